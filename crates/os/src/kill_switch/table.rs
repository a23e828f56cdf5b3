//! The table's rules, from the exceptions of all clients.

use std::{collections::BTreeSet, net::SocketAddr};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    firewall::{
        MarkBits,
        script::{REJECT, any_of, hook_chain, quoted, removal, replacement, set},
    },
    tunnel_net::{BYPASS_BIT, LINK_BIT, OWN_PACKETS},
};

/// The table's name; its family is `inet`.
pub const TABLE: &str = "mpvpn_kill_switch";
/// Packets whose mark has these bits belong to connections that came in over a link, and leave by it
/// ([`InboundNet`](crate::tunnel_net::InboundNet)), or leave past the tunnel
/// ([`BypassNet`](crate::tunnel_net::BypassNet), which marks none while this table has to block them).
const INBOUND: MarkBits = MarkBits { value: OWN_PACKETS.value | LINK_BIT, mask: OWN_PACKETS.mask | LINK_BIT };

/// Rules see addresses as they leave: behind steering (-140) and destination translation (-100); `filter` of
/// nft(8).
const PRIORITY: i32 = 0;
/// Ports of resolvers: DNS (RFC 1035) and DNS over TLS and QUIC (RFC 7858, RFC 9250).
const DNS_PORTS: [u16; 2] = [53, 853];
/// Router and neighbour discovery (RFC 4861) and multicast listener discovery (RFC 2710, RFC 3810), without
/// which the links themselves do not work. No router forwards these packets.
const ICMPV6_TYPES: [u8; 8] = [130, 131, 132, 133, 134, 135, 136, 143];

/// Packets that one client lets past its tunnel.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exceptions {
    /// TUN devices: packets may enter the tunnel by them.
    pub devices: Vec<String>,
    /// Firewall mark of the client's own packets.
    pub mark: u32,
    /// Where packets with this mark may go, by UDP and TCP: servers, their proxies, and resolvers of the
    /// links.
    pub remotes: Vec<SocketAddr>,
    /// Networks that may be reached past the tunnel, except ports 53 (DNS) and 853 (DNS over TLS and QUIC).
    /// With several clients, a network passes only if each of them names it.
    pub lan: Vec<IpNet>,
    /// It blocks for an instance that may not run, and says nothing about networks.
    #[serde(default)]
    pub is_hold: bool,
}

/// A script that replaces the table; without exceptions it is removed.
pub(crate) fn script(clients: &[Exceptions]) -> String {
    if clients.is_empty() {
        return removal(TABLE);
    }
    let mut objects = sets(clients);
    objects.push(hook_chain(("output", "filter", "output"), PRIORITY, "drop", output_rules()));
    objects.push(hook_chain(("forward", "filter", "forward"), PRIORITY, "drop", forward_rules()));
    replacement(TABLE, &objects)
}

/// The listing of nft, without the parts that differ between two installations of the same rules.
pub(super) fn without_handles(listing: &Value) -> Value {
    match listing {
        Value::Array(list) => list.iter().map(without_handles).collect(),
        Value::Object(fields) => {
            let kept = fields.iter().filter(|(name, _)| !["handle", "metainfo"].contains(&name.as_str()));
            Value::Object(kept.map(|(name, value)| (name.clone(), without_handles(value))).collect())
        }
        other => other.clone(),
    }
}

fn sets(clients: &[Exceptions]) -> Vec<String> {
    let devices: BTreeSet<&String> = clients.iter().flat_map(|client| &client.devices).collect();
    let devices: Vec<String> = devices.into_iter().map(|name| quoted(name)).collect();
    let remotes =
        |client: &Exceptions| client.remotes.iter().map(|remote| (client.mark, *remote)).collect::<Vec<_>>();
    let remotes: BTreeSet<(u32, SocketAddr)> = clients.iter().flat_map(remotes).collect();
    let lan = common_networks(clients);
    let of_family = |is_v4: bool| {
        let remotes = remotes.iter().filter(|(_, remote)| remote.is_ipv4() == is_v4);
        let remotes = remotes.map(|(mark, to)| format!("{mark} . {} . {}", to.ip(), to.port()));
        let lan = lan.iter().filter(|net| net.addr().is_ipv4() == is_v4);
        (remotes.collect::<Vec<_>>(), lan.collect::<Vec<_>>())
    };
    let ((remotes4, lan4), (remotes6, lan6)) = (of_family(true), of_family(false));
    vec![
        set(("set", "tunnels", "ifname"), &devices),
        set(("set", "remotes4", "mark . ipv4_addr . inet_service"), &remotes4),
        set(("set", "remotes6", "mark . ipv6_addr . inet_service"), &remotes6),
        set(("set", "lan4", "ipv4_addr; flags interval"), &lan4),
        set(("set", "lan6", "ipv6_addr; flags interval"), &lan6),
    ]
}

/// The networks that every client names, without those inside of others: nft refuses intervals that overlap.
fn common_networks(clients: &[Exceptions]) -> Vec<IpNet> {
    let running = || clients.iter().filter(|client| !client.is_hold);
    let is_common = |net: &IpNet| running().all(|client| client.lan.iter().any(|other| other.contains(net)));
    let common: Vec<IpNet> =
        running().flat_map(|client| &client.lan).map(IpNet::trunc).filter(is_common).collect();
    IpNet::aggregate(&common)
}

fn output_rules() -> Vec<String> {
    let icmpv6_types = any_of(ICMPV6_TYPES);
    let rules = [
        "oifname \"lo\" accept",
        "oifname @tunnels accept",
        "meta l4proto { 6, 17 } meta mark . ip daddr . th dport @remotes4 accept",
        "meta l4proto { 6, 17 } meta mark . ip6 daddr . th dport @remotes6 accept",
        // DHCP (RFC 2131) of this machine as client and as server, and DHCPv6 (RFC 8415) as client.
        "udp sport 68 udp dport 67 accept",
        "udp sport 67 udp dport 68 accept",
        "udp sport 546 udp dport 547 accept",
        &format!("icmpv6 type {icmpv6_types} accept"),
    ];
    rules.map(str::to_owned).into_iter().chain(shared_rules()).collect()
}

fn forward_rules() -> Vec<String> {
    let rules = [
        "oifname @tunnels accept",
        // Replies to hosts that use the tunnel by this machine.
        "iifname @tunnels ct direction reply accept",
        // Replies to those that left past the tunnel.
        &format!("ct direction reply ct mark & {past:#x} == {past:#x} accept", past = LINK_BIT | BYPASS_BIT),
    ];
    rules.map(str::to_owned).into_iter().chain(shared_rules()).collect()
}

/// The rules for both locally generated and forwarded packets.
fn shared_rules() -> Vec<String> {
    vec![
        format!("{} accept", INBOUND.condition("meta mark")),
        format!("meta l4proto {{ 6, 17 }} th dport {} {REJECT}", any_of(DNS_PORTS)),
        "ip daddr @lan4 accept".to_owned(),
        "ip6 daddr @lan6 accept".to_owned(),
        // Programs learn at once that they are blocked, instead of waiting for an answer.
        REJECT.to_owned(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(mark: u32, remote: &str, lan: &[&str]) -> Exceptions {
        Exceptions {
            devices: vec!["mpvpn0".into()],
            mark,
            remotes: vec![remote.parse().unwrap()],
            lan: lan.iter().map(|net| net.parse().unwrap()).collect(),
            is_hold: false,
        }
    }

    #[test]
    fn a_hold_blocks_and_takes_no_network_from_a_client_that_runs() {
        let hold = Exceptions { is_hold: true, ..Exceptions::default() };
        let running = client(1, "192.0.2.1:443", &["192.168.1.0/24"]);
        assert!(script(std::slice::from_ref(&hold)).contains("hook output priority 0; policy drop;"));
        assert_eq!(common_networks(&[hold.clone(), running.clone()]), running.lan);
        assert!(common_networks(&[hold]).is_empty());
    }

    #[test]
    fn a_network_passes_only_if_every_client_lets_it_pass() {
        let first = client(1, "192.0.2.1:443", &["192.168.1.0/24", "10.0.0.0/8"]);
        let second = client(2, "192.0.2.2:443", &["10.1.0.0/16"]);
        let shown = |clients: &[Exceptions]| {
            common_networks(clients).iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(shown(std::slice::from_ref(&first)), ["10.0.0.0/8", "192.168.1.0/24"]);
        assert_eq!(shown(&[first.clone(), second]), ["10.1.0.0/16"]);
        assert!(shown(&[first, client(3, "192.0.2.3:443", &[])]).is_empty());
    }

    #[test]
    fn without_clients_the_table_is_removed() {
        assert_eq!(script(&[]), format!("table inet {TABLE}\ndelete table inet {TABLE}\n"));
    }
}
