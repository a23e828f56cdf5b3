//! Netlink messages about the neighbour table (ARP, RFC 826; neighbour discovery, RFC 4861).

use netlink_packet_route::{
    RouteNetlinkMessage,
    neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourState},
};

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
