//! `mpvpn status`: prints the status of a running server or client.

use std::process::ExitCode;

use clap::Parser;
use mpvpn_control::{api, status};

use super::Command;
use crate::{
    failure::Failure,
    output::{json_line, print, width},
    process_selector::{ProcessSelector, help_for_any_role},
};

const SUMMARY: &str = "cannot show the status";

const EXAMPLES: &str = "\
Examples:
  mpvpn status
  mpvpn status --flows
      each connection inside the tunnel, and whether it travels as a stream or as packets
  mpvpn status --name mpvpn0 --json
  curl --unix-socket /run/mpvpn/client-mpvpn0.sock http://localhost/v1/status";

/// Show the status of a running server or client
#[derive(Debug, Parser)]
#[command(name = "status", after_help = EXAMPLES, mut_arg("name", help_for_any_role))]
pub(crate) struct Status {
    /// List the flows inside the tunnel: how each travels, and why
    #[arg(long)]
    pub(crate) flows: bool,
    /// Print JSON, the answer of the local API
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    target: ProcessSelector,
}

impl Command for Status {
    fn run(self) -> Result<ExitCode, Failure> {
        let socket = self.target.socket(SUMMARY)?;
        let failed = |error| Failure::from_control_error(SUMMARY, &error);
        if self.flows {
            let flows = api::fetch_flows(&socket).map_err(failed)?;
            return print(&if self.json {
                json_line(SUMMARY, serde_json::to_string(&flows))?
            } else {
                status::render_flows(&flows, width())
            });
        }
        let status = api::fetch_status(&socket).map_err(failed)?;
        print(&if self.json {
            json_line(SUMMARY, serde_json::to_string(&status))?
        } else {
            status::render(&status, width())
        })
    }
}
