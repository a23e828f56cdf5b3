//! The exceptions of each client on disk.
//!
//! Always holds: who has [`Records`] is the only one who reads or changes them, and the table; a file is
//! whole, as it is replaced by rename.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    time::SystemTime,
};

use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use super::Exceptions;
use crate::{
    error::OsError,
    undo::{failed, open_locked, read_record, read_text, replace, start_time, write_record},
};

/// The exceptions of one instance.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Record {
    pid: u32,
    /// When that process started, in clock ticks since boot (proc(5), `starttime`).
    start_time: u64,
    pub(super) exceptions: Exceptions,
}

impl Record {
    /// Whether it is no hold, and the process that wrote it still runs.
    pub(super) fn is_in_use(&self) -> bool {
        !self.exceptions.is_hold && start_time(self.pid) == Some(self.start_time)
    }
}

/// All records, locked.
#[derive(Debug)]
pub(super) struct Records {
    folder: PathBuf,
    /// An exclusive lock that is waited for is always taken.
    _lock: Option<File>,
}

impl Records {
    /// Waits until no other process has them.
    pub(super) fn lock(folder: &Path) -> Result<Self, OsError> {
        let lock = open_locked(&folder.join("lock"), FlockOperation::LockExclusive)
            .map_err(|source| failed("lock", folder, source))?;
        Ok(Self { folder: folder.to_owned(), _lock: lock })
    }

    /// The records as they are, to be read only.
    pub(super) fn look_at(folder: &Path) -> Self {
        Self { folder: folder.to_owned(), _lock: None }
    }

    /// When a record was written.
    pub(super) fn changed(&self, name: &str) -> Option<SystemTime> {
        fs::metadata(self.path(name)).and_then(|data| data.modified()).ok()
    }

    /// All that can be read, in the order of their names. One that cannot be read, of another version, holds
    /// nothing open.
    pub(super) fn all(&self) -> Vec<(String, Record)> {
        let names = fs::read_dir(&self.folder).into_iter().flatten().flatten().filter_map(|entry| {
            entry.file_name().to_str().and_then(|name| name.strip_suffix(".json")).map(ToOwned::to_owned)
        });
        let mut names: Vec<String> = names.collect();
        names.sort_unstable();
        let known = |name: String| match self.read(&name) {
            Some(record) => Some((name, record)),
            None => {
                tracing::warn!(name, "the exceptions of a kill switch cannot be read");
                None
            }
        };
        names.into_iter().filter_map(known).collect()
    }

    pub(super) fn read(&self, name: &str) -> Option<Record> {
        read_record(&self.path(name))
    }

    /// Writes the exceptions of an instance that runs in this process.
    pub(super) fn write(&self, name: &str, exceptions: &Exceptions) -> Result<(), OsError> {
        let pid = std::process::id();
        let exceptions = exceptions.clone();
        self.restore(name, &Record { pid, start_time: start_time(pid).unwrap_or(0), exceptions })
    }

    /// Writes a record as it is.
    pub(super) fn restore(&self, name: &str, record: &Record) -> Result<(), OsError> {
        write_record(&self.path(name), record)
    }

    pub(super) fn remove(&self, name: &str) -> Result<(), OsError> {
        let path = self.path(name);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed("remove", &path, error)),
            _ => Ok(()),
        }
    }

    /// How nft showed the table when it was installed; empty where there is none.
    pub(super) fn installed(&self) -> String {
        read_text(&self.folder.join("installed"))
    }

    /// Notes how nft shows the table. Without a table nothing needs to be remembered, and the folder goes.
    pub(super) fn note_installed(&self, listing: &str) -> Result<(), OsError> {
        let path = self.folder.join("installed");
        if !listing.is_empty() {
            return replace(&path, listing.as_bytes()).map_err(|source| failed("write", &path, source));
        }
        for file in [path, self.folder.join("lock")] {
            let _ = fs::remove_file(file);
        }
        // Those above hold nothing else unless a journal is kept there.
        let _ = fs::remove_dir(&self.folder);
        let _ = self.folder.parent().map(fs::remove_dir);
        Ok(())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(format!("{name}.json"))
    }
}
