//! Repair for packets of a path, and what is lost of them back: 100 packets of 1300 bytes each time, in groups of 20.
#![allow(clippy::disallowed_types)] // Edge: what the macros make opens files.
#![allow(missing_docs, unused_qualifications, reason = "what the macros of gungraun make")]
#![allow(clippy::disallowed_methods, reason = "a benchmark needs a moment to count from")]

mod setup;

use std::hint::black_box;

use gungraun::{library_benchmark, library_benchmark_group, main};

use setup::{Came, Leaving};

// Packets into groups, and the repair out.
#[library_benchmark]
#[bench::repair_1_of_20(Leaving::new(1))]
#[bench::repair_6_of_20(Leaving::new(6))]
fn protect(mut leaving: Leaving) -> (usize, Leaving) {
    (black_box(&mut leaving).pass(), leaving)
}

// What came into groups, and what was lost out.
#[library_benchmark]
#[bench::lost_0_of_20(Came::new(0))]
#[bench::lost_1_of_20(Came::new(1))]
#[bench::lost_6_of_20(Came::new(6))]
fn restore(mut came: Came) -> (usize, Came) {
    (black_box(&mut came).pass(), came)
}

library_benchmark_group!(name = repair, benchmarks = [protect, restore]);
main!(library_benchmark_groups = repair);
