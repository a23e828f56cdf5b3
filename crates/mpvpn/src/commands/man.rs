//! `mpvpn man`: the manual pages, for the package.

use std::{fs, path::PathBuf, process::ExitCode};

use clap::Parser;

use super::Command;
use crate::{cli, failure::Failure};

/// Write the manual pages of all commands into a folder
#[derive(Debug, Parser)]
#[command(name = "man", hide = true)]
pub(crate) struct Man {
    /// The folder
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,
}

impl Command for Man {
    const SUMMARY: &str = "cannot write the manual pages";

    fn run(self) -> Result<ExitCode, Failure> {
        // The page of `mpvpn lab` is in the package of the program that it starts.
        let written = clap_mangen::generate_to(cli::define(), &self.folder)
            .and_then(|()| fs::remove_file(self.folder.join("mpvpn-lab.1")));
        written.map(|()| ExitCode::SUCCESS).map_err(|error| {
            let why = format!("{}: {error}", self.folder.display());
            Failure::runtime(why, "name a folder that exists")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_that_is_not_hidden_has_a_page_with_its_options() {
        let folder = tempfile::tempdir().unwrap();
        Man { folder: folder.path().to_owned() }.run().unwrap();
        let page = |name: &str| fs::read_to_string(folder.path().join(format!("{name}.1")));
        assert!(page("mpvpn").unwrap().contains("mpvpn\\-status"), "{}", page("mpvpn").unwrap());
        assert!(page("mpvpn-client").unwrap().contains("\\-\\-kill\\-switch"));
        assert!(page("mpvpn-user-add").unwrap().contains("\\-\\-expires"));
        for absent in ["mpvpn-helper", "mpvpn-man", "mpvpn-lab"] {
            assert!(page(absent).is_err(), "{absent}");
        }
    }
}
