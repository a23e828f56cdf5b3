//! The memory of this process.

use crate::usage;

/// The memory of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryUse {
    /// Anonymous resident memory (bytes): heap, stacks and static data, without mapped files.
    pub resident: u64,
    /// Heap memory that the program has allocated and not freed (bytes).
    pub in_use: u64,
}

impl MemoryUse {
    /// Resident memory that is not in use on the heap (bytes): pages that the allocator keeps after a `free`,
    /// stacks, static data.
    pub fn unused(self) -> u64 {
        self.resident.saturating_sub(self.in_use)
    }
}

/// Returns the memory of this process. `None` where the C library is not glibc, or without `/proc`.
pub fn memory_use() -> Option<MemoryUse> {
    Some(MemoryUse { resident: usage::anonymous_memory(std::process::id())?, in_use: heap_in_use()? })
}

/// Returns the heap memory that the program has allocated and not freed (bytes). `None` where the C library
/// is not glibc.
pub fn heap_in_use() -> Option<u64> {
    #[cfg(target_env = "gnu")]
    {
        // SAFETY: glibc takes its own locks, and only counts.
        let heap = unsafe { libc::mallinfo2() };
        // Small and large blocks; the latter have mappings of their own.
        Some((heap.uordblks + heap.hblkhd) as u64)
    }
    #[cfg(not(target_env = "gnu"))]
    None
}

/// Returns the freed pages that the allocator still holds to the kernel (malloc_trim(3)). Takes about 7 ms
/// for each 100 MB (measured, `docs/design/memory.md`), during which no thread can allocate. Does nothing
/// where the C library is not glibc.
pub fn trim_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: glibc takes its own locks, and nothing that is in use is touched.
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(all(test, target_env = "gnu"))]
mod tests {
    use super::*;

    #[test]
    fn memory_that_was_freed_is_unused_until_it_is_returned() {
        const BLOCK: usize = 64 << 10;
        const BLOCKS: usize = 512;
        let unused = || memory_use().expect("/proc is there").unused();
        let before = unused();
        // Every second block stays, so that the allocator cannot give the end of the heap back by itself.
        let blocks: Vec<Vec<u8>> = (0..BLOCKS).map(|_| vec![1; BLOCK]).collect();
        let kept: Vec<Vec<u8>> = blocks.into_iter().step_by(2).collect();
        let freed = (BLOCKS / 2 * BLOCK) as u64;
        let held = unused().saturating_sub(before);
        assert!(held > freed / 2, "{held} of {freed} bytes are held");
        trim_heap();
        let left = unused().saturating_sub(before);
        assert!(left < freed / 4, "{left} of {freed} bytes are left; {} blocks are in use", kept.len());
    }
}
