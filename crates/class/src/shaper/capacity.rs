//! What a link carries, where nobody said so: learned from what its classes' paths deliver.
//!
//! In: what was delivered and how long it took, from all paths over the link. Out: the rate that classes are held to.
//!
//! While one class is alone its congestion controller decides, and what it delivers is noted. When classes share the
//! link, the sum of what they may send follows the queue: while packets do not wait on the way it is raised, slowly at
//! first, and when they do for a while (the shortest round trip of some tens of milliseconds is what counts) less is sent
//! until the queue is gone. Where both ends tell each other what their clocks say, only what waits on our way counts, and
//! a small queue shows what is too much. Else a round trip does not say whether a queue is on the way there or on the way
//! back, where the far end's shaper does the same. So each raises only at times, by chance: what was raised last is taken
//! back, and who raised nothing gives up nothing at first, and little if it comes again. Delay that stays although less is
//! sent is no queue of this end, and does not count for as long as it stays.
//!
//! Always holds: a given capacity is never exceeded, no link is taken to carry less than some packets in a moment, and
//! what is lowered for a queue is lowered by no more than a quarter unless less arrives than is sent.

use mpvpn_types::{BitRate, Duration, Instant};

use super::{PACKET, ways::Queues};

/// Deliveries are added up over this time: acknowledgements come in bunches.
const SPAN: f64 = 0.03;
/// Spans that are remembered, and over how many of them a rate is taken.
const SPANS: usize = 64;
const OF_LATE: usize = 5;
/// A round trip is taken for no longer than so many spans: some of them have to be remembered.
const MOST_ROUND: usize = 12;
/// What is done about a queue.
#[derive(Clone, Copy, Debug)]
struct Manner {
    /// One shorter than this (s) leaves room for more, one longer than the other has to go.
    short: f64,
    long: f64,
    /// How much more is tried in a span after it was in vain, and how much faster that becomes each time.
    raise: f64,
    faster: f64,
    /// What is taken back beyond what was raised.
    back: f64,
}

/// The same in full packets, where these take longer: two that leave together are no queue on a slow link, and nothing that
/// is reported comes before one that is on its way.
const SHORT_PACKETS: f64 = 1.5;
const LONG_PACKETS: f64 = 3.0;
const FULL_PACKETS: f64 = 6.0;

/// Where only round trips are known …
const BLIND: Manner = Manner { short: 0.001, long: 0.002, raise: 0.001, faster: 1.1, back: LESS };
/// … and where it is known what waits on our way: then a call feels every queue on both ways, each only half as long.
const SEEING: Manner = Manner { short: 0.0005, long: 0.001_25, raise: 0.0005, faster: 1.05, back: 0.02 };
/// The ways of a link together are known better than each by so much (s).
const UNSURE: f64 = 0.005;
/// A queue that shows, at the beginning, that the link carries no more, and that does not come of little (s).
const FULL: f64 = 0.004;
/// Growth in some round trips that shows that the link carries more.
const GROWING: f64 = 1.15;
/// What is sent beside a queue, compared with what was sent without: the queue comes of it.
const MORE: f64 = 1.05;
/// What is sent in each of some spans, compared with their mean: they say together what the link carries.
const STEADY: f64 = 0.5;
/// How much more is tried in a span at most.
const MOST_RAISE: f64 = 0.008;
/// The same at first, after the link was found to be full.
const FIRST_RAISE: f64 = 0.004;
/// So many spans after what was raised without a queue, it was not in vain, if it is more than what was too much before.
const CYCLE: usize = 12;
/// A queue that is seen has grown for so many spans, and a round trip.
const GROWN: usize = 7;
/// Spans without a queue before more is tried again, in the mean: twice as many whenever that was in vain.
const LEAST_HOLD: usize = 12;
const MOST_HOLD: usize = 64;
/// The link is taken to carry less by this share after a queue for which nothing had been raised, if that is not the first
/// for long, and by more if it comes again soon.
const LESS: f64 = 0.005;
const MOST_LESS: f64 = 0.01;
/// When there was no queue for so many spans, more is tried faster.
const LONG_CALM: usize = 40;
const CALM_RAISE: f64 = 0.04;
/// What carries less (bytes/s) is not measured: too little arrives in a span to tell anything by.
const LEAST_KNOWN: f64 = 100_000.0;
/// A queue is drained in about this time (s), by a share of the rate between these.
const DRAIN_TIME: f64 = 0.1;
const LEAST_DRAIN: f64 = 0.04;
const MOST_DRAIN: f64 = 0.25;
/// The link carries less than it was taken to if so much less arrives than is sent.
const OVERLOAD: f64 = 0.9;
/// Queues that are still there when the link was taken to carry less and less, to this share, are doubtful.
const DOUBTFUL: f64 = 0.9;
/// A queue that became shorter than this part of it goes away.
const GOING: f64 = 0.6;
/// Packets were waiting to be sent if that holds for this share of what was delivered; and for this one where a queue shows
/// that the link is full, though only some of its classes want more.
const BUSY: f64 = 0.8;
const PARTLY_BUSY: f64 = 0.04;
/// The link is in use if this share of what is allowed was delivered.
const USED: f64 = 0.85;
/// Delay that was found to be no queue counts as none for this long.
const VALID: Duration = Duration::from_secs(30);
/// … and no longer than none was found in so many spans: it may come and go.
const EXCESS_KEPT: usize = 32;
/// Paths report every 5 ms while they have something to send; one that was silent for longer than this was not looked at.
const SILENT: Duration = Duration::from_millis(200);

pub(super) fn seconds(time: Duration) -> f64 {
    time.as_secs_f64()
}

/// What a path over the link measured since it did so last, about 5 ms ago.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sample {
    /// Bytes of IP packets that were found to have arrived, and of those that the path loses anyway: these have crossed the
    /// link as well, or cannot be told from such.
    pub delivered: u64,
    /// The shortest round trip meanwhile, if there was any.
    pub rtt: Option<Duration>,
    /// The shortest round trip ever, if there was any.
    pub base_rtt: Option<Duration>,
    /// More waited all the time than could be sent, whatever held it back.
    pub backlogged: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Span {
    /// How long it was (s), and at the far end, of what is known to have arrived meanwhile: what reports it may have waited
    /// longer or shorter at the end than at the beginning. 0 for none.
    time: f64,
    far: f64,
    /// Bytes delivered, those of them where packets waited to be sent, and bytes sent.
    bytes: f64,
    waited: f64,
    sent: f64,
    /// What the link was taken to carry after it (bytes/s); 0 if that was not known.
    known: f64,
    /// The shortest delay beyond that of the empty link (s), if anything came back: there and back, and on each way if
    /// that is known.
    total: Option<f64>,
    ways: Option<Queues>,
}

impl Span {
    /// The delay that counts: that on our way if it is known.
    fn delay(self) -> Option<f64> {
        let total = self.total?;
        Some(self.ways.map_or(total, |ways| ways.of(total, UNSURE)))
    }

    fn is_busy(self, share: f64) -> bool {
        self.bytes > 0.0 && self.waited >= self.bytes * share
    }
}

/// While a queue is drained.
#[derive(Clone, Copy, Debug)]
struct Drain {
    /// How long it was (s), and became before that helped.
    queue: f64,
    longest: f64,
    /// Bytes/s that are sent meanwhile.
    rate: f64,
    /// Then it must be gone.
    end: Instant,
}

/// What is decided now about a link's capacity, for those who follow decisions. Rates in bytes/s, times in s.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Decided {
    pub(super) known: Option<f64>,
    /// What is sent while a queue is drained.
    pub(super) drain: Option<f64>,
    /// Delay that counts as none.
    pub(super) excess: Option<f64>,
    /// More is tried.
    pub(super) raises: bool,
    /// Why.
    pub(super) reason: &'static str,
    /// What that was found by: the delay beyond that of the empty link, what was delivered lately, the share that arrived of
    /// what was sent a round trip before, and whether it is known what waits on the own way.
    pub(super) queue: f64,
    pub(super) delivered: f64,
    pub(super) arrived: f64,
    pub(super) knows_ways: bool,
}

/// What is known of a link's capacity, in bytes/s of IP packets.
#[derive(Debug)]
pub(super) struct Capacity {
    /// Why it was taken for what it is.
    reason: &'static str,
    given: Option<f64>,
    known: Option<f64>,
    since: Instant,
    current: Span,
    /// The last ones in a ring, which grows: most links of thousands of clients are idle.
    spans: Vec<Span>,
    newest: usize,
    /// The shortest round trip of the link (s).
    base: f64,
    /// The last one (s).
    rtt: f64,
    drain: Option<Drain>,
    /// Delay (s) that is no queue, and when that was found.
    excess: Option<(f64, Instant)>,
    /// Whether more is tried, the share by which next, and how long there has been no queue (spans).
    raises: bool,
    raise: f64,
    calm: usize,
    /// Spans since a queue was there, in which the link was in use.
    free: usize,
    /// Spans that it takes before more is tried: in the mean, and this time.
    hold: usize,
    wait: usize,
    /// What was too much when more was tried last.
    tried: f64,
    /// The share by which it is lowered next if nothing was raised.
    less: f64,
    /// The most that arrived while less was not known to be carried.
    best: f64,
}

impl Capacity {
    pub(super) fn new(now: Instant, given: Option<BitRate>) -> Self {
        let given = given.map(bytes_per_second);
        Self {
            reason: "nothing was measured yet",
            given,
            known: given,
            since: now,
            current: Span::default(),
            spans: Vec::new(),
            newest: 0,
            base: f64::INFINITY,
            rtt: 0.0,
            drain: None,
            excess: None,
            raises: false,
            raise: MOST_RAISE,
            calm: 0,
            free: 0,
            hold: 1,
            wait: 0,
            tried: 0.0,
            less: LESS,
            best: 0.0,
        }
    }

    pub(super) fn set_given(&mut self, given: Option<BitRate>) {
        let given = given.map(bytes_per_second);
        if self.given != given {
            (self.given, self.known, self.drain) = (given, given.or(self.known), None);
        }
    }

    /// What is decided now.
    pub(super) fn decided(&self) -> Decided {
        let delay = self.least_delay(|_| true).unwrap_or_default();
        Decided {
            known: self.known,
            drain: self.drain.map(|drain| drain.rate),
            excess: self.excess.map(|(excess, _)| excess),
            raises: self.raises,
            reason: self.reason,
            queue: self.beyond_excess(delay),
            delivered: self.busy_rate(0, OF_LATE, PARTLY_BUSY).unwrap_or_default(),
            arrived: self.arrived_of_sent(),
            knows_ways: self.knows_ways(),
        }
    }

    /// What the link is taken to carry.
    pub(super) fn known(&self) -> Option<f64> {
        self.known
    }

    /// What may be sent now, if that is limited.
    pub(super) fn binding(&self, is_shared: bool) -> Option<f64> {
        match self.drain {
            _ if !is_shared => self.given,
            Some(drain) => Some(drain.rate),
            None => self.known,
        }
    }

    /// How long packets waited on our way of late (s), as far as that is known.
    pub(super) fn waiting(&self) -> f64 {
        self.least_delay(|span| span.ways.is_some()).map_or(0.0, |delay| self.beyond_excess(delay).max(0.0))
    }

    pub(super) fn spent(&mut self, bytes: f64) {
        self.current.sent += bytes;
    }

    /// Takes what a path measured, and how long packets wait on each way if that is known.
    pub(super) fn measured(&mut self, now: Instant, is_shared: bool, sample: Sample, ways: Option<Queues>) {
        let passed = now.saturating_duration_since(self.since);
        if passed > SILENT {
            // What was delivered meanwhile belongs to no time.
            (self.spans, self.newest) = (Vec::new(), 0);
            (self.current, self.since) = (Span::default(), now);
            return;
        }
        if let Some(rtt) = sample.rtt.map(seconds) {
            self.base = self.base.min(rtt).min(sample.base_rtt.map_or(f64::INFINITY, seconds));
            self.rtt = rtt;
            let delay = rtt - self.base;
            self.current.total = Some(self.current.total.map_or(delay, |least| least.min(delay)));
        }
        self.current.ways = self.current.ways.into_iter().chain(ways).reduce(Queues::min);
        let delivered = sample.delivered as f64;
        self.current.bytes += delivered;
        self.current.waited += if sample.backlogged { delivered } else { 0.0 };
        if seconds(passed) >= SPAN {
            let (time, before) = (seconds(passed), self.ways());
            let longer = before.zip(self.current.ways).map_or(0.0, |(before, now)| now.other - before.other);
            let far = (time - longer).clamp(time / 4.0, time * 4.0);
            self.remember(Span { time, far, ..self.current });
            (self.current, self.since) = (Span::default(), now);
            self.judge(now, is_shared);
            if self.given.is_none() && self.known.is_some_and(|known| known < LEAST_KNOWN) {
                // What was found so was wrong, or the controllers have to share such a link alone.
                self.reason = "too little arrives to be measured";
                (self.known, self.drain, self.best) = (None, None, 0.0);
            }
            self.spans[self.newest].known = self.known.unwrap_or_default();
        }
    }

    fn remember(&mut self, span: Span) {
        if self.spans.len() < SPANS {
            self.newest = self.spans.len();
            self.spans.push(span);
        } else {
            self.newest = (self.newest + 1) % SPANS;
            self.spans[self.newest] = span;
        }
    }

    /// The last `count` spans before the last `skip`; empty ones where there were not so many.
    fn late(&self, skip: usize, count: usize) -> impl Iterator<Item = Span> + Clone {
        let at = |ago: usize| (self.newest + 2 * SPANS - ago) % SPANS;
        (skip..skip + count).map(move |ago| self.spans.get(at(ago)).copied().unwrap_or_default())
    }

    /// Bytes/s delivered in the last `count` spans before the last `skip`, if this share of packets waited in all of them.
    fn busy_rate(&self, skip: usize, count: usize, share: f64) -> Option<f64> {
        let spans = self.late(skip, count);
        let time: f64 = spans.clone().map(|span| span.far).sum();
        let bytes: f64 = spans.clone().map(|span| span.bytes).sum();
        (count > 0 && spans.clone().all(|span| span.is_busy(share))).then(|| bytes / time)
    }

    /// The queue (s) that all packets found in the last two spans; `None` if nothing came back.
    fn queue(&mut self, now: Instant) -> Option<f64> {
        let delay = self.least_delay(|_| true)?;
        let expired = |at: Instant| now.saturating_duration_since(at) > VALID;
        let longest = self.longest(EXCESS_KEPT);
        self.excess =
            self.excess.filter(|(_, at)| !expired(*at)).map(|(excess, at)| (excess.min(longest), at));
        Some(self.beyond_excess(delay))
    }

    /// The delay (s) that all packets found in those of the last two spans that count.
    fn least_delay(&self, counts: impl Fn(&Span) -> bool) -> Option<f64> {
        self.late(0, 2).filter(counts).filter_map(Span::delay).min_by(f64::total_cmp)
    }

    /// What a delay (s) is longer than what is known to be no queue.
    fn beyond_excess(&self, delay: f64) -> f64 {
        delay - self.excess.map_or(0.0, |(excess, _)| excess)
    }

    /// The longest delay (s) that all packets of a span found in the last `count` of them.
    fn longest(&self, count: usize) -> f64 {
        self.late(0, count).filter_map(Span::delay).fold(0.0, f64::max)
    }

    fn judge(&mut self, now: Instant, is_shared: bool) {
        let Some(queue) = self.queue(now) else { return };
        let of_late = self.busy_rate(0, OF_LATE, PARTLY_BUSY);
        if !is_shared {
            self.reason = "one class is alone, and its controller finds the rate";
            self.drain = None;
            // A controller alone finds what the link carries.
            self.known =
                self.given.or_else(|| if of_late.is_some() { self.full_rate(queue) } else { self.known });
            return;
        }
        let Some(known) = self.known else {
            self.known = self.full_rate(queue);
            self.reason = "packets wait, and no more arrives than before";
            if self.known.is_none() {
                self.known = self.queued_rate();
                self.reason = "packets wait on the own way, and did not while less was sent";
            }
            self.raise = FIRST_RAISE;
            return;
        };
        if !self.late(0, OF_LATE).any(|span| span.is_busy(PARTLY_BUSY)) {
            // Where little is sent, delay is of others' making, or of acknowledgements that were held back.
            self.reason = "little is sent";
            self.drain = None;
            return;
        }
        self.best = self.best.max(of_late.unwrap_or_default().min(known));
        if let Some(drain) = self.drain {
            self.go_on(now, known, queue, drain);
        } else if queue > self.long(known) {
            self.begin(now, known, queue);
        } else if queue < self.short(known) && of_late.is_some_and(|rate| rate > known * USED) {
            self.grow(known);
        }
    }

    /// There was no queue in a span.
    fn grow(&mut self, known: f64) {
        self.calm += 1;
        self.free += 1;
        self.reason = "no queue, and the link is in use";
        if self.raises {
            if self.calm >= CYCLE && known > self.tried {
                (self.calm, self.hold, self.less) = (0, LEAST_HOLD, LESS);
            }
            // What is too much is seen a round trip later.
            let raise = self.raise / (self.round().max(1) as f64).sqrt();
            self.known = Some((known * (1.0 + raise)).min(self.given.unwrap_or(f64::INFINITY)));
            let most = if self.free > LONG_CALM { CALM_RAISE } else { MOST_RAISE };
            self.raise = (self.raise * self.manner().faster).min(most);
        } else if self.calm >= self.wait {
            (self.calm, self.raises, self.less) = (0, true, LESS);
        }
    }

    /// What a link carries of which nothing is known, if it is full: packets wait, and no more arrives than before.
    fn full_rate(&self, queue: f64) -> Option<f64> {
        let (round, fills) = (self.round(), self.fills());
        let is_queued = fills || queue > FULL;
        let (count, share) = if is_queued { (3, PARTLY_BUSY) } else { (8.max(round), BUSY) };
        let now = self.busy_rate(0, count, share)?;
        // What was delivered before packets waited counts as well.
        let before = self.busy_rate(count + 3 * round, count, if is_queued { 0.0 } else { share })?;
        (now < before * GROWING || fills).then(|| now.max(before))
    }

    /// What a link carries of which nothing is known, if packets wait on our way, and did not while less was sent: where
    /// what is sent is about what the link carries, nothing may ever wait here.
    fn queued_rate(&self) -> Option<f64> {
        let delay = |span: Span| span.ways.and(span.delay());
        let newest = delay(self.late(0, 1).next()?)?;
        let oldest = delay(self.late(OF_LATE - 1, 1).next()?)?;
        let queued = self.late(0, OF_LATE);
        if !queued.clone().all(|span| delay(span).is_some_and(|delay| delay > SEEING.long)) {
            return None;
        }
        let rate = |spans: &mut dyn Iterator<Item = Span>| {
            let (sent, time) = spans.fold((0.0, 0.0), |all, span| (all.0 + span.sent, all.1 + span.time));
            (time > 0.0).then(|| (sent / time, time))
        };
        let is_calm = |span: &Span| delay(*span).is_some_and(|delay| delay < SEEING.short);
        let (calm, _) = rate(&mut self.spans.iter().copied().filter(is_calm))?;
        let (sent, time) = rate(&mut queued.clone())?;
        // Delay was there before what was only sent at the end of it.
        if queued.clone().any(|span| span.sent < STEADY * sent * span.time) {
            return None;
        }
        // The queue grows by what is too much.
        let grows = ((newest - oldest) / time).clamp(-MOST_DRAIN, MOST_DRAIN);
        (sent > calm * MORE).then_some(sent / (1.0 + grows) * (1.0 - SEEING.back))
    }

    /// Whether packets wait on our way, longer and longer.
    fn fills(&self) -> bool {
        let mut delays = self.late(0, 3).map(|span| span.delay().unwrap_or_default());
        let grow = delays.clone().is_sorted_by(|late, early| late > early);
        self.knows_ways() && grow && delays.next() > Some(FULL)
    }

    /// There is a queue.
    fn begin(&mut self, now: Instant, known: f64, queue: f64) {
        // Small queues are seen where the ways are known, and losses that begin look like a slower link.
        let is_clear = !self.knows_ways() || queue > full(known);
        let overload = self.overload(known).filter(|_| is_clear);
        if let Some(carried) = overload {
            self.best = carried;
        } else if known < self.best * DOUBTFUL {
            // That would have helped: delay grows with what is sent where packets may not overtake slow ones.
            self.reason = "the delay stays although less and less was sent: it is no queue";
            (self.excess, self.best, self.drain) = (Some((self.longest(GROWN), now)), known, None);
            return;
        }
        let arrived = self.busy_rate(0, OF_LATE, PARTLY_BUSY).unwrap_or(known);
        let before = known;
        let (known, reason) = match overload {
            Some(carried) => (carried, "less arrives than was sent"),
            // What arrives while packets wait on our way is what the link carries.
            None if self.drain.is_some() && self.knows_ways() && queue > full(known) => {
                (known.min(arrived) * (1.0 - self.less), "the queue on the own way outlived the drain")
            }
            None if self.raises => {
                let known = known.min(self.before_queue()) * (1.0 - self.manner().back);
                (known, "a queue grew after more was tried")
            }
            None if self.calm < LEAST_HOLD || self.knows_ways() => {
                (known * (1.0 - self.less), "a queue grew although nothing was raised")
            }
            // Nothing was raised here, and it is the first one for long: the far end's shaper raised.
            None => (known, "a queue grew, the first one for long: the far end may have raised"),
        };
        (self.known, self.reason) = (Some(known), reason);
        if overload.is_some() {
            // It is known roughly.
            (self.hold, self.raise) = (1, MOST_RAISE);
        } else if self.raises {
            (self.hold, self.raise) = ((2 * self.hold).clamp(LEAST_HOLD, MOST_HOLD), self.manner().raise);
            self.tried = before;
        } else {
            self.less = (2.0 * self.less).min(MOST_LESS);
        }
        self.wait = self.hold / 2 + usize::from(self.chance()) % self.hold;
        (self.raises, self.calm, self.free) = (false, 0, 0);
        let share = (queue / DRAIN_TIME).clamp(LEAST_DRAIN, MOST_DRAIN);
        let time = 1.5 * queue / share + 2.0 * SPAN + self.rtt;
        let end = now + Duration::from_secs_f64(time.min(2.0));
        let rate = known.min(arrived.max(known * (1.0 - MOST_DRAIN))) * (1.0 - share);
        self.drain = Some(Drain { queue, longest: queue, rate, end });
    }

    /// Any number that differs between the two ends.
    fn chance(&self) -> u16 {
        let mix = |all: u64, span: &Span| {
            let bits = span.bytes.to_bits() ^ span.time.to_bits().rotate_left(32);
            (all ^ bits).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
        };
        (self.spans.iter().fold(0, mix) >> 48) as u16
    }

    fn go_on(&mut self, now: Instant, known: f64, queue: f64, drain: Drain) {
        let grew = queue > 1.5 * drain.queue + full(known);
        let longest = drain.longest.max(queue);
        self.drain = Some(Drain { longest, ..drain });
        // Where our way is known, a long queue is there.
        let is_ours = self.knows_ways() && queue > full(known) || queue < longest * GOING;
        if queue <= self.short(known) {
            self.reason = "the queue is gone";
            self.drain = None;
        } else if grew || now >= drain.end && is_ours {
            self.begin(now, known, queue);
        } else if now >= drain.end {
            self.reason = "the delay stays although less is sent: it is no queue";
            self.drain = None;
            self.excess = Some((self.longest(GROWN), now));
        }
    }

    /// How long packets waited on each way in the last span, if that is known.
    fn ways(&self) -> Option<Queues> {
        self.spans.get(self.newest)?.ways
    }

    /// Whether it is known what waits on our way.
    fn knows_ways(&self) -> bool {
        self.ways().is_some()
    }

    fn manner(&self) -> Manner {
        if self.knows_ways() { SEEING } else { BLIND }
    }

    /// A queue (s) that leaves room for more on a link that carries `known`.
    fn short(&self, known: f64) -> f64 {
        self.manner().short.max(SHORT_PACKETS * PACKET / known)
    }

    /// A queue (s) that has to go.
    fn long(&self, known: f64) -> f64 {
        self.manner().long.max(LONG_PACKETS * PACKET / known)
    }

    /// A round trip in spans, as far as they are remembered.
    fn round(&self) -> usize {
        ((self.rtt / SPAN).ceil() as usize).min(MOST_ROUND)
    }

    /// What the link was taken to carry before a queue grew that is there now; endless if that was not known.
    fn before_queue(&self) -> f64 {
        let known = self.late(GROWN + self.round(), 1).map(|span| span.known).find(|known| *known > 0.0);
        known.unwrap_or(f64::INFINITY)
    }

    /// What arrives, if that is clearly less than was sent.
    fn overload(&self, known: f64) -> Option<f64> {
        let arrived = self.sum(0, |span| span.bytes) / self.sum(0, |span| span.far);
        (self.arrived_of_sent() < OVERLOAD).then(|| known.min(arrived.max(known / 4.0)))
    }

    /// The share that arrives of what was sent a round trip before.
    fn arrived_of_sent(&self) -> f64 {
        let rate = |bytes: f64, time: f64| bytes / time.max(f64::MIN_POSITIVE);
        let round = self.round();
        let sent = rate(self.sum(round, |span| span.sent), self.sum(round, |span| span.time));
        let arrived = rate(self.sum(0, |span| span.bytes), self.sum(0, |span| span.far));
        if sent > 0.0 { arrived / sent } else { 1.0 }
    }

    /// The sum over a few spans, before the last `skip`.
    fn sum(&self, skip: usize, of: impl Fn(Span) -> f64) -> f64 {
        self.late(skip, 3).map(of).sum()
    }
}

/// A queue (s) that does not come of little on a link that carries `known` bytes/s.
fn full(known: f64) -> f64 {
    FULL.max(FULL_PACKETS * PACKET / known)
}

fn bytes_per_second(rate: BitRate) -> f64 {
    rate.bps() as f64 / 8.0
}
