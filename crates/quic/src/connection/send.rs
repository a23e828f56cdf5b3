//! The sending side of streams.
//!
//! In: written data, flow control credit, send quotas. Out: data for noq. Data of ordinary streams leaves at
//! once, on any path. Data of bulk streams waits here, and leaves by the send quotas of paths, in turns, when
//! a path's pass begins; not when the quota is granted, because passes have another order than grants, and
//! the bytes of a stream must leave in order.
//!
//! Always holds: a bulk stream is in `ready` if it has data and flow control credit, and `waiting` is the
//! data of these streams.

use std::collections::VecDeque;

use bytes::Bytes;
use mpvpn_types::Instant;
use rustc_hash::FxHashMap;

use super::{
    StreamChunk,
    readers::{ReadAhead, Reader},
};
use crate::{StreamId, held::HeldBytes};

/// The queue of a bulk stream (bytes), above which its writer is stopped. Smaller: paths run dry; larger:
/// memory of readers that stop. No measurement (docs/design/streams.md).
const MAX_BULK_QUEUE: usize = 256 << 10;
/// The queues of all bulk streams (bytes). Each takes at most an eighth of what is left of it (dynamic
/// thresholds, Choudhury and Hahne 1998), so 40 streams may have full queues, and what thousands that stand
/// leave is shared. The user of the connection may have less left ([`UserBytes`](crate::UserBytes)).
/// Smaller: slow transfers beside many that stand; larger: memory that a peer can demand by reading nothing.
const MAX_BULK_QUEUES: usize = 12 << 20;
const BULK_QUEUE_SHARE: usize = 8;
/// The minimum capacity of the queue of each bulk stream (bytes), so that no stream starves: a few packets.
/// Smaller: such streams are slow; larger: memory of thousands of them.
const MIN_BULK_QUEUE: usize = 4 << 10;
/// Bytes that a bulk stream may send before the next one has its turn. Smaller: overhead; larger: others
/// wait. No measurement.
const TURN_BYTES: u64 = 16 << 10;
/// Streams that are searched for long transfers. More: processor time; fewer: paths with a large delay
/// difference stay unused.
const MAX_SEARCHED: usize = 64;

/// The sending side of streams inside noq.
pub(super) trait StreamWriter {
    /// Takes bytes from the front of `bytes`; returns how many.
    fn write(&mut self, id: StreamId, bytes: &mut Bytes) -> Result<usize, noq_proto::WriteError>;
    /// Ends a stream.
    fn finish(&mut self, id: StreamId);
}

/// The result of [`SendStreams::flush`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Flushed {
    /// Bytes that noq took; a FIN counts as one.
    pub(super) bytes: u64,
    /// The peer stopped the stream: waiting data was dropped.
    pub(super) dropped: bool,
}

/// The sending side of one stream.
#[derive(Debug, Default)]
struct SendStream {
    queue: VecDeque<Bytes>,
    /// Bytes in the queue.
    bytes: usize,
    /// The offset of the first of them.
    at: u64,
    finish: bool,
    /// Whether the FIN was sent.
    ended: bool,
    /// Whether data leaves only by send quotas.
    bulk: bool,
    /// Whether the stream is in the queue of those that wait for quotas.
    ready: bool,
    /// Whether flow control or the reader's limit allows nothing now.
    blocked: bool,
    /// Whether the writer was stopped.
    full: bool,
    /// Since when the queue has always been full when the stream had its turn.
    full_since: Option<Instant>,
    reader: Reader,
    /// Whether it is blocked by the reader's limit.
    blocked_by_reader: bool,
    /// Whether sent data is not known to be read.
    unread: bool,
}

impl SendStream {
    /// Bytes that wait; a FIN counts as one.
    fn waiting_bytes(&self) -> u64 {
        self.bytes as u64 + u64::from(self.finish)
    }

    /// Bytes that the reader's limit allows now.
    fn may_send(&self, read_ahead: ReadAhead) -> u64 {
        self.reader.limit(read_ahead).saturating_sub(self.at)
    }

    /// Whether the queue has always been full since then.
    fn is_full_since(&self, since: Instant) -> bool {
        self.full_since.is_some_and(|full_since| full_since <= since)
    }

    /// Puts back the part of the first buffer that noq did not take.
    fn put_back(&mut self, taken: Bytes) {
        let back = self.queue.pop_front().unwrap_or_default();
        for bytes in [back, taken] {
            if !bytes.is_empty() {
                self.queue.push_front(bytes);
            }
        }
    }
}

/// The turn of a bulk stream in a path's pass.
#[derive(Clone, Copy, Debug)]
pub(super) struct StreamTurn {
    pub(super) id: StreamId,
    /// Bytes that the stream may send.
    pub(super) max: u64,
    /// Bytes that waited before.
    wanted: u64,
    /// Whether the writer was stopped before.
    was_full: bool,
}

/// The sending side of all streams of a connection.
#[derive(Debug, Default)]
pub(super) struct SendStreams {
    streams: FxHashMap<StreamId, SendStream>,
    /// Bulk streams with data and flow control credit.
    ready: VecDeque<StreamId>,
    /// The waiting data of these streams (bytes).
    pub(super) waiting: u64,
    /// The number of streams that are not known to be read completely.
    pub(super) unread_streams: u64,
    /// The data of ordinary streams that waits for flow control credit (bytes).
    pub(super) ordinary_bytes: usize,
    /// The queues of all streams (bytes).
    pub(super) queued: HeldBytes,
}

impl SendStreams {
    /// The bulk stream whose turn is next, and the offset of its next byte.
    pub(super) fn front(&self) -> Option<(StreamId, u64)> {
        let id = *self.ready.front()?;
        Some((id, self.streams.get(&id)?.at))
    }

    /// The waiting bytes of long transfers, whose queues have always been full since then, among the first
    /// [`MAX_SEARCHED`] streams.
    pub(super) fn long_transfer_bytes(&self, since: Instant) -> u64 {
        let streams = self.ready.iter().take(MAX_SEARCHED).filter_map(|id| self.streams.get(id));
        streams.filter(|stream| stream.is_full_since(since)).map(|stream| stream.bytes as u64).sum()
    }

    /// Makes a stream a bulk stream; returns whether it was not one before.
    pub(super) fn make_bulk(&mut self, id: StreamId) -> bool {
        let stream = self.streams.entry(id).or_default();
        let new = !std::mem::replace(&mut stream.bulk, true);
        if new {
            self.ordinary_bytes -= stream.bytes;
            self.make_ready(id);
        }
        new
    }

    /// Ends the writing of a bulk stream; written data still leaves.
    pub(super) fn end_bulk(&mut self, id: StreamId) {
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.full = false;
            if stream.waiting_bytes() == 0 {
                self.remove(id);
            }
        }
    }

    /// Queues data.
    pub(super) fn push(&mut self, id: StreamId, data: Bytes) {
        let stream = self.streams.entry(id).or_default();
        stream.bytes += data.len();
        if !stream.bulk {
            self.ordinary_bytes += data.len();
        }
        self.queued.add(data.len());
        if stream.ready {
            self.waiting += data.len() as u64;
        }
        stream.queue.push_back(data);
    }

    /// Ends a stream after the written data.
    pub(super) fn finish(&mut self, id: StreamId) {
        let stream = self.streams.entry(id).or_default();
        if !std::mem::replace(&mut stream.finish, true) && stream.ready {
            self.waiting += 1;
        }
    }

    /// Lets written data leave: at once, or in the turn of a bulk stream.
    pub(super) fn written(&mut self, writer: &mut impl StreamWriter, id: StreamId) -> Flushed {
        if self.streams.get(&id).is_some_and(|stream| stream.bulk) {
            self.make_ready(id);
            return Flushed::default();
        }
        self.flush(writer, id, u64::MAX, |_| {})
    }

    /// Writes to a bulk stream without a quota, if no data of it waits.
    pub(super) fn write_past_quota(
        &mut self,
        writer: &mut impl StreamWriter,
        id: StreamId,
        data: Bytes,
    ) -> Flushed {
        let Some(stream) = self.streams.get_mut(&id) else { return Flushed::default() };
        if !stream.bulk || stream.waiting_bytes() > 0 || stream.ended {
            return Flushed::default();
        }
        let max = data.len();
        stream.bytes += max;
        self.queued.add(max);
        stream.queue.push_back(data);
        let flushed = self.flush(writer, id, max as u64, |_| {});
        self.make_ready(id);
        flushed
    }

    /// Flow control allows data of a stream again; returns whether the stream exists.
    pub(super) fn unblock(&mut self, id: StreamId) -> bool {
        let Some(stream) = self.streams.get_mut(&id) else { return false };
        stream.blocked = false;
        true
    }

    /// Whether nothing waits on an ordinary stream.
    pub(super) fn is_forgotten(&self, id: StreamId) -> bool {
        !self.streams.contains_key(&id)
    }

    /// The reader of a stream has taken `read` bytes; returns whether the stream waited for that.
    pub(super) fn on_read(&mut self, now: Instant, id: StreamId, read: u64) -> bool {
        let Some(stream) = self.streams.get_mut(&id) else { return false };
        stream.reader.on_report(now, read);
        let blocked_by_reader = std::mem::take(&mut stream.blocked_by_reader);
        self.update_unread(id);
        blocked_by_reader
    }

    /// Updates the number of unread streams after data of a stream was sent or read.
    pub(super) fn update_unread(&mut self, id: StreamId) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        let unread = !stream.reader.has_read(stream.at);
        self.unread_streams = self.unread_streams + u64::from(unread)
            - u64::from(std::mem::replace(&mut stream.unread, unread));
    }

    /// Bytes that were written, but not passed to noq yet.
    pub(super) fn unsent(&self, id: StreamId) -> usize {
        self.streams.get(&id).map_or(0, |stream| stream.bytes)
    }

    /// Bytes that can be written to a bulk stream now; after 0, [`Self::end_turn`] reports when it is
    /// writable again.
    pub(super) fn writable_bytes(&mut self, id: StreamId) -> usize {
        let Some(stream) = self.streams.get_mut(&id) else { return 0 };
        let left = self.queued.left(MAX_BULK_QUEUES);
        let limit = (left / BULK_QUEUE_SHARE).clamp(MIN_BULK_QUEUE, MAX_BULK_QUEUE);
        let writable_bytes = limit.saturating_sub(stream.bytes);
        stream.full |= writable_bytes == 0;
        writable_bytes
    }

    fn make_ready(&mut self, id: StreamId) {
        if let Some(stream) = self.streams.get_mut(&id)
            && stream.bulk
            && !stream.ready
            && !stream.blocked
            && stream.waiting_bytes() > 0
        {
            stream.ready = true;
            self.waiting += stream.waiting_bytes();
            // In front: a stream that had no data waiting is probably interactive.
            self.ready.push_front(id);
        }
    }

    /// Removes a stream and its waiting data.
    pub(super) fn remove(&mut self, id: StreamId) {
        if let Some(stream) = self.forget(id)
            && stream.ready
        {
            self.waiting -= stream.waiting_bytes();
            self.ready.retain(|other| *other != id);
        }
    }

    /// Removes a stream, but not from the queue of those that wait for quotas.
    fn forget(&mut self, id: StreamId) -> Option<SendStream> {
        let stream = self.streams.remove(&id)?;
        self.unread_streams -= u64::from(stream.unread);
        if !stream.bulk {
            self.ordinary_bytes -= stream.bytes;
        }
        self.queued.sub(stream.bytes);
        Some(stream)
    }

    /// Passes up to `max` bytes of a stream to noq, and to `each`. A FIN counts as one byte.
    pub(super) fn flush(
        &mut self,
        writer: &mut impl StreamWriter,
        id: StreamId,
        max: u64,
        mut each: impl FnMut(StreamChunk),
    ) -> Flushed {
        let mut done = Flushed::default();
        let Some(stream) = self.streams.get_mut(&id) else { return done };
        while done.bytes < max
            && let Some(front) = stream.queue.front_mut()
        {
            let some = front.len().min(usize::try_from(max - done.bytes).unwrap_or(usize::MAX));
            let mut rest = front.split_to(some);
            let bytes = rest.clone();
            match writer.write(id, &mut rest) {
                Ok(n) => {
                    done.bytes += n as u64;
                    stream.bytes -= n;
                    if !stream.bulk {
                        self.ordinary_bytes -= n;
                    }
                    self.queued.sub(n);
                    each(StreamChunk { stream: id, offset: stream.at, data: bytes.slice(..n), fin: false });
                    stream.at += n as u64;
                    if n == some {
                        if front.is_empty() {
                            stream.queue.pop_front();
                        }
                        continue;
                    }
                    // noq reports credit only for streams of which it has refused data, so it is asked again.
                    if n > 0 {
                        stream.put_back(rest);
                        continue;
                    }
                }
                Err(noq_proto::WriteError::Blocked) => {}
                // Stopped or reset.
                Err(_) => {
                    self.remove(id);
                    done.dropped = true;
                    return done;
                }
            }
            stream.put_back(rest);
            stream.blocked = true;
            return done;
        }
        if stream.finish && stream.queue.is_empty() && done.bytes < max {
            (stream.finish, stream.ended) = (false, true);
            writer.finish(id);
            each(StreamChunk { stream: id, offset: stream.at, data: Bytes::new(), fin: true });
            done.bytes += 1;
        }
        if !stream.bulk && stream.waiting_bytes() == 0 {
            self.forget(id);
        }
        done
    }

    /// The bulk stream whose turn is next in a pass with `left` bytes; only a long transfer, if `long_since`
    /// is set. Other streams are added to `skipped`, for [`Self::return_skipped`].
    pub(super) fn next_turn(
        &mut self,
        now: Instant,
        left: u64,
        long_since: Option<Instant>,
        read_ahead: Option<ReadAhead>,
        skipped: &mut Vec<StreamId>,
    ) -> Option<StreamTurn> {
        while left > 0
            && skipped.len() < MAX_SEARCHED
            && let Some(id) = self.ready.pop_front()
        {
            let Some(stream) = self.streams.get_mut(&id) else { continue };
            if long_since.is_some_and(|since| !stream.is_full_since(since)) {
                skipped.push(id);
                continue;
            }
            let (wanted, was_full) = (stream.waiting_bytes(), stream.full);
            if was_full {
                stream.full_since.get_or_insert(now);
            }
            let may_send = read_ahead.map_or(u64::MAX, |read_ahead| stream.may_send(read_ahead));
            let max = left.min(TURN_BYTES).min(may_send);
            if max == 0 {
                (stream.blocked, stream.blocked_by_reader) = (true, true);
            }
            return Some(StreamTurn { id, max, wanted, was_full });
        }
        None
    }

    /// Ends the turn of a stream that has sent `done` bytes; `is_read`: this end reads the stream, too.
    /// Returns whether its writer may go on.
    pub(super) fn end_turn(&mut self, turn: StreamTurn, done: u64, is_read: bool) -> bool {
        let Some(stream) = self.streams.get_mut(&turn.id) else {
            self.waiting = self.waiting.saturating_sub(done);
            return false;
        };
        let has_room = stream.full && stream.bytes <= MAX_BULK_QUEUE / 2;
        stream.full &= !has_room;
        let wants = stream.waiting_bytes();
        if wants == 0 && !turn.was_full {
            stream.full_since = None;
        }
        if wants > 0 && !stream.blocked {
            self.waiting -= turn.wanted - wants;
            self.ready.push_back(turn.id);
        } else {
            stream.ready = false;
            self.waiting -= turn.wanted;
            if wants == 0 && !is_read {
                self.forget(turn.id);
            }
        }
        has_room
    }

    /// Returns skipped streams to their places.
    pub(super) fn return_skipped(&mut self, skipped: Vec<StreamId>) {
        skipped.into_iter().rev().for_each(|id| self.ready.push_front(id));
    }
}

#[cfg(test)]
mod tests {
    use mpvpn_types::Duration;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Takes `credit` bytes of each stream, and records them.
    #[derive(Default)]
    struct Peer {
        credit: FxHashMap<StreamId, usize>,
        got: Vec<(StreamId, usize)>,
        ended: Vec<StreamId>,
        stopped: Vec<StreamId>,
        blocked: Vec<StreamId>,
    }

    impl StreamWriter for Peer {
        fn write(&mut self, id: StreamId, bytes: &mut Bytes) -> Result<usize, noq_proto::WriteError> {
            if self.stopped.contains(&id) {
                return Err(noq_proto::WriteError::Stopped(noq_proto::VarInt::from_u32(0)));
            }
            let credit = self.credit.entry(id).or_insert(usize::MAX);
            let n = bytes.len().min(*credit);
            if n == 0 {
                self.blocked.push(id);
                return Err(noq_proto::WriteError::Blocked);
            }
            *credit -= n;
            let _ = bytes.split_to(n);
            self.got.push((id, n));
            Ok(n)
        }

        fn finish(&mut self, id: StreamId) {
            self.ended.push(id);
        }
    }

    #[test]
    fn a_stream_of_which_a_part_was_taken_is_asked_for_until_it_is_refused() {
        let (mut streams, mut peer) = (SendStreams::default(), Peer::default());
        peer.credit.insert(0, 40);
        streams.push(0, Bytes::from(vec![0; 100]));
        streams.written(&mut peer, 0);
        assert_eq!((&peer.got[..], &peer.blocked[..]), (&[(0, 40)][..], &[0][..]));
        peer.credit.insert(0, 100);
        assert!(streams.unblock(0));
        streams.written(&mut peer, 0);
        assert_eq!((&peer.got[..], streams.unsent(0)), (&[(0, 40), (0, 60)][..], 0));
    }

    fn bulk(streams: &mut SendStreams, id: StreamId, bytes: usize) {
        streams.make_bulk(id);
        streams.push(id, Bytes::from(vec![0; bytes]));
        streams.written(&mut Peer::default(), id);
    }

    /// The data that a pass of `left` bytes sends, and the streams that are writable again.
    fn pass(
        streams: &mut SendStreams,
        peer: &mut Peer,
        now: Instant,
        mut left: u64,
        long_since: Option<Instant>,
    ) -> (Vec<(StreamId, usize)>, Vec<StreamId>) {
        let (mut skipped, mut writable_bytes) = (Vec::new(), Vec::new());
        peer.got.clear();
        while let Some(turn) = streams.next_turn(now, left, long_since, None, &mut skipped) {
            let flushed = streams.flush(peer, turn.id, turn.max, |_| {});
            left -= flushed.bytes;
            if streams.end_turn(turn, flushed.bytes, false) {
                writable_bytes.push(turn.id);
            }
        }
        streams.return_skipped(skipped);
        (std::mem::take(&mut peer.got), writable_bytes)
    }

    #[test]
    fn ordinary_streams_leave_at_once_and_bulk_streams_wait_for_their_turn() {
        let (mut streams, mut peer) = (SendStreams::default(), Peer::default());
        streams.push(0, Bytes::from_static(b"hello"));
        streams.finish(0);
        assert_eq!(streams.written(&mut peer, 0), Flushed { bytes: 6, dropped: false });
        assert_eq!((&peer.got[..], &peer.ended[..]), (&[(0, 5)][..], &[0][..]));
        bulk(&mut streams, 4, 1000);
        assert_eq!((streams.waiting, streams.unsent(4)), (1000, 1000));
        assert_eq!(pass(&mut streams, &mut peer, Instant::now(), 400, None).0, [(4, 400)]);
        assert_eq!((streams.waiting, streams.front()), (600, Some((4, 400))));
    }

    #[test]
    fn bulk_streams_take_turns_of_16_kb() {
        let (mut streams, mut peer) = (SendStreams::default(), Peer::default());
        [4, 0].into_iter().for_each(|id| bulk(&mut streams, id, 40_000));
        let turn = TURN_BYTES as usize;
        let (sent, _) = pass(&mut streams, &mut peer, Instant::now(), 3 * TURN_BYTES, None);
        assert_eq!(sent, [(0, turn), (4, turn), (0, turn)]);
        let (sent, _) = pass(&mut streams, &mut peer, Instant::now(), u64::MAX, None);
        assert_eq!(sent, [(4, turn), (0, 40_000 - 2 * turn), (4, 40_000 - 2 * turn)]);
        assert_eq!((streams.waiting, streams.streams.len()), (0, 0), "this end does not read them");
    }

    #[test]
    fn blocked_data_is_sent_when_the_peer_gives_credit() {
        let (mut streams, mut peer) = (SendStreams::default(), Peer::default());
        peer.credit.insert(0, 300);
        bulk(&mut streams, 0, 1000);
        streams.finish(0);
        assert_eq!(pass(&mut streams, &mut peer, Instant::now(), 5000, None).0, [(0, 300)]);
        assert_eq!((streams.waiting, streams.unsent(0)), (0, 700), "it is blocked");
        peer.credit.insert(0, usize::MAX);
        assert!(streams.unblock(0) && !streams.unblock(4));
        streams.written(&mut peer, 0);
        assert_eq!(streams.waiting, 701);
        assert_eq!(pass(&mut streams, &mut peer, Instant::now(), 5000, None).0, [(0, 700)]);
        assert_eq!(peer.ended, [0]);
    }

    #[test]
    fn data_of_a_stopped_stream_is_dropped() {
        let (mut streams, mut peer) = (SendStreams::default(), Peer::default());
        peer.stopped.push(0);
        [4, 0].into_iter().for_each(|id| bulk(&mut streams, id, 1000));
        let flushed = streams.flush(&mut peer, 0, 100, |_| {});
        assert_eq!((flushed, streams.waiting), (Flushed { bytes: 0, dropped: true }, 1000));
        assert_eq!(pass(&mut streams, &mut peer, Instant::now(), 5000, None).0, [(4, 1000)]);
    }

    #[test]
    fn a_stopped_writer_continues_when_half_of_the_queue_is_free() {
        let (mut streams, mut peer, now) = (SendStreams::default(), Peer::default(), Instant::now());
        bulk(&mut streams, 0, MAX_BULK_QUEUE);
        assert_eq!(streams.writable_bytes(0), 0);
        let half = MAX_BULK_QUEUE as u64 / 2;
        assert_eq!(pass(&mut streams, &mut peer, now, half - TURN_BYTES, None).1, []);
        assert_eq!(pass(&mut streams, &mut peer, now, TURN_BYTES, None).1, [0]);
        assert_eq!(streams.writable_bytes(0), MAX_BULK_QUEUE / 2);
    }

    #[test]
    fn the_queues_of_all_streams_are_bounded_and_no_stream_starves() {
        let mut streams = SendStreams::default();
        let fill = |streams: &mut SendStreams, id| {
            streams.make_bulk(id);
            let writable = streams.writable_bytes(id);
            bulk(streams, id, writable);
            writable
        };
        for id in 0..40 {
            assert_eq!(fill(&mut streams, id), MAX_BULK_QUEUE, "stream {id}");
        }
        assert!((40..2000).all(|id| fill(&mut streams, id) >= MIN_BULK_QUEUE));
        assert!(streams.queued.get() < MAX_BULK_QUEUES + 2000 * MIN_BULK_QUEUE, "{:?}", streams.queued);
        (0..2000).for_each(|id| streams.remove(id));
        assert_eq!(streams.queued.get(), 0);
    }

    #[test]
    fn only_long_transfers_use_a_slow_path_and_others_keep_their_places() {
        let (mut streams, mut peer, start) = (SendStreams::default(), Peer::default(), Instant::now());
        [8, 4, 0].into_iter().for_each(|id| bulk(&mut streams, id, MAX_BULK_QUEUE));
        // The owner of the second has more than there is room for.
        assert_eq!(streams.writable_bytes(4), 0);
        pass(&mut streams, &mut peer, start, 3 * TURN_BYTES, None);
        let since = start + 10 * MS;
        assert_eq!(
            (streams.long_transfer_bytes(since), streams.long_transfer_bytes(start)),
            (streams.unsent(4) as u64, streams.unsent(4) as u64)
        );
        let (sent, _) = pass(&mut streams, &mut peer, start + 20 * MS, 2 * TURN_BYTES, Some(since));
        assert_eq!(sent, [(4, TURN_BYTES as usize); 2]);
        assert_eq!(streams.front().map(|(id, _)| id), Some(0));
    }

    #[test]
    fn a_reader_that_does_not_read_is_sent_a_bounded_amount() {
        let (mut streams, mut peer, start) = (SendStreams::default(), Peer::default(), Instant::now());
        let read_ahead = ReadAhead::new(20 * MS, 1);
        streams.make_bulk(0);
        let (mut sent, mut skipped) = (0, Vec::new());
        loop {
            streams.push(0, Bytes::from(vec![0; TURN_BYTES as usize]));
            streams.written(&mut peer, 0);
            let Some(turn) = streams.next_turn(start, u64::MAX, None, Some(read_ahead), &mut skipped) else {
                break;
            };
            let flushed = streams.flush(&mut peer, 0, turn.max, |_| {});
            streams.end_turn(turn, flushed.bytes, true);
            streams.update_unread(0);
            sent += flushed.bytes;
            assert!(sent < 8 << 20, "{sent} bytes to a reader that does not read");
        }
        assert_eq!((streams.unread_streams, streams.waiting), (1, 0));
        assert!(streams.on_read(start + MS, 0, sent));
        assert_eq!(streams.unread_streams, 0);
        assert!(streams.unblock(0));
        streams.written(&mut peer, 0);
        assert!(streams.waiting > 0);
    }
}
