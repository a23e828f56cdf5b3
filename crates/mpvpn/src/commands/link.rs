//! `mpvpn link`: shows the links of a running client, and changes their settings.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use mpvpn_input::{role::Role, values::is_link_name};
use mpvpn_status::{link_change::LinkChange, render_links};

use super::Command;
use crate::{
    failure::Failure,
    output::{print, width},
    process_selector::ProcessSelector,
};

const EXAMPLES: &str = "\
Examples:
  mpvpn link show
  mpvpn link set wwan0 --tier backup --metered yes
      use it only while no other link works, with few heartbeats
  mpvpn link set wwan0 --up 20mbit --down 50mbit --quota 50GB
      limit its rates, and the data in a month
  mpvpn link set wwan0 --down none --quota-reset
      remove the limit of the rate, and count the quota from 0

The tables [[link]] of the configuration file set the same permanently.";

/// Show the links of a running client, or change the settings of one until the client ends
#[derive(Debug, Parser)]
#[command(name = "link", after_help = EXAMPLES)]
pub(crate) struct Link {
    #[command(subcommand)]
    command: LinkCommand,
}

#[derive(Debug, Subcommand)]
enum LinkCommand {
    /// Show the links, their states and the reasons for these
    Show(ProcessSelector),
    /// Change the settings of a link until the client ends
    Set {
        /// The interface
        #[arg(value_name = "NAME", id = "link")]
        link: String,
        #[command(flatten)]
        change: LinkChange,
        #[command(flatten)]
        target: ProcessSelector,
    },
}

impl Command for Link {
    fn summary(&self) -> &'static str {
        match self.command {
            LinkCommand::Show(_) => "cannot show the links",
            LinkCommand::Set { .. } => "cannot change the link",
        }
    }

    fn run(self) -> Result<ExitCode, Failure> {
        match self.command {
            LinkCommand::Show(target) => {
                let socket = target.socket()?;
                let status = mpvpn_api::fetch_status(&socket)?;
                if status.role == Role::Server {
                    let next = "give the socket of a client with --api-socket";
                    return Err(Failure::usage("this process is a server: only clients have links", next));
                }
                print(&render_links(&status.links, width()))
            }
            LinkCommand::Set { link, change, target } => {
                let next = "see `mpvpn link set --help`";
                if change.is_empty() {
                    return Err(Failure::usage("no option says what to change", next));
                }
                if !is_link_name(&link) {
                    return Err(Failure::usage(format!("`{link}` is not an interface's name"), next));
                }
                let socket = target.socket()?;
                let link = mpvpn_api::change_link(&socket, &link, &change)?;
                print(&render_links(&[link], width()))
            }
        }
    }
}
