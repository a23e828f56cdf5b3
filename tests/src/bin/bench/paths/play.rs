//! Plays a scenario: every load in every direction, over all links, over each that may be the best alone, and with the
//! kernel's Multipath TCP.

use std::time::Duration;

use mpvpn_lab::{Direction, LinkStats};
use mpvpn_scenarios::{Change, FlowMode, Scenario};
use mpvpn_tests::{
    quic_bulk::Source,
    stage::{Peer, Stage, TUNNEL},
};

use super::{
    harm::{self, Harm},
    load::{Arrived, Iperf, Kind, Load, PORT, Run, Sink},
    mptcp,
    plan::{Plan, caught},
    watch::{Curves, Resent, Watch, resent},
};

/// How long all paths may take to be active.
const SETTLE: Duration = Duration::from_secs(10);

/// What was found of one load in one direction.
pub(crate) struct Row {
    pub(crate) load: Load,
    /// Which of the scenario's numbers of flows has the bars of this one.
    pub(crate) index: Option<usize>,
    pub(crate) way: Direction,
    /// Over all links.
    pub(crate) runs: Vec<Measured>,
    /// The same without any loss, where repair is judged.
    pub(crate) clean: Option<Measured>,
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
    /// What the sender numbered and sent again.
    pub(crate) resent: Option<Resent>,
    pub(crate) harms: Vec<Harm>,
    /// Pings that were not answered, where pings were sent.
    pub(crate) lost_pings: Option<u64>,
    /// How long the quiet TCP connection waited at most, or how it was lost; where there was one.
    pub(crate) talk: Option<Result<Duration, String>>,
}

/// Plays it.
pub(crate) fn play(scenario: &Scenario, plan: Plan) -> Result<Vec<Row>, String> {
    let stage = Stage::of(&scenario.links);
    let mut rows = Vec::new();
    for &way in &scenario.directions {
        for (index, load) in plan.loads(scenario) {
            let (runs, singles) = (Vec::new(), Vec::new());
            rows.push(Row { load, index, way, runs, clean: None, singles, mptcp: None });
        }
    }
    if Plan::asks_kernel(scenario) {
        beside(&stage, scenario, plan, &mut rows);
    }
    let server = stage.server(&[]);
    let sink = Sink::start(&stage, Kind::Tcp, PORT)?;
    let source = if scenario.quic { Some(Source::start(&stage)?) } else { None };
    let scene = Scene { scenario, stage: &stage, plan, server, source };
    scene.together(&mut rows);
    if Plan::asks_singles(scenario) {
        scene.alone(&mut rows);
    }
    drop(sink);
    Ok(rows)
}

/// Measures kernel MPTCP, before there is a tunnel.
fn beside(stage: &Stage, scenario: &Scenario, plan: Plan, rows: &mut [Row]) {
    let sink = caught(|| mptcp::prepare(stage, scenario.links.len()));
    for row in rows.iter_mut().filter(|row| matches!(row.load, Load::Tcp(..))) {
        if let Err(why) = &sink {
            row.mptcp = Some(Err(why.clone()));
            continue;
        }
        let run = || caught(|| mptcp::run(stage, scenario, row.load, row.way, plan.seconds(scenario)));
        let found = (0..plan.runs).map(|_| run()).collect::<Result<_, _>>().map(median);
        eprintln!("    kernel MPTCP, {}, {:?}: {}", row.load.name(), row.way, said(&found));
        row.mptcp = Some(found);
    }
}

/// A stage with a server, on which clients play.
struct Scene<'a> {
    scenario: &'a Scenario,
    stage: &'a Stage,
    plan: Plan,
    server: Peer,
    source: Option<Source>,
}

impl Scene<'_> {
    /// A client over all links, or over that one, whose paths are all active. All links become what `change` makes of
    /// them.
    fn client(&self, only: Option<usize>, change: &Change) -> Result<Peer, String> {
        for (number, spec) in (1..).zip(&self.scenario.links) {
            let link = self.stage.link(number);
            change.apply(link.handle(), spec).map_err(|error| format!("link {number}: {error}"))?;
        }
        let options = &self.scenario.client;
        let pipes = options.pipes.map(|pipes| pipes.to_string());
        let device = only.map(|index| format!("eth{}", index + 1));
        let words = [
            ("--scheduler", options.scheduler.as_deref()),
            ("--cc", options.cc.as_deref()),
            ("--pipes", pipes.as_deref()),
            ("--lane", (self.scenario.flow_mode == FlowMode::Stream).then_some("stream")),
            ("--path", device.as_deref()),
        ];
        let words: Vec<&str> =
            words.iter().filter_map(|(key, value)| Some([*key, (*value)?])).flatten().collect();
        let client = self.stage.client(&words);
        let used = |index: &usize| only.is_none_or(|only| only == *index);
        for index in (0..self.scenario.links.len()).filter(used) {
            client.until_path(&format!("eth{}", index + 1), "active", SETTLE);
        }
        Ok(client)
    }

    /// Every row over all links.
    fn together(&self, rows: &mut [Row]) {
        let mut client = None;
        for row in &mut *rows {
            for _ in 0..self.plan.runs(self.scenario) {
                let measured = self.next(&mut client, &Change::Restore, row);
                row.runs.push(measured);
            }
            eprintln!("    {}, {:?}: {}", row.load.name(), row.way, said(&row.mbit()));
        }
        if self.scenario.bars.max_repair.is_none() {
            return;
        }
        // What was learned of losses is not to be known here.
        client = None;
        for row in rows {
            let measured = self.next(&mut client, &Change::Set("loss=0".to_owned()), row);
            let found = measured.arrived.as_ref().map(|arrived| arrived.mbit).map_err(Clone::clone);
            eprintln!("    without loss, {}, {:?}: {}", row.load.name(), row.way, said(&found));
            row.clean = Some(measured);
        }
    }

    /// One run with `client`, or with a new one over links that `change` has changed, if there is none that works.
    fn next(&self, client: &mut Option<Peer>, change: &Change, row: &Row) -> Measured {
        let measured = caught(|| {
            if client.as_mut().is_none_or(|peer| !peer.is_running()) {
                *client = None;
                *client = Some(self.client(None, change)?);
            }
            self.run(client.as_ref().ok_or("no client")?, row)
        });
        let measured = measured.unwrap_or_else(Measured::failed);
        if measured.arrived.is_err() {
            // The next run shall not have the troubles of this one.
            *client = None;
        }
        measured
    }

    /// Every row over every link that may be the best alone.
    fn alone(&self, rows: &mut [Row]) {
        let ways = self.scenario.directions.iter();
        let mut candidates: Vec<usize> =
            ways.flat_map(|way| self.scenario.best_link_candidates(*way)).collect();
        candidates.sort_unstable();
        candidates.dedup();
        for index in candidates {
            let client = caught(|| self.client(Some(index), &Change::Restore));
            for row in &mut *rows {
                let run = || {
                    client.as_ref().map_err(Clone::clone)?;
                    caught(|| self.traffic(row, self.plan.seconds(self.scenario))?.finish())
                };
                let runs: Result<Vec<_>, _> =
                    (0..self.plan.runs).map(|_| run().map(|arrived| arrived.mbit)).collect();
                let found = runs.map(median);
                let (load, way) = (row.load.name(), row.way);
                eprintln!("    link {} alone, {load}, {way:?}: {}", index + 1, said(&found));
                row.singles.push((index + 1, found));
            }
        }
    }

    fn traffic(&self, row: &Row, seconds: u32) -> Result<Run, String> {
        match (row.load, &self.source) {
            (Load::Quic, Some(source)) => Run::quic(self.stage, source, TUNNEL, seconds),
            (Load::Quic, None) => Err("there is no QUIC server".to_owned()),
            (load, _) => {
                Iperf::start(self.stage, Kind::Tcp, (TUNNEL, PORT), load, row.way, seconds).map(Run::Iperf)
            }
        }
    }

    fn run(&self, client: &Peer, row: &Row) -> Result<Measured, String> {
        let sender = if row.way == Direction::Up { client } else { &self.server };
        let before = (self.sent(row.way), resent(sender.socket()));
        let watch = Watch::start(client.socket(), row.way);
        let run = || {
            if self.scenario.event.is_empty() {
                let run = self.traffic(row, self.plan.seconds(self.scenario));
                return Ok(Measured {
                    arrived: run.and_then(Run::finish),
                    ..Measured::failed(String::new())
                });
            }
            let start = |seconds| self.traffic(row, seconds);
            let harmed = harm::harmed(self.stage, self.scenario, row.way, start)?;
            Ok(Measured {
                arrived: harmed.arrived,
                harms: harmed.harms,
                lost_pings: Some(harmed.lost_pings),
                talk: Some(harmed.talk),
                ..Measured::failed(String::new())
            })
        };
        let measured = caught(run);
        let curves = watch.finish();
        let (sent, after) = (self.sent(row.way) - before.0, resent(sender.socket()));
        let resent = before.1.zip(after).map(|(before, after)| after.since(before));
        Ok(Measured { sent, curves, resent, ..measured? })
    }

    /// Bytes that went into all links in a direction so far, as if lost packets had been as long as the others.
    fn sent(&self, way: Direction) -> f64 {
        let of_link = |number| {
            let LinkStats { up, down } = self.stage.link(number).handle().stats().unwrap_or_default();
            let counters = if way == Direction::Up { up } else { down };
            let packets = counters.packets + counters.dropped_loss + counters.dropped_queue;
            counters.bytes as f64 * packets as f64 / (counters.packets.max(1)) as f64
        };
        (1..=self.scenario.links.len()).map(of_link).sum()
    }
}

impl Measured {
    /// A run of which nothing is known but why it failed.
    fn failed(why: String) -> Self {
        Self {
            arrived: Err(why),
            sent: f64::NAN,
            curves: Curves::default(),
            resent: None,
            harms: Vec::new(),
            lost_pings: None,
            talk: None,
        }
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
}

fn said(found: &Result<f64, String>) -> String {
    found.as_ref().map_or_else(Clone::clone, |mbit| format!("{mbit:.1} Mbit/s"))
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
