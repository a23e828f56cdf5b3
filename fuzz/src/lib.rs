//! The inputs that a coverage-guided fuzzer gives to every parser, and those that it found.
//!
//! In: arbitrary bytes. Out: nothing, or a panic. Each target is a function in [`TARGETS`]; it asserts more
//! than that nothing panics: what is written is read back, pieces give the same as the whole, memory and
//! output are bounded, invariants of the module hold. `fuzz_targets/` has the programs for libFuzzer, which
//! `./dev fuzz targets` builds and runs with the nightly compiler. The tests here replay, with the stable
//! one, the seeds in `seeds/TARGET/` and the inputs in `found/TARGET/`, which broke something once. The seeds
//! are made by [`seeds::all`] with the encoders of the product.
#![forbid(unsafe_code)]
// Fuzzers need a moment to count from, and files of their own.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

mod config;
mod datagrams;
mod front;
mod input;
mod live;
mod masque;
mod measure;
mod packets;
pub mod seeds;

pub use config::config;
pub use datagrams::{fec, labels};
pub use front::{dns, https_front, proxy_heads, proxy_protocol};
pub use live::{client, server};
pub use masque::{capsules, h3_frames, qpack, requests};
pub use measure::measure;
pub use packets::{ip_packets, split_join, split_tcp};

/// A fuzz target, run with each input of the fuzzer.
pub type Run = fn(&[u8]);

/// All targets with their names, which are also those of the folders with their inputs.
pub const TARGETS: &[(&str, Run)] = &[
    ("capsules", capsules),
    ("client", client),
    ("config", config),
    ("dns", dns),
    ("fec", fec),
    ("h3_frames", h3_frames),
    ("https_front", https_front),
    ("ip_packets", ip_packets),
    ("labels", labels),
    ("measure", measure),
    ("proxy_heads", proxy_heads),
    ("proxy_protocol", proxy_protocol),
    ("qpack", qpack),
    ("requests", requests),
    ("server", server),
    ("split_join", split_join),
    ("split_tcp", split_tcp),
];

#[cfg(test)]
mod tests;
