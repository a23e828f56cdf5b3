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
      what can change without a restart counts from then on, and no connection is lost: at a server access, limits,
      certificates, site, dns and routes, at a client links and classes; the command lists the keys that need a
      restart; a file with a mistake changes nothing; changes by `mpvpn link set` are undone

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

fn text_of(ReloadReport { links, classes, applied, restart }: &ReloadReport) -> String {
    let mut text = String::new();
    if *classes {
        text += "classes are as the file says now\n";
    }
    if *links {
        text += "links are used as the file says now\n";
    }
    if !applied.is_empty() {
        text += &format!("counts from now on: {}\n", applied.join(", "));
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
        let list = |keys: &[&str]| keys.iter().map(ToString::to_string).collect::<Vec<_>>();
        let text = |links, classes, applied: &[&str], restart: &[&str]| {
            text_of(&ReloadReport { links, classes, applied: list(applied), restart: list(restart) })
        };
        assert_eq!(text(false, false, &[], &[]), "nothing has changed\n");
        assert_eq!(
            text(false, false, &["access and isolate", "site"], &["listen"]),
            "counts from now on: access and isolate, site\ncounts after a restart: listen\n"
        );
        assert_eq!(
            text(true, true, &[], &["routes", "cc"]),
            "classes are as the file says now\nlinks are used as the file says now\ncounts after a restart: routes, cc\n"
        );
    }
}
