//! Nine tunnels at once, three classes over three links, with loads in all of them while the links come and go one after
//! the other: no class is ever blocked by another, and neither end grows.
//!
//! What a class waits for at most is what the loss of a link costs alone; that is measured first, without any load.

use std::{
    thread,
    time::{Duration, SystemTime},
};

use mpvpn_tests::{
    call::DENSE,
    ping::Pings,
    stage::{Direction, Place, TUNNEL},
    tcp::{Run, Sink, Way},
    usage::peak_memory,
};
use serde_json::json;

use super::{
    RIG,
    scene::{BULK, CRITICAL, DEFAULT, Line, Scene, THREE},
};
use crate::{
    figure::{Bar, noted},
    options::Options,
    paths::play::median,
    report::Outcome,
};

const LINKS: [&str; 3] =
    ["30mbit,15ms,queue=60ms", "30mbit,20ms,jitter=3ms,queue=60ms", "20mbit,25ms,queue=60ms"];
/// A link is whole, and then gone.
const WHOLE: Duration = Duration::from_secs(3);
const GONE: Duration = Duration::from_secs(2);
/// What a link that goes silent may cost, ms: as in the rig `cut`.
const LONGEST_GAP: f64 = 300.0;
/// Each end, MB.
const MOST_MEMORY: f64 = 96.0;
/// The last answer before a cut may be as old.
const BEFORE: Duration = Duration::from_millis(100);

/// The two classes whose calls go on.
const CALLING: [Line; 2] = [CRITICAL, DEFAULT];

/// How a link goes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Silent,
    Unplugged,
}

/// A link was gone.
struct Flap {
    from: SystemTime,
    to: SystemTime,
}

/// What the calls of a time with flaps say.
struct Found {
    flaps: Vec<Flap>,
    calls: Vec<Pings>,
    whole: (SystemTime, SystemTime),
}

pub(super) fn run(options: &Options) -> Result<Outcome, String> {
    let seconds = if options.quick { 60 } else { 600 };
    let scene = Scene::new(&LINKS, "", &THREE)?;
    let alone = flapping(&scene, 6)?;
    let loads = Loads::start(&scene, seconds);
    let rounds = seconds / (WHOLE + GONE).as_secs() as u32;
    let loaded = flapping(&scene, rounds)?;
    let rates = loads.finish();

    let mut outcome = Outcome::default();
    let mut note = |which: String, note: &str, value, unit, bar| {
        outcome.figures.push(noted(RIG, format!("nine tunnels: {which}"), note, value, unit, bar));
    };
    for (at, line) in CALLING.iter().enumerate() {
        let gaps = [&alone, &loaded].map(|found| found.gaps_ms(at));
        for (when, gaps) in ["alone", "under load"].iter().zip(&gaps) {
            let what = format!("{}, gap by a link that goes, {when}, median", line.class);
            note(what, &format!("of {}", gaps.len()), median(gaps.clone()), "ms", Bar::Lower);
        }
        let mut ask = |which, value, bar| note(which, "", value, "ms", bar);
        let worst = |found: &Found| found.longest_ms(at);
        ask(format!("{}, longest gap alone", line.class), worst(&alone), Bar::Lower);
        let what = format!("{}, longest gap in {seconds} s under load", line.class);
        ask(what, worst(&loaded), Bar::AtMost(LONGEST_GAP));
    }
    for (what, rate) in ["default down", "bulk up", "bulk down"].iter().zip(&rates.mbit) {
        note(format!("{what}, mean"), "", *rate, "Mbit/s", Bar::Higher);
    }
    for (end, peer) in [("client", &scene.client), ("server", &scene.server)] {
        let most = peak_memory(peer.id()).map_or(f64::NAN, |bytes| bytes as f64 / 1e6);
        note(format!("memory of the {end} at most"), "", most, "MB", Bar::AtMost(MOST_MEMORY));
    }
    let gaps = |found: &Found| json!([found.gaps_ms(0), found.gaps_ms(1)]);
    outcome.raw = json!({ "gaps_alone_ms": gaps(&alone), "gaps_ms": gaps(&loaded), "mbit": rates.mbit,
                          "idle_seconds": rates.idle });
    Ok(outcome)
}

impl Found {
    /// The longest time without an answer around each flap.
    fn gaps_ms(&self, call: usize) -> Vec<f64> {
        let gap = |flap: &Flap| self.calls[call].longest_gap(flap.from - BEFORE, flap.to + BEFORE);
        self.flaps.iter().map(|flap| gap(flap).as_secs_f64() * 1e3).collect()
    }

    /// The longest time without an answer at all.
    fn longest_ms(&self, call: usize) -> f64 {
        self.calls[call].longest_gap(self.whole.0, self.whole.1).as_secs_f64() * 1e3
    }
}

/// Takes the links away one after the other, each way in turn, with calls in two classes.
fn flapping(scene: &Scene, rounds: u32) -> Result<Found, String> {
    let calls: Vec<_> = CALLING.iter().map(|line| line.call(scene, DENSE)).collect::<Result<_, _>>()?;
    let mut flaps = Vec::new();
    // The first answers are under way.
    thread::sleep(BEFORE);
    let began = SystemTime::now();
    for round in 0..rounds {
        thread::sleep(WHOLE);
        let link = scene.stage.link(round as usize % LINKS.len() + 1);
        let kind = [Kind::Silent, Kind::Unplugged][round as usize / LINKS.len() % 2];
        let from = SystemTime::now();
        match kind {
            Kind::Silent => link.silence(Direction::Both),
            Kind::Unplugged => link.cut(),
        }
        thread::sleep(GONE);
        match kind {
            Kind::Silent => link.heal(),
            Kind::Unplugged => link.restore(),
        }
        flaps.push(Flap { from, to: SystemTime::now() });
    }
    let whole = (began, SystemTime::now());
    let calls = calls.into_iter().map(|call| call.finish()).collect::<Result<_, _>>()?;
    Ok(Found { flaps, calls, whole })
}

/// What every class has to do meanwhile.
struct Loads {
    runs: Vec<Run>,
    _sinks: Vec<Sink>,
}

/// What came of it.
struct Rates {
    mbit: Vec<f64>,
    /// Seconds in which nothing arrived.
    idle: Vec<usize>,
}

impl Loads {
    fn start(scene: &Scene, seconds: u32) -> Self {
        let ways = [(DEFAULT.port, 2, Way::Down), (BULK.port, 4, Way::Up), (BULK.port + 2, 4, Way::Down)];
        let listen = |(port, ..): (u16, u32, Way)| Sink::start(&scene.stage, Place::Server, port);
        let sinks: Vec<Sink> = ways.map(listen).into();
        let start = |(sink, (_, flows, way)): (&Sink, (u16, u32, Way))| {
            sink.tcp(&scene.stage, Place::Client, TUNNEL, flows, way, seconds)
        };
        let runs = sinks.iter().zip(ways).map(start).collect();
        Self { runs, _sinks: sinks }
    }

    fn finish(self) -> Rates {
        let reports: Vec<_> = self.runs.into_iter().map(Run::finish).collect();
        let idle = |seconds: &[f64]| seconds.iter().filter(|rate| **rate <= 0.0).count();
        Rates {
            mbit: reports.iter().map(|report| report.megabits()).collect(),
            idle: reports.iter().map(|report| idle(&report.seconds)).collect(),
        }
    }
}
