//! The packets of the TUN: to clients, and from their datagrams, UDP payloads included.
//!
//! In: TUN packets, QUIC datagrams. Out: the other of the two, and ICMP errors. Always holds: a packet of a
//! client has a source address of its session, or of a network behind it, and a destination that is
//! advertised.

use bytes::Bytes;
use mpvpn_masque::{datagram::DatagramError, h3};
use mpvpn_packet::{GroCoalescer, IpPacket, TunPacket, VnetHdr, icmp, ip, protocol};
use mpvpn_quic::ConnectionHandle;
use mpvpn_types::{Instant, target::TURNS};

use super::{
    Peer, Server, TunOutcome,
    limits::ConnectionLimits,
    peer::AuthenticatedPeer,
    session_connections::{Downlink, PacketSource},
};
use crate::{
    UdpId,
    accounts::counted_bytes,
    client::{clamp_received, is_link_local},
    multipath::{DecodedDatagram, Gateway, decode_payload},
    udp::PayloadInbox,
};

/// The port of a resolver (RFC 1035 §4.2.1).
const DNS_PORT: u16 = 53;

/// Whether a packet asks the resolver at the server's own address in the tunnel, by UDP.
fn is_query(packet: &IpPacket<'_>, own: Gateway) -> bool {
    packet.protocol() == protocol::UDP
        && packet.ports().is_some_and(|(_, to)| to == DNS_PORT)
        && own.for_source(packet.src()) == Some(packet.dst())
}

/// The ICMP error for a packet to a destination that is not advertised (RFC 9484 §7.2.1) or link-local, as
/// metadata of clouds are; none for a multicast group.
fn refusal(packet: &[u8], gateway: Gateway) -> Option<Vec<u8>> {
    let from = gateway.for_source(ip::parse(packet).ok()?.src())?;
    icmp::unreachable(packet, icmp::Unreachable::Prohibited, from)
}

/// Passes a packet of a client on to the TUN, as far as the limits of its user allow it now.
pub(super) fn pass_on(
    now: Instant,
    limits: Option<&mut ConnectionLimits>,
    joiner: &mut GroCoalescer,
    packet: Bytes,
) {
    match limits {
        Some(limits) if limits.uplink.is_limited() => limits.uplink.push_packet(now, &packet),
        Some(limits) => {
            limits.uplink.count(now, counted_bytes(&packet));
            joiner.push(packet);
        }
        None => joiner.push(packet),
    }
}

/// As [`pass_on`], for the payload of a UDP flow.
pub(super) fn pass_payload_on(
    now: Instant,
    limits: Option<&mut ConnectionLimits>,
    inbox: &mut PayloadInbox,
    udp: UdpId,
    payload: Bytes,
) {
    match limits {
        Some(limits) if limits.uplink.is_limited() => limits.uplink.push_payload(now, udp.stream, &payload),
        Some(limits) => {
            limits.uplink.count(now, payload.len() as u64);
            inbox.push(udp, payload);
        }
        None => inbox.push(udp, payload),
    }
}

impl Server {
    pub(super) fn receive(&mut self, now: Instant, id: ConnectionHandle) {
        let gateway = self.routes.gateway();
        let Some((peer, mut queries)) = self.peers.get_with_queries(id) else { return };
        let Some(connection) = self.endpoint.get(id) else { return };
        let Peer { authenticated, udp, early, limits, .. } = peer;
        let (mut bytes, mut payload_bytes) = (0, 0);
        let mut malformed = None;
        let (joiner, inbox, routes, sites) = (&mut self.joiner, &mut self.udp_in, &self.routes, &*self.sites);
        let tunnel = authenticated.as_ref().and_then(|authenticated| authenticated.tunnel.as_ref());
        let flows = tunnel.map(|tunnel| &self.sessions.session(&tunnel.secret).flows);
        let shard = self.shard.index();
        let arrival = tunnel.map(|tunnel| tunnel.arrival(shard));
        connection.receive_datagrams(|at, datagram| {
            let opened = match authenticated {
                Some(authenticated) => authenticated.multipath.decode_datagram(now, at, datagram),
                None => decode_payload(&datagram),
            };
            let mut next = match opened {
                Ok(DecodedDatagram::Packet(arrived)) => Some(arrived),
                Ok(DecodedDatagram::Payload(stream, payload)) if udp.has(stream) => {
                    payload_bytes += payload.len() as u64;
                    return pass_payload_on(
                        now,
                        limits.as_deref_mut(),
                        inbox,
                        UdpId::new(id, stream),
                        payload,
                    );
                }
                Ok(DecodedDatagram::Payload(stream, payload)) => return early.push(stream, &payload),
                Ok(DecodedDatagram::Ignored) => None,
                Err(error) => return malformed = Some(error),
            };
            let Some(AuthenticatedPeer { multipath, tunnel: Some(tunnel), .. }) =
                authenticated.as_deref_mut()
            else {
                return;
            };
            let addresses = tunnel.addresses;
            while let Some(arrived) = next.take().or_else(|| multipath.next_recovered()) {
                let Ok(view) = ip::parse(&arrived.packet) else { continue };
                let src = view.src();
                if !addresses.is_some_and(|addresses| addresses.contains(src))
                    && sites.session_of(src) != Some(&tunnel.secret)
                {
                    continue;
                }
                if is_link_local(view.dst()) || !routes.contain(view.dst()) {
                    if let Some(mut refusal) = refusal(&arrived.packet, gateway) {
                        multipath.send_packet(now, VnetHdr::NONE, &mut refusal, gateway, None, false);
                    }
                    continue;
                }
                if is_query(&view, gateway) && !queries.admit(now) {
                    tracing::trace!(target: TURNS, from = %src, "a name query is dropped: its user asks too often");
                    continue;
                }
                if let (Some(flows), Some(arrival)) = (flows, arrival) {
                    flows.record(now, arrival, &view);
                }
                bytes += arrived.packet.len() as u64;
                let mtu = multipath.mtu.announced();
                multipath.resequence(now, arrived, |packet| {
                    pass_on(now, limits.as_deref_mut(), joiner, clamp_received(packet, mtu));
                });
            }
        });
        let has_limits = limits.is_some();
        let mut downlink_started = None;
        if let Some(tunnel) = peer.tunnel_mut()
            && bytes > 0
            && !std::mem::replace(&mut tunnel.downlink_ready, true)
        {
            downlink_started = Some((tunnel.secret, tunnel.addresses));
        }
        if let Some(multipath) = peer.multipath() {
            multipath.deliver_reinjected(now, connection);
            if bytes + payload_bytes > 0 {
                multipath.on_data_received(now, bytes + payload_bytes);
            }
        }
        if let Some((secret, addresses)) = downlink_started {
            self.update_downlink(&secret, addresses.unwrap_or_default());
        }
        if has_limits {
            self.release_limited(now, id);
        }
        match malformed {
            Some(DatagramError::NoContextId { stream_id }) if !self.is_tunnel(id, stream_id) => {
                self.on_udp_stream_broken(id, stream_id, h3::code::DATAGRAM_ERROR);
            }
            Some(error) => self.close_peer(now, id, error.code(), &error.to_string()),
            None => {}
        }
    }

    /// Takes a packet read from the TUN. [`Self::poll_tun`] returns ICMP errors that answer it.
    pub fn handle_tun(&mut self, now: Instant, hdr: VnetHdr, packet: &mut [u8]) -> TunOutcome {
        let Ok(view) = ip::parse(packet) else { return TunOutcome::Consumed };
        let (src, dst) = (view.src(), view.dst());
        let source = PacketSource::Tun { shard: self.shard.index() };
        if let Some(outcome) = self.deliver(now, source, hdr, packet) {
            return outcome;
        }
        if is_link_local(dst) || is_link_local(src) {
            return TunOutcome::Consumed;
        }
        if self.shard.count() > 1
            && let Some(shard) = self.registry.shard_of(dst)
        {
            // The session is ending at this shard: its client cannot be reached now.
            return if shard == self.shard.index() {
                TunOutcome::Consumed
            } else {
                TunOutcome::ForShard(shard)
            };
        }
        if self.sites.session_of(dst).is_some() && self.registry.is_changing_sites(&self.sites) {
            // Another session may take the network over in a moment.
            return TunOutcome::Consumed;
        }
        let from = self.routes.gateway().for_source(src);
        let error =
            from.and_then(|from| icmp::unreachable(packet, icmp::Unreachable::AddressUnreachable, from));
        self.answer(error);
        TunOutcome::Consumed
    }

    /// Takes a packet that another shard read for a client of this one. Returns whether the client is still
    /// here.
    pub fn handle_handed_over(&mut self, now: Instant, hdr: VnetHdr, packet: &mut [u8]) -> bool {
        self.deliver(now, PacketSource::OtherShard, hdr, packet).is_some()
    }

    /// Queues a packet for its client, or says to which shard it belongs. Returns `None` if the client is not
    /// at this shard.
    fn deliver(
        &mut self,
        now: Instant,
        source: PacketSource,
        hdr: VnetHdr,
        packet: &mut [u8],
    ) -> Option<TunOutcome> {
        let view = ip::parse(packet).ok()?;
        let works = |id| {
            let authenticated = self.peers.get(id).and_then(|peer| peer.authenticated.as_ref());
            authenticated.is_some_and(|authenticated| authenticated.multipath.paths.any_works())
        };
        let at_site = || self.sessions.reachable(self.sites.session_of(view.dst())?);
        let session = self.sessions.session_at(view.dst()).or_else(at_site)?;
        let id = match session.downlink(now, source, &view, works)? {
            Downlink::Connection(id) => id,
            Downlink::OtherShard(shard) => return Some(TunOutcome::ForShard(shard)),
        };
        let gateway = self.routes.gateway();
        let queued = self.isolated(id, |server| {
            let multipath = server.peers.get_mut(id).and_then(Peer::multipath)?;
            Some(multipath.send_packet(now, hdr, packet, gateway, None, false))
        });
        self.answer(queued??);
        self.peers.mark_sends(id);
        Some(TunOutcome::Consumed)
    }

    fn answer(&mut self, packet: Option<Vec<u8>>) {
        if let Some(packet) = packet {
            self.joiner.push(Bytes::from(packet));
        }
    }

    /// The next packet for the TUN.
    pub fn poll_tun(&mut self) -> Option<TunPacket> {
        if let Some(joined) = self.joiner.pop() {
            return Some(joined);
        }
        self.joiner.flush();
        self.joiner.pop()
    }

    /// Returns the buffer of a written packet for reuse.
    pub fn recycle(&mut self, joined: TunPacket) {
        self.joiner.recycle(joined);
    }
}
