//! The client's end.
//!
//! Routes of the tunnel go into a table of their own, and two rules for each family lead there, in
//! this order:
//! 1. `lookup main suppress_prefixlength 0`: whatever the machine knows a specific route to (its own
//!    LANs above all) goes there. So a server cannot draw the traffic of a LAN into the tunnel.
//! 2. `not fwmark MARK lookup TABLE`: everything else goes into the tunnel, except the tunnel's own
//!    packets, which carry the mark and so never loop.
//!
//! With [`Routes::All`], a family in which the server assigned no address is made unreachable instead
//! of leaking beside the tunnel; applications get an error at once and try the other family. This is
//! done for IPv6 only where the machine has IPv6. Below an MTU of 1280 bytes there is no IPv6 in the
//! tunnel (RFC 8200, section 5), and it counts as not assigned.

use ipnet::IpNet;

use super::{InForce, everything, family_of, prepare_device};
use crate::{
    error::OsError,
    netlink::{Family, MAIN_TABLE, Netlink, Route, Rule},
    sysctl,
    undo::{Interface, Step, UndoJournal},
};

/// The smallest MTU of IPv6, in bytes (RFC 8200, section 5).
pub(super) const SMALLEST_V6_MTU: u32 = 1280;

/// What stays the same while a client runs.
#[derive(Clone, Debug)]
pub struct ClientNetConfig {
    /// The TUN device.
    pub tun: Interface,
    /// The firewall mark of the tunnel's own packets.
    pub mark: u32,
    /// The table for the tunnel's routes.
    pub table: u32,
    /// The priority of the first rule; the second has the next one. Both must be below 32766.
    pub priority: u32,
}

impl ClientNetConfig {
    /// A configuration for the device with the mark, table and priority that mpvpn uses: 0x6d70 ("mp").
    pub fn new(tun: Interface) -> Self {
        const MP: u32 = 0x6d70;
        Self { tun, mark: MP, table: MP, priority: MP }
    }
}

/// What the server assigned, and what the user wants of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientNetState {
    /// The addresses of this end.
    pub addresses: Vec<IpNet>,
    /// What goes into the tunnel.
    pub routes: Routes,
    /// Largest packet that the tunnel takes, in bytes.
    pub mtu: u32,
}

/// What goes into the tunnel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Routes {
    /// Everything that has no more specific route.
    All,
    /// These networks, as far as an address of their family is assigned.
    Advertised(Vec<IpNet>),
    /// Nothing but the networks of the addresses themselves.
    None,
}

/// A client's machine.
#[derive(Debug)]
pub struct ClientNet {
    config: ClientNetConfig,
    netlink: Netlink,
    in_force: InForce,
    mtu: Option<u32>,
}

impl ClientNet {
    /// Prepares the device and brings it up; nothing goes into it yet.
    pub fn new(config: ClientNetConfig) -> Result<Self, OsError> {
        let mut netlink = Netlink::open()?;
        prepare_device(&config.tun.name);
        netlink.set_up(config.tun.index)?;
        Ok(Self { config, netlink, in_force: InForce::default(), mtu: None })
    }

    /// Brings the machine to what is wanted now, from whatever was wanted before. After an error
    /// addresses, routes and rules are as they were; trying again is fine.
    pub fn apply(&mut self, undo: &mut UndoJournal, wanted: &ClientNetState) -> Result<(), OsError> {
        let v6_possible = sysctl::exists("net/ipv6/conf/all/disable_ipv6");
        let steps = self.steps(wanted, v6_possible, sysctl::has_ipv6());
        // IPv6 leaves a device whose MTU falls below its minimum: shrink last, grow first.
        if self.mtu.is_none_or(|now| wanted.mtu > now) {
            self.set_mtu(wanted.mtu)?;
        }
        if wanted.addresses.iter().any(|address| matches!(address, IpNet::V6(_))) {
            let key = sysctl::interface("ipv6", &self.config.tun.name, "disable_ipv6");
            let _ = sysctl::write(&key, "0");
        }
        self.in_force.change_to(undo, steps)?;
        self.set_mtu(wanted.mtu)
    }

    /// Takes everything back; the device stays up with its MTU.
    pub fn clear(&mut self, undo: &mut UndoJournal) -> Result<(), OsError> {
        self.in_force.change_to(undo, Vec::new())
    }

    /// Lets replies to the tunnel's own packets in at link `name`. A machine with strict reverse path
    /// checks drops them, because the way to the server leads into the tunnel, or over another link,
    /// for packets without the mark; loose checks are enough (RFC 3704, section 2.4).
    pub fn loosen_reverse_path_filter(&self, undo: &mut UndoJournal, name: &str) -> Result<(), OsError> {
        let key = sysctl::interface("ipv4", name, "rp_filter");
        let value = |key: &str| sysctl::read(key).ok().and_then(|text| text.parse::<u8>().ok()).unwrap_or(0);
        // The larger of both counts (kernel's ip-sysctl.rst).
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

    /// Everything wanted, in the order to make it: addresses, routes, and only then the rules.
    fn steps(&self, wanted: &ClientNetState, v6_possible: bool, v6_in_use: bool) -> Vec<Step> {
        let carries = |address: &IpNet| match address {
            IpNet::V4(_) => true,
            IpNet::V6(_) => v6_possible && wanted.mtu >= SMALLEST_V6_MTU,
        };
        let addresses: Vec<IpNet> = wanted.addresses.iter().copied().filter(carries).collect();
        let interface = || self.config.tun.clone();
        let address_step = |&address: &IpNet| Step::Address { interface: interface(), address };
        let mut steps: Vec<Step> = addresses.iter().map(address_step).collect();
        let mut rules = Vec::new();
        for family in [Family::V4, Family::V6] {
            let assigned = addresses.iter().any(|&address| family_of(address) == family);
            let routes = self.routes(family, assigned, v6_in_use, &wanted.routes);
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

    fn routes(&self, family: Family, assigned: bool, v6_in_use: bool, routes: &Routes) -> Vec<Route> {
        let table = self.config.table;
        let through = |destination| Route::through(destination, table, self.config.tun.index);
        match routes {
            Routes::All if assigned => vec![through(everything(family))],
            Routes::All if family == Family::V4 || v6_in_use => {
                vec![Route::unreachable(everything(family), table)]
            }
            Routes::Advertised(list) if assigned => {
                let mine = list.iter().filter(|&&network| family_of(network) == family);
                mine.map(|network| through(network.trunc())).collect()
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

    const V6_POSSIBLE: bool = true;
    const V6_IN_USE: bool = true;

    fn net() -> ClientNet {
        let tun = Interface { index: 9, name: "t0".into() };
        let netlink = Netlink::open().unwrap();
        ClientNet { config: ClientNetConfig::new(tun), netlink, in_force: InForce::default(), mtu: None }
    }

    fn wanted(addresses: &[&str], routes: Routes) -> ClientNetState {
        ClientNetState {
            addresses: addresses.iter().map(|text| text.parse().unwrap()).collect(),
            routes,
            mtu: 1400,
        }
    }

    fn shown(steps: &[Step]) -> Vec<String> {
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
        let steps = net().steps(&wanted(&["10.0.0.2/24"], Routes::All), V6_POSSIBLE, !V6_IN_USE);
        assert_eq!(
            shown(&steps),
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
        let steps = net().steps(&wanted(&["10.0.0.2/24"], Routes::All), V6_POSSIBLE, V6_IN_USE);
        let text = shown(&steps);
        assert!(text.contains(&"Unreachable ::/0 table 28016 metric 4294967295".to_owned()), "{text:#?}");
        assert_eq!(steps.iter().filter(|step| matches!(step, Step::Rule { .. })).count(), 4);
    }

    #[test]
    fn an_mtu_too_small_for_ipv6_counts_as_no_address() {
        let mut small = wanted(&["10.0.0.2/24", "fd00::2/64"], Routes::All);
        small.mtu = 1279;
        let steps = net().steps(&small, V6_POSSIBLE, V6_IN_USE);
        let unreachable =
            |step: &Step| matches!(step, Step::Route { route, .. } if route.kind == RouteKind::Unreachable);
        assert_eq!(steps.iter().filter(|step| unreachable(step)).count(), 1);
        assert!(!shown(&steps).contains(&"fd00::2/64".to_owned()));
    }

    #[test]
    fn advertised_routes_need_an_address_of_their_family() {
        let list = ["192.168.7.1/24", "2001:db8::/32"].map(|text| text.parse().unwrap()).to_vec();
        let steps = net().steps(&wanted(&["10.0.0.2/32"], Routes::Advertised(list)), V6_POSSIBLE, V6_IN_USE);
        let text = shown(&steps);
        assert_eq!(text[1], "192.168.7.0/24 table 28016 interface 9");
        assert_eq!(text.len(), 4, "{text:#?}");
    }

    #[test]
    fn no_routes_means_no_rules() {
        let steps = net().steps(&wanted(&["10.0.0.2/24"], Routes::None), V6_POSSIBLE, V6_IN_USE);
        assert_eq!(shown(&steps), ["10.0.0.2/24"]);
    }
}
