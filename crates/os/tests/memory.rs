//! What memory of the process is given back. Alone in its program, because other tests would take memory meanwhile.
#![cfg(target_env = "gnu")]

use mpvpn_os::memory::trim_heap;

/// Bytes of this process that are in memory.
fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

#[test]
fn what_was_freed_between_things_that_are_kept_is_given_back() {
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
