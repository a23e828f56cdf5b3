//! The binary `mpvpn`: parses the command line and calls the crates that do the work.
//!
//! In: the command line. Out: exit code 0 (success), 1 (failure) or 2 (bad usage or configuration); every
//! failure prints to stderr what failed, why, and the next step. Always holds: every option of a server or
//! client is also a key of its configuration file.
// This crate is at the edge: clocks, files and sockets are allowed.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

mod bugreport;
mod cli;
mod commands;
mod failure;
mod measure;
mod output;
mod process_selector;
#[cfg(test)]
mod tests;
mod top;

use std::process::ExitCode;

fn main() -> ExitCode {
    match cli::perform(std::env::args_os().collect()) {
        Ok(code) => code,
        Err(failure) => failure.report(),
    }
}
