use mpvpn_types::Duration;

/// Flows share this many sequences of numbers.
pub const BUCKETS: u32 = 1 << 12;
/// Numbers are taken modulo this.
pub(crate) const MODULUS: u32 = 1 << 24;
const ORDERED: u16 = 1 << 15;
/// The unit of [`Label::patience`] on the wire.
const PATIENCE_MS: u64 = 4;

/// What stands before a packet in the numbered context (docs/protocol.md, "Order").
///
/// ```text
/// bit 15      1 if the packet waits for its predecessors
/// bits 12-14  0
/// bits 0-11   bucket: which sequence the number belongs to
/// 1 byte      patience in units of 4 ms
/// 3 bytes     number
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Label {
    /// Which sequence; below [`BUCKETS`]. Flows with the same one are kept in order together.
    pub bucket: u16,
    /// The packet is to be delivered after those before it.
    pub ordered: bool,
    /// How long it may be held for them, at most 1020 ms.
    pub patience: Duration,
    /// Its place in the sequence, modulo 2^24.
    pub number: u32,
}

/// A datagram that ends inside its label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a label has 6 bytes, got {0}")]
pub struct TooShort(pub usize);

impl Label {
    /// Bytes of a label.
    pub const LEN: usize = 6;

    /// The bytes on the wire. Patience is rounded up, and cut to what fits.
    #[inline]
    pub fn encode(&self) -> [u8; Self::LEN] {
        let first = (self.bucket & (BUCKETS as u16 - 1)) | if self.ordered { ORDERED } else { 0 };
        let patience = (self.patience.as_millis() as u64).div_ceil(PATIENCE_MS).min(255) as u8;
        let [_, a, b, c] = self.number.to_be_bytes();
        let [high, low] = first.to_be_bytes();
        [high, low, patience, a, b, c]
    }

    /// Reads the label at the start of `bytes`. Bits that have no meaning yet are ignored.
    ///
    /// # Errors
    /// If there are fewer than [`Self::LEN`] bytes.
    #[inline]
    pub fn decode(bytes: &[u8]) -> Result<Self, TooShort> {
        let [high, low, patience, a, b, c] = *bytes.first_chunk().ok_or(TooShort(bytes.len()))?;
        let first = u16::from_be_bytes([high, low]);
        Ok(Self {
            bucket: first & (BUCKETS as u16 - 1),
            ordered: first & ORDERED != 0,
            patience: Duration::from_millis(u64::from(patience) * PATIENCE_MS),
            number: u32::from_be_bytes([0, a, b, c]),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_label_is_read_back(bucket in 0..BUCKETS as u16, ordered: bool, units in 0..256u64, number in 0..MODULUS) {
            let patience = Duration::from_millis(units * PATIENCE_MS);
            let label = Label { bucket, ordered, patience, number };
            prop_assert_eq!(Label::decode(&label.encode()), Ok(label));
        }
    }

    #[test]
    fn patience_is_rounded_up_and_cut() {
        let with = |patience| Label { bucket: 1, ordered: true, patience, number: 2 };
        let back = |ms| Label::decode(&with(Duration::from_millis(ms)).encode()).unwrap().patience;
        assert_eq!(back(1), Duration::from_millis(4));
        assert_eq!(back(5000), Duration::from_millis(1020));
        assert_eq!(Label::decode(&[0; 5]), Err(TooShort(5)));
    }
}
