//! What the clocks of both ends say, told with the data of links that classes share: so each end knows on
//! which way of a link packets wait, and need not take a queue on the way back for its own.
//!
//! In: bytes that paths have carried, reports of the far end. Out: reports to send. Always holds: nothing is
//! told while no data moves, and what is told is a small share of what does.

use bytes::{Buf, Bytes, BytesMut};
use mpvpn_class::ShaperHandle;
use mpvpn_masque::{
    datagram::{self, DatagramPrefix},
    varint,
};
use mpvpn_types::{Duration, Instant, PathId};

use super::path_table::PathTable;

/// It is looked this often whether it is time.
const LOOK: Duration = Duration::from_millis(5);
/// It is told no more often than this, and than that where one class has the link for itself …
const INTERVAL: Duration = Duration::from_millis(10);
const INTERVAL_ALONE: Duration = Duration::from_millis(50);
/// … and for so many bytes that moved over the path, either way: a report takes less than 70 of them …
const BYTES: u64 = 14_000;
/// … or for a few after this time.
const SELDOM: Duration = Duration::from_secs(1);
const FEW_BYTES: u64 = 1000;

/// What both ends tell each other of their clocks.
#[derive(Debug)]
pub(super) struct ClockReports {
    prefix: DatagramPrefix,
    /// Which of the clocks of a session the far end's is.
    far: u8,
    /// When this was looked at last.
    looked: Option<Instant>,
}

impl ClockReports {
    /// For the context with this ID of a request stream; `far` is the same for connections of a session where
    /// it is the same clock.
    pub(super) fn new(stream: u64, context: u64, far: u8) -> Self {
        Self { prefix: datagram::prefix(stream, context), far, looked: None }
    }

    pub(super) fn is_report(&self, datagram: &[u8]) -> bool {
        datagram.starts_with(self.prefix.as_ref())
    }

    /// Takes a report of the far end; one that is malformed, or of a path that is not known, says nothing.
    pub(super) fn take_report(&self, now: Instant, datagram: &[u8], paths: &mut PathTable) {
        let Some(report) = Report::decode(&datagram[self.prefix.as_ref().len()..]) else { return };
        let Some(path) = paths.get_mut(report.path) else { return };
        let Some(seat) = path.policy.shaper() else { return };
        path.clock.note_late(seat.shaper().on_clock_report(now, self.far, report.clock, report.found));
    }

    /// Whether it is time to look which paths have something to tell, with data that moved last at
    /// `data_moved`.
    pub(super) fn is_due(&mut self, now: Instant, data_moved: Option<Instant>) -> bool {
        let within =
            |at: Option<Instant>, time| at.is_some_and(|at| now.saturating_duration_since(at) < time);
        if within(self.looked, LOOK) || !within(data_moved, SELDOM) {
            return false;
        }
        self.looked = Some(now);
        true
    }

    /// The report of a path that shares its link, if it is time, with the bytes that `carried` says it has
    /// carried.
    pub(super) fn report(
        &self,
        now: Instant,
        id: PathId,
        clock: &mut PathClock,
        seat: &ShaperHandle,
        carried: impl FnOnce() -> u64,
    ) -> Option<Bytes> {
        let found = clock.next(now, || seat.shaper().is_single_class_active(now), carried)?;
        Some(Report { path: id, clock: seat.shaper().clock_micros(now), found }.encode(&self.prefix))
    }
}

/// What is known of the clocks at both ends of one path.
#[derive(Debug, Default)]
pub(super) struct PathClock {
    /// When something was told there, and the bytes that had moved over it then.
    told: Option<(Instant, u64)>,
    /// By how much what arrived since was later than told, at least (µs modulo 2^32).
    found: Option<u32>,
}

impl PathClock {
    /// A report was so much later than it said (µs modulo 2^32).
    fn note_late(&mut self, late: u32) {
        let is_less = |least: u32| (late.wrapping_sub(least) as i32) < 0;
        if self.found.is_none_or(is_less) {
            self.found = Some(late);
        }
    }

    /// Whether it is time to tell, and what was found since it was told last.
    fn next(
        &mut self,
        now: Instant,
        is_alone: impl FnOnce() -> bool,
        carried: impl FnOnce() -> u64,
    ) -> Option<Option<u32>> {
        let passed = self.told.map_or(SELDOM, |(at, _)| now.saturating_duration_since(at));
        if passed < INTERVAL || passed < INTERVAL_ALONE && is_alone() {
            return None;
        }
        let carried = carried();
        let since = carried - self.told.map_or(0, |(_, bytes)| bytes.min(carried));
        if since < if passed < SELDOM { BYTES } else { FEW_BYTES } {
            return None;
        }
        self.told = Some((now, carried));
        Some(self.found.take())
    }
}

/// A report as it is on the wire (docs/protocol.md, "Clock reports").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Report {
    path: PathId,
    clock: u32,
    found: Option<u32>,
}

impl Report {
    fn encode(&self, prefix: &DatagramPrefix) -> Bytes {
        let mut out = BytesMut::from(prefix.as_ref());
        varint::encode(self.path.0.into(), &mut out);
        out.extend_from_slice(&self.clock.to_be_bytes());
        if let Some(found) = self.found {
            out.extend_from_slice(&found.to_be_bytes());
        }
        out.freeze()
    }

    /// `None` if it is cut short.
    fn decode(mut bytes: &[u8]) -> Option<Self> {
        let (path, len) = varint::decode(bytes)?;
        bytes.advance(len);
        let clock = u32::from_be_bytes(*bytes.first_chunk()?);
        bytes.advance(size_of::<u32>());
        let found = bytes.first_chunk().map(|found| u32::from_be_bytes(*found));
        Some(Self { path: PathId(u32::try_from(path).ok()?), clock, found })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{
        super::testing::{Received, check_datagrams, prefix},
        *,
    };
    use crate::vectors::number;

    #[test]
    fn reports_are_read_as_they_were_written() {
        let prefix = datagram::prefix(0, 12);
        let start = prefix.as_ref().len();
        for found in [None, Some(0xfedc_ba98)] {
            let report = Report { path: PathId(u32::MAX), clock: 0x1234_5678, found };
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
            let Report { path, clock, found } = Report::decode(received.payload)?;
            Some(json!({ "path_id": path.0, "clock": clock, "delay": found }))
        };
        let encode = |_, _, fields: &Value| {
            let path = PathId(number(&fields["path_id"]) as u32);
            let found = fields["delay"].as_u64().map(|delay| delay as u32);
            Report { path, clock: number(&fields["clock"]) as u32, found }.encode(&prefix(fields)).to_vec()
        };
        check_datagrams(include_str!("../../../../docs/vectors/clocks.json"), parse, encode);
    }

    #[test]
    fn a_path_tells_for_so_many_bytes_and_not_too_often() {
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
    fn the_least_lateness_is_told_once_across_the_turn_of_the_clock() {
        let (mut clock, now) = (PathClock::default(), Instant::now());
        for late in [5, u32::MAX, 2] {
            clock.note_late(late);
        }
        assert_eq!(clock.next(now, || false, || 5000), Some(Some(u32::MAX)), "one µs before zero");
        assert_eq!(clock.next(now + SELDOM, || false, || 9000), Some(None));
    }

    #[test]
    fn nothing_is_looked_at_while_no_data_moves() {
        let (mut clocks, now) = (ClockReports::new(0, 12, 0), Instant::now());
        assert!(!clocks.is_due(now, None));
        assert!(clocks.is_due(now, Some(now)) && !clocks.is_due(now, Some(now)));
        assert!(!clocks.is_due(now + SELDOM, Some(now)) && clocks.is_due(now + LOOK, Some(now)));
    }
}
