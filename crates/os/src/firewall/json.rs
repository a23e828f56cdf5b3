//! Commands and expressions of nft in its JSON form (libnftables-json(5)), for tables of the family `inet`.

use ipnet::IpNet;
use serde_json::{Value, json};

/// Numbers of protocols (IANA, Assigned Internet Protocol Numbers) for conditions on `l4proto`. nft looks
/// names up in /etc/protocols, which small systems do not have.
pub(crate) const ICMP: u8 = 1;
pub(crate) const TCP: u8 = 6;
pub(crate) const UDP: u8 = 17;
pub(crate) const ICMPV6: u8 = 58;

/// Commands that remove a table whether or not it exists.
pub(crate) fn remove_table(table: &str) -> [Value; 2] {
    // Adding first makes the deletion succeed.
    [add_table(table), json!({"delete": {"table": {"family": "inet", "name": table}}})]
}

pub(crate) fn add_table(table: &str) -> Value {
    json!({"add": {"table": {"family": "inet", "name": table}}})
}

/// A chain at a hook of netfilter, named like the hook, with its rules; `kind` is `filter`, or `route` to
/// route packets again after a change of their mark.
pub(crate) fn hook_chain(
    (table, hook, kind): (&str, &str, &str),
    priority: i32,
    policy: &str,
    rules: &[Vec<Value>],
) -> Vec<Value> {
    let chain = json!({"add": {"chain": {
        "family": "inet", "table": table, "name": hook, "type": kind, "hook": hook, "prio": priority, "policy": policy,
    }}});
    std::iter::once(chain).chain(add_rules(table, hook, rules)).collect()
}

/// A chain that others go to, with its rules.
pub(crate) fn chain(table: &str, name: &str, rules: &[Vec<Value>]) -> Vec<Value> {
    let chain = json!({"add": {"chain": {"family": "inet", "table": table, "name": name}}});
    std::iter::once(chain).chain(add_rules(table, name, rules)).collect()
}

fn add_rules(table: &str, chain: &str, rules: &[Vec<Value>]) -> Vec<Value> {
    let rule =
        |expr| json!({"add": {"rule": {"family": "inet", "table": table, "chain": chain, "expr": expr}}});
    rules.iter().map(rule).collect()
}

/// A set. nft refuses an empty list of elements, so none is left out.
pub(crate) fn set(table: &str, name: &str, kind: &Value, elements: &[Value]) -> Value {
    with_elements("set", json!({"family": "inet", "table": table, "name": name, "type": kind}), elements)
}

/// A set of networks.
pub(crate) fn interval_set(table: &str, name: &str, kind: &str, elements: &[Value]) -> Value {
    let set = json!({"family": "inet", "table": table, "name": name, "type": kind, "flags": ["interval"]});
    with_elements("set", set, elements)
}

/// A map from keys to verdicts.
pub(crate) fn verdict_map(table: &str, name: &str, kind: &str, elements: &[Value]) -> Value {
    let map = json!({"family": "inet", "table": table, "name": name, "type": kind, "map": "verdict"});
    with_elements("map", map, elements)
}

fn with_elements(object: &str, mut definition: Value, elements: &[Value]) -> Value {
    if !elements.is_empty() {
        definition["elem"] = json!(elements);
    }
    json!({"add": {object: definition}})
}

/// Adds elements to a set.
pub(crate) fn add_elements(table: &str, name: &str, elements: &[Value]) -> Value {
    json!({"add": {"element": {"family": "inet", "table": table, "name": name, "elem": elements}}})
}

/// A network as an element of a set or the right side of a comparison.
pub(crate) fn network(net: &IpNet) -> Value {
    json!({"prefix": {"addr": net.network().to_string(), "len": net.prefix_len()}})
}

pub(crate) fn equal(left: Value, right: Value) -> Value {
    json!({"match": {"op": "==", "left": left, "right": right}})
}

pub(crate) fn not_equal(left: Value, right: Value) -> Value {
    json!({"match": {"op": "!=", "left": left, "right": right}})
}

/// The expression `value & mask`.
pub(crate) fn and(value: Value, mask: u32) -> Value {
    json!({"&": [value, mask]})
}

/// Changes a mark.
pub(crate) fn mangle(key: Value, value: Value) -> Value {
    json!({"mangle": {"key": key, "value": value}})
}

pub(crate) fn any_of(values: Value) -> Value {
    json!({"set": values})
}

pub(crate) fn meta(key: &str) -> Value {
    json!({"meta": {"key": key}})
}

pub(crate) fn ct(key: &str) -> Value {
    json!({"ct": {"key": key}})
}

pub(crate) fn payload(protocol: &str, field: &str) -> Value {
    json!({"payload": {"protocol": protocol, "field": field}})
}

pub(crate) fn accept() -> Value {
    json!({"accept": null})
}

pub(crate) fn drop_silently() -> Value {
    json!({"drop": null})
}

pub(crate) fn goto(chain: &str) -> Value {
    json!({"goto": {"target": chain}})
}

pub(crate) fn jump(chain: &str) -> Value {
    json!({"jump": {"target": chain}})
}

/// Ends a chain that was jumped to: the rule after the jump is next.
pub(crate) fn end_chain() -> Value {
    json!({"return": null})
}

/// Drops, and tells the sender by ICMP: communication administratively prohibited (RFC 1812, section 5.2.7.1;
/// RFC 4443, section 3.1).
pub(crate) fn reject() -> Value {
    json!({"reject": {"type": "icmpx", "expr": "admin-prohibited"}})
}
