//! `mpvpn client`: sends this machine's traffic through a server.

use std::{path::PathBuf, process::ExitCode};

use clap::{Args, Parser};
use mpvpn_control::{
    config::{ClientOptions, ConfigSource},
    log,
};
use mpvpn_engine::client;

use super::Command;
use crate::failure::{Failure, READ_THE_LOG};

const EXAMPLES: &str = "\
Examples:
  mpvpn client --server 203.0.113.1 --pin SHA256 --token-file /etc/mpvpn/token
      send all traffic through the tunnel, over every interface with a default route
  mpvpn client --server vpn.example:4433 --ca server.crt --path eth0 --path wwan0
      use these two interfaces only
  mpvpn client --server 203.0.113.1 --pin SHA256 --token-file t --routes advertised --share lan0
      send only traffic to the networks that the server advertises, also that of the machines behind lan0

Every option except --config is a key of the configuration file, as in
  server = \"vpn.example:4433\"
  path = [\"eth0\", \"wwan0\"]
Options on the command line override the file.";

/// Send this machine's traffic through a server, over all links at once
#[derive(Debug, Parser)]
#[command(name = "client", after_help = EXAMPLES, mut_args(hide))]
pub(crate) struct Client {
    #[command(flatten)]
    pub(crate) args: ClientArgs,
}

/// The options of commands that connect to a server.
#[derive(Args, Debug)]
pub(crate) struct ClientArgs {
    /// Configuration file [default: /etc/mpvpn/client.toml, if it is there]
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) options: ClientOptions,
}

fn hide(arg: clap::Arg) -> clap::Arg {
    let is_hidden = matches!(arg.get_id().as_str(), "socks5" | "http");
    arg.hide(is_hidden)
}

impl Command for Client {
    fn run(self) -> Result<ExitCode, Failure> {
        let origin = ConfigSource::<ClientOptions>::new(self.args.config, self.args.options);
        let config =
            origin.load().map_err(|error| Failure::from_control_error("cannot start the client", &error))?;
        log::init(config.log_level);
        client::run(config, origin)
            .map_err(|error| Failure::from_error("the client ended", &error, READ_THE_LOG))?;
        Ok(ExitCode::SUCCESS)
    }
}
