//! What clients of a server may reach by packets, and who may reach them.
//!
//! In: the rules of the configuration as [`Profile`]s, the server's networks, and which profile each session's addresses have. Out: the
//! table `inet mpvpn_<tun>_clients`. Always holds: the first rule of a profile that fits decides, as for connections that clients
//! ask for; where none fits, the defaults of [`ClientFilter`] do; what is not allowed is rejected by ICMP "administratively prohibited".

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::IpNet;
use serde_json::{Value, json};

use super::{
    apply_json,
    json::{
        accept, add_table, any_of, chain, ct, drop_packet, equal, goto, hook_chain, meta, network, not_equal,
        payload, protocol_of, reject, remove_table, verdict_map,
    },
    table_name,
};
use crate::error::OsError;

/// `filter` of nft(8).
const PRIORITY: i32 = 0;
/// Where clouds tell a machine its credentials: AWS, Azure and others; Azure's host; Alibaba; AWS by IPv6. A client that
/// reaches them has the rights of the server's machine.
const METADATA: [IpAddr; 4] = [
    IpAddr::V4(Ipv4Addr::new(169, 254, 169, 254)),
    IpAddr::V4(Ipv4Addr::new(168, 63, 129, 16)),
    IpAddr::V4(Ipv4Addr::new(100, 100, 100, 200)),
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254)),
];

/// One rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FilterRule {
    /// Whether packets that fit pass.
    pub allow: bool,
    /// Destinations; all if it is empty.
    pub to: Vec<IpNet>,
    /// Ranges of destination ports of TCP and UDP, both ends included; all protocols and ports if it is empty.
    pub ports: Vec<(u16, u16)>,
}

/// The rules of one kind of user, in their order.
pub type Profile = Vec<FilterRule>;

/// The filter of one server.
#[derive(Clone, Debug)]
pub struct ClientFilter {
    /// The TUN device.
    pub tun: String,
    /// The server's addresses in the tunnel: the only ones of its machine that clients reach.
    pub server: Vec<IpAddr>,
    /// Whether clients reach each other.
    pub is_isolated: bool,
    /// Whether others may open connections to clients; they may where clients keep their addresses beyond the server.
    pub accepts_inbound: bool,
    /// Profiles. The first counts for sessions that have no entry.
    pub profiles: Vec<Profile>,
    /// Addresses of sessions that have another profile, with its index.
    pub sessions: BTreeMap<IpAddr, usize>,
}

impl ClientFilter {
    /// Installs the table in place of the one before, in one transaction.
    ///
    /// # Errors
    /// If nft is missing or refuses it.
    pub fn install(&self) -> Result<(), OsError> {
        apply_json(&self.table(), &self.transaction())
    }

    /// Removes the table of a TUN device; it is fine if there is none.
    ///
    /// # Errors
    /// If nft is missing or refuses.
    pub fn remove(tun: &str) -> Result<(), OsError> {
        let table = Self::table_of(tun);
        apply_json(&table, &json!({"nftables": remove_table(&table)}))
    }

    /// Gives addresses of sessions a profile, or with `None` the first one again. The table stays in force meanwhile.
    ///
    /// # Errors
    /// If nft is missing or refuses; then nothing has changed.
    pub fn change_sessions(&mut self, changes: &[(IpAddr, Option<usize>)]) -> Result<(), OsError> {
        let table = self.table();
        let mut sessions = self.sessions.clone();
        let mut commands = Vec::new();
        for (address, profile) in changes {
            let elements = |command: &str, profile| {
                let one = |direction| {
                    json!({command: {"element": {
                        "family": "inet", "table": table, "name": map_name(direction, address.is_ipv4()),
                        "elem": [element(*address, direction, profile)],
                    }}})
                };
                ["forward", "input"].map(one)
            };
            if let Some(before) = sessions.remove(address) {
                commands.extend(elements("delete", before));
            }
            if let Some(profile) = profile.filter(|profile| *profile != 0) {
                commands.extend(elements("add", profile));
                sessions.insert(*address, profile);
            }
        }
        if !commands.is_empty() {
            apply_json(&table, &json!({"nftables": commands}))?;
        }
        self.sessions = sessions;
        Ok(())
    }

    fn table(&self) -> String {
        Self::table_of(&self.tun)
    }

    fn table_of(tun: &str) -> String {
        format!("{}_clients", table_name(tun))
    }

    fn transaction(&self) -> Value {
        let table = self.table();
        let mut commands = remove_table(&table).to_vec();
        commands.push(add_table(&table));
        commands.extend(chain(&table, "default_forward", &self.default_forward()));
        commands.extend(chain(&table, "default_input", &self.default_input()));
        for (direction, default) in [("forward", "default_forward"), ("input", "default_input")] {
            for (number, profile) in self.profiles.iter().enumerate() {
                let mut rules: Vec<_> = profile.iter().flat_map(statements).collect();
                rules.push(vec![goto(default)]);
                commands.extend(chain(&table, &profile_chain(direction, number), &rules));
            }
        }
        for direction in ["forward", "input"] {
            for is_v4 in [true, false] {
                let of_family = self.sessions.iter().filter(|(address, _)| address.is_ipv4() == is_v4);
                let elements: Vec<Value> =
                    of_family.map(|(address, profile)| element(*address, direction, *profile)).collect();
                let kind = if is_v4 { "ipv4_addr" } else { "ipv6_addr" };
                commands.push(verdict_map(&table, map_name(direction, is_v4), kind, &elements));
            }
        }
        let from_tun = || equal(meta("iifname"), json!(self.tun));
        let by_session = |direction: &str| {
            let look_up = |protocol: &str, is_v4| {
                let map = format!("@{}", map_name(direction, is_v4));
                vec![from_tun(), json!({"vmap": {"key": payload(protocol, "saddr"), "data": map}})]
            };
            [look_up("ip", true), look_up("ip6", false), vec![from_tun(), goto(&profile_chain(direction, 0))]]
        };
        let is_reply = || equal(ct("state"), any_of(json!(["established", "related"])));
        let mut forward = vec![vec![from_tun(), is_reply(), accept()]];
        forward.extend(by_session("forward"));
        let to_tun = || equal(meta("oifname"), json!(self.tun));
        forward.push(vec![to_tun(), is_reply(), accept()]);
        if !self.accepts_inbound {
            forward.push(vec![to_tun(), reject()]);
        }
        let mut input = vec![vec![from_tun(), is_reply(), accept()]];
        input.extend(by_session("input"));
        commands.extend(hook_chain((&table, "forward", "forward"), PRIORITY, "accept", &forward));
        commands.extend(hook_chain((&table, "input", "input"), PRIORITY, "accept", &input));
        json!({"nftables": commands})
    }

    fn default_forward(&self) -> Vec<Vec<Value>> {
        let mut rules: Vec<_> =
            METADATA.iter().map(|address| vec![to(&IpNet::from(*address)), reject()]).collect();
        if self.is_isolated {
            rules.push(vec![equal(meta("oifname"), json!(self.tun)), reject()]);
        }
        rules.push(vec![accept()]);
        rules
    }

    fn default_input(&self) -> Vec<Vec<Value>> {
        let mut rules: Vec<_> =
            self.server.iter().map(|own| vec![to(&IpNet::from(*own)), accept()]).collect();
        // Nobody answers multicast with errors (RFC 1122, section 3.2.2; RFC 4443, section 2.4).
        rules.push(vec![not_equal(meta("pkttype"), json!("host")), drop_packet()]);
        rules.push(vec![reject()]);
        rules
    }
}

fn element(address: IpAddr, direction: &str, profile: usize) -> Value {
    json!([address.to_string(), goto(&profile_chain(direction, profile))])
}

fn profile_chain(direction: &str, number: usize) -> String {
    format!("{direction}_profile_{number}")
}

fn map_name(direction: &str, is_v4: bool) -> &'static str {
    match (direction, is_v4) {
        ("forward", true) => "forward4",
        ("forward", false) => "forward6",
        (_, true) => "input4",
        (_, false) => "input6",
    }
}

/// A rule as expressions of nft: one for each family of its destinations.
fn statements(rule: &FilterRule) -> Vec<Vec<Value>> {
    let verdict = || if rule.allow { accept() } else { reject() };
    let ports = || {
        let range = |&(first, last): &(u16, u16)| {
            if first == last { json!(first) } else { json!({"range": [first, last]}) }
        };
        let list: Vec<Value> = rule.ports.iter().map(range).collect();
        let is_transport = equal(meta("l4proto"), any_of(json!(["tcp", "udp"])));
        if list.is_empty() {
            Vec::new()
        } else {
            vec![is_transport, equal(payload("th", "dport"), any_of(json!(list)))]
        }
    };
    if rule.to.is_empty() {
        return vec![[ports(), vec![verdict()]].concat()];
    }
    rule.to.iter().map(|net| [vec![to(net)], ports(), vec![verdict()]].concat()).collect()
}

fn to(net: &IpNet) -> Value {
    equal(payload(protocol_of(net), "daddr"), network(net))
}
