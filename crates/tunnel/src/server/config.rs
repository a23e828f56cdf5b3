//! What a server is told, and what it asks of its edge.

use std::net::IpAddr;

use bytes::Bytes;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use mpvpn_masque::{connect::Authority, headers::Headers};
use mpvpn_quic::ServerSetup;

#[cfg(doc)]
use super::Server;
use crate::{ClassLimits, ConnectionSlot, RelayId, SessionSecret, TunnelMode, UdpId};

/// An answer to anybody: its head and its content.
pub type SiteResponse = (Headers, Bytes);

/// Decides who may use the server.
pub trait Authenticate: Send {
    /// The name of the user whose credentials these are (the value of the `authorization` header).
    ///
    /// # Errors
    /// A sentence for the log if nobody's.
    fn authenticate(&self, authorization: Option<&str>) -> Result<String, String>;

    /// What a user may not exceed.
    fn limits(&self, user: &str) -> ClassLimits {
        let _ = user;
        ClassLimits::default()
    }
}

/// What a server needs to know.
pub struct ServerConfig {
    /// TLS and transport.
    pub setup: ServerSetup,
    /// What it is there for. Without packets, nobody gets an address.
    pub mode: TunnelMode,
    /// IPv4 addresses for clients; the first is the server's own.
    pub subnet: Ipv4Net,
    /// IPv6 addresses for clients.
    pub subnet6: Option<Ipv6Net>,
    /// Where their packets may go, beside `subnet` and `subnet6`: what clients are told. Others are refused.
    pub routes: Vec<IpNet>,
    /// Whether it says to clients that their TCP connections and UDP payloads should come by CONNECT and CONNECT-UDP: it
    /// then answers [`ServerEvent::Connect`] and [`ServerEvent::ConnectUdp`] wherever packets could go.
    pub offers_streams: bool,
    /// Resolvers that it suggests to clients, the best first.
    pub dns: Vec<IpAddr>,
    /// Who may use it.
    pub auth: Box<dyn Authenticate>,
    /// What everybody else sees: the answer to a request of this method, with its content.
    pub site: Box<dyn Fn(&str) -> SiteResponse + Send>,
    /// Whether wrong credentials are answered as none at all, instead of by saying so.
    pub hide_wrong_credentials: bool,
    /// Sessions at a time.
    pub max_clients: usize,
    /// Makes a secret for a new session, from a cryptographic random number generator.
    pub new_secret: Box<dyn FnMut() -> SessionSecret + Send>,
}

/// Something that the edge must act on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServerEvent {
    /// The largest packet that some client of any shard can take (bytes) has changed.
    Mtu(usize),
    /// A tunnel of another shard was replaced: [`Server::close_replaced`] is to be called there.
    Replaced(ConnectionSlot),
    /// A client wants a TCP connection: [`Server::relay_opened`] or [`Server::relay_failed`] answers it.
    Connect {
        /// The stream that will be the connection.
        relay: RelayId,
        /// Who wants it.
        user: String,
        /// Where to.
        to: Authority,
    },
    /// [`Server::relay_read`] has something to say again.
    RelayReadable(RelayId),
    /// [`Server::relay_room`] is there again.
    RelayWritable(RelayId),
    /// The client has broken it off, or is gone; there is no such relay any more.
    RelayGone(RelayId),
    /// A client wants UDP payloads to be carried: [`Server::udp_opened`] or [`Server::udp_failed`] answers it. Its payloads
    /// may come before that ([`Server::poll_udp`]).
    ConnectUdp {
        /// The flow.
        udp: UdpId,
        /// Who wants it.
        user: String,
        /// Where to.
        to: Authority,
    },
    /// The client has ended it, or is gone; there is no such flow any more.
    UdpGone(UdpId),
}

/// What became of a packet that was read from the TUN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum TunOutcome {
    /// It is on its way to a client, or answered, or dropped.
    Consumed,
    /// It is for a client of the shard with this number, for [`Server::handle_handed_over`] there.
    ForShard(u8),
}
