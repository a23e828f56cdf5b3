//! `memory::trim_heap` returns pages to the kernel. Alone in its program, because other tests would allocate
//! meanwhile.
#![cfg(target_env = "gnu")]

use mpvpn_os::memory::trim_heap;

/// The resident set size of this process, in bytes.
fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

#[test]
fn freed_pages_between_pages_in_use_are_returned_to_the_kernel() {
    let before = resident();
    let all: Vec<Box<[u8]>> = (0..4000).map(|_| vec![1; 16 << 10].into()).collect();
    let kept: Vec<_> = all.into_iter().step_by(100).collect();
    trim_heap();
    let more = resident().saturating_sub(before);
    assert!(
        more < 16 << 20,
        "{more} bytes more than before, of which {} are in use",
        kept.len() * (16 << 10)
    );
}
