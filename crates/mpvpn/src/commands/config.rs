//! `mpvpn config`: makes a running process read its configuration again.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use mpvpn_control::{api, config::ReloadReport};

use super::Command;
use crate::{failure::Failure, output::print, process_selector::ProcessSelector};

const SUMMARY: &str = "cannot reload the configuration";

const EXAMPLES: &str = "\
Examples:
  mpvpn config reload
      links and classes change at once; other changed keys need a restart, and the command lists them;
      changes by `mpvpn link set` are undone

SIGHUP does the same, except for a process that was started in a terminal: that ends.";

/// Make a running server or client read its configuration again
#[derive(Debug, Parser)]
#[command(name = "config", after_help = EXAMPLES)]
pub(crate) struct Config {
    #[command(subcommand)]
    command: ConfigCommand,
}

#[derive(Debug, Subcommand)]
enum ConfigCommand {
    /// Read the configuration file again; sessions continue
    Reload(ProcessSelector),
}

impl Command for Config {
    fn run(self) -> Result<ExitCode, Failure> {
        let ConfigCommand::Reload(target) = self.command;
        let socket = target.socket(SUMMARY)?;
        let reloaded = api::reload(&socket).map_err(|error| Failure::from_control_error(SUMMARY, &error))?;
        print(&text_of(&reloaded))
    }
}

fn text_of(ReloadReport { links, classes, restart }: &ReloadReport) -> String {
    let mut text = String::new();
    if *classes {
        text += "classes are as the file says now\n";
    }
    if *links {
        text += "links are used as the file says now\n";
    }
    if !restart.is_empty() {
        text += &format!("counts after a restart: {}\n", restart.join(", "));
    }
    if text.is_empty() {
        text += "nothing has changed\n";
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_counts_now_is_told_from_what_counts_later() {
        let text = |links, classes, restart: &[&str]| {
            text_of(&ReloadReport {
                links,
                classes,
                restart: restart.iter().map(ToString::to_string).collect(),
            })
        };
        assert_eq!(text(false, false, &[]), "nothing has changed\n");
        assert_eq!(
            text(true, true, &["routes", "cc"]),
            "classes are as the file says now\nlinks are used as the file says now\ncounts after a restart: routes, cc\n"
        );
    }
}
