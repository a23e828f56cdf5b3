//! The list of a client's flows, for `mpvpn flows` and the local API.

use mpvpn_flow::{rules::FlowModeReason, split_tcp::ConnectionState, udp::UdpFlowSummary};
use mpvpn_packet::FlowKey;
use mpvpn_types::Instant;

use super::{Client, flow_table::Flow};

/// How a flow travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlowTransport {
    /// As bytes of a stream, in this state.
    Stream(ConnectionState),
    /// As IP packets, whose connections are not tracked.
    Packets,
    /// As UDP payloads.
    UdpPayloads,
}

/// A flow of an app.
#[derive(Clone, Copy, Debug)]
pub struct FlowReport {
    /// The 5-tuple, from the app to its destination.
    pub key: FlowKey,
    /// How it travels.
    pub transport: FlowTransport,
    /// Why it travels so.
    pub why: FlowModeReason,
    /// Bytes from the app: payload of a stream or UDP payloads; otherwise whole IP packets.
    pub up_bytes: u64,
    /// Bytes to the app, likewise.
    pub down_bytes: u64,
    /// When it was first seen.
    pub since: Instant,
    /// When it was last active.
    pub active: Instant,
}

impl Client {
    /// All flows that travel as streams, and the flows that travel as packets and were active in the last two
    /// minutes; none while there is no tunnel. The reasons are those of the current rules and extensions,
    /// not those of the first packet.
    pub fn flows(&self, now: Instant) -> Vec<FlowReport> {
        let Some(session) = self.session.as_ref().filter(|session| session.up) else { return Vec::new() };
        let (targets, apps) = (session.stream_targets(), &self.apps);
        let streams = apps.tcp.split_tcp.summaries().map(|flow| FlowReport {
            key: flow.key,
            transport: FlowTransport::Stream(flow.state),
            why: if session.per_flow {
                FlowModeReason::ServerWithoutPackets
            } else {
                apps.tcp.why(&flow.key, targets, true)
            },
            up_bytes: flow.up_bytes,
            down_bytes: flow.down_bytes,
            since: flow.started,
            active: flow.last_active,
        });
        let packets = apps.flow_table.flows(now).map(|Flow { key, up_bytes, down_bytes, since, active }| {
            let why = apps.tcp.why(&key, targets, false);
            FlowReport { key, transport: FlowTransport::Packets, why, up_bytes, down_bytes, since, active }
        });
        let payloads = apps.udp.flows.summaries().map(
            |UdpFlowSummary { key, up_bytes, down_bytes, started, last_active, .. }| FlowReport {
                key,
                transport: FlowTransport::UdpPayloads,
                why: FlowModeReason::ServerWithoutPackets,
                up_bytes,
                down_bytes,
                since: started,
                active: last_active,
            },
        );
        streams.chain(packets).chain(payloads).collect()
    }
}
