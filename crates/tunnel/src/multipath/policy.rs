//! How the paths of a tunnel are meant to be used: the tiers, limits and costs of their links.
//!
//! In: policies of links (at a client) and of paths (at a server), which may come before the paths. Out: the
//! policy of each path, and what the connection has to be told about it. Always holds: what is kept about
//! paths that may never come is bounded.

use std::collections::BTreeMap;

use mpvpn_class::ShaperHandle;
use mpvpn_masque::capsule::{LinkNotice, LinkPolicy};
use mpvpn_path::LivenessConfig;
use mpvpn_types::{BitRate, ClassId, Instant, LinkId, PathId};

use super::Role;
use crate::shapers::Shapers;

/// Paths of which something may be known before they are there: more than a connection can have.
const MAX_EARLY: usize = 64;

/// How this end is to use a path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PathPolicy {
    /// What was said of its link; the far end's share of it says nothing here.
    pub(crate) policy: LinkPolicy,
    /// At a server: the first of several paths over the same link.
    pub(crate) with: Option<PathId>,
    /// At a server: the client's number of the link, if it has told.
    pub(crate) link: Option<u16>,
}

impl From<LinkPolicy> for PathPolicy {
    fn from(policy: LinkPolicy) -> Self {
        Self { policy, with: None, link: None }
    }
}

impl From<LinkNotice> for PathPolicy {
    fn from(notice: LinkNotice) -> Self {
        let LinkNotice { policy, with, link, .. } = notice;
        Self { policy, with, link }
    }
}

/// The policies of links and paths, known before there are paths and for those to come.
#[derive(Debug)]
pub(super) struct LinkPolicies {
    role: Role,
    /// At a client.
    by_link: BTreeMap<LinkId, PathPolicy>,
    /// At a server.
    by_path: BTreeMap<PathId, PathPolicy>,
}

impl LinkPolicies {
    pub(super) fn new(role: Role) -> Self {
        Self { role, by_link: BTreeMap::new(), by_path: BTreeMap::new() }
    }

    /// At a client: how the link is to be used, whatever paths it has or will have.
    pub(super) fn set_link(&mut self, link: LinkId, policy: PathPolicy) {
        self.by_link.insert(link, policy);
    }

    /// At a server: how a path is to be used, which may still have to be opened.
    pub(super) fn set_path(&mut self, id: PathId, policy: PathPolicy) {
        self.by_path.insert(id, policy);
        if self.by_path.len() > MAX_EARLY {
            // Numbers only grow: the least is that of the path that is gone for the longest time.
            self.by_path.pop_first();
        }
    }

    /// A path is gone, and its number with it.
    pub(super) fn forget_path(&mut self, id: PathId) {
        self.by_path.remove(&id);
    }

    /// The policy of a path that is new.
    pub(super) fn of(&self, id: PathId, link: LinkId) -> PathPolicy {
        let known = match self.role {
            Role::Client => self.by_link.get(&link),
            Role::Server => self.by_path.get(&id),
        };
        known.copied().unwrap_or_default()
    }
}

/// The shapers of the links, where other connections have paths over the same ones.
#[derive(Debug)]
pub(super) struct SharedLinks {
    shapers: Shapers,
    class: ClassId,
}

impl SharedLinks {
    pub(super) fn new(shapers: Shapers, class: ClassId) -> Self {
        Self { shapers, class }
    }
}

/// The policy of a path, and whether the connection knows it.
#[derive(Debug)]
pub(super) struct PolicyInForce {
    policy: PathPolicy,
    /// The connection was told what it has to know.
    applied: bool,
    /// The place at the shaper of the link, where classes share that.
    shaper: Option<ShaperHandle>,
}

/// What the connection has to know about the policy of a path.
#[derive(Debug)]
pub(super) struct PathSettings {
    pub(super) shaper: Option<ShaperHandle>,
    pub(super) cap: Option<BitRate>,
    /// The mark (DSCP) of what is sent there, 0 to 63.
    pub(super) dscp: u8,
}

impl PolicyInForce {
    /// For a path that is new; `shared`: other connections have paths over the same links.
    pub(super) fn new(policy: PathPolicy, shared: bool) -> Self {
        let is_plain = policy.policy.up.is_none() && policy.policy.dscp == 0;
        Self { policy, applied: is_plain && !shared, shaper: None }
    }

    #[inline]
    pub(super) fn get(&self) -> &LinkPolicy {
        &self.policy.policy
    }

    /// At a server: the first of several paths over the same link, and the client's number of the link.
    pub(super) fn place(&self) -> (Option<PathId>, Option<u16>) {
        (self.policy.with, self.policy.link)
    }

    /// The heartbeats that it asks for.
    pub(super) fn liveness(&self, inside_tcp: bool) -> LivenessConfig {
        let config = if self.get().metered { LivenessConfig::metered() } else { LivenessConfig::default() };
        if inside_tcp { config.inside_tcp() } else { config }
    }

    /// Takes another one; returns whether that is news.
    pub(super) fn set(&mut self, policy: PathPolicy) -> bool {
        let settings = |policy: &PathPolicy| (policy.policy.up, policy.link, policy.policy.dscp);
        self.applied &= settings(&self.policy) == settings(&policy);
        std::mem::replace(&mut self.policy, policy) != policy
    }

    /// The connection has to be told again.
    pub(super) fn reapply(&mut self) {
        self.applied = false;
    }

    /// The place at the shaper of the link.
    pub(super) fn shaper(&self) -> Option<&ShaperHandle> {
        self.shaper.as_ref()
    }

    /// What the connection has to be told, if it does not know it yet. `link`: the client's number of the
    /// link, if it is known.
    pub(super) fn apply(
        &mut self,
        now: Instant,
        shared: Option<&SharedLinks>,
        link: Option<u16>,
        inside_tcp: bool,
    ) -> Option<PathSettings> {
        if std::mem::replace(&mut self.applied, true) {
            return None;
        }
        let LinkPolicy { up: cap, dscp, .. } = self.policy.policy;
        // What a queue does to round trips cannot be seen through the one of a TCP connection.
        let measured = !inside_tcp || cap.is_some();
        let seat = shared.zip(link.filter(|_| measured));
        let seat = seat.map(|(shared, link)| shared.shapers.seat(now, link, shared.class, cap));
        self.shaper.clone_from(&seat);
        Some(PathSettings { shaper: seat, cap, dscp })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn capped(mbit: u64) -> PathPolicy {
        let up = Some(BitRate::from_bps(mbit * 1_000_000));
        LinkPolicy { up, ..LinkPolicy::default() }.into()
    }

    #[test]
    fn policies_of_paths_that_never_come_are_bounded_and_the_newest_are_kept() {
        let mut policies = LinkPolicies::new(Role::Server);
        for id in 0..1000 {
            policies.set_path(PathId(id), capped(id.into()));
        }
        assert_eq!(policies.by_path.len(), MAX_EARLY);
        assert_eq!(policies.of(PathId(999), LinkId(0)), capped(999));
        policies.forget_path(PathId(999));
        assert_eq!(policies.of(PathId(999), LinkId(0)), PathPolicy::default());
    }

    #[test]
    fn a_client_knows_policies_by_link_and_a_server_by_path() {
        for (role, by_link, by_path) in [
            (Role::Client, capped(1), PathPolicy::default()),
            (Role::Server, PathPolicy::default(), capped(2)),
        ] {
            let mut policies = LinkPolicies::new(role);
            policies.set_link(LinkId(5), capped(1));
            policies.set_path(PathId(6), capped(2));
            assert_eq!(policies.of(PathId(0), LinkId(5)), by_link);
            assert_eq!(policies.of(PathId(6), LinkId(0)), by_path);
        }
    }

    #[test]
    fn the_connection_is_told_once_and_again_when_something_changes() {
        let now = Instant::now();
        let told =
            |policy: &mut PolicyInForce| policy.apply(now, None, None, false).map(|settings| settings.cap);
        let mut policy = PolicyInForce::new(PathPolicy::default(), false);
        assert_eq!(told(&mut policy), None, "it has no cap anyway");
        policy.set(capped(5));
        assert_eq!((told(&mut policy), told(&mut policy)), (Some(capped(5).policy.up), None));
        policy.set(LinkPolicy { metered: true, ..capped(5).policy }.into());
        assert_eq!(told(&mut policy), None, "nothing to the connection");
        policy.reapply();
        assert_eq!(told(&mut policy), Some(capped(5).policy.up));
        policy.set(LinkPolicy { dscp: 46, ..capped(5).policy }.into());
        assert_eq!(policy.apply(now, None, None, false).map(|settings| settings.dscp), Some(46));
    }

    #[test]
    fn packets_inside_tcp_are_shaped_only_to_a_capacity_that_was_given() {
        let now = Instant::now();
        let shared = SharedLinks::new(Shapers::default(), ClassId(1));
        for (policy, inside_tcp, shaped) in [
            (PathPolicy::default(), false, true),
            (PathPolicy::default(), true, false),
            (capped(5), true, true),
        ] {
            let mut policy = PolicyInForce::new(policy, true);
            let settings = policy.apply(now, Some(&shared), Some(3), inside_tcp).expect("not told yet");
            assert_eq!((settings.shaper.is_some(), policy.shaper().is_some()), (shaped, shaped));
        }
    }
}
