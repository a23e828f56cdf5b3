//! The binary: reads what a person typed, and hands it to the rooms that do the work.
//!
//! In: the command line. Out: exit code 0 (ended as asked), 1 (failure) or 2 (bad usage or
//! configuration), and for every failure what failed, why, and what to do next on stderr. Always holds:
//! nothing is decided here that a configuration file could not decide too.
// This crate is at the edge: it starts what has clocks, files and sockets.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

mod check;
mod class;
mod cli;
mod config;
mod failure;
mod link;
mod run;
mod status;

use std::{ffi::OsString, process::ExitCode};

use clap::Parser;
use mpvpn_control::{
    config::{ClientOptions, Origin},
    log,
};

use crate::{
    cli::{Cli, Command},
    failure::Failure,
};

/// What to do about a failure that does not say it itself.
const LOG: &str = "see the log above; --log-level debug tells more";

fn main() -> ExitCode {
    match perform(std::env::args_os().collect()) {
        Ok(code) => code,
        Err(failure) => failure.report(),
    }
}

fn perform(words: Vec<OsString>) -> Result<ExitCode, Failure> {
    let words = cli::unfold_mode(words)?;
    let cli = match Cli::try_parse_from(words) {
        Ok(cli) => cli,
        Err(error) if error.use_stderr() => return Err(cli::explain(&error)),
        Err(help) => return status::print(&help.to_string()),
    };
    match cli.command {
        Command::Server(args) => {
            let origin = Origin::of_server(args.config, args.options, run::rights());
            let config =
                origin.load().map_err(|error| Failure::control("cannot start the server", &error))?;
            log::init(config.log_level);
            run::server(config, origin).map_err(|error| Failure::run("the server ended", &error, LOG))?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Client(args) => {
            let origin = Origin::<ClientOptions>::new(args.config, args.options);
            let config =
                origin.load().map_err(|error| Failure::control("cannot start the client", &error))?;
            log::init(config.log_level);
            run::client(config, origin).map_err(|error| Failure::run("the client ended", &error, LOG))?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Proxy(args) => {
            let origin = Origin::of_proxy(args.config, args.options);
            let config = origin.load().map_err(|error| Failure::control("cannot start the proxy", &error))?;
            log::init(config.log_level);
            run::client(config, origin).map_err(|error| Failure::run("the proxy ended", &error, LOG))?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Status(args) => status::show(&args),
        Command::Check(args) => check::perform(args),
        Command::Link { command } => link::perform(command),
        Command::Class { command } => class::perform(command),
        Command::Config { command } => config::perform(command),
        Command::Lab { command } => {
            run::lab(command).map_err(|error| Failure::run("the lab ended", &error, "see `mpvpn lab --help`"))
        }
    }
}
