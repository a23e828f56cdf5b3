//! How the paths of a tunnel are meant to be used: the tiers, limits and costs of their links.

use mpvpn_masque::capsule::LinkNotice;
use mpvpn_path::{Candidate, LivenessConfig, Offer, Place};
use mpvpn_quic::Connection;
use mpvpn_types::{BitRate, ClassId, Duration, Instant, LinkId, PathId, Tier, Weight};

use super::{Carrier, Echo, Role, Watched};
use crate::shapers::Shapers;

/// Paths of which something may be known before they are there: more than a connection can have.
const MAX_EARLY: usize = 64;

/// A path that stalls is expected to take so much longer, for so long.
const STALLED: Duration = Duration::from_millis(500);

/// How this end is to use a path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PathPolicy {
    /// When data is sent there.
    pub(crate) tier: Tier,
    /// Every packet costs.
    pub(crate) metered: bool,
    /// What this end may send there.
    pub(crate) cap: Option<BitRate>,
    /// How much this end sends there compared with other paths, under the scheduler `weighted`.
    pub(crate) weight: Weight,
    /// At a server: the first of several paths over the same link.
    pub(crate) with: Option<PathId>,
    /// At a server: the client's number of the link, if it has told.
    pub(crate) link: Option<u16>,
}

impl PathPolicy {
    pub(super) fn liveness(&self, inside_tcp: bool) -> LivenessConfig {
        let config = if self.metered { LivenessConfig::metered() } else { LivenessConfig::default() };
        if inside_tcp { config.inside_tcp() } else { config }
    }
}

impl From<LinkNotice> for PathPolicy {
    fn from(notice: LinkNotice) -> Self {
        let LinkNotice { tier, metered, cap, weight, with, link, .. } = notice;
        Self { tier, metered, cap, weight, with, link }
    }
}

impl Watched {
    /// Nobody needs to know quickly whether it still works, and finding out costs.
    pub(super) fn may_rest(&self) -> bool {
        self.policy.metered && self.policy.tier == Tier::Backup && self.place != Place::Active
    }

    /// As far as is known, what either end sends there arrives.
    pub(super) fn works(&self) -> bool {
        self.liveness.is_alive() && self.silent.is_none()
    }

    /// The far end does not hear this one there. Where it does not say so in reports (`told`), its wish for no
    /// data means that, until signs of life sent since were acknowledged.
    pub(super) fn is_unheard(&self, id: PathId, connection: &Connection, told: bool) -> bool {
        if told {
            return self.echo == Some(Echo::Silent);
        }
        // What is sent in the same turn is sent after it was read.
        let heard = |since| connection.acked_sent(id).is_some_and(|acked| acked >= since);
        self.refused.is_some_and(|since| !heard(since))
    }
}

impl Carrier {
    /// At a client: how the link is to be used, whatever paths it has or will have.
    pub(crate) fn set_link(&mut self, now: Instant, link: LinkId, policy: PathPolicy) {
        self.by_link.insert(link, policy);
        self.apply(now, |_, path| path.link == link, policy);
    }

    /// At a server: how a path is to be used, which may still have to be opened.
    pub(crate) fn set_path(&mut self, now: Instant, id: PathId, policy: PathPolicy) {
        self.by_path.insert(id, policy);
        if self.by_path.len() > MAX_EARLY {
            // Numbers only grow: the least is that of the path that is gone for the longest time.
            self.by_path.pop_first();
        }
        self.apply(now, |other, _| other == id, policy);
    }

    fn apply(&mut self, now: Instant, which: impl Fn(PathId, &Watched) -> bool, policy: PathPolicy) {
        for (id, path) in &mut self.paths {
            if !which(*id, path) || path.policy == policy {
                continue;
            }
            if path.policy.metered != policy.metered {
                path.liveness.set_config(now, policy.liveness(path.inside_tcp));
            }
            path.capped &= path.policy.cap == policy.cap && path.policy.link == policy.link;
            path.policy = policy;
            self.changed = true;
        }
    }

    /// The links are shared with other connections of the session from now on, this one being that of `class`.
    pub(crate) fn share_links(&mut self, shapers: Shapers, class: ClassId) {
        self.shares = Some((shapers, class));
        self.paths.values_mut().for_each(|path| path.capped = false);
        self.changed = true;
    }

    /// The paths with their links.
    pub(crate) fn links(&self) -> impl Iterator<Item = (PathId, LinkId)> + '_ {
        self.paths.iter().map(|(id, path)| (*id, path.link))
    }

    /// Whether there is such a path.
    pub(crate) fn has_path(&self, id: PathId) -> bool {
        self.paths.contains_key(&id)
    }

    /// Whether a path over another link works.
    pub(crate) fn works_without(&self, link: LinkId) -> bool {
        self.paths.values().any(|path| path.link != link && path.works())
    }

    /// The policy of a path that is new.
    pub(super) fn policy_of(&self, id: PathId, link: LinkId) -> PathPolicy {
        let known = match self.role {
            Role::Client => self.by_link.get(&link),
            Role::Server => self.by_path.get(&id),
        };
        known.copied().unwrap_or_default()
    }

    /// Gives every path its place by the tiers of the links. `due`: it is time for a measurement.
    pub(super) fn choose_places(&mut self, now: Instant, connection: &mut Connection, due: bool) {
        let told = self.is_told();
        let role = self.role;
        let mut candidates = Vec::with_capacity(self.paths.len());
        for (id, path) in &mut self.paths {
            if !path.capped {
                path.capped = true;
                let link = match role {
                    Role::Client => Some(path.link.uplink().0),
                    Role::Server => path.policy.link,
                };
                // What a queue does to round trips cannot be seen through the one of a TCP connection.
                let measured = !path.inside_tcp || path.policy.cap.is_some();
                let seat = self.shares.as_ref().zip(link.filter(|_| measured));
                let seat = seat.map(|((all, class), link)| all.seat(now, link, *class, path.policy.cap));
                path.seat.clone_from(&seat);
                connection.set_share(now, *id, seat);
                connection.set_rate_cap(now, *id, path.policy.cap);
            }
            let load = path.load.measure(due, connection.is_limited(*id));
            candidates.push(Candidate {
                id: *id,
                // Under failover the client chooses the path within a tier.
                link: if self.role == Role::Server && path.refused.is_some() {
                    LinkId(u16::MAX)
                } else {
                    path.link.uplink()
                },
                bundle: path.link_key(role, *id),
                tier: path.policy.tier,
                metered: path.policy.metered,
                works: path.liveness.is_alive() && !path.is_unheard(*id, connection, told),
                load,
            });
        }
        let links = usize::from(self.choice.copies());
        let places = self.tiers.places(now, self.dispatcher.scheduler(), &candidates, links, due);
        for (path, place) in self.paths.values_mut().zip(places) {
            path.place = place;
            if path.may_rest() {
                path.liveness.rest();
            }
        }
    }

    pub(super) fn note_traffic(&mut self, now: Instant) {
        self.wake_up(now);
        self.traffic.moves(now);
        for path in self.paths.values_mut().filter(|path| !path.may_rest()) {
            path.liveness.on_traffic(now);
        }
    }

    /// What a path can do for the next packets, of `most` bytes at most.
    pub(super) fn offer(&self, now: Instant, connection: &mut Connection, id: PathId, most: u64) -> Offer {
        let path = self.paths.get(&id);
        let weight = path.map_or_else(Weight::default, |path| path.policy.weight);
        let mut offer = connection.offer(now, id, most);
        if path.and_then(|path| path.stalled).is_some_and(|at| now.saturating_duration_since(at) < STALLED) {
            offer.delay += STALLED;
        }
        Offer { weight: weight.get().into(), ..offer }
    }

    /// Paths of lower rank are filled first.
    pub(super) fn rank(&self, id: PathId) -> Tier {
        self.paths.get(&id).map_or(Tier::Primary, |path| path.policy.tier)
    }
}
