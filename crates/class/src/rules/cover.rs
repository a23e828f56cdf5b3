//! Finds rules that no packet can match.
//!
//! In: rules in order. Out: the rules that never match, and why. A rule is the product of its conditions, so
//! one rule covers another if it does so in every condition. Addresses are compared separately for each IP
//! version, because source and destination of a packet have the same one.

use std::ops::RangeInclusive;

use derive_more::Display;
use ipnet::IpNet;

use super::{Rule, has_ports};
use crate::DomainPattern;

/// A rule that can never match.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnreachableRule {
    /// Index of the rule.
    pub rule: usize,
    /// Why it cannot match.
    pub reason: UnreachableReason,
}

/// Why a rule can never match.
#[derive(Clone, Copy, Debug, Display, PartialEq, Eq)]
pub enum UnreachableReason {
    /// It has conditions on ports, but only protocols without ports.
    #[display("it has ports, but its protocols have none")]
    NoPorts,
    /// All source networks are of one IP version, and all destination networks of the other.
    #[display("its sources are of one IP version and its destinations of the other")]
    MixedIpVersions,
    /// The earlier rule with this index matches every packet that this rule matches.
    #[display("rule {} comes first and matches everything that it matches", _0 + 1)]
    Covered(usize),
}

pub(super) fn unreachable(rules: &[Rule]) -> Vec<UnreachableRule> {
    let found = rules.iter().enumerate().filter_map(|(at, rule)| {
        let reason = contradiction(rule).or_else(|| {
            (0..at).find(|earlier| covers(&rules[*earlier], rule)).map(UnreachableReason::Covered)
        })?;
        Some(UnreachableRule { rule: at, reason })
    });
    found.collect()
}

fn contradiction(rule: &Rule) -> Option<UnreachableReason> {
    let asks_for_ports = !rule.ports.is_empty() || !rule.from_ports.is_empty();
    if asks_for_ports && !rule.protocols.is_empty() && !rule.protocols.iter().any(|one| has_ports(*one)) {
        return Some(UnreachableReason::NoPorts);
    }
    (!IpVersion::ALL.iter().any(|version| version.is_in(rule))).then_some(UnreachableReason::MixedIpVersions)
}

/// Whether `first` matches everything that `later` matches.
fn covers(first: &Rule, later: &Rule) -> bool {
    let addresses = IpVersion::ALL
        .iter()
        .filter(|version| version.is_in(later))
        .all(|version| version.covers(&first.from, &later.from) && version.covers(&first.to, &later.to));
    addresses
        && covers_all(&first.protocols, &later.protocols, |one, other| one == other)
        && covers_all(&first.dscp, &later.dscp, |one, other| one == other)
        && covers_all(&first.domains, &later.domains, DomainPattern::covers)
        && covers_ports(&first.from_ports, &later.from_ports)
        && covers_ports(&first.ports, &later.ports)
}

/// Whether the list `first` covers the list `later`, where an empty list matches everything.
fn covers_all<T>(first: &[T], later: &[T], covers: impl Fn(&T, &T) -> bool) -> bool {
    let one = |other: &T| first.iter().any(|one| covers(one, other));
    first.is_empty() || !later.is_empty() && later.iter().all(one)
}

/// A non-empty list of ports never covers an empty one, which also matches packets without ports.
fn covers_ports(first: &[RangeInclusive<u16>], later: &[RangeInclusive<u16>]) -> bool {
    let joined = joined(first);
    covers_all(&joined, later, |one, other| one.start() <= other.start() && other.end() <= one.end())
}

/// Merges adjacent and overlapping ranges.
fn joined(ranges: &[RangeInclusive<u16>]) -> Vec<RangeInclusive<u16>> {
    let mut sorted: Vec<_> = ranges.iter().map(|range| (*range.start(), *range.end())).collect();
    sorted.sort_unstable();
    let mut joined: Vec<(u16, u16)> = Vec::new();
    for (start, end) in sorted {
        match joined.last_mut() {
            Some(last) if start <= last.1.saturating_add(1) => last.1 = last.1.max(end),
            _ => joined.push((start, end)),
        }
    }
    joined.into_iter().map(|(start, end)| start..=end).collect()
}

/// An IP version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum IpVersion {
    V4,
    V6,
}

impl IpVersion {
    const ALL: [Self; 2] = [Self::V4, Self::V6];

    fn of(net: &IpNet) -> Self {
        if net.addr().is_ipv4() { Self::V4 } else { Self::V6 }
    }

    /// Whether a rule can match packets of this version.
    fn is_in(self, rule: &Rule) -> bool {
        [&rule.from, &rule.to].iter().all(|nets| super::matches_any(nets, |net| Self::of(net) == self))
    }

    /// Whether the networks of this version in `first` contain those in `later`.
    fn covers(self, first: &[IpNet], later: &[IpNet]) -> bool {
        if first.is_empty() {
            return true;
        }
        // Adjacent networks are merged into larger ones.
        let mine: Vec<IpNet> = first.iter().filter(|net| Self::of(net) == self).copied().collect();
        let mine = IpNet::aggregate(&mine);
        let all = match self {
            Self::V4 => IpNet::V4(ipnet::Ipv4Net::default()),
            Self::V6 => IpNet::V6(ipnet::Ipv6Net::default()),
        };
        let of_later = later.iter().filter(|net| Self::of(net) == self);
        let mut of_later = of_later.chain(later.is_empty().then_some(&all));
        of_later.all(|net| mine.iter().any(|one| one.contains(net)))
    }
}
