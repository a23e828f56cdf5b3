//! Source NAT, firewall marks for policy routing, and guards of addresses, by nftables.
//!
//! In: [`Rules`]. Out: the table `inet mpvpn_<name>` with chains for them. Always holds: a table is replaced
//! as a whole in one transaction, so at no moment are its rules missing or incomplete; no other table is
//! touched. A packet that another table drops (as Docker's forward policy does) stays dropped, because in
//! nftables no table can overrule the drop of another: such a machine needs a rule of its own that accepts
//! forwarding from and to the TUN device.

mod bypass;
mod client_filter;
mod forward;
mod forward_counters;
mod inbound;
mod marking;
pub(crate) mod script;
mod site;

use std::{collections::BTreeMap, net::IpAddr, path::Path};

pub(crate) use bypass::{BypassLink, BypassMatch, BypassTable, Destination};
pub use client_filter::{ClientFilter, FilterRule, Profile, SessionProfiles};
pub use forward::{PortForward, set_forwards};
pub use forward_counters::{ForwardCounters, ForwardedBytes};
use ipnet::IpNet;
pub use marking::{MarkBits, MarkRule, PacketMatch};
use serde::{Deserialize, Serialize};
use serde_json::json;
pub use site::{SiteNetwork, SiteRules};

use crate::{
    error::OsError,
    helper,
    kill_switch::{self, Exceptions},
    program::{self, Ended},
    tunnel_net::tcp_sockets::Connection,
};
use script::{any_of, hook_chain, protocol_of, quoted};

/// Priority of the chain for source NAT: `srcnat` of nft(8).
const SOURCE_NAT_PRIORITY: i32 = 100;
/// Priority of the chains that set marks: after those of other programs (`mangle` of nft(8), -150), whose
/// marks the rules may match, and before destination NAT (`dstnat`, -100), so that they match the original
/// destination.
const MARKING_PRIORITY: i32 = -140;
/// Priority of the chain that guards addresses: `raw` of nft(8), before connection tracking.
const GUARD_PRIORITY: i32 = -300;
/// The beginning of the names of tables.
const PREFIX: &str = "mpvpn_";

/// All rules of one tunnel.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Rules {
    /// Suffix of the table's name; by convention the name of the TUN device.
    pub name: String,
    /// Packets whose source address becomes that of the interface by which they leave.
    pub masquerade: Vec<Masquerade>,
    /// Packets that get a mark. The first rule that matches decides.
    #[serde(default, rename = "steer")]
    pub mark_rules: Vec<MarkRule>,
    /// Packets sent by this machine with these bits in their mark are not marked: those of the tunnels
    /// themselves.
    #[serde(default)]
    pub exempt_mark: Option<MarkBits>,
    /// Addresses that only one interface receives packets for.
    #[serde(default)]
    pub guards: Vec<AddressGuard>,
    /// The networks behind a client.
    #[serde(default)]
    pub site: Option<Box<SiteRules>>,
}

/// A rule that drops packets to some addresses, unless they arrive by the interface of these, or this machine
/// sends them.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct AddressGuard {
    /// The interface.
    pub interface: String,
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
}

impl AddressGuard {
    /// A guard for these addresses of `interface`.
    pub fn new(interface: &str, addresses: &[IpNet]) -> Self {
        Self { interface: interface.to_owned(), addresses: addresses.iter().map(IpNet::addr).collect() }
    }
}

/// A rule for source NAT: matching packets get the address of the interface by which they leave.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Masquerade {
    /// The packets' source network or incoming interface.
    pub from: Origin,
    /// The packets' outgoing interface.
    pub exit: Exit,
}

/// Condition on where packets come from.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Origin {
    /// A source address within this network.
    Network(IpNet),
    /// This interface (Linux 5.7 or newer).
    Interface(String),
    /// No condition.
    Anywhere,
}

/// Condition on the interface by which packets leave.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Exit {
    /// This interface.
    Through(String),
    /// Any interface but this one and the loopback: what stays on the machine keeps its source.
    AnyBut(String),
}

/// A change of a table of ours: facts, from which the process that makes it writes the rules.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Change {
    /// Replaces the table by one with these rules.
    Rules(Rules),
    /// Replaces the table by one with these rules, sessions and networks behind clients, which have other
    /// profiles than the first.
    Clients(ClientFilter, Vec<Session>, Vec<Site>),
    /// Takes sessions out of the table for clients, which has this name, and adds others.
    Sessions(String, Vec<Session>, Vec<Session>),
    /// Replaces the networks behind clients in it.
    Sites(String, Vec<Site>),
    /// Replaces the forwards of the server with this TUN device.
    Forwards(String, Vec<PortForward>),
    /// Replaces the table for replies, which has this name, by one for these links with their numbers.
    Inbound(String, BTreeMap<String, u8>),
    /// Adds connections to it that are older, with the numbers of their links.
    InboundConnections(String, Vec<(u8, Connection)>),
    /// Replaces the table of the kill switch; without exceptions removes it.
    KillSwitch(Vec<Exceptions>),
    /// Replaces the table for packets that leave past the tunnel.
    Bypass(Box<BypassTable>),
    /// Adds destinations of its rules to that table, which has this name: the number of the rule, the
    /// address, and for how many seconds.
    BypassDestinations(String, Vec<Destination>),
    /// Removes this table.
    Remove(String),
}

/// The address of a session, and the number of its profile.
pub(crate) type Session = (IpAddr, usize);

/// A network behind a client, and the number of its profile.
pub(crate) type Site = (IpNet, usize);

impl Change {
    /// The table.
    pub(crate) fn table(&self) -> String {
        match self {
            Self::Rules(rules) => table_name(&rules.name),
            Self::Clients(filter, ..) => filter.table(),
            Self::Forwards(tun, _) => forward::table(tun),
            Self::Bypass(table) => table.name(),
            Self::Sessions(table, ..)
            | Self::Sites(table, _)
            | Self::Inbound(table, _)
            | Self::InboundConnections(table, _)
            | Self::BypassDestinations(table, _)
            | Self::Remove(table) => table.clone(),
            Self::KillSwitch(_) => kill_switch::TABLE.to_owned(),
        }
    }

    /// The script that makes the change.
    fn script(&self) -> String {
        match self {
            Self::Rules(rules) => script_of(rules),
            Self::Clients(filter, sessions, sites) => filter.script(sessions, sites),
            Self::Sessions(table, before, after) => client_filter::change(table, before, after),
            Self::Sites(table, sites) => client_filter::site_change(table, sites),
            Self::Forwards(tun, forwards) => forward::script(tun, forwards),
            Self::Inbound(table, links) => inbound::script(table, links),
            Self::InboundConnections(table, connections) => inbound::elements(table, connections),
            Self::Bypass(table) => table.script(),
            Self::BypassDestinations(table, list) => bypass::destinations(table, list),
            Self::KillSwitch(exceptions) => kill_switch::script(exceptions),
            Self::Remove(table) => script::removal(table),
        }
    }

    /// The script that makes the change, if its facts are those of a tunnel.
    ///
    /// # Errors
    /// Why they are not.
    pub(crate) fn checked_script(&self) -> Result<String, String> {
        // A name with a quotation mark could begin a statement of its own. JSON escapes such characters.
        let facts = json!(self).to_string();
        if facts.contains('\\') || !is_own(&self.table()) {
            return Err("a name has a quotation mark, a backslash or a control character".to_owned());
        }
        // There is a rule with all conditions for each mark.
        if facts.len().saturating_mul(self.most_marks()) > helper::MAX_MESSAGE_BYTES as usize {
            return Err("a rule has too many marks and conditions".to_owned());
        }
        Ok(self.script())
    }

    fn most_marks(&self) -> usize {
        let packets: Vec<&PacketMatch> = match self {
            Self::Rules(rules) => rules.mark_rules.iter().map(|rule| &rule.packets).collect(),
            Self::Bypass(table) => table.rules.iter().map(|rule| &rule.packets).collect(),
            _ => Vec::new(),
        };
        packets.iter().map(|packets| packets.marks.len()).max().unwrap_or(1).max(1)
    }

    /// Makes the change in this process.
    pub(crate) fn carry_out(&self) -> Ended {
        match self.checked_script() {
            Ok(script) => run_nft(&["--file", "-"], script),
            Err(why) => Ended::Badly(why),
        }
    }
}

/// Shows a table, in this process.
pub(crate) fn show(table: &str) -> Ended {
    match is_own(table) {
        true => run_nft(&["--json", "list", "table", "inet", table], String::new()),
        false => Ended::Badly(format!("{table:?} is no table of mpvpn")),
    }
}

/// Whether a table has a name that [`table_name`] makes.
fn is_own(table: &str) -> bool {
    table
        .strip_prefix(PREFIX)
        .is_some_and(|rest| rest.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_'))
}

/// Runs nft(8), whose folder is often missing from the PATH of users that may run it.
fn run_nft(args: &[&str], input: String) -> Ended {
    let usual = ["/usr/sbin/nft", "/sbin/nft"].into_iter().find(|path| Path::new(path).exists());
    let args: Vec<String> = args.iter().map(|&arg| arg.to_owned()).collect();
    program::run(usual.unwrap_or("nft"), &args, input, None)
}

/// Installs `rules`, replacing the table of the same name.
pub fn install(rules: &Rules) -> Result<(), OsError> {
    apply(Change::Rules(rules.clone()))
}

/// Removes the table for `name`; no error if it does not exist.
pub fn remove(name: &str) -> Result<(), OsError> {
    apply(Change::Remove(table_name(name)))
}

/// The name of the table for `name`: `mpvpn_`, then `name` with each byte but ASCII letters and digits
/// replaced by `_`.
pub fn table_name(name: &str) -> String {
    let clean = |c: char| if c.is_ascii_alphanumeric() { c } else { '_' };
    format!("{PREFIX}{}", name.chars().take(64).map(clean).collect::<String>())
}

fn script_of(rules: &Rules) -> String {
    let mut chains = Vec::new();
    let mut chain = |chain: (&str, &str, &str), priority, rules: Vec<String>| {
        chains.push(hook_chain(chain, priority, "accept", rules));
    };
    if !rules.masquerade.is_empty() {
        let masquerade = rules.masquerade.iter().map(masquerade_rule).collect();
        chain(("postrouting", "nat", "postrouting"), SOURCE_NAT_PRIORITY, masquerade);
    }
    if !rules.guards.is_empty() {
        let guards = rules.guards.iter().flat_map(guard_rules).collect();
        chain(("guard", "filter", "prerouting"), GUARD_PRIORITY, guards);
    }
    if !rules.mark_rules.is_empty() {
        let incoming = rules.mark_rules.iter().flat_map(marking::rules_of).collect();
        chain(("prerouting", "filter", "prerouting"), MARKING_PRIORITY, incoming);
        // The kernel routes packets of this machine again after a change of the mark.
        let own = rules.mark_rules.iter().filter(|rule| rule.packets.ingress.is_empty());
        let exempt = rules.exempt_mark.map(|mark| format!("{} accept", mark.condition("meta mark")));
        let outgoing = exempt.into_iter().chain(own.flat_map(marking::rules_of)).collect();
        chain(("output", "route", "output"), MARKING_PRIORITY, outgoing);
    }
    chains.extend(rules.site.iter().flat_map(|site| site.chains()));
    let renewed = if rules.site.as_ref().is_some_and(|site| !site.forwards.is_empty()) {
        script::renewal
    } else {
        script::replacement
    };
    renewed(&table_name(&rules.name), &chains)
}

fn masquerade_rule(masquerade: &Masquerade) -> String {
    let from = match &masquerade.from {
        Origin::Network(network) => format!("{} saddr {}", protocol_of(network), network.trunc()),
        Origin::Interface(name) => format!("iifname {}", quoted(name)),
        Origin::Anywhere => String::new(),
    };
    let exit = match &masquerade.exit {
        Exit::Through(name) => format!("oifname {}", quoted(name)),
        Exit::AnyBut(name) => format!("oifname != {}", any_of([name, "lo"].map(quoted))),
    };
    format!("{from} {exit} masquerade")
}

/// The rules of a guard: one for each IP version.
fn guard_rules(guard: &AddressGuard) -> Vec<String> {
    let interface = quoted(&guard.interface);
    let rule = |protocol| {
        let addresses: Vec<_> =
            guard.addresses.iter().filter(|ip| ip.is_ipv4() == (protocol == "ip")).collect();
        (!addresses.is_empty()).then(|| {
            let addresses = any_of(addresses);
            format!("iifname != {interface} {protocol} daddr {addresses} fib saddr type != local drop")
        })
    };
    ["ip", "ip6"].into_iter().filter_map(rule).collect()
}

/// Makes a change.
///
/// # Errors
/// If nft is missing or refuses it; then nothing has changed.
pub(crate) fn apply(change: Change) -> Result<(), OsError> {
    let table = change.table();
    printed(helper::change_firewall(change)?)?.map(drop).map_err(|message| refused(&table, message))
}

/// The table `table` of the family `inet` as nft shows it; `None` if there is none.
///
/// # Errors
/// If nft is missing or cannot list tables.
pub(crate) fn list(table: &str) -> Result<Option<serde_json::Value>, OsError> {
    match printed(helper::show_table(table)?)? {
        Ok(shown) => {
            serde_json::from_str(&shown).map(Some).map_err(|error| refused(table, error.to_string()))
        }
        Err(said) if said.contains("No such file") => Ok(None),
        Err(said) => Err(refused(table, said)),
    }
}

fn refused(table: &str, message: String) -> OsError {
    OsError::Nft { table: table.to_owned(), message }
}

/// The output of nft, or its complaint.
fn printed(ended: Ended) -> Result<Result<String, String>, OsError> {
    match ended {
        Ended::Well(printed) => Ok(Ok(printed)),
        Ended::Badly(said) => Ok(Err(said)),
        Ended::Missing => Err(OsError::NftMissing),
        Ended::Late => Ok(Err("it did not end".to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_names_have_only_letters_digits_and_underscores() {
        assert_eq!(table_name("mpvpn0"), "mpvpn_mpvpn0");
        assert_eq!(table_name("eth0.1; flush ruleset"), "mpvpn_eth0_1__flush_ruleset");
        assert!(table_name(&"x".repeat(1000)).len() < 80);
    }

    #[test]
    fn one_transaction_clears_and_fills_the_table() {
        let rules = Rules {
            name: "t0".into(),
            masquerade: vec![
                Masquerade {
                    from: Origin::Network("10.0.0.5/24".parse().unwrap()),
                    exit: Exit::AnyBut("t0".into()),
                },
                Masquerade { from: Origin::Interface("lan0".into()), exit: Exit::Through("t0".into()) },
            ],
            ..Rules::default()
        };
        let script = script_of(&rules);
        assert!(
            script.starts_with("table inet mpvpn_t0\ndelete table inet mpvpn_t0\ntable inet mpvpn_t0 {\n")
        );
        let rules: Vec<&str> = script.lines().filter(|line| line.ends_with("masquerade")).collect();
        assert_eq!(
            rules,
            [
                "ip saddr 10.0.0.0/24 oifname != { \"t0\", \"lo\" } masquerade",
                "iifname \"lan0\" oifname \"t0\" masquerade",
            ]
        );
        assert_eq!(script.matches("chain ").count(), 1);
        assert!(
            script.contains("chain postrouting {\ntype nat hook postrouting priority 100; policy accept;\n")
        );
    }

    #[test]
    fn a_rule_that_would_become_a_script_of_many_megabytes_is_refused() {
        let rules = |count: u16| {
            let marks = (0..count).map(|value| MarkBits { value: value.into(), mask: 0xffff }).collect();
            let ports = (0..count).map(|port| (2 * port, 2 * port)).collect();
            let packets = PacketMatch { marks, ports, ..PacketMatch::default() };
            let mark_rules = vec![MarkRule { packets, set: MarkBits { value: 1, mask: 1 } }];
            Change::Rules(Rules { name: "t0".into(), mark_rules, ..Rules::default() })
        };
        assert!(rules(100).checked_script().is_ok_and(|script| script.len() < 1 << 20));
        let refused = rules(3000).checked_script().unwrap_err();
        assert!(refused.contains("too many marks"), "{refused}");
    }

    #[test]
    fn a_name_cannot_leave_its_quotation_marks() {
        assert_eq!(quoted("eth0.1"), "\"eth0.1\"");
        assert_eq!(quoted("\";flush ruleset"), "\"?;flush ruleset\"");
        assert_eq!(quoted("eth*"), "\"eth?\"");
        for name in ["\";flush ruleset", "\\", "\n"] {
            let change = Change::Inbound("mpvpn_t0_inbound".into(), BTreeMap::from([(name.into(), 1)]));
            assert!(
                matches!(change.carry_out(), Ended::Badly(said) if said.contains("quotation mark")),
                "{name}"
            );
        }
    }
}
