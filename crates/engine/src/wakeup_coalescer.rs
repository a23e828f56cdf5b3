//! Delays the iterations of a busy loop, as network cards coalesce interrupts.
//!
//! An iteration costs about the same for one packet as for ten: system calls, timers, acknowledgements. Under load
//! the next packet arrives as soon as an iteration ends, so without a delay the loop runs one iteration per packet
//! and takes the processor from the very programs whose packets it moves. In: when the loop waits and when it wakes.
//! Out: how long to sleep first. Always holds: no delay unless the loop found work waiting many times in a row;
//! iterations that take long are not delayed.

use std::time::{Duration, Instant};

/// The shortest interval between iterations of a busy loop; the most that coalescing adds to a packet's delay under
/// load. Shorter: more iterations for the same packets. Longer: delay. 50, 200 and 400 µs measured no different
/// (docs/design/threads.md).
const MIN_WAKEUP_INTERVAL: Duration = Duration::from_micros(100);
/// A wait shorter than this found work already waiting. It must exceed the time of an `epoll_wait` that returns at
/// once; larger values count requests and answers of a fast network as load. Chosen.
const MAX_IMMEDIATE_WAIT: Duration = Duration::from_micros(30);
/// Consecutive iterations that found work waiting before the loop counts as busy. Fewer: a name lookup or a page load
/// is delayed. More: load is noticed later.
const IMMEDIATE_WAKEUPS_BEFORE_DELAY: u32 = 8;

/// Decides how long to sleep between iterations.
#[derive(Debug, Default)]
pub(crate) struct WakeupCoalescer {
    last_wakeup: Option<Instant>,
    immediate_wakeups: u32,
}

impl WakeupCoalescer {
    /// How long to sleep before the next wait; `None` if the loop is not busy. Called at the end of an iteration.
    pub(crate) fn delay(&self, now: Instant) -> Option<Duration> {
        let next = self.last_wakeup.filter(|_| self.immediate_wakeups >= IMMEDIATE_WAKEUPS_BEFORE_DELAY)?
            + MIN_WAKEUP_INTERVAL;
        Some(next.saturating_duration_since(now)).filter(|delay| !delay.is_zero())
    }

    /// An iteration starts at `now`, after a wait that began at `wait_start`; sleeps do not count as waiting.
    pub(crate) fn on_wakeup(&mut self, wait_start: Instant, now: Instant) {
        self.last_wakeup = Some(now);
        self.immediate_wakeups = match now.saturating_duration_since(wait_start) < MAX_IMMEDIATE_WAIT {
            true => (self.immediate_wakeups + 1).min(2 * IMMEDIATE_WAKEUPS_BEFORE_DELAY),
            false => self.immediate_wakeups / 2,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MICROSECOND: Duration = Duration::from_micros(1);

    /// Iterations of `work` that each find the next packet `wait` after they look for it; returns the last delay.
    fn delay_after(turns: u32, work: Duration, wait: Duration) -> Option<Duration> {
        let (mut coalescer, mut now) = (WakeupCoalescer::default(), Instant::now());
        let mut delay = None;
        for _ in 0..turns {
            delay = coalescer.delay(now);
            let wait_start = now + delay.unwrap_or_default();
            now = wait_start + wait;
            coalescer.on_wakeup(wait_start, now);
            now += work;
        }
        delay
    }

    #[test]
    fn a_busy_loop_rests_until_the_spacing_is_kept() {
        assert_eq!(delay_after(100, 20 * MICROSECOND, MICROSECOND), Some(80 * MICROSECOND));
    }

    #[test]
    fn a_few_quick_turns_are_not_held_up() {
        assert_eq!(delay_after(IMMEDIATE_WAKEUPS_BEFORE_DELAY, 20 * MICROSECOND, MICROSECOND), None);
    }

    #[test]
    fn requests_and_answers_with_a_short_round_trip_are_not_held_up() {
        assert_eq!(delay_after(1000, 20 * MICROSECOND, 60 * MICROSECOND), None);
    }

    #[test]
    fn long_turns_follow_each_other_at_once() {
        assert_eq!(delay_after(1000, 150 * MICROSECOND, MICROSECOND), None);
    }
}
