//! Netlink messages about interfaces.

use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    link::{InfoData, InfoVlan, LinkAttribute, LinkFlags, LinkInfo as InfoAttribute, LinkMessage},
};
use serde::{Deserialize, Serialize};

/// An interface.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LinkInfo {
    /// The interface index.
    pub index: u32,
    /// The interface name.
    pub name: String,
    /// Whether it is administratively up.
    pub up: bool,
    /// Whether it is up and has a carrier, as far as the driver can tell.
    pub carrier: bool,
    /// Largest packet in bytes.
    pub mtu: u32,
    /// The kind of a virtual interface, as in `veth` or `tun`; `None` for hardware.
    pub kind: Option<String>,
    /// Whether it is the loopback interface.
    pub loopback: bool,
    /// The index of the lower interface, as of a VLAN interface (IFLA_LINK).
    pub parent: Option<u32>,
    /// The VLAN ID (IEEE 802.1Q) of a VLAN interface.
    pub vlan: Option<u16>,
}

/// An interface, identified by index and name together: a later interface with the same name is another one,
/// and its addresses and routes are not reverted.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Interface {
    /// The interface index.
    pub index: u32,
    /// The interface name.
    pub name: String,
}

impl Interface {
    pub(crate) fn is_one_of(&self, links: &[LinkInfo]) -> bool {
        links.iter().any(|link| link.index == self.index && link.name == self.name)
    }
}

/// Removes a virtual interface.
pub(crate) fn removal(index: u32) -> RouteNetlinkMessage {
    let mut message = LinkMessage::default();
    message.header.index = index;
    RouteNetlinkMessage::DelLink(message)
}

/// Sets these flags and attributes.
pub(super) fn set_request(
    index: u32,
    flags: LinkFlags,
    attributes: Vec<LinkAttribute>,
) -> RouteNetlinkMessage {
    let mut message = LinkMessage::default();
    message.header.index = index;
    (message.header.flags, message.header.change_mask) = (flags, flags);
    message.attributes = attributes;
    RouteNetlinkMessage::SetLink(message)
}

pub(super) fn parse(message: &RouteNetlinkMessage) -> Option<LinkInfo> {
    match message {
        RouteNetlinkMessage::NewLink(message) | RouteNetlinkMessage::DelLink(message) => {
            // Bridges report their ports with the same messages under the family AF_BRIDGE.
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
        up: flags.contains(LinkFlags::Up),
        carrier: flags.contains(LinkFlags::Up | LinkFlags::Running | LinkFlags::LowerUp),
        loopback: flags.contains(LinkFlags::Loopback),
        ..LinkInfo::default()
    };
    for attribute in &message.attributes {
        match attribute {
            LinkAttribute::IfName(name) => link.name.clone_from(name),
            LinkAttribute::Mtu(mtu) => link.mtu = *mtu,
            LinkAttribute::Link(index) => link.parent = Some(*index),
            LinkAttribute::LinkInfo(infos) => {
                link.kind = infos.iter().find_map(kind);
                link.vlan = infos.iter().find_map(vlan);
            }
            _ => {}
        }
    }
    link
}

fn vlan(info: &InfoAttribute) -> Option<u16> {
    let InfoAttribute::Data(InfoData::Vlan(data)) = info else { return None };
    data.iter().find_map(|entry| match entry {
        InfoVlan::Id(id) => Some(*id),
        _ => None,
    })
}

fn kind(info: &InfoAttribute) -> Option<String> {
    match info {
        InfoAttribute::Kind(kind) => Some(kind.to_string()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use netlink_packet_route::link::InfoKind;

    use super::*;

    #[test]
    fn a_vlan_interface_has_its_vlan_id_and_its_lower_interface() {
        let mut message = LinkMessage::default();
        message.header.index = 7;
        let vlan = InfoData::Vlan(vec![InfoVlan::Id(20)]);
        message.attributes = vec![
            LinkAttribute::IfName("guests".into()),
            LinkAttribute::Link(3),
            LinkAttribute::LinkInfo(vec![InfoAttribute::Kind(InfoKind::Vlan), InfoAttribute::Data(vlan)]),
        ];
        let link = parse(&RouteNetlinkMessage::NewLink(message)).unwrap();
        assert_eq!((link.vlan, link.parent, link.kind.as_deref()), (Some(20), Some(3), Some("vlan")));
    }
}
