//! The TCP transport: a link's QUIC packets inside HTTP/2, for networks that block UDP.

pub(crate) mod congestion;
pub(crate) mod connection;
pub(crate) mod probe;
pub(crate) mod pump;

/// The request header field with which a client sets the DSCP (RFC 2474) of the server's packets on the TCP
/// connection: an RFC 9651 Integer, 1 to 63.
pub(crate) const DSCP_HEADER: &str = "mpvpn-dscp";
