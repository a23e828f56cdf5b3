//! When to give memory back.
//!
//! What a busy time took from the allocator stays with it for the next: some tens of MB after flows at full speed, a
//! gigabyte after ten thousand clients. In: how long the loop worked, and the time. Out: whether memory is to be given back
//! now. What always holds: never while the loop is busy, not twice without a busy time between, and not again and again
//! where busy and calm moments take turns.

use std::time::{Duration, Instant};

/// Work is added up over this time.
const WINDOW: Duration = Duration::from_secs(1);
/// The loop was busy if it worked for at least this share of a window …
const BUSY: f64 = 0.1;
/// … and is calm when it works for no more than this part of the most that it did.
const CALM: f64 = 0.25;
/// So many windows in a row have to be calm.
const WINDOWS: u32 = 2;
/// Memory is given back this seldom.
const SELDOM: Duration = Duration::from_secs(15);

/// Decides when to give memory back.
#[derive(Debug)]
pub(crate) struct Thrift {
    since: Instant,
    worked: Duration,
    /// The largest share of a window since memory was given back.
    most: f64,
    calm: u32,
    given: Option<Instant>,
}

impl Thrift {
    pub(crate) fn new(now: Instant) -> Self {
        Self { since: now, worked: Duration::ZERO, most: 0.0, calm: 0, given: None }
    }

    /// A turn that ends at `now` worked so long. Says whether memory should be given back.
    pub(crate) fn worked(&mut self, now: Instant, time: Duration) -> bool {
        self.worked += time;
        let passed = now.saturating_duration_since(self.since);
        if passed < WINDOW {
            return false;
        }
        let share = self.worked.as_secs_f64() / passed.as_secs_f64();
        // A loop that slept for long was calm for as many windows.
        let windows = passed.as_secs().try_into().unwrap_or(WINDOWS);
        (self.since, self.worked, self.most) = (now, Duration::ZERO, self.most.max(share));
        self.calm = if share <= self.most * CALM { self.calm.saturating_add(windows) } else { 0 };
        let is_due = self.given.is_none_or(|at| now.saturating_duration_since(at) >= SELDOM);
        if self.most < BUSY || self.calm < WINDOWS || !is_due {
            return false;
        }
        (self.most, self.calm, self.given) = (share, 0, Some(now));
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    struct Loop {
        thrift: Thrift,
        start: Instant,
        now: Instant,
    }

    impl Loop {
        fn new() -> Self {
            let now = Instant::now();
            Self { thrift: Thrift::new(now), start: now, now }
        }

        /// Works for so many of each 10 ms, for so many seconds; when memory was given back (s).
        fn run(&mut self, busy: u32, seconds: u32) -> Vec<u64> {
            let mut given = Vec::new();
            for _ in 0..seconds * 100 {
                self.now += 10 * MS;
                if self.thrift.worked(self.now, busy * MS) {
                    given.push((self.now - self.start).as_secs());
                }
            }
            given
        }
    }

    #[test]
    fn memory_is_given_back_once_after_a_busy_time() {
        let mut turns = Loop::new();
        assert!(turns.run(9, 60).is_empty());
        assert_eq!(turns.run(0, 60), [62]);
        assert!(turns.run(6, 20).is_empty());
        assert_eq!(turns.run(1, 60), [142]);
    }

    #[test]
    fn a_loop_that_was_never_busy_keeps_what_it_has() {
        let mut turns = Loop::new();
        assert!(turns.run(0, 100).is_empty());
        let mut thrift = Thrift::new(turns.now);
        assert!((1..100).all(|step| !thrift.worked(turns.now + step * 500 * MS, 20 * MS)));
    }

    #[test]
    fn busy_and_calm_moments_that_take_turns_are_not_disturbed_each_time() {
        let mut turns = Loop::new();
        let given: Vec<u64> = (0..30).flat_map(|_| [turns.run(9, 2), turns.run(0, 4)].concat()).collect();
        assert!(given.len() <= 12 && given.windows(2).all(|pair| pair[1] - pair[0] >= 15), "{given:?}");
    }

    #[test]
    fn a_loop_that_sleeps_long_is_calm() {
        let mut turns = Loop::new();
        turns.run(9, 5);
        assert!(turns.thrift.worked(turns.now + 5000 * MS, MS));
    }
}
