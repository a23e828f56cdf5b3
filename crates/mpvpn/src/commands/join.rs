//! `mpvpn join`: sets up a client on this machine by a join link.

use std::process::ExitCode;

use clap::Parser;
use mpvpn_confine::secrets::hide_tokens;
use mpvpn_input::role::Role;
use mpvpn_setup::Instance;
use mpvpn_users::join::Joined;

use super::{Command, client::read_link};
use crate::{failure::Failure, output::print};

const EXAMPLES: &str = "\
Examples:
  mpvpn join 'mpvpn://TOKEN@vpn.example/?pin=SHA256'
      writes /etc/mpvpn/client.toml; the link is what `mpvpn user add` printed on the server
  mpvpn join - --start
      reads the link from standard input, and starts the service now and at each boot
  mpvpn join LINK --name work --start
      a further client beside the first: client-work.toml, and the service mpvpn-client@work

A file that is for the same server gets the new token and pins, and keeps all else.";

/// Set up a client on this machine by a join link
#[derive(Debug, Parser)]
#[command(name = "join", after_help = EXAMPLES)]
pub(crate) struct Join {
    /// The link, as `mpvpn user add` prints it on the server; `-` reads it from standard input
    #[arg(value_name = "JOIN-LINK")]
    link: String,
    /// Name of the client, for machines with several: its file is client-NAME.toml [default: client.toml]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Start the service now and at each boot
    #[arg(long)]
    start: bool,
}

impl Command for Join {
    const SUMMARY: &str = "cannot join";

    fn run(self) -> Result<ExitCode, Failure> {
        hide_tokens();
        let Self { link, name, start } = self;
        let instance = Instance::new(Role::Client, name)?;
        let (file, unit) = (instance.file(), instance.unit());
        let link = read_link(&link)?;
        let done = link.write_to(&file)?;
        let done = match done {
            Joined::New => "wrote",
            Joined::Updated => "put the new token and pins into",
        };
        let mut text = format!("{done} {}\n", file.display());
        if start {
            start_service(&unit)?;
            text += &format!(
                "started {unit}, now and at each boot; `mpvpn status --wait 30` waits until the tunnel is up\n"
            );
        } else {
            text += &format!("start it by `systemctl enable --now {unit}`, or `{}`\n", instance.command());
        }
        print(&text)
    }
}

fn start_service(unit: &str) -> Result<(), Failure> {
    let next = "install the package, which has the service, or start the client by `mpvpn client`";
    // One that runs already must read the new token.
    for command in ["enable", "restart"] {
        let output = std::process::Command::new("systemctl")
            .args([command, unit])
            .output()
            .map_err(|error| Failure::runtime(format!("systemctl cannot be started: {error}"), next))?;
        if !output.status.success() {
            let why = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            return Err(Failure::runtime(format!("{unit} cannot be started: {why}"), next));
        }
    }
    Ok(())
}
