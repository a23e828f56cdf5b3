//! `mpvpn lab`: emulated links between network namespaces of this machine.

use std::process::ExitCode;

use clap::Parser;
use mpvpn_lab::cli::{LabCommand, run};

use super::Command;
use crate::failure::Failure;

/// Try mpvpn on this machine, over emulated links between network namespaces
#[derive(Debug, Parser)]
#[command(name = "lab")]
pub(crate) struct Lab {
    #[command(subcommand)]
    pub(crate) command: LabCommand,
}

impl Command for Lab {
    fn run(self) -> Result<ExitCode, Failure> {
        run(self.command)
            .map_err(|error| Failure::from_error("the lab ended", &error, "see `mpvpn lab --help`"))
    }
}
