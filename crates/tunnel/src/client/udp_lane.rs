//! UDP flows of apps that travel by CONNECT-UDP.

use bytes::Bytes;
use mpvpn_flow::udp::{MAX_UDP_FLOWS, UdpFlowState, UdpFlowSummary, UdpFlows};
use mpvpn_masque::connect::{Authority, ProxyError};
use mpvpn_packet::{
    FlowKey, GroCoalescer, IpPacket, VnetHdr,
    icmp::{self, Unreachable},
    udp,
};
use mpvpn_types::Instant;

use super::{Client, ClientEvent, UdpFlowEvent};
use crate::UdpId;

/// The flows, and what comes for apps.
#[derive(Debug)]
pub(super) struct UdpLane {
    flows: UdpFlows<UdpId>,
}

impl Default for UdpLane {
    fn default() -> Self {
        Self { flows: UdpFlows::new(MAX_UDP_FLOWS) }
    }
}

impl UdpLane {
    /// Whether a flow is one of these.
    pub(super) fn has(&self, id: UdpId) -> bool {
        self.flows.contains(id)
    }

    /// A payload from a destination becomes a packet for an app; whether it is of one of these flows.
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

    /// The flows, for status output.
    pub(super) fn flows(&self) -> impl Iterator<Item = UdpFlowSummary> + '_ {
        self.flows.summaries()
    }

    /// When [`Client::expire_udp`] wants to be called.
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        self.flows.poll_timeout()
    }
}

impl Client {
    /// Takes a UDP packet of an app. Fragments are dropped: what is too large for the TUN fits no datagram either.
    pub(super) fn take_udp(&mut self, now: Instant, hdr: VnetHdr, packet: &IpPacket<'_>) {
        let mut payloads = udp::payloads(hdr, packet).peekable();
        if payloads.peek().is_none() {
            return;
        }
        let (key, bytes) = (FlowKey::of(packet), packet.transport().len().saturating_sub(udp::UDP_HEADER));
        let fate = match self.apps.udp_lane.flows.on_outgoing(now, &key, bytes) {
            Some(fate) => fate,
            None => {
                if !self.udp_possible() {
                    return self.tell(packet.bytes(), |packet, from| {
                        icmp::unreachable(packet, Unreachable::Prohibited, from)
                    });
                }
                // Without a stream for it the packet is lost: an app that uses UDP asks again.
                let Some(id) = self.udp_open(now, &Authority::from(key.destination())) else { return };
                if let Some(silent) = self.apps.udp_lane.flows.insert(now, key, id, bytes) {
                    self.udp_close(silent);
                }
                UdpFlowState::Relayed(id)
            }
        };
        match fate {
            UdpFlowState::Relayed(id) => {
                let mtu = self.session.as_ref().map_or(0, |session| session.multipath.announced_mtu());
                let headers = packet.transport_offset() + udp::UDP_HEADER;
                for payload in payloads {
                    // What is only for now too large is lost: kernels remember for minutes what they are told.
                    if payload.len() + headers > mtu {
                        return self.tell(packet.bytes(), |packet, from| {
                            icmp::packet_too_big(packet, mtu as u32, from)
                        });
                    }
                    self.udp_send(now, id, payload);
                }
            }
            UdpFlowState::Refused(reason) => {
                self.tell(packet.bytes(), |packet, from| icmp::unreachable(packet, reason, from));
            }
        }
    }

    /// What has become of a flow is for the app, or for the edge.
    pub(super) fn udp_news(&mut self, now: Instant, id: UdpId, news: UdpFlowEvent) {
        if !self.apps.udp_lane.has(id) {
            return self.reports.events.push_back(ClientEvent::Udp(id, news));
        }
        match news {
            UdpFlowEvent::Opened => {}
            UdpFlowEvent::Closed => self.apps.udp_lane.flows.remove(id),
            UdpFlowEvent::Refused(failure) => {
                let reason = match failure {
                    ProxyError::Prohibited => Unreachable::Prohibited,
                    ProxyError::Refused => Unreachable::PortUnreachable,
                    ProxyError::Dns | ProxyError::Unroutable | ProxyError::TimedOut => {
                        Unreachable::AddressUnreachable
                    }
                    // Worth another try.
                    ProxyError::Busy | ProxyError::Other => return self.apps.udp_lane.flows.remove(id),
                };
                if let Some(key) = self.apps.udp_lane.flows.refuse(now, id, reason)
                    && let Some(packet) = udp::build_packet(key.source(), key.destination(), &[])
                {
                    tracing::debug!(to = %key.destination(), ?failure, "UDP is not carried");
                    self.tell(&packet, |packet, from| icmp::unreachable(packet, reason, from));
                }
            }
        }
    }

    /// Ends flows that have been silent for long.
    pub(super) fn expire_udp(&mut self, now: Instant) {
        for id in self.apps.udp_lane.flows.expire(now) {
            self.udp_close(id);
        }
    }
}
