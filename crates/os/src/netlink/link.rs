//! Interfaces.

use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    link::{LinkAttribute, LinkFlags, LinkInfo as InfoAttribute, LinkMessage},
};

/// An interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkInfo {
    /// Its index.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// Whether it is switched on.
    pub up: bool,
    /// Whether it is on and has a carrier, as far as the driver can tell.
    pub carrier: bool,
    /// Largest packet in bytes.
    pub mtu: u32,
    /// What made it, as in `veth` or `tun`; `None` for hardware.
    pub kind: Option<String>,
    /// Whether it is the loopback.
    pub loopback: bool,
}

pub(super) fn list_request() -> RouteNetlinkMessage {
    RouteNetlinkMessage::GetLink(LinkMessage::default())
}

pub(super) fn up_request(index: u32) -> RouteNetlinkMessage {
    flag_request(index, LinkFlags::Up)
}

pub(super) fn down_request(index: u32) -> RouteNetlinkMessage {
    flag_request(index, LinkFlags::empty())
}

fn flag_request(index: u32, flags: LinkFlags) -> RouteNetlinkMessage {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.header.flags = flags;
    message.header.change_mask = LinkFlags::Up;
    RouteNetlinkMessage::SetLink(message)
}

pub(super) fn mtu_request(index: u32, mtu: u32) -> RouteNetlinkMessage {
    attribute_request(index, LinkAttribute::Mtu(mtu))
}

pub(super) fn queue_request(index: u32, packets: u32) -> RouteNetlinkMessage {
    attribute_request(index, LinkAttribute::TxQueueLen(packets))
}

fn attribute_request(index: u32, attribute: LinkAttribute) -> RouteNetlinkMessage {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.attributes.push(attribute);
    RouteNetlinkMessage::SetLink(message)
}

pub(super) fn parse(message: &RouteNetlinkMessage) -> Option<LinkInfo> {
    match message {
        RouteNetlinkMessage::NewLink(message) | RouteNetlinkMessage::DelLink(message) => {
            // Bridges tell of their ports with the same messages under their own family.
            let itself = message.header.interface_family == AddressFamily::Unspec;
            itself.then(|| from_message(message))
        }
        _ => None,
    }
}

fn from_message(message: &LinkMessage) -> LinkInfo {
    let flags = message.header.flags;
    let mut link = LinkInfo {
        index: message.header.index,
        name: String::new(),
        up: flags.contains(LinkFlags::Up),
        carrier: flags.contains(LinkFlags::Up | LinkFlags::Running | LinkFlags::LowerUp),
        mtu: 0,
        kind: None,
        loopback: flags.contains(LinkFlags::Loopback),
    };
    for attribute in &message.attributes {
        match attribute {
            LinkAttribute::IfName(name) => link.name.clone_from(name),
            LinkAttribute::Mtu(mtu) => link.mtu = *mtu,
            LinkAttribute::LinkInfo(infos) => link.kind = infos.iter().find_map(kind),
            _ => {}
        }
    }
    link
}

fn kind(info: &InfoAttribute) -> Option<String> {
    match info {
        InfoAttribute::Kind(kind) => Some(kind.to_string()),
        _ => None,
    }
}
