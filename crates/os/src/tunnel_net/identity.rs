//! The firewall marks, routing tables and rule priorities of the instances of mpvpn on one machine.
//!
//! In: the number of an instance, of a link or of a class's device, each held in a `NumberPool`. Out:
//! marks, tables and priorities that no other has. Always holds: bits 0 to 15 of a mark say that it is
//! mpvpn's, bits 16 to 23 whose it is (below 0x80 an instance, from there a link, from 0xc0 a link past the
//! tunnel), bits 24 to 27 the device of a class; other bits are never set.

use ipnet::IpNet;

use crate::{firewall::MarkBits, netlink::Interface};

/// "mp" in ASCII: any number that other programs do not use. It is the low half of marks and tables, and the
/// first priority of rules, which have to be below 32766, that of the main table.
const MPVPN_ID: u32 = 0x6d70;
/// The bits of a mark that say that it is mpvpn's: packets of all its instances, and replies that leave by a
/// link.
pub(crate) const OWN_PACKETS: MarkBits = MarkBits { value: MPVPN_ID, mask: 0xffff };
/// The bits of a mark that say whose it is.
pub(crate) const NUMBER_MASK: u32 = 0x00ff_0000;
/// The bit that the numbers of links have, and those of instances have not.
pub(crate) const LINK_BIT: u32 = 0x0080_0000;
/// The bit that packets past the tunnel have beside the number of their link.
pub(crate) const BYPASS_BIT: u32 = 0x0040_0000;
/// The bits of the mark that hold the number of a class's device (0: no device). More would take bits from
/// other programs.
const DEVICE_MARK_MASK: u32 = 0x0f00_0000;
/// Tables of one instance follow each other: its own, and one for each of the 15 devices of classes.
const TABLES_OF_INSTANCE: u32 = 16;
/// Priorities of a layer of rules: one for each instance.
const PRIORITIES_OF_LAYER: u32 = 0x80;

/// Rules that come first have smaller priorities. In each layer there are rules of all instances, so the more
/// specific route wins, whichever instance has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layer {
    /// Replies to connections that came in by a link: they leave by it.
    Inbound,
    /// Packets that leave past the tunnel, by their link.
    Bypass,
    /// Steered packets whose destination has a specific route in the main table.
    SteeredSpecific,
    /// Packets of a class's device.
    ClassDevice,
    /// Destinations with a specific route in the main table.
    MainSpecific,
    /// Destinations with a specific route in the tunnel's table.
    TunnelSpecific,
    /// Packets with an address of the tunnel, as of programs that are bound to it.
    TunnelAddress,
    /// All other packets.
    Everything,
}

/// The part of a client's configuration that stays the same while it runs.
#[derive(Clone, Debug)]
pub struct ClientNetConfig {
    /// The TUN device.
    pub tun: Interface,
    /// The number of this instance, of [`INSTANCE_NUMBERS`](crate::undo::INSTANCE_NUMBERS).
    pub number: u8,
    /// Networks for which routes of the main table count, beside those of `KeptNetworks`.
    pub keep_routes: Vec<IpNet>,
    /// The TUN devices of classes: routes of the main table that lead there count.
    pub class_tuns: Vec<Interface>,
    /// Routes into the tunnel that the user wants, whatever the server says.
    pub static_routes: Vec<StaticRoute>,
    /// Whether the device has no carrier while the tunnel does not work, so that the kernel takes the next
    /// route.
    pub has_carrier_of_tunnel: bool,
}

/// A route into the tunnel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StaticRoute {
    /// The destination.
    pub to: IpNet,
    /// The metric; `None`: the kernel's.
    pub metric: Option<u32>,
    /// The number of the table.
    pub table: u32,
}

impl ClientNetConfig {
    /// The configuration for the device `tun`, without devices of classes.
    pub fn new(tun: Interface, number: u8) -> Self {
        let (keep_routes, class_tuns, static_routes) = Default::default();
        Self { tun, number, keep_routes, class_tuns, static_routes, has_carrier_of_tunnel: false }
    }

    /// The firewall mark of the tunnel's own packets.
    pub fn mark(&self) -> u32 {
        MPVPN_ID | u32::from(self.number) << NUMBER_MASK.trailing_zeros()
    }

    /// The routing table for the tunnel's routes.
    pub fn table(&self) -> u32 {
        self.mark()
    }

    /// The routing table of the device with this number, 0 to 14.
    pub(super) fn class_table(&self, device: u8) -> u32 {
        self.table() + 1 + u32::from(device)
    }

    /// The routing table for replies that leave by a link. Each instance has its own, so that it can end
    /// without the others.
    pub(super) fn link_table(&self, link: u8) -> u32 {
        link_mark(link).value | u32::from(self.number) << 24
    }

    pub(super) fn priority(&self, layer: Layer) -> u32 {
        MPVPN_ID + layer as u32 * PRIORITIES_OF_LAYER + u32::from(self.number)
    }
}

/// Whether a routing table belongs to an instance of mpvpn.
pub(crate) fn is_table_of_instance(table: u32) -> bool {
    (MPVPN_ID..MPVPN_ID + TABLES_OF_INSTANCE).contains(&(table & 0xffff))
}

/// The mark of packets that leave by the link with this number of `LINK_NUMBERS`.
pub(crate) fn link_mark(link: u8) -> MarkBits {
    let value = MPVPN_ID | u32::from(link) << NUMBER_MASK.trailing_zeros();
    MarkBits { value, mask: OWN_PACKETS.mask | NUMBER_MASK }
}

/// The mark of packets that leave past the tunnel by this link.
pub(crate) fn bypass_mark(link: u8) -> MarkBits {
    let mark = link_mark(link);
    MarkBits { value: mark.value | BYPASS_BIT, ..mark }
}

/// The bits of packets that are steered into the device of a class, by its number of `CLASS_MARKS`.
pub(super) fn device_mark(number: u8) -> MarkBits {
    let value = u32::from(number) << DEVICE_MARK_MASK.trailing_zeros() & DEVICE_MARK_MASK;
    MarkBits { value, mask: DEVICE_MARK_MASK }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::undo::{CLASS_MARKS, INSTANCE_NUMBERS, LINK_NUMBERS};

    fn client(number: u8) -> ClientNetConfig {
        ClientNetConfig::new(Interface { index: 1, name: "t0".into() }, number)
    }

    #[test]
    fn all_marks_and_tables_differ() {
        let clients = (INSTANCE_NUMBERS.first..=INSTANCE_NUMBERS.last).map(client);
        let mut tables = BTreeSet::new();
        let mut marks = BTreeSet::new();
        for client in clients {
            assert_eq!(client.mark() & OWN_PACKETS.mask, OWN_PACKETS.value);
            assert_eq!(client.mark() & DEVICE_MARK_MASK, 0);
            assert!(marks.insert(client.mark()));
            let of_classes = (0..15).map(|device| client.class_table(device));
            let of_links = (LINK_NUMBERS.first..=LINK_NUMBERS.last).map(|link| client.link_table(link));
            for table in of_classes.chain(of_links).chain([client.table()]) {
                assert!(tables.insert(table) && is_table_of_instance(table), "{table:#x}");
            }
        }
        for link in LINK_NUMBERS.first..=LINK_NUMBERS.last {
            assert!(marks.insert(link_mark(link).value));
        }
        let devices: BTreeSet<u32> =
            (CLASS_MARKS.first..=CLASS_MARKS.last).map(|number| device_mark(number).value).collect();
        assert_eq!(devices.len(), 15);
        assert!(devices.iter().all(|value| value & DEVICE_MARK_MASK == *value && *value != 0));
        assert!(!is_table_of_instance(254) && !is_table_of_instance(MPVPN_ID + TABLES_OF_INSTANCE));
    }

    #[test]
    fn rules_of_one_layer_come_before_those_of_the_next_and_all_before_the_main_table() {
        let last = client(INSTANCE_NUMBERS.last);
        assert!(last.priority(Layer::MainSpecific) < client(0).priority(Layer::TunnelSpecific));
        assert!(last.priority(Layer::Everything) < 32_766);
    }
}
