//! How many paths a link gets (option `pipes = "auto"`): more than one helps where an operator limits each
//! UDP session.
//!
//! In: the bytes that the link has carried, the time, and hints from its address and DNS name. Out: how many
//! paths are open, how many of them carry data, and why.
//!
//! One more path is tested while the link is busy without a break: it carries data in every second turn, so
//! that changes of the demand affect turns with and without it alike. It stays if the link carries clearly
//! more with it in turn after turn. Always holds: a path is added or removed only after seconds of
//! measurement; a path is unused for a while before it is closed, so that nothing is in flight on it; after a
//! test that changed nothing the next one waits twice as long.

use std::{
    collections::VecDeque,
    net::{IpAddr, Ipv4Addr},
};

use derive_more::Display;
use mpvpn_types::{Duration, Instant, target::PIPES};
use tracing::{debug, trace};

/// Paths of a link at most. More: path IDs and sockets; fewer: a stricter limit per session is not made up
/// for. Chosen (docs/design/pipes.md).
const MAX_PATHS: u8 = 8;
/// Bytes/s (1 Mbit/s) from which a direction is busy. Lower: tests on idle links; higher: slow links are
/// never tested.
pub const MIN_BUSY_RATE: f64 = 125_000.0;
/// Consecutive samples (one a second) that show whether a link is busy without a break. Fewer: tests during
/// bursts; more: tests are rare.
const SAMPLES: usize = 5;
/// Samples further apart than this are not consecutive: one may be missing, as the caller samples once a
/// second.
const MAX_SAMPLE_GAP: Duration = Duration::from_secs(3);
/// How long congestion control gets to find the new rate before a turn is measured: this, and so many round
/// trips, and at most [`MAX_SETTLING_TIME`]. Shorter: the previous rate is measured; longer: tests take
/// longer.
const SETTLING_TIME: Duration = Duration::from_secs(2);
const SETTLING_ROUNDS: u32 = 10;
const MAX_SETTLING_TIME: Duration = Duration::from_secs(10);
/// How long each turn is measured. Shorter: noise; longer: tests take longer. Chosen.
const MEASURING_TIME: Duration = Duration::from_secs(3);
/// Pairs of turns after which a clear case is decided, and after which every case is. Fewer: noise decides;
/// more: tests take longer.
const CLEAR_PAIRS: usize = 2;
const ALL_PAIRS: usize = 5;
/// The gain that one more path needs to stay: this share of what a path carries, and this share of what the
/// link carries. Lower: useless paths stay; higher: useful ones are closed. Chosen.
const MIN_GAIN_OF_PATH: f64 = 0.25;
const MIN_GAIN_OF_LINK: f64 = 0.1;
/// How long a path is unused before it is closed. Shorter: packets in flight are lost.
const DRAIN_TIME: Duration = Duration::from_secs(3);
/// The pause after the first test that changed nothing; it doubles each time. Shorter: tests cost rate;
/// longer: a change of the operator's limit is found late.
const FIRST_PAUSE: Duration = Duration::from_secs(60);
const MAX_PAUSE: Duration = Duration::from_secs(4 * 3600);
/// Rates above this many times those of the last test make its result obsolete. Lower: more tests; higher: a
/// faster link keeps too few paths. Chosen.
const OBSOLETE_RATE_RATIO: f64 = 1.5;

const ORDINALS: [&str; 9] = ["", "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth"];

/// A hint, before any measurement, that the operator limits the rate of each UDP session.
#[derive(Clone, Debug, Display, PartialEq, Eq)]
pub enum SessionLimitHint {
    /// The link has a shared address, of a network behind carrier-grade NAT (RFC 6598).
    #[display("its address is one behind a carrier's address translation")]
    CarrierGradeNat,
    /// The DNS name of the link's public address belongs to an operator that is known for such limits.
    #[display("the operator's name is {_0}")]
    OperatorName(String),
}

impl SessionLimitHint {
    /// The hint that an address of the link gives.
    pub fn from_address(address: IpAddr) -> Option<Self> {
        const BLOCK: u32 = Ipv4Addr::new(100, 64, 0, 0).to_bits() >> 22;
        matches!(address, IpAddr::V4(ip) if ip.to_bits() >> 22 == BLOCK).then_some(Self::CarrierGradeNat)
    }

    /// The hint that the DNS name of the link's public address gives: Starlink's names are
    /// `customer.POP.pop.starlinkisp.net`.
    pub fn from_dns_name(name: &str) -> Option<Self> {
        const OPERATOR: &str = "starlinkisp.net";
        let name = name.trim_end_matches('.').to_ascii_lowercase();
        let under = name.strip_suffix(OPERATOR)?;
        // The owner of the address chooses the name: only printable names of valid length count (RFC 1035
        // §2.3.4).
        let plain = name.len() <= 253 && name.bytes().all(|byte| byte.is_ascii_graphic());
        (plain && (under.is_empty() || under.ends_with('.'))).then_some(Self::OperatorName(name))
    }
}

/// Byte counters of a link, both since the same fixed moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkBytes {
    /// To the server.
    pub up: u64,
    /// From the server.
    pub down: u64,
}

impl LinkBytes {
    /// Bytes/s, up and down.
    fn rates(self, before: Self, passed: Duration) -> Rates {
        let rate =
            |now: u64, before: u64| now.saturating_sub(before) as f64 / passed.as_secs_f64().max(0.001);
        [rate(self.up, before.up), rate(self.down, before.down)]
    }
}

/// How many paths a link has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathCount {
    /// Paths that exist.
    pub open: u8,
    /// How many of them carry data: the first ones.
    pub used: u8,
}

impl PathCount {
    /// All of them carry data.
    pub fn all(count: u8) -> Self {
        Self { open: count, used: count }
    }
}

/// Bytes/s, up and down.
type Rates = [f64; 2];

/// Decides how many paths one link has.
#[derive(Clone, Debug)]
pub struct PathCountController {
    /// The name of the link, for log lines.
    link: String,
    hint: Option<SessionLimitHint>,
    /// The number of paths that the last test confirmed.
    chosen: u8,
    state: State,
    next: NextTest,
    pause: Duration,
    last: Option<(Instant, LinkBytes)>,
    recent: VecDeque<Rates>,
    last_result: Option<TestResult>,
}

#[derive(Clone, Debug)]
enum State {
    /// No test starts before this moment.
    Resting(Option<Instant>),
    Testing(PathTest),
    /// Until this moment one more path is open, and unused; then no test starts for the given pause.
    Draining(Instant, Duration),
}

/// The kind of the next test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NextTest {
    /// Whether the link carries more with one more path.
    More,
    /// Whether the link still carries more with its last path.
    Fewer,
}

#[derive(Clone, Debug)]
struct PathTest {
    /// The number of the tested path, counted from 1; it carries data in every second turn.
    path: u8,
    settling_time: Duration,
    /// When this turn began, and the counters when its measurement began.
    since: Instant,
    mark: Option<(Instant, LinkBytes)>,
    /// The rates of finished turns, alternately without and with the path.
    turns: Vec<Rates>,
}

/// The result of the last test that was decided.
#[derive(Clone, Copy, Debug)]
struct TestResult {
    path: u8,
    /// The additional rate with the path, as a share of the rate without it.
    gain: f64,
    /// The highest rates during the test.
    most: Rates,
}

impl PathCountController {
    /// For a link with one path.
    pub fn new() -> Self {
        Self {
            link: String::new(),
            hint: None,
            chosen: 1,
            state: State::Resting(None),
            next: NextTest::More,
            pause: FIRST_PAUSE,
            last: None,
            recent: VecDeque::with_capacity(SAMPLES),
            last_result: None,
        }
    }

    /// Sets the name of the link for log lines.
    #[must_use]
    pub fn with_link_name(self, link: &str) -> Self {
        Self { link: link.to_owned(), ..self }
    }

    /// Takes a hint. If nothing was measured yet, the link has two paths from now on, and the first test is
    /// whether the second one helps.
    pub fn set_hint(&mut self, hint: SessionLimitHint) {
        let nothing_known = self.last_result.is_none() && !self.is_testing();
        if self.hint.is_none() && self.chosen == 1 && nothing_known {
            (self.chosen, self.next) = (2, NextTest::Fewer);
        }
        // A name says more than a block of addresses.
        if (hint != SessionLimitHint::CarrierGradeNat || self.hint.is_none())
            && self.hint.as_ref() != Some(&hint)
        {
            debug!(target: PIPES, link = self.link, %hint, chosen = self.chosen, "hint taken");
            self.hint = Some(hint);
        }
    }

    /// Takes a sample of the link's byte counters; to be called about once a second. `may_test`: the link may
    /// be tested now. `rtt`: its round-trip time.
    pub fn update(&mut self, now: Instant, carried: LinkBytes, rtt: Duration, may_test: bool) {
        self.add_sample(now, carried);
        match &mut self.state {
            State::Resting(until) => {
                let rests = until.is_some_and(|until| now < until);
                if may_test && self.is_busy() && !rests {
                    self.begin(now, rtt);
                }
            }
            State::Testing(test) => {
                if test.advance(now, carried) {
                    self.conclude(now);
                }
            }
            State::Draining(until, pause) if now >= *until => {
                let reason = "nothing is in flight on the unused path any more";
                debug!(target: PIPES, link = self.link, chosen = self.chosen, ?pause, reason, "path closed");
                self.state = State::Resting(Some(now + *pause));
            }
            State::Draining(..) => {}
        }
        self.shorten_pause_if_obsolete(now);
    }

    /// How many paths the link is to have now.
    pub fn count(&self) -> PathCount {
        match &self.state {
            State::Resting(_) => PathCount::all(self.chosen),
            State::Testing(test) => PathCount { open: test.path, used: test.used() },
            State::Draining(..) => PathCount { open: self.chosen + 1, used: self.chosen },
        }
    }

    /// The number of paths that the last test confirmed.
    pub fn chosen(&self) -> u8 {
        self.chosen
    }

    /// Whether a test is running.
    pub fn is_testing(&self) -> bool {
        matches!(self.state, State::Testing(_))
    }

    /// Why the link has this number of paths, for people.
    pub fn explanation(&self) -> String {
        let why = match (&self.last_result, &self.hint) {
            (Some(TestResult { path, gain, .. }), _) => {
                let article = match *path {
                    path if path <= self.chosen => "the",
                    8 => "an",
                    _ => "a",
                };
                let percent = (gain * 100.0).round();
                let brought = if percent < 1.0 { "nothing".to_owned() } else { format!("{percent:.0} %") };
                format!("{article} {} one brought {brought}", ORDINALS[usize::from(*path)])
            }
            (None, Some(hint)) => hint.to_string(),
            (None, None) => "the link was not full for long enough to try a second one".to_owned(),
        };
        let State::Testing(test) = &self.state else { return why };
        let tried = ORDINALS[usize::from(test.path)];
        match self.last_result.is_some() || self.hint.is_some() {
            true => format!("{why}; whether the {tried} one brings more is being tried"),
            false => format!("whether a {tried} one brings more is being tried"),
        }
    }

    /// Adds the rates since the last sample.
    fn add_sample(&mut self, now: Instant, carried: LinkBytes) {
        let before = self.last.replace((now, carried));
        let Some((at, before)) = before else { return };
        let passed = now.saturating_duration_since(at);
        if passed > MAX_SAMPLE_GAP {
            self.recent.clear();
        }
        if self.recent.len() == SAMPLES {
            self.recent.pop_front();
        }
        self.recent.push_back(carried.rates(before, passed));
    }

    /// The lowest rate of the last samples, if they vary so little that the link limits the rate, not pauses
    /// of the demand.
    fn steady_rate(&self, direction: usize) -> Option<f64> {
        let rates = || self.recent.iter().map(|rates| rates[direction]);
        let (least, most) = (rates().fold(f64::MAX, f64::min), rates().fold(0.0, f64::max));
        (self.recent.len() == SAMPLES && least >= MIN_BUSY_RATE && least >= most / 2.0).then_some(least)
    }

    fn is_busy(&self) -> bool {
        [0, 1].into_iter().any(|direction| self.steady_rate(direction).is_some())
    }

    /// Shortens the pause if the link carries clearly more than in the last test, whose result is obsolete
    /// then.
    fn shorten_pause_if_obsolete(&mut self, now: Instant) {
        let (State::Resting(Some(until)), Some(last_result)) = (&self.state, &self.last_result) else {
            return;
        };
        let higher = |direction: usize| {
            self.steady_rate(direction).is_some_and(|rate| {
                rate > OBSOLETE_RATE_RATIO * last_result.most[direction].max(MIN_BUSY_RATE)
            })
        };
        if *until > now + FIRST_PAUSE && (higher(0) || higher(1)) {
            let [up, down] = last_result.most;
            let reason = "the link carries clearly more than in the last test";
            debug!(target: PIPES, link = self.link, up, down, pause = ?FIRST_PAUSE, reason, "next test comes sooner");
            (self.state, self.next) = (State::Resting(Some(now + FIRST_PAUSE)), NextTest::More);
        }
    }

    fn begin(&mut self, now: Instant, rtt: Duration) {
        let path = match self.next {
            NextTest::Fewer => self.chosen,
            NextTest::More => self.chosen + 1,
        };
        if path > MAX_PATHS {
            self.next = NextTest::Fewer;
            let pause = self.next_pause();
            debug!(target: PIPES, link = self.link, chosen = self.chosen, ?pause, reason = "the link has the maximum number of paths", "no test");
            self.state = State::Resting(Some(now + pause));
            return;
        }
        let settling_time = (SETTLING_TIME + rtt * SETTLING_ROUNDS).min(MAX_SETTLING_TIME);
        let reason = match self.next {
            NextTest::More => "the link is busy without a break: testing one more path",
            NextTest::Fewer => "the link is busy without a break: testing whether the last path still helps",
        };
        debug!(
            target: PIPES, link = self.link, path, chosen = self.chosen, ?rtt, ?settling_time,
            up = self.steady_rate(0), down = self.steady_rate(1), reason, "test started"
        );
        self.state =
            State::Testing(PathTest { path, settling_time, since: now, mark: None, turns: Vec::new() });
    }

    /// A turn is over: decides the test if enough is known.
    fn conclude(&mut self, now: Instant) {
        let State::Testing(test) = &self.state else { return };
        let (path, verdict) = (test.path, test.verdict());
        if let Some([up, down]) = test.turns.last() {
            let used = test.turns.len() % 2 == 0;
            trace!(
                target: PIPES, link = self.link, path, turn = test.turns.len(), used, up, down, ?verdict,
                "turn measured"
            );
        }
        let (gain, most, stays) = match verdict {
            Verdict::Undecided => return,
            // Without demand there is nothing to compare.
            Verdict::Void => {
                let reason = "the demand ended";
                debug!(
                    target: PIPES, link = self.link, path, chosen = self.chosen, pause = ?FIRST_PAUSE, reason,
                    "trial ended"
                );
                self.end_test(now, path, FIRST_PAUSE);
                return;
            }
            Verdict::Kept(gain, most) => (gain, most, true),
            Verdict::Removed(gain, most) => (gain, most, false),
        };
        // The hint was right; the gain of a further path is not known yet.
        let first = self.last_result.replace(TestResult { path, gain, most }).is_none();
        let before = std::mem::replace(&mut self.chosen, if stays { path } else { path - 1 });
        let reason =
            if stays { "the link carries clearly more with the path" } else { "the path adds too little" };
        debug!(
            target: PIPES, link = self.link, path, stays, gain, up = most[0], down = most[1], from = before,
            to = self.chosen, reason, "trial ended"
        );
        if self.chosen != before {
            // The number has changed: test in the same direction at once.
            self.pause = FIRST_PAUSE;
            self.recent.clear();
            if stays {
                (self.state, self.next) = (State::Resting(None), NextTest::More);
            } else if self.chosen > 1 {
                self.next = NextTest::Fewer;
                self.state = State::Draining(now + DRAIN_TIME, Duration::ZERO);
            } else {
                self.next = NextTest::More;
                self.state = State::Draining(now + DRAIN_TIME, self.pause);
            }
            return;
        }
        self.next =
            if self.next == NextTest::More && self.chosen > 1 { NextTest::Fewer } else { NextTest::More };
        if first && stays {
            self.state = State::Resting(None);
        } else {
            let pause = self.next_pause();
            self.end_test(now, path, pause);
        }
    }

    /// Ends a test; the tested path is drained and closed unless it belongs to the confirmed ones.
    fn end_test(&mut self, now: Instant, path: u8, pause: Duration) {
        self.state = match path > self.chosen {
            true => State::Draining(now + DRAIN_TIME, pause),
            false => State::Resting(Some(now + pause)),
        };
    }

    /// The pause to make now; the next one is twice as long, up to [`MAX_PAUSE`].
    fn next_pause(&mut self) -> Duration {
        let next = (self.pause * 2).min(MAX_PAUSE);
        std::mem::replace(&mut self.pause, next)
    }
}

impl Default for PathCountController {
    fn default() -> Self {
        Self::new()
    }
}

/// The result of the turns so far; with the gain and the highest rates once decided.
#[derive(Clone, Copy, Debug)]
enum Verdict {
    Undecided,
    Void,
    Kept(f64, Rates),
    Removed(f64, Rates),
}

impl PathTest {
    /// Paths that carry data in this turn.
    fn used(&self) -> u8 {
        if self.turns.len().is_multiple_of(2) { self.path - 1 } else { self.path }
    }

    /// Takes a sample; returns whether a turn is over.
    fn advance(&mut self, now: Instant, carried: LinkBytes) -> bool {
        let Some((at, before)) = self.mark else {
            if now >= self.since + self.settling_time {
                self.mark = Some((now, carried));
            }
            return false;
        };
        let passed = now.saturating_duration_since(at);
        if passed < MEASURING_TIME {
            return false;
        }
        self.turns.push(carried.rates(before, passed));
        (self.since, self.mark) = (now, None);
        true
    }

    fn verdict(&self) -> Verdict {
        if self.turns.last().is_some_and(|rates| rates.iter().all(|rate| *rate < MIN_BUSY_RATE)) {
            return Verdict::Void;
        }
        let pairs = self.turns.len() / 2;
        if !self.turns.len().is_multiple_of(2) || pairs < CLEAR_PAIRS {
            return Verdict::Undecided;
        }
        let others = f64::from(self.path - 1);
        let needed = (MIN_GAIN_OF_PATH / others).max(MIN_GAIN_OF_LINK);
        let most =
            [0, 1].map(|direction| self.turns.iter().map(|rates| rates[direction]).fold(0.0, f64::max));
        let directions = [0, 1].into_iter().filter_map(|direction| self.gain(direction));
        let (gain, better) = directions.max_by(|a, b| a.0.total_cmp(&b.0)).unwrap_or((0.0, 0));
        // One pair out of five may come out wrong by chance; with fewer pairs none may.
        let enough = if pairs < ALL_PAIRS { better == pairs } else { better + 1 >= pairs };
        let needed_now = if pairs == CLEAR_PAIRS { 2.0 * needed } else { needed };
        match gain {
            gain if gain >= needed_now && enough => Verdict::Kept(gain, most),
            gain if gain >= needed / 2.0 && pairs < ALL_PAIRS => Verdict::Undecided,
            gain => Verdict::Removed(gain, most),
        }
    }

    /// The gain of the path in a direction that was busy in all turns, and in how many pairs the turn with
    /// the path was better.
    fn gain(&self, direction: usize) -> Option<(f64, usize)> {
        if self.turns.iter().any(|rates| rates[direction] < MIN_BUSY_RATE) {
            return None;
        }
        let sum =
            |with: usize| self.turns.iter().skip(with).step_by(2).map(|rates| rates[direction]).sum::<f64>();
        let better =
            self.turns.chunks_exact(2).filter(|pair| pair[1][direction] > pair[0][direction]).count();
        Some((sum(1) / sum(0) - 1.0, better))
    }
}

#[cfg(test)]
mod tests;
