//! The rig `sweep`: settings that nobody chose, drawn at random and played in simulated time
//! (`crates/tunnel/tests/simulation/sweep.rs`).
//!
//! In: a seed, and how many settings. Out: the distributions of utilisation, of a call's added delay, of the
//! time until a change is used, and of the share beside foreign flows; a plot; the ten worst settings, each
//! with the command that plays it again; beside them, a table of worlds after published measurements
//! (`crates/tunnel/tests/simulation/sweep/worlds.rs`).

use std::{
    fs,
    io::{BufRead, BufReader},
    process::{Command, Stdio},
};

use mpvpn_plot::{COLOURS, PANEL_LEFT, PANEL_RIGHT, Panel, Svg, TEXT_COLOUR};
use mpvpn_tests::percentile;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::Value;

use crate::{
    figure::{Bar, Figure, figure},
    options::Options,
    report::{Outcome, directory},
};

/// Settings of a complete sweep, and of a quick one.
const SETTINGS: [u32; 2] = [1000, 60];
/// The number of the first run of a world, and how many there are, as in `worlds.rs`.
const WORLDS: (u32, u32) = (1_000_000, 32);
/// The begin of the lines that the simulation prints for this rig.
const MARK: &str = "SWEEP ";
/// How many of the worst settings are listed.
const WORST: usize = 10;
/// The delay that a load may add to a call, beside two packets of the slowest link (ms).
const MAX_ADDED_MS: f64 = 3.0;
/// The share of a link that a tunnel may have beside one foreign flow.
const FAIR: std::ops::RangeInclusive<f64> = 0.25..=0.75;
/// The buffers for which that holds, in bandwidth-delay products.
const FAIR_BUFFERS: std::ops::RangeInclusive<f64> = 1.0..=4.0;

/// The results of a setting.
#[derive(Clone, Debug, Deserialize)]
struct Line {
    seed: u64,
    number: u64,
    setting: String,
    load: String,
    flows: u16,
    links: usize,
    loss: String,
    beside: String,
    step: String,
    is_up: bool,
    utilisation: f64,
    of_best_link: f64,
    of_plain: Option<f64>,
    call_added_ms: Option<f64>,
    call_lost: Option<f64>,
    packet_ms: f64,
    settled_ms: Option<f64>,
    share: Option<f64>,
    buffer_bdp: f64,
}

impl Line {
    fn has_foreign_flow(&self) -> bool {
        self.share.is_some()
    }

    /// Whether utilisation is judged here: a foreign flow takes its share of a link, and 30 % loss stands
    /// apart.
    fn counts(&self) -> bool {
        !self.has_foreign_flow() && self.loss != "heavy"
    }

    fn command(&self) -> String {
        format!("./dev bench sweep --seed {} --only {}", self.seed, self.number)
    }
}

/// The results of a run of a world.
#[derive(Clone, Debug, Deserialize)]
struct World {
    number: u64,
    world: String,
    load: String,
    flows: u16,
    direction: String,
    ceiling_mbit: f64,
    utilisation: f64,
    plain: f64,
    idle_p99_ms: f64,
    added_median_ms: f64,
    added_p99_ms: f64,
    lost_idle: f64,
    lost: f64,
}

pub(crate) fn run(options: &Options) -> Outcome {
    let count = options.count.unwrap_or(SETTINGS[usize::from(options.quick)]);
    if let Some(only) = options.only.filter(|only| *only >= WORLDS.0) {
        let worlds: Vec<World> = play(options.seed, only, 1);
        return Outcome { chapter: table(worlds), raw: Value::Null, ..Outcome::default() };
    }
    let (first, count) = options.only.map_or((0, count), |only| (only, 1));
    let lines: Vec<Line> = play(options.seed, first, count);
    let mut outcome = judge(&lines);
    match (options.only, &lines[..]) {
        (Some(_), [line]) => println!("{}\n{line:#?}", line.setting),
        _ => outcome.chapter += &table(play(options.seed, WORLDS.0, WORLDS.1)),
    }
    outcome
}

fn table(mut worlds: Vec<World>) -> String {
    worlds.sort_by_key(|line| line.number);
    let mut text = "\nWorlds (`--only` plays a run again). What is used of the links, and by TCP alone over the best of them \
        without a tunnel; how much later the call's packets come than without the load, and how many more are lost:\n\n\
        | world | load | Mbit/s | used, % | TCP alone, % | median, ms | p99, ms | p99 without load, ms | lost, % | `--only` |\n\
        |---|---|--:|--:|--:|--:|--:|--:|--:|--:|\n"
        .to_owned();
    for line in worlds {
        let World { number, world, load, flows, direction, ceiling_mbit, .. } = line;
        let World { added_median_ms, added_p99_ms, idle_p99_ms, .. } = line;
        let [used, plain, lost] =
            [line.utilisation, line.plain, line.lost - line.lost_idle].map(|share| 100.0 * share);
        text += &format!(
            "| {world} | {load}, {flows} {direction} | {ceiling_mbit:.1} | {used:.1} | {plain:.1} | {added_median_ms:.1} | \
            {added_p99_ms:.1} | {idle_p99_ms:.0} | {lost:.2} | {number} |\n"
        );
    }
    text
}

/// Plays settings or worlds; their lines are kept in a file, too.
fn play<T: DeserializeOwned>(seed: u32, first: u32, count: u32) -> Vec<T> {
    try_play(seed, first, count).unwrap_or_else(|complaint| panic!("{complaint}"))
}

fn try_play<T: DeserializeOwned>(seed: u32, first: u32, count: u32) -> Result<Vec<T>, String> {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let args =
        ["test", "--locked", "--quiet", "--release", "-p", "mpvpn-tunnel", "--test", "simulation", "--"];
    let mut simulation = Command::new(cargo)
        .args(args)
        .args(["--ignored", "--exact", "sweep::sweep", "--nocapture"])
        .envs(
            [("SWEEP_SEED", seed), ("SWEEP_FIRST", first), ("SWEEP_COUNT", count)]
                .map(|(name, value)| (name, value.to_string())),
        )
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| format!("cargo cannot be run: {error}"))?;
    let output = BufReader::new(simulation.stdout.take().expect("its output"));
    let (mut lines, mut kept, mut failed) = (Vec::new(), String::new(), Vec::new());
    for line in output.lines().map_while(Result::ok) {
        // The first line follows the name of the test.
        let Some((_, line)) = line.split_once(MARK) else { continue };
        kept += &format!("{line}\n");
        match serde_json::from_str(line) {
            Ok(line) => lines.push(line),
            Err(_) => failed.push(line.to_owned()),
        }
        if kept.lines().count().is_multiple_of(50) {
            eprintln!("  {} of {count} settings", kept.lines().count());
        }
    }
    let ended = simulation.wait().map_err(|error| format!("the simulation cannot be waited for: {error}"))?;
    let kind = if first >= WORLDS.0 { "worlds-" } else { "" };
    let path = directory().join("sweep").join(format!("{kind}{seed}.jsonl"));
    let written = fs::create_dir_all(directory().join("sweep")).and_then(|()| fs::write(&path, kept));
    written.map_err(|error| format!("{}: {error}", path.display()))?;
    if !ended.success() || !failed.is_empty() || lines.len() != count as usize {
        return Err(format!(
            "{} of {count} settings have a result ({ended}); without one: {failed:#?}",
            lines.len()
        ));
    }
    Ok(lines)
}

fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values
}

/// The share of values for which something holds, percent.
fn share_of(values: &[f64], holds: impl Fn(f64) -> bool) -> f64 {
    100.0 * values.iter().filter(|value| holds(**value)).count() as f64 / values.len() as f64
}

/// A kind of setting: its name, and which settings belong to it.
type Kind = (&'static str, fn(&Line) -> bool);

const KINDS: [Kind; 14] = [
    ("all", |_| true),
    ("one flow", |line| line.flows == 1),
    ("eight flows", |line| line.flows == 8),
    ("one link", |line| line.links == 1),
    ("two links", |line| line.links == 2),
    ("three or four", |line| line.links > 2),
    ("no loss", |line| line.loss == "none"),
    ("random loss", |line| line.loss == "random"),
    ("bursts of loss", |line| line.loss == "bursts"),
    ("bottleneck behind", |line| line.beside == "bottleneck"),
    ("no change", |line| line.step == "none"),
    ("rate up", |line| line.step == "rate up"),
    ("rate down", |line| line.step == "rate down"),
    ("other RTT", |line| line.step == "rtt"),
];

fn judge(lines: &[Line]) -> Outcome {
    let mut outcome = Outcome::default();
    let mut curves = Vec::new();
    outcome.chapter = format!("\n## sweep\n\n{} settings.\n", lines.len());
    for (load, [median, fifth]) in [("streams", [97.0, 85.0]), ("packets", [90.0, 75.0])] {
        let counted: Vec<&Line> = lines.iter().filter(|line| line.counts() && line.load == load).collect();
        outcome.chapter += &format!(
            "\nUtilisation, {load}, %:\n\n| | settings | 5th percentile | 25th | median | 75th |\n|---|--:|--:|--:|--:|--:|\n"
        );
        for (name, belongs) in KINDS {
            let of_kind = counted.iter().filter(|line| belongs(line));
            let values = sorted(of_kind.map(|line| 100.0 * line.utilisation));
            if values.is_empty() {
                continue;
            }
            let row: Vec<String> = [5, 25, 50, 75].map(|at| format!("{:.1}", percentile(&values, at))).into();
            outcome.chapter += &format!("| {name} | {} | {} |\n", values.len(), row.join(" | "));
        }
        let values = sorted(counted.iter().map(|line| 100.0 * line.utilisation));
        add(
            &mut outcome.figures,
            format!("{load}: median utilisation"),
            &values,
            50,
            "%",
            Bar::AtLeast(median),
        );
        add(&mut outcome.figures, format!("{load}: 5th percentile"), &values, 5, "%", Bar::AtLeast(fifth));
        let heavy =
            lines.iter().filter(|line| line.load == load && line.loss == "heavy" && !line.has_foreign_flow());
        let heavy = sorted(heavy.map(|line| 100.0 * line.utilisation));
        add(&mut outcome.figures, format!("{load}: median at 30 % loss"), &heavy, 50, "%", Bar::Higher);
        let of_best = sorted(counted.iter().map(|line| line.of_best_link));
        if load == "packets" && !of_best.is_empty() {
            let share = share_of(&of_best, |of_best| of_best >= 0.97);
            let name = "packets: settings not below the best link alone".to_owned();
            outcome.figures.push(figure("sweep", name, share, "%", Bar::AtLeast(99.0)));
            let of_plain = sorted(counted.iter().filter_map(|line| Some(100.0 * line.of_plain?)));
            for (percent, of) in [(50, "median"), (5, "5th percentile")] {
                let name = format!("packets: {of} of the same flows over the best link without a tunnel");
                add(&mut outcome.figures, name, &of_plain, percent, "%", Bar::Higher);
            }
        }
        curves.push((load.to_owned(), values));
    }
    let calls: Vec<&Line> =
        lines.iter().filter(|line| !line.has_foreign_flow() && line.step != "rate down").collect();
    let beyond = sorted(calls.iter().filter_map(|line| Some(line.call_added_ms? - 2.0 * line.packet_ms)));
    if !beyond.is_empty() {
        let share = share_of(&beyond, |beyond| beyond <= MAX_ADDED_MS);
        let name = "calls: settings with at most 3 ms and two packets more".to_owned();
        outcome.figures.push(figure("sweep", name, share, "%", Bar::AtLeast(95.0)));
        add(&mut outcome.figures, "calls: median added p99".to_owned(), &beyond, 50, "ms", Bar::Lower);
        add(&mut outcome.figures, "calls: 95th percentile".to_owned(), &beyond, 95, "ms", Bar::Lower);
        let lost = sorted(calls.iter().filter_map(|line| Some(100.0 * line.call_lost?)));
        add(&mut outcome.figures, "calls: 95th percentile of loss".to_owned(), &lost, 95, "%", Bar::Lower);
    }
    let changed: Vec<&Line> = lines.iter().filter(|line| line.step != "none" && line.counts()).collect();
    let settled = sorted(changed.iter().filter_map(|line| line.settled_ms));
    add(&mut outcome.figures, "changes: median time to 90 %".to_owned(), &settled, 50, "ms", Bar::Lower);
    if !changed.is_empty() {
        let share = 100.0 * settled.len() as f64 / changed.len() as f64;
        outcome.figures.push(figure("sweep", "changes: used to 90 %".to_owned(), share, "%", Bar::Higher));
    }
    let foreign = lines.iter().filter(|line| FAIR_BUFFERS.contains(&line.buffer_bdp));
    let shares = sorted(foreign.filter_map(|line| line.share));
    if !shares.is_empty() {
        let share = share_of(&shares, |share| FAIR.contains(&share));
        let name = "foreign flows: settings with 25 to 75 % of the link".to_owned();
        outcome.figures.push(figure("sweep", name, share, "%", Bar::AtLeast(90.0)));
        add(&mut outcome.figures, "foreign flows: median share".to_owned(), &shares, 50, "", Bar::None);
    }
    let started = lines.iter().filter(|line| line.is_up).count() as f64;
    let name = "tunnels that came up".to_owned();
    outcome.figures.push(figure("sweep", name, 100.0 * started / lines.len() as f64, "%", Bar::Higher));
    outcome.chapter += &worst(lines);
    outcome.plots.push(("sweep.svg".to_owned(), draw(&curves)));
    outcome.raw = Value::Null;
    outcome
}

/// Adds a percentile of sorted values, if there are any.
fn add(
    figures: &mut Vec<Figure>,
    name: String,
    values: &[f64],
    percent: usize,
    unit: &'static str,
    bar: Bar,
) {
    if !values.is_empty() {
        figures.push(figure("sweep", name, percentile(values, percent), unit, bar));
    }
}

/// The worst settings by utilisation, and those whose call felt most.
fn worst(lines: &[Line]) -> String {
    let mut text = String::new();
    let mut counted: Vec<&Line> = lines.iter().filter(|line| line.counts()).collect();
    counted.sort_by(|a, b| a.utilisation.total_cmp(&b.utilisation));
    text += "\nLeast used:\n\n";
    for line in counted.iter().take(WORST) {
        text += &format!("- {:.0} %: `{}`: {}\n", 100.0 * line.utilisation, line.command(), line.setting);
    }
    let mut calls: Vec<(f64, &Line)> =
        lines.iter().filter_map(|line| Some((line.call_added_ms?, line))).collect();
    calls.retain(|(_, line)| !line.has_foreign_flow() && line.step != "rate down");
    calls.sort_by(|a, b| b.0.total_cmp(&a.0));
    text += "\nCalls that waited longest:\n\n";
    for (added, line) in calls.iter().take(WORST) {
        text += &format!("- {added:.1} ms: `{}`: {}\n", line.command(), line.setting);
    }
    text
}

/// Draws for each load the share of settings (percent) whose utilisation is at most what the x axis says.
fn draw(curves: &[(String, Vec<f64>)]) -> String {
    const TOP: f64 = 90.0;
    const BOTTOM: f64 = 450.0;
    let panel = Panel::new((TOP, BOTTOM), 100.0, 100.0, "% of settings");
    let mut svg = Svg::default();
    svg.text(PANEL_LEFT, 36.0, "start", 21, TEXT_COLOUR, "Links, loads and changes at random");
    svg.text(PANEL_LEFT, 58.0, "start", 14, "#5c6773", "utilisation (%) · at most as much as that");
    svg.grid(&panel);
    for (number, (what, values)) in curves.iter().enumerate().filter(|(_, (_, values))| !values.is_empty()) {
        let percent = |count: usize| 100.0 * count as f64 / values.len() as f64;
        let steps = |(at, value): (usize, &f64)| [(*value, percent(at)), (*value, percent(at + 1))];
        let points: Vec<_> = values.iter().enumerate().flat_map(steps).collect();
        let colour = COLOURS[number % COLOURS.len()];
        svg.line(&panel, &points, colour, 2.0);
        svg.text(PANEL_RIGHT - 8.0, TOP + 20.0 + 20.0 * number as f64, "end", 14, colour, what);
    }
    svg.finish(BOTTOM + 40.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(load: &str, utilisation: f64) -> Line {
        let text = format!(
            r#"{{"seed":1,"number":2,"setting":"10mbit","load":"{load}","flows":1,"links":1,"loss":"none",
                "beside":"nothing","step":"none","is_up":true,"utilisation":{utilisation},"of_best_link":1.0,"of_plain":null,
                "call_added_ms":4.0,"call_lost":0.0,"packet_ms":1.2,"settled_ms":null,"share":null,"buffer_bdp":2}}"#
        );
        serde_json::from_str(&text).expect("a line")
    }

    #[test]
    fn percentiles_are_those_of_each_load() {
        let lines: Vec<Line> = (1..=100).map(|n| line("streams", f64::from(n) / 100.0)).collect();
        let found = judge(&[lines, vec![line("packets", 0.5)]].concat());
        let value = |name: &str| {
            found.figures.iter().find(|figure| figure.name == name).unwrap_or_else(|| panic!("{name}")).value
        };
        assert_eq!((value("streams: median utilisation"), value("streams: 5th percentile")), (50.0, 5.0));
        assert_eq!(value("packets: median utilisation"), 50.0);
        // 4 ms, and two packets take 2.4.
        assert_eq!(value("calls: settings with at most 3 ms and two packets more"), 100.0);
        assert!(
            found.chapter.contains("1 %: `./dev bench sweep --seed 1 --only 2`: 10mbit"),
            "{}",
            found.chapter
        );
        assert!(!found.plots[0].1.contains("NaN"));
    }
}
