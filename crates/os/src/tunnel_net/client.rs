//! The network configuration of a client.
//!
//! The tunnel's routes are in a table of their own. Policy rules for each IP version lead to it, in this
//! order, each between those of the other instances on the machine ([`identity`](super::identity)):
//! 1. `to NETWORK lookup main suppress_prefixlength LENGTH`: destinations in a kept network
//!    ([`KeptNetworks`], LANs above all) use their route of the main table, if that is specific. So a server
//!    cannot attract the traffic of a LAN into the tunnel, and a link cannot attract other traffic past it.
//! 2. `not fwmark MPVPN lookup TABLE suppress_prefixlength 0`: destinations with a specific route into this
//!    tunnel.
//! 3. `from ADDRESS lookup TABLE`: packets with an address of this tunnel.
//! 4. `not fwmark MPVPN lookup TABLE`: all other packets go into the tunnel, of several that of the instance
//!    with the smallest number.
//!
//! Packets of mpvpn's own instances have its mark and therefore never loop, through this tunnel or another.
//!
//! Routes that users add to a TUN device of a class are copied to the tunnel's table, where the rules find
//! them.
//!
//! Packets to the tunnel's addresses that arrive by another interface are dropped, so that a host on a link
//! cannot find out what the tunnel carries (CVE-2019-14899). The TUN device has host addresses without routes
//! of the kernel. The networks of the addresses are routes of the tunnel's table as well, so that a server
//! cannot claim a link's network as its own.
//!
//! With [`Routes::All`], an IP version in which the server assigned no address is made unreachable, so that
//! it does not leak past the tunnel; applications get an error at once and try the other version. For IPv6
//! this is done only if the machine has IPv6. Below an MTU of 1280 bytes the tunnel carries no IPv6 (RFC
//! 8200, section 5): IPv6 addresses count as not assigned then.

use std::{collections::BTreeSet, net::IpAddr};

use ipnet::IpNet;

use super::{
    AppliedSteps, ClientNetConfig, LINK_BIT, OWN_PACKETS, ReplaceableTable, StaticRoute, default_destination,
    family_of,
    identity::{Layer, is_table_of_instance},
    kept_networks::KeptNetworks,
    prepare_device,
    server::first_address,
};
use crate::{
    error::OsError,
    firewall::{AddressGuard, Rules},
    netlink::{Family, Interface, MAIN_TABLE, Netlink, Route, RouteKind, Rule},
    sysctl,
    undo::{Step, UndoJournal},
};

/// The smallest MTU of a link that carries IPv6, in bytes (RFC 8200, section 5).
pub(super) const MIN_V6_MTU_BYTES: u32 = 1280;

/// How many ignored routes are named in the log. Fewer: the user misses one; more: a log that nobody reads,
/// of a machine that has a routing table of the internet.
const MAX_NAMED_ROUTES: usize = 16;

/// The configuration that the client's machine shall have now: what the server assigned, limited to what the
/// user wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientNetState {
    /// The addresses of the TUN device.
    pub addresses: Vec<IpNet>,
    /// The destinations that are routed into the tunnel.
    pub routes: Routes,
    /// Networks behind this machine, which keep their routes.
    pub behind: Vec<IpNet>,
    /// The MTU of the TUN device, in bytes.
    pub mtu: u32,
}

/// The destinations that are routed into the tunnel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Routes {
    /// All destinations but those in kept networks that have a route.
    All,
    /// These networks, if an address of their IP version is assigned.
    Advertised(Vec<IpNet>),
    /// Only the networks of the assigned addresses.
    None,
}

/// The network configuration of a client's machine.
#[derive(Debug)]
pub struct ClientNet {
    config: ClientNetConfig,
    netlink: Netlink,
    applied: AppliedSteps,
    mtu: Option<u32>,
    /// The configuration that was applied last.
    wanted: Option<ClientNetState>,
    /// The firewall table that guards the addresses of the TUN device, and the addresses for which it was
    /// tried last.
    guard: ReplaceableTable,
    guarded: Vec<IpNet>,
    /// Networks of the tunnel that overlap others, and routes of the main table that are ignored, of which a
    /// warning was logged.
    overlaps: BTreeSet<IpNet>,
    ignored: BTreeSet<IpNet>,
}

/// The machine around the tunnel.
struct Surroundings {
    kept: KeptNetworks,
    /// Destinations that other interfaces reach.
    others: Vec<IpNet>,
    /// Routes of the main table to devices of classes.
    class_routes: Vec<Route>,
    kernel_has_v6: bool,
    machine_has_v6: bool,
}

impl ClientNet {
    /// Prepares the TUN device and brings it up, without addresses or routes.
    pub fn new(config: ClientNetConfig) -> Result<Self, OsError> {
        let mut netlink = Netlink::open()?;
        prepare_device(&config.tun.name);
        if config.has_carrier_of_tunnel {
            for tun in std::iter::once(&config.tun).chain(&config.class_tuns) {
                for family in ["ipv4", "ipv6"] {
                    let key = sysctl::interface_key(family, &tun.name, "ignore_routes_with_linkdown");
                    let _ = sysctl::write(&key, "1");
                }
            }
        }
        netlink.set_up(config.tun.index)?;
        Ok(Self::prepared(config, netlink))
    }

    fn prepared(config: ClientNetConfig, netlink: Netlink) -> Self {
        let (applied, guard) = (AppliedSteps::default(), ReplaceableTable::default());
        let (guarded, overlaps, ignored) = Default::default();
        Self { config, netlink, applied, mtu: None, wanted: None, guard, guarded, overlaps, ignored }
    }

    /// Takes the addresses and routes of the device that an earlier process has left in force.
    pub fn adopt(&mut self, undo: &UndoJournal) {
        self.applied = AppliedSteps::of_devices(undo, &[&self.config.tun]);
    }

    /// Changes the machine from the previous configuration to `wanted`. After an error the previous
    /// addresses, routes and rules are in force; the call can be repeated.
    pub fn apply(&mut self, undo: &mut UndoJournal, wanted: &ClientNetState) -> Result<(), OsError> {
        let around = self.surroundings(wanted)?;
        let steps = self.steps(wanted, &around);
        // The kernel removes IPv6 from a device whose MTU falls below 1280: grow the MTU first, shrink it
        // last.
        if self.mtu.is_none_or(|now| wanted.mtu > now) {
            self.set_mtu(wanted.mtu)?;
        }
        if wanted.addresses.iter().any(|address| matches!(address, IpNet::V6(_))) {
            let key = sysctl::interface_key("ipv6", &self.config.tun.name, "disable_ipv6");
            let _ = sysctl::write(&key, "0");
        }
        self.applied.change_to(undo, steps)?;
        self.guard_addresses(undo, &wanted.addresses);
        self.set_mtu(wanted.mtu)?;
        self.wanted = Some(wanted.clone());
        Ok(())
    }

    /// Applies the last configuration again, after links or routes of the machine have changed.
    pub fn refresh(&mut self, undo: &mut UndoJournal) -> Result<(), OsError> {
        self.wanted.clone().map_or(Ok(()), |wanted| self.apply(undo, &wanted))
    }

    /// The addresses of all interfaces but the tunnel's and those of classes.
    pub fn addresses_of_other_interfaces(&mut self) -> Result<Vec<IpAddr>, OsError> {
        let tuns = std::iter::once(&self.config.tun).chain(&self.config.class_tuns);
        let tuns: Vec<u32> = tuns.map(|tun| tun.index).collect();
        let others = self.netlink.addresses()?.into_iter().filter(|info| !tuns.contains(&info.index));
        Ok(others.map(|info| info.address.addr()).collect())
    }

    /// Reverts all steps; the device stays up with its MTU.
    pub fn clear(&mut self, undo: &mut UndoJournal) -> Result<(), OsError> {
        self.wanted = None;
        self.guarded = Vec::new();
        self.guard.remove(undo);
        self.applied.change_to(undo, Vec::new())
    }

    /// Lets link `name` receive packets whose way back is not over it.
    pub fn loosen_reverse_path_filter(&self, undo: &mut UndoJournal, name: &str) -> Result<(), OsError> {
        super::loosen_reverse_path_filter(undo, name)
    }

    fn set_mtu(&mut self, mtu: u32) -> Result<(), OsError> {
        if self.mtu == Some(mtu) {
            return Ok(());
        }
        self.netlink.set_mtu(self.config.tun.index, mtu)?;
        self.mtu = Some(mtu);
        Ok(())
    }

    /// Drops packets to the tunnel's addresses that arrive by other interfaces. A machine without nftables
    /// has no such rule, and a warning says so.
    fn guard_addresses(&mut self, undo: &mut UndoJournal, addresses: &[IpNet]) {
        if self.guarded == addresses {
            return;
        }
        self.guarded = addresses.to_vec();
        let name = format!("{} addresses", self.config.tun.name);
        let guards = vec![AddressGuard::new(&self.config.tun.name, addresses)];
        if let Err(error) = self.guard.change_to(undo, Rules { name, guards, ..Rules::default() }) {
            tracing::warn!(
                %error,
                "packets to the tunnel's addresses that arrive by links are not dropped: hosts there can find out which \
                 connections the tunnel carries"
            );
        }
    }

    /// Looks at the machine around the tunnel, and warns of routes that it ignores from now on.
    fn surroundings(&mut self, wanted: &ClientNetState) -> Result<Surroundings, OsError> {
        let named: Vec<IpNet> = self.config.keep_routes.iter().chain(&wanted.behind).copied().collect();
        let kept = KeptNetworks::new(&self.netlink.addresses()?, &named);
        let mut routes = self.netlink.routes()?;
        routes.retain(|route| {
            let is_other = route.interface.is_some_and(|index| index != self.config.tun.index);
            // Tables for replies by links repeat routes of the main table.
            let is_copy = is_table_of_instance(route.table) && route.table & LINK_BIT != 0;
            route.kind == RouteKind::Unicast && !route.is_default() && is_other && !is_copy
        });
        let class_routes = routes.extract_if(.., |route| self.class_tun(route).is_some());
        let class_routes = class_routes.filter(|route| route.table == MAIN_TABLE).collect();
        let (others, ignored): (Vec<Route>, Vec<Route>) =
            routes.into_iter().partition(|route| route.table != MAIN_TABLE || kept.keeps(&route.destination));
        self.warn_of_ignored(&wanted.routes, &ignored);
        Ok(Surroundings {
            kept,
            others: others.into_iter().map(|route| route.destination).collect(),
            class_routes,
            kernel_has_v6: sysctl::exists("net/ipv6/conf/all/disable_ipv6"),
            machine_has_v6: sysctl::has_ipv6(),
        })
    }

    /// The device of a class through which the route leads.
    fn class_tun(&self, route: &Route) -> Option<&Interface> {
        self.config.class_tuns.iter().find(|tun| Some(tun.index) == route.interface)
    }

    /// Warns of ignored routes whose packets go into the tunnel, once of each.
    fn warn_of_ignored(&mut self, wanted: &Routes, ignored: &[Route]) {
        let in_tunnel = |network: &IpNet| match wanted {
            Routes::All => true,
            Routes::Advertised(list) => {
                list.iter().any(|route| route.contains(network) || network.contains(route))
            }
            Routes::None => false,
        };
        let mut fresh: Vec<IpNet> = ignored.iter().map(|route| route.destination).collect();
        fresh.retain(|network| in_tunnel(network) && !self.ignored.contains(network));
        fresh.sort_unstable();
        fresh.dedup();
        fresh.truncate(MAX_NAMED_ROUTES.saturating_sub(self.ignored.len()));
        if fresh.is_empty() {
            return;
        }
        let list = fresh.iter().map(|network| format!("\"{network}\"")).collect::<Vec<_>>().join(", ");
        tracing::warn!(
            "routes of the main table to public networks do not count, because a link can make them by DHCP: packets to these go \
             into the tunnel; if they are to keep their routes, write in the configuration: keep-routes = [{list}]"
        );
        self.ignored.extend(fresh);
    }

    /// The destinations to route for the network of an assigned address: the network, or only the server's
    /// address in it if the network overlaps one of `others`.
    fn network_route(&mut self, address: IpNet, others: &[IpNet]) -> IpNet {
        let network = address.trunc();
        let overlapped = others.iter().find(|other| other.contains(&network) || network.contains(*other));
        let Some(overlapped) = overlapped else { return network };
        let server = IpNet::from(first_address(network).addr());
        if self.overlaps.insert(network) {
            tracing::warn!(
                %network, %overlapped,
                "the network of the tunnel overlaps one that this machine reaches over another interface, which keeps its \
                 traffic; only the server's address {server} is routed into the tunnel: change `subnet` at the server"
            );
        }
        server
    }

    /// All steps for `wanted` in the order to apply them: addresses, routes, and the rules last.
    fn steps(&mut self, wanted: &ClientNetState, around: &Surroundings) -> Vec<Step> {
        let is_carried = |address: &IpNet| match address {
            IpNet::V4(_) => true,
            IpNet::V6(_) => around.kernel_has_v6 && wanted.mtu >= MIN_V6_MTU_BYTES,
        };
        let addresses: Vec<IpNet> = wanted.addresses.iter().copied().filter(is_carried).collect();
        let tun = self.config.tun.clone();
        let interface = || tun.clone();
        // Host addresses: the kernel adds neither a route nor a broadcast address for the network, which the
        // server chooses.
        let address_step =
            |address: &IpNet| Step::Address { interface: interface(), address: IpNet::from(address.addr()) };
        let mut steps: Vec<Step> = addresses.iter().map(address_step).collect();
        let has_v6 = around.kernel_has_v6 && wanted.mtu >= MIN_V6_MTU_BYTES;
        let static_routes = self.config.static_routes.iter().filter(|it| it.to.addr().is_ipv4() || has_v6);
        steps.extend(static_routes.map(|StaticRoute { to, metric, table }| {
            let route = Route { metric: *metric, ..Route::through(*to, *table, self.config.tun.index) };
            Step::Route { route, interface: Some(interface()) }
        }));
        let mut rules = Vec::new();
        for family in [Family::V4, Family::V6] {
            let own = addresses.iter().filter(|&&address| family_of(address) == family);
            let assigned = own.clone().next().is_some();
            let mut routes = self.routes(family, assigned, around.machine_has_v6, &wanted.routes);
            // With several tunnels, the network of one must not go where another leads everything.
            for address in own.clone().filter(|address| address.prefix_len() < address.max_prefix_len()) {
                let destination = self.network_route(*address, &around.others);
                let route = Route::through(destination, self.config.table(), self.config.tun.index);
                if !routes.contains(&route) {
                    routes.push(route);
                }
            }
            if !routes.is_empty() {
                let all =
                    self.rules(family, &around.kept).chain(own.map(|address| self.source_rule(*address)));
                rules.extend(all.map(|rule| Step::Rule { rule }));
                let of_family =
                    around.class_routes.iter().filter(|route| family_of(route.destination) == family);
                routes.retain(|route| !of_family.clone().any(|other| other.destination == route.destination));
                let table = self.config.table();
                routes.extend(of_family.map(|route| Route { table, ..route.clone() }));
            }
            steps.extend(routes.into_iter().map(|route| {
                let interface = self.class_tun(&route).cloned().or(route.interface.map(|_| interface()));
                Step::Route { route, interface }
            }));
        }
        steps.extend(rules);
        steps
    }

    fn routes(&self, family: Family, assigned: bool, machine_has_v6: bool, routes: &Routes) -> Vec<Route> {
        let table = self.config.table();
        let through = |destination| Route::through(destination, table, self.config.tun.index);
        match routes {
            Routes::All if assigned => vec![through(default_destination(family))],
            Routes::All if family == Family::V4 || machine_has_v6 => {
                vec![Route::unreachable(default_destination(family), table)]
            }
            Routes::Advertised(list) if assigned => {
                let of_family = list.iter().filter(|&&network| family_of(network) == family);
                of_family.map(|network| through(network.trunc())).collect()
            }
            _ => Vec::new(),
        }
    }

    fn rules(&self, family: Family, kept: &KeptNetworks) -> impl Iterator<Item = Rule> {
        let [specific, all] =
            [Layer::TunnelSpecific, Layer::Everything].map(|layer| self.tunnel_rule(family, layer));
        let specific = Rule { suppress_prefix_length: Some(0), ..specific };
        kept.rules(family, self.config.priority(Layer::MainSpecific)).chain([specific, all])
    }

    /// Packets with this address of the tunnel go into it. The tunnel's own packets have addresses of links.
    fn source_rule(&self, address: IpNet) -> Rule {
        let priority = self.config.priority(Layer::TunnelAddress);
        let source = Some(IpNet::from(address.addr()));
        Rule { source, ..Rule::lookup(family_of(address), priority, self.config.table()) }
    }

    /// Packets but mpvpn's own look up the tunnel's table.
    fn tunnel_rule(&self, family: Family, layer: Layer) -> Rule {
        let mark = Some((OWN_PACKETS.value, OWN_PACKETS.mask));
        let rule = Rule::lookup(family, self.config.priority(layer), self.config.table());
        Rule { mark, invert: true, ..rule }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WITH_V6: bool = true;

    fn net() -> ClientNet {
        let tun = Interface { index: 9, name: "t0".into() };
        ClientNet::prepared(ClientNetConfig::new(tun, 0), Netlink::open().unwrap())
    }

    fn around(others: &[&str], machine_has_v6: bool) -> Surroundings {
        let others = others.iter().map(|text| text.parse().unwrap()).collect();
        let (kept, class_routes) = (KeptNetworks::new(&[], &[]), Vec::new());
        Surroundings { kept, others, class_routes, kernel_has_v6: true, machine_has_v6 }
    }

    const RULES: [&str; 7] = [
        "28528: to 10.0.0.0/8 lookup 254 suppress_prefixlength 7",
        "28528: to 169.254.0.0/16 lookup 254 suppress_prefixlength 15",
        "28528: to 172.16.0.0/12 lookup 254 suppress_prefixlength 11",
        "28528: to 192.168.0.0/16 lookup 254 suppress_prefixlength 15",
        "28528: to 224.0.0.0/4 lookup 254 suppress_prefixlength 3",
        "28656: not fwmark 0x6d70/0xffff lookup 28016 suppress_prefixlength 0",
        "28912: not fwmark 0x6d70/0xffff lookup 28016",
    ];

    fn wanted(addresses: &[&str], routes: Routes) -> ClientNetState {
        ClientNetState {
            addresses: addresses.iter().map(|text| text.parse().unwrap()).collect(),
            routes,
            behind: Vec::new(),
            mtu: 1400,
        }
    }

    fn to_strings(steps: &[Step]) -> Vec<String> {
        let show = |step: &Step| match step {
            Step::Address { address, .. } => address.to_string(),
            Step::Route { route, .. } => route.to_string(),
            Step::Rule { rule } => rule.to_string(),
            other => format!("{other:?}"),
        };
        steps.iter().map(show).collect()
    }

    #[test]
    fn everything_goes_into_the_tunnel_except_its_own_packets_and_lans() {
        let steps = net().steps(&wanted(&["10.0.0.2/24"], Routes::All), &around(&[], !WITH_V6));
        let routes =
            ["10.0.0.2/32", "0.0.0.0/0 table 28016 interface 9", "10.0.0.0/24 table 28016 interface 9"];
        let expected = [&routes, &RULES[..], &["28784: from 10.0.0.2/32 lookup 28016"]].concat();
        assert_eq!(to_strings(&steps), expected);
    }

    #[test]
    fn without_an_address_ipv6_is_unreachable_and_does_not_leak() {
        let steps = net().steps(&wanted(&["10.0.0.2/24"], Routes::All), &around(&[], WITH_V6));
        let text = to_strings(&steps);
        assert!(text.contains(&"Unreachable ::/0 table 28016 metric 4294967295".to_owned()), "{text:#?}");
        let into_tunnel = text.iter().filter(|step| step.starts_with("28912: not fwmark"));
        assert_eq!(into_tunnel.count(), 2, "{text:#?}");
    }

    #[test]
    fn an_mtu_too_small_for_ipv6_counts_as_no_address() {
        let mut small = wanted(&["10.0.0.2/24", "fd00::2/64"], Routes::All);
        small.mtu = 1279;
        let steps = net().steps(&small, &around(&[], WITH_V6));
        let unreachable =
            |step: &Step| matches!(step, Step::Route { route, .. } if route.kind == RouteKind::Unreachable);
        assert_eq!(steps.iter().filter(|step| unreachable(step)).count(), 1);
        assert!(!to_strings(&steps).contains(&"fd00::2/128".to_owned()));
    }

    #[test]
    fn advertised_routes_need_an_address_of_their_family() {
        let list = ["192.168.7.1/24", "2001:db8::/32"].map(|text| text.parse().unwrap()).to_vec();
        let steps = net().steps(&wanted(&["10.0.0.2/32"], Routes::Advertised(list)), &around(&[], WITH_V6));
        let routes = ["10.0.0.2/32", "192.168.7.0/24 table 28016 interface 9"];
        let expected = [&routes, &RULES[..], &["28784: from 10.0.0.2/32 lookup 28016"]].concat();
        assert_eq!(to_strings(&steps), expected);
    }

    #[test]
    fn the_network_of_the_tunnel_is_routed_behind_those_of_links() {
        let one = wanted(&["192.168.1.5/25"], Routes::None);
        let routed = |others: &[&str]| to_strings(&net().steps(&one, &around(others, WITH_V6)));
        let source_rule = "28784: from 192.168.1.5/32 lookup 28016";
        let expected = |route| [&["192.168.1.5/32", route], &RULES[..], &[source_rule]].concat();
        assert_eq!(routed(&["10.0.0.0/8"]), expected("192.168.1.0/25 table 28016 interface 9"));
        for link in ["192.168.1.0/24", "192.168.1.64/26"] {
            assert_eq!(routed(&[link]), expected("192.168.1.1/32 table 28016 interface 9"), "{link}");
        }
    }

    #[test]
    fn without_a_network_and_routes_there_are_no_rules() {
        let steps = net().steps(&wanted(&["128.0.0.2/32"], Routes::None), &around(&[], WITH_V6));
        assert_eq!(to_strings(&steps), ["128.0.0.2/32"]);
    }
}
