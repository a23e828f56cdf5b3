//! `mpvpn class`: shows the classes of traffic of a configuration.

use std::{path::PathBuf, process::ExitCode};

use clap::{Parser, Subcommand};
use mpvpn_config::{ClientConfig, render_classes};

use super::Command;
use crate::{
    failure::Failure,
    output::{print, width},
};

const EXAMPLES: &str = "\
Examples:
  mpvpn class list
      the classes, and the rules in the order of evaluation

`mpvpn route test` says which class a packet belongs to, and why.
The first rule that matches decides: first those of the tables [[class]] of the file in order, then the
built-in ones. The file is read as it is now; a running client may have read an older version.";

/// Show the classes of traffic of a client
#[derive(Debug, Parser)]
#[command(name = "class", after_help = EXAMPLES)]
pub(crate) struct Class {
    #[command(subcommand)]
    command: ClassCommand,
}

#[derive(Debug, Subcommand)]
enum ClassCommand {
    /// Show the classes and the rules in order
    List {
        /// The client's configuration file [default: /etc/mpvpn/client.toml, if it is there]
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
    },
}

impl Command for Class {
    const SUMMARY: &str = "cannot show the classes";

    fn run(self) -> Result<ExitCode, Failure> {
        let ClassCommand::List { config } = self.command;
        print(&render_classes(&ClientConfig::load_without_server(config.as_deref())?, width()))
    }
}
