//! `gungraun-runner`: the program that benchmark binaries start, in place of gungraun's own runner.
//!
//! In: the list of benchmarks on standard input, encoded; the path of the binary and words after `--` of
//! `cargo bench`: `--home=DIR` (for the files of callgrind, without it beside the binary) and part of the
//! name of the benchmarks to run. Out: a report on standard output, in the order of the benchmarks, which run
//! side by side on all processors.
#![allow(clippy::disallowed_types)] // Edge: it starts processes.

use std::{
    env, fs,
    io::{Read, Write},
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use mpvpn_benches::{
    callgrind,
    plan::{self, Benchmark, Plan},
    report,
};

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("gungraun-runner: {problem}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), String> {
    // gungraun calls it: VERSION --lib-bench PACKAGE_DIR PACKAGE FILE MODULE TARGET TOOLS BINARY LENGTH.
    let words: Vec<String> = env::args().skip(1).collect();
    let version = words.first().map_or("", String::as_str);
    if version != plan::GUNGRAUN_VERSION {
        let expected = plan::GUNGRAUN_VERSION;
        return Err(format!("benchmarks with gungraun {expected} were expected, not '{version}'"));
    }
    let binary = words.get(8).filter(|_| words[1] == "--lib-bench").ok_or("no benchmark binary was named")?;
    let binary = fs::canonicalize(binary).map_err(|error| format!("{binary}: {error}"))?;

    let mut bytes = Vec::new();
    std::io::stdin().read_to_end(&mut bytes).map_err(|error| format!("standard input: {error}"))?;
    let plan = Plan::decode(&bytes)?;
    let options = RunOptions::of(&plan.args, &binary)?;
    let chosen: Vec<&Benchmark> =
        plan.benchmarks.iter().filter(|benchmark| benchmark.name.contains(&options.name_filter)).collect();
    fs::create_dir_all(&options.home).map_err(|error| format!("{}: {error}", options.home.display()))?;
    let home =
        fs::canonicalize(&options.home).map_err(|error| format!("{}: {error}", options.home.display()))?;

    let path = env::var_os("PATH").unwrap_or_default();
    let valgrind = callgrind::find("valgrind", &path).ok_or("valgrind is not installed")?;
    let mut out = String::new();
    for (benchmark, count) in chosen.iter().zip(counts(&valgrind, &binary, &chosen, &home)) {
        out += &report::line(&benchmark.name, count.map_err(|error| format!("{}: {error}", benchmark.name))?);
        out.push('\n');
    }
    std::io::stdout().write_all(out.as_bytes()).map_err(|error| format!("standard output: {error}"))
}

/// The options after `--`.
struct RunOptions {
    home: PathBuf,
    /// Part of the names of the benchmarks to run.
    name_filter: String,
}

impl RunOptions {
    fn of(words: &[String], binary: &Path) -> Result<Self, String> {
        let mut options = Self { home: binary.with_extension("callgrind"), name_filter: String::new() };
        for word in words {
            match word.strip_prefix("--home=") {
                Some(home) => options.home = PathBuf::from(home),
                // From cargo.
                None if word == "--bench" => {}
                None if word.starts_with('-') => return Err(format!("no such option: {word}")),
                None => word.clone_into(&mut options.name_filter),
            }
        }
        Ok(options)
    }
}

/// The instructions of each benchmark, in their order.
fn counts(
    valgrind: &Path,
    binary: &Path,
    benchmarks: &[&Benchmark],
    home: &Path,
) -> Vec<Result<u64, String>> {
    let next = AtomicUsize::new(0);
    let results = Mutex::new(vec![Err("it was not run".to_owned()); benchmarks.len()]);
    let work = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(benchmark) = benchmarks.get(at) else { return };
            let result = count(valgrind, binary, benchmark, home);
            results.lock().expect("no worker panics with it")[at] = result;
        }
    };
    let workers = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| (0..workers).for_each(|_| drop(scope.spawn(work))));
    results.into_inner().expect("no worker panics with it")
}

fn count(valgrind: &Path, binary: &Path, benchmark: &Benchmark, home: &Path) -> Result<u64, String> {
    let out = home.join(format!("{}.out", benchmark.name.replace("::", ".").replace(' ', ".")));
    let output = callgrind::command(valgrind, binary, benchmark, &out)
        .output()
        .map_err(|error| format!("valgrind does not run: {error}"))?;
    if !output.status.success() {
        return Err(format!("{}\n{}", output.status, String::from_utf8_lossy(&output.stderr)));
    }
    let file = fs::read_to_string(&out).map_err(|error| format!("{}: {error}", out.display()))?;
    callgrind::total(&file)
}
