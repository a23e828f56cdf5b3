//! QUIC packets of a link inside HTTP/2, where UDP does not get through: the TCP way.

pub(crate) mod congestion;
pub(crate) mod connection;
pub(crate) mod probe;
pub(crate) mod pump;

/// The request header in which a client names the mark (DSCP, RFC 2474) of the packets that the server sends on the TCP
/// connection: an Integer of RFC 9651, 1 to 63.
pub(crate) const DSCP_HEADER: &str = "mpvpn-dscp";
