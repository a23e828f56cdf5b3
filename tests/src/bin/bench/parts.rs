//! Rigs that consist of parts, each of which can be run alone.

use mpvpn_lab::Direction;
use serde_json::{Map, Value, json};

use crate::{
    figure::{Bar, Figure, figure},
    paths::plan::catch_panic,
    report::{self, Outcome},
};

/// Runs the parts one after the other. A part that fails adds a missed figure, and the other parts still run.
pub(crate) fn run_parts<P: Copy>(
    rig: &'static str,
    parts: &[P],
    name: fn(P) -> &'static str,
    run: impl Fn(P) -> Result<Outcome, String>,
) -> Outcome {
    let mut whole = Outcome::default();
    let mut raw = Map::new();
    for &part in parts {
        let name = name(part);
        let outcome = catch_panic(|| run(part)).unwrap_or_else(|why| {
            let figures = vec![unmeasured_figure(rig, name, &why)];
            Outcome { figures, raw: json!({ "error": why }), ..Outcome::default() }
        });
        report::save_record(rig, name, &outcome.raw);
        whole.figures.extend(outcome.figures);
        whole.chapter += &outcome.chapter;
        whole.plots.extend(outcome.plots);
        raw.insert(name.to_owned(), outcome.raw);
    }
    whole.raw = Value::Object(raw);
    whole
}

/// A missed figure for something that could not be measured.
pub(crate) fn unmeasured_figure(rig: &'static str, what: &str, why: &str) -> Figure {
    eprintln!("  {what}: {why}");
    figure(rig, format!("{what}: it cannot be measured"), f64::NAN, "", Bar::AtLeast(0.0))
}

/// Name of a direction in tables and names of figures.
pub(crate) fn direction_name(direction: Direction) -> &'static str {
    if direction == Direction::Up { "up" } else { "down" }
}

/// The directions to measure: both, or with `--quick` only down.
pub(crate) fn directions(quick: bool) -> &'static [Direction] {
    if quick { &[Direction::Down] } else { &[Direction::Up, Direction::Down] }
}
