//! Decides when a connection releases its packet memory: after it had nothing to send for some time.
//!
//! In: uses of packet memory, and the time. Out: when to release the memory. Always holds: memory is released
//! once after each use, and never while packets wait.

use mpvpn_types::{Duration, Instant};

/// Time without packets to send after which packet memory is released. Smaller: pauses within a page load,
/// and clients that send a packet a second, cost allocations and timers. Larger: thousands of idle clients
/// keep megabytes for longer.
const IDLE_BEFORE_TRIM: Duration = Duration::from_secs(2);

/// Holds when packet memory was last used; `None` once it was released.
#[derive(Debug, Default)]
pub(super) struct MemoryTrimmer(Option<Instant>);

impl MemoryTrimmer {
    /// Packet memory is in use now.
    #[inline]
    pub(super) fn note_use(&mut self, now: Instant) {
        self.0 = Some(now);
    }

    /// Returns true once when memory is to be released; never while packets wait (`waits`).
    pub(super) fn expires(&mut self, now: Instant, waits: bool) -> bool {
        !waits && self.0.take_if(|at| now >= *at + IDLE_BEFORE_TRIM).is_some()
    }

    /// Returns when memory is to be released, unless packets wait (`waits`).
    pub(super) fn poll_timeout(&self, waits: bool) -> Option<Instant> {
        self.0.filter(|_| !waits).map(|at| at + IDLE_BEFORE_TRIM)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_released_once_after_two_idle_seconds() {
        let (mut trimmer, start) = (MemoryTrimmer::default(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        assert_eq!((trimmer.expires(start, false), trimmer.poll_timeout(false)), (false, None));
        trimmer.note_use(start);
        trimmer.note_use(at(500));
        assert_eq!(trimmer.poll_timeout(false), Some(at(2500)));
        assert!(!trimmer.expires(at(2499), false));
        assert!(!trimmer.expires(at(9000), true), "packets wait for a path");
        assert_eq!(trimmer.poll_timeout(true), None);
        assert!(trimmer.expires(at(9000), false) && !trimmer.expires(at(9000), false));
    }
}
