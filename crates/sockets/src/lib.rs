//! Bytes between the kernel's sockets and the tunnel, at client and server.
//!
//! In: readiness of sockets and TUN queues; what the tunnel wants to send. Out: datagrams and packets for the
//! tunnel, bytes moved between a TCP socket and a stream. Always holds: nothing here waits; what a full
//! socket does not take waits in a queue of bounded length.
#![forbid(unsafe_code)]
// This crate is at the edge: files, sockets and clocks are its business.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

pub mod bind_options;
pub mod packet_io;
pub mod payload;
pub mod splice;
