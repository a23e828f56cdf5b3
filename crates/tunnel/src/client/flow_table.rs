//! The recent flows that travel as packets, for `mpvpn flows`. In: for each TUN packet, or several of a flow
//! at once, the hash of the flow and the bytes. Out: the flows of the last two minutes. Always holds: a
//! packet costs one lookup in a set-associative table of fixed size; in a full set, the flow that was idle
//! longest is replaced.

use mpvpn_packet::FlowKey;
use mpvpn_types::{Duration, Instant};

/// Sets of the table, and flows in each: 2048 flows a direction. Chosen. Larger: memory, 64 bytes a flow and
/// direction; smaller: flows are missing in `mpvpn flows`.
const SETS: usize = 256;
const ASSOCIATIVITY: usize = 8;
/// A flow that was idle for longer is not listed: NATs drop UDP flows after two minutes, too (RFC 4787 §4.3).
/// Larger: ended flows are listed; smaller: idle ones are missing.
const RECENT: Duration = Duration::from_secs(120);

#[derive(Clone, Copy, Debug)]
pub(crate) struct Flow {
    /// The 5-tuple, from the app to its destination.
    pub(crate) key: FlowKey,
    /// Bytes of IP packets from the app and to it; a packet of several segments (GSO) counts one header.
    pub(crate) up_bytes: u64,
    pub(crate) down_bytes: u64,
    pub(crate) since: Instant,
    pub(crate) active: Instant,
}

/// Packets of one direction, by the hash of the flow.
#[derive(Debug)]
struct Table<T> {
    /// Allocated with the first packet.
    sets: Vec<[Option<(u32, T)>; ASSOCIATIVITY]>,
}

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self { sets: Vec::new() }
    }
}

impl<T: Copy> Table<T> {
    /// The entry of a flow; a new one replaces the entry with the oldest `age` in its set.
    fn entry(&mut self, hash: u32, new: impl FnOnce() -> T, age: impl Fn(&T) -> Instant) -> &mut T {
        if self.sets.is_empty() {
            self.sets.resize(SETS, [None; ASSOCIATIVITY]);
        }
        let set = &mut self.sets[hash as usize % SETS];
        let known = set.iter().position(|entry| matches!(entry, Some((other, _)) if *other == hash));
        let at = known.unwrap_or_else(|| {
            let oldest = (0..ASSOCIATIVITY)
                .min_by_key(|at| set[*at].as_ref().map(|(_, entry)| age(entry)))
                .unwrap_or(0);
            set[oldest] = None;
            oldest
        });
        &mut set[at].get_or_insert_with(|| (hash, new())).1
    }

    fn get(&self, hash: u32) -> Option<&T> {
        let set = self.sets.get(hash as usize % SETS)?;
        set.iter().flatten().find(|(other, _)| *other == hash).map(|(_, entry)| entry)
    }
}

/// Flows of both directions.
#[derive(Debug, Default)]
pub(crate) struct FlowTable {
    sent: Table<Flow>,
    /// Packets for apps: bytes, and the time of the last one.
    received: Table<(u64, Instant)>,
}

impl FlowTable {
    /// Records a packet of an app; `hash` is that of `key`.
    pub(crate) fn record_sent(&mut self, now: Instant, key: &FlowKey, hash: u32, bytes: usize) {
        let new = || Flow { key: *key, up_bytes: 0, down_bytes: 0, since: now, active: now };
        let flow = self.sent.entry(hash, new, |flow| flow.active);
        flow.up_bytes += bytes as u64;
        flow.active = now;
    }

    /// Records a packet for an app; `hash` is that of the packet's own 5-tuple.
    pub(crate) fn record_received(&mut self, now: Instant, hash: u32, bytes: usize) {
        let entry = self.received.entry(hash, || (0, now), |(_, at)| *at);
        *entry = (entry.0 + bytes as u64, now);
    }

    /// The flows of the last [`RECENT`].
    pub(crate) fn flows(&self, now: Instant) -> impl Iterator<Item = Flow> {
        let is_recent = move |flow: &Flow| now.saturating_duration_since(flow.active) < RECENT;
        let whole = |(_, flow): &(u32, Flow)| match self.received.get(flow.key.reversed().hash32()) {
            Some((bytes, at)) => Flow { down_bytes: *bytes, active: flow.active.max(*at), ..*flow },
            None => *flow,
        };
        self.sent.sets.iter().flatten().flatten().map(whole).filter(is_recent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(port: u16) -> FlowKey {
        let (src, dst) = ([10, 0, 0, 2].into(), [198, 51, 100, 9].into());
        FlowKey { src, dst, src_port: port, dst_port: 53, protocol: 17 }
    }

    #[test]
    fn both_directions_of_a_flow_are_one() {
        let (start, mut table) = (Instant::now(), FlowTable::default());
        let later = start + Duration::from_secs(3);
        table.record_sent(start, &key(1), key(1).hash32(), 60);
        table.record_sent(start, &key(1), key(1).hash32(), 40);
        table.record_received(later, key(1).reversed().hash32(), 1000);
        table.record_received(later, key(2).reversed().hash32(), 1000);
        let flows: Vec<_> = table.flows(later).collect();
        assert_eq!(flows.len(), 1, "a flow that is only received has no owner");
        let flow = flows[0];
        assert_eq!((flow.key, flow.up_bytes, flow.down_bytes), (key(1), 100, 1000));
        assert_eq!((flow.since, flow.active), (start, later));
    }

    #[test]
    fn idle_flows_are_not_listed() {
        let (start, mut table) = (Instant::now(), FlowTable::default());
        table.record_sent(start, &key(1), key(1).hash32(), 60);
        assert_eq!(table.flows(start + RECENT).count(), 0);
        table.record_sent(start + RECENT, &key(1), key(1).hash32(), 60);
        assert_eq!(table.flows(start + RECENT).count(), 1);
    }

    #[test]
    fn memory_is_bounded_and_the_latest_flows_are_kept() {
        let (start, mut table) = (Instant::now(), FlowTable::default());
        let ports = 1..=20_000;
        for port in ports.clone() {
            let now = start + Duration::from_millis(port.into());
            table.record_sent(now, &key(port), key(port).hash32(), 60);
            table.record_received(now, key(port).reversed().hash32(), 60);
        }
        let flows: Vec<_> = table.flows(start + Duration::from_secs(20)).collect();
        assert!((SETS * ASSOCIATIVITY / 2..=SETS * ASSOCIATIVITY).contains(&flows.len()), "{}", flows.len());
        let known = |port: u16| flows.iter().any(|flow| flow.key == key(port));
        assert!(ports.rev().take(200).all(known), "the latest");
        assert!(flows.iter().filter(|flow| flow.down_bytes == 60).count() > SETS * ASSOCIATIVITY / 2);
    }
}
