//! The table's rules, from the exceptions of all clients.

use std::net::SocketAddr;

use ipnet::IpNet;
use serde_json::{Value, json};

use super::Exceptions;
use crate::firewall::json::{
    TCP, UDP, accept, add_table, and, any_of, ct, equal, hook_chain, interval_set, meta, network, payload,
    reject, remove_table, set,
};
use crate::{
    firewall::MarkBits,
    tunnel_net::{LINK_BIT, OWN_PACKETS},
};

/// The table's name; its family is `inet`.
pub const TABLE: &str = "mpvpn_kill_switch";
/// Packets whose mark has these bits, and no others of its mask, belong to connections that came in over a
/// link, and leave by it ([`InboundNet`](crate::tunnel_net::InboundNet)).
const INBOUND: MarkBits = MarkBits { value: OWN_PACKETS.value | LINK_BIT, mask: OWN_PACKETS.mask | LINK_BIT };

/// Rules see addresses as they leave: behind steering (-140) and destination translation (-100); `filter` of
/// nft(8).
const PRIORITY: i32 = 0;
/// Ports of resolvers: DNS (RFC 1035) and DNS over TLS and QUIC (RFC 7858, RFC 9250).
const DNS_PORTS: [u16; 2] = [53, 853];
/// Router and neighbour discovery (RFC 4861) and multicast listener discovery (RFC 2710, RFC 3810), without
/// which the links themselves do not work. No router forwards these packets.
const ICMPV6_TYPES: [u8; 8] = [130, 131, 132, 133, 134, 135, 136, 143];

/// A transaction that replaces the table; without exceptions it is removed.
pub(crate) fn transaction(clients: &[Exceptions]) -> Value {
    let mut commands = remove_table(TABLE).to_vec();
    if !clients.is_empty() {
        commands.push(add_table(TABLE));
        commands.extend(sets(clients));
        commands.extend(hook_chain((TABLE, "output", "filter"), PRIORITY, "drop", &output_rules()));
        commands.extend(hook_chain((TABLE, "forward", "filter"), PRIORITY, "drop", &forward_rules()));
    }
    json!({"nftables": commands})
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

fn sets(clients: &[Exceptions]) -> Vec<Value> {
    let mut devices: Vec<&String> = clients.iter().flat_map(|client| &client.devices).collect();
    devices.sort_unstable();
    devices.dedup();
    let mut remotes: Vec<(u32, SocketAddr)> = clients
        .iter()
        .flat_map(|client| client.remotes.iter().map(|remote| (client.mark, *remote)))
        .collect();
    remotes.sort_unstable();
    remotes.dedup();
    let remotes_of = |is_v4: bool| -> Vec<Value> {
        let of_family = remotes.iter().filter(|(_, remote)| remote.is_ipv4() == is_v4);
        of_family.map(|(mark, to)| json!({"concat": [mark, to.ip().to_string(), to.port()]})).collect()
    };
    let lan = common_networks(clients);
    let lan_of = |is_v4: bool| -> Vec<Value> {
        lan.iter().filter(|net| net.addr().is_ipv4() == is_v4).map(network).collect()
    };
    let remote_key = |address: &str| json!(["mark", address, "inet_service"]);
    let devices: Vec<Value> = devices.into_iter().map(|name| json!(name)).collect();
    vec![
        set(TABLE, "tunnels", &json!("ifname"), &devices),
        set(TABLE, "remotes4", &remote_key("ipv4_addr"), &remotes_of(true)),
        set(TABLE, "remotes6", &remote_key("ipv6_addr"), &remotes_of(false)),
        interval_set(TABLE, "lan4", "ipv4_addr", &lan_of(true)),
        interval_set(TABLE, "lan6", "ipv6_addr", &lan_of(false)),
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

fn output_rules() -> Vec<Vec<Value>> {
    let mut rules = vec![
        vec![equal(meta("oifname"), json!("lo")), accept()],
        vec![equal(meta("oifname"), json!("@tunnels")), accept()],
        to_remotes("ip", "@remotes4"),
        to_remotes("ip6", "@remotes6"),
        // DHCP (RFC 2131) of this machine as client and as server, and DHCPv6 (RFC 8415) as client.
        udp_ports(68, 67),
        udp_ports(67, 68),
        udp_ports(546, 547),
        vec![equal(payload("icmpv6", "type"), any_of(json!(ICMPV6_TYPES))), accept()],
    ];
    rules.extend(shared_rules());
    rules
}

fn forward_rules() -> Vec<Vec<Value>> {
    let mut rules = vec![
        vec![equal(meta("oifname"), json!("@tunnels")), accept()],
        // Replies to hosts that use the tunnel by this machine.
        vec![equal(meta("iifname"), json!("@tunnels")), equal(ct("direction"), json!("reply")), accept()],
    ];
    rules.extend(shared_rules());
    rules
}

/// The rules for both locally generated and forwarded packets.
fn shared_rules() -> Vec<Vec<Value>> {
    let is_inbound = equal(and(meta("mark"), INBOUND.mask), json!(INBOUND.value));
    let is_dns = equal(payload("th", "dport"), any_of(json!(DNS_PORTS)));
    let is_udp_or_tcp = equal(meta("l4proto"), any_of(json!([TCP, UDP])));
    vec![
        vec![is_inbound, accept()],
        vec![is_udp_or_tcp, is_dns, reject()],
        vec![equal(payload("ip", "daddr"), json!("@lan4")), accept()],
        vec![equal(payload("ip6", "daddr"), json!("@lan6")), accept()],
        // Programs learn at once that they are blocked, instead of waiting for an answer.
        vec![reject()],
    ]
}

fn to_remotes(protocol: &str, set: &str) -> Vec<Value> {
    let key = json!({"concat": [meta("mark"), payload(protocol, "daddr"), payload("th", "dport")]});
    vec![equal(meta("l4proto"), any_of(json!([TCP, UDP]))), equal(key, json!(set)), accept()]
}

fn udp_ports(from: u16, to: u16) -> Vec<Value> {
    vec![equal(payload("udp", "sport"), json!(from)), equal(payload("udp", "dport"), json!(to)), accept()]
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
        assert!(transaction(std::slice::from_ref(&hold))["nftables"].as_array().unwrap().len() > 2);
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
        let commands = transaction(&[]);
        let list = commands["nftables"].as_array().unwrap();
        assert_eq!(list.len(), 2);
        assert_eq!(list[1]["delete"]["table"]["name"], TABLE);
    }
}
