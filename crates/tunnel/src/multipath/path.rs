//! One path, as this end judges and uses it: parts that own their state.

use mpvpn_path::Liveness;
use mpvpn_quic::PathStatus;
use mpvpn_types::{Instant, LinkId, PathId, Tier};

use super::{
    Role,
    clocks::PathClock,
    data_ack::{Stall, TypicalRtt},
    load::PathLoad,
    peer_view::PeerView,
    policy::{PathPolicy, PolicyInForce},
    reinjection::CloseTimer,
    usage::{LossGrace, PathUsage},
};

#[derive(Debug)]
pub(super) struct PathEntry {
    link: LinkId,
    /// Its packets travel inside TCP.
    inside_tcp: bool,
    pub(super) liveness: Liveness,
    pub(super) peer: PeerView,
    pub(super) usage: PathUsage,
    pub(super) loss_grace: LossGrace,
    pub(super) policy: PolicyInForce,
    pub(super) load: PathLoad,
    pub(super) clock: PathClock,
    pub(super) close: CloseTimer,
    pub(super) stall: Stall,
    pub(super) typical_rtt: TypicalRtt,
}

impl PathEntry {
    /// A path that was just opened over a link; at a server, where links have no numbers of their own, over
    /// one with the number of the path.
    pub(super) fn new(now: Instant, link: LinkId, inside_tcp: bool, policy: PolicyInForce) -> Self {
        Self {
            link,
            inside_tcp,
            liveness: Liveness::new(policy.liveness(inside_tcp), now),
            peer: PeerView::default(),
            usage: PathUsage::new(),
            loss_grace: LossGrace::default(),
            policy,
            load: PathLoad::new(),
            clock: PathClock::default(),
            close: CloseTimer::default(),
            stall: Stall::default(),
            typical_rtt: TypicalRtt::default(),
        }
    }

    #[inline]
    pub(super) fn link(&self) -> LinkId {
        self.link
    }

    pub(super) fn is_inside_tcp(&self) -> bool {
        self.inside_tcp
    }

    /// Every packet costs.
    #[inline]
    pub(super) fn is_metered(&self) -> bool {
        self.policy.get().metered
    }

    /// What all paths over one link have in common, and no other path has. One inside TCP has a controller of
    /// its own.
    pub(super) fn link_key(&self, role: Role, id: PathId) -> u32 {
        match role {
            Role::Client if self.link.is_tcp() => self.link.0.into(),
            Role::Client => self.link.uplink().0.into(),
            Role::Server => self.policy.place().0.unwrap_or(id).0,
        }
    }

    /// As far as is known, what either end sends there arrives.
    #[inline]
    pub(super) fn works(&self) -> bool {
        self.liveness.is_alive() && self.peer.unheard_since().is_none()
    }

    /// Since when it does not work.
    pub(super) fn dead_since(&self) -> Option<Instant> {
        self.liveness.dead_since().max(self.peer.unheard_since())
    }

    /// The peer was told that data may be sent there.
    #[inline]
    pub(super) fn is_trusted(&self) -> bool {
        self.usage.status() == PathStatus::Available
    }

    /// When it has to be looked at again.
    pub(super) fn poll_timeout(&self, now: Instant) -> Option<Instant> {
        let all =
            [self.liveness.poll_timeout(now), self.loss_grace.poll_timeout(), self.close.poll_timeout()];
        all.into_iter().flatten().min()
    }

    /// Nobody needs to know quickly whether it still works, and finding out costs.
    #[inline]
    pub(super) fn may_rest(&self) -> bool {
        let policy = self.policy.get();
        policy.metered && policy.tier == Tier::Backup && self.usage.place() != mpvpn_path::Placement::Active
    }

    /// Uses it in another way from now on; returns whether that is another one.
    pub(super) fn set_policy(&mut self, now: Instant, policy: PathPolicy) -> bool {
        let metered = self.policy.get().metered;
        if !self.policy.set(policy) {
            return false;
        }
        if self.policy.get().metered != metered {
            self.liveness.set_config(now, self.policy.liveness(self.inside_tcp));
        }
        true
    }
}
