//! What is taken in to be sent, and what leaves next.

use std::net::IpAddr;

use mpvpn_class::QueuedPacket;
use mpvpn_masque::datagram::DatagramPrefix;
use mpvpn_packet::{FlowKey, SplitError, VnetHdr, icmp, ip, protocol};
use mpvpn_quic::{Connection, Transmit};
use mpvpn_types::{
    Instant,
    target::{FEC, LIVENESS, REORDER, SCHEDULER},
};

use super::{
    MultipathConnection, flow_order::needs_order, log_context::enter_connection, packetizer::PacketLimits,
    pass::Pass,
};
use crate::client::Seen;

/// The addresses that ICMP errors come from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gateway {
    pub(crate) v4: Option<IpAddr>,
    pub(crate) v6: Option<IpAddr>,
}

impl Gateway {
    /// The address of the family of `source`.
    pub(crate) fn for_source(self, source: IpAddr) -> Option<IpAddr> {
        if source.is_ipv4() { self.v4 } else { self.v6 }
    }
}

impl MultipathConnection {
    /// Takes what was read from the TUN, and notes the flow where somebody may ask for it. Returns an ICMP
    /// error to give back, if the packet cannot be carried.
    pub(crate) fn send_packet(
        &mut self,
        now: Instant,
        hdr: VnetHdr,
        packet: &mut [u8],
        gateway: Gateway,
        seen: Option<&mut Seen>,
    ) -> Option<Vec<u8>> {
        let (mut mtu, promised) = (self.mtu.limit()?, self.mtu.announced());
        let view = ip::parse(packet).ok()?;
        let flow = FlowKey::of(&view);
        if self.recovery.sequencer.is_some() && flow.protocol != protocol::TCP {
            // What outgrows the paths while they are probed travels in parts.
            mtu = mtu.max(promised);
        }
        let ordered = needs_order(&view);
        let len = packet.len();
        let prefix = self.packetizer.prefix().as_ref().len();
        let pieces = match self.packetizer.split(hdr, packet, flow.protocol, PacketLimits { mtu, promised }) {
            Ok(pieces) => pieces,
            Err(SplitError::TooBig { mtu, .. }) => {
                let from = gateway.for_source(flow.src)?;
                return icmp::packet_too_big(packet, mtu as u32, from);
            }
            Err(error) => {
                tracing::debug!(%error, "a packet from the TUN was dropped");
                return None;
            }
        };
        let hash = flow.hash32();
        if let Some(seen) = seen {
            seen.sent(now, &flow, hash, len);
        }
        for data in pieces.iter() {
            self.traffic.count_sent((data.len() - prefix) as u64);
            self.scheduler
                .push(now, QueuedPacket { data, flow: hash, needs_order: ordered, unnumbered: false });
        }
        self.note_traffic(now);
        self.trimmer.note_use(now);
        None
    }

    /// Takes a payload of UDP that fits a datagram behind its prefix; `ordered` if overtaking hurts its flow.
    pub(crate) fn send_payload(
        &mut self,
        now: Instant,
        prefix: &DatagramPrefix,
        payload: &[u8],
        flow: u32,
        ordered: bool,
    ) {
        let data = self.packetizer.payload(prefix, payload);
        self.traffic.count_sent(payload.len() as u64);
        self.scheduler.push(now, QueuedPacket { data, flow, needs_order: ordered, unnumbered: true });
        self.note_traffic(now);
        self.trimmer.note_use(now);
    }

    /// A payload of UDP does not fit a datagram, and is dropped.
    pub(crate) fn count_oversized(&mut self) {
        self.traffic.count_oversized();
    }

    /// Bytes of a stream were sent.
    pub(crate) fn count_sent(&mut self, bytes: u64) {
        self.traffic.count_sent(bytes);
    }

    /// The next UDP payload to send.
    pub(crate) fn poll_transmit(
        &mut self,
        now: Instant,
        connection: &mut Connection,
        buf: &mut Vec<u8>,
    ) -> Option<Transmit> {
        self.refresh(now, connection);
        if self.recovery.owes_data_ack(now, connection) {
            let _spans = enter_connection!(&self.log, DEBUG, [REORDER]);
            let reinjected = self.recovery.acknowledge_data(now, connection, &mut self.paths, &self.groups);
            self.traffic.count_reinjected(reinjected);
        }
        if connection.is_between_passes() {
            self.send_clocks(now, connection);
        }
        loop {
            let moved = connection.is_between_passes() && self.assign(now, connection);
            if let Some(transmit) = connection.poll_transmit(now, buf) {
                return Some(transmit);
            }
            if !moved && !self.assign(now, connection) {
                return None;
            }
        }
    }

    /// Tells on each path what the clock says, if it is time.
    fn send_clocks(&mut self, now: Instant, connection: &mut Connection) {
        let Some(clocks) = &mut self.clocks else { return };
        if !clocks.is_due(now, self.traffic.last_data_at()) {
            return;
        }
        for (id, path) in self.paths.iter_mut().filter(|(_, path)| path.is_trusted()) {
            let Some(seat) = path.policy.shaper() else { continue };
            if let Some(report) =
                clocks.report(now, id, &mut path.clock, seat, || connection.udp_bytes_carried(id))
            {
                connection.queue_datagram_on_path(id, report);
            }
        }
    }

    /// Moves what waits to paths that have room. Returns whether any moved.
    fn assign(&mut self, now: Instant, connection: &mut Connection) -> bool {
        let _spans = enter_connection!(&self.log, TRACE, [SCHEDULER, REORDER, FEC]);
        self.recovery.collect(now, connection);
        if self.scheduler.is_empty() && !self.recovery.has_waiting() && connection.stream_backlog() == 0 {
            self.paths.ids().for_each(|id| connection.set_backlogged(id, false));
            return false;
        }
        let pass = Pass {
            now,
            // A peer that takes no datagrams has sent no request that needs them.
            max: connection.max_datagram_size().unwrap_or(0),
            connection,
            log: &self.log,
            scheduler: &mut self.scheduler,
            packetizer: &mut self.packetizer,
            recovery: &mut self.recovery,
            paths: &self.paths,
            groups: &self.groups,
            traffic: &mut self.traffic,
        };
        self.offers.clear();
        let moved = pass.run(&mut self.offers);
        if moved {
            // It may have waited for long.
            self.note_traffic(now);
        }
        moved
    }

    /// Data is on its way, in either direction.
    pub(super) fn note_traffic(&mut self, now: Instant) {
        let before = self.traffic.last_data_at();
        if !self.traffic.moves(now) {
            // Most packets of a turn.
            return;
        }
        if self.heartbeats.wake_up(now, &self.paths) {
            let _spans = enter_connection!(&self.log, DEBUG, [LIVENESS]);
            let still = before.map(|at| now.saturating_duration_since(at));
            tracing::debug!(target: LIVENESS, ?still, "data moves: heartbeats become dense");
        }
        for path in self.paths.values_mut().filter(|path| !path.may_rest()) {
            path.liveness.on_traffic(now);
        }
    }
}
