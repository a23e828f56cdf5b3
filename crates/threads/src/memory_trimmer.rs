//! Decides when the process returns free memory to the kernel (`malloc_trim`).
//!
//! The allocator keeps the memory of a burst for reuse: ten MB after some stalls under steady load, a
//! gigabyte after ten thousand clients. In: from time to time, how much memory is resident and in use. Out:
//! whether to trim now. Always holds: no trim unless more is unused than after the last one, and trims take
//! at most 1 / [`TRIM_TIME_DIVISOR`] of the time.

use std::time::{Duration, Instant};

use mpvpn_os::memory::MemoryUse;

/// How often memory is looked at. Shorter: more looks; longer: memory is returned later.
const LOOK_INTERVAL: Duration = Duration::from_secs(5);
/// A trim is due when unused memory has grown since the last one by this many bytes, and by 1 /
/// [`GAIN_DIVISOR`] of the memory in use. Chosen. Smaller: a trim returns memory that is soon needed again.
/// Larger: the process keeps unused memory.
const MIN_GAIN_BYTES: u64 = 512 << 10;
const GAIN_DIVISOR: u64 = 32;
/// The shortest time between two trims. Shorter: memory of a flow that pauses is taken away; longer: it is
/// kept.
const MIN_TRIM_INTERVAL: Duration = Duration::from_secs(15);
/// The pause after a trim is this many times as long as it took: a trim of 100 MB takes 7 ms. Smaller: more
/// stalls; larger: memory is kept.
const TRIM_TIME_DIVISOR: u32 = 1000;

/// Decides when to return memory.
#[derive(Debug)]
pub(crate) struct MemoryTrimmer {
    next_look: Instant,
    next_trim: Instant,
    /// The least unused memory since the last trim (bytes).
    least_unused: Option<u64>,
}

impl MemoryTrimmer {
    pub(crate) fn new(now: Instant) -> Self {
        Self { next_look: now + LOOK_INTERVAL, next_trim: now + MIN_TRIM_INTERVAL, least_unused: None }
    }

    /// Whether to call [`Self::look`], once for each time that it is due.
    pub(crate) fn is_look_due(&mut self, now: Instant) -> bool {
        let is_due = now >= self.next_look;
        if is_due {
            self.next_look = now + LOOK_INTERVAL;
        }
        is_due
    }

    /// Takes the memory of the process. Returns whether to trim now.
    pub(crate) fn look(&mut self, now: Instant, memory: MemoryUse) -> bool {
        let unused = memory.unused();
        let least = *self.least_unused.insert(self.least_unused.map_or(unused, |least| least.min(unused)));
        now >= self.next_trim && unused > least + MIN_GAIN_BYTES.max(memory.in_use / GAIN_DIVISOR)
    }

    /// A trim ended at `now` and took `time`; `memory` is what it left.
    pub(crate) fn on_trimmed(&mut self, now: Instant, time: Duration, memory: MemoryUse) {
        self.next_trim = now + MIN_TRIM_INTERVAL.max(time * TRIM_TIME_DIVISOR);
        self.least_unused = Some(memory.unused());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const MIB: u64 = 1 << 20;

    /// Looks for `seconds` at a process of which so many MiB are resident and in use; a trim leaves `kept`
    /// MiB unused. Returns the number of trims.
    fn trims(
        trimmer: &mut MemoryTrimmer,
        now: &mut Instant,
        seconds: u32,
        [resident, in_use, kept]: [u64; 3],
    ) -> u32 {
        let mut resident = resident * MIB;
        let mut trims = 0;
        for _ in 0..seconds {
            *now += SECOND;
            let memory = MemoryUse { resident, in_use: in_use * MIB };
            if trimmer.is_look_due(*now) && trimmer.look(*now, memory) {
                trims += 1;
                resident = resident.min((in_use + kept) * MIB);
                trimmer.on_trimmed(*now, SECOND / 1000, MemoryUse { resident, ..memory });
            }
        }
        trims
    }

    #[test]
    fn the_memory_of_a_burst_is_returned_once_while_load_goes_on() {
        let mut now = Instant::now();
        let mut trimmer = MemoryTrimmer::new(now);
        assert_eq!(trims(&mut trimmer, &mut now, 600, [24, 20, 4]), 0, "nothing has grown");
        assert_eq!(trims(&mut trimmer, &mut now, 600, [33, 20, 5]), 1);
        assert_eq!(trims(&mut trimmer, &mut now, 600, [25, 20, 5]), 0, "as much as the last trim left");
    }

    #[test]
    fn memory_that_is_in_use_is_not_searched_for_free_pages() {
        let mut now = Instant::now();
        let mut trimmer = MemoryTrimmer::new(now);
        for clients in 0..1000 {
            assert_eq!(trims(&mut trimmer, &mut now, 1, [24 + clients, 20 + clients, 4]), 0);
        }
        assert_eq!(trims(&mut trimmer, &mut now, 100, [1024, 20, 100]), 1, "they have left");
    }

    #[test]
    fn long_trims_are_seldom() {
        let mut now = Instant::now();
        let mut trimmer = MemoryTrimmer::new(now);
        trimmer.on_trimmed(now, SECOND / 10, MemoryUse { resident: 0, in_use: 0 });
        assert_eq!(trims(&mut trimmer, &mut now, 99, [100, 50, 0]), 0);
        assert_eq!(trims(&mut trimmer, &mut now, 99, [100, 50, 0]), 1);
    }
}
