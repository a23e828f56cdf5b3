//! Memory for packets that wait: chunks that are filled, handed out in parts, and filled again.
//!
//! In come bytes, appended to [`Arena::reserve`]. Out go [`Bytes`] that keep their chunk alive. What always
//! holds: a chunk is filled again only when every part of it has been dropped, and in the steady state
//! nothing is allocated. Memory that the allocator gives back to the kernel and takes again costs a page
//! fault for every 4 KiB, which is more than the copy into it.

use std::collections::VecDeque;

use bytes::{Bytes, BytesMut};

/// Bytes of a chunk: a read of 64 KiB from a TUN device, cut into packets of any usual size.
const CHUNK: usize = 128 * 1024;
/// Chunks that came back unused after this many requests are one too many.
const REVIEW: u32 = 256;
/// So many chunks are looked at for one that may be filled again. A part of the first may wait far longer than those
/// behind it, as what is on its way over a path that has died does.
const TRIES: usize = 32;

/// Reusable chunks of memory.
#[derive(Debug, Default)]
pub struct Arena {
    current: BytesMut,
    /// Full chunks, the one that was filled first in front, as its parts are usually dropped first; those that were
    /// looked at in vain at the end.
    filled: VecDeque<BytesMut>,
    requests: u32,
}

impl Arena {
    /// An arena that holds no memory yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Where to append at least `bytes` bytes without the buffer being moved.
    #[inline]
    pub fn reserve(&mut self, bytes: usize) -> &mut BytesMut {
        if self.current.capacity() - self.current.len() < bytes {
            self.next_chunk(bytes);
        }
        &mut self.current
    }

    /// Hands out what was appended since the last call.
    #[inline]
    pub fn take(&mut self) -> Bytes {
        self.current.split().freeze()
    }

    /// Gives all memory back that is not in use; to be called when nothing is expected for a while.
    pub fn release(&mut self) {
        *self = Self::default();
    }

    fn next_chunk(&mut self, bytes: usize) {
        let unsent = self.current.split();
        let full = std::mem::take(&mut self.current);
        if full.capacity() > 0 {
            self.filled.push_back(full);
        }
        let wanted = CHUNK.max(bytes + unsent.len());
        self.current = self.reclaim(wanted).unwrap_or_else(|| BytesMut::with_capacity(wanted));
        self.current.extend_from_slice(&unsent);
        self.requests += 1;
        if self.requests == REVIEW {
            self.requests = 0;
            self.reclaim(CHUNK);
        }
    }

    /// Takes out a full chunk of which nothing is in use any more.
    fn reclaim(&mut self, wanted: usize) -> Option<BytesMut> {
        for _ in 0..TRIES.min(self.filled.len()) {
            if let Some(free) = self.filled.pop_front_if(|chunk| chunk.try_reclaim(wanted)) {
                return Some(free);
            }
            self.filled.rotate_left(1);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(arena: &mut Arena, byte: u8, len: usize) -> Bytes {
        arena.reserve(len).extend_from_slice(&vec![byte; len]);
        arena.take()
    }

    #[test]
    fn parts_keep_their_bytes_while_chunks_are_used_again() {
        let mut arena = Arena::new();
        let mut waiting = VecDeque::new();
        for round in 0..10_000u32 {
            waiting.push_back((round as u8, fill(&mut arena, round as u8, 60_000)));
            if waiting.len() > 5 {
                let (byte, part) = waiting.pop_front().expect("not empty");
                assert!(part.len() == 60_000 && part.iter().all(|b| *b == byte));
            }
        }
        assert!(arena.filled.len() <= 8, "{} chunks for 6 parts", arena.filled.len());
    }

    #[test]
    fn the_steady_state_allocates_nothing() {
        let mut arena = Arena::new();
        let mut places = std::collections::BTreeSet::new();
        for _ in 0..1000 {
            let part = fill(&mut arena, 1, 60_000);
            places.insert(part.as_ptr() as usize);
        }
        assert!(places.len() <= 4, "{} places", places.len());
    }

    #[test]
    fn a_burst_is_given_back_bit_by_bit_and_at_rest_at_once() {
        let mut arena = Arena::new();
        let burst: Vec<Bytes> = (0..100).map(|_| fill(&mut arena, 2, 100_000)).collect();
        assert!(arena.filled.len() >= 99);
        drop(burst);
        for _ in 0..100 * REVIEW {
            fill(&mut arena, 3, 100_000);
        }
        assert!(arena.filled.len() <= 2, "{} chunks left", arena.filled.len());
        arena.release();
        assert!(arena.filled.is_empty() && arena.current.capacity() == 0);
    }

    #[test]
    fn parts_that_wait_long_keep_few_chunks() {
        let mut arena = Arena::new();
        let mut waiting = Vec::new();
        for round in 0..10_000u32 {
            let part = fill(&mut arena, 5, 60_000);
            if round % 1000 == 0 {
                waiting.push(part);
            }
            assert!(arena.filled.len() <= waiting.len() + 4, "{} chunks, {round} parts", arena.filled.len());
        }
        assert_eq!(waiting.len(), 10);
    }

    #[test]
    fn more_than_a_chunk_fits_too() {
        let mut arena = Arena::new();
        assert_eq!(fill(&mut arena, 4, 3 * CHUNK).len(), 3 * CHUNK);
    }

    #[test]
    fn what_was_appended_and_not_taken_moves_along() {
        let mut arena = Arena::new();
        arena.reserve(CHUNK).extend_from_slice(b"first ");
        arena.reserve(CHUNK).extend_from_slice(b"second");
        assert_eq!(&arena.take()[..], b"first second");
    }
}
