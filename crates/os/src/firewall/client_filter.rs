//! The packet filter for clients of a server: which targets they reach, and which sources reach them.
//!
//! In: the rules of kinds of users as [`Profile`]s, the server's networks, and which profile each session's
//! addresses have. Out: the table `inet mpvpn_<tun>_clients`. Always holds: it judges the address that a
//! packet is sent to, before any destination translation; the first rule of a profile that fits decides, and
//! where none fits, the defaults of [`ClientFilter`] do; rules lead to the server's machine and blocked
//! networks only where they name one address; replies of clients always pass; refusals are ICMP
//! "administratively prohibited". An address that the maps do not have gets the first profile, so most
//! sessions need no change of the table.

use std::{collections::BTreeMap, net::IpAddr};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::{
    Change, Session, Site, apply, forward, list,
    marking::{PROTOCOLS_WITH_PORTS, merged_ranges},
    script::{ANSWERS, REJECT, any_of, chain, hook_chain, protocol_of, quoted, replacement, set},
    table_name,
};
use crate::error::OsError;

/// After connection tracking (-200), before destination translation (`dstnat` of nft(8), -100): rules are
/// about the address that the client uses. It is `mangle` of nft(8).
const PRIORITY: i32 = -150;

/// One rule.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct FilterRule {
    /// Whether packets that fit pass.
    pub allow: bool,
    /// Destinations; all if it is empty.
    pub to: Vec<IpNet>,
    /// Ranges of destination ports, both ends included; all ports and protocols if it is empty.
    pub ports: Vec<(u16, u16)>,
}

/// The rules of one kind of user, in their order.
pub type Profile = Vec<FilterRule>;

/// The filter of one server.
///
/// Where no rule fits, packets of clients reach the server's addresses in the tunnel, and everything else but
/// `blocked` networks and the other addresses of the server's machine.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ClientFilter {
    /// The TUN device.
    pub tun: String,
    /// The server's addresses in the tunnel, with the prefix lengths of the clients' networks.
    pub addresses: Vec<IpNet>,
    /// Whether clients are kept from each other, whatever the rules say.
    pub is_isolated: bool,
    /// Whether packets from other interfaces may open connections to clients.
    pub accepts_inbound: bool,
    /// Networks that packets do not reach, unless a rule names one address of them.
    pub blocked: Vec<IpNet>,
    /// Ports of the machine that lead to clients, which other clients reach there: protocol number, first and
    /// last port.
    #[serde(default)]
    pub forwarded: Vec<(u8, u16, u16)>,
    /// Profiles. The first counts for addresses without an entry in [`SessionProfiles`].
    pub profiles: Vec<Profile>,
}

impl ClientFilter {
    /// Installs the table in place of the one before, in one transaction. No session has a profile of its
    /// own.
    ///
    /// # Errors
    /// If nft is missing or refuses it.
    pub fn install(&self) -> Result<(), OsError> {
        self.install_with(&BTreeMap::new(), &BTreeMap::new())
    }

    /// Removes the table; it is fine if there is none.
    ///
    /// # Errors
    /// If nft is missing or refuses.
    pub fn remove(&self) -> Result<(), OsError> {
        apply(Change::Remove(self.table()))
    }

    fn install_with(
        &self,
        sessions: &BTreeMap<IpAddr, usize>,
        sites: &BTreeMap<IpNet, usize>,
    ) -> Result<(), OsError> {
        let sessions = sessions.iter().map(|(&address, &profile)| (address, profile)).collect();
        let sites = sites.iter().map(|(&network, &profile)| (network, profile)).collect();
        apply(Change::Clients(self.clone(), sessions, sites))
    }

    pub(crate) fn table(&self) -> String {
        format!("{}_clients", table_name(&self.tun))
    }

    pub(super) fn script(&self, sessions: &[Session], sites: &[Site]) -> String {
        // No errors about packets to several hosts (RFC 1122, section 3.2.2).
        let refuse = ["jump unguarded", "fib daddr type { broadcast, multicast } drop", REJECT];
        let mut objects =
            vec![chain("unguarded", self.unguarded_rules()), chain("default", refuse.map(str::to_owned))];
        let no_rules = Profile::new();
        let first = self.profiles.first().unwrap_or(&no_rules);
        for (number, profile) in std::iter::once(first).chain(self.profiles.iter().skip(1)).enumerate() {
            let rules = profile.iter().flat_map(rules_of).chain(["goto default".to_owned()]);
            objects.push(chain(&profile_chain(number), rules));
        }
        for is_v4 in [true, false] {
            let kind = if is_v4 { "ipv4_addr : verdict" } else { "ipv6_addr : verdict" };
            objects.push(set(("map", map_name(is_v4), kind), &elements(sessions, is_v4)));
            let kind = format!("{kind}; flags interval");
            objects.push(set(("map", site_map_name(is_v4), &kind), &site_elements(sites, is_v4)));
        }
        objects.push(chain("from_clients", self.rules_from_clients()));
        let rules = self.prerouting_rules();
        objects.push(hook_chain(("prerouting", "filter", "prerouting"), PRIORITY, "accept", rules));
        replacement(&self.table(), &objects)
    }

    fn prerouting_rules(&self) -> Vec<String> {
        let mut rules = vec![
            format!("iifname {} goto from_clients", quoted(&self.tun)),
            "iifname \"lo\" accept".to_owned(),
        ];
        if !self.accepts_inbound {
            let networks = self.addresses.iter().map(IpNet::trunc);
            rules.extend(
                networks.map(|net| format!("{} ct state != {{ established, related }} drop", to(&net))),
            );
        }
        rules
    }

    fn rules_from_clients(&self) -> Vec<String> {
        let mut rules = ANSWERS.map(str::to_owned).to_vec();
        for protocol in [6, 17] {
            let ports = self.forwarded.iter().filter(|port| port.0 == protocol);
            let ports: Vec<_> = ports.map(|(_, first, last)| (*first, *last)).collect();
            rules.extend(forward::reachable(protocol, &ports));
        }
        if self.is_isolated {
            rules.extend(self.addresses.iter().map(|net| {
                let own = net.addr();
                format!("{} {} daddr != {own} {REJECT}", to(&net.trunc()), protocol_of(net))
            }));
        }
        rules.extend([true, false].into_iter().flat_map(|is_v4| {
            let protocol = if is_v4 { "ip" } else { "ip6" };
            [map_name(is_v4), site_map_name(is_v4)].map(|map| format!("{protocol} saddr vmap @{map}"))
        }));
        rules.push(format!("goto {}", profile_chain(0)));
        rules
    }

    /// Accepts packets to all but blocked networks and the machine.
    fn unguarded_rules(&self) -> Vec<String> {
        let own = self.addresses.iter().map(|net| format!("{} accept", to(&net.addr().into())));
        let blocked = to_any(&self.blocked).into_iter().map(|is_there| format!("{is_there} return"));
        let others = ["fib daddr type { local, anycast, broadcast, multicast } return", "accept"];
        own.chain(blocked).chain(others.map(str::to_owned)).collect()
    }
}

/// The profiles of sessions, in force.
#[derive(Debug)]
pub struct SessionProfiles {
    filter: ClientFilter,
    /// Addresses that have another profile than the first one.
    assigned: BTreeMap<IpAddr, usize>,
    /// The same for networks behind clients.
    sites: BTreeMap<IpNet, usize>,
}

impl SessionProfiles {
    /// Those of a filter that was just installed: all addresses have the first profile.
    pub fn new(filter: ClientFilter) -> Self {
        Self { filter, assigned: BTreeMap::new(), sites: BTreeMap::new() }
    }

    /// Gives addresses their profiles, in one transaction. The later entry for an address counts. Without a
    /// difference nothing is done.
    ///
    /// # Errors
    /// If nft is missing or refuses; then nothing has changed.
    pub fn change(&mut self, wanted: impl IntoIterator<Item = (IpAddr, usize)>) -> Result<(), OsError> {
        let mut differing: BTreeMap<IpAddr, usize> = wanted.into_iter().collect();
        differing.retain(|address, profile| self.profile(*address) != *profile);
        if differing.is_empty() {
            return Ok(());
        }
        let before = differing.keys().filter_map(|address| Some((*address, *self.assigned.get(address)?)));
        let after = differing.iter().filter(|(_, profile)| **profile != 0);
        let after = after.map(|(address, profile)| (*address, *profile));
        apply(Change::Sessions(self.filter.table(), before.collect(), after.collect()))?;
        for (address, profile) in differing {
            match profile {
                0 => self.assigned.remove(&address),
                profile => self.assigned.insert(address, profile),
            };
        }
        Ok(())
    }

    /// Gives networks behind clients their profiles, in one transaction, in place of those before.
    ///
    /// # Errors
    /// If nft is missing or refuses; then nothing has changed.
    pub fn set_sites(&mut self, sites: impl IntoIterator<Item = (IpNet, usize)>) -> Result<(), OsError> {
        let sites = with_others(sites);
        if sites != self.sites {
            let wanted = sites.iter().map(|(&network, &profile)| (network, profile)).collect();
            apply(Change::Sites(self.filter.table(), wanted))?;
            self.sites = sites;
        }
        Ok(())
    }

    /// The filter that is in force.
    pub fn filter(&self) -> &ClientFilter {
        &self.filter
    }

    /// Replaces the filter, in one transaction. `sessions`: the addresses of all sessions with their profiles
    /// among the new ones, `sites`: the networks behind clients; all others have the first.
    ///
    /// # Errors
    /// If nft is missing or refuses the rules; then nothing has changed.
    pub fn replace_rules(
        &mut self,
        filter: ClientFilter,
        sessions: impl IntoIterator<Item = (IpAddr, usize)>,
        sites: impl IntoIterator<Item = (IpNet, usize)>,
    ) -> Result<(), OsError> {
        let (assigned, sites) = (with_others(sessions), with_others(sites));
        filter.install_with(&assigned, &sites)?;
        (self.filter, self.assigned, self.sites) = (filter, assigned, sites);
        Ok(())
    }

    /// Installs the table again if another program has removed it; returns whether it had.
    ///
    /// # Errors
    /// If nft is missing or refuses the table.
    pub fn repair(&self) -> Result<bool, OsError> {
        if list(&self.filter.table())?.is_some() {
            return Ok(false);
        }
        self.filter.install_with(&self.assigned, &self.sites)?;
        Ok(true)
    }

    fn profile(&self, address: IpAddr) -> usize {
        self.assigned.get(&address).copied().unwrap_or(0)
    }
}

/// Those that have another profile than the first one.
fn with_others<T: Ord>(all: impl IntoIterator<Item = (T, usize)>) -> BTreeMap<T, usize> {
    all.into_iter().filter(|(_, profile)| *profile != 0).collect()
}

/// The script that replaces the networks behind clients in the maps of `table`.
pub(super) fn site_change(table: &str, sites: &[Site]) -> String {
    let mut script = String::new();
    for is_v4 in [true, false] {
        let map = site_map_name(is_v4);
        script += &format!("flush map inet {table} {map}\n");
        let elements = site_elements(sites, is_v4);
        if !elements.is_empty() {
            script += &format!("add element inet {table} {map} {}\n", any_of(elements));
        }
    }
    script
}

/// The script that takes sessions out of the maps of `table`, and adds others.
pub(super) fn change(table: &str, before: &[Session], after: &[Session]) -> String {
    let mut script = String::new();
    for is_v4 in [true, false] {
        for (command, sessions) in [("delete", before), ("add", after)] {
            let elements = elements(sessions, is_v4);
            if !elements.is_empty() {
                let map = map_name(is_v4);
                script += &format!("{command} element inet {table} {map} {}\n", any_of(elements));
            }
        }
    }
    script
}

/// The elements of the map of one family.
fn elements(sessions: &[Session], is_v4: bool) -> Vec<String> {
    let of_family = sessions.iter().filter(|(address, _)| address.is_ipv4() == is_v4);
    of_family.map(|(address, profile)| format!("{address} : goto {}", profile_chain(*profile))).collect()
}

/// The elements of the map of networks of one family, without those inside others: they are of the same user,
/// and nft refuses them.
fn site_elements(sites: &[Site], is_v4: bool) -> Vec<String> {
    let mut outer: Vec<&Site> = Vec::new();
    for site in sites.iter().filter(|(net, _)| net.addr().is_ipv4() == is_v4) {
        if !outer.last().is_some_and(|(last, _)| last.contains(&site.0)) {
            outer.push(site);
        }
    }
    outer.into_iter().map(|(net, profile)| format!("{net} : goto {}", profile_chain(*profile))).collect()
}

fn profile_chain(number: usize) -> String {
    format!("profile_{number}")
}

fn map_name(is_v4: bool) -> &'static str {
    if is_v4 { "profiles4" } else { "profiles6" }
}

fn site_map_name(is_v4: bool) -> &'static str {
    if is_v4 { "site_profiles4" } else { "site_profiles6" }
}

/// A rule as rules of nft: one for each family of its destinations.
fn rules_of(rule: &FilterRule) -> Vec<String> {
    let verdict = if rule.allow { "jump unguarded" } else { REJECT };
    let ports = match merged_ranges(&rule.ports) {
        ports if ports.is_empty() => String::new(),
        ports => {
            // In other protocols these bytes are not ports.
            let protocols = any_of(PROTOCOLS_WITH_PORTS);
            format!("meta l4proto {protocols} th dport {} ", any_of(ports))
        }
    };
    if rule.to.is_empty() {
        return vec![format!("{ports}{verdict}")];
    }
    let is_named = |net: &IpNet| rule.allow && net.prefix_len() == net.max_prefix_len();
    let (named, networks): (Vec<_>, Vec<_>) = rule.to.iter().copied().partition(is_named);
    let named = to_any(&named).into_iter().map(|is_there| format!("{is_there} {ports}accept"));
    let networks = to_any(&networks).into_iter().map(|is_there| format!("{is_there} {ports}{verdict}"));
    named.chain(networks).collect()
}

/// Whether a packet is to one of these networks: a condition for each family that they have.
fn to_any(nets: &[IpNet]) -> Vec<String> {
    // nft refuses networks in a set that overlap.
    let (v4, v6): (Vec<IpNet>, Vec<IpNet>) =
        IpNet::aggregate(&nets.to_vec()).into_iter().partition(|net| net.addr().is_ipv4());
    let families = [v4, v6].into_iter().filter(|nets| !nets.is_empty());
    families.map(|nets| format!("{} daddr {}", protocol_of(&nets[0]), any_of(&nets))).collect()
}

fn to(net: &IpNet) -> String {
    format!("{} daddr {}", protocol_of(net), net.trunc())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_is_one_statement_for_each_family_of_its_destinations() {
        let rule = |to: &[&str], ports: &[(u16, u16)]| {
            rules_of(&FilterRule {
                allow: false,
                to: to.iter().map(|net| net.parse().unwrap()).collect(),
                ports: ports.to_vec(),
            })
        };
        let ports =
            |ports: &str| format!("meta l4proto {{ 6, 17, 33, 132, 136 }} th dport {{ {ports} }} {REJECT}");
        assert_eq!(rule(&[], &[]), [REJECT]);
        assert_eq!(rule(&[], &[(25, 25)]), [ports("25")]);
        assert_eq!(
            rule(&["10.0.0.0/8", "10.1.0.0/16", "fd00::/8"], &[]),
            [format!("ip daddr {{ 10.0.0.0/8 }} {REJECT}"), format!("ip6 daddr {{ fd00::/8 }} {REJECT}")]
        );
        let both = rule(&["10.0.0.0/8", "10.1.0.0/16"], &[(1, 2), (2, 9)]);
        assert_eq!(both, [format!("ip daddr {{ 10.0.0.0/8 }} {}", ports("1-9"))]);
        let to = ["10.0.0.0/8", "10.1.0.1/32", "fd00::1/128"].map(|net| net.parse().unwrap());
        let allow = rules_of(&FilterRule { allow: true, to: to.to_vec(), ports: Vec::new() });
        let own = ["ip daddr { 10.1.0.1/32 } accept", "ip6 daddr { fd00::1/128 } accept"];
        assert_eq!(allow, [own[0], own[1], "ip daddr { 10.0.0.0/8 } jump unguarded"]);
    }
}
