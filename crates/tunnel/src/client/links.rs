//! The links of a client: the server's address over each, whether the server answers there, its policy, and
//! the path that is being opened. In: links, policies, answers to probes, paths that open and close. Out:
//! probes, and paths of the connection in use. Always holds: no path is opened over a link on which the
//! server has not answered, or whose tier is `never`; a policy may come before its link.

use std::{
    collections::{BTreeMap, VecDeque},
    net::SocketAddr,
};

use mpvpn_masque::capsule::LinkPolicy;
use mpvpn_quic::{Connection, LocalAddress, PathStatus, Transmit};
use mpvpn_types::{Duration, Instant, LinkId, PathId, Tier};

use crate::{handshake::VersionProbe, multipath::MultipathConnection};

/// A path that is not validated after this time is closed and opened anew. Chosen. Larger: a link stays
/// unused after a lost validation; smaller: path IDs are used up.
const PATH_VALIDATION_TIMEOUT: Duration = Duration::from_secs(30);
/// Pause after a path could not be opened, because path IDs or connection IDs are missing. Chosen. Larger:
/// paths are late; smaller: idle wake-ups.
const OPEN_PATH_RETRY: Duration = Duration::from_millis(30);

/// The policy that this end applies: the socket sets the DSCP, and a link counts as metered only if the
/// server agreed to send fewer heartbeats, too (`agreed`).
pub(super) fn local_policy(policy: &LinkPolicy, agreed: bool) -> LinkPolicy {
    LinkPolicy { metered: policy.metered && agreed, dscp: 0, ..*policy }
}

#[derive(Debug)]
struct Link {
    remote: SocketAddr,
    up: bool,
    probe: VersionProbe,
    /// When to open the path anew, and the path that is being validated.
    retry_open_at: Option<Instant>,
    path: Option<PathId>,
    /// When the last handshake over it began.
    handshake_at: Option<Instant>,
}

#[derive(Debug, Default)]
pub(crate) struct Links {
    links: BTreeMap<LinkId, Link>,
    policies: BTreeMap<LinkId, LinkPolicy>,
    probes: VecDeque<(LinkId, Vec<u8>)>,
}

impl Links {
    /// A link can reach the server at `remote`. Returns whether that address has changed.
    pub(super) fn up(&mut self, now: Instant, id: LinkId, remote: SocketAddr) -> bool {
        let link = self.links.entry(id).or_insert_with(|| Link {
            remote,
            up: false,
            probe: VersionProbe::new(now),
            retry_open_at: None,
            path: None,
            handshake_at: None,
        });
        link.up = true;
        link.probe.restart(now);
        if id.is_tcp() {
            // The server has accepted the TCP connection.
            link.probe.mark_answered();
        }
        std::mem::replace(&mut link.remote, remote) != remote
    }

    /// A link is down. Returns whether it is known.
    pub(super) fn down(&mut self, id: LinkId) -> bool {
        let Some(link) = self.links.get_mut(&id) else { return false };
        link.up = false;
        link.retry_open_at = None;
        true
    }

    /// All known links, up or not.
    pub(super) fn ids(&self) -> Vec<LinkId> {
        self.links.keys().copied().collect()
    }

    /// Sets the policy of a link; returns the previous one.
    pub(super) fn set_policy(&mut self, id: LinkId, policy: LinkPolicy) -> LinkPolicy {
        self.policies.insert(id, policy).unwrap_or_default()
    }

    pub(super) fn policy(&self, id: LinkId) -> LinkPolicy {
        self.policies.get(&id).copied().unwrap_or_default()
    }

    /// Applies all policies to a connection; `agreed`: see [`local_policy`].
    pub(crate) fn apply_policies(&self, now: Instant, multipath: &mut MultipathConnection, agreed: bool) {
        for (link, policy) in &self.policies {
            multipath.set_link(now, *link, local_policy(policy, agreed));
        }
    }

    /// Passes on which links are down: packets that arrive after a link went down may still validate a path
    /// over it.
    pub(super) fn apply_carriers(&self, now: Instant, multipath: &mut MultipathConnection) {
        for (id, _) in self.links.iter().filter(|(_, link)| !link.up) {
            multipath.on_link_carrier(now, *id, false);
        }
    }

    fn may_have_path(&self, id: LinkId) -> Option<&Link> {
        self.links.get(&id).filter(|link| link.up && self.policy(id).tier != Tier::Never)
    }

    /// Whether each link that may have a path may have one in `other`, too.
    pub(super) fn are_among(&self, other: &Self) -> bool {
        self.links.keys().all(|id| self.usable(*id).is_none() || other.usable(*id).is_some())
    }

    /// The server's address over a link that may have a path.
    pub(super) fn usable(&self, id: LinkId) -> Option<SocketAddr> {
        self.may_have_path(id).map(|link| link.remote)
    }

    /// The time since a link was last probed anew.
    pub(super) fn age(&self, now: Instant, id: LinkId) -> Duration {
        self.links.get(&id).map_or(Duration::ZERO, |link| link.probe.age(now))
    }

    /// Whether the server has answered the probes of a link since they started anew.
    pub(super) fn has_answered(&self, id: LinkId) -> bool {
        self.links.get(&id).is_some_and(|link| link.probe.answered)
    }

    /// A probe was answered from `remote`. Returns whether that is the server's address over the link.
    pub(super) fn on_probe_answer(&mut self, id: LinkId, remote: SocketAddr) -> bool {
        let link = self.links.get_mut(&id).filter(|link| link.remote == remote);
        link.map(|link| link.probe.mark_answered()).is_some()
    }

    /// A handshake over a link completed: a path may be opened at once.
    pub(super) fn on_connected(&mut self, id: LinkId) {
        if let Some(link) = self.links.get_mut(&id) {
            link.probe.mark_answered();
            link.retry_open_at = None;
        }
    }

    /// A path over a link was validated.
    pub(super) fn on_opened(&mut self, id: LinkId) {
        if let Some(link) = self.links.get_mut(&id) {
            (link.retry_open_at, link.path) = (None, None);
        }
    }

    /// The path over a link was closed, or the link may be used again: probes it anew. Returns whether the
    /// link is known.
    pub(super) fn probe_again(&mut self, now: Instant, id: LinkId) -> bool {
        let Some(link) = self.links.get_mut(&id) else { return false };
        link.probe.restart(now);
        link.retry_open_at = None;
        true
    }

    /// The tier of a link is `never` now.
    pub(super) fn stop_using(&mut self, id: LinkId) {
        if let Some(link) = self.links.get_mut(&id) {
            link.retry_open_at = None;
        }
    }

    /// There is a new connection: probes all links anew.
    pub(super) fn restart(&mut self, now: Instant) {
        for link in self.links.values_mut() {
            link.probe.restart(now);
            (link.retry_open_at, link.path) = (None, None);
        }
    }

    /// Probes links without a path, and opens paths where the server answers.
    pub(super) fn open_paths(
        &mut self,
        now: Instant,
        multipath: &MultipathConnection,
        connection: &mut Connection,
    ) {
        for id in self.without_path(multipath).collect::<Vec<_>>() {
            self.probe_if_due(now, id);
            let Some(link) = self.links.get_mut(&id) else { continue };
            if !link.probe.answered || link.retry_open_at.is_some_and(|at| now < at) {
                continue;
            }
            if let Some(path) = link.path.take() {
                connection.close_path(now, path);
            }
            match connection.open_path(now, LocalAddress::link(id), link.remote, PathStatus::Available) {
                // The path exists once it is validated; until then it must not be opened twice.
                Ok(path) => {
                    (link.retry_open_at, link.path) = (Some(now + PATH_VALIDATION_TIMEOUT), Some(path))
                }
                Err(error) => {
                    tracing::debug!(%error, link = id.0, "cannot open a path yet");
                    link.retry_open_at = Some(now + OPEN_PATH_RETRY);
                }
            }
        }
    }

    /// Nothing has been heard on any link `since`: links are asked again.
    pub(super) fn probe_all_again(&mut self, now: Instant, since: Instant) {
        let over_udp = self.links.iter_mut().filter(|(id, _)| !id.is_tcp());
        over_udp.for_each(|(_, link)| link.probe.ask_again(now, since));
    }

    /// Asks over links, whether or not they have a path.
    pub(super) fn probe(&mut self, now: Instant) {
        for id in self.probed().collect::<Vec<_>>() {
            self.probe_if_due(now, id);
        }
    }

    fn probe_if_due(&mut self, now: Instant, id: LinkId) {
        let metered = self.policy(id).metered;
        let Some(link) = self.links.get_mut(&id) else { return };
        let mut probe = Vec::new();
        if link.probe.poll(now, (id, metered), &mut probe) {
            self.probes.push_back((id, probe));
        }
    }

    /// When to call [`Self::probe`].
    pub(super) fn next_probe(&self) -> Option<Instant> {
        self.probed().filter_map(|id| self.links.get(&id)?.probe.next()).min()
    }

    /// The links that are asked: one path of each that may have one.
    fn probed(&self) -> impl Iterator<Item = LinkId> + '_ {
        let first = self.links.keys().copied().filter(|id| id.path_index() == 0 && !id.is_tcp());
        first.filter(|id| self.may_have_path(*id).is_some())
    }

    /// When the last handshake over a link began, if one has.
    pub(super) fn last_handshake(&self, id: LinkId) -> Option<Instant> {
        self.links.get(&id)?.handshake_at
    }

    /// A handshake over a link begins.
    pub(super) fn on_handshake(&mut self, now: Instant, id: LinkId) {
        if let Some(link) = self.links.get_mut(&id) {
            link.handshake_at = Some(now);
        }
    }

    /// Links that may have a path, and have none.
    fn without_path<'a>(&'a self, multipath: &'a MultipathConnection) -> impl Iterator<Item = LinkId> + 'a {
        self.links.keys().copied().filter(|id| self.needs_path(*id, multipath))
    }

    fn needs_path(&self, id: LinkId, multipath: &MultipathConnection) -> bool {
        self.may_have_path(id).is_some() && multipath.paths.path_on(id).is_none()
    }

    /// The next probe, appended to `buf`.
    pub(super) fn poll_transmit(&mut self, buf: &mut Vec<u8>) -> Option<Transmit> {
        let (id, packet) = self.probes.pop_front()?;
        let remote = self.links.get(&id)?.remote;
        buf.extend_from_slice(&packet);
        let (local, size) = (Some(LocalAddress::link(id)), packet.len());
        Some(Transmit { local, remote, ecn: None, dscp: 0, size, segment_size: None })
    }

    /// When to call [`Self::open_paths`].
    pub(super) fn poll_timeout(&self, multipath: &MultipathConnection) -> Option<Instant> {
        let next = |link: &Link| link.probe.next().into_iter().chain(link.retry_open_at).min();
        // Most links have a path and wait for nothing.
        let waiting = self.links.iter().filter_map(|(id, link)| Some((*id, next(link)?)));
        waiting.filter(|(id, _)| self.needs_path(*id, multipath)).map(|(_, at)| at).min()
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
        assert!(!links.down(LinkId(4)), "it is not known");
    }

    #[test]
    fn an_answer_counts_from_the_server_only_and_until_the_link_changes() {
        let (mut links, now) = (Links::default(), Instant::now());
        links.up(now, LINK, remote(1));
        assert!(!links.on_probe_answer(LINK, remote(2)) && !links.has_answered(LINK));
        assert!(links.on_probe_answer(LINK, remote(1)) && links.has_answered(LINK));
        let later = now + Duration::from_secs(1);
        assert_eq!(links.age(later, LINK), Duration::from_secs(1));
        assert!(links.probe_again(later, LINK) && !links.has_answered(LINK));
        assert_eq!(links.age(later, LINK), Duration::ZERO);
    }

    #[test]
    fn dscp_and_cost_of_a_link_are_left_to_the_server_if_it_agreed() {
        let policy = LinkPolicy { metered: true, dscp: 46, ..LinkPolicy::default() };
        assert_eq!(local_policy(&policy, true), LinkPolicy { dscp: 0, ..policy });
        assert_eq!(local_policy(&policy, false), LinkPolicy::default());
    }
}
