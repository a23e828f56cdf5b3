//! Reports of the runner, and tables of one or two reports.
//!
//! In: lines of JSON, one per benchmark. Out: tables as text, and the names of benchmarks that became worse.

use std::{collections::BTreeMap, fmt::Write};

use serde_json::{Value, json};

use crate::{Counts, exceeds, percent};

/// An invalid line of a report.
#[derive(Debug, PartialEq, Eq)]
pub struct Unreadable {
    /// The line, from 1.
    pub line: usize,
    /// The problem.
    pub problem: String,
}

/// The line of one benchmark.
pub fn line(name: &str, instructions: u64) -> String {
    json!({ "benchmark": name, "instructions": instructions }).to_string()
}

/// Reads a report.
///
/// # Errors
/// If a line is not as [`line()`] writes it.
pub fn read(report: &str) -> Result<Counts, Unreadable> {
    let lines = report.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    lines.map(|(at, line)| entry(line).map_err(|problem| Unreadable { line: at + 1, problem })).collect()
}

fn entry(line: &str) -> Result<(String, u64), String> {
    let entry: Value = serde_json::from_str(line).map_err(|error| error.to_string())?;
    let name = entry["benchmark"].as_str().ok_or("no name of a benchmark")?;
    let count = entry["instructions"].as_u64().ok_or_else(|| format!("no instruction count of {name}"))?;
    Ok((name.to_owned(), count))
}

/// A table of one run.
pub fn single(counts: &Counts) -> String {
    let width = width(counts.keys());
    let mut out = format!("{:width$}  instructions\n", "benchmark");
    for (name, count) in counts {
        let _ = writeln!(out, "{name:width$}  {count:>12}");
    }
    out
}

/// A table of two runs, and the names of the benchmarks that take more than `threshold` percent more
/// instructions.
pub fn compared(before: &Counts, after: &Counts, threshold: f64) -> (String, Vec<String>) {
    let names: BTreeMap<&String, ()> = before.keys().chain(after.keys()).map(|name| (name, ())).collect();
    let width = width(names.keys().copied());
    let mut out = format!("{:width$}  {:>12}  {:>12}  {:>9}\n", "benchmark", "before", "after", "change");
    let mut worse = Vec::new();
    for name in names.into_keys() {
        let (old, new) = (before.get(name).copied(), after.get(name).copied());
        let change = match (old, new) {
            (Some(old), Some(new)) => {
                if exceeds(new, old, threshold) {
                    worse.push(name.clone());
                }
                format!("{:+.1} %", percent(old, new))
            }
            (None, _) => "new".to_owned(),
            (_, None) => "gone".to_owned(),
        };
        let mark = if worse.last() == Some(name) { "  worse" } else { "" };
        let cell = |count: Option<u64>| count.map_or_else(|| "-".to_owned(), |count| count.to_string());
        let _ = writeln!(out, "{name:width$}  {:>12}  {:>12}  {change:>9}{mark}", cell(old), cell(new));
    }
    (out, worse)
}

fn width<'a>(names: impl Iterator<Item = &'a String>) -> usize {
    names.map(String::len).max().unwrap_or(0).max("benchmark".len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(list: &[(&str, u64)]) -> Counts {
        list.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect()
    }

    #[test]
    fn what_is_written_is_read_back() {
        let report = format!("{}\n\n{}\n", line("packet::split tcp4", 56_401), line("packet::update", 28));
        assert_eq!(read(&report), Ok(counts(&[("packet::split tcp4", 56_401), ("packet::update", 28)])));
    }

    #[test]
    fn a_line_without_a_count_is_named() {
        let report = format!("{}\n{{\"benchmark\":\"a::b\"}}", line("split", 1));
        let error = read(&report).unwrap_err();
        assert_eq!((error.line, error.problem.as_str()), (2, "no instruction count of a::b"));
        assert_eq!(read("running").unwrap_err().line, 1);
    }

    #[test]
    fn only_counts_above_the_threshold_are_worse() {
        let before = counts(&[("a", 1000), ("b", 1000), ("c", 1000), ("gone", 1), ("short", 20)]);
        let after = counts(&[("a", 1050), ("b", 1051), ("c", 10), ("new", 9000), ("short", 25)]);
        let (table, worse) = compared(&before, &after, 5.0);
        assert_eq!(worse, ["b"], "{table}");
        let rows: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(rows[2], ["b", "1000", "1051", "+5.1", "%", "worse"]);
        assert_eq!(rows[3], ["c", "1000", "10", "-99.0", "%"]);
        assert_eq!(rows[4], ["gone", "1", "-", "gone"]);
        assert_eq!(rows[5], ["new", "-", "9000", "new"]);
    }

    #[test]
    fn a_single_run_is_a_table_too() {
        let table = single(&counts(&[("packet::split tcp4", 7)]));
        assert_eq!(table.lines().nth(1).map(str::trim), Some("packet::split tcp4             7"));
    }
}
