//! Peers that authenticate, agree on every extension, and then misuse each: a rogue client at a real server,
//! and a rogue server at a real client, in simulated time. What the attacked end holds is counted by the
//! allocator of this program.

#![allow(
    unreachable_pub,
    clippy::disallowed_methods,
    reason = "a world is a library for its tests, and needs an instant to begin with"
)]

mod beside;
mod client;
mod heap;
mod panics;
mod paths;
mod rogue;
mod rogue_server;
mod server;
mod turns;
#[path = "../simulation/world/mod.rs"]
mod world;

/// The limit for the bookkeeping (places, entries, timers) of one connection over the baseline (bytes).
const MAX_BOOKKEEPING: usize = 512 << 10;
/// The limit for packets and stream bytes that a session holds (bytes).
const MAX_HELD: usize = 64 << 20;
