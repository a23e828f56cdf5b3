//! Ports of a server's machine that lead to hosts in the tunnel.
//!
//! In: ports and hosts. Out: the table `inet mpvpn_<tun>_forwards`. Always holds: a packet to such a port at
//! an address of this machine has the host as its destination from then on; its source stays, but where it
//! comes from the tunnel and goes back there, so that the answer comes this way, too; a counter has the bytes
//! of each direction.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::{
    Change, SOURCE_NAT_PRIORITY, apply, forward_counters,
    marking::range_of,
    script::{any_of, hook_chain, quoted, renewal},
    site::nets,
    table_name,
};
use crate::error::OsError;

/// Before `dstnat` of nft(8) (-100): other programs' translations do not come first.
const PRIORITY: i32 = -101;
/// Behind all translation of destinations: the first packet of a connection is counted, too.
const COUNTING_PRIORITY: i32 = -50;

/// Ports that lead to a host.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PortForward {
    /// Protocol number: TCP 6, UDP 17.
    pub protocol: u8,
    /// The first and the last port.
    pub ports: (u16, u16),
    /// Networks from which packets are let in; all if it is empty.
    pub from: Vec<IpNet>,
    /// The host: at most one address of each family.
    pub to: Vec<IpAddr>,
    /// Its port; `None`: that to which the packet was sent.
    pub to_port: Option<u16>,
}

impl PortForward {
    /// The rules for packets that come in by `ingress`, if that is given.
    pub(super) fn rules(&self, ingress: Option<&str>) -> Vec<String> {
        let by = ingress.map_or(String::new(), |name| format!("iifname {} ", quoted(name)));
        let rule = |to: &IpAddr| {
            let protocol = if to.is_ipv4() { "ip" } else { "ip6" };
            let from = match nets(to.is_ipv4(), self.from.iter().copied()) {
                Some(from) => format!("{protocol} saddr {from} "),
                None if self.from.is_empty() => String::new(),
                None => return None,
            };
            let ports = range_of(self.ports);
            let host = match (self.to_port, to) {
                (Some(port), to) => SocketAddr::new(*to, port).to_string(),
                (None, to) => to.to_string(),
            };
            let family = if to.is_ipv4() { "ipv4" } else { "ipv6" };
            Some(format!(
                "{by}meta nfproto {family} fib daddr type local meta l4proto {} th dport {ports} {from}dnat {protocol} to {host}",
                self.protocol
            ))
        };
        self.to.iter().filter_map(rule).collect()
    }
}

fn counters_of(forward: &PortForward) -> [String; 2] {
    forward_counters::names(forward.protocol, forward.ports.0)
}

/// Counters of the packets that the forwards lead between this machine and the tunnel, and their chains;
/// packets to `others` were translated for another reason. `hosts_in_tunnel`: as at a server.
pub(super) fn counting(
    tun: &str,
    forwards: &[PortForward],
    hosts_in_tunnel: bool,
    others: &[String],
) -> Vec<String> {
    let tun = quoted(tun);
    let protocols: BTreeSet<u8> = forwards.iter().map(|forward| forward.protocol).collect();
    // One look finds the counter: each packet of the tunnel passes these rules.
    let rules = |by: &str, is_answer: bool| {
        let (tun, direction) = (&tun, if is_answer { "reply" } else { "original" });
        let count = |protocol: &u8| {
            let own = forwards.iter().filter(|forward| forward.protocol == *protocol);
            let counter = |forward: &PortForward| {
                let name = quoted(&counters_of(forward)[usize::from(is_answer)]);
                format!("{} : {name}", range_of(forward.ports))
            };
            format!(
                "{by} {tun} ct status dnat ct direction {direction} meta l4proto {protocol} counter name ct original proto-dst map {}",
                any_of(own.map(counter))
            )
        };
        let skipped = others.iter().map(|to| format!("{by} {tun} ct original {to} return"));
        skipped.chain(protocols.iter().map(count)).collect::<Vec<_>>()
    };
    let names = forwards.iter().flat_map(counters_of);
    let counters = names.map(|name| format!("counter {name} {{\n}}\n"));
    let chains = [
        ("count_in", "prerouting", rules("iifname", hosts_in_tunnel)),
        ("count_out", "postrouting", rules("oifname", !hosts_in_tunnel)),
    ];
    let chains = chains
        .map(|(name, hook, rules)| hook_chain((name, "filter", hook), COUNTING_PRIORITY, "accept", rules));
    counters.chain(chains).collect()
}

/// Replaces the forwards of the server with this TUN device; without any there is no table.
///
/// # Errors
/// If nft is missing or refuses them; then nothing has changed.
pub fn set_forwards(tun: &str, forwards: &[PortForward]) -> Result<(), OsError> {
    match forwards.is_empty() {
        true => apply(Change::Remove(table(tun))),
        false => apply(Change::Forwards(tun.to_owned(), forwards.to_vec())),
    }
}

pub(super) fn table(tun: &str) -> String {
    format!("{}_forwards", table_name(tun))
}

pub(super) fn script(tun: &str, forwards: &[PortForward]) -> String {
    let inward = forwards.iter().flat_map(|forward| forward.rules(None)).collect::<Vec<_>>();
    let tun_name = quoted(tun);
    let back = format!("iifname {tun_name} oifname {tun_name} ct status dnat masquerade");
    let mut objects = counting(tun, forwards, true, &[]);
    objects.extend([
        hook_chain(("forward_in", "nat", "prerouting"), PRIORITY, "accept", inward),
        hook_chain(("forward_back", "nat", "postrouting"), SOURCE_NAT_PRIORITY - 1, "accept", [back]),
    ]);
    renewal(&table(tun), &objects)
}

/// A rule that lets clients reach the forwarded ports at the addresses of this machine.
pub(super) fn reachable(protocol: u8, ports: &[(u16, u16)]) -> Option<String> {
    let all = ports.iter().map(|ports| range_of(*ports)).collect::<Vec<_>>();
    (!all.is_empty())
        .then(|| format!("fib daddr type local meta l4proto {protocol} th dport {} accept", any_of(all)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_family_of_a_host_has_a_rule_where_sources_of_that_family_are_let_in() {
        let forward = PortForward {
            protocol: 6,
            ports: (8443, 8443),
            from: Vec::new(),
            to: ["10.0.0.2", "fd00::2"].map(|ip| ip.parse().unwrap()).to_vec(),
            to_port: Some(443),
        };
        let head = "fib daddr type local meta l4proto 6 th dport 8443";
        assert_eq!(
            forward.rules(None),
            [
                format!("meta nfproto ipv4 {head} dnat ip to 10.0.0.2:443"),
                format!("meta nfproto ipv6 {head} dnat ip6 to [fd00::2]:443"),
            ]
        );
        let from = vec!["203.0.113.0/24".parse().unwrap()];
        let some = PortForward { from, ports: (5000, 5010), to_port: None, protocol: 17, ..forward };
        let head = "fib daddr type local meta l4proto 17 th dport 5000-5010";
        assert_eq!(
            some.rules(None),
            [format!("meta nfproto ipv4 {head} ip saddr {{ 203.0.113.0/24 }} dnat ip to 10.0.0.2")]
        );
        let counted =
            counting("t0", std::slice::from_ref(&some), true, &["ip daddr { 10.77.1.0/24 }".to_owned()])
                .concat();
        let count = "meta l4proto 17 counter name ct original proto-dst map { 5000-5010 : \"forward_17_5000";
        for line in [
            "counter forward_17_5000_back {".to_owned(),
            format!("oifname \"t0\" ct status dnat ct direction original {count}_to\" }}"),
            format!("iifname \"t0\" ct status dnat ct direction reply {count}_back\" }}"),
            "iifname \"t0\" ct original ip daddr { 10.77.1.0/24 } return".to_owned(),
        ] {
            assert!(counted.lines().any(|found| found == line), "{line}: {counted}");
        }
        assert!(script("t0", &[some]).starts_with("table inet mpvpn_t0_forwards\nflush table"));
    }
}
