//! `mpvpn proxy`: offers a SOCKS5 or HTTP proxy to apps, whose traffic goes through a server.

use std::process::ExitCode;

use clap::Parser;
use mpvpn_client as client;
use mpvpn_config::{ConfigSource, log};
use mpvpn_confine::secrets::hide_tokens;

use super::{Command, client::ClientArgs};
use crate::failure::{Failure, READ_THE_LOG};

const EXAMPLES: &str = "\
Examples:
  mpvpn proxy --socks5 127.0.0.1:1080 --server 203.0.113.1 --pin SHA256 --token-file ~/token
      then, for example: curl --socks5-hostname 127.0.0.1:1080 https://example.com/
  mpvpn proxy --socks5 127.0.0.1:1080 --http 127.0.0.1:8080 --config ~/mpvpn.toml
      both kinds, with the other options in a file; then: export https_proxy=http://127.0.0.1:8080
  mpvpn proxy --http 127.0.0.1:8080 --server vpn.example --ca server.crt --path eth0 --path wwan0
      use these two interfaces only

The server opens the TCP connections and resolves the names, so neither a TUN device nor routes nor root are
needed. Everybody who can connect to the addresses can use the proxy: 127.0.0.1 is for this machine only.
The file has the keys of `mpvpn client`, and
  socks5 = [\"127.0.0.1:1080\"]
  http = [\"127.0.0.1:8080\"]
Options on the command line override the file.";

/// Offer a SOCKS5 or HTTP proxy to apps, whose traffic goes through a server over all links; needs no root
#[derive(Debug, Parser)]
#[command(name = "proxy", after_help = EXAMPLES, mut_args(hide))]
pub(crate) struct Proxy {
    #[command(flatten)]
    pub(crate) args: ClientArgs,
}

/// Options that only apply with a TUN device.
const OF_A_TUN: &str = "tun_name lane routes keep_routes dns dns_local kill_switch kill_switch_lan share \
    announce accept_from masquerade when_down shards";

fn hide(arg: clap::Arg) -> clap::Arg {
    let arg = match arg.get_id().as_str() {
        "config" => arg.help("Configuration file"),
        "name" => arg.help(
            "Name of this proxy in `mpvpn status --name NAME` and in the name of its socket, for machines with several mpvpn \
             processes [default: proxy]",
        ),
        "api_socket" => arg.help(
            "Path of the unix socket at which `mpvpn status` and other commands reach this proxy [default: client-NAME.sock in \
             $XDG_RUNTIME_DIR/mpvpn, for root in /run/mpvpn]",
        ),
        "state_dir" => arg.help(
            "Folder for data that survive a restart: how much of its quota each link has used [default: \
             $XDG_STATE_HOME/mpvpn, for root /var/lib/mpvpn]",
        ),
        _ => arg,
    };
    let is_hidden = OF_A_TUN.split(' ').any(|name| name == arg.get_id().as_str());
    arg.hide(is_hidden)
}

impl Command for Proxy {
    const SUMMARY: &str = "cannot start the proxy";

    fn run(self) -> Result<ExitCode, Failure> {
        hide_tokens();
        let origin = ConfigSource::of_proxy(self.args.config, self.args.options);
        let config = origin.load()?;
        log::init(config.log_level);
        client::run(config, origin)
            .map_err(|error| Failure::of(&error, READ_THE_LOG).about("the proxy ended"))?;
        Ok(ExitCode::SUCCESS)
    }
}
