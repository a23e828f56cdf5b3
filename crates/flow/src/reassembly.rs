use std::collections::VecDeque;

use bytes::Bytes;
use rustc_hash::FxHashMap;

use crate::label::{Label, Part};

/// Packets with missing parts that are kept at most: what a path of 100 Mbit/s has in flight in 100 ms.
/// Fewer: packets are lost; more: memory.
const MAX_INCOMPLETE_PACKETS: usize = 1 << 10;
/// Parts of such packets that are kept at most: most packets have two parts. Each takes about 60 bytes beside
/// its own. Fewer: packets are lost; more: memory of hostile peers with tiny parts.
const MAX_INCOMPLETE_PARTS: usize = 2 << 10;
/// Bytes of parts that are kept at most. Fewer: packets are lost; more: memory of hostile peers.
const MAX_INCOMPLETE_BYTES: usize = 4 << 20;

/// Reassembles packets that travel in parts, at the receiver.
#[derive(Debug, Default)]
pub struct PartReassembler {
    open: FxHashMap<(u16, u32), Parts>,
    /// All packets in `open`, and some that are complete or were dropped, the oldest first.
    order: VecDeque<(u16, u32)>,
    /// Bytes and number of the parts in `open`.
    bytes: usize,
    parts: usize,
}

#[derive(Debug)]
struct Parts {
    last: u8,
    /// The parts that have arrived, each with its index, in order.
    parts: Vec<(u8, Bytes)>,
}

impl PartReassembler {
    /// Before the first part.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes a packet or a part of one; returns the packet if it is complete. Where too much is kept, the
    /// packet that has waited for its other parts for the longest time is dropped.
    pub fn push(&mut self, label: Label, bytes: Bytes) -> Option<Bytes> {
        let Some(Part { index, last }) = label.part else { return Some(bytes) };
        if bytes.is_empty() {
            return None;
        }
        let key = (label.bucket, label.number);
        let fresh = || Parts { last, parts: Vec::new() };
        if !self.open.contains_key(&key) {
            self.order.push_back(key);
        }
        let packet = self.open.entry(key).or_insert_with(fresh);
        if packet.last != last || index > last {
            return None;
        }
        let Err(at) = packet.parts.binary_search_by_key(&index, |(index, _)| *index) else { return None };
        // A copy: the received slice would keep its whole receive buffer alive.
        packet.parts.insert(at, (index, Bytes::copy_from_slice(&bytes)));
        self.bytes += bytes.len();
        self.parts += 1;
        let is_complete = packet.parts.len() > usize::from(last);
        let complete = is_complete.then(|| {
            let parts: Vec<&[u8]> = packet.parts.iter().map(|(_, part)| &part[..]).collect();
            parts.concat().into()
        });
        if is_complete {
            self.forget(key);
        }
        while self.order.len() > MAX_INCOMPLETE_PACKETS
            || self.bytes > MAX_INCOMPLETE_BYTES
            || self.parts > MAX_INCOMPLETE_PARTS
        {
            let Some(oldest) = self.order.pop_front() else { break };
            self.forget(oldest);
        }
        complete
    }

    fn forget(&mut self, key: (u16, u32)) {
        if let Some(packet) = self.open.remove(&key) {
            self.bytes -= packet.parts.iter().map(|(_, part)| part.len()).sum::<usize>();
            self.parts -= packet.parts.len();
        }
    }
}

#[cfg(test)]
mod tests {
    use mpvpn_types::Duration;
    use proptest::prelude::*;

    use super::*;

    fn push(join: &mut PartReassembler, number: u32, part: Part, bytes: &[u8]) -> Option<Vec<u8>> {
        let label =
            Label { bucket: 3, ordered: true, reorder_timeout: Duration::ZERO, number, part: Some(part) };
        join.push(label, Bytes::copy_from_slice(bytes)).map(|packet| packet.to_vec())
    }

    proptest! {
        #[test]
        fn a_packet_is_put_together_from_parts_in_any_order(
            packet in prop::collection::vec(any::<u8>(), 16..3000), last in 1..=Part::MAX_INDEX, seed: u64,
        ) {
            let each = packet.len().div_ceil(usize::from(last) + 1);
            let parts: Vec<&[u8]> = packet.chunks(each).collect();
            let last = parts.len() as u8 - 1;
            let mut order: Vec<usize> = (0..parts.len()).collect();
            order.sort_by_key(|index| seed.rotate_left(*index as u32 * 7));
            let mut join = PartReassembler::new();
            for (came, index) in order.iter().enumerate() {
                let part = Part { index: *index as u8, last };
                let complete = push(&mut join, 7, part, parts[*index]);
                prop_assert_eq!(complete, (came + 1 == parts.len()).then(|| packet.clone()));
                if came + 1 < parts.len() {
                    prop_assert_eq!(push(&mut join, 7, part, parts[*index]), None, "a copy");
                }
            }
            prop_assert_eq!((join.bytes, join.open.len()), (0, 0));
        }
    }

    #[test]
    fn parts_of_different_packets_are_kept_apart() {
        let mut join = PartReassembler::new();
        let part = |index| Part { index, last: 1 };
        assert_eq!(push(&mut join, 1, part(0), b"ab"), None);
        assert_eq!(push(&mut join, 2, part(1), b"CD"), None);
        assert_eq!(push(&mut join, 1, Part { index: 1, last: 2 }, b"cd"), None, "cut in another way");
        assert_eq!(push(&mut join, 2, part(0), b"AB").as_deref(), Some(&b"ABCD"[..]));
        assert_eq!(push(&mut join, 1, part(1), b"cd").as_deref(), Some(&b"abcd"[..]));
    }

    #[test]
    fn memory_is_bounded() {
        let mut join = PartReassembler::new();
        for number in 0..20_000 {
            push(&mut join, number, Part { index: 0, last: 15 }, &[1; 9000]);
            assert!(
                join.bytes <= MAX_INCOMPLETE_BYTES
                    && join.open.len() <= MAX_INCOMPLETE_PACKETS
                    && join.order.len() <= MAX_INCOMPLETE_PACKETS
            );
        }
        for number in 0..20_000 {
            push(&mut join, number / 15, Part { index: (number % 15) as u8, last: 15 }, &[1]);
            assert!(join.parts <= MAX_INCOMPLETE_PARTS);
        }
        let kept: usize = join.open.values().map(|packet| packet.parts.len()).sum();
        assert_eq!(kept, join.parts);
    }
}
