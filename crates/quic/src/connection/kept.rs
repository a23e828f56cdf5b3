//! What was sent on bulk streams and has not arrived as far as is known, so that it can be sent again; and at the other
//! end, what has arrived. The library knows both, and tells neither.
//!
//! Always holds: what is kept is bounded, and it is in the library's own buffers, too, until that learns that it arrived.

use std::collections::{BTreeSet, VecDeque};

use mpvpn_types::{Duration, Instant, PathId};
use rustc_hash::FxHashMap;

use super::{Connection, Piece, streams::Inbound};
use crate::StreamId;

/// Bytes that are kept at most; what is sent beyond is not.
const MOST_KEPT: usize = 16 << 20;
/// What keeping a piece takes beside its bytes.
const KEEPING: usize = 128;
/// Gaps of a stream that are told at a time, and the held pieces that are looked through for them.
const MOST_GAPS: usize = 16;
const MOST_LOOKS: usize = 512;

/// How far a stream has come at the end that reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Which stream.
    pub stream: StreamId,
    /// All bytes before this place were handed to their reader.
    pub next: u64,
    /// The reader waits for what comes there; else it may have come.
    pub waits: bool,
    /// What is missing from `next` on, as far as the first thing behind it that has come: place and bytes, in order.
    pub gaps: Vec<(u64, u64)>,
}

/// Bytes that the far end waits for and should have.
#[derive(Clone, Debug)]
pub struct Overdue {
    /// What they are.
    pub piece: Piece,
    /// Where they were sent first.
    pub path: PathId,
    /// Nothing was acknowledged there since.
    pub stalls: bool,
}

#[derive(Debug)]
struct Sent {
    piece: Piece,
    path: PathId,
    /// When it was sent last.
    at: Instant,
    /// It is sent again in any case.
    due: bool,
}

impl Sent {
    fn end(&self) -> u64 {
        self.piece.at + self.piece.bytes.len() as u64
    }
}

#[derive(Debug, Default)]
struct Stream {
    pieces: VecDeque<Sent>,
    bytes: usize,
    /// What the far end said last; it waits for the first bytes without saying so.
    next: u64,
    reads: bool,
    gaps: Vec<(u64, u64)>,
    /// Something of it was sent again: the far end's library does not know where it ends until all has come to that.
    again: bool,
}

/// What was sent on all streams of a connection.
#[derive(Debug, Default)]
pub(super) struct Kept {
    on: bool,
    streams: FxHashMap<StreamId, Stream>,
    /// Those of which something is kept.
    some: BTreeSet<StreamId>,
    bytes: usize,
    /// Bytes that were ever sent.
    sent: u64,
}

impl Kept {
    /// Bytes have left on a path.
    pub(super) fn keep(&mut self, now: Instant, path: PathId, piece: &Piece) {
        self.sent += piece.bytes.len() as u64;
        if !self.on || self.bytes > MOST_KEPT {
            return;
        }
        let stream = self.streams.entry(piece.stream).or_default();
        self.bytes += piece.bytes.len() + KEEPING;
        stream.bytes += piece.bytes.len() + KEEPING;
        let due = piece.ends && stream.again;
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
    pub(super) fn note_again(&mut self, now: Instant, piece: &Piece) {
        let Some(stream) = self.streams.get_mut(&piece.stream) else { return };
        if !std::mem::replace(&mut stream.again, true)
            && let Some(last) = stream.pieces.back_mut().filter(|last| last.piece.ends)
        {
            last.due = true;
        }
        let first = stream.pieces.partition_point(|sent| sent.piece.at < piece.at);
        if let Some(sent) = stream.pieces.get_mut(first) {
            sent.at = now;
        }
    }
}

impl Inbound {
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

impl Connection {
    /// Both ends tell each other how far bulk streams have come from now on: [`Self::take_progress`] says it,
    /// [`Self::confirm`] takes it.
    pub fn tell_progress(&mut self) {
        self.streams.progress = true;
    }

    /// What is sent on bulk streams is kept from now on until [`Self::confirm`] is told that it arrived.
    pub fn keep_sent(&mut self) {
        self.streams.kept.on = true;
    }

    /// What was said about a stream did not arrive.
    pub fn retell(&mut self, id: StreamId) {
        self.streams.tell(id);
    }

    /// Whether the far end waits for what [`Self::take_progress`] has to say.
    pub fn progress_is_urgent(&self) -> bool {
        self.streams.urgent
    }

    /// How many streams [`Self::take_progress`] may have something to say about.
    pub fn progresses(&self) -> usize {
        self.streams.to_tell.len()
    }

    /// What is urgent is being told.
    pub fn note_told(&mut self) {
        self.streams.urgent = false;
    }

    /// The progress of the next stream on which something has changed since it was told last, or bytes are missing;
    /// `None` if the stream is gone.
    pub fn take_progress(&mut self) -> Option<Progress> {
        let id = self.streams.to_tell.pop_front()?;
        let inbound = self.streams.inbound.get_mut(&id)?;
        let gaps = if inbound.waits { inbound.gaps() } else { Vec::new() };
        inbound.queued = !gaps.is_empty();
        inbound.told = inbound.next;
        if inbound.queued {
            self.streams.to_tell.push_back(id);
        }
        Some(Progress { stream: id, next: inbound.next, waits: inbound.waits, gaps })
    }

    /// Takes what the far end said about a stream that this one writes.
    pub fn confirm(&mut self, now: Instant, progress: Progress) {
        self.note_read(now, progress.stream, progress.next);
        let kept = &mut self.streams.kept;
        let Some(stream) = kept.streams.get_mut(&progress.stream) else { return };
        if progress.next < stream.next {
            return;
        }
        while let Some(sent) =
            stream.pieces.pop_front_if(|sent| sent.end() <= progress.next && !sent.piece.ends)
        {
            stream.bytes -= sent.piece.bytes.len() + KEEPING;
            kept.bytes -= sent.piece.bytes.len() + KEEPING;
        }
        if stream.pieces.is_empty() {
            kept.some.remove(&progress.stream);
        }
        (stream.next, stream.reads, stream.gaps) = (progress.next, !progress.waits, progress.gaps);
    }

    /// Hands out bytes that the far end waits for, which were sent longer ago than `patience` says for their path: at
    /// most about `most` bytes. They count as sent now.
    pub fn take_overdue(
        &mut self,
        now: Instant,
        patience: &[(PathId, Duration)],
        mut most: usize,
        mut each: impl FnMut(Overdue),
    ) {
        let paths = &self.paths;
        let stalls = |path: PathId, at: Instant| {
            paths.iter().find(|other| other.id == path).is_some_and(|path| path.gate.acked_sent() < at)
        };
        let kept = &mut self.streams.kept;
        let least = patience.iter().map(|(_, patience)| *patience).min().unwrap_or_default();
        for id in &kept.some {
            let Some(stream) = kept.streams.get_mut(id).filter(|stream| !stream.reads) else { continue };
            let mut again = false;
            for sent in &mut stream.pieces {
                let age = now.saturating_duration_since(sent.at);
                let patience = patience.iter().find(|(path, _)| *path == sent.path);
                if !sent.due && age < patience.map_or(least, |(_, patience)| *patience) {
                    continue;
                }
                if most == 0 {
                    break;
                }
                let mut any = false;
                let all = [(stream.next, u64::MAX - stream.next)];
                for (at, len) in if stream.gaps.is_empty() { &all[..] } else { &stream.gaps } {
                    let (from, to) = ((*at).max(sent.piece.at), (at + len).min(sent.end()));
                    // The end has no bytes.
                    if from > to || from == to && !(sent.piece.ends && to == sent.end()) {
                        continue;
                    }
                    let place = |at: u64| (at - sent.piece.at) as usize;
                    let bytes = sent.piece.bytes.slice(place(from)..place(to));
                    most = most.saturating_sub(bytes.len().max(1));
                    let ends = sent.piece.ends && to == sent.end();
                    let piece = Piece { stream: *id, at: from, bytes, ends };
                    let stalls = !sent.due && stalls(sent.path, sent.at);
                    each(Overdue { piece, path: sent.path, stalls });
                    any = true;
                }
                if any {
                    (sent.at, sent.due) = (now, false);
                    again |= !sent.piece.ends;
                }
            }
            if again {
                // An end that was sent before is as unknown as one that is sent from now on.
                stream.again = true;
                if let Some(last) = stream.pieces.back_mut().filter(|last| last.piece.ends) {
                    last.due = true;
                }
            }
        }
    }

    /// Bytes that were ever sent on bulk streams, but for repetitions.
    pub fn stream_bytes(&self) -> u64 {
        self.streams.kept.sent
    }
}
