//! The shaper of a link: divides its capacity among the traffic classes of one client.
//!
//! In: the share of each class, whether it is backlogged, bytes it has sent, samples of what its paths
//! delivered, and the time. Out: how many bytes a class may send now, and when to ask again.
//!
//! The capacity fills one pool with tokens (bytes). The pool is divided immediately among the backlogged
//! classes: first the classes that go first (up to their `max`), then the guaranteed `min` of each class,
//! then the rest by weight. So the order in which classes ask does not matter, other classes get unused
//! tokens at the same moment, and a class gets its share back with the next tokens. This is generalised
//! processor sharing (Parekh and Gallager, 1993) with the guarantees and ceilings of the hierarchical token
//! bucket (Devera, 2002). No packet-by-packet approximation such as start-time fair queueing (Goyal, Vin and
//! Cheng, 1996) is needed, because classes ask for bytes and not for turns.
//!
//! Always holds:
//! - All classes together send no more than the capacity and a burst; packets that never wait
//!   (acknowledgements) are charged to their class afterwards.
//! - A class that is not backlogged keeps a small reserve, so that it can start at once, and no more.
//! - While the capacity is unknown, no class is limited, except by a `max` that is a rate.

mod capacity;
mod divide;
mod one_way_delay;
mod report;
#[cfg(test)]
mod tests;
mod watch;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mpvpn_types::{BitRate, ClassId, Duration, Instant, Portion, Weight};

pub use capacity::Sample;
use capacity::{CapacityEstimator, seconds};
use divide::{CLASSES, Claim, divide};
use one_way_delay::ClockComparison;
use watch::CapacityWatch;
pub use watch::{CapacityChange, CapacityReason};

/// Depth of the token bucket, in seconds of the capacity (at least two packets): the largest burst. A call
/// waits for such a burst at both ends, so it must be short: bursts of 16 kB on 50 Mbit/s were 2.6 ms of
/// delay. With a smaller one, tokens are lost when a wake-up comes late.
const BURST_SECONDS: f64 = 0.001;
/// Bytes that one send with segmentation offload may exceed the tokens by: about 12 packets. More lets a
/// class exceed its `max` for longer; less would forget a part of such a send.
const MAX_GSO_SEND_BYTES: f64 = 16_000.0;
/// Size of a full packet in bytes (Ethernet MTU).
const PACKET_BYTES: f64 = 1500.0;
/// Tokens in bytes that an idle class with `first` keeps: four packets. Other idle classes keep one. With
/// less, the first packets of a class wait; with more, idle classes together can send a larger burst.
const IDLE_RESERVE_FIRST_BYTES: f64 = 4.0 * PACKET_BYTES;
/// Tokens that an idle class keeps at least, in seconds of the capacity. With less, an application that
/// writes four packets at a time waited although it was within its share; with more, other classes wait
/// longer.
const IDLE_RESERVE_SECONDS: f64 = 0.000_3;
/// A waiting class is woken when it may send its rate times this many seconds, or two packets. Less means
/// more wake-ups; more means larger bursts.
const WAKEUP_QUANTUM_SECONDS: f64 = 0.000_25;
/// Maximum time until a waiting class asks again, because other classes may have stopped meanwhile. Shorter
/// means more wake-ups; longer leaves capacity unused.
const MAX_WAIT: Duration = Duration::from_millis(2);
/// Minimum time until a waiting class asks again, about what one iteration of the event loop takes. Shorter
/// busy-loops; longer adds delay and bursts. Chosen (docs/design/shaper.md, open questions).
const MIN_WAIT: Duration = Duration::from_micros(50);
/// A backlogged class that has not asked for this long counts as idle. Shorter takes the share of a class
/// whose thread got no processor; longer leaves the share of a stopped class unused. Chosen
/// (docs/design/shaper.md, open questions).
const DEMAND_TIMEOUT: Duration = Duration::from_millis(100);
/// The link counts as shared for this long after a class with `first` had something to send. Shorter, and a
/// call finds the queue of a backup again after a pause; longer, and a single class is limited without need.
/// Chosen (docs/design/shaper.md, open questions).
const SHARED_AFTER_FIRST: Duration = Duration::from_secs(2);
/// The link counts as shared for this long after several classes were backlogged at the same time. Trade-off
/// and origin as for [`SHARED_AFTER_FIRST`].
const SHARED_AFTER_CONTENTION: Duration = Duration::from_secs(1);
/// A class counts as idle when it has sent nothing for this long; clock reports are rarer while all but one
/// are idle. Shorter, and reports are missing when a class returns after a pause; longer, and more reports
/// are sent. Chosen (docs/design/shaper.md, open questions).
const CLASS_IDLE_AFTER: Duration = Duration::from_secs(2);
/// The part of a link that a class with `first` gets before all others if it has no `max`. More lets such a
/// class starve the others; less delays it when it needs most of a slow link. Chosen (docs/design/shaper.md,
/// open questions).
const DEFAULT_FIRST_MAX: Portion = Portion::Percent(50);
/// A congestion controller behind the shaper is told to assume at least the share of its class times this
/// factor, so that the fluctuations of its own estimate do not limit it. Less, and the class loses share;
/// more, and the controller overshoots when the class is alone again.
const CONTROLLER_HEADROOM: f64 = 1.4;
/// Maximum debt of the pool, in seconds of the capacity: how long bytes sent beyond the capacity are
/// remembered. Less, and overload has no consequence; more, and a class pays long for its acknowledgements.
const MAX_DEBT_SECONDS: f64 = 0.25;

/// The configured share of a class on a link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Share {
    /// The class is served before all others up to `max` (default: half of the link); beyond that it
    /// competes like the others.
    pub first: bool,
    /// Relative weight in the division of capacity that is not guaranteed to any class.
    pub weight: Weight,
    /// Guaranteed part of the link while the class is backlogged.
    pub min: Option<Portion>,
    /// Maximum part of the link, even if no other class sends. With `first`: the part that is served first.
    pub max: Option<Portion>,
}

/// A handle to the shaper of a link, for one class.
#[derive(Clone, Debug)]
pub struct ShaperHandle {
    shaper: Arc<Mutex<Shaper>>,
    class: ClassId,
}

impl ShaperHandle {
    /// A handle for `class`, a number below [`ClassId::MAX`].
    pub fn new(shaper: Arc<Mutex<Shaper>>, class: ClassId) -> Self {
        Self { shaper, class }
    }

    /// Locks the shaper.
    pub fn shaper(&self) -> MutexGuard<'_, Shaper> {
        self.shaper.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The class of the handle.
    pub fn class(&self) -> ClassId {
        self.class
    }

    /// Whether both handles are for the same class at the same shaper.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shaper, &other.shaper) && self.class == other.class
    }
}

/// The state of a class at the shaper. All amounts are bytes.
#[derive(Clone, Copy, Debug, Default)]
struct ClassState {
    share: Share,
    /// Bytes that the class may send; negative after it has sent more.
    tokens: f64,
    /// Bytes that the class may still take before all others.
    first_tokens: f64,
    /// Bytes that are still guaranteed to the class.
    min_tokens: f64,
    /// Bytes that its `max` still allows.
    max_tokens: f64,
    backlogged: bool,
    /// Since when; the last change of `backlogged`.
    backlog_changed: Option<Instant>,
    /// For how long the class was backlogged before that.
    backlog_time: Duration,
    /// When the class asked last.
    last_polled: Option<Instant>,
    /// When the class sent anything last, with the resolution of the shaper's updates.
    last_sent: Option<Instant>,
}

impl ClassState {
    /// How long the class has been backlogged since `backlog_changed`. A class whose connection does not poll
    /// for [`DEMAND_TIMEOUT`] counts as ended from then on.
    fn current_backlog_time(&self, now: Instant) -> Duration {
        let (Some(since), Some(polled)) =
            (self.backlog_changed.filter(|_| self.backlogged), self.last_polled)
        else {
            return Duration::ZERO;
        };
        now.min(polled + DEMAND_TIMEOUT).saturating_duration_since(since)
    }

    /// Tokens that the class keeps while idle, on a link with `link` bytes/s.
    fn idle_reserve(&self, link: f64) -> f64 {
        (link * IDLE_RESERVE_SECONDS).max(if self.share.first {
            IDLE_RESERVE_FIRST_BYTES
        } else {
            PACKET_BYTES
        })
    }

    /// Bytes/s that the class may take before all others, on a link with `link` bytes/s.
    fn first_rate(&self, link: f64) -> f64 {
        if self.share.first { portion_rate(self.share.max.unwrap_or(DEFAULT_FIRST_MAX), link) } else { 0.0 }
    }

    fn min_rate(&self, link: f64) -> f64 {
        self.share.min.map_or(0.0, |min| portion_rate(min, link))
    }

    /// Bytes/s that the class must never exceed, if limited and known.
    fn max_rate(&self, link: Option<f64>) -> Option<f64> {
        match (self.share.max?, link) {
            _ if self.share.first => None,
            (Portion::Percent(_), None) => None,
            (max, link) => Some(portion_rate(max, link.unwrap_or_default())),
        }
    }
}

/// A portion in bytes/s, of a link with `link` bytes/s.
fn portion_rate(portion: Portion, link: f64) -> f64 {
    match portion {
        Portion::Rate(rate) => rate.bps() as f64 / 8.0,
        Portion::Percent(percent) => link * f64::from(percent) / 100.0,
    }
}

/// Depth of the token bucket in bytes, on a link with `rate` bytes/s.
fn burst_bytes(rate: f64) -> f64 {
    (rate * BURST_SECONDS).max(2.0 * PACKET_BYTES)
}

/// The shaper of a link.
#[derive(Debug)]
pub struct Shaper {
    /// Number of the link, for log events.
    link: Option<u16>,
    last_update: Instant,
    capacity: CapacityEstimator,
    clocks: ClockComparison,
    /// Undivided tokens in bytes; negative after more was sent than can be charged to the classes.
    pool: f64,
    classes: [ClassState; CLASSES],
    /// Until when the link counts as shared by classes.
    shared_until: Option<Instant>,
    is_limiting: bool,
    capacity_watch: CapacityWatch,
}

impl Shaper {
    /// A shaper of a link with this capacity; `None` to measure it ([`Self::on_sample`]). All classes have
    /// [`Share::default`].
    pub fn new(now: Instant, capacity: Option<BitRate>) -> Self {
        let mut shaper = Self {
            link: None,
            last_update: now,
            capacity: CapacityEstimator::new(now, capacity),
            clocks: ClockComparison::new(now),
            pool: 0.0,
            classes: [ClassState { tokens: PACKET_BYTES, ..ClassState::default() }; CLASSES],
            shared_until: None,
            is_limiting: capacity.is_some(),
            capacity_watch: CapacityWatch::default(),
        };
        shaper.note_configured(capacity);
        shaper
    }

    fn note_configured(&mut self, given: Option<BitRate>) {
        if let Some(given) = given.and(self.capacity.estimate) {
            self.capacity_watch.configured(given);
        }
    }

    /// Sets the number of the link, for log events.
    #[must_use]
    pub fn with_link_number(self, link: u16) -> Self {
        Self { link: Some(link), ..self }
    }

    /// Changes the configured capacity.
    pub fn set_capacity(&mut self, now: Instant, capacity: Option<BitRate>) {
        report::configured(self.link, self.capacity.estimate, capacity);
        self.advance(now);
        self.capacity.set_configured(capacity);
        self.note_configured(capacity);
    }

    /// Changes the share of a class.
    pub fn set_share(&mut self, now: Instant, class: ClassId, share: Share) {
        self.advance(now);
        self.classes[index(class)].share = share;
        report::share(self.link, class, share);
    }

    /// The capacity of the link for IP packets: the configured one, a lower one if the configured one fills a
    /// queue, or the measured one. `None` while it is unknown.
    pub fn capacity(&self) -> Option<BitRate> {
        self.capacity.estimate.map(|rate| BitRate::from_bytes_per_second(rate as u64))
    }

    /// When packets last waited for the link, so that the capacity was measured; `None` if it is configured
    /// or unknown.
    pub fn capacity_measured(&self) -> Option<Instant> {
        self.capacity.measured()
    }

    /// A large change of the capacity since the last call ([`CapacityChange`]).
    pub fn take_capacity_change(&mut self) -> Option<CapacityChange> {
        self.capacity_watch.take()
    }

    /// Bytes of IP packets that a class may send now: a packet of any size may be sent if it is not 0. Only
    /// classes with data to send ask.
    pub fn available_bytes(&mut self, now: Instant, class: ClassId) -> u64 {
        self.classes[index(class)].last_polled = Some(now);
        if self.classes[index(class)].share.first {
            self.shared_until = self.shared_until.max(Some(now + SHARED_AFTER_FIRST));
        }
        self.advance(now);
        self.available(class)
    }

    fn available(&self, class: ClassId) -> u64 {
        let own = &self.classes[index(class)];
        let tokens = if self.is_limiting { own.tokens + self.pool.max(0.0) } else { f64::INFINITY };
        let most = own.max_rate(self.capacity.estimate).map_or(f64::INFINITY, |_| own.max_tokens);
        let room = tokens.min(most);
        if room == f64::INFINITY { u64::MAX } else { room.max(0.0) as u64 }
    }

    /// Charges bytes of IP packets to the class that has sent them.
    pub fn on_sent(&mut self, class: ClassId, bytes: u64) {
        let bytes = bytes as f64;
        self.capacity.on_sent(bytes);
        let most = burst_bytes(self.capacity.estimate.unwrap_or_default());
        let own = &mut self.classes[index(class)];
        own.last_sent = Some(self.last_update);
        own.max_tokens = (own.max_tokens - bytes).max(-most - MAX_GSO_SEND_BYTES);
        if !self.is_limiting {
            return;
        }
        own.tokens -= bytes;
        if own.tokens < 0.0 && self.pool > 0.0 {
            let drawn = self.pool.min(-own.tokens);
            (own.tokens, self.pool) = (own.tokens + drawn, self.pool - drawn);
        }
        if own.tokens < -most {
            // The debt of one class is limited; the pool takes the rest.
            (self.pool, own.tokens) = (self.pool + own.tokens + most, -most);
        }
    }

    /// Sets whether a class has more data than it may send.
    pub fn set_backlogged(&mut self, now: Instant, class: ClassId, backlogged: bool) {
        if self.classes[index(class)].backlogged == backlogged {
            return;
        }
        let own = &mut self.classes[index(class)];
        own.backlog_time += own.current_backlog_time(now);
        (own.backlogged, own.backlog_changed) = (backlogged, Some(now));
        self.advance(now);
        report::backlogged(self.link, class, backlogged, self.classes[index(class)].tokens, self.pool);
        let link = self.capacity.estimate.unwrap_or_default();
        let own = &mut self.classes[index(class)];
        let surplus = (own.tokens - own.idle_reserve(link)).max(0.0);
        if !backlogged && surplus > 0.0 {
            own.tokens -= surplus;
            self.pool += surplus;
            self.advance(now);
        }
    }

    /// For how long a class has had more data than it could send, in all.
    pub fn backlog_time(&self, now: Instant, class: ClassId) -> Duration {
        let own = &self.classes[index(class)];
        own.backlog_time + own.current_backlog_time(now)
    }

    /// When the class should ask again; `None` if it may send now.
    pub fn retry_at(&mut self, now: Instant, class: ClassId) -> Option<Instant> {
        self.advance(now);
        if self.available(class) > 0 {
            return None;
        }
        let own = &self.classes[index(class)];
        let rate = self.fair_rate(now, class).map_or(1.0, |rate| rate.max(1.0));
        let missing = |tokens: f64, rate: f64| {
            ((rate * WAKEUP_QUANTUM_SECONDS).max(2.0 * PACKET_BYTES) - tokens).max(0.0) / rate
        };
        let by_tokens = if self.is_limiting { missing(own.tokens + self.pool.min(0.0), rate) } else { 0.0 };
        let by_max =
            own.max_rate(self.capacity.estimate).map_or(0.0, |most| missing(own.max_tokens, most.max(1.0)));
        let wait = by_tokens.max(by_max).clamp(0.0, 1.0);
        report::waits(self.link, class, wait, rate, by_max > by_tokens);
        Some(now + Duration::from_secs_f64(wait).clamp(MIN_WAIT, MAX_WAIT))
    }

    /// Bytes/s that a backlogged class currently gets; `None` if it is not limited.
    pub fn class_rate(&mut self, now: Instant, class: ClassId) -> Option<u64> {
        self.advance(now);
        let held = self.is_limiting || self.classes[index(class)].max_rate(self.capacity.estimate).is_some();
        self.fair_rate(now, class).filter(|_| held).map(|rate| rate as u64)
    }

    /// Takes a measurement of a path of a class over about 5 ms. Returns the minimum rate (bytes/s) that a
    /// congestion controller limited by the shaper should assume for the path: its own estimate only
    /// shows the limit, and when the other classes stop, it must not have to probe for the rate of the
    /// link again.
    pub fn on_sample(&mut self, now: Instant, class: ClassId, sample: Sample) -> Option<u64> {
        self.advance(now);
        let is_shared = self.is_shared(now);
        // A class that is limited by its own `max` shows nothing about the link.
        let most = self.classes[index(class)].max_rate(self.capacity.estimate);
        let by_max = most.is_some_and(|most| self.fair_rate(now, class).is_none_or(|fair| fair >= most));
        let sample = Sample { backlogged: sample.backlogged && !by_max, ..sample };
        let before = report::is_followed().then(|| self.capacity.decision());
        self.capacity.on_sample(now, is_shared, sample, self.clocks.queues(now));
        if let Some(before) = before {
            report::capacity(self.link, before, self.capacity.decision());
        }
        self.capacity_watch.measured(self.capacity.estimate, || self.capacity.own_queue());
        if !self.is_limiting {
            return None;
        }
        let (link, fair) = (self.capacity.estimate?, self.fair_rate(now, class)?);
        Some((fair * CONTROLLER_HEADROOM).min(link) as u64)
    }

    /// The clock of this end for clock reports to the peer (µs modulo 2^32).
    pub fn clock_micros(&self, now: Instant) -> u32 {
        self.clocks.clock_micros(now)
    }

    /// Takes a clock report of the peer that arrived over the link (docs/protocol.md, "Clock reports").
    /// `clock` is the number of the peer's clock (one per thread), `sent` its time when the report was
    /// sent, `found` the one-way delay that the peer measured for the last report of this end, if any;
    /// both in µs modulo 2^32, delays plus the offset of the clocks. Returns the one-way delay of this
    /// report, for the next report to the peer.
    pub fn on_clock_report(&mut self, now: Instant, clock: u8, sent: u32, found: Option<u32>) -> u32 {
        self.clocks.on_report(now, clock, sent, found)
    }

    /// Whether at most one class has sent anything recently, acknowledgements included.
    pub fn is_single_class_active(&self, now: Instant) -> bool {
        let lately = |at: Instant| now.saturating_duration_since(at) < CLASS_IDLE_AFTER;
        self.classes.iter().filter(|class| class.last_sent.is_some_and(lately)).count() <= 1
    }

    /// Whether several classes use the link, so that its capacity must be divided.
    fn is_shared(&self, now: Instant) -> bool {
        self.shared_until.is_some_and(|until| now < until)
    }

    fn is_competing(&self, now: Instant, at: usize) -> bool {
        let own = &self.classes[at];
        own.backlogged
            && own
                .last_polled
                .is_some_and(|last_polled| now.saturating_duration_since(last_polled) < DEMAND_TIMEOUT)
    }

    /// Bytes/s that the class would get if it were backlogged, with the current demand of the other classes.
    fn fair_rate(&self, now: Instant, class: ClassId) -> Option<f64> {
        let link = self.capacity.estimate;
        let claim = |at: usize| {
            let own = &self.classes[at];
            if at != index(class) && !self.is_competing(now, at) {
                return Claim::default();
            }
            let known = link.unwrap_or_default();
            Claim {
                demand: own.max_rate(link).unwrap_or(f64::INFINITY),
                first_limit: own.first_rate(known),
                min_limit: own.min_rate(known),
                weight: own.share.weight.get().into(),
            }
        };
        match link {
            Some(link) => Some(divide(link, &std::array::from_fn(claim))[index(class)].total),
            None => self.classes[index(class)].max_rate(None),
        }
    }

    /// Adds tokens for the time up to `now`, and divides them.
    fn advance(&mut self, now: Instant) {
        let passed = seconds(now.saturating_duration_since(self.last_update)).min(1.0);
        self.last_update = self.last_update.max(now);
        let active: [bool; CLASSES] = std::array::from_fn(|at| self.is_competing(now, at));
        let count = active.iter().filter(|active| **active).count();
        if count > 1 {
            self.shared_until = self.shared_until.max(Some(now + SHARED_AFTER_CONTENTION));
        }
        let known = self.capacity.estimate;
        for class in &mut self.classes {
            if let Some(most) = class.max_rate(known) {
                class.max_tokens = (class.max_tokens + most * passed).min(burst_bytes(most));
            }
        }
        let link = self.capacity.limit(self.is_shared(now));
        if self.is_limiting != link.is_some() {
            self.is_limiting = link.is_some();
            report::limiting(self.link, link, self.is_shared(now), count, self.capacity.own_queue());
            let link = link.unwrap_or_default();
            // First let the queue drain that the single class has built up in the link: new classes would
            // wait in it.
            self.pool = -link * self.capacity.own_queue().min(MAX_DEBT_SECONDS);
            self.classes.iter_mut().for_each(|class| class.tokens = class.idle_reserve(link));
        }
        let Some(link) = link else { return };
        let burst = burst_bytes(link);
        self.pool = (self.pool + link * passed).max(-burst - link * MAX_DEBT_SECONDS);
        for class in &mut self.classes {
            let (first, least) = (class.first_rate(link), class.min_rate(link));
            class.first_tokens =
                (class.first_tokens + first * passed).min(first * BURST_SECONDS + IDLE_RESERVE_FIRST_BYTES);
            class.min_tokens = (class.min_tokens + least * passed).min(least * BURST_SECONDS + PACKET_BYTES);
        }
        self.distribute(link, &active, burst / count.max(1) as f64);
        let held: f64 = self.classes.iter().map(|class| class.tokens.max(0.0)).sum();
        self.pool = self.pool.min((burst - held).max(0.0));
    }

    /// Divides the pool of a link with `link` bytes/s: competing classes get up to `max_bytes` beyond the
    /// idle reserve, the other classes up to the idle reserve.
    fn distribute(&mut self, link: f64, competing: &[bool; CLASSES], max_bytes: f64) {
        if self.pool <= 0.0 {
            return;
        }
        let claims = std::array::from_fn(|at| {
            let class = &self.classes[at];
            let level = class.idle_reserve(link) + if competing[at] { max_bytes } else { 0.0 };
            Claim {
                demand: (level - class.tokens).max(0.0),
                first_limit: class.first_tokens.max(0.0),
                min_limit: class.min_tokens,
                weight: class.share.weight.get().into(),
            }
        });
        for (class, allocation) in self.classes.iter_mut().zip(divide(self.pool, &claims)) {
            class.tokens += allocation.total;
            class.first_tokens -= allocation.first;
            class.min_tokens -= allocation.min;
            self.pool -= allocation.total;
        }
    }
}

fn index(class: ClassId) -> usize {
    usize::from(class.0) % CLASSES
}
