//! How links are used beyond the configuration: exhausted quotas, and automatic numbers of pipes.
//!
//! In: what the links carry, time. Out: changed policies. Always holds: each part runs at most once a second,
//! and nothing wakes the loop for them while the links carry nothing.

use std::time::Instant;

use mpvpn_links::{Links, policies::LinkPolicies};
use mpvpn_status::Link as LinkStatus;
use mpvpn_tunnel::PathReport;

use super::{
    auto_pipes::{AutoPipes, WantedName},
    quotas::Quotas,
};

/// Quotas and automatic pipes of all links.
pub(super) struct LinkUse {
    pub(super) quotas: Quotas,
    pub(super) pipes: AutoPipes,
    /// The sum that the links had carried at the last update (bytes).
    carried: u64,
    /// Whether that was what they had carried at the one before.
    is_at_rest: bool,
}

/// The result of [`LinkUse::update`].
#[derive(Default)]
pub(super) struct LinkUpdate {
    /// The new policies, if they changed.
    pub(super) policies: Option<LinkPolicies>,
    /// Addresses for reverse lookups.
    pub(super) wanted_names: Vec<WantedName>,
}

impl LinkUse {
    pub(super) fn new(quotas: Quotas, pipes: AutoPipes) -> Self {
        Self { quotas, pipes, carried: 0, is_at_rest: false }
    }

    /// When the loop must wake for [`Self::update`].
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        (!self.is_at_rest).then(|| self.next_update())
    }

    /// When [`Self::update`] must be called, if the loop runs then.
    pub(super) fn next_update(&self) -> Instant {
        self.quotas.next_update.min(self.pipes.next_update)
    }

    /// Updates quotas and pipes that are due. `tunnel_resolves`: whether names can be asked for inside the
    /// tunnel. `paths` returns the paths of the default class's connection, and is called only if needed.
    pub(super) fn update(
        &mut self,
        now: Instant,
        policies: &LinkPolicies,
        links: &Links,
        tunnel_resolves: bool,
        paths: impl FnOnce() -> Vec<PathReport>,
    ) -> LinkUpdate {
        let (mut policies, mut has_changed, mut wanted_names) = (policies.clone(), false, Vec::new());
        let before = self.carried;
        self.carried = links.uplinks().map(|(_, link)| link.meter.ip_bytes()).sum();
        self.is_at_rest = self.carried == before;
        if now >= self.quotas.next_update {
            has_changed |= self.update_quotas(now, &mut policies, links);
        }
        if now >= self.pipes.next_update {
            let (changed, wanted) = self.pipes.update(now, &mut policies, links, tunnel_resolves, paths);
            has_changed |= changed;
            wanted_names = wanted;
        }
        LinkUpdate { policies: has_changed.then_some(policies), wanted_names }
    }

    /// Counts what the links carried. Returns whether `policies` changed.
    pub(super) fn update_quotas(&mut self, now: Instant, policies: &mut LinkPolicies, links: &Links) -> bool {
        let names = links.uplinks().map(|(_, link)| link.name.as_str());
        self.quotas.update(now, policies, names)
    }

    /// Adds quota and pipes to a link's status.
    pub(super) fn add_to_status(&self, policies: &LinkPolicies, link: &mut LinkStatus) {
        link.quota_used_bytes = link.quota_bytes.map(|_| self.quotas.used(&link.name));
        self.pipes.add_to_status(policies, link);
    }
}
