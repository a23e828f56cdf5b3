//! What a lab leaves in the system while it runs, and taking it away again, whoever left it.
//!
//! A lab's things all begin with its prefix `mplab-<pid>-<n>`, and its owner holds a lock on
//! `/run/mpvpn/lab/<prefix>.lock` as long as it lives: a lock that can be taken means that the owner is gone,
//! even if its process id is in use again. Files that other users need are in `/tmp/<prefix>`.

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
    process::{kill_inside, run},
};

/// Where running labs keep their locks, logs and sockets.
pub(crate) const RUN_DIR: &str = "/run/mpvpn/lab";
/// How all names of labs begin.
const MARK: &str = "mplab-";

/// The name and directory of a lab; dropping it removes all that bears the name.
pub(crate) struct Claim {
    prefix: String,
    dir: PathBuf,
    _lock: File,
}

impl Claim {
    /// Takes a name that no other lab has.
    pub(crate) fn take() -> Result<Self, LabError> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let prefix = format!("{MARK}{}-{count}", std::process::id());
        private_dir(Path::new(RUN_DIR))?;
        // Locked before it has its name: nobody can find it unlocked while we live.
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

    /// What the names of this lab's namespaces begin with.
    pub(crate) fn prefix(&self) -> &str {
        &self.prefix
    }

    /// A directory for the lab's files.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// A directory that every user may look into, made when it is first asked for.
    pub(crate) fn public_dir(&self) -> Result<PathBuf, LabError> {
        let path = public_dir(&self.prefix);
        let failed = || LabError::io(format!("create {}", path.display()));
        if let Err(error) = fs::create_dir(&path) {
            // Ours from an earlier call, not what somebody else has put there.
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

impl Drop for Claim {
    fn drop(&mut self) {
        remove(&self.prefix);
    }
}

/// Removes what labs left whose owners are gone.
pub(crate) fn sweep() {
    for prefix in prefixes() {
        // The lock file is held while we remove, so that two sweeps do not meet.
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

/// Removes all labs of this process, also those that other threads make meanwhile, but for a last one.
pub(crate) fn remove_own() {
    let own = format!("{MARK}{}-", std::process::id());
    for _ in 0..3 {
        prefixes().iter().filter(|prefix| prefix.starts_with(&own)).for_each(|prefix| remove(prefix));
    }
}

/// The names of all labs of which there is anything.
fn prefixes() -> BTreeSet<String> {
    let locks = names(RUN_DIR).into_iter().filter_map(|name| name.strip_suffix(".lock").map(str::to_owned));
    let namespaces = names(NETNS_DIR).into_iter();
    let namespaces = namespaces.filter_map(|name| Some(name.rsplit_once('-')?.0.to_owned()));
    locks.chain(namespaces).filter(|prefix| is_prefix(prefix)).collect()
}

/// Whether `text` is `mplab-<pid>-<n>`, exactly as we make it.
fn is_prefix(text: &str) -> bool {
    let Some((pid, count)) = text.strip_prefix(MARK).and_then(|rest| rest.split_once('-')) else {
        return false;
    };
    [pid, count].iter().all(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Ends the processes and removes the namespaces and files of a lab. What is gone already is no error.
fn remove(prefix: &str) {
    for name in names(NETNS_DIR) {
        if !name.strip_prefix(prefix).is_some_and(|rest| rest.starts_with('-')) {
            continue;
        }
        let _ = kill_inside(&Path::new(NETNS_DIR).join(&name));
        let _ = run(Command::new("ip").args(["netns", "del", &name]));
    }
    let _ = fs::remove_dir_all(format!("{RUN_DIR}/{prefix}"));
    let _ = fs::remove_dir_all(public_dir(prefix));
    let _ = fs::remove_file(format!("{RUN_DIR}/{prefix}.lock"));
}

/// Where files of a lab are that other users need, if it has any.
fn public_dir(prefix: &str) -> PathBuf {
    std::env::temp_dir().join(prefix)
}

fn names(dir: &str) -> Vec<String> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

/// Makes a directory that only root can look into.
fn private_dir(path: &Path) -> Result<(), LabError> {
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .map_err(LabError::io(format!("create {}", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_labs_are_swept() {
        assert!(is_prefix("mplab-123-0"));
        for other in ["mplab-", "mplab-1", "mplab-1-", "mplab-x-1", "other-1-1", "mplab-1-1-client"] {
            assert!(!is_prefix(other), "{other}");
        }
    }
}
