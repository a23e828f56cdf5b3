//! `mpvpn helper`: the process that a confined server or client starts for what it may not do itself.

use mpvpn_config::LogLevel;
use std::{path::PathBuf, process::ExitCode};

use clap::Parser;
use mpvpn_config::log;
use mpvpn_confine as confine;

use super::Command;
use crate::failure::Failure;

/// Change the firewall and the name servers for a server or client, which starts this itself
#[derive(Debug, Parser)]
#[command(name = "helper", hide = true)]
pub(crate) struct Helper {
    /// Only read files
    #[arg(long)]
    files_only: bool,
    /// Files that it reads
    readable: Vec<PathBuf>,
}

impl Command for Helper {
    const SUMMARY: &str = "the helper ended";

    fn run(self) -> Result<ExitCode, Failure> {
        log::init(LogLevel::default());
        let next = "run `mpvpn server` or `mpvpn client`, which starts this";
        confine::help(&self.readable, !self.files_only).map_err(|error| Failure::of(&error, next))?;
        Ok(ExitCode::SUCCESS)
    }
}
