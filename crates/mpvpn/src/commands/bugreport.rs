//! `mpvpn bugreport`: collects what a developer asks for, without secrets.

use std::{
    fs::OpenOptions,
    io::{IsTerminal, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::Parser;

use super::Command;
use crate::{
    bugreport,
    failure::Failure,
    output::{confirm, print},
    process_selector::{ProcessSelector, help_for_any_role},
};

const EXAMPLES: &str = "\
Examples:
  mpvpn bugreport
      as root: shows the report, and asks before it writes mpvpn-bugreport.txt
  mpvpn bugreport --yes --output /tmp/report.txt

Tokens, passwords, keys, names of users, hardware addresses, public addresses and the server's name are replaced by numbers, the
same in the whole report. Names of links, private addresses and the ports of this machine are not: read it before you send it.";

/// Collect status, events, configuration, logs and network facts for a report of a problem, without secrets
#[derive(Debug, Parser)]
#[command(name = "bugreport", after_help = EXAMPLES, mut_arg("name", help_for_any_role))]
pub(crate) struct Bugreport {
    /// Write to this file
    #[arg(long, value_name = "FILE", default_value = "mpvpn-bugreport.txt")]
    output: PathBuf,
    /// Write without showing the report and asking
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    target: ProcessSelector,
}

impl Command for Bugreport {
    const SUMMARY: &str = "cannot write the report";

    fn run(self) -> Result<ExitCode, Failure> {
        let is_chosen = self.target.name.is_some() || self.target.api_socket.is_some();
        let sockets = if is_chosen { vec![self.target.socket()?] } else { mpvpn_api::list_sockets() };
        let report = bugreport::collect(&sockets, &mut |part| {
            if std::io::stderr().is_terminal() {
                eprintln!("collecting {part}");
            }
        });
        if !self.yes {
            print(&report)?;
            if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
                return Ok(ExitCode::SUCCESS);
            }
            // Where nobody can be asked, nothing is written.
            if !confirm(&format!("write this to {}?", self.output.display())).unwrap_or(false) {
                return print("nothing was written\n");
            }
        }
        write(&self.output, &report).map_err(|error| {
            let why = format!("{}: {error}", self.output.display());
            Failure::runtime(why, "choose another file with --output FILE")
        })?;
        print(&format!("written to {}: read it before you send it\n", self.output.display()))
    }
}

/// Writes a file that only its owner can read; one that is there already is an error.
fn write(path: &Path, text: &str) -> std::io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(text.as_bytes())
}
