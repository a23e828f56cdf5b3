//! Finds the number of pipes for links with `pipes = "auto"`.
//!
//! In: what the links carry, the addresses from which the server sees them, and the DNS names of those addresses.
//! Out: numbers of pipes, for the policies of all shards. Always holds: one link at a time is tried with another
//! number; reverse lookups happen for a new address, and at most once an hour for the same one.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv6Addr},
    time::Instant,
};

use mpvpn_control::{
    events::{Event, EventSender},
    status::Link as LinkStatus,
};
use mpvpn_path::{LinkBytes, PathCountController, SessionLimitHint};
use mpvpn_tunnel::PathReport;
use mpvpn_types::{Duration, LinkId, Tier};

use crate::{
    links::{Link, Links},
    policies::{Direction, LinkPolicies},
};

/// The interval of updates. Shorter: noise. Longer: slower trials. It is the unit of time of `mpvpn_path::PathCountController`.
const UPDATE_INTERVAL: Duration = Duration::from_secs(1);
/// The shortest interval of reverse lookups of the same address. Names change rarely; chosen.
const REVERSE_LOOKUP_INTERVAL: Duration = Duration::from_secs(3600);

/// All links with an automatic number of pipes, by name.
pub(super) struct AutoPipes {
    links: BTreeMap<String, AutoPipeLink>,
    next_update: Instant,
    events: EventSender,
}

/// The state of one link.
struct AutoPipeLink {
    /// The networks of the link's addresses. In other networks, everything starts anew.
    networks: Vec<IpAddr>,
    judge: PathCountController,
    /// The address that was looked up last, and when.
    last_lookup: Option<(IpAddr, Instant)>,
}

impl AutoPipes {
    pub(super) fn new(now: Instant, events: EventSender) -> Self {
        Self { links: BTreeMap::new(), next_update: now, events }
    }

    /// When [`Self::update`] must be called.
    pub(super) fn poll_timeout(&self) -> Instant {
        self.next_update
    }

    /// Updates `policies` from what the links carry. Returns whether they changed, and the addresses to look up.
    /// `paths` returns the paths of the default class's connection, and is called only if needed.
    pub(super) fn update(
        &mut self,
        now: Instant,
        policies: &mut LinkPolicies,
        links: &Links,
        paths: impl FnOnce() -> Vec<PathReport>,
    ) -> (bool, Vec<IpAddr>) {
        self.next_update = now + UPDATE_INTERVAL;
        let (mut changed, mut wanted) = (false, Vec::new());
        let autos: Vec<(LinkId, &Link)> =
            links.uplinks().filter(|(_, link)| policies.has_auto_pipes(&link.name)).collect();
        self.links.retain(|name, _| autos.iter().any(|(_, link)| link.name == *name));
        let paths = if autos.is_empty() { Vec::new() } else { paths() };
        for (id, link) in autos {
            let before = self.links.get(&link.name).map_or(1, |link_state| link_state.judge.chosen());
            let is_up = link.remote.is_some();
            if is_up {
                wanted.extend(self.observe_addresses(now, id, link, &paths));
            }
            // A backup link must not be tried: its traffic would have to wait until it is needed.
            let in_use = matches!(policies.tier(&link.name), Tier::Primary | Tier::Overflow);
            let others =
                self.links.iter().any(|(name, other)| *name != link.name && other.judge.is_testing());
            let Some(link_state) = self.links.get_mut(&link.name) else { continue };
            let rtt = of_link(&paths, id).map(|path| path.view.rtt).max().unwrap_or_default();
            let carried = LinkBytes {
                up: link.meter.payload_bytes(Direction::Sent),
                down: link.meter.payload_bytes(Direction::Received),
            };
            link_state.judge.update(now, carried, rtt, is_up && in_use && !others);
            changed |= policies.set_auto_pipes(&link.name, link_state.judge.count());
            if link_state.judge.chosen() != before {
                link_state.report(&link.name, &self.events);
            }
        }
        (changed, wanted)
    }

    /// Uses the hints that a link's addresses give. Returns the address to look up, if any.
    fn observe_addresses(
        &mut self,
        now: Instant,
        id: LinkId,
        link: &Link,
        paths: &[PathReport],
    ) -> Option<IpAddr> {
        let networks = networks(link);
        let begin = || AutoPipeLink {
            networks: networks.clone(),
            judge: PathCountController::new().with_link_name(&link.name),
            last_lookup: None,
        };
        let link_state = self.links.entry(link.name.clone()).or_insert_with(begin);
        if link_state.networks != networks {
            *link_state = begin();
        }
        if let Some(hint) = link.addresses.iter().find_map(|ip| SessionLimitHint::from_address(*ip)) {
            link_state.judge.set_hint(hint);
        }
        let observed = of_link(paths, id).find_map(|path| path.view.observed)?.ip().to_canonical();
        link_state.needs_reverse_lookup(now, observed).then_some(observed)
    }

    /// Uses the hint that an address's name gives.
    pub(super) fn on_reverse_resolved(&mut self, now: Instant, address: IpAddr, name: &str) {
        tracing::debug!(%address, name, "the name of a link's public address");
        let Some(hint) = SessionLimitHint::from_dns_name(name) else { return };
        let fits =
            |link_state: &AutoPipeLink| link_state.last_lookup.is_some_and(|(asked, _)| asked == address);
        for (link, link_state) in self.links.iter_mut().filter(|(_, link_state)| fits(link_state)) {
            let before = link_state.judge.chosen();
            link_state.judge.set_hint(hint.clone());
            if link_state.judge.chosen() != before {
                link_state.report(link, &self.events);
            }
        }
        // Act on the hint in the next iteration.
        self.next_update = now;
    }

    /// Adds the number of pipes and its reason to a link's status.
    pub(super) fn add_to_status(&self, link: &mut LinkStatus) {
        if let Some(link_state) = self.links.get(&link.name) {
            link.pipes = Some(link_state.judge.chosen());
            link.pipes_reason = Some(link_state.judge.explanation());
        }
    }
}

impl AutoPipeLink {
    /// Whether to look up the name of this address now.
    fn needs_reverse_lookup(&mut self, now: Instant, address: IpAddr) -> bool {
        let recent = |(asked, at): (IpAddr, Instant)| {
            asked == address && now.saturating_duration_since(at) < REVERSE_LOOKUP_INTERVAL
        };
        if self.last_lookup.is_some_and(recent) {
            return false;
        }
        self.last_lookup = Some((address, now));
        true
    }

    fn report(&self, link: &str, events: &EventSender) {
        let (pipes, reason) = (self.judge.chosen(), self.judge.explanation().into());
        events.report(Event::PipesChanged { link: link.into(), pipes, reason });
    }
}

/// The paths over one link.
fn of_link(paths: &[PathReport], id: LinkId) -> impl Iterator<Item = &PathReport> {
    paths.iter().filter(move |path| path.link.is_some_and(|other| other.uplink() == id))
}

/// The stable part of a link's addresses: over IPv6 the interface identifier changes by itself (temporary addresses,
/// RFC 8981).
fn networks(link: &Link) -> Vec<IpAddr> {
    let network = |ip: &IpAddr| match ip {
        IpAddr::V4(ip) => IpAddr::V4(*ip),
        IpAddr::V6(ip) => IpAddr::V6(Ipv6Addr::from_bits(ip.to_bits() >> 64 << 64)),
    };
    let mut all: Vec<IpAddr> = link.addresses.iter().map(network).collect();
    all.sort_unstable();
    all.dedup();
    all
}
