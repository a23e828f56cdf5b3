//! Runs scenarios with real traffic: goodput over all links, compared with the best single link and with the
//! kernel's Multipath TCP, and the effect of link failures.

mod chart;
pub(crate) mod impairment;
mod judge;
pub(crate) mod load;
pub(crate) mod mptcp;
mod path_rates;
pub(crate) mod plan;
pub(crate) mod play;
pub(crate) mod quiet_connection;

use std::time::{Duration, Instant};

use mpvpn_scenarios::{FlowMode, Scenario};
use serde_json::{Value, json};

use self::plan::{Plan, catch_panic};
use crate::{
    figure::{Bar, figure},
    options::Options,
    report::{self, Outcome},
};

pub(crate) fn run(options: &Options) -> Outcome {
    for_flow_mode(FlowMode::Datagram, options)
}

/// Name of the rig for a flow mode.
fn rig(flow_mode: FlowMode) -> &'static str {
    match flow_mode {
        FlowMode::Datagram => "paths",
        FlowMode::Stream => "stream",
    }
}

/// Names of the scenarios with bars for a flow mode.
pub(crate) fn names(flow_mode: FlowMode) -> Vec<&'static str> {
    let all = Scenario::all().unwrap_or_else(|error| panic!("{error}"));
    all.into_iter().filter_map(|scenario| Some(scenario.for_flow_mode(flow_mode)?.name)).collect()
}

/// Runs the selected scenarios that have bars for a flow mode.
pub(crate) fn for_flow_mode(flow_mode: FlowMode, options: &Options) -> Outcome {
    let rig = rig(flow_mode);
    let mut plan = if options.quick { Plan::QUICK } else { Plan::FULL };
    plan.inner = options.inner;
    plan.runs = options.runs.unwrap_or(plan.runs);
    plan.repeat = options.cuts.or(plan.repeat);
    plan.random_cuts = options.cuts.or(plan.random_cuts);
    let scenarios = Scenario::all().unwrap_or_else(|error| panic!("{error}"));
    let wanted = |scenario: &Scenario| {
        options.scenarios.is_empty() || options.scenarios.iter().any(|name| name == scenario.name)
    };
    let played =
        scenarios.into_iter().filter(wanted).filter_map(|scenario| scenario.for_flow_mode(flow_mode));
    let scenarios: Vec<Scenario> = played.map(|scenario| plan.of(scenario)).collect();
    let left_out = |name: &&String| !scenarios.iter().any(|scenario| scenario.name == **name);
    for name in options.scenarios.iter().filter(left_out) {
        eprintln!("  {name} is left out: its file asks nothing of {rig}");
    }
    let mut left: Duration = scenarios.iter().map(|scenario| plan.estimate(scenario)).sum();
    let count = scenarios.len();
    eprintln!("  {count} scenarios, {}; each is in target/bench/{rig} as soon as it is done", about(left));
    let (began, mut failed) = (Instant::now(), Vec::new());
    let mut outcome = Outcome {
        chapter: format!("\n## {}\n\n{}", title(flow_mode), judge::TABLE_HEAD),
        ..Outcome::default()
    };
    let mut raw = serde_json::Map::new();
    if scenarios.is_empty() {
        let name = "there is no scenario to play".to_owned();
        outcome.figures.push(figure(rig, name, f64::NAN, "", Bar::AtLeast(0.0)));
    }
    for (number, scenario) in (1..).zip(&scenarios) {
        eprintln!("  {number} of {count}, {} left: {}: {}", about(left), scenario.name, scenario.story);
        // A scenario that fails adds a missed figure, and the others still run.
        let record = match catch_panic(|| play::play(scenario, plan)) {
            Ok(rows) => {
                let has_failed = |row: &play::Row| row.runs.iter().any(|run| run.arrived.is_err());
                if rows.iter().any(has_failed) {
                    failed.push(scenario.name);
                }
                record(scenario, &rows, &mut outcome)
            }
            Err(why) => {
                failed.push(scenario.name);
                eprintln!("  {}: {why}", scenario.name);
                let name = format!("{}: it cannot be played", scenario.name);
                outcome.figures.push(figure(rig, name, f64::NAN, "", Bar::AtLeast(0.0)));
                let first = why.lines().next().unwrap_or_default().replace('|', "/");
                outcome.chapter += &format!("| {} {}| {first} |\n", scenario.name, "| ".repeat(10));
                json!({ "error": why })
            }
        };
        report::save_record(rig, scenario.name, &record);
        raw.insert(scenario.name.to_owned(), record);
        left = left.saturating_sub(plan.estimate(scenario));
    }
    eprintln!("  played in {}", about(began.elapsed()));
    if !failed.is_empty() {
        eprintln!("  not all of these could be measured\n  next: ./dev bench {rig} {}", failed.join(" "));
    }
    outcome.raw = Value::Object(raw);
    outcome
}

fn title(flow_mode: FlowMode) -> &'static str {
    match flow_mode {
        FlowMode::Datagram => "Paths",
        FlowMode::Stream => "Streams over paths",
    }
}

fn record(scenario: &Scenario, rows: &[play::Row], outcome: &mut Outcome) -> Value {
    let mut lines = String::new();
    for row in rows {
        let figures = judge::figures(scenario, row);
        lines += &judge::line(scenario, row, &figures);
        outcome.figures.extend(figures);
    }
    eprint!("{lines}");
    outcome.chapter += &lines;
    outcome
        .plots
        .push((format!("{}/{}.svg", rig(scenario.flow_mode), scenario.name), chart::draw(scenario, rows)));
    json!({ "table": lines.lines().collect::<Vec<_>>(), "rows": rows.iter().map(judge::raw).collect::<Value>() })
}

/// A rounded duration as text.
pub(crate) fn about(time: Duration) -> String {
    match time.as_secs() {
        seconds if seconds < 100 => format!("{seconds} s"),
        seconds => format!("{} min", (seconds + 30) / 60),
    }
}
