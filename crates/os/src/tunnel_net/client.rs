//! The network configuration of a client.
//!
//! The tunnel's routes are in a table of their own. Two policy rules for each IP version lead to it, in this order:
//! 1. `lookup main suppress_prefixlength 0`: destinations with a specific route in the main table (LANs above all) use that
//!    route. So a server cannot attract the traffic of a LAN into the tunnel.
//! 2. `not fwmark MARK lookup TABLE`: all other packets go into the tunnel, except the tunnel's own packets, which have the
//!    mark and therefore never loop.
//!
//! With [`Routes::All`], an IP version in which the server assigned no address is made unreachable, so that it does not
//! leak past the tunnel; applications get an error at once and try the other version. For IPv6 this is done only if the
//! machine has IPv6. Below an MTU of 1280 bytes the tunnel carries no IPv6 (RFC 8200, section 5): IPv6 addresses count as
//! not assigned then.

use ipnet::IpNet;

use super::{AppliedSteps, default_destination, family_of, prepare_device};
use crate::{
    error::OsError,
    netlink::{Family, MAIN_TABLE, Netlink, Route, Rule},
    sysctl,
    undo::{Interface, Step, UndoJournal},
};

/// The smallest MTU of a link that carries IPv6, in bytes (RFC 8200, section 5).
pub(super) const MIN_V6_MTU_BYTES: u32 = 1280;

/// The part of a client's configuration that stays the same while it runs.
#[derive(Clone, Debug)]
pub struct ClientNetConfig {
    /// The TUN device.
    pub tun: Interface,
    /// The firewall mark of the tunnel's own packets.
    pub mark: u32,
    /// The routing table for the tunnel's routes.
    pub table: u32,
    /// The priority of the first policy rule; the second has the next one. Both must be below 32766, that of the main table.
    pub priority: u32,
}

impl ClientNetConfig {
    /// The configuration for the device `tun` with mpvpn's firewall mark, routing table and rule priority, all 0x6d70.
    pub fn new(tun: Interface) -> Self {
        /// "mp" in ASCII: any number that other programs do not use. As a priority it has to be below 32766.
        const MPVPN_ID: u32 = 0x6d70;
        Self { tun, mark: MPVPN_ID, table: MPVPN_ID, priority: MPVPN_ID }
    }
}

/// The configuration that the client's machine shall have now: what the server assigned, limited to what the user wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientNetState {
    /// The addresses of the TUN device.
    pub addresses: Vec<IpNet>,
    /// The destinations that are routed into the tunnel.
    pub routes: Routes,
    /// The MTU of the TUN device, in bytes.
    pub mtu: u32,
}

/// The destinations that are routed into the tunnel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Routes {
    /// All destinations without a more specific route.
    All,
    /// These networks, if an address of their IP version is assigned.
    Advertised(Vec<IpNet>),
    /// Only the networks of the assigned addresses themselves.
    None,
}

/// The network configuration of a client's machine.
#[derive(Debug)]
pub struct ClientNet {
    config: ClientNetConfig,
    netlink: Netlink,
    applied: AppliedSteps,
    mtu: Option<u32>,
}

impl ClientNet {
    /// Prepares the TUN device and brings it up, without addresses or routes.
    pub fn new(config: ClientNetConfig) -> Result<Self, OsError> {
        let mut netlink = Netlink::open()?;
        prepare_device(&config.tun.name);
        netlink.set_up(config.tun.index)?;
        Ok(Self { config, netlink, applied: AppliedSteps::default(), mtu: None })
    }

    /// Changes the machine from the previous configuration to `wanted`. After an error the previous addresses, routes and rules
    /// are in force; the call can be repeated.
    pub fn apply(&mut self, undo: &mut UndoJournal, wanted: &ClientNetState) -> Result<(), OsError> {
        let kernel_has_v6 = sysctl::exists("net/ipv6/conf/all/disable_ipv6");
        let steps = self.steps(wanted, kernel_has_v6, sysctl::has_ipv6());
        // The kernel removes IPv6 from a device whose MTU falls below 1280: grow the MTU first, shrink it last.
        if self.mtu.is_none_or(|now| wanted.mtu > now) {
            self.set_mtu(wanted.mtu)?;
        }
        if wanted.addresses.iter().any(|address| matches!(address, IpNet::V6(_))) {
            let key = sysctl::interface_key("ipv6", &self.config.tun.name, "disable_ipv6");
            let _ = sysctl::write(&key, "0");
        }
        self.applied.change_to(undo, steps)?;
        self.set_mtu(wanted.mtu)
    }

    /// Reverts all steps; the device stays up with its MTU.
    pub fn clear(&mut self, undo: &mut UndoJournal) -> Result<(), OsError> {
        self.applied.change_to(undo, Vec::new())
    }

    /// Sets the reverse path filter of link `name` from strict to loose (RFC 3704, section 2.4). A strict filter drops the
    /// server's replies to the tunnel's own packets: for packets without the mark the route to the server leads into the
    /// tunnel, or over another link.
    pub fn loosen_reverse_path_filter(&self, undo: &mut UndoJournal, name: &str) -> Result<(), OsError> {
        let key = sysctl::interface_key("ipv4", name, "rp_filter");
        let value = |key: &str| sysctl::read(key).ok().and_then(|text| text.parse::<u8>().ok()).unwrap_or(0);
        // The larger of the values for all interfaces and for this one is in force (the kernel's ip-sysctl.rst).
        if value(&key).max(value("net/ipv4/conf/all/rp_filter")) != 1 {
            return Ok(());
        }
        sysctl::set(undo, &key, "2")
    }

    fn set_mtu(&mut self, mtu: u32) -> Result<(), OsError> {
        if self.mtu == Some(mtu) {
            return Ok(());
        }
        self.netlink.set_mtu(self.config.tun.index, mtu)?;
        self.mtu = Some(mtu);
        Ok(())
    }

    /// All steps for `wanted` in the order to apply them: addresses, routes, and the rules last.
    fn steps(&self, wanted: &ClientNetState, kernel_has_v6: bool, machine_has_v6: bool) -> Vec<Step> {
        let is_carried = |address: &IpNet| match address {
            IpNet::V4(_) => true,
            IpNet::V6(_) => kernel_has_v6 && wanted.mtu >= MIN_V6_MTU_BYTES,
        };
        let addresses: Vec<IpNet> = wanted.addresses.iter().copied().filter(is_carried).collect();
        let interface = || self.config.tun.clone();
        let address_step = |&address: &IpNet| Step::Address { interface: interface(), address };
        let mut steps: Vec<Step> = addresses.iter().map(address_step).collect();
        let mut rules = Vec::new();
        for family in [Family::V4, Family::V6] {
            let assigned = addresses.iter().any(|&address| family_of(address) == family);
            let routes = self.routes(family, assigned, machine_has_v6, &wanted.routes);
            if !routes.is_empty() {
                rules.extend(self.rules(family).map(|rule| Step::Rule { rule }));
            }
            steps.extend(routes.into_iter().map(|route| {
                let interface = route.interface.map(|_| interface());
                Step::Route { route, interface }
            }));
        }
        steps.extend(rules);
        steps
    }

    fn routes(&self, family: Family, assigned: bool, machine_has_v6: bool, routes: &Routes) -> Vec<Route> {
        let table = self.config.table;
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

    fn rules(&self, family: Family) -> [Rule; 2] {
        let ClientNetConfig { mark, table, priority, .. } = self.config;
        let mut specific_first = Rule::lookup(family, priority, MAIN_TABLE);
        specific_first.suppress_prefix_length = Some(0);
        let mut then_tunnel = Rule::lookup(family, priority + 1, table);
        then_tunnel.mark = Some((mark, u32::MAX));
        then_tunnel.invert = true;
        [specific_first, then_tunnel]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::RouteKind;

    const KERNEL_HAS_V6: bool = true;
    const MACHINE_HAS_V6: bool = true;

    fn net() -> ClientNet {
        let tun = Interface { index: 9, name: "t0".into() };
        let netlink = Netlink::open().unwrap();
        ClientNet { config: ClientNetConfig::new(tun), netlink, applied: AppliedSteps::default(), mtu: None }
    }

    fn wanted(addresses: &[&str], routes: Routes) -> ClientNetState {
        ClientNetState {
            addresses: addresses.iter().map(|text| text.parse().unwrap()).collect(),
            routes,
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
        let steps = net().steps(&wanted(&["10.0.0.2/24"], Routes::All), KERNEL_HAS_V6, !MACHINE_HAS_V6);
        assert_eq!(
            to_strings(&steps),
            [
                "10.0.0.2/24",
                "0.0.0.0/0 table 28016 interface 9",
                "28016: lookup 254 suppress_prefixlength 0",
                "28017: not fwmark 0x6d70/0xffffffff lookup 28016",
            ]
        );
    }

    #[test]
    fn without_an_address_ipv6_is_unreachable_and_does_not_leak() {
        let steps = net().steps(&wanted(&["10.0.0.2/24"], Routes::All), KERNEL_HAS_V6, MACHINE_HAS_V6);
        let text = to_strings(&steps);
        assert!(text.contains(&"Unreachable ::/0 table 28016 metric 4294967295".to_owned()), "{text:#?}");
        assert_eq!(steps.iter().filter(|step| matches!(step, Step::Rule { .. })).count(), 4);
    }

    #[test]
    fn an_mtu_too_small_for_ipv6_counts_as_no_address() {
        let mut small = wanted(&["10.0.0.2/24", "fd00::2/64"], Routes::All);
        small.mtu = 1279;
        let steps = net().steps(&small, KERNEL_HAS_V6, MACHINE_HAS_V6);
        let unreachable =
            |step: &Step| matches!(step, Step::Route { route, .. } if route.kind == RouteKind::Unreachable);
        assert_eq!(steps.iter().filter(|step| unreachable(step)).count(), 1);
        assert!(!to_strings(&steps).contains(&"fd00::2/64".to_owned()));
    }

    #[test]
    fn advertised_routes_need_an_address_of_their_family() {
        let list = ["192.168.7.1/24", "2001:db8::/32"].map(|text| text.parse().unwrap()).to_vec();
        let steps =
            net().steps(&wanted(&["10.0.0.2/32"], Routes::Advertised(list)), KERNEL_HAS_V6, MACHINE_HAS_V6);
        let text = to_strings(&steps);
        assert_eq!(text[1], "192.168.7.0/24 table 28016 interface 9");
        assert_eq!(text.len(), 4, "{text:#?}");
    }

    #[test]
    fn no_routes_means_no_rules() {
        let steps = net().steps(&wanted(&["10.0.0.2/24"], Routes::None), KERNEL_HAS_V6, MACHINE_HAS_V6);
        assert_eq!(to_strings(&steps), ["10.0.0.2/24"]);
    }
}
