//! A standard experiment with Multipath TCP: one TCP connection over two slow links, one of which is silent
//! for a while. Compared are the tunnel with UDP blocked, and the kernel's Multipath TCP.

use std::{
    collections::BTreeMap,
    thread,
    time::{Duration, Instant},
};

use mpvpn_lab::Direction;
use mpvpn_tests::{
    firewall::{Firewall, Transport},
    testbed::{TUNNEL, Testbed},
};
use serde_json::{Value, json};

use super::{DEVICES, RIG, TunnelPair, mean};
use crate::{
    figure::{Bar, Figure, figure_with_note},
    median::median,
    options::Options,
    parts::{direction_name, directions, unmeasured_figure},
    paths::{
        impairment,
        load::{Iperf, IperfServer, Load, PORT, START_UP_SECONDS, TcpKind},
        mptcp,
        plan::catch_panic,
    },
    report::Outcome,
    timeline::{self, Timeline},
};

/// Both links: slow, so that a single TCP connection fills them.
const LINK: &str = "10mbit,10ms,queue=60ms";
/// Time before the cut that is left out of the mean over both links, s: the load starts a moment later than
/// its process.
const BEFORE_CUT_S: f64 = 0.5;
/// Time after the cut until the mean over one link begins, s.
const AFTER_CUT_S: f64 = 2.0;
/// Time after the return until the mean over both links begins again, and the length of that mean, s.
const AFTER_RETURN_S: f64 = 1.0;
const RETURN_WINDOW_S: f64 = 3.0;

/// The system that carries the connection.
#[derive(Clone, Copy, PartialEq, Eq)]
enum TestedSystem {
    /// mpvpn: title of the flow mode, and client options.
    Tunnel(&'static str, &'static [&'static str]),
    Kernel,
}

const TESTED_SYSTEMS: [TestedSystem; 3] = [
    TestedSystem::Tunnel("packets", &[]),
    TestedSystem::Tunnel("streams", &["--lane", "stream"]),
    TestedSystem::Kernel,
];

/// Results of a run.
struct LabRun {
    both_links_mbit: f64,
    one_link_mbit: f64,
    /// Mean from one second after the return.
    after_return_mbit: f64,
    /// Time from the return until the links carried 80 % of the previous rate; infinite if never.
    recovery_s: f64,
    /// The longest time in which nothing arrived.
    longest_stall_s: f64,
    /// The error if the connection was lost.
    error: Option<String>,
    steps: Vec<f64>,
    /// From when until when link 1 was silent (s).
    silent_s: (f64, f64),
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
    let (mut raw, mut charts) = (Vec::new(), BTreeMap::new());
    for system in TESTED_SYSTEMS {
        match catch_panic(|| measure(system, options, third, runs)) {
            Ok(rows) => {
                for (direction, runs_done) in &rows {
                    outcome.figures.extend(figures(system, *direction, runs_done));
                    outcome.chapter += &table_row(system, *direction, runs_done);
                    raw.push(json_of_runs(system, *direction, runs_done));
                    let panels: &mut Vec<_> = charts.entry(direction_name(*direction)).or_default();
                    panels.push(timeline(system, runs_done));
                }
            }
            // The kernel is measured for comparison only.
            Err(why) if system == TestedSystem::Kernel => {
                eprintln!("  {}: not measured: {why}", system.name())
            }
            Err(why) => outcome.figures.push(unmeasured_figure(RIG, &system.name(), &why)),
        }
    }
    outcome.plots = charts.into_iter().map(|(direction, panels)| chart(direction, third, &panels)).collect();
    outcome.raw = Value::Array(raw);
    Ok(outcome)
}

impl TestedSystem {
    fn name(self) -> String {
        match self {
            Self::Tunnel(lane, _) => format!("2 × 10 Mbit/s without UDP, TCP as {lane}"),
            Self::Kernel => "kernel Multipath TCP".to_owned(),
        }
    }
}

/// All runs of a system.
fn measure(
    system: TestedSystem,
    options: &Options,
    third: u32,
    runs: u32,
) -> Result<Vec<(Direction, Vec<LabRun>)>, String> {
    let testbed = Testbed::new(&[LINK; 2]);
    let load = Load::Tcp(1, options.inner);
    let (pair, _iperf) = match system {
        TestedSystem::Kernel => (None, mptcp::prepare(&testbed, DEVICES.len())?),
        TestedSystem::Tunnel(_, args) => {
            let firewall = Firewall { no_udp: &[1, 2], ..Firewall::OPEN };
            (
                Some(TunnelPair::start(&testbed, firewall, args)),
                IperfServer::start(&testbed, TcpKind::Tcp, PORT)?,
            )
        }
    };
    let mut rows = Vec::new();
    for &direction in directions(options.quick) {
        let mut runs_done = Vec::new();
        for _ in 0..runs {
            pair.iter().for_each(|pair| pair.wait_for_transports([Transport::Tcp; 2]));
            let before = mptcp::joins(&testbed);
            let start = |seconds| match system {
                TestedSystem::Kernel => mptcp::start(&testbed, load, direction, seconds),
                TestedSystem::Tunnel(..) => {
                    Iperf::start(&testbed, TcpKind::Tcp, (TUNNEL, PORT), load, direction, seconds)
                }
            };
            let run = play(&testbed, direction, third, start)?;
            if system == TestedSystem::Kernel && mptcp::joins(&testbed) == before {
                return Err("no subflow joined: is net.mptcp.enabled 1?".to_owned());
            }
            eprintln!(
                "    {}, {}: {:.1}, {:.1}, {:.1} Mbit/s, back after {:.2} s",
                system.name(),
                direction_name(direction),
                run.both_links_mbit,
                run.one_link_mbit,
                run.after_return_mbit,
                run.recovery_s
            );
            runs_done.push(run);
        }
        rows.push((direction, runs_done));
    }
    Ok(rows)
}

/// Runs the load that `start` starts; link 1 is silent in its second third.
fn play(
    testbed: &Testbed,
    direction: Direction,
    third: u32,
    start: impl FnOnce(u32) -> Result<Iperf, String>,
) -> Result<LabRun, String> {
    let run = start(3 * third)?;
    let begin = Instant::now();
    let length = Duration::from_secs(third.into());
    let due = [1, 2].map(|thirds| Duration::from_secs(START_UP_SECONDS.into()) + length * thirds);
    let [cut, healed] = due.map(|due| begin + due);
    thread::sleep(cut.saturating_duration_since(Instant::now()));
    testbed.link(1).silence(Direction::Both);
    thread::sleep(healed.saturating_duration_since(Instant::now()));
    testbed.link(1).end_silence();
    let healed = Instant::now();
    let arrived = run.finish();
    let histories = impairment::histories(testbed, DEVICES.len()).ok_or("the links tell nothing")?;
    let recovery_s = impairment::recovery_time(&histories, direction, (cut, healed), healed + length);
    let [cut, healed] = due.map(|due| due.as_secs_f64());
    let error = arrived.as_ref().err().cloned();
    let longest_stall_s = arrived.as_ref().map_or(f64::NAN, |arrived| arrived.longest_stall().as_secs_f64());
    let steps = arrived.map(|arrived| arrived.steps).unwrap_or_default();
    Ok(LabRun {
        both_links_mbit: mean(&steps, START_UP_SECONDS.into(), cut - BEFORE_CUT_S),
        one_link_mbit: mean(&steps, cut + AFTER_CUT_S, healed),
        after_return_mbit: mean(&steps, healed + AFTER_RETURN_S, healed + AFTER_RETURN_S + RETURN_WINDOW_S),
        recovery_s: recovery_s.map_or(f64::INFINITY, |recovery_s| recovery_s.as_secs_f64()),
        longest_stall_s,
        error,
        steps,
        silent_s: (cut, healed),
    })
}

/// The panel of a system.
fn timeline(system: TestedSystem, runs_done: &[LabRun]) -> Timeline {
    let recovery_s = maximum_of(runs_done, |run| run.recovery_s);
    Timeline {
        title: format!("{}; the links carry 80 % again after {recovery_s:.2} s at most", system.name()),
        runs: runs_done.iter().map(|run| run.steps.clone()).collect(),
        impaired: runs_done.first().map_or((0.0, 0.0), |run| run.silent_s),
        marks: Vec::new(),
    }
}

/// The name of a chart, and the chart.
fn chart(direction: &str, third: u32, panels: &[Timeline]) -> (String, String) {
    let title = format!(
        "One TCP connection {direction} over two links of 10 Mbit/s without UDP, link 1 silent for {third} s"
    );
    let below =
        format!("links: twice {LINK}; goodput at the receiver; the first run in blue, others in grey");
    (
        format!("{RIG}/lab-{direction}.svg"),
        timeline::draw(&title, &below, ("link 1 is silent", "link 1 is back"), panels),
    )
}

/// Median of a value over the runs.
fn median_of(runs_done: &[LabRun], of: impl Fn(&LabRun) -> f64) -> f64 {
    median(runs_done.iter().map(of).collect()).unwrap_or(f64::NAN)
}

fn maximum_of(runs_done: &[LabRun], of: impl Fn(&LabRun) -> f64) -> f64 {
    runs_done.iter().map(of).fold(0.0, f64::max)
}

/// Figures of a system; those of the kernel have no bars.
fn figures(system: TestedSystem, direction: Direction, runs_done: &[LabRun]) -> Vec<Figure> {
    let mut all = Vec::new();
    let mut ask = |which: &str, note: &str, value, unit, bar| {
        let bar = if system == TestedSystem::Kernel { Bar::None } else { bar };
        all.push(figure_with_note(
            RIG,
            format!("{}, {}: {which}", system.name(), direction_name(direction)),
            note,
            value,
            unit,
            bar,
        ));
    };
    ask("over both links", "", median_of(runs_done, |run| run.both_links_mbit), "Mbit/s", Bar::AtLeast(18.0));
    ask(
        "over one after the cut",
        "",
        median_of(runs_done, |run| run.one_link_mbit),
        "Mbit/s",
        Bar::AtLeast(9.0),
    );
    let error = runs_done.iter().filter_map(|run| run.error.as_deref()).collect::<Vec<_>>();
    let note =
        format!("of {}{}", runs_done.len(), error.first().map_or(String::new(), |why| format!(": {why}")));
    ask("connections lost", &note, error.len() as f64, "", Bar::AtMost(0.0));
    let recovery_s = maximum_of(runs_done, |run| run.recovery_s);
    ask("links carry 80 % again after, at most", "", recovery_s, "s", Bar::AtMost(1.0));
    let share = median_of(runs_done, |run| 100.0 * run.after_return_mbit / run.both_links_mbit);
    ask("goodput from 1 s after the return, of that before", "", share, "%", Bar::AtLeast(80.0));
    ask(
        "nothing arrived for, at most",
        "",
        maximum_of(runs_done, |run| run.longest_stall_s),
        "s",
        Bar::Lower,
    );
    all
}

fn table_row(system: TestedSystem, direction: Direction, runs_done: &[LabRun]) -> String {
    format!(
        "| {} | {} | {:.2} | {:.2} | {:.2} | {:.2} | {:.1} |\n",
        system.name(),
        direction_name(direction),
        median_of(runs_done, |run| run.both_links_mbit),
        median_of(runs_done, |run| run.one_link_mbit),
        median_of(runs_done, |run| run.after_return_mbit),
        maximum_of(runs_done, |run| run.recovery_s),
        maximum_of(runs_done, |run| run.longest_stall_s)
    )
}

fn json_of_runs(system: TestedSystem, direction: Direction, runs_done: &[LabRun]) -> Value {
    let run = |run: &LabRun| {
        json!({ "both": run.both_links_mbit, "one": run.one_link_mbit, "again": run.after_return_mbit,
                "back_s": run.recovery_s, "stall_s": run.longest_stall_s,
                "lost": run.error, "mbit_per_100ms": run.steps })
    };
    let runs: Vec<_> = runs_done.iter().map(run).collect();
    json!({ "who": system.name(), "way": direction_name(direction), "runs": runs })
}
