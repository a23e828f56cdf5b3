//! Decides when the process returns free memory to the kernel (`malloc_trim`).
//!
//! After a busy time the allocator keeps the memory for reuse: some tens of MB after flows at full speed, a gigabyte
//! after ten thousand clients. In: how long each loop iteration worked, and the time. Out: whether to trim now.
//! Always holds: no trim while the loop is busy, none without a busy time since the last, and at most one in
//! [`MIN_TRIM_INTERVAL`].

use std::time::{Duration, Instant};

/// The share of time that the loop works is measured over windows of this length. Shorter: a pause between two
/// requests looks calm. Longer: memory is returned later.
const WINDOW: Duration = Duration::from_secs(1);
/// The peak share of a window must reach this before a trim makes sense. Smaller: trims that return little. Larger: a
/// moderately busy process keeps its memory. Chosen.
const MIN_BUSY_SHARE: f64 = 0.1;
/// A window is calm if the loop works at most this share of the peak. Larger: trims (7 ms for 100 MB) disturb
/// traffic. Smaller: memory is kept under light traffic. Chosen.
const MAX_CALM_SHARE_OF_PEAK: f64 = 0.25;
/// Consecutive calm windows before a trim. More: later. Fewer: a short pause in a busy time trims memory that is
/// needed again at once. Chosen.
const CALM_WINDOWS_BEFORE_TRIM: u32 = 2;
/// The shortest time between two trims. A trim takes 7 ms for 100 MB, so a shorter interval costs stalls where busy
/// and calm times alternate; a longer one keeps memory.
const MIN_TRIM_INTERVAL: Duration = Duration::from_secs(15);

/// Decides when to return memory.
#[derive(Debug)]
pub(crate) struct MemoryTrimmer {
    window_start: Instant,
    busy: Duration,
    /// The largest share in any window since the last trim.
    peak_share: f64,
    calm_windows: u32,
    last_trim: Option<Instant>,
}

impl MemoryTrimmer {
    pub(crate) fn new(now: Instant) -> Self {
        Self { window_start: now, busy: Duration::ZERO, peak_share: 0.0, calm_windows: 0, last_trim: None }
    }

    /// An iteration that ends at `now` was busy for `time`. Returns whether to trim now.
    pub(crate) fn on_iteration(&mut self, now: Instant, time: Duration) -> bool {
        self.busy += time;
        let passed = now.saturating_duration_since(self.window_start);
        if passed < WINDOW {
            return false;
        }
        let share = self.busy.as_secs_f64() / passed.as_secs_f64();
        // A loop that slept through several windows was calm in all of them.
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

        /// Works `busy` ms of each 10 ms for `seconds`; returns the times of trims (s).
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
