//! Clock reports: both ends send their clock readings over links that classes share. One-way delays show in
//! which direction of a link packets queue, so a shaper does not slow down for a queue in the opposite
//! direction.
//!
//! In: bytes that paths have carried, reports of the peer. Out: reports to send. Always holds: no report is
//! sent while no data moves, and reports are a small share of the data (less than 0.5 % for bulk data).

use bytes::{Buf, Bytes, BytesMut};
use mpvpn_class::ShaperHandle;
use mpvpn_masque::{
    datagram::{self, DatagramPrefix},
    varint,
};
use mpvpn_types::{Duration, Instant, PathId};

use super::path_table::PathTable;

/// Time between checks whether reports are due. Smaller: more processor time. Larger: reports are sent late
/// by as much.
const CHECK_INTERVAL: Duration = Duration::from_millis(5);
/// Minimum time between two reports of a path. Smaller: more reports. Larger: queues are noticed later.
/// Value: chosen.
const MIN_REPORT_INTERVAL: Duration = Duration::from_millis(10);
/// The same while one class has the link to itself, where nobody else suffers from its queue. Value: chosen.
const MIN_REPORT_INTERVAL_ALONE: Duration = Duration::from_millis(50);
/// Bytes that a path carries in both directions for each report. A report takes less than 70 bytes, so
/// reports are less than 0.5 % of the data. Smaller: more overhead. Larger: slow links are measured seldom.
const BYTES_PER_REPORT: u64 = 14_000;
/// Time after the last report from which on [`MIN_BYTES_PER_LATE_REPORT`] suffice for the next one. Value:
/// chosen.
const LATE_REPORT_AFTER: Duration = Duration::from_secs(1);
/// Bytes that a path carries for a report after [`LATE_REPORT_AFTER`]. Smaller: reports on nearly idle paths.
/// Larger: slow links send no reports. Value: chosen.
const MIN_BYTES_PER_LATE_REPORT: u64 = 1000;

/// Sends and receives the clock reports of one connection.
#[derive(Debug)]
pub(super) struct ClockReports {
    prefix: DatagramPrefix,
    /// Number of the peer's clock within the session: connections to the same thread share a clock.
    peer_clock: u8,
    /// Time of the last check whether reports are due.
    checked_at: Option<Instant>,
}

impl ClockReports {
    /// Creates the reports of the datagram context `context` of a request stream. Connections of a session
    /// that read the same clock at the peer have the same `peer_clock`.
    pub(super) fn new(stream: u64, context: u64, peer_clock: u8) -> Self {
        Self { prefix: datagram::prefix(stream, context), peer_clock, checked_at: None }
    }

    pub(super) fn is_report(&self, datagram: &[u8]) -> bool {
        datagram.starts_with(self.prefix.as_ref())
    }

    /// Takes a report of the peer that arrived at `at`: how long it waited here since is no delay of the
    /// link. Malformed reports and reports of unknown paths are ignored.
    pub(super) fn take_report(&self, at: Instant, datagram: &[u8], paths: &mut PathTable) {
        let Some(report) = Report::decode(&datagram[self.prefix.as_ref().len()..]) else { return };
        let Some(path) = paths.get_mut(report.path) else { return };
        let Some(handle) = &path.policy.shaper else { return };
        path.clock.note_delay(handle.shaper().on_clock_report(
            at,
            self.peer_clock,
            report.clock_us,
            report.min_delay_us,
        ));
    }

    /// Whether to call [`Self::report`] for each path now; `last_data_at` is when data moved last.
    pub(super) fn is_due(&mut self, now: Instant, last_data_at: Option<Instant>) -> bool {
        let within =
            |at: Option<Instant>, time| at.is_some_and(|at| now.saturating_duration_since(at) < time);
        if within(self.checked_at, CHECK_INTERVAL) || !within(last_data_at, LATE_REPORT_AFTER) {
            return false;
        }
        self.checked_at = Some(now);
        true
    }

    /// Returns the report to send on a path, if one is due. `carried` returns the bytes that the path has
    /// carried in both directions.
    pub(super) fn report(
        &self,
        now: Instant,
        id: PathId,
        clock: &mut PathClock,
        handle: &ShaperHandle,
        carried: impl FnOnce() -> u64,
    ) -> Option<Bytes> {
        let min_delay_us = clock.next(now, || handle.shaper().is_single_class_active(now), carried)?;
        Some(
            Report { path: id, clock_us: handle.shaper().clock_micros(now), min_delay_us }
                .encode(&self.prefix),
        )
    }
}

/// The state of clock reports on one path.
#[derive(Debug, Default)]
pub(super) struct PathClock {
    /// Time of the last report, and the bytes that the path had carried by then.
    last_report: Option<(Instant, u64)>,
    /// Smallest one-way delay of the reports received since: arrival by the local clock minus sending by the
    /// peer's clock (µs modulo 2^32; only differences between such values have a meaning).
    min_delay_us: Option<u32>,
}

impl PathClock {
    /// Takes the one-way delay of a received report (µs modulo 2^32).
    fn note_delay(&mut self, delay_us: u32) {
        let is_less = |least: u32| (delay_us.wrapping_sub(least) as i32) < 0;
        if self.min_delay_us.is_none_or(is_less) {
            self.min_delay_us = Some(delay_us);
        }
    }

    /// If a report is due, returns the smallest one-way delay since the last report, which may be unknown.
    fn next(
        &mut self,
        now: Instant,
        is_alone: impl FnOnce() -> bool,
        carried: impl FnOnce() -> u64,
    ) -> Option<Option<u32>> {
        let passed = self.last_report.map_or(LATE_REPORT_AFTER, |(at, _)| now.saturating_duration_since(at));
        if passed < MIN_REPORT_INTERVAL || passed < MIN_REPORT_INTERVAL_ALONE && is_alone() {
            return None;
        }
        let carried = carried();
        let since = carried - self.last_report.map_or(0, |(_, bytes)| bytes.min(carried));
        if since < if passed < LATE_REPORT_AFTER { BYTES_PER_REPORT } else { MIN_BYTES_PER_LATE_REPORT } {
            return None;
        }
        self.last_report = Some((now, carried));
        Some(self.min_delay_us.take())
    }
}

/// The wire format of a clock report (docs/protocol.md, "Clock reports").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Report {
    path: PathId,
    clock_us: u32,
    min_delay_us: Option<u32>,
}

impl Report {
    fn encode(&self, prefix: &DatagramPrefix) -> Bytes {
        let mut out = BytesMut::from(prefix.as_ref());
        varint::encode(self.path.0.into(), &mut out);
        out.extend_from_slice(&self.clock_us.to_be_bytes());
        if let Some(min_delay_us) = self.min_delay_us {
            out.extend_from_slice(&min_delay_us.to_be_bytes());
        }
        out.freeze()
    }

    /// Returns `None` if the report is truncated.
    fn decode(mut bytes: &[u8]) -> Option<Self> {
        let path = PathId(u32::try_from(varint::take(&mut bytes)?).ok()?);
        let (clock_us, min_delay_us) = (bytes.try_get_u32().ok()?, bytes.try_get_u32().ok());
        Some(Self { path, clock_us, min_delay_us })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{
        super::tests::{Received, check_datagrams, prefix},
        *,
    };
    use crate::vectors::number;

    #[test]
    fn reports_are_read_as_they_were_written() {
        let prefix = datagram::prefix(0, 12);
        let start = prefix.as_ref().len();
        for min_delay_us in [None, Some(0xfedc_ba98)] {
            let report = Report { path: PathId(u32::MAX), clock_us: 0x1234_5678, min_delay_us };
            let bytes = report.encode(&prefix);
            assert_eq!(Report::decode(&bytes[start..]), Some(report));
            for len in start..start + 12 {
                assert_eq!(Report::decode(&bytes[start..len]), None, "{len} bytes");
            }
        }
        let beyond = [&[0xff; 8][..], &[0; 8]].concat();
        assert_eq!(Report::decode(&beyond), None, "no path has such a number");
    }

    #[test]
    fn reports_are_those_of_the_vectors() {
        let parse = |received: Received<'_>| {
            let Report { path, clock_us, min_delay_us } = Report::decode(received.payload)?;
            Some(json!({ "path_id": path.0, "clock": clock_us, "delay": min_delay_us }))
        };
        let encode = |_, _, fields: &Value| {
            let path = PathId(number(&fields["path_id"]) as u32);
            let min_delay_us = fields["delay"].as_u64().map(|delay| delay as u32);
            Report { path, clock_us: number(&fields["clock"]) as u32, min_delay_us }
                .encode(&prefix(fields))
                .to_vec()
        };
        check_datagrams(include_str!("../../../../docs/vectors/clocks.json"), parse, encode);
    }

    #[test]
    fn a_path_reports_after_enough_bytes_and_not_too_often() {
        const MS: Duration = Duration::from_millis(1);
        let (mut clock, start) = (PathClock::default(), Instant::now());
        let mut next = |at, alone, carried| clock.next(start + at * MS, || alone, || carried).is_some();
        assert!(!next(0, false, 999), "a few bytes are not enough");
        assert!(next(0, false, 1000));
        assert!(!next(9, false, 1_000_000));
        assert!(!next(10, false, 14_999));
        assert!(next(10, false, 15_000));
        assert!(!next(59, true, 100_000) && next(60, true, 100_000), "less often where one class is alone");
        assert!(!next(1059, false, 101_000) && next(1060, false, 101_000), "a few bytes after a second");
    }

    #[test]
    fn the_smallest_delay_is_reported_once_across_a_wrap_of_the_clock() {
        let (mut clock, now) = (PathClock::default(), Instant::now());
        for delay_us in [5, u32::MAX, 2] {
            clock.note_delay(delay_us);
        }
        assert_eq!(clock.next(now, || false, || 5000), Some(Some(u32::MAX)), "one µs before zero");
        assert_eq!(clock.next(now + LATE_REPORT_AFTER, || false, || 9000), Some(None));
    }

    #[test]
    fn no_clock_report_is_due_while_no_data_moves() {
        let (mut clocks, now) = (ClockReports::new(0, 12, 0), Instant::now());
        assert!(!clocks.is_due(now, None));
        assert!(clocks.is_due(now, Some(now)) && !clocks.is_due(now, Some(now)));
        assert!(
            !clocks.is_due(now + LATE_REPORT_AFTER, Some(now))
                && clocks.is_due(now + CHECK_INTERVAL, Some(now))
        );
    }
}
