//! The hostile client of [`mpvpn_tests::rogue`], as a process of its own.

use std::process::ExitCode;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match mpvpn_tests::rogue::run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(complaint) => {
            eprintln!("rogue: {complaint}");
            ExitCode::FAILURE
        }
    }
}
