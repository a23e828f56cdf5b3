//! `mpvpn class`: shows the classes of traffic of a configuration, and which one a packet belongs to.

use std::{path::PathBuf, process::ExitCode};

use clap::{Parser, Subcommand};
use mpvpn_config::{ClientConfig, PacketDescription, render_classes};

use super::Command;
use crate::{
    failure::Failure,
    output::{json_line, print, width},
};

const EXAMPLES: &str = "\
Examples:
  mpvpn class list
      the classes, and the rules in the order of evaluation
  mpvpn class test \"udp 10.0.0.5:5060 -> 198.51.100.9:5060 dscp 46\"
      the class of such a packet, and the rule that decides it
  mpvpn class test --config new.toml \"tcp [fd00::5]:40000 -> [2001:db8::9]:443 domain zoom.us\"
      the same with another file, and as if DNS had given the far end's address to that name
  mpvpn class test \"icmp 10.0.0.5 -> 1.1.1.1 mark 0x10 vlan 20 ingress lan0\"
      a packet that the kernel may steer into the TUN device of a class
  mpvpn class test --json \"icmp 10.0.0.5 -> 1.1.1.1\"
      in JSON

A packet is described by its protocol (tcp, udp, icmp or a number), the client's end, an arrow, and the far
end, both with ports if the protocol has ports; then optionally dscp, domain, mark, vlan and ingress. Put it
in quotes: the shell would take > for a redirection.
The first rule that matches decides: first those of the tables [[class]] of the file in order, then the
built-in ones. The file is read as it is now; a running client may have read an older version.";

/// Show the classes of traffic of a client, and which one a packet belongs to
#[derive(Debug, Parser)]
#[command(name = "class", after_help = EXAMPLES)]
pub(crate) struct Class {
    #[command(subcommand)]
    command: ClassCommand,
}

#[derive(Debug, Subcommand)]
enum ClassCommand {
    /// Show the classes and the rules in order
    List {
        /// The client's configuration file [default: /etc/mpvpn/client.toml, if it is there]
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
    },
    /// Show which class a packet belongs to, and which rule decides it
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

impl Command for Class {
    fn summary(&self) -> &'static str {
        match self.command {
            ClassCommand::List { .. } => "cannot show the classes",
            ClassCommand::Test { .. } => "cannot test the packet",
        }
    }

    fn run(self) -> Result<ExitCode, Failure> {
        match self.command {
            ClassCommand::List { config } => {
                print(&render_classes(&ClientConfig::load_without_server(config.as_deref())?, width()))
            }
            ClassCommand::Test { config, json, packet } => {
                let packet: PacketDescription = packet
                    .join(" ")
                    .parse()
                    .map_err(|why: String| Failure::usage(why, "see `mpvpn class test --help`"))?;
                let ruling = ClientConfig::load_without_server(config.as_deref())?.class_of(&packet);
                print(&if json { json_line(serde_json::to_string(&ruling))? } else { format!("{ruling}\n") })
            }
        }
    }
}
