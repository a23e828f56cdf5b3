//! Clients and servers in simulated time, one file a subject; [`world`] is the network between them.

#![allow(
    unreachable_pub,
    clippy::disallowed_methods,
    reason = "a world is a library for its tests, and needs an instant to begin with"
)]

mod access;
mod acks;
mod chaos;
mod class_connections;
mod classes;
mod cuts;
mod decisions;
mod fec;
mod forward;
mod limits;
mod links;
mod liveness;
mod many;
mod negotiation;
mod paths;
mod per_flow;
mod pipes;
mod pool;
mod relays;
mod scenarios;
mod shards;
mod sites;
mod stalls;
mod strangers;
mod streams;
mod sweep;
mod trace;
mod udp;
mod unauthenticated;
mod world;
