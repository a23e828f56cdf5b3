//! The binary: reads what a person typed, and hands it to the rooms that do the work.
//!
//! In: the command line. Out: exit code 0 (ended as asked), 1 (failure) or 2 (bad usage or
//! configuration), and for every failure what failed, why, and what to do next on stderr. Always holds:
//! nothing is decided here that a configuration file could not decide too.
// This crate is at the edge: it starts what has clocks, files and sockets.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

mod cli;
mod commands;
mod failure;
mod output;
#[cfg(test)]
mod reference;
mod target;

use std::process::ExitCode;

fn main() -> ExitCode {
    match cli::perform(std::env::args_os().collect()) {
        Ok(code) => code,
        Err(failure) => failure.report(),
    }
}
