//! Rules that no packet can reach.
//!
//! A rule is the product of its fields, so one covers another if it does in every field. Addresses are looked at once
//! for each version of IP, as both ends of a packet are of the same one.

use std::{fmt, ops::RangeInclusive};

use ipnet::IpNet;

use super::{Rule, has_ports};
use crate::DomainPattern;

/// A rule that can never decide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnreachableRule {
    /// Which one, counted from 0.
    pub rule: usize,
    /// Why it cannot match.
    pub reason: UnreachableReason,
}

/// Why a rule can never decide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnreachableReason {
    /// It asks for ports, and only for protocols that have none.
    NoPorts,
    /// Sources are all of one version of IP, and destinations all of the other.
    MixedIpVersions,
    /// All that it fits an earlier rule fits, this one, counted from 0.
    Covered(usize),
}

impl fmt::Display for UnreachableReason {
    /// Half a sentence, as in "it can never match: …".
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoPorts => f.write_str("it asks for ports, which its protocol does not have"),
            Self::MixedIpVersions => {
                f.write_str("it is about one version of IP at the source and the other at the destination")
            }
            Self::Covered(by) => write!(f, "rule {} comes first and fits all that it fits", by + 1),
        }
    }
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
    (!Version::ALL.iter().any(|version| version.is_in(rule))).then_some(UnreachableReason::MixedIpVersions)
}

/// Whether `first` fits everything that `later` fits.
fn covers(first: &Rule, later: &Rule) -> bool {
    let addresses = Version::ALL
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

/// Of lists in which an empty one stands for everything.
fn covers_all<T>(first: &[T], later: &[T], covers: impl Fn(&T, &T) -> bool) -> bool {
    let one = |other: &T| first.iter().any(|one| covers(one, other));
    first.is_empty() || !later.is_empty() && later.iter().all(one)
}

/// No list of ports covers an empty one, which stands for packets without ports, too.
fn covers_ports(first: &[RangeInclusive<u16>], later: &[RangeInclusive<u16>]) -> bool {
    let joined = joined(first);
    covers_all(&joined, later, |one, other| one.start() <= other.start() && other.end() <= one.end())
}

/// The same ports in as few ranges as possible.
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

/// A version of IP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    V4,
    V6,
}

impl Version {
    const ALL: [Self; 2] = [Self::V4, Self::V6];

    fn of(net: &IpNet) -> Self {
        if net.addr().is_ipv4() { Self::V4 } else { Self::V6 }
    }

    /// Whether a rule may fit packets of this version.
    fn is_in(self, rule: &Rule) -> bool {
        [&rule.from, &rule.to].iter().all(|nets| super::one_of(nets, |net| Self::of(net) == self))
    }

    /// Whether, among addresses of this version, those of `first` contain those of `later`.
    fn covers(self, first: &[IpNet], later: &[IpNet]) -> bool {
        if first.is_empty() {
            return true;
        }
        // Networks that fill a larger one together become that one.
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
