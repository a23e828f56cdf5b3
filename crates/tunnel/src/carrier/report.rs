//! What is told about a carrier in the status.

use mpvpn_path::{PathState, Place, Reason};
use mpvpn_quic::{Connection, PathView};
use mpvpn_types::{Duration, Instant, LinkId};

use super::{Carrier, Counters, LaneCounters, Rates, Role};

/// Packets of one path take times that differ by so much for no reason.
const TWITCH: Duration = Duration::from_millis(4);

/// One path as status output shows it.
#[derive(Clone, Debug)]
pub struct PathReport {
    /// What is measured.
    pub view: PathView,
    /// Whether it may be used.
    pub state: PathState,
    /// Why it is in that state; empty if there is nothing to say.
    pub reason: String,
    /// The link, at a client.
    pub link: Option<LinkId>,
}

impl Carrier {
    /// Paths for status output.
    pub(crate) fn report(&self, now: Instant, connection: &mut Connection) -> Vec<PathReport> {
        let mut reports = Vec::with_capacity(self.paths.len());
        for (id, path) in &self.paths {
            let Some(view) = connection.view(now, *id) else { continue };
            let reason = match path.liveness.reason() {
                Reason::Good if path.place != Place::Active => path.place.as_str().to_owned(),
                Reason::Good if path.state == PathState::Down => "the far end hears nothing".to_owned(),
                Reason::Good if path.state == PathState::Standby => "kept for later by the client".to_owned(),
                reason => reason.to_string(),
            };
            let link = (self.role == Role::Client).then_some(path.link);
            reports.push(PathReport { view, state: path.state, reason, link });
        }
        reports
    }

    /// What has moved since the start.
    pub(crate) fn counters(&self) -> Counters {
        self.traffic.counters()
    }

    /// How much moves now.
    pub(crate) fn rates(&self, now: Instant) -> Rates {
        self.traffic.rates(now)
    }

    /// Counts on where another carrier of the same connection has ended.
    pub(crate) fn count_on(&mut self, before: &Self) {
        self.traffic.continue_from(&before.traffic);
    }

    /// Packets dropped in the queues.
    pub(crate) fn drops(&self) -> u64 {
        self.dispatcher.drops() + self.traffic.too_big()
    }

    /// What became of numbered packets.
    /// `None` where the two ends agreed on no numbers.
    pub(crate) fn lane(&self) -> Option<LaneCounters> {
        self.sequencer.as_ref().map(|sequencer| sequencer.counters())
    }

    /// When data was last on its way through this tunnel, either way.
    pub(crate) fn moved(&self) -> Option<Instant> {
        self.traffic.last_moved()
    }

    /// How long after a packet came here one that takes another connection over the same links may still overtake it.
    pub(crate) fn spread(&self, connection: &Connection) -> Duration {
        let used = self.paths.iter().filter(|(_, path)| path.state == PathState::Active);
        let rtts = || used.clone().filter_map(|(id, _)| connection.rtt(*id));
        let (most, least) = (rtts().max().unwrap_or_default(), rtts().min().unwrap_or_default());
        self.sojourn() + (most - least) + TWITCH
    }

    /// How long packets wait in the queues.
    pub(crate) fn sojourn(&self) -> Duration {
        if self.dispatcher.is_empty() { Duration::ZERO } else { self.dispatcher.sojourn() }
    }
}
