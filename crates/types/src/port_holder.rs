//! Sockets that hold a port.

use std::net::SocketAddr;

use crate::word_enum;

word_enum! {
    /// The protocol of a port, as firewalls write it.
    #[derive(PartialOrd, Ord)]
    pub enum PortProtocol {
        /// UDP.
        #[default]
        Udp = "udp",
        /// TCP.
        Tcp = "tcp",
    }
}

impl PortProtocol {
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
