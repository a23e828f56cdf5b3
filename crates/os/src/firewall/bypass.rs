//! The table for packets that leave past the tunnel (`tunnel_net/bypass.rs` says why).
//!
//! The first packet of a connection decides, so that a connection keeps its way whatever a name means
//! later: the connection mark holds the link, and a bit that says past the tunnel.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::{
    PacketMatch, SOURCE_NAT_PRIORITY, marking,
    script::{REJECT, any_of, chain, hook_chain, quoted, replacement, set},
    table_name,
};
use crate::tunnel_net::{BYPASS_BIT, LINK_BIT, NUMBER_MASK, OWN_PACKETS, bypass_mark};

/// Priority of the chains that decide: behind the marks for replies (-145), which go back by their link, and
/// before steering into the devices of classes (-140).
const PRIORITY: i32 = -142;
/// The bit of connection marks that says that the kill switch never blocks it.
const ALWAYS_BIT: u32 = 0x0100_0000;
/// The bits of connection marks that say that a connection is past the tunnel, and how.
const CONNECTION_BITS: u32 = NUMBER_MASK | ALWAYS_BIT;
/// Tells the sender that there is no route: another address of the name may have one (RFC 8305).
const NO_ROUTE: &str = "reject with icmpx type no-route";
/// The most destinations of one rule. More would take memory of the kernel, some 100 bytes each; fewer forget
/// names that are in use.
const MAX_DESTINATIONS: u32 = 16_384;

/// A destination of a rule: the number of the rule, the address, and for how many seconds it counts.
pub(crate) type Destination = (usize, IpAddr, u32);

/// A link to leave by.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BypassLink {
    /// The interface.
    pub name: String,
    /// Its number of `LINK_NUMBERS`.
    pub number: u8,
    /// Whether it has a default route of IPv4, and of IPv6.
    pub leads: [bool; 2],
}

/// Packets that leave past the tunnel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BypassMatch {
    pub packets: PacketMatch,
    /// The number of the link; `None`: they are refused.
    pub link: Option<u8>,
    /// Whether they leave while the kill switch blocks, too.
    pub always: bool,
    /// Whether packets of this machine can match, and packets of other hosts.
    pub of_own: bool,
    pub of_others: bool,
}

/// The facts of the table.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BypassTable {
    /// The client's TUN devices; the table is called after the first.
    pub tuns: Vec<String>,
    pub links: Vec<BypassLink>,
    /// The first that matches decides.
    pub rules: Vec<BypassMatch>,
    /// The best link, for programs of the group.
    pub best: Option<u8>,
    /// The groups whose programs use the tunnel, and leave past it, whatever the rules say.
    pub tunnel_group: Option<u32>,
    pub bypass_group: Option<u32>,
    /// Whether others than those with `always` leave.
    pub is_open: bool,
    /// The destinations of rules with names.
    pub destinations: Vec<Destination>,
}

impl BypassTable {
    /// The table's name.
    pub(crate) fn name(&self) -> String {
        table_name(&format!("{} bypass", self.tuns.first().map_or("", String::as_str)))
    }

    /// The script that replaces the table.
    pub(crate) fn script(&self) -> String {
        let mut objects = Vec::new();
        for number in self.rules.iter().filter_map(|rule| rule.packets.destinations) {
            for (is_v4, kind) in [(true, "ipv4_addr"), (false, "ipv6_addr")] {
                let definition = format!("{kind}; flags timeout; size {MAX_DESTINATIONS}");
                let own =
                    self.destinations.iter().filter(|(of, ip, _)| *of == number && ip.is_ipv4() == is_v4);
                let own: Vec<String> = own.map(|(_, ip, seconds)| element(*ip, *seconds)).collect();
                let name = marking::destinations(number, is_v4);
                objects.push(set(("set", &name, &definition), &own));
            }
        }
        for link in &self.links {
            objects.push(chain(&exit_chain(Some(link.number), false), exit_rules(link, false)));
            objects.push(chain(&exit_chain(Some(link.number), true), exit_rules(link, true)));
        }
        objects.push(chain(&exit_chain(None, false), [REJECT.to_owned()]));
        let others = || self.rules.iter().filter(|rule| rule.of_others);
        let own = || self.rules.iter().filter(|rule| rule.of_own);
        let devices =
            self.tuns.iter().chain(self.links.iter().map(|link| &link.name)).map(|name| quoted(name));
        let mut incoming = vec![format!("iifname {} accept", any_of(devices.chain([quoted("lo")])))];
        incoming.extend(self.decision(others()));
        let mut outgoing = vec![format!("oifname {} accept", quoted("lo"))];
        outgoing.extend(self.decision(own()));
        objects.push(hook_chain(("prerouting", "filter", "prerouting"), PRIORITY, "accept", incoming));
        objects.push(hook_chain(("output", "route", "output"), PRIORITY, "accept", outgoing));
        let source = self.links.iter().map(|link| {
            format!(
                "oifname {} {} masquerade",
                quoted(&link.name),
                bypass_mark(link.number).condition("meta mark")
            )
        });
        objects.push(hook_chain(
            ("postrouting", "nat", "postrouting"),
            SOURCE_NAT_PRIORITY,
            "accept",
            source,
        ));
        replacement(&self.name(), &objects)
    }

    /// The rules that decide about packets.
    fn decision<'a>(&'a self, rules: impl Iterator<Item = &'a BypassMatch>) -> Vec<String> {
        let past = LINK_BIT | BYPASS_BIT;
        let (known, own) =
            (if self.is_open { past } else { past | ALWAYS_BIT }, OWN_PACKETS.value | LINK_BIT);
        let mut all = vec![
            format!("{} accept", OWN_PACKETS.condition("meta mark")),
            "ct direction reply accept".to_owned(),
            format!(
                "ct mark & {known:#x} == {known:#x} meta mark set ct mark & {NUMBER_MASK:#x} | {own:#x} accept"
            ),
            "ct state != new accept".to_owned(),
        ];
        let group = |id: u32, verdict: &str| format!("meta skgid {id} {verdict}");
        all.extend(self.tunnel_group.map(|id| group(id, "accept")));
        let best = format!("goto {}", exit_chain(self.best, false));
        all.extend(self.bypass_group.filter(|_| self.is_open).map(|id| group(id, &best)));
        for rule in rules.filter(|rule| self.is_open || rule.always) {
            let verdict = format!("goto {}", exit_chain(rule.link, rule.always));
            all.extend(marking::all_conditions(&rule.packets).iter().map(|one| format!("{one} {verdict}")));
        }
        all
    }
}

/// The chain that sends packets over a link.
fn exit_chain(link: Option<u8>, always: bool) -> String {
    match (link, always) {
        (None, _) => "no_link".to_owned(),
        (Some(number), false) => format!("link_{number}"),
        (Some(number), true) => format!("link_{number}_always"),
    }
}

fn exit_rules(link: &BypassLink, always: bool) -> Vec<String> {
    let missing = [("ipv4", link.leads[0]), ("ipv6", link.leads[1])].into_iter().filter(|(_, leads)| !leads);
    let mut rules: Vec<String> =
        missing.map(|(family, _)| format!("meta nfproto {family} {NO_ROUTE}")).collect();
    let mark = bypass_mark(link.number).value;
    let number = mark & NUMBER_MASK;
    let bits = if always { number | ALWAYS_BIT } else { number };
    rules.push(format!("ct mark set ct mark & {:#x} | {bits:#x}", !CONNECTION_BITS));
    rules.push(format!("meta mark set {mark:#x} accept"));
    rules
}

/// A script that adds destinations, or prolongs them.
pub(crate) fn destinations(table: &str, list: &[Destination]) -> String {
    let one = |(rule, ip, seconds): &Destination| {
        let name = marking::destinations(*rule, ip.is_ipv4());
        // Adding one that is there would keep its time.
        format!(
            "add element inet {table} {name} {{ {ip} }}\ndelete element inet {table} {name} {{ {ip} }}\nadd element inet {table} {name} {{ {} }}\n",
            element(*ip, *seconds)
        )
    };
    list.iter().map(one).collect()
}

fn element(ip: IpAddr, seconds: u32) -> String {
    format!("{ip} timeout {}s", seconds.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(is_open: bool) -> BypassTable {
        let rule =
            |packets, link, always| BypassMatch { packets, link, always, of_own: true, of_others: false };
        let named = PacketMatch { destinations: Some(0), ..PacketMatch::default() };
        let of_user = PacketMatch { uids: vec![7, 7], ..PacketMatch::default() };
        let host = PacketMatch { macs: vec![[2, 0, 0x5e, 0x10, 0, 1]], ..PacketMatch::default() };
        let others = BypassMatch { of_own: false, of_others: true, ..rule(host, None, false) };
        BypassTable {
            tuns: vec!["t0".into()],
            links: vec![BypassLink { name: "eth1".into(), number: 0x80, leads: [true, false] }],
            rules: vec![rule(named, Some(0x80), false), rule(of_user, Some(0x80), true), others],
            best: Some(0x80),
            bypass_group: Some(5),
            is_open,
            destinations: vec![(0, "192.0.2.9".parse().unwrap(), 300)],
            ..BypassTable::default()
        }
    }

    #[test]
    fn a_rule_sends_packets_to_the_chain_of_its_link() {
        let script = table(true).script();
        for expected in [
            "table inet mpvpn_t0_bypass {",
            "set rule0_ip4 {\ntype ipv4_addr; flags timeout; size 16384;\nelements = { 192.0.2.9 timeout 300s }",
            "meta nfproto ipv6 ip6 daddr @rule0_ip6  goto link_128\n",
            "meta nfproto ipv4 meta skuid { 7 }  goto link_128_always\n",
            "meta nfproto ipv4 ether saddr { 02:00:5e:10:00:01 }  goto no_link\n",
            "meta skgid 5 goto link_128\n",
            "meta nfproto ipv6 reject with icmpx type no-route\n",
            "meta mark set 0xc06d70 accept\n",
            "oifname \"eth1\" meta mark & 0xffffff == 0xc06d70 masquerade\n",
        ] {
            assert!(script.contains(expected), "{expected}\n{script}");
        }
        let (_, output) = script.split_once("chain output").unwrap();
        assert!(!output.contains("ether saddr"), "packets of this machine have no hardware address");
    }

    #[test]
    fn while_the_kill_switch_blocks_only_what_may_always_leave_does() {
        let script = table(false).script();
        assert!(script.contains("goto link_128_always\n"));
        assert!(!script.contains("goto link_128\n") && !script.contains("skgid"), "{script}");
        // Connections of the others are not marked any more.
        assert!(script.contains("ct mark & 0x1c00000 == 0x1c00000 meta mark set"), "{script}");
    }

    #[test]
    fn an_address_that_is_named_again_counts_for_longer() {
        let script = destinations("mpvpn_t0_bypass", &[(3, "2001:db8::9".parse().unwrap(), 0)]);
        assert_eq!(script.lines().count(), 3);
        assert!(script.ends_with("add element inet mpvpn_t0_bypass rule3_ip6 { 2001:db8::9 timeout 1s }\n"));
    }
}
