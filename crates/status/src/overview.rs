use std::net::IpAddr;

use super::Status;

/// The content of a server's dashboard: the status with some sessions in full, and all sessions in short.
#[derive(Clone, Debug)]
pub struct Overview {
    /// The status, without users; its `clients` are those of [`Self::shown`].
    pub status: Status,
    /// Identifiers of `status.clients`, in their order.
    pub shown: Vec<u64>,
    /// All sessions.
    pub sessions: Vec<SessionSummary>,
}

/// A session of a server in short.
#[derive(Clone, Debug, Default)]
pub struct SessionSummary {
    /// Identifier, which is another one for each session while the server runs.
    pub id: u64,
    /// Name of the user.
    pub user: String,
    /// The first address in the tunnel; `None` for a client that uses relays only.
    pub address: Option<IpAddr>,
    /// Time since the client connected, in s.
    pub connected_s: f64,
    /// Bytes of IP packets sent to the client.
    pub tx_bytes: u64,
    /// Bytes of IP packets received from the client.
    pub rx_bytes: u64,
}
