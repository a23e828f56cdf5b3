//! Bytes of streams: those that say how the connection is used leave at once, on any path. Those of bulk streams leave
//! only as paths are granted to them, and so on the path that they were granted.
//!
//! Bytes are taken from the streams when a path's pass begins, not when it is granted: passes have another order than
//! grants, and bytes of a stream must leave in theirs.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use bytes::{Buf, Bytes};
use mpvpn_types::{Instant, PathId};
use rustc_hash::FxHashMap;

use super::{
    Connection, Event,
    kept::Kept,
    readers::{Patience, Reader, URGENT},
};
use crate::{
    Read, StreamError, StreamId,
    streams::{from_noq, to_noq},
};

/// Bytes that wait in a bulk stream before its owner is told that there is no room.
pub(super) const BULK_QUEUE: usize = 256 << 10;
/// Bytes of all bulk streams that may be held because others are missing before them: the peer's credit bounds what it
/// sends in one round trip, not what comes while something is lost again and again.
const MOST_HELD: usize = 8 << 20;
/// Streams whose first bytes are rescued before the stream is there.
const MOST_EARLY: usize = 256;
/// What holding some bytes takes beside them.
const HOLDING: usize = 128;

/// What waits to be sent on one stream.
#[derive(Debug, Default)]
pub(super) struct Outbound {
    queue: VecDeque<Bytes>,
    /// Bytes in it.
    pub(super) bytes: usize,
    /// Where the first of them is in the stream.
    pub(super) at: u64,
    finish: bool,
    /// The end was sent.
    ended: bool,
    /// Leaves as paths are granted.
    bulk: bool,
    /// Has a place among those that wait for grants.
    pub(super) ready: bool,
    /// The peer gives no credit for now, or its reader is not to have more.
    pub(super) blocked: bool,
    /// The owner found no room.
    pub(super) full: bool,
    /// Since when the owner has always had more than there was room for.
    pub(super) crowded: Option<Instant>,
    reader: Reader,
    /// Blocked because of its reader.
    pub(super) restrained: bool,
    /// Something was sent that is not known to have been read.
    owes: bool,
}

impl Outbound {
    /// What it takes to send it all: the end counts as one byte.
    pub(super) fn wants(&self) -> u64 {
        self.bytes as u64 + u64::from(self.finish)
    }

    /// Bytes that may be sent now.
    pub(super) fn may_send(&self, patience: Patience) -> u64 {
        self.reader.limit(patience).saturating_sub(self.at)
    }

    /// Whether its owner has had more than there was room for since then.
    pub(super) fn lasts_since(&self, since: Instant) -> bool {
        self.crowded.is_some_and(|crowded| crowded <= since)
    }
}

/// What arrives on one bulk stream.
#[derive(Debug)]
pub(super) struct Inbound {
    /// Where the next byte for the owner is.
    pub(super) next: u64,
    /// Bytes that are not next, by where they begin; they may overlap.
    pub(super) held: BTreeMap<u64, Bytes>,
    /// Memory for them (bytes).
    bytes: usize,
    /// Where the stream ends, as far as [`Connection::rescue`] was told.
    end: Option<u64>,
    /// The owner found nothing, and nothing has come since.
    pub(super) waits: bool,
    /// Has a place among those whose progress is to be told.
    pub(super) queued: bool,
    /// What was told of `next` last.
    pub(super) told: u64,
}

impl Inbound {
    fn new(next: u64) -> Self {
        Self { next, held: BTreeMap::new(), bytes: 0, end: None, waits: true, queued: false, told: 0 }
    }
}

/// Bytes of a bulk stream that are on their way on a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Which stream.
    pub stream: StreamId,
    /// Where in it they are.
    pub at: u64,
    /// The bytes.
    pub bytes: Bytes,
    /// The stream ends after them.
    pub ends: bool,
}

/// All streams of a connection.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    pub(super) outbound: FxHashMap<StreamId, Outbound>,
    pub(super) inbound: FxHashMap<StreamId, Inbound>,
    /// Streams of the peer's that are not bulk streams yet, of which bytes were rescued.
    early: BTreeSet<StreamId>,
    /// Bidirectional streams of the peer's that are read in order so far.
    fresh: BTreeSet<StreamId>,
    /// The peer's bidirectional streams that were ever opened.
    opened: u64,
    /// Both ends tell each other how far streams have come.
    pub(super) progress: bool,
    /// Streams whose progress is to be told, and whether that is urgent.
    pub(super) to_tell: VecDeque<StreamId>,
    pub(super) urgent: bool,
    pub(super) kept: Kept,
    /// Bulk streams with something to send that the peer gives credit for.
    pub(super) ready: VecDeque<StreamId>,
    /// What they have to send (bytes).
    pub(super) waiting: u64,
    /// Bytes that are lost, and may be of streams: the library sends them again as soon as it may.
    pub(super) lost: u64,
    /// Bytes that paths have been granted for their next passes.
    pub(super) granted: u64,
    /// Bulk streams that are open in some direction.
    bulk: usize,
    /// Those whose readers are not known to have read everything.
    owing: u64,
    /// Memory for what is held in all of them (bytes).
    held: usize,
    /// How often the pass may go on with more credit than was reckoned.
    pub(super) prolong: u32,
}

impl Streams {
    /// Packets with so many bytes were lost.
    pub(super) fn note_lost(&mut self, bytes: u64) {
        if bytes > 0 && self.bulk > 0 {
            self.lost += bytes;
        }
    }

    /// A path is gone that had been granted so much.
    pub(super) fn forget_grant(&mut self, bytes: u64) {
        self.granted = self.granted.saturating_sub(bytes);
    }

    fn make_ready(&mut self, id: StreamId) {
        if let Some(out) = self.outbound.get_mut(&id)
            && out.bulk
            && !out.ready
            && !out.blocked
            && out.wants() > 0
        {
            out.ready = true;
            self.waiting += out.wants();
            // What has nothing waiting is what people wait for.
            self.ready.push_front(id);
        }
    }

    /// A stream that is not a bulk stream is over.
    fn forget_fresh(&mut self, id: StreamId) {
        self.fresh.remove(&id);
        if self.early.contains(&id) {
            self.forget_inbound(id);
        }
    }

    fn forget_inbound(&mut self, id: StreamId) -> Option<Inbound> {
        let inbound = self.inbound.remove(&id)?;
        self.held -= inbound.bytes;
        self.early.remove(&id);
        Some(inbound)
    }

    /// The peer has opened streams up to this one.
    pub(super) fn note_opened(&mut self, id: StreamId) {
        if is_bidirectional(id) {
            self.opened = self.opened.max((id >> 2) + 1);
            self.fresh.insert(id);
        }
    }

    /// Something has come on a stream; what, is seen when its owner reads.
    pub(super) fn note_readable(&mut self, id: StreamId) {
        if let Some(inbound) = self.inbound.get_mut(&id).filter(|inbound| inbound.waits) {
            inbound.waits = false;
            self.tell(id);
        }
    }

    pub(super) fn tell(&mut self, id: StreamId) {
        if self.progress
            && let Some(inbound) = self.inbound.get_mut(&id)
            && !std::mem::replace(&mut inbound.queued, true)
        {
            self.to_tell.push_back(id);
        }
    }

    fn remove_outbound(&mut self, id: StreamId) {
        if let Some(out) = self.forget(id)
            && out.ready
        {
            self.waiting -= out.wants();
            self.ready.retain(|other| *other != id);
        }
    }

    /// Takes out what was to be sent on a stream; of its place among those that wait for grants the caller takes care.
    pub(super) fn forget(&mut self, id: StreamId) -> Option<Outbound> {
        let out = self.outbound.remove(&id)?;
        self.owing -= u64::from(out.owes);
        Some(out)
    }

    /// Something was sent on a stream, or read.
    pub(super) fn note_owing(&mut self, id: StreamId) {
        let Some(out) = self.outbound.get_mut(&id) else { return };
        let owes = !out.reader.has_read(out.at);
        self.owing = self.owing + u64::from(owes) - u64::from(std::mem::replace(&mut out.owes, owes));
    }
}

/// What [`Connection::read_bulk`] stopped at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadEnd {
    /// There may be more.
    More,
    /// There is no more for now.
    Blocked,
    /// The peer has ended the stream.
    Finished,
    /// The peer has reset the stream with this code.
    Reset(u64),
}

impl Connection {
    /// Opens a stream that only this end writes.
    ///
    /// # Errors
    /// If the peer allows no more.
    pub fn open_uni(&mut self) -> Result<StreamId, StreamError> {
        self.inner.streams().open(noq_proto::Dir::Uni).map(from_noq).ok_or(StreamError::Limit)
    }

    /// Opens a stream that both ends write.
    ///
    /// # Errors
    /// If the peer allows no more; [`Event::StreamsAvailable`] follows.
    pub fn open_bi(&mut self) -> Result<StreamId, StreamError> {
        self.inner.streams().open(noq_proto::Dir::Bi).map(from_noq).ok_or(StreamError::Limit)
    }

    /// Makes a stream one whose bytes leave as paths are granted ([`Self::grant`]), and are read by
    /// [`Self::read_bulk`]. Until [`Self::end_bulk`] says that it is over.
    pub fn make_bulk(&mut self, id: StreamId) {
        let out = self.streams.outbound.entry(id).or_default();
        if !out.bulk {
            out.bulk = true;
            self.streams.bulk += 1;
            self.streams.make_ready(id);
        }
        // What was read before was read in order.
        let next = self.inner.recv_stream(to_noq(id)).bytes_read().unwrap_or(0);
        self.streams.inbound.entry(id).or_insert_with(|| Inbound::new(next));
        self.streams.early.remove(&id);
        self.streams.fresh.remove(&id);
    }

    /// Nobody will read or write a bulk stream any more; what was written still leaves.
    pub fn end_bulk(&mut self, id: StreamId) {
        if let Some(inbound) = self.streams.forget_inbound(id)
            && inbound.end == Some(inbound.next)
        {
            // What was rescued may still come a second time, and nobody will read it.
            self.stop(id, 0);
        }
        if let Some(out) = self.streams.outbound.get_mut(&id) {
            out.full = false;
            if out.wants() == 0 {
                self.streams.remove_outbound(id);
            }
        }
        self.streams.bulk = self.streams.bulk.saturating_sub(1);
    }

    /// Writes to a stream. What flow control holds back is sent later.
    pub fn write(&mut self, id: StreamId, data: Bytes) {
        let out = self.streams.outbound.entry(id).or_default();
        out.bytes += data.len();
        if out.ready {
            self.streams.waiting += data.len() as u64;
        }
        out.queue.push_back(data);
        self.written(id);
    }

    /// Ends a stream after what was written.
    pub fn finish(&mut self, id: StreamId) {
        let out = self.streams.outbound.entry(id).or_default();
        if !std::mem::replace(&mut out.finish, true) && out.ready {
            self.streams.waiting += 1;
        }
        self.written(id);
    }

    fn written(&mut self, id: StreamId) {
        if self.streams.outbound.get(&id).is_some_and(|out| out.bulk) {
            self.streams.make_ready(id);
        } else {
            self.flush(id, u64::MAX, |_| {});
        }
    }

    /// Gives a stream up in the direction that this end writes.
    pub fn reset(&mut self, id: StreamId, code: u64) {
        self.drop_writes(id);
        let code = noq_proto::VarInt::from_u64(code).unwrap_or(noq_proto::VarInt::from_u32(0));
        // A stream that is closed already needs no reset.
        let _ = self.inner.send_stream(to_noq(id)).reset(code);
    }

    /// Asks the peer to send nothing more on a stream.
    pub fn stop(&mut self, id: StreamId, code: u64) {
        let code = noq_proto::VarInt::from_u64(code).unwrap_or(noq_proto::VarInt::from_u32(0));
        let _ = self.inner.recv_stream(to_noq(id)).stop(code);
        self.streams.forget_fresh(id);
    }

    /// Writes to a stream of this end whose first bytes are on their way as [`Self::rescue`] takes them, past all
    /// grants: with these the peer learns that there is such a stream.
    pub fn announce(&mut self, id: StreamId, data: Bytes) {
        let Some(out) = self.streams.outbound.get_mut(&id) else { return };
        if !out.bulk || out.wants() > 0 || out.ended {
            return;
        }
        let most = data.len();
        out.bytes += most;
        out.queue.push_back(data);
        self.flush(id, most as u64, |_| {});
        self.streams.make_ready(id);
    }

    /// Forgets what was to be sent on a stream.
    pub(super) fn drop_writes(&mut self, id: StreamId) {
        self.streams.remove_outbound(id);
        self.streams.kept.forget(id);
    }

    /// The peer gives credit for a stream again.
    pub(super) fn unblock(&mut self, id: StreamId) {
        let Some(out) = self.streams.outbound.get_mut(&id) else { return };
        out.blocked = false;
        self.written(id);
    }

    /// How far ahead of their readers streams may be now.
    pub(super) fn patience(&self) -> Patience {
        let rtts = self.paths.iter().filter_map(|path| self.inner.rtt(noq_proto::PathId::from(path.id.0)));
        Patience::new(rtts.max().unwrap_or_default(), self.streams.owing)
    }

    /// The reader of a stream has taken so many bytes.
    pub(super) fn note_read(&mut self, now: Instant, id: StreamId, read: u64) {
        let Some(out) = self.streams.outbound.get_mut(&id) else { return };
        out.reader.note(now, read);
        let restrained = std::mem::take(&mut out.restrained);
        self.streams.note_owing(id);
        if restrained {
            self.unblock(id);
        }
    }

    /// Gives the library at most `most` bytes of a stream, of which `each` is told; returns how many. The end counts
    /// as one byte.
    pub(super) fn flush(&mut self, id: StreamId, most: u64, mut each: impl FnMut(Piece)) -> u64 {
        let Some(out) = self.streams.outbound.get_mut(&id) else { return 0 };
        let mut stream = self.inner.send_stream(to_noq(id));
        let mut done = 0;
        while done < most
            && let Some(front) = out.queue.front_mut()
        {
            let some = front.len().min(usize::try_from(most - done).unwrap_or(usize::MAX));
            let mut piece = [front.split_to(some)];
            let bytes = piece[0].clone();
            let taken = stream.write_chunks(&mut &mut piece[..]);
            let [rest] = piece;
            match taken {
                Ok(n) => {
                    done += n as u64;
                    out.bytes -= n;
                    each(Piece { stream: id, at: out.at, bytes: bytes.slice(..n), ends: false });
                    out.at += n as u64;
                    if n == some {
                        if front.is_empty() {
                            out.queue.pop_front();
                        }
                        continue;
                    }
                }
                Err(noq_proto::WriteError::Blocked) => {}
                // Stopped or reset: nobody wants it any more.
                Err(_) => {
                    self.drop_writes(id);
                    return done;
                }
            }
            // What was not taken comes first the next time.
            let back = std::mem::take(front);
            out.queue.pop_front();
            if !back.is_empty() {
                out.queue.push_front(back);
            }
            if !rest.is_empty() {
                out.queue.push_front(rest);
            }
            out.blocked = true;
            return done;
        }
        if out.finish && out.queue.is_empty() && done < most {
            (out.finish, out.ended) = (false, true);
            // A stream that the peer stopped is as finished as it gets.
            let _ = stream.finish();
            each(Piece { stream: id, at: out.at, bytes: Bytes::new(), ends: true });
            done += 1;
        }
        if !out.bulk && out.wants() == 0 {
            self.streams.forget(id);
        }
        done
    }

    /// Bytes written and not yet taken by the transport.
    pub fn unsent(&self, id: StreamId) -> usize {
        self.streams.outbound.get(&id).map_or(0, |out| out.bytes)
    }

    /// Bytes that a bulk stream takes now; after 0, [`Event::StreamWritable`] follows.
    pub fn stream_room(&mut self, id: StreamId) -> usize {
        let Some(out) = self.streams.outbound.get_mut(&id) else { return 0 };
        let room = BULK_QUEUE.saturating_sub(out.bytes);
        out.full |= room == 0;
        room
    }

    /// Takes the bytes of bulk streams that are on their way on a path, which is dead. What the library had sent again
    /// there is not among them.
    pub fn take_unsettled(&mut self, now: Instant, id: PathId) -> Vec<Piece> {
        let Some(path) = self.path_mut(id) else { return Vec::new() };
        path.settle();
        let pieces: Vec<Piece> = std::mem::take(&mut path.sent).into_iter().map(|(_, piece)| piece).collect();
        pieces.iter().for_each(|piece| self.streams.kept.note_again(now, piece));
        pieces
    }

    /// Whether bytes of streams may be on their way on a path that had been lost before: those are not among the
    /// unsettled, and the library repeats them only when they are lost again, or the path is closed.
    pub fn may_hold_repeated(&self, id: PathId) -> bool {
        self.path(id).is_some_and(|path| path.repeated.is_some_and(|at| at >= path.gate.acked_sent()))
    }

    /// Bytes of a bulk stream have come on another way than in the stream. They are dropped where too much is held:
    /// they come in the stream as well.
    pub fn rescue(&mut self, piece: Piece) {
        if !self.streams.inbound.contains_key(&piece.stream) && self.is_beginning(piece.stream) {
            let next = self.inner.recv_stream(to_noq(piece.stream)).bytes_read().unwrap_or(0);
            self.streams.inbound.insert(piece.stream, Inbound::new(next));
            self.streams.early.insert(piece.stream);
        }
        let Some(inbound) = self.streams.inbound.get_mut(&piece.stream) else { return };
        if piece.at > inbound.next && self.streams.held > MOST_HELD {
            return;
        }
        if piece.ends {
            inbound.end = Some(piece.at + piece.bytes.len() as u64);
        }
        let before = inbound.bytes;
        inbound.hold(piece.at, &piece.bytes);
        self.streams.held = self.streams.held + inbound.bytes - before;
        self.events.push_back(Event::StreamReadable(piece.stream));
    }

    /// Whether a stream is one of the peer's that is not opened yet, or read in order so far: its beginning may come
    /// another way.
    fn is_beginning(&mut self, id: StreamId) -> bool {
        let own = self.inner.side().is_client() == id.is_multiple_of(2);
        if own || !is_bidirectional(id) || self.streams.early.len() >= MOST_EARLY {
            return false;
        }
        let ahead = (id >> 2).checked_sub(self.streams.opened);
        ahead.is_some_and(|ahead| ahead < MOST_EARLY as u64) || self.streams.fresh.contains(&id)
    }

    /// Whether streams are open whose bytes leave as paths are granted.
    pub fn has_bulk(&self) -> bool {
        self.streams.bulk > 0
    }

    /// Looks for lost packets, whose bytes of streams are to be sent again.
    pub(super) fn note_losses(&mut self) {
        if self.streams.bulk == 0 {
            return;
        }
        for path in &mut self.paths {
            let Some(stats) = self.inner.path_stats(noq_proto::PathId::from(path.id.0)) else { continue };
            self.streams.note_lost(path.newly_lost(stats.lost_bytes));
        }
    }

    /// Reads the next bytes of a stream that is not a bulk stream.
    pub fn read(&mut self, id: StreamId) -> Read {
        let read = match self.streams.early.contains(&id) {
            true => self.read_early(id),
            false => self.read_in_order(id),
        };
        if matches!(read, Read::Finished | Read::Reset(_)) {
            self.streams.forget_fresh(id);
        }
        read
    }

    fn read_in_order(&mut self, id: StreamId) -> Read {
        let mut stream = self.inner.recv_stream(to_noq(id));
        let mut chunks = match stream.read(true) {
            Ok(chunks) => chunks,
            Err(_) => return Read::Blocked,
        };
        let read = match chunks.next(64 << 10) {
            Ok(Some(chunk)) => Read::Data(chunk.bytes),
            Ok(None) => Read::Finished,
            Err(noq_proto::ReadError::Blocked) => Read::Blocked,
            Err(noq_proto::ReadError::Reset(code)) => Read::Reset(code.into()),
        };
        // Credit that reading gives back to the peer leaves with the next control pass.
        let _ = chunks.finalize();
        read
    }

    /// The same for one of which bytes were rescued.
    fn read_early(&mut self, id: StreamId) -> Read {
        let mut read = Vec::new();
        let end = self.read_bulk(id, 1, |bytes| read.push(bytes));
        match end {
            _ if !read.is_empty() => Read::Data(read.concat().into()),
            ReadEnd::More | ReadEnd::Blocked => Read::Blocked,
            ReadEnd::Finished => Read::Finished,
            ReadEnd::Reset(code) => Read::Reset(code),
        }
    }

    /// Hands out the next bytes of a bulk stream, in order: about `most`.
    pub fn read_bulk(&mut self, id: StreamId, most: usize, mut out: impl FnMut(Bytes)) -> ReadEnd {
        let Some(inbound) = self.streams.inbound.get_mut(&id) else { return ReadEnd::Blocked };
        let mut stream = self.inner.recv_stream(to_noq(id));
        let mut chunks = match stream.read(false) {
            Ok(chunks) => chunks,
            Err(_) => return ReadEnd::Blocked,
        };
        let (before, others) = (inbound.bytes, self.streams.held - inbound.bytes);
        let waited = inbound.waits;
        let mut read = inbound.next_held(most, &mut out);
        let end = loop {
            if inbound.end == Some(inbound.next) {
                break ReadEnd::Finished;
            }
            if read >= most {
                break ReadEnd::More;
            }
            // Taking nothing tells where the next chunk is.
            if inbound.bytes + others > MOST_HELD
                && chunks.next(0).is_ok_and(|chunk| chunk.is_some_and(|chunk| chunk.offset > inbound.next))
            {
                break ReadEnd::Blocked;
            }
            match chunks.next(usize::MAX) {
                Ok(Some(chunk)) => {
                    read += inbound.take(chunk.offset, chunk.bytes, &mut out);
                    read += inbound.next_held(most.saturating_sub(read), &mut out);
                }
                Ok(None) => break ReadEnd::Finished,
                Err(noq_proto::ReadError::Blocked) => break ReadEnd::Blocked,
                Err(noq_proto::ReadError::Reset(code)) => break ReadEnd::Reset(code.into()),
            }
        };
        // Credit that reading gives back to the peer leaves with the next control pass.
        let _ = chunks.finalize();
        self.streams.held = self.streams.held + inbound.bytes - before;
        inbound.waits = end == ReadEnd::Blocked;
        self.streams.urgent |= inbound.next >= inbound.told + URGENT;
        if read > 0 || inbound.waits && (!waited || !inbound.held.is_empty()) {
            self.streams.tell(id);
        }
        end
    }
}

impl Inbound {
    /// Keeps bytes that are not next, if they are new.
    fn hold(&mut self, at: u64, bytes: &Bytes) {
        let longer = self.held.get(&at).is_none_or(|held| held.len() < bytes.len());
        if at + bytes.len() as u64 > self.next && longer {
            // A copy: the buffer behind it is of many packets.
            let before = self.held.insert(at, Bytes::copy_from_slice(bytes));
            self.bytes += bytes.len() + HOLDING - before.map_or(0, |before| before.len() + HOLDING);
        }
    }

    /// Hands out about `most` bytes of what is held and next; returns how many.
    fn next_held(&mut self, most: usize, out: &mut impl FnMut(Bytes)) -> usize {
        let mut taken = 0;
        while taken < most
            && let Some(entry) = self.held.first_entry()
            && *entry.key() <= self.next
        {
            let (at, bytes) = entry.remove_entry();
            self.bytes -= bytes.len() + HOLDING;
            taken += self.hand_out(at, bytes, out);
        }
        taken
    }

    /// Hands out those of `bytes`, which do not begin behind what is next, that were not handed out before.
    fn hand_out(&mut self, at: u64, mut bytes: Bytes, out: &mut impl FnMut(Bytes)) -> usize {
        let known = usize::try_from(self.next - at).unwrap_or(usize::MAX);
        if known >= bytes.len() {
            return 0;
        }
        bytes.advance(known);
        let taken = bytes.len();
        self.next += taken as u64;
        out(bytes);
        taken
    }

    /// Takes bytes, and hands out those that are next; returns how many.
    fn take(&mut self, at: u64, bytes: Bytes, out: &mut impl FnMut(Bytes)) -> usize {
        if at > self.next {
            self.hold(at, &bytes);
            return 0;
        }
        self.hand_out(at, bytes, out)
    }
}

/// Whether both ends write to a stream (RFC 9000 §2.1).
fn is_bidirectional(id: StreamId) -> bool {
    id & 2 == 0
}

impl super::Path {
    /// Of the bytes that were ever lost here, those since this was asked last.
    pub(super) fn newly_lost(&mut self, all: u64) -> u64 {
        all - std::mem::replace(&mut self.lost, all)
    }

    /// Forgets the bytes of streams that have arrived here, or were found lost and are sent again: those before the
    /// newest that was acknowledged.
    pub(super) fn settle(&mut self) {
        let newest = self.gate.acked_sent();
        while self.sent.pop_front_if(|(sent, _)| *sent < newest).is_some() {}
    }
}

#[cfg(test)]
mod tests {
    use mpvpn_types::LinkId;

    use super::*;
    use crate::{Endpoint, Local, connection::fault::tests::setup};

    #[test]
    fn what_a_peer_rescues_without_end_is_not_kept_without_end() {
        let setup = setup();
        let mut endpoint = Endpoint::client(&setup);
        let (now, remote) = (Instant::now(), "192.0.2.1:443".parse().unwrap());
        let id = endpoint.connect(now, &setup, Local::link(LinkId(0)), remote, "mpvpn").unwrap();
        let connection = endpoint.get(id).unwrap();
        for stream in [0, 4] {
            connection.make_bulk(stream);
            for at in 0..100_000 {
                let bytes = Bytes::from_static(b"x");
                connection.rescue(Piece { stream, at: 1 + 2 * at, bytes, ends: false });
            }
        }
        assert!(connection.streams.held <= MOST_HELD + 1 + HOLDING, "{} bytes", connection.streams.held);
        let pieces: usize = connection.streams.inbound.values().map(|inbound| inbound.held.len()).sum();
        assert!((10_000..100_000).contains(&pieces), "{pieces} pieces");
        // What is next is taken all the same.
        connection.rescue(Piece { stream: 4, at: 0, bytes: Bytes::from_static(b"first"), ends: false });
        assert_eq!(connection.streams.inbound[&4].held[&0], &b"first"[..]);
    }

    #[test]
    fn bytes_come_out_once_and_in_order_whatever_way_they_came() {
        let mut inbound = Inbound::new(0);
        let all: Vec<u8> = (0..200).collect();
        let mut got = Vec::new();
        let mut give = |at: usize, len: usize, rescued: bool| {
            let bytes = Bytes::copy_from_slice(&all[at..at + len]);
            let mut out = |bytes: Bytes| got.extend_from_slice(&bytes);
            if rescued {
                inbound.hold(at as u64, &bytes);
                inbound.next_held(1000, &mut out);
            } else {
                inbound.take(at as u64, bytes, &mut out);
                inbound.next_held(1000, &mut out);
            }
            inbound.bytes
        };
        give(10, 20, false);
        give(25, 20, true);
        give(10, 5, true);
        assert_eq!(give(10, 30, true), 50 + 2 * HOLDING, "the longer one");
        assert_eq!(give(0, 10, false), 0);
        assert_eq!(give(5, 10, true), 0, "known");
        give(60, 10, true);
        assert_eq!(give(44, 100, false), 0);
        assert_eq!(give(144, 56, true), 0);
        assert_eq!(got, all);
    }
}
