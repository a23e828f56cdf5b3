//! Log events about the decisions of a path's controller: what changed, from which inputs, and why.
//!
//! Always holds: nothing is computed for an event that no subscriber wants.

use mpvpn_types::{CongestionControl, PathId, target::CONGESTION};
use tracing::{Level, debug, enabled, trace};

use super::{GateState, Inner, Model};
use crate::{ConnectionHandle, bbr::Decisions, delivery::Window, random_loss::RandomLoss};

/// A rate that differs from the last logged one by this factor is logged. Smaller: more log lines; larger:
/// changes are missed.
const LOGGED_RATE_RATIO: f64 = 1.25;

/// The connection and path of a gate.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PathLabel {
    pub(crate) connection: ConnectionHandle,
    pub(crate) path: PathId,
}

impl Default for PathLabel {
    fn default() -> Self {
        // Before the connection sets it.
        Self { connection: ConnectionHandle(usize::MAX), path: PathId(0) }
    }
}

/// Whether decisions are logged.
pub(super) fn is_logged() -> bool {
    enabled!(target: CONGESTION, Level::DEBUG)
}

/// The decisions of a controller before an event, for comparison.
#[derive(Clone, Copy, Debug)]
pub(super) struct Before {
    decisions: Option<Decisions>,
    has_fallen: bool,
}

impl Before {
    pub(super) fn of(model: &Model) -> Self {
        Self { decisions: decisions(model), has_fallen: model.delivery.has_fallen() }
    }
}

fn decisions(model: &Model) -> Option<Decisions> {
    match &model.inner {
        Inner::Bbr(bbr) => Some(bbr.decisions()),
        Inner::Library(_) => None,
    }
}

/// Logs what an acknowledgement has changed; `window`: the delivery window that it completed.
pub(super) fn acknowledged(
    before: Before,
    model: &Model,
    random: &RandomLoss,
    shared: &GateState,
    window: Option<Window>,
) {
    let PathLabel { connection, path } = shared.label();
    let (connection, path) = (connection.0, path.0);
    let rate = model.delivery.rate;
    if let (Some(before), Some(now)) = (before.decisions, decisions(model)) {
        changes(before, now, shared, rate);
    }
    if model.delivery.has_fallen() != before.has_fallen {
        let reason = match before.has_fallen {
            false => "losses without a queue continue while less is sent",
            true => "the rate from before the losses is reached again, or was forgotten",
        };
        debug!(target: CONGESTION, connection, path, rate, fallen = !before.has_fallen, reason, "losses and rate");
    }
    let Some(window) = window else { return };
    let reported = shared.reported_rate();
    if rate as f64 > reported as f64 * LOGGED_RATE_RATIO
        || (rate as f64) * LOGGED_RATE_RATIO < reported as f64
    {
        shared.set_reported_rate(rate);
        let reason = match (rate > reported, window.overflows) {
            (true, _) => "more was delivered than before",
            (false, true) => "more is lost than the random loss of the path",
            (false, false) => "the path was full and delivered less",
        };
        debug!(
            target: CONGESTION, connection, path, from = reported, to = rate, delivered = window.rate,
            full = window.full, lost = window.lost, rtt = ?window.shortest,
            congestion_window = shared.window(),
            reason, "rate changed"
        );
    }
    trace!(
        target: CONGESTION, connection, path, rate, delivered = window.rate, full = window.full,
        lost = window.lost, overflows = window.overflows, random_loss = random.share(),
        shortest_rtt = ?window.shortest, longest_rtt = ?window.longest, base_rtt = ?shared.base_rtt(),
        in_flight = shared.in_flight(), congestion_window = shared.window(),
        pacing_rate = shared.pacing_rate(),
        phase = decisions(model).map(|decisions| decisions.phase),
        step = decisions(model).map(|decisions| decisions.step),
        "round"
    );
}

fn changes(before: Decisions, now: Decisions, shared: &GateState, rate: u64) {
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

/// Logs that the controller begins again, as the medium loses packets.
pub(super) fn restarted(shared: &GateState, random: &RandomLoss) {
    let PathLabel { connection, path } = shared.label();
    debug!(
        target: CONGESTION, connection = connection.0, path = path.0, congestion_window = shared.window(),
        medium_loss = random.measured(), reason = "the losses that made the window small were no congestion",
        "controller begins again"
    );
}

/// Logs that the shaper lets at least `least` (bytes/s) pass.
pub(super) fn rate_raised(shared: &GateState, from: u64, least: u64) {
    let PathLabel { connection, path } = shared.label();
    debug!(
        target: CONGESTION, connection = connection.0, path = path.0, from, to = least.max(from),
        reason = "the shaper held the path back and lets more pass now", "rate raised"
    );
}

/// Logs that this end sent less than its rate allows. The rate does not fall when less arrives then.
pub(super) fn late(shared: &GateState) {
    let PathLabel { connection, path } = shared.label();
    trace!(
        target: CONGESTION, connection = connection.0, path = path.0, pacing_rate = shared.pacing_rate(),
        reason = "this process was later than the pacer may catch up on", "sent less than the rate"
    );
}

/// Logs losses, and whether the controller counted them as congestion.
pub(super) fn losses(shared: &GateState, lost: u64, from: u64, persistent: bool, ecn: bool, outcome: &str) {
    let PathLabel { connection, path } = shared.label();
    let (connection, path, to) = (connection.0, path.0, shared.window());
    if from == to {
        trace!(target: CONGESTION, connection, path, lost, persistent, ecn, window = to, outcome, "losses");
    } else {
        debug!(target: CONGESTION, connection, path, lost, persistent, ecn, from, to, outcome, "window changed");
    }
}

/// Logs that another congestion controller begins.
pub(super) fn controller_replaced(shared: &GateState, from: CongestionControl, to: CongestionControl) {
    let PathLabel { connection, path } = shared.label();
    debug!(
        target: CONGESTION, connection = connection.0, path = path.0, %from, %to,
        reason = "the configuration or the peer requests it", "controller replaced"
    );
}
