//! The laboratory of Multipath TCP: two slow links, one TCP connection over both, one of them silent for a while. Through the
//! tunnel where no UDP gets through, and by Multipath TCP of the kernel.

use std::{
    thread,
    time::{Duration, Instant},
};

use mpvpn_lab::Direction;
use mpvpn_tests::{
    stage::{Stage, TUNNEL},
    wall::{Travel, Wall},
};
use serde_json::{Value, json};

use super::{DEVICES, Pair, RIG, mean};
use crate::{
    figure::{Bar, Figure, noted},
    options::Options,
    parts::{missing, name, ways},
    paths::{
        harm,
        load::{Iperf, Kind, Load, PORT, START_UP, Sink},
        mptcp,
        plan::caught,
        play::median,
    },
    report::Outcome,
};

const LINK: &str = "10mbit,10ms,queue=60ms";
/// How long before the cut the rate over both counts no more: the load begins a moment after it was started.
const BEFORE_CUT: f64 = 0.5;
/// Until the rate over one link counts.
const AFTER_CUT: f64 = 2.0;
/// Until the rate over both counts again, and how long that is looked at.
const AFTER_RETURN: f64 = 1.0;
const LOOK: f64 = 3.0;

/// Who carries the connection.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Who {
    /// mpvpn with these options.
    Tunnel(&'static str, &'static [&'static str]),
    Kernel,
}

const ALL: [Who; 3] =
    [Who::Tunnel("packets", &[]), Who::Tunnel("streams", &["--lane", "stream"]), Who::Kernel];

/// One run, rates in Mbit/s.
struct Found {
    both: f64,
    one: f64,
    /// From one second after the return.
    again: f64,
    /// From the return until the links carried 80 % of what they had carried; endless if never.
    back: f64,
    /// The longest time in which nothing arrived, seconds.
    stall: f64,
    /// Why the connection was lost.
    lost: Option<String>,
    steps: Vec<f64>,
}

pub(super) fn run(options: &Options) -> Result<Outcome, String> {
    let (third, runs) = if options.quick { (6, 1) } else { (10, 3) };
    let runs = options.runs.unwrap_or(runs);
    let mut outcome = Outcome {
        chapter: format!(
            "\n## Two links of 10 Mbit/s without UDP\n\n1 TCP connection, {} s over both links, as long with link 1 silent, \
             as long over both; medians of {runs}.\n\n\
             | who | way | both, Mbit/s | one | both again | back after, s | nothing for, s |\n\
             |---|---|---:|---:|---:|---:|---:|\n",
            third
        ),
        ..Outcome::default()
    };
    let mut raw = Vec::new();
    for who in ALL {
        match caught(|| measure(who, options, third, runs)) {
            Ok(rows) => {
                for (way, found) in &rows {
                    outcome.figures.extend(figures(who, *way, found));
                    outcome.chapter += &line(who, *way, found);
                    raw.push(tell(who, *way, found));
                }
            }
            // It is there for comparison.
            Err(why) if who == Who::Kernel => eprintln!("  {}: not measured: {why}", who.name()),
            Err(why) => outcome.figures.push(missing(RIG, &who.name(), &why)),
        }
    }
    outcome.raw = Value::Array(raw);
    Ok(outcome)
}

impl Who {
    fn name(self) -> String {
        match self {
            Self::Tunnel(lane, _) => format!("2 × 10 Mbit/s without UDP, TCP as {lane}"),
            Self::Kernel => "kernel Multipath TCP".to_owned(),
        }
    }
}

/// All runs of one of them.
fn measure(
    who: Who,
    options: &Options,
    third: u32,
    runs: u32,
) -> Result<Vec<(Direction, Vec<Found>)>, String> {
    let stage = Stage::new(&[LINK; 2]);
    let load = Load::Tcp(1, options.inner);
    let (pair, _sink) = match who {
        Who::Kernel => (None, mptcp::prepare(&stage, DEVICES.len())?),
        Who::Tunnel(_, words) => {
            let wall = Wall { no_udp: &[1, 2], ..Wall::NONE };
            (Some(Pair::start(&stage, wall, words)), Sink::start(&stage, Kind::Tcp, PORT)?)
        }
    };
    let mut rows = Vec::new();
    for &way in ways(options.quick) {
        let mut found = Vec::new();
        for _ in 0..runs {
            pair.iter().for_each(|pair| pair.settle([Travel::Tcp; 2]));
            let before = mptcp::joins(&stage);
            let start = |seconds| match who {
                Who::Kernel => mptcp::start(&stage, load, way, seconds),
                Who::Tunnel(..) => Iperf::start(&stage, Kind::Tcp, (TUNNEL, PORT), load, way, seconds),
            };
            let run = play(&stage, way, third, start)?;
            if who == Who::Kernel && mptcp::joins(&stage) == before {
                return Err("no subflow joined: is net.mptcp.enabled 1?".to_owned());
            }
            eprintln!(
                "    {}, {}: {:.1}, {:.1}, {:.1} Mbit/s, back after {:.2} s",
                who.name(),
                name(way),
                run.both,
                run.one,
                run.again,
                run.back
            );
            found.push(run);
        }
        rows.push((way, found));
    }
    Ok(rows)
}

/// Lets link 1 be silent for the second third of what `start` starts.
fn play(
    stage: &Stage,
    way: Direction,
    third: u32,
    start: impl FnOnce(u32) -> Result<Iperf, String>,
) -> Result<Found, String> {
    let run = start(3 * third)?;
    let begin = Instant::now();
    let length = Duration::from_secs(third.into());
    let due = [1, 2].map(|thirds| Duration::from_secs(START_UP.into()) + length * thirds);
    let [cut, healed] = due.map(|due| begin + due);
    thread::sleep(cut.saturating_duration_since(Instant::now()));
    stage.link(1).silence(Direction::Both);
    thread::sleep(healed.saturating_duration_since(Instant::now()));
    stage.link(1).heal();
    let healed = Instant::now();
    let arrived = run.finish();
    let histories = harm::histories(stage, DEVICES.len()).ok_or("the links tell nothing")?;
    let back = harm::back(&histories, way, (cut, healed), healed + length);
    let [cut, healed] = due.map(|due| due.as_secs_f64());
    let lost = arrived.as_ref().err().cloned();
    let stall = arrived.as_ref().map_or(f64::NAN, |arrived| arrived.stall().as_secs_f64());
    let steps = arrived.map(|arrived| arrived.steps).unwrap_or_default();
    Ok(Found {
        both: mean(&steps, START_UP.into(), cut - BEFORE_CUT),
        one: mean(&steps, cut + AFTER_CUT, healed),
        again: mean(&steps, healed + AFTER_RETURN, healed + AFTER_RETURN + LOOK),
        back: back.map_or(f64::INFINITY, |back| back.as_secs_f64()),
        stall,
        lost,
        steps,
    })
}

/// The middle of the runs.
fn middle(found: &[Found], of: impl Fn(&Found) -> f64) -> f64 {
    median(found.iter().map(of).collect())
}

fn worst(found: &[Found], of: impl Fn(&Found) -> f64) -> f64 {
    found.iter().map(of).fold(0.0, f64::max)
}

/// The kernel's are told and not judged.
fn figures(who: Who, way: Direction, found: &[Found]) -> Vec<Figure> {
    let mut all = Vec::new();
    let mut ask = |which: &str, note: &str, value, unit, bar| {
        let bar = if who == Who::Kernel { Bar::None } else { bar };
        all.push(noted(RIG, format!("{}, {}: {which}", who.name(), name(way)), note, value, unit, bar));
    };
    ask("over both links", "", middle(found, |run| run.both), "Mbit/s", Bar::AtLeast(18.0));
    ask("over one after the cut", "", middle(found, |run| run.one), "Mbit/s", Bar::AtLeast(9.0));
    let lost = found.iter().filter_map(|run| run.lost.as_deref()).collect::<Vec<_>>();
    let note = format!("of {}{}", found.len(), lost.first().map_or(String::new(), |why| format!(": {why}")));
    ask("connections lost", &note, lost.len() as f64, "", Bar::AtMost(0.0));
    let back = worst(found, |run| run.back);
    ask("links carry 80 % again after, at most", "", back, "s", Bar::AtMost(1.0));
    let share = middle(found, |run| 100.0 * run.again / run.both);
    ask("goodput from 1 s after the return, of that before", "", share, "%", Bar::AtLeast(80.0));
    ask("nothing arrived for, at most", "", worst(found, |run| run.stall), "s", Bar::Lower);
    all
}

fn line(who: Who, way: Direction, found: &[Found]) -> String {
    format!(
        "| {} | {} | {:.2} | {:.2} | {:.2} | {:.2} | {:.1} |\n",
        who.name(),
        name(way),
        middle(found, |run| run.both),
        middle(found, |run| run.one),
        middle(found, |run| run.again),
        worst(found, |run| run.back),
        worst(found, |run| run.stall)
    )
}

fn tell(who: Who, way: Direction, found: &[Found]) -> Value {
    let run = |run: &Found| {
        json!({ "both": run.both, "one": run.one, "again": run.again, "back_s": run.back, "stall_s": run.stall,
                "lost": run.lost, "mbit_per_100ms": run.steps })
    };
    json!({ "who": who.name(), "way": name(way), "runs": found.iter().map(run).collect::<Vec<_>>() })
}
