//! `mpvpn lab`: starts the program `mpvpn-lab`, which has the emulated links.

use std::{
    env,
    ffi::OsString,
    io::{Error, ErrorKind},
    os::unix::process::CommandExt,
    path::PathBuf,
    process::{self, ExitCode},
};

use clap::Parser;

use super::Command;
use crate::failure::Failure;

/// The program, and the Debian package that has it.
const PROGRAM: &str = "mpvpn-lab";

/// Try mpvpn on this machine, over emulated links between network namespaces
#[derive(Debug, Parser)]
#[command(name = "lab", disable_help_flag = true)]
pub(crate) struct Lab {
    /// A command of the lab and its options: `mpvpn lab --help` shows them
    #[arg(value_name = "ARGUMENT", trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

impl Command for Lab {
    const SUMMARY: &str = "the lab cannot start";

    /// Replaces this process by the program: the file beside this one, else the one in `PATH`.
    fn run(self) -> Result<ExitCode, Failure> {
        let beside = env::current_exe().map(|own| own.with_file_name(PROGRAM)).unwrap_or_default();
        let program = if beside.is_file() { &beside } else { &PathBuf::from(PROGRAM) };
        Err(explain(&process::Command::new(program).args(self.arguments).exec()))
    }
}

fn explain(error: &Error) -> Failure {
    match error.kind() {
        ErrorKind::NotFound => Failure::runtime(
            format!("the program {PROGRAM} is neither beside mpvpn nor in PATH"),
            format!("install the package {PROGRAM}; in the source tree, ./dev demo builds and runs it"),
        ),
        _ => Failure::runtime(format!("{PROGRAM}: {error}"), "check who may run that file"),
    }
}
