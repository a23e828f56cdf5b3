//! The packets of the TUN: from apps into the tunnel, and from datagrams to apps.
//!
//! In: TUN packets, QUIC datagrams. Out: the other of the two, and ICMP errors to apps. Always holds: only
//! packets from and to assigned addresses, and networks behind this client, are sent and delivered.

use std::net::IpAddr;

use bytes::Bytes;
use mpvpn_masque::{capsule::AssignedAddress, datagram::DatagramError, h3};
use mpvpn_packet::{FlowKey, GroCoalescer, TunPacket, VNET_HDR_LEN, VnetHdr, icmp, ip, mss};
use mpvpn_quic::LostReason;
use mpvpn_types::{Duration, Instant, LinkId, PathId};

use super::{Client, FlowTable, UdpFlowEvent, app_tcp::AppTcp, app_udp::AppUdp, in_use};
use crate::{
    UdpId,
    coalescing::CoalescingLimit,
    multipath::{DecodedDatagram, MultipathConnection},
};

/// Time without data after which a connection rests. Shorter: classes that share a link are not measured
/// between their packets, and take more of it than they should (the simulated world
/// `no_class_feels_that_another_wants_more_than_there_is`); longer: idle classes cost time in each iteration
/// for longer.
const IDLE_BEFORE_REST: Duration = Duration::from_secs(1);

/// The traffic of apps: flows that the client terminates, and packets for the TUN.
#[derive(Debug)]
pub(super) struct AppTraffic {
    /// TCP connections that travel as streams.
    pub(super) tcp: AppTcp,
    /// UDP flows that travel by CONNECT-UDP.
    pub(super) udp: AppUdp,
    pub(super) flow_table: FlowTable,
    /// Packets for the TUN.
    pub(super) joiner: GroCoalescer,
}

impl AppTraffic {
    pub(super) fn new(tcp: AppTcp) -> Self {
        Self { tcp, udp: AppUdp::default(), flow_table: FlowTable::default(), joiner: GroCoalescer::new() }
    }

    /// Queues a packet that the client made, such as an ICMP error, for the TUN.
    pub(super) fn push_reply(&mut self, packet: Option<Vec<u8>>) {
        if let Some(packet) = packet {
            self.joiner.push(Bytes::from(packet));
            self.joiner.flush();
        }
    }

    /// Delivers packets whose reorder timeout has expired.
    pub(super) fn release(&mut self, now: Instant, multipath: &mut MultipathConnection) {
        let (mtu, joiner) = (multipath.mtu.announced(), &mut self.joiner);
        multipath.release_timed_out(now, |packet| joiner.push(clamp_received(packet, mtu)));
        joiner.flush();
    }

    /// The next packet for the TUN.
    pub(super) fn poll_tun(&mut self, now: Instant) -> Option<TunPacket> {
        let Some(joined) = self.joiner.pop() else { return self.tcp.split_tcp.poll_packet(now) };
        if let Some(flow) = joined.flow_hash() {
            self.flow_table.record_received(now, flow, joined.len() - VNET_HDR_LEN);
        }
        Some(joined)
    }
}

impl Client {
    /// Takes the datagrams that have arrived, on `link` if that is known.
    pub(super) fn receive(&mut self, now: Instant, link: Option<LinkId>) {
        let Some((session, connection)) = in_use(&mut self.session, &mut self.endpoint) else { return };
        let mut bytes = 0;
        let mut malformed = None;
        let AppTraffic { joiner, udp: app_udp, .. } = &mut self.apps;
        let multipath = &mut session.multipath;
        let (addresses, behind) = (&session.addresses, &session.behind);
        let (udp, inbox) = (&session.udp, &mut self.udp_in);
        let (id, mut payload_bytes) = (session.connection, 0);
        connection.receive_datagrams(|at, datagram| {
            let mut next = match multipath.decode_datagram(now, at, datagram) {
                Ok(DecodedDatagram::Packet(arrived)) => Some(arrived),
                Ok(DecodedDatagram::Payload(stream, payload)) => {
                    payload_bytes += payload.len() as u64;
                    let id = UdpId::new(id, stream);
                    if !app_udp.arrived(now, id, &payload, joiner) {
                        udp.arrived(id, payload, inbox);
                    }
                    return;
                }
                Ok(DecodedDatagram::Ignored) => None,
                Err(error) => return malformed = Some(error),
            };
            while let Some(arrived) = next.take().or_else(|| multipath.next_recovered()) {
                // A packet for another address was misrouted, or tries to get past the firewall of this
                // machine.
                let is_for_us = |dst| is_own(addresses, dst) || behind.iter().any(|net| net.contains(&dst));
                if !ip::dst_of(&arrived.packet).is_some_and(is_for_us) {
                    continue;
                }
                multipath.note_echo_reply(now, &arrived, link);
                bytes += arrived.packet.len() as u64;
                let mtu = multipath.mtu.announced();
                multipath.resequence(now, arrived, |packet| joiner.push(clamp_received(packet, mtu)));
            }
        });
        session.multipath.deliver_reinjected(now, connection);
        if bytes + payload_bytes > 0 {
            session.multipath.on_data_received(now, bytes + payload_bytes);
            joiner.flush();
        }
        if let Some(DatagramError::NoContextId { stream_id }) = malformed
            && Some(stream_id) != session.request
        {
            let flow = UdpId::new(session.connection, stream_id);
            if session.udp.flows.has(stream_id) {
                self.end_udp_flow(flow, Err(h3::code::DATAGRAM_ERROR));
                self.on_udp_flow_event(now, flow, UdpFlowEvent::Closed);
            }
        } else if let Some(error) = malformed {
            connection.close(now, error.code(), &error.to_string());
            self.on_lost(
                now,
                &LostReason::Transport(format!("the server sent a malformed datagram: {error}")),
            );
        }
    }

    /// Takes a packet read from the TUN. [`Self::poll_tun`] returns the ICMP errors that answer it.
    pub fn handle_tun(&mut self, now: Instant, hdr: VnetHdr, packet: &mut [u8]) {
        self.take_tun(now, hdr, packet, false);
    }

    /// Takes a packet read from the TUN device that leaves before those that wait.
    pub(crate) fn handle_urgent_tun(&mut self, now: Instant, hdr: VnetHdr, packet: &mut [u8]) {
        self.take_tun(now, hdr, packet, true);
    }

    /// An app sends or connects. After a pause, a server that is not heard is asked for at once.
    pub fn on_wanted(&mut self, now: Instant) {
        if self.silence.on_wanted(now) && self.silence.is_probing {
            self.deadline = None;
            self.probe_anew(now);
            if self.session.is_none() {
                self.connector.backoff.reset(now);
            }
        }
    }

    fn take_tun(&mut self, now: Instant, hdr: VnetHdr, packet: &mut [u8], urgent: bool) {
        self.on_wanted(now);
        let Some(session) = self.session.as_mut().filter(|session| session.up) else { return };
        let Ok(view) = ip::parse(packet) else { return };
        let gateway = session.gateway();
        if !session.may_send(&view) {
            if is_link_local(view.dst()) {
                self.send_icmp_error(packet, |packet, from| {
                    icmp::unreachable(packet, icmp::Unreachable::Prohibited, from)
                });
            }
            return;
        }
        if !session.has_route_to(view.dst()) {
            return self.send_icmp_error(packet, |packet, from| {
                icmp::unreachable(packet, icmp::Unreachable::NoRoute, from)
            });
        }
        if session.per_flow {
            self.deadline = None;
            return self.take_packet_of_flow(now, hdr, &view);
        }
        let apps = &mut self.apps;
        if session.may_stream(&view) && apps.tcp.take_if_stream(now, &view, session.stream_targets()) {
            return;
        }
        let flows = Some(&mut apps.flow_table);
        let answer = session.multipath.send_packet(now, hdr, packet, gateway, flows, urgent);
        apps.push_reply(answer);
    }

    /// Whether the tunnel accepts a packet of an app.
    pub(crate) fn admits(&self, packet: &ip::IpPacket<'_>) -> bool {
        let session = self.session.as_ref().filter(|session| session.up);
        session.is_some_and(|session| session.may_send(packet) && session.has_route_to(packet.dst()))
    }

    /// Whether a connection that `packet` begins would travel as a stream of this client, at the server that
    /// `peer` has reached.
    pub(crate) fn wants_stream(&self, peer: &Self, packet: &ip::IpPacket<'_>) -> bool {
        let Some(session) = &peer.session else { return false };
        session.per_flow
            || session.may_stream(packet)
                && self.apps.tcp.wants(packet, FlowKey::of(packet).destination(), session.stream_targets())
    }

    /// When a packet or stream byte was last sent or received on this connection.
    pub(crate) fn last_activity(&self) -> Option<Instant> {
        self.session.as_ref().and_then(|session| session.multipath.traffic.last_data_at)
    }

    /// Records the use of this connection since `now` in `limit`.
    pub(crate) fn note_use(&self, now: Instant, limit: &mut CoalescingLimit, has_priority: bool) {
        let Some(session) = &self.session else { return };
        if session.multipath.traffic.last_data_at == Some(now) {
            limit.note_use(now, session.multipath.shortest_rtt, has_priority);
        }
    }

    /// Whether packets of another class would feel what this connection sends and receives.
    pub(crate) fn is_crowded(&self, now: Instant) -> bool {
        self.session.as_ref().is_some_and(|session| session.multipath.is_crowded(now))
    }

    /// The round-trip time of its first path.
    pub(crate) fn rtt(&mut self) -> Option<Duration> {
        let connection = self.session.as_ref()?.connection;
        self.endpoint.get(connection)?.rtt(PathId(0))
    }

    /// Whether the connection has flows that would end with it: streams, relays, CONNECT-UDP flows.
    pub(crate) fn has_flows(&self) -> bool {
        let udp = self.session.as_ref().map_or(0, |session| session.udp.flows.len());
        self.apps.tcp.split_tcp.flow_count() + self.edge_relays.len() + udp > 0
    }

    /// Sends an ICMP error to the source of a packet.
    pub(super) fn send_icmp_error(
        &mut self,
        packet: &[u8],
        error: impl FnOnce(&[u8], IpAddr) -> Option<Vec<u8>>,
    ) {
        let from = self
            .session
            .as_ref()
            .zip(ip::src_of(packet))
            .and_then(|(session, source)| session.gateway().for_source(source));
        self.apps.push_reply(from.and_then(|from| error(packet, from)));
    }

    /// Whether the client terminates this TCP connection of an app, so that it travels as a stream.
    pub(crate) fn terminates(&self, flow: &FlowKey) -> bool {
        self.apps.tcp.split_tcp.has_flow(flow)
    }

    /// Bytes queued for a path.
    pub fn backlog(&self) -> usize {
        self.session.as_ref().map_or(0, |session| session.multipath.scheduler.dispatcher.bytes())
    }

    /// Whether the connection rests: the tunnel is up, and for [`IDLE_BEFORE_REST`] there was no packet and
    /// no byte of a stream; or there is no connection and none is wanted.
    pub(crate) fn is_at_rest(&mut self, now: Instant) -> bool {
        let Some(session) = &self.session else {
            return !self.may_connect() && self.connector.handshakes.is_empty();
        };
        let last = session.multipath.traffic.last_data_at;
        let idle = last.is_none_or(|at| now.saturating_duration_since(at) >= IDLE_BEFORE_REST);
        let streams =
            self.endpoint.get(session.connection).map_or(0, |connection| connection.stream_backlog());
        session.up && idle && streams == 0 && session.multipath.is_drained()
    }

    /// The next packet for the TUN.
    pub fn poll_tun(&mut self, now: Instant) -> Option<TunPacket> {
        self.apps.poll_tun(now)
    }

    /// Returns the buffer of a written packet for reuse.
    pub fn recycle(&mut self, joined: TunPacket) {
        self.apps.joiner.recycle(joined);
    }
}

/// Whether `ip` is one of the client's own addresses. The other addresses of an assigned prefix are not: the
/// server chooses the prefix, which may contain hosts of a LAN.
fn is_own(assigned: &[AssignedAddress], ip: IpAddr) -> bool {
    assigned.iter().any(|entry| entry.net.addr() == ip)
}

/// Lowers the MSS of a received SYN to the MTU of the tunnel; other packets stay unchanged.
pub(crate) fn clamp_received(packet: Bytes, mtu: usize) -> Bytes {
    // A SYN is at most 120 bytes of headers plus a small TCP Fast Open cookie; longer packets are not
    // inspected.
    if packet.len() > 160 || !mss::is_syn(&packet) {
        return packet;
    }
    let mut copy = packet.to_vec();
    if mss::clamp(&mut copy, mtu, mss::Checksum::Full) { Bytes::from(copy) } else { packet }
}

pub(crate) fn is_link_local(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_link_local() || ip.is_multicast() || ip.is_broadcast(),
        IpAddr::V6(ip) => ip.is_unicast_link_local() || ip.is_multicast(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_for_other_addresses_of_an_assigned_prefix_are_not_delivered() {
        let assigned = |address: &str| AssignedAddress { request_id: 0, net: address.parse().unwrap() };
        let rogue = [assigned("128.0.0.2/1"), assigned("192.168.1.5/25"), assigned("fd00::2/64")];
        for own in ["128.0.0.2", "192.168.1.5", "fd00::2"] {
            assert!(is_own(&rogue, own.parse().unwrap()), "{own} is dropped");
        }
        for other in ["192.168.1.1", "192.168.1.6", "203.0.113.1", "fd00::1", "fd00::3", "2001:db8::1"] {
            assert!(!is_own(&rogue, other.parse().unwrap()), "{other} is delivered");
        }
    }
}
