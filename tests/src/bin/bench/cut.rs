//! The rig `cut`: how long an application waits when one of two links fails under load, and how long until
//! the link is used again.
//!
//! In: the number of cuts, or one for each kind. Out: figures; for several cuts their distribution, a plot,
//! and the logs around each gap that is longer than `MAX_P99`.

use std::{
    fs,
    path::Path,
    time::{Duration, SystemTime},
};

use mpvpn_plot::{COLOURS, PANEL_LEFT, PANEL_RIGHT, Panel, Svg, TEXT_COLOUR};
use mpvpn_tests::{
    cut::{Cut, LinkFailure, MAX_P99, Timeline, cut_under_load},
    percentile,
    testbed::{Direction, MpvpnProcess, Testbed},
};
use serde_json::json;
use time::{OffsetDateTime, macros::format_description};

use crate::{
    figure::{Bar, figure},
    options::Options,
    report::{Outcome, directory},
    rigs::pair,
};

/// Failures of a link, and the directions of the load.
const KINDS: [(LinkFailure, Direction); 6] = [
    (LinkFailure::Carrier, Direction::Up),
    (LinkFailure::Carrier, Direction::Down),
    (LinkFailure::Silent(Direction::Both), Direction::Up),
    (LinkFailure::Silent(Direction::Both), Direction::Down),
    (LinkFailure::Silent(Direction::Up), Direction::Up),
    (LinkFailure::Silent(Direction::Down), Direction::Down),
];
/// From when both links carry data to the cut: some cuts come before rates are stable, some after a path has
/// been alive for long enough not to count as flapping (5 s, docs/design/liveness.md).
const BEFORE_CUT: std::ops::Range<Duration> = Duration::from_millis(500)..Duration::from_millis(6500);
/// Time without the link.
const OUTAGE: Duration = Duration::from_millis(1500);
/// How long before a cut and after the restore the log of a long gap begins and ends.
const LOG_MARGIN: Duration = Duration::from_millis(500);
/// The longest gap of one cut of each kind, where few are measured.
const MAX_GAP_MS: [f64; 2] = [100.0, 300.0];
const MAX_RECOVERY_MS: f64 = 2000.0;

pub(crate) fn run(options: &Options) -> Outcome {
    match options.count {
        None => one_of_each_kind().into(),
        Some(count) => many(count),
    }
}

fn name(failure: LinkFailure, direction: Direction) -> String {
    format!("{failure:?}, 8 flows {direction:?}")
}

fn one_of_each_kind() -> Vec<crate::figure::Figure> {
    let mut figures = Vec::new();
    for (failure, direction) in KINDS {
        let testbed = Testbed::two_links();
        let (_server, client) = pair(&testbed);
        let outcome = cut_under_load(&testbed, &client, failure, direction, &Timeline::LONG);
        let (cut, what) = (&outcome.cuts[0], name(failure, direction));
        let bar = Bar::AtMost(MAX_GAP_MS[usize::from(failure != LinkFailure::Carrier)]);
        figures.push(figure("cut", format!("gap: {what}"), ms(cut.longest_gap), "ms", bar));
        let bar = Bar::AtMost(MAX_RECOVERY_MS);
        figures.push(figure("cut", format!("used again: {what}"), ms(cut.recovery_time), "ms", bar));
    }
    figures
}

/// Measures `count` cuts, divided among the kinds, those of a kind in one testbed.
fn many(count: u32) -> Outcome {
    let mut outcome = Outcome::default();
    let (mut curves, mut raw) = (Vec::new(), Vec::new());
    outcome.chapter = format!(
        "\n## cut\n\n{count} cuts of one of two links of 100 Mbit/s and 25 ms under load; ms.\n\n\
         | failure, load | cuts | min | median | p90 | p99 | max | used again, max |\n|---|--:|--:|--:|--:|--:|--:|--:|\n"
    );
    let kinds = KINDS.len() as u32;
    for (number, (failure, direction)) in (0..).zip(KINDS) {
        let share = count / kinds + u32::from(number < count % kinds);
        if share == 0 {
            continue;
        }
        let what = name(failure, direction);
        let testbed = Testbed::two_links().log_decisions();
        let (server, client) = pair(&testbed);
        let timeline = Timeline { count: share, before_cut: BEFORE_CUT, outage: OUTAGE };
        let measured = cut_under_load(&testbed, &client, failure, direction, &timeline);
        let gaps = measured.gaps_ms();
        let [min, median, p90, p99, max] = [0, 50, 90, 99, 100].map(|percent| percentile(&gaps, percent));
        let recovery = ms(measured.max_recovery_time());
        outcome.chapter += &format!(
            "| {what} | {share} | {min:.0} | {median:.0} | {p90:.0} | {p99:.0} | {max:.0} | {recovery:.0} |\n"
        );
        for (name, value, bar) in [
            ("median gap", median, Bar::AtMost(ms(failure.max_median()))),
            ("p99 of gaps", p99, Bar::AtMost(ms(MAX_P99))),
            ("longest gap", max, Bar::Lower),
            ("used again, latest", recovery, Bar::AtMost(MAX_RECOVERY_MS)),
        ] {
            outcome.figures.push(figure("cut", format!("{name}: {what}"), value, "ms", bar));
        }
        for (number, cut) in measured.cuts.iter().enumerate().filter(|(_, cut)| cut.longest_gap > MAX_P99) {
            let path = keep_log(cut, &format!("{failure:?}-{direction:?}-{number}"), [&client, &server]);
            let line = format!("{what}: gap of {:.0} ms, log: {path}", ms(cut.longest_gap));
            eprintln!("  {line}");
            outcome.chapter += &format!("\n{line}\n");
        }
        raw.push(json!({
            "failure": format!("{failure:?}"), "load": format!("{direction:?}"),
            "gaps_ms": measured.cuts.iter().map(|cut| ms(cut.longest_gap)).collect::<Vec<_>>(),
            "recovery_ms": measured.cuts.iter().map(|cut| ms(cut.recovery_time)).collect::<Vec<_>>(),
        }));
        curves.push((what, gaps));
    }
    outcome.raw = raw.into();
    outcome.plots.push(("cut.svg".to_owned(), draw(&curves)));
    outcome
}

/// Writes the lines that both ends logged around a cut to a file, and returns its path.
fn keep_log(cut: &Cut, name: &str, ends: [&MpvpnProcess; 2]) -> String {
    let name: String = name.chars().filter(|char| char.is_alphanumeric() || *char == '-').collect();
    let path = directory().join("cut").join(format!("{name}.log"));
    let (from, to) = (moment(cut.at - LOG_MARGIN), moment(cut.restored_at + LOG_MARGIN));
    let mut lines: Vec<String> = ["client", "server"]
        .iter()
        .zip(ends)
        .flat_map(|(end, process)| {
            let log = process.log();
            let lines = log.lines().filter(|line| (from.as_str()..to.as_str()).contains(line));
            lines.map(|line| format!("{line} [{end}]")).collect::<Vec<_>>()
        })
        .chain([
            format!("{} the link is cut", moment(cut.at)),
            format!("{} restored", moment(cut.restored_at)),
        ])
        .collect();
    lines.sort();
    write(&path, &(lines.join("\n") + "\n"));
    path.display().to_string()
}

fn write(path: &Path, text: &str) {
    let written = path.parent().map_or(Ok(()), fs::create_dir_all).and_then(|()| fs::write(path, text));
    written.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}

/// A time as logs begin with it.
fn moment(at: SystemTime) -> String {
    let format = format_description!("[year]-[month]-[day]T[hour]:[minute]:[second].[subsecond digits:6]Z");
    OffsetDateTime::from(at).format(&format).expect("all parts of a time")
}

/// Draws for each kind the share of cuts (percent) whose gap is at most as long as the x axis says.
fn draw(curves: &[(String, Vec<f64>)]) -> String {
    const TOP: f64 = 90.0;
    const BOTTOM: f64 = 450.0;
    let longest = curves.iter().filter_map(|(_, gaps)| gaps.last()).fold(ms(MAX_P99), |a, b| a.max(*b));
    let panel = Panel::new((TOP, BOTTOM), longest * 1.05, 100.0, "% of cuts");
    let mut svg = Svg::default();
    svg.text(PANEL_LEFT, 36.0, "start", 21, TEXT_COLOUR, "One of two links fails under load");
    let below = "longest time between replies to pings (ms) · at most as long as that";
    svg.text(PANEL_LEFT, 58.0, "start", 14, "#5c6773", below);
    svg.band(&panel, (ms(MAX_P99), longest * 1.05));
    svg.grid(&panel);
    for (number, (what, gaps)) in curves.iter().enumerate() {
        let percent = |count: usize| 100.0 * count as f64 / gaps.len() as f64;
        let steps = |(at, gap): (usize, &f64)| [(*gap, percent(at)), (*gap, percent(at + 1))];
        let points: Vec<_> = gaps.iter().enumerate().flat_map(steps).chain([(longest, 100.0)]).collect();
        let colour = COLOURS[number % COLOURS.len()];
        svg.line(&panel, &points, colour, 2.0);
        svg.text(PANEL_RIGHT - 8.0, BOTTOM - 16.0 - 20.0 * number as f64, "end", 14, colour, what);
    }
    svg.finish(BOTTOM + 40.0)
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_sort_like_the_lines_of_logs() {
        let at = SystemTime::UNIX_EPOCH + Duration::from_millis(1_764_318_123_456);
        assert!(*"2025-11-28T08:22:03.455999Z  INFO a" < *moment(at));
        assert!(*moment(at) < *"2025-11-28T08:22:03.456001Z  INFO a");
    }

    #[test]
    fn the_share_of_short_gaps_is_drawn_for_each_kind() {
        let svg = draw(&[("silent".to_owned(), vec![50.0, 90.0]), ("carrier".to_owned(), vec![20.0])]);
        assert!(svg.contains(">silent<") && svg.contains(">carrier<") && !svg.contains("NaN"));
    }
}
