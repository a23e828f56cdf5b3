//! Machine tests: whole Debian systems, booted in containers, on which the package is installed, used,
//! upgraded and purged; and one with a kernel of its own, in which end-to-end stories run.
//!
//! In: root file systems (`tests/machines/setup`), the package (`./dev package`), the program of the stories,
//! and the names of tests; `./dev test machines` brings all of them. Out: a line per step with its duration,
//! then the result of each test; journals of a failed test in `target/machine-failures`. Always holds:
//! everything happens in namespaces of this process ([`isolation`]); every wait is bounded; nothing is left
//! when the process ends, however it ends.
//!
//! [`network`] is the internet between the machines, [`machine`] one of them, [`site`] a server and its
//! clients, [`snapshot`] what a machine consists of, before and after. [`emulated_machine`] has a kernel of
//! its own. The tests are in [`stories`].
// Edge: tests run processes, sockets and clocks.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

mod emulated_machine;
mod isolation;
mod machine;
mod network;
mod package;
mod report;
mod root_file_system;
mod site;
mod snapshot;
mod stories;

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    process::ExitCode,
    time::Instant,
};

use stories::{STORIES, Story};

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let chosen: Vec<&Story> = match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => {
            println!(
                "machine tests: none named, so none runs; `sudo ./dev test machines` brings what they need"
            );
            return ExitCode::SUCCESS;
        }
        ["--list"] => {
            STORIES.iter().for_each(|story| println!("{}: {}", story.name, story.proves));
            return ExitCode::SUCCESS;
        }
        ["all"] => STORIES.iter().collect(),
        ["short"] => STORIES.iter().filter(|story| story.is_short).collect(),
        ref names => {
            let known = |name: &&str| STORIES.iter().any(|story| story.name == *name);
            if let Some(unknown) = names.iter().find(|name| !known(name)) {
                let all: Vec<_> = STORIES.iter().map(|story| story.name).collect();
                eprintln!("machine tests: no test is named {unknown}: all, short, {}", all.join(", "));
                return ExitCode::from(2);
            }
            STORIES.iter().filter(|story| names.contains(&story.name)).collect()
        }
    };
    if let Some(missing) = isolation::what_is_missing() {
        eprintln!("machine tests: {missing}");
        return ExitCode::from(2);
    }
    if !isolation::is_inside() {
        return isolation::run_inside(&words);
    }
    run(&chosen)
}

/// Runs the tests one after the other. The last line has the form of those of libtest, which `./dev test`
/// counts.
fn run(chosen: &[&Story]) -> ExitCode {
    isolation::prepare();
    let began = Instant::now();
    let mut failed = Vec::new();
    for story in chosen {
        println!("\n{}: {}", story.name, story.proves);
        let began = Instant::now();
        let result = catch_unwind(AssertUnwindSafe(story.run));
        let word = if result.is_ok() { "ok" } else { "FAILED" };
        println!("test {} ... {word} ({:.1} s)", story.name, began.elapsed().as_secs_f64());
        if result.is_err() {
            failed.push(story.name);
        }
    }
    let verdict = if failed.is_empty() { "ok" } else { "FAILED" };
    println!(
        "\ntest result: {verdict}. {} passed; {} failed; finished in {:.1} s",
        chosen.len() - failed.len(),
        failed.len(),
        began.elapsed().as_secs_f64()
    );
    if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
