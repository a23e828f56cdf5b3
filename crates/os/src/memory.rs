//! The heap of this process.

/// Returns the freed pages that the allocator still holds to the kernel (malloc_trim(3)). Takes about 7 ms for each 100 MB
/// (measured, `docs/design/memory.md`), during which no thread can allocate. Does nothing where the C library is not glibc.
pub fn trim_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: glibc takes its own locks, and nothing that is in use is touched.
    unsafe {
        libc::malloc_trim(0);
    }
}
