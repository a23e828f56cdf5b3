//! Finds the number of pipes for links with `pipes = "auto"`. That is the default for links whose operator is
//! known to limit each UDP session: the name of the address from which the server sees the link tells the
//! operator.
//!
//! In: what the links carry, the addresses from which the server sees them, and the DNS names of those
//! addresses. Out: numbers of pipes, for the policies of all shards. Always holds: one link at a time is
//! tried with another number; reverse lookups happen for a new address, and at most once an hour for the same
//! one. The name for a link without `pipes` is asked for only inside the tunnel, so that no network on the
//! way learns of it, and only when the link is busy: the query is a packet of another class, whose connection
//! an idle client does not need.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv6Addr},
    time::Instant,
};

use mpvpn_links::{
    Link, Links,
    policies::{Direction, LinkPolicies},
};
use mpvpn_path::{LinkBytes, MIN_BUSY_RATE, PathCountController, SessionLimitHint};
use mpvpn_status::{
    Link as LinkStatus,
    events::{Event, EventSender},
};
use mpvpn_tunnel::PathReport;
use mpvpn_types::{Duration, LinkId, Tier};

/// The interval of updates. Shorter: noise. Longer: slower trials. It is the unit of time of
/// `mpvpn_path::PathCountController`.
const UPDATE_INTERVAL: Duration = Duration::from_secs(1);
/// The shortest interval of reverse lookups of the same address. Names change rarely; chosen.
const REVERSE_LOOKUP_INTERVAL: Duration = Duration::from_secs(3600);

/// Which resolvers to ask for the name of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LookupScope {
    /// Those of the system.
    System,
    /// Those that answer inside the tunnel.
    Tunnel,
}

/// An address whose name is wanted.
pub(super) type WantedName = (IpAddr, LookupScope);

/// All links with an automatic number of pipes, or whose operator decides about that, by name.
pub(super) struct AutoPipes {
    links: BTreeMap<String, AutoPipeLink>,
    pub(super) next_update: Instant,
    events: EventSender,
}

/// The state of one link.
struct AutoPipeLink {
    /// The networks of the link's addresses. In other networks, everything starts anew.
    networks: Vec<IpAddr>,
    judge: PathCountController,
    /// The name of the public address, if it is of an operator that is known to limit each UDP session.
    operator: Option<SessionLimitHint>,
    /// The address that was looked up last, and when.
    last_lookup: Option<(IpAddr, Instant)>,
    /// When [`Self::is_busy`] last counted, and the bytes that the link had carried.
    carried: Option<(Instant, u64)>,
}

impl AutoPipes {
    pub(super) fn new(now: Instant, events: EventSender) -> Self {
        Self { links: BTreeMap::new(), next_update: now, events }
    }

    /// Updates `policies` from what the links carry. Returns whether they changed, and the addresses to look
    /// up. `tunnel_resolves`: whether names can be asked for inside the tunnel. `paths` returns the paths
    /// of the default class's connection, and is called only if needed.
    pub(super) fn update(
        &mut self,
        now: Instant,
        policies: &mut LinkPolicies,
        links: &Links,
        tunnel_resolves: bool,
        paths: impl FnOnce() -> Vec<PathReport>,
    ) -> (bool, Vec<WantedName>) {
        self.next_update = now + UPDATE_INTERVAL;
        let (mut changed, mut wanted) = (false, Vec::new());
        let is_observed =
            |name: &str| policies.has_auto_pipes(name) || tunnel_resolves && policies.has_default_pipes(name);
        let observed: Vec<(LinkId, &Link)> =
            links.uplinks().filter(|(_, link)| is_observed(&link.name)).collect();
        self.links.retain(|name, _| observed.iter().any(|(_, link)| link.name == *name));
        let paths = if observed.is_empty() { Vec::new() } else { paths() };
        for (id, link) in observed {
            let before = self.links.get(&link.name).map_or(1, |link_state| link_state.judge.chosen());
            let is_up = link.remote.is_some();
            if is_up {
                let scope = if policies.has_default_pipes(&link.name) {
                    LookupScope::Tunnel
                } else {
                    LookupScope::System
                };
                let address = self.observe_addresses(now, id, link, &paths, scope);
                wanted.extend(address.map(|address| (address, scope)));
            }
            if policies.has_default_pipes(&link.name) {
                let is_limited =
                    self.links.get(&link.name).is_some_and(|link_state| link_state.operator.is_some());
                changed |= policies.set_limited_by_operator(&link.name, is_limited);
            }
            if !policies.has_auto_pipes(&link.name) {
                continue;
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
        scope: LookupScope,
    ) -> Option<IpAddr> {
        let networks = networks(link);
        let begin = || AutoPipeLink::new(&link.name, networks.clone());
        let link_state = self.links.entry(link.name.clone()).or_insert_with(begin);
        if link_state.networks != networks {
            *link_state = begin();
        }
        if let Some(hint) = link.addresses.iter().find_map(|ip| SessionLimitHint::from_address(*ip)) {
            link_state.judge.set_hint(hint);
        }
        let carried =
            [Direction::Sent, Direction::Received].map(|direction| link.meter.payload_bytes(direction));
        let is_busy = link_state.is_busy(now, carried.iter().sum());
        let observed = of_link(paths, id).find_map(|path| path.view.observed)?.ip().to_canonical();
        let may_ask = is_busy || scope == LookupScope::System;
        (may_ask && link_state.needs_reverse_lookup(now, observed)).then_some(observed)
    }

    /// Uses the hint that an address's name gives.
    pub(super) fn on_reverse_resolved(&mut self, now: Instant, address: IpAddr, name: &str) {
        tracing::debug!(%address, name, "the name of a link's public address");
        let hint = SessionLimitHint::from_dns_name(name);
        let fits =
            |link_state: &AutoPipeLink| link_state.last_lookup.is_some_and(|(asked, _)| asked == address);
        for (link, link_state) in self.links.iter_mut().filter(|(_, link_state)| fits(link_state)) {
            link_state.operator.clone_from(&hint);
            let Some(hint) = hint.clone() else { continue };
            let before = link_state.judge.chosen();
            link_state.judge.set_hint(hint);
            if link_state.judge.chosen() != before {
                link_state.report(link, &self.events);
            }
        }
        // Act on the hint in the next iteration.
        self.next_update = now;
    }

    /// Adds the number of pipes and its reason to a link's status; nothing if the number is fixed.
    pub(super) fn add_to_status(&self, policies: &LinkPolicies, link: &mut LinkStatus) {
        let Some(link_state) = self.links.get(&link.name).filter(|_| policies.has_auto_pipes(&link.name))
        else {
            return;
        };
        link.pipes = Some(link_state.judge.chosen());
        let explanation = link_state.judge.explanation();
        link.pipes_reason = Some(match &link_state.operator {
            Some(operator) if policies.has_default_pipes(&link.name) => with_default(&explanation, operator),
            _ => explanation,
        });
    }
}

impl AutoPipeLink {
    fn new(name: &str, networks: Vec<IpAddr>) -> Self {
        let judge = PathCountController::new().with_link_name(name);
        Self { networks, judge, operator: None, last_lookup: None, carried: None }
    }

    /// Whether the link was busy for at least [`UPDATE_INTERVAL`] until now. `carried`: the bytes that it has
    /// carried.
    fn is_busy(&mut self, now: Instant, carried: u64) -> bool {
        let (at, before) = *self.carried.get_or_insert((now, carried));
        let elapsed = now.saturating_duration_since(at);
        if elapsed < UPDATE_INTERVAL {
            return false;
        }
        self.carried = Some((now, carried));
        carried.saturating_sub(before) as f64 > MIN_BUSY_RATE * elapsed.as_secs_f64()
    }

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

/// Why a link without `pipes` has its number of pipes.
fn with_default(explanation: &str, operator: &SessionLimitHint) -> String {
    let operator = operator.to_string();
    let default = format!("{operator}, so `pipes` is `auto` by default");
    match explanation.strip_prefix(&operator) {
        Some(rest) => default + rest,
        None => format!("{explanation}; {default}"),
    }
}

/// The paths over one link.
fn of_link(paths: &[PathReport], id: LinkId) -> impl Iterator<Item = &PathReport> {
    paths.iter().filter(move |path| path.link.is_some_and(|other| other.uplink() == id))
}

/// The stable part of a link's addresses: over IPv6 the interface identifier changes by itself (temporary
/// addresses, RFC 8981).
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_is_busy_from_one_mbit_per_second_on() {
        let (mut link, start) = (AutoPipeLink::new("eth1", Vec::new()), Instant::now());
        let mut look = |seconds, carried| link.is_busy(start + Duration::from_secs(seconds), carried);
        assert!(!look(0, 900_000), "nothing to compare with");
        assert!(!look(1, 1_000_000), "0.8 Mbit/s");
        assert!(look(2, 1_130_000), "1.04 Mbit/s");
        assert!(!look(2, 1_200_000), "too early to tell");
        assert!(!look(15, 1_500_000), "a pause");
    }

    #[test]
    fn the_reason_names_the_operator_once() {
        let operator = SessionLimitHint::OperatorName("a.starlinkisp.net".to_owned());
        let default = "the operator's name is a.starlinkisp.net, so `pipes` is `auto` by default";
        assert_eq!(with_default(&operator.to_string(), &operator), default);
        let tried = format!("{operator}; whether the second one brings more is being tried");
        assert_eq!(
            with_default(&tried, &operator),
            format!("{default}; whether the second one brings more is being tried")
        );
        assert_eq!(
            with_default("a second one brought 3 %", &operator),
            format!("a second one brought 3 %; {default}")
        );
    }
}
