//! Replies to connections that came in over a link leave by that link, whatever is routed into the tunnel.
//!
//! In: the links, which are the interfaces with a default route. Out: a table of nftables, and a routing
//! table with a policy rule for each link. Always holds: a connection keeps its link as long as the kernel
//! tracks it, whichever instances end meanwhile; only bits 16 to 23 of connection marks change, and only
//! where they are 0; packets that have a mark keep it.
//!
//! 1. The first packet of a connection that comes in by a link gives the connection mark the number of the
//!    link: packets of TCP with SYN alone, because others may belong to older connections that began here.
//! 2. Later packets of this machine and of hosts behind it, as with forwarded ports, get the mark of that
//!    link.
//! 3. The policy rule of this mark looks up the link's routing table: its routes of the main table, and its
//!    default route.
//!
//! The kernel may not track connections that are older than the table. TCP connections of this machine
//! with a local port that it listens at are read from `/proc` and marked by their addresses and ports;
//! forwarded ones if destination NAT was applied to them.

use std::collections::BTreeMap;

use super::{
    AppliedSteps, ClientNetConfig, family_of,
    identity::{Layer, is_table_of_instance, link_mark},
    loosen_reverse_path_filter, tcp_sockets,
};
use crate::{
    error::OsError,
    firewall::{self, Change, Rules},
    netlink::{Family, Interface, LinkInfo, MAIN_TABLE, Netlink, Route, RouteKind, Rule},
    undo::{LINK_NUMBERS, Step, UndoJournal},
};

/// Older connections that are marked, at most. Each takes some 200 bytes in the kernel; those beyond are cut
/// as they were without this table. A server that is a client at the same time has some ten thousand.
const MAX_OLDER_CONNECTIONS: usize = 32_768;

/// A link that has a routing table of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkTable {
    /// The link.
    pub name: String,
    /// Its number of [`LINK_NUMBERS`].
    pub number: u8,
    /// Whether it has a default route of IPv4, and of IPv6.
    pub leads: [bool; 2],
}

/// The links of a machine, prepared for replies.
#[derive(Debug)]
pub struct InboundNet {
    config: ClientNetConfig,
    netlink: Netlink,
    applied: AppliedSteps,
    /// The links that the table is for, with their numbers; some may be gone.
    installed: Option<BTreeMap<String, u8>>,
    /// The best first.
    links: Vec<LinkTable>,
}

impl InboundNet {
    /// Changes nothing yet.
    ///
    /// # Errors
    /// If the kernel cannot be asked.
    pub fn new(config: ClientNetConfig) -> Result<Self, OsError> {
        let (applied, installed, links) = Default::default();
        Ok(Self { config, netlink: Netlink::open()?, applied, installed, links })
    }

    /// The links with a routing table, by the metrics of their default routes, the smallest first.
    pub fn links(&self) -> &[LinkTable] {
        &self.links
    }

    /// Finds the links, and their routes, again. `tunnels` are devices that are no links.
    ///
    /// # Errors
    /// If nft or the kernel refuses; what was there before stays, as far as it was not changed already.
    pub fn update(&mut self, undo: &mut UndoJournal, tunnels: &[&str]) -> Result<(), OsError> {
        let names = self.netlink.default_route_interfaces(tunnels)?;
        let links: Vec<LinkInfo> =
            self.netlink.links()?.into_iter().filter(|link| names.contains(&link.name)).collect();
        let mut numbers = BTreeMap::new();
        for link in &links {
            numbers.insert(link.name.clone(), undo.shared_number(&LINK_NUMBERS, &link.name)?);
            loosen_reverse_path_filter(undo, &link.name)?;
        }
        let routes = self.netlink.routes()?;
        self.forget_vanished_routes(undo, &routes);
        let steps = links.iter().flat_map(|link| self.steps(link, numbers[&link.name], &routes)).collect();
        self.applied.change_to(undo, steps)?;
        let leads = |name: &String, family: Family| {
            let index = links.iter().find(|link| link.name == *name).map(|link| link.index);
            let is_way = |route: &Route| route.is_default() && route.kind == RouteKind::Unicast;
            routes.iter().any(|it| {
                it.interface == index
                    && is_way(it)
                    && family_of(it.destination) == family
                    && !is_table_of_instance(it.table)
            })
        };
        let of_name = |name: &String| {
            let leads = [Family::V4, Family::V6].map(|family| leads(name, family));
            Some(LinkTable { name: name.clone(), number: *numbers.get(name)?, leads })
        };
        self.links = names.iter().filter_map(of_name).collect();
        // Rules for a link that is gone match nothing, and stay. To replace the table takes 50 ms, in which
        // the caller moves no packet, just when other links have to carry those of this one.
        let known = self.installed.as_ref();
        let is_known = |(name, number)| known.is_some_and(|known| known.get(name) == Some(number));
        if known.is_none() || !numbers.iter().all(is_known) {
            self.install(undo, &numbers)?;
            self.installed = Some(numbers);
        }
        Ok(())
    }

    /// Routes vanish with the address or carrier of their link, and have to be added again when it is back.
    fn forget_vanished_routes(&mut self, undo: &mut UndoJournal, routes: &[Route]) {
        let is_there = |wanted: &Route| {
            routes.iter().any(|route| {
                (route.table, route.destination, route.interface, route.gateway)
                    == (wanted.table, wanted.destination, wanted.interface, wanted.gateway)
            })
        };
        let is_gone = |step: &mut Step| matches!(step, Step::Route { route, .. } if !is_there(route));
        let gone: Vec<Step> = self.applied.0.extract_if(.., is_gone).collect();
        super::log_errors(undo.revert(&gone));
    }

    /// The routes of a link, connected ones first, because gateways are reached by them; and the rules.
    fn steps(&self, link: &LinkInfo, number: u8, routes: &[Route]) -> Vec<Step> {
        let table = self.config.link_table(number);
        let interface = Interface { index: link.index, name: link.name.clone() };
        let is_of_link =
            |route: &&Route| route.interface == Some(link.index) && route.kind == RouteKind::Unicast;
        let mut copied: Vec<&Route> = routes
            .iter()
            .filter(is_of_link)
            // A link may have its default route in a table of its own.
            .filter(|route| {
                route.table == MAIN_TABLE || route.is_default() && !is_table_of_instance(route.table)
            })
            .collect();
        copied.sort_by_key(|route| (route.gateway.is_some(), route.table != MAIN_TABLE, route.metric));
        let mut steps: Vec<Step> = Vec::new();
        let mut destinations = Vec::new();
        for route in copied {
            // The best route to each destination.
            if !destinations.contains(&route.destination) {
                destinations.push(route.destination);
                let route = Route { table, metric: None, ..route.clone() };
                steps.push(Step::Route { route, interface: Some(interface.clone()) });
            }
        }
        let mark = link_mark(number);
        for family in [Family::V4, Family::V6] {
            if destinations.iter().any(|destination| family_of(*destination) == family) {
                let rule = Rule::lookup(family, self.config.priority(Layer::Inbound), table);
                steps.push(Step::Rule { rule: Rule { mark: Some((mark.value, mark.mask)), ..rule } });
            }
        }
        steps
    }

    /// Replaces the table of nftables, then adds the older connections: those that begin in between are
    /// marked by the rules.
    fn install(&self, undo: &mut UndoJournal, links: &BTreeMap<String, u8>) -> Result<(), OsError> {
        let rules = Rules { name: format!("{} inbound", self.config.tun.name), ..Rules::default() };
        let table = firewall::table_name(&rules.name);
        if self.installed.is_none() {
            undo.record(Step::Firewall { rules })?;
        }
        firewall::apply(Change::Inbound(table.clone(), links.clone()))?;
        let addresses = self.netlink_addresses(links)?;
        let older = tcp_sockets::inbound_connections();
        let of_links = older.into_iter().filter_map(|it| Some((*addresses.get(&it.local.ip())?, it)));
        let mut older: Vec<(u8, tcp_sockets::Connection)> = of_links.collect();
        if older.len() > MAX_OLDER_CONNECTIONS {
            tracing::warn!(
                connections = older.len(),
                kept = MAX_OLDER_CONNECTIONS,
                "some connections that came in before the client started may break"
            );
            older.truncate(MAX_OLDER_CONNECTIONS);
        }
        if older.is_empty() {
            return Ok(());
        }
        firewall::apply(Change::InboundConnections(table, older))
    }

    /// The addresses of the links, with the numbers of these.
    fn netlink_addresses(
        &self,
        links: &BTreeMap<String, u8>,
    ) -> Result<BTreeMap<std::net::IpAddr, u8>, OsError> {
        let mut netlink = Netlink::open()?;
        let names: BTreeMap<u32, String> =
            netlink.links()?.into_iter().map(|link| (link.index, link.name)).collect();
        let number = |index| links.get(names.get(&index)?).copied();
        let addresses = netlink.addresses()?;
        Ok(addresses.iter().filter_map(|info| Some((info.address.addr(), number(info.index)?))).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(index: u32, name: &str) -> LinkInfo {
        LinkInfo {
            index,
            name: name.into(),
            up: true,
            carrier: true,
            mtu: 1500,
            kind: None,
            loopback: false,
            parent: None,
            vlan: None,
        }
    }

    #[test]
    fn a_link_has_a_table_with_its_best_routes_only() {
        let route = |destination: &str, table, metric, interface, gateway: Option<&str>| Route {
            gateway: gateway.map(|ip| ip.parse().unwrap()),
            metric: Some(metric),
            ..Route::through(destination.parse().unwrap(), table, interface)
        };
        let routes = [
            route("0.0.0.0/0", MAIN_TABLE, 200, 2, Some("192.0.2.9")),
            route("0.0.0.0/0", MAIN_TABLE, 100, 2, Some("192.0.2.1")),
            route("192.0.2.0/24", MAIN_TABLE, 0, 2, None),
            route("198.51.100.0/24", MAIN_TABLE, 0, 3, None),
            route("0.0.0.0/0", 7, 0, 3, Some("198.51.100.1")),
            route("0.0.0.0/0", 28_016, 0, 2, None),
            route("203.0.113.0/24", 7, 0, 2, None),
        ];
        let config = ClientNetConfig::new(Interface { index: 9, name: "t0".into() }, 1);
        let net = InboundNet::new(config).unwrap();
        let shown = |index, name: &str, number| {
            let steps = net.steps(&link(index, name), number, &routes);
            let show = |step: &Step| match step {
                Step::Route { route, .. } => route.to_string(),
                Step::Rule { rule } => rule.to_string(),
                other => format!("{other:?}"),
            };
            steps.iter().map(show).collect::<Vec<_>>()
        };
        let table = 0x0180_6d70;
        assert_eq!(
            shown(2, "eth0", 0x80),
            [
                format!("192.0.2.0/24 table {table} interface 2"),
                format!("0.0.0.0/0 table {table} interface 2 via 192.0.2.1"),
                format!("28017: fwmark 0x806d70/0xffffff lookup {table}"),
            ]
        );
        assert!(
            shown(3, "eth1", 0x81)[1].ends_with("via 198.51.100.1"),
            "its default route is in another table"
        );
    }
}
