//! One TCP flow over a link that loses, by the congestion control and the lane of its class.

use mpvpn_lab::Direction;
use serde_json::{Value, json};

use super::{
    RIG,
    scene::{Line, Scene},
};
use crate::{
    figure::{Bar, figure},
    options::Options,
    parts::name,
    paths::load::Load,
    report::Outcome,
};

/// Lost each way, per cent.
const LOSSES: [u32; 3] = [0, 10, 30];

/// A class, and what is asked of it at each of [`LOSSES`], Mbit/s.
struct Row {
    title: &'static str,
    line: Line,
    bars: Option<[f64; 3]>,
    /// What a tunnel of the same kind by others reaches there.
    theirs: Option<[f64; 3]>,
}

/// What the reference reached, and at 30 % more than that on streams.
const ROWS: [Row; 4] = [
    Row {
        title: "bbr, datagram",
        line: Line::new("bbr-packets", 5330).with("cc = \"bbr\"\nlane = \"datagram\""),
        bars: Some([15.0, 0.5, 0.5]),
        theirs: Some([15.0, 0.5, 0.5]),
    },
    Row {
        title: "bbr, stream",
        line: Line::new("bbr-streams", 5340).with("cc = \"bbr\"\nlane = \"stream\""),
        bars: Some([47.0, 28.0, 33.0]),
        theirs: Some([47.0, 28.0, 26.0]),
    },
    Row {
        title: "cubic, datagram",
        line: Line::new("cubic-packets", 5350).with("cc = \"cubic\"\nlane = \"datagram\""),
        bars: None,
        theirs: None,
    },
    Row {
        title: "cubic, stream",
        line: Line::new("cubic-streams", 5360).with("cc = \"cubic\"\nlane = \"stream\""),
        bars: None,
        theirs: Some([50.0, 41.0, 15.0]),
    },
];

pub(super) fn run(options: &Options) -> Result<Outcome, String> {
    let seconds = if options.quick { 6 } else { 10 };
    let ways = &[Direction::Up][..];
    // One of each way for each row and loss.
    let mut found = vec![[[f64::NAN; 3]; ROWS.len()]; ways.len()];
    for (at, loss) in LOSSES.iter().enumerate() {
        let scene =
            Scene::new(&[&format!("60mbit,15ms,loss={loss}%,queue=60ms")], "", &ROWS.map(|row| row.line))?;
        for (row, cells) in ROWS.iter().enumerate() {
            let _sink = cells.line.sink(&scene)?;
            for (way, of_way) in ways.iter().zip(&mut found) {
                // What does not get through at all is a figure, too.
                let run = cells.line.load(&scene, Load::Tcp(1, options.inner), *way, seconds);
                of_way[row][at] = run.and_then(|run| run.finish()).map_or(0.0, |arrived| arrived.mbit);
                eprintln!("    {}, {loss} %, {}: {:.1} Mbit/s", cells.title, name(*way), of_way[row][at]);
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
        for (way, of_way) in ways.iter().zip(&found) {
            let line = tell(cells, *way, of_way[row], &mut outcome);
            outcome.chapter += &line;
        }
    }
    let titles: Vec<&str> = ROWS.iter().map(|row| row.title).collect();
    let ways: Vec<&str> = ways.iter().map(|way| name(*way)).collect();
    outcome.raw = json!({ "ways": ways, "rows": titles, "loss_pct": LOSSES, "mbit": Value::from_iter(
        found.iter().map(|of_way| json!(of_way))) });
    Ok(outcome)
}

fn tell(row: &Row, way: Direction, mbit: [f64; 3], outcome: &mut Outcome) -> String {
    let mut line = format!("| {} | {} |", row.title, name(way));
    for (at, loss) in LOSSES.iter().enumerate() {
        let bar = row.bars.map_or(Bar::Higher, |bars| Bar::AtLeast(bars[at]));
        let what = format!("{}, {loss} % loss, {}", row.title, name(way));
        outcome.figures.push(figure(RIG, what, mbit[at], "Mbit/s", bar));
        let theirs = row.theirs.map_or(String::new(), |theirs| format!(" ({})", theirs[at]));
        line += &format!(" {:.1}{theirs} |", mbit[at]);
    }
    line + "\n"
}
