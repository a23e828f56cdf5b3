//! Log events of a shaper's decisions: what changed, from which inputs, and why. Rates in bytes/s, times in
//! s.
//!
//! In: states before and after a decision. Out: `tracing` events. Always holds: nothing is computed for a
//! disabled event.

use mpvpn_types::{BitRate, ClassId, target::SHAPER};
use tracing::{Level, debug, enabled, trace};

use super::{Share, capacity::CapacityDecision};

/// A capacity that differs from the one before by this factor is logged at DEBUG, a smaller step at TRACE:
/// probing changes the capacity by up to 4 % in each interval. A smaller factor would log every probe at
/// DEBUG, a larger one miss changes.
const MIN_CHANGE_RATIO: f64 = 1.05;

/// Whether decisions are logged.
pub(super) fn is_followed() -> bool {
    enabled!(target: SHAPER, Level::DEBUG)
}

/// The configured capacity changed.
pub(super) fn configured(link: Option<u16>, from: Option<f64>, to: Option<BitRate>) {
    let to = to.map(|rate| rate.bps() / 8);
    debug!(target: SHAPER, link, from, to, reason = "configuration", "capacity configured");
}

/// The share of a class changed.
pub(super) fn share(link: Option<u16>, class: ClassId, share: Share) {
    debug!(target: SHAPER, link, class = class.0, ?share, "share of a class set");
}

/// The shaper starts or stops limiting the classes.
pub(super) fn limiting(
    link: Option<u16>,
    rate: Option<f64>,
    is_shared: bool,
    backlogged_classes: usize,
    waiting: f64,
) {
    let reason = match (rate, is_shared) {
        (Some(_), true) => "classes share the link, and its capacity is known",
        (Some(_), false) => "its capacity is configured",
        (None, true) => "its capacity is no longer known",
        (None, false) => "only one class is active",
    };
    debug!(
        target: SHAPER, link, shaped = rate.is_some(), rate, backlogged_classes, queue = waiting, reason,
        "shaping changed"
    );
}

/// A measurement was processed.
pub(super) fn capacity(link: Option<u16>, before: CapacityDecision, now: CapacityDecision) {
    if before == now {
        return;
    }
    let CapacityDecision {
        estimate,
        drain_rate,
        excess_delay,
        is_raising,
        reason,
        queue,
        delivered,
        arrived_ratio,
        one_way_known,
    } = now;
    let moved = match (before.estimate, estimate) {
        (Some(from), Some(to)) => to > from * MIN_CHANGE_RATIO || to * MIN_CHANGE_RATIO < from,
        (from, to) => from.is_some() != to.is_some(),
    };
    let state = |decided: &CapacityDecision| {
        (decided.drain_rate.is_some(), decided.excess_delay.is_some(), decided.is_raising)
    };
    if moved || state(&before) != state(&now) {
        debug!(
            target: SHAPER, link, from = before.estimate, to = estimate,
            drain_rate, excess_delay, is_raising, queue, delivered,
            arrived_ratio, one_way_known, reason, "capacity judged"
        );
    } else {
        trace!(
            target: SHAPER, link, from = before.estimate, to = estimate,
            drain_rate, excess_delay, is_raising, queue, delivered,
            arrived_ratio, one_way_known, reason, "capacity measured"
        );
    }
}

/// A class became backlogged, or idle.
pub(super) fn backlogged(link: Option<u16>, class: ClassId, backlogged: bool, tokens: f64, pool: f64) {
    trace!(target: SHAPER, link, class = class.0, backlogged, tokens, pool, "demand of a class changed");
}

/// A class must wait.
pub(super) fn waits(link: Option<u16>, class: ClassId, wait: f64, rate: f64, by_max: bool) {
    let reason = if by_max { "its max is used up" } else { "its share is used up" };
    trace!(target: SHAPER, link, class = class.0, wait, rate, reason, "class waits");
}
