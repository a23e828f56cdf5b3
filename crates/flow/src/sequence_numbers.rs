use crate::label::{BUCKETS, MODULUS};

/// The next number of each sequence, at the sender.
#[derive(Debug, Default)]
pub struct SequenceNumbers {
    /// Empty until the first packet is numbered, because most tunnels of a server are idle.
    next: Vec<u32>,
}

impl SequenceNumbers {
    /// All sequences start at 0.
    pub fn new() -> Self {
        Self::default()
    }

    /// The sequence (bucket) of a flow with this hash.
    #[inline]
    pub fn bucket(flow: u32) -> u16 {
        // The upper bits of a multiplicative hash (Knuth): the lower ones may have chosen a FQ-CoDel queue
        // already.
        (flow.wrapping_mul(0x9E37_79B1) >> (32 - BUCKETS.trailing_zeros())) as u16
    }

    /// The number of the next packet of a sequence.
    #[inline]
    pub fn next(&mut self, bucket: u16) -> u32 {
        if self.next.is_empty() {
            self.next = vec![0; BUCKETS as usize];
        }
        let Some(next) = self.next.get_mut(usize::from(bucket)) else { return 0 };
        let number = *next;
        *next = (number + 1) % MODULUS;
        number
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_sequence_counts_for_itself_and_wraps() {
        let mut numbers = SequenceNumbers::new();
        assert_eq!((numbers.next(7), numbers.next(7), numbers.next(8)), (0, 1, 0));
        numbers.next[7] = MODULUS - 1;
        assert_eq!((numbers.next(7), numbers.next(7)), (MODULUS - 1, 0));
    }

    #[test]
    fn flows_are_spread_over_all_sequences() {
        let used: std::collections::BTreeSet<u16> = (0..100_000).map(SequenceNumbers::bucket).collect();
        assert!(used.len() > 4000, "{}", used.len());
        assert!(used.iter().all(|bucket| u32::from(*bucket) < BUCKETS));
    }
}
