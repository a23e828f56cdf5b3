//! `mpvpn dns-service`: changes the name servers for clients that are no root; mpvpn-dns.service runs it.

use mpvpn_config::LogLevel;
use std::process::ExitCode;

use clap::Parser;
use mpvpn_config::log;
use mpvpn_confine as confine;

use super::Command;
use crate::failure::Failure;

/// Change the name servers of this machine for clients; the service manager starts this
#[derive(Debug, Parser)]
#[command(name = "dns-service", hide = true)]
pub(crate) struct DnsService {}

impl Command for DnsService {
    const SUMMARY: &str = "name servers were not changed";

    fn run(self) -> Result<ExitCode, Failure> {
        log::init(LogLevel::default());
        let next = "run `systemctl start mpvpn-dns`";
        confine::change_name_servers().map_err(|error| Failure::of(&error, next))?;
        Ok(ExitCode::SUCCESS)
    }
}
