//! At the receiver: restores lost packets from the other packets of their groups.

use std::{collections::VecDeque, mem::take};

use bytes::Bytes;
use mpvpn_types::{Duration, Fec, Instant, target::FEC};
use rustc_hash::FxHashMap;

use super::{GroupPosition, Symbol, code::Decoder};

/// Groups that are kept at most: those of 0.2 s at 1 Gbit/s, of 20 packets each; a table of 1024 places takes
/// no more. A group has about 0.4 KB of lists and places. Fewer: late packets cannot be restored; more:
/// memory of hostile peers with tiny packets.
const MAX_GROUPS: usize = 896;
/// Packets that are kept at most: [`MAX_KEPT_BYTES`] in packets of full size. Each takes about 60 bytes
/// beside its own. Fewer: fast paths lose groups before they are complete; more: memory of hostile peers with
/// tiny packets.
const MAX_KEPT_PACKETS: usize = 3072;
/// Bytes of source and repair packets that are kept at most. Fewer: fast paths lose groups before they are
/// complete; more: memory.
const MAX_KEPT_BYTES: usize = 4 << 20;
/// The age at which a group is dropped: the reorder timeout of its packets (at most 500 ms) and
/// retransmissions (600 ms) have ended.
const MAX_GROUP_AGE: Duration = Duration::from_secs(1);

/// Counters of the receiver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DecoderStats {
    /// Lost packets that were restored.
    pub recovered: u64,
    /// Repair packets that were not needed.
    pub wasted: u64,
    /// Groups that lost more packets than could be restored.
    pub unrecoverable: u64,
}

/// Restores lost packets from the other packets of their groups.
#[derive(Debug, Default)]
pub struct GroupDecoder {
    groups: FxHashMap<u16, Group>,
    /// All in `groups`, the oldest first, with the time of their first packet.
    order: VecDeque<(Instant, u16)>,
    /// Bytes and number of kept packets.
    bytes: usize,
    packets: usize,
    decoder: Decoder,
    /// Empty buffers of earlier packets, for reuse.
    spare: Vec<Vec<u8>>,
    stats: DecoderStats,
}

#[derive(Debug, Default)]
struct Group {
    /// A bit for each source packet that was received.
    seen: u64,
    /// The number of source packets and the length of repair packets, known from the first repair packet.
    shape: Option<(u8, usize)>,
    packets: Vec<(u8, Vec<u8>)>,
    repairs: Vec<(u8, Vec<u8>)>,
    /// The group is complete or restored.
    done: bool,
}

impl Group {
    /// A bit for each missing source packet; `None` before the first repair packet.
    fn missing(&self) -> Option<u64> {
        let (data, _) = self.shape?;
        Some(u64::MAX >> (64 - u32::from(data.clamp(1, 64))) & !self.seen)
    }

    /// Empties the kept packets into `spare`; returns their number and bytes.
    fn clear(&mut self, spare: &mut Vec<Vec<u8>>) -> (usize, usize) {
        let (mut packets, mut bytes) = (0, 0);
        for (_, mut kept) in take(&mut self.packets).into_iter().chain(take(&mut self.repairs)) {
            packets += 1;
            bytes += kept.len();
            if spare.len() < usize::from(Fec::MAX_DATA) {
                kept.clear();
                spare.push(kept);
            }
        }
        (packets, bytes)
    }
}

impl GroupDecoder {
    /// Before the first packet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes a received source or repair packet; passes restored packets to `out`.
    pub fn push(&mut self, now: Instant, position: GroupPosition, bytes: &[u8], out: impl FnMut(Bytes)) {
        self.evict(now, bytes.len());
        if !self.groups.contains_key(&position.group) {
            self.order.push_back((now, position.group));
        }
        let group = self.groups.entry(position.group).or_default();
        let keep = |spare: &mut Vec<Vec<u8>>| {
            let mut kept = spare.pop().unwrap_or_default();
            kept.extend_from_slice(bytes);
            kept
        };
        match position.symbol {
            Symbol::Source(index) => {
                let bit = 1u64.checked_shl(index.into()).unwrap_or(0);
                if group.done || group.seen & bit != 0 {
                    group.seen |= bit;
                    return;
                }
                group.seen |= bit;
                group.packets.push((index, keep(&mut self.spare)));
            }
            Symbol::Repair { index, source_count: data } => {
                if group.done {
                    self.stats.wasted += 1;
                    return;
                }
                // All repair packets of a group must have the shape of the first one.
                let shape = *group.shape.get_or_insert((data, bytes.len()));
                if shape != (data, bytes.len()) || group.repairs.iter().any(|(other, _)| *other == index) {
                    return;
                }
                group.repairs.push((index, keep(&mut self.spare)));
            }
        }
        self.bytes += bytes.len();
        self.packets += 1;
        self.restore(position.group, out);
    }

    fn restore(&mut self, number: u16, mut out: impl FnMut(Bytes)) {
        let Some(group) = self.groups.get_mut(&number) else { return };
        let Some(missing) = group.missing() else { return };
        let count = missing.count_ones() as usize;
        if count > group.repairs.len() {
            return;
        }
        self.stats.wasted += (group.repairs.len() - count) as u64;
        if count > 0 {
            let (data, _) = group.shape.unwrap_or_default();
            let missing: Vec<u8> = (0..data).filter(|index| missing >> index & 1 == 1).collect();
            let (bytes, packets) = (&mut self.bytes, &mut self.packets);
            group.packets.retain(|(index, packet)| {
                let is_inside = *index < data;
                *bytes -= if is_inside { 0 } else { packet.len() };
                *packets -= usize::from(!is_inside);
                is_inside
            });
            tracing::trace!(
                target: FEC,
                group = number,
                data,
                ?missing,
                repairs = group.repairs.len(),
                "lost packets are restored"
            );
            self.decoder.decode(&missing, &group.packets, &group.repairs[..count], |_, packet| {
                self.stats.recovered += 1;
                out(Bytes::copy_from_slice(packet));
            });
        }
        group.done = true;
        let cleared = group.clear(&mut self.spare);
        self.note_cleared(cleared);
    }

    fn note_cleared(&mut self, (packets, bytes): (usize, usize)) {
        self.packets = self.packets.saturating_sub(packets);
        self.bytes = self.bytes.saturating_sub(bytes);
    }

    /// Drops old groups, and the oldest ones until `bytes` more fit.
    fn evict(&mut self, now: Instant, bytes: usize) {
        while let Some((since, number)) = self.order.front().copied() {
            let old = now.saturating_duration_since(since) > MAX_GROUP_AGE;
            let fits = self.bytes + bytes <= MAX_KEPT_BYTES && self.packets < MAX_KEPT_PACKETS;
            if !old && self.order.len() < MAX_GROUPS && fits {
                return;
            }
            self.order.pop_front();
            let Some(mut group) = self.groups.remove(&number) else { continue };
            if !group.done && group.shape.is_some() {
                tracing::trace!(
                    target: FEC,
                    group = number,
                    packets = group.packets.len(),
                    repairs = group.repairs.len(),
                    "a group lost more packets than can be restored"
                );
                self.stats.unrecoverable += 1;
            }
            let cleared = group.clear(&mut self.spare);
            self.note_cleared(cleared);
        }
    }

    /// The counters since the start.
    pub fn stats(&self) -> DecoderStats {
        self.stats
    }

    /// Drops all groups and frees their memory.
    pub fn clear(&mut self) {
        let open = self.order.iter().filter_map(|(_, number)| self.groups.get(number));
        let lost = open.filter(|group| !group.done && group.shape.is_some()).count();
        let unrecoverable = self.stats.unrecoverable + lost as u64;
        *self = Self { stats: DecoderStats { unrecoverable, ..self.stats }, ..Self::default() };
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::fec::code::Encoder;

    /// The datagrams of a group: the packets, then the repair.
    fn datagrams(group: u16, packets: &[Vec<u8>], repair: u8) -> Vec<(GroupPosition, Vec<u8>)> {
        let data = packets.len() as u8;
        let position = |shard| GroupPosition { group, symbol: shard };
        let mut all: Vec<_> = (0..)
            .zip(packets)
            .map(|(index, packet)| (position(Symbol::Source(index)), packet.clone()))
            .collect();
        let mut encoder = Encoder::default();
        let shards = (0..).zip(encoder.encode(packets, repair));
        all.extend(
            shards.map(|(index, shard)| {
                (position(Symbol::Repair { index, source_count: data }), shard.clone())
            }),
        );
        all
    }

    /// The packets that come out, delivered or restored, in any order.
    fn received(restorer: &mut GroupDecoder, all: &[(GroupPosition, Vec<u8>)]) -> Vec<Vec<u8>> {
        let mut out = Vec::new();
        for (position, bytes) in all {
            if matches!(position.symbol, Symbol::Source(_)) {
                out.push(bytes.clone());
            }
            restorer.push(Instant::now(), *position, bytes, |packet| out.push(packet.to_vec()));
        }
        out.sort();
        out
    }

    fn any_place() -> impl Strategy<Value = GroupPosition> {
        (0u16..4, any::<bool>(), any::<u8>(), any::<u8>()).prop_map(|(group, is_data, index, data)| {
            let shard = match is_data {
                true => Symbol::Source(index % Fec::MAX_DATA),
                false => {
                    Symbol::Repair { index: index % Fec::MAX_REPAIR, source_count: data % Fec::MAX_DATA + 1 }
                }
            };
            GroupPosition { group, symbol: shard }
        })
    }

    proptest! {
        #[test]
        fn what_is_lost_of_a_group_comes_back_in_whatever_order_the_rest_comes(
            packets in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..300), 1..=64),
            repair in 1u8..=32, seed: u64,
        ) {
            let mut all = datagrams(65_535, &packets, repair);
            let mixed = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let key = |n: usize| mixed.rotate_left(n as u32).wrapping_add(n as u64);
            let mut order: Vec<usize> = (0..all.len()).collect();
            order.sort_by_key(|n| key(*n));
            let rest: Vec<_> = order[usize::from(repair)..].iter().map(|n| all[*n].clone()).collect();
            let mut restorer = GroupDecoder::new();
            let mut expected = packets.clone();
            expected.sort();
            prop_assert_eq!(received(&mut restorer, &rest), expected);
            let lost = order[..usize::from(repair)].iter().filter(|n| **n < packets.len()).count();
            prop_assert_eq!(restorer.stats().recovered, lost as u64);
            let is_repair = |position: &GroupPosition| matches!(position.symbol, Symbol::Repair { .. });
            let has_repair = rest.iter().any(|(position, _)| is_repair(position));
            prop_assert!(restorer.bytes == 0 || !has_repair, "nothing is kept of a group that is known to be whole");
            // Packets that arrive after their restoration restore nothing again.
            all.retain(|(position, _)| matches!(position.symbol, Symbol::Repair { .. }));
            prop_assert_eq!(received(&mut restorer, &all).len(), 0);
        }

        #[test]
        fn whatever_comes_nothing_panics_and_memory_is_bounded(
            came in prop::collection::vec((any_place(), prop::collection::vec(any::<u8>(), 0..80)), 0..300),
        ) {
            let mut restorer = GroupDecoder::new();
            for (position, bytes) in came {
                restorer.push(Instant::now(), position, &bytes, |packet| assert!(packet.len() < 80));
            }
            let kept = |group: &Group| {
                group.packets.iter().chain(&group.repairs).map(|(_, bytes)| bytes.len()).sum::<usize>()
            };
            #[allow(clippy::disallowed_methods, reason = "a sum")]
            let kept: usize = restorer.groups.values().map(kept).sum();
            prop_assert_eq!(restorer.bytes, kept);
        }
    }

    #[test]
    fn a_group_that_lost_too_much_is_forgotten_after_a_while() {
        let start = Instant::now();
        let mut restorer = GroupDecoder::new();
        let packets = vec![vec![1; 1000]; 10];
        for (position, bytes) in datagrams(7, &packets, 1).iter().skip(2) {
            restorer.push(start, *position, bytes, |_| panic!("two are lost"));
        }
        assert_eq!(restorer.bytes, 8 * 1000 + 1002);
        let later = start + MAX_GROUP_AGE * 2;
        restorer.push(later, GroupPosition { group: 8, symbol: Symbol::Source(0) }, &[1], |_| {});
        assert_eq!((restorer.bytes, restorer.order.len(), restorer.stats().unrecoverable), (1, 1, 1));
        restorer.clear();
        assert_eq!((restorer.bytes, restorer.stats().unrecoverable), (0, 1));
    }

    #[test]
    fn a_flood_of_groups_that_are_never_whole_takes_bounded_memory() {
        let now = Instant::now();
        let mut restorer = GroupDecoder::new();
        for n in 0..50_000u32 {
            let position = GroupPosition { group: n as u16, symbol: Symbol::Source(n as u8 % 64) };
            restorer.push(now, position, &[1; 9000], |_| {});
            assert!(restorer.bytes <= MAX_KEPT_BYTES && restorer.groups.len() <= MAX_GROUPS);
            assert!(restorer.packets <= MAX_KEPT_PACKETS);
            assert_eq!(restorer.groups.len(), restorer.order.len());
        }
    }
}
