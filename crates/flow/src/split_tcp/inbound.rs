use std::collections::VecDeque;

use bytes::{Bytes, BytesMut};

use super::seq::Seq;

/// Out-of-order segments that are kept at most; gaps are rare on a local link. Fewer: retransmissions; more:
/// memory.
const MAX_OUT_OF_ORDER: usize = 64;
/// The largest empty buffer that an idle connection keeps (bytes). Smaller: allocations; larger: memory of
/// idle connections.
const MAX_IDLE_BUFFER: usize = 1024;
/// The largest buffer (bytes): one read of a TUN device. Larger: data that was partly read keeps more memory
/// alive.
const MAX_CHUNK: usize = 64 << 10;

/// The receiving side: bytes of the app in order, until they are read (RFC 9293 §3.10.7.4).
///
/// Always holds: no byte is accepted twice, nor beyond the announced window, whose right edge never moves
/// back.
#[derive(Debug, Default)]
pub(super) struct Inbound {
    /// The next expected byte (RCV.NXT).
    pub(super) next: Seq,
    /// The right edge of the announced window (RCV.NXT + RCV.WND).
    edge: Seq,
    /// The shift of announced windows.
    scale: u8,
    /// Bytes that wait to be read: these, then those of `tail`. Bytes that were read keep their chunk alive,
    /// so chunks are small.
    chunks: VecDeque<Bytes>,
    tail: BytesMut,
    /// Bytes that wait to be read.
    pub(super) waiting: usize,
    /// Out-of-order segments, by their first byte; they may overlap.
    out_of_order: Vec<(Seq, Bytes)>,
    /// The sequence number of the app's FIN, once received.
    end: Option<Seq>,
    pub(super) ended: bool,
    pub(super) end_read: bool,
}

impl Inbound {
    /// After a SYN with the sequence number `first`, which may be followed by `window` bytes.
    pub(super) fn new(first: Seq, window: usize, scale: u8) -> Self {
        let next = first.plus(1);
        Self { next, edge: next.plus(window), scale, ..Self::default() }
    }

    /// Whether all bytes up to the FIN were read; if so, the reader knows of the end now.
    pub(super) fn read_end(&mut self) -> bool {
        self.end_read = self.ended && self.waiting == 0;
        self.end_read
    }

    /// Bytes that are held, in order or not.
    pub(super) fn held(&self) -> usize {
        self.waiting + self.out_of_order.iter().map(|(_, bytes)| bytes.len()).sum::<usize>()
    }

    /// Whether a segment is acceptable (RFC 9293 §3.10.7.4); `len` includes SYN and FIN.
    pub(super) fn admits(&self, seq: Seq, len: usize) -> bool {
        let window = self.edge.plus(self.max_rounding()).since(self.next).max(0);
        let inside = |at: Seq| (0..window).contains(&at.since(self.next));
        match (len, window) {
            (0, 0) => seq == self.next,
            (0, _) => inside(seq),
            (_, 0) => false,
            _ => inside(seq) || inside(seq.plus(len - 1)),
        }
    }

    /// Takes a segment's payload and FIN. Returns whether the next expected byte has advanced.
    pub(super) fn accept(&mut self, mut seq: Seq, mut payload: &[u8], mut fin: bool) -> bool {
        if self.ended {
            return false;
        }
        let behind = self.next.beyond(seq);
        if behind > 0 {
            let Some(rest) = payload.get(behind..) else { return false };
            (seq, payload) = (self.next, rest);
        }
        let room = self.edge.plus(self.max_rounding()).beyond(seq);
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
            self.hold_out_of_order(seq, payload);
            return false;
        }
        let before = self.next;
        self.append(payload);
        self.append_out_of_order();
        if self.end == Some(self.next) {
            self.ended = true;
            self.next = self.next.plus(1);
            self.out_of_order = Vec::new();
        }
        self.next != before
    }

    fn hold_out_of_order(&mut self, seq: Seq, payload: &[u8]) {
        let known = self.out_of_order.iter().any(|(at, bytes)| *at == seq && bytes.len() >= payload.len());
        if payload.is_empty() || known || self.out_of_order.len() == MAX_OUT_OF_ORDER {
            return;
        }
        // Overlapping segments together have no more bytes than the window.
        let kept: usize = self.out_of_order.iter().map(|(_, bytes)| bytes.len()).sum();
        if kept + payload.len() > self.edge.plus(self.max_rounding()).beyond(self.next) {
            return;
        }
        let at = self.out_of_order.partition_point(|(at, _)| at.since(seq) <= 0);
        self.out_of_order.insert(at, (seq, Bytes::copy_from_slice(payload)));
    }

    /// Appends out-of-order segments that are next now.
    fn append_out_of_order(&mut self) {
        while let Some((seq, _)) = self.out_of_order.first()
            && seq.since(self.next) <= 0
        {
            let (seq, bytes) = self.out_of_order.remove(0);
            let mut fresh = bytes.get(self.next.beyond(seq)..).unwrap_or_default();
            if let Some(end) = self.end {
                fresh = &fresh[..fresh.len().min(end.beyond(self.next))];
            }
            self.append(fresh);
        }
    }

    fn append(&mut self, payload: &[u8]) {
        if self.tail.capacity() - self.tail.len() < payload.len() {
            let size = payload.len().max((2 * self.tail.len()).min(MAX_CHUNK));
            if !self.tail.is_empty() {
                self.chunks.push_back(self.tail.split().freeze());
            }
            self.tail.reserve(size);
        }
        self.tail.extend_from_slice(payload);
        self.waiting += payload.len();
        self.next = self.next.plus(payload.len());
    }

    /// Reads up to `max` bytes; none only if none wait.
    pub(super) fn read(&mut self, max: usize) -> Bytes {
        let bytes = match self.chunks.front_mut() {
            Some(first) => first.split_to(first.len().min(max)),
            None => self.tail.split_to(self.tail.len().min(max)).freeze(),
        };
        self.chunks.pop_front_if(|first| first.is_empty());
        self.waiting -= bytes.len();
        bytes
    }

    /// Whether a window update is worth a packet, where `limit` bytes may be held (silly window avoidance,
    /// RFC 9293 §3.8.6.2.2).
    pub(super) fn needs_window_update(&self, limit: usize, mss: usize) -> bool {
        let gain = self.window_edge(limit).beyond(self.edge);
        let closed = self.edge.since(self.next) < mss as i32;
        !self.ended && (gain >= limit / 2 || closed && gain >= mss.min(limit / 2))
    }

    /// The window to announce, scaled, where `limit` bytes may be held.
    pub(super) fn announce(&mut self, limit: usize) -> u16 {
        let window_edge = self.window_edge(limit);
        if window_edge.since(self.edge) > 0 {
            self.edge = window_edge;
        }
        // Rounded up, because an announced window must not shrink.
        let window = (self.edge.beyond(self.next) + self.max_rounding()) >> self.scale;
        u16::try_from(window).unwrap_or(u16::MAX)
    }

    /// The right edge of the window if `limit` bytes may wait.
    fn window_edge(&self, limit: usize) -> Seq {
        let max = usize::from(u16::MAX) << self.scale;
        let first_unread = Seq(self.next.0.wrapping_sub(self.waiting as u32));
        first_unread.plus(limit.min(self.waiting + max))
    }

    /// Bytes that rounding may add to a window.
    fn max_rounding(&self) -> usize {
        (1 << self.scale) - 1
    }

    /// Whether [`Self::trim_memory`] would free memory.
    pub(super) fn has_spare(&self) -> bool {
        self.waiting == 0 && self.tail.capacity() > MAX_IDLE_BUFFER
    }

    /// Frees memory that is not in use.
    pub(super) fn trim_memory(&mut self) {
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

    /// All bytes that wait.
    fn read_all(inbound: &mut Inbound) -> Vec<u8> {
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
            if inbound.waiting > 200 << 10 {
                taken.push(inbound.read(64 << 10));
            }
            inbound.announce(1 << 20);
        }
        let chunks = inbound.chunks.iter().map(Bytes::len).sum::<usize>() + inbound.tail.capacity();
        assert!(chunks <= inbound.waiting + MAX_CHUNK, "{chunks} bytes for {}", inbound.waiting);
        assert!(taken.len() > 3 && taken.iter().all(|bytes| bytes.len() <= MAX_CHUNK));
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
        assert_eq!(read_all(&mut inbound), b"abcdeFGHIj");
        assert!(inbound.read_end() && inbound.end_read);
        assert_eq!(inbound.next, at(11), "the end has a number, too");
        assert!(!inbound.accept(at(10), b"k", false), "nothing comes after the end");
    }

    #[test]
    fn a_buffer_that_nobody_reads_closes_the_window_and_opens_it_again() {
        let mut inbound = Inbound::new(FIRST, 100, 0);
        assert!(inbound.accept(at(0), &[1; 150], true), "the part that fits, and so not the end");
        assert_eq!((inbound.waiting, inbound.announce(100), inbound.ended), (100, 0, false));
        assert!(!inbound.admits(at(100), 1) && inbound.admits(at(100), 0));
        assert!(!inbound.needs_window_update(100, 40));
        assert_eq!(inbound.read(30).len(), 30);
        assert!(!inbound.needs_window_update(100, 40), "too little for a segment");
        inbound.read(20);
        assert!(inbound.needs_window_update(100, 40));
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
            // Lost pieces come again at the end.
            for (start, len) in pieces.into_iter().chain([(0, 800)]) {
                let stop = (start + len).min(all.len());
                inbound.accept(at(start), &all[start..stop], stop == all.len());
                // Segments that overlap may each be kept.
                prop_assert!(inbound.held() <= 2 * (1000 + 16));
                read.extend_from_slice(&inbound.read(37));
                inbound.announce(1000);
            }
            read.extend(read_all(&mut inbound));
            prop_assert_eq!(read, all);
            prop_assert!(inbound.read_end() && inbound.end_read);
        }
    }
}
