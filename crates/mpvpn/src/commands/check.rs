//! `mpvpn check`: tries every link to a server, and reports which transports work.

use std::{
    io::{IsTerminal, Write},
    process::ExitCode,
};

use clap::Parser;
use mpvpn_client::check::run;
use mpvpn_config::{ClientConfig, log};
use mpvpn_status::check;

use super::{Command, client::ClientArgs};
use crate::{
    failure::Failure,
    output::{json_line, print, width},
};

const EXAMPLES: &str = "\
Examples:
  mpvpn check
      with the file that `mpvpn client` reads
  mpvpn check --server 203.0.113.1 --pin SHA256 --token-file token --path eth0 --path wwan0
  mpvpn check --json --config ~/mpvpn.toml

It reads the options and the file of `mpvpn client`, and ignores keys that do not matter for a check.
Exit code 0 if a client would have at least one link, else 1.";

/// Test every link to a server: UDP, TCP, path MTU, NAT, and the token; needs no root and no running client
#[derive(Debug, Parser)]
#[command(name = "check", after_help = EXAMPLES, mut_args(hide))]
pub(crate) struct Check {
    /// Print the result as JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) client: ClientArgs,
}

/// The options of a client that a check uses; the others are hidden in its help.
const CHECK_OPTIONS: &str = "json config server path ca pin cert key insecure token token_file via transport";

fn hide(arg: clap::Arg) -> clap::Arg {
    let is_hidden = CHECK_OPTIONS.split(' ').all(|name| name != arg.get_id().as_str());
    arg.hide(is_hidden)
}

impl Command for Check {
    const SUMMARY: &str = "cannot check the links";

    fn run(self) -> Result<ExitCode, Failure> {
        check_links(self)
    }
}

fn check_links(args: Check) -> Result<ExitCode, Failure> {
    let config = ClientConfig::load(args.client.config.as_deref(), args.client.options)?;
    log::init(config.log_level);
    // Progress is for people: a program reads the JSON only.
    let shows_progress = std::io::stderr().is_terminal() || !args.json;
    let progress = |line: &str| {
        if shows_progress {
            // Without stderr, only the progress is lost.
            let _ = writeln!(std::io::stderr(), "{line}");
        }
    };
    progress(&format!("checking the links to {}, for up to 20 s", config.server));
    let next = "check the name in --server, and that this machine resolves names: `getent hosts NAME`";
    let result = run(&config, &progress).map_err(|error| Failure::of(&error, next))?;
    print(&if args.json {
        json_line(serde_json::to_string(&result))?
    } else {
        check::render(&result, width())
    })?;
    Ok(if result.works() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
