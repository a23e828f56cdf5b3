//! Whether a path works, judged by the packets that arrive on it.
//!
//! Both ends send heartbeats on every path: dense ones (about one a round trip) while data moves, rare ones otherwise. An
//! end that misses several dense heartbeats in a row declares the path dead; after a few arrivals the path is alive again.
//! Acknowledgements prove nothing, since they may come over another path; nor does a carrier, which some links never lose. The
//! only path of a connection is judged by [`answers`] instead.
//!
//! In: arrivals, traffic, carrier changes, measurements, the time. Out: when to send a heartbeat, and changes between alive
//! and dead. Always holds: silence counts only while dense heartbeats or answers are expected; without a carrier nothing is
//! sent.

mod answers;

use std::fmt;

use mpvpn_types::{Duration, Instant, target::LIVENESS};

use answers::{AnswerLimits, Answers};

/// Intervals and limits of liveness.
#[derive(Clone, Debug)]
pub struct LivenessConfig {
    /// How long heartbeats stay dense after data last moved.
    pub dense_duration: Duration,
    /// The shortest interval of dense heartbeats; it is one round trip between this and `max_dense_interval`.
    pub min_dense_interval: Duration,
    /// The longest interval of dense heartbeats.
    pub max_dense_interval: Duration,
    /// The interval while no data moves: short enough to keep a NAT binding (RFC 4787 §4.3).
    pub idle_interval: Duration,
    /// The interval on a path that died less than 20 s ago, while no data moves.
    pub recent_death_interval: Duration,
    /// The interval on a path that has been dead for longer, while no data moves.
    pub long_dead_interval: Duration,
    /// Consecutive heartbeats that must be missing on a path without loss; more with loss.
    pub min_missed: u32,
    /// Arrivals after which a dead path is alive; more if it died repeatedly.
    pub min_arrivals: u32,
    /// A silence shorter than this never means death.
    pub min_silence: Duration,
}

impl Default for LivenessConfig {
    fn default() -> Self {
        Self {
            dense_duration: Self::DENSE_DURATION,
            min_dense_interval: Duration::from_millis(25),
            max_dense_interval: Self::MAX_DENSE_INTERVAL,
            idle_interval: Duration::from_secs(15),
            recent_death_interval: Duration::from_millis(100),
            long_dead_interval: Duration::from_secs(2),
            min_missed: 3,
            min_arrivals: 2,
            min_silence: Duration::ZERO,
        }
    }
}

impl LivenessConfig {
    /// How long heartbeats stay dense after data last moved, on every link. Shorter: a path that dies in a pause is noticed
    /// late; longer: more heartbeats of idle connections. Chosen (docs/design/liveness.md).
    pub const DENSE_DURATION: Duration = Duration::from_secs(2);
    /// The longest interval of dense heartbeats on an unmetered link. Other timers that depend on heartbeats are multiples of
    /// it. Shorter: more packets; longer: a path with a long round trip is declared dead later.
    pub const MAX_DENSE_INTERVAL: Duration = Duration::from_millis(100);

    /// For a metered link: half as many heartbeats while data moves, and otherwise as few as NAT bindings found in practice
    /// allow (RFC 4787 REQ-5 asks for two minutes, many devices keep 30 s).
    pub fn metered() -> Self {
        Self {
            min_dense_interval: Duration::from_millis(50),
            max_dense_interval: Duration::from_millis(200),
            idle_interval: Duration::from_secs(25),
            recent_death_interval: Duration::from_millis(200),
            long_dead_interval: Duration::from_secs(10),
            ..Self::default()
        }
    }
}

impl LivenessConfig {
    /// For packets inside TCP, which delivers nothing while an earlier segment is missing: Linux retransmits after 200 ms at
    /// the soonest (RFC 6298 §2.4 asks for 1 s), and after 400 ms again. Shorter: retransmissions look like death.
    pub fn inside_tcp(self) -> Self {
        Self { min_silence: Duration::from_millis(700), ..self }
    }
}

/// A heartbeat of the idle time may be early by half of its interval: then all paths with the same interval get together. Larger:
/// they stay in groups; smaller: more heartbeats.
const EARLY_IDLE_DIVISOR: u32 = 2;
/// How long a dead path gets the shorter heartbeat interval. Shorter: an outage of this length ends later; longer: more
/// packets on dead paths. Chosen.
const RECENT_DEATH: Duration = Duration::from_secs(20);
/// A path that was alive for less than this before it died is flapping: it needs more arrivals to be alive again …
const MIN_STEADY: Duration = Duration::from_secs(5);
/// … for this long after its last death. Shorter values of both: flapping paths take data down with them more often;
/// longer: a path that works again is used late. Chosen.
const FLAPPING_WINDOW: Duration = Duration::from_secs(30);
/// How often the required arrivals double at most: 2 become 8, heartbeats of 0.2 to 0.8 s. More: slower return; fewer:
/// flapping paths carry data too soon. Chosen.
const MAX_DOUBLINGS: u32 = 2;
/// Arrivals closer together than this count as one, because a burst proves no more than one packet. It is less than the
/// shortest interval of heartbeats (25 ms), so that late ones still count.
const MIN_ARRIVAL_GAP: Duration = Duration::from_millis(8);
/// Arrivals further apart than this are counted anew: six of the longest dense intervals. Shorter: lossy paths stay dead;
/// longer: stray packets revive a path.
const MAX_ARRIVAL_GAP: Duration = Duration::from_millis(600);
/// Consecutive heartbeats that must be missing at most, however much the path loses. More: death of a lossy path is found
/// later; fewer: loss is taken for death. Chosen.
const MAX_MISSED: u32 = 12;
/// The logarithm of the probability below which a run of losses means death: ln(1e-5). Higher: false deaths on lossy paths;
/// lower: true ones are found later. Chosen.
const LN_IMPROBABLE: f64 = -11.5;

/// Why a path is in its state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateReason {
    /// It works.
    Works,
    /// The kernel reports that the link has no carrier or no address, or was removed.
    NoCarrier,
    /// Too many consecutive heartbeats are missing.
    Silent {
        /// Missing heartbeats.
        missed: u32,
    },
    /// The carrier is back, or something arrived again, and more arrivals are awaited.
    Probing,
}

impl fmt::Display for StateReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Works => Ok(()),
            Self::NoCarrier => f.write_str("no carrier"),
            Self::Silent { missed } => write!(f, "{missed} heartbeats lost"),
            Self::Probing => f.write_str("heard again, being tried"),
        }
    }
}

/// A change of a path's liveness.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LivenessChange {
    /// It may carry data.
    Alive,
    /// It must not carry data.
    Dead,
}

/// What [`Liveness::poll`] asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LivenessUpdate {
    /// Send a heartbeat on it.
    pub send_heartbeat: bool,
    /// The path has just died, or is alive again.
    pub change: Option<LivenessChange>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Alive { since: Instant },
    Dead { since: Instant, arrivals: u32 },
}

/// The liveness of one path, at one end.
#[derive(Clone, Debug)]
pub struct Liveness {
    config: LivenessConfig,
    state: State,
    reason: StateReason,
    carrier: bool,
    /// When something last arrived, or silence was last excused.
    last_received: Instant,
    /// When something last arrived.
    last_arrival: Instant,
    last_heartbeat: Option<Instant>,
    last_traffic: Option<Instant>,
    /// Until when heartbeats are dense because data moves at the peer.
    peer_traffic_until: Option<Instant>,
    dense_since: Instant,
    /// When the path last died, and how many deaths before that followed one another closely.
    last_death: Option<(Instant, u32)>,
    rtt: Duration,
    rtt_var: Duration,
    loss: f64,
    intervals: Intervals,
    /// The answers of the peer, if this is the only path of its connection.
    answers: Option<Answers>,
}

/// What follows from configuration and measurements, and is asked for in each iteration.
#[derive(Clone, Copy, Debug)]
struct Intervals {
    /// The interval of dense heartbeats.
    dense: Duration,
    /// How long heartbeats may be missing: the required number of intervals, and the variation of the round-trip time.
    max_gap: Duration,
    answers: AnswerLimits,
}

impl Liveness {
    /// A path that was just validated: it counts as alive.
    pub fn new(config: LivenessConfig, now: Instant) -> Self {
        let mut liveness = Self {
            intervals: Intervals {
                dense: Duration::ZERO,
                max_gap: Duration::ZERO,
                answers: AnswerLimits::default(),
            },
            answers: None,
            config,
            state: State::Alive { since: now },
            reason: StateReason::Works,
            carrier: true,
            last_received: now,
            last_arrival: now,
            last_heartbeat: None,
            last_traffic: None,
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
        let answers = AnswerLimits::new(self.rtt, self.rtt_var, dense, misses);
        self.intervals = Intervals { dense, max_gap, answers };
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

    /// Sets whether the connection has no other path.
    pub fn set_only_path(&mut self, now: Instant, only: bool) {
        if only == self.answers.is_some() {
            return;
        }
        self.answers = only.then(Answers::default);
        // The peer learns a one-way delay later or earlier that heartbeats are dense.
        self.dense_since = now;
    }

    /// Whether [`Self::on_sent`] is of use: the path is the only one, and everything that was sent is answered.
    pub fn is_answered(&self) -> bool {
        self.answers.is_some_and(|answers| !answers.are_awaited())
    }

    /// An ack-eliciting packet was sent on this path. Only needed if [`Self::is_answered`].
    pub fn on_sent(&mut self, now: Instant) {
        if let Some(answers) = &mut self.answers {
            answers.on_sent(now);
        }
    }

    /// Silence so far proves nothing.
    fn excuse_silence(&mut self, now: Instant) {
        self.last_received = self.last_received.max(now);
        self.answers.iter_mut().for_each(Answers::forget);
    }

    /// Data of the tunnel moved, in any direction, on any path of the connection.
    pub fn on_traffic(&mut self, now: Instant) {
        self.begin_dense(now);
        self.last_traffic = Some(now);
    }

    /// Heartbeats become dense, if they are not.
    fn begin_dense(&mut self, now: Instant) {
        if !self.is_dense(now) {
            self.dense_since = now;
            // Questions of the idle time were not repeated.
            self.answers.iter_mut().for_each(Answers::forget);
        }
    }

    /// The peer reported that data moves there, which makes heartbeats dense until `until`; or that none does (`None`).
    pub fn on_peer_traffic(&mut self, now: Instant, until: Option<Instant>) {
        if until.is_some() {
            self.begin_dense(now);
        }
        self.peer_traffic_until = until;
    }

    /// Sets the smoothed round-trip time, its variation and the share of lost packets (0 to 1).
    pub fn set_measurements(&mut self, rtt: Duration, rtt_var: Duration, loss: f64) {
        self.rtt = rtt;
        self.rtt_var = rtt_var;
        self.loss = loss.clamp(0.0, 1.0);
        self.update_intervals();
    }

    /// Something arrived on this path.
    pub fn on_received(&mut self, now: Instant) {
        let apart = now.saturating_duration_since(self.last_received);
        if let State::Dead { arrivals, .. } = &mut self.state
            && self.carrier
        {
            if apart > MAX_ARRIVAL_GAP {
                *arrivals = 1;
            } else if apart >= MIN_ARRIVAL_GAP || *arrivals == 0 {
                *arrivals += 1;
            } else {
                return;
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
        self.excuse_silence(now);
        self.last_arrival = self.last_arrival.max(now);
    }

    /// The kernel reports that the link has a carrier, or has none.
    pub fn on_carrier(&mut self, now: Instant, up: bool) {
        if self.carrier == up {
            return;
        }
        self.carrier = up;
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
        self.state = State::Dead { since: now, arrivals: 0 };
    }

    /// This process got no processor for a while: silence in that time proves nothing.
    pub fn on_local_stall(&mut self, now: Instant) {
        self.excuse_silence(now);
    }

    /// Replaces the configuration.
    pub fn set_config(&mut self, now: Instant, config: LivenessConfig) {
        self.config = config;
        self.update_intervals();
        // The peer's heartbeats in flight still follow the old intervals.
        self.excuse_silence(now);
    }

    /// Takes the next heartbeat of the idle time before it is due, to leave together with one on another path: then a device
    /// wakes once for all. Returns whether to send one.
    pub fn take_early_heartbeat(&mut self, now: Instant) -> bool {
        let may = self.carrier && self.is_alive() && !self.is_dense(now);
        let early = self.config.idle_interval / EARLY_IDLE_DIVISOR;
        let takes = may && now + early >= self.next_heartbeat(now);
        if takes {
            self.last_heartbeat = Some(now);
        }
        takes
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
        self.last_traffic
            .is_some_and(|moved| now.saturating_duration_since(moved) < self.config.dense_duration)
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

    /// When something last arrived, or silence was last excused.
    pub fn last_received(&self) -> Instant {
        self.last_received
    }

    /// When something last arrived; when the path was made, if nothing has.
    pub fn last_arrival(&self) -> Instant {
        self.last_arrival
    }

    /// Whether nothing has arrived for a quarter of the silence limit, in which acknowledgements of steady traffic would
    /// have arrived. This does not mean death.
    pub fn is_quiet(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.last_received) > self.silence_limit() / 4
    }

    /// How long the path may be silent while dense heartbeats are expected, a round trip included.
    pub fn silence_limit(&self) -> Duration {
        (self.rtt + self.intervals.max_gap).max(self.config.min_silence)
    }

    fn interval(&self, now: Instant) -> Duration {
        match self.state {
            // The peer needs arrivals to revive the path, too.
            State::Dead { arrivals, .. } if arrivals > 0 && self.last_received + MAX_ARRIVAL_GAP > now => {
                self.config.min_dense_interval
            }
            State::Alive { .. } if self.answers.is_some() && self.is_dense(now) => answers::CALM_INTERVAL,
            // On a dead path too: the other direction may work, and the peer must not miss heartbeats.
            _ if self.is_dense(now) => self.intervals.dense,
            State::Alive { .. } => self.config.idle_interval,
            State::Dead { since, .. } if now.saturating_duration_since(since) < RECENT_DEATH => {
                self.config.recent_death_interval
            }
            State::Dead { .. } => self.config.long_dead_interval,
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

    /// Arrivals after which the path is alive again: more for a flapping path, so that it loses less data when it dies
    /// again. If no other path works, it is used all the same.
    fn required_arrivals(&self, now: Instant) -> u32 {
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
        if !self.is_alive() || !self.is_dense(now) {
            return None;
        }
        if let Some(answers) = &self.answers {
            return answers.dead_at(&self.intervals.answers, self.rtt + self.config.min_silence);
        }
        // The peer learns one one-way delay later that data moves, and its heartbeats take another one.
        let expected = self.last_received.max(self.dense_since + self.rtt + self.intervals.dense);
        Some(expected + self.intervals.max_gap.max(self.config.min_silence))
    }

    /// When [`Self::poll`] wants to be called next.
    pub fn poll_timeout(&self, now: Instant) -> Option<Instant> {
        if !self.carrier {
            return None;
        }
        let beat = self.next_heartbeat(now);
        Some(self.deadline(now).map_or(beat, |deadline| deadline.min(beat)))
    }

    /// When the next heartbeat is due.
    fn next_heartbeat(&self, now: Instant) -> Instant {
        let Some(last) = self.last_heartbeat else { return now };
        let next = last + self.interval(now);
        let late = self.answers.filter(|_| self.is_alive() && self.is_dense(now));
        let late = late.and_then(|answers| answers.late_at(&self.intervals.answers));
        late.map_or(next, |late| next.min(late.max(last + self.intervals.dense)))
    }

    /// Updates the path's state.
    pub fn poll(&mut self, now: Instant) -> LivenessUpdate {
        let mut verdict = LivenessUpdate::default();
        match self.state {
            State::Alive { .. } => {
                if self.deadline(now).is_some_and(|deadline| now >= deadline) {
                    self.reason = StateReason::Silent { missed: self.required_misses() };
                    self.record_death(now);
                    tracing::debug!(
                        target: LIVENESS,
                        silence = ?now.saturating_duration_since(self.last_received),
                        limit = ?self.intervals.max_gap.max(self.config.min_silence),
                        only_path = ?self.answers.map(|_| self.intervals.answers),
                        interval = ?self.intervals.dense,
                        misses = self.required_misses(),
                        rtt = ?self.rtt,
                        rtt_var = ?self.rtt_var,
                        loss = self.loss,
                        "silence exceeds the limit: the path is dead"
                    );
                    self.state = State::Dead { since: now, arrivals: 0 };
                    verdict.change = Some(LivenessChange::Dead);
                }
            }
            State::Dead { arrivals, since } if self.carrier && arrivals >= self.required_arrivals(now) => {
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
        if self.carrier && now >= self.next_heartbeat(now) {
            self.last_heartbeat = Some(now);
            verdict.send_heartbeat = true;
            tracing::trace!(target: LIVENESS, interval = ?self.interval(now), "a heartbeat is due");
        }
        verdict
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Two ends of a path with 12 ms each way, driven in steps of 1 ms.
    struct Pair {
        now: Instant,
        ends: [Liveness; 2],
        /// When a packet arrives, at which end, and whether that end has to acknowledge it.
        wire: Vec<(Instant, usize, bool)>,
        /// Whether packets are acknowledged over this path, as it is the only one.
        only: bool,
        /// Whether packets of end `i` arrive.
        open: [bool; 2],
        beats: [u32; 2],
        changes: Vec<(Instant, usize, LivenessChange)>,
    }

    impl Pair {
        fn new() -> Self {
            let now = Instant::now();
            let end = Liveness::new(LivenessConfig::default(), now);
            let mut ends = [end.clone(), end];
            for end in &mut ends {
                end.set_measurements(24 * MS, MS, 0.0);
            }
            let (wire, changes) = (Vec::new(), Vec::new());
            Self { now, ends, wire, only: false, open: [true; 2], beats: [0; 2], changes }
        }

        /// A path that is the only one of its connection.
        fn only() -> Self {
            let mut pair = Self { only: true, ..Self::new() };
            pair.ends.iter_mut().for_each(|end| end.set_only_path(pair.now, true));
            pair
        }

        /// The end `from` sends a packet.
        fn send(&mut self, from: usize, eliciting: bool) {
            if eliciting {
                self.ends[from].on_sent(self.now);
            }
            if self.open[from] {
                self.wire.push((self.now + 12 * MS, 1 - from, eliciting && self.only));
            }
        }

        fn run(&mut self, time: Duration, busy: bool) {
            let end = self.now + time;
            while self.now < end {
                self.now += MS;
                let now = self.now;
                let arrived: Vec<_> = self.wire.extract_if(.., |(at, ..)| *at <= now).collect();
                for (_, to, eliciting) in arrived {
                    self.ends[to].on_received(now);
                    if eliciting {
                        self.send(to, false);
                    }
                }
                for i in 0..2 {
                    if busy {
                        self.ends[i].on_traffic(now);
                    }
                    let verdict = self.ends[i].poll(now);
                    if let Some(change) = verdict.change {
                        self.changes.push((now, i, change));
                    }
                    if verdict.send_heartbeat {
                        self.beats[i] += 1;
                        self.send(i, true);
                    }
                }
            }
        }
    }

    #[test]
    fn inside_tcp_a_silence_of_a_timeout_is_no_death_and_a_longer_one_is() {
        let start = Instant::now();
        let mut path = Liveness::new(LivenessConfig::default().inside_tcp(), start);
        path.set_measurements(24 * MS, MS, 0.0);
        let mut died = None;
        for ms in 0..3000u32 {
            let now = start + ms * MS;
            path.on_traffic(now);
            if ms % 25 == 0 && !(300..900).contains(&ms) && ms < 2000 {
                path.on_received(now);
            }
            if path.poll(now).change == Some(LivenessChange::Dead) {
                died = died.or(Some(ms));
            }
        }
        assert!(died.is_some_and(|ms| (2600..2800).contains(&ms)), "{died:?}");
    }

    #[test]
    fn a_silent_path_is_dead_within_100_ms_and_back_within_300() {
        let mut pair = Pair::new();
        pair.run(Duration::from_secs(3), true);
        assert_eq!(pair.changes, [], "a path that works was called dead");
        let cut = pair.now;
        pair.open = [false; 2];
        pair.run(Duration::from_secs(1), true);
        assert_eq!(pair.changes.len(), 2, "{:?}", pair.changes);
        for (at, end, change) in pair.changes.drain(..) {
            assert_eq!(change, LivenessChange::Dead);
            assert!(at - cut <= 100 * MS, "end {end} took {:?}", at - cut);
        }
        let restored = pair.now;
        pair.open = [true; 2];
        pair.run(Duration::from_secs(1), true);
        assert_eq!(pair.changes.len(), 2, "{:?}", pair.changes);
        for (at, end, change) in &pair.changes {
            assert_eq!(*change, LivenessChange::Alive);
            assert!(*at - restored <= 300 * MS, "end {end} took {:?}", *at - restored);
        }
    }

    #[test]
    fn heartbeats_of_idle_paths_leave_together() {
        let start = Instant::now();
        let mut paths = [0, 4, 9].map(|second| {
            let mut path = Liveness::new(LivenessConfig::default(), start);
            path.poll(start + second * 1000 * MS);
            path
        });
        let (mut times, mut heartbeats) = (0, 0);
        for second in 10..130 {
            let now = start + second * 1000 * MS;
            let mut due: Vec<bool> = paths.iter_mut().map(|path| path.poll(now).send_heartbeat).collect();
            if due.contains(&true) {
                for (path, due) in paths.iter_mut().zip(&mut due) {
                    *due |= path.take_early_heartbeat(now);
                }
                times += 1;
                heartbeats += due.iter().filter(|due| **due).count();
            }
        }
        assert!(times <= 9 && heartbeats <= 27, "{heartbeats} heartbeats at {times} times in two minutes");
        let busy = start + 130_000 * MS;
        paths[0].on_traffic(busy);
        assert!(!paths[0].take_early_heartbeat(busy), "dense ones are sent when they are due");
    }

    #[test]
    fn the_only_path_has_a_heartbeat_a_second_while_data_moves() {
        let mut pair = Pair::only();
        pair.run(Duration::from_secs(10), true);
        assert!(pair.beats.iter().all(|beats| *beats <= 11), "{:?} heartbeats in 10 s", pair.beats);
        pair.run(Duration::from_secs(60), false);
        pair.run(Duration::from_secs(5), true);
        assert_eq!(pair.changes, [], "a path that works was called dead");
    }

    #[test]
    fn the_only_path_is_dead_soon_after_data_that_is_not_answered_and_back_within_300_ms() {
        let mut pair = Pair::only();
        pair.run(Duration::from_secs(3), true);
        let cut = pair.now;
        pair.open = [false; 2];
        pair.send(0, true);
        pair.run(Duration::from_secs(2), true);
        let died: Vec<_> = pair.changes.drain(..).map(|(at, end, change)| (end, change, at - cut)).collect();
        let [(0, LivenessChange::Dead, asked), (1, LivenessChange::Dead, silent)] = died[..] else {
            panic!("{died:?}");
        };
        assert!(asked <= 160 * MS, "the end that sends data took {asked:?}");
        assert!(silent <= 1160 * MS, "the other one, with a heartbeat a second, took {silent:?}");
        let restored = pair.now;
        pair.open = [true; 2];
        pair.run(Duration::from_secs(1), true);
        let back = pair.changes.iter().map(|(at, ..)| *at - restored).max();
        assert!(pair.changes.len() == 2 && back.is_some_and(|back| back <= 300 * MS), "{:?}", pair.changes);
    }

    #[test]
    fn a_lost_packet_is_no_death_of_the_only_path() {
        for rtt_ms in [24, 600] {
            let mut pair = Pair::only();
            pair.ends.iter_mut().for_each(|end| end.set_measurements(rtt_ms * MS, MS, 0.0));
            pair.run(Duration::from_secs(3), true);
            pair.open[0] = false;
            pair.send(0, true);
            pair.open[0] = true;
            pair.run(Duration::from_secs(3), true);
            assert_eq!(pair.changes, [], "with {rtt_ms} ms");
        }
    }

    #[test]
    fn a_second_path_makes_heartbeats_dense_and_is_no_death_of_the_first() {
        let mut pair = Pair::only();
        pair.run(Duration::from_secs(3), true);
        // One end learns of it before the other one does.
        pair.ends[0].set_only_path(pair.now, false);
        pair.run(12 * MS, true);
        pair.ends[1].set_only_path(pair.now, false);
        pair.only = false;
        pair.beats = [0; 2];
        pair.run(Duration::from_secs(1), true);
        assert!(pair.beats.iter().all(|beats| *beats >= 30), "{:?} heartbeats in a second", pair.beats);
        assert_eq!(pair.changes, []);
    }

    #[test]
    fn a_flapping_path_is_alive_later_each_time_but_never_given_up() {
        let mut pair = Pair::new();
        pair.run(Duration::from_secs(3), true);
        // A second without any packet, then how long both ends take to trust the path again.
        let flap = |pair: &mut Pair| {
            pair.open = [false; 2];
            pair.run(Duration::from_secs(1), true);
            pair.changes.clear();
            let restored = pair.now;
            pair.open = [true; 2];
            pair.run(Duration::from_secs(1), true);
            pair.changes.iter().map(|(at, ..)| *at - restored).max().expect("back within a second")
        };
        let back: Vec<Duration> = (0..5).map(|_| flap(&mut pair)).collect();
        assert!(back[0] < back[1] && back[1] < back[2] && back[4] <= 400 * MS, "{back:?}");
        pair.run(Duration::from_secs(6), true);
        let later = flap(&mut pair);
        assert!(later <= back[0], "it was steady meanwhile: {later:?}, {back:?}");
    }

    #[test]
    fn traffic_at_the_peer_makes_heartbeats_dense_while_it_reports_it() {
        let mut pair = Pair::new();
        pair.run(Duration::from_secs(20), false);
        pair.beats = [0; 2];
        for _ in 0..10 {
            let now = pair.now;
            for end in &mut pair.ends {
                end.on_peer_traffic(now, Some(now + 300 * MS));
            }
            pair.run(100 * MS, false);
        }
        assert!((35..=45).contains(&pair.beats[0]), "{} heartbeats in a second", pair.beats[0]);
        let now = pair.now;
        for end in &mut pair.ends {
            end.on_peer_traffic(now, None);
        }
        pair.beats = [0; 2];
        pair.run(Duration::from_secs(10), false);
        assert!(pair.beats[0] <= 1, "{} heartbeats after it was over", pair.beats[0]);
        assert_eq!(pair.changes, []);
    }

    #[test]
    fn the_end_that_receives_nothing_notices_the_loss_of_one_direction() {
        let mut pair = Pair::new();
        pair.run(Duration::from_secs(3), true);
        pair.open = [false, true];
        pair.run(Duration::from_secs(1), true);
        let seen: Vec<_> = pair.changes.iter().map(|(_, end, change)| (*end, *change)).collect();
        assert_eq!(seen, [(1, LivenessChange::Dead)]);
    }

    #[test]
    fn heartbeats_are_dense_only_while_data_moves() {
        let mut pair = Pair::new();
        pair.run(Duration::from_secs(10), true);
        let busy = pair.beats[0];
        assert!((300..=400).contains(&busy), "{busy} heartbeats in 10 s of traffic");
        pair.run(Duration::from_secs(3), false);
        pair.beats = [0; 2];
        pair.run(Duration::from_secs(60), false);
        assert!(pair.beats[0] <= 5, "{} heartbeats in an idle minute", pair.beats[0]);
        assert_eq!(pair.changes, [], "idleness was taken for death");
    }

    #[test]
    fn traffic_after_a_long_idle_time_is_no_death() {
        let mut pair = Pair::new();
        pair.run(Duration::from_secs(40), false);
        pair.run(Duration::from_secs(1), true);
        assert_eq!(pair.changes, []);
    }

    #[test]
    fn carrier_loss_is_death_at_once_and_sends_nothing() {
        let mut pair = Pair::new();
        pair.run(Duration::from_secs(3), true);
        let now = pair.now;
        pair.ends[0].on_carrier(now, false);
        assert!(!pair.ends[0].is_alive());
        assert_eq!(pair.ends[0].reason().to_string(), "no carrier");
        pair.beats = [0; 2];
        pair.run(500 * MS, true);
        assert_eq!(pair.beats[0], 0);
        let now = pair.now;
        pair.ends[0].on_carrier(now, true);
        pair.run(300 * MS, true);
        assert!(pair.ends.iter().all(Liveness::is_alive), "not back 300 ms after the carrier");
    }

    #[test]
    fn a_lossy_path_may_miss_more_heartbeats() {
        let now = Instant::now();
        let mut path = Liveness::new(LivenessConfig::default(), now);
        path.set_measurements(25 * MS, MS, 0.0);
        assert_eq!(path.required_misses(), 3);
        path.set_measurements(25 * MS, MS, 0.1);
        assert_eq!(path.required_misses(), 5);
        path.set_measurements(25 * MS, MS, 0.3);
        assert_eq!(path.required_misses(), 10);
        path.set_measurements(25 * MS, MS, 1.0);
        assert_eq!(path.required_misses(), MAX_MISSED);
    }

    #[test]
    fn a_burst_is_one_arrival() {
        let now = Instant::now();
        let mut path = Liveness::new(LivenessConfig::default(), now);
        path.on_carrier(now, false);
        path.on_carrier(now, true);
        for _ in 0..50 {
            path.on_received(now + MS);
        }
        assert_eq!(path.poll(now + MS).change, None);
        path.on_received(now + 20 * MS);
        assert_eq!(path.poll(now + 20 * MS).change, Some(LivenessChange::Alive));
    }

    #[test]
    fn metered_paths_have_fewer_heartbeats_and_are_judged_by_them() {
        let mut pair = Pair::new();
        let now = pair.now;
        for end in &mut pair.ends {
            end.set_config(now, LivenessConfig::metered());
        }
        pair.run(Duration::from_secs(10), true);
        assert!((150..=205).contains(&pair.beats[0]), "{} heartbeats in 10 s of traffic", pair.beats[0]);
        pair.beats = [0; 2];
        pair.ends.iter_mut().for_each(Liveness::end_dense_heartbeats);
        pair.run(Duration::from_secs(100), false);
        assert!(pair.beats[0] <= 4, "{} heartbeats in 100 idle seconds", pair.beats[0]);
        pair.run(Duration::from_secs(3), true);
        assert_eq!(pair.changes, [], "a path that works was called dead");
        let cut = pair.now;
        pair.open = [false; 2];
        pair.run(Duration::from_secs(1), true);
        assert_eq!(pair.changes.len(), 2, "{:?}", pair.changes);
        for (at, end, _) in pair.changes {
            assert!(at - cut <= 300 * MS, "end {end} took {:?}", at - cut);
        }
    }

    #[test]
    fn one_end_may_learn_later_that_a_path_is_metered() {
        for first in 0..2 {
            let mut pair = Pair::new();
            pair.run(Duration::from_secs(3), true);
            for end in [first, 1 - first] {
                let now = pair.now;
                pair.ends[end].set_config(now, LivenessConfig::metered());
                pair.run(200 * MS, true);
            }
            for end in [first, 1 - first] {
                let now = pair.now;
                pair.ends[end].set_config(now, LivenessConfig::default());
                pair.run(200 * MS, true);
            }
            assert_eq!(pair.changes, [], "a path that works was called dead");
        }
    }

    #[test]
    fn silence_during_a_local_stall_is_excused() {
        let mut pair = Pair::new();
        pair.run(Duration::from_secs(3), true);
        let later = pair.now + 500 * MS;
        pair.ends[0].on_traffic(later);
        pair.ends[0].on_local_stall(later);
        assert_eq!(pair.ends[0].poll(later).change, None);
    }
}
