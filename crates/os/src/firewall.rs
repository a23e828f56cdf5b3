//! Source NAT, firewall marks for policy routing, and guards of addresses, by nftables.
//!
//! In: [`Rules`]. Out: the table `inet mpvpn_<name>` with chains for them. Always holds: a table is replaced
//! as a whole in one transaction, so at no moment are its rules missing or incomplete; no other table is
//! touched. A packet that another table drops (as Docker's forward policy does) stays dropped, because in
//! nftables no table can overrule the drop of another: such a machine needs a rule of its own that accepts
//! forwarding from and to the TUN device.

mod client_filter;
pub(crate) mod json;
mod marking;

use std::{
    collections::{BTreeMap, HashSet},
    net::IpAddr,
    path::Path,
};

pub use client_filter::{ClientFilter, FilterRule, Profile, SessionProfiles};
use ipnet::IpNet;
pub use marking::{MarkBits, MarkRule, PacketMatch};
use nftables::{
    batch::Batch,
    expr::{
        Expression, Fib, FibFlag, FibResult, Meta, MetaKey, NamedExpression, Payload, PayloadField, Prefix,
        SetItem,
    },
    schema::{Chain, NfListObject, Nftables, Rule, Table},
    stmt::{Match, Operator, Statement},
    types::{NfChainPolicy, NfChainType, NfFamily, NfHook},
};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::{
    error::OsError,
    helper,
    kill_switch::{self, Exceptions},
    program::{self, Ended},
    tunnel_net::inbound::{self, Connection},
};

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
/// Chain for source NAT.
const POSTROUTING_CHAIN: &str = "postrouting";
/// Chain that marks packets received from interfaces.
const PREROUTING_CHAIN: &str = "prerouting";
/// Chain that guards addresses.
const GUARD_CHAIN: &str = "guard";
/// Chain that marks packets sent by this machine; the kernel routes them again after a change of the mark.
const OUTPUT_CHAIN: &str = "output";

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
    /// Replaces the table by one with these rules and sessions, which have other profiles than the first.
    Clients(ClientFilter, Vec<Session>),
    /// Takes sessions out of the table for clients, which has this name, and adds others.
    Sessions(String, Vec<Session>, Vec<Session>),
    /// Replaces the table for replies, which has this name, by one for these links with their numbers.
    Inbound(String, BTreeMap<String, u8>),
    /// Adds connections to it that are older, with the numbers of their links.
    InboundConnections(String, Vec<(u8, Connection)>),
    /// Replaces the table of the kill switch; without exceptions removes it.
    KillSwitch(Vec<Exceptions>),
    /// Removes this table.
    Remove(String),
}

/// The address of a session, and the number of its profile.
pub(crate) type Session = (IpAddr, usize);

impl Change {
    /// The table.
    pub(crate) fn table(&self) -> String {
        match self {
            Self::Rules(rules) => table_name(&rules.name),
            Self::Clients(filter, _) => filter.table(),
            Self::Sessions(table, ..)
            | Self::Inbound(table, _)
            | Self::InboundConnections(table, _)
            | Self::Remove(table) => table.clone(),
            Self::KillSwitch(_) => kill_switch::TABLE.to_owned(),
        }
    }

    /// The transaction in the JSON form of nft.
    fn transaction(&self) -> serde_json::Value {
        match self {
            Self::Rules(rules) => json!(transaction(rules)),
            Self::Clients(filter, sessions) => filter.transaction(sessions),
            Self::Sessions(table, before, after) => client_filter::change(table, before, after),
            Self::Inbound(table, links) => inbound::transaction(table, links),
            Self::InboundConnections(table, connections) => {
                json!({"nftables": inbound::elements(table, connections)})
            }
            Self::KillSwitch(exceptions) => kill_switch::transaction(exceptions),
            Self::Remove(table) => json!({"nftables": json::remove_table(table)}),
        }
    }

    /// Makes the change in this process.
    pub(crate) fn carry_out(&self) -> Ended {
        let text = self.transaction().to_string();
        // nft takes text that it cannot use for its other language. There a name with a quotation mark, which
        // is escaped here, could begin a statement of its own.
        if text.contains('\\') || !is_own(&self.table()) {
            return Ended::Badly(
                "a name has a quotation mark, a backslash or a control character".to_owned(),
            );
        }
        run_nft(&["--json", "--file", "-"], text)
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

fn transaction(rules: &Rules) -> Nftables<'static> {
    let table = table_name(&rules.name);
    let mut batch = Batch::new();
    clear(&mut batch, &table);
    batch.add(NfListObject::Table(table_object(&table)));
    let mut chain = |name: &'static str, kind, hook, priority, rules: Vec<Vec<Statement<'static>>>| {
        batch.add(NfListObject::Chain(Chain {
            family: NfFamily::INet,
            table: table.clone().into(),
            name: name.into(),
            _type: Some(kind),
            hook: Some(hook),
            prio: Some(priority),
            policy: Some(NfChainPolicy::Accept),
            ..Chain::default()
        }));
        for statements in rules {
            batch.add(NfListObject::Rule(Rule {
                family: NfFamily::INet,
                table: table.clone().into(),
                chain: name.into(),
                expr: statements.into(),
                ..Rule::default()
            }));
        }
    };
    // A chain for NAT makes the kernel track connections, which costs time for each packet.
    if !rules.masquerade.is_empty() {
        let masquerade = rules.masquerade.iter().map(masquerade_statements).collect();
        chain(POSTROUTING_CHAIN, NfChainType::NAT, NfHook::Postrouting, SOURCE_NAT_PRIORITY, masquerade);
    }
    if !rules.guards.is_empty() {
        let guards = rules.guards.iter().flat_map(guard_statements).collect();
        chain(GUARD_CHAIN, NfChainType::Filter, NfHook::Prerouting, GUARD_PRIORITY, guards);
    }
    if !rules.mark_rules.is_empty() {
        let incoming = rules.mark_rules.iter().flat_map(marking::statements_of);
        chain(
            PREROUTING_CHAIN,
            NfChainType::Filter,
            NfHook::Prerouting,
            MARKING_PRIORITY,
            incoming.collect(),
        );
        let own = rules.mark_rules.iter().filter(|rule| rule.packets.ingress.is_empty());
        let exempt = rules.exempt_mark.map(|mark| {
            let marked =
                comparison(marking::mark_and(mark.mask), Operator::EQ, Expression::Number(mark.value));
            vec![marked, Statement::Accept(None)]
        });
        let outgoing = exempt.into_iter().chain(own.flat_map(marking::statements_of));
        chain(OUTPUT_CHAIN, NfChainType::Route, NfHook::Output, MARKING_PRIORITY, outgoing.collect());
    }
    batch.to_nftables()
}

/// Adds the table before deleting it, so that the deletion succeeds whether or not it existed.
fn clear(batch: &mut Batch<'static>, table: &str) {
    batch.add(NfListObject::Table(table_object(table)));
    batch.delete(NfListObject::Table(table_object(table)));
}

fn table_object(table: &str) -> Table<'static> {
    Table { family: NfFamily::INet, name: table.to_owned().into(), handle: None }
}

fn masquerade_statements(masquerade: &Masquerade) -> Vec<Statement<'static>> {
    let from = match &masquerade.from {
        Origin::Network(network) => {
            Some(comparison(source_address(*network), Operator::EQ, prefix(*network)))
        }
        Origin::Interface(name) => Some(comparison(meta(MetaKey::Iifname), Operator::EQ, text(name))),
        Origin::Anywhere => None,
    };
    let exit = match &masquerade.exit {
        Exit::Through(name) => comparison(meta(MetaKey::Oifname), Operator::EQ, text(name)),
        Exit::AnyBut(name) => {
            let names = [name, "lo"].map(|name| SetItem::Element(text(name)));
            let names = Expression::Named(NamedExpression::Set(names.to_vec()));
            comparison(meta(MetaKey::Oifname), Operator::NEQ, names)
        }
    };
    from.into_iter().chain([exit, Statement::Masquerade(None)]).collect()
}

/// The rules of a guard, one for each IP version that has addresses.
fn guard_statements(guard: &AddressGuard) -> Vec<Vec<Statement<'static>>> {
    let rule = |protocol: &'static str| {
        let of_family = guard.addresses.iter().filter(|ip| ip.is_ipv4() == (protocol == "ip"));
        let items: Vec<_> = of_family.map(|ip| SetItem::Element(text(&ip.to_string()))).collect();
        let sender = Fib { result: FibResult::Type, flags: HashSet::from([FibFlag::Saddr]) };
        (!items.is_empty()).then(|| {
            vec![
                comparison(meta(MetaKey::Iifname), Operator::NEQ, text(&guard.interface)),
                comparison(
                    field(protocol, "daddr"),
                    Operator::EQ,
                    Expression::Named(NamedExpression::Set(items)),
                ),
                comparison(Expression::Named(NamedExpression::Fib(sender)), Operator::NEQ, text("local")),
                Statement::Drop(None),
            ]
        })
    };
    ["ip", "ip6"].into_iter().filter_map(rule).collect()
}

fn comparison(left: Expression<'static>, op: Operator, right: Expression<'static>) -> Statement<'static> {
    Statement::Match(Match { left, right, op })
}

fn meta(key: MetaKey) -> Expression<'static> {
    Expression::Named(NamedExpression::Meta(Meta { key }))
}

fn text(text: &str) -> Expression<'static> {
    Expression::String(text.to_owned().into())
}

fn source_address(network: IpNet) -> Expression<'static> {
    let protocol = match network {
        IpNet::V4(_) => "ip",
        IpNet::V6(_) => "ip6",
    };
    field(protocol, "saddr")
}

fn field(protocol: &'static str, field: &'static str) -> Expression<'static> {
    let field = PayloadField { protocol: protocol.into(), field: field.into() };
    Expression::Named(NamedExpression::Payload(Payload::PayloadField(field)))
}

fn prefix(network: IpNet) -> Expression<'static> {
    Expression::Named(NamedExpression::Prefix(Prefix {
        addr: Box::new(text(&network.network().to_string())),
        len: network.prefix_len().into(),
    }))
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

/// What nft printed, or what it complained about.
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
        let json = serde_json::to_value(transaction(&rules)).unwrap();
        let list = json["nftables"].as_array().unwrap();
        assert_eq!(list[0]["add"]["table"]["name"], "mpvpn_t0");
        assert_eq!(list[1]["delete"]["table"]["name"], "mpvpn_t0");
        assert_eq!(list[2]["add"]["table"]["name"], "mpvpn_t0");
        assert_eq!(list[3]["add"]["chain"]["hook"], "postrouting");
        let expr = &list[4]["add"]["rule"]["expr"];
        assert_eq!(expr[0]["match"]["left"]["payload"]["protocol"], "ip");
        assert_eq!(expr[0]["match"]["right"]["prefix"]["addr"], "10.0.0.0");
        assert_eq!(expr[1]["match"]["op"], "!=");
        assert_eq!(expr[1]["match"]["right"]["set"], serde_json::json!(["t0", "lo"]));
        assert!(expr[2].get("masquerade").is_some());
        let expr = &list[5]["add"]["rule"]["expr"];
        assert_eq!(expr[0]["match"]["left"]["meta"]["key"], "iifname");
        assert_eq!(expr[1]["match"]["right"], "t0");
        assert_eq!(list.len(), 6);
    }
}
