//! Memory of this process.

/// Gives pages back to the kernel that were freed but that the allocator keeps for later. Takes about 7 ms for each 100 MB, in
/// which no thread can allocate. Does nothing where the C library is not glibc.
pub fn give_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: glibc takes its own locks, and nothing that is in use is touched.
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resident() -> usize {
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
        statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
    }

    #[test]
    #[cfg(target_env = "gnu")]
    fn what_was_freed_between_things_that_are_kept_is_given_back() {
        let before = resident();
        let all: Vec<Box<[u8]>> = (0..4000).map(|_| vec![1; 16 << 10].into()).collect();
        let kept: Vec<_> = all.into_iter().step_by(100).collect();
        give_back();
        let more = resident().saturating_sub(before);
        assert!(
            more < 16 << 20,
            "{more} bytes more than before, of which {} are in use",
            kept.len() * (16 << 10)
        );
    }
}
