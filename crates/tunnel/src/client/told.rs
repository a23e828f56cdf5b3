//! What a client tells its edge.

use std::net::IpAddr;

use ipnet::IpNet;
use mpvpn_masque::{capsule::IpRange, connect::ProxyError};
use mpvpn_types::{CongestionControl, Duration};

use super::UdpFlowEvent;
use crate::{PathReport, RelayId, ResequencingCounters, TrafficCounters, TrafficRates, UdpId};

/// What the server gave the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assignment {
    /// Addresses with the length of the prefix that was assigned.
    pub addresses: Vec<IpNet>,
    /// Those that were asked for beyond these, in the order of asking; nothing where the server gave none.
    pub additional: Vec<Vec<IpNet>>,
    /// What the server offers to reach.
    pub routes: Vec<IpRange>,
    /// Resolvers that it suggests, the best first; at most three.
    pub dns: Vec<IpAddr>,
}

impl Assignment {
    /// The addresses at a place of those beyond the first, counted from 0, and whether they are there: a server that
    /// gives one of each family leaves every place the first ones.
    pub fn additional_or_first(&self, at: usize) -> (Vec<IpNet>, bool) {
        let own = self.additional.get(at).filter(|own| !own.is_empty());
        let host = |net: &IpNet| IpNet::from(net.addr());
        (own.unwrap_or(&self.addresses).iter().map(host).collect(), own.is_some())
    }
}

/// Something that the edge must act on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClientEvent {
    /// The tunnel works; addresses and routes are these, also when they are those of before. There are none where it
    /// carries no packets.
    Up(Assignment),
    /// Addresses or routes have changed.
    AssignmentChanged(Assignment),
    /// Packets up to this size (bytes) can be carried.
    Mtu(usize),
    /// Other clients may now join this session as its members ([`Client::join`](super::Client::join)).
    JoinsAllowed {
        /// With this secret.
        secret: Vec<u8>,
        /// Also those of other classes.
        other_classes: bool,
    },
    /// [`Client::relay_open`](super::Client::relay_open) or [`Client::udp_open`](super::Client::udp_open) gave none, and
    /// may give one now.
    RelaysAllowed,
    /// The server has made the connection of a relay: bytes may be read and written.
    RelayOpened(RelayId),
    /// There is no connection, and no relay any more.
    RelayFailed(RelayId, ProxyError),
    /// A relay has something to read.
    RelayReadable(RelayId),
    /// A relay has room again.
    RelayWritable(RelayId),
    /// A relay is over: the destination has broken it off, or the server is lost.
    RelayGone(RelayId),
    /// What has become of a flow of UDP payloads.
    Udp(UdpId, UdpFlowEvent),
    /// The connection is lost; the client tries to make a new one by itself.
    Down(String),
    /// Going on makes no sense.
    Fatal(ClientError),
}

/// Why a client ends.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClientError {
    /// The credentials were refused.
    #[error("the server refuses the token (HTTP status {0})")]
    Unauthorized(u16),
    /// The server has no CONNECT-IP at this path, or refuses this request.
    #[error("{0}")]
    Refused(String),
    /// TLS failed.
    #[error("the secure connection to the server failed: {0}")]
    Tls(String),
    /// The peer speaks HTTP/3 but not what a tunnel needs.
    #[error("the server does not offer {0}")]
    Unsupported(&'static str),
}

/// Whether the tunnel works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientState {
    /// No connection yet, or again.
    Connecting,
    /// No connection, as nobody uses its class.
    Asleep,
    /// Packets flow.
    Up,
}

/// Figures for status output.
#[derive(Clone, Debug)]
pub struct ClientReport {
    /// Whether the tunnel works.
    pub state: ClientState,
    /// Why it does not; empty if it does, or nothing is known.
    pub reason: String,
    /// What the server gave.
    pub assignment: Option<Assignment>,
    /// How often the session was taken up again.
    pub resumed: u32,
    /// Bytes of inner packets.
    pub counters: TrafficCounters,
    /// How much moves now.
    pub rates: TrafficRates,
    /// Packets dropped in queues.
    pub drops: u64,
    /// How long packets wait.
    pub sojourn: Duration,
    /// What became of numbered packets; `None` where the two ends agreed on no numbers.
    pub resequencing: Option<ResequencingCounters>,
    /// The congestion controller that the server says it uses on the connection's paths; `None` where it says nothing.
    pub peer_cc: Option<CongestionControl>,
    /// The server carries no packets, and each flow travels by itself.
    pub per_flow: bool,
    /// TCP connections that travel as streams.
    pub stream_flows: usize,
    /// Flows of UDP payloads that travel by CONNECT-UDP.
    pub udp_flows: usize,
    /// Flows that travel as packets and were seen in the last two minutes, as far as they are remembered.
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
    fn a_place_for_which_the_server_gave_nothing_has_the_first_addresses() {
        let nets = |list: &[&str]| list.iter().map(|net| net.parse().unwrap()).collect::<Vec<IpNet>>();
        let assignment = Assignment {
            addresses: nets(&["10.0.0.2/24", "fd00::2/64"]),
            additional: vec![nets(&["10.0.0.3/32"]), Vec::new()],
            routes: Vec::new(),
            dns: Vec::new(),
        };
        assert_eq!(assignment.additional_or_first(0), (nets(&["10.0.0.3/32"]), true));
        for place in [1, 2] {
            assert_eq!(assignment.additional_or_first(place), (nets(&["10.0.0.2/32", "fd00::2/128"]), false));
        }
    }
}
