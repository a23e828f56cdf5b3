//! One pass over the paths: what waits is handed to those that have room, until none has any or nothing
//! waits.
//!
//! In: queues, what was lost, and what each path can take. Out: datagrams queued at the connection for their
//! paths. Always holds: repair leaves before what was lost, that before new data, and links of later tiers
//! get what is left.

use bytes::Bytes;
use mpvpn_class::QueuedPacket;
use mpvpn_flow::fec::Load;
use mpvpn_path::{EligiblePackets, PathCandidate, first_to_arrive_if};
use mpvpn_quic::{Connection, TrackedDatagram};
use mpvpn_types::{Duration, Instant, PathId, Tier, Weight};

use super::{
    groups::PathGroups, log_context::LogContext, packetizer::Packetizer, path_table::PathTable,
    recovery::Recovery, scheduling::PacketScheduler, sequence::Sequencer, traffic::Traffic,
};

/// Bytes that one pass hands to a path, so that paths take turns on a fast machine.
const PASS_BYTES: u64 = 256 * 1024;
/// Links that one packet may leave on.
const MOST_LINKS: usize = 16;
/// Packets that waited for so long find their paths full; less is a burst.
const LATE: Duration = Duration::from_millis(5);

/// What a pass works with.
pub(super) struct Pass<'a> {
    pub(super) now: Instant,
    pub(super) connection: &'a mut Connection,
    /// Bytes that a datagram may have.
    pub(super) max: usize,
    pub(super) log: &'a LogContext,
    pub(super) scheduler: &'a mut PacketScheduler,
    pub(super) packetizer: &'a mut Packetizer,
    pub(super) recovery: &'a mut Recovery,
    pub(super) paths: &'a PathTable,
    pub(super) groups: &'a PathGroups,
    pub(super) traffic: &'a mut Traffic,
}

/// What a path took of what it could have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Taken {
    /// It took something.
    some: bool,
    /// Nothing is left that it wants.
    all: bool,
}

impl Pass<'_> {
    /// Hands out what waits; `offers` is empty, and kept for its memory. Returns whether anything moved.
    pub(super) fn run(mut self, offers: &mut Vec<PathCandidate>) -> bool {
        let repairing = self.recovery.has_waiting();
        // Links of later tiers get what is left.
        let mut later = Vec::new();
        for id in self.scheduler.order() {
            let (tier, offer) = offer_of(self.paths, self.connection, self.now, id);
            if tier == Tier::Primary { &mut *offers } else { &mut later }.push(offer);
        }
        // Copies of all packets go there, too.
        if offers.len() < usize::from(self.scheduler.copies()) {
            offers.append(&mut later);
        }
        // Repair is worth something as long as it is early.
        let mut moved = false;
        for offer in offers.iter_mut().chain(&mut later) {
            let taken = self.send_protection(offer.id, offer.available_window);
            offer.assign(taken);
            moved |= taken > 0;
        }
        moved |= self.send_data_acks(offers);
        moved |= self.send_reinjected(offers);
        moved |= repairing && self.retransmit(offers);
        moved |= self.fill(offers);
        if !later.is_empty() {
            offers.append(&mut later);
            moved |= self.fill(offers);
        }
        moved |= self.fill_late(offers);
        let waits = self.recovery.has_waiting() || self.connection.stream_backlog() > 0;
        for offer in &*offers {
            let room = self.connection.available_window(self.now, offer.id);
            let limited = room == 0 && (waits || self.scheduler.has_for(offer.id));
            self.connection.set_backlogged(offer.id, limited);
        }
        moved
    }

    /// Moves packets to the paths of `offers` until these have no room, or nothing should wait for them.
    fn fill(&mut self, offers: &mut [PathCandidate]) -> bool {
        let mut moved = false;
        while let Some(pick) = self.scheduler.pick(self.now, offers, self.connection.stream_backlog()) {
            let want = if pick.arrives_first { EligiblePackets::Any } else { EligiblePackets::OldFlows };
            let taken = self.give(offers, pick.index, want);
            // Packets and streams take turns.
            let granted = self.grant(&mut offers[pick.index]);
            moved |= taken.some || granted;
            if taken.all && !granted {
                offers[pick.index].available_window = 0;
                // What is left is for the best path, or there is nothing left.
                if pick.arrives_first {
                    break;
                }
            }
        }
        // What may take one path only waits for no other.
        for at in 0..offers.len() {
            moved |= self.give(offers, at, EligiblePackets::Pinned).some;
        }
        moved
    }

    /// Lets the path of an offer carry a turn's bytes of streams; whether there were any.
    fn grant(&mut self, offer: &mut PathCandidate) -> bool {
        if offer.available_window == 0 || self.connection.stream_backlog() == 0 {
            return false;
        }
        let taken = self.connection.grant_quota(offer.id, self.scheduler.turn(offer.available_window));
        self.scheduler.charge(offer, taken);
        offer.assign(taken);
        taken > 0
    }

    /// Moves a turn's packets to the path of `offers[at]`.
    fn give(&mut self, offers: &mut [PathCandidate], at: usize, want: EligiblePackets) -> Taken {
        let PathCandidate { id, available_window: room, .. } = offers[at];
        let most = if want == EligiblePackets::Pinned { room } else { self.scheduler.turn(room) };
        let mut taken = 0;
        let mut all = false;
        while taken < most && !all {
            match self.scheduler.pop(self.now, id, want) {
                Some(packet) => taken += self.carry(packet, id, offers),
                None => all = true,
            }
            taken += self.send_protection(id, most.saturating_sub(taken));
        }
        self.scheduler.charge(&offers[at], taken);
        offers[at].assign(taken);
        Taken { some: taken > 0, all }
    }

    /// Queues a packet for a path, in parts if it does not fit; returns the bytes that it takes there.
    fn carry(&mut self, packet: QueuedPacket, id: PathId, offers: &mut [PathCandidate]) -> u64 {
        let max = self.max;
        if packet.unnumbered {
            if packet.data.len() <= max {
                return self.connection.queue_datagram(id, packet.data);
            }
            // The paths became smaller while it waited.
            self.traffic.count_oversized();
            return 0;
        }
        let sequencer = self.recovery.sequencer.as_deref();
        let numbered = sequencer.filter(|sequencer| sequencer.is_on());
        let label = numbered.map_or(0, |sequencer| sequencer.overhead(self.packetizer.prefix()));
        let fits = packet.data.len() + label <= max;
        if !fits && (sequencer.is_none() || self.packetizer.is_tcp(&packet)) {
            return self.carry_cut(&packet, max.saturating_sub(label), id, offers);
        }
        let sequencer = self.recovery.sequencer.as_deref_mut();
        let Some(sequencer) = sequencer.filter(|sequencer| sequencer.is_on() || !fits) else {
            return self.connection.queue_datagram(id, packet.data);
        };
        let payload = self.packetizer.behind_prefix(&packet);
        let label = sequencer.label(self.now, &packet, payload);
        if fits {
            let load = if self.scheduler.sojourn() >= LATE { Load::Full } else { Load::Light };
            let now = self.now;
            return self
                .launch(id, offers, |sequencer, path| sequencer.frame(now, path, label, payload, load));
        }
        let parts = sequencer.in_parts(label, payload, max);
        let each = |part: Bytes| self.launch(id, offers, |_, _| (part.clone(), None));
        parts.into_iter().map(each).sum()
    }

    /// The same for a packet that is to be cut so that each datagram has at most `max` bytes.
    #[cold]
    fn carry_cut(
        &mut self,
        packet: &QueuedPacket,
        max: usize,
        id: PathId,
        offers: &mut [PathCandidate],
    ) -> u64 {
        match self.packetizer.cut(packet, max) {
            Ok(parts) => parts.into_iter().map(|part| self.carry(part, id, offers)).sum(),
            Err(error) => {
                tracing::debug!(
                    class = self.log.class(),
                    %error,
                    "a packet outgrew its paths and was dropped"
                );
                0
            }
        }
    }

    /// Queues a numbered packet for a path, and its copies for others, each as `make` makes it for the path
    /// that it leaves on; returns the bytes that it takes on the first one.
    fn launch(
        &mut self,
        id: PathId,
        offers: &mut [PathCandidate],
        mut make: impl FnMut(&mut Sequencer, PathId) -> (Bytes, Option<u32>),
    ) -> u64 {
        let (now, copies) = (self.now, self.scheduler.extra_copies(offers.len()));
        let Some(sequencer) = &mut self.recovery.sequencer else { return 0 };
        let connection = &mut *self.connection;
        let mut copied = false;
        // No link gets two.
        let mut had = [id; MOST_LINKS];
        for at in 1..=copies.min(MOST_LINKS - 1) {
            let Some(next) = first_to_arrive_if(offers, |offer| !had[..at].contains(&offer.id)) else {
                break;
            };
            had[at] = offers[next].id;
            let path = connection.next_path_in_group(had[at]).unwrap_or(had[at]);
            let (data, mark) = make(sequencer, path);
            // The first one is sent again if it is lost, and a copy is not.
            offers[next].assign(match mark {
                None => connection.queue_datagram(had[at], data),
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

    /// Sends again what was lost, on the paths where it arrives first. Returns whether anything was.
    fn retransmit(&mut self, offers: &mut [PathCandidate]) -> bool {
        let Some(sequencer) = &mut self.recovery.sequencer else { return false };
        let mut moved = false;
        while let Some(at) = mpvpn_path::first_to_arrive(offers) {
            let Some(datagram) = sequencer.next_retransmission() else { break };
            let offer = &mut offers[at];
            if datagram.data.len() <= self.max {
                offer.assign(self.connection.queue_tracked(offer.id, datagram));
                moved = true;
                continue;
            }
            for data in sequencer.lost_in_parts(&datagram.data, self.max) {
                offer.assign(
                    self.connection.queue_tracked(offer.id, TrackedDatagram { data, ..datagram.clone() }),
                );
                moved = true;
            }
        }
        moved
    }

    /// Sends repair of FEC groups on the paths that carry as `head`, no more than `room` bytes or what one
    /// datagram exceeds that by; returns the bytes that it takes.
    fn send_protection(&mut self, head: PathId, room: u64) -> u64 {
        let sequencer = self.recovery.sequencer.as_mut();
        let protection = sequencer.and_then(|sequencer| sequencer.protection());
        let Some(protection) = protection.filter(|protection| protection.has_repair()) else { return 0 };
        let mut taken = 0;
        for id in self.groups.members(head) {
            while taken < room
                && let Some(datagram) = protection.next_repair(self.now, *id)
            {
                taken += self.connection.queue_tracked_on_path(*id, datagram);
            }
        }
        taken
    }

    /// Sends a report of how far streams have come on all paths that have room, since any may stall.
    fn send_data_acks(&mut self, offers: &mut [PathCandidate]) -> bool {
        let Some(acks) = &mut self.recovery.data_acks else { return false };
        if offers.iter().all(|offer| offer.available_window == 0) {
            return false;
        }
        let Some(data) = acks.take_waiting() else { return false };
        for offer in offers.iter_mut().filter(|offer| offer.available_window > 0) {
            let data = data.clone();
            let report = TrackedDatagram {
                data,
                first_sent: self.now,
                retransmissions: 0,
                has_copy: false,
                ack_token: None,
            };
            offer.assign(self.connection.queue_tracked(offer.id, report));
        }
        true
    }

    /// Sends reinjected bytes on the paths where they arrive first. Returns whether there were any.
    fn send_reinjected(&mut self, offers: &mut [PathCandidate]) -> bool {
        let Some(reinjection) = &mut self.recovery.reinjection else { return false };
        let mut moved = false;
        while let Some((at, datagram)) = reinjection.next(self.now, self.max, offers) {
            let offer = &mut offers[at];
            offer.assign(self.connection.queue_tracked(offer.id, datagram));
            moved = true;
        }
        moved
    }
}

/// What a path can do for the next packets, and the tier of its link.
fn offer_of(
    paths: &PathTable,
    connection: &mut Connection,
    now: Instant,
    id: PathId,
) -> (Tier, PathCandidate) {
    let offer = connection.path_candidate(now, id, PASS_BYTES);
    let Some(path) = paths.get(id) else {
        return (Tier::Primary, PathCandidate { weight: Weight::default().get().into(), ..offer });
    };
    let policy = path.policy.get();
    let delay = offer.one_way_delay + path.stall.delay(now);
    (policy.tier, PathCandidate { weight: policy.weight.get().into(), one_way_delay: delay, ..offer })
}
