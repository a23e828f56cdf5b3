//! A buffer pool for queued packets: chunks of memory that are filled, handed out in parts, and reused.
//!
//! In: bytes, appended to the buffer of [`Arena::reserve`]. Out: [`Bytes`] that keep their chunk alive.
//! Always holds: a chunk is reused only after all its parts were dropped, and nothing is allocated in the
//! steady state. Memory that the allocator returns to the kernel and takes again would cost a page fault for
//! every 4 KiB, more than the copy into it.

use std::collections::VecDeque;

use bytes::{Bytes, BytesMut};

/// Size of a chunk in bytes: one TUN read of up to 64 KiB, split into packets with a prefix each, fits. A
/// smaller chunk makes such a read allocate a chunk of its own; a larger one stays alive longer for a single
/// waiting packet.
const CHUNK_BYTES: usize = 128 * 1024;
/// After this many requests for a chunk, one chunk that is completely unused is freed. Fewer requests would
/// free memory that the next burst needs; more keep the memory of a burst longer. The number is chosen
/// (docs/design/packets.md, open questions).
const REQUESTS_PER_TRIM: u32 = 256;
/// Number of full chunks to examine for one that can be reused. With only one, a single packet that waits
/// long (in flight on a dead path, for example) would block all chunks behind it; with more, a search that
/// fails takes longer. The number is chosen (docs/design/packets.md, open questions).
const MAX_RECLAIM_ATTEMPTS: usize = 32;

/// A pool of reusable chunks of memory.
#[derive(Debug, Default)]
pub struct Arena {
    current: BytesMut,
    /// Full chunks, oldest first, because the parts of the oldest one are usually dropped first. A chunk
    /// that was examined and is still in use moves to the end.
    full_chunks: VecDeque<BytesMut>,
    requests_since_trim: u32,
}

impl Arena {
    /// An empty pool.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns a buffer to which at least `bytes` bytes can be appended without reallocation.
    #[inline]
    pub fn reserve(&mut self, bytes: usize) -> &mut BytesMut {
        if self.current.capacity() - self.current.len() < bytes {
            self.next_chunk(bytes);
        }
        &mut self.current
    }

    /// Takes what was appended since the last call.
    #[inline]
    pub fn take(&mut self) -> Bytes {
        self.current.split().freeze()
    }

    /// Frees all memory that no part refers to; for idle times.
    pub fn release(&mut self) {
        *self = Self::default();
    }

    fn next_chunk(&mut self, bytes: usize) {
        let unsent = self.current.split();
        let full = std::mem::take(&mut self.current);
        if full.capacity() > 0 {
            self.full_chunks.push_back(full);
        }
        let min_bytes = CHUNK_BYTES.max(bytes + unsent.len());
        self.current = self.reclaim(min_bytes).unwrap_or_else(|| BytesMut::with_capacity(min_bytes));
        self.current.extend_from_slice(&unsent);
        self.requests_since_trim += 1;
        if self.requests_since_trim == REQUESTS_PER_TRIM {
            self.requests_since_trim = 0;
            self.reclaim(CHUNK_BYTES);
        }
    }

    /// Removes and returns a full chunk of at least `min_bytes` that no part refers to any more.
    fn reclaim(&mut self, min_bytes: usize) -> Option<BytesMut> {
        for _ in 0..MAX_RECLAIM_ATTEMPTS.min(self.full_chunks.len()) {
            if let Some(free) = self.full_chunks.pop_front_if(|chunk| chunk.try_reclaim(min_bytes)) {
                return Some(free);
            }
            self.full_chunks.rotate_left(1);
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
    fn parts_keep_their_bytes_while_chunks_are_reused() {
        let mut arena = Arena::new();
        let mut waiting = VecDeque::new();
        for round in 0..10_000u32 {
            waiting.push_back((round as u8, fill(&mut arena, round as u8, 60_000)));
            if waiting.len() > 5 {
                let (byte, part) = waiting.pop_front().expect("not empty");
                assert!(part.len() == 60_000 && part.iter().all(|b| *b == byte));
            }
        }
        assert!(arena.full_chunks.len() <= 8, "{} chunks for 6 parts", arena.full_chunks.len());
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
    fn the_memory_of_a_burst_is_freed_gradually_and_completely_on_release() {
        let mut arena = Arena::new();
        let burst: Vec<Bytes> = (0..100).map(|_| fill(&mut arena, 2, 100_000)).collect();
        assert!(arena.full_chunks.len() >= 99);
        drop(burst);
        for _ in 0..100 * REQUESTS_PER_TRIM {
            fill(&mut arena, 3, 100_000);
        }
        assert!(arena.full_chunks.len() <= 2, "{} chunks left", arena.full_chunks.len());
        arena.release();
        assert!(arena.full_chunks.is_empty() && arena.current.capacity() == 0);
    }

    #[test]
    fn a_part_that_is_held_long_keeps_only_its_own_chunk() {
        let mut arena = Arena::new();
        let mut waiting = Vec::new();
        for round in 0..10_000u32 {
            let part = fill(&mut arena, 5, 60_000);
            if round % 1000 == 0 {
                waiting.push(part);
            }
            assert!(
                arena.full_chunks.len() <= waiting.len() + 4,
                "{} chunks, {round} parts",
                arena.full_chunks.len()
            );
        }
        assert_eq!(waiting.len(), 10);
    }

    #[test]
    fn a_request_larger_than_a_chunk_succeeds() {
        let mut arena = Arena::new();
        assert_eq!(fill(&mut arena, 4, 3 * CHUNK_BYTES).len(), 3 * CHUNK_BYTES);
    }

    #[test]
    fn appended_bytes_move_to_the_next_chunk_until_taken() {
        let mut arena = Arena::new();
        arena.reserve(CHUNK_BYTES).extend_from_slice(b"first ");
        arena.reserve(CHUNK_BYTES).extend_from_slice(b"second");
        assert_eq!(&arena.take()[..], b"first second");
    }
}
