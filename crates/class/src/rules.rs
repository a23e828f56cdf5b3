//! Classification rules: which class a flow belongs to.
//!
//! In: the header fields of a packet ([`PacketFields`]), and the domains of addresses ([`DnsSnooper`]). Out:
//! the class of the first rule that matches, and the index of that rule. A rule describes packets from a
//! client to a destination. Rules are evaluated once for each flow, one after the other, without allocation.
//!
//! [`Rules::unreachable`] finds rules that no packet can match.

pub(crate) mod builtin;
mod cover;

use std::{net::IpAddr, ops::RangeInclusive};

use ipnet::IpNet;
use mpvpn_types::{ClassId, Instant, target::CLASSES};
use tracing::debug;

use crate::{DnsSnooper, DomainPattern};

pub use builtin::BuiltInRule;
pub use cover::{UnreachableReason, UnreachableRule};

/// The header fields of a client's packet that rules can match.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketFields {
    /// Protocol number of the transport header (IANA, Assigned Internet Protocol Numbers).
    pub protocol: u8,
    /// Source address: the client's side.
    pub src: IpAddr,
    /// Destination address.
    pub dst: IpAddr,
    /// Source and destination port; `None` for fragments and for protocols without ports.
    pub ports: Option<(u16, u16)>,
    /// The differentiated services code point (RFC 2474), 0 to 63.
    pub dscp: u8,
}

/// A rule: conditions on a packet, and the class of packets that meet all of them. A list is met if one of
/// its entries matches, or if it is empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rule {
    /// Protocol numbers.
    pub protocols: Vec<u8>,
    /// Source networks.
    pub from: Vec<IpNet>,
    /// Destination networks.
    pub to: Vec<IpNet>,
    /// Source ports. A packet without ports matches no list of ports but an empty one.
    pub from_ports: Vec<RangeInclusive<u16>>,
    /// Destination ports.
    pub ports: Vec<RangeInclusive<u16>>,
    /// Code points, 0 to 63.
    pub dscp: Vec<u8>,
    /// Domains of the destination address.
    pub domains: Vec<DomainPattern>,
    /// The class of matching packets.
    pub class: ClassId,
}

impl Rule {
    fn matches(&self, now: Instant, facts: &PacketFields, names: &DnsSnooper) -> bool {
        let PacketFields { protocol, src, dst, ports, dscp } = *facts;
        matches_any(&self.protocols, |one| *one == protocol)
            && matches_any(&self.dscp, |one| *one == dscp)
            && matches_any(&self.from_ports, |range| ports.is_some_and(|(from, _)| range.contains(&from)))
            && matches_any(&self.ports, |range| ports.is_some_and(|(_, to)| range.contains(&to)))
            && matches_any(&self.from, |net| net.contains(&src))
            && matches_any(&self.to, |net| net.contains(&dst))
            && matches_any(&self.domains, |pattern| names.matches(now, dst, pattern))
    }
}

/// Whether an entry of the list matches, or the list is empty.
fn matches_any<T>(list: &[T], fits: impl FnMut(&T) -> bool) -> bool {
    list.is_empty() || list.iter().any(fits)
}

/// The result of classifying a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Classification {
    /// The class of the packet.
    pub class: ClassId,
    /// Index of the rule that matched; `None` if no rule matches, which means [`ClassId::DEFAULT`].
    pub rule: Option<usize>,
}

/// Rules in order: the first that matches decides.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rules(Vec<Rule>);

impl Rules {
    /// The rules, in this order.
    pub fn new(rules: Vec<Rule>) -> Self {
        Self(rules)
    }

    /// The class of a packet. `names` should have the patterns of [`Self::patterns`].
    pub fn classify(&self, now: Instant, facts: &PacketFields, names: &DnsSnooper) -> Classification {
        let facts = PacketFields { src: facts.src.to_canonical(), dst: facts.dst.to_canonical(), ..*facts };
        let rule = self.0.iter().position(|rule| rule.matches(now, &facts, names));
        let class = rule.map_or(ClassId::DEFAULT, |at| self.0[at].class);
        let reason = if rule.is_some() { "first rule that matches" } else { "no rule matches" };
        debug!(target: CLASSES, ?facts, class = class.0, rule, reason, "flow classified");
        Classification { class, rule }
    }

    /// The domains in the rules.
    pub fn patterns(&self) -> impl Iterator<Item = &DomainPattern> {
        self.0.iter().flat_map(|rule| &rule.domains)
    }

    /// The rules that can never match, in order: those with contradictory conditions, and those that one
    /// earlier rule covers completely. A rule that several earlier rules cover only together is not
    /// found.
    pub fn unreachable(&self) -> Vec<UnreachableRule> {
        cover::unreachable(&self.0)
    }
}

/// Whether packets of a protocol have ports: TCP, UDP, DCCP, SCTP and UDP-Lite.
pub fn has_ports(protocol: u8) -> bool {
    matches!(protocol, 6 | 17 | 33 | 132 | 136)
}

#[cfg(test)]
mod tests;
