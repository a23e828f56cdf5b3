//! The sent but unconfirmed data of bulk streams, for reinjection on another path. noq keeps it as well, but
//! does not report which data was acknowledged.
//!
//! In: stream chunks as they leave, and the peer's DataAcks. Out: overdue chunks: missing at the peer, though
//! they should have arrived. Always holds: the kept data is bounded.

use std::collections::{BTreeSet, VecDeque};

use mpvpn_types::{Duration, Instant, PathId};
use rustc_hash::FxHashMap;

use super::{StreamChunk, receive::MAX_OUT_OF_ORDER_BYTES};
use crate::StreamId;

/// Bytes that are kept at most; further data cannot be reinjected. It is what the peer keeps out of order, so
/// that each of its gaps can be filled. Larger: memory of data that the peer has; smaller: gaps stay where
/// nothing else is sent any more.
const MAX_KEPT_BYTES: usize = MAX_OUT_OF_ORDER_BYTES;
/// The memory of a kept chunk beside its bytes.
const CHUNK_OVERHEAD: usize = 128;

/// How much of a stream has arrived at its reader (DATA_ACK of MPTCP, RFC 8684 §3.3.2).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataAck {
    /// Which stream.
    pub stream: StreamId,
    /// All bytes before this offset were delivered to the reader.
    pub next_offset: u64,
    /// Whether the reader waits for the byte at this offset; otherwise it may have arrived.
    pub reader_waits: bool,
    /// The gaps from that offset on, before data that has arrived: offset and length, in order.
    pub gaps: Vec<(u64, u64)>,
}

/// Data that the peer misses, though it should have arrived.
#[derive(Clone, Debug)]
pub struct OverdueChunk {
    /// The data.
    pub chunk: StreamChunk,
    /// The path on which it was first sent.
    pub path: PathId,
    /// Whether nothing that was sent there since was acknowledged.
    pub path_stalled: bool,
}

#[derive(Debug)]
struct Sent {
    piece: StreamChunk,
    path: PathId,
    /// When it was last sent.
    at: Instant,
    /// Whether it is overdue whatever its age.
    always_overdue: bool,
}

impl Sent {
    fn end(&self) -> u64 {
        self.piece.offset + self.piece.data.len() as u64
    }
}

#[derive(Debug, Default)]
struct SentStream {
    pieces: VecDeque<Sent>,
    bytes: usize,
    /// The last DataAck; without one the peer waits for the first bytes.
    next: u64,
    reader_has_data: bool,
    gaps: Vec<(u64, u64)>,
    /// Whether data was reinjected: then the peer's noq learns the end of the stream only by its own
    /// retransmissions, and the FIN has to be reinjected as well.
    reinjected: bool,
}

impl SentStream {
    /// Notes that data was reinjected; a FIN that was sent before becomes overdue.
    fn note_reinjected(&mut self) {
        self.reinjected = true;
        if let Some(last) = self.pieces.back_mut().filter(|last| last.piece.fin) {
            last.always_overdue = true;
        }
    }

    /// Calls `each` for missing data that was sent longer ago than `timeout` of its path, up to about `max`
    /// bytes; returns how many of those are left. `stalls`: whether nothing that was sent on a path since
    /// an instant was acknowledged.
    fn take_overdue(
        &mut self,
        now: Instant,
        timeout: impl Fn(PathId) -> Duration,
        stalls: impl Fn(PathId, Instant) -> bool,
        mut max: usize,
        mut each: impl FnMut(OverdueChunk),
    ) -> usize {
        let mut reinjected = false;
        for sent in &mut self.pieces {
            let age = now.saturating_duration_since(sent.at);
            if !sent.always_overdue && age < timeout(sent.path) {
                continue;
            }
            if max == 0 {
                break;
            }
            let mut any = false;
            let all = [(self.next, u64::MAX - self.next)];
            for (at, len) in if self.gaps.is_empty() { &all[..] } else { &self.gaps } {
                let (from, to) = ((*at).max(sent.piece.offset), (at + len).min(sent.end()));
                // A chunk with only a FIN is empty.
                if from > to || from == to && !(sent.piece.fin && to == sent.end()) {
                    continue;
                }
                let place = |at: u64| (at - sent.piece.offset) as usize;
                let bytes = sent.piece.data.slice(place(from)..place(to));
                max = max.saturating_sub(bytes.len().max(1));
                let ends = sent.piece.fin && to == sent.end();
                let piece = StreamChunk { stream: sent.piece.stream, offset: from, data: bytes, fin: ends };
                let stalls = !sent.always_overdue && stalls(sent.path, sent.at);
                each(OverdueChunk { chunk: piece, path: sent.path, path_stalled: stalls });
                any = true;
            }
            if any {
                (sent.at, sent.always_overdue) = (now, false);
                reinjected |= !sent.piece.fin;
            }
        }
        if reinjected {
            self.note_reinjected();
        }
        max
    }
}

/// The sent data of all bulk streams of a connection.
#[derive(Debug, Default)]
pub(super) struct ReinjectionLog {
    pub(super) on: bool,
    streams: FxHashMap<StreamId, SentStream>,
    /// Streams with kept data.
    non_empty: BTreeSet<StreamId>,
    pub(super) bytes: usize,
    /// Bytes that were ever sent.
    pub(super) sent: u64,
}

impl ReinjectionLog {
    /// A chunk has left on a path.
    pub(super) fn on_sent(&mut self, now: Instant, path: PathId, piece: &StreamChunk) {
        self.sent += piece.data.len() as u64;
        if !self.on || self.bytes > MAX_KEPT_BYTES {
            return;
        }
        let stream = self.streams.entry(piece.stream).or_default();
        self.bytes += piece.data.len() + CHUNK_OVERHEAD;
        stream.bytes += piece.data.len() + CHUNK_OVERHEAD;
        let always_overdue = piece.fin && stream.reinjected;
        stream.pieces.push_back(Sent { piece: piece.clone(), path, at: now, always_overdue });
        self.non_empty.insert(piece.stream);
    }

    /// Drops the data of a stream that has arrived completely, or was reset.
    pub(super) fn forget(&mut self, id: StreamId) {
        if let Some(stream) = self.streams.remove(&id) {
            self.bytes -= stream.bytes;
            self.non_empty.remove(&id);
        }
    }

    /// Notes that a chunk was reinjected because its path died.
    pub(super) fn note_reinjected(&mut self, now: Instant, piece: &StreamChunk) {
        let Some(stream) = self.streams.get_mut(&piece.stream) else { return };
        if !stream.reinjected {
            stream.note_reinjected();
        }
        let first = stream.pieces.partition_point(|sent| sent.piece.offset < piece.offset);
        if let Some(sent) = stream.pieces.get_mut(first) {
            sent.at = now;
        }
    }

    /// Takes a DataAck of the peer.
    pub(super) fn on_data_ack(&mut self, ack: DataAck) {
        let Some(stream) = self.streams.get_mut(&ack.stream) else { return };
        if ack.next_offset < stream.next {
            return;
        }
        while let Some(sent) =
            stream.pieces.pop_front_if(|sent| sent.end() <= ack.next_offset && !sent.piece.fin)
        {
            stream.bytes -= sent.piece.data.len() + CHUNK_OVERHEAD;
            self.bytes -= sent.piece.data.len() + CHUNK_OVERHEAD;
        }
        if stream.pieces.is_empty() {
            self.non_empty.remove(&ack.stream);
        }
        (stream.next, stream.reader_has_data, stream.gaps) = (ack.next_offset, !ack.reader_waits, ack.gaps);
    }

    /// Calls `each` for missing data that was sent longer ago than the timeout of its path (for unknown
    /// paths, the shortest timeout), up to about `max` bytes; it counts as sent now. `stalls`: whether
    /// nothing that was sent on a path at an instant or later was acknowledged.
    pub(super) fn take_overdue(
        &mut self,
        now: Instant,
        timeouts: &[(PathId, Duration)],
        mut max: usize,
        stalls: impl Fn(PathId, Instant) -> bool,
        mut each: impl FnMut(OverdueChunk),
    ) {
        let least = timeouts.iter().map(|(_, timeout)| *timeout).min().unwrap_or_default();
        let timeout =
            |path| timeouts.iter().find(|(id, _)| *id == path).map_or(least, |(_, timeout)| *timeout);
        for id in &self.non_empty {
            if let Some(stream) = self.streams.get_mut(id).filter(|stream| !stream.reader_has_data) {
                max = stream.take_overdue(now, timeout, &stalls, max, &mut each);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const PATHS: [(PathId, Duration); 2] =
        [(PathId(0), Duration::from_millis(30)), (PathId(1), Duration::from_millis(80))];

    fn piece(at: u64, bytes: &'static [u8]) -> StreamChunk {
        StreamChunk { stream: 0, offset: at, data: Bytes::from_static(bytes), fin: false }
    }

    fn data_ack(next: u64, gaps: &[(u64, u64)]) -> DataAck {
        DataAck { stream: 0, next_offset: next, reader_waits: true, gaps: gaps.to_vec() }
    }

    fn log() -> ReinjectionLog {
        ReinjectionLog { on: true, ..ReinjectionLog::default() }
    }

    /// Offset and bytes of overdue data, and whether its path stalls.
    fn overdue(log: &mut ReinjectionLog, now: Instant, max: usize) -> Vec<(u64, Vec<u8>, bool)> {
        let mut all = Vec::new();
        let stalls = |path, _| path == PathId(1);
        log.take_overdue(now, &PATHS, max, stalls, |overdue| {
            all.push((overdue.chunk.offset, overdue.chunk.data.to_vec(), overdue.path_stalled));
        });
        all
    }

    #[test]
    fn missing_data_is_overdue_once_after_the_timeout_of_its_path() {
        let (mut log, start) = (log(), Instant::now());
        log.on_sent(start, PathId(0), &piece(0, b"abcd"));
        log.on_sent(start, PathId(1), &piece(4, b"efgh"));
        assert_eq!(overdue(&mut log, start + 29 * MS, 100), []);
        assert_eq!(overdue(&mut log, start + 30 * MS, 100), [(0, b"abcd".to_vec(), false)]);
        assert_eq!(overdue(&mut log, start + 59 * MS, 100), [], "it counts as sent");
        let both = [(0, b"abcd".to_vec(), false), (4, b"efgh".to_vec(), true)];
        assert_eq!(overdue(&mut log, start + 80 * MS, 100), both);
    }

    #[test]
    fn only_what_is_missing_is_sent_again() {
        let (mut log, start) = (log(), Instant::now());
        log.on_sent(start, PathId(0), &piece(0, b"abcd"));
        log.on_sent(start, PathId(0), &piece(4, b"efgh"));
        log.on_data_ack(data_ack(1, &[(1, 1), (3, 2)]));
        let missing = [(1, b"b".to_vec(), false), (3, b"d".to_vec(), false), (4, b"e".to_vec(), false)];
        assert_eq!(overdue(&mut log, start + 40 * MS, 100), missing);
        log.on_data_ack(DataAck { reader_waits: false, ..data_ack(5, &[]) });
        assert_eq!(overdue(&mut log, start + 200 * MS, 100), [], "the reader has something to read");
    }

    #[test]
    fn confirmed_data_takes_no_memory() {
        let (mut log, start) = (log(), Instant::now());
        for at in 0..5_000_000 {
            log.on_sent(start, PathId(0), &piece(at, b"x"));
        }
        assert!(log.bytes <= MAX_KEPT_BYTES + 1 + CHUNK_OVERHEAD, "{} bytes", log.bytes);
        assert_eq!(log.sent, 5_000_000);
        log.on_data_ack(data_ack(5_000_000, &[]));
        assert_eq!((log.bytes, log.non_empty.len()), (0, 0));
        log.on_sent(start, PathId(0), &piece(5_000_000, b"x"));
        log.forget(0);
        assert_eq!((log.bytes, log.streams.len()), (0, 0));
    }

    #[test]
    fn the_fin_of_a_stream_with_reinjected_data_is_reinjected() {
        let (mut log, start) = (log(), Instant::now());
        log.on_sent(start, PathId(0), &piece(0, b"abcd"));
        log.note_reinjected(start, &piece(0, b"abcd"));
        log.on_sent(start, PathId(0), &StreamChunk { fin: true, ..piece(4, b"") });
        log.on_data_ack(data_ack(4, &[]));
        // At once, whatever the timeout.
        assert_eq!(overdue(&mut log, start, 100), [(4, Vec::new(), false)]);
        assert_eq!(overdue(&mut log, start, 100), []);
    }

    #[test]
    fn no_more_is_sent_again_than_is_asked_for() {
        let (mut log, start) = (log(), Instant::now());
        (0..10).for_each(|at| log.on_sent(start, PathId(0), &piece(at, b"x")));
        assert_eq!(overdue(&mut log, start + 40 * MS, 3).len(), 3);
        assert_eq!(overdue(&mut log, start + 40 * MS, 100).len(), 7);
    }
}
