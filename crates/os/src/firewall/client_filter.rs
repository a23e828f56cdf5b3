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
use serde_json::{Value, json};

use super::{
    Change, Session, apply,
    json::{
        ICMP, ICMPV6, accept, add_table, any_of, chain, ct, drop_silently, end_chain, equal, goto,
        hook_chain, jump, meta, network, not_equal, payload, reject, remove_table, verdict_map,
    },
    list,
    marking::{PROTOCOLS_WITH_PORTS, merged_ranges},
    table_name,
};
use crate::error::OsError;

/// After connection tracking (-200), before destination translation (`dstnat` of nft(8), -100): rules are
/// about the address that the client uses. It is `mangle` of nft(8).
const PRIORITY: i32 = -150;

/// The chain that accepts packets to all but the server's machine and blocked networks.
const UNGUARDED_CHAIN: &str = "unguarded";

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
        self.install_with(&BTreeMap::new())
    }

    /// Removes the table; it is fine if there is none.
    ///
    /// # Errors
    /// If nft is missing or refuses.
    pub fn remove(&self) -> Result<(), OsError> {
        apply(Change::Remove(self.table()))
    }

    fn install_with(&self, sessions: &BTreeMap<IpAddr, usize>) -> Result<(), OsError> {
        apply(Change::Clients(self.clone(), sessions.iter().map(|(&address, &it)| (address, it)).collect()))
    }

    pub(super) fn table(&self) -> String {
        format!("{}_clients", table_name(&self.tun))
    }

    pub(super) fn transaction(&self, sessions: &[Session]) -> Value {
        let table = self.table();
        let mut commands = remove_table(&table).to_vec();
        commands.push(add_table(&table));
        commands.extend(chain(&table, UNGUARDED_CHAIN, &self.unguarded_rules()));
        // No errors about packets to several hosts (RFC 1122, section 3.2.2).
        let refuse = [
            vec![jump(UNGUARDED_CHAIN)],
            vec![is_one_of(&["broadcast", "multicast"]), drop_silently()],
            vec![reject()],
        ];
        commands.extend(chain(&table, "default", &refuse));
        let no_rules = Profile::new();
        let first = self.profiles.first().unwrap_or(&no_rules);
        for (number, profile) in std::iter::once(first).chain(self.profiles.iter().skip(1)).enumerate() {
            let mut rules: Vec<_> = profile.iter().flat_map(statements).collect();
            rules.push(vec![goto("default")]);
            commands.extend(chain(&table, &profile_chain(number), &rules));
        }
        for is_v4 in [true, false] {
            let of_family = sessions.iter().filter(|(address, _)| address.is_ipv4() == is_v4);
            let elements: Vec<Value> =
                of_family.map(|(address, profile)| element(*address, *profile)).collect();
            let kind = if is_v4 { "ipv4_addr" } else { "ipv6_addr" };
            commands.push(verdict_map(&table, map_name(is_v4), kind, &elements));
        }
        commands.extend(chain(&table, "from_clients", &self.rules_from_clients()));
        let rules = self.prerouting_rules();
        commands.extend(hook_chain((&table, "prerouting", "filter"), PRIORITY, "accept", &rules));
        json!({"nftables": commands})
    }

    fn prerouting_rules(&self) -> Vec<Vec<Value>> {
        let mut rules = vec![
            vec![equal(meta("iifname"), json!(self.tun)), goto("from_clients")],
            vec![equal(meta("iifname"), json!("lo")), accept()],
        ];
        if !self.accepts_inbound {
            let is_known = json!(["established", "related"]);
            rules.extend(self.addresses.iter().map(|address| {
                vec![to(&address.trunc()), not_equal(ct("state"), any_of(is_known.clone())), drop_silently()]
            }));
        }
        rules
    }

    fn rules_from_clients(&self) -> Vec<Vec<Value>> {
        let look_up = |is_v4: bool| {
            let protocol = if is_v4 { "ip" } else { "ip6" };
            let map = format!("@{}", map_name(is_v4));
            vec![json!({"vmap": {"key": payload(protocol, "saddr"), "data": map}})]
        };
        let mut rules = vec![
            // Answers of clients. Packets of connections that clients opened are judged one by one.
            vec![equal(ct("state"), json!("established")), equal(ct("direction"), json!("reply")), accept()],
            vec![
                equal(ct("state"), json!("related")),
                equal(meta("l4proto"), any_of(json!([ICMP, ICMPV6]))),
                accept(),
            ],
        ];
        if self.is_isolated {
            rules.extend(self.addresses.iter().map(|address| {
                let is_other = not_equal(payload(protocol_of(address), "daddr"), json!(address.addr()));
                vec![to(&address.trunc()), is_other, reject()]
            }));
        }
        rules.extend([look_up(true), look_up(false), vec![goto(&profile_chain(0))]]);
        rules
    }

    /// Accepts packets to all but blocked networks and the machine.
    fn unguarded_rules(&self) -> Vec<Vec<Value>> {
        let own = self.addresses.iter().map(|address| vec![to(&IpNet::from(address.addr())), accept()]);
        let blocked = to_any(&self.blocked).into_iter().map(|is_there| vec![is_there, end_chain()]);
        let machine = vec![is_one_of(&["local", "anycast", "broadcast", "multicast"]), end_chain()];
        own.chain(blocked).chain([machine, vec![accept()]]).collect()
    }
}

/// The profiles of sessions, in force.
#[derive(Debug)]
pub struct SessionProfiles {
    filter: ClientFilter,
    /// Addresses that have another profile than the first one.
    assigned: BTreeMap<IpAddr, usize>,
}

impl SessionProfiles {
    /// Those of a filter that was just installed: all addresses have the first profile.
    pub fn new(filter: ClientFilter) -> Self {
        Self { filter, assigned: BTreeMap::new() }
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

    /// Replaces the rules of all users, in one transaction. `sessions`: the addresses of all sessions with
    /// their profiles among the new ones; all others have the first.
    ///
    /// # Errors
    /// If nft is missing or refuses the rules; then nothing has changed.
    pub fn replace_rules(
        &mut self,
        is_isolated: bool,
        profiles: Vec<Profile>,
        sessions: impl IntoIterator<Item = (IpAddr, usize)>,
    ) -> Result<(), OsError> {
        let filter = ClientFilter { is_isolated, profiles, ..self.filter.clone() };
        let assigned = sessions.into_iter().filter(|(_, profile)| *profile != 0).collect();
        filter.install_with(&assigned)?;
        (self.filter, self.assigned) = (filter, assigned);
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
        self.filter.install_with(&self.assigned)?;
        Ok(true)
    }

    fn profile(&self, address: IpAddr) -> usize {
        self.assigned.get(&address).copied().unwrap_or(0)
    }
}

/// The transaction that takes sessions out of the maps of `table`, and adds others.
pub(super) fn change(table: &str, before: &[Session], after: &[Session]) -> Value {
    let mut commands = Vec::new();
    for is_v4 in [true, false] {
        for (command, sessions) in [("delete", before), ("add", after)] {
            let of_family = sessions.iter().filter(|(address, _)| address.is_ipv4() == is_v4);
            let elements: Vec<Value> =
                of_family.map(|&(address, profile)| element(address, profile)).collect();
            let map = json!({"family": "inet", "table": table, "name": map_name(is_v4), "elem": elements});
            if !elements.is_empty() {
                commands.push(json!({command: {"element": map}}));
            }
        }
    }
    json!({"nftables": commands})
}

fn element(address: IpAddr, profile: usize) -> Value {
    json!([address.to_string(), goto(&profile_chain(profile))])
}

fn profile_chain(number: usize) -> String {
    format!("profile_{number}")
}

fn map_name(is_v4: bool) -> &'static str {
    if is_v4 { "profiles4" } else { "profiles6" }
}

/// A rule as expressions of nft: one for each family of its destinations.
fn statements(rule: &FilterRule) -> Vec<Vec<Value>> {
    let range = |ports: std::ops::RangeInclusive<u16>| json!({"range": [ports.start(), ports.end()]});
    let ports: Vec<Value> = merged_ranges(&rule.ports).into_iter().map(range).collect();
    let mut rest = Vec::new();
    if !ports.is_empty() {
        // In other protocols these bytes are not ports.
        rest.push(equal(meta("l4proto"), any_of(json!(PROTOCOLS_WITH_PORTS))));
        rest.push(equal(payload("th", "dport"), any_of(json!(ports))));
    }
    let with = |is_there: Option<Value>, verdict: Value| -> Vec<Value> {
        is_there.into_iter().chain(rest.iter().cloned()).chain([verdict]).collect()
    };
    let verdict = if rule.allow { jump(UNGUARDED_CHAIN) } else { reject() };
    if rule.to.is_empty() {
        return vec![with(None, verdict)];
    }
    let is_named = |net: &IpNet| rule.allow && net.prefix_len() == net.max_prefix_len();
    let (named, networks): (Vec<_>, Vec<_>) = rule.to.iter().copied().partition(is_named);
    let named = to_any(&named).into_iter().map(|is_there| with(Some(is_there), accept()));
    let networks = to_any(&networks).into_iter().map(|is_there| with(Some(is_there), verdict.clone()));
    named.chain(networks).collect()
}

/// Whether a packet is to one of these networks: a condition for each family that they have.
fn to_any(nets: &[IpNet]) -> Vec<Value> {
    // nft refuses networks in a set that overlap.
    let all = IpNet::aggregate(&nets.to_vec());
    let families = [true, false]
        .map(|is_v4| -> Vec<&IpNet> { all.iter().filter(|net| net.addr().is_ipv4() == is_v4).collect() });
    let families = families.into_iter().filter(|nets| !nets.is_empty());
    let condition = |nets: Vec<&IpNet>| {
        let values: Vec<Value> = nets.iter().map(|net| network(net)).collect();
        equal(payload(protocol_of(nets[0]), "daddr"), any_of(json!(values)))
    };
    families.map(condition).collect()
}

/// Whether the kernel delivers a packet in one of these ways.
fn is_one_of(kinds: &[&str]) -> Value {
    equal(json!({"fib": {"result": "type", "flags": ["daddr"]}}), any_of(json!(kinds)))
}

fn to(net: &IpNet) -> Value {
    equal(payload(protocol_of(net), "daddr"), network(net))
}

fn protocol_of(net: &IpNet) -> &'static str {
    if net.addr().is_ipv4() { "ip" } else { "ip6" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_is_one_statement_for_each_family_of_its_destinations() {
        let rule = |to: &[&str], ports: &[(u16, u16)]| FilterRule {
            allow: false,
            to: to.iter().map(|net| net.parse().unwrap()).collect(),
            ports: ports.to_vec(),
        };
        let count = |rule: &FilterRule| statements(rule).iter().map(Vec::len).collect::<Vec<_>>();
        assert_eq!(count(&rule(&[], &[])), [1]);
        assert_eq!(count(&rule(&[], &[(25, 25)])), [3]);
        assert_eq!(count(&rule(&["10.0.0.0/8", "10.1.0.0/16", "fd00::/8"], &[])), [2, 2]);
        assert_eq!(count(&rule(&["10.0.0.0/8"], &[(1, 2), (2, 9)])), [4]);
        let both = statements(&rule(&["10.0.0.0/8", "10.1.0.0/16"], &[(1, 2), (2, 9)]));
        let text = json!(both).to_string();
        assert!(text.contains("10.0.0.0") && !text.contains("10.1.0.0"), "{text}");
        assert!(text.contains("[1,9]") && !text.contains("[2,9]"), "{text}");
        let allow = FilterRule { allow: true, ..rule(&["10.0.0.0/8", "10.1.0.1/32", "fd00::1/128"], &[]) };
        let verdicts: Vec<_> = statements(&allow).into_iter().map(|mut all| all.pop()).collect();
        assert_eq!(verdicts, [Some(accept()), Some(accept()), Some(jump(UNGUARDED_CHAIN))]);
    }
}
