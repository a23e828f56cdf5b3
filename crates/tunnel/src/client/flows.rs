//! The flows of a client one by one, for people and programs that ask.

use mpvpn_flow::{rules::FlowModeReason, split_tcp::ConnectionState, udp::UdpFlowSummary};
use mpvpn_packet::FlowKey;
use mpvpn_types::Instant;

use super::{Client, seen::Flow};

/// How a flow travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlowTransport {
    /// As bytes of a stream, in this state.
    Stream(ConnectionState),
    /// As packets, whose connections nobody follows here.
    Packets,
    /// As UDP payloads.
    UdpPayloads,
}

/// A flow of an app.
#[derive(Clone, Copy, Debug)]
pub struct FlowReport {
    /// From the app to where it wants.
    pub key: FlowKey,
    /// How it travels.
    pub transport: FlowTransport,
    /// What decided that.
    pub why: FlowModeReason,
    /// From the app: bytes of its connection; where packets travel, of those.
    pub up: u64,
    /// To the app, likewise.
    pub down: u64,
    /// Since when it is known.
    pub since: Instant,
    /// When something of it was seen last.
    pub active: Instant,
}

impl Client {
    /// All flows that travel as streams, and of those that travel as packets the ones that were seen in the last two
    /// minutes, as far as they are remembered; none while there is no tunnel. The server's word on each is the one of
    /// now, as is what the rules say.
    pub fn flows(&self, now: Instant) -> Vec<FlowReport> {
        let Some(session) = self.session.as_ref().filter(|session| session.up) else { return Vec::new() };
        let (reach, apps) = (session.reach(), &self.apps);
        let streams = apps.lane.summaries().map(|flow| FlowReport {
            key: flow.key,
            transport: FlowTransport::Stream(flow.state),
            why: if session.by_flows {
                FlowModeReason::ServerWithoutPackets
            } else {
                apps.lane.why(&flow.key, reach, true)
            },
            up: flow.up_bytes,
            down: flow.down_bytes,
            since: flow.started,
            active: flow.last_active,
        });
        let packets = apps.seen.flows(now).map(|Flow { key, up, down, since, active }| {
            let why = apps.lane.why(&key, reach, false);
            FlowReport { key, transport: FlowTransport::Packets, why, up, down, since, active }
        });
        let payloads = apps.udp_lane.flows().map(
            |UdpFlowSummary {
                 key,
                 up_bytes: up,
                 down_bytes: down,
                 started: since,
                 last_active: active,
                 ..
             }| FlowReport {
                key,
                transport: FlowTransport::UdpPayloads,
                why: FlowModeReason::ServerWithoutPackets,
                up,
                down,
                since,
                active,
            },
        );
        streams.chain(packets).chain(payloads).collect()
    }
}
