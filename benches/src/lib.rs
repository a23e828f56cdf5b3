//! From what gungraun reports to a table, and to the verdict whether something became more expensive.
//!
//! In: its JSON output, one object a line, of one run or of two. Out: lines of text for people.

use std::{collections::BTreeMap, fmt::Write};

use serde_json::Value;

/// A change by fewer instructions is never too much, whatever its share of a short function.
const SLACK: u64 = 5;

/// Instructions of each benchmark, by its name.
pub type Counts = BTreeMap<String, u64>;

/// Why a report cannot be read.
#[derive(Debug, PartialEq, Eq)]
pub struct Unreadable {
    /// The line, from 1.
    pub line: usize,
    /// What is wrong with it.
    pub problem: String,
}

/// Reads a report.
///
/// # Errors
/// If a line is not what gungraun writes.
pub fn read(report: &str) -> Result<Counts, Unreadable> {
    let lines = report.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    lines.map(|(at, line)| entry(line).map_err(|problem| Unreadable { line: at + 1, problem })).collect()
}

fn entry(line: &str) -> Result<(String, u64), String> {
    let report: Value = serde_json::from_str(line).map_err(|error| error.to_string())?;
    let path = report["module_path"].as_str().ok_or("no module_path")?;
    // The file and its group have the same name.
    let (_, name) = path.split_once("::").unwrap_or(("", path));
    let name = match report["id"].as_str() {
        Some(id) => format!("{name} {id}"),
        None => name.to_owned(),
    };
    let count = &report["profiles"][0]["data"]["total"]["metrics"]["Ir"]["values"]["new"];
    let count = count.as_u64().ok_or_else(|| format!("no instruction count of {name}"))?;
    Ok((name, count))
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

/// A table of two runs, and the names of the benchmarks that take more than `threshold` percent more instructions.
pub fn compared(before: &Counts, after: &Counts, threshold: f64) -> (String, Vec<String>) {
    let names: BTreeMap<&String, ()> = before.keys().chain(after.keys()).map(|name| (name, ())).collect();
    let width = width(names.keys().copied());
    let mut out = format!("{:width$}  {:>12}  {:>12}  {:>9}\n", "benchmark", "before", "after", "change");
    let mut worse = Vec::new();
    for name in names.into_keys() {
        let (old, new) = (before.get(name).copied(), after.get(name).copied());
        let change = match (old, new) {
            (Some(old), Some(new)) => {
                let percent = percent(old, new);
                if new as f64 * 100.0 > old as f64 * (100.0 + threshold) && new > old + SLACK {
                    worse.push(name.clone());
                }
                format!("{percent:+.1} %")
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

fn percent(old: u64, new: u64) -> f64 {
    if old == new { 0.0 } else { (new as f64 / old.max(1) as f64 - 1.0) * 100.0 }
}

fn width<'a>(names: impl Iterator<Item = &'a String>) -> usize {
    names.map(String::len).max().unwrap_or(0).max("benchmark".len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(name: &str, id: &str, count: u64) -> String {
        format!(
            r#"{{"module_path":"packet::packet::{name}","id":{id},"profiles":[{{"data":{{"total":{{"metrics":{{"Ir":{{"values":{{"new":{count}}}}}}}}}}}}}]}}"#
        )
    }

    fn counts(list: &[(&str, u64)]) -> Counts {
        list.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect()
    }

    #[test]
    fn names_and_counts_are_read_from_a_report() {
        let report = format!("{}\n\n{}\n", line("split", r#""tcp4""#, 56_401), line("update", "null", 28));
        assert_eq!(read(&report), Ok(counts(&[("packet::split tcp4", 56_401), ("packet::update", 28)])));
    }

    #[test]
    fn a_line_without_a_count_is_named() {
        let report = format!("{}\n{{\"module_path\":\"a::b\"}}", line("split", "null", 1));
        let error = read(&report).unwrap_err();
        assert_eq!((error.line, error.problem.as_str()), (2, "no instruction count of b"));
        assert_eq!(read("running").unwrap_err().line, 1);
    }

    #[test]
    fn only_what_exceeds_the_threshold_is_worse() {
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
