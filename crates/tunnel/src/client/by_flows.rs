//! A server without CONNECT-IP: each flow of the machine travels by itself, TCP connections as streams and UDP by
//! CONNECT-UDP. The machine's addresses are then made up here and seen by nobody else.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use mpvpn_flow::rules::FlowMode;
use mpvpn_masque::{
    capsule::{AssignedAddress, IpRange},
    connect_ip::ResponseError,
    headers::Headers,
};
use mpvpn_packet::{
    IpPacket, VnetHdr,
    icmp::{self, Unreachable},
    protocol,
};
use mpvpn_types::Instant;

use super::{Client, TunnelMode};
use crate::multipath::extensions;

/// Of a block for hosts whose addresses never leave them (RFC 7335 §4).
const LOCAL_V4: Ipv4Addr = Ipv4Addr::new(192, 0, 0, 2);

impl Client {
    /// Whether a server that offers no CONNECT-IP will do: where streams were asked for, or if the server says that it
    /// makes them.
    pub(super) fn may_go_by_flows(&self, error: Option<(&ResponseError, &Headers)>) -> bool {
        let will_do = match (error, self.config.flow_rules.mode) {
            (Some((ResponseError::NotOffered { .. }, headers)), FlowMode::Auto) => {
                extensions::announces_flow_requests(headers)
            }
            (Some((ResponseError::NotOffered { .. }, _)) | None, FlowMode::Stream) => true,
            _ => false,
        };
        // The flows of a TUN with several queues move from one to another.
        will_do
            && self.config.mode == TunnelMode::Packets
            && !self.membership.part.is_member()
            && !self.membership.part.has_members()
    }

    /// Goes on without packets; `asks`: the server may know more than the RFCs.
    pub(super) fn go_by_flows(&mut self, now: Instant, asks: bool) {
        if !self.was_up {
            tracing::warn!("the server carries no packets: only TCP and UDP will work");
        }
        let addresses = local_addresses(self.config.isn_secret[0]);
        if let Some(session) = &mut self.session {
            session.by_flows = true;
            session.request = None;
            session.addresses =
                addresses.into_iter().map(|net| AssignedAddress { request_id: 0, net }).collect();
            session.routes = everywhere();
        }
        self.begin_streams(now, asks);
    }

    /// Takes a packet of the TUN, which is of no protocol that travels without packets if it is answered.
    pub(super) fn take_flow(&mut self, now: Instant, hdr: VnetHdr, packet: &IpPacket<'_>) {
        match packet.protocol() {
            protocol::TCP if packet.has_transport_header() => self.apps.lane.take(now, packet),
            protocol::UDP => self.take_udp(now, hdr, packet),
            _ => self.tell(packet.bytes(), |packet, from| {
                icmp::unreachable(packet, Unreachable::Prohibited, from)
            }),
        }
    }
}

/// Addresses that this machine's apps send from. That of IPv6 is of a random network (RFC 4193 §3.2).
fn local_addresses(secret: u64) -> [IpNet; 2] {
    let [a, b, c, d, e, ..] = secret.to_be_bytes();
    let word = |high, low| u16::from_be_bytes([high, low]);
    let v6 = Ipv6Addr::new(word(0xfd, a), word(b, c), word(d, e), 0, 0, 0, 0, 2);
    [IpAddr::from(LOCAL_V4).into(), IpAddr::from(v6).into()]
}

fn everywhere() -> Vec<IpRange> {
    let nets = [IpNet::from(Ipv4Net::default()), IpNet::from(Ipv6Net::default())];
    nets.map(|net| IpRange::from_net(net, 0)).into()
}
