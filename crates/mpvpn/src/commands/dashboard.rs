//! `mpvpn dashboard`: prints a link that logs in at the dashboard of a running server or client.

use std::process::ExitCode;

use clap::Parser;
use mpvpn_api::DashboardLink;

use super::Command;
use crate::{
    failure::Failure,
    output::print,
    process_selector::{ProcessSelector, help_for_any_role},
};

const EXAMPLES: &str = "\
Examples:
  mpvpn client --server vpn.example --token-file token --dashboard 127.0.0.1:9470
      a client with a dashboard; or the line `dashboard = \"127.0.0.1:9470\"` in its file
  mpvpn dashboard
      prints a link: open it in a browser
  ssh -L 9470:127.0.0.1:9470 -t router mpvpn dashboard
      the dashboard of another machine: open the link here, while this command's connection lasts

The link works once, for ten minutes; the browser stays logged in until it was not used for twelve hours, or the process ends.
Whoever has the link can do there what `mpvpn link set` and `mpvpn user` do: give it to nobody.";

/// Print a link that logs a browser in at the dashboard, once
#[derive(Debug, Parser)]
#[command(name = "dashboard", after_help = EXAMPLES, mut_arg("name", help_for_any_role))]
pub(crate) struct Dashboard {
    #[command(flatten)]
    target: ProcessSelector,
}

impl Command for Dashboard {
    const SUMMARY: &str = "cannot log in at the dashboard";

    fn run(self) -> Result<ExitCode, Failure> {
        let socket = self.target.socket()?;
        let DashboardLink { url, .. } = mpvpn_api::dashboard_link(&socket)?;
        print(&format!("{url}\n"))
    }
}
