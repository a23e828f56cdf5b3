//! Text of scripts of nft (nft(8)), for tables of the family `inet`.
//!
//! Numbers stand for protocols, because nft looks names up in /etc/protocols, which small systems do not
//! have: TCP 6, UDP 17, ICMP 1, ICMPv6 58 (IANA, Assigned Internet Protocol Numbers).

use std::{fmt::Display, iter::once};

use ipnet::IpNet;

/// Drops, and tells the sender by ICMP: communication administratively prohibited (RFC 1812, section 5.2.7.1;
/// RFC 4443, section 3.1).
pub(crate) const REJECT: &str = "reject with icmpx type admin-prohibited";

/// Accepts answers on connections that began on the other side, and errors about them (ICMP). Packets of
/// connections that began on this side are judged one by one.
pub(crate) const ANSWERS: [&str; 2] = [
    "ct state == established ct direction reply accept",
    "ct state == related meta l4proto { 1, 58 } accept",
];

/// Removes a table whether or not it exists.
pub(crate) fn removal(table: &str) -> String {
    // Adding first makes the deletion succeed.
    format!("table inet {table}\ndelete table inet {table}\n")
}

/// Replaces a table by one with these chains and sets.
pub(crate) fn replacement(table: &str, objects: &[String]) -> String {
    format!("{}table inet {table} {{\n{}}}\n", removal(table), objects.concat())
}

/// As [`replacement`], but counters and chains of the table stay, and keep what they have counted: for tables
/// whose chains have the same hooks each time.
pub(crate) fn renewal(table: &str, objects: &[String]) -> String {
    format!("table inet {table}\nflush table inet {table}\ntable inet {table} {{\n{}}}\n", objects.concat())
}

/// A chain at a hook of netfilter, with its rules; `kind` is `filter`, `nat`, or `route` to route packets
/// again after a change of their mark.
pub(crate) fn hook_chain(
    (name, kind, hook): (&str, &str, &str),
    priority: i32,
    policy: &str,
    rules: impl IntoIterator<Item = String>,
) -> String {
    let head = format!("type {kind} hook {hook} priority {priority}; policy {policy};");
    chain(name, once(head).chain(rules))
}

/// A chain that others go to, with its rules.
pub(crate) fn chain(name: &str, rules: impl IntoIterator<Item = String>) -> String {
    let rules: String = rules.into_iter().map(|rule| rule + "\n").collect();
    format!("chain {name} {{\n{rules}}}\n")
}

/// A set or a map: what it is, its name, and its type. nft refuses an empty list of elements, so none is left
/// out.
pub(crate) fn set<T: Display>((kind, name, definition): (&str, &str, &str), elements: &[T]) -> String {
    let elements = match elements {
        [] => String::new(),
        some => format!("elements = {}\n", any_of(some)),
    };
    format!("{kind} {name} {{\ntype {definition};\n{elements}}}\n")
}

/// Several values, as elements of a set or the right side of a condition.
pub(crate) fn any_of<T: Display>(values: impl IntoIterator<Item = T>) -> String {
    let values: Vec<String> = values.into_iter().map(|value| value.to_string()).collect();
    format!("{{ {} }}", values.join(", "))
}

/// The name of an interface. nft knows no way to write a quotation mark, and takes `*` for any text: a name
/// with these, which no configuration can have, becomes another one.
pub(crate) fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace(['"', '*'], "?"))
}

/// The word for the header of packets of a network.
pub(crate) fn protocol_of(net: &IpNet) -> &'static str {
    if net.addr().is_ipv4() { "ip" } else { "ip6" }
}
