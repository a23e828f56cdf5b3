//! `mpvpn status`: prints the status of a running server or client.

use std::process::ExitCode;

use clap::Parser;
use mpvpn_control::{api, status};

use super::Command;
use crate::{
    failure::Failure,
    output::{in_json, print, width},
    target::{Target, either},
};

const WHAT: &str = "cannot show the status";

const EXAMPLES: &str = "\
Examples:
  mpvpn status
  mpvpn status --flows
      each connection inside the tunnel, and whether it travels as a stream or as packets
  mpvpn status --name mpvpn0 --json
  curl --unix-socket /run/mpvpn/client-mpvpn0.sock http://localhost/v1/status";

/// Show the status of a running server or client
#[derive(Debug, Parser)]
#[command(name = "status", after_help = EXAMPLES, mut_arg("name", either))]
pub(crate) struct Status {
    /// List the flows inside the tunnel: how each travels, and why
    #[arg(long)]
    pub(crate) flows: bool,
    /// Print JSON, the answer of the local API
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    target: Target,
}

impl Command for Status {
    fn run(self) -> Result<ExitCode, Failure> {
        let socket = self.target.socket(WHAT)?;
        let failed = |error| Failure::control(WHAT, &error);
        if self.flows {
            let flows = api::fetch_flows(&socket).map_err(failed)?;
            return print(&if self.json {
                in_json(WHAT, serde_json::to_string(&flows))?
            } else {
                status::render_flows(&flows, width())
            });
        }
        let status = api::fetch_status(&socket).map_err(failed)?;
        print(&if self.json {
            in_json(WHAT, serde_json::to_string(&status))?
        } else {
            status::render(&status, width())
        })
    }
}
