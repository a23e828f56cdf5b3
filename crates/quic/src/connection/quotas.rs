//! Send quotas: how many bytes of bulk streams each path may send in its next pass. They leave the streams
//! when the pass begins.
//!
//! In: quotas from the scheduler, losses, streams with data. Out: stream data for noq on each path. Always
//! holds: what noq has to retransmit counts against the quotas first.

use mpvpn_types::{Instant, PathId, varint_len};

use super::{
    Connection, Event, path::StreamsInFlight, readers::ReadAhead, send::StreamWriter, streams::Streams,
};
use crate::StreamId;

/// The overhead of a packet (bytes): flags, connection ID, packet number of two bytes (up to 32,768 packets
/// in flight) and AEAD tag (RFC 9000 §17.3.1).
const PACKET_OVERHEAD: u64 = 1 + 8 + 2 + 16;
/// The overhead of a STREAM frame (bytes) beside stream ID, offset and data: its type, and the 8 bytes that
/// noq reserves for the length (RFC 9000 §19.8).
const STREAM_FRAME_OVERHEAD: u64 = 1 + 8;
/// A pass is extended by this many packets, at most [`MAX_PASS_EXTENSIONS`] times, when noq had more to
/// retransmit than was known. Fewer: data of the pass leaves on another path; more: one path sends too much.
const PASS_EXTENSION_PACKETS: u64 = 2;
const MAX_PASS_EXTENSIONS: u32 = 16;

/// The bytes of bulk streams that paths may send in their next passes.
///
/// noq retransmits lost data before anything else, on whatever path sends next; so it counts against the
/// quotas first.
#[derive(Debug, Default)]
pub(super) struct StreamQuotas {
    /// Lost bytes that noq will retransmit as soon as it may; not all are stream data.
    pub(super) lost: u64,
    /// The quotas of all paths for their next passes (bytes).
    granted: u64,
    /// How often the current pass may still be extended.
    extend_pass: u32,
}

impl StreamQuotas {
    /// Bytes that could be granted while `waiting` bytes wait in streams.
    fn backlog(&self, waiting: u64) -> u64 {
        (waiting + self.lost).saturating_sub(self.granted)
    }

    /// Removes a quota that will not be used.
    pub(super) fn forget(&mut self, bytes: u64) {
        self.granted = self.granted.saturating_sub(bytes);
    }

    /// Begins the pass of a path with this quota; returns how many bytes of it noq retransmits.
    fn begin_pass(&mut self, grant: u64) -> u64 {
        self.forget(grant);
        self.extend_pass = if grant > 0 { MAX_PASS_EXTENSIONS } else { 0 };
        let again = self.lost.min(grant);
        self.lost -= again;
        again
    }

    /// A pass has ended with `left` bytes of credit; returns more credit (bytes) if its data did not fit,
    /// because noq has retransmitted more than was known. Without it, the data would leave with the next
    /// packets, on any path.
    pub(super) fn extend_pass(&mut self, left: u64, packet: u64) -> Option<u64> {
        if left >= packet || self.extend_pass == 0 {
            return None;
        }
        self.extend_pass -= 1;
        Some(PASS_EXTENSION_PACKETS * packet)
    }
}

/// The data that a path takes out of bulk streams when its pass begins.
#[derive(Clone, Copy, Debug)]
pub(super) struct Withdrawal {
    pub(super) path: PathId,
    /// The quota (bytes).
    pub(super) grant: u64,
    /// If set, only long transfers: streams that always had more data than fitted since then.
    pub(super) long_since: Option<Instant>,
    /// How far ahead of their readers streams may be, if the peer sends DataAck reports.
    pub(super) read_ahead: Option<ReadAhead>,
}

impl Streams {
    /// Passes the quota of a path to noq, and records it as in flight on that path. Calls `writable` for
    /// every stream that can be written again.
    pub(super) fn withdraw(
        &mut self,
        now: Instant,
        writer: &mut impl StreamWriter,
        withdrawal: Withdrawal,
        in_flight: &mut StreamsInFlight,
        mut writable: impl FnMut(StreamId),
    ) {
        let Withdrawal { path, grant, long_since, read_ahead } = withdrawal;
        let again = self.quotas.begin_pass(grant);
        if again > 0 {
            in_flight.note_retransmission(now);
        }
        let mut left = grant - again;
        let mut skipped = Vec::new();
        while let Some(turn) = self.send.next_turn(now, left, long_since, read_ahead, &mut skipped) {
            let first = in_flight.len();
            let flushed = self.send.flush(writer, turn.id, turn.max, |piece| in_flight.push(now, piece));
            if flushed.dropped {
                self.reinjection.forget(turn.id);
            }
            in_flight.since(first).for_each(|piece| self.reinjection.on_sent(now, path, piece));
            if read_ahead.is_some() {
                self.send.update_unread(turn.id);
            }
            left -= flushed.bytes;
            if self.send.end_turn(turn, flushed.bytes, self.receive.contains(turn.id)) {
                writable(turn.id);
            }
        }
        self.send.return_skipped(skipped);
    }
}

impl Connection {
    /// Bytes of bulk streams that paths could be granted now.
    pub fn stream_backlog(&self) -> u64 {
        self.streams.quotas.backlog(self.streams.send.waiting)
    }

    /// Grants a path a send quota of up to `max` bytes of bulk streams, framing included, but at least one
    /// packet if data waits; returns the bytes of available window that this takes.
    pub fn grant_quota(&mut self, id: PathId, max: u64) -> u64 {
        self.grant(id, max, self.stream_backlog(), None)
    }

    /// As [`Self::grant_quota`], for a path with a large delay difference, from which only long transfers
    /// profit: only streams that always had more data than fitted since `since`. Nothing is granted while
    /// noq has data to retransmit, which would leave there.
    pub fn grant_quota_to_long_transfers(&mut self, id: PathId, max: u64, since: Instant) -> u64 {
        if self.streams.quotas.lost > 0 {
            return 0;
        }
        let bytes = self.streams.send.long_transfer_bytes(since);
        self.grant(id, max, bytes.min(self.stream_backlog()), Some(since))
    }

    fn grant(&mut self, id: PathId, max: u64, backlog: u64, long_since: Option<Instant>) -> u64 {
        if backlog == 0 {
            return 0;
        }
        let Some(packet) = self.contained_read(Self::mtu).map(u64::from) else { return 0 };
        let overhead = self.packet_overhead(max.max(packet));
        let payload = packet - overhead;
        let bytes = backlog.min((max / packet).max(1) * payload);
        let cost = bytes + bytes.div_ceil(payload) * overhead;
        let Some(path) = self.next_of_group(id) else { return 0 };
        path.queue.add_stream_bytes(bytes, cost, long_since);
        self.streams.quotas.granted += bytes;
        cost
    }

    /// The overhead of a packet (bytes) for the stream whose turn is next. If it is estimated too high,
    /// packets are shorter than possible; if too low, a second packet carries a few bytes.
    fn packet_overhead(&self, max: u64) -> u64 {
        let front = self.streams.send.front();
        let place = front.map_or(4 + 8, |(id, at)| varint_len(id) + varint_len(at + max));
        PACKET_OVERHEAD + STREAM_FRAME_OVERHEAD + place as u64
    }

    /// Passes the quota of the path at `index` to noq, as its pass begins.
    pub(super) fn write_quota(
        &mut self,
        now: Instant,
        index: usize,
        grant: u64,
        long_since: Option<Instant>,
    ) {
        let read_ahead = (grant > 0 && self.streams.limits_read_ahead).then(|| self.read_ahead());
        let Some(path) = self.paths.at_mut(index) else { return };
        let withdrawal = Withdrawal { path: path.id, grant, long_since, read_ahead };
        let events = &mut self.events;
        self.streams.withdraw(now, &mut self.inner, withdrawal, &mut path.streams, |id| {
            events.push_back(Event::StreamWritable(id));
        });
    }

    /// Notes before a control pass that noq may retransmit data on any path.
    pub(super) fn note_retransmissions(&mut self, now: Instant) {
        if self.streams.quotas.lost > 0 {
            self.paths.iter_mut().for_each(|path| path.streams.note_retransmission(now));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_bytes_count_against_quotas_first_and_once() {
        let mut quotas = StreamQuotas::default();
        quotas.lost += 3000;
        assert_eq!((quotas.backlog(5000), quotas.lost > 0), (8000, true));
        quotas.granted += 4000;
        quotas.granted += 1000;
        assert_eq!(quotas.backlog(5000), 3000);
        assert_eq!(quotas.begin_pass(4000), 3000);
        assert_eq!(quotas.begin_pass(1000), 0);
        assert_eq!(quotas.lost, 0);
        quotas.granted += 500;
        quotas.forget(500);
        assert_eq!(quotas.backlog(5000), 5000);
    }

    #[test]
    fn a_pass_is_extended_for_unknown_retransmissions_but_not_for_ever() {
        let mut quotas = StreamQuotas::default();
        assert_eq!(quotas.extend_pass(0, 1200), None, "nothing was granted");
        quotas.begin_pass(1000);
        assert_eq!(quotas.extend_pass(1200, 1200), None, "a packet would have fitted");
        let times = std::iter::from_fn(|| quotas.extend_pass(100, 1200)).count();
        assert_eq!(times, MAX_PASS_EXTENSIONS as usize);
    }
}
