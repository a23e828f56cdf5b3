//! The TUN devices of classes at a client, and what goes there.
//!
//! Each device has a table with a default route to it, which is asked
//! 1. for what is bound to the device, or to an address of its own;
//! 2. for packets with its bits in the firewall mark, unless the main table knows a specific way for them. nftables
//!    give these bits to the packets that are to be steered there, as [`ClassSteering`] says.
//!
//! Routes that people make to the device lead there as well. Whatever leaves by it gets its address, as the server takes
//! packets from no others.

use std::collections::BTreeSet;

use ipnet::IpNet;

use super::{
    ClientNetConfig, Families, InForce, client::SMALLEST_V6_MTU, enable_forwarding, everything, family_of,
    prepare_device,
};
use crate::{
    error::OsError,
    firewall::{Exit, MarkBits, MarkRule, Masquerade, Origin, PacketMatch, Rules},
    netlink::{Family, LinkInfo, MAIN_TABLE, Netlink, Route, Rule},
    sysctl,
    undo::{Interface, Step, UndoJournal},
};

/// The bits of the firewall mark that name a device.
const MASK: u32 = 0x0f00_0000;

/// The TUN device of a class.
#[derive(Clone, Debug)]
pub struct ClassTun {
    /// The device.
    pub interface: Interface,
    /// Tells it from others, 0 to 14.
    pub number: u8,
}

/// PacketMatch that go into the device of a class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClassSteering {
    /// The number of the device.
    pub number: u8,
    /// What is true of them.
    pub packets: PacketMatch,
    /// VLANs, by the interfaces of which they come in; any if it is empty. Where [`PacketMatch::ingress`] is not empty, such
    /// an interface is one of these, or stands on one.
    pub vlans: Vec<u16>,
}

/// The addresses of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceAddresses {
    /// Which.
    pub addresses: Vec<IpNet>,
    /// Whether no other device has them.
    pub own: bool,
}

/// The devices of all classes.
#[derive(Debug)]
pub struct ClassNet {
    client: ClientNetConfig,
    tuns: Vec<ClassTun>,
    steering: Vec<ClassSteering>,
    netlink: Netlink,
    in_force: InForce,
    /// What was said last: the addresses of each device, and the MTU (bytes).
    wanted: Option<(Vec<DeviceAddresses>, u32)>,
    /// The table of the firewall that is in force.
    firewall: InForce,
}

impl ClassNet {
    /// Prepares the devices and brings them up; nothing goes into them yet.
    pub fn new(
        client: ClientNetConfig,
        tuns: Vec<ClassTun>,
        steering: Vec<ClassSteering>,
    ) -> Result<Self, OsError> {
        let mut netlink = Netlink::open()?;
        for ClassTun { interface, .. } in &tuns {
            prepare_device(&interface.name);
            // The way back to who answers leads into the main device; the larger of both counts (kernel's ip-sysctl.rst).
            if sysctl::read("net/ipv4/conf/all/rp_filter").is_ok_and(|value| value == "1") {
                let _ = sysctl::write(&sysctl::interface("ipv4", &interface.name, "rp_filter"), "2");
            }
            netlink.set_up(interface.index)?;
        }
        let (in_force, firewall) = Default::default();
        Ok(Self { client, tuns, steering, netlink, in_force, wanted: None, firewall })
    }

    /// Lets the machine pass packets on, where packets of others are to be steered.
    pub fn enable_forwarding(&mut self, undo: &mut UndoJournal) -> Result<(), OsError> {
        let others =
            |steering: &ClassSteering| !(steering.packets.ingress.is_empty() && steering.vlans.is_empty());
        if !self.steering.iter().any(others) {
            return Ok(());
        }
        enable_forwarding(undo, &mut self.netlink, Families { v4: true, v6: sysctl::has_ipv6() })
    }

    /// Brings the machine to what is wanted now: the addresses of each device, in the order of the devices, and the MTU
    /// (bytes).
    pub fn apply(
        &mut self,
        undo: &mut UndoJournal,
        wanted: Vec<DeviceAddresses>,
        mtu: u32,
    ) -> Result<(), OsError> {
        if self.tuns.is_empty() || self.wanted.as_ref().is_some_and(|last| last.0 == wanted && last.1 == mtu)
        {
            return Ok(());
        }
        let v6_possible = sysctl::exists("net/ipv6/conf/all/disable_ipv6") && mtu >= SMALLEST_V6_MTU;
        let carries = |address: &&IpNet| family_of(**address) == Family::V4 || v6_possible;
        let grows = self.wanted.as_ref().is_none_or(|last| mtu > last.1);
        // IPv6 leaves a device whose MTU falls below its minimum: shrink last, grow first.
        if grows {
            self.set_mtu(mtu)?;
        }
        let mut steps = Vec::new();
        for (tun, given) in self.tuns.iter().zip(&wanted) {
            let addresses: Vec<IpNet> = given.addresses.iter().filter(carries).copied().collect();
            if addresses.iter().any(|address| family_of(*address) == Family::V6) {
                let _ = sysctl::write(&sysctl::interface("ipv6", &tun.interface.name, "disable_ipv6"), "0");
            }
            steps.extend(self.steps(tun, &addresses, given.own));
        }
        self.in_force.change_to(undo, steps)?;
        if !grows {
            self.set_mtu(mtu)?;
        }
        self.wanted = Some((wanted, mtu));
        self.update_vlan_interfaces(undo)
    }

    /// Finds the interfaces of VLANs anew.
    pub fn update_vlan_interfaces(&mut self, undo: &mut UndoJournal) -> Result<(), OsError> {
        if self.wanted.is_none() {
            return Ok(());
        }
        let links = match self.steering.iter().any(|steering| !steering.vlans.is_empty()) {
            true => self.netlink.links()?,
            false => Vec::new(),
        };
        let steps = vec![Step::Firewall { rules: self.rules(&links) }];
        if self.firewall.0 == steps {
            return Ok(());
        }
        // Both have the same name: what takes the old one back would take the new one.
        self.firewall.change_to(undo, Vec::new())?;
        self.firewall.change_to(undo, steps)
    }

    fn set_mtu(&mut self, mtu: u32) -> Result<(), OsError> {
        self.tuns.iter().try_for_each(|tun| self.netlink.set_mtu(tun.interface.index, mtu))
    }

    /// Everything for one device, in the order to make it.
    fn steps(&self, tun: &ClassTun, addresses: &[IpNet], own: bool) -> Vec<Step> {
        let interface = || tun.interface.clone();
        let mut steps: Vec<Step> =
            addresses.iter().map(|&address| Step::Address { interface: interface(), address }).collect();
        let table = self.client.table + 1 + u32::from(tun.number);
        // Before the rules of the client, which lead into its own device.
        let [specific, first] = [self.client.priority - 2, self.client.priority - 1];
        let mark = (bits(tun.number).value, MASK);
        let is_steered = self.steering.iter().any(|steering| steering.number == tun.number);
        for family in [Family::V4, Family::V6] {
            let mut of_family = addresses.iter().filter(|address| family_of(**address) == family).peekable();
            if of_family.peek().is_none() {
                continue;
            }
            let route = Route::through(everything(family), table, tun.interface.index);
            steps.push(Step::Route { route, interface: Some(interface()) });
            let lookup = Rule::lookup(family, first, table);
            let bound = Rule { output: Some(tun.interface.name.clone()), ..lookup.clone() };
            steps.push(Step::Rule { rule: bound });
            steps.extend(of_family.filter(|_| own).map(|address| {
                let source = Some(IpNet::from(address.addr()));
                Step::Rule { rule: Rule { source, ..lookup.clone() } }
            }));
            if is_steered {
                let known = Rule {
                    mark: Some(mark),
                    suppress_prefix_length: Some(0),
                    ..Rule::lookup(family, specific, MAIN_TABLE)
                };
                let marked = Rule { mark: Some(mark), ..lookup };
                steps.extend([known, marked].map(|rule| Step::Rule { rule }));
            }
        }
        steps
    }

    fn rules(&self, links: &[LinkInfo]) -> Rules {
        let masquerade = self.tuns.iter().map(|tun| Masquerade {
            from: Origin::Anywhere,
            exit: Exit::Through(tun.interface.name.clone()),
        });
        let mark_rules = self.steering.iter().filter_map(|steering| {
            let packets = match steering.vlans.is_empty() {
                true => steering.packets.clone(),
                false => PacketMatch { ingress: interfaces_of(steering, links), ..steering.packets.clone() },
            };
            // Without the interface of such a VLAN nothing fits; the empty list would fit everything.
            let can_be = steering.vlans.is_empty() || !packets.ingress.is_empty();
            can_be.then(|| MarkRule { packets, set: bits(steering.number) })
        });
        Rules {
            name: format!("{} classes", self.client.tun.name),
            masquerade: masquerade.collect(),
            mark_rules: mark_rules.collect(),
            exempt_mark: Some(self.client.mark),
        }
    }
}

fn bits(number: u8) -> MarkBits {
    MarkBits { value: (u32::from(number) + 1) << MASK.trailing_zeros() & MASK, mask: MASK }
}

/// The interfaces by which packets of such VLANs come in.
fn interfaces_of(steering: &ClassSteering, links: &[LinkInfo]) -> Vec<String> {
    let ingress: BTreeSet<&str> = steering.packets.ingress.iter().map(String::as_str).collect();
    let parent = |link: &LinkInfo| links.iter().find(|other| Some(other.index) == link.parent);
    let stands_there = |link: &LinkInfo| parent(link).is_some_and(|parent| ingress.contains(&*parent.name));
    let fits = |link: &&LinkInfo| {
        link.vlan.is_some_and(|vlan| steering.vlans.contains(&vlan))
            && (ingress.is_empty() || ingress.contains(&*link.name) || stands_there(link))
    };
    links.iter().filter(fits).map(|link| link.name.clone()).collect()
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
    fn a_vlan_is_found_by_its_number_and_the_interface_that_it_stands_on() {
        let links = [
            link(2, "eth1", None, None),
            link(3, "br0", None, None),
            link(4, "eth1.20", Some(2), Some(20)),
            link(5, "guests", Some(3), Some(20)),
            link(6, "eth1.30", Some(2), Some(30)),
        ];
        let found = |vlans: &[u16], ingress: &[&str]| {
            let ingress = ingress.iter().map(|name| (*name).to_owned()).collect();
            let packets = PacketMatch { ingress, ..PacketMatch::default() };
            interfaces_of(&ClassSteering { number: 1, packets, vlans: vlans.into() }, &links).join(" ")
        };
        assert_eq!(found(&[20], &[]), "eth1.20 guests");
        assert_eq!(found(&[20, 30], &["eth1"]), "eth1.20 eth1.30");
        assert_eq!(found(&[20], &["guests", "eth1.30"]), "guests");
        assert_eq!(found(&[40], &[]), "");
    }

    #[test]
    fn every_device_has_bits_of_its_own_which_are_none_of_the_tunnels_mark() {
        let client = ClientNetConfig::new(Interface { index: 1, name: "t0".into() });
        let all: BTreeSet<u32> = (0..15).map(|number| bits(number).value).collect();
        assert_eq!(all.len(), 15);
        assert!(all.iter().all(|value| value & MASK == *value && *value != 0));
        assert_eq!(client.mark & MASK, 0);
    }
}
