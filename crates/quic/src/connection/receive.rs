//! The receiving side of bulk streams: puts their data in order.
//!
//! In: chunks from noq in any order, and reinjected data from datagrams. Out: the data in order, and a
//! [`DataAck`] for each stream. Always holds: every byte is delivered once; out-of-order data of all streams
//! together is bounded, and takes its bytes from the connection's window of flow control.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use bytes::{Buf, Bytes};
use rustc_hash::FxHashMap;

use super::{DataAck, ReadStatus, StreamChunk, readers::URGENT_REPORT_BYTES, unread::UnreadStreams};
use crate::StreamId;

/// Out-of-order bytes of all bulk streams together: the window of the connection in chunks of 512 bytes, with
/// their memory (two streams share a packet). So what the peer may send always has a place. Smaller: data
/// stays in noq, which ends a connection whose stream has more than 1024 gaps; larger: memory of reinjected
/// data, which has no window.
pub(super) const MAX_OUT_OF_ORDER_BYTES: usize = 30 << 20;
/// Out-of-order chunks of all bulk streams together, and one more for each 512 bytes: noq compares each new
/// chunk with all of its stream. Fewer: as above; more: processor time of hostile peers with tiny chunks.
const MAX_OUT_OF_ORDER_CHUNKS: usize = 5 << 10;
/// The window of the connection follows the out-of-order data in such steps. Smaller: more MAX_DATA frames;
/// larger: memory.
const WINDOW_STEP: u32 = 1 << 20;
/// Streams whose first bytes may be reinjected before noq has opened the stream. Fewer: requests wait for
/// retransmissions; more: memory of hostile peers.
const MAX_EARLY_STREAMS: usize = 256;
/// The memory of an out-of-order chunk beside its bytes.
const CHUNK_OVERHEAD: usize = 128;
/// Gaps of a stream in one DataAck (more do not fit an entry), and the out-of-order chunks that are searched
/// for them. Fewer: gaps are reported late; more: processor time.
const MAX_GAPS: usize = 16;
const MAX_SEARCHED_CHUNKS: usize = 512;

/// The received chunks of one stream inside noq, in any order.
pub(super) trait ChunkReader {
    /// The next chunk of at most `max` bytes; `None` at the end of the stream.
    fn next(&mut self, max: usize) -> Result<Option<noq_proto::Chunk>, noq_proto::ReadError>;
}

impl ChunkReader for noq_proto::Chunks<'_> {
    fn next(&mut self, max: usize) -> Result<Option<noq_proto::Chunk>, noq_proto::ReadError> {
        Self::next(self, max)
    }
}

/// The receiving side of one bulk stream.
#[derive(Debug, Default)]
struct ReceiveStream {
    /// The offset of the next byte to deliver.
    next: u64,
    /// Out-of-order chunks by offset; they may overlap.
    held: BTreeMap<u64, Bytes>,
    /// Their memory (bytes).
    bytes: usize,
    /// The final size, if reinjected data had a FIN.
    end: Option<u64>,
    /// Whether the reader found no data, and nothing has arrived since.
    reader_waits: bool,
    /// Whether a DataAck is pending.
    ack_pending: bool,
    /// The `next` offset in the last DataAck.
    last_acked: u64,
}

impl ReceiveStream {
    fn new(next: u64) -> Self {
        Self { next, reader_waits: true, ..Self::default() }
    }

    /// Keeps out-of-order data, if it is new.
    fn hold(&mut self, at: u64, bytes: &Bytes) {
        // Without what was delivered, so that pieces which begin before the next byte take one place and not
        // each their own.
        let known = usize::try_from(self.next.saturating_sub(at)).unwrap_or(usize::MAX);
        let Some(bytes) = bytes.get(known..).filter(|bytes| !bytes.is_empty()) else { return };
        let at = at.max(self.next);
        if self.held.get(&at).is_none_or(|held| held.len() < bytes.len()) {
            // A copy: the received slice would keep a buffer of many packets alive.
            let before = self.held.insert(at, Bytes::copy_from_slice(bytes));
            self.bytes +=
                bytes.len() + CHUNK_OVERHEAD - before.map_or(0, |before| before.len() + CHUNK_OVERHEAD);
        }
    }

    /// Delivers about `max` bytes of kept data that is next now; returns how many.
    fn deliver_held(&mut self, max: usize, out: &mut impl FnMut(Bytes)) -> usize {
        let mut taken = 0;
        while taken < max
            && let Some(entry) = self.held.first_entry()
            && *entry.key() <= self.next
        {
            let (at, bytes) = entry.remove_entry();
            self.bytes -= bytes.len() + CHUNK_OVERHEAD;
            taken += self.deliver(at, bytes, out);
        }
        taken
    }

    /// Delivers the new part of `bytes`, which begin at or before the next offset; returns its length.
    fn deliver(&mut self, at: u64, mut bytes: Bytes, out: &mut impl FnMut(Bytes)) -> usize {
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

    /// Takes data, and delivers it if it is next; returns how many bytes were delivered.
    fn take(&mut self, at: u64, bytes: Bytes, out: &mut impl FnMut(Bytes)) -> usize {
        if at > self.next {
            self.hold(at, &bytes);
            return 0;
        }
        self.deliver(at, bytes, out)
    }

    /// The gaps before kept data: offset and length.
    fn gaps(&self) -> Vec<(u64, u64)> {
        let (mut end, mut gaps) = (self.next, Vec::new());
        for (at, bytes) in self.held.iter().take(MAX_SEARCHED_CHUNKS) {
            if *at > end {
                if gaps.len() == MAX_GAPS {
                    break;
                }
                gaps.push((end, at - end));
            }
            end = end.max(at + bytes.len() as u64);
        }
        gaps
    }
}

/// The receiving side of all streams of a connection.
#[derive(Debug, Default)]
pub(super) struct ReceiveStreams {
    streams: FxHashMap<StreamId, ReceiveStream>,
    /// Streams of the peer with reinjected data that are not bulk streams yet.
    early: BTreeSet<StreamId>,
    /// Bidirectional streams of the peer that noq still delivers in order.
    read_in_order: BTreeSet<StreamId>,
    /// The number of bidirectional streams that the peer has opened.
    opened: u64,
    /// Memory of out-of-order data of all streams (bytes), and its chunks.
    held: usize,
    chunks: usize,
    /// The window of the connection, and the part that out-of-order data leaves (bytes). `None`: nobody has
    /// set it.
    window: Option<(u32, u32)>,
    /// All streams that have something to read.
    pub(super) unread: UnreadStreams,
    /// Whether both ends send DataAck reports.
    pub(super) sends_data_acks: bool,
    /// Streams with a pending DataAck, and whether any is urgent.
    pub(super) pending_acks: VecDeque<StreamId>,
    pub(super) urgent: bool,
}

impl ReceiveStreams {
    /// Memory of out-of-order data (bytes).
    pub(super) fn held(&self) -> usize {
        self.held
    }

    /// Sets the window of the connection (bytes), which out-of-order data takes a part of.
    pub(super) fn set_window(&mut self, bytes: u32) {
        self.window = Some((bytes, bytes));
    }

    /// The window that is left beside out-of-order data, when that has changed by a step.
    pub(super) fn changed_window(&mut self) -> Option<u32> {
        let (all, left) = self.window?;
        let held = u32::try_from(self.held).unwrap_or(u32::MAX);
        let now = all - (held - held % WINDOW_STEP).min(all);
        self.window = Some((all, now));
        (now != left).then_some(now)
    }

    /// Makes a stream a bulk stream after `read` bytes were read in order.
    pub(super) fn make_bulk(&mut self, id: StreamId, read: u64) {
        self.streams.entry(id).or_insert_with(|| ReceiveStream::new(read));
        self.early.remove(&id);
        self.read_in_order.remove(&id);
    }

    /// Ends the reading of a bulk stream; returns whether to send STOP_SENDING: everything was read, but noq
    /// does not know the end of the stream, as reinjected data may still arrive a second time.
    pub(super) fn end_bulk(&mut self, id: StreamId) -> bool {
        self.unread.remove(id);
        self.forget(id).is_some_and(|stream| stream.end == Some(stream.next))
    }

    /// Whether this end reads the stream out of order.
    pub(super) fn contains(&self, id: StreamId) -> bool {
        self.streams.contains_key(&id)
    }

    /// Whether the stream has reinjected data, but is no bulk stream yet.
    pub(super) fn is_early(&self, id: StreamId) -> bool {
        self.early.contains(&id)
    }

    /// Ends the reading of a stream that is no bulk stream.
    pub(super) fn end_ordered(&mut self, id: StreamId) {
        self.unread.remove(id);
        self.read_in_order.remove(&id);
        if self.early.contains(&id) {
            self.forget(id);
        }
    }

    fn forget(&mut self, id: StreamId) -> Option<ReceiveStream> {
        let stream = self.streams.remove(&id)?;
        self.held -= stream.bytes;
        self.chunks -= stream.held.len();
        self.early.remove(&id);
        Some(stream)
    }

    /// The peer has opened the streams up to this one.
    pub(super) fn note_opened(&mut self, id: StreamId) {
        self.unread.insert(id);
        if is_bidirectional(id) {
            self.opened = self.opened.max((id >> 2) + 1);
            self.read_in_order.insert(id);
        }
    }

    /// Data has arrived on a stream.
    pub(super) fn note_readable(&mut self, id: StreamId) {
        self.unread.insert(id);
        if let Some(stream) = self.streams.get_mut(&id).filter(|stream| stream.reader_waits) {
            stream.reader_waits = false;
            self.queue_data_ack(id);
        }
    }

    /// Takes reinjected data of a stream; returns whether it may be readable. It is dropped if too much is
    /// kept, because noq delivers it as well. `own`: this end opened the stream; `read`: how many of its
    /// bytes were read in order.
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
        if piece.offset > stream.next && is_full(self.held, self.chunks) {
            return false;
        }
        if piece.fin {
            stream.end = Some(piece.offset + piece.data.len() as u64);
        }
        let before = (stream.bytes, stream.held.len());
        stream.hold(piece.offset, &piece.data);
        self.held = self.held + stream.bytes - before.0;
        self.chunks = self.chunks + stream.held.len() - before.1;
        true
    }

    /// Whether a stream of the peer is not opened yet, or still read in order, so that its beginning may be
    /// reinjected.
    fn is_beginning(&self, id: StreamId) -> bool {
        if !is_bidirectional(id) || self.early.len() >= MAX_EARLY_STREAMS {
            return false;
        }
        let ahead = (id >> 2).checked_sub(self.opened);
        ahead.is_some_and(|ahead| ahead < MAX_EARLY_STREAMS as u64) || self.read_in_order.contains(&id)
    }

    /// Delivers the next bytes of a stream in order, about `max`.
    pub(super) fn read(
        &mut self,
        id: StreamId,
        max: usize,
        chunks: &mut impl ChunkReader,
        mut out: impl FnMut(Bytes),
    ) -> ReadStatus {
        let Some(stream) = self.streams.get_mut(&id) else { return ReadStatus::Blocked };
        let (others, other_chunks) = (self.held - stream.bytes, self.chunks - stream.held.len());
        let waited = stream.reader_waits;
        let mut read = stream.deliver_held(max, &mut out);
        let end = loop {
            if stream.end == Some(stream.next) {
                break ReadStatus::Finished;
            }
            if read >= max {
                break ReadStatus::More;
            }
            // Reading 0 bytes returns the offset of the next chunk.
            if is_full(stream.bytes + others, stream.held.len() + other_chunks)
                && chunks.next(0).is_ok_and(|chunk| chunk.is_some_and(|chunk| chunk.offset > stream.next))
            {
                break ReadStatus::Blocked;
            }
            match chunks.next(usize::MAX) {
                Ok(Some(chunk)) => {
                    self.unread.taken += chunk.bytes.len() as u64;
                    read += stream.take(chunk.offset, chunk.bytes, &mut out);
                    read += stream.deliver_held(max.saturating_sub(read), &mut out);
                }
                Ok(None) => break ReadStatus::Finished,
                Err(noq_proto::ReadError::Blocked) => break ReadStatus::Blocked,
                Err(noq_proto::ReadError::Reset(code)) => break ReadStatus::Reset(code.into()),
            }
        };
        self.held = others + stream.bytes;
        self.chunks = other_chunks + stream.held.len();
        stream.reader_waits = end == ReadStatus::Blocked;
        if end != ReadStatus::More {
            self.unread.remove(id);
        }
        self.urgent |= stream.next >= stream.last_acked + URGENT_REPORT_BYTES;
        if read > 0 || stream.reader_waits && (!waited || !stream.held.is_empty()) {
            self.queue_data_ack(id);
        }
        end
    }

    /// Queues a DataAck of a stream.
    pub(super) fn queue_data_ack(&mut self, id: StreamId) {
        if self.sends_data_acks
            && let Some(stream) = self.streams.get_mut(&id)
            && !std::mem::replace(&mut stream.ack_pending, true)
        {
            self.pending_acks.push_back(id);
        }
    }

    /// The DataAck of the next stream that has changed since its last one, or that has gaps; `None` if the
    /// stream is gone.
    pub(super) fn next_data_ack(&mut self) -> Option<DataAck> {
        let id = self.pending_acks.pop_front()?;
        let stream = self.streams.get_mut(&id)?;
        let gaps = if stream.reader_waits { stream.gaps() } else { Vec::new() };
        stream.ack_pending = !gaps.is_empty();
        stream.last_acked = stream.next;
        if stream.ack_pending {
            self.pending_acks.push_back(id);
        }
        Some(DataAck { stream: id, next_offset: stream.next, reader_waits: stream.reader_waits, gaps })
    }
}

/// Whether so many out-of-order bytes in so many chunks are too many for another one.
fn is_full(bytes: usize, chunks: usize) -> bool {
    bytes > MAX_OUT_OF_ORDER_BYTES || chunks >= MAX_OUT_OF_ORDER_CHUNKS + bytes / 512
}

/// Whether a stream is bidirectional (RFC 9000 §2.1).
fn is_bidirectional(id: StreamId) -> bool {
    id & 2 == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::RECEIVE_WINDOW;

    /// Chunks as noq delivers them; blocked after the last one.
    struct Chunks(VecDeque<(u64, Bytes)>);

    impl Chunks {
        fn of(chunks: &[(u64, &'static [u8])]) -> Self {
            Self(chunks.iter().map(|(at, bytes)| (*at, Bytes::from_static(bytes))).collect())
        }
    }

    impl ChunkReader for Chunks {
        fn next(&mut self, max: usize) -> Result<Option<noq_proto::Chunk>, noq_proto::ReadError> {
            let Some((offset, bytes)) = self.0.front_mut() else { return Err(noq_proto::ReadError::Blocked) };
            let chunk = noq_proto::Chunk { offset: *offset, bytes: bytes.split_to(max.min(bytes.len())) };
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
    fn pieces_that_begin_before_the_next_byte_take_one_place() {
        let mut streams = ReceiveStreams::default();
        streams.make_bulk(0, 1000);
        for at in 0..1000 {
            streams.take_reinjected(&piece(0, at, &[7; 1200]), false, || 0);
        }
        assert_eq!(streams.chunks, 1);
        let (got, _) = read(&mut streams, &[]);
        assert_eq!((got.len(), streams.chunks, streams.held), (1199, 0, 0), "the longest of them");
    }

    #[test]
    fn out_of_order_data_is_bounded() {
        let mut streams = ReceiveStreams::default();
        for stream in [0, 4] {
            streams.make_bulk(stream, 0);
            for at in 0..100_000 {
                streams.take_reinjected(&piece(stream, 1 + 2 * at, b"x"), false, || 0);
            }
        }
        let pieces: usize = streams.streams.values().map(|stream| stream.held.len()).sum();
        assert!((MAX_OUT_OF_ORDER_CHUNKS..7 << 10).contains(&pieces), "{pieces}");
        assert_eq!(pieces, streams.chunks);
        // The next bytes in order are taken all the same.
        assert!(streams.take_reinjected(&piece(4, 0, b"first"), false, || 0));
        assert_eq!(streams.streams[&4].held[&0], &b"first"[..]);
        // All memory is given back.
        assert!(!streams.end_bulk(0) && !streams.end_bulk(4));
        assert_eq!((streams.held, streams.chunks), (0, 0));
        // Large chunks are bounded by their bytes.
        streams.make_bulk(8, 0);
        for at in 0..10_000 {
            streams.take_reinjected(&piece(8, 1 + 8000 * at, &[7; 4000]), false, || 0);
        }
        assert!(streams.held <= MAX_OUT_OF_ORDER_BYTES + 4000 + CHUNK_OVERHEAD, "{} bytes", streams.held);
        assert!(streams.chunks > 6500, "{} chunks", streams.chunks);
    }

    #[test]
    fn what_the_peer_may_send_always_has_a_place_and_that_takes_from_its_window() {
        let mut streams = ReceiveStreams::default();
        assert_eq!(streams.changed_window(), None, "nobody has set it");
        streams.set_window(RECEIVE_WINDOW);
        streams.make_bulk(0, 0);
        assert_eq!(streams.changed_window(), None);
        let chunks: Vec<(u64, &'static [u8])> =
            (0..u64::from(RECEIVE_WINDOW) / 512).map(|at| (1 + 1024 * at, &[7; 512][..])).collect();
        read(&mut streams, &chunks[..6000]);
        assert_eq!(streams.changed_window(), Some(RECEIVE_WINDOW - (3 << 20)));
        // The whole window out of order: nothing stays behind, and nothing more may come.
        read(&mut streams, &chunks[6000..]);
        assert_eq!((streams.chunks, streams.changed_window()), (chunks.len(), Some(0)));
        streams.end_bulk(0);
        assert_eq!((streams.changed_window(), streams.changed_window()), (Some(RECEIVE_WINDOW), None));
    }

    #[test]
    fn bytes_are_delivered_once_and_in_order() {
        let mut stream = ReceiveStream::new(0);
        let all: Vec<u8> = (0..200).collect();
        let mut got = Vec::new();
        let mut give = |at: usize, len: usize, reinjected: bool| {
            let bytes = Bytes::copy_from_slice(&all[at..at + len]);
            let mut out = |bytes: Bytes| got.extend_from_slice(&bytes);
            if reinjected {
                stream.hold(at as u64, &bytes);
                stream.deliver_held(1000, &mut out);
            } else {
                stream.take(at as u64, bytes, &mut out);
                stream.deliver_held(1000, &mut out);
            }
            stream.bytes
        };
        give(10, 20, false);
        give(25, 20, true);
        give(10, 5, true);
        assert_eq!(give(10, 30, true), 50 + 2 * CHUNK_OVERHEAD, "the longer one");
        assert_eq!(give(0, 10, false), 0);
        assert_eq!(give(5, 10, true), 0, "known");
        give(60, 10, true);
        assert_eq!(give(44, 100, false), 0);
        assert_eq!(give(144, 56, true), 0);
        assert_eq!(got, all);
    }

    #[test]
    fn only_the_next_streams_of_the_peer_may_begin_with_reinjected_data() {
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
    fn data_acks_report_gaps_until_they_are_filled() {
        let mut streams = ReceiveStreams::default();
        streams.make_bulk(0, 0);
        read(&mut streams, &[(0, b"ab")]);
        assert_eq!(streams.pending_acks.len(), 0, "nobody asked for it");
        streams.sends_data_acks = true;
        assert_eq!(read(&mut streams, &[(2, b"cd"), (6, b"gh")]), (b"cd".to_vec(), ReadStatus::Blocked));
        let last_acked = DataAck { stream: 0, next_offset: 4, reader_waits: true, gaps: vec![(4, 2)] };
        assert_eq!(streams.next_data_ack(), Some(last_acked.clone()));
        assert_eq!(streams.next_data_ack(), Some(last_acked), "as long as it is missing");
        assert!(streams.take_reinjected(&piece(0, 4, b"ef"), false, || 0));
        assert_eq!(read(&mut streams, &[]), (b"efgh".to_vec(), ReadStatus::Blocked));
        let last_acked = DataAck { stream: 0, next_offset: 8, reader_waits: true, gaps: Vec::new() };
        assert_eq!((streams.next_data_ack(), streams.pending_acks.len()), (Some(last_acked), 0));
        streams.note_readable(0);
        assert_eq!(streams.next_data_ack().map(|ack| ack.reader_waits), Some(false));
    }

    #[test]
    fn a_reinjected_fin_ends_the_stream() {
        let mut streams = ReceiveStreams::default();
        streams.make_bulk(0, 0);
        let last = StreamChunk { fin: true, ..piece(0, 2, b"cd") };
        assert!(streams.take_reinjected(&last, false, || 0));
        assert_eq!(read(&mut streams, &[(0, b"ab")]), (b"abcd".to_vec(), ReadStatus::Finished));
        assert!(streams.end_bulk(0), "the library still waits for the end");
    }
}
