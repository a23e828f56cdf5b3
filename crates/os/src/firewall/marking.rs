//! Rules that set bits of the firewall mark, for policy routing (`ip rule fwmark`) to match.
//!
//! In: [`MarkRule`]s. Out: statements of nft. Always holds: packets are marked before the routing decision;
//! rules with an incoming interface apply to received packets only, the others also to packets that this
//! machine sends; only the bits in the mask of [`MarkRule::set`] change, because other programs use the other
//! bits.

use std::{collections::BTreeSet, ops::RangeInclusive};

use ipnet::IpNet;
use nftables::{
    expr::{BinaryOperation, Expression, MetaKey, NamedExpression, Range, SetItem},
    stmt::{Mangle, Operator, Statement},
};
use serde::{Deserialize, Serialize};

use super::{comparison, field, meta, prefix, text};
use crate::netlink::Family;

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

/// The statements of the nft rules for `rule`: one nft rule for each IP version and mark.
pub(super) fn statements_of(rule: &MarkRule) -> Vec<Vec<Statement<'static>>> {
    let packets = &rule.packets;
    let marks: Vec<Option<MarkBits>> = match packets.marks.as_slice() {
        [] => vec![None],
        marks => marks.iter().copied().map(Some).collect(),
    };
    let families = [Family::V4, Family::V6];
    let all = families.into_iter().flat_map(|family| marks.iter().map(move |mark| (family, *mark)));
    all.filter_map(|(family, mark)| statements(packets, family, mark, rule.set)).collect()
}

/// The nft rule for one IP version and one of the marks; `None` if no packet can match.
fn statements(
    packets: &PacketMatch,
    family: Family,
    mark: Option<MarkBits>,
    set: MarkBits,
) -> Option<Vec<Statement<'static>>> {
    let (word, header) = match family {
        Family::V4 => ("ipv4", "ip"),
        Family::V6 => ("ipv6", "ip6"),
    };
    let protocols = packets.protocols();
    if protocols.is_empty() && !(packets.ports.is_empty() && packets.from_ports.is_empty()) {
        return None;
    }
    let mut statements = vec![comparison(meta(MetaKey::Nfproto), Operator::EQ, text(word))];
    let mut match_any_of = |left: Expression<'static>, items: Vec<Expression<'static>>| {
        if !items.is_empty() {
            let items = items.into_iter().map(SetItem::Element).collect();
            let set = Expression::Named(NamedExpression::Set(items));
            statements.push(comparison(left, Operator::EQ, set));
        }
    };
    match_any_of(meta(MetaKey::Iifname), deduplicated(&packets.ingress).map(|name| text(name)).collect());
    match_any_of(meta(MetaKey::L4proto), deduplicated(&protocols).map(|one| number(*one)).collect());
    for (name, nets) in [("saddr", &packets.from), ("daddr", &packets.to)] {
        let is_v4 = family == Family::V4;
        let own: Vec<IpNet> = nets.iter().copied().filter(|net| net.addr().is_ipv4() == is_v4).collect();
        if own.is_empty() && !nets.is_empty() {
            return None;
        }
        // nft refuses overlapping networks in a set.
        match_any_of(field(header, name), IpNet::aggregate(&own).into_iter().map(prefix).collect());
    }
    match_any_of(field(header, "dscp"), deduplicated(&packets.dscp).map(|one| number(*one)).collect());
    match_any_of(field("th", "sport"), merged_ranges(&packets.from_ports).into_iter().map(range).collect());
    match_any_of(field("th", "dport"), merged_ranges(&packets.ports).into_iter().map(range).collect());
    if let Some(mark) = mark {
        statements.push(comparison(mark_and(mark.mask), Operator::EQ, Expression::Number(mark.value)));
    }
    let value = BinaryOperation::OR(vec![mark_and(!set.mask), Expression::Number(set.value)]);
    statements.push(Statement::Mangle(Mangle {
        key: meta(MetaKey::Mark),
        value: Expression::BinaryOperation(Box::new(value)),
    }));
    // Ends the chain: the first rule that matches decides.
    statements.push(Statement::Accept(None));
    Some(statements)
}

/// The expression `mark & mask`.
pub(super) fn mark_and(mask: u32) -> Expression<'static> {
    let and = BinaryOperation::AND(meta(MetaKey::Mark), Expression::Number(mask));
    Expression::BinaryOperation(Box::new(and))
}

fn number(number: u8) -> Expression<'static> {
    Expression::Number(number.into())
}

fn range(ports: RangeInclusive<u16>) -> Expression<'static> {
    let [first, last] = [*ports.start(), *ports.end()].map(|port| Expression::Number(port.into()));
    match ports.start() == ports.end() {
        true => first,
        false => Expression::Range(Box::new(Range { range: [first, last] })),
    }
}

fn deduplicated<T: Ord>(items: &[T]) -> impl Iterator<Item = &T> {
    items.iter().collect::<BTreeSet<_>>().into_iter()
}

/// Merges ranges that overlap or touch: nft refuses them in a set.
pub(super) fn merged_ranges(ranges: &[(u16, u16)]) -> Vec<RangeInclusive<u16>> {
    let mut merged_ranges: Vec<RangeInclusive<u16>> = Vec::new();
    for (first, last) in deduplicated(ranges) {
        match merged_ranges.last_mut() {
            Some(before) if *first <= before.end().saturating_add(1) => {
                *before = *before.start()..=*before.end().max(last);
            }
            _ => merged_ranges.push(*first..=*last),
        }
    }
    merged_ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_a_rule_for_each_family_and_mark_that_can_be() {
        let set = MarkBits { value: 2 << 24, mask: 0xf << 24 };
        let count = |packets: PacketMatch| statements_of(&MarkRule { packets, set }).len();
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
        assert_eq!(merged_ranges(&packets.ports), [1..=4, 7..=12]);
        let packets = PacketMatch { protocols: vec![1, 17], ..packets };
        assert_eq!(packets.protocols(), [17]);
    }
}
