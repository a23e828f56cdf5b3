//! The LINK capsule: how a client wants the server to use the link under one of its paths (docs/protocol.md).
//!
//! In: a [`LinkNotice`], or the value of a received capsule. Out: the bytes, or the notice. Always holds:
//! values out of range are refused; flags and fields of later versions are ignored.

use bytes::{BufMut, BytesMut};
use mpvpn_types::{BitRate, PathId, Tier, Weight};

use super::{CapsuleError, LINK, put_header, reader::Fields};
use crate::varint;

const METERED: u8 = 0x01;
const TIER_SHIFT: u8 = 1;
const TIER_MASK: u8 = 0x06;
/// Maximum DSCP: it has six bits (RFC 2474 §3).
const MAX_DSCP: u64 = 63;
/// Maximum rate limit on the wire in kbit/s: 1 Tbit/s, far above any link.
const MAX_KBPS: u64 = 1_000_000_000;

/// How an end uses a link: the configuration of a link, from the file to the wire.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkPolicy {
    /// When the link carries data.
    pub tier: Tier,
    /// Traffic on the link costs money: fewer heartbeats are sent.
    pub metered: bool,
    /// Rate limit of what this end sends over the link, counted as IP packets; on the wire in whole kbit/s.
    pub up: Option<BitRate>,
    /// Rate limit of what the peer sends over the link. The peer gets a policy of its own, see
    /// [`Self::for_peer`].
    pub down: Option<BitRate>,
    /// Weight of the link under the scheduler `weighted`.
    pub weight: Weight,
    /// DSCP (RFC 2474) of the packets sent over the link, 0 to 63.
    pub dscp: u8,
}

impl LinkPolicy {
    /// The policy for the peer: how it uses the link in its direction.
    #[must_use]
    pub fn for_peer(self) -> Self {
        Self { up: self.down, down: None, ..self }
    }
}

/// A client's policy for the link under a path. It replaces the previous notice for that path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkNotice {
    /// The path (draft-ietf-quic-multipath-21).
    pub path: PathId,
    /// How the receiver uses the link. On the wire the tier `never` becomes `backup`, and `down`, which only
    /// concerns the sender, is left out.
    pub policy: LinkPolicy,
    /// The first of several paths over the same link; `None` for the only path of a link.
    pub first_path: Option<PathId>,
    /// The client's number of the link, which identifies paths of several connections over the same link;
    /// `None` if the client has only one connection.
    pub link: Option<u16>,
}

impl LinkNotice {
    /// The notice that applies to a path without any notice.
    pub fn with_defaults(path: PathId) -> Self {
        Self { path, policy: LinkPolicy::default(), first_path: None, link: None }
    }

    pub(super) fn encode(&self, out: &mut BytesMut) {
        let LinkPolicy { tier, metered, up, weight, dscp, .. } = self.policy;
        let path = u64::from(self.path.0);
        let kbps = up.map_or(0, |cap| (cap.bps() / 1000).clamp(1, MAX_KBPS));
        let tier = match tier {
            Tier::Primary => 0,
            Tier::Overflow => 1,
            Tier::Backup | Tier::Never => 2,
        };
        let weight = u64::from(weight.get());
        let with = self.first_path.map_or(0, |first| u64::from(first.0) + 1);
        let link = self.link.map_or(0, |link| u64::from(link) + 1);
        // Optional fields at the end that are 0 are left out.
        let optional = [with, link, u64::from(dscp)];
        let said = optional.iter().rposition(|value| *value > 0).map_or(0, |last| last + 1);
        let optional = &optional[..said];
        let optional_len: usize = optional.iter().map(|value| varint::len(*value)).sum();
        let length = varint::len(path) + 1 + varint::len(kbps) + varint::len(weight) + optional_len;
        let out = put_header(LINK, length, out);
        varint::encode(path, out);
        out.put_u8(tier << TIER_SHIFT | if metered { METERED } else { 0 });
        varint::encode(kbps, out);
        varint::encode(weight, out);
        optional.iter().for_each(|value| varint::encode(*value, out));
    }

    /// Parses the value of a LINK capsule. Flags and fields that a later version may add are ignored.
    pub(super) fn parse(value: &[u8]) -> Result<Self, CapsuleError> {
        let mut fields = Fields { kind: LINK, left: value };
        let path = fields.varint()?;
        let path = u32::try_from(path).map_err(|_| CapsuleError::LinkField { field: "path", value: path })?;
        let flags = fields.byte()?;
        let kbps = fields.varint()?;
        if kbps > MAX_KBPS {
            return Err(CapsuleError::LinkField { field: "cap", value: kbps });
        }
        let tier = match (flags & TIER_MASK) >> TIER_SHIFT {
            0 => Tier::Primary,
            1 => Tier::Overflow,
            2 => Tier::Backup,
            tier => return Err(CapsuleError::LinkField { field: "tier", value: tier.into() }),
        };
        // Older clients send no more fields.
        let weight = if fields.left.is_empty() { 1 } else { fields.varint()? };
        let mut optional = || if fields.left.is_empty() { Ok(0) } else { fields.varint() };
        let (with, link, dscp) = (optional()?, optional()?, optional()?);
        if dscp > MAX_DSCP {
            return Err(CapsuleError::LinkField { field: "DSCP", value: dscp });
        }
        let number = u16::try_from(link.saturating_sub(1));
        let number = number.map_err(|_| CapsuleError::LinkField { field: "link", value: link })?;
        let first = u32::try_from(with.saturating_sub(1));
        let first = first.map_err(|_| CapsuleError::LinkField { field: "first path", value: with })?;
        let policy = LinkPolicy {
            tier,
            metered: flags & METERED != 0,
            up: (kbps > 0).then(|| BitRate::from_bps(kbps * 1000)),
            down: None,
            weight: Weight::new(weight).ok_or(CapsuleError::LinkField { field: "weight", value: weight })?,
            dscp: dscp as u8,
        };
        Ok(Self {
            path: PathId(path),
            policy,
            first_path: (with > 0).then_some(PathId(first)),
            link: (link > 0).then_some(number),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capsule::{Capsule, CapsuleReader};
    use proptest::prelude::*;

    fn read(bytes: &[u8]) -> Result<Option<Capsule>, CapsuleError> {
        let mut reader = CapsuleReader::new();
        reader.push(bytes);
        reader.next()
    }

    fn with_value(value: &[u8]) -> Vec<u8> {
        let mut out = BytesMut::new();
        put_header(LINK, value.len(), &mut out).extend_from_slice(value);
        out.to_vec()
    }

    #[test]
    fn the_bytes_are_the_documented_ones() {
        let policy = LinkPolicy {
            tier: Tier::Backup,
            metered: true,
            up: Some(BitRate::from_bps(50_000_000)),
            weight: Weight::new(3).unwrap(),
            ..LinkPolicy::default()
        };
        let notice = LinkNotice { policy, ..LinkNotice::with_defaults(PathId(5)) };
        let bytes = Capsule::Link(notice).to_bytes();
        assert_eq!(bytes[..], [0xad, 0x70, 0x76, 0x6c, 7, 5, 0b101, 0x80, 0, 0xc3, 0x50, 3]);
        let bytes = Capsule::Link(LinkNotice { link: Some(6), ..notice }).to_bytes();
        assert_eq!(bytes[4..], [9, 5, 0b101, 0x80, 0, 0xc3, 0x50, 3, 0, 7]);
        let bytes =
            Capsule::Link(LinkNotice { policy: LinkPolicy { dscp: 46, ..policy }, ..notice }).to_bytes();
        assert_eq!(bytes[4..], [10, 5, 0b101, 0x80, 0, 0xc3, 0x50, 3, 0, 0, 46]);
        let policy = LinkPolicy { weight: policy.weight, ..LinkPolicy::default() };
        let notice = LinkNotice { policy, first_path: Some(PathId(2)), ..notice };
        assert_eq!(Capsule::Link(notice).to_bytes()[..], [0xad, 0x70, 0x76, 0x6c, 5, 5, 0, 0, 3, 3]);
    }

    #[test]
    fn invalid_values_are_refused_and_fields_of_later_versions_ignored() {
        for bad in [
            &[][..],
            &[5],
            &[5, 0],
            &[5, 0b110, 0],
            &[5, 0, 0xc0, 0, 0, 1, 0, 0, 0, 0],
            &[5, 0, 0, 0],
            &[5, 0, 0, 0x43, 0xe9],
            &[5, 0, 0, 1, 0x40],
            &[5, 0, 0, 1, 0xc0, 0, 0, 1, 0, 0, 0, 1],
            &[5, 0, 0, 1, 0, 0x80, 1, 0, 1],
            &[5, 0, 0, 1, 0, 0, 0x40, 64],
        ] {
            assert!(read(&with_value(bad)).is_err(), "{bad:?}");
        }
        assert!(read(&with_value(&[0; MAX + 1])).is_err(), "too long");
        let read_value = |value: &[u8]| read(&with_value(value)).unwrap();
        let read = read_value(&[5, 0xf8, 0, 1, 0, 0, 0, 3]);
        let expected = LinkNotice::with_defaults(PathId(5));
        assert_eq!(read, Some(Capsule::Link(expected)));
        assert_eq!(read_value(&[5, 0xf8, 0]), Some(Capsule::Link(expected)), "an older client");
    }

    const MAX: usize = crate::capsule::MAX_LINK_LEN;

    proptest! {
        #[test]
        fn what_is_written_is_read_back(
            path in any::<u32>(), tier in 0..3usize, metered: bool,
            kbps in proptest::option::of(1..=MAX_KBPS),
            weight in 1..=1000u64, with in proptest::option::of(any::<u32>()),
            link in proptest::option::of(any::<u16>()),
            dscp in 0..=63u8,
        ) {
            let up = kbps.map(|kbps| BitRate::from_bps(kbps * 1000));
            let (tier, weight) = (Tier::ALL[tier], Weight::new(weight).unwrap());
            let policy = LinkPolicy { tier, metered, up, down: None, weight, dscp };
            let notice = LinkNotice { path: PathId(path), policy, first_path: with.map(PathId), link };
            prop_assert_eq!(read(&Capsule::Link(notice).to_bytes()), Ok(Some(Capsule::Link(notice))));
        }

        #[test]
        fn any_value_is_read_without_panic(value in proptest::collection::vec(any::<u8>(), 0..80)) {
            let _ = read(&with_value(&value));
        }
    }
}
