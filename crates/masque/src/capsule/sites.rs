//! The SITES capsule: which networks are behind clients of a server, and what became of those that the
//! receiver announced (docs/protocol.md).
//!
//! In: networks with their states, or the value of a received capsule. Out: the bytes, or the networks.
//! Always holds: a state that this version does not know counts as refused.

use bytes::{BufMut, BytesMut};
use ipnet::IpNet;

use super::{
    CapsuleError, SITES, addr_len, put_addr, put_header, put_version,
    reader::{Fields, HostBits},
};

/// The state of a network behind a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SiteState {
    /// It is behind another client.
    OfAnother,
    /// It is behind the receiver, to which its packets go.
    InUse,
    /// Another session of the same user has it; the receiver gets it when that ends.
    Standby,
    /// The user of the receiver may not announce it.
    NotAllowed,
    /// It overlaps a network behind a client of another user.
    Taken,
    /// It overlaps a network of the server's machine, or contains an address of a client's link.
    OfServer,
    /// The receiver announced too many.
    TooMany,
}

impl SiteState {
    /// All of them, each at the place of its number on the wire.
    const ALL: [Self; 7] = [
        Self::OfAnother,
        Self::InUse,
        Self::Standby,
        Self::NotAllowed,
        Self::Taken,
        Self::OfServer,
        Self::TooMany,
    ];

    pub(super) fn number(self) -> u8 {
        self as u8
    }

    pub(super) fn from_number(number: u8) -> Self {
        Self::ALL.get(usize::from(number)).copied().unwrap_or(Self::NotAllowed)
    }
}

/// A network behind a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Site {
    /// The network.
    pub net: IpNet,
    /// Its state.
    pub state: SiteState,
}

pub(super) fn encode(sites: &[Site], out: &mut BytesMut) {
    let len = sites.iter().map(|site| 3 + addr_len(site.net.addr())).sum();
    let out = put_header(SITES, len, out);
    for site in sites {
        out.put_u8(site.state.number());
        put_version(site.net.addr(), out);
        put_addr(site.net.network(), out);
        out.put_u8(site.net.prefix_len());
    }
}

pub(super) fn parse(value: &[u8]) -> Result<Vec<Site>, CapsuleError> {
    let mut fields = Fields { kind: SITES, left: value };
    let mut sites = Vec::new();
    while !fields.left.is_empty() {
        let state = SiteState::from_number(fields.byte()?);
        sites.push(Site { state, net: fields.net(HostBits::Refuse)? });
    }
    Ok(sites)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_state_has_its_place_on_the_wire() {
        for (at, state) in SiteState::ALL.into_iter().enumerate() {
            assert_eq!(usize::from(state.number()), at);
        }
    }

    #[test]
    fn networks_come_back_with_their_states_and_unknown_states_are_refusals() {
        let site = |net: &str, state| Site { net: net.parse().unwrap(), state };
        let sites = [
            site("192.168.7.0/24", SiteState::InUse),
            site("2001:db8:7::/48", SiteState::OfAnother),
            site("10.0.0.0/8", SiteState::Taken),
        ];
        let mut encoded = BytesMut::new();
        encode(&sites, &mut encoded);
        let value = &encoded[encoded.len() - (7 + 19 + 7)..];
        assert_eq!(parse(value).unwrap(), sites);
        let unknown = [99, 4, 10, 1, 0, 0, 16];
        assert_eq!(parse(&unknown).unwrap(), [site("10.1.0.0/16", SiteState::NotAllowed)]);
        for bad in [&[1, 4, 10, 1, 0, 0][..], &[1, 5, 10, 1, 0, 0, 16], &[1, 4, 10, 1, 0, 1, 16], &[1]] {
            assert!(parse(bad).is_err(), "{bad:?}");
        }
    }
}
