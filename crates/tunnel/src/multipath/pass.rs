//! One pass over the paths: assigns waiting data to paths with an available window, until no window or no
//! data is left.
//!
//! In: queues, lost packets, and the available window of each path. Out: datagrams queued at the QUIC
//! connection for their paths, and send quotas for stream data. Always holds: FEC repair packets go first,
//! then packets of flows that send little, then what is sent again, then other new data; paths of later tiers
//! get only what is left.

use bytes::Bytes;
use mpvpn_class::{QueuedPacket, RateLimitMember};
use mpvpn_flow::fec::Load;
use mpvpn_path::{EligiblePackets, PathCandidate, first_to_arrive_if};
use mpvpn_quic::{Connection, TrackedDatagram};
use mpvpn_types::{Duration, Instant, PathId, Tier, Weight};

use super::{
    delay_difference::LatePaths, groups::PathGroups, log_context::LogContext, packetizer::Packetizer,
    path_table::PathTable, recovery::Recovery, scheduling::PacketScheduler, sequence::Sequencer,
    traffic::Traffic,
};
use crate::{EchoWatch, accounts::counted_bytes};

/// Maximum bytes that a pass assigns to a path, so that paths take turns on a fast machine. Smaller: more
/// passes. Larger: one path delays the others.
const MAX_PASS_BYTES: u64 = 256 * 1024;
/// Maximum number of links on which one packet and its copies are sent. Smaller: the scheduler `redundant`
/// does not use all links. Larger: an array on the stack grows.
const MAX_LINKS_PER_PACKET: usize = 16;
/// Waiting time in the queue from which on the paths count as full for FEC; below it, a burst waits. Smaller:
/// bursts get the FEC of full paths. Larger: full paths get too much FEC.
const FULL_LOAD_SOJOURN: Duration = Duration::from_millis(5);

/// The state on which a pass operates.
pub(super) struct Pass<'a> {
    pub(super) now: Instant,
    pub(super) connection: &'a mut Connection,
    /// Maximum size of a datagram (bytes).
    pub(super) max: usize,
    pub(super) log: &'a LogContext,
    pub(super) scheduler: &'a mut PacketScheduler,
    pub(super) packetizer: &'a mut Packetizer,
    pub(super) recovery: &'a mut Recovery,
    pub(super) paths: &'a PathTable,
    pub(super) groups: &'a PathGroups,
    pub(super) traffic: &'a mut Traffic,
    pub(super) late_paths: &'a mut LatePaths,
    pub(super) rate_limit: Option<&'a mut RateLimitMember>,
    /// Records the links of ICMP echoes, while a program asks for them.
    pub(super) echo_watch: Option<&'a EchoWatch>,
    /// Bytes of packets that the limit of the user still allows.
    pub(super) allowance: u64,
    /// Bytes of packets that this pass has taken out of the queues.
    pub(super) taken: u64,
}

/// The result of moving packets to a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Handover {
    /// At least one packet was moved.
    pub(super) moved: bool,
    /// No packet for this path is left in the queues.
    drained: bool,
}

impl Pass<'_> {
    /// Runs the pass; `candidates` is empty, and passed for its allocation. Returns whether any data was
    /// assigned.
    pub(super) fn run(mut self, candidates: &mut Vec<PathCandidate>) -> bool {
        let repairing = self.recovery.has_waiting();
        if let Some(limit) = &self.rate_limit {
            self.allowance = limit.available_bytes(self.now);
        }
        // Paths of later tiers get only what is left.
        let mut later = Vec::new();
        for id in self.scheduler.dispatcher.paths_by_preference() {
            let (tier, candidate) = candidate_of(self.paths, self.connection, self.now, id);
            if tier == Tier::Primary { &mut *candidates } else { &mut later }.push(candidate);
        }
        mpvpn_path::set_one_way_delays([&mut *candidates, &mut later]);
        // With copies of each packet, paths of later tiers are needed for the copies.
        if candidates.len() < usize::from(self.scheduler.choice.copies()) {
            candidates.append(&mut later);
        }
        // Repair packets are useful only if they arrive early.
        let mut moved = false;
        for candidate in candidates.iter_mut().chain(&mut later).filter(|_| repairing) {
            let taken = self.send_repair(candidate.id, candidate.available_window);
            candidate.assign(taken);
            moved |= taken > 0;
        }
        moved |= self.send_data_acks(candidates);
        moved |= repairing && self.give_new_flows(candidates);
        moved |= self.send_reinjected(candidates);
        moved |= repairing && self.retransmit(candidates);
        moved |= self.fill_paths(candidates);
        if !later.is_empty() {
            candidates.append(&mut later);
            moved |= self.fill_paths(candidates);
        }
        moved |= self.fill_high_delay_paths(candidates);
        moved |= self.fill_late_paths(candidates);
        let waits = self.recovery.has_waiting() || self.connection.stream_backlog() > 0;
        for candidate in &*candidates {
            let limited = (waits || self.scheduler.dispatcher.has_packet_for(candidate.id))
                && self.connection.available_window(self.now, candidate.id) == 0;
            self.connection.set_backlogged(candidate.id, limited);
        }
        if let Some(limit) = self.rate_limit {
            limit.on_carried(self.now, self.taken);
            limit.set_waiting(self.allowance == 0 && !self.scheduler.dispatcher.is_empty());
        }
        moved
    }

    /// Moves packets and stream data to the paths of `candidates` until no window or no data is left, or
    /// waiting for a better path is preferable.
    fn fill_paths(&mut self, candidates: &mut [PathCandidate]) -> bool {
        let mut moved = false;
        while let Some(pick) = self.scheduler.pick(self.now, candidates, self.connection.stream_backlog()) {
            let want = if pick.arrives_first { EligiblePackets::Any } else { EligiblePackets::OldFlows };
            let handover = self.give_packets(candidates, pick.index, want);
            // Packets and stream data take turns.
            let granted = self.grant_stream_quota(&mut candidates[pick.index]);
            moved |= handover.moved || granted;
            if handover.drained && !granted {
                candidates[pick.index].available_window = 0;
                // The best path has no data left, so no other path has.
                if pick.arrives_first {
                    break;
                }
            }
        }
        // Packets that are bound to one path do not wait for another one.
        if self.scheduler.dispatcher.has_pinned() || self.recovery.has_waiting() {
            for at in 0..candidates.len() {
                moved |= self.give_packets(candidates, at, EligiblePackets::Pinned).moved;
            }
        }
        moved
    }

    /// Moves the packets of flows that send little, each to the path on which it arrives first. They do not
    /// wait for what other flows send again: after the death of a path that is as much as was in flight on
    /// it.
    fn give_new_flows(&mut self, candidates: &mut [PathCandidate]) -> bool {
        let mut moved = false;
        while let Some(pick) =
            self.scheduler.pick(self.now, candidates, 0).filter(|selection| selection.arrives_first)
        {
            let handover = self.give_packets(candidates, pick.index, EligiblePackets::NewFlows);
            moved |= handover.moved;
            if handover.drained {
                break;
            }
        }
        moved
    }

    /// Gives the path of a candidate a send quota for one turn of stream data; returns whether any was sent.
    fn grant_stream_quota(&mut self, candidate: &mut PathCandidate) -> bool {
        if candidate.available_window == 0 || self.connection.stream_backlog() == 0 {
            return false;
        }
        let taken = self
            .connection
            .grant_quota(candidate.id, self.scheduler.path_turn_bytes(candidate.available_window));
        self.scheduler.charge(candidate, taken);
        candidate.assign(taken);
        taken > 0
    }

    /// Moves one turn of packets to the path of `candidates[at]`.
    pub(super) fn give_packets(
        &mut self,
        candidates: &mut [PathCandidate],
        at: usize,
        want: EligiblePackets,
    ) -> Handover {
        let PathCandidate { id, available_window: window, .. } = candidates[at];
        let max_bytes =
            if want == EligiblePackets::Pinned { window } else { self.scheduler.path_turn_bytes(window) };
        let mut taken = 0;
        let mut drained = false;
        while taken < max_bytes && !drained && self.allowance > 0 {
            match self.scheduler.dispatcher.pop(self.now, id, want) {
                Some(packet) => {
                    if self.rate_limit.is_some() {
                        self.count(&packet);
                    }
                    taken += self.queue_packet(packet, id, candidates);
                }
                None => drained = true,
            }
            taken += self.send_repair(id, max_bytes.saturating_sub(taken));
        }
        // Packets that the user's limit holds back are for no path now.
        drained |= self.allowance == 0;
        self.scheduler.charge(&candidates[at], taken);
        candidates[at].assign(taken);
        Handover { moved: taken > 0, drained }
    }

    /// Counts a packet for its user.
    fn count(&mut self, packet: &QueuedPacket) {
        let bytes = match packet.unnumbered {
            // The payload of a UDP flow.
            true => packet.data.len() as u64,
            false => counted_bytes(self.packetizer.behind_prefix(packet)),
        };
        self.allowance = self.allowance.saturating_sub(bytes);
        self.taken += bytes;
    }

    /// Queues a packet for a path, split if it does not fit a datagram; returns the bytes that it takes on
    /// the path.
    fn queue_packet(&mut self, packet: QueuedPacket, id: PathId, candidates: &mut [PathCandidate]) -> u64 {
        let max = self.max;
        if packet.unnumbered {
            if packet.data.len() <= max {
                return self.connection.queue_datagram(id, packet.data);
            }
            // The MTU became smaller while the payload waited.
            self.traffic.oversized += 1;
            return 0;
        }
        let sequencer = self.recovery.sequencer.as_deref();
        let numbered = sequencer.filter(|sequencer| sequencer.is_on());
        let label_bytes = numbered.map_or(0, |sequencer| sequencer.overhead_bytes(&self.packetizer.prefix));
        let fits = packet.data.len() + label_bytes <= max;
        if !fits && (sequencer.is_none() || self.packetizer.is_tcp(&packet)) {
            return self.queue_segments(&packet, max.saturating_sub(label_bytes), id, candidates);
        }
        let sequencer = self.recovery.sequencer.as_deref_mut();
        let Some(sequencer) = sequencer.filter(|sequencer| sequencer.is_on() || !fits) else {
            self.note_echo_request(self.packetizer.behind_prefix(&packet), id);
            return self.connection.queue_datagram(id, packet.data);
        };
        let payload = self.packetizer.behind_prefix(&packet);
        let label = sequencer.label(self.now, &packet, payload);
        if fits {
            let load = if self.scheduler.sojourn() >= FULL_LOAD_SOJOURN { Load::Full } else { Load::Light };
            let now = self.now;
            let (watch, paths) = (self.echo_watch, self.paths);
            return self.queue_numbered(id, candidates, |sequencer, path| {
                if let Some(watch) = watch {
                    note_echo_request(watch, now, payload, path, paths);
                }
                sequencer.frame(now, path, label, payload, load)
            });
        }
        let parts = sequencer.split_into_parts(label, payload, max);
        let each = |part: Bytes| self.queue_numbered(id, candidates, |_, _| (part.clone(), None));
        parts.into_iter().map(each).sum()
    }

    /// Queues a packet that does not fit as TCP segments or IP fragments of at most `max` bytes.
    #[cold]
    fn queue_segments(
        &mut self,
        packet: &QueuedPacket,
        max: usize,
        id: PathId,
        candidates: &mut [PathCandidate],
    ) -> u64 {
        match self.packetizer.cut(packet, max) {
            Ok(parts) => parts.into_iter().map(|part| self.queue_packet(part, id, candidates)).sum(),
            Err(error) => {
                tracing::debug!(
                    class = self.log.class(),
                    %error,
                    "a packet was dropped: the path MTU fell while it waited, and it must not be fragmented"
                );
                0
            }
        }
    }

    /// Queues a numbered packet for a path, and its copies for other paths. `make` encodes the datagram for a
    /// path. Returns the bytes that the packet takes on the first path.
    fn queue_numbered(
        &mut self,
        id: PathId,
        candidates: &mut [PathCandidate],
        mut make: impl FnMut(&mut Sequencer, PathId) -> (Bytes, Option<u32>),
    ) -> u64 {
        let (now, copies) = (self.now, self.scheduler.extra_copies(candidates.len()));
        let Some(sequencer) = &mut self.recovery.sequencer else { return 0 };
        let connection = &mut *self.connection;
        let mut copied = false;
        // Each copy uses another link.
        let mut used_paths = [id; MAX_LINKS_PER_PACKET];
        for at in 1..=copies.min(MAX_LINKS_PER_PACKET - 1) {
            let Some(next) =
                first_to_arrive_if(candidates, |candidate| !used_paths[..at].contains(&candidate.id))
            else {
                break;
            };
            used_paths[at] = candidates[next].id;
            let path = connection.next_path_in_group(used_paths[at]).unwrap_or(used_paths[at]);
            let (data, mark) = make(sequencer, path);
            // Only the first datagram is retransmitted after loss, not a copy.
            candidates[next].assign(match mark {
                None => connection.queue_datagram(used_paths[at], data),
                Some(_) => {
                    let copy = TrackedDatagram {
                        data,
                        first_sent: now,
                        retransmissions: u8::MAX,
                        has_copy: true,
                        ack_token: mark,
                    };
                    connection.queue_tracked_on_path(path, copy)
                }
            });
            sequencer.count_copy();
            copied = true;
        }
        let path = connection.next_path_in_group(id).unwrap_or(id);
        let (data, mark) = make(sequencer, path);
        connection.queue_tracked_on_path(
            path,
            TrackedDatagram { data, first_sent: now, retransmissions: 0, has_copy: copied, ack_token: mark },
        )
    }

    /// Records the link of a watched echo request that leaves on a path.
    fn note_echo_request(&self, packet: &[u8], path: PathId) {
        if let Some(watch) = self.echo_watch {
            note_echo_request(watch, self.now, packet, path, self.paths);
        }
    }

    /// Retransmits lost packets, each on the path on which it arrives first. Returns whether any was sent.
    fn retransmit(&mut self, candidates: &mut [PathCandidate]) -> bool {
        let Some(sequencer) = &mut self.recovery.sequencer else { return false };
        let mut moved = false;
        while let Some(at) = mpvpn_path::first_to_arrive_soon(candidates) {
            let Some(datagram) = sequencer.next_retransmission() else { break };
            let candidate = &mut candidates[at];
            if datagram.data.len() <= self.max {
                if let (Some(watch), Some(payload)) = (self.echo_watch, sequencer.payload_of(&datagram.data))
                {
                    note_echo_request(watch, self.now, payload, candidate.id, self.paths);
                }
                candidate.assign(self.connection.queue_tracked(candidate.id, datagram));
                moved = true;
                continue;
            }
            for data in sequencer.split_lost_into_parts(&datagram.data, self.max) {
                candidate.assign(
                    self.connection.queue_tracked(candidate.id, TrackedDatagram { data, ..datagram.clone() }),
                );
                moved = true;
            }
        }
        moved
    }

    /// Sends FEC repair packets on the paths of the group of `head`. Stops after `window` bytes, which the
    /// last datagram may exceed. Returns the bytes sent.
    fn send_repair(&mut self, head: PathId, window: u64) -> u64 {
        let sequencer = self.recovery.sequencer.as_mut();
        let protection = sequencer.and_then(|sequencer| sequencer.protection());
        let Some(protection) = protection.filter(|protection| protection.has_repair()) else { return 0 };
        let mut taken = 0;
        for id in self.groups.members(head) {
            while taken < window
                && let Some(datagram) = protection.next_repair(self.now, *id)
            {
                taken += self.connection.queue_tracked_on_path(*id, datagram);
            }
        }
        taken
    }

    /// Sends the waiting DataAck report on all paths with an available window, since any path may stall.
    fn send_data_acks(&mut self, candidates: &mut [PathCandidate]) -> bool {
        let Some(acks) = &mut self.recovery.data_acks else { return false };
        if candidates.iter().all(|candidate| candidate.available_window == 0) {
            return false;
        }
        let Some(data) = acks.take_waiting() else { return false };
        for candidate in candidates.iter_mut().filter(|candidate| candidate.available_window > 0) {
            let data = data.clone();
            let report = TrackedDatagram {
                data,
                first_sent: self.now,
                retransmissions: 0,
                has_copy: false,
                ack_token: None,
            };
            candidate.assign(self.connection.queue_tracked(candidate.id, report));
        }
        true
    }

    /// Sends reinjected bytes, each on the path on which it arrives first. Returns whether any were sent.
    fn send_reinjected(&mut self, candidates: &mut [PathCandidate]) -> bool {
        let Some(reinjection) = &mut self.recovery.reinjection else { return false };
        let mut moved = false;
        while let Some((at, datagram)) = reinjection.next(self.now, self.max, candidates) {
            let candidate = &mut candidates[at];
            candidate.assign(self.connection.queue_tracked(candidate.id, datagram));
            moved = true;
        }
        moved
    }
}

/// Records the link of an echo request that leaves on a path.
fn note_echo_request(watch: &EchoWatch, now: Instant, packet: &[u8], path: PathId, paths: &PathTable) {
    if let Some(path) = paths.get(path) {
        watch.on_sent(now, packet, path.link());
    }
}

/// Returns the path candidate of a path, and the tier of its link.
fn candidate_of(
    paths: &PathTable,
    connection: &mut Connection,
    now: Instant,
    id: PathId,
) -> (Tier, PathCandidate) {
    let candidate = connection.path_candidate(now, id, MAX_PASS_BYTES);
    let Some(path) = paths.get(id) else {
        return (Tier::Primary, PathCandidate { weight: Weight::default().get().into(), ..candidate });
    };
    let policy = path.policy.get();
    let one_way_delay = path.stall.delay(now);
    (policy.tier, PathCandidate { weight: policy.weight.get().into(), one_way_delay, ..candidate })
}
