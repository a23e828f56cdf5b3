//! `mpvpn kill-switch`: holds the block of the kill switch while no client runs.

use std::{path::PathBuf, process::ExitCode};

use clap::{Parser, Subcommand};
use mpvpn_control::config::{BlockWish, files_of_enabled_clients};
use mpvpn_engine::hold;

use super::Command;
use crate::{failure::Failure, output::print};

const SUMMARY: &str = "cannot change the kill switch";

const EXAMPLES: &str = "\
Examples:
  mpvpn kill-switch hold
      for all clients whose services are enabled and whose files have kill-switch = true; mpvpn-kill-switch.service
      does this at boot, before there is a network
  mpvpn kill-switch hold --config /etc/mpvpn/client.toml
      for this client only; where its file has no kill switch, its block ends
  mpvpn kill-switch release
      ends the blocks of all clients that do not run";

/// Block this machine's traffic past the tunnel also while the client does not run
///
/// A client with a kill switch blocks while it runs. A hold blocks from boot until the client runs, and after it was stopped.
/// Needs CAP_NET_ADMIN.
#[derive(Debug, Parser)]
#[command(name = "kill-switch", after_help = EXAMPLES)]
pub(crate) struct KillSwitch {
    #[command(subcommand)]
    command: KillSwitchCommand,
}

#[derive(Debug, Subcommand)]
enum KillSwitchCommand {
    /// Block until `release`, whether the client runs or not
    Hold {
        /// The client's configuration file [default: those of all clients whose services are enabled]
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
    },
    /// End the blocks of all clients; those of running clients stay
    Release,
}

impl Command for KillSwitch {
    fn run(self) -> Result<ExitCode, Failure> {
        let failed =
            |error: mpvpn_engine::EngineError| Failure::from_error(SUMMARY, &error, "run it as root");
        let text = match self.command {
            KillSwitchCommand::Hold { config } => {
                let files = config.map_or_else(files_of_enabled_clients, |file| vec![file]);
                // A file that cannot be read ends nothing of the others.
                let mut result = Ok(());
                for file in files {
                    let wish = BlockWish::of_file(&file)
                        .map_err(|error| Failure::from_control_error(SUMMARY, &error));
                    let set = wish.and_then(|wish| Ok((hold::set(&wish).map_err(failed)?, wish.tun_name)));
                    match set {
                        Ok((true, name)) => println!("{name}: blocked past the tunnel ({})", file.display()),
                        Ok((false, _)) => {}
                        Err(error) => result = Err(error),
                    }
                }
                result?;
                String::new()
            }
            KillSwitchCommand::Release => match hold::release().map_err(failed)? {
                names if names.is_empty() => "nothing was held\n".to_owned(),
                names => format!("released: {}\n", names.join(", ")),
            },
        };
        print(&text)
    }
}
