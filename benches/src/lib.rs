//! Instruction counts of the code that processes every packet, by callgrind.
//!
//! The benchmarks in `benches/` are written with gungraun. Two programs use this library: `gungraun-runner`,
//! which each benchmark binary starts with a list of its benchmarks ([`plan`]), runs each under callgrind
//! ([`callgrind`]) and writes a report; and `micro-table`, which reads reports ([`report`]) and compares two
//! of them, or one with the numbers in the tree ([`baseline`]).
//!
//! gungraun's own runner is not used because of its size: it has 93 dependencies that nothing else here
//! needs, and compiling them would take most of the first `./dev test micro` on a machine.

pub mod baseline;
pub mod callgrind;
pub mod plan;
pub mod report;

use std::collections::BTreeMap;

/// Instructions of each benchmark, by its name.
pub type Counts = BTreeMap<String, u64>;

/// Differences of at most this many instructions are ignored, whatever their percentage. Larger: a doubled
/// `packet::checksum_update` (28 instructions) passes. Smaller: one spilled register in it fails.
pub const MIN_DIFFERENCE: u64 = 5;

/// Whether `new` is more than `threshold` percent, and more than [`MIN_DIFFERENCE`], above `old`.
pub fn exceeds(new: u64, old: u64, threshold: f64) -> bool {
    // Without a division, so that exactly `threshold` percent is not above it.
    new as f64 * 100.0 > old as f64 * (100.0 + threshold) && new > old + MIN_DIFFERENCE
}

/// The change from `old` to `new` (percent).
pub fn percent(old: u64, new: u64) -> f64 {
    if old == new { 0.0 } else { (new as f64 / old.max(1) as f64 - 1.0) * 100.0 }
}
