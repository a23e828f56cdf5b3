//! What was sent on bulk streams and has not arrived as far as is known, so that it can be sent again on another path. The
//! library knows what has arrived, and does not tell.
//!
//! In: pieces as they leave, and what the far end says about its streams. Out: what it waits for and should have. Always
//! holds: what is kept is bounded, and it is in the library's own buffers, too, until that learns that it arrived.

use std::collections::{BTreeSet, VecDeque};

use mpvpn_types::{Duration, Instant, PathId};
use rustc_hash::FxHashMap;

use super::StreamChunk;
use crate::StreamId;

/// Bytes that are kept at most; what is sent beyond is not. More takes memory, less leaves nothing to send again on links
/// with a large product of rate and delay.
const MAX_KEPT_BYTES: usize = 16 << 20;
/// What keeping a piece takes beside its bytes.
const CHUNK_OVERHEAD: usize = 128;

/// How far a stream has come at the end that reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataAck {
    /// Which stream.
    pub stream: StreamId,
    /// All bytes before this place were handed to their reader.
    pub next_offset: u64,
    /// The reader waits for what comes there; else it may have come.
    pub reader_waits: bool,
    /// What is missing from `next` on, as far as the first thing behind it that has come: place and bytes, in order.
    pub gaps: Vec<(u64, u64)>,
}

/// Bytes that the far end waits for and should have.
#[derive(Clone, Debug)]
pub struct OverdueChunk {
    /// What they are.
    pub chunk: StreamChunk,
    /// Where they were sent first.
    pub path: PathId,
    /// Nothing was acknowledged there since.
    pub path_stalled: bool,
}

#[derive(Debug)]
struct Sent {
    piece: StreamChunk,
    path: PathId,
    /// When it was sent last.
    at: Instant,
    /// It is sent again in any case.
    due: bool,
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
    /// What the far end said last; it waits for the first bytes without saying so.
    next: u64,
    reads: bool,
    gaps: Vec<(u64, u64)>,
    /// Something of it was sent again: the far end's library does not know where it ends until all has come to that.
    again: bool,
}

impl SentStream {
    /// Something before the end is sent again. An end that was sent before is as unknown as one that is sent from now on.
    fn note_again(&mut self) {
        self.again = true;
        if let Some(last) = self.pieces.back_mut().filter(|last| last.piece.fin) {
            last.due = true;
        }
    }

    /// Calls `each` for what the far end misses of what is old enough, at most about `most` bytes; returns how many of
    /// those are left. `timeout` says how old it is to be, per path; `stalls` whether nothing was acknowledged on a path
    /// since then.
    fn take_overdue(
        &mut self,
        now: Instant,
        timeout: impl Fn(PathId) -> Duration,
        stalls: impl Fn(PathId, Instant) -> bool,
        mut most: usize,
        mut each: impl FnMut(OverdueChunk),
    ) -> usize {
        let mut again = false;
        for sent in &mut self.pieces {
            let age = now.saturating_duration_since(sent.at);
            if !sent.due && age < timeout(sent.path) {
                continue;
            }
            if most == 0 {
                break;
            }
            let mut any = false;
            let all = [(self.next, u64::MAX - self.next)];
            for (at, len) in if self.gaps.is_empty() { &all[..] } else { &self.gaps } {
                let (from, to) = ((*at).max(sent.piece.offset), (at + len).min(sent.end()));
                // The end has no bytes.
                if from > to || from == to && !(sent.piece.fin && to == sent.end()) {
                    continue;
                }
                let place = |at: u64| (at - sent.piece.offset) as usize;
                let bytes = sent.piece.data.slice(place(from)..place(to));
                most = most.saturating_sub(bytes.len().max(1));
                let ends = sent.piece.fin && to == sent.end();
                let piece = StreamChunk { stream: sent.piece.stream, offset: from, data: bytes, fin: ends };
                let stalls = !sent.due && stalls(sent.path, sent.at);
                each(OverdueChunk { chunk: piece, path: sent.path, path_stalled: stalls });
                any = true;
            }
            if any {
                (sent.at, sent.due) = (now, false);
                again |= !sent.piece.fin;
            }
        }
        if again {
            self.note_again();
        }
        most
    }
}

/// What was sent on all streams of a connection.
#[derive(Debug, Default)]
pub(super) struct ReinjectionLog {
    on: bool,
    streams: FxHashMap<StreamId, SentStream>,
    /// Those of which something is kept.
    some: BTreeSet<StreamId>,
    bytes: usize,
    /// Bytes that were ever sent.
    sent: u64,
}

impl ReinjectionLog {
    /// What is sent is kept from now on.
    pub(super) fn start(&mut self) {
        self.on = true;
    }

    /// Bytes that were ever sent.
    pub(super) fn bytes_sent(&self) -> u64 {
        self.sent
    }

    /// Bytes have left on a path.
    pub(super) fn keep(&mut self, now: Instant, path: PathId, piece: &StreamChunk) {
        self.sent += piece.data.len() as u64;
        if !self.on || self.bytes > MAX_KEPT_BYTES {
            return;
        }
        let stream = self.streams.entry(piece.stream).or_default();
        self.bytes += piece.data.len() + CHUNK_OVERHEAD;
        stream.bytes += piece.data.len() + CHUNK_OVERHEAD;
        let due = piece.fin && stream.again;
        stream.pieces.push_back(Sent { piece: piece.clone(), path, at: now, due });
        self.some.insert(piece.stream);
    }

    /// All of a stream has arrived, or nobody wants it any more.
    pub(super) fn forget(&mut self, id: StreamId) {
        if let Some(stream) = self.streams.remove(&id) {
            self.bytes -= stream.bytes;
            self.some.remove(&id);
        }
    }

    /// Bytes are sent again for another reason.
    pub(super) fn note_again(&mut self, now: Instant, piece: &StreamChunk) {
        let Some(stream) = self.streams.get_mut(&piece.stream) else { return };
        if !stream.again {
            stream.note_again();
        }
        let first = stream.pieces.partition_point(|sent| sent.piece.offset < piece.offset);
        if let Some(sent) = stream.pieces.get_mut(first) {
            sent.at = now;
        }
    }

    /// Takes what the far end said about a stream.
    pub(super) fn confirm(&mut self, progress: DataAck) {
        let Some(stream) = self.streams.get_mut(&progress.stream) else { return };
        if progress.next_offset < stream.next {
            return;
        }
        while let Some(sent) =
            stream.pieces.pop_front_if(|sent| sent.end() <= progress.next_offset && !sent.piece.fin)
        {
            stream.bytes -= sent.piece.data.len() + CHUNK_OVERHEAD;
            self.bytes -= sent.piece.data.len() + CHUNK_OVERHEAD;
        }
        if stream.pieces.is_empty() {
            self.some.remove(&progress.stream);
        }
        (stream.next, stream.reads, stream.gaps) =
            (progress.next_offset, !progress.reader_waits, progress.gaps);
    }

    /// Hands out bytes that the far end waits for, which were sent longer ago than `timeouts` says for their path (the
    /// shortest counts for others): at most about `most` bytes. They count as sent now. `stalls` says whether nothing was
    /// acknowledged on a path that was sent at a time or later.
    pub(super) fn take_overdue(
        &mut self,
        now: Instant,
        timeouts: &[(PathId, Duration)],
        mut most: usize,
        stalls: impl Fn(PathId, Instant) -> bool,
        mut each: impl FnMut(OverdueChunk),
    ) {
        let least = timeouts.iter().map(|(_, timeout)| *timeout).min().unwrap_or_default();
        let timeout =
            |path| timeouts.iter().find(|(id, _)| *id == path).map_or(least, |(_, timeout)| *timeout);
        for id in &self.some {
            if let Some(stream) = self.streams.get_mut(id).filter(|stream| !stream.reads) {
                most = stream.take_overdue(now, timeout, &stalls, most, &mut each);
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

    fn progress(next: u64, gaps: &[(u64, u64)]) -> DataAck {
        DataAck { stream: 0, next_offset: next, reader_waits: true, gaps: gaps.to_vec() }
    }

    fn log() -> ReinjectionLog {
        let mut log = ReinjectionLog::default();
        log.start();
        log
    }

    /// Place and bytes of what is overdue, and whether its path stalls.
    fn overdue(log: &mut ReinjectionLog, now: Instant, most: usize) -> Vec<(u64, Vec<u8>, bool)> {
        let mut all = Vec::new();
        let stalls = |path, _| path == PathId(1);
        log.take_overdue(now, &PATHS, most, stalls, |overdue| {
            all.push((overdue.chunk.offset, overdue.chunk.data.to_vec(), overdue.path_stalled));
        });
        all
    }

    #[test]
    fn what_the_far_end_waits_for_is_overdue_after_the_timeout_of_its_path_and_once() {
        let (mut log, start) = (log(), Instant::now());
        log.keep(start, PathId(0), &piece(0, b"abcd"));
        log.keep(start, PathId(1), &piece(4, b"efgh"));
        assert_eq!(overdue(&mut log, start + 29 * MS, 100), []);
        assert_eq!(overdue(&mut log, start + 30 * MS, 100), [(0, b"abcd".to_vec(), false)]);
        assert_eq!(overdue(&mut log, start + 59 * MS, 100), [], "it counts as sent");
        let both = [(0, b"abcd".to_vec(), false), (4, b"efgh".to_vec(), true)];
        assert_eq!(overdue(&mut log, start + 80 * MS, 100), both);
    }

    #[test]
    fn only_what_is_missing_is_sent_again() {
        let (mut log, start) = (log(), Instant::now());
        log.keep(start, PathId(0), &piece(0, b"abcd"));
        log.keep(start, PathId(0), &piece(4, b"efgh"));
        log.confirm(progress(1, &[(1, 1), (3, 2)]));
        let missing = [(1, b"b".to_vec(), false), (3, b"d".to_vec(), false), (4, b"e".to_vec(), false)];
        assert_eq!(overdue(&mut log, start + 40 * MS, 100), missing);
        log.confirm(DataAck { reader_waits: false, ..progress(5, &[]) });
        assert_eq!(overdue(&mut log, start + 200 * MS, 100), [], "the reader has something to read");
    }

    #[test]
    fn what_has_arrived_takes_no_memory() {
        let (mut log, start) = (log(), Instant::now());
        for at in 0..5_000_000 {
            log.keep(start, PathId(0), &piece(at, b"x"));
        }
        assert!(log.bytes <= MAX_KEPT_BYTES + 1 + CHUNK_OVERHEAD, "{} bytes", log.bytes);
        assert_eq!(log.bytes_sent(), 5_000_000);
        log.confirm(progress(5_000_000, &[]));
        assert_eq!((log.bytes, log.some.len()), (0, 0));
        log.keep(start, PathId(0), &piece(5_000_000, b"x"));
        log.forget(0);
        assert_eq!((log.bytes, log.streams.len()), (0, 0));
    }

    #[test]
    fn the_end_of_a_stream_of_which_something_was_sent_again_is_sent_again_too() {
        let (mut log, start) = (log(), Instant::now());
        log.keep(start, PathId(0), &piece(0, b"abcd"));
        log.note_again(start, &piece(0, b"abcd"));
        log.keep(start, PathId(0), &StreamChunk { fin: true, ..piece(4, b"") });
        log.confirm(progress(4, &[]));
        // At once, whatever the timeout.
        assert_eq!(overdue(&mut log, start, 100), [(4, Vec::new(), false)]);
        assert_eq!(overdue(&mut log, start, 100), []);
    }

    #[test]
    fn no_more_is_sent_again_than_is_asked_for() {
        let (mut log, start) = (log(), Instant::now());
        (0..10).for_each(|at| log.keep(start, PathId(0), &piece(at, b"x")));
        assert_eq!(overdue(&mut log, start + 40 * MS, 3).len(), 3);
        assert_eq!(overdue(&mut log, start + 40 * MS, 100).len(), 7);
    }
}
