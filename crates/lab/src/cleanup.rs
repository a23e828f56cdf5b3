//! The traces of a lab in the system, and their removal, also after the lab's process was killed.
//!
//! The names of all objects of a lab begin with its prefix `mplab-<pid>-<n>`, and its process holds a lock on
//! `/run/mpvpn/lab/<prefix>.lock` as long as it lives: if the lock can be taken, the process has ended, even
//! if its ID is in use again. Files that other users need are in `/tmp/<prefix>`.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicU32, Ordering},
};

use rustix::fs::{FlockOperation, flock};

use crate::{
    error::LabError,
    namespace::NETNS_DIR,
    process::{kill_processes_in, run},
};

/// Where running labs keep their locks, logs and sockets.
pub const RUN_DIR: &str = "/run/mpvpn/lab";
/// The prefix of all names of labs.
const NAME_PREFIX: &str = "mplab-";

/// Rounds of removing labs that other threads create meanwhile. The process ends right after; with fewer
/// rounds more remains for the next lab to remove, more delay the exit.
const REMOVAL_ROUNDS: usize = 3;

/// The name and directory of a lab; dropping it removes all objects with that name.
pub(crate) struct LabClaim {
    prefix: String,
    dir: PathBuf,
    _lock: File,
}

impl LabClaim {
    /// Claims a name that no other lab has.
    pub(crate) fn take() -> Result<Self, LabError> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let prefix = format!("{NAME_PREFIX}{}-{count}", std::process::id());
        private_dir(Path::new(RUN_DIR))?;
        // The file is locked before it gets its final name, so another process never finds it unlocked while
        // this one lives.
        let (hidden, lock) = (format!("{RUN_DIR}/.{prefix}"), format!("{RUN_DIR}/{prefix}.lock"));
        let file = File::create(&hidden).map_err(LabError::io(format!("create {hidden}")))?;
        flock(&file, FlockOperation::NonBlockingLockExclusive)
            .map_err(LabError::sys(format!("lock {hidden}")))?;
        fs::rename(&hidden, &lock).map_err(LabError::io(format!("create {lock}")))?;
        let dir = PathBuf::from(format!("{RUN_DIR}/{prefix}"));
        let claim = Self { prefix, dir, _lock: file };
        private_dir(&claim.dir)?;
        Ok(claim)
    }

    /// The prefix of the names of this lab's namespaces.
    pub(crate) fn prefix(&self) -> &str {
        &self.prefix
    }

    /// A directory for the lab's files.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// A directory that every user may read, created at the first call.
    pub(crate) fn public_dir(&self) -> Result<PathBuf, LabError> {
        let path = public_dir(&self.prefix);
        let failed = || LabError::io(format!("create {}", path.display()));
        if let Err(error) = fs::create_dir(&path) {
            // The directory may exist from an earlier call; anything that another user has created there is
            // refused.
            let is_ours = fs::symlink_metadata(&path)
                .is_ok_and(|found| found.is_dir() && found.uid() == rustix::process::geteuid().as_raw());
            if !is_ours {
                return Err(failed()(error));
            }
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).map_err(failed())?;
        Ok(path)
    }
}

impl Drop for LabClaim {
    fn drop(&mut self) {
        remove(&self.prefix);
    }
}

/// Removes what labs of ended processes left.
pub(crate) fn remove_abandoned() {
    for prefix in prefixes() {
        // The lock is held during the removal, so that two processes do not remove the same lab.
        let lock = File::open(format!("{RUN_DIR}/{prefix}.lock"));
        let abandoned = match &lock {
            Ok(file) => flock(file, FlockOperation::NonBlockingLockExclusive).is_ok(),
            Err(_) => true,
        };
        if abandoned {
            remove(&prefix);
        }
    }
}

/// Removes all labs of this process. It repeats this for labs that other threads create meanwhile, of which
/// one may remain.
pub(crate) fn remove_own() {
    let own = format!("{NAME_PREFIX}{}-", std::process::id());
    for _ in 0..REMOVAL_ROUNDS {
        prefixes().iter().filter(|prefix| prefix.starts_with(&own)).for_each(|prefix| remove(prefix));
    }
}

/// The prefixes of all labs that have a lock file or a namespace.
fn prefixes() -> BTreeSet<String> {
    let locks = names(RUN_DIR).into_iter().filter_map(|name| name.strip_suffix(".lock").map(str::to_owned));
    let namespaces = names(NETNS_DIR).into_iter();
    let namespaces = namespaces.filter_map(|name| Some(name.rsplit_once('-')?.0.to_owned()));
    locks.chain(namespaces).filter(|prefix| is_prefix(prefix)).collect()
}

/// Whether `text` is the prefix of a lab, `mplab-<pid>-<n>` in decimal digits.
fn is_prefix(text: &str) -> bool {
    let Some((pid, count)) = text.strip_prefix(NAME_PREFIX).and_then(|rest| rest.split_once('-')) else {
        return false;
    };
    [pid, count].iter().all(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Kills the processes and removes the namespaces and files of a lab. Missing ones are no error.
fn remove(prefix: &str) {
    for name in names(NETNS_DIR) {
        if !name.strip_prefix(prefix).is_some_and(|rest| rest.starts_with('-')) {
            continue;
        }
        let _ = kill_processes_in(&Path::new(NETNS_DIR).join(&name));
        let _ = run(Command::new("ip").args(["netns", "del", &name]));
    }
    let _ = fs::remove_dir_all(format!("{RUN_DIR}/{prefix}"));
    let _ = fs::remove_dir_all(public_dir(prefix));
    let _ = fs::remove_file(format!("{RUN_DIR}/{prefix}.lock"));
}

/// The directory of the files that other users need, if the lab has any.
fn public_dir(prefix: &str) -> PathBuf {
    std::env::temp_dir().join(prefix)
}

fn names(dir: &str) -> Vec<String> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

/// Creates a directory that only root can read, and that others can pass: servers and clients of the lab
/// leave root, and have their own folders in it.
fn private_dir(path: &Path) -> Result<(), LabError> {
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o711)
        .create(path)
        // It may be there already.
        .and_then(|()| fs::set_permissions(path, fs::Permissions::from_mode(0o711)))
        .map_err(LabError::io(format!("create {}", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_labs_are_recognized() {
        assert!(is_prefix("mplab-123-0"));
        for other in ["mplab-", "mplab-1", "mplab-1-", "mplab-x-1", "other-1-1", "mplab-1-1-client"] {
            assert!(!is_prefix(other), "{other}");
        }
    }
}
