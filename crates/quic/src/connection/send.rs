//! Bytes that wait to be sent on streams.
//!
//! Those of most streams leave at once, on any path. Those of bulk streams leave only as paths are granted to them: they
//! wait here, and take turns when a path's pass begins. Not when it is granted: passes have another order than grants, and
//! bytes of a stream must leave in theirs.
//!
//! Always holds: a bulk stream has a place in `ready` if it has something to send that the peer gives credit for, and
//! `waiting` is what those streams have to send.

use std::collections::VecDeque;

use bytes::Bytes;
use mpvpn_types::Instant;
use rustc_hash::FxHashMap;

use super::{
    StreamChunk,
    readers::{Patience, Reader},
};
use crate::StreamId;

/// Bytes that wait in a bulk stream before its owner is told that there is no room.
const BULK_QUEUE: usize = 256 << 10;
/// Bytes that a bulk stream may send before the next one has its turn.
const TURN: u64 = 16 << 10;
/// Streams that are looked through for those that last.
const MOST_LOOKS: usize = 64;

/// The side of the library that takes bytes of streams.
pub(super) trait StreamWriter {
    /// Takes bytes from the front of `bytes`; returns how many.
    fn write(&mut self, id: StreamId, bytes: &mut Bytes) -> Result<usize, noq_proto::WriteError>;
    /// Ends a stream.
    fn finish(&mut self, id: StreamId);
}

/// What [`SendStreams::flush`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Flushed {
    /// Bytes that were taken; the end counts as one.
    pub(super) bytes: u64,
    /// The peer wants no more: what waited was dropped.
    pub(super) dropped: bool,
}

/// What waits to be sent on one stream.
#[derive(Debug, Default)]
struct SendStream {
    queue: VecDeque<Bytes>,
    /// Bytes in it.
    bytes: usize,
    /// Where the first of them is in the stream.
    at: u64,
    finish: bool,
    /// The end was sent.
    ended: bool,
    /// Leaves as paths are granted.
    bulk: bool,
    /// Has a place among those that wait for grants.
    ready: bool,
    /// The peer gives no credit for now, or its reader is not to have more.
    blocked: bool,
    /// The owner found no room.
    full: bool,
    /// Since when the owner has always had more than there was room for.
    crowded: Option<Instant>,
    reader: Reader,
    /// Blocked because of its reader.
    restrained: bool,
    /// Something was sent that is not known to have been read.
    owes: bool,
}

impl SendStream {
    /// What it takes to send it all: the end counts as one byte.
    fn wants(&self) -> u64 {
        self.bytes as u64 + u64::from(self.finish)
    }

    /// Bytes that may be sent now.
    fn may_send(&self, patience: Patience) -> u64 {
        self.reader.limit(patience).saturating_sub(self.at)
    }

    /// Whether its owner has had more than there was room for since then.
    fn lasts_since(&self, since: Instant) -> bool {
        self.crowded.is_some_and(|crowded| crowded <= since)
    }

    /// Puts back what the library did not take of the first buffer.
    fn put_back(&mut self, taken: Bytes) {
        let back = self.queue.pop_front().unwrap_or_default();
        for bytes in [back, taken] {
            if !bytes.is_empty() {
                self.queue.push_front(bytes);
            }
        }
    }
}

/// The turn of a bulk stream when a path's pass begins.
#[derive(Clone, Copy, Debug)]
pub(super) struct Turn {
    pub(super) id: StreamId,
    /// Bytes that it may send.
    pub(super) most: u64,
    /// What it had to send.
    wanted: u64,
    /// Its owner had found no room.
    was_full: bool,
}

/// What waits on all streams of a connection.
#[derive(Debug, Default)]
pub(super) struct SendStreams {
    streams: FxHashMap<StreamId, SendStream>,
    /// Bulk streams with something to send that the peer gives credit for.
    ready: VecDeque<StreamId>,
    /// What they have to send (bytes).
    waiting: u64,
    /// Streams whose readers are not known to have read everything.
    owing: u64,
}

impl SendStreams {
    /// What bulk streams have to send (bytes).
    pub(super) fn waiting(&self) -> u64 {
        self.waiting
    }

    /// How many streams have readers that are not known to have read everything.
    pub(super) fn owing(&self) -> u64 {
        self.owing
    }

    /// The number of the bulk stream whose turn is next, and the place of its next byte.
    pub(super) fn front(&self) -> Option<(StreamId, u64)> {
        let id = *self.ready.front()?;
        Some((id, self.streams.get(&id)?.at))
    }

    /// Bytes of bulk streams whose owners have had more than there was room for since then, as far as they are looked
    /// through.
    pub(super) fn lasting(&self, since: Instant) -> u64 {
        let streams = self.ready.iter().take(MOST_LOOKS).filter_map(|id| self.streams.get(id));
        streams.filter(|stream| stream.lasts_since(since)).map(|stream| stream.bytes as u64).sum()
    }

    /// Makes a stream a bulk stream; returns whether it was none.
    pub(super) fn make_bulk(&mut self, id: StreamId) -> bool {
        let stream = self.streams.entry(id).or_default();
        let new = !std::mem::replace(&mut stream.bulk, true);
        if new {
            self.make_ready(id);
        }
        new
    }

    /// Nobody will write to a bulk stream any more; what was written still leaves.
    pub(super) fn end_bulk(&mut self, id: StreamId) {
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.full = false;
            if stream.wants() == 0 {
                self.remove(id);
            }
        }
    }

    /// Takes bytes that are to be sent.
    pub(super) fn push(&mut self, id: StreamId, data: Bytes) {
        let stream = self.streams.entry(id).or_default();
        stream.bytes += data.len();
        if stream.ready {
            self.waiting += data.len() as u64;
        }
        stream.queue.push_back(data);
    }

    /// Ends a stream after what was written.
    pub(super) fn finish(&mut self, id: StreamId) {
        let stream = self.streams.entry(id).or_default();
        if !std::mem::replace(&mut stream.finish, true) && stream.ready {
            self.waiting += 1;
        }
    }

    /// Lets what was written leave: at once, or in the turn of a bulk stream.
    pub(super) fn written(&mut self, writer: &mut impl StreamWriter, id: StreamId) -> Flushed {
        if self.streams.get(&id).is_some_and(|stream| stream.bulk) {
            self.make_ready(id);
            return Flushed::default();
        }
        self.flush(writer, id, u64::MAX, |_| {})
    }

    /// Writes to a bulk stream past all turns, if it has sent and has to send nothing.
    pub(super) fn announce(&mut self, writer: &mut impl StreamWriter, id: StreamId, data: Bytes) -> Flushed {
        let Some(stream) = self.streams.get_mut(&id) else { return Flushed::default() };
        if !stream.bulk || stream.wants() > 0 || stream.ended {
            return Flushed::default();
        }
        let most = data.len();
        stream.bytes += most;
        stream.queue.push_back(data);
        let flushed = self.flush(writer, id, most as u64, |_| {});
        self.make_ready(id);
        flushed
    }

    /// The peer gives credit for a stream again; returns whether there is such a stream.
    pub(super) fn unblock(&mut self, id: StreamId) -> bool {
        let Some(stream) = self.streams.get_mut(&id) else { return false };
        stream.blocked = false;
        true
    }

    /// The reader of a stream has taken so many bytes; returns whether the stream waited for that.
    pub(super) fn note_read(&mut self, now: Instant, id: StreamId, read: u64) -> bool {
        let Some(stream) = self.streams.get_mut(&id) else { return false };
        stream.reader.note(now, read);
        let restrained = std::mem::take(&mut stream.restrained);
        self.note_owing(id);
        restrained
    }

    /// Something was sent on a stream, or read.
    pub(super) fn note_owing(&mut self, id: StreamId) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        let owes = !stream.reader.has_read(stream.at);
        self.owing = self.owing + u64::from(owes) - u64::from(std::mem::replace(&mut stream.owes, owes));
    }

    /// Bytes written and not yet taken by the library.
    pub(super) fn unsent(&self, id: StreamId) -> usize {
        self.streams.get(&id).map_or(0, |stream| stream.bytes)
    }

    /// Bytes that a bulk stream takes now; after 0 its owner is told by the end of a turn.
    pub(super) fn room(&mut self, id: StreamId) -> usize {
        let Some(stream) = self.streams.get_mut(&id) else { return 0 };
        let room = BULK_QUEUE.saturating_sub(stream.bytes);
        stream.full |= room == 0;
        room
    }

    fn make_ready(&mut self, id: StreamId) {
        if let Some(stream) = self.streams.get_mut(&id)
            && stream.bulk
            && !stream.ready
            && !stream.blocked
            && stream.wants() > 0
        {
            stream.ready = true;
            self.waiting += stream.wants();
            // What has nothing waiting is what people wait for.
            self.ready.push_front(id);
        }
    }

    /// Takes out what was to be sent on a stream.
    pub(super) fn remove(&mut self, id: StreamId) {
        if let Some(stream) = self.forget(id)
            && stream.ready
        {
            self.waiting -= stream.wants();
            self.ready.retain(|other| *other != id);
        }
    }

    /// The same; of its place among those that wait for grants the caller takes care.
    fn forget(&mut self, id: StreamId) -> Option<SendStream> {
        let stream = self.streams.remove(&id)?;
        self.owing -= u64::from(stream.owes);
        Some(stream)
    }

    /// Gives the library at most `most` bytes of a stream, of which `each` is told. The end counts as one byte.
    pub(super) fn flush(
        &mut self,
        writer: &mut impl StreamWriter,
        id: StreamId,
        most: u64,
        mut each: impl FnMut(StreamChunk),
    ) -> Flushed {
        let mut done = Flushed::default();
        let Some(stream) = self.streams.get_mut(&id) else { return done };
        while done.bytes < most
            && let Some(front) = stream.queue.front_mut()
        {
            let some = front.len().min(usize::try_from(most - done.bytes).unwrap_or(usize::MAX));
            let mut rest = front.split_to(some);
            let bytes = rest.clone();
            match writer.write(id, &mut rest) {
                Ok(n) => {
                    done.bytes += n as u64;
                    stream.bytes -= n;
                    each(StreamChunk { stream: id, offset: stream.at, data: bytes.slice(..n), fin: false });
                    stream.at += n as u64;
                    if n == some {
                        if front.is_empty() {
                            stream.queue.pop_front();
                        }
                        continue;
                    }
                }
                Err(noq_proto::WriteError::Blocked) => {}
                // Stopped or reset: nobody wants it any more.
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
        if stream.finish && stream.queue.is_empty() && done.bytes < most {
            (stream.finish, stream.ended) = (false, true);
            writer.finish(id);
            each(StreamChunk { stream: id, offset: stream.at, data: Bytes::new(), fin: true });
            done.bytes += 1;
        }
        if !stream.bulk && stream.wants() == 0 {
            self.forget(id);
        }
        done
    }

    /// The bulk stream whose turn is next in a pass with `left` bytes: one that lasts since then, if that is asked for.
    /// Those that do not are added to `skipped`, for [`Self::return_skipped`].
    pub(super) fn next_turn(
        &mut self,
        now: Instant,
        left: u64,
        lasting_since: Option<Instant>,
        patience: Option<Patience>,
        skipped: &mut Vec<StreamId>,
    ) -> Option<Turn> {
        while left > 0
            && skipped.len() < MOST_LOOKS
            && let Some(id) = self.ready.pop_front()
        {
            let Some(stream) = self.streams.get_mut(&id) else { continue };
            if lasting_since.is_some_and(|since| !stream.lasts_since(since)) {
                skipped.push(id);
                continue;
            }
            let (wanted, was_full) = (stream.wants(), stream.full);
            if was_full {
                stream.crowded.get_or_insert(now);
            }
            let may_send = patience.map_or(u64::MAX, |patience| stream.may_send(patience));
            let most = left.min(TURN).min(may_send);
            if most == 0 {
                (stream.blocked, stream.restrained) = (true, true);
            }
            return Some(Turn { id, most, wanted, was_full });
        }
        None
    }

    /// The turn of a stream is over, in which it has sent so many bytes; `is_read` if this end reads it, too. Returns
    /// whether its owner is to be told that there is room again.
    pub(super) fn end_turn(&mut self, turn: Turn, done: u64, is_read: bool) -> bool {
        let Some(stream) = self.streams.get_mut(&turn.id) else {
            self.waiting = self.waiting.saturating_sub(done);
            return false;
        };
        let has_room = stream.full && stream.bytes <= BULK_QUEUE / 2;
        stream.full &= !has_room;
        let wants = stream.wants();
        if wants == 0 && !turn.was_full {
            stream.crowded = None;
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

    /// Gives streams that were skipped their places back.
    pub(super) fn return_skipped(&mut self, skipped: Vec<StreamId>) {
        skipped.into_iter().rev().for_each(|id| self.ready.push_front(id));
    }
}

#[cfg(test)]
mod tests {
    use mpvpn_types::Duration;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Takes so many bytes of each stream, and remembers what it took.
    #[derive(Default)]
    struct Peer {
        credit: FxHashMap<StreamId, usize>,
        got: Vec<(StreamId, usize)>,
        ended: Vec<StreamId>,
        stopped: Vec<StreamId>,
    }

    impl StreamWriter for Peer {
        fn write(&mut self, id: StreamId, bytes: &mut Bytes) -> Result<usize, noq_proto::WriteError> {
            if self.stopped.contains(&id) {
                return Err(noq_proto::WriteError::Stopped(noq_proto::VarInt::from_u32(0)));
            }
            let credit = self.credit.entry(id).or_insert(usize::MAX);
            let n = bytes.len().min(*credit);
            if n == 0 {
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

    fn bulk(streams: &mut SendStreams, id: StreamId, bytes: usize) {
        streams.make_bulk(id);
        streams.push(id, Bytes::from(vec![0; bytes]));
        streams.written(&mut Peer::default(), id);
    }

    /// What a pass with so many bytes sends, and the streams that have room again.
    fn pass(
        streams: &mut SendStreams,
        peer: &mut Peer,
        now: Instant,
        mut left: u64,
        lasting_since: Option<Instant>,
    ) -> (Vec<(StreamId, usize)>, Vec<StreamId>) {
        let (mut skipped, mut room) = (Vec::new(), Vec::new());
        peer.got.clear();
        while let Some(turn) = streams.next_turn(now, left, lasting_since, None, &mut skipped) {
            let flushed = streams.flush(peer, turn.id, turn.most, |_| {});
            left -= flushed.bytes;
            if streams.end_turn(turn, flushed.bytes, false) {
                room.push(turn.id);
            }
        }
        streams.return_skipped(skipped);
        (std::mem::take(&mut peer.got), room)
    }

    #[test]
    fn what_is_no_bulk_leaves_at_once_and_a_bulk_stream_waits_for_its_turn() {
        let (mut streams, mut peer) = (SendStreams::default(), Peer::default());
        streams.push(0, Bytes::from_static(b"hello"));
        streams.finish(0);
        assert_eq!(streams.written(&mut peer, 0), Flushed { bytes: 6, dropped: false });
        assert_eq!((&peer.got[..], &peer.ended[..]), (&[(0, 5)][..], &[0][..]));
        bulk(&mut streams, 4, 1000);
        assert_eq!((streams.waiting(), streams.unsent(4)), (1000, 1000));
        assert_eq!(pass(&mut streams, &mut peer, Instant::now(), 400, None).0, [(4, 400)]);
        assert_eq!((streams.waiting(), streams.front()), (600, Some((4, 400))));
    }

    #[test]
    fn bulk_streams_take_turns_of_16_kb() {
        let (mut streams, mut peer) = (SendStreams::default(), Peer::default());
        [4, 0].into_iter().for_each(|id| bulk(&mut streams, id, 40_000));
        let turn = TURN as usize;
        let (sent, _) = pass(&mut streams, &mut peer, Instant::now(), 3 * TURN, None);
        assert_eq!(sent, [(0, turn), (4, turn), (0, turn)]);
        let (sent, _) = pass(&mut streams, &mut peer, Instant::now(), u64::MAX, None);
        assert_eq!(sent, [(4, turn), (0, 40_000 - 2 * turn), (4, 40_000 - 2 * turn)]);
        assert_eq!((streams.waiting(), streams.streams.len()), (0, 0), "nobody reads them");
    }

    #[test]
    fn what_the_peer_does_not_take_is_sent_when_it_gives_credit() {
        let (mut streams, mut peer) = (SendStreams::default(), Peer::default());
        peer.credit.insert(0, 300);
        bulk(&mut streams, 0, 1000);
        streams.finish(0);
        assert_eq!(pass(&mut streams, &mut peer, Instant::now(), 5000, None).0, [(0, 300)]);
        assert_eq!((streams.waiting(), streams.unsent(0)), (0, 700), "it is blocked");
        peer.credit.insert(0, usize::MAX);
        assert!(streams.unblock(0) && !streams.unblock(4));
        streams.written(&mut peer, 0);
        assert_eq!(streams.waiting(), 701);
        assert_eq!(pass(&mut streams, &mut peer, Instant::now(), 5000, None).0, [(0, 700)]);
        assert_eq!(peer.ended, [0]);
    }

    #[test]
    fn what_the_peer_stopped_is_dropped() {
        let (mut streams, mut peer) = (SendStreams::default(), Peer::default());
        peer.stopped.push(0);
        [4, 0].into_iter().for_each(|id| bulk(&mut streams, id, 1000));
        let flushed = streams.flush(&mut peer, 0, 100, |_| {});
        assert_eq!((flushed, streams.waiting()), (Flushed { bytes: 0, dropped: true }, 1000));
        assert_eq!(pass(&mut streams, &mut peer, Instant::now(), 5000, None).0, [(4, 1000)]);
    }

    #[test]
    fn an_owner_that_found_no_room_is_told_when_half_is_free() {
        let (mut streams, mut peer, now) = (SendStreams::default(), Peer::default(), Instant::now());
        bulk(&mut streams, 0, BULK_QUEUE);
        assert_eq!(streams.room(0), 0);
        let half = BULK_QUEUE as u64 / 2;
        assert_eq!(pass(&mut streams, &mut peer, now, half - TURN, None).1, []);
        assert_eq!(pass(&mut streams, &mut peer, now, TURN, None).1, [0]);
        assert_eq!(streams.room(0), BULK_QUEUE / 2);
    }

    #[test]
    fn only_streams_that_last_leave_on_a_late_path_and_others_keep_their_places() {
        let (mut streams, mut peer, start) = (SendStreams::default(), Peer::default(), Instant::now());
        [8, 4, 0].into_iter().for_each(|id| bulk(&mut streams, id, BULK_QUEUE));
        // The owner of the second has more than there is room for.
        assert_eq!(streams.room(4), 0);
        pass(&mut streams, &mut peer, start, 3 * TURN, None);
        let since = start + 10 * MS;
        assert_eq!(
            (streams.lasting(since), streams.lasting(start)),
            (streams.unsent(4) as u64, streams.unsent(4) as u64)
        );
        let (sent, _) = pass(&mut streams, &mut peer, start + 20 * MS, 2 * TURN, Some(since));
        assert_eq!(sent, [(4, TURN as usize); 2]);
        assert_eq!(streams.front().map(|(id, _)| id), Some(0));
    }

    #[test]
    fn a_reader_that_does_not_read_is_sent_no_more_until_it_does() {
        let (mut streams, mut peer, start) = (SendStreams::default(), Peer::default(), Instant::now());
        let patience = Patience::new(20 * MS, 1);
        streams.make_bulk(0);
        let (mut sent, mut skipped) = (0, Vec::new());
        loop {
            streams.push(0, Bytes::from(vec![0; TURN as usize]));
            streams.written(&mut peer, 0);
            let Some(turn) = streams.next_turn(start, u64::MAX, None, Some(patience), &mut skipped) else {
                break;
            };
            let flushed = streams.flush(&mut peer, 0, turn.most, |_| {});
            streams.end_turn(turn, flushed.bytes, true);
            streams.note_owing(0);
            sent += flushed.bytes;
            assert!(sent < 8 << 20, "{sent} bytes to who does not read");
        }
        assert_eq!((streams.owing(), streams.waiting()), (1, 0));
        assert!(streams.note_read(start + MS, 0, sent));
        assert_eq!(streams.owing(), 0);
        assert!(streams.unblock(0));
        streams.written(&mut peer, 0);
        assert!(streams.waiting() > 0);
    }
}
