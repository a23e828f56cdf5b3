//! A model-based congestion controller in the shape of BBR (Cardwell et al., "BBR: Congestion-Based
//! Congestion Control", ACM Queue 14(5), 2016; draft-cardwell-iccrg-bbr-congestion-control-00).
//!
//! In: acknowledgements, losses, and whether the sender had more to send. Out: a congestion window and a
//! pacing rate that keep a path busy without filling its queue.
//!
//! A tunnel is not a bulk sender: its traffic is clocked by the flows inside, comes in bursts and pauses. So
//! this differs from the paper:
//! - The rate is the highest delivery rate shown ([`Delivery`]). It falls only while the path was full, never
//!   because less was sent.
//! - The round-trip time without a queue is measured in the drain after each probe. There is no ProbeRTT
//!   phase that holds the window down for 200 ms, which flows inside answer with losses.
//! - The shortest round trip is not the base round-trip time: where delay varies and packets do not overtake
//!   each other, a lone packet is quicker than any in a busy stream. Where a stream is slower, a
//!   [`QueueProbe`] shows whether that is a queue.
//! - A probe that finds a higher rate is repeated at once: a rate that was measured while this machine was
//!   busy is corrected in a few round trips.
//! - Losses by themselves change nothing; lost bytes are not delivered, and lower the rate so. Losses that
//!   occur at any rate are compensated ([`RandomLoss`](crate::random_loss::RandomLoss)).
//! - A mark of congestion (ECN CE, RFC 3168) says that a queue is there. A round with marks is a round with a
//!   queue: it ends startup and probes, and is followed by a cruise below the rate.

use mpvpn_types::{Duration, Instant, bytes_in};

use crate::{
    config::{ACK_ELICITING_THRESHOLD, MAX_ACK_DELAY},
    delivery::{Delivery, Window},
    queue_probe::{self, QueueProbe},
};

/// The pacing and window gain of startup, 2/ln 2: the smallest that doubles the delivery rate each round
/// (BBR). Smaller: more rounds; larger: more queue.
const STARTUP_GAIN: f64 = 2.885;
/// The pacing gains of the eight phases of a cycle, each a round trip long: a probe, a drain, and six cruise
/// phases (BBR). Cruise gains are above 1 because a sender with late wake-ups would otherwise stay below the
/// rate; the drain removes the queue that this builds. Smaller: the rate sinks; larger: a standing queue.
const CYCLE: [f64; 8] = [1.25, 0.75, 1.03, 1.03, 1.03, 1.03, 1.03, 1.03];
/// The gains of a probe and its drain, by how many consecutive probes found a higher rate: a rate far below
/// the path's was measured while little was sent, and is corrected as quickly as in startup. Smaller: slow
/// return; larger: queue of a probe.
const PROBES: [(f64, f64); 4] = [(CYCLE[0], CYCLE[1]), (CYCLE[0], CYCLE[1]), (1.5, 0.6), (2.0, 0.5)];
/// The cruise gain while there is a queue. Smaller: rate is given away; larger: the queue stands for longer.
pub(crate) const QUEUE_CRUISE_GAIN: f64 = 0.96;
/// The cruise gain inside TCP without a queue: a little more than TCP carries, so that it never runs dry and
/// sends full segments. Smaller: TCP runs dry; larger: queue. Measured (docs/performance.md, "Inside TCP").
const TCP_CRUISE_GAIN: f64 = 1.1;
/// The drain gain inside TCP, and the time between two drains: one every 270 ms lost a third of the rate in
/// two windows of eight.
const TCP_DRAIN_GAIN: f64 = 0.5;
const TCP_DRAIN_INTERVAL: Duration = Duration::from_secs(2);
/// If this many consecutive drains inside TCP leave a queue, the path has become longer. Fewer: a queue is
/// taken for the path; more: a longer path is used late. Not derived (docs/design/congestion-control.md).
const MAX_USELESS_DRAINS: u32 = 2;
/// Inside TCP the cruise gain is 1 − queue / max of this and [`TCP_EASE_ROUNDS`] round trips, but at least
/// [`MIN_EASE`]. Shorter: TCP runs dry; longer: queues of 60 ms and more.
const TCP_EASE_DELAY: Duration = Duration::from_millis(100);
const TCP_EASE_ROUNDS: u32 = 4;
pub(crate) const MIN_EASE: f64 = 0.8;
/// The congestion window after startup in bandwidth-delay products (BBR). Smaller: the window limits paths
/// with varying delay; larger: more in flight when a queue stands.
const WINDOW_GAIN: f64 = 2.0;
/// The least congestion window, in what is sent in the smoothed round-trip time. Smaller: the window limits
/// paths with varying delay, which looks like a slower path; larger: more in flight when a queue stands.
const SMOOTHED_WINDOW_GAIN: f64 = 1.25;
/// Startup ends after [`FULL_ROUNDS`] rounds in which the rate grew by less than this factor (BBR). Fewer
/// rounds: startup ends early; more: a longer queue.
const FULL_GROWTH: f64 = 1.25;
const FULL_ROUNDS: u32 = 3;
/// Rounds without growth but with a suspected queue after which startup runs a queue probe: flows inside that
/// are paced leave nothing waiting, though the path is full. Fewer: startup ends early; more: twice the rate
/// for longer.
const ROUNDS_BEFORE_QUEUE_PROBE: u32 = 6;
/// Consecutive windows with a queue after which a queue probe starts; a draining queue is shorter-lived.
/// Fewer: needless probes; more: queues stand for longer.
const WINDOWS_BEFORE_QUEUE_PROBE: u32 = 4;
/// The growth of the rate from which a probe was successful: above the noise of one window. Smaller: probes
/// repeat on noise; larger: a wrong rate is corrected late.
const PROBE_SUCCESS_GROWTH: f64 = 1.08;
/// How long a shortest round trip counts (BBR). Shorter: a queue is taken for the path; longer: a longer path
/// is taken for a queue.
const MAX_MIN_RTT_AGE: Duration = Duration::from_secs(10);
/// The share of losses in a window from which the drain lasts a full round, to measure random loss. Chosen.
const MIN_LOSS_FOR_FULL_DRAIN: f64 = 0.02;
/// Windows of a busy path over which the shortest round trip is taken: two cycles, so that it includes
/// drains. Fewer: a queue is taken for the path; more: a longer path is found late.
const BASE_RTT_WINDOWS: usize = 16;
/// After this long without use, earlier round trips of a busy path are forgotten: the path may have changed.
/// Shorter: the base is lost in pauses; longer: an old base counts.
const MAX_BUSY_PAUSE: Duration = Duration::from_secs(2);
/// A path carries little below this fraction (one over it) of its rate, in two consecutive windows. No
/// measurement.
const LITTLE_RATE_DIVISOR: u64 = 8;
/// Less than this rate (bytes/s) is little on any path. No measurement.
const LITTLE_RATE: u64 = 64_000;
/// Windows with little traffic over which the longest round trip is taken, for the variation of delay. No
/// measurement.
const QUIET_WINDOWS: usize = 32;
/// The largest packet that held-back acknowledgements are counted with (bytes): a UDP payload on Ethernet.
/// With larger ones (inside TCP) ten packets would be a queue on a slow link.
const ETHERNET_PAYLOAD: u64 = 1472;
/// The least congestion window in packets (BBR). Larger: queue on slow paths.
const MIN_WINDOW_PACKETS: u64 = 4;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    /// The rate doubles every round, until it stops growing; `best` is the highest rate so far, `rounds`
    /// counts rounds without growth, `queued` those of them with a suspected queue.
    Startup { best: u64, rounds: u32, queued: u32 },
    /// The queue of startup is drained.
    Drain,
    /// The gains of [`CYCLE`] in turn; `before` is the rate when the last probe began, and `found` the number
    /// of consecutive successful probes, an index into [`PROBES`].
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

/// The controller's current decisions, for log lines.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Decisions {
    /// The name of the phase, why it began, and the index in the cycle.
    pub(crate) phase: &'static str,
    pub(crate) reason: &'static str,
    pub(crate) step: usize,
    /// Whether a queue probe is running.
    pub(crate) probes_queue: bool,
    /// When a queue probe last found a queue, and the round trip that it measured without one.
    pub(crate) queue_found: Option<Instant>,
    pub(crate) without_queue: Option<Duration>,
    /// The shortest round trip of the last 10 s.
    pub(crate) min_rtt: Option<Duration>,
}

/// The controller of one path.
#[derive(Clone, Debug)]
pub(crate) struct Bbr {
    phase: Phase,
    /// Why the phase began.
    reason: &'static str,
    initial: u64,
    mtu: u64,
    min_rtt: Option<(Duration, Instant)>,
    /// The shortest round trip since `min_rtt` was set, which replaces it when that is too old.
    next_min: Option<Duration>,
    /// The shortest round trip of each of the last windows in which the path was busy; inside TCP, where
    /// drains are rare, each entry covers several windows.
    windows: [Duration; BASE_RTT_WINDOWS],
    /// The least of them, cached because it is needed for each acknowledged packet.
    least_window: Duration,
    newest: usize,
    newest_since: Option<Instant>,
    /// When the newest of them ended.
    last_busy: Option<Instant>,
    smoothed: Duration,
    /// The longest round trips of windows with little traffic, which show how much the delay varies without
    /// a queue.
    quiet: [Duration; QUIET_WINDOWS],
    /// The longest of them, cached.
    max_quiet: Duration,
    newest_quiet: usize,
    carried_little: bool,
    /// The shortest round trip of the last window, and its delivery rate (bytes/s).
    last_shortest: Duration,
    delivered: u64,
    /// Whether more than [`MIN_LOSS_FOR_FULL_DRAIN`] was lost in the last window.
    lossy: bool,
    queue_probe: QueueProbe,
    /// Consecutive windows with a queue.
    windows_with_queue: u32,
    /// Whether packets of the running window, and of the last one, were marked.
    marked: bool,
    last_marked: bool,
    inside_tcp: bool,
    /// Consecutive drains inside TCP that left a queue.
    useless_drains: u32,
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
            windows: [Duration::MAX; BASE_RTT_WINDOWS],
            least_window: Duration::MAX,
            newest: 0,
            newest_since: None,
            last_busy: None,
            smoothed: Duration::ZERO,
            quiet: [Duration::ZERO; QUIET_WINDOWS],
            max_quiet: Duration::ZERO,
            newest_quiet: 0,
            carried_little: true,
            last_shortest: Duration::ZERO,
            delivered: 0,
            lossy: false,
            queue_probe: QueueProbe::default(),
            windows_with_queue: 0,
            marked: false,
            last_marked: false,
            inside_tcp: false,
            useless_drains: 0,
        }
    }

    /// Sets whether packets travel inside TCP, which controls congestion itself and loses nothing: then the
    /// controller only keeps a short queue in front of TCP.
    pub(crate) fn set_inside_tcp(&mut self, inside_tcp: bool) {
        self.inside_tcp = inside_tcp;
    }

    pub(crate) fn on_mtu(&mut self, mtu: u16) {
        self.mtu = mtu.into();
    }

    /// The peer has reported packets that the network marked (ECN CE).
    pub(crate) fn on_marked(&mut self) {
        self.marked = true;
    }

    /// Takes a sample of the round-trip time.
    pub(crate) fn on_rtt(&mut self, now: Instant, rtt: Duration) {
        self.smoothed = if self.smoothed.is_zero() { rtt } else { (self.smoothed * 7 + rtt) / 8 };
        self.queue_probe.on_rtt(now, rtt, self.smoothed);
        self.next_min = Some(self.next_min.map_or(rtt, |least| least.min(rtt)));
        match self.min_rtt {
            Some((least, at)) if rtt > least && now.saturating_duration_since(at) < MAX_MIN_RTT_AGE => {}
            Some((least, _)) if rtt > least => {
                self.min_rtt = self.next_min.take().map(|next| (next, now));
            }
            _ => {
                self.min_rtt = Some((rtt, now));
                self.next_min = None;
            }
        }
    }

    /// Takes a complete window of [`Delivery`], about one round trip long; `rate` in bytes/s, `in_flight` in
    /// bytes.
    pub(crate) fn on_round(&mut self, now: Instant, window: Window, rate: u64, in_flight: u64) {
        self.lossy = window.lost > MIN_LOSS_FOR_FULL_DRAIN;
        self.last_marked = std::mem::take(&mut self.marked);
        self.last_shortest = window.shortest;
        if !self.queue_probe.is_running() {
            self.delivered = window.rate;
        }
        let little = window.rate <= (rate / LITTLE_RATE_DIVISOR).max(LITTLE_RATE);
        if little && self.carried_little {
            self.newest_quiet = (self.newest_quiet + 1) % QUIET_WINDOWS;
            self.quiet[self.newest_quiet] = window.longest.saturating_sub(Delivery::ACK_DELAY);
            self.max_quiet = self.quiet.iter().copied().fold(Duration::ZERO, Duration::max);
        }
        self.carried_little = little;
        if window.rate >= rate / 2 {
            if self.last_busy.is_some_and(|at| now.saturating_duration_since(at) > MAX_BUSY_PAUSE) {
                self.windows = [Duration::MAX; BASE_RTT_WINDOWS];
            }
            self.last_busy = Some(now);
            let least = if self.inside_tcp {
                TCP_DRAIN_INTERVAL * 2 / BASE_RTT_WINDOWS as u32
            } else {
                Duration::ZERO
            };
            if self.newest_since.is_none_or(|since| now.saturating_duration_since(since) >= least) {
                self.newest = (self.newest + 1) % BASE_RTT_WINDOWS;
                self.windows[self.newest] = Duration::MAX;
                self.newest_since = Some(now);
            }
            self.windows[self.newest] = self.windows[self.newest].min(window.shortest);
            self.least_window = self.windows.iter().copied().fold(Duration::MAX, Duration::min);
        }
        let queue = self.has_queue(rate);
        // An overflowing queue ends startup at once, also if there was not always something to send. Losses
        // of packets that are too large for the path come without a queue, and do not count.
        let waited = self.min_rtt.is_some_and(|(least, _)| window.shortest > least + Delivery::ACK_DELAY);
        let overruns =
            window.overflows && waited && in_flight > self.max_in_flight_without_queue(rate) / 4 * 5;
        match &mut self.phase {
            Phase::Startup { best, rounds, queued } => {
                if rate as f64 >= *best as f64 * FULL_GROWTH && !self.last_marked {
                    (*best, *rounds, *queued) = (rate, 0, 0);
                } else if overruns {
                    *rounds = FULL_ROUNDS;
                    self.reason = "a queue overflows";
                } else if self.last_marked {
                    *rounds = FULL_ROUNDS;
                    self.reason = "packets are marked";
                } else if window.full {
                    *rounds += 1;
                    self.reason = "the rate no longer grows";
                } else if queue && in_flight >= self.initial / 2 {
                    // Flows inside that are paced at the path's rate leave nothing waiting here. With little
                    // in flight, such as acknowledgements of a download, the queue is not
                    // of this sender, or on the return path.
                    *queued += 1;
                }
                let looks = *queued >= ROUNDS_BEFORE_QUEUE_PROBE;
                if *rounds >= FULL_ROUNDS || looks && self.queue_probe.found_queue_lately(now) {
                    if *rounds < FULL_ROUNDS {
                        self.reason = "a queue was found";
                    }
                    self.phase = Phase::Drain;
                } else if looks && queue {
                    let lone = self.min_rtt.map_or(window.shortest, |(least, _)| least);
                    self.queue_probe.begin(now, window.shortest, self.smoothed, lone);
                }
            }
            Phase::Drain => {
                if in_flight <= self.max_in_flight_without_queue(rate) {
                    self.phase = Phase::Cruise { phase: 2, since: now, before: rate, found: 0 };
                    self.reason = "no more is in flight than the path holds";
                }
            }
            Phase::Cruise { .. } => {}
        }
        self.advance(now, rate, in_flight, queue);
        let used = matches!(self.phase, Phase::Cruise { .. }) && window.rate >= rate / 2;
        self.windows_with_queue = if queue && used { self.windows_with_queue + 1 } else { 0 };
        if self.windows_with_queue >= WINDOWS_BEFORE_QUEUE_PROBE && !self.inside_tcp {
            let base = self.base_rtt().unwrap_or_default();
            self.queue_probe.begin(now, window.shortest, self.smoothed, base);
        }
    }

    /// The current decisions.
    pub(crate) fn decisions(&self) -> Decisions {
        Decisions {
            phase: self.phase.name(),
            reason: self.reason,
            step: if let Phase::Cruise { phase, .. } = self.phase { phase } else { 0 },
            probes_queue: self.queue_probe.is_running(),
            queue_found: self.queue_probe.queue_found,
            without_queue: self.queue_probe.rtt_without_queue(),
            min_rtt: self.min_rtt.map(|(rtt, _)| rtt),
        }
    }

    /// The round-trip time of a packet in a busy stream without a queue.
    pub(crate) fn base_rtt(&self) -> Option<Duration> {
        let (least, _) = self.min_rtt?;
        let stream = match self.phase {
            // TCP may lose packets that startup has queued, and then everything behind them waits.
            Phase::Startup { .. } if self.inside_tcp => None,
            Phase::Startup { .. } => Some(self.smoothed),
            Phase::Drain | Phase::Cruise { .. } => Some(self.least_window),
        };
        // A busy stream may have a queue at all times. The variation of delay without a queue shows while
        // little is sent, or in a queue probe.
        let most =
            self.queue_probe.rtt_without_queue().into_iter().fold(least.max(self.max_quiet), Duration::max);
        Some(stream.filter(|rtt| *rtt < Duration::MAX).unwrap_or(least).clamp(least, most))
    }

    /// Whether less is sent than the path can carry now, or was a round trip ago.
    pub(crate) fn is_draining(&self) -> bool {
        self.queue_probe.is_running()
            || matches!(self.phase, Phase::Drain | Phase::Cruise { phase: 1 | 2, .. })
    }

    /// Whether a queue probe has found a queue lately.
    pub(crate) fn is_queued(&self, now: Instant) -> bool {
        self.queue_probe.found_queue_lately(now)
    }

    /// The share of the rate (0 to 1) that is sent now, or was a round trip ago.
    pub(crate) fn paced_share(&self, rate: u64) -> f64 {
        match self.phase {
            _ if self.queue_probe.is_running() => queue_probe::GAIN,
            Phase::Cruise { phase: 1 | 2, found, .. } => self.drain_gain(found),
            Phase::Cruise { .. } if self.inside_tcp => self.tcp_cruise_gain(rate).min(1.0),
            Phase::Cruise { .. } if self.has_queue(rate) => QUEUE_CRUISE_GAIN,
            Phase::Cruise { .. } | Phase::Startup { .. } => 1.0,
            Phase::Drain => 1.0 / STARTUP_GAIN,
        }
    }

    /// Whether less is sent now than the path's rate, so that losses are random.
    pub(crate) fn is_below(&self) -> bool {
        self.queue_probe.is_sending_less()
            || matches!(self.phase, Phase::Drain | Phase::Cruise { phase: 1, .. })
    }

    /// The drain gain after a probe.
    fn drain_gain(&self, found: usize) -> f64 {
        if self.inside_tcp { TCP_DRAIN_GAIN } else { PROBES[found].1 }
    }

    fn advance(&mut self, now: Instant, rate: u64, in_flight: u64, queue: bool) {
        let drained = self.max_in_flight_without_queue(rate);
        let round = self.base_rtt().unwrap_or(Duration::from_millis(100)).max(Duration::from_millis(10));
        // A queue that never ends would be taken for part of the path in the end.
        let drain_rounds = if self.inside_tcp { 4 } else { 2 };
        let Phase::Cruise { phase, since, before, found } = &mut self.phase else { return };
        let elapsed = now.saturating_duration_since(*since);
        // The queue that a probe built is drained for as long as it is there, but no longer than it
        // took to build.
        let done = match *phase {
            // The probe has found a queue.
            0 if self.last_marked => true,
            // A full round of slow sending, to measure random loss.
            1 if self.lossy && elapsed < round => false,
            1 => in_flight <= drained || elapsed >= round * drain_rounds,
            // Until packets of the drain are acknowledged, however long the path has become.
            2 if self.inside_tcp => elapsed >= round.max(self.smoothed),
            3 if self.inside_tcp => elapsed >= TCP_DRAIN_INTERVAL,
            _ => elapsed >= round,
        };
        if !done {
            return;
        }
        if self.inside_tcp {
            if *phase == 2 {
                self.useless_drains = if queue { self.useless_drains + 1 } else { 0 };
            }
            if self.useless_drains >= MAX_USELESS_DRAINS {
                let shortest = Some(self.least_window).filter(|rtt| *rtt < Duration::MAX);
                self.min_rtt = shortest.map(|shortest| (shortest, now)).or(self.min_rtt);
                (self.next_min, self.useless_drains) = (None, 0);
            }
            // Sending between the drains probes all the time.
            *phase = if (1..3).contains(phase) { *phase + 1 } else { 1 };
            *since = now;
            return;
        }
        // A successful probe is followed by the next one at once.
        let more = *phase == 1 && rate as f64 > *before as f64 * PROBE_SUCCESS_GROWTH;
        *phase = if more { 0 } else { (*phase + 1) % CYCLE.len() };
        *since = now;
        if *phase == 0 {
            *before = rate;
            *found = if more { (*found + 1).min(PROBES.len() - 1) } else { 0 };
        }
    }

    /// The bandwidth-delay product (bytes).
    fn bandwidth_delay_product(&self, rate: u64) -> u64 {
        bytes_in(rate, self.base_rtt().unwrap_or_default())
    }

    /// Whether packets have waited in a queue during all of the last window, or were marked by one.
    fn has_queue(&self, rate: u64) -> bool {
        self.last_marked || !self.queueing_delay(rate).is_zero()
    }

    /// The queueing delay of the last window: how much its shortest round trip exceeds the base, beyond what
    /// variation and held-back acknowledgements explain.
    fn queueing_delay(&self, rate: u64) -> Duration {
        let Some(base) = self.base_rtt() else { return Duration::ZERO };
        // The peer holds acknowledgements back for so many packets, or for MAX_ACK_DELAY.
        let held =
            Duration::from_nanos(u64::from(ACK_ELICITING_THRESHOLD) * self.mtu * 1_000_000_000 / rate.max(1));
        let held = held.min(MAX_ACK_DELAY + Duration::from_millis(1));
        let usual = base + base / 8 + held + Duration::from_millis(2);
        self.last_shortest.saturating_sub(usual)
    }

    /// The cruise gain inside TCP.
    fn tcp_cruise_gain(&self, rate: u64) -> f64 {
        let queue = self.queueing_delay(rate);
        if queue.is_zero() {
            return TCP_CRUISE_GAIN;
        }
        let answer = TCP_EASE_DELAY.max(self.base_rtt().unwrap_or_default() * TCP_EASE_ROUNDS);
        (1.0 - queue.as_secs_f64() / answer.as_secs_f64()).max(MIN_EASE)
    }

    /// Bytes in flight that certainly leave no queue. They follow the shortest round trip, not the base,
    /// which may include a queue if the path was full all the time.
    fn max_in_flight_without_queue(&self, rate: u64) -> u64 {
        let rtt = self.min_rtt.map_or(Duration::ZERO, |(rtt, _)| rtt);
        bytes_in(rate, rtt) + self.unacked_at_peer(rate)
    }

    /// Bytes that have arrived but count as in flight, because the peer holds acknowledgements back for up to
    /// [`ACK_ELICITING_THRESHOLD`] packets or [`MAX_ACK_DELAY`]. Large packets count as ordinary ones: so
    /// many of them would be a queue on a slow link.
    fn unacked_at_peer(&self, rate: u64) -> u64 {
        u64::from(ACK_ELICITING_THRESHOLD) * self.mtu.min(ETHERNET_PAYLOAD) + bytes_in(rate, MAX_ACK_DELAY)
    }

    /// The congestion window (bytes) at a rate (bytes/s), if packets are answered `late` after they arrived:
    /// round trips end with their arrival, but what they acknowledge counts as in flight until then.
    pub(crate) fn window(&self, rate: u64, late: Duration) -> u64 {
        let gain = match self.phase {
            Phase::Startup { .. } => STARTUP_GAIN,
            Phase::Drain | Phase::Cruise { .. } => WINDOW_GAIN,
        };
        // If round trips are longer than the base, only the pacing rate reacts: a window that did would let
        // less arrive, which looks like a slower path, and so on. Inside TCP the pacing rate would
        // react too slowly.
        let slack = if self.inside_tcp { 1.0 } else { SMOOTHED_WINDOW_GAIN };
        let sent = (rate as f64 * (self.smoothed.as_secs_f64() * slack + late.as_secs_f64())) as u64;
        let window = ((self.bandwidth_delay_product(rate) as f64 * gain) as u64).max(sent)
            + self.unacked_at_peer(rate);
        let least = match self.phase {
            Phase::Startup { .. } => self.initial,
            Phase::Drain | Phase::Cruise { .. } => MIN_WINDOW_PACKETS * self.mtu,
        };
        window.max(least)
    }

    /// The pacing rate (bytes/s); `None` before the first round-trip sample.
    pub(crate) fn pacing_rate(&self, rate: u64, rtt: Duration) -> Option<u64> {
        let gain = match self.phase {
            _ if self.queue_probe.is_sending_less() => queue_probe::GAIN,
            Phase::Startup { .. } => STARTUP_GAIN,
            Phase::Drain => 1.0 / STARTUP_GAIN,
            Phase::Cruise { phase: 1, found, .. } => self.drain_gain(found),
            Phase::Cruise { .. } if self.inside_tcp => self.tcp_cruise_gain(rate),
            Phase::Cruise { phase: 0, found, .. } => PROBES[found].0,
            Phase::Cruise { .. } if self.has_queue(rate) => QUEUE_CRUISE_GAIN,
            Phase::Cruise { phase, .. } => CYCLE[phase],
        };
        // A queue probe has to send less than before, also if the traffic needs less than half of the rate.
        let rate = if self.queue_probe.is_sending_less() { rate.min(self.delivered) } else { rate };
        if matches!(self.phase, Phase::Startup { .. }) && !self.queue_probe.is_sending_less() {
            // Before the first measurement: the initial window, in a round trip.
            let first = (u128::from(self.initial) * 1_000_000_000 / rtt.as_nanos().max(1)) as u64;
            return (!rtt.is_zero()).then(|| ((rate as f64 * gain) as u64).max(first));
        }
        Some((rate as f64 * gain) as u64).map(|paced| paced.max(self.mtu))
    }
}

#[cfg(test)]
mod tests;
