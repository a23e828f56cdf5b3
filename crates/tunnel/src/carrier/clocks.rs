//! What the clocks of both ends say, told with the data of links that classes share: so each end knows on which way of a
//! link packets wait, and need not take a queue on the way back for its own.
//!
//! Always holds: nothing is told while no data moves, and what is told is a small share of what does.

use bytes::{Buf, Bytes, BytesMut};
use mpvpn_masque::{
    datagram::{self, DatagramPrefix},
    varint,
};
use mpvpn_quic::{Connection, PathStatus};
use mpvpn_types::{Duration, Instant, PathId};

use super::Carrier;

/// It is looked this often whether it is time.
const LOOK: Duration = Duration::from_millis(5);
/// It is told no more often than this, and than that where one class has the link for itself …
const EVERY: Duration = Duration::from_millis(10);
const ALONE_EVERY: Duration = Duration::from_millis(50);
/// … and for so many bytes that moved over the path, either way: a report takes less than 70 of them …
const BYTES: u64 = 14_000;
/// … or for a few after this time.
const SELDOM: Duration = Duration::from_secs(1);
const FEW_BYTES: u64 = 1000;

/// What both ends tell each other of their clocks.
#[derive(Debug)]
pub(super) struct Clocks {
    prefix: DatagramPrefix,
    /// Which of the clocks of a session the far end's is.
    far: u8,
    /// When this was looked at last.
    looked: Option<Instant>,
}

impl Clocks {
    pub(super) fn is_report(&self, datagram: &[u8]) -> bool {
        datagram.starts_with(self.prefix.as_ref())
    }
}

/// What is known of one path.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Clocked {
    /// When something was told there, and the bytes that had moved over it then.
    told: Option<(Instant, u64)>,
    /// By how much what arrived since was later than told, at least (µs modulo 2^32).
    found: Option<u32>,
}

/// A report as it is on the wire (docs/protocol.md, "Clocks").
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

impl Carrier {
    /// The peer tells what its clock says, in this context of the request stream; `far` is the same for connections of a
    /// session where it is the same clock.
    pub(crate) fn tell_clocks(&mut self, stream: u64, context: u64, far: u8) {
        self.clocks = Some(Clocks { prefix: datagram::prefix(stream, context), far, looked: None });
    }

    /// Takes a report of the far end; one that is malformed, or of a path that is not known, says nothing.
    pub(super) fn take_clock(&mut self, now: Instant, datagram: &[u8]) {
        let Some(clocks) = &self.clocks else { return };
        let Some(report) = Report::decode(&datagram[clocks.prefix.as_ref().len()..]) else { return };
        let Some(path) = self.paths.get_mut(&report.path) else { return };
        let Some(seat) = &path.seat else { return };
        let found = seat.shaper().told(now, clocks.far, report.clock, report.found);
        let is_less = |least: u32| (found.wrapping_sub(least) as i32) < 0;
        if path.clocked.found.is_none_or(is_less) {
            path.clocked.found = Some(found);
        }
    }

    /// Tells on each path what the clock says, if it is time.
    pub(super) fn send_clocks(&mut self, now: Instant, connection: &mut Connection) {
        let Some(clocks) = &mut self.clocks else { return };
        let lately =
            |at: Option<Instant>, time| at.is_some_and(|at| now.saturating_duration_since(at) < time);
        if lately(clocks.looked, LOOK) || !self.traffic.moved_within(now, SELDOM) {
            return;
        }
        clocks.looked = Some(now);
        for (id, path) in &mut self.paths {
            let Some(seat) = path.seat.as_ref().filter(|_| path.told == PathStatus::Available) else {
                continue;
            };
            let passed = path.clocked.told.map_or(SELDOM, |(at, _)| now.saturating_duration_since(at));
            if passed < EVERY || passed < ALONE_EVERY && seat.shaper().is_alone(now) {
                continue;
            }
            let moved = connection.moved(*id);
            let since = moved - path.clocked.told.map_or(0, |(_, bytes)| bytes.min(moved));
            if since < if passed < SELDOM { BYTES } else { FEW_BYTES } {
                continue;
            }
            let found = path.clocked.found.take();
            path.clocked.told = Some((now, moved));
            let report = Report { path: *id, clock: seat.shaper().clock(now), found };
            connection.queue_on(*id, report.encode(&clocks.prefix));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
