//! Three classes over three links (nine paths) with load in all classes, while the links fail one after the
//! other: no class may block another, and memory must not grow.
//!
//! The gaps under load are compared with those without load, which are measured first.

use std::{
    thread,
    time::{Duration, SystemTime},
};

use mpvpn_tests::{
    call::DENSE,
    iperf::{IperfRun, IperfServer},
    ping::Pings,
    testbed::{Direction, Host, TUNNEL},
    usage::peak_memory,
};
use serde_json::json;

use super::{
    RIG,
    class_testbed::{ALL_CLASSES, BULK, CRITICAL, ClassTestbed, ClassTraffic, DEFAULT},
};
use crate::{
    figure::{Bar, figure_with_note},
    median::median,
    options::Options,
    report::Outcome,
};

/// Links of different rates and delays.
const LINKS: [&str; 3] =
    ["30mbit,15ms,queue=60ms", "30mbit,20ms,jitter=3ms,queue=60ms", "20mbit,25ms,queue=60ms"];
/// How long all links are up between failures, and how long a failed link is down.
const LINK_UP_TIME: Duration = Duration::from_secs(3);
const LINK_DOWN_TIME: Duration = Duration::from_secs(2);
/// Bar: longest gap between replies of a call when a link fails silently, ms; as in the rig `cut`.
const MAX_GAP_MS: f64 = 300.0;
/// Bar: peak memory of each end, MB.
const MAX_MEMORY_MB: f64 = 96.0;
/// Gaps are searched from this long before a failure, so that the last reply before it counts.
const LOOK_BACK: Duration = Duration::from_millis(100);

/// The classes with calls.
const CALL_CLASSES: [ClassTraffic; 2] = [CRITICAL, DEFAULT];

/// How a link fails.
#[derive(Clone, Copy, PartialEq, Eq)]
enum FlapKind {
    Silent,
    Unplugged,
}

/// A failure of a link.
struct Flap {
    from: SystemTime,
    to: SystemTime,
}

/// Failures in a period, and the results of the calls meanwhile.
struct FlapResult {
    flaps: Vec<Flap>,
    calls: Vec<Pings>,
    period: (SystemTime, SystemTime),
}

pub(super) fn run(options: &Options) -> Result<Outcome, String> {
    let seconds = if options.quick { 60 } else { 600 };
    let setup = ClassTestbed::new(&LINKS, "", &ALL_CLASSES)?;
    let alone = flap_links(&setup, 6)?;
    let loads = Loads::start(&setup, seconds);
    let rounds = seconds / (LINK_UP_TIME + LINK_DOWN_TIME).as_secs() as u32;
    let loaded = flap_links(&setup, rounds)?;
    let rates = loads.finish();

    let mut outcome = Outcome::default();
    let mut note = |which: String, note: &str, value, unit, bar| {
        outcome.figures.push(figure_with_note(RIG, format!("nine tunnels: {which}"), note, value, unit, bar));
    };
    for (at, line) in CALL_CLASSES.iter().enumerate() {
        let gaps = [&alone, &loaded].map(|result| result.gaps_ms(at));
        for (when, gaps) in ["alone", "under load"].iter().zip(&gaps) {
            let what = format!("{}, gap by a link that goes, {when}, median", line.class);
            note(
                what,
                &format!("of {}", gaps.len()),
                median(gaps.clone()).unwrap_or(f64::NAN),
                "ms",
                Bar::Lower,
            );
        }
        let mut ask = |which, value, bar| note(which, "", value, "ms", bar);
        let worst = |result: &FlapResult| result.longest_ms(at);
        ask(format!("{}, longest gap alone", line.class), worst(&alone), Bar::Lower);
        let what = format!("{}, longest gap in {seconds} s under load", line.class);
        ask(what, worst(&loaded), Bar::AtMost(MAX_GAP_MS));
    }
    for (what, rate) in ["default down", "bulk up", "bulk down"].iter().zip(&rates.mbit) {
        note(format!("{what}, mean"), "", *rate, "Mbit/s", Bar::Higher);
    }
    for (end, process) in [("client", &setup.client), ("server", &setup.server)] {
        let most = peak_memory(process.id()).map_or(f64::NAN, |bytes| bytes as f64 / 1e6);
        note(format!("memory of the {end} at most"), "", most, "MB", Bar::AtMost(MAX_MEMORY_MB));
    }
    let gaps = |result: &FlapResult| json!([result.gaps_ms(0), result.gaps_ms(1)]);
    outcome.raw = json!({ "gaps_alone_ms": gaps(&alone), "gaps_ms": gaps(&loaded), "mbit": rates.mbit,
                          "idle_seconds": rates.silent_seconds });
    Ok(outcome)
}

impl FlapResult {
    /// The longest gap around each failure, ms.
    fn gaps_ms(&self, call: usize) -> Vec<f64> {
        let gap = |flap: &Flap| self.calls[call].longest_gap(flap.from - LOOK_BACK, flap.to + LOOK_BACK);
        self.flaps.iter().map(|flap| gap(flap).as_secs_f64() * 1e3).collect()
    }

    /// The longest gap in the whole period, ms.
    fn longest_ms(&self, call: usize) -> f64 {
        self.calls[call].longest_gap(self.period.0, self.period.1).as_secs_f64() * 1e3
    }
}

/// Lets the links fail one after the other, silently and by carrier loss in turn, with calls in two classes.
fn flap_links(setup: &ClassTestbed, rounds: u32) -> Result<FlapResult, String> {
    let calls: Vec<_> = CALL_CLASSES.iter().map(|line| line.call(setup, DENSE)).collect::<Result<_, _>>()?;
    let mut flaps = Vec::new();
    // Wait for the first replies.
    thread::sleep(LOOK_BACK);
    let began = SystemTime::now();
    for round in 0..rounds {
        thread::sleep(LINK_UP_TIME);
        let link = setup.testbed.link(round as usize % LINKS.len() + 1);
        let kind = [FlapKind::Silent, FlapKind::Unplugged][round as usize / LINKS.len() % 2];
        let from = SystemTime::now();
        match kind {
            FlapKind::Silent => link.silence(Direction::Both),
            FlapKind::Unplugged => link.cut(),
        }
        thread::sleep(LINK_DOWN_TIME);
        match kind {
            FlapKind::Silent => link.end_silence(),
            FlapKind::Unplugged => link.restore(),
        }
        flaps.push(Flap { from, to: SystemTime::now() });
    }
    let period = (began, SystemTime::now());
    let calls = calls.into_iter().map(|call| call.finish()).collect::<Result<_, _>>()?;
    Ok(FlapResult { flaps, calls, period })
}

/// The loads of all classes.
struct Loads {
    runs: Vec<IperfRun>,
    _iperf_servers: Vec<IperfServer>,
}

/// Results of the loads.
struct Rates {
    mbit: Vec<f64>,
    /// Number of seconds in which nothing arrived, by load.
    silent_seconds: Vec<usize>,
}

impl Loads {
    fn start(setup: &ClassTestbed, seconds: u32) -> Self {
        let directions = [
            (DEFAULT.port, 2, Direction::Down),
            (BULK.port, 4, Direction::Up),
            (BULK.port + 2, 4, Direction::Down),
        ];
        let listen =
            |(port, ..): (u16, u32, Direction)| IperfServer::start(&setup.testbed, Host::Server, port);
        let iperf_servers: Vec<IperfServer> = directions.map(listen).into();
        let start = |(iperf, (_, flows, direction)): (&IperfServer, (u16, u32, Direction))| {
            iperf.tcp(&setup.testbed, Host::Client, TUNNEL, flows, direction, seconds)
        };
        let runs = iperf_servers.iter().zip(directions).map(start).collect();
        Self { runs, _iperf_servers: iperf_servers }
    }

    fn finish(self) -> Rates {
        let reports: Vec<_> = self.runs.into_iter().map(IperfRun::finish).collect();
        let silent_seconds = |seconds: &[f64]| seconds.iter().filter(|rate| **rate <= 0.0).count();
        Rates {
            mbit: reports.iter().map(|report| report.megabits()).collect(),
            silent_seconds: reports.iter().map(|report| silent_seconds(&report.seconds)).collect(),
        }
    }
}
