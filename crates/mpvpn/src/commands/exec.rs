//! `mpvpn exec`: runs a program whose packets leave past the tunnel, or use it whatever the rules say.
//!
//! A group of its own marks the program and all that it starts; the client's firewall table asks for it.

use std::{
    ffi::OsString,
    io::ErrorKind,
    os::unix::process::CommandExt,
    process::{self, ExitCode},
};

use clap::Parser;
use mpvpn_input::groups;

use super::Command;
use crate::failure::Failure;

const EXAMPLES: &str = "\
Examples:
  mpvpn exec --bypass -- curl https://example.com
      past the tunnel, over the best link that works
  mpvpn exec --tunnel -- curl https://example.com
      in the tunnel, although a [[bypass]] would match

Without root a member of the group does the same: `sg mpvpn-bypass -c COMMAND`, `sg mpvpn-tunnel -c COMMAND`.
With a kill switch a program past the tunnel is blocked as others are while the tunnel does not work.
Names are asked for as those of all programs: [[bypass]] with `domain` asks for them past the tunnel, too.";

/// Run a program past the tunnel, or in it whatever [[bypass]] says
#[derive(Debug, Parser)]
#[command(name = "exec", after_help = EXAMPLES)]
pub(crate) struct Exec {
    /// Its packets leave past the tunnel, over the best link that works
    #[arg(long, required_unless_present = "tunnel", conflicts_with = "tunnel")]
    bypass: bool,
    /// Its packets use the tunnel, although a [[bypass]] would match
    #[arg(long)]
    tunnel: bool,
    /// The program, with its arguments
    #[arg(value_name = "COMMAND", required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<OsString>,
}

impl Command for Exec {
    const SUMMARY: &str = "cannot run the program";

    fn run(self) -> Result<ExitCode, Failure> {
        let group = if self.bypass { groups::BYPASS } else { groups::TUNNEL };
        let missing = || {
            Failure::usage(
                format!("there is no group {group}, by which the client knows such programs"),
                format!("sudo groupadd --system {group}, then start the client again"),
            )
        };
        let number = groups::id(group).ok_or_else(missing)?;
        let [program, arguments @ ..] = &*self.command else { return Err(missing()) };
        let error = process::Command::new(program).args(arguments).gid(number).exec();
        let why = format!("{}: {error}", program.to_string_lossy());
        Err(match error.kind() {
            ErrorKind::PermissionDenied => {
                Failure::usage(why, "run it with sudo, or with `sg` as a member of the group")
            }
            _ => Failure::runtime(why, "name a program as in a shell"),
        })
    }
}
