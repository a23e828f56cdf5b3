//! How classes share a link: in front of each link stands one shaper that all classes of a client ask.
//!
//! In: what each class may have, whether it has more to send, what it has sent, what was delivered, and the time. Out:
//! how much a class may send now, and when to ask again.
//!
//! What the link carries grows as tokens into one pool, and is divided at once among the classes that want to send:
//! those that go first (up to their `max`), then what each is owed at least, then the rest by weight. So no class
//! depends on who asks first, what one does not use is the others' in the same moment, and it is its own again with the
//! next byte that grows. This is generalised processor sharing (Parekh and Gallager, 1993), of which start-time fair
//! queueing (Goyal, Vin and Cheng, 1996) is the packet by packet approximation, with the guarantees and ceilings of the
//! hierarchical token bucket (Devera, 2002). It can be done literally here, because classes ask for bytes and not for
//! turns.
//!
//! Always holds:
//! - All classes together send no more than the capacity and a burst; what never waits (acknowledgements) is taken from
//!   what its class may send afterwards.
//! - A class that wants nothing keeps a packet's worth, so that it can begin at once, and no more.
//! - Without a known capacity nothing is held back, but for a `max` that is a rate.

mod capacity;
mod divide;
mod report;
#[cfg(test)]
mod tests;
mod watch;
mod ways;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mpvpn_types::{BitRate, ClassId, Duration, Instant, Portion, Weight};

pub use capacity::Sample;
use capacity::{Capacity, seconds};
use divide::{CLASSES, Claim, divide};
use watch::CapacityWatch;
pub use watch::{CapacityChange, CapacityReason};
use ways::Ways;

/// What may leave at once: what the link carries in this time (s), as a call waits for all of it, at both ends, or two
/// packets. What a wake-up missed that came later is lost.
const BURST: f64 = 0.001;
/// What one segmented send may take beyond that (bytes).
const SEGMENTED: f64 = 16_000.0;
/// What a class that wants nothing keeps: a packet, or four where it goes first (bytes), or what the link carries in this
/// time (s): so much comes at once where an app writes a few packets, and would else wait although it is within its share.
const PACKET: f64 = 1500.0;
const FIRST_KEEPS: f64 = 4.0 * PACKET;
const KEPT: f64 = 0.000_3;
/// A class that waits is woken for what it may send in this time (s), or for two packets …
const WAKE: f64 = 0.000_25;
/// … but no later than this, as others may have stopped meanwhile.
const MOST_WAIT: Duration = Duration::from_millis(2);
const LEAST_WAIT: Duration = Duration::from_micros(50);
/// A class that has not asked for this long wants nothing any more, whatever it said.
const STALE: Duration = Duration::from_millis(100);
/// Classes count as sharing the link for this long after one that goes first had something to send …
const AFTER_FIRST: Duration = Duration::from_secs(2);
/// … or after several wanted to send at once.
const AFTER_SEVERAL: Duration = Duration::from_secs(1);
/// A class is alone when no other has sent anything for this long.
const ALONE_AFTER: Duration = Duration::from_secs(2);
/// What a class that goes first may take before the others if nothing is said.
const FIRST_MAX: Portion = Portion::Percent(50);
/// Beyond its share a controller that is held back goes by this much more, so that its own ups and downs never bind.
const HEADROOM: f64 = 1.4;
/// What was sent beyond the capacity counts for this long (s).
const MOST_DEBT: f64 = 0.25;

/// What a class may have of a link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Share {
    /// Before all others for as long as it takes no more than `max` (half of the link if that is not said); beyond that
    /// it competes like the rest.
    pub first: bool,
    /// How much of what is not owed to anybody, compared with others.
    pub weight: Weight,
    /// What it has at least when it wants it.
    pub min: Option<Portion>,
    /// What it has at most, also when nobody else wants anything.
    pub max: Option<Portion>,
}

/// The place of a class at a shaper.
#[derive(Clone, Debug)]
pub struct ShaperHandle {
    shaper: Arc<Mutex<Shaper>>,
    class: ClassId,
}

impl ShaperHandle {
    /// The seat of `class`, a number below [`ClassId::MAX`].
    pub fn new(shaper: Arc<Mutex<Shaper>>, class: ClassId) -> Self {
        Self { shaper, class }
    }

    /// The shaper, for a moment.
    pub fn shaper(&self) -> MutexGuard<'_, Shaper> {
        self.shaper.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whose seat it is.
    pub fn class(&self) -> ClassId {
        self.class
    }

    /// Whether both are the same class at the same shaper.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shaper, &other.shaper) && self.class == other.class
    }
}

/// A class at the shaper. All amounts are bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Class {
    share: Share,
    /// What it may send; less than 0 if it has sent more.
    tokens: f64,
    /// What it may still take before the others.
    first: f64,
    /// What it is still owed.
    least: f64,
    /// What its `max` leaves it.
    ceiling: f64,
    wanting: bool,
    /// When it asked last.
    polled: Option<Instant>,
    /// When it sent anything last, as far as that was looked at.
    sent: Option<Instant>,
}

impl Class {
    /// What it keeps of a link that carries `link` bytes/s while it wants nothing.
    fn keeps(&self, link: f64) -> f64 {
        (link * KEPT).max(if self.share.first { FIRST_KEEPS } else { PACKET })
    }

    /// Bytes/s that it may take before the others, of a link that carries `link`.
    fn first_rate(&self, link: f64) -> f64 {
        if self.share.first { portion(self.share.max.unwrap_or(FIRST_MAX), link) } else { 0.0 }
    }

    fn least_rate(&self, link: f64) -> f64 {
        self.share.min.map_or(0.0, |min| portion(min, link))
    }

    /// Bytes/s that it may never exceed, if that is known.
    fn most_rate(&self, link: Option<f64>) -> Option<f64> {
        match (self.share.max?, link) {
            _ if self.share.first => None,
            (Portion::Percent(_), None) => None,
            (max, link) => Some(portion(max, link.unwrap_or_default())),
        }
    }
}

/// Bytes/s that a portion is of a link that carries `link` bytes/s.
fn portion(portion: Portion, link: f64) -> f64 {
    match portion {
        Portion::Rate(rate) => rate.bps() as f64 / 8.0,
        Portion::Percent(percent) => link * f64::from(percent) / 100.0,
    }
}

/// Bytes that may leave at once on a link that carries `rate` bytes/s.
fn burst(rate: f64) -> f64 {
    (rate * BURST).max(2.0 * PACKET)
}

/// What stands in front of a link.
#[derive(Debug)]
pub struct Shaper {
    /// The number of the link, in events.
    link: Option<u16>,
    last: Instant,
    capacity: Capacity,
    ways: Ways,
    /// Bytes that nobody had a use for; less than 0 where more was sent than classes can be held to.
    pool: f64,
    classes: [Class; CLASSES],
    /// Until when classes count as sharing the link.
    shared_until: Option<Instant>,
    bound: bool,
    watch: CapacityWatch,
}

impl Shaper {
    /// A shaper of a link that carries `capacity`; `None` to learn that from what is delivered ([`Self::on_sample`]).
    /// All classes have the share of [`Share::default`].
    pub fn new(now: Instant, capacity: Option<BitRate>) -> Self {
        let mut shaper = Self {
            link: None,
            last: now,
            capacity: Capacity::new(now, capacity),
            ways: Ways::new(now),
            pool: 0.0,
            classes: [Class { tokens: PACKET, ..Class::default() }; CLASSES],
            shared_until: None,
            bound: capacity.is_some(),
            watch: CapacityWatch::default(),
        };
        shaper.note_given(capacity);
        shaper
    }

    fn note_given(&mut self, given: Option<BitRate>) {
        if let Some(given) = given.and(self.capacity.known()) {
            self.watch.given(given);
        }
    }

    /// The same for the link with this number, which events about it have.
    #[must_use]
    pub fn with_link_number(self, link: u16) -> Self {
        Self { link: Some(link), ..self }
    }

    /// Changes what the link carries.
    pub fn set_capacity(&mut self, now: Instant, capacity: Option<BitRate>) {
        report::given(self.link, self.capacity.known(), capacity);
        self.advance(now);
        self.capacity.set_given(capacity);
        self.note_given(capacity);
    }

    /// Changes what a class may have.
    pub fn set_share(&mut self, now: Instant, class: ClassId, share: Share) {
        self.advance(now);
        self.classes[index(class)].share = share;
        report::share(self.link, class, share);
    }

    /// What the link is taken to carry (IP packets): what was given, or less where that was found to fill a queue, or
    /// what was measured. `None` while nothing is known.
    pub fn capacity(&self) -> Option<BitRate> {
        self.capacity.known().map(|rate| BitRate::from_bytes_per_second(rate as u64))
    }

    /// A large change of the capacity since the last call.
    pub fn take_capacity_change(&mut self) -> Option<CapacityChange> {
        self.watch.take()
    }

    /// Bytes of IP packets that a class may send now: a packet may be begun as long as it is not 0. Whoever asks has
    /// something to send.
    pub fn available_bytes(&mut self, now: Instant, class: ClassId) -> u64 {
        self.classes[index(class)].polled = Some(now);
        if self.classes[index(class)].share.first {
            self.shared_until = self.shared_until.max(Some(now + AFTER_FIRST));
        }
        self.advance(now);
        self.room(class)
    }

    fn room(&self, class: ClassId) -> u64 {
        let own = &self.classes[index(class)];
        let tokens = if self.bound { own.tokens + self.pool.max(0.0) } else { f64::INFINITY };
        let most = own.most_rate(self.capacity.known()).map_or(f64::INFINITY, |_| own.ceiling);
        let room = tokens.min(most);
        if room == f64::INFINITY { u64::MAX } else { room.max(0.0) as u64 }
    }

    /// A class has sent so many bytes of IP packets.
    pub fn on_sent(&mut self, class: ClassId, bytes: u64) {
        let bytes = bytes as f64;
        self.capacity.spent(bytes);
        let most = burst(self.capacity.known().unwrap_or_default());
        let own = &mut self.classes[index(class)];
        own.sent = Some(self.last);
        own.ceiling = (own.ceiling - bytes).max(-most - SEGMENTED);
        if !self.bound {
            return;
        }
        own.tokens -= bytes;
        if own.tokens < 0.0 && self.pool > 0.0 {
            let drawn = self.pool.min(-own.tokens);
            (own.tokens, self.pool) = (own.tokens + drawn, self.pool - drawn);
        }
        if own.tokens < -most {
            // More than it can be made to wait for.
            (self.pool, own.tokens) = (self.pool + own.tokens + most, -most);
        }
    }

    /// Says whether a class has more to send than it may.
    pub fn set_wanting(&mut self, now: Instant, class: ClassId, wanting: bool) {
        if self.classes[index(class)].wanting == wanting {
            return;
        }
        self.classes[index(class)].wanting = wanting;
        self.advance(now);
        report::wanting(self.link, class, wanting, self.classes[index(class)].tokens, self.pool);
        let link = self.capacity.known().unwrap_or_default();
        let own = &mut self.classes[index(class)];
        let surplus = (own.tokens - own.keeps(link)).max(0.0);
        if !wanting && surplus > 0.0 {
            own.tokens -= surplus;
            self.pool += surplus;
            self.advance(now);
        }
    }

    /// When to ask again for a class; `None` if it may send now.
    pub fn retry_at(&mut self, now: Instant, class: ClassId) -> Option<Instant> {
        self.advance(now);
        if self.room(class) > 0 {
            return None;
        }
        let own = &self.classes[index(class)];
        let rate = self.fair_rate(now, class).map_or(1.0, |rate| rate.max(1.0));
        let missing = |tokens: f64, rate: f64| ((rate * WAKE).max(2.0 * PACKET) - tokens).max(0.0) / rate;
        let by_tokens = if self.bound { missing(own.tokens + self.pool.min(0.0), rate) } else { 0.0 };
        let by_max =
            own.most_rate(self.capacity.known()).map_or(0.0, |most| missing(own.ceiling, most.max(1.0)));
        let wait = by_tokens.max(by_max).clamp(0.0, 1.0);
        report::waits(self.link, class, wait, rate, by_max > by_tokens);
        Some(now + Duration::from_secs_f64(wait).clamp(LEAST_WAIT, MOST_WAIT))
    }

    /// Bytes/s that a class gets while it wants them, as things are now; `None` where it is not held back.
    pub fn class_rate(&mut self, now: Instant, class: ClassId) -> Option<u64> {
        self.advance(now);
        let held = self.bound || self.classes[index(class)].most_rate(self.capacity.known()).is_some();
        self.fair_rate(now, class).filter(|_| held).map(|rate| rate as u64)
    }

    /// Takes what a path of a class measured over about 5 ms. Returns what a congestion controller that was held back
    /// meanwhile should take the path's rate for at least (bytes/s): what it is held to says nothing about the path, and
    /// when the others stop it must not have to find the link's rate anew.
    pub fn on_sample(&mut self, now: Instant, class: ClassId, sample: Sample) -> Option<u64> {
        self.advance(now);
        let is_shared = self.is_shared(now);
        // What a class is held to by its own `max` says nothing about the link.
        let most = self.classes[index(class)].most_rate(self.capacity.known());
        let by_max = most.is_some_and(|most| self.fair_rate(now, class).is_none_or(|fair| fair >= most));
        let sample = Sample { backlogged: sample.backlogged && !by_max, ..sample };
        let before = report::is_followed().then(|| self.capacity.decided());
        self.capacity.measured(now, is_shared, sample, self.ways.queues(now));
        if let Some(before) = before {
            report::capacity(self.link, before, self.capacity.decided());
        }
        self.watch.measured(self.capacity.known(), || self.capacity.waiting());
        if !self.bound {
            return None;
        }
        let (link, fair) = (self.capacity.known()?, self.fair_rate(now, class)?);
        Some((fair * HEADROOM).min(link) as u64)
    }

    /// What this end's clock says, to be told to the far end with what is sent over the link (µs modulo 2^32).
    pub fn clock_micros(&self, now: Instant) -> u32 {
        self.ways.clock(now)
    }

    /// Takes what the far end told over the link: what its clock, one of several, said when it did, and how much later what
    /// it got from here arrived than this end's clock had said, if that is known (µs modulo 2^32). Returns how much later
    /// this arrived than was told, to be told in turn.
    pub fn on_clock_report(&mut self, now: Instant, clock: u8, sent: u32, found: Option<u32>) -> u32 {
        self.ways.told(now, clock, sent, found)
    }

    /// Whether at most one class has sent anything lately, acknowledgements included.
    pub fn is_single_class_active(&self, now: Instant) -> bool {
        let lately = |at: Instant| now.saturating_duration_since(at) < ALONE_AFTER;
        self.classes.iter().filter(|class| class.sent.is_some_and(lately)).count() <= 1
    }

    /// Whether classes share the link, so that what it carries has to be divided.
    fn is_shared(&self, now: Instant) -> bool {
        self.shared_until.is_some_and(|until| now < until)
    }

    fn is_active(&self, now: Instant, at: usize) -> bool {
        let own = &self.classes[at];
        own.wanting && own.polled.is_some_and(|polled| now.saturating_duration_since(polled) < STALE)
    }

    /// Bytes/s for a class while it wants them, by what the others want now.
    fn fair_rate(&self, now: Instant, class: ClassId) -> Option<f64> {
        let link = self.capacity.known();
        let claim = |at: usize| {
            let own = &self.classes[at];
            if at != index(class) && !self.is_active(now, at) {
                return Claim::default();
            }
            let known = link.unwrap_or_default();
            Claim {
                need: own.most_rate(link).unwrap_or(f64::INFINITY),
                first: own.first_rate(known),
                least: own.least_rate(known),
                weight: own.share.weight.get().into(),
            }
        };
        match link {
            Some(link) => Some(divide(link, &std::array::from_fn(claim))[index(class)].all),
            None => self.classes[index(class)].most_rate(None),
        }
    }

    /// Lets tokens grow up to `now`, and divides them.
    fn advance(&mut self, now: Instant) {
        let passed = seconds(now.saturating_duration_since(self.last)).min(1.0);
        self.last = self.last.max(now);
        let active: [bool; CLASSES] = std::array::from_fn(|at| self.is_active(now, at));
        let count = active.iter().filter(|active| **active).count();
        if count > 1 {
            self.shared_until = self.shared_until.max(Some(now + AFTER_SEVERAL));
        }
        let known = self.capacity.known();
        for class in &mut self.classes {
            if let Some(most) = class.most_rate(known) {
                class.ceiling = (class.ceiling + most * passed).min(burst(most));
            }
        }
        let link = self.capacity.binding(self.is_shared(now));
        if self.bound != link.is_some() {
            self.bound = link.is_some();
            report::bound(self.link, link, self.is_shared(now), count, self.capacity.waiting());
            let link = link.unwrap_or_default();
            // What a class alone has put into the link's queue is waited for at once: whoever comes now would find it.
            self.pool = -link * self.capacity.waiting().min(MOST_DEBT);
            self.classes.iter_mut().for_each(|class| class.tokens = class.keeps(link));
        }
        let Some(link) = link else { return };
        let burst = burst(link);
        self.pool = (self.pool + link * passed).max(-burst - link * MOST_DEBT);
        for class in &mut self.classes {
            let (first, least) = (class.first_rate(link), class.least_rate(link));
            class.first = (class.first + first * passed).min(first * BURST + FIRST_KEEPS);
            class.least = (class.least + least * passed).min(least * BURST + PACKET);
        }
        self.hand_out(link, &active, burst / count.max(1) as f64);
        let held: f64 = self.classes.iter().map(|class| class.tokens.max(0.0)).sum();
        self.pool = self.pool.min((burst - held).max(0.0));
    }

    /// Divides the pool of a link that carries `link` bytes/s among the classes that want to send, each up to `most` beyond
    /// what one that does not may keep.
    fn hand_out(&mut self, link: f64, active: &[bool; CLASSES], most: f64) {
        if self.pool <= 0.0 {
            return;
        }
        let claims = std::array::from_fn(|at| {
            let class = &self.classes[at];
            let level = class.keeps(link) + if active[at] { most } else { 0.0 };
            Claim {
                need: (level - class.tokens).max(0.0),
                first: class.first.max(0.0),
                least: class.least,
                weight: class.share.weight.get().into(),
            }
        });
        for (class, given) in self.classes.iter_mut().zip(divide(self.pool, &claims)) {
            class.tokens += given.all;
            class.first -= given.first;
            class.least -= given.least;
            self.pool -= given.all;
        }
    }
}

fn index(class: ClassId) -> usize {
    usize::from(class.0) % CLASSES
}
