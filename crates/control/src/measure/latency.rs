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
        Latency {
            sent: self.sent,
            answered,
            loss_pct: 100.0 * self.sent.saturating_sub(answered) as f64 / self.sent.max(1) as f64,
            rtt_ms: (answered > 0).then(|| RttFigures {
                min: percentile(&sorted, 0.0),
                mean,
                p50: percentile(&sorted, 50.0),
                p99: percentile(&sorted, 99.0),
                max: percentile(&sorted, 100.0),
            }),
        }
    }
}

/// The value below which `percent` of the sorted values are (nearest rank); 0 of none.
fn percentile(sorted: &[f64], percent: f64) -> f64 {
    let rank = (percent / 100.0 * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or_default()
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
