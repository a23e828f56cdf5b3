//! The inputs that a coverage-guided fuzzer gives to every parser, and those that it found.
//!
//! In: arbitrary bytes. Out: nothing, or a panic. Each target is a function in [`TARGETS`]; it asserts more
//! than that nothing panics: what is written is read back, pieces give the same as the whole, memory and
//! output are bounded, invariants of the module hold. `fuzz_targets/` has the programs for libFuzzer, which
//! `./dev fuzz targets` builds and runs with the nightly compiler. The tests here replay, with the stable
//! one, the seeds in `seeds/TARGET/` and the inputs in `found/TARGET/`, which broke something once. The seeds
//! are made by [`seeds::all`] with the encoders of the product. `pages/` is the web site of a target.
#![deny(unsafe_code)]
// Fuzzers need a moment to count from, and files of their own.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

mod api;
mod config;
mod datagrams;
#[cfg(feature = "libfuzzer")]
mod forked;
mod front;
mod https;
mod input;
mod live;
mod machine;
mod masque;
mod measure;
mod packets;
pub mod seeds;
mod users;

pub use api::control_api;
pub use config::config;
pub use datagrams::{fec, labels};
#[cfg(feature = "libfuzzer")]
pub use forked::{play_in_copy, prepare_copies};
pub use front::{dns, dns_forwarder, proxy_heads, proxy_protocol};
pub use https::https_front;
pub use live::{client, client_with_session, server, server_with_session};
pub use machine::{helper, journal};
pub use masque::{capsules, h3_frames, qpack, requests};
pub use measure::measure;
pub use packets::{ip_packets, split_join, split_tcp};
pub use users::{join_link, users};

/// A fuzz target, run with each input of the fuzzer.
pub type Run = fn(&[u8]);

/// All targets with their names, which are also those of the folders with their inputs.
pub const TARGETS: &[(&str, Run)] = &[
    ("capsules", capsules),
    ("client", client),
    ("config", config),
    ("control_api", control_api),
    ("dns", dns),
    ("dns_forwarder", dns_forwarder),
    ("fec", fec),
    ("h3_frames", h3_frames),
    ("helper", helper),
    ("https_front", https_front),
    ("ip_packets", ip_packets),
    ("join_link", join_link),
    ("journal", journal),
    ("labels", labels),
    ("measure", measure),
    ("proxy_heads", proxy_heads),
    ("proxy_protocol", proxy_protocol),
    ("qpack", qpack),
    ("requests", requests),
    ("server", server),
    ("split_join", split_join),
    ("split_tcp", split_tcp),
    ("users", users),
];

#[cfg(test)]
mod tests;
