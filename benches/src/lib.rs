//! Instruction counts of the code that every packet runs through, by callgrind.
//!
//! The benchmarks in `benches/` are written with gungraun. Two programs use this library: `gungraun-runner`, which each
//! benchmark binary starts with a list of its benchmarks ([`plan`]), runs each under callgrind ([`callgrind`]) and
//! writes a report; and `micro-table`, which reads reports ([`report`]) and compares two of them, or one with the
//! numbers in the tree ([`baseline`]).
//!
//! gungraun has a runner of its own. It is not used, because of its size: 93 of its dependencies are needed by nothing else
//! here, and to compile it would be most of the time that `./dev test micro` takes on a machine that never did.

pub mod baseline;
pub mod callgrind;
pub mod plan;
pub mod report;

use std::collections::BTreeMap;

/// Instructions of each benchmark, by its name.
pub type Counts = BTreeMap<String, u64>;

/// A difference of so few instructions is never worse or better, whatever its share of a short function. Larger: a
/// doubled `packet::checksum_update` (28 instructions) passes. Smaller: one spilled register there fails.
pub const SLACK: u64 = 5;

/// Whether `new` is more than `threshold` percent, and more than [`SLACK`], above `old`.
pub fn exceeds(new: u64, old: u64, threshold: f64) -> bool {
    // Compared without a division, so that exactly `threshold` percent does not exceed it.
    new as f64 * 100.0 > old as f64 * (100.0 + threshold) && new > old + SLACK
}

/// The change from `old` to `new` (percent).
pub fn percent(old: u64, new: u64) -> f64 {
    if old == new { 0.0 } else { (new as f64 / old.max(1) as f64 - 1.0) * 100.0 }
}
