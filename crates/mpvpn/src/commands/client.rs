//! `mpvpn client`: sends this machine's traffic through a server.

use std::{
    io::{Read, stdin},
    path::PathBuf,
    process::ExitCode,
};

use clap::{Args, Parser};
use mpvpn_client as client;
use mpvpn_config::{ClientOptions, ConfigSource, log};
use mpvpn_confine::secrets::hide_tokens;
use mpvpn_identity::trust::Ca;
use mpvpn_users::join::{JoinLink, LinkTrust, ParseLinkError};

use super::Command;
use crate::failure::{Failure, READ_THE_LOG};

const EXAMPLES: &str = "\
Examples:
  mpvpn client 'mpvpn://TOKEN@vpn.example/?pin=SHA256'
      the join link that `mpvpn user add` printed on the server; `-` reads it from standard input
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
    /// Join link, as `mpvpn user add` prints it: server, token and how to know the server in one; `-` reads
    /// it from standard input. The token is hidden from `ps` at once
    #[arg(value_name = "JOIN-LINK", conflicts_with_all = ["server", "token", "token_file", "pin", "ca", "insecure"])]
    link: Option<String>,
    #[command(flatten)]
    pub(crate) args: ClientArgs,
}

/// The options of a command line with a join link.
pub(crate) fn with_link(link: Option<String>, options: ClientOptions) -> Result<ClientOptions, Failure> {
    let Some(text) = link else { return Ok(options) };
    let link = read_link(&text)?;
    let (ca, pin) = match link.trust {
        LinkTrust::Pins(pins) => (None, pins),
        LinkTrust::System => (Some(Ca::System), Vec::new()),
    };
    Ok(ClientOptions { server: vec![link.server.into()], token: Some(link.token), ca, pin, ..options })
}

/// The join link in an argument, or in standard input if that is `-`.
pub(crate) fn read_link(argument: &str) -> Result<JoinLink, Failure> {
    let next = "copy the whole link, in single quotes, as `mpvpn user add` printed it on the server";
    let mut text = argument.to_owned();
    if argument == "-" {
        text.clear();
        // Longer texts are no links.
        stdin()
            .take(64 << 10)
            .read_to_string(&mut text)
            .map_err(|error| Failure::runtime(format!("standard input cannot be read: {error}"), next))?;
    }
    text.parse().map_err(|error: ParseLinkError| Failure::usage(error.to_string(), next))
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
    const SUMMARY: &str = "cannot start the client";

    fn run(self) -> Result<ExitCode, Failure> {
        hide_tokens();
        let options = with_link(self.link, self.args.options)?;
        let origin = ConfigSource::<ClientOptions>::new(self.args.config, options);
        let config = origin.load()?;
        log::init(config.log_level);
        client::run(config, origin)
            .map_err(|error| Failure::of(&error, READ_THE_LOG).about("the client ended"))?;
        Ok(ExitCode::SUCCESS)
    }
}
