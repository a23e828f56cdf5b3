//! Which class a packet belongs to.
//!
//! In: what a packet shows ([`PacketFields`]), and the [`DnsSnooper`] that addresses have. Out: the class of the first rule that
//! fits, and which rule it was. A rule describes packets from a client to the far end. It is asked once for each flow,
//! so it goes through the rules one by one, without allocating.
//!
//! [`Rules::unreachable`] finds the rules that no packet can reach.

pub(crate) mod builtin;
mod cover;

use std::{net::IpAddr, ops::RangeInclusive};

use ipnet::IpNet;
use mpvpn_types::{ClassId, Instant, target::CLASSES};
use tracing::debug;

use crate::{DnsSnooper, DomainPattern};

pub use builtin::BuiltInRule;
pub use cover::{UnreachableReason, UnreachableRule};

/// What a packet of a client shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketFields {
    /// The protocol behind the IP headers (IANA, Assigned Internet Protocol Numbers).
    pub protocol: u8,
    /// The client's end.
    pub src: IpAddr,
    /// The far end.
    pub dst: IpAddr,
    /// The ports of the two; none in fragments, and of protocols without ports.
    pub ports: Option<(u16, u16)>,
    /// The differentiated services code point (RFC 2474), 0 to 63.
    pub dscp: u8,
}

/// A kind of packets, and their class. Every field has to fit; a list fits if one of it does, or if it is empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rule {
    /// Protocols.
    pub protocols: Vec<u8>,
    /// Networks of the client's end.
    pub from: Vec<IpNet>,
    /// Networks of the far end.
    pub to: Vec<IpNet>,
    /// Ports of the client's end. A packet that shows no ports fits no list of ports.
    pub from_ports: Vec<RangeInclusive<u16>>,
    /// Ports of the far end.
    pub ports: Vec<RangeInclusive<u16>>,
    /// Code points, 0 to 63.
    pub dscp: Vec<u8>,
    /// Domains of the far end.
    pub domains: Vec<DomainPattern>,
    /// The class of such packets.
    pub class: ClassId,
}

impl Rule {
    fn fits(&self, now: Instant, facts: &PacketFields, names: &DnsSnooper) -> bool {
        let PacketFields { protocol, src, dst, ports, dscp } = *facts;
        one_of(&self.protocols, |one| *one == protocol)
            && one_of(&self.dscp, |one| *one == dscp)
            && one_of(&self.from_ports, |range| ports.is_some_and(|(from, _)| range.contains(&from)))
            && one_of(&self.ports, |range| ports.is_some_and(|(_, to)| range.contains(&to)))
            && one_of(&self.from, |net| net.contains(&src))
            && one_of(&self.to, |net| net.contains(&dst))
            && one_of(&self.domains, |pattern| names.matches(now, dst, pattern))
    }
}

/// Whether one of the list fits, or there is none.
fn one_of<T>(list: &[T], fits: impl FnMut(&T) -> bool) -> bool {
    list.is_empty() || list.iter().any(fits)
}

/// What the rules say about a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Classification {
    /// Its class.
    pub class: ClassId,
    /// The rule that decided, counted from 0; none if no rule fits, which means [`ClassId::DEFAULT`].
    pub rule: Option<usize>,
}

/// Rules in order: the first that fits counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rules(Vec<Rule>);

impl Rules {
    /// These rules in this order.
    pub fn new(rules: Vec<Rule>) -> Self {
        Self(rules)
    }

    /// The class of a packet. `names` should know of [`Self::patterns`].
    pub fn classify(&self, now: Instant, facts: &PacketFields, names: &DnsSnooper) -> Classification {
        let facts = PacketFields { src: facts.src.to_canonical(), dst: facts.dst.to_canonical(), ..*facts };
        let rule = self.0.iter().position(|rule| rule.fits(now, &facts, names));
        let class = rule.map_or(ClassId::DEFAULT, |at| self.0[at].class);
        let reason = if rule.is_some() { "the first rule that fits" } else { "no rule fits" };
        debug!(target: CLASSES, ?facts, class = class.0, rule, reason, "flow classified");
        Classification { class, rule }
    }

    /// The domains that rules ask for.
    pub fn patterns(&self) -> impl Iterator<Item = &DomainPattern> {
        self.0.iter().flat_map(|rule| &rule.domains)
    }

    /// The rules that can never decide, in order: those that contradict themselves, and those that one earlier rule
    /// covers wholly. That several earlier rules cover one together is not noticed.
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
