//! Goodput of one TCP flow over a lossy link, by congestion control and flow mode of its class.

use mpvpn_lab::Direction;
use serde_json::{Value, json};

use super::{
    RIG,
    class_testbed::{ClassTestbed, ClassTraffic},
};
use crate::{
    figure::{Bar, figure},
    options::Options,
    parts::direction_name,
    paths::load::Load,
    report::Outcome,
};

/// Loss each way, percent.
const LOSS_PERCENTS: [u32; 3] = [0, 10, 30];

/// A class, and its bars at each of [`LOSS_PERCENTS`], Mbit/s.
struct Row {
    title: &'static str,
    line: ClassTraffic,
    bars: Option<[f64; 3]>,
    /// Results reported of another multipath tunnel, Mbit/s.
    reference: Option<[f64; 3]>,
}

/// The bars are the reported results of the reference; on streams at 30 % loss the bar is higher.
const ROWS: [Row; 4] = [
    Row {
        title: "bbr, datagram",
        line: ClassTraffic::new("bbr-packets", 5330).with("cc = \"bbr\"\nlane = \"datagram\""),
        bars: Some([15.0, 0.5, 0.5]),
        reference: Some([15.0, 0.5, 0.5]),
    },
    Row {
        title: "bbr, stream",
        line: ClassTraffic::new("bbr-streams", 5340).with("cc = \"bbr\"\nlane = \"stream\""),
        bars: Some([47.0, 28.0, 33.0]),
        reference: Some([47.0, 28.0, 26.0]),
    },
    Row {
        title: "cubic, datagram",
        line: ClassTraffic::new("cubic-packets", 5350).with("cc = \"cubic\"\nlane = \"datagram\""),
        bars: None,
        reference: None,
    },
    Row {
        title: "cubic, stream",
        line: ClassTraffic::new("cubic-streams", 5360).with("cc = \"cubic\"\nlane = \"stream\""),
        bars: None,
        reference: Some([50.0, 41.0, 15.0]),
    },
];

pub(super) fn run(options: &Options) -> Result<Outcome, String> {
    let seconds = if options.quick { 6 } else { 10 };
    let directions = &[Direction::Up][..];
    // By direction, row and loss.
    let mut found = vec![[[f64::NAN; 3]; ROWS.len()]; directions.len()];
    for (at, loss) in LOSS_PERCENTS.iter().enumerate() {
        let setup = ClassTestbed::new(
            &[&format!("60mbit,15ms,loss={loss}%,queue=60ms")],
            "",
            &ROWS.map(|row| row.line),
        )?;
        for (row, cells) in ROWS.iter().enumerate() {
            let _iperf = cells.line.iperf(&setup)?;
            for (direction, of_direction) in directions.iter().zip(&mut found) {
                // A run without any goodput is a result of 0 Mbit/s.
                let run = cells.line.load(&setup, Load::Tcp(1, options.inner), *direction, seconds);
                of_direction[row][at] = run.and_then(|run| run.finish()).map_or(0.0, |arrived| arrived.mbit);
                eprintln!(
                    "    {}, {loss} %, {}: {:.1} Mbit/s",
                    cells.title,
                    direction_name(*direction),
                    of_direction[row][at]
                );
            }
        }
    }
    let mut outcome = Outcome {
        chapter: "\n## Loss\n\nMbit/s of one TCP flow over 60 Mbit/s, 30 ms there and back, which loses so much each way; \
                  in brackets what is reported of another multipath tunnel.\n\n\
                  | class | way | no loss | 10 % | 30 % |\n|---|---|---:|---:|---:|\n"
            .to_owned(),
        ..Outcome::default()
    };
    for (row, cells) in ROWS.iter().enumerate() {
        for (direction, of_direction) in directions.iter().zip(&found) {
            let line = add_row(cells, *direction, of_direction[row], &mut outcome);
            outcome.chapter += &line;
        }
    }
    let titles: Vec<&str> = ROWS.iter().map(|row| row.title).collect();
    let directions: Vec<&str> = directions.iter().map(|direction| direction_name(*direction)).collect();
    outcome.raw = json!({ "ways": directions, "rows": titles, "loss_pct": LOSS_PERCENTS, "mbit": Value::from_iter(
        found.iter().map(|of_direction| json!(of_direction))) });
    Ok(outcome)
}

fn add_row(row: &Row, direction: Direction, mbit: [f64; 3], outcome: &mut Outcome) -> String {
    let mut line = format!("| {} | {} |", row.title, direction_name(direction));
    for (at, loss) in LOSS_PERCENTS.iter().enumerate() {
        let bar = row.bars.map_or(Bar::Higher, |bars| Bar::AtLeast(bars[at]));
        let what = format!("{}, {loss} % loss, {}", row.title, direction_name(direction));
        outcome.figures.push(figure(RIG, what, mbit[at], "Mbit/s", bar));
        let reference = row.reference.map_or(String::new(), |reference| format!(" ({})", reference[at]));
        line += &format!(" {:.1}{reference} |", mbit[at]);
    }
    line + "\n"
}
