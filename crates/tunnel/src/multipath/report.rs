//! What others may ask about a tunnel: which paths work, what has moved, what the status shows.

use mpvpn_path::{PathState, Placement, StateReason};
use mpvpn_quic::{Connection, PathStats};
use mpvpn_types::{Duration, Instant, LinkId, PathId};

use super::{MultipathConnection, ResequencingCounters, Role, TrafficCounters, TrafficRates};

/// Packets of one path take times that differ by so much for no reason.
const JITTER: Duration = Duration::from_millis(4);

/// One path as status output shows it.
#[derive(Clone, Debug)]
pub struct PathReport {
    /// What is measured.
    pub view: PathStats,
    /// Whether it may be used.
    pub state: PathState,
    /// Why it is in that state; empty if there is nothing to say.
    pub reason: String,
    /// The link, at a client.
    pub link: Option<LinkId>,
}

impl MultipathConnection {
    /// Paths for status output.
    pub(crate) fn report(&self, now: Instant, connection: &mut Connection) -> Vec<PathReport> {
        let mut reports = Vec::with_capacity(self.paths.len());
        for (id, path) in self.paths.iter() {
            let Some(view) = connection.path_stats(now, id) else { continue };
            let (state, place) = (path.usage.state(), path.usage.place());
            let reason = match path.liveness.reason() {
                StateReason::Works if place != Placement::Active => place.as_str().to_owned(),
                StateReason::Works if state == PathState::Down => "the far end hears nothing".to_owned(),
                StateReason::Works if state == PathState::Standby => {
                    "kept for later by the client".to_owned()
                }
                reason => reason.to_string(),
            };
            let link = (self.role == Role::Client).then_some(path.link());
            reports.push(PathReport { view, state, reason, link });
        }
        reports
    }

    /// The paths with their links.
    pub(crate) fn links(&self) -> impl Iterator<Item = (PathId, LinkId)> + '_ {
        self.paths.iter().map(|(id, path)| (id, path.link()))
    }

    /// Whether there is such a path.
    pub(crate) fn has_path(&self, id: PathId) -> bool {
        self.paths.contains(id)
    }

    /// The path that runs over a link.
    pub(crate) fn path_on(&self, link: LinkId) -> Option<PathId> {
        self.paths.path_on(link)
    }

    /// Whether the path over a link works, if there is one.
    pub(crate) fn path_works_on(&self, link: LinkId) -> Option<bool> {
        self.paths.works_on(link)
    }

    /// Whether a path over another link works.
    pub(crate) fn any_path_works_besides(&self, link: LinkId) -> bool {
        self.paths.works_besides(link)
    }

    /// Whether any path works.
    pub(crate) fn any_path_works(&self) -> bool {
        self.paths.any_works()
    }

    /// Since when no path works, as far as anyone can tell.
    pub(crate) fn all_paths_dead_since(&self, now: Instant) -> Option<Instant> {
        if self.paths.any_works() {
            return self.heartbeats.unanswered_since(now, &self.paths);
        }
        self.paths.dead_since()
    }

    /// What has moved since the start.
    pub(crate) fn counters(&self) -> TrafficCounters {
        self.traffic.counters()
    }

    /// How much moves now.
    pub(crate) fn rates(&self, now: Instant) -> TrafficRates {
        self.traffic.rates(now)
    }

    /// Counts on where another multipath of the same connection has ended.
    pub(crate) fn continue_counters_from(&mut self, before: &Self) {
        self.traffic.continue_from(&before.traffic);
    }

    /// Packets dropped in the queues.
    pub(crate) fn drops(&self) -> u64 {
        self.scheduler.drops() + self.traffic.too_big()
    }

    /// What became of numbered packets.
    /// `None` where the two ends agreed on no numbers.
    pub(crate) fn resequencing(&self) -> Option<ResequencingCounters> {
        self.recovery.sequencer.as_ref().map(|sequencer| sequencer.counters())
    }

    /// When data was last on its way through this tunnel, either way.
    pub(crate) fn last_data_at(&self) -> Option<Instant> {
        self.traffic.last_data_at()
    }

    /// How long after a packet came here one that takes another connection over the same links may still
    /// overtake it.
    pub(crate) fn max_reordering_delay(&self, connection: &Connection) -> Duration {
        let rtts = || {
            let used = self.paths.iter().filter(|(_, path)| path.usage.state() == PathState::Active);
            used.filter_map(|(id, _)| connection.rtt(id))
        };
        let (most, least) = (rtts().max().unwrap_or_default(), rtts().min().unwrap_or_default());
        self.sojourn() + (most - least) + JITTER
    }

    /// Bytes that wait for a path.
    pub(crate) fn backlog_bytes(&self) -> usize {
        self.scheduler.backlog()
    }

    /// How long packets wait in the queues.
    pub(crate) fn sojourn(&self) -> Duration {
        self.scheduler.sojourn()
    }

    /// The MTU promised last.
    pub(crate) fn announced_mtu(&self) -> usize {
        self.mtu.announced()
    }
}
