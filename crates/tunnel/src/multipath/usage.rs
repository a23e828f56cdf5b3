//! Whether a path carries data.
//!
//! In: what liveness, the far end and the tiers say about the path. Out: its state, and the status to tell
//! the peer. Always holds: a path that does not work is down, whatever its tier.

use mpvpn_path::{PathState, Placement};
use mpvpn_quic::PathStatus;
use mpvpn_types::{Duration, Instant};

/// Losses that belong to the death of a path may be found this long after it is back: the library declares
/// packets lost up to three probe timeouts after they were sent. Shorter, and they slow the path down;
/// longer, and congestion goes unnoticed.
const LOSS_GRACE: Duration = Duration::from_millis(300);

/// The use of one path.
#[derive(Debug)]
pub(super) struct PathUsage {
    place: Placement,
    state: PathState,
    /// What the peer was told (draft-ietf-quic-multipath-21 §3.3).
    status: PathStatus,
}

/// What decides about the state of a path.
#[derive(Clone, Copy, Debug)]
pub(super) struct Evidence {
    /// Packets arrive on it.
    pub(super) alive: bool,
    /// The far end does not hear this one there.
    pub(super) unheard: bool,
    /// The client, whose wish counts, wants no data there while other paths work.
    pub(super) refused: bool,
    /// Nothing is known of which packets arrive at the far end, but this one may.
    pub(super) trusted_anyway: bool,
}

/// What came of [`PathUsage::judge`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Judgement {
    /// The peer is to be told this.
    pub(super) tell: Option<PathStatus>,
    /// The state that it was in before, if it is in another one now.
    pub(super) left: Option<PathState>,
}

impl PathUsage {
    /// A path that was just opened carries data.
    pub(super) fn new() -> Self {
        Self { place: Placement::Active, state: PathState::Active, status: PathStatus::Available }
    }

    #[inline]
    pub(super) fn place(&self) -> Placement {
        self.place
    }

    pub(super) fn set_place(&mut self, place: Placement) {
        self.place = place;
    }

    #[inline]
    pub(super) fn state(&self) -> PathState {
        self.state
    }

    /// What the peer was told last.
    #[inline]
    pub(super) fn status(&self) -> PathStatus {
        self.status
    }

    /// Finds the state anew.
    pub(super) fn judge(&mut self, evidence: Evidence) -> Judgement {
        let Evidence { alive, unheard, refused, trusted_anyway } = evidence;
        let active = self.place == Placement::Active;
        let state = match alive && !(active && unheard) {
            false => PathState::Down,
            true if !active || refused => PathState::Standby,
            true => PathState::Active,
        };
        // Also the library's own choice for acknowledgements and stream data.
        let trusted = state == PathState::Active || trusted_anyway;
        let status = if trusted { PathStatus::Available } else { PathStatus::Backup };
        let judgement = Judgement {
            tell: (status != self.status).then_some(status),
            left: (state != self.state).then_some(self.state),
        };
        (self.state, self.status) = (state, status);
        judgement
    }
}

/// For how long the losses of a path are those of its death rather than congestion.
#[derive(Debug, Default)]
pub(super) struct LossGrace(Option<Instant>);

impl LossGrace {
    /// Takes whether the path is down; returns whether its losses are to be ignored, if that may be new.
    pub(super) fn update(&mut self, now: Instant, down: bool) -> Option<bool> {
        if down {
            self.0 = Some(now + LOSS_GRACE);
            return Some(true);
        }
        self.0.take_if(|at| now >= *at).map(|_| false)
    }

    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: Evidence = Evidence { alive: true, unheard: false, refused: false, trusted_anyway: false };

    #[test]
    fn the_peer_is_told_only_what_is_new() {
        let mut usage = PathUsage::new();
        assert_eq!(usage.judge(GOOD), Judgement::default());
        let dead = Evidence { alive: false, ..GOOD };
        let first = usage.judge(dead);
        assert_eq!(first, Judgement { tell: Some(PathStatus::Backup), left: Some(PathState::Active) });
        assert_eq!(usage.judge(dead), Judgement::default());
        assert_eq!(usage.judge(GOOD).left, Some(PathState::Down));
    }

    #[test]
    fn a_path_that_the_far_end_does_not_hear_is_down_only_where_data_is_sent() {
        let unheard = Evidence { unheard: true, ..GOOD };
        let mut usage = PathUsage::new();
        usage.judge(unheard);
        assert_eq!(usage.state(), PathState::Down);
        usage.set_place(Placement::OverflowNotNeeded);
        usage.judge(unheard);
        assert_eq!((usage.state(), usage.status()), (PathState::Standby, PathStatus::Backup));
    }

    #[test]
    fn when_nothing_is_known_of_the_far_end_a_dead_path_is_tried_all_the_same() {
        let mut usage = PathUsage::new();
        let judgement = usage.judge(Evidence { alive: false, trusted_anyway: true, ..GOOD });
        assert_eq!((usage.state(), judgement.tell), (PathState::Down, None));
    }

    #[test]
    fn a_path_that_the_client_keeps_for_later_waits() {
        let mut usage = PathUsage::new();
        usage.judge(Evidence { refused: true, ..GOOD });
        assert_eq!(usage.state(), PathState::Standby);
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
