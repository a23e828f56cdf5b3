//! What waits is handed out to the paths that have room.

use std::ops::Range;

use bytes::Bytes;
use mpvpn_class::Queued;
use mpvpn_lane::fec::Load;
use mpvpn_packet::{VnetHdr, ip, protocol, split};
use mpvpn_path::{Offer, Scheduler, Want, first_of};
use mpvpn_quic::{Connection, Tracked};
use mpvpn_types::{Duration, Instant, PathId, Tier};

use super::{Carrier, as_super_packet, sequence::Sequencer};

/// Bytes that one pass hands to a path, so that paths take turns on a fast machine.
const PASS_BYTES: u64 = 256 * 1024;
/// Links that one packet may leave on.
const MOST_LINKS: usize = 16;
/// Bytes that a path is given before it is asked again which path is best.
const TURN_BYTES: u64 = 12 * 1024;
/// Packets that waited for so long find their paths full; less is a burst.
const LATE: Duration = Duration::from_millis(5);

impl Carrier {
    /// Moves packets from the queues to paths that have room. Returns whether any moved.
    pub(super) fn assign(&mut self, now: Instant, connection: &mut Connection) -> bool {
        self.collect(now, connection);
        let repairing = self.has_repairs();
        if self.dispatcher.is_empty() && !repairing && connection.stream_backlog() == 0 {
            for id in self.paths.keys() {
                connection.set_limited(*id, false);
            }
            return false;
        }
        // A peer that takes no datagrams has sent no request that needs them.
        let max = connection.max_datagram().unwrap_or(0);
        let mut offers = std::mem::take(&mut self.offers);
        offers.clear();
        // Links of later tiers get what is left.
        let mut later = Vec::new();
        for id in self.dispatcher.order() {
            let offer = self.offer(now, connection, id, PASS_BYTES);
            if self.rank(id) == Tier::Primary { &mut offers } else { &mut later }.push(offer);
        }
        // Copies of all packets go there, too.
        if offers.len() < usize::from(self.choice.copies()) {
            offers.append(&mut later);
        }
        // Repair is worth something as long as it is early.
        let mut moved = false;
        for offer in offers.iter_mut().chain(&mut later) {
            let taken = self.send_protection(now, connection, offer.id, offer.room);
            offer.take(taken);
            moved |= taken > 0;
        }
        moved |= self.send_rescued(now, connection, max, &mut offers);
        moved |= repairing && self.repair(connection, max, &mut offers);
        moved |= self.fill(now, connection, max, &mut offers);
        if !later.is_empty() {
            offers.append(&mut later);
            moved |= self.fill(now, connection, max, &mut offers);
        }
        moved |= self.fill_late(now, connection, &mut offers);
        let waits = self.has_repairs() || connection.stream_backlog() > 0;
        for offer in &offers {
            let room = connection.room(now, offer.id);
            connection.set_limited(offer.id, room == 0 && (waits || self.dispatcher.has_for(offer.id)));
        }
        self.offers = offers;
        if moved {
            // It may have waited for long.
            self.note_traffic(now);
        }
        moved
    }

    /// Whether anything that was lost waits to be sent again.
    fn has_repairs(&self) -> bool {
        self.sequencer.as_ref().is_some_and(|sequencer| sequencer.has_repairs())
            || self.rescue.as_ref().is_some_and(|rescue| rescue.has_waiting())
    }

    /// Moves packets to the paths of `offers` until these have no room, or nothing should wait for them.
    fn fill(&mut self, now: Instant, connection: &mut Connection, max: usize, offers: &mut [Offer]) -> bool {
        let scheduler = self.dispatcher.scheduler();
        let mut moved = false;
        loop {
            let backlog = self.dispatcher.bytes() as u64 + connection.stream_backlog();
            let Some(pick) = self.choice.pick(now, scheduler, offers, backlog) else { break };
            let want = if pick.best { Want::Any } else { Want::Standing };
            let (some, all) = self.give(now, connection, max, offers, pick.at, want);
            // Packets and streams take turns.
            let granted = self.grant(connection, &mut offers[pick.at]);
            moved |= some || granted;
            if all && !granted {
                offers[pick.at].room = 0;
                // What is left is for the best path, or there is nothing left.
                if pick.best {
                    break;
                }
            }
        }
        // What may take one path only waits for no other.
        for at in 0..offers.len() {
            moved |= self.give(now, connection, max, offers, at, Want::Own).0;
        }
        moved
    }

    /// Lets the path of an offer carry a turn's bytes of streams; whether there were any.
    fn grant(&mut self, connection: &mut Connection, offer: &mut Offer) -> bool {
        if offer.room == 0 || connection.stream_backlog() == 0 {
            return false;
        }
        let scheduler = self.dispatcher.scheduler();
        let taken = connection.grant(offer.id, offer.room.min(turn(scheduler, offer.room)));
        self.choice.charge(scheduler, offer, taken);
        offer.take(taken);
        taken > 0
    }

    /// Moves a turn's packets to the path of `offers[at]`; whether any moved, and whether these were all that
    /// it wants.
    fn give(
        &mut self,
        now: Instant,
        connection: &mut Connection,
        max: usize,
        offers: &mut [Offer],
        at: usize,
        want: Want,
    ) -> (bool, bool) {
        let scheduler = self.dispatcher.scheduler();
        let Offer { id, room, .. } = offers[at];
        let most = if want == Want::Own { room } else { room.min(turn(scheduler, room)) };
        let mut taken = 0;
        let mut all = false;
        while taken < most && !all {
            match self.dispatcher.pop(now, id, want) {
                Some(packet) => taken += self.carry(now, connection, packet, id, max, offers),
                None => all = true,
            }
            taken += self.send_protection(now, connection, id, most.saturating_sub(taken));
        }
        self.choice.charge(scheduler, &offers[at], taken);
        offers[at].take(taken);
        (taken > 0, all)
    }

    /// Queues a packet for a path, in parts if it does not fit; returns the bytes that it takes there.
    fn carry(
        &mut self,
        now: Instant,
        connection: &mut Connection,
        packet: Queued,
        id: PathId,
        max: usize,
        offers: &mut [Offer],
    ) -> u64 {
        if packet.plain {
            if packet.data.len() <= max {
                return connection.queue(id, packet.data);
            }
            // The paths became smaller while it waited.
            self.traffic.count_too_big();
            return 0;
        }
        let numbered = self.sequencer.as_ref().filter(|sequencer| sequencer.is_on());
        let label = numbered.map_or(0, |sequencer| sequencer.overhead(&self.prefix));
        let fits = packet.data.len() + label <= max;
        if !fits && (self.sequencer.is_none() || self.is_tcp(&packet)) {
            let parts = self.cut(&packet, max.saturating_sub(label));
            return parts.into_iter().map(|part| self.carry(now, connection, part, id, max, offers)).sum();
        }
        let Some(sequencer) = self.sequencer.as_mut().filter(|sequencer| sequencer.is_on() || !fits) else {
            return connection.queue(id, packet.data);
        };
        let payload = &packet.data[self.prefix.as_ref().len()..];
        let label = sequencer.label(now, &packet, payload);
        if fits {
            let load = if self.sojourn() >= LATE { Load::Full } else { Load::Light };
            return self.launch(now, connection, id, offers, |sequencer, path| {
                sequencer.frame(now, path, label, payload, load)
            });
        }
        let parts = sequencer.in_parts(label, payload, max);
        let each = |part: Bytes| self.launch(now, connection, id, offers, |_, _| (part.clone(), None));
        parts.into_iter().map(each).sum()
    }

    /// Queues a numbered packet for a path, and its copies for others, each as `make` makes it for the path that it leaves
    /// on; returns the bytes that it takes on the first one.
    fn launch(
        &mut self,
        now: Instant,
        connection: &mut Connection,
        id: PathId,
        offers: &mut [Offer],
        mut make: impl FnMut(&mut Sequencer, PathId) -> (Bytes, Option<u32>),
    ) -> u64 {
        let copies = match self.dispatcher.scheduler() {
            Scheduler::Redundant => offers.len().saturating_sub(1),
            _ => usize::from(self.choice.copies()).saturating_sub(1),
        };
        let Some(sequencer) = &mut self.sequencer else { return 0 };
        let mut copied = false;
        // No link gets two.
        let mut had = [id; MOST_LINKS];
        for at in 1..=copies.min(MOST_LINKS - 1) {
            let Some(next) = first_of(offers, |offer| !had[..at].contains(&offer.id)) else { break };
            had[at] = offers[next].id;
            let path = connection.carrier_of(had[at]).unwrap_or(had[at]);
            let (data, mark) = make(sequencer, path);
            // The first one is sent again if it is lost, and a copy is not.
            offers[next].take(match mark {
                None => connection.queue(had[at], data),
                Some(_) => {
                    let copy = Tracked { data, born: now, tries: u8::MAX, copied: true, mark };
                    connection.queue_tracked_on(path, copy)
                }
            });
            sequencer.count_copy();
            copied = true;
        }
        let path = connection.carrier_of(id).unwrap_or(id);
        let (data, mark) = make(sequencer, path);
        connection.queue_tracked_on(path, Tracked { data, born: now, tries: 0, copied, mark })
    }

    fn is_tcp(&self, packet: &Queued) -> bool {
        let whole = packet.data.get(self.prefix.as_ref().len()..);
        whole.and_then(|whole| ip::parse(whole).ok()).is_some_and(|view| view.protocol() == protocol::TCP)
    }

    /// A packet that waited while the limit fell, as every new path makes it fall for a moment: as smaller packets
    /// of TCP, or not at all if it is something else.
    #[cold]
    fn cut(&mut self, packet: &Queued, max: usize) -> Vec<Queued> {
        let prefix = self.prefix.as_ref();
        let whole = &packet.data[prefix.len()..];
        let hdr = if self.is_tcp(packet) { as_super_packet(whole) } else { VnetHdr::NONE };
        let mtu = max.saturating_sub(prefix.len());
        self.ranges.clear();
        let room = self.arena.room(split::bound(hdr, whole.len(), mtu, prefix.len()));
        if let Err(error) = split::split(hdr, whole, mtu, prefix, room, &mut self.ranges) {
            tracing::debug!(class = self.class.as_deref(), %error, "a packet outgrew its paths and was dropped");
            return Vec::new();
        }
        let parts = self.arena.take();
        let part = |range: &Range<usize>| Queued { data: parts.slice(range.clone()), ..*packet };
        self.ranges.iter().map(part).collect()
    }

    /// Sends again what was lost, on the paths where it arrives first. Returns whether anything was.
    fn repair(&mut self, connection: &mut Connection, max: usize, offers: &mut [Offer]) -> bool {
        let Some(sequencer) = &mut self.sequencer else { return false };
        let mut moved = false;
        while let Some(at) = mpvpn_path::first_to_arrive(offers) {
            let Some(datagram) = sequencer.next_retransmission() else { break };
            let offer = &mut offers[at];
            if datagram.data.len() <= max {
                offer.take(connection.queue_tracked(offer.id, datagram));
                moved = true;
                continue;
            }
            for data in sequencer.lost_in_parts(&datagram.data, max) {
                offer.take(connection.queue_tracked(offer.id, Tracked { data, ..datagram.clone() }));
                moved = true;
            }
        }
        moved
    }
}

/// Bytes that a path is given at a time: all it can take where the order of the paths is fixed, few where
/// every turn goes to the path that is best then.
fn turn(scheduler: Scheduler, room: u64) -> u64 {
    match scheduler {
        Scheduler::MinRtt | Scheduler::Flow | Scheduler::Failover => room,
        _ => TURN_BYTES,
    }
}
