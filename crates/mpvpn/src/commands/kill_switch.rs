//! `mpvpn kill-switch`: holds the block of the kill switch while no client runs.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use mpvpn_client::hold;
use mpvpn_config::BlockWish;
use mpvpn_error::RunError;

use super::Command;
use crate::{failure::Failure, output::print};

const EXAMPLES: &str = "\
Examples:
  mpvpn kill-switch hold
      mpvpn-kill-switch.service does this at boot, before there is a network, and the service of a client before it
      starts and after it has ended
  mpvpn kill-switch release
      lets packets pass again after `systemctl stop mpvpn-client`

A client with a kill switch blocks while it runs. A hold blocks from boot until the client runs, and after it was
stopped: for each client whose service is enabled and whose file has kill-switch = true. So `systemctl disable --now
mpvpn-client` ends its hold.";

/// Block this machine's traffic past the tunnel also while the client does not run
#[derive(Debug, Parser)]
#[command(name = "kill-switch", after_help = EXAMPLES)]
pub(crate) struct KillSwitch {
    #[command(subcommand)]
    command: KillSwitchCommand,
}

#[derive(Debug, Subcommand)]
enum KillSwitchCommand {
    /// Block for the clients whose services are enabled and whose files have a kill switch, and for no others
    Hold,
    /// End the blocks of clients that do not run; those of running clients stay. Needs root
    Release,
}

impl Command for KillSwitch {
    const SUMMARY: &str = "cannot change the kill switch";

    fn run(self) -> Result<ExitCode, Failure> {
        let failed = |error: RunError| Failure::of(&error, "run it as root");
        let (said, names) = match self.command {
            KillSwitchCommand::Hold => {
                // A file that cannot be read ends no hold.
                let wishes = BlockWish::of_enabled_clients()?;
                ("blocked past the tunnel, also while it does not run", hold::set(&wishes).map_err(failed)?)
            }
            KillSwitchCommand::Release => match hold::release().map_err(failed)? {
                names if names.is_empty() => {
                    return print("no client that does not run blocks this machine\n");
                }
                names => ("blocks no more", names),
            },
        };
        let lines: String = names.iter().map(|name| format!("{name}: {said}\n")).collect();
        print(&lines)
    }
}
