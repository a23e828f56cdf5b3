//! Configuration of a server, and its events for the edge.

use std::net::{IpAddr, SocketAddr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use mpvpn_masque::{connect::Authority, headers::Headers, request::Rejection};
use mpvpn_quic::ServerSetup;
use mpvpn_types::Domain;

#[cfg(doc)]
use super::Server;
use crate::{AddressSet, ConnectionSlot, RelayId, SessionSecret, TunnelMode, UdpId, UserLimits};

/// Names a certificate of a client.
pub type CertificateId = [u8; 32];

/// Names a credential: a [`CertificateId`], or the SHA-256 of a token.
pub type CredentialId = [u8; 32];

/// A user whose credentials are right.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuthenticatedUser {
    /// The name.
    pub name: String,
    /// The credential; `None` if none is needed.
    pub credential: Option<CredentialId>,
}

impl From<&str> for AuthenticatedUser {
    /// A user that needs no credential.
    fn from(name: &str) -> Self {
        Self { name: name.to_owned(), credential: None }
    }
}

/// Checks credentials.
pub trait Authenticate: Send {
    /// The user with these credentials: the value of the `authorization` field, and the certificate (DER)
    /// that the TLS handshake has verified.
    ///
    /// # Errors
    /// 403 with the reason if the credentials are those of a user without access, else 401.
    fn authenticate(
        &self,
        authorization: Option<&str>,
        certificate: Option<&[u8]>,
    ) -> Result<AuthenticatedUser, Rejection>;

    /// Whether a user has access now by the credential that was accepted before. Unless it does,
    /// [`Server::end_users`] ends what the user has by it.
    fn has_access(&self, user: &AuthenticatedUser) -> bool {
        let _ = user;
        false
    }

    /// The limits of a user.
    fn limits(&self, user: &str) -> UserLimits {
        let _ = user;
        UserLimits::default()
    }

    /// The networks of which a user's clients may announce parts as theirs.
    fn site_networks(&self, user: &str) -> Vec<IpNet> {
        let _ = user;
        Vec::new()
    }

    /// Whether the edge filters the packets of users by different rules. Then sessions get their addresses
    /// after it has answered [`ServerEvent::Filter`].
    fn has_rules_of_users(&self) -> bool {
        false
    }
}

/// Configuration of a [`Server`].
pub struct ServerConfig {
    /// TLS and transport.
    pub setup: ServerSetup,
    /// Packets and relays, or relays only. Without packets no client gets an address.
    pub mode: TunnelMode,
    /// The network of IPv4 addresses for clients; the first address is the server's own.
    pub subnet: Ipv4Net,
    /// The network of IPv6 addresses for clients.
    pub subnet6: Option<Ipv6Net>,
    /// Networks to which clients may send packets, besides `subnet` and `subnet6`. They are advertised to
    /// clients; packets to other addresses are refused.
    pub routes: Vec<IpNet>,
    /// Whether it announces CONNECT and CONNECT-UDP to clients (extensions `streams`, `udp`): the edge must
    /// then answer [`ServerEvent::Connect`] and [`ServerEvent::ConnectUdp`] for every target that
    /// packets could reach.
    pub offers_streams: bool,
    /// Resolvers that it suggests to clients, in order of preference.
    pub dns: Vec<IpAddr>,
    /// The domain below which these know names of their own.
    pub dns_domain: Option<Domain>,
    /// Checks credentials.
    pub auth: Box<dyn Authenticate>,
    /// Whether wrong credentials are answered with the site, as missing ones are, instead of 401 or 407.
    pub hide_wrong_credentials: bool,
    /// Most sessions at a time.
    pub max_clients: usize,
    /// Keys of extensions that it does not know, for tests with ends that know fewer.
    pub disabled_extensions: &'static [&'static str],
    /// Returns the secret for a new session, from a cryptographic random number generator.
    pub new_secret: Box<dyn FnMut() -> SessionSecret + Send>,
}

/// An event that needs an action of the edge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServerEvent {
    /// The largest MTU of the clients of all shards has changed (bytes).
    Mtu(usize),
    /// A session is about to use addresses: filter its packets by the rules of its user, then call
    /// [`Server::on_filtered`]. Requests of a shard must be handled in their order, and before that shard
    /// is called again.
    Filter(Box<FilterRequest>),
    /// A connection at another shard was replaced: call [`Server::close_replaced`] there.
    Replaced(ConnectionSlot),
    /// A client requests a TCP connection: answer with [`Server::relay_opened`] or [`Server::relay_failed`].
    Connect {
        /// The relay that is requested.
        relay: RelayId,
        /// The user.
        user: String,
        /// The target.
        to: Authority,
    },
    /// A request that the site answers: call [`Server::visit_respond`], then [`Server::relay_write`] for
    /// content and [`Server::visit_finish`], or [`Server::visit_abort`]. Its own content is read as that of a
    /// relay.
    Visit {
        /// The request.
        visit: RelayId,
        /// Its header section.
        headers: Headers,
        /// The address of the visitor.
        from: Option<SocketAddr>,
    },
    /// A relay is readable: call [`Server::relay_read`].
    RelayReadable(RelayId),
    /// A relay is writable: [`Server::relay_writable_bytes`] is not 0.
    RelayWritable(RelayId),
    /// A relay or visit is closed: the client reset it, or its connection is lost.
    RelayGone(RelayId),
    /// A client requests a UDP flow: answer with [`Server::udp_opened`] or [`Server::udp_failed`]. Payloads
    /// may arrive before that ([`Server::poll_udp`]).
    ConnectUdp {
        /// The flow that is requested.
        udp: UdpId,
        /// The user.
        user: String,
        /// The target.
        to: Authority,
    },
    /// A UDP flow is closed: the client ended it, or its connection is lost.
    UdpGone(UdpId),
}

/// Addresses that a session is about to use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FilterRequest {
    /// The user.
    pub user: String,
    /// The addresses.
    pub addresses: AddressSet,
    /// The connection that waits for them.
    pub connection: ConnectionSlot,
    /// The client's requests that the assignment answers.
    pub(crate) requested: Vec<(u64, IpNet)>,
}

/// The outcome of a packet that was read from the TUN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TunOutcome {
    /// Queued for a client, answered, or dropped.
    Consumed,
    /// For a client of another shard: call [`Server::handle_handed_over`] at the shard with this number.
    ForShard(u8),
}
