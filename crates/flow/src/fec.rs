//! Repair without asking: packets of a path in groups, each followed by packets of repair from which the far end restores
//! what the path lost (forward error correction).
//!
//! In, at the sender: packets as they leave, with the path that they leave on; what became of them; how much each path
//! loses. Out: the [`GroupPosition`] of each packet in a group, datagrams of repair, and which losses the far end does not make good
//! by itself. In, at the receiver: what arrived. Out: what was lost and could be restored.
//!
//! Always holds:
//! - a group stays on one path, so what happens to that path happens to all of the group or to the next one;
//! - packets of repair are never more, in bytes, than the share of the data that was allowed;
//! - memory is bounded, whatever the peer sends, and nothing that it sends is believed: what was restored passes through the
//!   same checks as what arrived.

mod code;
mod field;
mod group_decoder;
mod group_encoder;
mod group_outcomes;
mod rate;

pub use group_decoder::{DecoderStats, GroupDecoder};
pub use group_encoder::{ClosedGroup, EncoderStats, FULL_PATH_WAIT_FACTOR, GroupEncoder};
pub use group_outcomes::GroupOutcomes;
pub use rate::{Load, LossMonitor, RepairPlan};

use bytes::BufMut;
use mpvpn_types::Fec;

/// Where a datagram stands in its group (docs/protocol.md, "FEC groups").
///
/// ```text
/// 2 bytes     group, modulo 2^16
/// bit 7       1 for repair
/// bit 6       0
/// bits 0-5    index: of the packet in the group, or of the repair
/// 1 byte      only with bit 7: packets in the group, less 1
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GroupPosition {
    /// Which group, modulo 2^16.
    pub group: u16,
    /// Which part of it.
    pub symbol: Symbol,
}

/// A part of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Symbol {
    /// A packet, counted from 0; below [`Fec::MAX_DATA`].
    Source(u8),
    /// Repair.
    Repair {
        /// Counted from 0; below [`Fec::MAX_REPAIR`].
        index: u8,
        /// Packets in the group, 1 to [`Fec::MAX_DATA`].
        source_count: u8,
    },
}

/// What is no place in a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GroupPositionError {
    /// It ends too early.
    #[error("a place in a group has 3 bytes, 4 for repair; got {0}")]
    TooShort(usize),
    /// No group is so large.
    #[error("a group has {data} packets and {repair} of repair at most; got index {0}", data = Fec::MAX_DATA, repair = Fec::MAX_REPAIR)]
    OutOfRange(u8),
}

const REPAIR: u8 = 1 << 7;
const INDEX: u8 = (1 << 6) - 1;

impl GroupPosition {
    /// Bytes in front of a packet.
    pub const LEN: usize = 3;
    /// Bytes that a datagram of repair is longer than the longest packet of its group with its own place.
    pub const REPAIR_OVERHEAD: usize = 1 + code::LENGTH;

    /// Writes the bytes to the end of `out`.
    #[inline]
    pub fn encode(&self, out: &mut impl BufMut) {
        out.put_u16(self.group);
        match self.symbol {
            Symbol::Source(index) => out.put_u8(index & INDEX),
            Symbol::Repair { index, source_count: data } => {
                out.put_u8(REPAIR | index & INDEX);
                out.put_u8(data.wrapping_sub(1));
            }
        }
    }

    /// Reads the place at the start of `bytes`; also returns how long it is.
    ///
    /// # Errors
    /// If it is not whole, or of a group that is too large.
    #[inline]
    pub fn decode(bytes: &[u8]) -> Result<(Self, usize), GroupPositionError> {
        let too_short = || GroupPositionError::TooShort(bytes.len());
        let [high, low, first] = *bytes.first_chunk().ok_or_else(too_short)?;
        let (group, index) = (u16::from_be_bytes([high, low]), first & INDEX);
        if first & REPAIR == 0 {
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

    fn any_shard() -> impl Strategy<Value = Symbol> {
        prop_oneof![
            (0..Fec::MAX_DATA).prop_map(Symbol::Source),
            (0..Fec::MAX_REPAIR, 1..=Fec::MAX_DATA)
                .prop_map(|(index, data)| Symbol::Repair { index, source_count: data }),
        ]
    }

    proptest! {
        #[test]
        fn a_place_is_read_back(group: u16, shard in any_shard()) {
            let place = GroupPosition { group, symbol: shard };
            let mut bytes = Vec::new();
            place.encode(&mut bytes);
            prop_assert_eq!(GroupPosition::decode(&bytes), Ok((place, bytes.len())));
            prop_assert_eq!(GroupPosition::decode(&bytes[..bytes.len() - 1]), Err(GroupPositionError::TooShort(bytes.len() - 1)));
        }
    }

    #[test]
    fn groups_out_of_range_are_refused() {
        assert_eq!(GroupPosition::decode(&[0, 1, 0x80, 64]), Err(GroupPositionError::OutOfRange(64)));
        assert_eq!(GroupPosition::decode(&[0, 1, 0xa0, 0]), Err(GroupPositionError::OutOfRange(32)));
    }
}
