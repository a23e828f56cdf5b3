//! The TCP transport: a link's QUIC packets inside HTTP/2, for networks that block UDP.

pub(crate) mod congestion;
pub(crate) mod connection;
pub(crate) mod probe;
pub(crate) mod pump;

/// The key of the extension with which a client sets the DSCP (RFC 2474) of the server's packets on the TCP
/// connection: an Integer, 1 to 63, in the field `mpvpn` of a request.
pub(crate) const DSCP_KEY: &str = "dscp";
