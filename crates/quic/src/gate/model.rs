//! The controller behind a gate: BBR or one of noq's, with the measured delivery rate.

use std::sync::{Arc, atomic::Ordering::Relaxed};

use mpvpn_types::{CongestionControl, Duration, Instant};
use noq_proto::congestion::{Controller, ControllerFactory, CubicConfig};

use super::{FIXED_POINT_ONE, GateState, INITIAL_WINDOW, UNKNOWN, nanos};
use crate::{
    bbr::Bbr,
    delivery::Delivery,
    random_loss::{RandomLoss, compensated},
};

/// A congestion controller.
pub(super) enum Inner {
    Bbr(Box<Bbr>),
    Library(Box<dyn Controller>),
}

/// The controller and delivery rate of a path, or of a group of paths over one link.
pub(super) struct Model {
    pub(super) inner: Inner,
    pub(super) delivery: Delivery,
}

impl Clone for Model {
    fn clone(&self) -> Self {
        let inner = match &self.inner {
            Inner::Bbr(bbr) => Inner::Bbr(bbr.clone()),
            Inner::Library(inner) => Inner::Library(inner.clone_box()),
        };
        Self { inner, delivery: self.delivery.clone() }
    }
}

impl Model {
    /// A new controller of this kind; `mtu`: the largest UDP payload (bytes).
    pub(super) fn new(kind: CongestionControl, now: Instant, mtu: u16) -> Self {
        let inner = match kind {
            CongestionControl::Bbr => Inner::Bbr(Box::new(Bbr::new(INITIAL_WINDOW, mtu))),
            CongestionControl::Cubic => {
                let mut config = CubicConfig::default();
                config.initial_window(INITIAL_WINDOW);
                Inner::Library(Arc::new(config).build(now, mtu))
            }
        };
        Self { inner, delivery: Delivery::new(now) }
    }

    /// The kind of controller.
    pub(super) fn kind(&self) -> CongestionControl {
        match &self.inner {
            Inner::Bbr(_) => CongestionControl::Bbr,
            Inner::Library(_) => CongestionControl::Cubic,
        }
    }

    /// Publishes window, rates and round-trip times in the state of all paths that share this controller.
    pub(super) fn publish(&self, random: &RandomLoss, shared: &GateState) {
        let base = match &self.inner {
            Inner::Bbr(bbr) => bbr.base_rtt().unwrap_or_default(),
            Inner::Library(_) => shared.min_rtt().unwrap_or_default(),
        };
        let known = random.measured().map_or(UNKNOWN, |share| (share * FIXED_POINT_ONE) as u64);
        shared.random_loss.store(known, Relaxed);
        let kind = self.kind() as u8;
        // All paths share one queue, so the newest measurement of any says how long it is.
        let rtt = Duration::from_nanos(shared.rtt.load(Relaxed));
        let late = Duration::from_nanos(shared.answer_delay.load(Relaxed));
        shared.for_all(|path| {
            let (window, pacing) = match &self.inner {
                Inner::Bbr(bbr) => {
                    // Random loss takes its share of what this path sends.
                    let lost = path.random_loss().map_or(0.0, compensated);
                    let rate = (self.delivery.rate as f64 / (1.0 - lost)) as u64;
                    (bbr.window(rate, late), bbr.pacing_rate(rate, rtt))
                }
                Inner::Library(inner) => (inner.window(), inner.metrics().pacing_rate),
            };
            path.kind_in_use.store(kind, Relaxed);
            path.base_rtt.store(nanos(base), Relaxed);
            path.window.store(window, Relaxed);
            path.rate.store(pacing.unwrap_or(0), Relaxed);
            path.delivered.store(self.delivery.rate, Relaxed);
        });
    }

    /// The controller, if it is one of noq's.
    pub(super) fn library(&mut self) -> Option<&mut dyn Controller> {
        match &mut self.inner {
            Inner::Bbr(_) => None,
            Inner::Library(inner) => Some(inner.as_mut()),
        }
    }
}
