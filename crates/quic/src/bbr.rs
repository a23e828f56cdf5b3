//! A model-based congestion controller in the shape of BBR (Cardwell et al., "BBR: Congestion-Based
//! Congestion Control", ACM Queue 14(5), 2016; draft-cardwell-iccrg-bbr-congestion-control-00).
//!
//! In: acknowledgements, losses, and whether the sender had more to send. Out: a window and a pacing
//! rate that keep a path busy without filling its queue.
//!
//! A tunnel is not a bulk sender: what it carries is itself clocked by the flows inside, comes in
//! bursts and falls silent. So this differs from the paper where that matters:
//! - The rate is what the path has shown ([`Delivery`]). It falls only while the path was full, never
//!   because less was asked of it.
//! - The round-trip time of an empty path is found while the rate is lowered after each probe; there
//!   is no phase that holds the window down for 200 ms, which flows inside answer with losses.
//! - The shortest round trip is not taken for that of an empty path: where delay varies and packets do not
//!   overtake each other, a lone packet is quicker than any in a stream. Where a stream is slower, sending less for
//!   a moment shows whether that is a queue ([`QueueProbe`]).
//! - A probe that finds more is repeated at once: a rate that was measured while this machine was
//!   busy elsewhere is put right in a few round trips.
//! - Losses change nothing by themselves; what is lost is not delivered, and lowers the rate so. Losses
//!   that come however little is sent are made up for ([`RandomLoss`](crate::random_loss::RandomLoss)).

use mpvpn_types::{Duration, Instant};

use crate::{
    delivery::{Delivery, Window},
    queue_probe::{self, QueueProbe},
};

/// Fills a pipe in the fewest rounds: 2/ln 2.
const STARTUP_GAIN: f64 = 2.885;
/// Pacing over the eight phases of a cycle, each a round trip long. A little above the rate between
/// the probes, because a sender that comes late now and then would stay below it; the second phase
/// drains what that adds up to.
const CYCLE: [f64; 8] = [1.25, 0.75, 1.03, 1.03, 1.03, 1.03, 1.03, 1.03];
/// Gains of a probe and of the drain after it, by how many probes on end found more. What is far below the path was
/// measured while little was asked of it, and is left behind as quickly as startup would.
const PROBES: [(f64, f64); 4] = [(CYCLE[0], CYCLE[1]), (CYCLE[0], CYCLE[1]), (1.5, 0.6), (2.0, 0.5)];
/// Instead of the gain between the probes, while a queue is there.
pub(crate) const EASE: f64 = 0.96;
/// The same between the probes inside TCP: a little more than it carries, unless it has a queue already. It must not run
/// dry, as it sends whole segments only of what waits.
const AHEAD: f64 = 1.1;
/// Gain of a drain there, and the time between two.
const TCP_DRAIN: f64 = 0.5;
const TCP_CYCLE: Duration = Duration::from_secs(2);
/// A queue that as many drains on end did not end is none of ours: the way has become longer.
const IN_VAIN: u32 = 2;
/// A queue there that is longer by so much, or by so many round trips, than it shall be would be answered with nothing
/// at all, and the least share of the rate that any is answered with.
const TCP_EASE: Duration = Duration::from_millis(100);
const TCP_EASE_ROUNDS: u32 = 4;
pub(crate) const LEAST_EASE: f64 = 0.8;
/// Window in units of the bandwidth-delay product.
const WINDOW_GAIN: f64 = 2.0;
/// Window in units of what is sent in the round trips as they are.
const SLACK: f64 = 1.25;
/// Growth that shows that a pipe is not full yet, and rounds without it that show that it is.
const FULL_GROWTH: f64 = 1.25;
const FULL_ROUNDS: u32 = 3;
/// Rounds without growth in which there seems to be a queue, after which that is looked into: a queue shows the same,
/// though nothing waited to be sent.
const QUEUED_ROUNDS: u32 = 6;
/// FlowControlWindows on end after which a queue is looked into; one that is being drained is not.
const STANDING: u32 = 4;
/// Growth by which a probe has found that the path carries more.
const FOUND: f64 = 1.08;
/// A shortest round trip counts for this long.
const MIN_RTT_AGE: Duration = Duration::from_secs(10);
/// Losses in a window from which on it is worth to know whether they come anyway.
const LOSSY: f64 = 0.02;
/// FlowControlWindows of a path in use that are remembered, two cycles or more; the shortest round trip counts.
const WINDOWS: usize = 16;
/// A path that was not in use for this long is a different one.
const STALE: Duration = Duration::from_secs(2);
/// A path carries little if it is below this share of its rate for two windows.
const LITTLE: u64 = 8;
/// Less than this (bytes/s) is little on any path.
const LITTLE_RATE: u64 = 64_000;
/// FlowControlWindows in which little was carried whose longest round trips are remembered.
const QUIET_WINDOWS: usize = 32;
/// UDP payload of a packet on an Ethernet (bytes).
const ETHERNET: u64 = 1472;
/// Least window, in packets.
const MIN_PACKETS: u64 = 4;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    /// Doubling every round.
    Startup { best: u64, rounds: u32, queued: u32 },
    /// Letting go of what startup queued.
    Drain,
    /// Cycling around the rate; `before` is what it was when the last probe began, and `found` says how many of the
    /// last probes found more, as a place in [`PROBES`].
    Cruise { phase: usize, since: Instant, before: u64, found: usize },
}

impl Phase {
    fn name(self) -> &'static str {
        match self {
            Self::Startup { .. } => "startup",
            Self::Drain => "drain",
            Self::Cruise { .. } => "cruise",
        }
    }
}

/// What a controller decides now, for those who follow its decisions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Decided {
    /// The name of its phase, why it began, and the place in the cycle.
    pub(crate) phase: &'static str,
    pub(crate) reason: &'static str,
    pub(crate) step: usize,
    /// Whether it sends less for a moment to see whether a delay is a queue.
    pub(crate) probes_queue: bool,
    /// When a queue was found last, and the round trip that was found without one.
    pub(crate) queue_found: Option<Instant>,
    pub(crate) without_queue: Option<Duration>,
    /// The shortest round trip that counts.
    pub(crate) min_rtt: Option<Duration>,
}

/// The controller of one path.
#[derive(Clone, Debug)]
pub(crate) struct Bbr {
    phase: Phase,
    /// Why it is in this phase.
    reason: &'static str,
    initial: u64,
    mtu: u64,
    min_rtt: Option<(Duration, Instant)>,
    /// The shortest round trip since `min_rtt` was set, to take its place when that is too old.
    next_min: Option<Duration>,
    /// The shortest round trip of each of the last windows in which the path was in use; inside TCP, where drains are
    /// rare, of a few together.
    windows: [Duration; WINDOWS],
    /// The least of them: it is asked for with each packet that is acknowledged.
    least_window: Duration,
    newest: usize,
    newest_since: Option<Instant>,
    /// When the newest of them ended.
    used: Option<Instant>,
    smoothed: Duration,
    /// The longest round trips of windows in which the path carried little: its delay varies by so much.
    quiet: [Duration; QUIET_WINDOWS],
    /// The most of them.
    most_quiet: Duration,
    newest_quiet: usize,
    carried_little: bool,
    /// The shortest round trip of the last window, and bytes/s that were delivered in it.
    recent: Duration,
    delivered: u64,
    /// Packets were lost in the last window.
    lossy: bool,
    settle: QueueProbe,
    /// FlowControlWindows on end with a queue.
    standing: u32,
    inside_tcp: bool,
    /// Drains on end there that left a queue.
    in_vain: u32,
}

impl Bbr {
    pub(crate) fn new(initial_window: u64, mtu: u16) -> Self {
        Self {
            phase: Phase::Startup { best: 0, rounds: 0, queued: 0 },
            reason: "nothing is known of the path",
            initial: initial_window,
            mtu: mtu.into(),
            min_rtt: None,
            next_min: None,
            windows: [Duration::MAX; WINDOWS],
            least_window: Duration::MAX,
            newest: 0,
            newest_since: None,
            used: None,
            smoothed: Duration::ZERO,
            quiet: [Duration::ZERO; QUIET_WINDOWS],
            most_quiet: Duration::ZERO,
            newest_quiet: 0,
            carried_little: true,
            recent: Duration::ZERO,
            delivered: 0,
            lossy: false,
            settle: QueueProbe::default(),
            standing: 0,
            inside_tcp: false,
            in_vain: 0,
        }
    }

    /// Whether packets travel inside TCP, which has found out what the path carries and loses nothing. All that is to be
    /// done is to keep a short queue in front of it.
    pub(crate) fn set_inside_tcp(&mut self, inside_tcp: bool) {
        self.inside_tcp = inside_tcp;
    }

    pub(crate) fn on_mtu(&mut self, mtu: u16) {
        self.mtu = mtu.into();
    }

    /// Takes a sample of the round-trip time.
    pub(crate) fn on_rtt(&mut self, now: Instant, rtt: Duration) {
        self.smoothed = if self.smoothed.is_zero() { rtt } else { (self.smoothed * 7 + rtt) / 8 };
        self.settle.on_rtt(now, rtt, self.smoothed);
        self.next_min = Some(self.next_min.map_or(rtt, |least| least.min(rtt)));
        match self.min_rtt {
            Some((least, at)) if rtt > least && now.saturating_duration_since(at) < MIN_RTT_AGE => {}
            Some((least, _)) if rtt > least => {
                self.min_rtt = self.next_min.take().map(|next| (next, now));
            }
            _ => {
                self.min_rtt = Some((rtt, now));
                self.next_min = None;
            }
        }
    }

    /// A window of [`Delivery`] is complete: about a round has passed.
    pub(crate) fn on_round(&mut self, now: Instant, window: Window, rate: u64, in_flight: u64) {
        self.lossy = window.lost > LOSSY;
        self.recent = window.shortest;
        if !self.settle.is_looking() {
            self.delivered = window.rate;
        }
        let little = window.rate <= (rate / LITTLE).max(LITTLE_RATE);
        if little && self.carried_little {
            self.newest_quiet = (self.newest_quiet + 1) % QUIET_WINDOWS;
            self.quiet[self.newest_quiet] = window.longest.saturating_sub(Delivery::ACK_DELAY);
            self.most_quiet = self.quiet.iter().copied().fold(Duration::ZERO, Duration::max);
        }
        self.carried_little = little;
        if window.rate >= rate / 2 {
            if self.used.is_some_and(|at| now.saturating_duration_since(at) > STALE) {
                self.windows = [Duration::MAX; WINDOWS];
            }
            self.used = Some(now);
            let least = if self.inside_tcp { TCP_CYCLE * 2 / WINDOWS as u32 } else { Duration::ZERO };
            if self.newest_since.is_none_or(|since| now.saturating_duration_since(since) >= least) {
                self.newest = (self.newest + 1) % WINDOWS;
                self.windows[self.newest] = Duration::MAX;
                self.newest_since = Some(now);
            }
            self.windows[self.newest] = self.windows[self.newest].min(window.shortest);
            self.least_window = self.windows.iter().copied().fold(Duration::MAX, Duration::min);
        }
        let queue = self.has_queue(rate);
        // A queue that overflows is proof at once, also if there was not always something to send. Packets that are too
        // large for the path are lost without a queue.
        let waited = self.min_rtt.is_some_and(|(least, _)| window.shortest > least + Delivery::ACK_DELAY);
        let overruns = window.overflows && waited && in_flight > self.empty(rate) / 4 * 5;
        match &mut self.phase {
            Phase::Startup { best, rounds, queued } => {
                if rate as f64 >= *best as f64 * FULL_GROWTH {
                    (*best, *rounds, *queued) = (rate, 0, 0);
                } else if overruns {
                    *rounds = FULL_ROUNDS;
                    self.reason = "a queue overflows";
                } else if window.full {
                    *rounds += 1;
                    self.reason = "the rate no longer grows";
                } else if queue && in_flight >= self.initial / 2 {
                    // Flows inside that keep to the rate of the path leave nothing waiting here. Little that is on
                    // its way, as acknowledgements of a download, waits in somebody else's queue, or on the way back.
                    *queued += 1;
                }
                let looks = *queued >= QUEUED_ROUNDS;
                if *rounds >= FULL_ROUNDS || looks && self.settle.is_proven(now) {
                    if *rounds < FULL_ROUNDS {
                        self.reason = "a queue was found";
                    }
                    self.phase = Phase::Drain;
                } else if looks && queue {
                    let lone = self.min_rtt.map_or(window.shortest, |(least, _)| least);
                    self.settle.begin(now, window.shortest, self.smoothed, lone);
                }
            }
            Phase::Drain => {
                if in_flight <= self.empty(rate) {
                    self.phase = Phase::Cruise { phase: 2, since: now, before: rate, found: 0 };
                    self.reason = "no more is in flight than the path holds";
                }
            }
            Phase::Cruise { .. } => {}
        }
        self.advance(now, rate, in_flight, queue);
        let used = matches!(self.phase, Phase::Cruise { .. }) && window.rate >= rate / 2;
        self.standing = if queue && used { self.standing + 1 } else { 0 };
        if self.standing >= STANDING && !self.inside_tcp {
            let base = self.base_rtt().unwrap_or_default();
            self.settle.begin(now, window.shortest, self.smoothed, base);
        }
    }

    /// What it decides now.
    pub(crate) fn decided(&self) -> Decided {
        Decided {
            phase: self.phase.name(),
            reason: self.reason,
            step: if let Phase::Cruise { phase, .. } = self.phase { phase } else { 0 },
            probes_queue: self.settle.is_looking(),
            queue_found: self.settle.proven(),
            without_queue: self.settle.found(),
            min_rtt: self.min_rtt.map(|(rtt, _)| rtt),
        }
    }

    /// The round trip of a packet in a stream, with the queue empty.
    pub(crate) fn base_rtt(&self) -> Option<Duration> {
        let (least, _) = self.min_rtt?;
        let stream = match self.phase {
            // What startup has queued there TCP may lose, and then everything behind it waits.
            Phase::Startup { .. } if self.inside_tcp => None,
            Phase::Startup { .. } => Some(self.smoothed),
            Phase::Drain | Phase::Cruise { .. } => Some(self.least_window),
        };
        // A stream may have a queue of its own making or of somebody else before it, at all times; by how much
        // delay varies is seen while little is sent, or less than usual.
        let most = self.settle.found().into_iter().fold(least.max(self.most_quiet), Duration::max);
        Some(stream.filter(|rtt| *rtt < Duration::MAX).unwrap_or(least).clamp(least, most))
    }

    /// Whether less is sent than the path can carry, or was a round trip ago.
    pub(crate) fn is_draining(&self) -> bool {
        self.settle.is_looking() || matches!(self.phase, Phase::Drain | Phase::Cruise { phase: 1 | 2, .. })
    }

    /// Whether packets wait on the path for sure, or did a moment ago.
    pub(crate) fn is_queued(&self, now: Instant) -> bool {
        self.settle.is_proven(now)
    }

    /// The share of the rate (0 to 1) that is sent, or was a round trip ago.
    pub(crate) fn paced(&self, rate: u64) -> f64 {
        match self.phase {
            _ if self.settle.is_looking() => queue_probe::GAIN,
            Phase::Cruise { phase: 1 | 2, found, .. } => self.drain(found),
            Phase::Cruise { .. } if self.inside_tcp => self.ahead_of_tcp(rate).min(1.0),
            Phase::Cruise { .. } if self.has_queue(rate) => EASE,
            Phase::Cruise { .. } | Phase::Startup { .. } => 1.0,
            Phase::Drain => 1.0 / STARTUP_GAIN,
        }
    }

    /// Whether less is sent than the path is known to carry.
    pub(crate) fn is_below(&self) -> bool {
        self.settle.is_slow() || matches!(self.phase, Phase::Drain | Phase::Cruise { phase: 1, .. })
    }

    /// The gain after a probe.
    fn drain(&self, found: usize) -> f64 {
        if self.inside_tcp { TCP_DRAIN } else { PROBES[found].1 }
    }

    fn advance(&mut self, now: Instant, rate: u64, in_flight: u64, queue: bool) {
        let drained = self.empty(rate);
        let round = self.base_rtt().unwrap_or(Duration::from_millis(100)).max(Duration::from_millis(10));
        // A queue that was never gone would be taken for part of the path one day.
        let drain_rounds = if self.inside_tcp { 4 } else { 2 };
        let Phase::Cruise { phase, since, before, found } = &mut self.phase else { return };
        let elapsed = now.saturating_duration_since(*since);
        // The queue that a probe built is drained for as long as it is there, but no longer than it
        // took to build.
        let done = match *phase {
            // Whether losses go on while less is sent has to be seen.
            1 if self.lossy && elapsed < round => false,
            1 => in_flight <= drained || elapsed >= round * drain_rounds,
            // Until what was sent in the drain is acknowledged, however long the way has become.
            2 if self.inside_tcp => elapsed >= round.max(self.smoothed),
            3 if self.inside_tcp => elapsed >= TCP_CYCLE,
            _ => elapsed >= round,
        };
        if !done {
            return;
        }
        if self.inside_tcp {
            if *phase == 2 {
                self.in_vain = if queue { self.in_vain + 1 } else { 0 };
            }
            if self.in_vain >= IN_VAIN {
                let shortest = Some(self.least_window).filter(|rtt| *rtt < Duration::MAX);
                self.min_rtt = shortest.map(|shortest| (shortest, now)).or(self.min_rtt);
                (self.next_min, self.in_vain) = (None, 0);
            }
            // What is sent between the drains probes all the time.
            *phase = if (1..3).contains(phase) { *phase + 1 } else { 1 };
            *since = now;
            return;
        }
        // A probe that found more is followed by the next one at once.
        let more = *phase == 1 && rate as f64 > *before as f64 * FOUND;
        *phase = if more { 0 } else { (*phase + 1) % CYCLE.len() };
        *since = now;
        if *phase == 0 {
            *before = rate;
            *found = if more { (*found + 1).min(PROBES.len() - 1) } else { 0 };
        }
    }

    /// Bytes that fill the path without a queue.
    fn product(&self, rate: u64) -> u64 {
        bytes_in(rate, self.base_rtt().unwrap_or_default())
    }

    /// Whether packets have waited on the path in all of the last window.
    fn has_queue(&self, rate: u64) -> bool {
        !self.queue(rate).is_zero()
    }

    /// By how much packets have waited longer in all of the last window than could be something else.
    fn queue(&self, rate: u64) -> Duration {
        let Some(base) = self.base_rtt() else { return Duration::ZERO };
        // Acknowledgements are held back for 10 packets, or for 5 ms.
        let held = Duration::from_nanos(10 * self.mtu * 1_000_000_000 / rate.max(1));
        let usual = base + base / 8 + held.min(Duration::from_millis(6)) + Duration::from_millis(2);
        self.recent.saturating_sub(usual)
    }

    /// The gain inside TCP, between drains.
    fn ahead_of_tcp(&self, rate: u64) -> f64 {
        let queue = self.queue(rate);
        if queue.is_zero() {
            return AHEAD;
        }
        let answer = TCP_EASE.max(self.base_rtt().unwrap_or_default() * TCP_EASE_ROUNDS);
        (1.0 - queue.as_secs_f64() / answer.as_secs_f64()).max(LEAST_EASE)
    }

    /// Bytes in flight that leave no queue for sure. The base may hold one, if the path was full all the time:
    /// a drain that stopped there would never find out.
    fn empty(&self, rate: u64) -> u64 {
        let rtt = self.min_rtt.map_or(Duration::ZERO, |(rtt, _)| rtt);
        bytes_in(rate, rtt) + self.held(rate)
    }

    /// Bytes that have arrived and count as in flight: acknowledgements are held back for up to 10 packets
    /// or 5 ms at the far end. Of larger packets than most links carry, 10 would be a queue on a slow one.
    fn held(&self, rate: u64) -> u64 {
        10 * self.mtu.min(ETHERNET) + rate / 200
    }

    /// Bytes that may be in flight.
    pub(crate) fn window(&self, rate: u64) -> u64 {
        let gain = match self.phase {
            Phase::Startup { .. } => STARTUP_GAIN,
            Phase::Drain | Phase::Cruise { .. } => WINDOW_GAIN,
        };
        // Where packets are slower than the base says, for whatever reason, the pace alone has to answer that: a
        // window that did would let less arrive, which looks like a slower path, and so on to nothing.
        // Inside TCP the pace would not answer it soon enough.
        let slack = if self.inside_tcp { 1.0 } else { SLACK };
        let sent = (rate as f64 * self.smoothed.as_secs_f64() * slack) as u64;
        let window = ((self.product(rate) as f64 * gain) as u64).max(sent) + self.held(rate);
        let least = match self.phase {
            Phase::Startup { .. } => self.initial,
            Phase::Drain | Phase::Cruise { .. } => MIN_PACKETS * self.mtu,
        };
        window.max(least)
    }

    /// Bytes a second to send; `None` while there is nothing to base it on.
    pub(crate) fn pacing_rate(&self, rate: u64, rtt: Duration) -> Option<u64> {
        let gain = match self.phase {
            _ if self.settle.is_slow() => queue_probe::GAIN,
            Phase::Startup { .. } => STARTUP_GAIN,
            Phase::Drain => 1.0 / STARTUP_GAIN,
            Phase::Cruise { phase: 1, found, .. } => self.drain(found),
            Phase::Cruise { .. } if self.inside_tcp => self.ahead_of_tcp(rate),
            Phase::Cruise { phase: 0, found, .. } => PROBES[found].0,
            Phase::Cruise { .. } if self.has_queue(rate) => EASE,
            Phase::Cruise { phase, .. } => CYCLE[phase],
        };
        // Where less is asked for than the path carries, half of the rate might be no less than that.
        let rate = if self.settle.is_slow() { rate.min(self.delivered) } else { rate };
        if matches!(self.phase, Phase::Startup { .. }) && !self.settle.is_slow() {
            // Before the first measurement: the initial window, in a round trip.
            let first = (u128::from(self.initial) * 1_000_000_000 / rtt.as_nanos().max(1)) as u64;
            return (!rtt.is_zero()).then(|| ((rate as f64 * gain) as u64).max(first));
        }
        Some((rate as f64 * gain) as u64).map(|paced| paced.max(self.mtu))
    }
}

/// Bytes that a rate (bytes/s) comes to in a time.
fn bytes_in(rate: u64, time: Duration) -> u64 {
    (u128::from(rate) * time.as_nanos() / 1_000_000_000) as u64
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;
    use crate::delivery::Acked;

    const MS: Duration = Duration::from_millis(1);

    fn window(rate: u64) -> Window {
        Window { rate, shortest: 25 * MS, longest: 25 * MS, lost: 0.0, full: true, overflows: false }
    }

    #[test]
    fn startup_ends_when_the_rate_stops_growing_and_not_because_little_is_asked() {
        let now = Instant::now();
        let mut bbr = Bbr::new(38_400, 1472);
        bbr.on_rtt(now, 25 * MS);
        for _ in 0..20 {
            bbr.on_round(now, Window { full: false, ..window(100_000) }, 100_000, 3_000);
        }
        assert!(matches!(bbr.phase, Phase::Startup { .. }), "{:?}", bbr.phase);
        let mut overflows = bbr.clone();
        for rate in [1_000_000, 3_000_000, 9_000_000, 12_500_000, 12_500_000, 12_500_000, 12_500_000] {
            bbr.on_round(now, window(rate), rate, 900_000);
            let gaps = Window { full: false, overflows: true, ..window(rate) };
            overflows.on_round(now, gaps, rate, 900_000);
        }
        assert!(matches!((bbr.phase, overflows.phase), (Phase::Drain, Phase::Startup { .. })));
        let queue = Window { full: false, overflows: true, shortest: 60 * MS, ..window(12_500_000) };
        overflows.on_round(now, queue, 12_500_000, 900_000);
        assert_eq!(overflows.phase, Phase::Drain);
        bbr.on_round(now, window(12_500_000), 12_500_000, 300_000);
        assert!(matches!(bbr.phase, Phase::Cruise { .. }));
        let product = 312_500;
        assert!((2 * product..3 * product).contains(&bbr.window(12_500_000)));
    }

    #[test]
    fn a_rate_that_was_measured_too_low_is_put_right_quickly() {
        for (measured, most) in [(6_000_000, 12), (200_000, 20)] {
            let now = Instant::now();
            let mut bbr = Bbr::new(38_400, 1472);
            bbr.on_rtt(now, 25 * MS);
            bbr.phase = Phase::Cruise { phase: 7, since: now, before: 0, found: 0 };
            let (capacity, mut rate) = (12_500_000.0, measured);
            let mut rounds = 0;
            while rate < 12_000_000 {
                rounds += 1;
                // What is paced now is delivered in the next round.
                let paced = bbr.pacing_rate(rate, 25 * MS).unwrap();
                rate = rate.max(f64::min(capacity, paced as f64) as u64);
                bbr.on_round(now + rounds * 26 * MS, window(rate), rate, 0);
                assert!(rounds < most, "{rate} after {rounds} rounds, from {measured}");
            }
        }
    }

    #[test]
    fn an_old_shortest_round_trip_gives_way() {
        let now = Instant::now();
        let mut bbr = Bbr::new(38_400, 1472);
        bbr.on_rtt(now, 25 * MS);
        for ms in 0..30_000 {
            bbr.on_rtt(now + ms * MS, 60 * MS);
        }
        assert_eq!(bbr.min_rtt.map(|(rtt, _)| rtt), Some(60 * MS));
    }

    #[test]
    fn the_drain_ends_on_a_path_shorter_than_its_acknowledgements_take() {
        let now = Instant::now();
        let mut bbr = Bbr::new(38_400, 1472);
        bbr.phase = Phase::Drain;
        bbr.on_rtt(now, MS / 5);
        bbr.on_round(now, window(12_500_000), 12_500_000, 14_720);
        assert!(matches!(bbr.phase, Phase::Cruise { .. }));
    }

    #[test]
    fn a_queue_that_never_ends_is_no_base() {
        let now = Instant::now();
        let mut bbr = Bbr::new(38_400, 1472);
        bbr.phase = Phase::Cruise { phase: 3, since: now, before: 0, found: 0 };
        bbr.on_rtt(now, 10 * MS);
        for _ in 0..40 {
            let window = Window { shortest: 35 * MS, longest: 40 * MS, ..window(10_000_000) };
            bbr.on_round(now, window, 10_000_000, 0);
        }
        assert_eq!(bbr.base_rtt(), Some(10 * MS));
        assert!(bbr.has_queue(10_000_000));
    }

    #[test]
    fn the_base_is_what_a_stream_sees_where_delay_varies() {
        let now = Instant::now();
        let mut bbr = Bbr::new(38_400, 1472);
        bbr.phase = Phase::Cruise { phase: 3, since: now, before: 0, found: 0 };
        bbr.on_rtt(now, 14 * MS);
        assert_eq!(bbr.base_rtt(), Some(14 * MS));
        for _ in 0..3 {
            let window = Window { shortest: 20 * MS, longest: 60 * MS, full: false, ..window(10_000) };
            bbr.on_round(now, window, 10_000_000, 0);
        }
        for n in 0..40 {
            let shortest = if n % 8 == 0 { 40 * MS } else { 55 * MS };
            bbr.on_round(now, Window { shortest, longest: shortest, ..window(10_000_000) }, 10_000_000, 0);
        }
        assert_eq!(bbr.base_rtt(), Some(40 * MS));
        bbr.on_round(
            now + 5000 * MS,
            Window { shortest: 20 * MS, longest: 30 * MS, ..window(10_000_000) },
            10_000_000,
            0,
        );
        assert_eq!(bbr.base_rtt(), Some(20 * MS), "not what it was before a pause");
    }

    #[test]
    fn delay_that_is_no_queue_does_not_wear_the_rate_down() {
        let start = Instant::now();
        let (mut bbr, mut delivery) = (Bbr::new(38_400, 1472), Delivery::new(start));
        bbr.phase = Phase::Cruise { phase: 3, since: start, before: 0, found: 0 };
        delivery.raise(6_000_000);
        bbr.on_rtt(start, 10 * MS);
        // Everybody comes 40 ms late, whatever is sent; the path carries it all.
        for ms in 1..8000 {
            let now = start + ms * MS;
            let rate = delivery.rate();
            let pace = bbr.pacing_rate(rate, 50 * MS).unwrap();
            let sent = pace.min(bbr.window(rate) * 20).min(6_000_000);
            bbr.on_rtt(now, 50 * MS);
            arrive(&mut bbr, &mut delivery, now, (now - 50 * MS, sent / 1000), rate, sent / 20);
            assert!(delivery.rate() > 5_500_000, "{} after {ms} ms", delivery.rate());
        }
    }

    #[test]
    fn packets_that_are_larger_make_no_longer_queue() {
        let now = Instant::now();
        let [small, large] = [1472, 4096].map(|mtu| {
            let mut bbr = Bbr::new(38_400, mtu);
            bbr.on_rtt(now, 20 * MS);
            bbr.phase = Phase::Cruise { phase: 3, since: now, before: 0, found: 0 };
            [125_000, 1_250_000].map(|rate| bbr.window(rate))
        });
        assert_eq!(small, large);
    }

    /// So many bytes that were sent then are acknowledged, with so many still in flight.
    fn arrive(
        bbr: &mut Bbr,
        delivery: &mut Delivery,
        now: Instant,
        (sent, bytes): (Instant, u64),
        rate: u64,
        in_flight: u64,
    ) {
        let acked = Acked {
            bytes,
            sent,
            rtt: now - sent,
            random_loss: 0.0,
            base: bbr.base_rtt().unwrap(),
            idle: bbr.is_draining(),
            paced: bbr.paced(rate),
            queued: bbr.is_queued(now),
            in_order: bbr.inside_tcp,
        };
        if let Some(window) = delivery.on_ack(now, acked) {
            bbr.on_round(now, window, delivery.rate(), in_flight);
        }
    }

    /// What TCP, which carries `capacity` (bytes/s) with a round trip of 20 ms, and of `later` after 30 s, makes of this in 60 s:
    /// the share of it that was used in the last 30 s, and the longest queue before it in that time.
    fn in_front_of_tcp(capacity: u64, mtu: u16, later: Duration) -> (f64, Duration) {
        let start = Instant::now();
        let (mut bbr, mut delivery) = (Bbr::new(38_400, mtu), Delivery::new(start));
        bbr.set_inside_tcp(true);
        let (mut waiting, mut on_its_way) = (VecDeque::new(), VecDeque::new());
        let (mut tokens, mut in_flight, mut queued) = (38_400, 0, 0);
        let (mut used, mut longest) = (0, 0);
        for ms in 1..60_000_u32 {
            let now = start + ms * MS;
            let way = if ms < 30_000 { 20 * MS } else { later };
            let rate = delivery.rate();
            tokens += bbr.pacing_rate(rate, 20 * MS).unwrap_or(1_000_000) / 1000;
            let sent = tokens.min(bbr.window(rate).saturating_sub(in_flight));
            tokens = (tokens - sent).min(10_000);
            (in_flight, queued) = (in_flight + sent, queued + sent);
            waiting.push_back((now, sent));
            let mut room = capacity / 1000;
            while let Some((at, bytes)) = waiting.front_mut() {
                let taken = (*bytes).min(room);
                (*bytes, room, queued) = (*bytes - taken, room - taken, queued - taken);
                on_its_way.push_back((now + way, *at, taken));
                if *bytes > 0 {
                    break;
                }
                waiting.pop_front();
            }
            if ms > 30_000 {
                (used, longest) = (used + capacity / 1000 - room, longest.max(queued));
            }
            while let Some((_, at, bytes)) = on_its_way.pop_front_if(|(arrives, ..)| *arrives <= now) {
                in_flight -= bytes;
                bbr.on_rtt(now, now - at);
                arrive(&mut bbr, &mut delivery, now, (at, bytes), rate, in_flight);
            }
        }
        (used as f64 / (capacity * 30) as f64, Duration::from_millis(longest * 1000 / capacity))
    }

    #[test]
    fn in_front_of_tcp_the_queue_is_short_and_never_empty() {
        for capacity in [250_000, 1_250_000, 12_500_000] {
            for mtu in [1472, 4096] {
                let (used, queue) = in_front_of_tcp(capacity, mtu, 20 * MS);
                let what = format!("{used} of {capacity} bytes/s, {queue:?}, in packets of {mtu}");
                assert!(used > 0.985 && queue < 30 * MS, "{what}");
            }
        }
    }

    #[test]
    fn in_front_of_tcp_a_way_that_became_longer_is_used_all_the_same() {
        for later in [40, 70, 220] {
            let (used, queue) = in_front_of_tcp(1_250_000, 4096, later * MS);
            assert!(
                used > 0.85 && queue < 120 * MS,
                "{used} is used, {queue:?}, when a round trip is {later} ms"
            );
        }
    }
}
