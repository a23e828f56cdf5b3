//! The flows whose packets pass a client, for whom asks.
//!
//! In: for each packet of the TUN, or several of a flow at once, the hash of the flow, which is known there, and the
//! bytes. Out: the flows that were seen lately. Always holds: a packet costs a look at one set of the table, and the
//! table does not grow; where a set is full, what was silent for longest makes way.

use mpvpn_packet::FlowKey;
use mpvpn_types::{Duration, Instant};

/// Sets of the table, a power of two, and flows in each.
const SETS: usize = 256;
const WAYS: usize = 8;
/// A flow that was silent for longer is not shown: most likely it is over.
const LATELY: Duration = Duration::from_secs(120);

#[derive(Clone, Copy, Debug)]
pub(crate) struct Flow {
    /// From the app to where it wants.
    pub(crate) key: FlowKey,
    /// Bytes of IP packets, those of several segments with one header: from the app, and to it.
    pub(crate) up: u64,
    pub(crate) down: u64,
    pub(crate) since: Instant,
    pub(crate) active: Instant,
}

/// Packets of one direction, by the hash of the flow.
#[derive(Debug)]
struct Table<T> {
    /// Empty until something is seen.
    sets: Vec<[Option<(u32, T)>; WAYS]>,
}

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self { sets: Vec::new() }
    }
}

impl<T: Copy> Table<T> {
    /// The entry of a flow; a new one takes the place of that which `age` says is oldest.
    fn entry(&mut self, hash: u32, new: impl FnOnce() -> T, age: impl Fn(&T) -> Instant) -> &mut T {
        if self.sets.is_empty() {
            self.sets.resize(SETS, [None; WAYS]);
        }
        let set = &mut self.sets[hash as usize % SETS];
        let known = set.iter().position(|way| matches!(way, Some((other, _)) if *other == hash));
        let at = known.unwrap_or_else(|| {
            let oldest =
                (0..WAYS).min_by_key(|at| set[*at].as_ref().map(|(_, entry)| age(entry))).unwrap_or(0);
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

/// What was seen.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    sent: Table<Flow>,
    /// Packets for apps: bytes, and when.
    received: Table<(u64, Instant)>,
}

impl Seen {
    /// A packet of an app; `hash` is that of its key.
    pub(crate) fn sent(&mut self, now: Instant, key: &FlowKey, hash: u32, bytes: usize) {
        let new = || Flow { key: *key, up: 0, down: 0, since: now, active: now };
        let flow = self.sent.entry(hash, new, |flow| flow.active);
        flow.up += bytes as u64;
        flow.active = now;
    }

    /// A packet for an app; `hash` is that of its own key.
    pub(crate) fn received(&mut self, now: Instant, hash: u32, bytes: usize) {
        let entry = self.received.entry(hash, || (0, now), |(_, at)| *at);
        *entry = (entry.0 + bytes as u64, now);
    }

    /// When something of a flow was seen last, as far as it is remembered.
    pub(crate) fn last(&self, key: &FlowKey) -> Option<Instant> {
        let sent = self.sent.get(key.hash32()).map(|flow| flow.active);
        let received = self.received.get(key.reversed().hash32()).map(|(_, at)| *at);
        sent.max(received)
    }

    /// The flows of which something was seen lately.
    pub(crate) fn flows(&self, now: Instant) -> impl Iterator<Item = Flow> {
        let lately = move |flow: &Flow| now.saturating_duration_since(flow.active) < LATELY;
        let whole = |(_, flow): &(u32, Flow)| match self.received.get(flow.key.reversed().hash32()) {
            Some((bytes, at)) => Flow { down: *bytes, active: flow.active.max(*at), ..*flow },
            None => *flow,
        };
        self.sent.sets.iter().flatten().flatten().map(whole).filter(lately)
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
        let (start, mut seen) = (Instant::now(), Seen::default());
        let later = start + Duration::from_secs(3);
        seen.sent(start, &key(1), key(1).hash32(), 60);
        seen.sent(start, &key(1), key(1).hash32(), 40);
        seen.received(later, key(1).reversed().hash32(), 1000);
        seen.received(later, key(2).reversed().hash32(), 1000);
        let flows: Vec<_> = seen.flows(later).collect();
        assert_eq!(flows.len(), 1, "what is only received is nobody's");
        let flow = flows[0];
        assert_eq!((flow.key, flow.up, flow.down), (key(1), 100, 1000));
        assert_eq!((flow.since, flow.active), (start, later));
        assert_eq!([1, 2, 3].map(|port| seen.last(&key(port))), [Some(later), Some(later), None]);
    }

    #[test]
    fn flows_that_are_silent_are_left_out() {
        let (start, mut seen) = (Instant::now(), Seen::default());
        seen.sent(start, &key(1), key(1).hash32(), 60);
        assert_eq!(seen.flows(start + LATELY).count(), 0);
        seen.sent(start + LATELY, &key(1), key(1).hash32(), 60);
        assert_eq!(seen.flows(start + LATELY).count(), 1);
    }

    #[test]
    fn however_many_flows_come_memory_is_bounded_and_the_latest_are_there() {
        let (start, mut seen) = (Instant::now(), Seen::default());
        let ports = 1..=20_000;
        for port in ports.clone() {
            let now = start + Duration::from_millis(port.into());
            seen.sent(now, &key(port), key(port).hash32(), 60);
            seen.received(now, key(port).reversed().hash32(), 60);
        }
        let flows: Vec<_> = seen.flows(start + Duration::from_secs(20)).collect();
        assert!((SETS * WAYS / 2..=SETS * WAYS).contains(&flows.len()), "{}", flows.len());
        let known = |port: u16| flows.iter().any(|flow| flow.key == key(port));
        assert!(ports.rev().take(200).all(known), "the latest");
        assert!(flows.iter().filter(|flow| flow.down == 60).count() > SETS * WAYS / 2);
    }
}
