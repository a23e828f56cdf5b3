//! What a shaper decides, as events for the log: what changed, from which inputs, and why. Rates in bytes/s, times in s.
//!
//! Always holds: nothing is computed for an event that nobody wants.

use mpvpn_types::{BitRate, ClassId, target::SHAPER};
use tracing::{Level, debug, enabled, trace};

use super::{Share, capacity::Decided};

/// A capacity that differs from the one before by this factor is a change; smaller steps are tried all the time.
const CHANGED: f64 = 1.05;

/// Whether anybody follows decisions.
pub(super) fn is_followed() -> bool {
    enabled!(target: SHAPER, Level::DEBUG)
}

/// The capacity was set from outside.
pub(super) fn given(link: Option<u16>, from: Option<f64>, to: Option<BitRate>) {
    let to = to.map(|rate| rate.bps() / 8);
    debug!(target: SHAPER, link, from, to, reason = "it is configured so", "capacity given");
}

/// What a class may have was set from outside.
pub(super) fn share(link: Option<u16>, class: ClassId, share: Share) {
    debug!(target: SHAPER, link, class = class.0, ?share, "share of a class set");
}

/// The link begins or ceases to be shaped.
pub(super) fn bound(link: Option<u16>, rate: Option<f64>, is_shared: bool, wanting: usize, waiting: f64) {
    let reason = match (rate, is_shared) {
        (Some(_), true) => "classes share the link, and its capacity is known",
        (Some(_), false) => "its capacity is configured",
        (None, true) => "its capacity is not known any more",
        (None, false) => "one class is alone",
    };
    debug!(
        target: SHAPER, link, shaped = rate.is_some(), rate, classes_wanting = wanting, queue = waiting, reason,
        "shaping changed"
    );
}

/// A span of measurement is over, or not yet.
pub(super) fn capacity(link: Option<u16>, before: Decided, now: Decided) {
    if before == now {
        return;
    }
    let Decided { known, drain, excess, raises, reason, queue, delivered, arrived, knows_ways } = now;
    let moved = match (before.known, known) {
        (Some(from), Some(to)) => to > from * CHANGED || to * CHANGED < from,
        (from, to) => from.is_some() != to.is_some(),
    };
    let state = |decided: &Decided| (decided.drain.is_some(), decided.excess.is_some(), decided.raises);
    if moved || state(&before) != state(&now) {
        debug!(
            target: SHAPER, link, from = before.known, to = known, drain, excess, raises, queue, delivered, arrived,
            knows_ways, reason, "capacity judged"
        );
    } else {
        trace!(
            target: SHAPER, link, from = before.known, to = known, drain, excess, raises, queue, delivered, arrived,
            knows_ways, reason, "capacity measured"
        );
    }
}

/// A class has more to send than it may, or has no more.
pub(super) fn wanting(link: Option<u16>, class: ClassId, wanting: bool, tokens: f64, pool: f64) {
    trace!(target: SHAPER, link, class = class.0, wanting, tokens, pool, "demand of a class changed");
}

/// A class is held back.
pub(super) fn waits(link: Option<u16>, class: ClassId, wait: f64, rate: f64, by_max: bool) {
    let reason = if by_max { "its max is used up" } else { "its share is used up" };
    trace!(target: SHAPER, link, class = class.0, wait, rate, reason, "class waits");
}
