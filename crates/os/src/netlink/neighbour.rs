//! Netlink messages about the neighbour table (ARP, RFC 826; neighbour discovery, RFC 4861).

use std::net::IpAddr;

use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState},
};

/// An entry of the interface `index` that answers for an address (NTF_PROXY).
pub(crate) fn proxy(index: u32, address: IpAddr) -> NeighbourMessage {
    let mut entry = NeighbourMessage::default();
    let (family, destination) = match address {
        IpAddr::V4(ip) => (AddressFamily::Inet, NeighbourAddress::Inet(ip)),
        IpAddr::V6(ip) => (AddressFamily::Inet6, NeighbourAddress::Inet6(ip)),
    };
    (entry.header.family, entry.header.ifindex) = (family, index);
    entry.header.flags = NeighbourFlags::Proxy;
    entry.attributes.push(NeighbourAttribute::Destination(destination));
    entry
}

/// The address of an entry of the interface `index` and the request that removes it, if the kernel is asking
/// for its link-layer address without an answer so far (state NUD_INCOMPLETE).
pub(super) fn removal_of_unresolved(
    entry: RouteNetlinkMessage,
    index: u32,
) -> Option<(String, RouteNetlinkMessage)> {
    let RouteNetlinkMessage::NewNeighbour(entry) = entry else { return None };
    let is_unresolved = entry.header.state == NeighbourState::Incomplete && entry.header.ifindex == index;
    let address = entry.attributes.iter().find_map(|attribute| match attribute {
        NeighbourAttribute::Destination(NeighbourAddress::Inet(ip)) => Some(ip.to_string()),
        NeighbourAttribute::Destination(NeighbourAddress::Inet6(ip)) => Some(ip.to_string()),
        _ => None,
    })?;
    is_unresolved.then_some((address, RouteNetlinkMessage::DelNeighbour(entry)))
}
