//! Links whose operator shapes each UDP session: four pipes over each of three links, without and with loss.

use mpvpn_lab::Direction;
use serde_json::{Value, json};

use super::{
    RIG,
    class_testbed::{ClassTestbed, ClassTraffic, DEFAULT},
    measured,
};
use crate::{
    figure::{Bar, figure},
    options::Options,
    parts::{direction_name, directions},
    paths::load::Load,
    report::Outcome,
};

/// A link whose operator limits each UDP session to 30 Mbit/s.
const LINK: &str = "110mbit,10ms,queue=60ms,session_rate=30mbit";
/// Number of TCP flows: enough to use all pipes.
const FLOWS: u32 = 8;

/// Loss, configuration and bar of a case.
struct Case {
    title: &'static str,
    /// Loss in the link description, each way.
    loss: &'static str,
    default: ClassTraffic,
    /// Minimum goodput, Mbit/s.
    min_mbit: f64,
}

const CASES: [Case; 3] = [
    Case { title: "4 pipes on each of 3 shaped links", loss: "", default: DEFAULT, min_mbit: 290.0 },
    Case {
        title: "the same, 12 % loss, repair",
        loss: ",loss=12%",
        default: DEFAULT.with("fec = \"auto\"\nlane = \"datagram\""),
        min_mbit: 220.0,
    },
    // The default flow mode of TCP to hosts behind the server.
    Case {
        title: "the same, 12 % loss, as streams",
        loss: ",loss=12%",
        default: DEFAULT.with("fec = \"auto\"\nlane = \"stream\""),
        min_mbit: 220.0,
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
        let setup = ClassTestbed::new(&[link.as_str(); 3], "pipes = 4\n", &[case.default])?;
        let _iperf = case.default.iperf(&setup)?;
        for &direction in directions(options.quick) {
            let what = format!("{}, {}", case.title, direction_name(direction));
            let (mbit, bytes) = measured(&what, options, &mut outcome, || {
                let before = carried(&setup, direction)?;
                let load = case.default.load(&setup, Load::Tcp(FLOWS, options.inner), direction, seconds)?;
                let mbit = load.finish()?.mbit;
                let after = carried(&setup, direction)?;
                let bytes: Vec<f64> =
                    after.iter().zip(before).map(|(after, before)| after - before).collect();
                Ok((mbit, bytes))
            })?;
            let mean = bytes.iter().sum::<f64>() / bytes.len() as f64;
            let shares: Vec<f64> = bytes.iter().map(|bytes| 100.0 * bytes / mean).collect();
            let deviation = shares.iter().map(|share| (share - 100.0).abs()).fold(0.0, f64::max);
            let mut ask = |which: &str, value, unit, bar| {
                outcome.figures.push(figure(RIG, format!("{what}: {which}"), value, unit, bar));
            };
            ask("goodput", mbit, "Mbit/s", Bar::AtLeast(case.min_mbit));
            ask("a link's bytes, off their mean by", deviation, "%", Bar::AtMost(5.0));
            let percents: Vec<String> = shares.iter().map(|share| format!("{share:.1}")).collect();
            outcome.chapter += &format!(
                "| {} | {} | {mbit:.1} | {} |\n",
                case.title,
                direction_name(direction),
                percents.join(", ")
            );
            let fec = setup.client.status()["lane"]["fec"].clone();
            raw.push(
                json!({ "case": case.title, "way": direction_name(direction), "mbit": mbit, "bytes": bytes,
                             "repair_at_client": fec }),
            );
        }
    }
    outcome.raw = Value::Array(raw);
    Ok(outcome)
}

/// Bytes that each link has delivered in a direction so far.
fn carried(setup: &ClassTestbed, direction: Direction) -> Result<Vec<f64>, String> {
    let of_link = |number| {
        let stats = setup.testbed.link(number).handle().stats().map_err(|error| error.to_string())?;
        let counters = if direction == Direction::Up { stats.up } else { stats.down };
        Ok(counters.bytes as f64)
    };
    (1..=3).map(of_link).collect()
}
