//! `mpvpn reset`: takes back what killed processes have left.

use std::process::ExitCode;

use clap::Parser;
use mpvpn_setup::reset;

use super::Command;
use crate::{failure::Failure, output::print};

const EXAMPLES: &str = "\
Examples:
  mpvpn reset
      after a crash: routes, rules, firewall tables and resolvers as they were, and no kill switch any more";

/// Take back what killed processes left on this machine: routes, firewall, resolvers, the kill switch
///
/// Processes that run are left alone. Needs root.
#[derive(Debug, Parser)]
#[command(name = "reset", after_help = EXAMPLES)]
pub(crate) struct Reset {}

impl Command for Reset {
    const SUMMARY: &str = "cannot reset this machine";

    fn run(self) -> Result<ExitCode, Failure> {
        let report = reset::run().map_err(|error| Failure::of(&error, "sudo mpvpn reset"))?;
        let mut text = String::new();
        let list = |names: &[String]| names.join(", ");
        if !report.reverted.is_empty() {
            text += &format!("took back the changes of {}\n", list(&report.reverted));
        }
        if !report.lifted.is_empty() {
            text += &format!("lifted the kill switch of {}\n", list(&report.lifted));
        }
        if !report.running.is_empty() {
            text += &format!("left alone, because it runs: {}\n", list(&report.running));
        }
        if text.is_empty() {
            text += "nothing was left on this machine\n";
        }
        print(&text)?;
        if report.errors.is_empty() {
            return Ok(ExitCode::SUCCESS);
        }
        Err(Failure::runtime(report.errors.join("; "), "take these back by hand, or restart the machine"))
    }
}
