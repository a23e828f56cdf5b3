//! Compares two binaries: the rigs of this work tree run with the binary of another commit and with the
//! binary under test, in turn.
//!
//! In: the path of the other commit's binary (`--against`; the binary under test is `MPVPN_BIN`) and the
//! names of the rigs. Each run is a separate process of this program with one rig, so that a rig that fails
//! ends only its run. Out: a verdict on every figure, on standard output and in `target/bench/against/`. The
//! files are written after every run, with what is known by then.
//!
//! Some of many figures look worse by chance. So the rigs of figures that look worse run again, with as many
//! pairs, and the verdict uses all pairs.

mod judge;
mod schedule;
mod series;
mod summary;

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Instant,
};

use mpvpn_scenarios::Scenario;
use mpvpn_tests::testbed::binary;
use serde_json::{Value, json};

use self::{
    schedule::{Durations, Run, schedule},
    series::Collection,
    summary::Row,
};
use crate::{options::Options, paths, report};

/// Default number of pairs of runs. Fewer than 5: differences below the spread are never detected. More than
/// 10: a rig of a minute takes more than 20 minutes.
const PAIRS: u32 = 5;
/// Default number of pairs for rigs that take half an hour even with `--quick`.
const PAIRS_OF_A_LONG_RIG: u32 = 2;
const LONG: [&str; 3] = ["paths", "stream", "classes"];
/// The exit code of a run that was interrupted.
const INTERRUPTED: i32 = 130;

/// The number of pairs of a rig, without `--pairs`.
pub(crate) fn default_pairs(rig: &str, is_quick: bool) -> u32 {
    if is_quick && LONG.contains(&rig) { PAIRS_OF_A_LONG_RIG } else { PAIRS }
}

/// Runs the comparison. Returns whether no figure became worse.
///
/// # Errors
/// If there is nothing to compare with, or the comparison was interrupted.
pub(crate) fn run(options: &Options, before: &Path) -> Result<bool, String> {
    // The programs run in other directories.
    let absolute = |program: &Path| {
        let found = program.canonicalize().ok().filter(|found| found.is_file());
        found.ok_or_else(|| format!("there is no binary at {}", program.display()))
    };
    let binaries = [absolute(before)?, absolute(&binary())?];
    if options.rigs.is_empty() {
        return Err("--against needs the names of the rigs to run".to_owned());
    }
    let directory = report::directory().join("against");
    let _ = fs::remove_dir_all(directory.join("runs"));
    let mut comparison = Comparison {
        options,
        binaries,
        directory,
        durations: Durations::new(options.rigs.len()),
        figures: Collection::default(),
        scenarios: options.scenarios.clone(),
    };
    let pairs: Vec<u32> = options
        .rigs
        .iter()
        .map(|rig| options.pairs.unwrap_or_else(|| default_pairs(rig, options.quick)))
        .collect();
    comparison.play(&schedule(&pairs, 0))?;
    let repeats = comparison.repeats(&pairs);
    if repeats.iter().any(|pairs| *pairs > 0) {
        comparison.play(&schedule(&repeats, pairs.iter().copied().max().unwrap_or(0)))?;
    }
    let rows = summary::rows(&comparison.figures, options.threshold);
    print!("{}", summary::table(&rows));
    println!("\n{}", summary::counts(&rows));
    Ok(!rows.iter().any(Row::is_worse))
}

struct Comparison<'a> {
    options: &'a Options,
    /// The binary before and the binary under test.
    binaries: [PathBuf; 2],
    directory: PathBuf,
    durations: Durations,
    figures: Collection,
    /// Scenarios of the rigs that run scenarios; empty: all.
    scenarios: Vec<String>,
}

impl Comparison<'_> {
    fn play(&mut self, runs: &[Run]) -> Result<(), String> {
        for (done, run) in runs.iter().enumerate() {
            let Run { rig, pair, side } = *run;
            let left = self.durations.left(&runs[done..]);
            let left = left.map_or("time left is known after the first pair".to_owned(), |left| {
                format!("{} left", paths::about(left))
            });
            eprintln!("  {}, pair {}, {}; {left}", self.options.rigs[rig], pair + 1, side.name());
            let began = Instant::now();
            match self.run(*run)? {
                Ok(report) => self.figures.take(&report, pair, side)?,
                Err(why) => eprintln!("    not measured: {why}"),
            }
            self.durations.note(rig, began.elapsed());
            self.write()?;
        }
        Ok(())
    }

    /// Runs a rig once and returns its report. The outer error ends the comparison.
    fn run(&self, run: Run) -> Result<Result<Value, String>, String> {
        let rig = &self.options.rigs[run.rig];
        let name = format!("{rig}-{}-{}", run.pair + 1, run.side.name());
        let directory = self.directory.join("runs").join(name);
        let failed = |error| format!("{}: {error}", directory.display());
        fs::create_dir_all(&directory).map_err(failed)?;
        let log = fs::File::create(directory.join("log")).map_err(failed)?;
        let copy = log.try_clone().map_err(failed)?;
        let program = std::env::current_exe().map_err(|error| error.to_string())?;
        let status = Command::new(program)
            .arg(rig)
            .args(&self.scenarios)
            .args(&self.options.passed_on)
            .arg("--report-to")
            .arg(&directory)
            .env("MPVPN_BIN", &self.binaries[run.side as usize])
            .stdin(Stdio::null())
            .stdout(log)
            .stderr(copy)
            .status()
            .map_err(failed)?;
        if status.code() == Some(INTERRUPTED) {
            return Err("interrupted".to_owned());
        }
        // A run that missed a bar fails as well, but it has a report.
        let text = fs::read_to_string(directory.join("report.json"));
        let text = text.map_err(|_| format!("{status}: {}", last_line(&directory.join("log"))));
        Ok(text.and_then(|text| serde_json::from_str(&text).map_err(|error| error.to_string())))
    }

    /// The number of further pairs of each rig: as many as before if some of its figures look worse.
    fn repeats(&mut self, pairs: &[u32]) -> Vec<u32> {
        let rows = summary::rows(&self.figures, self.options.threshold);
        let worse: Vec<(&str, &str)> = rows
            .iter()
            .filter(|row| row.is_worse())
            .map(|row| (row.series.rig.as_str(), row.series.name.as_str()))
            .collect();
        if !worse.is_empty() {
            let names: Vec<String> = worse.iter().map(|(rig, name)| format!("{rig}, {name}")).collect();
            eprintln!("  these look worse, and their rigs run again: {}", names.join("; "));
        }
        self.scenarios = scenarios_of(&worse, &self.scenarios);
        let rigs = self.options.rigs.iter().zip(pairs);
        rigs.map(|(rig, pairs)| if worse.iter().any(|(of, _)| of == rig) { *pairs } else { 0 }).collect()
    }

    fn write(&self) -> Result<(), String> {
        let rows = summary::rows(&self.figures, self.options.threshold);
        let [before, after] = self.binaries.each_ref().map(|path| path.display().to_string());
        let all = json!({
            "machine": report::machine(), "date": report::date(), "before": before, "after": after,
            "threshold_percent": self.options.threshold, "figures": summary::figures(&rows),
        });
        let text = format!(
            "# {after}\n\nagainst {before}; {}; {}\n\n{}\n{}\n",
            report::machine(),
            report::date(),
            summary::table(&rows),
            summary::counts(&rows)
        );
        let put = |name: &str, text: String| fs::write(self.directory.join(name), text);
        put("report.json", format!("{all:#}\n"))
            .and_then(|()| put("report.md", text))
            .map_err(|error| format!("{}: {error}", self.directory.display()))
    }
}

/// The scenarios to repeat: if all figures that look worse belong to scenarios, only those, else `all`.
fn scenarios_of(worse: &[(&str, &str)], all: &[String]) -> Vec<String> {
    let of = |name: &str| Scenario::names().find(|scenario| name.starts_with(&format!("{scenario}, ")));
    let found: Option<Vec<&str>> = worse.iter().map(|(_, name)| of(name)).collect();
    let Some(mut found) = found.filter(|found| !found.is_empty()) else { return all.to_vec() };
    found.sort_unstable();
    found.dedup();
    found.into_iter().map(str::to_owned).collect()
}

fn last_line(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    let last = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("nothing was said");
    format!("{} (all of it: {})", last.trim(), log.display())
}

/// The number of pairs, as the list of rigs shows it.
pub(crate) fn about(rig: &str) -> String {
    let (whole, quick) = (default_pairs(rig, false), default_pairs(rig, true));
    if whole == quick { format!("{whole} pairs") } else { format!("{whole} pairs, {quick} with --quick") }
}

/// Makes this process end when its parent ends for any reason.
pub(crate) fn end_with_parent() -> Result<(), String> {
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::TERM))
        .map_err(|error| format!("the end of the comparison cannot be noticed: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_quick_rigs_get_two_pairs_and_all_others_five() {
        let pairs = [("cut", false), ("cut", true), ("paths", false), ("paths", true), ("classes", true)]
            .map(|(rig, quick)| default_pairs(rig, quick));
        assert_eq!(pairs, [5, 5, 5, 2, 2]);
    }

    #[test]
    fn only_scenarios_that_look_worse_are_repeated() {
        let all = ["lossy".to_owned(), "equal".to_owned(), "two_100".to_owned()];
        let worse = [("paths", "lossy, 4 TCP Up: goodput"), ("paths", "lossy, QUIC Down: goodput")];
        assert_eq!(scenarios_of(&worse, &all), ["lossy"]);
        let other = [("paths", "lossy, 4 TCP Up: goodput"), ("stream", "short connections")];
        assert_eq!(scenarios_of(&other, &all), all);
        assert_eq!(scenarios_of(&[], &all), all);
    }

    #[test]
    fn why_a_run_failed_is_the_last_line_of_its_log() {
        let directory = tempfile::tempdir().expect("a directory");
        let log = directory.path().join("log");
        fs::write(&log, "one\nerror: unexpected argument '--qlog'\n\n").expect("a log");
        assert!(last_line(&log).starts_with("error: unexpected argument '--qlog' (all of it: "));
    }
}
