//! `mpvpn top`: a live screen of a running server or client.

use std::{io::IsTerminal, process::ExitCode, time::Duration};

use clap::Parser;

use super::Command;
use crate::{
    failure::Failure,
    output::parse_seconds,
    process_selector::{ProcessSelector, help_for_any_role},
    top,
};

const EXAMPLES: &str = "\
Examples:
  mpvpn top
  mpvpn top --name mpvpn0 --interval 0.5
  ssh -t router mpvpn top
      on another machine; -t gives the command a terminal
  NO_COLOR=1 mpvpn top

Keys: Tab or 1 to 6 another view, arrows select a row, s sorts by the next column, r reverses, / filters, p pauses, ? helps, q ends.";

/// Show links, paths, classes, flows and events live, with rates and the last minutes as bars
#[derive(Debug, Parser)]
#[command(name = "top", after_help = EXAMPLES, mut_arg("name", help_for_any_role))]
pub(crate) struct Top {
    /// Time between two measurements, from 0.2 to 60 seconds
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = parse_interval)]
    interval: Duration,
    #[command(flatten)]
    target: ProcessSelector,
}

impl Command for Top {
    const SUMMARY: &str = "cannot show the live screen";

    fn run(self) -> Result<ExitCode, Failure> {
        if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
            let why = "standard input and output are not a terminal";
            return Err(Failure::usage(
                why,
                "run it in a terminal (over SSH: ssh -t), or see `mpvpn status`",
            ));
        }
        top::run(&self.target.socket()?, self.interval)
    }
}

fn parse_interval(text: &str) -> Result<Duration, String> {
    parse_seconds(text, 0.2..=60.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_is_a_number_of_seconds_within_bounds() {
        assert_eq!(parse_interval("0.5"), Ok(Duration::from_millis(500)));
        for text in ["0.1", "61", "-1", "NaN", "inf", "1s", ""] {
            assert!(parse_interval(text).unwrap_err().contains("is not a number from 0.2 to 60"), "{text}");
        }
    }
}
