//! The qlog events of gates: packets, and the controller's metrics after acknowledgements and losses.

use std::sync::atomic::Ordering::Relaxed;

use mpvpn_types::{Duration, Instant, PathId};

use super::GateState;
use crate::{QlogEvent, QlogMetrics, qlog::ConnectionQlog};

/// Acknowledged packets that were not recorded yet; empty if nothing is recorded.
#[derive(Debug, Default)]
pub(super) struct Acks {
    numbers: Vec<u64>,
    latest_rtt: Duration,
}

impl GateState {
    /// Records events from now on.
    pub(crate) fn set_qlog(&self, qlog: ConnectionQlog) {
        // An existing sink is that of the same connection.
        let _ = self.qlog.set(qlog);
    }

    /// Calls `event` with the number of the path if events are recorded, and records what it returns.
    pub(super) fn record(&self, now: Instant, event: impl FnOnce(PathId) -> QlogEvent) {
        if let Some(qlog) = self.qlog.get() {
            qlog.record(now, event(self.label().path));
        }
    }
}

impl Acks {
    pub(super) fn add(&mut self, shared: &GateState, number: u64, rtt: Duration) {
        if shared.qlog.get().is_some() {
            self.numbers.push(number);
            self.latest_rtt = rtt;
        }
    }

    /// Records the acknowledged packets, if there are any, and the controller's metrics.
    pub(super) fn record(&mut self, shared: &GateState, now: Instant) {
        if !self.numbers.is_empty() {
            let numbers = std::mem::take(&mut self.numbers);
            shared.record(now, |path| QlogEvent::PacketsAcked { path, numbers });
        }
        shared.record(now, |path| {
            QlogEvent::Metrics(QlogMetrics {
                path,
                min_rtt: shared.min_rtt().unwrap_or_default(),
                smoothed_rtt: Duration::from_nanos(shared.rtt.load(Relaxed)),
                latest_rtt: self.latest_rtt,
                rtt_variance: shared.jitter(),
                congestion_window: shared.window(),
                bytes_in_flight: shared.in_flight(),
                pacing_rate: shared.pacing_rate(),
            })
        });
    }
}
