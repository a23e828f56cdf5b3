//! Events and status reports of a client for its edge.

use std::{net::IpAddr, sync::Arc};

use ipnet::IpNet;
use mpvpn_masque::{
    capsule::{IpRange, Site},
    connect::ProxyError,
    connect_ip::RefusalDetail,
};
use mpvpn_quic::HandshakeCounters;
use mpvpn_types::{CongestionControl, Domain, Duration, Instant};

use crate::{PathReport, RelayId, ResequencingCounters, TrafficCounters, TrafficRates, UdpId};

/// Addresses, routes and resolvers from the server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Assignment {
    /// Addresses with the prefix length of their network.
    pub addresses: Vec<IpNet>,
    /// Additional addresses in the order of the requests; empty where the server assigned none.
    pub additional: Vec<Vec<IpNet>>,
    /// Routes that the server advertises.
    pub routes: Arc<[IpRange]>,
    /// Resolvers that the server suggests, in order of preference; at most three.
    pub dns: Arc<[IpAddr]>,
    /// The domain below which these know names of their own, if there is one.
    pub dns_domain: Option<Arc<Domain>>,
    /// Networks behind clients, if the server says which.
    pub sites: Option<Arc<[Site]>>,
    /// Networks that the server assigned for hosts behind this client.
    pub networks: Arc<Vec<IpNet>>,
}

impl Assignment {
    /// The additional addresses at index `at` and `true`; without such, the first addresses and `false`.
    pub fn additional_or_first(&self, at: usize) -> (Vec<IpNet>, bool) {
        let own = self.additional.get(at).filter(|own| !own.is_empty());
        let host = |net: &IpNet| IpNet::from(net.addr());
        (own.unwrap_or(&self.addresses).iter().map(host).collect(), own.is_some())
    }
}

/// An event of a CONNECT-UDP flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UdpFlowEvent {
    /// The server has accepted the flow.
    Opened,
    /// The server has refused the flow, which is closed.
    Refused(ProxyError),
    /// The server has ended the flow, or the connection is lost.
    Closed,
}

/// An event that needs an action of the edge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClientEvent {
    /// The tunnel is up with this assignment, which may equal the previous one. It is empty in
    /// [`TunnelMode::RelaysOnly`](super::TunnelMode).
    Up(Assignment),
    /// Addresses or routes have changed.
    AssignmentChanged(Assignment),
    /// The MTU of the tunnel (bytes).
    Mtu(usize),
    /// Other connections may join this session ([`Client::join`](super::Client::join)).
    JoinsAllowed {
        /// The secret of the session.
        secret: Vec<u8>,
        /// Whether connections of other classes may join, too.
        other_classes: bool,
    },
    /// [`Client::relay_open`](super::Client::relay_open) or [`Client::udp_open`](super::Client::udp_open)
    /// returned `None`, and may succeed now.
    RelaysAllowed,
    /// The server has connected to the target of a relay: bytes may be read and written.
    RelayOpened(RelayId),
    /// The server could not connect to the target: the relay is closed.
    RelayFailed(RelayId, ProxyError),
    /// A relay is readable.
    RelayReadable(RelayId),
    /// A relay is writable again.
    RelayWritable(RelayId),
    /// A relay is closed: the target reset it, or the connection to the server is lost.
    RelayGone(RelayId),
    /// An event of a CONNECT-UDP flow.
    Udp(UdpId, UdpFlowEvent),
    /// The connection is lost, or the server refuses this client, for this reason; the client asks again by
    /// itself.
    Down(String),
    /// The client cannot continue.
    Fatal(ClientError),
}

/// Why a client cannot continue.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClientError {
    /// The credentials were refused.
    #[error("the server refuses the token (HTTP status {0})")]
    Unauthorized(u16),
    /// The client showed no token, and what it is known by, such as its certificate, gives no access.
    #[error("the server refuses this client (HTTP status {status}){detail}")]
    AccessDenied {
        /// HTTP status.
        status: u16,
        /// Details from the server.
        detail: RefusalDetail,
    },
    /// The server refused the certificate of this client in the TLS handshake.
    #[error("the server refuses the certificate of this client: {0}")]
    CertificateRefused(&'static str),
    /// The server has no CONNECT-IP at this path, or refuses this request.
    #[error("{0}")]
    Refused(String),
    /// The server assigns no other addresses than those that the machine has, of which this is one.
    #[error(
        "the server assigns addresses that this machine has already, such as {0}, and no others: take {0} from the interface that \
         has it (`ip address show to {0}`), or give the server another `--subnet`"
    )]
    AddressInUse(IpAddr),
    /// TLS failed.
    #[error("the secure connection to the server failed: {0}")]
    Tls(String),
    /// The server supports HTTP/3 but not an extension that a tunnel needs.
    #[error("the server does not offer {0}")]
    Unsupported(&'static str),
}

/// State of a client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ClientState {
    /// Connecting or reconnecting.
    #[default]
    Connecting,
    /// The server knows this client and refuses it; the client asks again by itself.
    Refused,
    /// No connection, because its class has no traffic.
    Asleep,
    /// The tunnel is up.
    Up,
}

/// A time in which a client does not reach its server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outage {
    /// When something of the server last arrived; if nothing ever has, when the client was made.
    pub since: Instant,
    /// When the client tries again; `None` while it tries.
    pub next_try: Option<Instant>,
}

/// Status of a client.
#[derive(Clone, Debug, Default)]
pub struct ClientReport {
    /// State of the tunnel.
    pub state: ClientState,
    /// Why the tunnel is not up; empty if it is, or if no reason is known.
    pub reason: String,
    /// `None` if the server is reached, or not wanted.
    pub outage: Option<Outage>,
    /// The last assignment.
    pub assignment: Option<Assignment>,
    /// How often the session was resumed.
    pub resumed: u32,
    /// Bytes of inner packets.
    pub counters: TrafficCounters,
    /// Current rates.
    pub rates: TrafficRates,
    /// Packets dropped in queues.
    pub drops: u64,
    /// Time that packets wait in queues (CoDel's sojourn time).
    pub sojourn: Duration,
    /// Bytes of packets that wait in queues.
    pub queued_bytes: usize,
    /// Handshakes with the server.
    pub handshakes: HandshakeCounters,
    /// Counters of numbered packets; `None` where the two ends negotiated no numbers.
    pub resequencing: Option<ResequencingCounters>,
    /// The congestion controller of the server on this connection's paths; `None` if it reports none.
    pub peer_cc: Option<CongestionControl>,
    /// Whether the server has no CONNECT-IP, so that each flow travels by a request of its own.
    pub per_flow: bool,
    /// TCP connections that travel as streams.
    pub stream_flows: usize,
    /// UDP flows that travel by CONNECT-UDP.
    pub udp_flows: usize,
    /// Flows that travel as packets and were active in the last two minutes; the table of flows is bounded.
    pub datagram_flows: usize,
    /// Every path.
    pub paths: Vec<PathReport>,
    /// MTU of the tunnel (bytes).
    pub mtu: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_an_additional_address_the_first_ones_are_used() {
        let nets = |list: &[&str]| list.iter().map(|net| net.parse().unwrap()).collect::<Vec<IpNet>>();
        let assignment = Assignment {
            addresses: nets(&["10.0.0.2/24", "fd00::2/64"]),
            additional: vec![nets(&["10.0.0.3/32"]), Vec::new()],
            ..Assignment::default()
        };
        assert_eq!(assignment.additional_or_first(0), (nets(&["10.0.0.3/32"]), true));
        for place in [1, 2] {
            assert_eq!(assignment.additional_or_first(place), (nets(&["10.0.0.2/32", "fd00::2/128"]), false));
        }
    }
}
