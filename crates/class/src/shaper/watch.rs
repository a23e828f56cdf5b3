//! Reports changes of a link's capacity that are larger than the steps of its measurement.
//!
//! In: the capacity after each measurement. Out: a change, reported once. Always holds: a capacity that
//! returns to the last reported one within [`MIN_REPORTED_RATIO`] is not reported.

use mpvpn_types::{BitRate, Duration};

/// A capacity is reported when it differs from the last reported one by this factor. Probing raises it by up
/// to 4 % a step and takes that back, and draining a queue lowers it by at most a quarter: a factor below 1.3
/// would report each of these, a larger one would miss that a radio link lost a quarter of its rate.
const MIN_REPORTED_RATIO: f64 = 1.3;

/// A change of the capacity of a link.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CapacityChange {
    /// The capacity reported before; `None` for the first one.
    pub before: Option<BitRate>,
    /// The capacity now.
    pub now: BitRate,
    /// Why it changed.
    pub reason: CapacityReason,
}

/// Why the capacity of a link changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CapacityReason {
    /// It was configured.
    Configured,
    /// First measurement: packets were queued and the delivery rate no longer grew.
    FirstMeasurement,
    /// Probing: no queueing delay at this rate.
    NoQueue,
    /// Queueing delay of this length on the way to the far end.
    Queue(Duration),
}

/// Remembers the last reported capacity of a link.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CapacityWatch {
    /// Bytes/s.
    reported: Option<f64>,
    change: Option<CapacityChange>,
}

impl CapacityWatch {
    /// Takes the measured capacity (bytes/s) and the queueing delay (s), which is computed only for a change.
    /// A capacity that is unknown again, as while one class alone does not fill the link, leaves the last
    /// reported one valid.
    pub(super) fn measured(&mut self, known: Option<f64>, queue: impl FnOnce() -> f64) {
        let Some(known) = known.filter(|known| self.differs(*known)) else { return };
        let reason = match self.reported {
            None => CapacityReason::FirstMeasurement,
            Some(reported) if known > reported => CapacityReason::NoQueue,
            Some(_) => CapacityReason::Queue(Duration::try_from_secs_f64(queue()).unwrap_or_default()),
        };
        self.report(known, reason);
    }

    /// Takes the configured capacity (bytes/s).
    pub(super) fn configured(&mut self, known: f64) {
        if self.differs(known) {
            self.report(known, CapacityReason::Configured);
        }
    }

    fn differs(&self, known: f64) -> bool {
        self.reported.is_none_or(|reported| {
            known >= reported * MIN_REPORTED_RATIO || reported >= known * MIN_REPORTED_RATIO
        })
    }

    fn report(&mut self, known: f64, reason: CapacityReason) {
        let rate = |bytes: f64| BitRate::from_bytes_per_second(bytes as u64);
        // A change that was not taken yet is extended.
        let before = self.change.map_or(self.reported.map(rate), |change| change.before);
        self.reported = Some(known);
        self.change = Some(CapacityChange { before, now: rate(known), reason });
    }

    pub(super) fn take(&mut self) -> Option<CapacityChange> {
        self.change.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MBIT: f64 = 125_000.0;

    fn rate(mbit: u64) -> BitRate {
        BitRate::from_bps(mbit * 1_000_000)
    }

    #[test]
    fn the_first_capacity_and_large_changes_are_reported_once() {
        let mut watch = CapacityWatch::default();
        watch.measured(None, || 0.0);
        assert_eq!(watch.take(), None);
        watch.measured(Some(20.0 * MBIT), || 0.004);
        let first = CapacityChange { before: None, now: rate(20), reason: CapacityReason::FirstMeasurement };
        assert_eq!((watch.take(), watch.take()), (Some(first), None));
        for mbit in [Some(21.0), Some(24.0), None, Some(19.0), Some(16.0)] {
            watch.measured(mbit.map(|mbit| mbit * MBIT), || 0.0);
            assert_eq!(watch.take(), None, "{mbit:?}");
        }
        watch.measured(Some(10.0 * MBIT), || 0.012);
        let reason = CapacityReason::Queue(Duration::from_millis(12));
        assert_eq!(watch.take(), Some(CapacityChange { before: Some(rate(20)), now: rate(10), reason }));
        watch.measured(Some(14.0 * MBIT), || 0.0);
        let grown = CapacityChange { before: Some(rate(10)), now: rate(14), reason: CapacityReason::NoQueue };
        assert_eq!(watch.take(), Some(grown));
    }

    #[test]
    fn a_change_that_was_not_taken_is_extended() {
        let mut watch = CapacityWatch::default();
        watch.configured(10.0 * MBIT);
        watch.configured(40.0 * MBIT);
        let given = CapacityChange { before: None, now: rate(40), reason: CapacityReason::Configured };
        assert_eq!(watch.take(), Some(given));
        watch.measured(Some(20.0 * MBIT), || 0.002);
        watch.measured(Some(12.0 * MBIT), || 0.003);
        let (before, reason) = (Some(rate(40)), CapacityReason::Queue(Duration::from_millis(3)));
        assert_eq!(watch.take(), Some(CapacityChange { before, now: rate(12), reason }));
    }
}
