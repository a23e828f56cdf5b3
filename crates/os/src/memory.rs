//! Memory of this process.

/// Gives pages back to the kernel that were freed but that the allocator keeps for later. Takes about 7 ms for each 100 MB, in
/// which no thread can allocate. Does nothing where the C library is not glibc.
pub fn trim_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: glibc takes its own locks, and nothing that is in use is touched.
    unsafe {
        libc::malloc_trim(0);
    }
}
