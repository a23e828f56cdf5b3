//! Chooses the kernel's congestion controller for the TCP transport.
//!
//! In: the connection's segment counters, once a second. Out: the controller to set. The kernel's BBR starts
//! fast and tolerates random loss, but every ten seconds its ProbeRTT lets hardly anything through for 200 ms
//! (draft-cardwell-iccrg-bbr-congestion-control-00 §4.3.5), which a call notices. Without losses CUBIC does
//! not hold back what the link can carry, and the QUIC inside finds the rate. So it is BBR while little is
//! sent or much is lost, else CUBIC.

use std::{convert::Infallible, future::pending, os::fd::AsFd};

use mpvpn_os::tcp::{SegmentCounters, set_congestion_control};
use mpvpn_types::CongestionControl;
use tokio::time::{Duration, sleep};

const SAMPLE_INTERVAL: Duration = Duration::from_secs(1);
/// Segments in one sample that are more than a call sends. Larger: light downloads keep BBR with its pauses.
/// Smaller: a call's few losses decide. Chosen.
const MIN_BUSY_SEGMENTS: u32 = 64;
/// A sample is clean with at most one loss in this many segments, or [`ALWAYS_TOLERATED_LOSSES`]: so few
/// hardly slow CUBIC down. Larger: BBR more often, with its pauses. Smaller: CUBIC collapses under random
/// loss. Chosen.
const SEGMENTS_PER_TOLERATED_LOSS: u32 = 1000;
const ALWAYS_TOLERATED_LOSSES: u32 = 2;
/// Clean samples before the change to CUBIC. By then slow start is over, and BBR's first ProbeRTT has not
/// come. Chosen.
const CLEAN_SAMPLES_BEFORE_CUBIC: u32 = 2;

#[derive(Debug)]
struct ControllerSelector {
    controller: CongestionControl,
    clean_samples: u32,
    previous: SegmentCounters,
}

impl ControllerSelector {
    fn new(previous: SegmentCounters) -> Self {
        Self { controller: CongestionControl::Bbr, clean_samples: 0, previous }
    }

    /// Takes the counters; returns the controller to change to, if any.
    fn on_sample(&mut self, now: SegmentCounters) -> Option<CongestionControl> {
        let segments = now.segments.wrapping_sub(self.previous.segments);
        let retransmitted = now.retransmitted.wrapping_sub(self.previous.retransmitted);
        let spurious = now.spurious.wrapping_sub(self.previous.spurious);
        self.previous = now;
        let lost = retransmitted.saturating_sub(spurious);
        let is_clean = segments >= MIN_BUSY_SEGMENTS
            && (lost <= ALWAYS_TOLERATED_LOSSES || lost <= segments / SEGMENTS_PER_TOLERATED_LOSS);
        self.clean_samples = if is_clean { self.clean_samples + 1 } else { 0 };
        let controller = match self.controller {
            CongestionControl::Bbr if self.clean_samples >= CLEAN_SAMPLES_BEFORE_CUBIC => {
                CongestionControl::Cubic
            }
            CongestionControl::Cubic if !is_clean => CongestionControl::Bbr,
            controller => controller,
        };
        (controller != self.controller).then(|| {
            self.controller = controller;
            controller
        })
    }
}

/// Adapts the congestion controller of `socket`, for ever. If the kernel lacks a controller or does not
/// permit it, the connection keeps the other.
pub async fn adapt_congestion_control(socket: impl AsFd) -> Infallible {
    let set = |controller: CongestionControl| {
        let controller = controller.as_str();
        if let Err(error) = set_congestion_control(&socket, controller) {
            tracing::debug!(controller, %error, "cannot set the congestion controller of a TCP connection");
        }
    };
    set(CongestionControl::Bbr);
    if let Ok(previous) = SegmentCounters::of(&socket) {
        let mut selector = ControllerSelector::new(previous);
        loop {
            sleep(SAMPLE_INTERVAL).await;
            let Ok(now) = SegmentCounters::of(&socket) else { break };
            selector.on_sample(now).map(set);
        }
    }
    pending().await
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The decisions for these numbers of sent, retransmitted and spuriously retransmitted segments per
    /// sample.
    fn decisions(
        selector: &mut ControllerSelector,
        samples: &[(u32, u32, u32)],
    ) -> Vec<Option<CongestionControl>> {
        let look = |&(segments, retransmitted, spurious): &(u32, u32, u32)| {
            let previous = selector.previous;
            selector.on_sample(SegmentCounters {
                segments: previous.segments.wrapping_add(segments),
                retransmitted: previous.retransmitted.wrapping_add(retransmitted),
                spurious: previous.spurious.wrapping_add(spurious),
            })
        };
        samples.iter().map(look).collect()
    }

    fn new() -> ControllerSelector {
        ControllerSelector::new(SegmentCounters {
            segments: u32::MAX - 100,
            retransmitted: u32::MAX,
            spurious: u32::MAX,
        })
    }

    #[test]
    fn a_download_without_losses_changes_to_cubic_and_its_end_back() {
        let samples = [(900, 40, 0), (900, 0, 0), (900, 1, 0), (900, 0, 0), (10, 0, 0), (10, 0, 0)];
        let wanted = [None, None, Some(CongestionControl::Cubic), None, Some(CongestionControl::Bbr), None];
        assert_eq!(decisions(&mut new(), &samples), wanted);
    }

    #[test]
    fn losses_change_back_to_bbr_at_once_and_what_was_repeated_in_vain_does_not() {
        let samples =
            [(900, 0, 0), (900, 0, 0), (900, 9, 9), (100_000, 80, 0), (900, 12, 1), (900, 9, 0), (900, 0, 0)];
        let wanted =
            [None, Some(CongestionControl::Cubic), None, None, Some(CongestionControl::Bbr), None, None];
        assert_eq!(decisions(&mut new(), &samples), wanted);
    }

    #[test]
    fn a_call_stays_as_it_is() {
        assert_eq!(decisions(&mut new(), &[(50, 0, 0); 5]), [None; 5]);
    }
}
