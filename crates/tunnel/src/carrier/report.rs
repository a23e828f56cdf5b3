//! What is told about a carrier in the status.

use mpvpn_path::{PathState, Place, Reason};
use mpvpn_quic::{Connection, PathView};
use mpvpn_types::{Duration, Instant, LinkId};

use super::{Carrier, LaneCounters, Role};

/// Counters of a tunnel (bytes and packets of inner IP).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Bytes taken from the TUN and sent.
    pub tx_bytes: u64,
    /// Bytes received and given to the TUN.
    pub rx_bytes: u64,
    /// Bytes of streams sent again because a path stalled or died.
    pub repeated: u64,
}

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

    /// Packets dropped in the queues.
    pub(crate) fn drops(&self) -> u64 {
        self.dispatcher.drops() + self.too_big
    }

    /// What became of numbered packets.
    /// `None` where the two ends agreed on no numbers.
    pub(crate) fn lane(&self) -> Option<LaneCounters> {
        self.sequencer.as_ref().map(|sequencer| sequencer.counters())
    }

    /// How long packets wait in the queues.
    pub(crate) fn sojourn(&self) -> Duration {
        if self.dispatcher.is_empty() { Duration::ZERO } else { self.dispatcher.sojourn() }
    }
}
