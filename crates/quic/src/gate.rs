//! The credit gate: a congestion controller that opens and shuts at our command, around one that
//! tells the truth.

use std::{
    any::Any,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
};

use mpvpn_types::{Duration, Instant};
use noq_proto::{
    RttEstimator,
    congestion::{Bbr3Config, Controller, ControllerFactory, ControllerMetrics, CubicConfig},
};

use crate::Cc;

/// A window that never binds. Above 2^32, where the library gives up its own pacing.
const ENDLESS: u64 = u64::MAX / 4;

/// Bytes that a new path may have in flight. Several connections share a tunnel from its first
/// moment, each with an initial window of its own (RFC 6928); what leaves is paced.
const INITIAL_WINDOW: u64 = 32 * 1200;

/// What a gate and the loop know of each other.
///
/// One thread uses it at a time; the atomics are there because controllers must be `Sync`.
pub(crate) struct Shared {
    /// When the gate was made; times in here are nanoseconds since then.
    origin: Instant,
    credit: AtomicU64,
    /// Always open: during the handshake.
    pub(crate) open: AtomicBool,
    /// The loop had more to send than the inner window allows.
    pub(crate) window_limited: AtomicBool,
    /// The loop had more to send than window or pacing allow.
    pub(crate) limited: AtomicBool,
    /// Losses are those of a dead path and say nothing about congestion.
    pub(crate) frozen: AtomicBool,
    window: AtomicU64,
    in_flight: AtomicU64,
    rate: AtomicU64,
    delivered: AtomicU64,
    acked_sent: AtomicU64,
    rtt: AtomicU64,
    min_rtt: AtomicU64,
    jitter: AtomicU64,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared")
            .field("credit", &self.credit)
            .field("window", &self.window)
            .field("in_flight", &self.in_flight)
            .field("rate", &self.rate)
            .finish_non_exhaustive()
    }
}

impl Shared {
    fn new(origin: Instant) -> Self {
        Self {
            origin,
            credit: AtomicU64::new(0),
            open: AtomicBool::new(true),
            window_limited: AtomicBool::new(false),
            limited: AtomicBool::new(false),
            frozen: AtomicBool::new(false),
            window: AtomicU64::new(0),
            in_flight: AtomicU64::new(0),
            rate: AtomicU64::new(0),
            delivered: AtomicU64::new(0),
            acked_sent: AtomicU64::new(0),
            rtt: AtomicU64::new(0),
            min_rtt: AtomicU64::new(0),
            jitter: AtomicU64::new(0),
        }
    }

    /// Sets the credit (bytes).
    pub(crate) fn set_credit(&self, bytes: u64) {
        self.credit.store(bytes, Relaxed);
    }

    /// Congestion window of the inner controller (bytes).
    pub(crate) fn window(&self) -> u64 {
        self.window.load(Relaxed)
    }

    /// Bytes sent and neither acknowledged nor lost.
    pub(crate) fn in_flight(&self) -> u64 {
        self.in_flight.load(Relaxed)
    }

    /// Bytes that the inner window still allows.
    pub(crate) fn room(&self) -> u64 {
        self.window().saturating_sub(self.in_flight())
    }

    /// The inner controller's pacing rate (bytes/s).
    pub(crate) fn pacing_rate(&self) -> Option<u64> {
        let rate = self.rate.load(Relaxed);
        if rate > 0 {
            return Some(rate);
        }
        // RFC 9002 §7.7 recommends 1.25 windows a round trip.
        let rtt = self.rtt.load(Relaxed);
        (rtt > 0).then(|| (u128::from(self.window()) * 1_250_000_000 / u128::from(rtt)) as u64)
    }

    /// Delivery rate (bytes/s) that the path has shown, 0 if it has not carried anything.
    pub(crate) fn delivery_rate(&self) -> u64 {
        self.delivered.load(Relaxed)
    }

    /// When the newest acknowledged packet was sent.
    pub(crate) fn acked_sent(&self) -> Instant {
        self.origin + Duration::from_nanos(self.acked_sent.load(Relaxed))
    }

    /// Variation of the round-trip time.
    pub(crate) fn jitter(&self) -> Duration {
        Duration::from_nanos(self.jitter.load(Relaxed))
    }

    /// The least round-trip time seen.
    pub(crate) fn min_rtt(&self) -> Duration {
        Duration::from_nanos(self.min_rtt.load(Relaxed))
    }

    fn measured(&self, now: Instant, sent: Instant, rtt: &RttEstimator) {
        let sent_at = nanos(sent.saturating_duration_since(self.origin));
        if sent_at <= self.acked_sent.load(Relaxed) {
            return;
        }
        self.acked_sent.store(sent_at, Relaxed);
        let smoothed = nanos(rtt.get());
        self.rtt.store(smoothed, Relaxed);
        self.min_rtt.store(nanos(rtt.min()), Relaxed);
        // RFC 9002 §5.3, of samples that still hold the acknowledgement delay.
        let sample = nanos(now.saturating_duration_since(sent));
        let jitter = self.jitter.load(Relaxed);
        self.jitter.store((jitter * 3 + sample.abs_diff(smoothed)) / 4, Relaxed);
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// What a path delivers, measured over windows of a round trip.
///
/// Controllers know windows; how much of a window was ever used, and so what a path is worth
/// compared to another one, only acknowledgements tell.
#[derive(Clone, Debug)]
struct Delivery {
    since: Instant,
    acked: u64,
    /// The path was never short of data in this window.
    full: bool,
    rate: u64,
}

impl Delivery {
    /// Acknowledgements come in bunches: shorter windows would measure those.
    const WINDOW: Duration = Duration::from_millis(40);

    fn new(now: Instant) -> Self {
        Self { since: now, acked: 0, full: true, rate: 0 }
    }

    /// Counts acknowledged bytes; returns the rate (bytes/s) when a window is complete.
    fn on_ack(&mut self, now: Instant, bytes: u64, rtt: Duration, app_limited: bool) -> Option<u64> {
        let time = now.saturating_duration_since(self.since);
        if time < rtt.max(Self::WINDOW) {
            self.acked += bytes;
            self.full &= !app_limited;
            return None;
        }
        let sample = (u128::from(self.acked) * 1_000_000_000 / time.as_nanos().max(1)) as u64;
        // A path that was full and delivered less has become slower; one that was not full may only
        // have been asked for less.
        self.rate = if self.full { (self.rate - self.rate / 8).max(sample) } else { self.rate.max(sample) };
        *self = Self { since: now, acked: bytes, full: !app_limited, rate: self.rate };
        Some(self.rate)
    }
}

/// A controller behind a gate.
pub(crate) struct Gate {
    inner: Box<dyn Controller>,
    delivery: Delivery,
    pub(crate) shared: Arc<Shared>,
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gate").field("shared", &self.shared).finish_non_exhaustive()
    }
}

impl Gate {
    fn add_in_flight(&self, bytes: u64) {
        self.shared.in_flight.store(self.shared.in_flight() + bytes, Relaxed);
    }

    fn remove_in_flight(&self, bytes: u64) {
        self.shared.in_flight.store(self.shared.in_flight().saturating_sub(bytes), Relaxed);
    }

    fn publish(&self) {
        let metrics = self.inner.metrics();
        self.shared.window.store(self.inner.window(), Relaxed);
        self.shared.rate.store(metrics.pacing_rate.unwrap_or(0), Relaxed);
    }

    fn frozen(&self) -> bool {
        self.shared.frozen.load(Relaxed)
    }
}

impl Controller for Gate {
    fn on_sent(&mut self, now: Instant, bytes: u64, largest_pn: u64) {
        self.inner.on_sent(now, bytes, largest_pn);
    }

    fn on_packet_sent(&mut self, now: Instant, bytes: u16, pn: u64) {
        let credit = self.shared.credit.load(Relaxed);
        self.shared.credit.store(credit.saturating_sub(bytes.into()), Relaxed);
        self.add_in_flight(bytes.into());
        self.inner.on_packet_sent(now, bytes, pn);
    }

    /// The library calls this whenever the gate is shut; what it means is said in `on_end_acks`.
    fn on_cwnd_limited(&mut self) {}

    fn on_ack(
        &mut self,
        now: Instant,
        sent: Instant,
        bytes: u64,
        pn: u64,
        _app_limited: bool,
        rtt: &RttEstimator,
    ) {
        self.remove_in_flight(bytes);
        self.shared.measured(now, sent, rtt);
        let app_limited = !self.shared.limited.load(Relaxed);
        if let Some(rate) = self.delivery.on_ack(now, bytes, rtt.get(), app_limited) {
            self.shared.delivered.store(rate, Relaxed);
        }
        self.inner.on_ack(now, sent, bytes, pn, app_limited, rtt);
    }

    fn on_end_acks(
        &mut self,
        now: Instant,
        in_flight: u64,
        _app_limited: bool,
        largest_packet_num_acked: Option<u64>,
    ) {
        self.shared.in_flight.store(in_flight, Relaxed);
        if self.shared.window_limited.load(Relaxed) {
            self.inner.on_cwnd_limited();
        }
        let app_limited = !self.shared.limited.load(Relaxed);
        self.inner.on_end_acks(now, in_flight, app_limited, largest_packet_num_acked);
        if app_limited {
            // The library's BBR ends an application-limited phase with one call and starts the next
            // with the following one: packets sent in between look as if the path were full at an
            // idle tunnel's rate, and end its startup for good. The call changes nothing else twice.
            self.inner.on_end_acks(now, in_flight, app_limited, largest_packet_num_acked);
        }
        self.publish();
    }

    fn on_congestion_event(
        &mut self,
        now: Instant,
        sent: Instant,
        is_persistent_congestion: bool,
        is_ecn: bool,
        lost_bytes: u64,
        largest_lost_pn: u64,
    ) {
        if !self.frozen() {
            self.inner.on_congestion_event(
                now,
                sent,
                is_persistent_congestion,
                is_ecn,
                lost_bytes,
                largest_lost_pn,
            );
        }
        self.publish();
    }

    fn on_packet_lost(&mut self, lost_bytes: u16, pn: u64, now: Instant) {
        self.remove_in_flight(lost_bytes.into());
        if !self.frozen() {
            self.inner.on_packet_lost(lost_bytes, pn, now);
        }
    }

    fn on_spurious_congestion_event(&mut self) {
        self.inner.on_spurious_congestion_event();
        self.publish();
    }

    fn on_mtu_update(&mut self, new_mtu: u16) {
        self.inner.on_mtu_update(new_mtu);
        self.publish();
    }

    fn on_ack_frequency_update(&mut self, threshold: u64, max_ack_delay: Duration) {
        self.inner.on_ack_frequency_update(threshold, max_ack_delay);
    }

    fn window(&self) -> u64 {
        if self.shared.open.load(Relaxed) || self.shared.credit.load(Relaxed) > 0 { ENDLESS } else { 0 }
    }

    fn metrics(&self) -> ControllerMetrics {
        let mut metrics = ControllerMetrics::default();
        metrics.congestion_window = ENDLESS;
        metrics
    }

    fn clone_box(&self) -> Box<dyn Controller> {
        Box::new(Self {
            inner: self.inner.clone_box(),
            delivery: self.delivery.clone(),
            shared: self.shared.clone(),
        })
    }

    fn initial_window(&self) -> u64 {
        self.inner.initial_window()
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

/// Builds gates around controllers of one kind.
pub(crate) struct GateFactory(pub(crate) Cc);

impl ControllerFactory for GateFactory {
    fn build(self: Arc<Self>, now: Instant, current_mtu: u16) -> Box<dyn Controller> {
        let inner = match self.0 {
            Cc::Bbr => {
                let mut config = Bbr3Config::default();
                config.initial_window(INITIAL_WINDOW);
                Arc::new(config).build(now, current_mtu)
            }
            Cc::Cubic => {
                let mut config = CubicConfig::default();
                config.initial_window(INITIAL_WINDOW);
                Arc::new(config).build(now, current_mtu)
            }
        };
        let gate = Gate { inner, delivery: Delivery::new(now), shared: Arc::new(Shared::new(now)) };
        gate.publish();
        Box::new(gate)
    }
}

/// The shared side of the gate that `controller` is.
pub(crate) fn shared_of(controller: &dyn Controller) -> Option<Arc<Shared>> {
    let gate = controller.clone_box().into_any().downcast::<Gate>().ok()?;
    Some(gate.shared.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gate() -> (Box<dyn Controller>, Arc<Shared>) {
        let controller = Arc::new(GateFactory(Cc::Cubic)).build(Instant::now(), 1200);
        let shared = shared_of(controller.as_ref()).expect("a gate");
        shared.open.store(false, Relaxed);
        (controller, shared)
    }

    #[test]
    fn the_window_is_endless_with_credit_and_empty_without() {
        let (mut controller, shared) = gate();
        assert_eq!(controller.window(), 0);
        shared.set_credit(2000);
        assert_eq!(controller.window(), ENDLESS);
        controller.on_packet_sent(Instant::now(), 1200, 0);
        assert_eq!(controller.window(), ENDLESS);
        controller.on_packet_sent(Instant::now(), 1200, 1);
        assert_eq!(controller.window(), 0);
        assert_eq!(shared.in_flight(), 2400);
    }

    #[test]
    fn the_delivery_rate_follows_a_full_path_and_remembers_it_while_idle() {
        let start = Instant::now();
        let mut delivery = Delivery::new(start);
        let ms = Duration::from_millis;
        let mut run = |from: u64, to: u64, bytes: u64, app_limited| {
            for at in from..to {
                delivery.on_ack(start + ms(at), bytes, ms(20), app_limited);
            }
            delivery.rate
        };
        assert!((9_500_000..10_500_000).contains(&run(1, 1000, 10_000, false)));
        assert!((9_500_000..10_500_000).contains(&run(1000, 5000, 100, true)));
        assert!((4_500_000..5_500_000).contains(&run(5000, 7000, 5_000, false)));
    }

    #[test]
    fn a_frozen_gate_keeps_the_window_through_losses() {
        let (mut controller, shared) = gate();
        let now = Instant::now();
        let before = shared.window();
        shared.frozen.store(true, Relaxed);
        controller.on_packet_sent(now, 1200, 0);
        controller.on_packet_lost(1200, 0, now);
        controller.on_congestion_event(now, now, true, false, 1200, 0);
        assert_eq!((shared.window(), shared.in_flight()), (before, 0));
        shared.frozen.store(false, Relaxed);
        controller.on_congestion_event(now, now, true, false, 1200, 1);
        assert!(shared.window() < before);
    }
}
