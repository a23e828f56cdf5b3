//! The program `mpvpn-lab`, which `mpvpn lab` starts: `mpvpn` over emulated links of this machine.
//!
//! In: the command line. Out: exit code 0 (success), 1 (failure), 2 (bad usage), or that of the command that
//! ran in the lab; every failure prints to stderr what failed, why, and the next step. Always holds: server
//! and client are the program `mpvpn` as it is installed, and touch no state of the machine's own.
// This crate is an edge: it talks to the kernel, the clock, files and other processes.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

mod classes;
mod commands;
mod control;
mod demo;
mod results;
mod screen;
mod vpn;

use std::{
    ffi::OsString,
    fmt::Display,
    io,
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::{
    CommandFactory, Parser, Subcommand,
    error::{ContextKind, ContextValue, ErrorKind},
};
use clap_complete::{Shell, generate};

use commands::LabCommand;

/// The name of the program and of its package.
const PROGRAM: &str = "mpvpn-lab";
const HELP: &str = "see `mpvpn lab --help`";
const FAILURE: u8 = 1;
const BAD_USAGE: u8 = 2;

/// Try mpvpn on this machine, over emulated links between network namespaces
#[derive(Debug, Parser)]
#[command(name = PROGRAM, bin_name = "mpvpn lab", version)]
struct Options {
    #[command(subcommand)]
    command: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    #[command(flatten)]
    Lab(Box<LabCommand>),
    /// Write the manual pages of all commands into a folder
    #[command(hide = true)]
    Man {
        /// The folder
        #[arg(value_name = "FOLDER")]
        folder: PathBuf,
    },
    /// Print the script by which a shell completes commands and options
    #[command(hide = true)]
    Completions {
        /// The shell: bash, zsh, fish, elvish or powershell
        #[arg(value_name = "SHELL", value_parser = clap::value_parser!(Shell), hide_possible_values = true)]
        shell: Shell,
    },
}

/// The program with all its commands.
pub fn define() -> clap::Command {
    Options::command()
}

/// Runs the command of a command line, whose first word is the name of the program.
pub fn perform(words: impl IntoIterator<Item = OsString>) -> ExitCode {
    let action = match Options::try_parse_from(words) {
        Ok(options) => options.command,
        Err(error) if error.use_stderr() => return explain(&error),
        Err(help) => {
            print!("{help}");
            return ExitCode::SUCCESS;
        }
    };
    match action {
        Action::Lab(command) => {
            commands::run(*command).unwrap_or_else(|error| fail(FAILURE, "the lab ended", error, HELP))
        }
        Action::Man { folder } => match write_manual(&folder) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                let cause = format!("{}: {error}", folder.display());
                fail(FAILURE, "cannot write the manual pages", cause, "name a folder that exists")
            }
        },
        Action::Completions { shell } => {
            generate(shell, &mut define(), PROGRAM, &mut io::stdout());
            ExitCode::SUCCESS
        }
    }
}

fn write_manual(folder: &Path) -> io::Result<()> {
    clap_mangen::generate_to(define(), folder)
}

/// Reports an error of clap as cause and next step.
fn explain(error: &clap::Error) -> ExitCode {
    let text = error.to_string();
    let cause = match error.kind() {
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand | ErrorKind::MissingSubcommand => {
            "a command is missing".to_owned()
        }
        _ => {
            let sentence = text.trim_start_matches("error: ").split("\n\n").next().unwrap_or_default();
            sentence.split_whitespace().collect::<Vec<_>>().join(" ")
        }
    };
    let next = match error.get(ContextKind::SuggestedArg) {
        Some(ContextValue::String(word)) => format!("did you mean `{word}`?"),
        _ => HELP.to_owned(),
    };
    fail(BAD_USAGE, "bad usage", cause, &next)
}

fn fail(code: u8, summary: &str, cause: impl Display, next: &str) -> ExitCode {
    eprintln!("{PROGRAM}: {summary}: {cause}\n  next: {next}");
    ExitCode::from(code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_holds_together() {
        define().debug_assert();
    }

    #[test]
    fn every_command_that_is_not_hidden_has_a_page_with_its_options() {
        let folder = tempfile::tempdir().unwrap();
        write_manual(folder.path()).unwrap();
        let page = |name: &str| std::fs::read_to_string(folder.path().join(format!("{name}.1")));
        assert!(page("mpvpn-lab").unwrap().contains("mpvpn\\-lab\\-demo"), "{}", page("mpvpn-lab").unwrap());
        assert!(page("mpvpn-lab-up").unwrap().contains("\\-\\-client\\-arg"));
        assert!(page("mpvpn-lab-link").unwrap().contains("\\-\\-direction"));
        assert!(page("mpvpn-lab-man").is_err());
    }

    #[test]
    fn each_shell_learns_the_commands_and_options() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let mut script = Vec::new();
            generate(shell, &mut define(), PROGRAM, &mut script);
            let script = String::from_utf8(script).unwrap();
            for word in ["mpvpn-lab", "demo", "server-arg", "direction"] {
                assert!(script.contains(word), "{shell}: {word}");
            }
        }
    }
}
