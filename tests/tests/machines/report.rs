//! The steps of a test, with their durations.

use std::time::{Duration, Instant};

/// Runs a step, and prints its name with its duration.
pub(crate) fn step<T>(name: &str, task: impl FnOnce() -> T) -> T {
    let began = Instant::now();
    let result = task();
    println!("  {:6.2} s  {name}", began.elapsed().as_secs_f64());
    result
}

/// Prints a measured value beside its bar, and panics if the value exceeds the bar.
pub(crate) fn at_most(what: &str, measured: f64, bar: f64, unit: &str) {
    println!("            {what}: {measured:.2} {unit} (at most {bar} {unit})");
    assert!(measured <= bar, "{what}: {measured:.2} {unit}, and it may be {bar} {unit}");
}

/// The same for a duration in seconds.
pub(crate) fn within(what: &str, measured: Duration, bar: Duration) {
    at_most(what, measured.as_secs_f64(), bar.as_secs_f64(), "s");
}
