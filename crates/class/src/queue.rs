//! FQ-CoDel (RFC 8290): per-flow queues, served by deficit round robin, each with its own CoDel (RFC 8289).
//!
//! In: packets with their flow hash, and the time. Out: the next packet to send. Always holds: packets of a
//! flow keep their order, and every packet is delivered, replaced by a later one that supersedes it, counted
//! as dropped, or counted as queued.
//!
//! The flow hash selects a bucket. Only buckets with packets exist in memory: they are entries of a slab,
//! found through a small map, in one of two lists. A bucket that has just become active is in the list of new
//! flows, which is served first; when it has used its quantum it moves to the end of the old flows (RFC 8290
//! §4.2).

mod codel;
mod flows;
mod store;
#[cfg(test)]
mod tests;

use bytes::Bytes;
use mpvpn_types::{Duration, Instant};

use codel::{ControlParameters, DropDecision};
use flows::{Flows, List};
use store::{Packet, Store};

/// Maximum number of packets dropped from the fattest flow after one search for it: 64 as in Linux
/// `fq_codel`. With fewer, the search runs more often under overload; with more, one flow loses many packets
/// in a row.
const MAX_DROP_BATCH: usize = 64;

/// A packet in the queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueuedPacket {
    /// The bytes of the packet. The queue counts their length, although a slice keeps its whole buffer
    /// alive.
    pub data: Bytes,
    /// Hash of the flow. Flows with the same hash share a queue. It should be seeded, so that an attacker
    /// cannot choose packets that share the queue of another flow.
    pub flow: u32,
    /// Reordering within the flow would reduce its throughput (TCP, for example). The queue itself ignores
    /// it.
    pub needs_order: bool,
    /// The packet is sent without a sequence number, so the receiver neither resequences nor reassembles it.
    /// The queue itself ignores it.
    pub unnumbered: bool,
}

/// Limits and CoDel parameters of an [`FqCodel`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueConfig {
    /// Maximum number of queued bytes.
    pub limit_bytes: usize,
    /// Maximum number of queued packets.
    pub limit_packets: usize,
    /// CoDel's target: the acceptable standing queue delay (RFC 8289 §4.4).
    pub target: Duration,
    /// CoDel's interval: how long the queueing delay may exceed the target before the first drop, about the
    /// largest usual round-trip time (RFC 8289 §4.3).
    pub interval: Duration,
    /// Bytes that a flow may send per round of the round robin, at least 256 (RFC 8290 §5.2.4). A flow with
    /// no more than this behind the packet in hand has no standing queue, so it should be the size of
    /// the largest packet.
    pub quantum: usize,
    /// Number of buckets over which flows are hashed, at least 1.
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

/// The flows whose packets may leave.
#[derive(Clone, Copy, PartialEq, Eq)]
enum FlowLists {
    /// New flows, then old ones.
    All,
    Old,
    /// Old flows, while the one whose turn it is needs order.
    OldOrdered,
    New,
}

/// An FQ-CoDel queue.
#[derive(Debug)]
pub struct FqCodel {
    limit_bytes: usize,
    limit_packets: usize,
    quantum: i64,
    buckets: u32,
    parameters: ControlParameters,
    /// Time 0 of all times in ns: the first instant passed in.
    epoch: Option<Instant>,
    store: Store,
    flows: Flows,
    new_flows: List,
    old_flows: List,
    bytes: usize,
    packets: usize,
    drops: u64,
    /// Queueing delay of the last popped packet in ns.
    sojourn_ns: u64,
}

impl FqCodel {
    /// An empty queue. Values of `config` that are out of range are clamped.
    pub fn new(config: QueueConfig) -> Self {
        Self {
            limit_bytes: config.limit_bytes,
            limit_packets: config.limit_packets.min(store::MAX_PACKETS),
            quantum: as_deficit(config.quantum.max(256)),
            buckets: u32::try_from(config.flows).unwrap_or(u32::MAX).max(1),
            parameters: ControlParameters {
                target_ns: as_ns(config.target),
                interval_ns: as_ns(config.interval).max(1),
                max_packet_bytes: config.quantum,
            },
            epoch: None,
            store: Store::new(),
            flows: Flows::new(),
            new_flows: List::EMPTY,
            old_flows: List::EMPTY,
            bytes: 0,
            packets: 0,
            drops: 0,
            sojourn_ns: 0,
        }
    }

    /// Appends a packet to its flow. Returns the number of bytes dropped: if the queue exceeds a limit,
    /// packets are dropped from the head of the fattest flow, which may be this one.
    pub fn push(&mut self, now: Instant, packet: QueuedPacket) -> usize {
        let pushed_ns = self.ns(now);
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
        let packet = Packet { data, flow, needs_order, unnumbered, pushed_ns };
        self.store.push(&mut self.flows.get_mut(slot).fifo, packet);
        if self.bytes <= self.limit_bytes && self.packets <= self.limit_packets {
            return 0;
        }
        self.drop_excess()
    }

    /// Puts a packet in the place of the last waiting packet of its bucket, if that is as long and
    /// `supersedes` says so for the bytes of both, the later one first. Else appends it as [`Self::push`]
    /// does. Returns whether it replaced a packet.
    pub fn push_superseding(
        &mut self,
        now: Instant,
        packet: QueuedPacket,
        supersedes: impl FnOnce(&[u8], &[u8]) -> bool,
    ) -> bool {
        let pushed_ns = self.ns(now);
        let bucket = self.bucket(packet.flow);
        if let Some(slot) = self.flows.find(bucket) {
            let fifo = &mut self.flows.get_mut(slot).fifo;
            if let Some(last) = self.store.last_mut(fifo)
                && last.data.len() == packet.data.len()
                && supersedes(&packet.data, &last.data)
            {
                let QueuedPacket { data, flow, needs_order, unnumbered } = packet;
                *last = Packet { data, flow, needs_order, unnumbered, pushed_ns };
                return true;
            }
        }
        self.push(now, packet);
        false
    }

    /// Sets the maximum number of queued bytes. If more are queued, the next push drops the excess.
    pub fn set_limit(&mut self, bytes: usize) {
        self.limit_bytes = bytes;
    }

    /// Sets CoDel's target.
    pub fn set_target(&mut self, target: Duration) {
        self.parameters.target_ns = as_ns(target);
    }

    /// Sets the quantum in bytes, at least 256. The acceptable standing queue stays one packet.
    pub fn set_quantum(&mut self, bytes: usize) {
        self.quantum = as_deficit(bytes.max(256));
    }

    /// Removes and returns the next packet.
    pub fn pop(&mut self, now: Instant) -> Option<QueuedPacket> {
        let now = self.ns(now);
        self.dequeue(now, FlowLists::All)
    }

    /// Removes and returns the next packet of the old flows; packets of new flows stay for the next
    /// [`Self::pop`].
    pub fn pop_old_flow(&mut self, now: Instant) -> Option<QueuedPacket> {
        let now = self.ns(now);
        self.dequeue(now, FlowLists::Old)
    }

    /// As [`Self::pop_old_flow`], but nothing if reordering does not harm the flow whose turn it is.
    pub fn pop_ordered_flow(&mut self, now: Instant) -> Option<QueuedPacket> {
        let now = self.ns(now);
        self.dequeue(now, FlowLists::OldOrdered)
    }

    /// Removes and returns the next packet of the new flows, which send little, or have just begun.
    pub fn pop_new_flow(&mut self, now: Instant) -> Option<QueuedPacket> {
        let now = self.ns(now);
        self.dequeue(now, FlowLists::New)
    }

    /// Number of queued bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Number of queued packets.
    pub fn packets(&self) -> usize {
        self.packets
    }

    /// Whether the queue is empty.
    pub fn is_empty(&self) -> bool {
        self.packets == 0
    }

    /// Number of packets dropped since the queue was created, by CoDel or by a limit.
    pub fn drops(&self) -> u64 {
        self.drops
    }

    /// Queueing delay of the last popped packet.
    pub fn sojourn(&self) -> Duration {
        Duration::from_nanos(self.sojourn_ns)
    }

    #[cfg(test)]
    /// Memory of the queue in bytes, without the data of the packets.
    pub fn memory(&self) -> usize {
        size_of::<Self>() + self.store.heap_bytes() + self.flows.heap_bytes()
    }

    /// Frees the memory that an empty queue keeps for later packets; for idle times.
    pub fn trim_memory(&mut self) {
        if self.packets == 0 {
            self.flows.trim_memory();
            self.store.trim_memory();
        }
    }

    /// Deficit round robin over these flows (RFC 8290 §4.2).
    fn dequeue(&mut self, now: u64, lists: FlowLists) -> Option<QueuedPacket> {
        loop {
            let may_be_new = matches!(lists, FlowLists::All | FlowLists::New);
            let from_new = may_be_new && !self.new_flows.is_empty();
            if lists == FlowLists::New && !from_new {
                return None;
            }
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
            if lists == FlowLists::OldOrdered
                && let Some(first) = self.store.first(&self.flows.get_mut(slot).fifo)
                && !first.needs_order
            {
                return None;
            }
            if let Some(queued) = self.dequeue_from(slot, now) {
                self.reset_if_empty();
                return Some(queued);
            }
            let list = if from_new { &mut self.new_flows } else { &mut self.old_flows };
            self.flows.pop_front(list);
            // An emptied new flow moves to the old ones, so that it cannot starve them by becoming new again
            // and again.
            if from_new && !self.old_flows.is_empty() {
                self.flows.push_back(&mut self.old_flows, slot);
            } else {
                self.flows.remove(slot);
            }
        }
    }

    /// The first packet of a flow that CoDel does not drop; its length is charged to the deficit.
    fn dequeue_from(&mut self, slot: u32, now: u64) -> Option<QueuedPacket> {
        let flow = self.flows.get_mut(slot);
        while let Some(packet) = self.store.pop(&mut flow.fifo) {
            let waited = now.saturating_sub(packet.pushed_ns);
            self.bytes -= packet.data.len();
            self.packets -= 1;
            match flow.codel.decide(&self.parameters, now, waited, flow.fifo.bytes) {
                DropDecision::Send => {
                    flow.deficit -= as_deficit(packet.data.len().max(1));
                    self.sojourn_ns = waited;
                    let Packet { data, flow, needs_order, unnumbered, .. } = packet;
                    return Some(QueuedPacket { data, flow, needs_order, unnumbered });
                }
                DropDecision::Drop => self.drops += 1,
            }
        }
        flow.codel.ran_empty();
        None
    }

    /// Drops from the fattest flows until the queue is a little below its limits, so that not every push has
    /// to search for the fattest flow (RFC 8290 §4.1). Returns the number of bytes dropped.
    #[cold]
    fn drop_excess(&mut self) -> usize {
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
        for _ in 0..MAX_DROP_BATCH {
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

    /// Removes all flows when the queue is empty: flows that are still listed have no packets.
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
