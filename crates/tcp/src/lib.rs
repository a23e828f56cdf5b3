//! The TCP transport: a link's QUIC packets inside HTTP/2, for networks that block UDP.
#![forbid(unsafe_code)]
// This crate is at the edge: files, sockets and clocks are its business.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

pub mod congestion;
pub mod connection;
pub mod dial;
pub mod h2_stream;
pub mod probe;
pub mod pump;

/// The key of the extension with which a client sets the DSCP (RFC 2474) of the server's packets on the TCP
/// connection: an Integer, 1 to 63, in the field `mpvpn` of a request.
pub const DSCP_KEY: &str = "dscp";
