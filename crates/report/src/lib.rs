//! Reports that client and server make in the same way: flows, paths, counters, events.
//!
//! In: reports of the tunnel and of the connections of a process. Out: the values of `mpvpn-status`. Always
//! holds: nothing is asked here, so a report costs only what it is made of.
#![forbid(unsafe_code)]
// This crate is at the edge: files, sockets and clocks are its business.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

pub mod events;
pub mod flows;
pub mod paths;
pub mod sites;
