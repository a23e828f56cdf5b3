//! Round-trip times of a series of requests.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Round-trip times and losses of a series of requests.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LatencySamples {
    rtts_ms: Vec<f64>,
    sent: u64,
}

impl LatencySamples {
    /// Counts a request that was answered after `rtt`, or was lost.
    pub fn add(&mut self, rtt: Option<Duration>) {
        self.sent += 1;
        self.rtts_ms.extend(rtt.map(|rtt| rtt.as_secs_f64() * 1000.0));
    }

    /// The figures of the series.
    pub fn summary(&self) -> Latency {
        let mut sorted = self.rtts_ms.clone();
        sorted.sort_by(f64::total_cmp);
        let answered = sorted.len() as u64;
        let mean = sorted.iter().sum::<f64>() / sorted.len().max(1) as f64;
        let of = |percent| percentile(&sorted, percent);
        let rtt_ms = of(0.0).zip(of(50.0)).zip(of(99.0)).zip(of(100.0));
        Latency {
            sent: self.sent,
            answered,
            loss_pct: 100.0 * self.sent.saturating_sub(answered) as f64 / self.sent.max(1) as f64,
            rtt_ms: rtt_ms.map(|(((min, p50), p99), max)| RttFigures { min, mean, p50, p99, max }),
        }
    }
}

/// The value at or below which `percent` of the sorted values are (nearest rank); `None` of none.
pub fn percentile(sorted: &[f64], percent: f64) -> Option<f64> {
    let rank = (percent / 100.0 * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied()
}

/// The figures of a series of requests.
#[derive(Clone, Copy, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
pub struct Latency {
    /// Requests sent.
    pub sent: u64,
    /// Requests answered.
    pub answered: u64,
    /// Requests without an answer, in percent.
    pub loss_pct: f64,
    /// Round-trip times, in ms; `null` if nothing was answered.
    pub rtt_ms: Option<RttFigures>,
}

/// Round-trip times, in ms.
#[derive(Clone, Copy, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
pub struct RttFigures {
    /// The lowest.
    pub min: f64,
    /// The mean.
    pub mean: f64,
    /// The median.
    pub p50: f64,
    /// Below this are 99 %.
    pub p99: f64,
    /// The highest.
    pub max: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_of_the_answered_requests_and_losses_of_all() {
        let mut samples = LatencySamples::default();
        assert_eq!(samples.summary(), Latency::default());
        for ms in (1..=100).rev() {
            samples.add(Some(Duration::from_millis(ms)));
        }
        (0..25).for_each(|_| samples.add(None));
        let Latency { sent, answered, loss_pct, rtt_ms } = samples.summary();
        assert_eq!((sent, answered, loss_pct), (125, 100, 20.0));
        assert_eq!(rtt_ms, Some(RttFigures { min: 1.0, mean: 50.5, p50: 50.0, p99: 99.0, max: 100.0 }));
    }
}
