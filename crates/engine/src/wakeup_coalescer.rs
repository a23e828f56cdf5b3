//! Rests between the turns of a busy loop, as network cards moderate their interrupts.
//!
//! A turn costs much the same for one packet as for ten: system calls, a look at every timer, a pass for
//! acknowledgements. Under load the next packet is there as soon as a turn is over, so without a rest the
//! loop runs a turn a packet and starves the very programs it works for. In: when the loop waits and when it
//! gets something to do. Out: how long to rest first. What always holds: no rest unless the loop has found
//! work at once many times in a row, and turns that take long by themselves are not delayed.

use std::time::{Duration, Instant};

/// Turns of a busy loop start at least this far apart: what it adds to a packet's way, at most, under load.
const MIN_WAKEUP_INTERVAL: Duration = Duration::from_micros(100);
/// A wait that was shorter than this found the work waiting.
const MAX_IMMEDIATE_WAIT: Duration = Duration::from_micros(30);
/// Turns in a row that found work at once before the loop counts as busy. Answers and requests that follow
/// each other quickly (a name looked up, a page that is opened) pass before that.
const IMMEDIATE_WAKEUPS_BEFORE_DELAY: u32 = 8;

/// Decides how long to rest.
#[derive(Debug, Default)]
pub(crate) struct WakeupCoalescer {
    last_wakeup: Option<Instant>,
    immediate_wakeups: u32,
}

impl WakeupCoalescer {
    /// The work of a turn is done: how long to rest before looking for more.
    pub(crate) fn delay(&self, now: Instant) -> Option<Duration> {
        let next = self.last_wakeup.filter(|_| self.immediate_wakeups >= IMMEDIATE_WAKEUPS_BEFORE_DELAY)?
            + MIN_WAKEUP_INTERVAL;
        Some(next.saturating_duration_since(now)).filter(|delay| !delay.is_zero())
    }

    /// A turn starts at `now`, after a wait since `waiting`; rests do not count.
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

    /// Turns of `work` that each find the next packet `wait` after it was looked for; the rest before the last.
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
