//! Measures the capacity of a link from what the paths of its classes deliver.
//!
//! In: bytes delivered and round-trip times, from all paths over the link, and the queueing delay in each
//! direction if clock reports exist. Out: the rate to which the classes are limited together.
//!
//! While a single class is active, its congestion controller decides, and the delivery rate is recorded once
//! it stops growing. While classes share the link, the limit follows the queue. Without a queue, the estimate
//! is raised, slowly at first. With a queue that lasts (the minimum delay over some tens of milliseconds
//! counts), less is sent until the queue has drained. With clock reports from both ends, only the queue in
//! the own direction counts, and a small queue already shows a rate that is too high. Without them, a
//! round-trip time does not show in which direction the queue is, and the peer's shaper reacts to the same
//! queue. So each end raises only at random times; the end that raised last takes the raise back, and the
//! other end lowers nothing at first, and little if the queue returns. A delay that remains although
//! less is sent is not a queue of this end; it is ignored while it remains.
//!
//! Always holds: a configured capacity is never exceeded; a capacity below [`MIN_CAPACITY`] counts as
//! unknown; a queue lowers the sending rate by no more than a quarter, unless less arrives than is sent.

use mpvpn_types::{BitRate, Duration, Instant};

use super::{PACKET_BYTES, one_way_delay::OneWayQueues};

/// Duration of a measurement interval (s): acknowledgements come in bunches, which an interval must average
/// out. Shorter intervals are noisy; longer ones react slowly.
const INTERVAL_SECONDS: f64 = 0.03;
/// Number of intervals in the history, about 2 s: enough for the longest round trip ([`MAX_RTT_INTERVALS`])
/// several times. More cost memory for each link of each client.
const MAX_INTERVALS: usize = 64;
/// Number of intervals over which the recent delivery rate is averaged (150 ms). Fewer are noisy, more react
/// slowly.
const RECENT_INTERVALS: usize = 5;
/// A round trip counts as at most this many intervals (360 ms), because the history must contain several.
const MAX_RTT_INTERVALS: usize = 12;

/// How the estimate reacts to a queue.
#[derive(Clone, Copy, Debug)]
struct QueueResponse {
    /// Queueing delay in seconds: below `low_queue`, probe for more capacity; above `high_queue`, drain.
    low_queue: f64,
    high_queue: f64,
    /// First raise in an interval after a failed probe (share of the rate), and the factor by which raises
    /// grow.
    min_raise: f64,
    raise_growth: f64,
    /// Extra back-off after a failed probe (share of the rate).
    back_off: f64,
}

/// The same thresholds in full packets, if these take longer: two packets sent together are no queue on a
/// slow link, and a report cannot overtake the packet in transmission. With fewer packets, slow links are
/// underused (a link of 10 Mbit/s was measured a sixth too low); with more, slow links have longer queues.
const LOW_QUEUE_PACKETS: f64 = 1.5;
const HIGH_QUEUE_PACKETS: f64 = 3.0;
const FULL_QUEUE_PACKETS: f64 = 6.0;

/// Without clock reports. Lower thresholds take the jitter of a busy machine for a queue; higher ones delay
/// calls.
const RTT_ONLY: QueueResponse = QueueResponse {
    low_queue: 0.001,
    high_queue: 0.002,
    min_raise: 0.001,
    raise_growth: 1.1,
    back_off: MIN_BACK_OFF,
};
/// With clock reports. A call waits in the queues of both directions, so each may only be half as long. The
/// back-off of 2 % is a compromise: 3 % cost a backup a tenth of the rest, 0.75 % let calls wait at 30 %
/// loss.
const ONE_WAY: QueueResponse = QueueResponse {
    low_queue: 0.0005,
    high_queue: 0.001_25,
    min_raise: 0.0005,
    raise_growth: 1.05,
    back_off: 0.02,
};
/// Error (s) of the queueing delay of one direction compared with that of the round trip. Smaller, and clock
/// noise hides a queue; larger, and a queue that no direction accounts for is missed. Chosen
/// (docs/design/shaper.md, open questions).
const ONE_WAY_ERROR_SECONDS: f64 = 0.005;
/// Queueing delay (s) that shows that a link of unknown capacity is full: more than a few packets cause.
/// Smaller, and a few packets look like a full link; larger, and the startup queue is longer.
const FULL_QUEUE_SECONDS: f64 = 0.004;
/// Growth of the delivery rate within some round trips that shows that the link carries more. Not derived
/// (docs/design/shaper.md, open questions): a smaller ratio ends the search late, a larger one too early.
const DELIVERY_GROWTH_RATIO: f64 = 1.15;
/// Minimum ratio of the sending rate with a queue to the sending rate without: then the queue comes from this
/// end. Not derived (docs/design/shaper.md, open questions): a smaller ratio blames noise, a larger one
/// misses a slow overload.
const SENT_MORE_RATIO: f64 = 1.05;
/// Minimum ratio of what is sent in each recent interval to their mean: only steady sending shows the
/// capacity. Not derived (docs/design/shaper.md, open questions): a smaller ratio lets a burst count, a
/// larger one seldom measures.
const STEADY_SENDING_RATIO: f64 = 0.5;
/// Maximum raise in an interval (share of the rate). Smaller follows a faster link slowly; larger builds
/// queues.
const MAX_RAISE: f64 = 0.008;
/// The first raise after the link was found to be full: half the maximum, with the same trade-off.
const INITIAL_RAISE: f64 = 0.004;
/// A raise was successful if there was no queue for this many intervals and the estimate exceeds the last
/// failed rate. Not derived (docs/design/shaper.md, open questions): fewer believe too early, more hold back
/// longer.
const SUCCESSFUL_RAISE_INTERVALS: usize = 12;
/// A measured queue has been growing for this many intervals and a round trip: the estimate before it was
/// right. Not derived (docs/design/shaper.md, open questions): fewer take back too little, more too much.
const QUEUE_GROWTH_INTERVALS: usize = 7;
/// Mean number of intervals without a queue before the next raise; doubled after each failed raise. Fewer let
/// both ends probe at once and build queues more often; more are slow.
const MIN_HOLD_INTERVALS: usize = 12;
const MAX_HOLD_INTERVALS: usize = 64;
/// Back-off (share of the rate) after a queue without a preceding raise of this end; doubled up to the
/// maximum if the queue returns soon. Less lets calls wait, more leaves capacity unused.
const MIN_BACK_OFF: f64 = 0.005;
const MAX_BACK_OFF: f64 = 0.01;
/// After this many intervals without a queue, raises may grow to [`MAX_QUEUE_FREE_RAISE`]: the link is much
/// faster than estimated. Not derived (docs/design/shaper.md, open questions): fewer build queues, more
/// follow a faster link slowly.
const MIN_QUEUE_FREE_INTERVALS: usize = 40;
/// Maximum raise in an interval after [`MIN_QUEUE_FREE_INTERVALS`] (share of the rate), with the trade-off of
/// [`MAX_RAISE`].
const MAX_QUEUE_FREE_RAISE: f64 = 0.04;
/// Minimum capacity to measure (bytes/s). Below it, too little arrives in an interval: an outage once lowered
/// the estimate to 40 bit/s. A higher minimum would leave more slow links without a shaper.
const MIN_CAPACITY: f64 = 100_000.0;
/// Time (s) in which a queue is drained. Shorter leaves capacity unused; longer lets queues stand.
const DRAIN_SECONDS: f64 = 0.1;
/// The sending rate is lowered for a drain by a share between these.
const MIN_DRAIN_SHARE: f64 = 0.04;
const MAX_DRAIN_SHARE: f64 = 0.25;
/// The link carries less than estimated if less than this share of what was sent arrives. Larger, and noise
/// lowers the estimate; smaller, and a slower link is found late.
const OVERLOAD_RATIO: f64 = 0.9;
/// A queue that remains after the estimate was lowered to this share is not a queue. Not derived
/// (docs/design/shaper.md, open questions): larger ignores real queues, smaller gives up more capacity to a
/// false one.
const FALSE_QUEUE_RATIO: f64 = 0.9;
/// A queue that shrank below this share of its maximum is draining. Not derived (docs/design/shaper.md, open
/// questions): larger takes noise for draining, smaller takes a slowly draining queue for a false one.
const QUEUE_SHRINKING_RATIO: f64 = 0.6;
/// Packets were backlogged if this share of the delivered bytes was sent while packets waited. Not derived
/// (docs/design/shaper.md, open questions): larger seldom measures, smaller takes an idle link for a full
/// one.
const BACKLOGGED_SHARE: f64 = 0.8;
/// The same if a queue already shows that the link is full, although only some of its classes want to send
/// more.
const PARTLY_BACKLOGGED_SHARE: f64 = 0.04;
/// The link is in use if this share of the estimate was delivered: only then can a raise have an effect. Not
/// derived (docs/design/shaper.md, open questions): larger seldom raises, smaller raises without evidence.
const IN_USE_SHARE: f64 = 0.85;
/// A delay that was found to be no queue is subtracted for this long. Shorter, and the jitter of a busy
/// machine counts as a queue again; longer, and a real queue is ignored.
const EXCESS_DELAY_LIFETIME: Duration = Duration::from_secs(30);
/// … and no longer than until it is absent for this many intervals (1 s): it may come and go. With 0.2 s, a
/// link of 50 Mbit/s was measured as 35 for seconds.
const EXCESS_DELAY_INTERVALS: usize = 32;
/// Paths report samples every 5 ms while they send. After a longer gap the current interval and the history
/// are discarded, because what was delivered meanwhile belongs to no interval. Shorter would discard good
/// data on a busy machine.
const MAX_SAMPLE_GAP: Duration = Duration::from_millis(200);

pub(super) fn seconds(time: Duration) -> f64 {
    time.as_secs_f64()
}

/// A measurement of one path over the link since the previous one, about 5 ms before.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sample {
    /// Bytes of IP packets acknowledged, plus an estimate of those lost at random: lost packets used the
    /// link too, or cannot be distinguished from packets that did.
    pub delivered: u64,
    /// Minimum round-trip time since the previous sample, if measured.
    pub rtt: Option<Duration>,
    /// Minimum round-trip time of the path, if measured.
    pub base_rtt: Option<Duration>,
    /// More packets were queued all the time than could be sent, whatever limited sending.
    pub backlogged: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Interval {
    /// Duration in seconds at this end; 0 for an empty interval.
    duration: f64,
    /// Duration in seconds at the peer, from the first to the last packet acknowledged in the interval: a
    /// queue in the peer's direction that grew or shrank bunches or spreads the acknowledgements.
    duration_at_peer: f64,
    /// Bytes delivered, the part of them delivered while packets were backlogged, and bytes sent.
    delivered: f64,
    delivered_backlogged: f64,
    sent: f64,
    /// The estimated capacity at the end of the interval (bytes/s); 0 if it was unknown.
    estimate: f64,
    /// Minimum queueing delay (s), if anything was acknowledged: of the round trip, and of each direction if
    /// known.
    rtt_delay: Option<f64>,
    one_way_queues: Option<OneWayQueues>,
}

impl Interval {
    /// The relevant queueing delay (s): in the own direction if known, else of the round trip.
    fn delay(self) -> Option<f64> {
        let total = self.rtt_delay?;
        Some(self.one_way_queues.map_or(total, |ways| ways.own_within(total, ONE_WAY_ERROR_SECONDS)))
    }

    fn is_backlogged(self, share: f64) -> bool {
        self.delivered > 0.0 && self.delivered_backlogged >= self.delivered * share
    }
}

/// State while a queue is being drained.
#[derive(Clone, Copy, Debug)]
struct Drain {
    /// Queueing delay (s) at the start, and its maximum since.
    initial_queue: f64,
    longest_queue: f64,
    /// Sending rate meanwhile (bytes/s).
    rate: f64,
    /// When the queue must be gone.
    end: Instant,
    /// The busy period, if it began with an overload.
    busy: Option<BusyPeriod>,
}

/// The time since the longest queue: packets have waited for the link, so what has arrived is its capacity. A
/// radio link that pauses carries nothing for a while, and then what has waited and more.
#[derive(Clone, Copy, Debug)]
struct BusyPeriod {
    /// The estimate before the overload (bytes/s).
    before: f64,
    /// Bytes that have arrived, and the time (s).
    delivered: f64,
    time: f64,
}

impl BusyPeriod {
    fn new(before: f64) -> Self {
        Self { before, delivered: 0.0, time: 0.0 }
    }
}

/// The current decision about a link's capacity, for log events. Rates in bytes/s, times in s.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct CapacityDecision {
    pub(super) estimate: Option<f64>,
    /// Sending rate while a queue is drained.
    pub(super) drain_rate: Option<f64>,
    /// Delay that is not a queue and is subtracted.
    pub(super) excess_delay: Option<f64>,
    /// Whether the estimate is being raised.
    pub(super) is_raising: bool,
    /// The reason of the last change.
    pub(super) reason: &'static str,
    /// The inputs: queueing delay, recent delivery rate, share that arrived of what was sent a round trip
    /// before, and whether the queueing delay of the own direction is known.
    pub(super) queue: f64,
    pub(super) delivered: f64,
    pub(super) arrived_ratio: f64,
    pub(super) one_way_known: bool,
}

/// Estimates the capacity of a link, in bytes/s of IP packets.
#[derive(Debug)]
pub(super) struct CapacityEstimator {
    /// The reason of the last change.
    reason: &'static str,
    configured: Option<f64>,
    /// The estimated or configured capacity.
    pub(super) estimate: Option<f64>,
    /// When the estimate was last measured: packets waited for the link.
    measured_at: Instant,
    interval_start: Instant,
    current_interval: Interval,
    /// Ring buffer of the last intervals. It grows on demand, because most links of thousands of clients are
    /// idle.
    intervals: Vec<Interval>,
    newest: usize,
    /// Minimum round-trip time of the link (s).
    base_rtt: f64,
    /// Last round-trip time (s).
    last_rtt: f64,
    drain: Option<Drain>,
    /// Delay (s) that is not a queue, and when that was found.
    excess_delay: Option<(f64, Instant)>,
    /// Whether the estimate is being raised, the next raise (share of the rate), and the number of intervals
    /// without a queue since the last decision.
    is_raising: bool,
    next_raise: f64,
    intervals_since_decision: usize,
    /// Number of intervals since the last queue in which the link was in use.
    queue_free_intervals: usize,
    /// Number of intervals to hold before the next raise: on average, and this time.
    mean_hold_intervals: usize,
    hold_intervals: usize,
    /// The rate that caused a queue at the last failed raise.
    failed_rate: f64,
    /// The next back-off (share of the rate) after a queue without a preceding raise.
    next_back_off: f64,
    /// Maximum delivery rate since the last overload.
    best_delivery_rate: f64,
}

impl CapacityEstimator {
    pub(super) fn new(now: Instant, configured: Option<BitRate>) -> Self {
        let configured = configured.map(bytes_per_second);
        Self {
            reason: "nothing was measured yet",
            configured,
            estimate: configured,
            measured_at: now,
            interval_start: now,
            current_interval: Interval::default(),
            intervals: Vec::new(),
            newest: 0,
            base_rtt: f64::INFINITY,
            last_rtt: 0.0,
            drain: None,
            excess_delay: None,
            is_raising: false,
            next_raise: MAX_RAISE,
            intervals_since_decision: 0,
            queue_free_intervals: 0,
            mean_hold_intervals: 1,
            hold_intervals: 0,
            failed_rate: 0.0,
            next_back_off: MIN_BACK_OFF,
            best_delivery_rate: 0.0,
        }
    }

    pub(super) fn set_configured(&mut self, configured: Option<BitRate>) {
        let configured = configured.map(bytes_per_second);
        if self.configured != configured {
            (self.configured, self.estimate, self.drain) = (configured, configured.or(self.estimate), None);
        }
    }

    /// When the estimate was last measured; `None` if it is configured or unknown.
    pub(super) fn measured(&self) -> Option<Instant> {
        (self.configured.is_none() && self.estimate.is_some()).then_some(self.measured_at)
    }

    /// The current decision, for log events.
    pub(super) fn decision(&self) -> CapacityDecision {
        let delay = self.min_delay(|_| true).unwrap_or_default();
        CapacityDecision {
            estimate: self.estimate,
            drain_rate: self.drain.map(|drain| drain.rate),
            excess_delay: self.excess_delay.map(|(excess, _)| excess),
            is_raising: self.is_raising,
            reason: self.reason,
            queue: self.above_excess_delay(delay),
            delivered: self
                .backlogged_delivery_rate(0, RECENT_INTERVALS, PARTLY_BACKLOGGED_SHARE)
                .unwrap_or_default(),
            arrived_ratio: self.arrived_ratio(),
            one_way_known: self.is_one_way_known(),
        }
    }

    /// The current limit for all classes together, if there is one.
    pub(super) fn limit(&self, is_shared: bool) -> Option<f64> {
        match self.drain {
            _ if !is_shared => self.configured,
            Some(drain) => Some(drain.rate),
            None => self.estimate,
        }
    }

    /// Recent queueing delay in the own direction (s); 0 if it is unknown.
    pub(super) fn own_queue(&self) -> f64 {
        self.min_delay(|interval| interval.one_way_queues.is_some())
            .map_or(0.0, |delay| self.above_excess_delay(delay).max(0.0))
    }

    pub(super) fn on_sent(&mut self, bytes: f64) {
        self.current_interval.sent += bytes;
    }

    /// Takes a sample of a path, and the queueing delay of each direction if known.
    pub(super) fn on_sample(
        &mut self,
        now: Instant,
        is_shared: bool,
        sample: Sample,
        ways: Option<OneWayQueues>,
    ) {
        let passed = now.saturating_duration_since(self.interval_start);
        if passed > MAX_SAMPLE_GAP {
            // Bytes delivered meanwhile cannot be assigned to an interval.
            (self.intervals, self.newest) = (Vec::new(), 0);
            (self.current_interval, self.interval_start) = (Interval::default(), now);
            return;
        }
        if let Some(rtt) = sample.rtt.map(seconds) {
            self.base_rtt = self.base_rtt.min(rtt).min(sample.base_rtt.map_or(f64::INFINITY, seconds));
            self.last_rtt = rtt;
            let delay = rtt - self.base_rtt;
            self.current_interval.rtt_delay =
                Some(self.current_interval.rtt_delay.map_or(delay, |least| least.min(delay)));
        }
        self.current_interval.one_way_queues =
            self.current_interval.one_way_queues.into_iter().chain(ways).reduce(OneWayQueues::min);
        let delivered = sample.delivered as f64;
        self.current_interval.delivered += delivered;
        self.current_interval.delivered_backlogged += if sample.backlogged { delivered } else { 0.0 };
        if seconds(passed) >= INTERVAL_SECONDS {
            let (time, before) = (seconds(passed), self.one_way_queues());
            let longer = before
                .zip(self.current_interval.one_way_queues)
                .map_or(0.0, |(before, now)| now.peer - before.peer);
            let far = (time - longer).clamp(time / 4.0, time * 4.0);
            self.push_interval(Interval { duration: time, duration_at_peer: far, ..self.current_interval });
            (self.current_interval, self.interval_start) = (Interval::default(), now);
            self.judge(now, is_shared);
            if self.configured.is_none() && self.estimate.is_some_and(|known| known < MIN_CAPACITY) {
                // The estimate was wrong, or the congestion controllers must share such a slow link without
                // the shaper.
                self.reason = "too little arrives to be measured";
                (self.estimate, self.drain, self.best_delivery_rate) = (None, None, 0.0);
            }
            self.intervals[self.newest].estimate = self.estimate.unwrap_or_default();
        }
    }

    fn push_interval(&mut self, interval: Interval) {
        if self.intervals.len() < MAX_INTERVALS {
            self.newest = self.intervals.len();
            self.intervals.push(interval);
        } else {
            self.newest = (self.newest + 1) % MAX_INTERVALS;
            self.intervals[self.newest] = interval;
        }
    }

    /// The last `count` intervals before the last `skip`, padded with empty ones.
    fn recent(&self, skip: usize, count: usize) -> impl Iterator<Item = Interval> + Clone {
        let at = |ago: usize| (self.newest + 2 * MAX_INTERVALS - ago) % MAX_INTERVALS;
        (skip..skip + count).map(move |ago| self.intervals.get(at(ago)).copied().unwrap_or_default())
    }

    /// Delivery rate (bytes/s) over the last `count` intervals before the last `skip`, if the share of
    /// backlogged bytes was at least `share` in each of them.
    fn backlogged_delivery_rate(&self, skip: usize, count: usize, share: f64) -> Option<f64> {
        let spans = self.recent(skip, count);
        let time: f64 = spans.clone().map(|interval| interval.duration_at_peer).sum();
        let bytes: f64 = spans.clone().map(|interval| interval.delivered).sum();
        (count > 0 && spans.clone().all(|interval| interval.is_backlogged(share))).then(|| bytes / time)
    }

    /// The delivery rate over the last [`RECENT_INTERVALS`] less what may be too much: acknowledgements of a
    /// queue that drains come closer together than their packets arrived.
    fn min_delivery_rate(&self, rate: f64) -> f64 {
        let spans = self.recent(0, RECENT_INTERVALS);
        let time: f64 = spans.clone().map(|interval| interval.duration).sum();
        let (least, most) = spans
            .filter_map(|interval| interval.rtt_delay)
            .fold((f64::INFINITY, 0.0_f64), |(least, most), delay| (delay.min(least), delay.max(most)));
        let error = if time > 0.0 { ((most - least) / time).clamp(0.0, 1.0) } else { 0.0 };
        rate * (1.0 - error)
    }

    /// Minimum queueing delay (s) of the last two intervals; `None` if nothing was acknowledged.
    fn current_queue(&mut self, now: Instant) -> Option<f64> {
        let delay = self.min_delay(|_| true)?;
        let expired = |at: Instant| now.saturating_duration_since(at) > EXCESS_DELAY_LIFETIME;
        let longest = self.max_delay(EXCESS_DELAY_INTERVALS);
        self.excess_delay =
            self.excess_delay.filter(|(_, at)| !expired(*at)).map(|(excess, at)| (excess.min(longest), at));
        Some(self.above_excess_delay(delay))
    }

    /// Minimum queueing delay (s) of those of the last two intervals that `counts` accepts.
    fn min_delay(&self, counts: impl Fn(&Interval) -> bool) -> Option<f64> {
        self.recent(0, 2).filter(counts).filter_map(Interval::delay).min_by(f64::total_cmp)
    }

    /// A delay (s) minus the part that is known not to be a queue.
    fn above_excess_delay(&self, delay: f64) -> f64 {
        delay - self.excess_delay.map_or(0.0, |(excess, _)| excess)
    }

    /// Maximum of the queueing delays (s) of the last `count` intervals.
    fn max_delay(&self, count: usize) -> f64 {
        self.recent(0, count).filter_map(Interval::delay).fold(0.0, f64::max)
    }

    fn judge(&mut self, now: Instant, is_shared: bool) {
        let Some(queue) = self.current_queue(now) else { return };
        let recent_rate = self.backlogged_delivery_rate(0, RECENT_INTERVALS, PARTLY_BACKLOGGED_SHARE);
        if recent_rate.is_some() {
            self.measured_at = now;
        }
        if !is_shared {
            self.reason = "only one class is active, and its controller finds the rate";
            self.drain = None;
            // The controller of a single class finds the capacity.
            self.estimate = self
                .configured
                .or_else(|| if recent_rate.is_some() { self.saturated_rate(queue) } else { self.estimate });
            return;
        }
        let Some(known) = self.estimate else {
            self.estimate = self.saturated_rate(queue);
            self.reason = "packets wait, and the delivery rate no longer grows";
            if self.estimate.is_none() {
                self.estimate = self.rate_from_own_queue();
                self.reason = "packets are queued in the own direction, and were not while less was sent";
            }
            (self.next_raise, self.measured_at) = (INITIAL_RAISE, now);
            return;
        };
        if !self.recent(0, RECENT_INTERVALS).any(|interval| interval.is_backlogged(PARTLY_BACKLOGGED_SHARE)) {
            // While little is sent, delay comes from other traffic or from delayed acknowledgements.
            self.reason = "little is sent";
            self.drain = None;
            return;
        }
        let min_delivery_rate = self.min_delivery_rate(recent_rate.unwrap_or_default());
        self.best_delivery_rate = self.best_delivery_rate.max(min_delivery_rate.min(known));
        if let Some(drain) = self.drain {
            self.continue_drain(now, known, queue, drain);
        } else if queue > self.high_queue_threshold(known) {
            self.start_drain(now, known, queue);
        } else if queue < self.low_queue_threshold(known)
            && recent_rate.is_some_and(|rate| rate > known * IN_USE_SHARE)
        {
            self.raise_if_due(known);
        }
    }

    /// Called for an interval without a queue: raises the estimate, or waits for the next raise.
    fn raise_if_due(&mut self, known: f64) {
        self.intervals_since_decision += 1;
        self.queue_free_intervals += 1;
        self.reason = "no queue, and the link is in use";
        if self.is_raising {
            if self.intervals_since_decision >= SUCCESSFUL_RAISE_INTERVALS && known > self.failed_rate {
                (self.intervals_since_decision, self.mean_hold_intervals, self.next_back_off) =
                    (0, MIN_HOLD_INTERVALS, MIN_BACK_OFF);
            }
            // The effect of a raise is only visible a round trip later.
            let raise = self.next_raise / (self.rtt_intervals().max(1) as f64).sqrt();
            self.estimate = Some((known * (1.0 + raise)).min(self.configured.unwrap_or(f64::INFINITY)));
            let most = if self.queue_free_intervals > MIN_QUEUE_FREE_INTERVALS {
                MAX_QUEUE_FREE_RAISE
            } else {
                MAX_RAISE
            };
            self.next_raise = (self.next_raise * self.queue_response().raise_growth).min(most);
        } else if self.intervals_since_decision >= self.hold_intervals {
            (self.intervals_since_decision, self.is_raising, self.next_back_off) = (0, true, MIN_BACK_OFF);
        }
    }

    /// The capacity of a full link of unknown capacity: packets wait, and the delivery rate no longer grows.
    fn saturated_rate(&self, queue: f64) -> Option<f64> {
        let (round, fills) = (self.rtt_intervals(), self.is_own_queue_growing());
        let is_queued = fills || queue > FULL_QUEUE_SECONDS;
        let (count, share) =
            if is_queued { (3, PARTLY_BACKLOGGED_SHARE) } else { (8.max(round), BACKLOGGED_SHARE) };
        let now = self.backlogged_delivery_rate(0, count, share)?;
        // The delivery rate before packets waited counts too.
        let before =
            self.backlogged_delivery_rate(count + 3 * round, count, if is_queued { 0.0 } else { share })?;
        (now < before * DELIVERY_GROWTH_RATIO || fills).then(|| now.max(before))
    }

    /// The capacity of a link of unknown capacity if packets are queued in the own direction, and were not
    /// while less was sent. Senders whose rate is about the capacity may fill the link without ever
    /// waiting at this end.
    fn rate_from_own_queue(&self) -> Option<f64> {
        let delay = |interval: Interval| interval.one_way_queues.and(interval.delay());
        let newest = delay(self.recent(0, 1).next()?)?;
        let oldest = delay(self.recent(RECENT_INTERVALS - 1, 1).next()?)?;
        let queued = self.recent(0, RECENT_INTERVALS);
        let shortest = queued
            .clone()
            .try_fold(f64::INFINITY, |shortest, interval| delay(interval).map(|delay| shortest.min(delay)))?;
        let rate = |spans: &mut dyn Iterator<Item = Interval>| {
            let (sent, time) =
                spans.fold((0.0, 0.0), |all, interval| (all.0 + interval.sent, all.1 + interval.duration));
            (time > 0.0).then(|| (sent / time, time))
        };
        let has_no_queue =
            |interval: &Interval| delay(*interval).is_some_and(|delay| delay < ONE_WAY.low_queue);
        let (rate_without_queue, _) = rate(&mut self.intervals.iter().copied().filter(has_no_queue))?;
        let (sent, time) = rate(&mut queued.clone())?;
        // A burst at the end of the intervals cannot have caused the delay at their start.
        if queued.clone().any(|interval| interval.sent < STEADY_SENDING_RATIO * sent * interval.duration) {
            return None;
        }
        // The queue grows by the excess of the sending rate over the capacity.
        let grows = ((newest - oldest) / time).clamp(-MAX_DRAIN_SHARE, MAX_DRAIN_SHARE);
        let rate = sent / (1.0 + grows) * (1.0 - ONE_WAY.back_off);
        // At a low rate a few packets would make a longer delay: a shorter one is not a queue at this rate.
        let is_queue = shortest > self.high_queue_threshold(rate);
        (is_queue && sent > rate_without_queue * SENT_MORE_RATIO).then_some(rate)
    }

    /// Whether the queue in the own direction is long and growing.
    fn is_own_queue_growing(&self) -> bool {
        let mut delays = self.recent(0, 3).map(|interval| interval.delay().unwrap_or_default());
        let grow = delays.clone().is_sorted_by(|late, early| late > early);
        self.is_one_way_known() && grow && delays.next() > Some(FULL_QUEUE_SECONDS)
    }

    /// Called when there is a queue: lowers the estimate and starts to drain, or finds that the delay is not
    /// a queue.
    fn start_drain(&mut self, now: Instant, known: f64, queue: f64) {
        // With clock reports already small queues are detected, and starting losses look like a slower link.
        let is_clear = !self.is_one_way_known() || queue > full_queue_threshold(known);
        let overload = self.overload_rate(known).filter(|_| is_clear);
        if let Some(carried) = overload {
            self.best_delivery_rate = carried;
        } else if known < self.best_delivery_rate * FALSE_QUEUE_RATIO {
            // Lowering the rate that far would have drained a queue: the delay has another cause, such as
            // resequencing on a link with retransmissions.
            self.reason = "the delay remains although the rate was lowered repeatedly: it is not a queue";
            (self.excess_delay, self.best_delivery_rate, self.drain) =
                (Some((self.max_delay(QUEUE_GROWTH_INTERVALS), now)), known, None);
            return;
        }
        let arrived =
            self.backlogged_delivery_rate(0, RECENT_INTERVALS, PARTLY_BACKLOGGED_SHARE).unwrap_or(known);
        let min_arrived = self.min_delivery_rate(arrived);
        let before = known;
        let before_overload = self.drain.and_then(|drain| drain.busy).map(|busy| busy.before);
        let busy = before_overload.or(overload.map(|_| before)).map(BusyPeriod::new);
        let (known, reason) = match overload {
            Some(carried) => (carried, "less arrives than was sent"),
            // The delivery rate while packets are queued in the own direction is the capacity.
            None if self.drain.is_some()
                && self.is_one_way_known()
                && queue > full_queue_threshold(known) =>
            {
                (
                    known.min(arrived) * (1.0 - self.next_back_off),
                    "the queue in the own direction outlasted the drain",
                )
            }
            None if self.is_raising => {
                let carried = self.capacity_before_queue().max(min_arrived);
                (known.min(carried) * (1.0 - self.queue_response().back_off), "a queue grew after a raise")
            }
            None if self.intervals_since_decision < MIN_HOLD_INTERVALS || self.is_one_way_known() => {
                (known * (1.0 - self.next_back_off), "a queue grew without a raise")
            }
            // This end raised nothing, and it is the first queue for a long time: the peer's shaper raised.
            None => (known, "first queue for a long time: the peer may have raised"),
        };
        (self.estimate, self.reason) = (Some(known), reason);
        if overload.is_some() {
            // The estimate is only approximate.
            (self.mean_hold_intervals, self.next_raise) = (1, MAX_RAISE);
        } else if self.is_raising {
            (self.mean_hold_intervals, self.next_raise) = (
                (2 * self.mean_hold_intervals).clamp(MIN_HOLD_INTERVALS, MAX_HOLD_INTERVALS),
                self.queue_response().min_raise,
            );
            self.failed_rate = before;
        } else {
            self.next_back_off = (2.0 * self.next_back_off).min(MAX_BACK_OFF);
        }
        self.hold_intervals =
            self.mean_hold_intervals / 2 + usize::from(self.pseudo_random()) % self.mean_hold_intervals;
        (self.is_raising, self.intervals_since_decision, self.queue_free_intervals) = (false, 0, 0);
        let share = (queue / DRAIN_SECONDS).clamp(MIN_DRAIN_SHARE, MAX_DRAIN_SHARE);
        let time = 1.5 * queue / share + 2.0 * INTERVAL_SECONDS + self.last_rtt;
        let end = now + Duration::from_secs_f64(time.min(2.0));
        let rate = known.min(min_arrived.max(known * (1.0 - MAX_DRAIN_SHARE))) * (1.0 - share);
        self.drain = Some(Drain { initial_queue: queue, longest_queue: queue, rate, end, busy });
    }

    /// A pseudo-random number that differs between the two ends.
    fn pseudo_random(&self) -> u16 {
        let mix = |all: u64, interval: &Interval| {
            let bits = interval.delivered.to_bits() ^ interval.duration.to_bits().rotate_left(32);
            (all ^ bits).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
        };
        (self.intervals.iter().fold(0, mix) >> 48) as u16
    }

    fn continue_drain(&mut self, now: Instant, known: f64, queue: f64, drain: Drain) {
        let grew = queue > 1.5 * drain.initial_queue + full_queue_threshold(known);
        let longest = drain.longest_queue.max(queue);
        let last = self.recent(0, 1).next().unwrap_or_default();
        let busy = drain.busy.map(|busy| match queue > drain.longest_queue {
            true => BusyPeriod::new(busy.before),
            false => BusyPeriod {
                delivered: busy.delivered + last.delivered,
                time: busy.time + last.duration_at_peer,
                ..busy
            },
        });
        self.drain = Some(Drain { longest_queue: longest, busy, ..drain });
        // If the queueing delay of the own direction is known, a long one is a real queue.
        let is_own_queue = self.is_one_way_known() && queue > full_queue_threshold(known)
            || queue < longest * QUEUE_SHRINKING_RATIO;
        if queue <= self.low_queue_threshold(known) {
            self.reason = "the queue has drained";
            self.drain = None;
            let carried =
                busy.map_or(0.0, |busy| busy.before.min(busy.delivered / busy.time.max(f64::MIN_POSITIVE)));
            self.estimate = Some(known.max(carried));
        } else if grew || now >= drain.end && is_own_queue {
            self.start_drain(now, known, queue);
        } else if now >= drain.end {
            self.reason = "the delay remains although less is sent: it is not a queue";
            self.drain = None;
            self.excess_delay = Some((self.max_delay(QUEUE_GROWTH_INTERVALS), now));
        }
    }

    /// Queueing delay of each direction in the last interval, if known.
    fn one_way_queues(&self) -> Option<OneWayQueues> {
        self.intervals.get(self.newest)?.one_way_queues
    }

    /// Whether the queueing delay of the own direction is known.
    fn is_one_way_known(&self) -> bool {
        self.one_way_queues().is_some()
    }

    fn queue_response(&self) -> QueueResponse {
        if self.is_one_way_known() { ONE_WAY } else { RTT_ONLY }
    }

    /// Queueing delay (s) below which the estimate may be raised, on a link with `capacity` bytes/s.
    fn low_queue_threshold(&self, capacity: f64) -> f64 {
        self.queue_response().low_queue.max(LOW_QUEUE_PACKETS * PACKET_BYTES / capacity)
    }

    /// Queueing delay (s) above which the queue is drained, on a link with `capacity` bytes/s.
    fn high_queue_threshold(&self, capacity: f64) -> f64 {
        self.queue_response().high_queue.max(HIGH_QUEUE_PACKETS * PACKET_BYTES / capacity)
    }

    /// The round-trip time in intervals, at most [`MAX_RTT_INTERVALS`].
    fn rtt_intervals(&self) -> usize {
        ((self.last_rtt / INTERVAL_SECONDS).ceil() as usize).min(MAX_RTT_INTERVALS)
    }

    /// The estimate before the current queue grew; infinite if it was unknown.
    fn capacity_before_queue(&self) -> f64 {
        let known = self
            .recent(QUEUE_GROWTH_INTERVALS + self.rtt_intervals(), 1)
            .map(|interval| interval.estimate)
            .find(|known| *known > 0.0);
        known.unwrap_or(f64::INFINITY)
    }

    /// The arrival rate, if it is clearly less than the sending rate.
    fn overload_rate(&self, known: f64) -> Option<f64> {
        let arrived = self.sum_recent(0, |interval| interval.delivered)
            / self.sum_recent(0, |interval| interval.duration_at_peer);
        (self.arrived_ratio() < OVERLOAD_RATIO).then(|| known.min(arrived.max(known / 4.0)))
    }

    /// The ratio of the arrival rate to the sending rate a round trip before.
    fn arrived_ratio(&self) -> f64 {
        let rate = |bytes: f64, time: f64| bytes / time.max(f64::MIN_POSITIVE);
        let round = self.rtt_intervals();
        let sent = rate(
            self.sum_recent(round, |interval| interval.sent),
            self.sum_recent(round, |interval| interval.duration),
        );
        let arrived = rate(
            self.sum_recent(0, |interval| interval.delivered),
            self.sum_recent(0, |interval| interval.duration_at_peer),
        );
        if sent > 0.0 { arrived / sent } else { 1.0 }
    }

    /// The sum over three intervals before the last `skip`.
    fn sum_recent(&self, skip: usize, of: impl Fn(Interval) -> f64) -> f64 {
        self.recent(skip, 3).map(of).sum()
    }
}

/// Queueing delay (s) that more than a few packets cause, on a link with `capacity` bytes/s.
fn full_queue_threshold(capacity: f64) -> f64 {
    FULL_QUEUE_SECONDS.max(FULL_QUEUE_PACKETS * PACKET_BYTES / capacity)
}

fn bytes_per_second(rate: BitRate) -> f64 {
    rate.bps() as f64 / 8.0
}
