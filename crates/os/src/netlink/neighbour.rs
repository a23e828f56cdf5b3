//! Netlink messages about the neighbour table (ARP, RFC 826; neighbour discovery, RFC 4861).

use std::net::IpAddr;

use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourState},
};

/// An entry whose link-layer address the kernel is asking for without an answer so far (state
/// NUD_INCOMPLETE).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UnresolvedNeighbour {
    pub(super) index: u32,
    pub(super) address: IpAddr,
}

impl UnresolvedNeighbour {
    pub(super) fn parse(message: &RouteNetlinkMessage) -> Option<Self> {
        let RouteNetlinkMessage::NewNeighbour(message) = message else { return None };
        let address = message.attributes.iter().find_map(|attribute| match attribute {
            NeighbourAttribute::Destination(NeighbourAddress::Inet(ip)) => Some(IpAddr::V4(*ip)),
            NeighbourAttribute::Destination(NeighbourAddress::Inet6(ip)) => Some(IpAddr::V6(*ip)),
            _ => None,
        })?;
        let is_incomplete = message.header.state == NeighbourState::Incomplete;
        is_incomplete.then_some(Self { index: message.header.ifindex, address })
    }

    pub(super) fn remove_request(self) -> RouteNetlinkMessage {
        let mut message = NeighbourMessage::default();
        message.header.ifindex = self.index;
        let (family, address) = match self.address {
            IpAddr::V4(ip) => (AddressFamily::Inet, NeighbourAddress::Inet(ip)),
            IpAddr::V6(ip) => (AddressFamily::Inet6, NeighbourAddress::Inet6(ip)),
        };
        message.header.family = family;
        message.attributes.push(NeighbourAttribute::Destination(address));
        RouteNetlinkMessage::DelNeighbour(message)
    }
}
