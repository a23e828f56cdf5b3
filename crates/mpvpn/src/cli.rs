//! The command line: parses it, runs the command, and rewords the errors of clap.
//!
//! In: the arguments of the process. Out: the exit code of the command, or a [`Failure`]. Always holds: a
//! wrong command line ends with exit code 2 and names a next step.

use std::{error::Error as _, ffi::OsString, process::ExitCode};

use clap::error::{ContextKind, ContextValue, ErrorKind};
use mpvpn_config::most_similar;

use crate::{
    commands::{self, Entry},
    failure::Failure,
    output::print,
};

const SUMMARY: &str = "bad usage";

/// The program with all its commands.
pub(crate) fn define() -> clap::Command {
    clap::Command::new("mpvpn")
        .version(env!("CARGO_PKG_VERSION"))
        .about(
            "A VPN that carries a machine's traffic over all its links at once, to a server that forwards it",
        )
        .after_help(EXAMPLES)
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommands(commands::ALL.iter().map(|entry| with_possible_values((entry.define)())))
}

/// The command with the possible values of its options in their help texts, one value a line.
fn with_possible_values(command: clap::Command) -> clap::Command {
    command.mut_subcommands(with_possible_values).mut_args(|arg| {
        let words: Vec<_> = arg.get_possible_values();
        let lines = words.iter().filter_map(|word| {
            let meaning = word.get_help()?.to_string();
            Some(format!("\n{}: {}", word.get_name(), sentence(&meaning)))
        });
        let lines: String = lines.collect();
        if lines.is_empty() {
            return arg;
        }
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        arg.help(help + &lines).hide_possible_values(true)
    })
}

/// The first sentence of a text, in one line and without the full stop.
fn sentence(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let end = line.find(". ").unwrap_or(line.len());
    line[..end].trim_end_matches('.').to_owned()
}

/// Runs the command of a command line.
pub(crate) fn perform(words: Vec<OsString>) -> Result<ExitCode, Failure> {
    dispatch(words).map_err(|failure| failure.about(SUMMARY))
}

fn dispatch(words: Vec<OsString>) -> Result<ExitCode, Failure> {
    let words = expand_mode(words)?;
    let mut found = match define().try_get_matches_from(words) {
        Ok(found) => found,
        Err(error) if error.use_stderr() => return Err(explain(&error)),
        Err(help) => return print(&help.to_string()),
    };
    let Some((name, mut options)) = found.remove_subcommand() else { return Err(missing_command()) };
    match entry(&name) {
        Some(entry) => (entry.run)(&mut options),
        None => Err(missing_command()),
    }
}

fn entry(name: &str) -> Option<&'static Entry> {
    commands::ALL.iter().find(|entry| (entry.define)().get_name() == name)
}

const EXAMPLES: &str = "\
Examples:
  mpvpn server
      as root on the server: creates a certificate and a token, and prints the command for clients
  mpvpn client --server 203.0.113.1 --pin SHA256 --token TOKEN
      as root on the client: the command that the server printed
  mpvpn proxy --socks5 127.0.0.1:1080 --server 203.0.113.1 --pin SHA256 --token TOKEN
      as any user: a proxy for apps instead of a VPN for the machine
  mpvpn status
      state, rates, delay and loss of links and classes
  mpvpn top
      the same live, until q is pressed
  mpvpn lab demo
      a demonstration on this machine, over emulated links

`mpvpn --mode server …` and `mpvpn --mode client …` mean `mpvpn server …` and `mpvpn client …`.
Exit codes: 0 ended as asked, 1 failure, 2 bad usage or configuration.";

/// Replaces `--mode server …`, anywhere among the options, by `server …`.
pub(crate) fn expand_mode(mut words: Vec<OsString>) -> Result<Vec<OsString>, Failure> {
    let starts_with_option =
        words.get(1).and_then(|word| word.to_str()).is_some_and(|word| word.starts_with('-'));
    let is_mode =
        |word: &OsString| word.to_str().is_some_and(|word| word == "--mode" || word.starts_with("--mode="));
    let Some(at) = words.iter().position(is_mode).filter(|_| starts_with_option) else { return Ok(words) };
    let word = words.remove(at).to_string_lossy().into_owned();
    let mode = match word.split_once('=') {
        Some((_, mode)) => mode.to_owned(),
        None if at < words.len() => words.remove(at).to_string_lossy().into_owned(),
        None => String::new(),
    };
    if mode != "server" && mode != "client" {
        return Err(Failure::usage(
            format!("`{mode}` is not a mode: expected --mode server or --mode client"),
            "see `mpvpn --help`",
        ));
    }
    words.insert(1, mode.into());
    Ok(words)
}

/// Options that users try although they are keys of the configuration file, with the next step.
const KEYS_OF_THE_FILE: &[(&str, &str)] =
    &[("--fec", "set it for a class of traffic in the client's file: fec = \"auto\" in a table [[class]]")];

fn missing_command() -> Failure {
    Failure::usage("a command is missing", format!("{HELP}; `mpvpn lab demo` demonstrates it"))
}

const HELP: &str = "see `mpvpn --help` and `mpvpn COMMAND --help`";

/// Rewords an error of clap as cause and next step.
pub(crate) fn explain(error: &clap::Error) -> Failure {
    let context = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.clone()),
        Some(ContextValue::Strings(texts)) => texts.first().cloned(),
        _ => None,
    };
    let proposal =
        |kind| context(kind).map_or_else(|| HELP.to_owned(), |similar| format!("did you mean `{similar}`?"));
    match error.kind() {
        ErrorKind::UnknownArgument => {
            let word = context(ContextKind::InvalidArg).unwrap_or_default();
            if let Some((_, next_step)) = KEYS_OF_THE_FILE.iter().find(|(option, _)| *option == word) {
                return Failure::usage(format!("`{word}` is not an option"), *next_step);
            }
            Failure::usage(format!("`{word}` is not an option here"), proposal(ContextKind::SuggestedArg))
        }
        ErrorKind::InvalidSubcommand => {
            let word = context(ContextKind::InvalidSubcommand).unwrap_or_default();
            let proposed = match error.get(ContextKind::SuggestedSubcommand) {
                Some(ContextValue::Strings(words)) => words.iter().map(String::as_str).collect(),
                _ => Vec::new(),
            };
            let next = match most_similar(&word, &proposed) {
                Some(similar) => format!("did you mean `{similar}`?"),
                None => {
                    let root = define();
                    let shown = root.get_subcommands().filter(|command| !command.is_hide_set());
                    let names: Vec<_> = shown.map(clap::Command::get_name).collect();
                    format!("available are: {}; {HELP}", names.join(", "))
                }
            };
            Failure::usage(format!("`{word}` is not a command"), next)
        }
        ErrorKind::ValueValidation => {
            let option = context(ContextKind::InvalidArg).unwrap_or_default();
            let why = error.source().map_or_else(|| first_line(error), ToString::to_string);
            Failure::usage(format!("{option}: {why}"), HELP)
        }
        ErrorKind::InvalidValue => Failure::usage(first_line(error), proposal(ContextKind::SuggestedValue)),
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand | ErrorKind::MissingSubcommand => {
            missing_command()
        }
        _ => Failure::usage(first_line(error), HELP),
    }
}

/// The first sentence of clap's message, without `error:` and hints.
fn first_line(error: &clap::Error) -> String {
    let text = error.to_string();
    let sentence = text.split("\n\n").next().unwrap_or_default().trim_start_matches("error: ");
    sentence.lines().map(str::trim).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests;
