//! Scenarios with real traffic: what links of all kinds give together, beside the best of them alone and beside the
//! kernel's Multipath TCP, and what it costs when one is lost.

mod draw;
mod judge;
mod load;
mod mptcp;
mod play;
mod watch;

use std::panic::{AssertUnwindSafe, catch_unwind};

use mpvpn_lab::scenario::Scenario;
use serde_json::{Value, json};

use self::play::Plan;
use crate::{
    figure::{Bar, figure},
    options::Options,
    report::Outcome,
};

/// How much is played by default.
const WHOLE: Plan = Plan { runs: 3, seconds: None, most_flows: u32::MAX, repeat: None };
/// How much is played in a hurry.
const QUICK: Plan = Plan { runs: 1, seconds: Some(6), most_flows: 4, repeat: Some(3) };

pub(crate) fn run(options: &Options) -> Outcome {
    let mut plan = if options.quick { QUICK } else { WHOLE };
    plan.repeat = options.cuts.or(plan.repeat);
    let scenarios = Scenario::all().unwrap_or_else(|error| panic!("{error}"));
    let wanted = |scenario: &&Scenario| {
        options.scenarios.is_empty() || options.scenarios.iter().any(|name| name == scenario.name)
    };
    let mut outcome = Outcome { chapter: format!("\n## Paths\n\n{}", judge::HEAD), ..Outcome::default() };
    let mut raw = serde_json::Map::new();
    for scenario in scenarios.iter().filter(wanted) {
        eprintln!("  {}: {}", scenario.name, scenario.story);
        // One scenario that fails is a figure that is missing, not the end of the others.
        let played = catch_unwind(AssertUnwindSafe(|| play::play(scenario, plan)))
            .unwrap_or_else(|panic| Err(text_of(&*panic)));
        match played {
            Ok(rows) => raw.insert(scenario.name.to_owned(), record(scenario, &rows, &mut outcome)),
            Err(why) => {
                eprintln!("  {}: {why}", scenario.name);
                let name = format!("{}: it cannot be played", scenario.name);
                outcome.figures.push(figure("paths", name, f64::NAN, "", Bar::AtLeast(0.0)));
                let first = why.lines().next().unwrap_or_default().replace('|', "/");
                outcome.chapter += &format!("| {} | | | | | | | | | | {first} |\n", scenario.name);
                raw.insert(scenario.name.to_owned(), json!({ "error": why }))
            }
        };
    }
    outcome.raw = Value::Object(raw);
    outcome
}

fn record(scenario: &Scenario, rows: &[play::Row], outcome: &mut Outcome) -> Value {
    for row in rows {
        let figures = judge::figures(scenario, row);
        let line = judge::line(scenario, row, &figures);
        eprint!("  {line}");
        outcome.chapter += &line;
        outcome.figures.extend(figures);
    }
    outcome.plots.push((format!("paths/{}.svg", scenario.name), draw::draw(scenario, rows)));
    rows.iter().map(judge::raw).collect()
}

fn text_of(panic: &dyn std::any::Any) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("it panicked").to_owned()
}
