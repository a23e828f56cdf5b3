use std::collections::VecDeque;

use bytes::{Bytes, BytesMut};

use super::seq::Seq;

/// Segments that are kept because bytes before them are missing, which is rare on a link that loses nothing.
const MOST_AHEAD: usize = 64;
/// An empty buffer larger than this is given back when the flow rests (bytes).
const SMALL: usize = 1024;
/// Bytes that are kept together: what a read of a TUN device brings.
const CHUNK: usize = 64 << 10;

/// What an app sends: its bytes in order, as far as they came and were not read (RFC 9293 §3.10.7.4).
///
/// Always holds: no byte is taken twice, none beyond what was announced, and the announced edge never moves back.
#[derive(Debug)]
pub(super) struct Inbound {
    /// The next byte that is expected.
    next: Seq,
    /// The app may send up to here.
    edge: Seq,
    /// By how many bits announced windows are scaled.
    scale: u8,
    /// Bytes that wait to be read: these, and then those of `tail`. What was read keeps its chunk alive, so chunks are small.
    chunks: VecDeque<Bytes>,
    tail: BytesMut,
    /// Bytes in both.
    waiting: usize,
    /// Segments that came too early, by where they start; they may overlap.
    ahead: Vec<(Seq, Bytes)>,
    /// Where the app's bytes end, once it said so.
    end: Option<Seq>,
    ended: bool,
    end_read: bool,
}

impl Inbound {
    /// After a SYN with the sequence number `first`, which may be followed by `window` bytes.
    pub(super) fn new(first: Seq, window: usize, scale: u8) -> Self {
        let next = first.plus(1);
        Self {
            next,
            edge: next.plus(window),
            scale,
            chunks: VecDeque::new(),
            tail: BytesMut::new(),
            waiting: 0,
            ahead: Vec::new(),
            end: None,
            ended: false,
            end_read: false,
        }
    }

    /// The next byte that is expected: what to acknowledge.
    pub(super) fn next(&self) -> Seq {
        self.next
    }

    /// Whether all that the app will ever send has arrived.
    pub(super) fn has_ended(&self) -> bool {
        self.ended
    }

    /// Whether the app will send nothing more and everything was read, and notes that the reader knows.
    pub(super) fn read_end(&mut self) -> bool {
        self.end_read = self.ended && self.waiting == 0;
        self.end_read
    }

    /// Whether the reader has everything, and knows.
    pub(super) fn is_finished(&self) -> bool {
        self.end_read
    }

    /// Bytes that wait to be read.
    pub(super) fn len(&self) -> usize {
        self.waiting
    }

    /// What it holds (bytes).
    pub(super) fn held(&self) -> usize {
        self.waiting + self.ahead.iter().map(|(_, bytes)| bytes.len()).sum::<usize>()
    }

    /// Whether a segment lies in the window (RFC 9293 §3.10.7.4); `len` counts SYN and FIN.
    pub(super) fn admits(&self, seq: Seq, len: usize) -> bool {
        let window = self.edge.plus(self.slack()).since(self.next).max(0);
        let inside = |at: Seq| (0..window).contains(&at.since(self.next));
        match (len, window) {
            (0, 0) => seq == self.next,
            (0, _) => inside(seq),
            (_, 0) => false,
            _ => inside(seq) || inside(seq.plus(len - 1)),
        }
    }

    /// Takes a segment's payload, and its end if `fin`. Returns whether anything came that was expected next.
    pub(super) fn accept(&mut self, mut seq: Seq, mut payload: &[u8], mut fin: bool) -> bool {
        if self.ended {
            return false;
        }
        let behind = self.next.beyond(seq);
        if behind > 0 {
            let Some(rest) = payload.get(behind..) else { return false };
            (seq, payload) = (self.next, rest);
        }
        let room = self.edge.plus(self.slack()).beyond(seq);
        if payload.len() > room {
            (payload, fin) = (&payload[..room], false);
        }
        let stop = seq.plus(payload.len());
        if fin {
            self.end.get_or_insert(stop);
        }
        if let Some(end) = self.end {
            payload = &payload[..payload.len().saturating_sub(stop.beyond(end))];
        }
        if seq != self.next {
            self.keep(seq, payload);
            return false;
        }
        let before = self.next;
        self.append(payload);
        self.take_ahead();
        if self.end == Some(self.next) {
            self.ended = true;
            self.next = self.next.plus(1);
            self.ahead = Vec::new();
        }
        self.next != before
    }

    fn keep(&mut self, seq: Seq, payload: &[u8]) {
        let known = self.ahead.iter().any(|(at, bytes)| *at == seq && bytes.len() >= payload.len());
        if payload.is_empty() || known || self.ahead.len() == MOST_AHEAD {
            return;
        }
        // Copies of the same bytes do not add up to more than the app was allowed.
        let kept: usize = self.ahead.iter().map(|(_, bytes)| bytes.len()).sum();
        if kept + payload.len() > self.edge.plus(self.slack()).beyond(self.next) {
            return;
        }
        let at = self.ahead.partition_point(|(at, _)| at.since(seq) <= 0);
        self.ahead.insert(at, (seq, Bytes::copy_from_slice(payload)));
    }

    /// Takes over what had come too early and fits now.
    fn take_ahead(&mut self) {
        while let Some((seq, _)) = self.ahead.first()
            && seq.since(self.next) <= 0
        {
            let (seq, bytes) = self.ahead.remove(0);
            let mut fresh = bytes.get(self.next.beyond(seq)..).unwrap_or_default();
            if let Some(end) = self.end {
                fresh = &fresh[..fresh.len().min(end.beyond(self.next))];
            }
            self.append(fresh);
        }
    }

    fn append(&mut self, payload: &[u8]) {
        if self.tail.capacity() - self.tail.len() < payload.len() {
            let size = payload.len().max((2 * self.tail.len()).min(CHUNK));
            if !self.tail.is_empty() {
                self.chunks.push_back(self.tail.split().freeze());
            }
            self.tail.reserve(size);
        }
        self.tail.extend_from_slice(payload);
        self.waiting += payload.len();
        self.next = self.next.plus(payload.len());
    }

    /// Takes some of the bytes that wait, at most `most`; none only if none wait.
    pub(super) fn read(&mut self, most: usize) -> Bytes {
        let bytes = match self.chunks.front_mut() {
            Some(first) => first.split_to(first.len().min(most)),
            None => self.tail.split_to(self.tail.len().min(most)).freeze(),
        };
        self.chunks.pop_front_if(|first| first.is_empty());
        self.waiting -= bytes.len();
        bytes
    }

    /// Whether announcing the window anew is worth a packet, where `limit` bytes may be held.
    pub(super) fn is_worth_telling(&self, limit: usize, mss: usize) -> bool {
        let gain = self.wanted(limit).beyond(self.edge);
        let closed = self.edge.since(self.next) < mss as i32;
        !self.ended && (gain >= limit / 2 || closed && gain >= mss.min(limit / 2))
    }

    /// The window to announce, scaled, where `limit` bytes may be held.
    pub(super) fn announce(&mut self, limit: usize) -> u16 {
        let wanted = self.wanted(limit);
        if wanted.since(self.edge) > 0 {
            self.edge = wanted;
        }
        // Rounded up: what was announced must not shrink.
        let window = (self.edge.beyond(self.next) + self.slack()) >> self.scale;
        u16::try_from(window).unwrap_or(u16::MAX)
    }

    /// Up to where the app may send if `limit` bytes may wait.
    fn wanted(&self, limit: usize) -> Seq {
        let most = usize::from(u16::MAX) << self.scale;
        let first_unread = Seq(self.next.0.wrapping_sub(self.waiting as u32));
        first_unread.plus(limit.min(self.waiting + most))
    }

    /// What rounding may add to a window (bytes).
    fn slack(&self) -> usize {
        (1 << self.scale) - 1
    }

    /// Whether it holds memory that [`Self::rest`] gives back.
    pub(super) fn has_spare(&self) -> bool {
        self.waiting == 0 && self.tail.capacity() > SMALL
    }

    /// Gives back memory that is not in use.
    pub(super) fn rest(&mut self) {
        if self.has_spare() {
            (self.chunks, self.tail) = (VecDeque::new(), BytesMut::new());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const FIRST: Seq = Seq(u32::MAX - 50);

    fn at(offset: usize) -> Seq {
        FIRST.plus(1 + offset)
    }

    /// All that waits.
    fn rest(inbound: &mut Inbound) -> Vec<u8> {
        std::iter::from_fn(|| Some(inbound.read(100)).filter(|bytes| !bytes.is_empty())).flatten().collect()
    }

    #[test]
    fn what_nobody_reads_takes_little_more_memory_than_it_has_bytes() {
        let mut inbound = Inbound::new(FIRST, 1 << 20, 5);
        let (mut taken, mut sent) = (Vec::new(), 0);
        // As many bytes wait here as behind: what was read is still in use.
        for size in [40 << 10, 64 << 10, 1400, 30 << 10, 64 << 10].into_iter().cycle().take(15) {
            inbound.accept(at(sent), &vec![7; size], false);
            sent += size;
            if inbound.len() > 200 << 10 {
                taken.push(inbound.read(64 << 10));
            }
            inbound.announce(1 << 20);
        }
        let chunks = inbound.chunks.iter().map(Bytes::len).sum::<usize>() + inbound.tail.capacity();
        assert!(chunks <= inbound.len() + CHUNK, "{chunks} bytes for {}", inbound.len());
        assert!(taken.len() > 3 && taken.iter().all(|bytes| bytes.len() <= CHUNK));
    }

    #[test]
    fn old_new_and_repeated_bytes_come_out_once() {
        let mut inbound = Inbound::new(FIRST, 1000, 0);
        assert!(inbound.accept(at(0), b"abc", false));
        assert!(!inbound.accept(at(0), b"abc", false), "all of it is old");
        assert!(inbound.accept(at(1), b"bcde", false), "half of it is old");
        assert!(!inbound.accept(at(8), b"ij", true), "a gap before it");
        assert!(!inbound.accept(at(8), b"ij", true));
        assert!(inbound.accept(at(4), b"eFGHI", false), "fills the gap and overlaps both sides");
        assert_eq!(rest(&mut inbound), b"abcdeFGHIj");
        assert!(inbound.read_end() && inbound.is_finished());
        assert_eq!(inbound.next(), at(11), "the end has a number, too");
        assert!(!inbound.accept(at(10), b"k", false), "nothing comes after the end");
    }

    #[test]
    fn a_buffer_that_nobody_reads_closes_the_window_and_opens_it_again() {
        let mut inbound = Inbound::new(FIRST, 100, 0);
        assert!(inbound.accept(at(0), &[1; 150], true), "the part that fits, and so not the end");
        assert_eq!((inbound.len(), inbound.announce(100), inbound.has_ended()), (100, 0, false));
        assert!(!inbound.admits(at(100), 1) && inbound.admits(at(100), 0));
        assert!(!inbound.is_worth_telling(100, 40));
        assert_eq!(inbound.read(30).len(), 30);
        assert!(!inbound.is_worth_telling(100, 40), "too little for a segment");
        inbound.read(20);
        assert!(inbound.is_worth_telling(100, 40));
        assert_eq!(inbound.announce(100), 50);
        assert!(inbound.admits(at(100), 50) && !inbound.admits(at(150), 1));
    }

    #[test]
    fn a_smaller_limit_takes_nothing_back() {
        let mut inbound = Inbound::new(FIRST, 1000, 4);
        assert_eq!(inbound.announce(1000), 63, "1000 rounded up to a multiple of 16");
        assert_eq!(inbound.announce(10), 63);
        assert!(inbound.accept(at(0), &[1; 1000], false));
        assert_eq!(inbound.announce(10), 0);
    }

    proptest! {
        #[test]
        fn segments_in_any_order_make_the_same_bytes(
            pieces in proptest::collection::vec((0usize..600, 1usize..200), 1..60),
            scale in 0u8..5,
        ) {
            let all: Vec<u8> = (0..800u32).map(|n| (n % 251) as u8).collect();
            let mut inbound = Inbound::new(FIRST, 1000, scale);
            let mut read = Vec::new();
            // Whatever was lost comes again at the end.
            for (start, len) in pieces.into_iter().chain([(0, 800)]) {
                let stop = (start + len).min(all.len());
                inbound.accept(at(start), &all[start..stop], stop == all.len());
                // Segments that overlap may each be kept.
                prop_assert!(inbound.held() <= 2 * (1000 + 16));
                read.extend_from_slice(&inbound.read(37));
                inbound.announce(1000);
            }
            read.extend(rest(&mut inbound));
            prop_assert_eq!(read, all);
            prop_assert!(inbound.read_end() && inbound.is_finished());
        }
    }
}
