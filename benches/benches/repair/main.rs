//! Instructions of forward error correction: repair packets for, and recovery of, 100 packets of 1300 bytes
//! in groups of 20.
#![allow(clippy::disallowed_types)] // Edge: what the macros make opens files.
#![allow(missing_docs, unused_qualifications, reason = "what the macros of gungraun make")]
#![allow(clippy::disallowed_methods, reason = "a benchmark needs a moment to count from")]

mod setup;

use std::hint::black_box;

use gungraun::{library_benchmark, library_benchmark_group, main};

use setup::{ReceivedPackets, SentPackets};

// Encode: packets into groups, repair packets out.
#[library_benchmark]
#[bench::repair_1_of_20(SentPackets::new(1))]
#[bench::repair_6_of_20(SentPackets::new(6))]
fn protect(mut sent: SentPackets) -> (usize, SentPackets) {
    (black_box(&mut sent).pass(), sent)
}

// Decode: received packets into groups, lost packets out.
#[library_benchmark]
#[bench::lost_0_of_20(ReceivedPackets::new(0))]
#[bench::lost_1_of_20(ReceivedPackets::new(1))]
#[bench::lost_6_of_20(ReceivedPackets::new(6))]
fn restore(mut received: ReceivedPackets) -> (usize, ReceivedPackets) {
    (black_box(&mut received).pass(), received)
}

library_benchmark_group!(name = repair, benchmarks = [protect, restore]);
main!(library_benchmark_groups = repair);
