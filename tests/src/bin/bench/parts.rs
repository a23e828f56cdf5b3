//! A rig that consists of parts, each of which can be run alone.

use serde_json::{Map, Value, json};

use crate::{
    figure::{Bar, figure},
    paths::plan::caught,
    report::{self, Outcome},
};

/// Runs the parts one after the other. One that fails is a figure that is missing, not the end of the others.
pub(crate) fn each<P: Copy>(
    rig: &'static str,
    parts: &[P],
    name: fn(P) -> &'static str,
    run: impl Fn(P) -> Result<Outcome, String>,
) -> Outcome {
    let mut whole = Outcome::default();
    let mut raw = Map::new();
    for &part in parts {
        let name = name(part);
        let outcome = caught(|| run(part)).unwrap_or_else(|why| {
            eprintln!("  {name}: {why}");
            let missing = format!("{name}: it cannot be measured");
            let figures = vec![figure(rig, missing, f64::NAN, "", Bar::AtLeast(0.0))];
            Outcome { figures, raw: json!({ "error": why }), ..Outcome::default() }
        });
        report::keep(rig, name, &outcome.raw);
        whole.figures.extend(outcome.figures);
        whole.chapter += &outcome.chapter;
        whole.plots.extend(outcome.plots);
        raw.insert(name.to_owned(), outcome.raw);
    }
    whole.raw = Value::Object(raw);
    whole
}
