//! Forward error correction: the packets of a path form groups, each followed by repair packets from which
//! the receiver restores lost packets.
//!
//! At the sender: in: packets as they leave, with their path; acknowledgements and losses; the loss of each
//! path. Out: the [`GroupPosition`] of each packet, repair packets, and the lost packets that the receiver
//! cannot restore. At the receiver: in: received packets. Out: restored packets.
//!
//! Always holds:
//! - a group is on one path, so that an outage of that path affects whole groups;
//! - repair packets have at most the configured share of the bytes of the data;
//! - memory is bounded, whatever the peer sends, and restored packets pass the same checks as received ones.

mod code;
mod field;
mod group_decoder;
mod group_encoder;
mod group_outcomes;
mod rate;

pub use group_decoder::{DecoderStats, GroupDecoder};
pub use group_encoder::{ClosedGroup, EncoderStats, FULL_PATH_WAIT_FACTOR, GroupEncoder};
pub use group_outcomes::{GroupOutcomes, OutcomeStats};
pub use rate::{Load, LossMonitor, RepairPlan};

use bytes::BufMut;
use mpvpn_types::Fec;

/// The position of a datagram in its group (docs/protocol.md, "FEC groups").
///
/// ```text
/// 2 bytes     group, modulo 2^16
/// bit 7       1 for a repair packet
/// bit 6       0
/// bits 0-5    index of the source packet, or of the repair packet
/// 1 byte      only with bit 7: source packets in the group, less 1
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GroupPosition {
    /// The number of the group, modulo 2^16.
    pub group: u16,
    /// The source or repair packet of the group.
    pub symbol: Symbol,
}

/// A source or repair packet of a group (RFC 6363 §2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Symbol {
    /// A source packet: its index, below [`Fec::MAX_DATA`].
    Source(u8),
    /// A repair packet.
    Repair {
        /// Its index, below [`Fec::MAX_REPAIR`].
        index: u8,
        /// Source packets in the group, 1 to [`Fec::MAX_DATA`].
        source_count: u8,
    },
}

/// Why bytes are no valid position in a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GroupPositionError {
    /// The bytes end too early.
    #[error("a position in a group has 3 bytes, 4 for a repair packet; got {0}")]
    TooShort(usize),
    /// The index is beyond the largest group.
    #[error("a group has at most {data} source and {repair} repair packets; got index {0}", data = Fec::MAX_DATA, repair = Fec::MAX_REPAIR)]
    OutOfRange(u8),
}

const IS_REPAIR: u8 = 1 << 7;
const INDEX_MASK: u8 = (1 << 6) - 1;

impl GroupPosition {
    /// Bytes in front of a source packet.
    pub const LEN: usize = 3;
    /// Bytes by which a repair packet is longer than the longest source packet of its group with its
    /// position.
    pub const REPAIR_OVERHEAD: usize = 1 + code::LENGTH;

    /// Appends the encoded position to `out`.
    #[inline]
    pub fn encode(&self, out: &mut impl BufMut) {
        out.put_u16(self.group);
        match self.symbol {
            Symbol::Source(index) => out.put_u8(index & INDEX_MASK),
            Symbol::Repair { index, source_count: data } => {
                out.put_u8(IS_REPAIR | index & INDEX_MASK);
                out.put_u8(data.wrapping_sub(1));
            }
        }
    }

    /// Reads the position at the start of `bytes`; returns it with its length.
    ///
    /// # Errors
    /// If the position is incomplete, or beyond the largest group.
    #[inline]
    pub fn decode(bytes: &[u8]) -> Result<(Self, usize), GroupPositionError> {
        let too_short = || GroupPositionError::TooShort(bytes.len());
        let [high, low, first] = *bytes.first_chunk().ok_or_else(too_short)?;
        let (group, index) = (u16::from_be_bytes([high, low]), first & INDEX_MASK);
        if first & IS_REPAIR == 0 {
            return Ok((Self { group, symbol: Symbol::Source(index) }, Self::LEN));
        }
        let data = *bytes.get(Self::LEN).ok_or_else(too_short)?;
        if data >= Fec::MAX_DATA {
            return Err(GroupPositionError::OutOfRange(data));
        }
        if index >= Fec::MAX_REPAIR {
            return Err(GroupPositionError::OutOfRange(index));
        }
        Ok((Self { group, symbol: Symbol::Repair { index, source_count: data + 1 } }, Self::LEN + 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_symbol() -> impl Strategy<Value = Symbol> {
        prop_oneof![
            (0..Fec::MAX_DATA).prop_map(Symbol::Source),
            (0..Fec::MAX_REPAIR, 1..=Fec::MAX_DATA)
                .prop_map(|(index, data)| Symbol::Repair { index, source_count: data }),
        ]
    }

    proptest! {
        #[test]
        fn a_position_is_read_back(group: u16, symbol in any_symbol()) {
            let position = GroupPosition { group, symbol };
            let mut bytes = Vec::new();
            position.encode(&mut bytes);
            prop_assert_eq!(GroupPosition::decode(&bytes), Ok((position, bytes.len())));
            let short = &bytes[..bytes.len() - 1];
            prop_assert_eq!(GroupPosition::decode(short), Err(GroupPositionError::TooShort(short.len())));
        }
    }

    #[test]
    fn groups_out_of_range_are_refused() {
        assert_eq!(GroupPosition::decode(&[0, 1, 0x80, 64]), Err(GroupPositionError::OutOfRange(64)));
        assert_eq!(GroupPosition::decode(&[0, 1, 0xa0, 0]), Err(GroupPositionError::OutOfRange(32)));
    }
}
