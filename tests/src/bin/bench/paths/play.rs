//! Plays a scenario: every load in every direction, over all links, over each that may be the best alone, and with the
//! kernel's Multipath TCP.

use std::{
    thread,
    time::{Duration, Instant, SystemTime},
};

use mpvpn_lab::{Direction, LinkStats, scenario::Scenario};
use mpvpn_tests::{
    ping::Ping,
    stage::{Peer, Place, Stage, TUNNEL},
};

use super::{
    load::{Arrived, Kind, Load, Run, START_UP, Sink},
    mptcp,
    watch::{Curves, Watch},
};

/// How long all paths may take to be active.
const SETTLE: Duration = Duration::from_secs(10);
/// Between pings while links are harmed.
const DENSE: Duration = Duration::from_millis(5);
/// A harm is looked for from so long before it, so that the last answer before it counts.
const BEFORE: Duration = Duration::from_millis(100);
/// The window in which a link's return is looked for.
const WINDOW: Duration = Duration::from_millis(100);
/// The share of the earlier rate at which a link counts as back.
const BACK: f64 = 0.8;

/// How much of a scenario is played.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    /// How often each row is measured.
    pub(crate) runs: u32,
    /// Seconds of a run without events, where not as the scenario says.
    pub(crate) seconds: Option<u32>,
    /// Rows with more flows are left out, unless none would be left.
    pub(crate) most_flows: u32,
    /// How often events are repeated, where not as the scenario says.
    pub(crate) repeat: Option<u32>,
}

/// What was found of one load in one direction.
pub(crate) struct Row {
    pub(crate) load: Load,
    /// Which of the scenario's numbers of flows this is.
    pub(crate) index: usize,
    pub(crate) way: Direction,
    /// Over all links.
    pub(crate) runs: Vec<Measured>,
    /// Over single links, counted from 1: medians, Mbit/s.
    pub(crate) singles: Vec<(usize, Result<f64, String>)>,
    /// Kernel MPTCP, Mbit/s; `None` where it was not asked.
    pub(crate) mptcp: Option<Result<f64, String>>,
}

/// One run over all links.
pub(crate) struct Measured {
    pub(crate) arrived: Result<Arrived, String>,
    /// Bytes of IP packets that went into the links in that direction.
    pub(crate) sent: f64,
    pub(crate) curves: Curves,
    pub(crate) harms: Vec<Harm>,
    /// Pings that were not answered, where pings were sent.
    pub(crate) lost_pings: Option<u64>,
}

/// What a harm did.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Harm {
    pub(crate) from: SystemTime,
    pub(crate) to: SystemTime,
    /// The longest time without an answer to pings.
    pub(crate) gap: Duration,
    /// From the end of the harm until the links carried what they had carried before it; `None`: not in this run.
    pub(crate) back: Option<Duration>,
}

impl Plan {
    fn flows(&self, scenario: &Scenario) -> Vec<(usize, u32)> {
        let all = || scenario.flows.iter().copied().enumerate();
        let few: Vec<_> = all().filter(|(_, flows)| *flows <= self.most_flows).collect();
        if few.is_empty() { all().collect() } else { few }
    }

    fn seconds(&self, scenario: &Scenario) -> u32 {
        self.seconds.unwrap_or(scenario.seconds)
    }
}

/// Plays it.
pub(crate) fn play(scenario: &Scenario, plan: Plan) -> Result<Vec<Row>, String> {
    let stage = Stage::of(&scenario.links);
    let mut rows = Vec::new();
    for &way in &scenario.directions {
        for (index, flows) in plan.flows(scenario) {
            let load = Load::Tcp(flows);
            rows.push(Row { load, index, way, runs: Vec::new(), singles: Vec::new(), mptcp: None });
        }
    }
    if scenario.event.is_empty() {
        beside(&stage, scenario, plan, &mut rows);
    }
    let _server = stage.server(&[]);
    let sink = Sink::start(&stage, Kind::Tcp)?;
    let scene = Scene { scenario, stage: &stage, plan };
    let client = scene.client(None);
    for row in &mut rows {
        for _ in 0..if scenario.event.is_empty() { plan.runs } else { 1 } {
            row.runs.push(scene.run(&client, row));
        }
        eprintln!("    {}, {:?}: {}", row.load.name(), row.way, row.said());
    }
    drop(client);
    if scenario.links.len() > 1 && (scenario.event.is_empty() || scenario.bars.min_single_mbit.is_some()) {
        scene.alone(&mut rows);
    }
    drop(sink);
    Ok(rows)
}

/// Measures kernel MPTCP, before there is a tunnel.
fn beside(stage: &Stage, scenario: &Scenario, plan: Plan, rows: &mut [Row]) {
    let sink = match mptcp::prepare(stage, scenario) {
        Ok(sink) => sink,
        Err(why) => {
            rows.iter_mut().for_each(|row| row.mptcp = Some(Err(why.clone())));
            return;
        }
    };
    for row in rows {
        let Load::Tcp(flows) = row.load;
        let run = || mptcp::run(stage, scenario, flows, row.way, plan.seconds(scenario));
        row.mptcp = Some((0..plan.runs).map(|_| run()).collect::<Result<_, _>>().map(median));
    }
    drop(sink);
}

/// A stage with a server, on which clients play.
struct Scene<'a> {
    scenario: &'a Scenario,
    stage: &'a Stage,
    plan: Plan,
}

impl Scene<'_> {
    /// A client over all links, or over that one, whose paths are all active.
    fn client(&self, only: Option<usize>) -> Peer {
        let options = &self.scenario.client;
        let pipes = options.pipes.map(|pipes| pipes.to_string());
        let device = only.map(|index| format!("eth{}", index + 1));
        let words = [
            ("--scheduler", options.scheduler.as_deref()),
            ("--cc", options.cc.as_deref()),
            ("--pipes", pipes.as_deref()),
            ("--path", device.as_deref()),
        ];
        let words: Vec<&str> =
            words.iter().filter_map(|(key, value)| Some([*key, (*value)?])).flatten().collect();
        let client = self.stage.client(&words);
        let used = |index: &usize| only.is_none_or(|only| only == *index);
        for index in (0..self.scenario.links.len()).filter(used) {
            client.until_path(&format!("eth{}", index + 1), "active", SETTLE);
        }
        client
    }

    /// Every row over every link that may be the best alone.
    fn alone(&self, rows: &mut [Row]) {
        let ways = self.scenario.directions.iter();
        let mut candidates: Vec<usize> = ways.flat_map(|way| self.scenario.candidates(*way)).collect();
        candidates.sort_unstable();
        candidates.dedup();
        for index in candidates {
            let client = self.client(Some(index));
            for row in &mut *rows {
                let run = || self.traffic(row, self.plan.seconds(self.scenario))?.finish();
                let runs: Result<Vec<_>, _> =
                    (0..self.plan.runs).map(|_| run().map(|arrived| arrived.mbit)).collect();
                let found = runs.map(median);
                eprintln!("    link {} alone, {}, {:?}: {found:.1?}", index + 1, row.load.name(), row.way);
                row.singles.push((index + 1, found));
            }
            drop(client);
        }
    }

    fn traffic(&self, row: &Row, seconds: u32) -> Result<Run, String> {
        let Load::Tcp(flows) = row.load;
        Run::start(self.stage, Kind::Tcp, TUNNEL, flows, row.way, seconds)
    }

    fn run(&self, client: &Peer, row: &Row) -> Measured {
        let before = self.sent(row.way);
        let watch = Watch::start(client.socket(), row.way);
        let (arrived, harms, lost_pings) = if self.scenario.event.is_empty() {
            let run = self.traffic(row, self.plan.seconds(self.scenario));
            (run.and_then(Run::finish), Vec::new(), None)
        } else {
            self.harmed(row)
        };
        let curves = watch.finish();
        Measured { arrived, sent: self.sent(row.way) - before, curves, harms, lost_pings }
    }

    /// A run while things happen to the links.
    fn harmed(&self, row: &Row) -> (Result<Arrived, String>, Vec<Harm>, Option<u64>) {
        let scenario = self.scenario;
        let repeat = self.plan.repeat.unwrap_or(scenario.repeat).max(1);
        let (period, start_up) =
            (Duration::from_secs(scenario.seconds.into()), Duration::from_secs(START_UP.into()));
        let run = match self.traffic(row, scenario.seconds * repeat) {
            Ok(run) => run,
            Err(why) => return (Err(why), Vec::new(), None),
        };
        let ping =
            Ping::every(self.stage, Place::Client, DENSE, TUNNEL, START_UP + scenario.seconds * repeat + 1);
        let (start, wall) = (Instant::now() + start_up, SystemTime::now() + start_up);
        for repetition in 0..repeat {
            for event in &scenario.event {
                let due = start + period * repetition + event.at();
                thread::sleep(due.saturating_duration_since(Instant::now()));
                let link = self.stage.link(event.link);
                if let Err(error) = event.change.apply(link.handle(), &scenario.links[event.link - 1]) {
                    return (Err(format!("link {}: {error}", event.link)), Vec::new(), None);
                }
            }
        }
        let arrived = run.finish();
        let pings = ping.finish();
        let times = (0..repeat).flat_map(|repetition| {
            scenario
                .harms()
                .into_iter()
                .map(move |(from, to)| (period * repetition + from, period * repetition + to))
        });
        let harms = times.map(|(from, to)| Harm {
            from: wall + from,
            to: wall + to,
            gap: pings.longest_gap(wall + from - BEFORE, wall + to),
            back: self.back(row.way, start + from, start + to, start + to + period),
        });
        (arrived, harms.collect(), Some(pings.missing()))
    }

    /// How long after `to` all links together carried [`BACK`] of what they had carried in the second before `from`.
    fn back(&self, way: Direction, from: Instant, to: Instant, end: Instant) -> Option<Duration> {
        let histories: Vec<_> = self
            .stage_links()
            .map(|number| self.stage.link(number).handle().history())
            .collect::<Result<_, _>>()
            .ok()?;
        let carried = |from: Instant, to: Instant| -> f64 {
            histories.iter().map(|history| history.between(way, from, to) as f64).sum()
        };
        let second = Duration::from_secs(1);
        let wanted = carried(from - second, from) * BACK * WINDOW.as_secs_f64();
        let times =
            (0..).map(|step| to + WINDOW + Duration::from_millis(10) * step).take_while(|at| *at < end);
        times.into_iter().find(|at| carried(*at - WINDOW, *at) >= wanted).map(|at| at - to)
    }

    /// Bytes that went into all links in a direction so far, as if lost packets had been as long as the others.
    fn sent(&self, way: Direction) -> f64 {
        let of_link = |number| {
            let LinkStats { up, down } = self.stage.link(number).handle().stats().unwrap_or_default();
            let counters = if way == Direction::Up { up } else { down };
            let packets = counters.packets + counters.dropped_loss + counters.dropped_queue;
            counters.bytes as f64 * packets as f64 / (counters.packets.max(1)) as f64
        };
        self.stage_links().map(of_link).sum()
    }

    fn stage_links(&self) -> impl Iterator<Item = usize> {
        1..=self.scenario.links.len()
    }
}

impl Row {
    /// The median of the runs, Mbit/s; or why there is none.
    pub(crate) fn mbit(&self) -> Result<f64, String> {
        let rates = self.runs.iter().map(|run| Ok(run.arrived.as_ref().map_err(Clone::clone)?.mbit));
        rates.collect::<Result<Vec<_>, String>>().map(median)
    }

    /// The best link alone: its number and Mbit/s.
    pub(crate) fn best_single(&self) -> Option<(usize, f64)> {
        let known = self.singles.iter().filter_map(|(number, rate)| Some((*number, *rate.as_ref().ok()?)));
        known.max_by(|a, b| a.1.total_cmp(&b.1))
    }

    fn said(&self) -> String {
        self.mbit().map_or_else(|why| why, |mbit| format!("{mbit:.1} Mbit/s"))
    }
}

/// Not a number where there is nothing.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        count if count % 2 == 1 => values[middle],
        _ => f64::midpoint(values[middle - 1], values[middle]),
    }
}
