//! Queries about a multipath connection: which paths work, counters, and the data of status output.
//!
//! In: nothing. Out: copies of the state of the parts. Always holds: a query changes nothing.

use mpvpn_path::{PathState, Placement, StateReason};
use mpvpn_quic::{Connection, PathStats};
use mpvpn_types::{Instant, LinkId, PathId};

use super::{MultipathConnection, PathFecCounters, ResequencingCounters, Role};

/// One path as status output shows it.
#[derive(Clone, Debug)]
pub struct PathReport {
    /// The measurements of the path.
    pub view: PathStats,
    /// Whether the path carries data.
    pub state: PathState,
    /// The reason for the state; empty for an active path.
    pub reason: String,
    /// The link, at a client; `None` at a server.
    pub link: Option<LinkId>,
    /// Counters of FEC for what this end sends; `None` if FEC was not negotiated.
    pub fec: Option<PathFecCounters>,
    /// When something last arrived on the path.
    pub last_arrival: Instant,
}

impl MultipathConnection {
    /// Returns the paths for status output.
    pub(crate) fn report(&self, now: Instant, connection: &mut Connection) -> Vec<PathReport> {
        let mut reports = Vec::with_capacity(self.paths.len());
        for (id, path) in self.paths.iter() {
            let Some(view) = connection.path_stats(now, id) else { continue };
            let (state, placement) = (path.usage.state, path.usage.placement);
            let reason = match path.liveness.reason() {
                StateReason::Works if placement != Placement::Active => placement.as_str().to_owned(),
                StateReason::Works if state == PathState::Down => "the far end hears nothing".to_owned(),
                StateReason::Works if state == PathState::Standby => {
                    "kept for later by the client".to_owned()
                }
                reason => reason.to_string(),
            };
            let link = (self.role == Role::Client).then_some(path.link());
            let fec = self.recovery.sequencer.as_ref().and_then(|sequencer| sequencer.path_fec(id));
            let last_arrival = path.liveness.last_arrival();
            reports.push(PathReport { view, state, reason, link, fec, last_arrival });
        }
        reports
    }

    /// Returns the paths with their links.
    pub(crate) fn links(&self) -> impl Iterator<Item = (PathId, LinkId)> + '_ {
        self.paths.iter().map(|(id, path)| (id, path.link()))
    }

    /// Returns since when no path works or reports of the peer are missing, if so.
    pub(crate) fn all_paths_dead_since(&self, now: Instant) -> Option<Instant> {
        if self.paths.any_works() {
            return self.heartbeats.unanswered_since(now, &self.paths);
        }
        self.paths.dead_since()
    }

    /// Returns how many packets were dropped, in the queues or as too large.
    pub(crate) fn drops(&self) -> u64 {
        self.scheduler.dispatcher.drops() + self.traffic.oversized
    }

    /// Returns the counters of numbered packets; `None` if numbers were not negotiated.
    pub(crate) fn resequencing(&self) -> Option<ResequencingCounters> {
        self.recovery.sequencer.as_ref().map(|sequencer| sequencer.counters())
    }

    /// Returns the bytes of received packets that wait for others.
    pub(crate) fn held_bytes(&self) -> usize {
        self.recovery.sequencer.as_ref().map_or(0, |sequencer| sequencer.resequencer.reorder.held_bytes())
    }

    /// Whether no packet waits, new or lost.
    pub(crate) fn is_drained(&self) -> bool {
        self.scheduler.dispatcher.is_empty() && !self.recovery.has_waiting()
    }
}
