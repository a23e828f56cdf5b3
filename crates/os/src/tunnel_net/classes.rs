//! The TUN devices of the classes of a client, and the packets that are routed into them.
//!
//! Each device has a routing table with a default route to it. Policy rules look up this table
//! 1. for packets of sockets that are bound to the device, or to an address that only this device has;
//! 2. for packets with the device's bits in the firewall mark, unless they go to a kept network
//!    ([`KeptNetworks`]) to which the main table has a route. Rules of nftables set these bits on the
//!    packets that [`ClassSteering`] matches.
//!
//! In the table of a pinned class an unreachable route follows the default route, for the time without a
//! carrier. Routes that users add to the device lead there as well. Packets that leave by it get its
//! address (source NAT), because the server accepts packets from no other address.

use std::collections::BTreeSet;

use ipnet::IpNet;

use super::{
    AppliedSteps, ClientNetConfig, Families, OWN_PACKETS, ReplaceableTable,
    client::MIN_V6_MTU_BYTES,
    default_destination, enable_forwarding, family_of,
    identity::{Layer, device_mark},
    kept_networks::KeptNetworks,
    prepare_device,
};
use crate::{
    error::OsError,
    firewall::{AddressGuard, Exit, MarkRule, Masquerade, Origin, PacketMatch, Rules},
    netlink::{Family, Interface, LinkInfo, Netlink, Route, Rule},
    sysctl,
    undo::{Step, UndoJournal},
};

/// The TUN device of a class.
#[derive(Clone, Debug)]
pub struct ClassTun {
    /// The interface.
    pub interface: Interface,
    /// The number of the device: that of its class, 0 to 14.
    pub number: u8,
    /// The firewall mark of packets that are steered into it, of [`CLASS_MARKS`](crate::undo::CLASS_MARKS);
    /// `None` if no rule steers packets there.
    pub mark: Option<u8>,
    /// Whether packets for it go nowhere else while it has no carrier.
    pub is_pinned: bool,
}

/// A rule that steers packets into the device of a class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClassSteering {
    /// The number of the device.
    pub number: u8,
    /// The packets.
    pub packets: PacketMatch,
    /// VLAN IDs (IEEE 802.1Q): packets match only if they arrive by a VLAN interface with one of these; an
    /// empty list sets no condition. If [`PacketMatch::ingress`] is not empty, the VLAN interface is one
    /// of those, or above one of those.
    pub vlans: Vec<u16>,
}

/// The addresses of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceAddresses {
    /// The addresses, with the lengths of their prefixes.
    pub addresses: Vec<IpNet>,
    /// Whether no other device has these addresses.
    pub own: bool,
}

/// The network configuration of the devices of all classes.
#[derive(Debug)]
pub struct ClassNet {
    client: ClientNetConfig,
    tuns: Vec<ClassTun>,
    steering: Vec<ClassSteering>,
    netlink: Netlink,
    applied: AppliedSteps,
    /// The arguments of the last call of [`Self::apply`]: the addresses of each device, and the MTU (bytes).
    wanted: Option<(Vec<DeviceAddresses>, u32)>,
    /// The kept networks at that time.
    kept: KeptNetworks,
    /// The table of nftables that is in force.
    firewall: ReplaceableTable,
}

impl ClassNet {
    /// Prepares the devices and brings them up, without addresses or routes.
    pub fn new(
        client: ClientNetConfig,
        tuns: Vec<ClassTun>,
        steering: Vec<ClassSteering>,
    ) -> Result<Self, OsError> {
        let mut netlink = Netlink::open()?;
        for ClassTun { interface, .. } in &tuns {
            prepare_device(&interface.name);
            // The route back to the sender of a reply leads into the main device, so a strict reverse path
            // filter would drop the reply. The larger of the values for all interfaces and for
            // this one is in force (the kernel's ip-sysctl.rst).
            if sysctl::read("net/ipv4/conf/all/rp_filter").is_ok_and(|value| value == "1") {
                let _ = sysctl::write(&sysctl::interface_key("ipv4", &interface.name, "rp_filter"), "2");
            }
            netlink.set_up(interface.index)?;
        }
        let (applied, firewall) = (AppliedSteps::default(), ReplaceableTable::default());
        let kept = KeptNetworks::new(&[], &client.keep_routes);
        Ok(Self { client, tuns, steering, netlink, applied, wanted: None, kept, firewall })
    }

    /// Takes the addresses and routes of the devices that an earlier process has left in force.
    pub fn adopt(&mut self, undo: &UndoJournal) {
        let devices: Vec<&Interface> = self.tuns.iter().map(|tun| &tun.interface).collect();
        self.applied = AppliedSteps::of_devices(undo, &devices);
    }

    /// Enables forwarding if packets of other hosts are steered.
    pub fn enable_forwarding(&mut self, undo: &mut UndoJournal) -> Result<(), OsError> {
        let others =
            |steering: &ClassSteering| !(steering.packets.ingress.is_empty() && steering.vlans.is_empty());
        if !self.steering.iter().any(others) {
            return Ok(());
        }
        enable_forwarding(undo, &mut self.netlink, Families { v4: true, v6: sysctl::has_ipv6() })
    }

    /// Changes the machine to these addresses, one entry for each device in the order of the devices, and
    /// this MTU (bytes).
    pub fn apply(
        &mut self,
        undo: &mut UndoJournal,
        wanted: Vec<DeviceAddresses>,
        mtu: u32,
    ) -> Result<(), OsError> {
        if self.tuns.is_empty() {
            return Ok(());
        }
        let kept = KeptNetworks::new(&self.netlink.addresses()?, &self.client.keep_routes);
        let is_same = self.wanted.as_ref().is_some_and(|last| last.0 == wanted && last.1 == mtu);
        if is_same && self.kept == kept {
            return Ok(());
        }
        let kernel_has_v6 = sysctl::exists("net/ipv6/conf/all/disable_ipv6") && mtu >= MIN_V6_MTU_BYTES;
        let is_carried = |address: &&IpNet| family_of(**address) == Family::V4 || kernel_has_v6;
        let grows = self.wanted.as_ref().is_none_or(|last| mtu > last.1);
        // The kernel removes IPv6 from a device whose MTU falls below 1280: grow the MTU first, shrink it
        // last.
        if grows {
            self.set_mtu(mtu)?;
        }
        let mut steps = Vec::new();
        for (tun, given) in self.tuns.iter().zip(&wanted) {
            let addresses: Vec<IpNet> = given.addresses.iter().filter(is_carried).copied().collect();
            if addresses.iter().any(|address| family_of(*address) == Family::V6) {
                let _ =
                    sysctl::write(&sysctl::interface_key("ipv6", &tun.interface.name, "disable_ipv6"), "0");
            }
            steps.extend(self.steps(tun, &addresses, given.own, &kept));
        }
        self.applied.change_to(undo, steps)?;
        if !grows {
            self.set_mtu(mtu)?;
        }
        (self.wanted, self.kept) = (Some((wanted, mtu)), kept);
        self.update_vlan_interfaces(undo)
    }

    /// Applies the last configuration again, after links of the machine have changed.
    pub fn refresh(&mut self, undo: &mut UndoJournal) -> Result<(), OsError> {
        self.wanted.clone().map_or(Ok(()), |(wanted, mtu)| self.apply(undo, wanted, mtu))
    }

    /// Finds the interfaces of VLANs again, and installs the firewall table if they have changed.
    pub fn update_vlan_interfaces(&mut self, undo: &mut UndoJournal) -> Result<(), OsError> {
        if self.wanted.is_none() {
            return Ok(());
        }
        let links = match self.steering.iter().any(|steering| !steering.vlans.is_empty()) {
            true => self.netlink.links()?,
            false => Vec::new(),
        };
        let rules = self.firewall_rules(&links);
        self.firewall.change_to(undo, rules)
    }

    fn set_mtu(&mut self, mtu: u32) -> Result<(), OsError> {
        self.tuns.iter().try_for_each(|tun| self.netlink.set_mtu(tun.interface.index, mtu))
    }

    /// All steps for one device in the order to apply them.
    fn steps(&self, tun: &ClassTun, addresses: &[IpNet], own: bool, kept: &KeptNetworks) -> Vec<Step> {
        let interface = || tun.interface.clone();
        let mut steps: Vec<Step> =
            addresses.iter().map(|&address| Step::Address { interface: interface(), address }).collect();
        let table = self.client.class_table(tun.number);
        let mark = tun.mark.map(device_mark).map(|mark| (mark.value, mark.mask));
        for family in [Family::V4, Family::V6] {
            let mut of_family = addresses.iter().filter(|address| family_of(**address) == family).peekable();
            if of_family.peek().is_none() {
                continue;
            }
            let route = Route::through(default_destination(family), table, tun.interface.index);
            steps.push(Step::Route { route, interface: Some(interface()) });
            if tun.is_pinned {
                let route = Route::unreachable(default_destination(family), table);
                steps.push(Step::Route { route, interface: None });
            }
            let lookup = Rule::lookup(family, self.client.priority(Layer::ClassDevice), table);
            let bound = Rule { output: Some(tun.interface.name.clone()), ..lookup.clone() };
            steps.push(Step::Rule { rule: bound });
            steps.extend(of_family.filter(|_| own).map(|address| {
                let source = Some(IpNet::from(address.addr()));
                Step::Rule { rule: Rule { source, ..lookup.clone() } }
            }));
            if mark.is_some() {
                let specific = self.client.priority(Layer::SteeredSpecific);
                let rules = kept.rules(family, specific).chain([lookup]);
                steps.extend(rules.map(|rule| Step::Rule { rule: Rule { mark, ..rule } }));
            }
        }
        steps
    }

    fn firewall_rules(&self, links: &[LinkInfo]) -> Rules {
        let masquerade = self.tuns.iter().map(|tun| Masquerade {
            from: Origin::Anywhere,
            exit: Exit::Through(tun.interface.name.clone()),
        });
        let mark_of = |steering: &ClassSteering| {
            self.tuns.iter().find(|tun| tun.number == steering.number)?.mark.map(device_mark)
        };
        let mark_rules = self.steering.iter().filter_map(|steering| {
            let set = mark_of(steering)?;
            let packets = match steering.vlans.is_empty() {
                true => steering.packets.clone(),
                false => {
                    let ingress = vlan_interfaces(&steering.packets.ingress, &steering.vlans, links);
                    PacketMatch { ingress, ..steering.packets.clone() }
                }
            };
            // Without an interface of the VLAN no packet can match, but an empty list would match all
            // packets.
            let can_match = steering.vlans.is_empty() || !packets.ingress.is_empty();
            can_match.then_some(MarkRule { packets, set })
        });
        let given = self.wanted.iter().flat_map(|(wanted, _)| wanted);
        let own = self.tuns.iter().zip(given).filter(|(_, given)| given.own);
        let guards = own.map(|(tun, given)| AddressGuard::new(&tun.interface.name, &given.addresses));
        let guards = guards.collect();
        Rules {
            name: format!("{} classes", self.client.tun.name),
            masquerade: masquerade.collect(),
            mark_rules: mark_rules.collect(),
            exempt_mark: Some(OWN_PACKETS),
            guards,
            site: None,
        }
    }
}

/// The interfaces of these VLANs that are among those of `ingress`, or above one of them; all if that is
/// empty.
pub(super) fn vlan_interfaces(ingress: &[String], vlans: &[u16], links: &[LinkInfo]) -> Vec<String> {
    let ingress: BTreeSet<&str> = ingress.iter().map(String::as_str).collect();
    let parent = |link: &LinkInfo| links.iter().find(|other| Some(other.index) == link.parent);
    let is_above_ingress =
        |link: &LinkInfo| parent(link).is_some_and(|parent| ingress.contains(&*parent.name));
    let matches = |link: &&LinkInfo| {
        link.vlan.is_some_and(|vlan| vlans.contains(&vlan))
            && (ingress.is_empty() || ingress.contains(&*link.name) || is_above_ingress(link))
    };
    links.iter().filter(matches).map(|link| link.name.clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(index: u32, name: &str, parent: Option<u32>, vlan: Option<u16>) -> LinkInfo {
        let name = name.into();
        LinkInfo {
            index,
            name,
            up: true,
            carrier: true,
            mtu: 1500,
            kind: None,
            loopback: false,
            parent,
            vlan,
        }
    }

    #[test]
    fn a_vlan_is_found_by_its_id_and_its_lower_interface() {
        let links = [
            link(2, "eth1", None, None),
            link(3, "br0", None, None),
            link(4, "eth1.20", Some(2), Some(20)),
            link(5, "guests", Some(3), Some(20)),
            link(6, "eth1.30", Some(2), Some(30)),
        ];
        let found = |vlans: &[u16], ingress: &[&str]| {
            let ingress: Vec<String> = ingress.iter().map(|name| (*name).to_owned()).collect();
            vlan_interfaces(&ingress, vlans, &links).join(" ")
        };
        assert_eq!(found(&[20], &[]), "eth1.20 guests");
        assert_eq!(found(&[20, 30], &["eth1"]), "eth1.20 eth1.30");
        assert_eq!(found(&[20], &["guests", "eth1.30"]), "guests");
        assert_eq!(found(&[40], &[]), "");
    }
}
