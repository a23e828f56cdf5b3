//! Links whose operator shapes each UDP session: four pipes over each of three, alone and with loss and repair.

use mpvpn_lab::Direction;
use serde_json::{Value, json};

use super::{
    RIG, measured,
    scene::{DEFAULT, Line, Scene},
};
use crate::{
    figure::{Bar, figure},
    options::Options,
    parts::{name, ways},
    paths::load::Load,
    report::Outcome,
};

const LINK: &str = "110mbit,10ms,queue=60ms,session_rate=30mbit";
const FLOWS: u32 = 8;

/// Links as they are, and what is asked.
struct Case {
    title: &'static str,
    /// Lost each way.
    loss: &'static str,
    default: Line,
    /// Mbit/s.
    least: f64,
}

const CASES: [Case; 3] = [
    Case { title: "4 pipes on each of 3 shaped links", loss: "", default: DEFAULT, least: 290.0 },
    Case {
        title: "the same, 12 % loss, repair",
        loss: ",loss=12%",
        default: DEFAULT.with("fec = \"auto\"\nlane = \"datagram\""),
        least: 220.0,
    },
    // As TCP to hosts behind the server travels if nothing is said.
    Case {
        title: "the same, 12 % loss, as streams",
        loss: ",loss=12%",
        default: DEFAULT.with("fec = \"auto\"\nlane = \"stream\""),
        least: 220.0,
    },
];

pub(super) fn run(options: &Options) -> Result<Outcome, String> {
    let seconds = if options.quick { 6 } else { 10 };
    let mut outcome = Outcome {
        chapter: "\n## Sessions that are shaped one by one\n\n8 TCP flows over three links of 110 Mbit/s, 30 a session.\n\n\
                  | links | way | Mbit/s | bytes that each link carried, of their mean, % |\n|---|---|---:|---|\n"
            .to_owned(),
        ..Outcome::default()
    };
    let mut raw = Vec::new();
    for case in &CASES {
        let link = format!("{LINK}{}", case.loss);
        let scene = Scene::new(&[link.as_str(); 3], "pipes = 4\n", &[case.default])?;
        let _sink = case.default.sink(&scene)?;
        for &way in ways(options.quick) {
            let what = format!("{}, {}", case.title, name(way));
            let (mbit, bytes) = measured(&what, options, &mut outcome, || {
                let before = carried(&scene, way)?;
                let load = case.default.load(&scene, Load::Tcp(FLOWS, options.inner), way, seconds)?;
                let mbit = load.finish()?.mbit;
                let after = carried(&scene, way)?;
                let bytes: Vec<f64> =
                    after.iter().zip(before).map(|(after, before)| after - before).collect();
                Ok((mbit, bytes))
            })?;
            let mean = bytes.iter().sum::<f64>() / bytes.len() as f64;
            let shares: Vec<f64> = bytes.iter().map(|bytes| 100.0 * bytes / mean).collect();
            let off = shares.iter().map(|share| (share - 100.0).abs()).fold(0.0, f64::max);
            let mut ask = |which: &str, value, unit, bar| {
                outcome.figures.push(figure(RIG, format!("{what}: {which}"), value, unit, bar));
            };
            ask("goodput", mbit, "Mbit/s", Bar::AtLeast(case.least));
            ask("a link's bytes, off their mean by", off, "%", Bar::AtMost(5.0));
            let told: Vec<String> = shares.iter().map(|share| format!("{share:.1}")).collect();
            outcome.chapter +=
                &format!("| {} | {} | {mbit:.1} | {} |\n", case.title, name(way), told.join(", "));
            let fec = scene.client.status()["lane"]["fec"].clone();
            raw.push(json!({ "case": case.title, "way": name(way), "mbit": mbit, "bytes": bytes,
                             "repair_at_client": fec }));
        }
    }
    outcome.raw = Value::Array(raw);
    Ok(outcome)
}

/// Bytes that each link has delivered in that direction so far.
fn carried(scene: &Scene, way: Direction) -> Result<Vec<f64>, String> {
    let of_link = |number| {
        let stats = scene.stage.link(number).handle().stats().map_err(|error| error.to_string())?;
        let counters = if way == Direction::Up { stats.up } else { stats.down };
        Ok(counters.bytes as f64)
    };
    (1..=3).map(of_link).collect()
}
