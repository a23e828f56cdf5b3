//! `mpvpn route`: says which way a packet goes, and why.

use std::{path::PathBuf, process::ExitCode};

use clap::{Parser, Subcommand};
use mpvpn_config::{ClientConfig, PacketDescription};

use super::Command;
use crate::{
    failure::Failure,
    output::{json_line, print},
};

const EXAMPLES: &str = "\
Examples:
  mpvpn route test \"udp 10.0.0.5:5060 -> 198.51.100.9:5060 dscp 46\"
      in the tunnel or past it, its class, and the rules that decide
  mpvpn route test \"tcp 10.0.7.5 -> tv.example:443\"
      a name stands for an address that nobody knows but by this name
  mpvpn route test --config new.toml \"tcp [fd00::5]:40000 -> [2001:db8::9]:443 domain zoom.us\"
      with another file, and as if DNS had given the far end's address to that name
  mpvpn route test \"icmp 10.0.0.5 -> 1.1.1.1 mark 0x10 vlan 20 ingress lan0 mac 02:00:5e:10:00:01\"
      with what only the kernel sees
  mpvpn route test --json \"icmp 10.0.0.5 -> 1.1.1.1 uid 1000\"
      in JSON, a packet of a program of this machine

A packet is described by its protocol (tcp, udp, icmp or a number), the sender, an arrow, and the far end, with
ports if the protocol has ports (that of the sender may be left out); then optionally dscp, domain, mark, vlan,
ingress, mac and uid. Put it in quotes: the shell would take > for a redirection.
First the tables [[bypass]] of the file are tried in order, then those of [[class]], then the built-in rules.
The file is read as it is now; a running client may have read an older version. Which destinations are routed
into the tunnel at all is another matter: `ip route get ADDRESS` asks the kernel.";

/// Show whether a packet travels in the tunnel or past it, and which rule decides
#[derive(Debug, Parser)]
#[command(name = "route", after_help = EXAMPLES)]
pub(crate) struct Route {
    #[command(subcommand)]
    command: RouteCommand,
}

#[derive(Debug, Subcommand)]
enum RouteCommand {
    /// Show the way of a packet
    #[command(after_help = EXAMPLES)]
    Test {
        /// The client's configuration file [default: /etc/mpvpn/client.toml, if it is there]
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
        /// Print JSON
        #[arg(long)]
        json: bool,
        /// The packet, in quotes, as in "udp 10.0.0.5:5060 -> 198.51.100.9:5060 dscp 46"
        #[arg(value_name = "PACKET", required = true)]
        packet: Vec<String>,
    },
}

impl Command for Route {
    const SUMMARY: &str = "cannot test the packet";

    fn run(self) -> Result<ExitCode, Failure> {
        let RouteCommand::Test { config, json, packet } = self.command;
        let packet: PacketDescription = packet
            .join(" ")
            .parse()
            .map_err(|why: String| Failure::usage(why, "see `mpvpn route test --help`"))?;
        let route = ClientConfig::load_without_server(config.as_deref())?.route_of(&packet);
        print(&if json { json_line(serde_json::to_string(&route))? } else { format!("{route}\n") })
    }
}
