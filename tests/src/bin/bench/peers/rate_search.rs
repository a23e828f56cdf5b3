//! Searches the highest packet rate with less than 1 % loss.
//!
//! In: a function that probes an offered rate. Out: the highest received rate among probes with less than 1 %
//! loss. The first search of a system brackets the rate by doubling and halving with short probes, and
//! confirms it with full probes; later searches start from the known rate.

use serde_json::{Value, json};

/// Maximum loss of a successful probe, percent. Larger: rates with a visible loss count. Smaller: single
/// losses fail probes.
const MAX_LOSS_PERCENT: f64 = 1.0;
/// Start of a first search, datagrams per second: in the middle of the range of usual results.
const START_RATE: f64 = 60_000.0;
/// Rate below which a first search gives up, datagrams per second.
const MIN_RATE: f64 = 500.0;
/// Factor between rates of a later search: the resolution of results. Smaller: more probes. Larger: coarser
/// results.
const STEP_FACTOR: f64 = 1.07;
/// Ratio of sent to offered rate below which iperf3 itself is the limit.
const SENDER_BOUND_RATIO: f64 = 0.93;

/// Result of a probe.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Probe {
    /// Offered rate, datagrams per second.
    pub(crate) offered: f64,
    /// Sent rate, datagrams per second; `None` if the run failed.
    pub(crate) sent: Option<f64>,
    pub(crate) loss_pct: f64,
}

/// Length of a probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProbeLength {
    Short,
    Full,
}

/// Result of a search.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SearchResult {
    /// Received rate, datagrams per second.
    pub(crate) rate: f64,
    /// Whether iperf3 could not send more.
    pub(crate) sender_bound: bool,
    pub(crate) probes: Vec<Probe>,
}

impl Probe {
    fn is_within_loss_limit(&self) -> bool {
        self.sent.is_some() && self.loss_pct < MAX_LOSS_PERCENT
    }

    fn received(&self) -> f64 {
        self.sent.unwrap_or(0.0) * (1.0 - self.loss_pct / 100.0)
    }

    fn is_sender_bound(&self) -> bool {
        self.sent.is_some_and(|sent| sent < self.offered * SENDER_BOUND_RATIO)
    }

    pub(crate) fn json(&self) -> Value {
        json!({ "offered": self.offered, "sent": self.sent, "loss_pct": self.loss_pct })
    }
}

/// Searches; `known_rate` is the result of an earlier search.
pub(crate) fn search(
    known_rate: Option<f64>,
    mut probe: impl FnMut(f64, ProbeLength) -> Probe,
) -> Option<SearchResult> {
    let mut probes = Vec::new();
    let mut try_at = |rate: f64, length| {
        let probe = probe(rate, length);
        probes.push(probe.clone());
        probe
    };
    let rate = match known_rate {
        Some(rate) => rate,
        None => bracket(&mut try_at)?,
    };
    let best = refine(rate, known_rate.is_some(), &mut try_at)?;
    let rate = best.received();
    let at_best =
        |probe: &&Probe| probe.is_within_loss_limit() && probe.received() >= rate * SENDER_BOUND_RATIO;
    let sender_bound = probes.iter().filter(at_best).any(Probe::is_sender_bound);
    Some(SearchResult { rate, sender_bound, probes })
}

/// Short probes until success and failure are within 10 %; returns the highest successful rate.
fn bracket(try_at: &mut impl FnMut(f64, ProbeLength) -> Probe) -> Option<f64> {
    let (mut low, mut high, mut rate) = (0.0_f64, f64::INFINITY, START_RATE);
    for _ in 0..12 {
        let probe = try_at(rate, ProbeLength::Short);
        if probe.is_within_loss_limit() {
            low = low.max(probe.received());
            if probe.is_sender_bound() {
                break;
            }
        } else {
            high = high.min(rate);
        }
        if high < low * 1.1 || high < MIN_RATE {
            break;
        }
        rate = match (low > 0.0, high.is_finite()) {
            (_, false) => rate * 2.0,
            (false, true) => rate / 2.0,
            (true, true) => (low * high).sqrt(),
        };
    }
    (low > 0.0).then_some(low)
}

/// Full probes: down in growing steps until one succeeds, or up while they succeed.
fn refine(start: f64, upward: bool, try_at: &mut impl FnMut(f64, ProbeLength) -> Probe) -> Option<Probe> {
    let mut rate = start;
    let mut best: Option<Probe> = None;
    for tries in 1..=6 {
        let probe = try_at(rate, ProbeLength::Full);
        match (probe.is_within_loss_limit(), &best) {
            (true, _) => {
                let done = !upward || probe.is_sender_bound() || rate < start;
                best = Some(probe);
                if done {
                    break;
                }
                rate *= STEP_FACTOR;
            }
            (false, Some(_)) => break,
            (false, None) => rate /= STEP_FACTOR.powi(tries),
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A simulated system and sender with these maximum rates.
    fn link(capacity: f64, sender: f64) -> impl FnMut(f64, ProbeLength) -> Probe {
        move |offered, _| {
            let sent = offered.min(sender);
            Probe { offered, sent: Some(sent), loss_pct: 100.0 * (1.0 - capacity / sent).max(0.0) }
        }
    }

    #[test]
    fn a_first_search_ends_near_the_limit() {
        for capacity in [3_000.0, 19_000.0, 70_000.0, 130_000.0, 500_000.0] {
            let found = search(None, link(capacity, 1e9)).expect("something");
            assert!((0.9 * capacity..=capacity).contains(&found.rate), "{capacity}: {found:?}");
            assert!(found.probes.len() <= 14 && !found.sender_bound, "{found:?}");
        }
    }

    #[test]
    fn a_later_search_follows_changes_both_ways() {
        for (known_rate, capacity) in [(100_000.0, 111_000.0), (100_000.0, 90_000.0), (100_000.0, 101_000.0)]
        {
            let found = search(Some(known_rate), link(capacity, 1e9)).expect("something");
            assert!((0.9 * capacity..=capacity * 1.01).contains(&found.rate), "{capacity}: {found:?}");
            assert!(found.probes.len() <= 4);
        }
    }

    #[test]
    fn a_slow_sender_is_distinguished_from_a_slow_system() {
        let found = search(None, link(1e9, 150_000.0)).expect("something");
        assert!(found.sender_bound && (found.rate - 150_000.0).abs() < 1.0, "{found:?}");
        let again = search(Some(150_000.0), link(1e9, 150_000.0)).expect("something");
        assert!(again.sender_bound && again.probes.len() <= 3, "{again:?}");
    }

    #[test]
    fn a_system_that_carries_nothing_has_no_rate() {
        let dead = |offered, _| Probe { offered, sent: None, loss_pct: 0.0 };
        assert_eq!(search(None, dead), None);
        assert_eq!(search(Some(10_000.0), dead), None);
    }
}
