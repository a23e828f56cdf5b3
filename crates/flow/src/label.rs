use bytes::BufMut;
use mpvpn_types::Duration;

/// Sequences of numbers, which flows share by their hash: 12 bits of the label. Fewer: flows wait for one
/// another more often; more: memory.
pub const BUCKETS: u32 = 1 << 12;
/// Numbers wrap at this value: 3 bytes of the label.
pub(crate) const MODULUS: u32 = 1 << 24;
const ORDERED: u16 = 1 << 15;
const HAS_PART: u16 = 1 << 14;
/// The unit of [`Label::reorder_timeout`] on the wire.
const REORDER_TIMEOUT_UNIT_MS: u64 = 4;

/// The header of a packet in the numbered context (docs/protocol.md, "Order").
///
/// ```text
/// bit 15      1 if the packet waits for its predecessors
/// bit 14      1 if this is a part of the packet: a byte that says which one follows
/// bits 12-13  0
/// bits 0-11   bucket: which sequence the number belongs to
/// 1 byte      reorder timeout in units of 4 ms
/// 3 bytes     number
/// 1 byte      only with bit 14: index of the part × 16 + index of the last part
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Label {
    /// The sequence, below [`BUCKETS`]. Packets of all flows with the same one are kept in one order.
    pub bucket: u16,
    /// Whether the packet is delivered only after the packets with lower numbers.
    pub ordered: bool,
    /// How long the packet may be held for them, at most 1020 ms.
    pub reorder_timeout: Duration,
    /// The packet's number in the sequence, modulo 2^24.
    pub number: u32,
    /// Which part of the packet this is; `None` for a whole packet.
    pub part: Option<Part>,
}

/// Which part of a packet a datagram carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Counted from 0; at most `last`.
    pub index: u8,
    /// The index of the last part, at most [`Part::MAX_INDEX`].
    pub last: u8,
}

impl Part {
    /// Bytes by which a label with a part is longer.
    pub const LEN: usize = 1;
    /// The highest index: 4 bits of the label.
    pub const MAX_INDEX: u8 = 15;
}

/// Why bytes are no valid label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LabelError {
    /// The bytes end inside the label.
    #[error("a label has 6 bytes, 7 with a part; got {0}")]
    TooShort(usize),
    /// The part index is above the last index.
    #[error("part index {} is above the last index {}", .0.index, .0.last)]
    NoSuchPart(Part),
}

impl Label {
    /// Bytes of a label of a whole packet.
    pub const LEN: usize = 6;

    /// Appends the encoded label to `out`. The reorder timeout is rounded up to 4 ms, and limited to 1020 ms.
    #[inline]
    pub fn encode(&self, out: &mut impl BufMut) {
        let mut first = self.bucket & (BUCKETS as u16 - 1);
        first |= if self.ordered { ORDERED } else { 0 };
        first |= if self.part.is_some() { HAS_PART } else { 0 };
        let reorder_timeout =
            (self.reorder_timeout.as_millis() as u64).div_ceil(REORDER_TIMEOUT_UNIT_MS).min(255) as u8;
        let [_, a, b, c] = self.number.to_be_bytes();
        let [high, low] = first.to_be_bytes();
        out.put_slice(&[high, low, reorder_timeout, a, b, c]);
        if let Some(Part { index, last }) = self.part {
            out.put_u8(index << 4 | last & Part::MAX_INDEX);
        }
    }

    /// Reads the label at the start of `bytes`; returns it with its length. Reserved bits are ignored.
    ///
    /// # Errors
    /// If the label is incomplete, or its part index is above the last index.
    #[inline]
    pub fn decode(bytes: &[u8]) -> Result<(Self, usize), LabelError> {
        let too_short = || LabelError::TooShort(bytes.len());
        let [high, low, reorder_timeout, a, b, c] = *bytes.first_chunk().ok_or_else(too_short)?;
        let first = u16::from_be_bytes([high, low]);
        let mut label = Self {
            bucket: first & (BUCKETS as u16 - 1),
            ordered: first & ORDERED != 0,
            reorder_timeout: Duration::from_millis(u64::from(reorder_timeout) * REORDER_TIMEOUT_UNIT_MS),
            number: u32::from_be_bytes([0, a, b, c]),
            part: None,
        };
        if first & HAS_PART == 0 {
            return Ok((label, Self::LEN));
        }
        let byte = bytes.get(Self::LEN).ok_or_else(too_short)?;
        let part = Part { index: byte >> 4, last: byte & Part::MAX_INDEX };
        if part.index > part.last {
            return Err(LabelError::NoSuchPart(part));
        }
        label.part = Some(part);
        Ok((label, Self::LEN + Part::LEN))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn encoded(label: Label) -> Vec<u8> {
        let mut bytes = Vec::new();
        label.encode(&mut bytes);
        bytes
    }

    fn any_part() -> impl Strategy<Value = Option<Part>> {
        prop::option::of(
            (0..=Part::MAX_INDEX)
                .prop_flat_map(|last| (0..=last).prop_map(move |index| Part { index, last })),
        )
    }

    proptest! {
        #[test]
        fn a_label_is_read_back(
            bucket in 0..BUCKETS as u16, ordered: bool, units in 0..256u64, number in 0..MODULUS,
            part in any_part(),
        ) {
            let reorder_timeout = Duration::from_millis(units * REORDER_TIMEOUT_UNIT_MS);
            let label = Label { bucket, ordered, reorder_timeout, number, part };
            let bytes = encoded(label);
            prop_assert_eq!(Label::decode(&bytes), Ok((label, bytes.len())));
            let short = &bytes[..bytes.len() - 1];
            prop_assert_eq!(Label::decode(short), Err(LabelError::TooShort(short.len())));
        }
    }

    #[test]
    fn the_reorder_timeout_is_rounded_up_and_limited() {
        let with =
            |reorder_timeout| Label { bucket: 1, ordered: true, reorder_timeout, number: 2, part: None };
        let back = |ms| Label::decode(&encoded(with(Duration::from_millis(ms)))).unwrap().0.reorder_timeout;
        assert_eq!(back(1), Duration::from_millis(4));
        assert_eq!(back(5000), Duration::from_millis(1020));
        assert_eq!(Label::decode(&[0; 5]), Err(LabelError::TooShort(5)));
    }

    #[test]
    fn a_part_above_the_last_index_is_refused() {
        let beyond = Part { index: 3, last: 2 };
        let label = Label {
            bucket: 1,
            ordered: true,
            reorder_timeout: Duration::ZERO,
            number: 2,
            part: Some(beyond),
        };
        assert_eq!(Label::decode(&encoded(label)), Err(LabelError::NoSuchPart(beyond)));
    }
}
