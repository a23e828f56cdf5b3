//! FQ-CoDel: flows in buckets, served in turn, each under its own CoDel.
//!
//! A packet's flow hash picks a bucket. Only buckets with packets exist in memory: they are entries of
//! a slab, found through a small map, and stand in one of two lists. A bucket that has just become
//! active stands in the list of new flows, which is served first; when it has used up its quantum it
//! goes to the end of the old flows (deficit round robin, RFC 8290 section 4.2).

mod codel;
mod flows;
mod store;
#[cfg(test)]
mod tests;

use bytes::Bytes;
use mpvpn_types::{Duration, Instant};

use codel::{Law, Verdict};
use flows::{Flows, List};
use store::{Packet, Store};

/// How many packets one search for the fattest flow may drop, as in Linux.
const DROP_BATCH: usize = 64;

/// A packet that waits, or is about to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueuedPacket {
    /// The packet. The queue counts its length; a slice keeps the whole buffer behind it alive.
    pub data: Bytes,
    /// Hash of the flow. Flows with the same hash share a queue. It should be seeded, so that nobody
    /// can aim at the queue of someone else.
    pub flow: u32,
    /// Overtaking another packet of its flow would cost the flow speed. The queue only carries it along.
    pub needs_order: bool,
    /// It travels as it is: nobody at the far end puts such packets back in order, or together. Carried along as well.
    pub unnumbered: bool,
}

/// What an [`FqCodel`] may hold and how long packets may wait in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueConfig {
    /// Most bytes that wait.
    pub limit_bytes: usize,
    /// Most packets that wait.
    pub limit_packets: usize,
    /// The waiting time that is acceptable for ever (RFC 8289 section 4.4).
    pub target: Duration,
    /// For how long the waiting time may exceed the target before the first drop: about the largest
    /// usual round-trip time (RFC 8289 section 4.3).
    pub interval: Duration,
    /// Bytes that a flow may send a turn, at least 256. A flow with no more than this behind the packet
    /// in hand has no standing queue, so it should be the size of the largest packet.
    pub quantum: usize,
    /// Number of buckets over which flows are spread, at least 1.
    pub flows: usize,
}

impl Default for QueueConfig {
    fn default() -> Self {
        Self {
            limit_bytes: 1 << 20,
            limit_packets: 8192,
            target: Duration::from_millis(5),
            interval: Duration::from_millis(100),
            quantum: 1514,
            flows: 1024,
        }
    }
}

/// The queue.
#[derive(Debug)]
pub struct FqCodel {
    limit_bytes: usize,
    limit_packets: usize,
    quantum: i64,
    buckets: u32,
    law: Law,
    /// Time 0 of all times inside: the first instant that the queue was told.
    epoch: Option<Instant>,
    store: Store,
    flows: Flows,
    new_flows: List,
    old_flows: List,
    bytes: usize,
    packets: usize,
    drops: u64,
    /// Waiting time of the last popped packet in ns.
    sojourn: u64,
}

impl FqCodel {
    /// An empty queue. Values of `config` that are out of range are moved to the nearest usable one.
    pub fn new(config: QueueConfig) -> Self {
        Self {
            limit_bytes: config.limit_bytes,
            limit_packets: config.limit_packets.min(store::MOST_PACKETS),
            quantum: as_deficit(config.quantum.max(256)),
            buckets: u32::try_from(config.flows).unwrap_or(u32::MAX).max(1),
            law: Law {
                target: as_ns(config.target),
                interval: as_ns(config.interval).max(1),
                one_packet: config.quantum,
            },
            epoch: None,
            store: Store::new(),
            flows: Flows::new(),
            new_flows: List::EMPTY,
            old_flows: List::EMPTY,
            bytes: 0,
            packets: 0,
            drops: 0,
            sojourn: 0,
        }
    }

    /// Puts a packet behind the others of its flow. Returns the bytes dropped to make room: when the
    /// queue is over a limit, packets go from the head of the fattest flow, which may be this one.
    pub fn push(&mut self, now: Instant, packet: QueuedPacket) -> usize {
        let at = self.ns(now);
        let bucket = self.bucket(packet.flow);
        let slot = match self.flows.find(bucket) {
            Some(slot) => slot,
            None => {
                let slot = self.flows.insert(bucket, self.quantum);
                self.flows.push_back(&mut self.new_flows, slot);
                slot
            }
        };
        self.bytes += packet.data.len();
        self.packets += 1;
        let QueuedPacket { data, flow, needs_order, unnumbered } = packet;
        let packet = Packet { data, flow, needs_order, unnumbered, at };
        self.store.push(&mut self.flows.get_mut(slot).fifo, packet);
        if self.bytes <= self.limit_bytes && self.packets <= self.limit_packets {
            return 0;
        }
        self.make_room()
    }

    /// Changes how many bytes may wait. What waits beyond a lower limit is dropped when the next packet comes.
    pub fn set_limit(&mut self, bytes: usize) {
        self.limit_bytes = bytes;
    }

    /// Changes how many bytes a flow may send a turn, at least 256. The acceptable standing queue stays one packet.
    pub fn set_quantum(&mut self, bytes: usize) {
        self.quantum = as_deficit(bytes.max(256));
    }

    /// Takes the next packet out.
    pub fn pop(&mut self, now: Instant) -> Option<QueuedPacket> {
        let now = self.ns(now);
        self.dequeue(now, true)
    }

    /// Takes the next packet out of a flow that has waited for a turn before: one of a flow that sends
    /// little stays for the next [`Self::pop`].
    pub fn pop_old_flow(&mut self, now: Instant) -> Option<QueuedPacket> {
        let now = self.ns(now);
        self.dequeue(now, false)
    }

    /// Bytes that wait.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Packets that wait.
    pub fn packets(&self) -> usize {
        self.packets
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.packets == 0
    }

    /// Packets dropped since the queue was made: by CoDel or by a limit.
    pub fn drops(&self) -> u64 {
        self.drops
    }

    /// How long the last popped packet had waited.
    pub fn sojourn(&self) -> Duration {
        Duration::from_nanos(self.sojourn)
    }

    #[cfg(test)]
    /// Bytes of memory that the queue itself holds, the data of the packets not included.
    pub fn memory(&self) -> usize {
        size_of::<Self>() + self.store.heap_bytes() + self.flows.heap_bytes()
    }

    /// Gives back the memory that an empty queue keeps for the packets to come; for when none are expected.
    pub fn trim_memory(&mut self) {
        if self.packets == 0 {
            self.flows.trim_memory();
            self.store.trim_memory();
        }
    }

    /// Deficit round robin over the flows (RFC 8290 section 4.2), also over those that have just become
    /// active if `new`.
    fn dequeue(&mut self, now: u64, new: bool) -> Option<QueuedPacket> {
        loop {
            let from_new = new && !self.new_flows.is_empty();
            let list = if from_new { &mut self.new_flows } else { &mut self.old_flows };
            let Some(slot) = list.front() else {
                self.reset_if_empty();
                return None;
            };
            if self.flows.get_mut(slot).deficit <= 0 {
                self.flows.get_mut(slot).deficit += self.quantum;
                self.flows.pop_front(list);
                self.flows.push_back(&mut self.old_flows, slot);
                continue;
            }
            if let Some(queued) = self.dequeue_from(slot, now) {
                self.reset_if_empty();
                return Some(queued);
            }
            let list = if from_new { &mut self.new_flows } else { &mut self.old_flows };
            self.flows.pop_front(list);
            // Without the detour through the old flows a flow could starve them by being empty often.
            if from_new && !self.old_flows.is_empty() {
                self.flows.push_back(&mut self.old_flows, slot);
            } else {
                self.flows.remove(slot);
            }
        }
    }

    /// The first packet of a flow that CoDel lets through; the deficit is charged for it.
    fn dequeue_from(&mut self, slot: u32, now: u64) -> Option<QueuedPacket> {
        let flow = self.flows.get_mut(slot);
        while let Some(packet) = self.store.pop(&mut flow.fifo) {
            let waited = now.saturating_sub(packet.at);
            self.bytes -= packet.data.len();
            self.packets -= 1;
            match flow.codel.judge(&self.law, now, waited, flow.fifo.bytes) {
                Verdict::Send => {
                    flow.deficit -= as_deficit(packet.data.len().max(1));
                    self.sojourn = waited;
                    let Packet { data, flow, needs_order, unnumbered, .. } = packet;
                    return Some(QueuedPacket { data, flow, needs_order, unnumbered });
                }
                Verdict::Drop => self.drops += 1,
            }
        }
        flow.codel.ran_empty();
        None
    }

    /// Drops from the fattest flows until the queue is a little below its limits, so that not every
    /// push has to search for the fattest flow (RFC 8290 section 4.1). Returns the bytes dropped.
    #[cold]
    fn make_room(&mut self) -> usize {
        let before = self.bytes;
        while self.bytes > self.limit_bytes || self.packets > self.limit_packets {
            let Some(slot) = self.flows.fattest() else { break };
            self.drop_from_head(slot);
        }
        let dropped = before - self.bytes;
        self.reset_if_empty();
        dropped
    }

    /// Drops at most half of a flow's backlog and at least one packet.
    fn drop_from_head(&mut self, slot: u32) {
        let enough_bytes = self.limit_bytes - self.limit_bytes / 64;
        let enough_packets = self.limit_packets - self.limit_packets / 64;
        let fifo = &mut self.flows.get_mut(slot).fifo;
        let half = fifo.bytes / 2;
        for _ in 0..DROP_BATCH {
            let Some(packet) = self.store.pop(fifo) else { return };
            self.bytes -= packet.data.len();
            self.packets -= 1;
            self.drops += 1;
            let enough = self.bytes <= enough_bytes && self.packets <= enough_packets;
            if enough || fifo.bytes <= half {
                return;
            }
        }
    }

    /// Forgets flows when nothing waits: those still listed are empty then, and would be removed by the
    /// next turns.
    fn reset_if_empty(&mut self) {
        if self.packets > 0 {
            return;
        }
        self.flows.remove_all(&mut self.new_flows);
        self.flows.remove_all(&mut self.old_flows);
        self.store.clear();
    }

    fn bucket(&self, flow: u32) -> u32 {
        let mixed = flow.wrapping_mul(0x9E37_79B1);
        ((u64::from(mixed) * u64::from(self.buckets)) >> 32) as u32
    }

    fn ns(&mut self, now: Instant) -> u64 {
        let epoch = *self.epoch.get_or_insert(now);
        as_ns(now.saturating_duration_since(epoch))
    }
}

fn as_ns(time: Duration) -> u64 {
    time.as_secs().saturating_mul(1_000_000_000).saturating_add(u64::from(time.subsec_nanos()))
}

fn as_deficit(bytes: usize) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX / 2).min(i64::MAX / 2)
}
