//! The policies of links and paths: tier, rate cap, cost and DSCP.
//!
//! In: policies of links (at a client) and of paths (at a server), possibly before the paths are open. Out:
//! the policy of each path, and the settings to apply to the QUIC connection. Always holds: the number of
//! policies stored for paths that are not open is bounded.

use std::collections::BTreeMap;

use mpvpn_class::ShaperHandle;
use mpvpn_masque::capsule::{LinkNotice, LinkPolicy};
use mpvpn_path::LivenessConfig;
use mpvpn_types::{BitRate, ClassId, Instant, LinkId, PathId};

use super::Role;
use crate::shapers::Shapers;

/// Maximum number of paths with a policy at a server; a connection has at most 32 paths. Larger: a hostile
/// client can occupy more memory.
const MAX_UNOPENED_PATHS: usize = 64;

/// The policy of a path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PathPolicy {
    /// The policy of the path's link, for the sending direction of this end.
    pub(crate) policy: LinkPolicy,
    /// At a server: the first path that the client opened over the same link, if it opened several.
    pub(crate) first_of_link: Option<PathId>,
    /// At a server: the client's number of the link, if the client sent it.
    pub(crate) link: Option<u16>,
}

impl From<LinkPolicy> for PathPolicy {
    fn from(policy: LinkPolicy) -> Self {
        Self { policy, first_of_link: None, link: None }
    }
}

impl From<LinkNotice> for PathPolicy {
    fn from(notice: LinkNotice) -> Self {
        let LinkNotice { policy, first_path: with, link, .. } = notice;
        Self { policy, first_of_link: with, link }
    }
}

/// The policies of links and paths, including those of paths that are not open yet.
#[derive(Debug)]
pub(super) struct LinkPolicies {
    role: Role,
    /// Used at a client.
    by_link: BTreeMap<LinkId, PathPolicy>,
    /// Used at a server.
    by_path: BTreeMap<PathId, PathPolicy>,
}

impl LinkPolicies {
    pub(super) fn new(role: Role) -> Self {
        Self { role, by_link: BTreeMap::new(), by_path: BTreeMap::new() }
    }

    /// At a client: sets the policy of a link, for its present and future paths.
    pub(super) fn set_link(&mut self, link: LinkId, policy: PathPolicy) {
        self.by_link.insert(link, policy);
    }

    /// At a server: sets the policy of a path, which need not be open yet.
    pub(super) fn set_path(&mut self, id: PathId, policy: PathPolicy) {
        self.by_path.insert(id, policy);
        if self.by_path.len() > MAX_UNOPENED_PATHS {
            // Path IDs only grow, so the lowest one is the oldest.
            self.by_path.pop_first();
        }
    }

    /// Removes the policy of a closed path.
    pub(super) fn forget_path(&mut self, id: PathId) {
        self.by_path.remove(&id);
    }

    /// Returns the policy of a new path over a link.
    pub(super) fn of(&self, id: PathId, link: LinkId) -> PathPolicy {
        let known = match self.role {
            Role::Client => self.by_link.get(&link),
            Role::Server => self.by_path.get(&id),
        };
        known.copied().unwrap_or_default()
    }
}

/// The shapers of links that several connections use, and the class of this connection.
#[derive(Debug)]
pub(super) struct SharedLinks {
    shapers: Shapers,
    pub(super) class: ClassId,
}

impl SharedLinks {
    pub(super) fn new(shapers: Shapers, class: ClassId) -> Self {
        Self { shapers, class }
    }
}

/// The policy of a path, and whether it was applied to the QUIC connection.
#[derive(Debug)]
pub(super) struct PolicyInForce {
    policy: PathPolicy,
    /// Whether the settings of the policy were applied to the QUIC connection.
    applied: bool,
    /// The handle of the link's shaper, if classes share the link.
    pub(super) shaper: Option<ShaperHandle>,
}

/// The settings of a path that are applied to the QUIC connection.
#[derive(Debug)]
pub(super) struct PathSettings {
    pub(super) shaper: Option<ShaperHandle>,
    pub(super) cap: Option<BitRate>,
    /// The DSCP of packets sent on the path, 0 to 63 (RFC 2474).
    pub(super) dscp: u8,
}

impl PolicyInForce {
    /// Creates the policy of a new path; `shared`: other connections use the same links.
    pub(super) fn new(policy: PathPolicy, shared: bool) -> Self {
        let is_plain = policy.policy.up.is_none() && policy.policy.dscp == 0;
        Self { policy, applied: is_plain && !shared, shaper: None }
    }

    #[inline]
    pub(super) fn get(&self) -> &LinkPolicy {
        &self.policy.policy
    }

    /// At a server: the first path that the client opened over the same link, if it opened several.
    pub(super) fn first_of_link(&self) -> Option<PathId> {
        self.policy.first_of_link
    }

    /// At a server: the client's number of the link, if the client sent it.
    pub(super) fn client_link(&self) -> Option<u16> {
        self.policy.link
    }

    /// Returns the heartbeat configuration of the path.
    pub(super) fn liveness(&self, role: Role, inside_tcp: bool) -> LivenessConfig {
        let config = if self.get().metered { LivenessConfig::metered() } else { LivenessConfig::default() };
        let config = if role == Role::Server { config.of_server() } else { config };
        if inside_tcp { config.inside_tcp() } else { config }
    }

    /// Sets the policy; returns whether it has changed.
    pub(super) fn set(&mut self, policy: PathPolicy) -> bool {
        let settings = |policy: &PathPolicy| (policy.policy.up, policy.link, policy.policy.dscp);
        self.applied &= settings(&self.policy) == settings(&policy);
        std::mem::replace(&mut self.policy, policy) != policy
    }

    /// Requests that the settings are applied again.
    pub(super) fn reapply(&mut self) {
        self.applied = false;
    }

    /// Returns the settings to apply to the QUIC connection, unless they were applied. `link`: the client's
    /// number of the link, if it is known.
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
        // Inside TCP, the send queue of TCP hides the queue of the link, so only a configured rate can be
        // shaped.
        let measured = !inside_tcp || cap.is_some();
        let handle = shared.zip(link.filter(|_| measured));
        let handle = handle.map(|(shared, link)| shared.shapers.handle(now, link, shared.class, cap));
        self.shaper.clone_from(&handle);
        Some(PathSettings { shaper: handle, cap, dscp })
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
    fn policies_of_unopened_paths_are_bounded_and_the_newest_are_kept() {
        let mut policies = LinkPolicies::new(Role::Server);
        for id in 0..1000 {
            policies.set_path(PathId(id), capped(id.into()));
        }
        assert_eq!(policies.by_path.len(), MAX_UNOPENED_PATHS);
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
    fn settings_are_applied_once_and_again_after_a_change() {
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
            assert_eq!((settings.shaper.is_some(), policy.shaper.is_some()), (shaped, shaped));
        }
    }
}
