//! `mpvpn man`: the manual pages, for the package.

use std::{path::PathBuf, process::ExitCode};

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
    fn run(self) -> Result<ExitCode, Failure> {
        clap_mangen::generate_to(cli::define(), &self.folder).map_err(|error| {
            let why = format!("{}: {error}", self.folder.display());
            Failure::runtime("cannot write the manual pages", why, "name a folder that exists")
        })?;
        Ok(ExitCode::SUCCESS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_that_is_not_hidden_has_a_page_with_its_options() {
        let folder = tempfile::tempdir().unwrap();
        Man { folder: folder.path().to_owned() }.run().unwrap();
        let page = |name: &str| std::fs::read_to_string(folder.path().join(format!("{name}.1")));
        assert!(page("mpvpn").unwrap().contains("mpvpn\\-status"), "{}", page("mpvpn").unwrap());
        assert!(page("mpvpn-client").unwrap().contains("\\-\\-kill\\-switch"));
        assert!(page("mpvpn-user-add").unwrap().contains("\\-\\-expires"));
        assert!(page("mpvpn-helper").is_err() && page("mpvpn-man").is_err());
    }
}
