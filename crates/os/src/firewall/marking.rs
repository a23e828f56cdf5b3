//! Rules that set bits of the firewall mark, for policy routing (`ip rule fwmark`) to match.
//!
//! In: [`MarkRule`]s. Out: rules of nft. Always holds: packets are marked before the routing decision;
//! rules with an incoming interface apply to received packets only, the others also to packets that this
//! machine sends; only the bits in the mask of [`MarkRule::set`] change, because other programs use the other
//! bits.

use std::collections::BTreeSet;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::script::{any_of, quoted};

/// Protocols whose headers begin with ports: TCP, UDP, DCCP, SCTP and UDP-Lite (IANA, Assigned Internet
/// Protocol Numbers).
pub(super) const PROTOCOLS_WITH_PORTS: [u8; 5] = [6, 17, 33, 132, 136];

/// Some bits of a firewall mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct MarkBits {
    /// The values of the bits in `mask`; other bits are 0.
    pub value: u32,
    /// The bits that count.
    pub mask: u32,
}

impl MarkBits {
    /// The condition that the mark `key` has these bits.
    pub(crate) fn condition(self, key: &str) -> String {
        format!("{key} & {:#x} == {:#x}", self.mask, self.value)
    }
}

/// A rule: matching packets get these bits in their mark.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct MarkRule {
    /// The packets that the rule is for.
    pub packets: PacketMatch,
    /// The bits that it sets.
    pub set: MarkBits,
}

/// Conditions on a packet, all of which must hold. A list holds if one of its entries matches, or if it is
/// empty.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PacketMatch {
    /// The mark that the packet has already.
    pub marks: Vec<MarkBits>,
    /// Names of the incoming interface.
    pub ingress: Vec<String>,
    /// Transport protocols (IANA, Assigned Internet Protocol Numbers).
    pub protocols: Vec<u8>,
    /// Networks of the source address.
    pub from: Vec<IpNet>,
    /// Networks of the destination address.
    pub to: Vec<IpNet>,
    /// Ranges of source ports: first and last.
    pub from_ports: Vec<(u16, u16)>,
    /// Ranges of destination ports: first and last.
    pub ports: Vec<(u16, u16)>,
    /// DSCPs (RFC 2474), 0 to 63.
    pub dscp: Vec<u8>,
    /// Hardware addresses of the sender.
    #[serde(default)]
    pub macs: Vec<[u8; 6]>,
    /// Users of this machine whose programs send the packet.
    #[serde(default)]
    pub uids: Vec<u32>,
    /// The number of a rule that has sets of destination addresses.
    #[serde(default)]
    pub destinations: Option<usize>,
}

impl PacketMatch {
    /// The protocols to match; where ports are given, only those that have ports.
    fn protocols(&self) -> Vec<u8> {
        match self.ports.is_empty() && self.from_ports.is_empty() {
            true => self.protocols.clone(),
            // In other protocols these bytes are not ports.
            false if self.protocols.is_empty() => PROTOCOLS_WITH_PORTS.to_vec(),
            false => {
                self.protocols.iter().copied().filter(|one| PROTOCOLS_WITH_PORTS.contains(one)).collect()
            }
        }
    }
}

/// The nft rules for `rule`: one for each IP version and mark.
pub(super) fn rules_of(rule: &MarkRule) -> Vec<String> {
    // Accepting ends the chain: the first rule that matches decides.
    let MarkBits { value, mask } = rule.set;
    let end = format!("meta mark set meta mark & {:#x} | {value:#x} accept", !mask);
    all_conditions(&rule.packets).iter().map(|conditions| format!("{conditions} {end}")).collect()
}

/// The conditions of rules, one of which matches exactly these packets: one for each IP version and mark.
pub(super) fn all_conditions(packets: &PacketMatch) -> Vec<String> {
    let marks: Vec<String> = match packets.marks.as_slice() {
        [] => vec![String::new()],
        marks => marks.iter().map(|mark| mark.condition("meta mark")).collect(),
    };
    let conditions = [true, false].into_iter().filter_map(|is_v4| conditions(packets, is_v4));
    conditions.flat_map(|conditions| marks.iter().map(move |mark| format!("{conditions} {mark}"))).collect()
}

/// The conditions for one IP version, without the mark; `None` if no packet can match.
fn conditions(packets: &PacketMatch, is_v4: bool) -> Option<String> {
    let (version, header) = if is_v4 { ("ipv4", "ip") } else { ("ipv6", "ip6") };
    let protocols = packets.protocols();
    if protocols.is_empty() && !(packets.ports.is_empty() && packets.from_ports.is_empty()) {
        return None;
    }
    let mut conditions = format!("meta nfproto {version}");
    let mut require = |key: &str, values: Vec<String>| {
        if !values.is_empty() {
            conditions += &format!(" {key} {}", any_of(values));
        }
    };
    require("iifname", deduplicated(&packets.ingress).map(|name| quoted(name)).collect());
    require("meta l4proto", deduplicated(&protocols).map(u8::to_string).collect());
    for (name, nets) in [("saddr", &packets.from), ("daddr", &packets.to)] {
        let own: Vec<IpNet> = nets.iter().copied().filter(|net| net.addr().is_ipv4() == is_v4).collect();
        if own.is_empty() && !nets.is_empty() {
            return None;
        }
        // nft refuses overlapping networks in a set.
        require(&format!("{header} {name}"), IpNet::aggregate(&own).iter().map(IpNet::to_string).collect());
    }
    require(&format!("{header} dscp"), deduplicated(&packets.dscp).map(u8::to_string).collect());
    let mac = |mac: &[u8; 6]| mac.map(|byte| format!("{byte:02x}")).join(":");
    require("ether saddr", deduplicated(&packets.macs).map(mac).collect());
    require("meta skuid", deduplicated(&packets.uids).map(u32::to_string).collect());
    require("th sport", merged_ranges(&packets.from_ports));
    require("th dport", merged_ranges(&packets.ports));
    if let Some(number) = packets.destinations {
        conditions += &format!(" {header} daddr @{}", destinations(number, is_v4));
    }
    Some(conditions)
}

/// The name of the set with the destination addresses of the rule with this number.
pub(super) fn destinations(rule: usize, is_v4: bool) -> String {
    format!("rule{rule}_ip{}", if is_v4 { 4 } else { 6 })
}

fn deduplicated<T: Ord>(items: &[T]) -> impl Iterator<Item = &T> {
    items.iter().collect::<BTreeSet<_>>().into_iter()
}

/// Merges ranges of ports that overlap or touch, which nft refuses in a set.
pub(super) fn merged_ranges(ranges: &[(u16, u16)]) -> Vec<String> {
    let mut merged: Vec<(u16, u16)> = Vec::new();
    for (first, last) in deduplicated(ranges) {
        match merged.last_mut() {
            Some(before) if *first <= before.1.saturating_add(1) => before.1 = before.1.max(*last),
            _ => merged.push((*first, *last)),
        }
    }
    merged.into_iter().map(range_of).collect()
}

/// A range of ports, first and last, as nft has it.
pub(super) fn range_of((first, last): (u16, u16)) -> String {
    if first == last { first.to_string() } else { format!("{first}-{last}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_a_rule_for_each_family_and_mark_that_can_be() {
        let set = MarkBits { value: 2 << 24, mask: 0xf << 24 };
        let count = |packets: PacketMatch| rules_of(&MarkRule { packets, set }).len();
        assert_eq!(count(PacketMatch::default()), 2);
        let nets = |list: &[&str]| list.iter().map(|net| net.parse().unwrap()).collect::<Vec<IpNet>>();
        let v4 = PacketMatch { from: nets(&["10.0.0.0/8"]), ..PacketMatch::default() };
        assert_eq!(count(v4.clone()), 1);
        assert_eq!(count(PacketMatch { to: nets(&["fd00::/8"]), ..v4.clone() }), 0);
        let marks = vec![MarkBits { value: 1, mask: 1 }, MarkBits { value: 2, mask: 2 }];
        assert_eq!(count(PacketMatch { marks, ..v4 }), 2);
        assert_eq!(
            count(PacketMatch { protocols: vec![1], ports: vec![(1, 2)], ..PacketMatch::default() }),
            0
        );
    }

    #[test]
    fn ports_are_those_of_protocols_that_have_some_and_their_ranges_are_joined() {
        let packets = PacketMatch { ports: vec![(7, 9), (1, 3), (4, 4), (8, 12)], ..PacketMatch::default() };
        assert_eq!(packets.protocols(), PROTOCOLS_WITH_PORTS);
        assert_eq!(merged_ranges(&packets.ports), ["1-4", "7-12"]);
        let packets = PacketMatch { protocols: vec![1, 17], ..packets };
        assert_eq!(packets.protocols(), [17]);
    }
}
