//! The state of a path: active, standby or down.
//!
//! In: liveness, the peer's view, and the role of the path among the tiers. Out: the state, and the path
//! status to send to the peer. Always holds: a path that does not work is down, whatever its tier.

use mpvpn_path::{PathState, Placement};
use mpvpn_quic::PathStatus;
use mpvpn_types::{Duration, Instant};

/// How long after a path works again its losses are still attributed to the outage: noq declares packets lost
/// up to three probe timeouts after they were sent. Smaller: losses of the outage slow the path down. Larger:
/// congestion goes unnoticed.
const LOSS_GRACE: Duration = Duration::from_millis(300);

/// The state of one path and the status sent to the peer.
#[derive(Debug)]
pub(super) struct PathUsage {
    pub(super) placement: Placement,
    pub(super) state: PathState,
    /// The status sent to the peer (draft-ietf-quic-multipath-21 §3.3).
    pub(super) status: PathStatus,
}

/// The inputs that determine the state of a path.
#[derive(Clone, Copy, Debug)]
pub(super) struct Evidence {
    /// Packets arrive on the path.
    pub(super) alive: bool,
    /// Packets of this end do not arrive at the peer on the path.
    pub(super) unheard: bool,
    /// At a server: the client wants no data on the path while other paths work.
    pub(super) refused: bool,
    /// Reports of the peer are missing and the path has a carrier, so it may be the one that works.
    pub(super) peer_unknown: bool,
}

/// The result of [`PathUsage::judge`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Judgement {
    /// The path status to send to the peer, if it has changed.
    pub(super) new_status: Option<PathStatus>,
    /// The previous state, if the state has changed.
    pub(super) previous_state: Option<PathState>,
}

impl PathUsage {
    /// Creates the state of a path that was just opened: active.
    pub(super) fn new() -> Self {
        Self { placement: Placement::Active, state: PathState::Active, status: PathStatus::Available }
    }

    /// Determines the state from the evidence.
    pub(super) fn judge(&mut self, evidence: Evidence) -> Judgement {
        let Evidence { alive, unheard, refused, peer_unknown } = evidence;
        let active = self.placement == Placement::Active;
        let state = match alive && !(active && unheard) {
            false => PathState::Down,
            true if !active || refused => PathState::Standby,
            true => PathState::Active,
        };
        // noq uses the same status to choose paths for acknowledgements and stream data.
        let trusted = state == PathState::Active || peer_unknown;
        let status = if trusted { PathStatus::Available } else { PathStatus::Backup };
        let judgement = Judgement {
            new_status: (status != self.status).then_some(status),
            previous_state: (state != self.state).then_some(self.state),
        };
        (self.state, self.status) = (state, status);
        judgement
    }
}

/// The time until which losses of a path are attributed to its outage, not to congestion.
#[derive(Debug, Default)]
pub(super) struct LossGrace(Option<Instant>);

impl LossGrace {
    /// Takes whether the path is down; returns whether its losses are to be ignored, if that may have
    /// changed.
    pub(super) fn update(&mut self, now: Instant, down: bool) -> Option<bool> {
        if down {
            self.0 = Some(now + LOSS_GRACE);
            return Some(true);
        }
        self.is_over(now).then(|| {
            self.0 = None;
            false
        })
    }

    /// Whether [`Self::update`] has to be called, which is when [`Self::poll_timeout`] said.
    pub(super) fn is_over(&self, now: Instant) -> bool {
        self.0.is_some_and(|at| now >= at)
    }

    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: Evidence = Evidence { alive: true, unheard: false, refused: false, peer_unknown: false };

    #[test]
    fn only_a_changed_status_is_sent_to_the_peer() {
        let mut usage = PathUsage::new();
        assert_eq!(usage.judge(GOOD), Judgement::default());
        let dead = Evidence { alive: false, ..GOOD };
        let first = usage.judge(dead);
        assert_eq!(
            first,
            Judgement { new_status: Some(PathStatus::Backup), previous_state: Some(PathState::Active) }
        );
        assert_eq!(usage.judge(dead), Judgement::default());
        assert_eq!(usage.judge(GOOD).previous_state, Some(PathState::Down));
    }

    #[test]
    fn a_path_unheard_by_the_peer_is_down_only_if_it_carries_data() {
        let unheard = Evidence { unheard: true, ..GOOD };
        let mut usage = PathUsage::new();
        usage.judge(unheard);
        assert_eq!(usage.state, PathState::Down);
        usage.placement = Placement::OverflowNotNeeded;
        usage.judge(unheard);
        assert_eq!((usage.state, usage.status), (PathState::Standby, PathStatus::Backup));
    }

    #[test]
    fn a_dead_path_is_tried_while_reports_of_the_peer_are_missing() {
        let mut usage = PathUsage::new();
        let judgement = usage.judge(Evidence { alive: false, peer_unknown: true, ..GOOD });
        assert_eq!((usage.state, judgement.new_status), (PathState::Down, None));
    }

    #[test]
    fn a_path_that_the_client_refuses_is_standby() {
        let mut usage = PathUsage::new();
        usage.judge(Evidence { refused: true, ..GOOD });
        assert_eq!(usage.state, PathState::Standby);
    }

    #[test]
    fn losses_count_again_some_time_after_a_path_is_back() {
        let (mut grace, now) = (LossGrace::default(), Instant::now());
        assert_eq!(grace.update(now, false), None);
        assert_eq!(grace.update(now, true), Some(true));
        assert_eq!(grace.update(now + LOSS_GRACE - Duration::from_millis(1), false), None);
        assert_eq!(grace.update(now + LOSS_GRACE, false), Some(false));
        assert_eq!((grace.update(now + LOSS_GRACE, false), grace.poll_timeout()), (None, None));
    }
}
