//! Address ranges of ROUTE_ADVERTISEMENT capsules (RFC 9484 §4.7.3), their order, and conversion to CIDR
//! prefixes.
//!
//! In: ranges, prefixes, or received routes. Out: ranges in the order that the RFC requires, violations of
//! that order, or prefixes. Always holds: both ends of a range are of one family, and start ≤ end.

use super::Family;
use ipnet::{IpNet, Ipv4Subnets, Ipv6Subnets};
use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

/// All addresses from start to end, both included, for one IP protocol or all (0).
///
/// Always holds: both ends are of one family and start ≤ end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct IpRange {
    start: IpAddr,
    end: IpAddr,
    protocol: u8,
}

/// Two addresses that do not form a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RangeError {
    /// "The Start IP Address MUST be less than or equal to the End IP Address" (RFC 9484 §4.7.3).
    #[error("range starts at {start}, after its end {end}")]
    Backwards {
        /// First address.
        start: IpAddr,
        /// Last address.
        end: IpAddr,
    },
    /// Start and end are of different IP versions.
    #[error("range mixes IP versions: {start} to {end}")]
    MixedFamilies {
        /// First address.
        start: IpAddr,
        /// Last address.
        end: IpAddr,
    },
}

impl IpRange {
    /// The range from `start` to `end` for IP protocol `protocol` (0: all).
    ///
    /// # Errors
    /// If the ends are of different families or in the wrong order.
    pub fn new(start: IpAddr, end: IpAddr, protocol: u8) -> Result<Self, RangeError> {
        if start.is_ipv4() != end.is_ipv4() {
            return Err(RangeError::MixedFamilies { start, end });
        }
        if start > end {
            return Err(RangeError::Backwards { start, end });
        }
        Ok(Self { start, end, protocol })
    }

    /// The range that covers `net` for IP protocol `protocol` (0: all).
    pub fn from_net(net: IpNet, protocol: u8) -> Self {
        Self { start: net.network(), end: net.broadcast(), protocol }
    }

    /// First address.
    pub fn start(&self) -> IpAddr {
        self.start
    }

    /// Last address.
    pub fn end(&self) -> IpAddr {
        self.end
    }

    /// IP protocol number; 0 means all protocols.
    pub fn protocol(&self) -> u8 {
        self.protocol
    }

    /// IP version of both ends.
    pub fn family(&self) -> Family {
        Family::of(self.start)
    }

    /// Whether `addr` lies in the range, whatever the protocol.
    #[inline]
    pub fn contains(&self, addr: IpAddr) -> bool {
        self.start.is_ipv4() == addr.is_ipv4() && self.start <= addr && addr <= self.end
    }

    /// The smallest list of prefixes that cover exactly this range, in order; at most 254.
    pub fn to_nets(&self) -> Vec<IpNet> {
        match (self.start, self.end) {
            (IpAddr::V4(start), IpAddr::V4(end)) => Ipv4Subnets::new(start, end, 0).map(IpNet::V4).collect(),
            (IpAddr::V6(start), IpAddr::V6(end)) => Ipv6Subnets::new(start, end, 0).map(IpNet::V6).collect(),
            (IpAddr::V4(_), IpAddr::V6(_)) | (IpAddr::V6(_), IpAddr::V4(_)) => Vec::new(),
        }
    }

    /// Sort key of ROUTE_ADVERTISEMENT: IP version, then protocol, then addresses.
    fn order(&self) -> (Family, u8, u128, u128) {
        (self.family(), self.protocol, to_bits(self.start), to_bits(self.end))
    }

    fn overlaps(&self, other: &Self) -> bool {
        self.family() == other.family() && self.start <= other.end && other.start <= self.end
    }
}

impl fmt::Display for IpRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.protocol {
            0 => write!(f, "{}-{}", self.start, self.end),
            protocol => write!(f, "{}-{} protocol {protocol}", self.start, self.end),
        }
    }
}

/// `ranges` as ROUTE_ADVERTISEMENT requires them: sorted, adjacent and overlapping ranges of one protocol
/// merged, and ranges for all protocols subtracted from ranges for single protocols.
pub fn routes_sorted(mut ranges: Vec<IpRange>) -> Vec<IpRange> {
    ranges.sort_unstable_by_key(IpRange::order);
    let mut merged: Vec<IpRange> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match merged.last_mut() {
            Some(last) if joins(last, &range) => last.end = last.end.max(range.end),
            _ => merged.push(range),
        }
    }
    let all: Vec<IpRange> = merged.iter().filter(|range| range.protocol == 0).copied().collect();
    merged
        .into_iter()
        .flat_map(|range| if range.protocol == 0 { vec![range] } else { subtract(range, &all) })
        .collect()
}

/// The first pair of `ranges` that breaks the rules of RFC 9484 §4.7.3, earlier entry first.
///
/// The IP version never decreases, within a version the protocol never decreases, and "if the IP Version and
/// IP Protocol of A and B are both equal, the End IP Address of A MUST be strictly less than the Start IP
/// Address of B".
pub(super) fn order_violation(ranges: &[IpRange]) -> Option<(IpRange, IpRange)> {
    let mut pairs = ranges.iter().zip(ranges.iter().skip(1));
    let (before, after) = pairs.find(|(a, b)| {
        let (key_a, key_b) = ((a.family(), a.protocol), (b.family(), b.protocol));
        key_a > key_b || (key_a == key_b && a.end >= b.start)
    })?;
    Some((*before, *after))
}

/// A range for all protocols and one for a single protocol that overlap, in ordered `ranges`.
pub(super) fn protocol_overlap(ranges: &[IpRange]) -> Option<(IpRange, IpRange)> {
    let all: Vec<&IpRange> = ranges.iter().filter(|range| range.protocol == 0).collect();
    ranges.iter().filter(|range| range.protocol != 0).find_map(|one| {
        // `all` is ordered and free of overlaps: only the first entry that ends at or after `one`
        // starts can touch it.
        let at = all.partition_point(|all| (all.family(), all.end) < (one.family(), one.start));
        let candidate = *all.get(at)?;
        candidate.overlaps(one).then_some((*candidate, *one))
    })
}

/// Whether `next`, which does not start before `last`, is adjacent to it or overlaps it.
fn joins(last: &IpRange, next: &IpRange) -> bool {
    (last.family(), last.protocol) == (next.family(), next.protocol)
        && to_bits(next.start) <= to_bits(last.end).saturating_add(1)
}

/// `range` without `holes`, which are sorted and do not overlap each other.
fn subtract(range: IpRange, holes: &[IpRange]) -> Vec<IpRange> {
    let (mut at, end) = (to_bits(range.start), to_bits(range.end));
    let part = |start, end| IpRange {
        start: from_bits(start, range.family()),
        end: from_bits(end, range.family()),
        protocol: range.protocol,
    };
    let mut left = Vec::new();
    for hole in holes.iter().filter(|hole| hole.overlaps(&range)) {
        let (hole_start, hole_end) = (to_bits(hole.start), to_bits(hole.end));
        if at < hole_start {
            left.push(part(at, hole_start - 1));
        }
        if hole_end >= end {
            return left;
        }
        at = hole_end + 1;
    }
    left.push(part(at, end));
    left
}

fn to_bits(addr: IpAddr) -> u128 {
    match addr {
        IpAddr::V4(addr) => u128::from(addr.to_bits()),
        IpAddr::V6(addr) => addr.to_bits(),
    }
}

fn from_bits(bits: u128, family: Family) -> IpAddr {
    match family {
        Family::V4 => IpAddr::V4(Ipv4Addr::from_bits(bits as u32)),
        Family::V6 => IpAddr::V6(Ipv6Addr::from_bits(bits)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn range(start: &str, end: &str, protocol: u8) -> IpRange {
        IpRange::new(start.parse().unwrap(), end.parse().unwrap(), protocol).unwrap()
    }

    fn v4(start: u8, end: u8, protocol: u8) -> IpRange {
        let (start, end) = (start.min(end), start.max(end));
        IpRange::new([10, 0, 0, start].into(), [10, 0, 0, end].into(), protocol).unwrap()
    }

    #[test]
    fn the_whole_internet_is_one_prefix() {
        for net in ["0.0.0.0/0", "::/0"] {
            let net: IpNet = net.parse().unwrap();
            assert_eq!(IpRange::from_net(net, 0).to_nets(), [net]);
        }
    }

    #[test]
    fn an_unaligned_range_becomes_the_fewest_prefixes() {
        let nets = range("10.0.0.1", "10.0.0.6", 0).to_nets();
        let texts: Vec<_> = nets.iter().map(ToString::to_string).collect();
        assert_eq!(texts, ["10.0.0.1/32", "10.0.0.2/31", "10.0.0.4/31", "10.0.0.6/32"]);
    }

    #[test]
    fn families_do_not_contain_each_other() {
        let all = range("0.0.0.0", "255.255.255.255", 0);
        assert!(all.contains("192.0.2.1".parse().unwrap()));
        assert!(!all.contains("::1".parse().unwrap()));
    }

    #[test]
    fn adjacent_ranges_merge_and_ranges_for_all_protocols_replace_single_ones() {
        let routes = routes_sorted(vec![
            range("2001:db8::", "2001:db8::ff", 0),
            range("10.0.0.128", "10.0.0.255", 0),
            range("10.0.0.0", "10.0.0.127", 0),
            range("10.0.0.100", "10.0.1.9", 17),
            range("10.0.0.1", "10.0.0.2", 6),
        ]);
        let wanted = [
            range("10.0.0.0", "10.0.0.255", 0),
            range("10.0.1.0", "10.0.1.9", 17),
            range("2001:db8::", "2001:db8::ff", 0),
        ];
        assert_eq!(routes, wanted);
    }

    #[test]
    fn bad_ranges_are_refused() {
        let (low, high) = ("10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap());
        assert!(matches!(IpRange::new(high, low, 0), Err(RangeError::Backwards { .. })));
        let v6 = "::1".parse().unwrap();
        assert!(matches!(IpRange::new(low, v6, 0), Err(RangeError::MixedFamilies { .. })));
    }

    proptest! {
        #[test]
        fn sorted_routes_are_legal_and_cover_the_same(
            parts in prop::collection::vec((any::<u8>(), any::<u8>(), 0u8..3), 0..12)
        ) {
            let ranges: Vec<_> = parts.iter().map(|(a, b, protocol)| v4(*a, *b, *protocol)).collect();
            let routes = routes_sorted(ranges.clone());
            prop_assert_eq!(order_violation(&routes), None);
            prop_assert_eq!(protocol_overlap(&routes), None);
            for last in 0..=255u8 {
                let addr = IpAddr::from([10, 0, 0, last]);
                for protocol in 1..3u8 {
                    let covers = |list: &[IpRange]| list.iter().any(|range| {
                        range.contains(addr) && [0, protocol].contains(&range.protocol())
                    });
                    prop_assert_eq!(covers(&ranges), covers(&routes));
                }
            }
        }

        #[test]
        fn prefixes_cover_exactly_the_range(a in any::<u128>(), b in any::<u128>(), shift in 0u32..128) {
            let (low, high) = ((a.min(b)) >> shift, (a.max(b)) >> shift);
            let range = IpRange::new(from_bits(low, Family::V6), from_bits(high, Family::V6), 0).unwrap();
            let nets = range.to_nets();
            prop_assert!(nets.len() <= 254);
            prop_assert_eq!(nets[0].network(), range.start());
            prop_assert_eq!(nets[nets.len() - 1].broadcast(), range.end());
            for pair in nets.windows(2) {
                prop_assert_eq!(to_bits(pair[0].broadcast()) + 1, to_bits(pair[1].network()));
            }
        }

        #[test]
        fn overlap_search_agrees_with_trying_all_pairs(
            parts in prop::collection::vec((any::<u8>(), 0u8..20, 0u8..3), 0..12)
        ) {
            let mut sorted: Vec<_> =
                parts.iter().map(|(a, len, protocol)| v4(*a, a.saturating_add(*len), *protocol)).collect();
            sorted.sort_by_key(IpRange::order);
            let mut ranges: Vec<IpRange> = Vec::new();
            for range in sorted {
                ranges.push(range);
                if order_violation(&ranges).is_some() {
                    ranges.pop();
                }
            }
            let slow = ranges.iter().any(|a| {
                a.protocol == 0 && ranges.iter().any(|b| b.protocol != 0 && a.overlaps(b))
            });
            prop_assert_eq!(protocol_overlap(&ranges).is_some(), slow);
        }
    }
}
