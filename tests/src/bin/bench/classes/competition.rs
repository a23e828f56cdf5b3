//! Classes that want more than a link carries: a call beside a backup, the share of everything else, and whether what
//! nobody else wants is used.

use std::time::{Duration, Instant};

use mpvpn_lab::Direction;
use mpvpn_tests::{call::G711, ping::Pings};
use serde_json::{Value, json};

use super::{
    RIG, measured,
    scene::{BULK, CRITICAL, DEFAULT, Line, Scene},
    tell_call,
};
use crate::{
    figure::{Bar, figure},
    options::Options,
    parts::{name, ways},
    paths::{
        load::{Load, START_UP},
        plan::caught,
    },
    report::Outcome,
};

const LINK: &str = "50mbit,6.5ms,queue=60ms";
/// The same as the client's file says it.
const GIVEN: &str = "[[link]]\nname = \"eth1\"\nup = \"50mbit\"\ndown = \"50mbit\"\n";
/// The same, bytes a second.
const RATE: f64 = 50e6 / 8.0;
/// Flows of bulk, and of default.
const FLOWS: (u32, u32) = (16, 4);
/// How long the call has the link for itself.
const IDLE: Duration = Duration::from_secs(5);

/// What the client is told.
struct Case {
    title: &'static str,
    before: &'static str,
    default: Line,
    /// What is default's by that, if both want more than there is.
    share: f64,
}

const CASES: [Case; 3] = [
    Case { title: "rate given, 4 to 1", before: GIVEN, default: DEFAULT, share: 0.8 },
    Case { title: "rate measured, 4 to 1", before: "", default: DEFAULT, share: 0.8 },
    // 20 of 50 Mbit/s first, and half of the rest.
    Case {
        title: "rate given, min = 20mbit, 1 to 1",
        before: GIVEN,
        default: DEFAULT.with("min = \"20mbit\"\nweight = 1"),
        share: 0.7,
    },
];

/// What was found of a case in one direction.
struct Found {
    idle: Pings,
    /// With bulk alone, and with bulk and default.
    calls: [Pings; 2],
    /// Bulk's goodput alone, then that of bulk and default together, Mbit/s.
    mbit: [f64; 3],
    /// What the link delivered in these two runs, of what it carries.
    used: [f64; 2],
}

impl Found {
    fn share(&self) -> f64 {
        self.mbit[2] / (self.mbit[1] + self.mbit[2])
    }
}

pub(super) fn run(options: &Options) -> Result<Outcome, String> {
    let seconds = if options.quick { 6 } else { 10 };
    let mut outcome = Outcome {
        chapter: "\n## Classes that want more than a link carries\n\n| link | way | call idle, 99 % in ms | beside bulk | \
                  beside both | calls lost | bulk alone, Mbit/s | link used, % | bulk, default, Mbit/s | default's share, % |\n\
                  |---|---|---:|---:|---:|---:|---:|---:|---:|---:|\n"
            .to_owned(),
        ..Outcome::default()
    };
    let mut raw = Vec::new();
    for case in &CASES {
        // One case that fails is a figure that is missing, not the end of the others.
        if let Err(why) = caught(|| play(case, seconds, options, &mut outcome, &mut raw)) {
            eprintln!("  {}: {why}", case.title);
            let what = format!("{}: it cannot be measured", case.title);
            outcome.figures.push(figure(RIG, what, f64::NAN, "", Bar::AtLeast(0.0)));
            raw.push(json!({ "case": case.title, "error": why }));
        }
    }
    outcome.raw = Value::Array(raw);
    Ok(outcome)
}

fn play(
    case: &Case,
    seconds: u32,
    options: &Options,
    outcome: &mut Outcome,
    raw: &mut Vec<Value>,
) -> Result<(), String> {
    let scene = Scene::new(&[LINK], case.before, &[CRITICAL, case.default, BULK])?;
    let _sinks = [BULK.sink(&scene)?, case.default.sink(&scene)?];
    for &way in ways(options.quick) {
        let what = format!("{}, {}", case.title, name(way));
        let found = measured(&what, options, outcome, || measure(&scene, case, way, seconds, options))?;
        tell(case, way, &found, outcome);
        raw.push(told(case, way, &found));
    }
    let what = format!("{}, both ways", case.title);
    let found = measured(&what, options, outcome, || both_ways(&scene, seconds, options))?;
    raw.push(tell_both(&what, &found, outcome));
    Ok(())
}

/// What was found of a case with bulk filling both ways at once.
struct Both {
    idle: Pings,
    beside: Pings,
    /// Bulk's goodput up and down, Mbit/s, and what the link delivered of what it carries.
    mbit: [f64; 2],
    used: [f64; 2],
}

fn both_ways(scene: &Scene, seconds: u32, options: &Options) -> Result<Both, String> {
    let back = Line { port: BULK.port + 2, ..BULK };
    let _sink = back.sink(scene)?;
    let call = CRITICAL.call(scene, G711)?;
    std::thread::sleep(IDLE);
    let idle = call.finish()?;
    let tcp = Load::Tcp(FLOWS.0, options.inner);
    let up = BULK.load(scene, tcp, Direction::Up, seconds)?;
    let down = back.load(scene, tcp, Direction::Down, seconds)?;
    std::thread::sleep(Duration::from_secs(START_UP.into()));
    let (from, call) = (Instant::now(), CRITICAL.call(scene, G711)?);
    let mbit = [up.finish()?.mbit, down.finish()?.mbit];
    let beside = call.finish()?;
    let used = [used(scene, Direction::Up, from, seconds)?, used(scene, Direction::Down, from, seconds)?];
    Ok(Both { idle, beside, mbit, used })
}

fn tell_both(what: &str, found: &Both, outcome: &mut Outcome) -> Value {
    let mut ask = |which: &str, value, unit, bar| {
        outcome.figures.push(figure(RIG, format!("{what}: {which}"), value, unit, bar));
    };
    ask("call beside bulk, lost", found.beside.lost() as f64, "", Bar::AtMost(0.0));
    let more = found.beside.rtt_ms(99) - found.idle.rtt_ms(99);
    ask("call beside bulk, 99 % over idle", more, "ms", Bar::AtMost(5.0));
    for (way, used) in ["up", "down"].iter().zip(found.used) {
        ask(&format!("bulk uses of the link {way}"), 100.0 * used, "%", Bar::AtLeast(95.0));
    }
    let line = format!(
        "| {what} |  | {:.2} | {:.2} |  | {} | {:.1}, {:.1} | {:.1}, {:.1} |  |  |\n",
        found.idle.rtt_ms(99),
        found.beside.rtt_ms(99),
        found.beside.lost(),
        found.mbit[0],
        found.mbit[1],
        100.0 * found.used[0],
        100.0 * found.used[1],
    );
    eprint!("{line}");
    outcome.chapter += &line;
    json!({ "case": what, "idle": tell_call(&found.idle), "beside_bulk": tell_call(&found.beside),
            "bulk_mbit": found.mbit, "used": found.used })
}

fn measure(
    scene: &Scene,
    case: &Case,
    way: Direction,
    seconds: u32,
    options: &Options,
) -> Result<Found, String> {
    let call = CRITICAL.call(scene, G711)?;
    std::thread::sleep(IDLE);
    let idle = call.finish()?;
    let tcp = |flows| Load::Tcp(flows, options.inner);
    // The call comes when the load is there.
    let begun = Duration::from_secs(START_UP.into());

    let bulk = BULK.load(scene, tcp(FLOWS.0), way, seconds)?;
    std::thread::sleep(begun);
    let (from, call) = (Instant::now(), CRITICAL.call(scene, G711)?);
    let alone = bulk.finish()?.mbit;
    let beside_bulk = call.finish()?;
    let used_alone = used(scene, way, from, seconds)?;

    let bulk = BULK.load(scene, tcp(FLOWS.0), way, seconds)?;
    let default = case.default.load(scene, tcp(FLOWS.1), way, seconds)?;
    std::thread::sleep(begun);
    let (from, call) = (Instant::now(), CRITICAL.call(scene, G711)?);
    let (bulk, default) = (bulk.finish()?.mbit, default.finish()?.mbit);
    let beside_both = call.finish()?;
    let used = [used_alone, used(scene, way, from, seconds)?];
    Ok(Found { idle, calls: [beside_bulk, beside_both], mbit: [alone, bulk, default], used })
}

/// What the link delivered in these seconds, of what it carries. The last half second is left out, as iperf3 ends then.
fn used(scene: &Scene, way: Direction, from: Instant, seconds: u32) -> Result<f64, String> {
    let time = Duration::from_secs(seconds.into()) - Duration::from_millis(500);
    let history = scene.stage.link(1).handle().history().map_err(|error| error.to_string())?;
    Ok(history.between(way, from, from + time) as f64 / (RATE * time.as_secs_f64()))
}

fn tell(case: &Case, way: Direction, found: &Found, outcome: &mut Outcome) {
    let what = format!("{}, {}", case.title, name(way));
    let mut ask = |which: &str, value, unit, bar| {
        outcome.figures.push(figure(RIG, format!("{what}: {which}"), value, unit, bar));
    };
    for (with, calls) in ["bulk", "bulk and default"].iter().zip(&found.calls) {
        ask(&format!("call beside {with}, lost"), calls.lost() as f64, "", Bar::AtMost(0.0));
        let more = calls.rtt_ms(99) - found.idle.rtt_ms(99);
        ask(&format!("call beside {with}, 99 % over idle"), more, "ms", Bar::AtMost(5.0));
    }
    ask("bulk uses of the link", 100.0 * found.used[0], "%", Bar::AtLeast(95.0));
    ask("both use of the link", 100.0 * found.used[1], "%", Bar::Higher);
    let off = 100.0 * (found.share() / case.share - 1.0).abs();
    ask("default's share, off by", off, "%", Bar::AtMost(5.0));
    let line = format!(
        "| {} | {} | {:.2} | {:.2} | {:.2} | {} | {:.1} | {:.1} | {:.1}, {:.1} | {:.1} of {:.0} |\n",
        case.title,
        name(way),
        found.idle.rtt_ms(99),
        found.calls[0].rtt_ms(99),
        found.calls[1].rtt_ms(99),
        found.calls[0].lost() + found.calls[1].lost(),
        found.mbit[0],
        100.0 * found.used[0],
        found.mbit[1],
        found.mbit[2],
        100.0 * found.share(),
        100.0 * case.share,
    );
    eprint!("{line}");
    outcome.chapter += &line;
}

fn told(case: &Case, way: Direction, found: &Found) -> Value {
    json!({ "case": case.title, "way": name(way), "idle": tell_call(&found.idle),
            "beside_bulk": tell_call(&found.calls[0]), "beside_both": tell_call(&found.calls[1]), "bulk_alone_mbit": found.mbit[0], "bulk_mbit": found.mbit[1],
            "default_mbit": found.mbit[2], "used": found.used })
}
