//! The queue in front of a bottleneck, with the disciplines that networks have.
//!
//! In: packets and the current time. Out: the packet to be transmitted next; those that were dropped go to
//! the caller. Always holds: the packets of a flow stay in order; the bytes are those of the packets inside.

use std::{
    collections::{BTreeMap, VecDeque},
    time::{Duration, Instant},
};

use crate::shaper::UdpFlow;

/// The delay that CoDel allows to stay (RFC 8289, section 4.3).
const TARGET: Duration = Duration::from_millis(5);
/// The time for which a longer delay has to last before CoDel drops (RFC 8289, section 4.2).
const INTERVAL: Duration = Duration::from_millis(100);
/// CoDel drops nothing of a queue that holds no more bytes than this, a packet.
const ONE_PACKET_BYTES: u64 = 1514;
/// The bytes that a flow may send in a turn (RFC 8290, section 5.2.3).
const QUANTUM_BYTES: i64 = 1514;

/// How a bottleneck treats packets that have to wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Discipline {
    /// First in, first out; packets beyond the length are dropped.
    #[default]
    TailDrop,
    /// The same, and packets that have waited for too long are dropped ever faster (RFC 8289).
    CoDel,
    /// A queue for each UDP flow, in turns, each with CoDel (RFC 8290).
    FqCoDel,
    /// None waits: packets beyond the rate are dropped, after a burst as long as the queue would be.
    Policer,
}

/// A packet in the queue.
pub(crate) struct Waiting<T> {
    pub(crate) ip_bytes: u32,
    /// The bytes that the rate counts.
    pub(crate) counted_bytes: u32,
    pub(crate) arrived: Instant,
    pub(crate) flow: Option<UdpFlow>,
    pub(crate) item: T,
}

/// Packets in front of a bottleneck, without the one that is being transmitted.
pub(crate) struct Queue<T> {
    discipline: Discipline,
    /// The queue of each flow; without FQ-CoDel there is one.
    flows: BTreeMap<Option<UdpFlow>, FlowQueue<T>>,
    /// Flows in the order of their turns: those that are new, and the others.
    turns: [VecDeque<Option<UdpFlow>>; 2],
    bytes: u64,
    len: usize,
}

impl<T> Queue<T> {
    pub(crate) fn new(discipline: Discipline) -> Self {
        Self { discipline, flows: BTreeMap::new(), turns: Default::default(), bytes: 0, len: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Adds a packet. Beyond `most_bytes`, FQ-CoDel drops from the longest queue, and the others drop what
    /// arrives: they return it.
    pub(crate) fn push(&mut self, packet: Waiting<T>, most_bytes: u64, dropped: &mut Vec<T>) -> Option<T> {
        let has_room = self.bytes + u64::from(packet.counted_bytes) <= most_bytes;
        if !has_room && self.discipline != Discipline::FqCoDel {
            return Some(packet.item);
        }
        let flow = packet.flow.filter(|_| self.discipline == Discipline::FqCoDel);
        let turns = &mut self.turns[0];
        let own = self.flows.entry(flow).or_insert_with(|| {
            turns.push_back(flow);
            FlowQueue::new()
        });
        own.bytes += u64::from(packet.counted_bytes);
        self.bytes += u64::from(packet.counted_bytes);
        self.len += 1;
        own.packets.push_back(packet);
        while self.bytes > most_bytes
            && let Some(longest) = self.flows.values_mut().max_by_key(|queue| queue.bytes)
            && let Some(first) = longest.packets.pop_front()
        {
            longest.bytes -= u64::from(first.counted_bytes);
            self.bytes -= u64::from(first.counted_bytes);
            self.len -= 1;
            dropped.push(first.item);
        }
        None
    }

    /// The packet whose transmission begins at `now`.
    pub(crate) fn pop(&mut self, now: Instant, dropped: &mut Vec<T>) -> Option<Waiting<T>> {
        let is_in_turns = self.discipline == Discipline::FqCoDel;
        loop {
            let list = usize::from(self.turns[0].is_empty());
            let flow = *self.turns[list].front()?;
            let own = self.flows.get_mut(&flow).expect("a flow that has a turn has a queue");
            if is_in_turns && own.deficit <= 0 {
                own.deficit += QUANTUM_BYTES;
                self.turns[list].pop_front();
                self.turns[1].push_back(flow);
                continue;
            }
            let before = (own.bytes, own.packets.len());
            let taken = own.take(now, self.discipline, dropped);
            self.bytes -= before.0 - own.bytes;
            self.len -= before.1 - own.packets.len();
            if let Some(packet) = taken {
                own.deficit -= i64::from(packet.counted_bytes);
                return Some(packet);
            }
            if !is_in_turns {
                return None;
            }
            self.turns[list].pop_front();
            // A new flow that is empty waits among the others, so that it is not new again with each packet.
            if list == 0 && !self.turns[1].is_empty() {
                self.turns[1].push_back(flow);
            } else {
                self.flows.remove(&flow);
            }
        }
    }

    /// Applies another discipline to the packets that wait, too.
    pub(crate) fn set_discipline(&mut self, discipline: Discipline) {
        if discipline == self.discipline {
            return;
        }
        let all = std::mem::replace(self, Self::new(discipline)).flows.into_values();
        for packet in all.flat_map(|queue| queue.packets) {
            self.push(packet, u64::MAX, &mut Vec::new());
        }
    }

    /// Empties the queue and returns its items.
    pub(crate) fn clear(&mut self) -> impl Iterator<Item = T> + use<T> {
        let flows = std::mem::take(&mut self.flows);
        *self = Self::new(self.discipline);
        flows.into_values().flat_map(|queue| queue.packets).map(|packet| packet.item)
    }
}

/// The packets of a flow.
struct FlowQueue<T> {
    packets: VecDeque<Waiting<T>>,
    bytes: u64,
    /// The bytes that the flow may send in this turn.
    deficit: i64,
    codel: CoDel,
}

impl<T> FlowQueue<T> {
    fn new() -> Self {
        Self { packets: VecDeque::new(), bytes: 0, deficit: QUANTUM_BYTES, codel: CoDel::default() }
    }

    fn take(&mut self, now: Instant, discipline: Discipline, dropped: &mut Vec<T>) -> Option<Waiting<T>> {
        loop {
            let packet = self.packets.pop_front()?;
            self.bytes -= u64::from(packet.counted_bytes);
            let has_codel = matches!(discipline, Discipline::CoDel | Discipline::FqCoDel);
            let waited = now.saturating_duration_since(packet.arrived);
            if !has_codel || !self.codel.drops(now, waited, self.bytes) {
                return Some(packet);
            }
            dropped.push(packet.item);
        }
    }
}

/// The state of CoDel (RFC 8289, section 5).
#[derive(Default)]
struct CoDel {
    /// When packets will have waited for too long during an interval.
    too_long_at: Option<Instant>,
    /// When the next packet is dropped, while some are.
    drop_next: Option<Instant>,
    /// When the last packet was dropped, how many were dropped since dropping began, and how many there had
    /// been when it began.
    last_drop: Option<Instant>,
    count: u32,
    first_count: u32,
}

impl CoDel {
    /// Whether a packet that has waited so long is dropped; `left_bytes` remain behind it.
    fn drops(&mut self, now: Instant, waited: Duration, left_bytes: u64) -> bool {
        if waited < TARGET || left_bytes < ONE_PACKET_BYTES {
            (self.too_long_at, self.drop_next) = (None, None);
            return false;
        }
        if now < *self.too_long_at.get_or_insert(now + INTERVAL) {
            self.drop_next = None;
            return false;
        }
        let due = match self.drop_next {
            Some(at) if now < at => return false,
            Some(at) => {
                self.count += 1;
                at
            }
            None => {
                // As fast as the last time, if that was lately.
                let before = self.count - self.first_count;
                let is_soon =
                    self.last_drop.is_some_and(|at| now.saturating_duration_since(at) < 16 * INTERVAL);
                self.count = if is_soon && before > 1 { before } else { 1 };
                self.first_count = self.count;
                now
            }
        };
        self.drop_next = Some(due + INTERVAL.div_f64(f64::from(self.count).sqrt()));
        self.last_drop = Some(now);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn packet(arrived: Instant, port: u16, item: u32) -> Waiting<u32> {
        let flow = UdpFlow::new(([192, 0, 2, 1], port).into(), ([198, 51, 100, 1], 443).into());
        Waiting { ip_bytes: 1000, counted_bytes: 1000, arrived, flow: Some(flow), item }
    }

    /// Offers eleven packets in 20 ms and takes ten for a minute; returns how long packets of the last ten
    /// seconds waited at most, and the share that was dropped.
    fn overload(discipline: Discipline) -> (Duration, f64) {
        let (start, mut queue, mut dropped) = (Instant::now(), Queue::new(discipline), Vec::new());
        let (mut longest, mut offered) = (Duration::ZERO, 0);
        for ms in 0..60_000 {
            let now = start + ms * MS;
            for _ in 0..u32::from(ms % 2 == 0) + u32::from(ms % 20 == 0) {
                dropped.extend(queue.push(packet(now, 1, offered), 400_000, &mut Vec::new()));
                offered += 1;
            }
            if ms % 2 == 0
                && let Some(taken) = queue.pop(now, &mut dropped)
                && ms >= 50_000
            {
                longest = longest.max(now - taken.arrived);
            }
        }
        (longest, dropped.len() as f64 / f64::from(offered))
    }

    #[test]
    fn codel_shortens_the_queue_that_tail_drop_leaves_full() {
        let (full, dropped) = overload(Discipline::TailDrop);
        assert!(full > 750 * MS && (0.07..0.1).contains(&dropped), "{full:?} {dropped}");
        for discipline in [Discipline::CoDel, Discipline::FqCoDel] {
            let (short, dropped) = overload(discipline);
            assert!(short < 100 * MS && (0.07..0.1).contains(&dropped), "{discipline:?} {short:?} {dropped}");
        }
    }

    #[test]
    fn with_fq_codel_a_thin_flow_waits_for_no_other() {
        let (start, mut queue, mut dropped) = (Instant::now(), Queue::new(Discipline::FqCoDel), Vec::new());
        for item in 0..100 {
            assert_eq!(queue.push(packet(start, 1, item), 1_000_000, &mut dropped), None);
        }
        queue.pop(start, &mut dropped);
        queue.push(packet(start, 2, 1000), 1_000_000, &mut dropped);
        let next: Vec<_> = (0..3).filter_map(|_| queue.pop(start, &mut dropped)).map(|it| it.item).collect();
        assert!(next.contains(&1000), "{next:?}");
        // Both have as much when both have enough to send.
        for item in 1001..1101 {
            queue.push(packet(start, 2, item), 1_000_000, &mut dropped);
        }
        let next = (0..60).filter_map(|_| queue.pop(start, &mut dropped));
        let of_second = next.filter(|packet| packet.item >= 1000).count();
        assert!((28..=32).contains(&of_second), "{of_second}");
        assert_eq!((queue.len(), queue.bytes), (137, 137_000));
    }

    #[test]
    fn a_full_queue_of_flows_drops_from_the_longest() {
        let (start, mut queue, mut dropped) = (Instant::now(), Queue::new(Discipline::FqCoDel), Vec::new());
        for item in 0..10 {
            queue.push(packet(start, 1, item), 10_000, &mut dropped);
        }
        assert_eq!(queue.push(packet(start, 2, 100), 10_000, &mut dropped), None);
        assert_eq!((dropped, queue.len()), (vec![0], 10));
        assert_eq!(queue.clear().count(), 10);
    }
}
