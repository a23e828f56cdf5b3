//! The table that marks connections by the link over which they came in (`tunnel_net/inbound.rs` says why).

use std::{collections::BTreeMap, net::SocketAddr};

use super::script::{any_of, hook_chain, quoted, replacement, set};
use crate::tunnel_net::{BYPASS_BIT, LINK_BIT, NUMBER_MASK, OWN_PACKETS, link_mark, tcp_sockets::Connection};

/// Priority of the chains: behind `mangle` of nft(8) (-150), so that the marks of other programs count, and
/// before steering into the devices of classes (-140).
const PRIORITY: i32 = -145;

/// The script that replaces the table by one for these links with their numbers.
pub(crate) fn script(table: &str, links: &BTreeMap<String, u8>) -> String {
    let mut sets = Vec::new();
    let mut incoming = Vec::new();
    let mut outgoing = Vec::new();
    let (others, own) = (format!("{:#x}", !NUMBER_MASK), OWN_PACKETS.value);
    let restore = format!(
        "ct mark & {kind:#x} == {LINK_BIT:#x} meta mark 0 meta mark set ct mark & {NUMBER_MASK:#x} | {own:#x}",
        kind = LINK_BIT | BYPASS_BIT
    );
    for (link, number) in links {
        let bits = u32::from(*number) << NUMBER_MASK.trailing_zeros();
        let unmarked =
            format!("iifname {} ct direction original ct mark & {NUMBER_MASK:#x} == 0", quoted(link));
        for is_first in [
            "ct state == new meta l4proto != 6",
            "ct state == new tcp flags & (fin | syn | rst | ack) == syn",
            "ct status dnat",
        ] {
            incoming.push(format!("{unmarked} {is_first} ct mark set ct mark & {others} | {bits:#x}"));
        }
        for (protocol, address) in [("ip", "ipv4_addr"), ("ip6", "ipv6_addr")] {
            let name = set_name(protocol == "ip", *number);
            let kind = format!("{address} . inet_service . {address} . inet_service");
            sets.push(set::<String>(("set", &name, &kind), &[]));
            let key = format!("{protocol} saddr . tcp sport . {protocol} daddr . tcp dport");
            let mark = link_mark(*number).value;
            outgoing.push(format!("meta mark 0 {key} @{name} meta mark set {mark:#x} accept"));
        }
    }
    if !links.is_empty() {
        let links = any_of(links.keys().map(|link| quoted(link)));
        incoming.push(format!("iifname != {links} ct direction reply {restore}"));
    }
    outgoing.push(restore);
    sets.push(hook_chain(("prerouting", "filter", "prerouting"), PRIORITY, "accept", incoming));
    sets.push(hook_chain(("output", "route", "output"), PRIORITY, "accept", outgoing));
    replacement(table, &sets)
}

/// A script that adds older connections, each with the number of its link, to the sets.
pub(crate) fn elements(table: &str, older: &[(u8, Connection)]) -> String {
    let mut sets: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (number, Connection { local, remote }) in older {
        let ends = [local, remote].map(|socket: &SocketAddr| format!("{} . {}", socket.ip(), socket.port()));
        sets.entry(set_name(local.is_ipv4(), *number)).or_default().push(ends.join(" . "));
    }
    let add = |(name, list)| format!("add element inet {table} {name} {}\n", any_of::<String>(list));
    sets.into_iter().map(add).collect()
}

/// The set of older connections of a link.
fn set_name(is_v4: bool, link: u8) -> String {
    format!("older{}_{link}", if is_v4 { 4 } else { 6 })
}
