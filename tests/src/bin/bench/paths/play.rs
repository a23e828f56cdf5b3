//! Runs a scenario: every load in every direction, over all links, over each candidate for the best single
//! link, and with the kernel's Multipath TCP.

use std::time::Duration;

use mpvpn_lab::{Direction, LinkStats};
use mpvpn_scenarios::{Change, FlowMode, Scenario};
use mpvpn_tests::{
    quic_bulk::QuicServer,
    testbed::{MpvpnProcess, TUNNEL, Testbed},
};

use super::{
    impairment::{self, Impairment},
    load::{Iperf, IperfServer, Load, LoadResult, LoadRun, PORT, TcpKind},
    mptcp,
    path_rates::{PathRateWatch, PathRates, Resent, resent},
    plan::{Plan, catch_panic},
};
use crate::median::median;

/// How long all paths may take to become active.
const PATHS_TIMEOUT: Duration = Duration::from_secs(10);

/// Results of one load in one direction.
pub(crate) struct Row {
    pub(crate) load: Load,
    /// Index into the scenario's list of flows whose bars apply; `None`: no bars of goodput.
    pub(crate) index: Option<usize>,
    pub(crate) direction: Direction,
    /// Runs over all links.
    pub(crate) runs: Vec<RunResult>,
    /// A run without loss, in scenarios with `max_repair`.
    pub(crate) clean: Option<RunResult>,
    /// Number of a link, from 1, and the median goodput over this link alone, Mbit/s.
    pub(crate) singles: Vec<(usize, Result<f64, String>)>,
    /// Goodput of the kernel's Multipath TCP, Mbit/s; `None`: not measured.
    pub(crate) mptcp: Option<Result<f64, String>>,
}

/// Results of a run over all links.
pub(crate) struct RunResult {
    pub(crate) arrived: Result<LoadResult, String>,
    /// Bytes of IP packets that entered the links in that direction.
    pub(crate) sent: f64,
    pub(crate) path_rates: PathRates,
    /// Numbered and retransmitted packets of the sender.
    pub(crate) resent: Option<Resent>,
    pub(crate) impairments: Vec<Impairment>,
    /// Number of unanswered pings; `None`: no pings were sent.
    pub(crate) lost_pings: Option<u64>,
    /// The longest answer time of the quiet TCP connection, or its error; `None`: there was none.
    pub(crate) quiet_connection: Option<Result<Duration, String>>,
}

/// Runs a scenario.
pub(crate) fn play(scenario: &Scenario, plan: Plan) -> Result<Vec<Row>, String> {
    let testbed = Testbed::of(&scenario.links);
    let mut rows = Vec::new();
    for &direction in &scenario.directions {
        for (index, load) in plan.loads(scenario) {
            let (runs, singles) = (Vec::new(), Vec::new());
            rows.push(Row { load, index, direction, runs, clean: None, singles, mptcp: None });
        }
    }
    if Plan::measures_kernel_mptcp(scenario) {
        measure_kernel_mptcp(&testbed, scenario, plan, &mut rows);
    }
    let server = testbed.server(&[]);
    let iperf = IperfServer::start(&testbed, TcpKind::Tcp, PORT)?;
    let quic_server = if scenario.quic { Some(QuicServer::start(&testbed)?) } else { None };
    let scenario_run = ScenarioRun { scenario, testbed: &testbed, plan, server, quic_server };
    scenario_run.measure_all_links(&mut rows);
    if Plan::measures_single_links(scenario) {
        scenario_run.measure_single_links(&mut rows);
    }
    drop(iperf);
    Ok(rows)
}

/// Measures the kernel's Multipath TCP before the tunnel starts.
fn measure_kernel_mptcp(testbed: &Testbed, scenario: &Scenario, plan: Plan, rows: &mut [Row]) {
    let iperf = catch_panic(|| mptcp::prepare(testbed, scenario.links.len()));
    for row in rows.iter_mut().filter(|row| matches!(row.load, Load::Tcp(..))) {
        if let Err(why) = &iperf {
            row.mptcp = Some(Err(why.clone()));
            continue;
        }
        let run =
            || catch_panic(|| mptcp::run(testbed, scenario, row.load, row.direction, plan.seconds(scenario)));
        let found = (0..plan.runs)
            .map(|_| run())
            .collect::<Result<_, _>>()
            .map(|rates| median(rates).unwrap_or(f64::NAN));
        eprintln!("    kernel MPTCP, {}, {:?}: {}", row.load.name(), row.direction, rate_or_error(&found));
        row.mptcp = Some(found);
    }
}

/// A testbed with a server, and the state of a scenario's runs.
struct ScenarioRun<'a> {
    scenario: &'a Scenario,
    testbed: &'a Testbed,
    plan: Plan,
    server: MpvpnProcess,
    quic_server: Option<QuicServer>,
}

impl ScenarioRun<'_> {
    /// Applies `change` to all links, starts a client over all links or over link `only`, and waits until its
    /// paths are active.
    fn client(&self, only: Option<usize>, change: &Change) -> Result<MpvpnProcess, String> {
        for (number, spec) in (1..).zip(&self.scenario.links) {
            let link = self.testbed.link(number);
            change.apply(link.handle(), spec).map_err(|error| format!("link {number}: {error}"))?;
        }
        let options = &self.scenario.client;
        let pipes = options.pipes.map(|pipes| pipes.to_string());
        let device = only.map(|index| format!("eth{}", index + 1));
        let args = [
            ("--scheduler", options.scheduler.as_deref()),
            ("--cc", options.cc.as_deref()),
            ("--pipes", pipes.as_deref()),
            ("--lane", (self.scenario.flow_mode == FlowMode::Stream).then_some("stream")),
            ("--path", device.as_deref()),
        ];
        let args: Vec<&str> =
            args.iter().filter_map(|(key, value)| Some([*key, (*value)?])).flatten().collect();
        let client = self.testbed.client(&args);
        let used = |index: &usize| only.is_none_or(|only| only == *index);
        for index in (0..self.scenario.links.len()).filter(used) {
            client.wait_for_path(&format!("eth{}", index + 1), "active", PATHS_TIMEOUT);
        }
        Ok(client)
    }

    /// Measures every row over all links.
    fn measure_all_links(&self, rows: &mut [Row]) {
        let mut client = None;
        for row in &mut *rows {
            for _ in 0..self.plan.runs(self.scenario) {
                let measured = self.run_with_client(&mut client, &Change::Restore, row);
                row.runs.push(measured);
            }
            eprintln!("    {}, {:?}: {}", row.load.name(), row.direction, rate_or_error(&row.mbit()));
        }
        if self.scenario.bars.max_repair.is_none() {
            return;
        }
        // A new client, which has not measured losses.
        client = None;
        for row in rows {
            let measured = self.run_with_client(&mut client, &Change::Set("loss=0".to_owned()), row);
            let found = measured.arrived.as_ref().map(|arrived| arrived.mbit).map_err(Clone::clone);
            eprintln!(
                "    without loss, {}, {:?}: {}",
                row.load.name(),
                row.direction,
                rate_or_error(&found)
            );
            row.clean = Some(measured);
        }
    }

    /// A run with `client`; if there is none that works, with a new one over links to which `change` was
    /// applied.
    fn run_with_client(&self, client: &mut Option<MpvpnProcess>, change: &Change, row: &Row) -> RunResult {
        let measured = catch_panic(|| {
            if client.as_mut().is_none_or(|process| !process.is_running()) {
                *client = None;
                *client = Some(self.client(None, change)?);
            }
            self.run(client.as_ref().ok_or("no client")?, row)
        });
        let measured = measured.unwrap_or_else(RunResult::failed);
        if measured.arrived.is_err() {
            // The next run gets a new client.
            *client = None;
        }
        measured
    }

    /// Measures every row over each candidate for the best single link.
    fn measure_single_links(&self, rows: &mut [Row]) {
        let directions = self.scenario.directions.iter();
        let mut candidates: Vec<usize> =
            directions.flat_map(|direction| self.scenario.best_link_candidates(*direction)).collect();
        candidates.sort_unstable();
        candidates.dedup();
        for index in candidates {
            let client = catch_panic(|| self.client(Some(index), &Change::Restore));
            for row in &mut *rows {
                let run = || {
                    client.as_ref().map_err(Clone::clone)?;
                    catch_panic(|| self.traffic(row, self.plan.seconds(self.scenario))?.finish())
                };
                let runs: Result<Vec<_>, _> =
                    (0..self.plan.runs).map(|_| run().map(|arrived| arrived.mbit)).collect();
                let found = runs.map(|rates| median(rates).unwrap_or(f64::NAN));
                let (load, direction) = (row.load.name(), row.direction);
                eprintln!("    link {} alone, {load}, {direction:?}: {}", index + 1, rate_or_error(&found));
                row.singles.push((index + 1, found));
            }
        }
    }

    fn traffic(&self, row: &Row, seconds: u32) -> Result<LoadRun, String> {
        match (row.load, &self.quic_server) {
            (Load::Quic, Some(quic_server)) => LoadRun::quic(self.testbed, quic_server, TUNNEL, seconds),
            (Load::Quic, None) => Err("there is no QUIC server".to_owned()),
            (load, _) => {
                Iperf::start(self.testbed, TcpKind::Tcp, (TUNNEL, PORT), load, row.direction, seconds)
                    .map(LoadRun::Iperf)
            }
        }
    }

    fn run(&self, client: &MpvpnProcess, row: &Row) -> Result<RunResult, String> {
        let sender = if row.direction == Direction::Up { client } else { &self.server };
        let before = (self.sent(row.direction), resent(sender.socket()));
        let watch = PathRateWatch::start(client.socket(), row.direction);
        let run = || {
            if self.scenario.event.is_empty() {
                let run = self.traffic(row, self.plan.seconds(self.scenario));
                return Ok(RunResult {
                    arrived: run.and_then(LoadRun::finish),
                    ..RunResult::failed(String::new())
                });
            }
            let start = |seconds| self.traffic(row, seconds);
            let run_with_events =
                impairment::run_with_events(self.testbed, self.scenario, row.direction, start)?;
            Ok(RunResult {
                arrived: run_with_events.arrived,
                impairments: run_with_events.impairments,
                lost_pings: Some(run_with_events.lost_pings),
                quiet_connection: Some(run_with_events.quiet_connection),
                ..RunResult::failed(String::new())
            })
        };
        let measured = catch_panic(run);
        let path_rates = watch.finish();
        let (sent, after) = (self.sent(row.direction) - before.0, resent(sender.socket()));
        let resent = before.1.zip(after).map(|(before, after)| after.since(before));
        Ok(RunResult { sent, path_rates, resent, ..measured? })
    }

    /// Bytes that entered all links in a direction so far; lost packets are counted with the mean size.
    fn sent(&self, direction: Direction) -> f64 {
        let of_link = |number| {
            let LinkStats { up, down } = self.testbed.link(number).handle().stats().unwrap_or_default();
            let counters = if direction == Direction::Up { up } else { down };
            let packets = counters.packets + counters.dropped_loss + counters.dropped_queue;
            counters.bytes as f64 * packets as f64 / (counters.packets.max(1)) as f64
        };
        (1..=self.scenario.links.len()).map(of_link).sum()
    }
}

impl RunResult {
    /// The result of a run that failed for the reason `why`.
    fn failed(why: String) -> Self {
        Self {
            arrived: Err(why),
            sent: f64::NAN,
            path_rates: PathRates::default(),
            resent: None,
            impairments: Vec::new(),
            lost_pings: None,
            quiet_connection: None,
        }
    }
}

impl Row {
    /// Median goodput of the runs, Mbit/s, or the first error.
    pub(crate) fn mbit(&self) -> Result<f64, String> {
        let rates = self.runs.iter().map(|run| Ok(run.arrived.as_ref().map_err(Clone::clone)?.mbit));
        rates.collect::<Result<Vec<_>, String>>().map(|rates| median(rates).unwrap_or(f64::NAN))
    }

    /// Number and goodput (Mbit/s) of the best single link.
    pub(crate) fn best_single(&self) -> Option<(usize, f64)> {
        let known = self.singles.iter().filter_map(|(number, rate)| Some((*number, *rate.as_ref().ok()?)));
        known.max_by(|a, b| a.1.total_cmp(&b.1))
    }
}

fn rate_or_error(found: &Result<f64, String>) -> String {
    found.as_ref().map_or_else(Clone::clone, |mbit| format!("{mbit:.1} Mbit/s"))
}
