//! The packets of a TUN: those that go into the tunnel, and what comes for apps in datagrams.

use std::net::IpAddr;

use bytes::Bytes;
use mpvpn_masque::{datagram::DatagramError, h3};
use mpvpn_packet::{FlowKey, GroCoalescer, TunPacket, VNET_HDR_LEN, VnetHdr, icmp, ip, mss};
use mpvpn_quic::LostReason;
use mpvpn_types::{Duration, Instant, PathId};

use super::{Client, Seen, UdpFlowEvent, in_use, lane::Lane, udp_lane::UdpLane};
use crate::{
    UdpId,
    multipath::{DecodedDatagram, MultipathConnection},
};

/// The packets of apps: those that end here, and those that come for them.
#[derive(Debug)]
pub(super) struct Apps {
    /// TCP connections that travel as streams.
    pub(super) lane: Lane,
    /// UDP flows that travel by CONNECT-UDP.
    pub(super) udp_lane: UdpLane,
    pub(super) seen: Seen,
    /// Packets for the TUN.
    pub(super) joiner: GroCoalescer,
}

impl Apps {
    pub(super) fn new(lane: Lane) -> Self {
        Self { lane, udp_lane: UdpLane::default(), seen: Seen::default(), joiner: GroCoalescer::new() }
    }

    /// Gives an app a packet that was made here, if there is one.
    pub(super) fn answer(&mut self, packet: Option<Vec<u8>>) {
        if let Some(packet) = packet {
            self.joiner.push(Bytes::from(packet));
            self.joiner.flush();
        }
    }

    /// Gives apps what has waited for long enough.
    pub(super) fn release(&mut self, now: Instant, multipath: &mut MultipathConnection) {
        let (mtu, joiner) = (multipath.announced_mtu(), &mut self.joiner);
        multipath.release_timed_out(now, |packet| joiner.push(clamp_received(packet, mtu)));
        joiner.flush();
    }

    /// The next packet for the TUN.
    pub(super) fn poll_tun(&mut self, now: Instant) -> Option<TunPacket> {
        let Some(joined) = self.joiner.pop() else { return self.lane.poll_packet(now) };
        if let Some(flow) = joined.flow_hash() {
            self.seen.received(now, flow, joined.len() - VNET_HDR_LEN);
        }
        Some(joined)
    }
}

impl Client {
    pub(super) fn receive(&mut self, now: Instant) {
        let Some((session, connection)) = in_use(&mut self.session, &mut self.endpoint) else { return };
        let mut bytes = 0;
        let mut malformed = None;
        let Apps { joiner, udp_lane, .. } = &mut self.apps;
        let multipath = &mut session.multipath;
        let (addresses, udp, inbox) = (&session.addresses, &session.udp, &mut self.udp_in);
        let (id, mut payload_bytes) = (session.connection, 0);
        connection.receive_datagrams(|datagram| {
            let mut next = match multipath.decode_datagram(now, datagram) {
                Ok(DecodedDatagram::Packet(arrived)) => Some(arrived),
                Ok(DecodedDatagram::Payload(stream, payload)) => {
                    payload_bytes += payload.len() as u64;
                    let id = UdpId::new(id, stream);
                    if !udp_lane.arrived(now, id, &payload, joiner) {
                        udp.arrived(id, payload, inbox);
                    }
                    return;
                }
                Ok(DecodedDatagram::Ignored) => None,
                Err(error) => return malformed = Some(error),
            };
            while let Some(arrived) = next.take().or_else(|| multipath.next_recovered()) {
                // What is not for this client was misrouted, or is an attempt to get past its firewall.
                let dst = ip::dst_of(&arrived.packet);
                if !dst.is_some_and(|dst| addresses.iter().any(|assigned| assigned.net.contains(&dst))) {
                    continue;
                }
                bytes += arrived.packet.len() as u64;
                let mtu = multipath.announced_mtu();
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
                self.udp_over(flow, Err(h3::code::DATAGRAM_ERROR));
                self.udp_news(now, flow, UdpFlowEvent::Closed);
            }
        } else if let Some(error) = malformed {
            connection.close(now, error.code(), &error.to_string());
            self.lost(now, &LostReason::Transport(format!("the server sent a malformed datagram: {error}")));
        }
    }

    /// Takes what was read from the TUN. Answers for it (ICMP errors) come out of [`Self::poll_tun`].
    pub fn handle_tun(&mut self, now: Instant, hdr: VnetHdr, packet: &mut [u8]) {
        let Some(session) = self.session.as_mut().filter(|session| session.up) else { return };
        let Ok(view) = ip::parse(packet) else { return };
        let gateway = session.gateway();
        if !session.may_send(&view) {
            return;
        }
        if !session.reaches(view.dst()) {
            return self
                .tell(packet, |packet, from| icmp::unreachable(packet, icmp::Unreachable::NoRoute, from));
        }
        if session.by_flows {
            return self.take_flow(now, hdr, &view);
        }
        let apps = &mut self.apps;
        if apps.lane.takes(now, &view, session.reach()) {
            return;
        }
        let answer = session.multipath.send_packet(now, hdr, packet, gateway, Some(&mut apps.seen));
        apps.answer(answer);
    }

    /// Whether a packet of an app would go into the tunnel.
    pub(crate) fn admits(&self, packet: &ip::IpPacket<'_>) -> bool {
        let session = self.session.as_ref().filter(|session| session.up);
        session.is_some_and(|session| session.may_send(packet) && session.reaches(packet.dst()))
    }

    /// When a packet or a byte of a stream was last on its way through this connection.
    pub(crate) fn moved(&self) -> Option<Instant> {
        self.session.as_ref().and_then(|session| session.multipath.last_data_at())
    }

    /// The round-trip time of its first path.
    pub(crate) fn rtt(&mut self) -> Option<Duration> {
        let connection = self.session.as_ref()?.connection;
        self.endpoint.get(connection)?.rtt(PathId(0))
    }

    /// Whether it has something that ends with its connection.
    pub(crate) fn has_flows(&self) -> bool {
        let udp = self.session.as_ref().map_or(0, |session| session.udp.flows.len());
        self.apps.lane.flows() + self.own.len() + udp > 0
    }

    /// Whether a packet of this flow, either way, was here so lately that one which takes another connection over the
    /// same links might overtake it.
    pub(crate) fn is_followed_by(&mut self, now: Instant, flow: &FlowKey) -> bool {
        let Some(last) = self.apps.seen.last(flow) else { return false };
        let Some(session) = &self.session else { return false };
        let Some(connection) = self.endpoint.get(session.connection) else { return false };
        now.saturating_duration_since(last) < session.multipath.max_reordering_delay(connection)
    }

    /// Sends an ICMP error to the source of a packet.
    pub(super) fn tell(&mut self, packet: &[u8], error: impl FnOnce(&[u8], IpAddr) -> Option<Vec<u8>>) {
        let from = self
            .session
            .as_ref()
            .zip(ip::src_of(packet))
            .and_then(|(session, source)| session.gateway().for_source(source));
        self.apps.answer(from.and_then(|from| error(packet, from)));
    }

    /// Whether a TCP connection of an app ends here, and travels as a stream.
    pub(crate) fn ends(&self, flow: &FlowKey) -> bool {
        self.apps.lane.ends(flow)
    }

    /// Whether the server answers by any path, as far as this end can tell.
    pub fn works(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.up && session.multipath.any_path_works())
    }

    /// Bytes that wait for a path.
    pub fn backlog(&self) -> usize {
        self.session.as_ref().map_or(0, |session| session.multipath.backlog_bytes())
    }

    /// The next packet for the TUN.
    pub fn poll_tun(&mut self, now: Instant) -> Option<TunPacket> {
        self.apps.poll_tun(now)
    }

    /// Gives the memory of a written packet back.
    pub fn recycle(&mut self, joined: TunPacket) {
        self.apps.joiner.recycle(joined);
    }
}

/// Lowers the MSS of a SYN that came through the tunnel; every other packet passes untouched.
pub(crate) fn clamp_received(packet: Bytes, mtu: usize) -> Bytes {
    // A SYN has no payload to speak of: longer packets need no look inside.
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
