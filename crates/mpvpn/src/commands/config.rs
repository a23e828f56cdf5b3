//! `mpvpn config`: checks and shows configuration files, and makes a running process read its file again.

use mpvpn_config::FileKind;
use std::{path::PathBuf, process::ExitCode};

use clap::{Parser, Subcommand};

use mpvpn_status::reload_report::{ConfigValue, LockoutPolicy, ReloadReport};
use mpvpn_users::check_file::{CheckedFile, check_file};

use super::Command;
use crate::{
    failure::Failure,
    output::{json_line, print},
    process_selector::{ProcessSelector, help_for_any_role},
};

const EXAMPLES: &str = "\
Examples:
  mpvpn config check /etc/mpvpn/server.toml
      whether a server would start with this file, and the files that it names; a mistake is named with line and column
  mpvpn config show
      each key of the process that runs here: its value, and whether it is a default, an option, or in which line of the file
  mpvpn config reload
      what can change without a restart counts from then on, and no connection is lost: at a server access, limits,
      certificates, site, dns and routes, at a client links and classes; the command lists the keys that need a
      restart; a file with a mistake changes nothing; changes by `mpvpn link set` are undone
  mpvpn config reload --force
      also shows a new certificate that locks out clients whose join links pin the one before; without --force, such a
      reload changes nothing and says how many users that are

SIGHUP does the same as reload, except for a process that was started in a terminal: that ends. It never forces: a
certificate that would lock clients out stays unused, and a warning says so.";

/// Check and show the configuration, and make a running server or client read it again
#[derive(Debug, Parser)]
#[command(name = "config", after_help = EXAMPLES)]
pub(crate) struct Config {
    #[command(subcommand)]
    command: ConfigCommand,
}

#[derive(Debug, Subcommand)]
enum ConfigCommand {
    /// Read the configuration file again; sessions continue
    #[command(mut_arg("name", help_for_any_role))]
    Reload {
        /// Show a new certificate also if that locks out clients whose join links pin the one before
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        target: ProcessSelector,
    },
    /// Check a file as the command does at its start, without starting anything
    Check {
        /// The file
        #[arg(value_name = "FILE")]
        file: PathBuf,
        /// The command that the file is for [default: as its keys and its name say]
        #[arg(long = "for", value_name = "server|client|proxy")]
        kind: Option<FileKind>,
    },
    /// Show each key with its value, and where that comes from; secrets are hidden
    Show {
        /// Show what this file says, instead of a running process
        #[arg(value_name = "FILE", conflicts_with_all = ["name", "api_socket"])]
        file: Option<PathBuf>,
        /// The command that the file is for [default: as its keys and its name say]
        #[arg(long = "for", value_name = "server|client|proxy", requires = "file")]
        kind: Option<FileKind>,
        /// Print JSON
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        target: ProcessSelector,
    },
}

impl Command for Config {
    fn summary(&self) -> &'static str {
        match self.command {
            ConfigCommand::Reload { .. } => "cannot reload the configuration",
            ConfigCommand::Check { .. } => "the configuration does not work",
            ConfigCommand::Show { .. } => "cannot show the configuration",
        }
    }

    fn run(self) -> Result<ExitCode, Failure> {
        match self.command {
            ConfigCommand::Reload { force, target } => {
                let socket = target.socket()?;
                let policy = if force { LockoutPolicy::Allow } else { LockoutPolicy::Refuse };
                let reloaded = mpvpn_api::reload(&socket, policy)?;
                print(&text_of(&reloaded))
            }
            ConfigCommand::Check { file, kind } => {
                let checked = check_file(&file, kind)?;
                let CheckedFile { kind, notes } = checked;
                let notes: String = notes.iter().map(|note| format!("note: {note}\n")).collect();
                print(&format!("{notes}{}: `mpvpn {kind}` would start with it\n", file.display()))
            }
            ConfigCommand::Show { file, kind, json, target } => {
                let values = match file {
                    Some(file) => FileKind::of(&file, kind)
                        .and_then(|kind| mpvpn_config::values(kind, Some(&file), &[]))?,
                    None => mpvpn_api::fetch_config(&target.socket()?)?,
                };
                if json { print(&json_line(serde_json::to_string(&values))?) } else { print(&table(&values)) }
            }
        }
    }
}

/// One line for each key.
fn table(values: &[ConfigValue]) -> String {
    let longest = |text: fn(&ConfigValue) -> &str, limit: usize| {
        values
            .iter()
            .map(|value| text(value).chars().count())
            .filter(|width| *width <= limit)
            .max()
            .unwrap_or(0)
    };
    let (keys, texts) = (longest(|value| &value.key, 40), longest(|value| &value.value, 50));
    let line =
        |ConfigValue { key, value, origin }: &ConfigValue| format!("{key:keys$}  {value:texts$}  {origin}\n");
    values.iter().map(line).collect()
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
