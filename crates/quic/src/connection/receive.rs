//! What arrives on bulk streams, put in order.
//!
//! In: chunks of the library in any order, and bytes that came past it on another path. Out: the bytes in order, and how far
//! each stream has come, for the far end. Always holds: every byte is handed out once; what is held because others are
//! missing before it is bounded, for all streams together.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use bytes::{Buf, Bytes};
use rustc_hash::FxHashMap;

use super::{DataAck, ReadStatus, StreamChunk, readers::URGENT};
use crate::StreamId;

/// Bytes of all bulk streams that may be held because others are missing before them: the peer's credit bounds what it
/// sends in one round trip, not what comes while something is lost again and again.
const MOST_HELD: usize = 8 << 20;
/// Streams whose first bytes come another way before the stream is there.
const MOST_EARLY: usize = 256;
/// What holding some bytes takes beside them.
const HOLDING: usize = 128;
/// Gaps of a stream that are told at a time, and the held pieces that are looked through for them.
const MOST_GAPS: usize = 16;
const MOST_LOOKS: usize = 512;

/// The chunks of one stream that the library has, in any order.
pub(super) trait ChunkReader {
    /// The next chunk of at most `most` bytes; `None` at the end of the stream.
    fn next(&mut self, most: usize) -> Result<Option<noq_proto::Chunk>, noq_proto::ReadError>;
}

impl ChunkReader for noq_proto::Chunks<'_> {
    fn next(&mut self, most: usize) -> Result<Option<noq_proto::Chunk>, noq_proto::ReadError> {
        Self::next(self, most)
    }
}

/// What arrives on one bulk stream.
#[derive(Debug)]
struct ReceiveStream {
    /// Where the next byte for the owner is.
    next: u64,
    /// Bytes that are not next, by where they begin; they may overlap.
    held: BTreeMap<u64, Bytes>,
    /// Memory for them (bytes).
    bytes: usize,
    /// Where the stream ends, as far as bytes that came another way said.
    end: Option<u64>,
    /// The owner found nothing, and nothing has come since.
    waits: bool,
    /// Has a place among those whose progress is to be told.
    queued: bool,
    /// What was told of `next` last.
    told: u64,
}

impl ReceiveStream {
    fn new(next: u64) -> Self {
        Self { next, held: BTreeMap::new(), bytes: 0, end: None, waits: true, queued: false, told: 0 }
    }

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

    /// The gaps before what is held.
    fn gaps(&self) -> Vec<(u64, u64)> {
        let (mut end, mut gaps) = (self.next, Vec::new());
        for (at, bytes) in self.held.iter().take(MOST_LOOKS) {
            if *at > end {
                if gaps.len() == MOST_GAPS {
                    break;
                }
                gaps.push((end, at - end));
            }
            end = end.max(at + bytes.len() as u64);
        }
        gaps
    }
}

/// What arrives on all streams of a connection.
#[derive(Debug, Default)]
pub(super) struct ReceiveStreams {
    streams: FxHashMap<StreamId, ReceiveStream>,
    /// Streams of the peer's that are not bulk streams yet, of which bytes came another way.
    early: BTreeSet<StreamId>,
    /// Bidirectional streams of the peer's that are read in order so far.
    fresh: BTreeSet<StreamId>,
    /// The peer's bidirectional streams that were ever opened.
    opened: u64,
    /// Memory for what is held in all of them (bytes).
    held: usize,
    /// Both ends tell each other how far streams have come.
    tells: bool,
    /// Streams whose progress is to be told, and whether that is urgent.
    to_tell: VecDeque<StreamId>,
    urgent: bool,
}

impl ReceiveStreams {
    /// Makes a stream a bulk stream, of which `read` bytes were read in order before.
    pub(super) fn make_bulk(&mut self, id: StreamId, read: u64) {
        self.streams.entry(id).or_insert_with(|| ReceiveStream::new(read));
        self.early.remove(&id);
        self.fresh.remove(&id);
    }

    /// Nobody will read a bulk stream any more; returns whether the peer is to be asked to stop: all of it was read, but
    /// what came another way may still come a second time.
    pub(super) fn end_bulk(&mut self, id: StreamId) -> bool {
        self.forget(id).is_some_and(|stream| stream.end == Some(stream.next))
    }

    /// Whether a stream is read here.
    pub(super) fn contains(&self, id: StreamId) -> bool {
        self.streams.contains_key(&id)
    }

    /// Whether a stream is none of bulk, of which bytes came another way.
    pub(super) fn is_early(&self, id: StreamId) -> bool {
        self.early.contains(&id)
    }

    /// A stream that is not a bulk stream is over.
    pub(super) fn end_ordered(&mut self, id: StreamId) {
        self.fresh.remove(&id);
        if self.early.contains(&id) {
            self.forget(id);
        }
    }

    fn forget(&mut self, id: StreamId) -> Option<ReceiveStream> {
        let stream = self.streams.remove(&id)?;
        self.held -= stream.bytes;
        self.early.remove(&id);
        Some(stream)
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
        if let Some(stream) = self.streams.get_mut(&id).filter(|stream| stream.waits) {
            stream.waits = false;
            self.tell(id);
        }
    }

    /// Takes bytes of a stream that came another way than in it; returns whether there may be something to read. They are
    /// dropped where too much is held: they come in the stream as well. `own` says whether this end opened the stream,
    /// `read` how many of its bytes were read in order.
    pub(super) fn take_reinjected(
        &mut self,
        piece: &StreamChunk,
        own: bool,
        read: impl FnOnce() -> u64,
    ) -> bool {
        let id = piece.stream;
        if !self.streams.contains_key(&id) && !own && self.is_beginning(id) {
            self.streams.insert(id, ReceiveStream::new(read()));
            self.early.insert(id);
        }
        let Some(stream) = self.streams.get_mut(&id) else { return false };
        if piece.offset > stream.next && self.held > MOST_HELD {
            return false;
        }
        if piece.fin {
            stream.end = Some(piece.offset + piece.data.len() as u64);
        }
        let before = stream.bytes;
        stream.hold(piece.offset, &piece.data);
        self.held = self.held + stream.bytes - before;
        true
    }

    /// Whether a stream of the peer's is not opened yet, or read in order so far: its beginning may come another way.
    fn is_beginning(&self, id: StreamId) -> bool {
        if !is_bidirectional(id) || self.early.len() >= MOST_EARLY {
            return false;
        }
        let ahead = (id >> 2).checked_sub(self.opened);
        ahead.is_some_and(|ahead| ahead < MOST_EARLY as u64) || self.fresh.contains(&id)
    }

    /// Hands out the next bytes of a stream, in order: about `most`.
    pub(super) fn read(
        &mut self,
        id: StreamId,
        most: usize,
        chunks: &mut impl ChunkReader,
        mut out: impl FnMut(Bytes),
    ) -> ReadStatus {
        let Some(stream) = self.streams.get_mut(&id) else { return ReadStatus::Blocked };
        let (before, others) = (stream.bytes, self.held - stream.bytes);
        let waited = stream.waits;
        let mut read = stream.next_held(most, &mut out);
        let end = loop {
            if stream.end == Some(stream.next) {
                break ReadStatus::Finished;
            }
            if read >= most {
                break ReadStatus::More;
            }
            // Taking nothing tells where the next chunk is.
            if stream.bytes + others > MOST_HELD
                && chunks.next(0).is_ok_and(|chunk| chunk.is_some_and(|chunk| chunk.offset > stream.next))
            {
                break ReadStatus::Blocked;
            }
            match chunks.next(usize::MAX) {
                Ok(Some(chunk)) => {
                    read += stream.take(chunk.offset, chunk.bytes, &mut out);
                    read += stream.next_held(most.saturating_sub(read), &mut out);
                }
                Ok(None) => break ReadStatus::Finished,
                Err(noq_proto::ReadError::Blocked) => break ReadStatus::Blocked,
                Err(noq_proto::ReadError::Reset(code)) => break ReadStatus::Reset(code.into()),
            }
        };
        self.held = self.held + stream.bytes - before;
        stream.waits = end == ReadStatus::Blocked;
        self.urgent |= stream.next >= stream.told + URGENT;
        if read > 0 || stream.waits && (!waited || !stream.held.is_empty()) {
            self.tell(id);
        }
        end
    }

    /// How far streams have come is told from now on.
    pub(super) fn tell_progress(&mut self) {
        self.tells = true;
    }

    /// The progress of a stream is to be told.
    pub(super) fn tell(&mut self, id: StreamId) {
        if self.tells
            && let Some(stream) = self.streams.get_mut(&id)
            && !std::mem::replace(&mut stream.queued, true)
        {
            self.to_tell.push_back(id);
        }
    }

    /// Whether the far end waits for progress to be told.
    pub(super) fn is_urgent(&self) -> bool {
        self.urgent
    }

    /// What is urgent is being told.
    pub(super) fn clear_urgent(&mut self) {
        self.urgent = false;
    }

    /// How many streams [`Self::take_progress`] may have something to say about.
    pub(super) fn progresses(&self) -> usize {
        self.to_tell.len()
    }

    /// The progress of the next stream on which something has changed since it was told last, or bytes are missing;
    /// `None` if the stream is gone.
    pub(super) fn take_progress(&mut self) -> Option<DataAck> {
        let id = self.to_tell.pop_front()?;
        let stream = self.streams.get_mut(&id)?;
        let gaps = if stream.waits { stream.gaps() } else { Vec::new() };
        stream.queued = !gaps.is_empty();
        stream.told = stream.next;
        if stream.queued {
            self.to_tell.push_back(id);
        }
        Some(DataAck { stream: id, next_offset: stream.next, reader_waits: stream.waits, gaps })
    }
}

/// Whether both ends write to a stream (RFC 9000 §2.1).
fn is_bidirectional(id: StreamId) -> bool {
    id & 2 == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Chunks as the library hands them out; blocked after the last.
    struct Chunks(VecDeque<(u64, Bytes)>);

    impl Chunks {
        fn of(chunks: &[(u64, &'static [u8])]) -> Self {
            Self(chunks.iter().map(|(at, bytes)| (*at, Bytes::from_static(bytes))).collect())
        }
    }

    impl ChunkReader for Chunks {
        fn next(&mut self, most: usize) -> Result<Option<noq_proto::Chunk>, noq_proto::ReadError> {
            let Some((offset, bytes)) = self.0.front_mut() else { return Err(noq_proto::ReadError::Blocked) };
            let chunk = noq_proto::Chunk { offset: *offset, bytes: bytes.split_to(most.min(bytes.len())) };
            *offset += chunk.bytes.len() as u64;
            if bytes.is_empty() {
                self.0.pop_front();
            }
            Ok(Some(chunk))
        }
    }

    fn piece(stream: StreamId, at: u64, bytes: &'static [u8]) -> StreamChunk {
        StreamChunk { stream, offset: at, data: Bytes::from_static(bytes), fin: false }
    }

    fn read(streams: &mut ReceiveStreams, chunks: &[(u64, &'static [u8])]) -> (Vec<u8>, ReadStatus) {
        let mut got = Vec::new();
        let end = streams.read(0, usize::MAX, &mut Chunks::of(chunks), |bytes| got.extend_from_slice(&bytes));
        (got, end)
    }

    #[test]
    fn what_a_peer_sends_behind_gaps_without_end_is_not_kept_without_end() {
        let mut streams = ReceiveStreams::default();
        for stream in [0, 4] {
            streams.make_bulk(stream, 0);
            for at in 0..100_000 {
                streams.take_reinjected(&piece(stream, 1 + 2 * at, b"x"), false, || 0);
            }
        }
        assert!(streams.held <= MOST_HELD + 1 + HOLDING, "{} bytes", streams.held);
        let pieces: usize = streams.streams.values().map(|stream| stream.held.len()).sum();
        assert!((10_000..100_000).contains(&pieces), "{pieces} pieces");
        // What is next is taken all the same.
        assert!(streams.take_reinjected(&piece(4, 0, b"first"), false, || 0));
        assert_eq!(streams.streams[&4].held[&0], &b"first"[..]);
        // All memory is given back.
        assert!(!streams.end_bulk(0) && !streams.end_bulk(4));
        assert_eq!(streams.held, 0);
    }

    #[test]
    fn bytes_come_out_once_and_in_order_whatever_way_they_came() {
        let mut stream = ReceiveStream::new(0);
        let all: Vec<u8> = (0..200).collect();
        let mut got = Vec::new();
        let mut give = |at: usize, len: usize, reinjected: bool| {
            let bytes = Bytes::copy_from_slice(&all[at..at + len]);
            let mut out = |bytes: Bytes| got.extend_from_slice(&bytes);
            if reinjected {
                stream.hold(at as u64, &bytes);
                stream.next_held(1000, &mut out);
            } else {
                stream.take(at as u64, bytes, &mut out);
                stream.next_held(1000, &mut out);
            }
            stream.bytes
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

    #[test]
    fn a_stream_whose_beginning_came_another_way_is_one_of_the_peers_that_may_come_next() {
        let mut streams = ReceiveStreams::default();
        assert!(!streams.take_reinjected(&piece(1, 0, b"x"), true, || 0), "this end's");
        assert!(!streams.take_reinjected(&piece(2, 0, b"x"), false, || 0), "of one direction");
        assert!(!streams.take_reinjected(&piece(4 * 256, 0, b"x"), false, || 0), "too far ahead");
        assert!(streams.take_reinjected(&piece(4, 2, b"cd"), false, || 2));
        assert!(streams.is_early(4));
        streams.end_ordered(4);
        assert!(!streams.is_early(4) && !streams.contains(4));
    }

    #[test]
    fn progress_tells_what_is_missing_until_it_has_come() {
        let mut streams = ReceiveStreams::default();
        streams.make_bulk(0, 0);
        read(&mut streams, &[(0, b"ab")]);
        assert_eq!(streams.progresses(), 0, "nobody asked for it");
        streams.tell_progress();
        assert_eq!(read(&mut streams, &[(2, b"cd"), (6, b"gh")]), (b"cd".to_vec(), ReadStatus::Blocked));
        let told = DataAck { stream: 0, next_offset: 4, reader_waits: true, gaps: vec![(4, 2)] };
        assert_eq!(streams.take_progress(), Some(told.clone()));
        assert_eq!(streams.take_progress(), Some(told), "as long as it is missing");
        assert!(streams.take_reinjected(&piece(0, 4, b"ef"), false, || 0));
        assert_eq!(read(&mut streams, &[]), (b"efgh".to_vec(), ReadStatus::Blocked));
        let told = DataAck { stream: 0, next_offset: 8, reader_waits: true, gaps: Vec::new() };
        assert_eq!((streams.take_progress(), streams.progresses()), (Some(told), 0));
        streams.note_readable(0);
        assert_eq!(streams.take_progress().map(|progress| progress.reader_waits), Some(false));
    }

    #[test]
    fn an_end_that_came_another_way_ends_the_stream() {
        let mut streams = ReceiveStreams::default();
        streams.make_bulk(0, 0);
        let last = StreamChunk { fin: true, ..piece(0, 2, b"cd") };
        assert!(streams.take_reinjected(&last, false, || 0));
        assert_eq!(read(&mut streams, &[(0, b"ab")]), (b"abcd".to_vec(), ReadStatus::Finished));
        assert!(streams.end_bulk(0), "the library still waits for the end");
    }
}
