//! `mpvpn completions`: what a shell needs to complete the commands and options of `mpvpn`.

use std::process::ExitCode;

use clap::Parser;
use clap_complete::{Shell, generate};

use super::Command;
use crate::{cli, failure::Failure, output::print};

const EXAMPLES: &str = "\
Examples:
  mpvpn completions bash > /etc/bash_completion.d/mpvpn
  mpvpn completions zsh > /usr/local/share/zsh/site-functions/_mpvpn
  mpvpn completions fish > ~/.config/fish/completions/mpvpn.fish

The package brings those of bash, zsh and fish.";

/// Print the script by which a shell completes commands and options
#[derive(Debug, Parser)]
#[command(name = "completions", after_help = EXAMPLES)]
pub(crate) struct Completions {
    /// The shell: bash, zsh, fish, elvish or powershell
    #[arg(value_name = "SHELL", value_parser = clap::value_parser!(Shell), hide_possible_values = true)]
    shell: Shell,
}

impl Command for Completions {
    const SUMMARY: &str = "cannot write the completions";

    fn run(self) -> Result<ExitCode, Failure> {
        let mut script = Vec::new();
        generate(self.shell, &mut cli::define(), "mpvpn", &mut script);
        print(&String::from_utf8_lossy(&script))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_shell_learns_the_commands_and_options() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let mut script = Vec::new();
            generate(shell, &mut cli::define(), "mpvpn", &mut script);
            let script = String::from_utf8(script).unwrap();
            for word in ["server", "status", "kill-switch", "completions"] {
                assert!(script.contains(word), "{shell}: {word}");
            }
        }
    }
}
