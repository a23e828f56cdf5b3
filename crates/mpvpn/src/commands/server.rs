//! `mpvpn server`: gives clients access to this machine and the network behind it.

use std::{path::PathBuf, process::ExitCode};

use clap::Parser;
use mpvpn_config::{ConfigSource, ServerOptions, log};
use mpvpn_server as server;

use super::Command;
use crate::failure::{Failure, READ_THE_LOG};

const EXAMPLES: &str = "\
Examples:
  mpvpn server
      with a certificate and a token that it creates in /var/lib/mpvpn; prints the client's command
  mpvpn server --listen 0.0.0.0:4433 --listen '[::]:4433' --cert server.crt --key server.key
      with your certificate, on another port, over IPv4 and IPv6
  mpvpn server --subnet 10.8.0.0/16 --subnet6 none --nat off
      other addresses, without translation: the network behind has a route for 10.8.0.0/16 to this machine
  mpvpn server --routes 192.168.7.0/24 --routes fd00:7::/64
      clients reach these two networks only; with `--routes advertised` a client sends nothing else here

Without root, the server relays TCP and UDP only, by default on port 4433, with a certificate and a token in
$XDG_STATE_HOME/mpvpn (~/.local/state/mpvpn), and reads no configuration file unless --config names one.

Every option except --config is a key of the configuration file, as in
  listen = [\"0.0.0.0:4433\", \"[::]:4433\"]
  subnet = \"10.8.0.0/16\"
Options on the command line override the file.";

/// Give clients access to this machine and the network behind it
#[derive(Debug, Parser)]
#[command(name = "server", after_help = EXAMPLES)]
pub(crate) struct Server {
    /// Configuration file [default: /etc/mpvpn/server.toml, if it is there]
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) options: ServerOptions,
}

impl Command for Server {
    const SUMMARY: &str = "cannot start the server";

    fn run(self) -> Result<ExitCode, Failure> {
        let origin = ConfigSource::of_server(self.config, self.options, server::rights());
        let config = origin.load()?;
        log::init(config.log_level);
        server::run(config, origin)
            .map_err(|error| Failure::of(&error, READ_THE_LOG).about("the server ended"))?;
        Ok(ExitCode::SUCCESS)
    }
}
