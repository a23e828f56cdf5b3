//! Delays the iterations of a loop whose packets arrive close together, as network cards coalesce interrupts.
//!
//! An iteration costs about the same for one packet as for ten: waking up, system calls, timers,
//! acknowledgements. A packet that arrives soon after an iteration waits for others until the interval since
//! that iteration has passed; one that arrives later, as the first one after a pause, is taken at once. In:
//! when the loop waits and when it wakes, and how long packets may wait. Out: how long to sleep first. Always
//! holds: no sleep unless the last ones brought packets together, or the loop found work waiting many
//! times in a row; iterations that take long are not delayed.

use std::time::{Duration, Instant};

/// The interval between iterations of a loop that never waits, whatever packets may: otherwise it runs one
/// iteration per packet, and takes the processor from the very programs whose packets it moves. Shorter: more
/// iterations for the same packets. Longer: delay. 50, 200 and 400 µs measured no different
/// (docs/design/threads.md).
const BUSY_INTERVAL: Duration = Duration::from_micros(100);
/// A wait shorter than this found work already waiting. It must exceed the time of an `epoll_wait` that
/// returns at once; larger values count requests and answers of a fast network as load. Chosen.
const MAX_IMMEDIATE_WAIT: Duration = Duration::from_micros(30);
/// Consecutive iterations that found work waiting before the loop counts as busy. Fewer: a name lookup or a
/// page load is delayed. More: load is noticed later.
const IMMEDIATE_WAKEUPS_BEFORE_DELAY: u32 = 8;
/// Consecutive iterations that began within the interval that packets may wait, before the loop sleeps.
/// Fewer: requests and answers are delayed. More: load is noticed later.
const CLOSE_WAKEUPS_BEFORE_DELAY: u32 = 4;
/// The interval must exceed this, or it is over when the iteration ends.
const MIN_INTERVAL: Duration = Duration::from_micros(20);

/// Decides how long to sleep between iterations.
#[derive(Debug, Default)]
pub(crate) struct WakeupCoalescer {
    last_wakeup: Option<Instant>,
    immediate_wakeups: u32,
    close_wakeups: u32,
}

impl WakeupCoalescer {
    /// How long to sleep before the next wait; `None`: not at all. Called at the end of an iteration.
    /// `allowed`: how long a packet may wait.
    pub(crate) fn delay(&self, now: Instant, allowed: Duration) -> Option<Duration> {
        let last = self.last_wakeup?;
        let busy = self.immediate_wakeups >= IMMEDIATE_WAKEUPS_BEFORE_DELAY;
        let close = self.close_wakeups >= CLOSE_WAKEUPS_BEFORE_DELAY && allowed >= MIN_INTERVAL;
        let interval = match (busy, close) {
            (_, true) => allowed.max(BUSY_INTERVAL * u32::from(busy)),
            (true, false) => BUSY_INTERVAL,
            (false, false) => return None,
        };
        Some((last + interval).saturating_duration_since(now)).filter(|delay| !delay.is_zero())
    }

    /// An iteration starts at `now`, after a wait that began at `wait_start`, after the sleep if there was
    /// one.
    pub(crate) fn on_wakeup(&mut self, wait_start: Instant, now: Instant, slept: bool, allowed: Duration) {
        let waited = now.saturating_duration_since(wait_start);
        let since_last = self.last_wakeup.map_or(Duration::MAX, |last| now.saturating_duration_since(last));
        self.last_wakeup = Some(now);
        self.immediate_wakeups = match waited < MAX_IMMEDIATE_WAIT {
            true => (self.immediate_wakeups + 1).min(2 * IMMEDIATE_WAKEUPS_BEFORE_DELAY),
            false => self.immediate_wakeups / 2,
        };
        // A sleep after which nothing waits was in vain.
        let brought = if slept { waited < MAX_IMMEDIATE_WAIT } else { since_last < allowed };
        self.close_wakeups = match brought {
            true => (self.close_wakeups + 1).min(2 * CLOSE_WAKEUPS_BEFORE_DELAY),
            false => self.close_wakeups / 2,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MICROSECOND: Duration = Duration::from_micros(1);

    /// Iterations of `work` that each find the next packet `wait` after they look for it; returns the last
    /// delay.
    fn delay_after(turns: u32, work: Duration, wait: Duration) -> Option<Duration> {
        let (mut coalescer, mut now) = (WakeupCoalescer::default(), Instant::now());
        let mut delay = None;
        for _ in 0..turns {
            delay = coalescer.delay(now, Duration::ZERO);
            let wait_start = now + delay.unwrap_or_default();
            now = wait_start + wait;
            coalescer.on_wakeup(wait_start, now, delay.is_some(), Duration::ZERO);
            now += work;
        }
        delay
    }

    /// Packets that arrive every `interval` at a loop whose iterations take 20 µs, and which may wait for
    /// `allowed`: returns the iterations and the sleeps for each of 1,000 packets, and the longest that
    /// one waited.
    fn taken_together(interval: Duration, allowed: Duration) -> (f64, f64, Duration) {
        const PACKETS: u32 = 1000;
        let (mut coalescer, start) = (WakeupCoalescer::default(), Instant::now());
        let (mut now, mut next, mut iterations, mut sleeps) = (start, 0, 0, 0);
        let mut longest = Duration::ZERO;
        while next < PACKETS {
            let delay = coalescer.delay(now, allowed);
            sleeps += u32::from(delay.is_some());
            let wait_start = now + delay.unwrap_or_default();
            let first = start + interval * next;
            now = wait_start.max(first);
            longest = longest.max(now - first);
            coalescer.on_wakeup(wait_start, now, delay.is_some(), allowed);
            while next < PACKETS && start + interval * next <= now {
                next += 1;
            }
            iterations += 1;
            now += 20 * MICROSECOND;
        }
        let share = |count: u32| f64::from(count) / f64::from(PACKETS);
        (share(iterations), share(sleeps), longest)
    }

    #[test]
    fn packets_that_arrive_close_together_are_taken_together_and_wait_no_longer_than_allowed() {
        let (iterations, _, longest) = taken_together(100 * MICROSECOND, 300 * MICROSECOND);
        assert!(iterations < 0.35 && longest <= 300 * MICROSECOND, "{iterations} for a packet, {longest:?}");
    }

    #[test]
    fn packets_that_arrive_far_apart_are_taken_at_once() {
        let (iterations, sleeps, longest) = taken_together(400 * MICROSECOND, 300 * MICROSECOND);
        assert!(iterations > 0.99 && sleeps < 0.01 && longest < MICROSECOND, "{sleeps} sleeps, {longest:?}");
        let (iterations, sleeps, _) = taken_together(100 * MICROSECOND, Duration::ZERO);
        assert!(iterations > 0.99 && sleeps < 0.01, "none may wait: {sleeps} sleeps");
    }

    #[test]
    fn the_first_packet_after_a_pause_is_taken_at_once() {
        let (mut coalescer, mut now) = (WakeupCoalescer::default(), Instant::now());
        let allowed = 300 * MICROSECOND;
        for _ in 0..100 {
            let delay = coalescer.delay(now, allowed);
            let wait_start = now + delay.unwrap_or_default();
            now = wait_start + if delay.is_some() { MICROSECOND } else { 100 * MICROSECOND };
            coalescer.on_wakeup(wait_start, now, delay.is_some(), allowed);
        }
        assert!(coalescer.delay(now, allowed).is_some(), "under load");
        // The sleep after the last iteration is over long before the next packet comes, which finds the loop
        // waiting.
        assert_eq!(coalescer.delay(now + 400 * MICROSECOND, allowed), None);
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
