//! When to give memory back.
//!
//! What a busy time took from the allocator stays with it for the next: some tens of MB after flows at full speed, a
//! gigabyte after ten thousand clients. In: how long the loop worked, and the time. Out: whether memory is to be given back
//! now. What always holds: never while the loop is busy, not twice without a busy time between, and not again and again
//! where busy and calm moments take event_loop.

use std::time::{Duration, Instant};

/// Work is added up over this time.
const WINDOW: Duration = Duration::from_secs(1);
/// The loop was busy if it worked for at least this share of a window …
const MIN_BUSY_SHARE: f64 = 0.1;
/// … and is calm when it works for no more than this part of the most that it did.
const MAX_CALM_SHARE_OF_PEAK: f64 = 0.25;
/// So many windows in a row have to be calm.
const CALM_WINDOWS_BEFORE_TRIM: u32 = 2;
/// Memory is given back this seldom.
const MIN_TRIM_INTERVAL: Duration = Duration::from_secs(15);

/// Decides when to give memory back.
#[derive(Debug)]
pub(crate) struct MemoryTrimmer {
    window_start: Instant,
    busy: Duration,
    /// The largest share of a window since memory was given back.
    peak_share: f64,
    calm_windows: u32,
    last_trim: Option<Instant>,
}

impl MemoryTrimmer {
    pub(crate) fn new(now: Instant) -> Self {
        Self { window_start: now, busy: Duration::ZERO, peak_share: 0.0, calm_windows: 0, last_trim: None }
    }

    /// A turn that ends at `now` worked so long. Says whether memory should be given back.
    pub(crate) fn on_iteration(&mut self, now: Instant, time: Duration) -> bool {
        self.busy += time;
        let passed = now.saturating_duration_since(self.window_start);
        if passed < WINDOW {
            return false;
        }
        let share = self.busy.as_secs_f64() / passed.as_secs_f64();
        // A loop that slept for long was calm for as many windows.
        let windows = passed.as_secs().try_into().unwrap_or(CALM_WINDOWS_BEFORE_TRIM);
        (self.window_start, self.busy, self.peak_share) = (now, Duration::ZERO, self.peak_share.max(share));
        self.calm_windows = if share <= self.peak_share * MAX_CALM_SHARE_OF_PEAK {
            self.calm_windows.saturating_add(windows)
        } else {
            0
        };
        let is_due = self.last_trim.is_none_or(|at| now.saturating_duration_since(at) >= MIN_TRIM_INTERVAL);
        if self.peak_share < MIN_BUSY_SHARE || self.calm_windows < CALM_WINDOWS_BEFORE_TRIM || !is_due {
            return false;
        }
        (self.peak_share, self.calm_windows, self.last_trim) = (share, 0, Some(now));
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    struct Loop {
        trimmer: MemoryTrimmer,
        start: Instant,
        now: Instant,
    }

    impl Loop {
        fn new() -> Self {
            let now = Instant::now();
            Self { trimmer: MemoryTrimmer::new(now), start: now, now }
        }

        /// Works for so many of each 10 ms, for so many seconds; when memory was given back (s).
        fn run(&mut self, busy: u32, seconds: u32) -> Vec<u64> {
            let mut given = Vec::new();
            for _ in 0..seconds * 100 {
                self.now += 10 * MS;
                if self.trimmer.on_iteration(self.now, busy * MS) {
                    given.push((self.now - self.start).as_secs());
                }
            }
            given
        }
    }

    #[test]
    fn memory_is_given_back_once_after_a_busy_time() {
        let mut event_loop = Loop::new();
        assert!(event_loop.run(9, 60).is_empty());
        assert_eq!(event_loop.run(0, 60), [62]);
        assert!(event_loop.run(6, 20).is_empty());
        assert_eq!(event_loop.run(1, 60), [142]);
    }

    #[test]
    fn a_loop_that_was_never_busy_keeps_what_it_has() {
        let mut event_loop = Loop::new();
        assert!(event_loop.run(0, 100).is_empty());
        let mut trimmer = MemoryTrimmer::new(event_loop.now);
        assert!((1..100).all(|step| !trimmer.on_iteration(event_loop.now + step * 500 * MS, 20 * MS)));
    }

    #[test]
    fn busy_and_calm_moments_that_take_turns_are_not_disturbed_each_time() {
        let mut event_loop = Loop::new();
        let given: Vec<u64> =
            (0..30).flat_map(|_| [event_loop.run(9, 2), event_loop.run(0, 4)].concat()).collect();
        assert!(given.len() <= 12 && given.windows(2).all(|pair| pair[1] - pair[0] >= 15), "{given:?}");
    }

    #[test]
    fn a_loop_that_sleeps_long_is_calm() {
        let mut event_loop = Loop::new();
        event_loop.run(9, 5);
        assert!(event_loop.trimmer.on_iteration(event_loop.now + 5000 * MS, MS));
    }
}
