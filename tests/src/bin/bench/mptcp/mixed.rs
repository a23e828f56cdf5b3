//! UDP that is blocked on one of two links from the start, and on both in mid-flow.

use std::{
    thread,
    time::{Duration, Instant, SystemTime},
};

use mpvpn_lab::Direction;
use mpvpn_tests::{
    ping::Ping,
    stage::{LINK, Place, Stage, TUNNEL},
    wall::{Travel, Wall, travels},
};
use serde_json::{Value, json};

use super::{DEVICES, Pair, RIG, mean};
use crate::{
    figure::{Bar, Figure, figure, noted},
    options::Options,
    parts::{missing, name, ways},
    paths::{
        load::{Iperf, Kind, Load, PORT, START_UP, Sink},
        plan::caught,
        play::median,
        talk::Talk,
    },
    report::Outcome,
};

const FLOWS: u32 = 8;
/// Before UDP is blocked, in seconds after the start-up.
const BEFORE: u32 = 5;
/// How long it is blocked, in seconds.
const BLOCKED: u32 = 10;
/// The load goes on for so long after that, in seconds: QUIC must be back by then.
const AFTER: u32 = 35;
/// From one look at the client's status to the next.
const GLANCE: Duration = Duration::from_millis(200);
/// From an answer of the quiet connection to its next question.
const PAUSE: Duration = Duration::from_millis(100);
/// The last answer before a block may be as old.
const MARGIN: Duration = Duration::from_millis(100);
/// Until the rate inside TCP counts, in seconds.
const SETTLED: f64 = 3.0;

const ONE: Wall<'static> = Wall { no_udp: &[1], ..Wall::NONE };
const BOTH: Wall<'static> = Wall { no_udp: &[1, 2], ..Wall::NONE };

/// A block in mid-flow. Times in seconds, rates in Mbit/s.
struct Found {
    before: f64,
    meanwhile: f64,
    after: f64,
    /// The longest time without an answer to pings while UDP was blocked, and from then on.
    silence: [f64; 2],
    /// The longest time in which the flows got nothing.
    stall: f64,
    /// From the end of the block until both links travelled by QUIC alone; endless if not in time.
    quic: f64,
    /// Why connections were lost.
    lost: Vec<String>,
    steps: Vec<f64>,
}

pub(super) fn run(options: &Options) -> Result<Outcome, String> {
    let stage = Stage::two_links();
    let mut outcome = Outcome {
        chapter: format!(
            "\n## UDP blocked on one of two links, and on both in mid-flow\n\nTwice {LINK}, {FLOWS} TCP flows.\n\n\
             | way | QUIC + TCP, Mbit/s | QUIC | TCP | QUIC again | silence, s | nothing for, s | QUIC after, s |\n\
             |---|---:|---:|---:|---:|---:|---:|---:|\n"
        ),
        ..Outcome::default()
    };
    let mut raw = Vec::new();
    for &way in ways(options.quick) {
        let what = format!("UDP blocked on link 1, {FLOWS} flows {}", name(way));
        let mbit = caught(|| together(&stage, options, way));
        let sum = mbit.as_ref().map_or(f64::NAN, |mbit| median(mbit.clone()));
        match mbit {
            Ok(mbit) => {
                let what = format!("{what}: QUIC + TCP");
                outcome.figures.push(figure(RIG, what, sum, "Mbit/s", Bar::AtLeast(165.0)));
                raw.push(json!({ "case": "one link", "way": name(way), "mbit": mbit }));
            }
            Err(why) => outcome.figures.push(missing(RIG, &what, &why)),
        }
        let what = format!("UDP blocked on both in mid-flow, {FLOWS} flows {}", name(way));
        match caught(|| block(&stage, options, way)) {
            Ok(found) => {
                outcome.figures.extend(found.figures(&what));
                outcome.chapter += &format!("| {} | {sum:.1} | {} |\n", name(way), found.cells());
                raw.push(found.tell(way));
            }
            Err(why) => outcome.figures.push(missing(RIG, &what, &why)),
        }
    }
    outcome.raw = Value::Array(raw);
    Ok(outcome)
}

impl Found {
    fn figures(&self, what: &str) -> Vec<Figure> {
        let why = self.lost.first().map_or("", String::as_str);
        let lost = format!("{what}: connections lost");
        let lost = noted(RIG, lost, why, self.lost.len() as f64, "", Bar::AtMost(0.0));
        let others = [
            ("no ping answered for", self.silence[0], "s", Bar::AtMost(2.0)),
            ("nothing arrived for", self.stall, "s", Bar::AtMost(2.0)),
            ("unblocked, by QUIC again after", self.quic, "s", Bar::AtMost(30.0)),
            ("unblocked, no ping answered for", self.silence[1], "s", Bar::Lower),
            ("over QUIC", self.before, "Mbit/s", Bar::Higher),
            ("inside TCP", self.meanwhile, "Mbit/s", Bar::Higher),
            ("over QUIC again", self.after, "Mbit/s", Bar::Higher),
        ];
        let others = others
            .into_iter()
            .map(|(which, value, unit, bar)| figure(RIG, format!("{what}: {which}"), value, unit, bar));
        [lost].into_iter().chain(others).collect()
    }

    fn cells(&self) -> String {
        let Self { before, meanwhile, after, silence, stall, quic, .. } = self;
        format!("{before:.1} | {meanwhile:.1} | {after:.1} | {:.2} | {stall:.1} | {quic:.1}", silence[0])
    }

    fn tell(&self, way: Direction) -> Value {
        json!({ "case": "both in mid-flow", "way": name(way), "lost": self.lost, "silence_s": self.silence,
                "stall_s": self.stall, "quic_s": self.quic, "mbit_per_100ms": self.steps })
    }
}

/// The rates of some runs over both links, one inside TCP.
fn together(stage: &Stage, options: &Options, way: Direction) -> Result<Vec<f64>, String> {
    let (seconds, runs) = if options.quick { (6, 1) } else { (10, 3) };
    let pair = Pair::start(stage, ONE, &[]);
    let _sink = Sink::start(stage, Kind::Tcp, PORT)?;
    let run = |_| {
        pair.settle([Travel::Tcp, Travel::Quic]);
        let mbit = load(stage, options, way, seconds)?.finish()?.mbit;
        // Otherwise it was not what is measured.
        let status = pair.client.status();
        travels(&status, DEVICES[0], Travel::Tcp)?;
        travels(&status, DEVICES[1], Travel::Quic)?;
        Ok(mbit)
    };
    (0..options.runs.unwrap_or(runs)).map(run).collect()
}

fn load(stage: &Stage, options: &Options, way: Direction, seconds: u32) -> Result<Iperf, String> {
    Iperf::start(stage, Kind::Tcp, (TUNNEL, PORT), Load::Tcp(FLOWS, options.inner), way, seconds)
}

/// Blocks UDP on both links in the middle of a load, and lets it through again.
fn block(stage: &Stage, options: &Options, way: Direction) -> Result<Found, String> {
    // How soon UDP is tried again depends on how often it has failed: each block is the first of its client.
    let pair = Pair::start(stage, Wall::NONE, &[]);
    pair.settle([Travel::Quic; 2]);
    let _sink = Sink::start(stage, Kind::Tcp, PORT)?;
    let talk = Talk::start(stage, TUNNEL, PAUSE)?;
    let seconds = BEFORE + BLOCKED + AFTER;
    let load = load(stage, options, way, seconds)?;
    let pings = Ping::dense(stage, Place::Client, TUNNEL, u64::from(START_UP + seconds));
    let (begin, wall) = (Instant::now(), SystemTime::now());
    let [block, unblock, end] = [BEFORE, BEFORE + BLOCKED, seconds].map(|seconds| START_UP + seconds);
    let sleep_until = |seconds: u32| {
        let due = begin + Duration::from_secs(seconds.into());
        thread::sleep(due.saturating_duration_since(Instant::now()));
    };
    sleep_until(block);
    let blocked = SystemTime::now();
    BOTH.raise(stage);
    sleep_until(unblock);
    Wall::NONE.raise(stage);
    let unblocked = (SystemTime::now(), Instant::now());
    let quic = loop {
        let status = pair.client.status();
        if DEVICES.iter().all(|device| travels(&status, device, Travel::Quic).is_ok()) {
            break unblocked.1.elapsed().as_secs_f64();
        }
        if begin.elapsed() >= Duration::from_secs(end.into()) {
            break f64::INFINITY;
        }
        thread::sleep(GLANCE);
    };
    let (arrived, talk, pings) = (load.finish(), talk.finish(), pings.finish());
    let lost = [arrived.as_ref().err(), talk.as_ref().err()].into_iter().flatten().cloned().collect();
    let stall = arrived.as_ref().map_or(f64::NAN, |arrived| arrived.stall().as_secs_f64());
    let steps = arrived.map(|arrived| arrived.steps).unwrap_or_default();
    // The last pings are under way when there are no more.
    let last = wall + Duration::from_secs(u64::from(end) - 1);
    let [block, unblock, end] = [block, unblock, end].map(f64::from);
    Ok(Found {
        before: mean(&steps, START_UP.into(), block),
        meanwhile: mean(&steps, block + SETTLED, unblock),
        after: mean(&steps, unblock + quic + SETTLED, end),
        silence: [
            pings.longest_gap(blocked - MARGIN, unblocked.0).as_secs_f64(),
            pings.longest_gap(unblocked.0, last).as_secs_f64(),
        ],
        stall,
        quic,
        lost,
        steps,
    })
}
