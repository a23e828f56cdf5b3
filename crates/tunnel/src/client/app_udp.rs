//! UDP flows of apps that travel by CONNECT-UDP.
//!
//! In: UDP packets of apps, UDP payloads of the server. Out: the other of the two, and ICMP errors. Always
//! holds: the number of flows is bounded; the flow that was idle longest is closed for a new one.

use bytes::Bytes;
use mpvpn_flow::udp::{MAX_UDP_FLOWS, UdpFlowState, UdpFlows};
use mpvpn_masque::connect::{Authority, ProxyError};
use mpvpn_packet::{
    FlowKey, GroCoalescer, IpPacket, VnetHdr,
    icmp::{self, Unreachable},
    udp,
};
use mpvpn_types::Instant;

use super::{Client, ClientEvent, UdpFlowEvent};
use crate::UdpId;

/// The UDP flows of apps.
#[derive(Debug)]
pub(super) struct AppUdp {
    pub(super) flows: UdpFlows<UdpId>,
}

impl Default for AppUdp {
    fn default() -> Self {
        Self { flows: UdpFlows::new(MAX_UDP_FLOWS) }
    }
}

impl AppUdp {
    /// Makes a packet for an app of a payload. Returns whether the flow belongs to an app.
    pub(super) fn arrived(
        &mut self,
        now: Instant,
        id: UdpId,
        payload: &[u8],
        joiner: &mut GroCoalescer,
    ) -> bool {
        let Some(key) = self.flows.on_incoming(now, id, payload.len()) else { return false };
        if let Some(packet) = udp::build_packet(key.destination(), key.source(), payload) {
            joiner.push(Bytes::from(packet));
        }
        true
    }
}

impl Client {
    /// Takes a UDP packet of an app. Fragments are dropped: a packet that is too large for the TUN fits no
    /// datagram either.
    pub(super) fn take_udp(&mut self, now: Instant, hdr: VnetHdr, packet: &IpPacket<'_>) {
        let mut payloads = udp::payloads(hdr, packet).peekable();
        if payloads.peek().is_none() {
            return;
        }
        let (key, bytes) = (FlowKey::of(packet), packet.transport().len().saturating_sub(udp::UDP_HEADER));
        let fate = match self.apps.udp.flows.on_outgoing(now, &key, bytes) {
            Some(fate) => fate,
            None => {
                if !self.udp_possible() {
                    return self.send_icmp_error(packet.bytes(), |packet, from| {
                        icmp::unreachable(packet, Unreachable::Prohibited, from)
                    });
                }
                // Without a stream the packet is dropped: apps that use UDP retransmit.
                let Some(id) = self.udp_open(now, &Authority::from(key.destination())) else { return };
                if let Some(silent) = self.apps.udp.flows.insert(now, key, id, bytes) {
                    self.udp_close(silent);
                }
                UdpFlowState::Relayed(id)
            }
        };
        match fate {
            UdpFlowState::Relayed(id) => {
                let mtu = self.session.as_ref().map_or(0, |session| session.multipath.mtu.announced());
                let headers = packet.transport_offset() + udp::UDP_HEADER;
                for payload in payloads {
                    // A payload that is too large only for the moment is dropped without an error: kernels
                    // keep a path MTU for minutes.
                    if payload.len() + headers > mtu {
                        return self.send_icmp_error(packet.bytes(), |packet, from| {
                            icmp::packet_too_big(packet, mtu as u32, from)
                        });
                    }
                    self.udp_send(now, id, payload);
                }
            }
            UdpFlowState::Refused(reason) => {
                self.send_icmp_error(packet.bytes(), |packet, from| icmp::unreachable(packet, reason, from));
            }
        }
    }

    /// Handles an event of a flow: here if the flow belongs to an app, else by the edge.
    pub(super) fn on_udp_flow_event(&mut self, now: Instant, id: UdpId, news: UdpFlowEvent) {
        if !self.apps.udp.flows.contains(id) {
            return self.reports.events.push_back(ClientEvent::Udp(id, news));
        }
        match news {
            UdpFlowEvent::Opened => {}
            UdpFlowEvent::Closed => self.apps.udp.flows.remove(id),
            UdpFlowEvent::Refused(failure) => {
                let reason = match failure {
                    ProxyError::Prohibited => Unreachable::Prohibited,
                    ProxyError::Refused => Unreachable::PortUnreachable,
                    ProxyError::Dns | ProxyError::Unroutable | ProxyError::TimedOut => {
                        Unreachable::AddressUnreachable
                    }
                    // A retry may succeed.
                    ProxyError::Busy | ProxyError::Other => return self.apps.udp.flows.remove(id),
                };
                if let Some(key) = self.apps.udp.flows.refuse(now, id, reason)
                    && let Some(packet) = udp::build_packet(key.source(), key.destination(), &[])
                {
                    tracing::debug!(to = %key.destination(), ?failure, "UDP is not carried");
                    self.send_icmp_error(&packet, |packet, from| icmp::unreachable(packet, reason, from));
                }
            }
        }
    }

    /// Closes flows whose idle timeout has expired.
    pub(super) fn expire_udp(&mut self, now: Instant) {
        for id in self.apps.udp.flows.expire(now) {
            self.udp_close(id);
        }
    }
}
