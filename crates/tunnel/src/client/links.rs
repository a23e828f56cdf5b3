//! The links of a client: where each leads, whether the server answers there, how it is to be used, and the path that is
//! opened over it.
//!
//! In: links that come and go, policies, answers to probes, what becomes of paths. Out: probes to send, paths that are
//! opened on the connection in use. Always holds: over a link on which the server has not answered no path is opened, nor
//! over one of the tier `never`; a policy may come before its link.

use std::{
    collections::{BTreeMap, VecDeque},
    net::SocketAddr,
};

use mpvpn_masque::capsule::LinkPolicy;
use mpvpn_quic::{Connection, LocalAddress, PathStatus, Transmit};
use mpvpn_types::{Duration, Instant, LinkId, PathId, Tier};

use crate::{attempt::Probe, multipath::MultipathConnection};

/// A path that is not validated after this time is opened anew.
const OPENING: Duration = Duration::from_secs(30);
/// After this time it is tried again to open a path that could not be opened.
const NOT_YET: Duration = Duration::from_millis(30);

/// What a policy means at this end, whose packets get their mark from the socket; `agreed`: the far end sends heartbeats
/// accordingly.
pub(super) fn at_this_end(policy: &LinkPolicy, agreed: bool) -> LinkPolicy {
    LinkPolicy { metered: policy.metered && agreed, dscp: 0, ..*policy }
}

#[derive(Debug)]
struct Link {
    remote: SocketAddr,
    up: bool,
    probe: Probe,
    /// When a path may be opened again, and the one that is being opened.
    opening: Option<Instant>,
    path: Option<PathId>,
}

#[derive(Debug, Default)]
pub(crate) struct Links {
    links: BTreeMap<LinkId, Link>,
    policies: BTreeMap<LinkId, LinkPolicy>,
    probes: VecDeque<(LinkId, Vec<u8>)>,
}

impl Links {
    /// A link can carry packets to the server at `remote`. Returns whether that is another place than before.
    pub(super) fn up(&mut self, now: Instant, id: LinkId, remote: SocketAddr) -> bool {
        let link = self.links.entry(id).or_insert_with(|| Link {
            remote,
            up: false,
            probe: Probe::new(now),
            opening: None,
            path: None,
        });
        link.up = true;
        link.probe.restart(now);
        if id.is_tcp() {
            // The server has taken the connection.
            link.probe.answer();
        }
        std::mem::replace(&mut link.remote, remote) != remote
    }

    /// A link cannot carry packets. Returns whether it is known.
    pub(super) fn down(&mut self, id: LinkId) -> bool {
        let Some(link) = self.links.get_mut(&id) else { return false };
        link.up = false;
        link.opening = None;
        true
    }

    /// All links that are known, up or not.
    pub(super) fn ids(&self) -> Vec<LinkId> {
        self.links.keys().copied().collect()
    }

    /// Sets how a link is to be used; returns how it was before.
    pub(super) fn set_policy(&mut self, id: LinkId, policy: LinkPolicy) -> LinkPolicy {
        self.policies.insert(id, policy).unwrap_or_default()
    }

    pub(super) fn policy(&self, id: LinkId) -> LinkPolicy {
        self.policies.get(&id).copied().unwrap_or_default()
    }

    /// Has a connection use the links by all policies that were set; `agreed`: see [`at_this_end`].
    pub(crate) fn apply_policies(&self, now: Instant, multipath: &mut MultipathConnection, agreed: bool) {
        for (link, policy) in &self.policies {
            multipath.set_link(now, *link, at_this_end(policy, agreed));
        }
    }

    fn may_have_path(&self, id: LinkId) -> Option<&Link> {
        self.links.get(&id).filter(|link| link.up && self.policy(id).tier != Tier::Never)
    }

    /// Where a link leads that may have a path.
    pub(super) fn usable(&self, id: LinkId) -> Option<SocketAddr> {
        self.may_have_path(id).map(|link| link.remote)
    }

    /// How long ago something about a link changed.
    pub(super) fn age(&self, now: Instant, id: LinkId) -> Duration {
        self.links.get(&id).map_or(Duration::ZERO, |link| link.probe.age(now))
    }

    /// Whether the server has answered on a link since something about it changed.
    pub(super) fn has_answered(&self, id: LinkId) -> bool {
        self.links.get(&id).is_some_and(|link| link.probe.answered())
    }

    /// A probe was answered from `remote`. Returns whether that is where the link leads.
    pub(super) fn on_answer(&mut self, id: LinkId, remote: SocketAddr) -> bool {
        let link = self.links.get_mut(&id).filter(|link| link.remote == remote);
        link.map(|link| link.probe.answer()).is_some()
    }

    /// A handshake over a link succeeded: where it has no path it may have one at once.
    pub(super) fn on_connected(&mut self, id: LinkId) {
        if let Some(link) = self.links.get_mut(&id) {
            link.probe.answer();
            link.opening = None;
        }
    }

    /// A path over a link was validated.
    pub(super) fn on_opened(&mut self, id: LinkId) {
        if let Some(link) = self.links.get_mut(&id) {
            (link.opening, link.path) = (None, None);
        }
    }

    /// The path over a link is gone, or it may be used again: whether the server answers there has to be asked anew.
    pub(super) fn ask_again(&mut self, now: Instant, id: LinkId) -> bool {
        let Some(link) = self.links.get_mut(&id) else { return false };
        link.probe.restart(now);
        link.opening = None;
        true
    }

    /// A link is not to be used any more.
    pub(super) fn leave(&mut self, id: LinkId) {
        if let Some(link) = self.links.get_mut(&id) {
            link.opening = None;
        }
    }

    /// There is another connection: all links are asked anew.
    pub(super) fn restart(&mut self, now: Instant) {
        for link in self.links.values_mut() {
            link.probe.restart(now);
            (link.opening, link.path) = (None, None);
        }
    }

    /// Asks on links without a path whether the server can be reached, and opens a path where it can.
    pub(super) fn open_paths(
        &mut self,
        now: Instant,
        multipath: &MultipathConnection,
        connection: &mut Connection,
    ) {
        for id in self.without_path(multipath).collect::<Vec<_>>() {
            let Some(link) = self.links.get_mut(&id) else { continue };
            let mut probe = Vec::new();
            if link.probe.poll(now, id, &mut probe) {
                self.probes.push_back((id, probe));
            }
            if !link.probe.answered() || link.opening.is_some_and(|at| now < at) {
                continue;
            }
            if let Some(path) = link.path.take() {
                connection.close_path(now, path);
            }
            match connection.open_path(now, LocalAddress::link(id), link.remote, PathStatus::Available) {
                // The path is there when it is validated; until then it must not be opened twice.
                Ok(path) => (link.opening, link.path) = (Some(now + OPENING), Some(path)),
                Err(error) => {
                    tracing::debug!(%error, link = id.0, "cannot open a path yet");
                    link.opening = Some(now + NOT_YET);
                }
            }
        }
    }

    /// Links that may have a path, and have none.
    fn without_path<'a>(&'a self, multipath: &'a MultipathConnection) -> impl Iterator<Item = LinkId> + 'a {
        let all = self.links.keys().copied();
        all.filter(|id| self.may_have_path(*id).is_some() && multipath.path_on(*id).is_none())
    }

    /// The next probe, which is at the end of `buf` then.
    pub(super) fn poll_transmit(&mut self, buf: &mut Vec<u8>) -> Option<Transmit> {
        let (id, packet) = self.probes.pop_front()?;
        let remote = self.links.get(&id)?.remote;
        buf.extend_from_slice(&packet);
        let (local, size) = (Some(LocalAddress::link(id)), packet.len());
        Some(Transmit { local, remote, ecn: None, dscp: 0, size, segment_size: None })
    }

    /// When [`Self::open_paths`] has something to do.
    pub(super) fn poll_timeout(&self, multipath: &MultipathConnection) -> Option<Instant> {
        let links = self.without_path(multipath).filter_map(|id| self.links.get(&id));
        links.flat_map(|link| [link.probe.next(), link.opening]).flatten().min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINK: LinkId = LinkId(3);

    fn remote(port: u16) -> SocketAddr {
        ([192, 0, 2, 1], port).into()
    }

    #[test]
    fn a_link_is_usable_while_it_is_up_and_its_tier_is_not_never() {
        let (mut links, now) = (Links::default(), Instant::now());
        let never = LinkPolicy { tier: Tier::Never, ..LinkPolicy::default() };
        assert_eq!(links.set_policy(LINK, never), LinkPolicy::default(), "before there is such a link");
        assert!(!links.up(now, LINK, remote(1)));
        assert_eq!(links.usable(LINK), None);
        assert_eq!(links.set_policy(LINK, LinkPolicy::default()), never);
        assert_eq!(links.usable(LINK), Some(remote(1)));
        assert!(links.up(now, LINK, remote(2)), "the server has moved");
        assert!(links.down(LINK));
        assert_eq!(links.usable(LINK), None);
        assert!(!links.down(LinkId(4)), "nobody knows it");
    }

    #[test]
    fn only_the_server_answers_and_only_until_something_changes() {
        let (mut links, now) = (Links::default(), Instant::now());
        links.up(now, LINK, remote(1));
        assert!(!links.on_answer(LINK, remote(2)) && !links.has_answered(LINK));
        assert!(links.on_answer(LINK, remote(1)) && links.has_answered(LINK));
        let later = now + Duration::from_secs(1);
        assert_eq!(links.age(later, LINK), Duration::from_secs(1));
        assert!(links.ask_again(later, LINK) && !links.has_answered(LINK));
        assert_eq!(links.age(later, LINK), Duration::ZERO);
    }

    #[test]
    fn the_mark_and_the_cost_of_a_link_are_those_of_the_far_end_where_it_knows_them() {
        let policy = LinkPolicy { metered: true, dscp: 46, ..LinkPolicy::default() };
        assert_eq!(at_this_end(&policy, true), LinkPolicy { dscp: 0, ..policy });
        assert_eq!(at_this_end(&policy, false), LinkPolicy::default());
    }
}
