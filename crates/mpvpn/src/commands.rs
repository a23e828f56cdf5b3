//! The commands of the program, one file each: name, options, help and action.
//!
//! In: a parsed command line. Out: an exit code, or a [`Failure`]. Always holds: a command is known only to
//! its own file and to its two lines here.

mod backup;
mod bugreport;
mod check;
mod class;
pub(crate) mod client;
mod completions;
mod config;
mod dashboard;
mod dns_service;
pub(crate) mod events;
mod exec;
mod helper;
mod join;
mod kill_switch;
mod lab;
mod link;
mod man;
mod measure;
mod ping;
mod proxy;
mod reset;
mod route;
pub(crate) mod server;
mod setup;
mod status;
pub(crate) mod top;
mod user;

use std::process::ExitCode;

use clap::{ArgMatches, Parser};

use crate::{cli::explain, failure::Failure};

macro_rules! entries {
    ($($module:ident::$command:ident)+) => { &[$(entry::<$module::$command>()),+] };
}

/// The commands, in the order of `mpvpn --help`.
pub(crate) const ALL: &[Entry] = entries! {
    server::Server client::Client join::Join setup::Setup proxy::Proxy user::User status::Status
    top::Top dashboard::Dashboard events::Events ping::Ping measure::Measure check::Check
    bugreport::Bugreport link::Link class::Class route::Route exec::Exec config::Config
    kill_switch::KillSwitch backup::Backup backup::Restore reset::Reset completions::Completions
    man::Man dns_service::DnsService
    helper::Helper lab::Lab
};

/// A command with its options.
pub(crate) trait Command: Parser {
    /// The summary of its failures.
    const SUMMARY: &str = "";

    /// The summary of failures with these options.
    fn summary(&self) -> &'static str {
        Self::SUMMARY
    }

    /// Runs the command.
    fn run(self) -> Result<ExitCode, Failure>;
}

/// A command in the list of all.
pub(crate) struct Entry {
    /// Its name, options and help.
    pub(crate) define: fn() -> clap::Command,
    /// Runs it with these options.
    pub(crate) run: fn(&mut ArgMatches) -> Result<ExitCode, Failure>,
}

const fn entry<C: Command>() -> Entry {
    Entry { define: C::command, run: run::<C> }
}

fn run<C: Command>(words: &mut ArgMatches) -> Result<ExitCode, Failure> {
    let command = C::from_arg_matches_mut(words).map_err(|error| explain(&error))?;
    let summary = command.summary();
    command.run().map_err(|failure| failure.about(summary))
}
