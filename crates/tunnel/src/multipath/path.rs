//! The state of one path: liveness, the peer's view, load, policy and timers.
//!
//! In: measurements and events, through the parts. Out: whether the path works and is trusted. Always holds:
//! each part owns its state.

use mpvpn_path::Liveness;
use mpvpn_quic::PathStatus;
use mpvpn_types::{Duration, Instant, LinkId, PathId, Tier, earliest};

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

/// The least time for the answer to a heartbeat of the idle time: a probe timeout before a round trip is
/// known (RFC 9002 §6.2.2), as a server that thousands of idle clients ask may be slow. Larger: a server that
/// is gone is noticed later. Smaller: more heartbeats where one is lost.
const MIN_ANSWER_TIME: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct PathEntry {
    /// Which end this is.
    role: Role,
    link: LinkId,
    /// Whether QUIC packets of the path travel inside TCP.
    inside_tcp: bool,
    pub(super) liveness: Liveness,
    pub(super) peer: PeerView,
    /// Whether packets that this end sends did not arrive, when the paths were judged last.
    pub(super) is_unheard: bool,
    pub(super) usage: PathUsage,
    pub(super) loss_grace: LossGrace,
    pub(super) policy: PolicyInForce,
    pub(super) load: PathLoad,
    pub(super) clock: PathClock,
    pub(super) close: CloseTimer,
    pub(super) stall: Stall,
    pub(super) typical_rtt: TypicalRtt,
    /// At a client, while heartbeats are sparse: when the first one left here of which it is not known that
    /// it was acknowledged.
    awaited_since: Option<Instant>,
}

impl PathEntry {
    /// Creates the state of a path that was just opened over a link. At a server, which does not number
    /// links, `link` has the number of the path.
    pub(super) fn new(
        now: Instant,
        role: Role,
        link: LinkId,
        inside_tcp: bool,
        policy: PolicyInForce,
    ) -> Self {
        Self {
            role,
            link,
            inside_tcp,
            liveness: Liveness::new(policy.liveness(role, inside_tcp), now),
            peer: PeerView::default(),
            is_unheard: false,
            usage: PathUsage::new(),
            loss_grace: LossGrace::default(),
            policy,
            load: PathLoad::new(),
            clock: PathClock::default(),
            close: CloseTimer::default(),
            stall: Stall::default(),
            typical_rtt: TypicalRtt::default(),
            awaited_since: None,
        }
    }

    /// A heartbeat of the idle time leaves. `acked`: when the newest packet left of which it is known that it
    /// was acknowledged.
    pub(super) fn on_heartbeat(&mut self, now: Instant, acked: Option<Instant>) {
        self.awaited_since = self.unanswered_since(acked).or(Some(now)).filter(|_| self.works());
    }

    fn unanswered_since(&self, acked: Option<Instant>) -> Option<Instant> {
        self.awaited_since.filter(|at| acked.is_none_or(|acked| acked < *at))
    }

    /// When heartbeats of the idle time have waited too long for an acknowledgement, if the path seems to
    /// work.
    pub(super) fn no_answer_at(&self, acked: impl FnOnce() -> Option<Instant>) -> Option<Instant> {
        self.awaited_since?;
        let since = self.unanswered_since(acked()).filter(|_| self.works())?;
        Some(since + self.liveness.silence_limit().max(MIN_ANSWER_TIME))
    }

    /// Awaits no acknowledgement any more.
    pub(super) fn forget_heartbeat(&mut self) {
        self.awaited_since = None;
    }

    #[inline]
    pub(super) fn link(&self) -> LinkId {
        self.link
    }

    /// The number of the link at the client; `None` at a server that does not know it.
    pub(super) fn uplink(&self) -> Option<u16> {
        match self.role {
            Role::Client => Some(self.link.uplink().0),
            Role::Server => self.policy.client_link(),
        }
    }

    pub(super) fn is_inside_tcp(&self) -> bool {
        self.inside_tcp
    }

    /// Whether the link is metered, so that traffic costs money.
    #[inline]
    pub(super) fn is_metered(&self) -> bool {
        self.policy.get().metered
    }

    /// Returns a key that is equal for all paths over one link. A path inside TCP has a key of its own, since
    /// it needs its own congestion controller.
    pub(super) fn link_key(&self, role: Role, id: PathId) -> u32 {
        match role {
            Role::Client if self.link.is_tcp() => self.link.0.into(),
            Role::Client => self.link.uplink().0.into(),
            Role::Server => self.policy.first_of_link().unwrap_or(id).0,
        }
    }

    /// Whether the peer has requested a heartbeat; resets that. On a dead path one that has just left is the
    /// answer.
    pub(super) fn take_heartbeat_request(&mut self, now: Instant) -> bool {
        self.peer.take_heartbeat_request() && !self.liveness.has_just_probed(now)
    }

    /// Whether packets arrive in both directions, as far as is known.
    #[inline]
    pub(super) fn works(&self) -> bool {
        self.liveness.is_alive() && self.peer.unheard_since.is_none() && !self.is_unheard
    }

    /// Returns since when the path does not work, if so.
    pub(super) fn dead_since(&self) -> Option<Instant> {
        self.liveness.dead_since().max(self.peer.unheard_since)
    }

    /// Whether the path status sent to the peer allows data on the path.
    #[inline]
    pub(super) fn is_trusted(&self) -> bool {
        self.usage.status == PathStatus::Available
    }

    /// Returns when a timer of the path expires.
    pub(super) fn poll_timeout(&self, now: Instant) -> Option<Instant> {
        let others = earliest(self.loss_grace.poll_timeout(), self.close.poll_timeout());
        earliest(self.liveness.poll_timeout(now), others)
    }

    /// Whether heartbeats are not worth their cost: the path is metered, a backup, and not in use.
    #[inline]
    pub(super) fn may_stay_unprobed(&self) -> bool {
        let policy = self.policy.get();
        policy.metered && policy.tier == Tier::Backup && self.usage.placement != mpvpn_path::Placement::Active
    }

    /// Sets the policy of the path; returns whether it has changed.
    pub(super) fn set_policy(&mut self, now: Instant, policy: PathPolicy) -> bool {
        let metered = self.policy.get().metered;
        if !self.policy.set(policy) {
            return false;
        }
        if self.policy.get().metered != metered {
            self.liveness.set_config(now, self.policy.liveness(self.role, self.inside_tcp));
        }
        true
    }
}
