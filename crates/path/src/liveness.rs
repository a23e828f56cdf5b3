//! Whether a path works, judged by the packets that arrive on it.
//!
//! Both ends send heartbeats on every path: dense ones (about one a round trip) while data moves, rare ones
//! otherwise. An end that misses several dense heartbeats in a row declares the path dead; after a few
//! arrivals the path is alive again. Acknowledgements prove nothing, since they may come over another path;
//! nor does a carrier, which some links never lose. The only path that works is judged by [`awaited_ack`]
//! instead, and a dead path is asked ever less often.
//!
//! In: arrivals, traffic, carrier changes, measurements, the time. Out: when to send a heartbeat, and changes
//! between alive and dead. Always holds: silence counts only while dense heartbeats or acknowledgements are
//! expected; without a carrier nothing is sent.

mod awaited_ack;
mod silences;
#[cfg(test)]
mod tests;

use derive_more::Display;
use mpvpn_types::{Duration, Instant, target::LIVENESS};

use awaited_ack::{AckTimeouts, AwaitedAck};
use silences::RecentSilences;

use crate::{pause::longest_pause_after_long, probe_pause};

/// Intervals and limits of liveness.
#[derive(Clone, Debug)]
pub struct LivenessConfig {
    /// How long heartbeats stay dense after data last moved.
    pub dense_duration: Duration,
    /// The shortest interval of dense heartbeats; it is one round trip between this and
    /// `max_dense_interval`.
    pub min_dense_interval: Duration,
    /// The longest interval of dense heartbeats.
    pub max_dense_interval: Duration,
    /// The interval while no data moves: short enough to keep a NAT binding (RFC 4787 §4.3).
    pub idle_interval: Duration,
    /// The shortest interval on a dead path, while no data moves; it grows with the silence. While data
    /// moves, the shortest one is that of dense heartbeats.
    pub min_dead_interval: Duration,
    /// The longest interval on a dead path, while data moves and other paths work.
    pub max_dead_interval: Duration,
    /// Consecutive heartbeats that must be missing on a path without loss; more with loss.
    pub min_missed: u32,
    /// Arrivals after which a dead path is alive; more if it died repeatedly.
    pub min_arrivals: u32,
    /// A silence shorter than this never means death.
    pub min_silence: Duration,
    /// Whether the other end finds out when a path works again.
    pub peer_finds_return: bool,
    /// Whether the link is metered.
    pub metered: bool,
}

impl Default for LivenessConfig {
    fn default() -> Self {
        Self {
            dense_duration: Self::DENSE_DURATION,
            min_dense_interval: Duration::from_millis(25),
            max_dense_interval: Self::MAX_DENSE_INTERVAL,
            idle_interval: Duration::from_secs(15),
            min_dead_interval: Duration::from_millis(100),
            max_dead_interval: Duration::from_secs(2),
            min_missed: 3,
            min_arrivals: 2,
            min_silence: Duration::ZERO,
            peer_finds_return: false,
            metered: false,
        }
    }
}

impl LivenessConfig {
    /// How long heartbeats stay dense after data last moved, on every link. Shorter: a path that dies in a
    /// pause is noticed late; longer: more heartbeats of idle connections. Chosen
    /// (docs/design/liveness.md).
    pub const DENSE_DURATION: Duration = Duration::from_secs(2);
    /// The longest interval of dense heartbeats on an unmetered link. Other timers that depend on heartbeats
    /// are multiples of it. Shorter: more packets; longer: a path with a long round trip is declared dead
    /// later.
    pub const MAX_DENSE_INTERVAL: Duration = Duration::from_millis(100);
    /// Data that moves again after such a pause is a reason to ask anew. Longer: who comes back to a machine
    /// waits for longer; shorter: programs that send now and then keep the questions frequent. Chosen.
    pub const TRAFFIC_PAUSE: Duration = Duration::from_secs(10);

    /// For a metered link: half as many heartbeats while data moves, and otherwise as few as NAT bindings
    /// found in practice allow (RFC 4787 REQ-5 asks for two minutes, many devices keep 30 s).
    pub fn metered() -> Self {
        Self {
            min_dense_interval: Duration::from_millis(50),
            max_dense_interval: Duration::from_millis(200),
            idle_interval: Duration::from_secs(25),
            min_dead_interval: Duration::from_millis(200),
            max_dead_interval: Duration::from_secs(10),
            metered: true,
            ..Self::default()
        }
    }
}

impl LivenessConfig {
    /// For a server, whose clients find out when a path works again: if the server is slow, thousands of its
    /// clients seem silent at once, and replies to its heartbeats would make it slower.
    pub fn of_server(self) -> Self {
        Self { peer_finds_return: true, ..self }
    }

    /// For packets inside TCP, which delivers nothing while an earlier segment is missing: Linux retransmits
    /// after 200 ms at the soonest (RFC 6298 §2.4 asks for 1 s), and after 400 ms again. Shorter:
    /// retransmissions look like death.
    pub fn inside_tcp(self) -> Self {
        Self { min_silence: Duration::from_millis(700), ..self }
    }
}

/// The interval of heartbeats on a path that is not asked: longer than any connection without an answer.
const NEVER: Duration = Duration::from_secs(86_400);
/// A heartbeat of the idle time may be early by half of its interval: then all paths with the same interval
/// get together. Larger: they stay in groups; smaller: more heartbeats.
const EARLY_IDLE_DIVISOR: u32 = 2;
/// A path that was alive for less than this before it died is flapping: it needs more arrivals to be alive
/// again …
const MIN_STEADY: Duration = Duration::from_secs(5);
/// … for this long after its last death. Shorter values of both: flapping paths take data down with them more
/// often; longer: a path that works again is used late. Chosen.
const FLAPPING_WINDOW: Duration = Duration::from_secs(30);
/// How often the required arrivals double at most: 2 become 8, heartbeats of 0.2 to 0.8 s. More: slower
/// return; fewer: flapping paths carry data too soon. Chosen.
const MAX_DOUBLINGS: u32 = 2;
/// Arrivals closer together than this count as one, because a burst proves no more than one packet. It is
/// less than the shortest interval of heartbeats (25 ms), so that late ones still count.
const MIN_ARRIVAL_GAP: Duration = Duration::from_millis(8);
/// Arrivals further apart than this are counted anew: six of the longest dense intervals. Shorter: lossy
/// paths stay dead; longer: stray packets revive a path.
const MAX_ARRIVAL_GAP: Duration = Duration::from_millis(600);
/// Consecutive heartbeats that must be missing at most, however much the path loses. More: death of a lossy
/// path is found later; fewer: loss is taken for death. Chosen.
const MAX_MISSED: u32 = 12;
/// The logarithm of the probability below which a run of losses means death: ln(1e-5). Higher: false deaths
/// on lossy paths; lower: true ones are found later. Chosen.
const LN_IMPROBABLE: f64 = -11.5;

/// Why a path is in its state.
#[derive(Clone, Copy, Debug, Display, PartialEq, Eq)]
pub enum StateReason {
    /// It works.
    #[display("")]
    Works,
    /// The kernel reports that the link has no carrier or no address, or was removed.
    #[display("no carrier")]
    NoCarrier,
    /// Too many consecutive heartbeats are missing.
    #[display("{missed} heartbeats lost")]
    Silent {
        /// Missing heartbeats.
        missed: u32,
    },
    /// The carrier is back, or something arrived again, and more arrivals are awaited.
    #[display("heard again, being tried")]
    Probing,
}

/// A change of a path's liveness.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LivenessChange {
    /// It may carry data.
    Alive,
    /// It must not carry data.
    Dead,
}

/// The result of [`Liveness::poll`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LivenessUpdate {
    /// Send a heartbeat on it.
    pub send_heartbeat: bool,
    /// [`Liveness::is_heard`] has changed: report it to the peer at once.
    pub report: bool,
    /// The path has just died, or is alive again.
    pub change: Option<LivenessChange>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Alive {
        since: Instant,
    },
    Dead {
        since: Instant,
        /// The last arrival before the path died, or the carrier's last change.
        silent_since: Instant,
        arrivals: u32,
    },
}

/// When silence has consequences.
#[derive(Clone, Copy, Debug)]
struct SilenceDeadlines {
    /// It is reported to the peer before it means death: as soon as it is longer, by one heartbeat, than any
    /// other of the last seconds. What the peer does then (it sends its packets in flight again on other
    /// paths, and uses the path again when it is heard) costs little if the silence ends. `None`: nothing is
    /// known of other silences.
    report: Option<Instant>,
    /// The path is dead.
    death: Instant,
}

/// The liveness of one path, at one end.
#[derive(Clone, Debug)]
pub struct Liveness {
    config: LivenessConfig,
    state: State,
    reason: StateReason,
    carrier: bool,
    /// When something last arrived, or silence last began to count anew.
    last_received: Instant,
    /// When something last arrived.
    last_arrival: Instant,
    last_heartbeat: Option<Instant>,
    /// [`Self::is_heard`] at the last [`Self::poll`].
    was_heard: bool,
    /// The silences of the last seconds in which heartbeats were dense.
    silences: RecentSilences,
    last_traffic: Option<Instant>,
    /// At an end that hears nothing on any path: since when, or when it last had a reason to ask anew.
    alone_since: Option<Instant>,
    /// See [`Self::set_probed`].
    is_probed: bool,
    /// Until when heartbeats are dense because data moves at the peer.
    peer_traffic_until: Option<Instant>,
    dense_since: Instant,
    /// When the path last died, and how many deaths before that followed one another closely.
    last_death: Option<(Instant, u32)>,
    rtt: Duration,
    rtt_var: Duration,
    loss: f64,
    intervals: Intervals,
    /// The acknowledgement that the peer owes, if no other path works.
    awaited_ack: Option<AwaitedAck>,
}

/// Intervals that follow from configuration and measurements, computed anew in each iteration.
#[derive(Clone, Copy, Debug)]
struct Intervals {
    /// The interval of dense heartbeats.
    dense: Duration,
    /// Consecutive heartbeats, or acknowledgements, that must be missing.
    misses: u32,
    /// How long heartbeats may be missing: the required number of intervals, and the variation of the
    /// round-trip time.
    max_gap: Duration,
    ack_timeouts: AckTimeouts,
}

impl Liveness {
    /// A path that was just validated: it counts as alive.
    pub fn new(config: LivenessConfig, now: Instant) -> Self {
        let mut liveness = Self {
            intervals: Intervals {
                dense: Duration::ZERO,
                misses: 0,
                max_gap: Duration::ZERO,
                ack_timeouts: AckTimeouts::default(),
            },
            awaited_ack: None,
            config,
            state: State::Alive { since: now },
            reason: StateReason::Works,
            carrier: true,
            last_received: now,
            last_arrival: now,
            last_heartbeat: None,
            was_heard: true,
            silences: RecentSilences::new(now),
            last_traffic: None,
            alone_since: None,
            is_probed: true,
            peer_traffic_until: None,
            dense_since: now,
            last_death: None,
            rtt: Duration::from_millis(100),
            rtt_var: Duration::ZERO,
            loss: 0.0,
        };
        liveness.update_intervals();
        liveness
    }

    fn update_intervals(&mut self) {
        let dense = self.rtt.clamp(self.config.min_dense_interval, self.config.max_dense_interval);
        let misses = self.required_misses();
        let max_gap = dense * misses + self.rtt_var.min(dense);
        let ack_timeouts = AckTimeouts::new(self.rtt, self.rtt_var, dense, misses);
        self.intervals = Intervals { dense, misses, max_gap, ack_timeouts };
    }

    /// Whether the path may carry data.
    pub fn is_alive(&self) -> bool {
        matches!(self.state, State::Alive { .. })
    }

    /// Why the path is in its state.
    pub fn reason(&self) -> StateReason {
        self.reason
    }

    /// When the path died, if it is dead.
    pub fn dead_since(&self) -> Option<Instant> {
        match self.state {
            State::Alive { .. } => None,
            State::Dead { since, .. } => Some(since),
        }
    }

    /// Sets whether there is nothing to change to: the connection has no other path that works. Then
    /// acknowledgements come over this one, and dense heartbeats would inform no choice.
    pub fn set_only_path(&mut self, now: Instant, only: bool) {
        if only == self.awaited_ack.is_some() {
            return;
        }
        self.awaited_ack = only.then(AwaitedAck::default);
        // The peer learns a one-way delay later or earlier that heartbeats are dense.
        self.dense_since = now;
    }

    /// Whether [`Self::on_sent`] is of use: the path is the only one, and every packet that was sent is
    /// acknowledged.
    pub fn is_acked(&self) -> bool {
        self.awaited_ack.is_some_and(|awaited| !awaited.is_awaited)
    }

    /// An ack-eliciting packet was sent on this path. Only needed if [`Self::is_acked`].
    pub fn on_sent(&mut self, now: Instant) {
        if let Some(awaited) = &mut self.awaited_ack {
            awaited.on_sent(now);
        }
    }

    /// Silence so far proves nothing.
    fn restart_silence(&mut self, now: Instant) {
        self.last_received = self.last_received.max(now);
        self.awaited_ack.iter_mut().for_each(AwaitedAck::reset);
    }

    /// Data of the tunnel moved, in any direction, on any path of the connection. Returns whether that may
    /// make something due.
    pub fn on_traffic(&mut self, now: Instant) -> bool {
        let begins = self.begin_dense(now);
        let paused = self
            .last_traffic
            .is_none_or(|at| now.saturating_duration_since(at) >= LivenessConfig::TRAFFIC_PAUSE);
        if paused {
            self.probe_anew(now);
        }
        self.last_traffic = Some(now);
        begins || paused
    }

    /// Sets whether heartbeats ask on the path when it has been dead for long and no data could use it: not
    /// while another connection asks over the same link. When that ends, the next one is due at once.
    /// Returns whether this is a change.
    pub fn set_probed(&mut self, probed: bool) -> bool {
        let before = std::mem::replace(&mut self.is_probed, probed);
        if probed && !before {
            self.last_heartbeat = None;
        }
        before != probed
    }

    /// Whether questions on the path are left to another connection.
    pub fn is_left_to_others(&self, now: Instant) -> bool {
        !self.is_probed && self.is_long_dead(now)
    }

    /// Whether it has been dead for so long that questions are shared. In short outages, the most frequent,
    /// every one counts.
    fn is_long_dead(&self, now: Instant) -> bool {
        self.silence(now) >= LivenessConfig::TRAFFIC_PAUSE
    }

    /// Sets whether this end hears nothing on any path, so that it asks ever less often, also while data
    /// moves.
    pub fn set_alone(&mut self, now: Instant, alone: bool) {
        if alone != self.alone_since.is_some() {
            self.alone_since = alone.then_some(now);
        }
    }

    /// Asks as often as at the beginning of the silence: something has changed.
    pub fn probe_anew(&mut self, now: Instant) {
        if let Some(at) = &mut self.alone_since {
            (*at, self.last_heartbeat) = (now, None);
        }
    }

    /// How long the path has been silent, if it is dead. Packets that arrive now and then, which do not
    /// suffice to revive it, change nothing: the peer may hear nothing here.
    fn silence(&self, now: Instant) -> Duration {
        match self.state {
            State::Alive { .. } => Duration::ZERO,
            State::Dead { silent_since, .. } => now.saturating_duration_since(silent_since),
        }
    }

    /// The interval of heartbeats on a dead path: longer with the silence. Data that moves could use a path
    /// beside one that works as soon as it is back; otherwise nobody waits for it, or other probes ask, too.
    /// An end whose peer finds the return answers the peer's heartbeats.
    fn dead_interval(&self, now: Instant) -> Duration {
        let is_dense = self.is_dense(now);
        let least = if is_dense { self.intervals.dense } else { self.config.min_dead_interval };
        let alone = self.alone_for(now);
        let silence = alone.unwrap_or_else(|| self.silence(now));
        if self.is_left_to_others(now) && (alone.is_some() || !is_dense) {
            return NEVER;
        }
        if is_dense && alone.is_none() && !self.config.peer_finds_return {
            return longest_pause_after_long(silence, least, self.config.max_dead_interval);
        }
        // Beside a path that works the binding of a NAT has to live; alone, packets of full size ask as well.
        probe_pause(silence, least, self.config.metered && alone.is_some())
    }

    /// How long this end has heard nothing on any path, since it last had a reason to ask anew.
    pub fn alone_for(&self, now: Instant) -> Option<Duration> {
        self.alone_since.map(|alone| now.saturating_duration_since(alone.max(self.last_arrival)))
    }

    /// Heartbeats become dense, if they are not. Returns whether they were not.
    fn begin_dense(&mut self, now: Instant) -> bool {
        let begins = !self.is_dense(now);
        if begins {
            self.dense_since = now;
            self.silences = RecentSilences::new(now);
            // Questions of the idle time were not repeated.
            self.awaited_ack.iter_mut().for_each(AwaitedAck::reset);
        }
        begins
    }

    /// The peer reported that data moves there, which makes heartbeats dense until `until`.
    pub fn on_peer_traffic(&mut self, now: Instant, until: Instant) {
        self.begin_dense(now);
        self.peer_traffic_until = Some(until);
    }

    /// Sets the smoothed round-trip time, its variation and the share of lost packets (0 to 1).
    pub fn set_measurements(&mut self, rtt: Duration, rtt_var: Duration, loss: f64) {
        self.rtt = rtt;
        self.rtt_var = rtt_var;
        self.loss = loss.clamp(0.0, 1.0);
        self.update_intervals();
    }

    /// Something arrived on this path. Returns whether that may make something due.
    pub fn on_received(&mut self, now: Instant) -> bool {
        let apart = now.saturating_duration_since(self.last_received);
        if let State::Dead { arrivals, .. } = &mut self.state
            && self.carrier
        {
            if apart > MAX_ARRIVAL_GAP {
                *arrivals = 1;
            } else if apart >= MIN_ARRIVAL_GAP || *arrivals == 0 {
                *arrivals += 1;
            } else {
                return true;
            }
            let arrivals = *arrivals;
            self.reason = StateReason::Probing;
            tracing::debug!(
                target: LIVENESS,
                arrivals,
                needed = self.required_arrivals(now),
                silence = ?apart,
                "a packet arrived on a dead path"
            );
        }
        // How long the path was dead says nothing about how long it is silent while it works.
        if self.is_alive() {
            self.silences.note(now, apart);
        }
        self.restart_silence(now);
        self.last_arrival = self.last_arrival.max(now);
        !self.is_alive() || !self.was_heard
    }

    /// The kernel reports that the link has a carrier, or has none.
    pub fn on_carrier(&mut self, now: Instant, up: bool) {
        if self.carrier == up {
            return;
        }
        self.carrier = up;
        self.awaited_ack.iter_mut().for_each(AwaitedAck::reset);
        if up {
            self.last_heartbeat = None;
            self.reason = StateReason::Probing;
            tracing::debug!(
                target: LIVENESS,
                needed = self.required_arrivals(now),
                "the link has a carrier again: probing the path"
            );
        } else {
            self.reason = StateReason::NoCarrier;
            self.record_death(now);
            tracing::debug!(
                target: LIVENESS,
                silence = ?now.saturating_duration_since(self.last_received),
                "the link lost its carrier: the path is dead"
            );
        }
        self.state = State::Dead { since: now, silent_since: now, arrivals: 0 };
    }

    /// This process got no processor for a while: silence in that time proves nothing.
    pub fn on_local_stall(&mut self, now: Instant) {
        self.restart_silence(now);
    }

    /// Replaces the configuration.
    pub fn set_config(&mut self, now: Instant, config: LivenessConfig) {
        self.config = config;
        self.update_intervals();
        // The peer's heartbeats in flight still follow the old intervals.
        self.restart_silence(now);
    }

    /// Takes the next heartbeat of the idle time before it is due, to leave together with one on another
    /// path: then a device wakes once for all. Returns whether to send one.
    pub fn take_early_heartbeat(&mut self, now: Instant) -> bool {
        let may = self.carrier && self.is_alive() && !self.is_dense(now);
        let early = self.config.idle_interval / EARLY_IDLE_DIVISOR;
        let takes = may && now + early >= self.next_heartbeat(now);
        if takes {
            self.last_heartbeat = Some(now);
        }
        takes
    }

    /// A packet was sent on the path that asks as a heartbeat does.
    pub fn on_heartbeat_sent(&mut self, now: Instant) {
        self.last_heartbeat = Some(now);
    }

    /// Whether a heartbeat has left less than half a pause ago on a path that has been dead for long.
    pub fn has_just_probed(&self, now: Instant) -> bool {
        self.is_long_dead(now) && self.last_heartbeat.is_some_and(|at| now < at + self.interval(now) / 2)
    }

    /// Makes the next heartbeat due at once.
    pub fn send_heartbeat_now(&mut self) {
        self.last_heartbeat = None;
    }

    /// Ends dense heartbeats at once, because the path is to carry no data.
    pub fn end_dense_heartbeats(&mut self) {
        (self.last_traffic, self.peer_traffic_until) = (None, None);
    }

    /// Whether heartbeats are dense.
    pub fn is_dense(&self, now: Instant) -> bool {
        self.last_traffic.is_some_and(|moved| now < moved + self.config.dense_duration)
            || self.peer_traffic_until.is_some_and(|until| now < until)
    }

    /// Whether the kernel reports a carrier.
    pub fn has_carrier(&self) -> bool {
        self.carrier
    }

    /// Whether the path is dead and something arrived on it in the last 600 ms.
    pub fn is_probing(&self, now: Instant) -> bool {
        matches!(self.state, State::Dead { arrivals, .. } if arrivals > 0)
            && now < self.last_received + MAX_ARRIVAL_GAP
    }

    /// When something last arrived, or silence last began to count anew.
    pub fn last_received(&self) -> Instant {
        self.last_received
    }

    /// When something last arrived; when the path was made, if nothing has.
    pub fn last_arrival(&self) -> Instant {
        self.last_arrival
    }

    /// How many heartbeats are missing, while they are dense.
    pub fn missed(&self, now: Instant) -> u32 {
        now.saturating_duration_since(self.last_received).div_duration_f64(self.intervals.dense) as u32
    }

    /// Whether nothing has arrived for a quarter of the silence limit, in which acknowledgements of steady
    /// traffic would have arrived. This does not mean death.
    pub fn is_quiet(&self, now: Instant) -> bool {
        now > self.last_received
            && now.saturating_duration_since(self.last_received) > self.silence_limit() / 4
    }

    /// How long the path may be silent while dense heartbeats are expected, a round trip included.
    pub fn silence_limit(&self) -> Duration {
        (self.rtt + self.intervals.max_gap).max(self.config.min_silence)
    }

    /// The interval on the only path while it is dead: longer with each heartbeat that is not acknowledged,
    /// as probe timeouts are (RFC 9002 §6.2.1), and never shorter than a round trip. An end that is only slow
    /// has to work off its backlog of heartbeats.
    fn retry_interval(&self, now: Instant, awaited: AwaitedAck) -> Duration {
        let most = match self.config.peer_finds_return {
            true => self.config.max_dead_interval,
            false => self.dead_interval(now).max(self.config.min_dead_interval),
        };
        self.intervals.dense.saturating_mul(1 << awaited.retries).min(most).max(self.rtt)
    }

    fn interval(&self, now: Instant) -> Duration {
        if let (State::Dead { .. }, Some(awaited)) = (self.state, self.awaited_ack) {
            return self.retry_interval(now, awaited);
        }
        match self.state {
            // The peer needs arrivals to revive the path, too. It may be that none of them gets there, so as
            // many as are needed leave in one pause between questions.
            State::Dead { arrivals, .. } if arrivals > 0 && self.last_received + MAX_ARRIVAL_GAP > now => {
                let interval = self.dead_interval(now) / self.required_arrivals(now);
                interval.clamp(self.config.min_dense_interval, MAX_ARRIVAL_GAP / 2)
            }
            State::Alive { .. } if self.awaited_ack.is_some() && self.is_dense(now) => {
                awaited_ack::ACKED_HEARTBEAT_INTERVAL
            }
            State::Dead { .. } => self.dead_interval(now),
            State::Alive { .. } if self.is_dense(now) => self.intervals.dense,
            State::Alive { .. } => self.config.idle_interval,
        }
    }

    fn record_death(&mut self, now: Instant) {
        let State::Alive { since } = self.state else { return };
        let lately = self.last_death.filter(|(at, _)| {
            now.saturating_duration_since(since) < MIN_STEADY
                && now.saturating_duration_since(*at) < FLAPPING_WINDOW
        });
        self.last_death = Some((now, lately.map_or(0, |(_, times)| times + 1)));
    }

    /// Arrivals after which the path is alive again: more for a flapping path beside one that works, so that
    /// it loses less data when it dies again. The only path carries the data whatever it is called.
    fn required_arrivals(&self, now: Instant) -> u32 {
        if self.awaited_ack.is_some() {
            return self.config.min_arrivals;
        }
        let lately = self.last_death.filter(|(at, _)| now.saturating_duration_since(*at) < FLAPPING_WINDOW);
        self.config.min_arrivals << lately.map_or(0, |(_, times)| times.min(MAX_DOUBLINGS))
    }

    fn required_misses(&self) -> u32 {
        if self.loss < 0.005 {
            return self.config.min_missed;
        }
        let run = (LN_IMPROBABLE / self.loss.min(0.95).ln()).ceil() as u32;
        run.clamp(self.config.min_missed, MAX_MISSED)
    }

    /// When silence means death; `None` while no dense heartbeats may be expected.
    fn deadline(&self, now: Instant) -> Option<Instant> {
        match &self.awaited_ack {
            None => self.silence_deadlines(now).map(|deadlines| deadlines.death),
            Some(awaited) if self.is_alive() && self.is_dense(now) => {
                awaited.dead_at(&self.intervals.ack_timeouts, self.rtt + self.config.min_silence)
            }
            Some(_) => None,
        }
    }

    /// When silence on one of several paths is reported and means death; `None` while no dense heartbeats may
    /// be expected.
    fn silence_deadlines(&self, now: Instant) -> Option<SilenceDeadlines> {
        if self.awaited_ack.is_some() || !self.is_alive() || !self.is_dense(now) {
            return None;
        }
        // The peer learns one one-way delay later that data moves, and its heartbeats take another one.
        let expected = self.last_received.max(self.dense_since + self.rtt + self.intervals.dense);
        let Intervals { dense, max_gap, .. } = self.intervals;
        let after = |gap: Duration| expected + gap.max(self.config.min_silence);
        let longest = self.silences.longest();
        let report = longest.map(|longest| after((max_gap - dense).max(longest + dense)));
        Some(SilenceDeadlines { report, death: after(max_gap) })
    }

    /// Whether reports to the peer say that packets arrive on the path.
    pub fn is_heard(&self, now: Instant) -> bool {
        self.is_heard_until(now, self.silence_deadlines(now))
    }

    fn is_heard_until(&self, now: Instant, deadlines: Option<SilenceDeadlines>) -> bool {
        self.is_alive() && deadlines.and_then(|deadlines| deadlines.report).is_none_or(|at| now < at)
    }

    /// When [`Self::poll`] wants to be called next.
    pub fn poll_timeout(&self, now: Instant) -> Option<Instant> {
        if !self.carrier {
            return None;
        }
        let next = self.next_heartbeat(now);
        // No deadline of the silence is earlier than this: the usual case, in which packets arrive.
        let silent_at = self.last_received + self.intervals.max_gap.saturating_sub(self.intervals.dense);
        let is_steady = self.awaited_ack.is_none() && self.is_alive() && self.was_heard;
        if is_steady && now.max(next) < silent_at {
            return Some(next);
        }
        let deadlines = self.silence_deadlines(now);
        if self.is_heard_until(now, deadlines) != self.was_heard {
            return Some(now);
        }
        let Some(SilenceDeadlines { report, death }) = deadlines else {
            return Some(self.deadline(now).map_or(next, |deadline| deadline.min(next)));
        };
        Some(report.filter(|_| self.was_heard).map_or(death, |report| report.min(death)).min(next))
    }

    /// When the next heartbeat is due.
    fn next_heartbeat(&self, now: Instant) -> Instant {
        let Some(last) = self.last_heartbeat else { return now };
        let awaited = self.awaited_ack.filter(|_| self.is_alive() && self.is_dense(now));
        let sent = awaited.and_then(|awaited| awaited.sent);
        let next = sent.map_or(last, |sent| sent.max(last)) + self.interval(now);
        // More heartbeats than the verdict needs would not be acknowledged before it.
        let unproven = awaited.filter(|awaited| awaited.retries + 1 < self.intervals.misses);
        let probe = unproven.and_then(|awaited| awaited.probe_at(&self.intervals.ack_timeouts));
        probe.map_or(next, |probe| next.min(probe.max(last + self.intervals.dense)))
    }

    /// Updates the path's state.
    pub fn poll(&mut self, now: Instant) -> LivenessUpdate {
        let mut verdict = LivenessUpdate::default();
        match self.state {
            State::Alive { .. } => {
                if self.deadline(now).is_some_and(|deadline| now >= deadline) {
                    self.reason = StateReason::Silent { missed: self.intervals.misses };
                    self.record_death(now);
                    tracing::debug!(
                        target: LIVENESS,
                        silence = ?now.saturating_duration_since(self.last_received),
                        limit = ?self.intervals.max_gap.max(self.config.min_silence),
                        only_path = ?self.awaited_ack.map(|_| self.intervals.ack_timeouts),
                        interval = ?self.intervals.dense,
                        misses = self.intervals.misses,
                        rtt = ?self.rtt,
                        rtt_var = ?self.rtt_var,
                        loss = self.loss,
                        "silence exceeds the limit: the path is dead"
                    );
                    self.state = State::Dead { since: now, silent_since: self.last_arrival, arrivals: 0 };
                    verdict.change = Some(LivenessChange::Dead);
                }
            }
            State::Dead { arrivals, since, .. }
                if self.carrier && arrivals >= self.required_arrivals(now) =>
            {
                tracing::debug!(
                    target: LIVENESS,
                    arrivals,
                    needed = self.required_arrivals(now),
                    dead_for = ?now.saturating_duration_since(since),
                    "enough packets arrived: the path is alive"
                );
                self.reason = StateReason::Works;
                self.state = State::Alive { since: now };
                verdict.change = Some(LivenessChange::Alive);
            }
            State::Dead { .. } => {}
        }
        let is_heard = self.is_heard(now);
        verdict.report = std::mem::replace(&mut self.was_heard, is_heard) != is_heard;
        if verdict.report {
            let silence = now.saturating_duration_since(self.last_received);
            tracing::debug!(target: LIVENESS, is_heard, ?silence, "the report about the path changes");
        }
        if self.carrier && now >= self.next_heartbeat(now) {
            self.last_heartbeat = Some(now);
            self.awaited_ack.iter_mut().for_each(AwaitedAck::on_heartbeat);
            verdict.send_heartbeat = true;
            tracing::trace!(target: LIVENESS, interval = ?self.interval(now), "a heartbeat is due");
        }
        verdict
    }
}
