//! `mpvpn join`: sets up a client on this machine by a join link.

use std::{path::PathBuf, process::ExitCode};

use clap::Parser;
use mpvpn_control::{config::CLIENT_FILE, join::Joined};
use mpvpn_engine::hide_tokens;

use super::{Command, client::read_link};
use crate::{failure::Failure, output::print};

const SUMMARY: &str = "cannot join";
/// Bytes of a name. Chosen: it is a part of the name of a file and of a unit.
const MAX_NAME_BYTES: usize = 32;

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
    fn run(self) -> Result<ExitCode, Failure> {
        hide_tokens();
        let Self { link, name, start } = self;
        let (file, unit) = file_and_unit(name.as_deref())?;
        let link = read_link(SUMMARY, &link)?;
        let done = link.write_to(&file).map_err(|error| Failure::from_control_error(SUMMARY, &error))?;
        let done = match done {
            Joined::New => "wrote",
            Joined::Updated => "put the new token and pins into",
        };
        let mut text = format!("{done} {}\n", file.display());
        if start {
            start_service(&unit)?;
            text += &format!("started {unit}, now and at each boot; `mpvpn status` shows it\n");
        } else if name.is_some() {
            text += &format!(
                "start it by `systemctl enable --now {unit}`, or `mpvpn client --config {}`\n",
                file.display()
            );
        } else {
            text += &format!("start it by `systemctl enable --now {unit}`, or `mpvpn client`\n");
        }
        print(&text)
    }
}

/// The configuration file of a client, and its unit.
fn file_and_unit(name: Option<&str>) -> Result<(PathBuf, String), Failure> {
    let file = PathBuf::from(CLIENT_FILE);
    let Some(name) = name else { return Ok((file, "mpvpn-client".to_owned())) };
    let allowed = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    if !(1..=MAX_NAME_BYTES).contains(&name.len()) || !name.chars().all(allowed) {
        return Err(Failure::usage(
            SUMMARY,
            format!("`{name}` cannot be the name of a client"),
            format!("take 1 to {MAX_NAME_BYTES} letters, digits, - and _"),
        ));
    }
    Ok((file.with_file_name(format!("client-{name}.toml")), format!("mpvpn-client@{name}")))
}

fn start_service(unit: &str) -> Result<(), Failure> {
    let next = "install the package, which has the service, or start the client by `mpvpn client`";
    let started = std::process::Command::new("systemctl").args(["enable", "--now", unit]).output();
    let output = started
        .map_err(|error| Failure::runtime(SUMMARY, format!("systemctl cannot be started: {error}"), next))?;
    match output.status.success() {
        true => Ok(()),
        false => {
            let why = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            Err(Failure::runtime(SUMMARY, format!("{unit} cannot be started: {why}"), next))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_named_client_has_a_file_and_a_unit_of_its_own() {
        let (file, unit) = file_and_unit(Some("work")).unwrap();
        assert_eq!(
            (file.to_str(), unit.as_str()),
            (Some("/etc/mpvpn/client-work.toml"), "mpvpn-client@work")
        );
        for bad in ["", "a b", "../x", "a/b", &"x".repeat(33)] {
            assert!(file_and_unit(Some(bad)).is_err(), "{bad}");
        }
    }
}
