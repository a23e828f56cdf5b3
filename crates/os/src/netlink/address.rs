//! Addresses of interfaces.

use std::net::IpAddr;

use ipnet::IpNet;
use netlink_packet_route::{
    RouteNetlinkMessage,
    address::{AddressAttribute, AddressFlags, AddressHeaderFlags, AddressMessage, AddressScope},
};

use super::route;

/// An address of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressInfo {
    /// The interface index.
    pub index: u32,
    /// The address, with the length of its prefix.
    pub address: IpNet,
    /// Whether it can be used now: duplicate address detection (RFC 4862 §5.4) neither runs nor has failed.
    pub usable: bool,
    /// Whether its scope is smaller than global: link-local, or of this host.
    pub link_local: bool,
}

pub(super) fn add_request(index: u32, address: IpNet) -> RouteNetlinkMessage {
    let mut message = message(index, address);
    let mut flags = AddressFlags::empty();
    if matches!(address, IpNet::V6(_)) {
        message.header.flags = AddressHeaderFlags::Nodad;
        flags |= AddressFlags::Nodad;
    }
    // The kernel adds no route to the main table (IFA_F_NOPREFIXROUTE) for an address without a network.
    if address.prefix_len() == address.max_prefix_len() {
        flags |= AddressFlags::Noprefixroute;
    }
    if !flags.is_empty() {
        message.attributes.push(AddressAttribute::Flags(flags));
    }
    RouteNetlinkMessage::NewAddress(message)
}

pub(crate) fn message(index: u32, address: IpNet) -> AddressMessage {
    let mut message = AddressMessage::default();
    message.header.index = index;
    message.header.prefix_len = address.prefix_len();
    message.header.scope = AddressScope::Universe;
    message.header.family = route::family(address.addr());
    message.attributes.push(AddressAttribute::Local(address.addr()));
    message.attributes.push(AddressAttribute::Address(address.addr()));
    message
}

pub(super) fn parse(message: &RouteNetlinkMessage) -> Option<AddressInfo> {
    let (RouteNetlinkMessage::NewAddress(message) | RouteNetlinkMessage::DelAddress(message)) = message
    else {
        return None;
    };
    let mut local = None;
    let mut peer = None;
    let mut flags = AddressFlags::from_bits_retain(message.header.flags.bits().into());
    for attribute in &message.attributes {
        match attribute {
            AddressAttribute::Local(ip) => local = Some(*ip),
            AddressAttribute::Address(ip) => peer = Some(*ip),
            AddressAttribute::Flags(all) => flags = *all,
            _ => {}
        }
    }
    let ip: IpAddr = local.or(peer)?;
    Some(AddressInfo {
        index: message.header.index,
        address: IpNet::new(ip, message.header.prefix_len).ok()?,
        usable: !flags.intersects(AddressFlags::Tentative | AddressFlags::Dadfailed),
        link_local: message.header.scope != AddressScope::Universe,
    })
}
