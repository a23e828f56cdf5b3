//! Whether a path works, judged by what arrives on it.
//!
//! Both ends send heartbeats on every path: densely while data moves, rarely otherwise. An end
//! that hears nothing for a few of the heartbeats it may expect calls the path dead; a few
//! arrivals later it trusts it again. Acknowledgements say nothing here, since they may come over
//! another path, and a carrier that is up says nothing either: some links never lose it.

use std::fmt;

use mpvpn_types::{Duration, Instant, target::LIVENESS};

/// The times that liveness works with.
#[derive(Clone, Debug)]
pub struct LivenessConfig {
    /// Heartbeats stay dense this long after data last moved.
    pub dense_duration: Duration,
    /// The least interval of dense heartbeats; between this and `dense_max` it is one round trip.
    pub min_dense_interval: Duration,
    /// The greatest interval of dense heartbeats.
    pub max_dense_interval: Duration,
    /// The interval while no data moves: short enough to keep a NAT binding (RFC 4787 §4.3).
    pub idle_interval: Duration,
    /// The interval on a path that died lately, while no data moves.
    pub recent_death_interval: Duration,
    /// The interval on a path that has been dead for long and is not missed.
    pub long_dead_interval: Duration,
    /// Heartbeats that must be missing on a path without loss.
    pub min_missed: u32,
    /// Arrivals that make a dead path trusted again.
    pub min_arrivals: u32,
    /// A silence that is shorter than this proves nothing, a round trip included.
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
    /// Heartbeats stay dense this long after data last moved, on every link.
    pub const DENSE_DURATION: Duration = Duration::from_secs(2);
    /// The greatest interval of dense heartbeats on a link whose packets cost nothing. What goes by the interval of
    /// heartbeats is a multiple of it.
    pub const MAX_DENSE_INTERVAL: Duration = Duration::from_millis(100);

    /// For a link on which every packet costs: half as many heartbeats while data moves, and otherwise
    /// as few as the NAT bindings that are found in practice allow (RFC 4787 REQ-5 asks for two minutes,
    /// many devices keep 30 s).
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
    /// For packets inside TCP, which hands out nothing until what was lost before is there: it may repeat that after
    /// its shortest timeout only (RFC 6298 §2.4 as Linux has it, 200 ms), and again.
    pub fn inside_tcp(self) -> Self {
        Self { min_silence: Duration::from_millis(700), ..self }
    }
}

/// How long a path counts as "died lately".
const LATELY: Duration = Duration::from_secs(20);
/// A path that was alive for less than this before it died comes and goes, and is trusted later …
const STEADY: Duration = Duration::from_secs(5);
/// … for so long.
const FLAPPING: Duration = Duration::from_secs(30);
/// So much later at most, in doublings: heartbeats of a quarter to a whole second.
const MOST_DOUBLINGS: u32 = 2;
/// Arrivals closer together than this are one arrival: a burst proves no more than a packet.
const DISTINCT: Duration = Duration::from_millis(8);
/// Arrivals further apart than this do not add up to a path that works.
const WINDOW: Duration = Duration::from_millis(600);
/// No measured loss makes more misses than this necessary.
const MAX_MISSES: u32 = 12;
/// How improbable a run of losses must be before it means death: ln(1e-5).
const LN_IMPROBABLE: f64 = -11.5;

/// Why a path is in the state that it is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateReason {
    /// It works.
    Works,
    /// It was just opened.
    Opening,
    /// The kernel reports that the link has no carrier, no address or is gone.
    NoCarrier,
    /// Nothing arrived for so many heartbeats.
    Silent {
        /// Heartbeats that did not come.
        missed: u32,
    },
    /// The link is back, or something arrived again, and it is being tried.
    Probing,
}

impl fmt::Display for StateReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Works => Ok(()),
            Self::Opening => f.write_str("opening"),
            Self::NoCarrier => f.write_str("no carrier"),
            Self::Silent { missed } => write!(f, "{missed} heartbeats lost"),
            Self::Probing => f.write_str("heard again, being tried"),
        }
    }
}

/// What changed about a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LivenessChange {
    /// It may carry data.
    Alive,
    /// It must not carry data.
    Dead,
}

/// What to do about a path now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LivenessUpdate {
    /// Send a heartbeat on it.
    pub send_heartbeat: bool,
    /// It changed.
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
    /// Nothing before this moment counts as silence.
    heard: Instant,
    beat: Option<Instant>,
    moved: Option<Instant>,
    /// Until then heartbeats are dense because data moves at the far end.
    far: Option<Instant>,
    dense_since: Instant,
    /// When it died last, and how often shortly after it had died before.
    died: Option<(Instant, u32)>,
    rtt: Duration,
    rtt_var: Duration,
    loss: f64,
}

impl Liveness {
    /// A path that was just validated: it counts as alive.
    pub fn new(config: LivenessConfig, now: Instant) -> Self {
        Self {
            config,
            state: State::Alive { since: now },
            reason: StateReason::Works,
            carrier: true,
            heard: now,
            beat: None,
            moved: None,
            far: None,
            dense_since: now,
            died: None,
            rtt: Duration::from_millis(100),
            rtt_var: Duration::ZERO,
            loss: 0.0,
        }
    }

    /// Whether the path may carry data.
    pub fn is_alive(&self) -> bool {
        matches!(self.state, State::Alive { .. })
    }

    /// Why it is in its state.
    pub fn reason(&self) -> StateReason {
        self.reason
    }

    /// Since when it is dead.
    pub fn dead_since(&self) -> Option<Instant> {
        match self.state {
            State::Alive { .. } => None,
            State::Dead { since, .. } => Some(since),
        }
    }

    /// Data of the tunnel moved, in any direction, on any path of the connection.
    pub fn on_traffic(&mut self, now: Instant) {
        if !self.is_dense(now) {
            self.dense_since = now;
        }
        self.moved = Some(now);
    }

    /// The far end said that data moves there, which makes heartbeats dense until `until`; or that none does.
    pub fn on_peer_traffic(&mut self, now: Instant, until: Option<Instant>) {
        if until.is_some() && !self.is_dense(now) {
            self.dense_since = now;
        }
        self.far = until;
    }

    /// Sets what was measured: smoothed round-trip time, its variation, share of packets lost (0 to 1).
    pub fn set_measurements(&mut self, rtt: Duration, rtt_var: Duration, loss: f64) {
        self.rtt = rtt;
        self.rtt_var = rtt_var;
        self.loss = loss.clamp(0.0, 1.0);
    }

    /// Something arrived on this path.
    pub fn on_received(&mut self, now: Instant) {
        let apart = now.saturating_duration_since(self.heard);
        if let State::Dead { arrivals, .. } = &mut self.state
            && self.carrier
        {
            if apart > WINDOW {
                *arrivals = 1;
            } else if apart >= DISTINCT || *arrivals == 0 {
                *arrivals += 1;
            } else {
                return;
            }
            let arrivals = *arrivals;
            self.reason = StateReason::Probing;
            tracing::debug!(
                target: LIVENESS,
                arrivals,
                needed = self.good(now),
                silence = ?apart,
                "heard on a dead path"
            );
        }
        self.heard = self.heard.max(now);
    }

    /// The kernel says that the link can or cannot carry packets.
    pub fn on_carrier(&mut self, now: Instant, up: bool) {
        if self.carrier == up {
            return;
        }
        self.carrier = up;
        if up {
            self.beat = None;
            self.reason = StateReason::Probing;
            tracing::debug!(
                target: LIVENESS,
                needed = self.good(now),
                "the link has a carrier again: the path is tried"
            );
        } else {
            self.reason = StateReason::NoCarrier;
            self.note_death(now);
            tracing::debug!(
                target: LIVENESS,
                silence = ?now.saturating_duration_since(self.heard),
                "the link lost its carrier: the path is dead"
            );
        }
        self.state = State::Dead { since: now, arrivals: 0 };
    }

    /// This end did not run for a while: what silence there was proves nothing.
    pub fn on_local_stall(&mut self, now: Instant) {
        self.heard = self.heard.max(now);
    }

    /// Goes on with other times.
    pub fn set_config(&mut self, now: Instant, config: LivenessConfig) {
        self.config = config;
        // Heartbeats of the far end that are on their way follow the old times.
        self.heard = self.heard.max(now);
    }

    /// The next heartbeat is due at once.
    pub fn send_heartbeat_now(&mut self) {
        self.beat = None;
    }

    /// No data is meant to move here from now on: heartbeats become rare at once.
    pub fn end_dense_heartbeats(&mut self) {
        (self.moved, self.far) = (None, None);
    }

    /// Whether heartbeats are dense.
    pub fn is_dense(&self, now: Instant) -> bool {
        self.moved.is_some_and(|moved| now.saturating_duration_since(moved) < self.config.dense_duration)
            || self.far.is_some_and(|until| now < until)
    }

    /// Whether the kernel says that the link can carry packets.
    pub fn has_carrier(&self) -> bool {
        self.carrier
    }

    /// Whether something was heard lately on a path that is not trusted.
    pub fn is_probing(&self, now: Instant) -> bool {
        matches!(self.state, State::Dead { arrivals, .. } if arrivals > 0) && now < self.heard + WINDOW
    }

    /// When something arrived last.
    pub fn last_received(&self) -> Instant {
        self.heard
    }

    /// Whether less was heard than acknowledgements of steady traffic would be. That proves nothing.
    pub fn is_quiet(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.heard) > self.silence_limit() / 4
    }

    /// How long a silence of dense heartbeats proves nothing, a round trip included.
    pub fn silence_limit(&self) -> Duration {
        (self.rtt + self.run()).max(self.config.min_silence)
    }

    /// How long heartbeats may be missing after the time of the next one.
    fn run(&self) -> Duration {
        self.dense() * self.misses() + self.rtt_var.min(self.dense())
    }

    /// The interval of dense heartbeats.
    fn dense(&self) -> Duration {
        self.rtt.clamp(self.config.min_dense_interval, self.config.max_dense_interval)
    }

    fn interval(&self, now: Instant) -> Duration {
        match self.state {
            // The far end needs arrivals as much as this one does.
            State::Dead { arrivals, .. } if arrivals > 0 && self.heard + WINDOW > now => {
                self.config.min_dense_interval
            }
            // On a dead path too: the far end may hear this one well, and must not think otherwise.
            _ if self.is_dense(now) => self.dense(),
            State::Alive { .. } => self.config.idle_interval,
            State::Dead { since, .. } if now.saturating_duration_since(since) < LATELY => {
                self.config.recent_death_interval
            }
            State::Dead { .. } => self.config.long_dead_interval,
        }
    }

    fn note_death(&mut self, now: Instant) {
        let State::Alive { since } = self.state else { return };
        let lately = self.died.filter(|(at, _)| {
            now.saturating_duration_since(since) < STEADY && now.saturating_duration_since(*at) < FLAPPING
        });
        self.died = Some((now, lately.map_or(0, |(_, times)| times + 1)));
    }

    /// Arrivals that make it trusted again: more if it comes and goes, so that it takes nothing with it when
    /// it goes again. Where nothing better works, it is used all the same.
    fn good(&self, now: Instant) -> u32 {
        let lately = self.died.filter(|(at, _)| now.saturating_duration_since(*at) < FLAPPING);
        self.config.min_arrivals << lately.map_or(0, |(_, times)| times.min(MOST_DOUBLINGS))
    }

    fn misses(&self) -> u32 {
        if self.loss < 0.005 {
            return self.config.min_missed;
        }
        let run = (LN_IMPROBABLE / self.loss.min(0.95).ln()).ceil() as u32;
        run.clamp(self.config.min_missed, MAX_MISSES)
    }

    /// When silence means death; `None` while no dense heartbeats may be expected.
    fn deadline(&self, now: Instant) -> Option<Instant> {
        if !self.is_alive() || !self.is_dense(now) {
            return None;
        }
        // The far end learns a one-way delay late that data moves, and answers as late.
        let expected = self.heard.max(self.dense_since + self.rtt + self.dense());
        Some(expected + self.run().max(self.config.min_silence))
    }

    /// When [`Self::poll`] wants to be called next.
    pub fn poll_timeout(&self, now: Instant) -> Option<Instant> {
        if !self.carrier {
            return None;
        }
        let beat = self.beat.map_or(now, |beat| beat + self.interval(now));
        Some(self.deadline(now).map_or(beat, |deadline| deadline.min(beat)))
    }

    /// Judges the path.
    pub fn poll(&mut self, now: Instant) -> LivenessUpdate {
        let mut verdict = LivenessUpdate::default();
        match self.state {
            State::Alive { .. } => {
                if self.deadline(now).is_some_and(|deadline| now >= deadline) {
                    self.reason = StateReason::Silent { missed: self.misses() };
                    self.note_death(now);
                    tracing::debug!(
                        target: LIVENESS,
                        silence = ?now.saturating_duration_since(self.heard),
                        limit = ?self.run().max(self.config.min_silence),
                        interval = ?self.dense(),
                        misses = self.misses(),
                        rtt = ?self.rtt,
                        rtt_var = ?self.rtt_var,
                        loss = self.loss,
                        "silent for too long: the path is dead"
                    );
                    self.state = State::Dead { since: now, arrivals: 0 };
                    verdict.change = Some(LivenessChange::Dead);
                }
            }
            State::Dead { arrivals, since } if self.carrier && arrivals >= self.good(now) => {
                tracing::debug!(
                    target: LIVENESS,
                    arrivals,
                    needed = self.good(now),
                    dead_for = ?now.saturating_duration_since(since),
                    "enough arrived: the path works"
                );
                self.reason = StateReason::Works;
                self.state = State::Alive { since: now };
                verdict.change = Some(LivenessChange::Alive);
            }
            State::Dead { .. } => {}
        }
        if self.carrier && self.beat.is_none_or(|beat| now >= beat + self.interval(now)) {
            self.beat = Some(now);
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
        wire: Vec<(Instant, usize)>,
        /// Whether what end `i` sends arrives.
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
            Self { now, ends, wire: Vec::new(), open: [true; 2], beats: [0; 2], changes: Vec::new() }
        }

        fn run(&mut self, time: Duration, busy: bool) {
            let end = self.now + time;
            while self.now < end {
                self.now += MS;
                let now = self.now;
                let arrived: Vec<_> = self.wire.extract_if(.., |(at, _)| *at <= now).collect();
                for (_, to) in arrived {
                    self.ends[to].on_received(now);
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
                        if self.open[i] {
                            self.wire.push((now + 12 * MS, 1 - i));
                        }
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
    fn a_path_that_comes_and_goes_is_trusted_later_but_never_given_up() {
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
    fn data_at_the_far_end_makes_heartbeats_dense_while_it_says_so() {
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
    fn one_direction_lost_is_seen_by_the_end_that_hears_nothing() {
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
    fn a_lossy_path_gets_more_patience() {
        let now = Instant::now();
        let mut path = Liveness::new(LivenessConfig::default(), now);
        path.set_measurements(25 * MS, MS, 0.0);
        assert_eq!(path.misses(), 3);
        path.set_measurements(25 * MS, MS, 0.1);
        assert_eq!(path.misses(), 5);
        path.set_measurements(25 * MS, MS, 0.3);
        assert_eq!(path.misses(), 10);
        path.set_measurements(25 * MS, MS, 1.0);
        assert_eq!(path.misses(), MAX_MISSES);
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
    fn time_that_this_end_slept_is_forgiven() {
        let mut pair = Pair::new();
        pair.run(Duration::from_secs(3), true);
        let later = pair.now + 500 * MS;
        pair.ends[0].on_traffic(later);
        pair.ends[0].on_local_stall(later);
        assert_eq!(pair.ends[0].poll(later).change, None);
    }
}
