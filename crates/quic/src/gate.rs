//! The credit gate: a congestion controller for noq that opens and shuts on command, around the real
//! controller.
//!
//! In: noq's calls about packets that were sent, acknowledged and lost; credit from the event loop. Out: an
//! unlimited window to noq while there is credit, none otherwise; window, rates and round-trip times of the
//! real controller to the event loop. Always holds: the real controller sees every packet, whatever noq sees.

mod group;
mod medium;
mod model;
mod qlog;
mod report;

use std::{
    any::Any,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::Relaxed},
    },
};

use group::Group;
use medium::MediumLosses;
use model::{Inner, Model};
use mpvpn_types::{CongestionControl, Duration, Instant, bytes_in};
use noq_proto::{
    RttEstimator,
    congestion::{Controller, ControllerFactory, ControllerMetrics},
};

pub(crate) use self::report::PathLabel;
use crate::{
    QlogEvent, delivery::Acked, qlog::ConnectionQlog, random_loss::RandomLoss, sent_datagrams::SentDatagrams,
};

/// The window that noq sees while the gate is open: it never limits, and is above 2^32, from where noq does
/// not pace.
const UNLIMITED_WINDOW: u64 = u64::MAX / 4;

/// The initial congestion window (bytes): 32 packets, more than the 10 of RFC 6928 because several
/// connections share a tunnel from its first moment, and packets are paced. Smaller: slow start; larger:
/// bursts into slow links.
const INITIAL_WINDOW: u64 = 32 * 1200;
/// The fixed-point representation of 1 in [`GateState::random_loss`]: 2^32.
const FIXED_POINT_ONE: f64 = 4_294_967_296.0;
const UNKNOWN: u64 = u64::MAX;

/// The state that a gate shares with the event loop.
///
/// One thread uses it at a time; it has atomics because noq's controllers must be `Sync`.
#[derive(derive_more::Debug)]
#[debug("GateState(credit {credit:?}, window {window:?}, in flight {in_flight:?}, rate {rate:?})")]
pub(crate) struct GateState {
    /// When the gate was made; times in here are nanoseconds since then.
    origin: Instant,
    credit: AtomicU64,
    /// Whether the gate is open without credit, as during the handshake.
    pub(crate) open: AtomicBool,
    /// More data waits than the congestion window allows.
    pub(crate) window_limited: AtomicBool,
    /// More data waits than congestion window and pacing allow.
    pub(crate) limited: AtomicBool,
    /// The path is dead, so its losses are no sign of congestion.
    pub(crate) ignore_losses: AtomicBool,
    /// Packets travel inside TCP.
    pub(crate) inside_tcp: AtomicBool,
    window: AtomicU64,
    in_flight: AtomicU64,
    rate: AtomicU64,
    delivered: AtomicU64,
    acked_sent: AtomicU64,
    rtt: AtomicU64,
    min_rtt: AtomicU64,
    jitter: AtomicU64,
    base_rtt: AtomicU64,
    /// How long after their arrival packets are answered, smoothed.
    answer_delay: AtomicU64,
    /// When less left than the rate allows, as this process was late; 0 once a later packet is acknowledged.
    late_at: AtomicU64,
    /// The shortest round trip since [`Self::take_least_rtt`].
    least_rtt: AtomicU64,
    /// Bytes and packets that were sent and are acknowledged by the peer, and those that were acknowledged.
    sent: (AtomicU64, AtomicU64),
    acked: (AtomicU64, AtomicU64),
    /// Whether packets were acknowledged since [`Self::take_acked`]; others may be lost then.
    has_acked: AtomicBool,
    /// Whether the MTU has changed since [`Self::take_new_mtu`].
    has_new_mtu: AtomicBool,
    /// The least rate (bytes/s) that the controller takes over with the next acknowledgement; 0 for none.
    pub(crate) least_rate: AtomicU64,
    /// The congestion controller to change to, as a number; all ones for no change.
    kind: AtomicU8,
    /// The congestion controller in use, as a number.
    kind_in_use: AtomicU8,
    /// The random loss, in units of 2^-32; all ones if unknown.
    random_loss: AtomicU64,
    /// Whether there are tracked datagrams.
    has_tracked: AtomicBool,
    sent_datagrams: Mutex<SentDatagrams>,
    /// The paths that share a controller with this one.
    group: OnceLock<Arc<Group>>,
    /// The connection and path of the gate.
    label: OnceLock<PathLabel>,
    /// The sink of qlog events, if they are recorded.
    qlog: OnceLock<ConnectionQlog>,
    /// The last logged delivery rate (bytes/s).
    reported_rate: AtomicU64,
}

impl GateState {
    fn new(origin: Instant) -> Self {
        Self {
            origin,
            credit: AtomicU64::new(0),
            open: AtomicBool::new(true),
            window_limited: AtomicBool::new(false),
            limited: AtomicBool::new(false),
            ignore_losses: AtomicBool::new(false),
            inside_tcp: AtomicBool::new(false),
            window: AtomicU64::new(0),
            in_flight: AtomicU64::new(0),
            rate: AtomicU64::new(0),
            delivered: AtomicU64::new(0),
            acked_sent: AtomicU64::new(0),
            rtt: AtomicU64::new(0),
            min_rtt: AtomicU64::new(0),
            jitter: AtomicU64::new(0),
            base_rtt: AtomicU64::new(0),
            answer_delay: AtomicU64::new(0),
            late_at: AtomicU64::new(0),
            least_rtt: AtomicU64::new(u64::MAX),
            sent: Default::default(),
            acked: Default::default(),
            has_acked: AtomicBool::new(false),
            has_new_mtu: AtomicBool::new(false),
            least_rate: AtomicU64::new(0),
            kind: AtomicU8::new(u8::MAX),
            kind_in_use: AtomicU8::new(0),
            random_loss: AtomicU64::new(UNKNOWN),
            has_tracked: AtomicBool::new(false),
            sent_datagrams: Mutex::new(SentDatagrams::default()),
            group: OnceLock::new(),
            label: OnceLock::new(),
            qlog: OnceLock::new(),
            reported_rate: AtomicU64::new(0),
        }
    }

    fn label(&self) -> PathLabel {
        self.label.get().copied().unwrap_or_default()
    }

    fn reported_rate(&self) -> u64 {
        self.reported_rate.load(Relaxed)
    }

    fn set_reported_rate(&self, rate: u64) {
        self.reported_rate.store(rate, Relaxed);
    }

    /// Lets another path share the controller of this one, for good. A path that is in a group already stays
    /// there.
    pub(crate) fn join(self: &Arc<Self>, other: &Arc<Self>) {
        let group = self.group.get_or_init(|| Arc::new(Group::of(self)));
        let theirs = other.group.get_or_init(|| group.clone());
        if Arc::ptr_eq(group, theirs) {
            group.add(other);
        }
    }

    /// Calls `each` for all paths that share this controller.
    fn for_all(&self, mut each: impl FnMut(&Self)) {
        match self.group.get() {
            None => each(self),
            Some(group) => group.members().iter().filter_map(Weak::upgrade).for_each(|member| each(&member)),
        }
    }

    /// Bytes in flight on all paths that share this controller, except dead ones.
    fn all_in_flight(&self) -> u64 {
        let mut sum = 0;
        self.for_all(|path| sum += if path.ignore_losses.load(Relaxed) { 0 } else { path.in_flight() });
        sum
    }

    /// The tracked datagrams, to add more.
    pub(crate) fn track(&self) -> MutexGuard<'_, SentDatagrams> {
        self.has_tracked.store(true, Relaxed);
        self.sent_datagrams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The tracked datagrams, if there are any.
    pub(crate) fn tracked(&self) -> Option<MutexGuard<'_, SentDatagrams>> {
        let has_tracked = self.has_tracked.load(Relaxed);
        has_tracked.then(|| self.sent_datagrams.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Sets the credit (bytes).
    pub(crate) fn set_credit(&self, bytes: u64) {
        self.credit.store(bytes, Relaxed);
    }

    /// Whether packets were acknowledged since the last call.
    pub(crate) fn take_acked(&self) -> bool {
        self.has_acked.load(Relaxed) && self.has_acked.swap(false, Relaxed)
    }

    /// Whether the MTU has changed since the last call.
    pub(crate) fn take_new_mtu(&self) -> bool {
        self.has_new_mtu.load(Relaxed) && self.has_new_mtu.swap(false, Relaxed)
    }

    /// Shuts the gate; returns the unused credit (bytes).
    pub(crate) fn take_credit(&self) -> u64 {
        self.credit.swap(0, Relaxed)
    }

    /// The congestion window of the real controller (bytes).
    pub(crate) fn window(&self) -> u64 {
        self.window.load(Relaxed)
    }

    /// Bytes in flight.
    pub(crate) fn in_flight(&self) -> u64 {
        self.in_flight.load(Relaxed)
    }

    /// The pacing rate of the real controller (bytes/s).
    pub(crate) fn pacing_rate(&self) -> Option<u64> {
        let rate = self.rate.load(Relaxed);
        if rate > 0 {
            return Some(rate);
        }
        // RFC 9002 §7.7 recommends 1.25 windows a round trip.
        let rtt = self.rtt.load(Relaxed);
        (rtt > 0).then(|| (u128::from(self.window()) * 1_250_000_000 / u128::from(rtt)) as u64)
    }

    /// The delivery rate (bytes/s), 0 if unknown.
    pub(crate) fn delivery_rate(&self) -> u64 {
        self.delivered.load(Relaxed)
    }

    /// The expected rate (bytes/s): the delivery rate, else what the congestion window allows, 0 if neither
    /// is known.
    pub(crate) fn rate(&self) -> u64 {
        match (self.delivery_rate(), self.rtt.load(Relaxed)) {
            (0, 0) => 0,
            (0, rtt) => (u128::from(self.window()) * 1_000_000_000 / u128::from(rtt)) as u64,
            (rate, _) => rate,
        }
    }

    /// When the newest acknowledged packet was sent.
    pub(crate) fn acked_sent(&self) -> Instant {
        self.origin + Duration::from_nanos(self.acked_sent.load(Relaxed))
    }

    /// When the newest acknowledged packets of all paths that share this controller were sent, in the mean.
    /// Bytes that are acknowledged on any of them were sent while this mean advanced, however
    /// acknowledgements are bunched.
    fn newest_sent(&self) -> Instant {
        let (mut sum, mut count) = (0, 0);
        self.for_all(|path| {
            if !path.ignore_losses.load(Relaxed) {
                sum += u128::from(nanos(path.acked_sent().saturating_duration_since(self.origin)));
                count += 1;
            }
        });
        match u64::try_from(sum / count.max(1)) {
            Ok(mean) if count > 0 => self.origin + Duration::from_nanos(mean),
            _ => self.acked_sent(),
        }
    }

    /// Packets were answered so long after they arrived, as this process had other work.
    pub(crate) fn on_answered(&self, late: Duration) {
        self.answer_delay.store((self.answer_delay.load(Relaxed) * 7 + nanos(late)) / 8, Relaxed);
    }

    /// Less has left than the rate allows, as this process was late.
    pub(crate) fn on_late(&self, now: Instant) {
        report::late(self);
        self.late_at.store(nanos(now.saturating_duration_since(self.origin)), Relaxed);
    }

    /// Whether a packet that was acknowledged is the first that was `sent` after this process was late.
    fn take_late(&self, sent: Instant) -> bool {
        let late_at = self.late_at.load(Relaxed);
        let is_first = late_at > 0 && nanos(sent.saturating_duration_since(self.origin)) >= late_at;
        if is_first {
            self.late_at.store(0, Relaxed);
        }
        is_first
    }

    /// Variation of the round-trip time.
    pub(crate) fn jitter(&self) -> Duration {
        Duration::from_nanos(self.jitter.load(Relaxed))
    }

    /// The round-trip time of a packet in a busy stream without a queue.
    pub(crate) fn base_rtt(&self) -> Duration {
        Duration::from_nanos(self.base_rtt.load(Relaxed))
    }

    /// The random loss (share of packets, 0 to 1), once measured.
    pub(crate) fn random_loss(&self) -> Option<f64> {
        let share = self.random_loss.load(Relaxed);
        (share != UNKNOWN).then(|| share as f64 / FIXED_POINT_ONE)
    }

    /// The shortest round-trip time, if there was a sample.
    pub(crate) fn min_rtt(&self) -> Option<Duration> {
        Some(Duration::from_nanos(self.min_rtt.load(Relaxed))).filter(|rtt| !rtt.is_zero())
    }

    /// The shortest round trip since the last call; `None` without acknowledgements.
    pub(crate) fn take_least_rtt(&self) -> Option<Duration> {
        let least = self.least_rtt.swap(u64::MAX, Relaxed);
        (least < u64::MAX).then(|| Duration::from_nanos(least))
    }

    /// Initialises a gate that noq has just created: its path, whether it is open, and its congestion
    /// controller, if it is not the configured one.
    pub(crate) fn begin(&self, label: PathLabel, open: bool, cc: Option<CongestionControl>) {
        self.label.get_or_init(|| label);
        self.open.store(open, Relaxed);
        if let Some(cc) = cc {
            self.set_kind(cc);
        }
    }

    /// Changes the congestion controller with the next acknowledgement, if it is another one.
    pub(crate) fn set_kind(&self, cc: CongestionControl) {
        self.kind.store(cc as u8, Relaxed);
    }

    /// The congestion controller in use.
    pub(crate) fn kind_in_use(&self) -> CongestionControl {
        CongestionControl::ALL.get(usize::from(self.kind_in_use.load(Relaxed))).copied().unwrap_or_default()
    }

    /// The least rate (bytes/s) to take over, if it was set since the last call. Called for every
    /// acknowledged packet, so it writes only if it was set.
    fn take_least_rate(&self) -> Option<u64> {
        let rate = self.least_rate.load(Relaxed);
        (rate > 0).then(|| {
            self.least_rate.store(0, Relaxed);
            rate
        })
    }

    /// Ack-eliciting bytes that were sent, and those that were acknowledged, with `header` bytes per packet
    /// added.
    pub(crate) fn wire_bytes(&self, header: u64) -> (u64, u64) {
        let of =
            |(bytes, packets): &(AtomicU64, AtomicU64)| bytes.load(Relaxed) + header * packets.load(Relaxed);
        (of(&self.sent), of(&self.acked))
    }

    fn add_rtt_sample(&self, now: Instant, sent: Instant, rtt: &RttEstimator) {
        let sample = nanos(now.saturating_duration_since(sent));
        if sample < self.least_rtt.load(Relaxed) {
            self.least_rtt.store(sample, Relaxed);
        }
        let sent_at = nanos(sent.saturating_duration_since(self.origin));
        if sent_at <= self.acked_sent.load(Relaxed) {
            return;
        }
        self.acked_sent.store(sent_at, Relaxed);
        let smoothed = nanos(rtt.get());
        self.rtt.store(smoothed, Relaxed);
        self.min_rtt.store(nanos(rtt.min()), Relaxed);
        // RFC 9002 §5.3, of samples that still hold the acknowledgement delay.
        let jitter = self.jitter.load(Relaxed);
        self.jitter.store((jitter * 3 + sample.abs_diff(smoothed)) / 4, Relaxed);
    }
}

fn count((bytes, packets): &(AtomicU64, AtomicU64), more: u64) {
    bytes.store(bytes.load(Relaxed) + more, Relaxed);
    packets.store(packets.load(Relaxed) + 1, Relaxed);
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// A controller behind a gate.
#[derive(derive_more::Debug)]
#[debug("Gate({shared:?})")]
pub(crate) struct Gate {
    own: Model,
    /// The largest UDP payload (bytes).
    mtu: u16,
    random: RandomLoss,
    /// The losses that a controller is spared that takes every loss for congestion.
    medium: MediumLosses,
    acks: qlog::Acks,
    pub(crate) shared: Arc<GateState>,
}

impl Gate {
    fn add_in_flight(&self, bytes: u64) {
        self.shared.in_flight.store(self.shared.in_flight() + bytes, Relaxed);
    }

    fn remove_in_flight(&self, bytes: u64) {
        self.shared.in_flight.store(self.shared.in_flight().saturating_sub(bytes), Relaxed);
    }

    /// Calls `act` with the controller of this path, which may be that of a group.
    fn decide<R>(&mut self, act: impl FnOnce(&mut Model, &mut RandomLoss, &GateState) -> R) -> R {
        let Some(group) = self.shared.group.get() else {
            return act(&mut self.own, &mut self.random, &self.shared);
        };
        let mut model = group.model.lock().unwrap_or_else(PoisonError::into_inner);
        let model = match &mut *model {
            none @ None if group.begins_with(&self.shared) => none.insert(self.own.clone()),
            None => &mut self.own,
            Some(model) => model,
        };
        act(model, &mut self.random, &self.shared)
    }

    /// Replaces the controller if another one was requested.
    fn change_controller_if_requested(&mut self, now: Instant) {
        let at = self.shared.kind.load(Relaxed);
        let Some(kind) = CongestionControl::ALL.get(usize::from(at)).copied() else { return };
        self.shared.kind.store(u8::MAX, Relaxed);
        let mtu = self.mtu;
        self.decide(|model, _, shared| {
            if model.kind() != kind {
                report::controller_replaced(shared, model.kind(), kind);
                *model = Model::new(kind, now, mtu);
            }
        });
    }

    /// Begins again as on a new path, because losses that were no congestion have made the window small.
    fn restart(&mut self, now: Instant) {
        let mtu = self.mtu;
        self.decide(|model, random, shared| {
            report::restarted(shared, random);
            model.inner = Model::new(model.kind(), now, mtu).inner;
        });
    }

    fn publish(&mut self) {
        self.decide(|model, random, shared| model.publish(random, shared));
    }
}

impl Controller for Gate {
    fn on_sent(&mut self, now: Instant, bytes: u64, largest_pn: u64) {
        self.decide(|model, _, _| model.library().map(|inner| inner.on_sent(now, bytes, largest_pn)));
    }

    fn on_packet_sent(&mut self, now: Instant, bytes: u16, pn: u64) {
        let credit = self.shared.credit.load(Relaxed);
        self.shared.credit.store(credit.saturating_sub(bytes.into()), Relaxed);
        self.add_in_flight(bytes.into());
        count(&self.shared.sent, bytes.into());
        if let Some(mut sent_datagrams) = self.shared.tracked() {
            sent_datagrams.on_sent(pn, bytes.into());
        }
        self.shared.record(now, |path| QlogEvent::PacketSent { path, number: pn, size: bytes });
        let window = self.decide(|model, random, shared| match &mut model.inner {
            Inner::Bbr(bbr) => {
                random.on_sent(pn, bbr.is_below() || model.delivery.has_fallen());
                None
            }
            Inner::Library(inner) => {
                let (window, rtt) = (inner.window(), shared.min_rtt().unwrap_or_default());
                // An empty path holds as much as is in flight, so no queue of this end overflows.
                random.on_sent(pn, window < bytes_in(model.delivery.rate, rtt));
                inner.on_packet_sent(now, bytes, pn);
                Some(window)
            }
        });
        if let Some(window) = window
            && self.medium.on_sent(now, pn, window, &self.random)
        {
            self.restart(now);
        }
    }

    /// noq calls this whenever the gate is shut, which says nothing; `on_end_acks` passes the real state on.
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
        self.change_controller_if_requested(now);
        self.remove_in_flight(bytes);
        count(&self.shared.acked, bytes);
        if let Some(mut sent_datagrams) = self.shared.tracked() {
            sent_datagrams.on_acked(pn);
            if sent_datagrams.is_empty() {
                self.shared.has_tracked.store(sent_datagrams.has_outcomes(), Relaxed);
            }
        }
        self.random.on_outcome(pn, false);
        self.medium.on_acked(pn, sent);
        self.shared.add_rtt_sample(now, sent, rtt);
        let app_limited = !self.shared.limited.load(Relaxed);
        let was_late = self.shared.take_late(sent);
        let sample = now.saturating_duration_since(sent);
        self.acks.add(&self.shared, pn, sample);
        self.decide(|model, random, shared| {
            let before = report::is_logged().then(|| report::Before::of(model));
            let Model { inner, delivery } = model;
            // A path that is paced below its rate on purpose, or by a process that was late, delivers less.
            let held_back = was_late || matches!(inner, Inner::Bbr(bbr) if bbr.is_draining());
            let base = match inner {
                Inner::Bbr(bbr) => bbr.base_rtt().unwrap_or(sample),
                Inner::Library(_) => rtt.min(),
            };
            let idle = app_limited || held_back;
            let (paced, queued) = match inner {
                Inner::Bbr(bbr) => (bbr.paced_share(delivery.rate), bbr.is_queued(now)),
                Inner::Library(_) => (1.0, false),
            };
            let (newest, random_loss) = (shared.newest_sent(), random.share());
            let in_order = shared.inside_tcp.load(Relaxed);
            let acked =
                Acked { bytes, sent: newest, rtt: sample, base, idle, random_loss, paced, queued, in_order };
            if let Inner::Bbr(_) = inner
                && let Some(rate) = shared.take_least_rate()
            {
                report::rate_raised(shared, delivery.rate, rate);
                delivery.raise(rate);
            }
            let had_fallen = delivery.has_fallen();
            let window = delivery.on_ack(now, acked);
            if delivery.has_fallen() && !had_fallen {
                // Earlier losses say little about random loss any more.
                random.forget();
            }
            shared.delivered.store(delivery.rate, Relaxed);
            match inner {
                Inner::Bbr(bbr) => {
                    bbr.set_inside_tcp(shared.inside_tcp.load(Relaxed));
                    bbr.on_rtt(now, sample);
                    if let Some(window) = window {
                        bbr.on_round(now, window, delivery.rate, shared.all_in_flight());
                    }
                }
                Inner::Library(inner) => inner.on_ack(now, sent, bytes, pn, app_limited, rtt),
            }
            if let Some(before) = before {
                report::acknowledged(before, model, random, shared, window);
            }
        });
    }

    fn on_end_acks(
        &mut self,
        now: Instant,
        in_flight: u64,
        _app_limited: bool,
        largest_packet_num_acked: Option<u64>,
    ) {
        self.shared.in_flight.store(in_flight, Relaxed);
        self.shared.has_acked.store(true, Relaxed);
        self.decide(|model, random, shared| {
            if let Some(inner) = model.library() {
                if shared.window_limited.load(Relaxed) {
                    inner.on_cwnd_limited();
                }
                let app_limited = !shared.limited.load(Relaxed);
                inner.on_end_acks(now, shared.all_in_flight(), app_limited, largest_packet_num_acked);
            }
            model.publish(random, shared);
        });
        self.acks.record(&self.shared, now);
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
        let is_congestion = self.medium.take_congestion() || is_ecn || is_persistent_congestion;
        let window = self.shared.window();
        let report = |shared: &GateState, outcome| {
            report::losses(shared, lost_bytes, window, is_persistent_congestion, is_ecn, outcome);
        };
        if !is_congestion {
            report(&self.shared, "ignored: the medium loses as much however little is sent");
            return;
        }
        self.decide(|model, random, shared| {
            let ignore_losses = shared.ignore_losses.load(Relaxed);
            if is_ecn && let Inner::Bbr(bbr) = &mut model.inner {
                bbr.on_marked();
            }
            if !ignore_losses && let Some(inner) = model.library() {
                inner.on_congestion_event(
                    now,
                    sent,
                    is_persistent_congestion,
                    is_ecn,
                    lost_bytes,
                    largest_lost_pn,
                );
            }
            model.publish(random, shared);
            let outcome = match (&model.inner, ignore_losses) {
                (_, true) => "ignored: the path is dead",
                (Inner::Bbr(_), false) if is_ecn => "marked: a queue is there",
                (Inner::Bbr(_), false) => "no signal for this controller",
                (Inner::Library(_), false) => "the controller counts them as congestion",
            };
            report(shared, outcome);
        });
        self.acks.record(&self.shared, now);
    }

    fn on_packet_lost(&mut self, lost_bytes: u16, pn: u64, now: Instant) {
        self.remove_in_flight(lost_bytes.into());
        if let Some(mut sent_datagrams) = self.shared.tracked() {
            sent_datagrams.on_lost(pn);
        }
        self.shared.record(now, |path| QlogEvent::PacketLost { path, number: pn, size: lost_bytes });
        if self.shared.ignore_losses.load(Relaxed) {
            return;
        }
        self.random.on_outcome(pn, true);
        self.medium.on_lost(pn);
        self.decide(|model, _, _| {
            model.delivery.on_lost(lost_bytes.into());
            if let Some(inner) = model.library() {
                inner.on_packet_lost(lost_bytes, pn, now);
            }
        });
    }

    fn on_spurious_congestion_event(&mut self) {
        self.decide(|model, random, shared| {
            let window = shared.window();
            if let Some(inner) = model.library() {
                inner.on_spurious_congestion_event();
            }
            model.publish(random, shared);
            report::losses(shared, 0, window, false, false, "packets that were declared lost have arrived");
        });
    }

    fn on_mtu_update(&mut self, new_mtu: u16) {
        self.mtu = new_mtu;
        self.shared.has_new_mtu.store(true, Relaxed);
        self.decide(|model, random, shared| {
            match &mut model.inner {
                Inner::Bbr(bbr) => bbr.on_mtu(new_mtu),
                Inner::Library(inner) => inner.on_mtu_update(new_mtu),
            }
            model.publish(random, shared);
        });
    }

    fn on_ack_frequency_update(&mut self, threshold: u64, max_ack_delay: Duration) {
        self.decide(|model, _, _| {
            model.library().map(|inner| inner.on_ack_frequency_update(threshold, max_ack_delay))
        });
    }

    fn window(&self) -> u64 {
        if self.shared.open.load(Relaxed) || self.shared.credit.load(Relaxed) > 0 {
            UNLIMITED_WINDOW
        } else {
            0
        }
    }

    fn metrics(&self) -> ControllerMetrics {
        let mut metrics = ControllerMetrics::default();
        metrics.congestion_window = UNLIMITED_WINDOW;
        metrics
    }

    fn clone_box(&self) -> Box<dyn Controller> {
        Box::new(Self {
            own: self.own.clone(),
            random: self.random.clone(),
            medium: self.medium.clone(),
            acks: qlog::Acks::default(),
            shared: self.shared.clone(),
            ..*self
        })
    }

    fn initial_window(&self) -> u64 {
        INITIAL_WINDOW
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

/// Builds gates around controllers of one kind.
pub(crate) struct GateFactory(pub(crate) CongestionControl);

impl ControllerFactory for GateFactory {
    fn build(self: Arc<Self>, now: Instant, current_mtu: u16) -> Box<dyn Controller> {
        let mut gate = Gate {
            own: Model::new(self.0, now, current_mtu),
            mtu: current_mtu,
            random: RandomLoss::default(),
            medium: MediumLosses::default(),
            acks: qlog::Acks::default(),
            shared: Arc::new(GateState::new(now)),
        };
        gate.publish();
        Box::new(gate)
    }
}

/// The shared state of a gate; `None` if `controller` is no gate.
pub(crate) fn gate_state_of(controller: &dyn Controller) -> Option<Arc<GateState>> {
    let gate = controller.clone_box().into_any().downcast::<Gate>().ok()?;
    Some(gate.shared.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gate() -> (Box<dyn Controller>, Arc<GateState>) {
        let controller = Arc::new(GateFactory(CongestionControl::Cubic)).build(Instant::now(), 1200);
        let shared = gate_state_of(controller.as_ref()).expect("a gate");
        shared.open.store(false, Relaxed);
        (controller, shared)
    }

    #[test]
    fn the_window_is_endless_with_credit_and_empty_without() {
        let (mut controller, shared) = gate();
        assert_eq!(controller.window(), 0);
        shared.set_credit(2000);
        assert_eq!(controller.window(), UNLIMITED_WINDOW);
        controller.on_packet_sent(Instant::now(), 1200, 0);
        assert_eq!(controller.window(), UNLIMITED_WINDOW);
        controller.on_packet_sent(Instant::now(), 1200, 1);
        assert_eq!(controller.window(), 0);
        assert_eq!(shared.in_flight(), 2400);
    }

    #[test]
    fn only_the_first_packet_after_this_process_was_late_says_so() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let shared = GateState::new(start);
        assert!(!shared.take_late(at(5)));
        shared.on_late(at(10));
        assert!(!shared.take_late(at(9)), "sent before");
        assert!(shared.take_late(at(10)) && !shared.take_late(at(11)));
    }

    #[test]
    fn a_group_has_one_controller() {
        let (mut first, one) = gate();
        let (mut second, two) = gate();
        let now = Instant::now();
        one.join(&two);
        first.on_packet_sent(now, 1200, 0);
        second.on_packet_sent(now, 1200, 0);
        assert_eq!((one.all_in_flight(), two.all_in_flight()), (2400, 2400));
        second.on_packet_lost(1200, 0, now);
        second.on_congestion_event(now, now, false, false, 1200, 0);
        assert!(two.window() < INITIAL_WINDOW);
        assert_eq!(one.window(), two.window());
        two.ignore_losses.store(true, Relaxed);
        second.on_packet_sent(now, 1200, 1);
        assert_eq!(one.all_in_flight(), 1200, "bytes on a dead path do not count");
        drop((second, two));
        assert_eq!(one.all_in_flight(), 1200);
    }

    #[test]
    fn a_gate_that_ignores_losses_keeps_its_window() {
        let (mut controller, shared) = gate();
        let now = Instant::now();
        let before = shared.window();
        shared.ignore_losses.store(true, Relaxed);
        controller.on_packet_sent(now, 1200, 0);
        controller.on_packet_lost(1200, 0, now);
        controller.on_congestion_event(now, now, true, false, 1200, 0);
        assert_eq!((shared.window(), shared.in_flight()), (before, 0));
        shared.ignore_losses.store(false, Relaxed);
        controller.on_congestion_event(now, now, true, false, 1200, 1);
        assert!(shared.window() < before);
    }
}
