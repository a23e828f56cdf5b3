//! What is behind the gate: a congestion controller, of our own or of the library, and the delivery rate that it goes by.

use std::sync::{Arc, atomic::Ordering::Relaxed};

use mpvpn_types::{CongestionControl, Duration, Instant};
use noq_proto::congestion::{Controller, ControllerFactory, CubicConfig};

use super::{INITIAL_WINDOW, SHARE, Shared, UNKNOWN, nanos};
use crate::{bbr::Bbr, delivery::Delivery, random_loss::RandomLoss};

/// A congestion controller.
pub(super) enum Inner {
    Bbr(Box<Bbr>),
    Library(Box<dyn Controller>),
}

/// What decides how much a path may carry, or several that share a bottleneck.
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
    /// One of this kind for a path that has carried nothing; `mtu`: bytes of a UDP payload.
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

    /// The kind of its controller.
    pub(super) fn kind(&self) -> CongestionControl {
        match &self.inner {
            Inner::Bbr(_) => CongestionControl::Bbr,
            Inner::Library(_) => CongestionControl::Cubic,
        }
    }

    /// Says what it allows and knows on all paths that it decides about.
    pub(super) fn publish(&self, random: &RandomLoss, shared: &Shared) {
        let base = match &self.inner {
            Inner::Bbr(bbr) => bbr.base_rtt().unwrap_or_default(),
            Inner::Library(_) => shared.min_rtt().unwrap_or_default(),
        };
        let known = random.measured().map_or(UNKNOWN, |share| (share * SHARE) as u64);
        shared.random_loss.store(known, Relaxed);
        let (window, pacing) = match &self.inner {
            Inner::Bbr(bbr) => {
                // What is lost anyway takes its share of the rate.
                let rate = (self.delivery.rate() as f64 / (1.0 - random.share())) as u64;
                let rtt = Duration::from_nanos(shared.rtt.load(Relaxed));
                (bbr.window(rate), bbr.pacing_rate(rate, rtt))
            }
            Inner::Library(inner) => (inner.window(), inner.metrics().pacing_rate),
        };
        let kind = self.kind() as u8;
        shared.for_all(|path| {
            path.kind_in_use.store(kind, Relaxed);
            path.base_rtt.store(nanos(base), Relaxed);
            path.window.store(window, Relaxed);
            path.rate.store(pacing.unwrap_or(0), Relaxed);
            path.delivered.store(self.delivery.rate(), Relaxed);
        });
    }

    /// The controller, if it is one of the library.
    pub(super) fn library(&mut self) -> Option<&mut dyn Controller> {
        match &mut self.inner {
            Inner::Bbr(_) => None,
            Inner::Library(inner) => Some(inner.as_mut()),
        }
    }
}
