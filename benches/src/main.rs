//! `micro-table [--threshold PERCENT] REPORT [REPORT]`: the table of `./dev micro`, of one run or of before and after.
//! Exits with 1 if a benchmark became more than PERCENT (5) more expensive, with 2 if it was called wrongly.

use std::process::ExitCode;

use mpvpn_benches::{self as table, Counts};

const USAGE: &str = "micro-table [--threshold PERCENT] REPORT [REPORT]";

fn main() -> ExitCode {
    match run() {
        Ok(code) => code,
        Err(problem) => {
            eprintln!("micro: {problem}\n  next: {USAGE}");
            ExitCode::from(2)
        }
    }
}

fn run() -> Result<ExitCode, String> {
    let mut threshold = 5.0;
    let mut reports = Vec::new();
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        if word != "--threshold" {
            reports.push(load(&word)?);
            continue;
        }
        let value = words.next().unwrap_or_default();
        threshold =
            value.parse().map_err(|_| format!("--threshold takes a number of percent, not '{value}'"))?;
    }
    match reports.as_slice() {
        [counts] => {
            print!("{}", table::single(counts));
            Ok(ExitCode::SUCCESS)
        }
        [before, after] => Ok(compare(before, after, threshold)),
        _ => Err(format!("expected one report or two, got {}", reports.len())),
    }
}

fn load(path: &str) -> Result<Counts, String> {
    let text = std::fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))?;
    let counts =
        table::read(&text).map_err(|error| format!("{path}, line {}: {}", error.line, error.problem))?;
    if counts.is_empty() {
        return Err(format!("{path}: no benchmark ran"));
    }
    Ok(counts)
}

fn compare(before: &Counts, after: &Counts, threshold: f64) -> ExitCode {
    let (table, worse) = table::compared(before, after, threshold);
    print!("{table}");
    if worse.is_empty() {
        println!("none takes more than {threshold} % more instructions than before");
        return ExitCode::SUCCESS;
    }
    eprintln!("micro: more than {threshold} % more instructions than before: {}", worse.join(", "));
    ExitCode::FAILURE
}
