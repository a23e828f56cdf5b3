//! The credit gate: a congestion controller that opens and shuts at our command, around one that
//! tells the truth.

mod group;
mod model;
mod qlog;
mod report;

use std::{
    any::Any,
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::Relaxed},
    },
};

use group::Group;
use model::{Inner, Model};
use mpvpn_types::{CongestionControl, Duration, Instant};
use noq_proto::{
    RttEstimator,
    congestion::{Controller, ControllerFactory, ControllerMetrics},
};

pub(crate) use self::report::PathLabel;
use crate::{
    QlogEvent, delivery::Acked, qlog::ConnectionQlog, random_loss::RandomLoss, sent_datagrams::SentDatagrams,
};

/// A window that never binds. Above 2^32, where the library gives up its own pacing.
const ENDLESS: u64 = u64::MAX / 4;

/// Bytes that a new path may have in flight. Several connections share a tunnel from its first
/// moment, each with an initial window of its own (RFC 6928); what leaves is paced.
const INITIAL_WINDOW: u64 = 32 * 1200;

/// Losses that may be spared at once: those of a round trip come together (packets).
const MOST_SPARED: f64 = 32.0;
/// What 1 is in [`Shared::random_loss`] and [`Shared::spared`].
const SHARE: f64 = 4_294_967_296.0;
const UNKNOWN: u64 = u64::MAX;

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
    /// The shortest round trip since somebody asked.
    least_rtt: AtomicU64,
    /// Bytes and packets that were sent and had to be acknowledged, and those that were.
    sent: (AtomicU64, AtomicU64),
    acked: (AtomicU64, AtomicU64),
    /// Bytes/s that the path is to be taken for at least, from the next acknowledgement on; 0 for nothing.
    pub(crate) at_least: AtomicU64,
    /// The kind of controller that is wanted instead of the one that there is, as a number; all ones for
    /// none.
    kind: AtomicU8,
    /// The kind of the controller that decides now, as a number.
    kind_in_use: AtomicU8,
    /// The share of packets that is lost however little is sent, in 2^-32; all ones if that is not known.
    random_loss: AtomicU64,
    /// The share of packets whose loss does not count as congestion, in 2^-32.
    spared: AtomicU64,
    /// Something is in the ledger.
    follows: AtomicBool,
    ledger: Mutex<SentDatagrams>,
    /// The paths that share one controller with this one.
    group: OnceLock<Arc<Group>>,
    /// Which path it is.
    label: OnceLock<PathLabel>,
    /// Where events are recorded, if they are.
    qlog: OnceLock<ConnectionQlog>,
    /// The delivery rate (bytes/s) that was reported last as a change.
    reported_rate: AtomicU64,
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
            least_rtt: AtomicU64::new(u64::MAX),
            sent: Default::default(),
            acked: Default::default(),
            at_least: AtomicU64::new(0),
            kind: AtomicU8::new(u8::MAX),
            kind_in_use: AtomicU8::new(0),
            random_loss: AtomicU64::new(UNKNOWN),
            spared: AtomicU64::new(0),
            follows: AtomicBool::new(false),
            ledger: Mutex::new(SentDatagrams::default()),
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

    /// Has another path decided about together with this one, for good. One that is in a group already stays there.
    pub(crate) fn join(self: &Arc<Self>, other: &Arc<Self>) {
        let group = self.group.get_or_init(|| Arc::new(Group::of(self)));
        let theirs = other.group.get_or_init(|| group.clone());
        if Arc::ptr_eq(group, theirs) {
            group.add(other);
        }
    }

    /// Calls `each` for all paths that one controller decides about.
    fn for_all(&self, mut each: impl FnMut(&Self)) {
        match self.group.get() {
            None => each(self),
            Some(group) => group.members().iter().filter_map(Weak::upgrade).for_each(|member| each(&member)),
        }
    }

    /// Bytes sent and neither acknowledged nor lost on all these paths, but for those that are dead.
    fn all_in_flight(&self) -> u64 {
        let mut sum = 0;
        self.for_all(|path| sum += if path.frozen.load(Relaxed) { 0 } else { path.in_flight() });
        sum
    }

    /// The fates of datagrams, to write new ones down.
    pub(crate) fn follow(&self) -> MutexGuard<'_, SentDatagrams> {
        self.follows.store(true, Relaxed);
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The fates of datagrams, if any are followed.
    pub(crate) fn fates(&self) -> Option<MutexGuard<'_, SentDatagrams>> {
        let follows = self.follows.load(Relaxed);
        follows.then(|| self.ledger.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Sets the credit (bytes).
    pub(crate) fn set_credit(&self, bytes: u64) {
        self.credit.store(bytes, Relaxed);
    }

    /// Shuts the gate; the credit that was left (bytes).
    pub(crate) fn take_credit(&self) -> u64 {
        self.credit.swap(0, Relaxed)
    }

    /// Congestion window of the inner controller (bytes).
    pub(crate) fn window(&self) -> u64 {
        self.window.load(Relaxed)
    }

    /// Bytes sent and neither acknowledged nor lost.
    pub(crate) fn in_flight(&self) -> u64 {
        self.in_flight.load(Relaxed)
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

    /// Rate to reckon with (bytes/s): what was shown, else what the window allows, 0 if neither is known.
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

    /// When the newest acknowledged packets of all paths that one controller decides about were sent, in the mean:
    /// what their acknowledgements tell together was sent while this moved on, however they are bunched.
    fn newest_sent(&self) -> Instant {
        let (mut sum, mut count) = (0, 0);
        self.for_all(|path| {
            if !path.frozen.load(Relaxed) {
                sum += u128::from(nanos(path.acked_sent().saturating_duration_since(self.origin)));
                count += 1;
            }
        });
        match u64::try_from(sum / count.max(1)) {
            Ok(mean) if count > 0 => self.origin + Duration::from_nanos(mean),
            _ => self.acked_sent(),
        }
    }

    /// Variation of the round-trip time.
    pub(crate) fn jitter(&self) -> Duration {
        Duration::from_nanos(self.jitter.load(Relaxed))
    }

    /// The round-trip time of a packet in a stream, with the path's queue empty.
    pub(crate) fn base_rtt(&self) -> Duration {
        Duration::from_nanos(self.base_rtt.load(Relaxed))
    }

    /// The share of packets (0 to 1) that is lost however little is sent, if that could be told.
    pub(crate) fn random_loss(&self) -> Option<f64> {
        let share = self.random_loss.load(Relaxed);
        (share != UNKNOWN).then(|| share as f64 / SHARE)
    }

    /// Spares a controller that takes every loss for congestion this share of packets (0 to 1): they are lost anyway, and
    /// made good by other means.
    pub(crate) fn spare(&self, share: f64) {
        self.spared.store((share.clamp(0.0, 1.0) * SHARE) as u64, Relaxed);
    }

    /// The least round-trip time seen, if there was any.
    pub(crate) fn min_rtt(&self) -> Option<Duration> {
        Some(Duration::from_nanos(self.min_rtt.load(Relaxed))).filter(|rtt| !rtt.is_zero())
    }

    /// The shortest round trip since this was asked last; `None` if nothing came back.
    pub(crate) fn take_least_rtt(&self) -> Option<Duration> {
        let least = self.least_rtt.swap(u64::MAX, Relaxed);
        (least < u64::MAX).then(|| Duration::from_nanos(least))
    }

    /// Tells a gate that the library has just made which path it is, and what holds for all of its connection: whether it
    /// is open, and the kind of its controller, if that was asked for.
    pub(crate) fn begin(&self, label: PathLabel, open: bool, cc: Option<CongestionControl>) {
        self.label.get_or_init(|| label);
        self.open.store(open, Relaxed);
        if let Some(cc) = cc {
            self.set_kind(cc);
        }
    }

    /// Lets a controller of this kind begin anew, if there is another one, with the next acknowledgement.
    pub(crate) fn set_kind(&self, cc: CongestionControl) {
        self.kind.store(cc as u8, Relaxed);
    }

    /// The kind of the controller that decides now.
    pub(crate) fn kind_in_use(&self) -> CongestionControl {
        CongestionControl::ALL.get(usize::from(self.kind_in_use.load(Relaxed))).copied().unwrap_or_default()
    }

    /// What the path is to be taken for at least (bytes/s), if that was said since this was asked last. Asked with every
    /// acknowledged packet, so nothing is written where nothing was said.
    fn take_at_least(&self) -> Option<u64> {
        let rate = self.at_least.load(Relaxed);
        (rate > 0).then(|| {
            self.at_least.store(0, Relaxed);
            rate
        })
    }

    /// Bytes that were sent and had to be acknowledged, and those that were, with `header` bytes in front of each
    /// packet.
    pub(crate) fn wire(&self, header: u64) -> (u64, u64) {
        let of =
            |(bytes, packets): &(AtomicU64, AtomicU64)| bytes.load(Relaxed) + header * packets.load(Relaxed);
        (of(&self.sent), of(&self.acked))
    }

    fn measured(&self, now: Instant, sent: Instant, rtt: &RttEstimator) {
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
pub(crate) struct Gate {
    own: Model,
    /// Bytes of a UDP payload.
    mtu: u16,
    random: RandomLoss,
    /// Losses that may be spared still.
    sparable: f64,
    /// One was not, since the controller was told of congestion.
    unspared: bool,
    acks: qlog::Acks,
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

    /// Calls `act` with what decides about this path.
    fn decide<R>(&mut self, act: impl FnOnce(&mut Model, &mut RandomLoss, &Shared) -> R) -> R {
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

    /// Begins anew with a controller of the kind that was asked for.
    fn change_kind(&mut self, now: Instant) {
        let at = self.shared.kind.load(Relaxed);
        let Some(kind) = CongestionControl::ALL.get(usize::from(at)).copied() else { return };
        self.shared.kind.store(u8::MAX, Relaxed);
        let mtu = self.mtu;
        self.decide(|model, _, shared| {
            if model.kind() != kind {
                report::kind(shared, model.kind(), kind);
                *model = Model::new(kind, now, mtu);
            }
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
        let spared = self.shared.spared.load(Relaxed) as f64 / SHARE;
        self.sparable = (self.sparable + spared).min(if spared > 0.0 { MOST_SPARED } else { 0.0 });
        if let Some(mut ledger) = self.shared.fates() {
            ledger.on_sent(pn, bytes.into());
        }
        self.shared.record(now, |path| QlogEvent::PacketSent { path, number: pn, size: bytes });
        self.decide(|model, random, _| match &mut model.inner {
            Inner::Bbr(bbr) => random.on_sent(pn, bbr.is_below() || model.delivery.has_fallen()),
            Inner::Library(inner) => inner.on_packet_sent(now, bytes, pn),
        });
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
        self.change_kind(now);
        self.remove_in_flight(bytes);
        count(&self.shared.acked, bytes);
        if let Some(mut ledger) = self.shared.fates() {
            ledger.on_acked(pn);
            if ledger.is_empty() {
                self.shared.follows.store(ledger.has_outcomes(), Relaxed);
            }
        }
        self.random.on_fate(pn, false);
        self.shared.measured(now, sent, rtt);
        let app_limited = !self.shared.limited.load(Relaxed);
        let sample = now.saturating_duration_since(sent);
        self.acks.add(&self.shared, pn, sample);
        self.decide(|model, random, shared| {
            let before = report::is_followed().then(|| report::Before::of(model));
            let Model { inner, delivery } = model;
            // A path that is paced below its rate delivers less for no fault of its own.
            let held_back = matches!(inner, Inner::Bbr(bbr) if bbr.is_draining());
            let base = match inner {
                Inner::Bbr(bbr) => bbr.base_rtt().unwrap_or(sample),
                Inner::Library(_) => rtt.min(),
            };
            let idle = app_limited || held_back;
            let (paced, queued) = match inner {
                Inner::Bbr(bbr) => (bbr.paced(delivery.rate()), bbr.is_queued(now)),
                Inner::Library(_) => (1.0, false),
            };
            let (newest, random_loss) = (shared.newest_sent(), random.share());
            let in_order = shared.inside_tcp.load(Relaxed);
            let acked =
                Acked { bytes, sent: newest, rtt: sample, base, idle, random_loss, paced, queued, in_order };
            if let Inner::Bbr(_) = inner
                && let Some(rate) = shared.take_at_least()
            {
                report::raised(shared, delivery.rate(), rate);
                delivery.raise(rate);
            }
            let had_fallen = delivery.has_fallen();
            let window = delivery.on_ack(now, acked);
            if delivery.has_fallen() && !had_fallen {
                // What was lost before is no guide any more.
                random.forget();
            }
            shared.delivered.store(delivery.rate(), Relaxed);
            match inner {
                Inner::Bbr(bbr) => {
                    bbr.set_inside_tcp(shared.inside_tcp.load(Relaxed));
                    bbr.on_rtt(now, sample);
                    if let Some(window) = window {
                        bbr.on_round(now, window, delivery.rate(), shared.all_in_flight());
                    }
                }
                Inner::Library(inner) => inner.on_ack(now, sent, bytes, pn, app_limited, rtt),
            }
            if let Some(before) = before {
                report::round(before, model, random, shared, window);
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
        let told = std::mem::take(&mut self.unspared) || is_ecn || is_persistent_congestion;
        let window = self.shared.window();
        let report = |shared: &Shared, outcome| {
            report::losses(shared, lost_bytes, window, is_persistent_congestion, is_ecn, outcome);
        };
        if !told {
            report(&self.shared, "spared: the path loses so many anyway, and they are made good");
            return;
        }
        self.decide(|model, random, shared| {
            let frozen = shared.frozen.load(Relaxed);
            if !frozen && let Some(inner) = model.library() {
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
            let outcome = match (&model.inner, frozen) {
                (_, true) => "ignored: the path is taken for dead",
                (Inner::Bbr(_), false) => "no signal for this controller",
                (Inner::Library(_), false) => "the controller was told of congestion",
            };
            report(shared, outcome);
        });
        self.acks.record(&self.shared, now);
    }

    fn on_packet_lost(&mut self, lost_bytes: u16, pn: u64, now: Instant) {
        self.remove_in_flight(lost_bytes.into());
        if let Some(mut ledger) = self.shared.fates() {
            ledger.on_lost(pn);
        }
        self.shared.record(now, |path| QlogEvent::PacketLost { path, number: pn, size: lost_bytes });
        if self.shared.frozen.load(Relaxed) {
            return;
        }
        self.random.on_fate(pn, true);
        if self.sparable >= 1.0 {
            self.sparable -= 1.0;
        } else {
            self.unspared = true;
        }
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
            report::losses(shared, 0, window, false, false, "what was taken for lost has arrived");
        });
    }

    fn on_mtu_update(&mut self, new_mtu: u16) {
        self.mtu = new_mtu;
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
        if self.shared.open.load(Relaxed) || self.shared.credit.load(Relaxed) > 0 { ENDLESS } else { 0 }
    }

    fn metrics(&self) -> ControllerMetrics {
        let mut metrics = ControllerMetrics::default();
        metrics.congestion_window = ENDLESS;
        metrics
    }

    fn clone_box(&self) -> Box<dyn Controller> {
        Box::new(Self {
            own: self.own.clone(),
            random: self.random.clone(),
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
            sparable: 0.0,
            unspared: false,
            acks: qlog::Acks::default(),
            shared: Arc::new(Shared::new(now)),
        };
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
        let controller = Arc::new(GateFactory(CongestionControl::Cubic)).build(Instant::now(), 1200);
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
    fn what_is_learned_on_one_path_of_a_group_counts_for_all() {
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
        two.frozen.store(true, Relaxed);
        second.on_packet_sent(now, 1200, 1);
        assert_eq!(one.all_in_flight(), 1200, "what is on a dead path takes no room");
        drop((second, two));
        assert_eq!(one.all_in_flight(), 1200);
    }

    #[test]
    fn losses_that_are_made_good_are_spared_and_more_are_not() {
        let start = Instant::now();
        let run = |spared: f64, one_in: u64| {
            let (mut controller, shared) = gate();
            shared.spare(spared);
            for packet in 0..1000 {
                let now = start + Duration::from_millis(packet);
                controller.on_packet_sent(now, 1200, packet);
                if packet % one_in == one_in - 1 {
                    controller.on_packet_lost(1200, packet, now);
                    controller.on_congestion_event(now, now, false, false, 1200, packet);
                }
            }
            shared.window()
        };
        assert_eq!(run(0.15, 8), INITIAL_WINDOW);
        assert!(run(0.15, 4) < INITIAL_WINDOW / 2 && run(0.0, 8) < INITIAL_WINDOW / 2);
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
