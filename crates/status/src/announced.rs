//! Networks behind clients, and ports of a server's machine that lead to them.

use std::net::IpAddr;

use ipnet::IpNet;
use mpvpn_types::word_enum;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::metrics::{Metric, metrics};

word_enum! {
    /// Whether a network behind a client is reached there.
    pub enum NetworkState {
        /// The server has not answered yet.
        #[default]
        Waiting = "waiting",
        /// It is reached there.
        InUse = "in use",
        /// Another session of the same user has it.
        Standby = "standby",
        /// The server assigned it to the client, and no host uses it.
        Unused = "unused",
        /// The server does not say whether it is reached.
        Unknown = "unknown",
        /// It is not.
        Refused = "refused",
    }
}

/// A network behind a client, at the client or its server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AnnouncedNetwork {
    /// The network, as others know it.
    #[schemars(with = "String")]
    pub network: IpNet,
    /// The network as its hosts have it; left out at a server, and where it is the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub local: Option<IpNet>,
    /// The user of the client; left out at a client.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Whether it is reached there.
    pub state: NetworkState,
    /// Why it is not; empty if it is.
    pub reason: String,
}

impl AnnouncedNetwork {
    /// The network for people.
    pub(crate) fn text(&self) -> String {
        match self.local {
            Some(local) => format!("{local} as {}", self.network),
            None => self.network.to_string(),
        }
    }
}

/// Ports of a server's machine that lead to a host in the tunnel, or of a client's address to one behind it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ForwardedPort {
    /// Protocol and port, or a range of ports.
    pub port: String,
    /// The host as configured: a user or an address, and the port.
    pub to: String,
    /// The addresses to which they lead now; empty while the user has no session.
    pub addresses: Vec<IpAddr>,
    /// Networks from which packets are let in; left out if it is everywhere.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(with = "Vec<String>")]
    pub from: Vec<IpNet>,
    /// Bytes of IP packets that were led to the host.
    #[serde(default)]
    pub tx_bytes: u64,
    /// Bytes of IP packets that came back.
    #[serde(default)]
    pub rx_bytes: u64,
}

impl ForwardedPort {
    /// The metrics of each forwarded port.
    pub const METRICS: &[Metric<Self>] = metrics! { forward: ForwardedPort;
        "forward_transmit_bytes_total" Counter forward.tx_bytes, "Bytes of IP packets led from a forwarded port to its host.";
        "forward_receive_bytes_total" Counter forward.rx_bytes, "Bytes of IP packets that came back from the host of a forwarded port.";
    };
}
