//! How links are used by what was found out about them: quotas that are used up, and how many pipes they get.
//!
//! In: what the links carry, time. Out: changed policies. Always holds: each is looked at once a second at most.

use std::{net::IpAddr, time::Instant};

use mpvpn_control::status::Link as LinkStatus;
use mpvpn_tunnel::PathReport;

use super::{pipes::AutoPipes, quotas::Quotas};
use crate::{links::Links, policies::Policies};

/// What was found out about all links.
pub(super) struct LinkUse {
    pub(super) quotas: Quotas,
    pub(super) pipes: AutoPipes,
}

/// What a look at the links has brought.
#[derive(Default)]
pub(super) struct LinkNews {
    /// The links are to be used in this way from now on.
    pub(super) policies: Option<Policies>,
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
    pub(super) fn look(
        &mut self,
        now: Instant,
        policies: &Policies,
        links: &Links,
        paths: impl FnOnce() -> Vec<PathReport>,
    ) -> LinkNews {
        if now < self.poll_timeout() {
            return LinkNews::default();
        }
        let (mut policies, mut is_news, mut wanted_names) = (policies.clone(), false, Vec::new());
        if now >= self.quotas.poll_timeout() {
            is_news |= self.count(now, &mut policies, links);
        }
        if now >= self.pipes.poll_timeout() {
            let (news, wanted) = self.pipes.look(now, &mut policies, links, paths);
            is_news |= news;
            wanted_names = wanted;
        }
        LinkNews { policies: is_news.then_some(policies), wanted_names }
    }

    /// Counts what the quotas allow now; whether `policies` were changed.
    pub(super) fn count(&mut self, now: Instant, policies: &mut Policies, links: &Links) -> bool {
        let names = links.uplinks().map(|(_, link)| link.name.as_str());
        self.quotas.look(now, policies, names)
    }

    /// Completes what is told about a link.
    pub(super) fn explain(&self, link: &mut LinkStatus) {
        link.quota_used_bytes = link.quota_bytes.map(|_| self.quotas.used(&link.name));
        self.pipes.explain(link);
    }
}
