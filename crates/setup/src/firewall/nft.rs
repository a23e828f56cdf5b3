//! Rules in the chains of nftables that drop, with a comment.
//!
//! A chain drops if its policy does, or if it ends with a rule that drops or rejects everything. In the first
//! case a rule goes to its end, in the second before the last rule: what the chain refuses earlier stays
//! refused. Chains that iptables made belong to iptables, those of firewalld and ufw to these, and those of
//! mpvpn to its processes.

use derive_more::Display;
use mpvpn_types::PortProtocol;
use serde_json::{Value, json};

use super::{DNS_PORT, NOT_NEEDED, Rule};
use crate::plan::{Action, Chain, NftRule, Step};

/// How many jumps are followed at the end of a chain. Chosen: deeper nests are not made by hand.
const MAX_JUMPS: usize = 4;

/// A chain at a hook that drops.
#[derive(Debug, Display, PartialEq, Eq)]
#[display("nftables chain {chain}")]
pub(super) struct DroppingChain {
    chain: Chain,
    is_input: bool,
    /// The handle of the last rule, if that drops.
    last: Option<u64>,
}

/// The chains for packets to this machine and through it that drop.
pub(super) fn dropping_chains(ruleset: &Value, has_ufw: bool) -> Vec<DroppingChain> {
    let chains = items(ruleset, "chain").filter_map(|item| {
        let hook = text(item, "hook")?;
        let is_filter = text(item, "type")? == "filter" && ["input", "forward"].contains(&hook);
        let chain = chain_of(item, "name")?;
        (is_filter && !is_managed(&chain, has_ufw))
            .then(|| (chain, hook == "input", text(item, "policy") == Some("drop")))
    });
    let judge = |(chain, is_input, drops_by_policy): (Chain, bool, bool)| {
        let last = rules_of(ruleset, &chain).last();
        let last = last.filter(|rule| ends_in_drop(ruleset, &chain, rule, MAX_JUMPS));
        let last = last.and_then(|rule| rule["handle"].as_u64());
        (drops_by_policy || last.is_some()).then_some(DroppingChain { chain, is_input, last })
    };
    chains.filter_map(judge).collect()
}

/// Whether another program manages the chain.
fn is_managed(chain: &Chain, has_ufw: bool) -> bool {
    let of_iptables = ["ip", "ip6"].contains(&chain.family.as_str())
        && chain.table == "filter"
        && ["INPUT", "FORWARD"].contains(&chain.name.as_str());
    !["ip", "ip6", "inet"].contains(&chain.family.as_str())
        || of_iptables
        || chain.table == "firewalld"
        || chain.table.starts_with("mpvpn_")
        || has_ufw && chain.name.starts_with("ufw")
}

/// Whether a rule drops every packet that comes to it.
fn ends_in_drop(ruleset: &Value, chain: &Chain, rule: &Value, jumps: usize) -> bool {
    let statements = rule["expr"].as_array().into_iter().flatten();
    let mut telling = statements.filter(|statement| {
        // These let every packet pass on.
        statement.get("counter").is_none() && statement.get("log").is_none()
    });
    let (Some(statement), None) = (telling.next(), telling.next()) else { return false };
    if statement.get("drop").is_some() || statement.get("reject").is_some() {
        return true;
    }
    let target = ["jump", "goto"].iter().find_map(|verb| statement.get(verb)?.get("target")?.as_str());
    let Some(target) = target.filter(|_| jumps > 0) else { return false };
    let target = Chain { name: target.to_owned(), ..chain.clone() };
    rules_of(ruleset, &target).last().is_some_and(|rule| ends_in_drop(ruleset, &target, rule, jumps - 1))
}

/// The steps by which the chains that drop have these rules with the comment `tag`, and no chain another one
/// with it.
pub(super) fn changes(ruleset: &Value, has_ufw: bool, tag: &str, rules: &[Rule]) -> Vec<Step> {
    let wanted: Vec<(NftRule, &Rule, Option<u64>)> = dropping_chains(ruleset, has_ufw)
        .iter()
        .flat_map(|dropping| {
            let of_hook = rules.iter().filter(|rule| rule.is_input() == dropping.is_input);
            of_hook.map(|rule| (NftRule::new(&dropping.chain, tag, rule), rule, dropping.last))
        })
        .collect();
    let mut steps = Vec::new();
    for item in items(ruleset, "rule").filter(|item| text(item, "comment") == Some(tag)) {
        let Some(found) = NftRule::listed(item, tag) else { continue };
        let is_wanted = wanted.iter().any(|(rule, ..)| rule.is_same(&found));
        if !is_wanted && !is_managed(&found.chain, false) {
            steps.push(Step::new(Action::DeleteNft(found), NOT_NEEDED, None));
        }
    }
    for (rule, meaning, before) in wanted {
        // Somebody's equal rule serves as well.
        let is_there =
            rules_of(ruleset, &rule.chain).any(|item| without_counters(&item["expr"]) == rule.expr);
        if !is_there {
            let adding = Action::Run(rule.words(before));
            steps.push(Step::new(adding, meaning.why(), Some(Action::DeleteNft(rule))));
        }
    }
    steps
}

/// The handle that a rule has in this ruleset.
pub fn handle_of(ruleset: &Value, rule: &NftRule) -> Option<u64> {
    let own = items(ruleset, "rule").filter(|item| text(item, "comment") == Some(&rule.tag));
    let mut found = own.filter_map(|item| Some((item, NftRule::listed(item, &rule.tag)?)));
    found.find(|(_, listed)| listed.is_same(rule))?.0["handle"].as_u64()
}

impl NftRule {
    fn new(chain: &Chain, tag: &str, rule: &Rule) -> Self {
        let equal = |left: Value, right: Value| json!({"match": {"op": "==", "left": left, "right": right}});
        let port = |protocol: &PortProtocol, port: u16| {
            equal(json!({"payload": {"protocol": protocol.as_str(), "field": "dport"}}), json!(port))
        };
        let interface = |key: &str, device: &str| equal(json!({"meta": {"key": key}}), json!(device));
        let established = || json!({"match": {"op": "in", "left": {"ct": {"key": "state"}}, "right": ["established", "related"]}});
        let (text, mut expr) = match rule {
            Rule::Port(protocol, number) => {
                (format!("{} dport {number}", protocol.as_str()), vec![port(protocol, *number)])
            }
            Rule::Resolver(protocol, device) => (
                format!("iifname \"{device}\" {} dport {DNS_PORT}", protocol.as_str()),
                vec![interface("iifname", device), port(protocol, DNS_PORT)],
            ),
            Rule::From(device) => (format!("iifname \"{device}\""), vec![interface("iifname", device)]),
            Rule::To(device) => (format!("oifname \"{device}\""), vec![interface("oifname", device)]),
            Rule::Replies(device) => (
                format!("oifname \"{device}\" ct state established,related"),
                vec![interface("oifname", device), established()],
            ),
        };
        expr.push(json!({"accept": null}));
        Self { chain: chain.clone(), tag: tag.to_owned(), text: format!("{text} accept"), expr: expr.into() }
    }

    /// A rule from the list of nft.
    fn listed(item: &Value, tag: &str) -> Option<Self> {
        let chain = chain_of(item, "chain")?;
        let expr = without_counters(&item["expr"]);
        // Only rules that setup makes are removed, whatever the tag says.
        let is_accept = expr.as_array()?.last()?.get("accept").is_some();
        is_accept.then(|| Self { chain, tag: tag.to_owned(), text: format!("comment \"{tag}\""), expr })
    }

    fn is_same(&self, other: &Self) -> bool {
        (&self.chain, &self.expr) == (&other.chain, &other.expr)
    }

    /// The command that adds it: before the rule with this handle, else at the end.
    fn words(&self, before: Option<u64>) -> Vec<String> {
        let Chain { family, table, name } = &self.chain;
        let mut words: Vec<String> =
            ["nft", if before.is_some() { "insert" } else { "add" }, "rule", family, table, name]
                .map(str::to_owned)
                .into();
        if let Some(handle) = before {
            words.extend(["handle".to_owned(), handle.to_string()]);
        }
        words.extend([self.text.clone(), "comment".to_owned(), format!("\"{}\"", self.tag)]);
        words
    }
}

fn items<'a>(ruleset: &'a Value, kind: &'static str) -> impl Iterator<Item = &'a Value> {
    ruleset["nftables"].as_array().into_iter().flatten().filter_map(move |item| item.get(kind))
}

fn rules_of<'a>(ruleset: &'a Value, chain: &Chain) -> impl Iterator<Item = &'a Value> {
    items(ruleset, "rule").filter(move |item| chain_of(item, "chain").as_ref() == Some(chain))
}

/// The chain of an item, which has the chain's name under `key`.
fn chain_of(item: &Value, key: &str) -> Option<Chain> {
    let [family, table, name] = ["family", "table", key].map(|key| text(item, key).map(str::to_owned));
    Some(Chain { family: family?, table: table?, name: name? })
}

fn text<'a>(item: &'a Value, key: &str) -> Option<&'a str> {
    item.get(key)?.as_str()
}

/// The statements of a rule without counters, whose values change.
fn without_counters(expr: &Value) -> Value {
    let statements = expr.as_array().into_iter().flatten();
    statements.filter(|statement| statement.get("counter").is_none()).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::{
        super::tests::{openings, texts},
        *,
    };

    /// As nft 1.0.6 lists it: an input chain that drops by policy, a forward chain whose last rule rejects,
    /// an output chain, a chain that other rules jump to.
    const RULESET: &str = r#"{"nftables": [
        {"chain": {"family": "inet", "table": "filter", "name": "input", "handle": 1, "type": "filter", "hook": "input", "prio": 0, "policy": "drop"}},
        {"chain": {"family": "inet", "table": "filter", "name": "forward", "handle": 2, "type": "filter", "hook": "forward", "prio": 0, "policy": "accept"}},
        {"chain": {"family": "inet", "table": "filter", "name": "deny", "handle": 3}},
        {"chain": {"family": "inet", "table": "filter", "name": "output", "handle": 4, "type": "filter", "hook": "output", "prio": 0, "policy": "drop"}},
        {"chain": {"family": "ip", "table": "filter", "name": "FORWARD", "handle": 4, "type": "filter", "hook": "forward", "prio": 0, "policy": "drop"}},
        {"chain": {"family": "inet", "table": "mpvpn_kill_switch", "name": "forward", "handle": 4, "type": "filter", "hook": "forward", "prio": 0, "policy": "drop"}},
        {"chain": {"family": "inet", "table": "open", "name": "input", "handle": 4, "type": "filter", "hook": "input", "prio": 0, "policy": "accept"}},
        {"rule": {"family": "inet", "table": "filter", "chain": "input", "handle": 5, "expr": [{"match": {"op": "==", "left": {"payload": {"protocol": "tcp", "field": "dport"}}, "right": 443}}, {"counter": {"packets": 0, "bytes": 0}}, {"accept": null}]}},
        {"rule": {"family": "inet", "table": "filter", "chain": "forward", "handle": 9, "expr": [{"counter": {"packets": 0, "bytes": 0}}, {"jump": {"target": "deny"}}]}},
        {"rule": {"family": "inet", "table": "filter", "chain": "deny", "handle": 10, "expr": [{"log": {"prefix": "x"}}]}},
        {"rule": {"family": "inet", "table": "filter", "chain": "deny", "handle": 11, "expr": [{"drop": null}]}}
    ]}"#;

    fn ruleset() -> Value {
        serde_json::from_str(RULESET).unwrap()
    }

    #[test]
    fn rules_go_into_the_chains_that_drop_and_before_the_rule_that_does() {
        let steps = changes(&ruleset(), false, "mpvpn-server", &openings().rules());
        assert_eq!(
            texts(&steps),
            [
                // TCP port 443 is open already.
                r#"nft add rule inet filter input 'udp dport 443 accept' comment '"mpvpn-server"'"#,
                r#"nft add rule inet filter input 'iifname "mpvpn0" udp dport 53 accept' comment '"mpvpn-server"'"#,
                r#"nft add rule inet filter input 'iifname "mpvpn0" tcp dport 53 accept' comment '"mpvpn-server"'"#,
                r#"nft insert rule inet filter forward handle 9 'iifname "mpvpn0" accept' comment '"mpvpn-server"'"#,
                r#"nft insert rule inet filter forward handle 9 'oifname "mpvpn0" ct state established,related accept' comment '"mpvpn-server"'"#,
            ]
        );
    }

    #[test]
    fn rules_that_are_there_are_not_added_and_those_not_needed_removed() {
        let mut ruleset = ruleset();
        let tagged = |handle: u64, chain: &str, expr: Value| {
            json!({"rule": {
                "family": "inet", "table": "filter", "chain": chain, "handle": handle,
                "comment": "mpvpn-server", "expr": expr
            }})
        };
        let port = |port: u16| json!([{"match": {"op": "==", "left": {"payload": {"protocol": "udp", "field": "dport"}}, "right": port}}, {"accept": null}]);
        let list = ruleset["nftables"].as_array_mut().unwrap();
        list.push(tagged(20, "input", port(443)));
        list.push(tagged(21, "input", port(4433)));
        list.push(tagged(22, "input", json!([{"drop": null}])));
        let steps = changes(&ruleset, false, "mpvpn-server", &openings().rules());
        let texts = texts(&steps);
        assert!(texts.iter().all(|step| !step.contains("udp dport 443")), "{texts:?}");
        let deleted: Vec<_> = steps
            .iter()
            .filter_map(|step| match &step.action {
                Action::DeleteNft(rule) => handle_of(&ruleset, rule),
                _ => None,
            })
            .collect();
        assert_eq!(deleted, [21]);
        let all = changes(&ruleset, false, "mpvpn-server", &[]);
        assert_eq!(all.len(), 2, "{all:?}");
        assert_eq!(changes(&ruleset, false, "mpvpn-server-work", &[]), []);
    }

    #[test]
    fn chains_that_jump_in_circles_do_not_drop() {
        let jump = |chain: &str, to: &str| {
            json!({"rule": {
                "family": "inet", "table": "t", "chain": chain, "handle": 1,
                "expr": [{"jump": {"target": to}}]
            }})
        };
        let chain = json!({"chain": {"family": "inet", "table": "t", "name": "a", "type": "filter", "hook": "input", "policy": "accept"}});
        let ruleset = json!({"nftables": [chain, jump("a", "b"), jump("b", "a")]});
        assert_eq!(dropping_chains(&ruleset, false), []);
    }
}
