//! Names and addresses: a resolver for the threads of a process, and one that answers the hosts of a network.
//!
//! In: names, addresses, DNS queries. Out: addresses, names, DNS responses. Always holds: everything that
//! waits is bounded in number and time; nothing here runs on a packet thread.
#![forbid(unsafe_code)]
// This crate is at the edge: files, sockets and clocks are its business.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

pub mod dns;
pub mod lookup;
pub mod resolver;
pub mod untrusted;
