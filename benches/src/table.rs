//! `micro-table`: prints the table of `./dev micro` for one run or for two commits, and compares a run with
//! the accepted counts in the tree.
//!
//! Exit code 1: a benchmark takes more than PERCENT (5) more instructions, or the accepted counts do not
//! match the benchmarks. Exit code 2: invalid arguments.

use std::{env::consts::ARCH, fs, process::ExitCode};

use mpvpn_benches::{
    Counts,
    baseline::{ACCEPT_COMMAND, Baseline},
    report,
};

const USAGE: &str = "micro-table [--threshold PERCENT] REPORT [REPORT]
        micro-table --baseline FILE --counted-with TOOLS [--accept] REPORT";

fn main() -> ExitCode {
    match run() {
        Ok(code) => code,
        Err(problem) => {
            eprintln!("micro: {problem}\n  next: {USAGE}");
            ExitCode::from(2)
        }
    }
}

/// The command line.
struct Options {
    threshold: f64,
    baseline: Option<String>,
    counted_with: String,
    accept: bool,
    reports: Vec<Counts>,
}

impl Options {
    fn parse(mut words: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut options = Self {
            threshold: 5.0,
            baseline: None,
            counted_with: String::new(),
            accept: false,
            reports: Vec::new(),
        };
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or(format!("{word} needs a value"));
            match word.as_str() {
                "--threshold" => {
                    let value = value()?;
                    options.threshold = value
                        .parse()
                        .map_err(|_| format!("--threshold takes a number of percent, not '{value}'"))?;
                }
                "--baseline" => options.baseline = Some(value()?),
                "--counted-with" => options.counted_with = value()?,
                "--accept" => options.accept = true,
                file => options.reports.push(load(file)?),
            }
        }
        Ok(options)
    }
}

fn run() -> Result<ExitCode, String> {
    let options = Options::parse(std::env::args().skip(1))?;
    match (options.reports.as_slice(), &options.baseline) {
        ([counts], Some(file)) if options.accept => accept(file, counts, &options.counted_with),
        ([counts], Some(file)) => judge(file, counts, &options.counted_with),
        ([counts], None) => {
            print!("{}", report::single(counts));
            Ok(ExitCode::SUCCESS)
        }
        ([before, after], None) => Ok(compare(before, after, options.threshold)),
        (reports, _) => Err(format!("another number of reports was expected than {}", reports.len())),
    }
}

fn load(path: &str) -> Result<Counts, String> {
    let text = fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))?;
    let counts =
        report::read(&text).map_err(|error| format!("{path}, line {}: {}", error.line, error.problem))?;
    if counts.is_empty() {
        return Err(format!("{path}: no benchmark ran"));
    }
    Ok(counts)
}

fn compare(before: &Counts, after: &Counts, threshold: f64) -> ExitCode {
    let (table, worse) = report::compared(before, after, threshold);
    print!("{table}");
    if worse.is_empty() {
        println!("none takes more than {threshold} % more instructions than before");
        return ExitCode::SUCCESS;
    }
    eprintln!("micro: more than {threshold} % more instructions than before: {}", worse.join(", "));
    ExitCode::FAILURE
}

fn judge(file: &str, counts: &Counts, counted_with: &str) -> Result<ExitCode, String> {
    let baseline = read(file)?;
    if baseline.architecture != ARCH {
        println!(
            "micro: not compared: the numbers in {file} are of {}, not of {ARCH}",
            baseline.architecture
        );
        return Ok(ExitCode::SUCCESS);
    }
    let verdict = baseline.compare(counts);
    eprint!("{}", verdict.to_text(&baseline, counted_with));
    if verdict.fails() {
        return Ok(ExitCode::FAILURE);
    }
    println!("micro: {} benchmarks, none worse than accepted", counts.len());
    Ok(ExitCode::SUCCESS)
}

fn accept(file: &str, counts: &Counts, counted_with: &str) -> Result<ExitCode, String> {
    let baseline = Baseline {
        architecture: ARCH.to_owned(),
        counted_with: counted_with.to_owned(),
        instructions: counts.clone(),
    };
    if let Ok(before) = read(file) {
        print!("{}", report::compared(&before.instructions, counts, f64::INFINITY).0);
    }
    fs::write(file, baseline.to_text()).map_err(|error| format!("{file}: {error}"))?;
    println!("wrote {file}: say in the commit why they changed");
    Ok(ExitCode::SUCCESS)
}

fn read(file: &str) -> Result<Baseline, String> {
    let text =
        fs::read_to_string(file).map_err(|error| format!("{file}: {error}; {ACCEPT_COMMAND} writes it"))?;
    Baseline::parse(&text).map_err(|error| format!("{file}: {error}"))
}
