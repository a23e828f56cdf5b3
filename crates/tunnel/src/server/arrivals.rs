//! What comes from clients in datagrams: packets of their tunnels, and UDP payloads.

use mpvpn_masque::{datagram::DatagramError, h3};
use mpvpn_packet::{VnetHdr, icmp, ip};
use mpvpn_quic::ConnectionId;
use mpvpn_types::Instant;

use super::{Peer, Server};
use crate::{
    UdpId,
    carrier::{Gateway, Opened, open_payload},
    client::{clamp_received, is_link_local},
};

/// The answer to a packet for a destination that was not advertised (RFC 9484 §7.2.1).
fn refusal(packet: &[u8], gateway: Gateway) -> Option<Vec<u8>> {
    let from = gateway.for_source(ip::parse(packet).ok()?.src())?;
    icmp::unreachable(packet, icmp::Unreachable::Prohibited, from)
}

impl Server {
    pub(super) fn receive(&mut self, now: Instant, id: ConnectionId) {
        let gateway = self.gateway();
        let Some(peer) = self.peers.get_mut(id) else { return };
        let Some(connection) = self.endpoint.get(id) else { return };
        let Peer { tunnel, bare, udp, early, .. } = peer;
        let (mut bytes, mut payload_bytes) = (0, 0);
        let mut malformed = None;
        let (joiner, inbox, routes) = (&mut self.joiner, &mut self.udp_in, &self.routes);
        let mut group = tunnel.as_ref().and_then(|tunnel| self.groups.get_mut(&tunnel.secret));
        connection.receive_datagrams(|datagram| {
            let opened = match (&mut *tunnel, &mut *bare) {
                (Some(tunnel), _) => tunnel.carrier.open_datagram(now, datagram),
                (None, Some(bare)) => bare.carrier.open_datagram(now, datagram),
                (None, None) => open_payload(&datagram),
            };
            let mut next = match opened {
                Ok(Opened::Packet(arrived)) => Some(arrived),
                Ok(Opened::Payload(stream, payload)) if udp.has(stream) => {
                    payload_bytes += payload.len() as u64;
                    return inbox.push(UdpId::new(id, stream), payload);
                }
                Ok(Opened::Payload(stream, payload)) => return early.keep(stream, &payload),
                Ok(Opened::Nothing) => None,
                Err(error) => return malformed = Some(error),
            };
            let Some(tunnel) = tunnel else { return };
            let (carrier, addresses) = (&mut tunnel.carrier, tunnel.addresses);
            while let Some(arrived) = next.take().or_else(|| carrier.next_restored()) {
                let Ok(view) = ip::parse(&arrived.packet) else { continue };
                if !addresses.is_some_and(|addresses| addresses.contains(view.src()))
                    || is_link_local(view.dst())
                {
                    continue;
                }
                if !routes.lead_to(view.dst()) {
                    if let Some(mut refusal) = refusal(&arrived.packet, gateway) {
                        carrier.send(now, VnetHdr::NONE, &mut refusal, gateway, None);
                    }
                    continue;
                }
                if let Some(group) = &mut group {
                    group.came_up(now, tunnel.member.class(), &view);
                }
                bytes += arrived.packet.len() as u64;
                let mtu = carrier.mtu();
                carrier.put_in_order(now, arrived, |packet| joiner.push(clamp_received(packet, mtu)));
            }
        });
        let mut starts_to_serve = None;
        if let Some(tunnel) = tunnel
            && bytes > 0
            && !std::mem::replace(&mut tunnel.serves, true)
        {
            starts_to_serve = Some((tunnel.secret, tunnel.addresses));
        }
        if let Some(carrier) = peer.carrier() {
            carrier.deliver_rescued(now, connection);
            if bytes + payload_bytes > 0 {
                carrier.note_delivered(now, bytes + payload_bytes);
            }
        }
        if let Some((secret, addresses)) = starts_to_serve {
            self.serve(&secret, addresses.unwrap_or_default());
        }
        match malformed {
            Some(DatagramError::NoContextId { stream_id }) if !self.is_tunnel(id, stream_id) => {
                self.udp_broken(id, stream_id, h3::code::DATAGRAM_ERROR);
            }
            Some(error) => self.close_peer(now, id, error.code(), &error.to_string()),
            None => {}
        }
    }
}
