//! A client with a TUN at a server without CONNECT-IP: TCP connections travel as streams, UDP flows by
//! CONNECT-UDP.
//!
//! In: packets of the TUN. Out: streams and UDP flows; ICMP errors for other protocols. Always holds: the
//! addresses of the TUN are made up here and do not leave this machine.

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

/// An IPv4 address that never leaves a host (RFC 7335 §4).
const LOCAL_V4: Ipv4Addr = Ipv4Addr::new(192, 0, 0, 2);

impl Client {
    /// Whether a server without CONNECT-IP is acceptable: the flow mode is `stream`, or `auto` and the server
    /// announces that it opens connections.
    pub(super) fn may_run_per_flow(&self, error: Option<(&ResponseError, &Headers)>) -> bool {
        let will_do = match (error, self.config.flow_rules.mode) {
            (Some((ResponseError::NotOffered { .. }, headers)), FlowMode::Auto) => {
                extensions::announces_flow_requests(headers)
            }
            (Some((ResponseError::NotOffered { .. }, _)) | None, FlowMode::Stream) => true,
            _ => false,
        };
        // Not with several shards: the flows of a TUN with several queues may change their queue.
        will_do
            && self.config.mode == TunnelMode::Packets
            && !self.membership.role.is_joined()
            && !self.membership.role.allows_joins()
    }

    /// Continues without packets; `has_extensions`: the server may support `connect-mpvpn`.
    pub(super) fn run_per_flow(&mut self, now: Instant, has_extensions: bool) {
        if !self.was_up {
            tracing::warn!("the server carries no packets: only TCP and UDP will work");
        }
        let addresses = local_addresses(self.config.isn_secret[0]);
        if let Some(session) = &mut self.session {
            session.per_flow = true;
            session.request = None;
            session.addresses =
                addresses.into_iter().map(|net| AssignedAddress { request_id: 0, net }).collect();
            session.routes = everywhere();
        }
        self.start_without_packets(now, has_extensions);
    }

    /// Takes a packet of the TUN; protocols other than TCP and UDP are answered with an ICMP error.
    pub(super) fn take_packet_of_flow(&mut self, now: Instant, hdr: VnetHdr, packet: &IpPacket<'_>) {
        match packet.protocol() {
            protocol::TCP if packet.has_transport_header() => {
                self.apps.tcp.split_tcp.handle_packet(now, packet)
            }
            protocol::UDP => self.take_udp(now, hdr, packet),
            _ => self.send_icmp_error(packet.bytes(), |packet, from| {
                icmp::unreachable(packet, Unreachable::Prohibited, from)
            }),
        }
    }
}

/// Source addresses for the apps of this machine. The IPv6 address is of a random unique local network (RFC
/// 4193 §3.2).
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
