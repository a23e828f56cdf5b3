//! When memory for packets is given back: after nothing had to be sent for some time.

use mpvpn_types::{Duration, Instant};

/// A tunnel that had nothing to send for this time gives its memory for packets back. Sooner, and pauses of a
/// page load cost allocations; later, and thousands of idle clients keep megabytes.
const IDLE_BEFORE_TRIM: Duration = Duration::from_secs(1);

/// When memory for packets was last in use, until it has been given back.
#[derive(Debug, Default)]
pub(super) struct MemoryTrimmer(Option<Instant>);

impl MemoryTrimmer {
    /// Packets were taken in.
    #[inline]
    pub(super) fn note_use(&mut self, now: Instant) {
        self.0 = Some(now);
    }

    /// Whether it is time to give memory back, once; never while something `waits`.
    pub(super) fn expires(&mut self, now: Instant, waits: bool) -> bool {
        !waits && self.0.take_if(|at| now >= *at + IDLE_BEFORE_TRIM).is_some()
    }

    /// When it will be time, unless something `waits`.
    pub(super) fn poll_timeout(&self, waits: bool) -> Option<Instant> {
        self.0.filter(|_| !waits).map(|at| at + IDLE_BEFORE_TRIM)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_given_back_once_after_a_second_of_idleness() {
        let (mut trimmer, start) = (MemoryTrimmer::default(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        assert_eq!((trimmer.expires(start, false), trimmer.poll_timeout(false)), (false, None));
        trimmer.note_use(start);
        trimmer.note_use(at(500));
        assert_eq!(trimmer.poll_timeout(false), Some(at(1500)));
        assert!(!trimmer.expires(at(1499), false));
        assert!(!trimmer.expires(at(9000), true), "packets wait for a path");
        assert_eq!(trimmer.poll_timeout(true), None);
        assert!(trimmer.expires(at(9000), false) && !trimmer.expires(at(9000), false));
    }
}
