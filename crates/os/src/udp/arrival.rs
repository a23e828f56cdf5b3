//! When datagrams have arrived: the kernel's times, which are by the wall clock (SO_TIMESTAMPNS), by the
//! clock of the process.
//!
//! In: both clocks at each receive call, the kernel's times. Out: times of the process's clock. Always holds:
//! none is later than the call; while the wall clock is set, it is the time of the call.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The wall clock was set if it has moved by this much against the other clock since the last call.
/// Adjustments of its speed stay below, at most 0.05 %, for calls up to 2 s apart. Larger: a smaller step
/// counts as time in which a datagram waited. Chosen.
const MAX_DRIFT: Duration = Duration::from_millis(1);
/// A datagram cannot have waited for longer: the wall clock was set while nothing was received. Smaller:
/// datagrams that waited while the process had no processor count as younger. Chosen.
const MAX_AGE: Duration = Duration::from_secs(1);

/// Both clocks, as last read.
#[derive(Clone, Copy, Debug)]
struct Clocks {
    now: Instant,
    /// Since 1970.
    wall: Duration,
}

/// Turns the kernel's times into those of the process's clock.
#[derive(Debug, Default)]
pub(super) struct ArrivalClock {
    last: Option<Clocks>,
    /// The wall clock was set since the call before the last one.
    was_set: bool,
}

impl ArrivalClock {
    /// Reads both clocks after a receive call.
    pub(super) fn read(&mut self) {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.advance(Clocks { now: Instant::now(), wall });
    }

    fn advance(&mut self, clocks: Clocks) {
        self.was_set = self.last.is_some_and(|last| {
            let passed = clocks.now.saturating_duration_since(last.now);
            (last.wall + passed).abs_diff(clocks.wall) > MAX_DRIFT.max(passed / 2000)
        });
        self.last = Some(clocks);
    }

    /// When a datagram has arrived that the last call returned, with the kernel's time since 1970 if there is
    /// one.
    pub(super) fn arrival(&self, kernel: Option<Duration>) -> Instant {
        let Some(Clocks { now, wall }) = self.last else { return Instant::now() };
        let age = kernel.filter(|_| !self.was_set).map_or(Duration::ZERO, |time| wall.saturating_sub(time));
        let age = if age > MAX_AGE { Duration::ZERO } else { age };
        now.checked_sub(age).unwrap_or(now)
    }
}

/// The time in a control message (struct timespec, of 32 or 64 bits), since 1970.
pub(super) fn kernel_time(data: &[u8]) -> Option<Duration> {
    let (seconds, nanoseconds) = match data.len() {
        16 => {
            let half = |at: usize| data[at..].first_chunk().map(|bytes| i64::from_ne_bytes(*bytes));
            (half(0)?, half(8)?)
        }
        8 => {
            let half = |at: usize| data[at..].first_chunk().map(|bytes| i32::from_ne_bytes(*bytes));
            (half(0)?.into(), half(4)?.into())
        }
        _ => return None,
    };
    let nanoseconds = u32::try_from(nanoseconds).ok().filter(|nanoseconds| *nanoseconds < 1_000_000_000)?;
    Some(Duration::new(seconds.try_into().ok()?, nanoseconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const WALL: Duration = Duration::from_secs(1_700_000_000);

    /// A clock that was read at `start`, and again a second later, when the wall clock said `wall` more.
    fn clock_after(start: Instant, wall: Duration) -> ArrivalClock {
        let mut clock = ArrivalClock::default();
        clock.advance(Clocks { now: start, wall: WALL });
        clock.advance(Clocks { now: start + 1000 * MS, wall: WALL + wall });
        clock
    }

    #[test]
    fn a_datagram_is_as_old_as_the_kernel_says() {
        let start = Instant::now();
        let clock = clock_after(start, 1000 * MS);
        assert_eq!(clock.arrival(Some(WALL + 700 * MS)), start + 700 * MS);
        assert_eq!(clock.arrival(Some(WALL + 1001 * MS)), start + 1000 * MS, "none comes from the future");
        assert_eq!(clock.arrival(None), start + 1000 * MS, "the kernel gave no time");
    }

    #[test]
    fn a_wall_clock_that_was_set_says_nothing() {
        let start = Instant::now();
        for (wall, kernel) in [(1400, 900), (600, 900), (1_000_000, 500)] {
            let mut clock = clock_after(start, wall * MS);
            assert_eq!(clock.arrival(Some(WALL + kernel * MS)), start + 1000 * MS, "now {wall} ms later");
            clock.advance(Clocks { now: start + 1100 * MS, wall: WALL + (wall + 100) * MS });
            assert_eq!(clock.arrival(Some(WALL + (wall + 40) * MS)), start + 1040 * MS, "and counts again");
        }
        let mut first = ArrivalClock::default();
        first.advance(Clocks { now: start, wall: WALL });
        assert_eq!(first.arrival(Some(WALL - 3000 * MS)), start, "no datagram waits that long");
    }

    #[test]
    fn times_of_both_widths_are_read_and_malformed_ones_ignored() {
        let wide = [1_700_000_000_i64.to_ne_bytes(), 5_000_000_i64.to_ne_bytes()].concat();
        let narrow = [1_700_000_000_i32.to_ne_bytes(), 5_000_000_i32.to_ne_bytes()].concat();
        assert_eq!(kernel_time(&wide), Some(WALL + 5 * MS));
        assert_eq!(kernel_time(&narrow), Some(WALL + 5 * MS));
        let negative = [(-1_i64).to_ne_bytes(), 0_i64.to_ne_bytes()].concat();
        let too_many = [1_i64.to_ne_bytes(), 1_000_000_000_i64.to_ne_bytes()].concat();
        for malformed in [&wide[..12], &negative, &too_many, &[]] {
            assert_eq!(kernel_time(malformed), None);
        }
    }
}
