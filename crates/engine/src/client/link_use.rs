//! How links are used by what was found out about them: quotas that are used up, and how many pipes they get.
//!
//! In: what the links carry, time. Out: changed policies. Always holds: each is looked at once a second at most.

use std::{net::IpAddr, time::Instant};

use mpvpn_control::status::Link as LinkStatus;
use mpvpn_tunnel::PathReport;

use super::{auto_pipes::AutoPipes, quotas::Quotas};
use crate::{links::Links, policies::LinkPolicies};

/// What was found out about all links.
pub(super) struct LinkUse {
    pub(super) quotas: Quotas,
    pub(super) pipes: AutoPipes,
}

/// What a look at the links has brought.
#[derive(Default)]
pub(super) struct LinkUpdate {
    /// The links are to be used in this way from now on.
    pub(super) policies: Option<LinkPolicies>,
    /// Addresses whose names in the DNS are wanted.
    pub(super) wanted_names: Vec<IpAddr>,
}

impl LinkUse {
    /// When [`Self::look`] wants to be called.
    pub(super) fn poll_timeout(&self) -> Instant {
        self.quotas.poll_timeout().min(self.pipes.poll_timeout())
    }

    /// Looks what the links carry, where it is time. `paths` gives the paths of the first connection, if anybody wants to
    /// know.
    pub(super) fn update(
        &mut self,
        now: Instant,
        policies: &LinkPolicies,
        links: &Links,
        paths: impl FnOnce() -> Vec<PathReport>,
    ) -> LinkUpdate {
        if now < self.poll_timeout() {
            return LinkUpdate::default();
        }
        let (mut policies, mut has_changed, mut wanted_names) = (policies.clone(), false, Vec::new());
        if now >= self.quotas.poll_timeout() {
            has_changed |= self.update_quotas(now, &mut policies, links);
        }
        if now >= self.pipes.poll_timeout() {
            let (changed, wanted) = self.pipes.update(now, &mut policies, links, paths);
            has_changed |= changed;
            wanted_names = wanted;
        }
        LinkUpdate { policies: has_changed.then_some(policies), wanted_names }
    }

    /// Counts what the quotas allow now; whether `policies` were changed.
    pub(super) fn update_quotas(&mut self, now: Instant, policies: &mut LinkPolicies, links: &Links) -> bool {
        let names = links.uplinks().map(|(_, link)| link.name.as_str());
        self.quotas.update(now, policies, names)
    }

    /// Completes what is told about a link.
    pub(super) fn add_to_status(&self, link: &mut LinkStatus) {
        link.quota_used_bytes = link.quota_bytes.map(|_| self.quotas.used(&link.name));
        self.pipes.add_to_status(link);
    }
}
