//! Sockets that hold a port.

use std::net::SocketAddr;

/// The protocol of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PortProtocol {
    /// UDP.
    Udp,
    /// TCP.
    Tcp,
}

impl PortProtocol {
    /// As firewalls write it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Udp => "udp",
            Self::Tcp => "tcp",
        }
    }

    /// As sentences have it.
    pub fn in_capitals(self) -> &'static str {
        match self {
            Self::Udp => "UDP",
            Self::Tcp => "TCP",
        }
    }
}

/// A socket that holds a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortHolder {
    /// Its protocol.
    pub protocol: PortProtocol,
    /// Its address and port.
    pub address: SocketAddr,
    /// The name of its process (`comm`), if it is known.
    pub program: Option<String>,
    /// The systemd unit of its process, if it has one.
    pub unit: Option<String>,
}
