//! Takes packets and UDP payloads to send, and produces the next UDP payload of the QUIC connection.
//!
//! In: packets from the TUN device, UDP payloads, the time. Out: UDP payloads, and ICMP errors for packets
//! that do not fit. Always holds: every packet is queued, answered with an ICMP error, or dropped because it
//! is malformed, no MTU is known yet, or nothing has been heard for long.

use std::net::IpAddr;

use mpvpn_class::QueuedPacket;
use mpvpn_masque::datagram::DatagramPrefix;
use mpvpn_packet::{FlowKey, SplitError, VnetHdr, ack_filter, icmp, ip, protocol};
use mpvpn_path::LONG_SILENCE;
use mpvpn_quic::{Connection, Transmit};
use mpvpn_types::{
    Duration, Instant,
    target::{FEC, LIVENESS, REORDER, SCHEDULER},
};

use super::{
    MultipathConnection, flow_order::needs_order, log_context::enter_connection, packetizer::PacketLimits,
    pass::Pass,
};
use crate::client::FlowTable;

/// The source addresses of ICMP errors.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gateway {
    pub(crate) v4: Option<IpAddr>,
    pub(crate) v6: Option<IpAddr>,
}

impl Gateway {
    /// Returns the address of the same family as `source`.
    pub(crate) fn for_source(self, source: IpAddr) -> Option<IpAddr> {
        if source.is_ipv4() { self.v4 } else { self.v6 }
    }
}

impl MultipathConnection {
    /// Takes a packet read from the TUN device, and records its flow in `flow_table`. A packet that is
    /// `urgent` leaves before those that wait. Returns an ICMP error for its sender if the packet cannot
    /// be sent.
    pub(crate) fn send_packet(
        &mut self,
        now: Instant,
        hdr: VnetHdr,
        packet: &mut [u8],
        gateway: Gateway,
        flow_table: Option<&mut FlowTable>,
        urgent: bool,
    ) -> Option<Vec<u8>> {
        let mut mtu = self.mtu.limit?;
        let (announced, largest) = (self.mtu.announced(), self.mtu.largest_taken());
        let view = ip::parse(packet).ok()?;
        self.note_traffic(now);
        if self.is_given_up(now) {
            return None;
        }
        let flow = FlowKey::of(&view);
        if self.recovery.sequencer.is_some() && flow.protocol != protocol::TCP {
            // Packets that exceed the path MTU while it is being searched are sent in parts.
            mtu = mtu.max(largest);
        }
        let ordered = needs_order(&view);
        let len = packet.len();
        let prefix = self.packetizer.prefix.as_ref().len();
        let limits = PacketLimits { mtu, announced, largest };
        let pieces = match self.packetizer.split(hdr, packet, flow.protocol, limits) {
            Ok(pieces) => pieces,
            Err(SplitError::TooBig { .. }) if announced < largest => return None,
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
        if let Some(flow_table) = flow_table {
            flow_table.record_sent(now, &flow, hash, len);
        }
        for data in pieces.iter() {
            self.traffic.counters.tx_bytes += (data.len() - prefix) as u64;
            let queued = QueuedPacket { data, flow: hash, needs_order: ordered, unnumbered: false };
            // Among TCP packets, only acknowledgements need no order.
            if urgent || ordered || flow.protocol != protocol::TCP {
                self.scheduler.push(now, queued, urgent);
            } else if self.scheduler.dispatcher.push_superseding(now, queued, |later, earlier| {
                let earlier = earlier.strip_prefix(&later[..prefix]);
                earlier.is_some_and(|earlier| ack_filter::supersedes(&later[prefix..], earlier))
            }) {
                self.traffic.counters.superseded_acks += 1;
            }
        }
        self.trimmer.note_use(now);
        None
    }

    /// Takes a UDP payload that fits a datagram after its prefix. `flow` is the hash of its flow; `ordered`:
    /// reordering harms the flow.
    pub(crate) fn send_payload(
        &mut self,
        now: Instant,
        prefix: &DatagramPrefix,
        payload: &[u8],
        flow: u32,
        ordered: bool,
    ) {
        self.note_traffic(now);
        if self.is_given_up(now) {
            return;
        }
        let data = self.packetizer.payload(prefix, payload);
        self.traffic.counters.tx_bytes += payload.len() as u64;
        self.scheduler.push(now, QueuedPacket { data, flow, needs_order: ordered, unnumbered: true }, false);
        self.trimmer.note_use(now);
    }

    /// Whether nothing has been heard on any path for so long that packets of apps would only cost their
    /// links: heartbeats ask.
    #[inline]
    fn is_given_up(&self, now: Instant) -> bool {
        if !self.is_alone {
            return false;
        }
        let mut silences = self.paths.values().filter_map(|path| path.liveness.alone_for(now));
        silences.next().is_some_and(|first| silences.fold(first, Duration::min) >= LONG_SILENCE)
    }

    /// Writes the next UDP payload to send to `buf`; `None` if there is nothing to send.
    pub(crate) fn poll_transmit(
        &mut self,
        now: Instant,
        connection: &mut Connection,
        buf: &mut Vec<u8>,
    ) -> Option<Transmit> {
        self.may_be_due = false;
        self.refresh(now, connection);
        if self.recovery.is_data_ack_due(now, connection) {
            let _spans = enter_connection!(&self.log, DEBUG, [REORDER]);
            let reinjected = self.recovery.acknowledge_data(now, connection, &mut self.paths, &self.groups);
            self.traffic.counters.reinjected_bytes += reinjected;
        }
        if connection.is_between_passes() {
            self.send_clocks(now, connection);
        }
        loop {
            let moved = connection.is_between_passes() && self.assign_to_paths(now, connection);
            if let Some(transmit) = connection.poll_transmit(now, buf) {
                self.note_ack_eliciting(now, connection);
                return Some(transmit);
            }
            if !moved && !self.assign_to_paths(now, connection) {
                return None;
            }
        }
    }

    /// Records that the only path that works has sent a packet that the peer has to acknowledge.
    #[inline]
    fn note_ack_eliciting(&mut self, now: Instant, connection: &Connection) {
        if let Some((id, path)) = self.paths.sole_mut()
            && path.liveness.is_acked()
            && connection.has_in_flight(id)
        {
            path.liveness.on_sent(now);
        }
    }

    /// Sends clock reports on the paths where they are due.
    fn send_clocks(&mut self, now: Instant, connection: &mut Connection) {
        let Some(clocks) = &mut self.clocks else { return };
        if !clocks.is_due(now, self.traffic.last_data_at) {
            return;
        }
        for (id, path) in self.paths.iter_mut().filter(|(_, path)| path.is_trusted()) {
            let Some(shaper) = &path.policy.shaper else { continue };
            if let Some(report) =
                clocks.report(now, id, &mut path.clock, shaper, || connection.udp_bytes_carried(id))
            {
                connection.queue_datagram_on_path(id, report);
            }
        }
    }

    /// Assigns waiting data to paths with an available window. Returns whether any data was assigned.
    fn assign_to_paths(&mut self, now: Instant, connection: &mut Connection) -> bool {
        let _spans = enter_connection!(&self.log, TRACE, [SCHEDULER, REORDER, FEC]);
        self.recovery.collect(now, connection);
        if self.scheduler.dispatcher.is_empty()
            && !self.recovery.has_waiting()
            && connection.stream_backlog() == 0
        {
            connection.set_none_backlogged();
            return false;
        }
        let pass = Pass {
            now,
            // If the peer takes no datagrams, no request that needs them was accepted, so none are queued.
            max: connection.max_datagram_size().unwrap_or(0),
            connection,
            log: &self.log,
            scheduler: &mut self.scheduler,
            packetizer: &mut self.packetizer,
            recovery: &mut self.recovery,
            paths: &self.paths,
            groups: &self.groups,
            traffic: &mut self.traffic,
            late_paths: &mut self.late_paths,
            rate_limit: self.rate_limit.as_mut(),
            echo_watch: self.echo_watch.as_ref().filter(|watch| watch.is_active(now)),
            allowance: u64::MAX,
            taken: 0,
        };
        self.candidates.clear();
        let moved = pass.run(&mut self.candidates);
        if moved {
            // The data may have waited for long, so heartbeats may be sparse.
            self.note_traffic(now);
        }
        moved
    }

    /// Records that data moves, in either direction, and makes heartbeats dense.
    pub(super) fn note_traffic(&mut self, now: Instant) {
        let before = self.traffic.last_data_at;
        if !self.traffic.note_data(now) {
            // Already recorded in this event-loop iteration.
            return;
        }
        if self.make_heartbeats_dense(now) {
            let _spans = enter_connection!(&self.log, DEBUG, [LIVENESS]);
            let idle_for = before.map(|at| now.saturating_duration_since(at));
            tracing::debug!(target: LIVENESS, ?idle_for, "data moves: heartbeats become dense");
        }
    }

    /// Makes heartbeats dense on all paths that are worth it. Returns whether they were sparse.
    pub(super) fn make_heartbeats_dense(&mut self, now: Instant) -> bool {
        let were_sparse = self.heartbeats.on_data_resumed(now, &self.paths);
        for path in self.paths.values_mut().filter(|path| !path.may_stay_unprobed()) {
            self.may_be_due |= path.liveness.on_traffic(now);
        }
        were_sparse
    }
}
