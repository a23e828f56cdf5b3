//! `mpvpn backup` and `mpvpn restore`: the state of a server in one file.

use std::{path::PathBuf, process::ExitCode, time::SystemTime};

use clap::Parser;
use mpvpn_users::backup::Backup as ServerBackup;

use super::{Command, user::ServerFiles};
use crate::{failure::Failure, output::print};

const BACKUP_EXAMPLES: &str = "\
Examples:
  mpvpn backup server.backup
      users, certificate and key, leases and quotas; the server may run

The file has the private key of the server and mode 0600: keep it where only you can read it. The configuration file, and
certificates that it names elsewhere, are not in it.";

const RESTORE_EXAMPLES: &str = "\
Examples:
  mpvpn restore server.backup
      on this machine or another; links and tokens of clients work as before

The file is checked first: one that was cut short or changed replaces nothing. A running server has to be stopped before.";

/// Write users, identity, leases and quotas of the server on this machine to one file
#[derive(Debug, Parser)]
#[command(name = "backup", after_help = BACKUP_EXAMPLES)]
pub(crate) struct Backup {
    /// The new file, which only its owner can read
    #[arg(value_name = "FILE", id = "backup_file")]
    file: PathBuf,
    #[command(flatten)]
    server: ServerFiles,
}

/// Take users, identity, leases and quotas of the server on this machine from a backup
#[derive(Debug, Parser)]
#[command(name = "restore", after_help = RESTORE_EXAMPLES)]
pub(crate) struct Restore {
    /// A file of `mpvpn backup`
    #[arg(value_name = "FILE", id = "backup_file")]
    file: PathBuf,
    #[command(flatten)]
    server: ServerFiles,
}

impl Command for Backup {
    const SUMMARY: &str = "cannot back the server up";

    fn run(self) -> Result<ExitCode, Failure> {
        let backup = ServerBackup::collect(&self.server.load()?, SystemTime::now())?;
        backup.save(&self.file)?;
        let names: Vec<_> = backup.names().collect();
        print(&format!("wrote {}: {}\n", self.file.display(), names.join(", ")))
    }
}

impl Command for Restore {
    const SUMMARY: &str = "cannot restore the server";

    fn run(self) -> Result<ExitCode, Failure> {
        let backup = ServerBackup::load(&self.file)?;
        let config = self.server.load()?;
        backup.restore(&config)?;
        let names: Vec<_> = backup.names().collect();
        print(&format!(
            "restored the backup of {} to {}: {}\n",
            backup.created(),
            config.state_dir.display(),
            names.join(", ")
        ))
    }
}
