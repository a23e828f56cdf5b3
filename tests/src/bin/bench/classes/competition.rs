//! Classes whose demand exceeds the link's rate: quality of a call beside bulk traffic, shares of the
//! classes, and utilization of the link.

use std::time::{Duration, Instant};

use mpvpn_lab::Direction;
use mpvpn_tests::{call::G711, ping::Pings};
use serde_json::{Value, json};

use super::{
    RIG, call_json,
    class_testbed::{BULK, CRITICAL, ClassTestbed, ClassTraffic, DEFAULT},
    measured,
};
use crate::{
    figure::{Bar, figure},
    options::Options,
    parts::{direction_name, directions},
    paths::{
        load::{Load, START_UP_SECONDS},
        plan::catch_panic,
    },
    report::Outcome,
};

/// The link, whose rate the classes share.
const LINK: &str = "50mbit,6.5ms,queue=60ms";
/// The link's rate in the client's configuration.
const CONFIGURED_RATE: &str = "[[link]]\nname = \"eth1\"\nup = \"50mbit\"\ndown = \"50mbit\"\n";
/// The link's rate, bytes per second.
const LINK_BYTES_PER_SECOND: f64 = 50e6 / 8.0;
/// TCP flows of `bulk` and of `default`.
const FLOWS: (u32, u32) = (16, 4);
/// Duration of the call without other traffic.
const IDLE_CALL_TIME: Duration = Duration::from_secs(5);

/// A configuration of the client.
struct Case {
    title: &'static str,
    before: &'static str,
    default: ClassTraffic,
    /// The configured share of `default` if both classes have more demand than the link's rate.
    share: f64,
}

const CASES: [Case; 3] = [
    Case { title: "rate given, 4 to 1", before: CONFIGURED_RATE, default: DEFAULT, share: 0.8 },
    Case { title: "rate measured, 4 to 1", before: "", default: DEFAULT, share: 0.8 },
    // min is 20 of 50 Mbit/s; the rest is shared equally.
    Case {
        title: "rate given, min = 20mbit, 1 to 1",
        before: CONFIGURED_RATE,
        default: DEFAULT.with("min = \"20mbit\"\nweight = 1"),
        share: 0.7,
    },
];

/// Results of a case in one direction.
struct CaseResult {
    idle: Pings,
    /// Calls beside `bulk`, and beside `bulk` and `default`.
    calls: [Pings; 2],
    /// Goodput of `bulk` alone, then of `bulk` and of `default` together, Mbit/s.
    mbit: [f64; 3],
    /// Utilization of the link in both runs, 0 to 1.
    utilization: [f64; 2],
}

impl CaseResult {
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
        // A case that fails adds a missed figure, and the other cases still run.
        if let Err(why) = catch_panic(|| play(case, seconds, options, &mut outcome, &mut raw)) {
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
    let setup = ClassTestbed::new(&[LINK], case.before, &[CRITICAL, case.default, BULK])?;
    let _iperf_servers = [BULK.iperf(&setup)?, case.default.iperf(&setup)?];
    for &direction in directions(options.quick) {
        let what = format!("{}, {}", case.title, direction_name(direction));
        let result =
            measured(&what, options, outcome, || measure(&setup, case, direction, seconds, options))?;
        add_figures(case, direction, &result, outcome);
        raw.push(case_json(case, direction, &result));
    }
    let what = format!("{}, both ways", case.title);
    let result = measured(&what, options, outcome, || both_ways(&setup, seconds, options))?;
    raw.push(add_both_figures(&what, &result, outcome));
    Ok(())
}

/// Results with `bulk` in both directions at the same time.
struct BothDirections {
    idle: Pings,
    beside: Pings,
    /// Goodput of `bulk` up and down, Mbit/s, and utilization of the link, 0 to 1.
    mbit: [f64; 2],
    utilization: [f64; 2],
}

fn both_ways(setup: &ClassTestbed, seconds: u32, options: &Options) -> Result<BothDirections, String> {
    let back = ClassTraffic { port: BULK.port + 2, ..BULK };
    let _iperf = back.iperf(setup)?;
    let call = CRITICAL.call(setup, G711)?;
    std::thread::sleep(IDLE_CALL_TIME);
    let idle = call.finish()?;
    let tcp = Load::Tcp(FLOWS.0, options.inner);
    let up = BULK.load(setup, tcp, Direction::Up, seconds)?;
    let down = back.load(setup, tcp, Direction::Down, seconds)?;
    std::thread::sleep(Duration::from_secs(START_UP_SECONDS.into()));
    let (from, call) = (Instant::now(), CRITICAL.call(setup, G711)?);
    let mbit = [up.finish()?.mbit, down.finish()?.mbit];
    let beside = call.finish()?;
    let utilization = [
        utilization(setup, Direction::Up, from, seconds)?,
        utilization(setup, Direction::Down, from, seconds)?,
    ];
    Ok(BothDirections { idle, beside, mbit, utilization })
}

fn add_both_figures(what: &str, result: &BothDirections, outcome: &mut Outcome) -> Value {
    let mut ask = |which: &str, value, unit, bar| {
        outcome.figures.push(figure(RIG, format!("{what}: {which}"), value, unit, bar));
    };
    ask("call beside bulk, lost", result.beside.lost() as f64, "", Bar::AtMost(0.0));
    let more = result.beside.rtt_ms(99) - result.idle.rtt_ms(99);
    ask("call beside bulk, 99 % over idle", more, "ms", Bar::AtMost(5.0));
    for (direction, utilization) in ["up", "down"].iter().zip(result.utilization) {
        ask(&format!("bulk uses of the link {direction}"), 100.0 * utilization, "%", Bar::AtLeast(95.0));
    }
    let line = format!(
        "| {what} |  | {:.2} | {:.2} |  | {} | {:.1}, {:.1} | {:.1}, {:.1} |  |  |\n",
        result.idle.rtt_ms(99),
        result.beside.rtt_ms(99),
        result.beside.lost(),
        result.mbit[0],
        result.mbit[1],
        100.0 * result.utilization[0],
        100.0 * result.utilization[1],
    );
    eprint!("{line}");
    outcome.chapter += &line;
    json!({ "case": what, "idle": call_json(&result.idle), "beside_bulk": call_json(&result.beside),
            "bulk_mbit": result.mbit, "used": result.utilization })
}

fn measure(
    setup: &ClassTestbed,
    case: &Case,
    direction: Direction,
    seconds: u32,
    options: &Options,
) -> Result<CaseResult, String> {
    let call = CRITICAL.call(setup, G711)?;
    std::thread::sleep(IDLE_CALL_TIME);
    let idle = call.finish()?;
    let tcp = |flows| Load::Tcp(flows, options.inner);
    // The call starts after the start-up of the load.
    let begun = Duration::from_secs(START_UP_SECONDS.into());

    let bulk = BULK.load(setup, tcp(FLOWS.0), direction, seconds)?;
    std::thread::sleep(begun);
    let (from, call) = (Instant::now(), CRITICAL.call(setup, G711)?);
    let alone = bulk.finish()?.mbit;
    let beside_bulk = call.finish()?;
    let used_alone = utilization(setup, direction, from, seconds)?;

    let bulk = BULK.load(setup, tcp(FLOWS.0), direction, seconds)?;
    let default = case.default.load(setup, tcp(FLOWS.1), direction, seconds)?;
    std::thread::sleep(begun);
    let (from, call) = (Instant::now(), CRITICAL.call(setup, G711)?);
    let (bulk, default) = (bulk.finish()?.mbit, default.finish()?.mbit);
    let beside_both = call.finish()?;
    let utilization = [used_alone, utilization(setup, direction, from, seconds)?];
    Ok(CaseResult { idle, calls: [beside_bulk, beside_both], mbit: [alone, bulk, default], utilization })
}

/// Utilization of the link in a period, 0 to 1. The last half second is left out, because iperf3 ends then.
fn utilization(
    setup: &ClassTestbed,
    direction: Direction,
    from: Instant,
    seconds: u32,
) -> Result<f64, String> {
    let time = Duration::from_secs(seconds.into()) - Duration::from_millis(500);
    let history = setup.testbed.link(1).handle().history().map_err(|error| error.to_string())?;
    Ok(history.between(direction, from, from + time) as f64 / (LINK_BYTES_PER_SECOND * time.as_secs_f64()))
}

fn add_figures(case: &Case, direction: Direction, result: &CaseResult, outcome: &mut Outcome) {
    let what = format!("{}, {}", case.title, direction_name(direction));
    let mut ask = |which: &str, value, unit, bar| {
        outcome.figures.push(figure(RIG, format!("{what}: {which}"), value, unit, bar));
    };
    for (with, calls) in ["bulk", "bulk and default"].iter().zip(&result.calls) {
        ask(&format!("call beside {with}, lost"), calls.lost() as f64, "", Bar::AtMost(0.0));
        let more = calls.rtt_ms(99) - result.idle.rtt_ms(99);
        ask(&format!("call beside {with}, 99 % over idle"), more, "ms", Bar::AtMost(5.0));
    }
    ask("bulk uses of the link", 100.0 * result.utilization[0], "%", Bar::AtLeast(95.0));
    ask("both use of the link", 100.0 * result.utilization[1], "%", Bar::Higher);
    let off = 100.0 * (result.share() / case.share - 1.0).abs();
    ask("default's share, off by", off, "%", Bar::AtMost(5.0));
    let line = format!(
        "| {} | {} | {:.2} | {:.2} | {:.2} | {} | {:.1} | {:.1} | {:.1}, {:.1} | {:.1} of {:.0} |\n",
        case.title,
        direction_name(direction),
        result.idle.rtt_ms(99),
        result.calls[0].rtt_ms(99),
        result.calls[1].rtt_ms(99),
        result.calls[0].lost() + result.calls[1].lost(),
        result.mbit[0],
        100.0 * result.utilization[0],
        result.mbit[1],
        result.mbit[2],
        100.0 * result.share(),
        100.0 * case.share,
    );
    eprint!("{line}");
    outcome.chapter += &line;
}

fn case_json(case: &Case, direction: Direction, result: &CaseResult) -> Value {
    json!({ "case": case.title, "way": direction_name(direction), "idle": call_json(&result.idle),
            "beside_bulk": call_json(&result.calls[0]), "beside_both": call_json(&result.calls[1]),
            "bulk_alone_mbit": result.mbit[0], "bulk_mbit": result.mbit[1],
            "default_mbit": result.mbit[2], "used": result.utilization })
}
