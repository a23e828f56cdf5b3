//! What the controller of a path decides, as events for the log: what changed, from which inputs, and why.
//!
//! Always holds: nothing is computed for an event that nobody wants.

use mpvpn_types::{CongestionControl, PathId, target::CONGESTION};
use tracing::{Level, debug, enabled, trace};

use super::{Inner, Model, Shared};
use crate::{ConnectionHandle, bbr::Decided, delivery::Window, random_loss::RandomLoss};

/// A rate that differs from the reported one by this factor is a change.
const CHANGED: f64 = 1.25;

/// Which path a gate belongs to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PathLabel {
    pub(crate) connection: ConnectionHandle,
    pub(crate) path: PathId,
}

impl Default for PathLabel {
    fn default() -> Self {
        // Until the connection says otherwise: its first path, of none.
        Self { connection: ConnectionHandle(usize::MAX), path: PathId(0) }
    }
}

/// Whether anybody follows decisions.
pub(super) fn is_followed() -> bool {
    enabled!(target: CONGESTION, Level::DEBUG)
}

/// What a controller had decided before, to be compared with what it decides now.
#[derive(Clone, Copy, Debug)]
pub(super) struct Before {
    decided: Option<Decided>,
    has_fallen: bool,
}

impl Before {
    pub(super) fn of(model: &Model) -> Self {
        Self { decided: decided(model), has_fallen: model.delivery.has_fallen() }
    }
}

fn decided(model: &Model) -> Option<Decided> {
    match &model.inner {
        Inner::Bbr(bbr) => Some(bbr.decided()),
        Inner::Library(_) => None,
    }
}

/// A round is over, with what `window` shows if it was looked at.
pub(super) fn round(
    before: Before,
    model: &Model,
    random: &RandomLoss,
    shared: &Shared,
    window: Option<Window>,
) {
    let PathLabel { connection, path } = shared.label();
    let (connection, path) = (connection.0, path.0);
    let rate = model.delivery.rate();
    if let (Some(before), Some(now)) = (before.decided, decided(model)) {
        changes(before, now, shared, rate);
    }
    if model.delivery.has_fallen() != before.has_fallen {
        let reason = match before.has_fallen {
            false => "losses that no queue explains go on while less is sent",
            true => "the rate from before the losses is reached again, or forgotten",
        };
        debug!(target: CONGESTION, connection, path, rate, fallen = !before.has_fallen, reason, "losses and rate");
    }
    let Some(window) = window else { return };
    let reported = shared.reported_rate();
    if rate as f64 > reported as f64 * CHANGED || (rate as f64) * CHANGED < reported as f64 {
        shared.set_reported_rate(rate);
        let reason = match (rate > reported, window.overflows) {
            (true, _) => "more was delivered than before",
            (false, true) => "more is lost than the path loses anyway",
            (false, false) => "the path was full and delivered less",
        };
        debug!(
            target: CONGESTION, connection, path, from = reported, to = rate, delivered = window.rate,
            full = window.full, lost = window.lost, rtt = ?window.shortest, congestion_window = shared.window(),
            reason, "rate changed"
        );
    }
    trace!(
        target: CONGESTION, connection, path, rate, delivered = window.rate, full = window.full,
        lost = window.lost, overflows = window.overflows, random_loss = random.share(),
        shortest_rtt = ?window.shortest, longest_rtt = ?window.longest, base_rtt = ?shared.base_rtt(),
        in_flight = shared.in_flight(), congestion_window = shared.window(), pacing_rate = shared.pacing_rate(),
        phase = decided(model).map(|decided| decided.phase), step = decided(model).map(|decided| decided.step),
        "round"
    );
}

fn changes(before: Decided, now: Decided, shared: &Shared, rate: u64) {
    let PathLabel { connection, path } = shared.label();
    let (connection, path) = (connection.0, path.0);
    if before.phase != now.phase {
        debug!(
            target: CONGESTION, connection, path, from = before.phase, to = now.phase, rate,
            in_flight = shared.in_flight(), min_rtt = ?now.min_rtt, base_rtt = ?shared.base_rtt(),
            reason = now.reason, "state changed"
        );
    }
    if now.probes_queue && !before.probes_queue {
        debug!(
            target: CONGESTION, connection, path, rate, min_rtt = ?now.min_rtt, base_rtt = ?shared.base_rtt(),
            reason = "round trips are longer than those of lone packets", "queue probe started"
        );
    }
    if before.probes_queue && !now.probes_queue {
        let is_queue = now.queue_found != before.queue_found && now.queue_found.is_some();
        debug!(
            target: CONGESTION, connection, path, is_queue, rtt_without_queue = ?now.without_queue,
            reason = if is_queue { "round trips became shorter" } else { "round trips stayed as long" },
            "queue probe ended"
        );
    }
    if let (Some(from), Some(to)) = (before.min_rtt, now.min_rtt)
        && to > from
    {
        let reason = "the shortest round trip is too old to count";
        debug!(target: CONGESTION, connection, path, ?from, ?to, reason, "shortest round trip replaced");
    }
}

/// A shaper said that the path carries at least `least` (bytes/s).
pub(super) fn raised(shared: &Shared, from: u64, least: u64) {
    let PathLabel { connection, path } = shared.label();
    debug!(
        target: CONGESTION, connection = connection.0, path = path.0, from, to = least.max(from),
        reason = "the shaper held the path back and lets more pass now", "rate raised"
    );
}

/// Losses were reported to the controller, or kept from it.
pub(super) fn losses(shared: &Shared, lost: u64, from: u64, persistent: bool, ecn: bool, outcome: &str) {
    let PathLabel { connection, path } = shared.label();
    let (connection, path, to) = (connection.0, path.0, shared.window());
    if from == to {
        trace!(target: CONGESTION, connection, path, lost, persistent, ecn, window = to, outcome, "losses");
    } else {
        debug!(target: CONGESTION, connection, path, lost, persistent, ecn, from, to, outcome, "window changed");
    }
}

/// Another kind of controller begins.
pub(super) fn kind(shared: &Shared, from: CongestionControl, to: CongestionControl) {
    let PathLabel { connection, path } = shared.label();
    debug!(
        target: CONGESTION, connection = connection.0, path = path.0, %from, %to,
        reason = "the configuration, or the far end, asks for it", "controller replaced"
    );
}
