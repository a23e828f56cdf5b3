//! The erasure code: repair packets from the source packets of a group, and back.
//!
//! Each source packet is a vector: its length (2 bytes), its bytes, and zeros up to the longest of the group.
//! Each byte of repair packet j is the sum, over the source packets i, of the byte at the same offset times 1
//! / (128 + j + i), in GF(2^8). These factors form a Cauchy matrix, so any n repair packets restore any n
//! source packets, and a repair packet does not depend on the number of the others.

use super::field::{add_multiples, inverse, product};

/// Bytes of the length in front of each source packet.
pub(super) const LENGTH: usize = 2;

/// The factor of source packet `data` in repair packet `repair`. Both are below 64, so the divisor is never
/// 0.
fn factor(repair: u8, data: u8) -> u8 {
    inverse(0x80 ^ repair ^ data)
}

/// Makes repair packets; keeps its buffers for reuse.
#[derive(Debug, Default)]
pub(super) struct Encoder {
    shards: Vec<Vec<u8>>,
}

impl Encoder {
    /// The first `count` repair packets of a group.
    pub(super) fn encode<T: AsRef<[u8]>>(&mut self, packets: &[T], count: u8) -> &[Vec<u8>] {
        let longest = packets.iter().map(|packet| packet.as_ref().len()).max().unwrap_or(0);
        let count = usize::from(count);
        if self.shards.len() < count {
            self.shards.resize_with(count, Vec::new);
        }
        let shards = &mut self.shards[..count];
        for shard in shards.iter_mut() {
            shard.clear();
            shard.resize(LENGTH + longest, 0);
        }
        for (index, packet) in (0..).zip(packets) {
            add_packet(shards, packet.as_ref(), |n| factor(n as u8, index));
        }
        shards
    }
}

fn add_packet(sums: &mut [Vec<u8>], packet: &[u8], factor: impl Fn(usize) -> u8) {
    // No source packet is longer than a datagram, so the length fits.
    let length = (packet.len() as u16).to_be_bytes();
    add_multiples(sums, 0, &length, &factor);
    add_multiples(sums, LENGTH, packet, factor);
}

/// Restores source packets; keeps its buffers for reuse.
#[derive(Debug, Default)]
pub(super) struct Decoder {
    /// The repair packets less the received source packets: sums of the missing ones alone.
    sums: Vec<Vec<u8>>,
    restored: Vec<Vec<u8>>,
}

impl Decoder {
    /// Restores the packets `missing` of a group from the `received` ones (index and bytes) and as many
    /// `repairs` (index and bytes, all of one length) as packets are missing. Packets that do not belong
    /// together give arbitrary results; results with an impossible length are left out.
    pub(super) fn decode<T: AsRef<[u8]>>(
        &mut self,
        missing: &[u8],
        received: &[(u8, T)],
        repairs: &[(u8, T)],
        mut out: impl FnMut(u8, &[u8]),
    ) {
        let count = missing.len();
        let Some(inverted) = inverted(missing, repairs) else { return };
        let size = repairs.first().map_or(0, |(_, bytes)| bytes.as_ref().len());
        for sums in [&mut self.sums, &mut self.restored] {
            sums.resize_with(count.max(sums.len()), Vec::new);
            for sum in &mut sums[..count] {
                sum.clear();
                sum.resize(size, 0);
            }
        }
        let sums = &mut self.sums[..count];
        for (sum, (_, bytes)) in sums.iter_mut().zip(repairs) {
            sum.copy_from_slice(&bytes.as_ref()[..size.min(bytes.as_ref().len())]);
        }
        for (index, packet) in received {
            add_packet(sums, packet.as_ref(), |n| factor(repairs[n].0, *index));
        }
        let restored = &mut self.restored[..count];
        for (column, sum) in self.sums[..count].iter().enumerate() {
            add_multiples(restored, 0, sum, |row| inverted[row * count + column]);
        }
        for (index, shard) in missing.iter().zip(restored) {
            let Some((length, bytes)) = shard.split_first_chunk::<LENGTH>() else { continue };
            if let Some(packet) = bytes.get(..u16::from_be_bytes(*length).into()) {
                out(*index, packet);
            }
        }
    }
}

/// The inverse of the matrix of factors of the missing packets (columns) in the repair packets (rows), row by
/// row. `None` if there are not as many repair packets as missing ones.
fn inverted<T>(missing: &[u8], repairs: &[(u8, T)]) -> Option<Vec<u8>> {
    let count = missing.len();
    if repairs.len() != count {
        return None;
    }
    // Gauss-Jordan elimination: each row of factors, followed by a row of the unit matrix.
    let row = |(n, (repair, _)): (usize, &(u8, T))| {
        let unit = (0..count).map(|at| u8::from(at == n));
        missing.iter().map(|data| factor(*repair, *data)).chain(unit).collect()
    };
    let mut rows: Vec<Vec<u8>> = repairs.iter().enumerate().map(row).collect();
    for pivot in 0..count {
        // There is a pivot, as long as no repair packet occurs twice.
        let swap = (pivot..count).find(|row| rows[*row][pivot] != 0)?;
        rows.swap(pivot, swap);
        let by = inverse(rows[pivot][pivot]);
        rows[pivot].iter_mut().for_each(|value| *value = product(*value, by));
        let own = std::mem::take(&mut rows[pivot]);
        for row in rows.iter_mut().filter(|row| !row.is_empty()) {
            let by = row[pivot];
            row.iter_mut().zip(&own).for_each(|(value, own)| *value ^= product(by, *own));
        }
        rows[pivot] = own;
    }
    Some(rows.iter().flat_map(|row| &row[count..]).copied().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn group() -> impl Strategy<Value = Vec<Vec<u8>>> {
        prop::collection::vec(prop::collection::vec(any::<u8>(), 0..600), 1..=64)
    }

    proptest! {
        #[test]
        fn as_many_losses_as_repair_packets_are_restored(packets in group(), repair in 1u8..=32, seed: u64) {
            let mut encoder = Encoder::default();
            let shards: Vec<(u8, Vec<u8>)> =
            (0..).zip(encoder.encode(&packets, repair).iter().cloned()).collect();
            let mut order: Vec<u8> = (0..packets.len() as u8).collect();
            let mixed = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            order.sort_by_key(|index| mixed.rotate_left(u32::from(*index)));
            let lost = usize::from(repair).min(packets.len());
            let (missing, rest) = order.split_at(lost);
            let received = rest.iter().map(|index| (*index, packets[usize::from(*index)].clone()));
            let received: Vec<_> = received.collect();
            // Not the first repairs, but any.
            let from = seed as usize % (shards.len() - lost + 1);
            let mut restored = Vec::new();
            Decoder::default().decode(missing, &received, &shards[from..from + lost], |index, bytes| {
                restored.push((index, bytes.to_vec()));
            });
            prop_assert_eq!(restored.len(), lost);
            for (index, bytes) in restored {
                prop_assert_eq!(&bytes, &packets[usize::from(index)]);
            }
        }

        #[test]
        fn packets_of_different_groups_cause_no_panic(
            missing in prop::collection::btree_set(0u8..64, 0..20),
            received in prop::collection::vec((0u8..64, prop::collection::vec(any::<u8>(), 0..300)), 0..20),
            size in 0usize..300, indices in prop::collection::vec(0u8..32, 0..20), fill: u8,
        ) {
            let missing: Vec<u8> = missing.into_iter().collect();
            let repairs: Vec<_> = indices.iter().map(|index| (*index, vec![fill; size])).collect();
            let mut decoder = Decoder::default();
            decoder.decode(&missing, &received, &repairs, |_, packet| assert!(packet.len() < size));
        }
    }

    #[test]
    fn the_bytes_of_repair_are_those_of_the_specification() {
        let mut encoder = Encoder::default();
        let shards = encoder.encode(&[&[1u8, 2, 3][..], &[4]], 2);
        // 1 / 128 and 1 / 129 (1 / (128 + 1) and 1 / (128 + 0 + 1) are the same).
        let (even, odd) = (27, 84);
        assert_eq!((factor(0, 0), factor(0, 1), factor(1, 0), factor(1, 1)), (even, odd, odd, even));
        let packets: [[u8; 5]; 2] = [[0, 3, 1, 2, 3], [0, 1, 4, 0, 0]];
        let sum = |a: u8, b: u8| -> Vec<u8> {
            (0..5).map(|at| product(a, packets[0][at]) ^ product(b, packets[1][at])).collect()
        };
        assert_eq!(shards, [sum(even, odd), sum(odd, even)]);
    }
}
