//! How many pipes a link is to have, where that has to be found out.
//!
//! In: what the link has carried, time, and what its address or the operator's name for it suggest. Out: how many pipes
//! are open, how many of them carry data, and why.
//!
//! A pipe is tried while the link is busy without a break: it is opened, and used and left unused in turns, so that what
//! the demand does by itself shows up on both sides. It stays if the link carries clearly more with it, turn after turn.
//! Always holds: between two pipes of a verdict lie seconds of measurement; a pipe is unused for a while before it is
//! closed, so nothing is on the way there any more; what was found in vain is tried again ever more seldom.

use std::{
    collections::VecDeque,
    fmt,
    net::{IpAddr, Ipv4Addr},
};

use mpvpn_types::{Duration, Instant, target::PIPES};
use tracing::{debug, trace};

/// Pipes a link at most.
const MOST: u8 = 8;
/// A direction that carries less (bytes/s) is not busy.
const BUSY: f64 = 125_000.0;
/// Looks in a row that show whether a link is busy without a break.
const WINDOW: usize = 5;
/// Looks further apart than this belong to no row.
const GAP: Duration = Duration::from_secs(3);
/// What congestion control gets to find the new rate, and round trips beside that.
const SETTLE: Duration = Duration::from_secs(2);
const SETTLE_ROUNDS: u32 = 10;
const LONGEST_SETTLE: Duration = Duration::from_secs(10);
/// How long each turn is measured.
const MEASURE: Duration = Duration::from_secs(3);
/// Pairs of turns after which a clear case is decided, and every case.
const CLEAR_PAIRS: usize = 2;
const ALL_PAIRS: usize = 5;
/// What one more pipe has to bring: this part of what a pipe carries, and of what the link carries.
const OF_A_PIPE: f64 = 0.25;
const OF_THE_LINK: f64 = 0.1;
/// A pipe that is closed has been unused for this long.
const DRAIN: Duration = Duration::from_secs(3);
/// After a verdict that changes nothing the next trial waits for this long, and each time twice as long.
const FIRST_PAUSE: Duration = Duration::from_secs(60);
const LONGEST_PAUSE: Duration = Duration::from_secs(4 * 3600);
/// What a trial said holds for rates up to so many times those that were seen in it.
const HIGHER: f64 = 1.5;

const ORDINALS: [&str; 9] = ["", "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth"];

/// What suggests that an operator limits each UDP session, before anything was measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SessionLimitHint {
    /// The link has an address of the block for networks behind a carrier's address translation (RFC 6598).
    CarrierGradeNat,
    /// The operator's name for the address that the server sees is of one who is known for it.
    OperatorName(String),
}

impl SessionLimitHint {
    /// What an address of the link itself suggests.
    pub fn from_address(address: IpAddr) -> Option<Self> {
        const BLOCK: u32 = Ipv4Addr::new(100, 64, 0, 0).to_bits() >> 22;
        matches!(address, IpAddr::V4(ip) if ip.to_bits() >> 22 == BLOCK).then_some(Self::CarrierGradeNat)
    }

    /// What the name suggests that the DNS has for the link's public address: Starlink names its customers
    /// `customer.POP.pop.starlinkisp.net`.
    pub fn from_dns_name(name: &str) -> Option<Self> {
        const OPERATOR: &str = "starlinkisp.net";
        let name = name.trim_end_matches('.').to_ascii_lowercase();
        let under = name.strip_suffix(OPERATOR)?;
        // It comes from whoever has the address; longer ones the DNS has not (RFC 1035 §2.3.4).
        let plain = name.len() <= 253 && name.bytes().all(|byte| byte.is_ascii_graphic());
        (plain && (under.is_empty() || under.ends_with('.'))).then_some(Self::OperatorName(name))
    }
}

impl fmt::Display for SessionLimitHint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::CarrierGradeNat => f.write_str("its address is one behind a carrier's address translation"),
            Self::OperatorName(name) => write!(f, "the operator's name is {name}"),
        }
    }
}

/// Bytes that a link has carried since some moment in the past, which stays the same.
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

/// How many pipes a link has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathCount {
    /// Those that exist.
    pub open: u8,
    /// Those of them that carry data: the first ones.
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

/// Decides about the pipes of one link.
#[derive(Clone, Debug)]
pub struct PathCountController {
    /// The name of the link, in events.
    link: String,
    hint: Option<SessionLimitHint>,
    /// The number that was found to be right.
    settled: u8,
    state: State,
    next: Step,
    pause: Duration,
    last: Option<(Instant, LinkBytes)>,
    recent: VecDeque<Rates>,
    finding: Option<Finding>,
}

#[derive(Clone, Debug)]
enum State {
    /// Until this moment nothing is tried.
    Resting(Option<Instant>),
    Trying(Trial),
    /// Until this moment one more pipe is open, and unused; then nothing is tried for the pause.
    Draining(Instant, Duration),
}

/// What is tried next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// Whether one more pipe brings something.
    More,
    /// Whether the last one still does.
    Fewer,
}

#[derive(Clone, Debug)]
struct Trial {
    /// The pipe that is used in every second turn, counted from 1.
    pipe: u8,
    settle: Duration,
    /// The begin of this turn, and what was carried when its measurement began.
    since: Instant,
    mark: Option<(Instant, LinkBytes)>,
    /// Of the turns that are over: without and with it by turns.
    turns: Vec<Rates>,
}

/// What the last trial that came to a verdict found.
#[derive(Clone, Copy, Debug)]
struct Finding {
    pipe: u8,
    /// What it brought, as a share of what was carried without.
    gain: f64,
    /// The most that was carried in it.
    most: Rates,
}

impl PathCountController {
    /// For a link with one pipe.
    pub fn new() -> Self {
        Self {
            link: String::new(),
            hint: None,
            settled: 1,
            state: State::Resting(None),
            next: Step::More,
            pause: FIRST_PAUSE,
            last: None,
            recent: VecDeque::with_capacity(WINDOW),
            finding: None,
        }
    }

    /// The same for the link of this name, which events about it have.
    #[must_use]
    pub fn with_link_name(self, link: &str) -> Self {
        Self { link: link.to_owned(), ..self }
    }

    /// Takes a hint. Where nothing was measured yet there are two pipes from now on, and it is tried first whether the
    /// second one brings something.
    pub fn set_hint(&mut self, hint: SessionLimitHint) {
        let nothing_known = self.finding.is_none() && !self.is_testing();
        if self.hint.is_none() && self.settled == 1 && nothing_known {
            (self.settled, self.next) = (2, Step::Fewer);
        }
        // A name says more than a block of addresses.
        if (hint != SessionLimitHint::CarrierGradeNat || self.hint.is_none())
            && self.hint.as_ref() != Some(&hint)
        {
            debug!(target: PIPES, link = self.link, %hint, settled = self.settled, "hint taken");
            self.hint = Some(hint);
        }
    }

    /// Takes what the link has carried until now; to be called about once a second. `may_try`: it is used as far as it
    /// goes, and nothing else is tried meanwhile. `rtt`: its round trip.
    pub fn update(&mut self, now: Instant, carried: LinkBytes, rtt: Duration, may_try: bool) {
        self.note(now, carried);
        match &mut self.state {
            State::Resting(until) => {
                let rests = until.is_some_and(|until| now < until);
                if may_try && self.is_busy() && !rests {
                    self.begin(now, rtt);
                }
            }
            State::Trying(trial) => {
                if trial.advance(now, carried) {
                    self.conclude(now);
                }
            }
            State::Draining(until, pause) if now >= *until => {
                let reason = "nothing is on the way on the unused pipe any more";
                debug!(target: PIPES, link = self.link, settled = self.settled, ?pause, reason, "pipe closed");
                self.state = State::Resting(Some(now + *pause));
            }
            State::Draining(..) => {}
        }
        self.rest_less(now);
    }

    /// How many pipes there are to be now.
    pub fn count(&self) -> PathCount {
        match &self.state {
            State::Resting(_) => PathCount::all(self.settled),
            State::Trying(trial) => PathCount { open: trial.pipe, used: trial.used() },
            State::Draining(..) => PathCount { open: self.settled + 1, used: self.settled },
        }
    }

    /// The number that was found to be right until now.
    pub fn chosen(&self) -> u8 {
        self.settled
    }

    /// Whether a pipe is used and left unused in turns.
    pub fn is_testing(&self) -> bool {
        matches!(self.state, State::Trying(_))
    }

    /// Why there are as many as there are, for people.
    pub fn explanation(&self) -> String {
        let why = match (&self.finding, &self.hint) {
            (Some(Finding { pipe, gain, .. }), _) => {
                let article = match *pipe {
                    pipe if pipe <= self.settled => "the",
                    8 => "an",
                    _ => "a",
                };
                let percent = (gain * 100.0).round();
                let brought = if percent < 1.0 { "nothing".to_owned() } else { format!("{percent:.0} %") };
                format!("{article} {} one brought {brought}", ORDINALS[usize::from(*pipe)])
            }
            (None, Some(hint)) => hint.to_string(),
            (None, None) => "the link was not full for long enough to try a second one".to_owned(),
        };
        let State::Trying(trial) = &self.state else { return why };
        let tried = ORDINALS[usize::from(trial.pipe)];
        match self.finding.is_some() || self.hint.is_some() {
            true => format!("{why}; whether the {tried} one brings more is being tried"),
            false => format!("whether a {tried} one brings more is being tried"),
        }
    }

    /// Notes the rates since the last look.
    fn note(&mut self, now: Instant, carried: LinkBytes) {
        let before = self.last.replace((now, carried));
        let Some((at, before)) = before else { return };
        let passed = now.saturating_duration_since(at);
        if passed > GAP {
            self.recent.clear();
        }
        if self.recent.len() == WINDOW {
            self.recent.pop_front();
        }
        self.recent.push_back(carried.rates(before, passed));
    }

    /// The least of the last looks, where these show that something else than the demand's own pauses limits the rate.
    fn steady(&self, way: usize) -> Option<f64> {
        let rates = || self.recent.iter().map(|rates| rates[way]);
        let (least, most) = (rates().fold(f64::MAX, f64::min), rates().fold(0.0, f64::max));
        (self.recent.len() == WINDOW && least >= BUSY && least >= most / 2.0).then_some(least)
    }

    fn is_busy(&self) -> bool {
        [0, 1].into_iter().any(|way| self.steady(way).is_some())
    }

    /// Where clearly more is carried than in the last trial, that says nothing any more.
    fn rest_less(&mut self, now: Instant) {
        let (State::Resting(Some(until)), Some(finding)) = (&self.state, &self.finding) else { return };
        let higher =
            |way: usize| self.steady(way).is_some_and(|rate| rate > HIGHER * finding.most[way].max(BUSY));
        if *until > now + FIRST_PAUSE && (higher(0) || higher(1)) {
            let [up, down] = finding.most;
            let reason = "clearly more is carried than in the last trial";
            debug!(target: PIPES, link = self.link, up, down, pause = ?FIRST_PAUSE, reason, "next trial comes sooner");
            (self.state, self.next) = (State::Resting(Some(now + FIRST_PAUSE)), Step::More);
        }
    }

    fn begin(&mut self, now: Instant, rtt: Duration) {
        let pipe = match self.next {
            Step::Fewer => self.settled,
            Step::More => self.settled + 1,
        };
        if pipe > MOST {
            self.next = Step::Fewer;
            let pause = self.longer_pause();
            debug!(target: PIPES, link = self.link, settled = self.settled, ?pause, reason = "there are as many as may be", "no trial");
            self.state = State::Resting(Some(now + pause));
            return;
        }
        let settle = (SETTLE + rtt * SETTLE_ROUNDS).min(LONGEST_SETTLE);
        let reason = match self.next {
            Step::More => "the link is busy without a break: whether one more brings something",
            Step::Fewer => "the link is busy without a break: whether the last one still brings something",
        };
        debug!(
            target: PIPES, link = self.link, pipe, settled = self.settled, ?rtt, ?settle,
            up = self.steady(0), down = self.steady(1), reason, "trial started"
        );
        self.state = State::Trying(Trial { pipe, settle, since: now, mark: None, turns: Vec::new() });
    }

    /// A turn is over: decides what can be decided.
    fn conclude(&mut self, now: Instant) {
        let State::Trying(trial) = &self.state else { return };
        let (pipe, verdict) = (trial.pipe, trial.verdict());
        if let Some([up, down]) = trial.turns.last() {
            let used = trial.turns.len() % 2 == 0;
            trace!(target: PIPES, link = self.link, pipe, turn = trial.turns.len(), used, up, down, ?verdict, "turn measured");
        }
        let (gain, most, stays) = match verdict {
            Verdict::Open => return,
            // The demand is gone, and with it what could be compared.
            Verdict::Void => {
                let reason = "the demand ended";
                debug!(target: PIPES, link = self.link, pipe, settled = self.settled, pause = ?FIRST_PAUSE, reason, "trial ended");
                self.leave(now, pipe, FIRST_PAUSE);
                return;
            }
            Verdict::Stays(gain, most) => (gain, most, true),
            Verdict::Goes(gain, most) => (gain, most, false),
        };
        // What a hint promised is true, but nobody knows yet what the next pipe would bring.
        let first = self.finding.replace(Finding { pipe, gain, most }).is_none();
        let before = std::mem::replace(&mut self.settled, if stays { pipe } else { pipe - 1 });
        let reason = if stays { "the link carries clearly more with it" } else { "it brings too little" };
        debug!(
            target: PIPES, link = self.link, pipe, stays, gain, up = most[0], down = most[1], from = before,
            to = self.settled, reason, "trial ended"
        );
        if self.settled != before {
            // Things are not as they were: go on in this direction at once.
            self.pause = FIRST_PAUSE;
            self.recent.clear();
            if stays {
                (self.state, self.next) = (State::Resting(None), Step::More);
            } else if self.settled > 1 {
                self.next = Step::Fewer;
                self.state = State::Draining(now + DRAIN, Duration::ZERO);
            } else {
                self.next = Step::More;
                self.state = State::Draining(now + DRAIN, self.pause);
            }
            return;
        }
        self.next = if self.next == Step::More && self.settled > 1 { Step::Fewer } else { Step::More };
        if first && stays {
            self.state = State::Resting(None);
        } else {
            let pause = self.longer_pause();
            self.leave(now, pipe, pause);
        }
    }

    /// Stops to use a pipe, which is closed later unless it belongs to those that were found right.
    fn leave(&mut self, now: Instant, pipe: u8, pause: Duration) {
        self.state = match pipe > self.settled {
            true => State::Draining(now + DRAIN, pause),
            false => State::Resting(Some(now + pause)),
        };
    }

    /// The pause to make now; the next one is twice as long.
    fn longer_pause(&mut self) -> Duration {
        let next = (self.pause * 2).min(LONGEST_PAUSE);
        std::mem::replace(&mut self.pause, next)
    }
}

impl Default for PathCountController {
    fn default() -> Self {
        Self::new()
    }
}

/// What turns with and without a pipe show: its gain, and the most that was carried.
#[derive(Clone, Copy, Debug)]
enum Verdict {
    Open,
    Void,
    Stays(f64, Rates),
    Goes(f64, Rates),
}

impl Trial {
    /// Pipes that carry data in this turn.
    fn used(&self) -> u8 {
        if self.turns.len().is_multiple_of(2) { self.pipe - 1 } else { self.pipe }
    }

    /// Goes on; whether a turn is over.
    fn advance(&mut self, now: Instant, carried: LinkBytes) -> bool {
        let Some((at, before)) = self.mark else {
            if now >= self.since + self.settle {
                self.mark = Some((now, carried));
            }
            return false;
        };
        let passed = now.saturating_duration_since(at);
        if passed < MEASURE {
            return false;
        }
        self.turns.push(carried.rates(before, passed));
        (self.since, self.mark) = (now, None);
        true
    }

    fn verdict(&self) -> Verdict {
        if self.turns.last().is_some_and(|rates| rates.iter().all(|rate| *rate < BUSY)) {
            return Verdict::Void;
        }
        let pairs = self.turns.len() / 2;
        if !self.turns.len().is_multiple_of(2) || pairs < CLEAR_PAIRS {
            return Verdict::Open;
        }
        let others = f64::from(self.pipe - 1);
        let needed = (OF_A_PIPE / others).max(OF_THE_LINK);
        let most = [0, 1].map(|way| self.turns.iter().map(|rates| rates[way]).fold(0.0, f64::max));
        let ways = [0, 1].into_iter().filter_map(|way| self.gain(way));
        let (gain, better) = ways.max_by(|a, b| a.0.total_cmp(&b.0)).unwrap_or((0.0, 0));
        // By chance one pair may come out wrong of many, but not of a few.
        let enough = if pairs < ALL_PAIRS { better == pairs } else { better + 1 >= pairs };
        let needed_now = if pairs == CLEAR_PAIRS { 2.0 * needed } else { needed };
        match gain {
            gain if gain >= needed_now && enough => Verdict::Stays(gain, most),
            gain if gain >= needed / 2.0 && pairs < ALL_PAIRS => Verdict::Open,
            gain => Verdict::Goes(gain, most),
        }
    }

    /// What the pipe brought in a direction that was busy all the time, and in how many pairs of turns the one with it was
    /// better.
    fn gain(&self, way: usize) -> Option<(f64, usize)> {
        if self.turns.iter().any(|rates| rates[way] < BUSY) {
            return None;
        }
        let sum = |with: usize| self.turns.iter().skip(with).step_by(2).map(|rates| rates[way]).sum::<f64>();
        let better = self.turns.chunks_exact(2).filter(|pair| pair[1][way] > pair[0][way]).count();
        Some((sum(1) / sum(0) - 1.0, better))
    }
}

#[cfg(test)]
mod tests;
