//! A lock file (flock(2)) that at most one living process holds.

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use rustix::fs::{FlockOperation, flock};

/// Attempts at a lock file that other processes keep removing. Each needs another process that ends at that
/// moment, so more would only hide a mistake; fewer could fail where many processes start and end at once.
const MAX_ATTEMPTS: usize = 100;

/// A held lock. Dropping it removes the file, and the folder if it is empty.
#[derive(Debug)]
pub struct Lock {
    folder: PathBuf,
    path: PathBuf,
    _file: File,
}

impl Lock {
    /// Takes the lock `<folder>/<name>.lock` and creates the folder if it does not exist; `None` if another
    /// process holds the lock.
    pub(super) fn take(folder: &Path, name: &str) -> io::Result<Option<Self>> {
        let path = folder.join(format!("{name}.lock"));
        let file = open_locked(&path, FlockOperation::NonBlockingLockExclusive)?;
        Ok(file.map(|file| Self { folder: folder.to_owned(), path, _file: file }))
    }

    /// As `take`, but waits for the process that holds the lock. A lock on the folder itself
    /// could be held by everybody who may read the folder.
    ///
    /// # Errors
    /// If the file cannot be made.
    pub fn wait_for(folder: &Path, name: &str) -> io::Result<Self> {
        let path = folder.join(format!("{name}.lock"));
        let file = open_locked(&path, FlockOperation::LockExclusive)?.ok_or(io::ErrorKind::WouldBlock)?;
        Ok(Self { folder: folder.to_owned(), path, _file: file })
    }
}

/// Opens the file at `path`, creating it and its folder if they do not exist, and locks it; `None` if
/// `operation` does not wait and another process holds the lock. The kernel releases it with the file.
pub(crate) fn open_locked(path: &Path, operation: FlockOperation) -> io::Result<Option<File>> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    // A previous owner that ends may remove the file or the folder between any two of these steps.
    for _ in 0..MAX_ATTEMPTS {
        make_folder(folder)?;
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let opened = options.mode(0o600).custom_flags(libc::O_NOFOLLOW).open(path);
        let file = match opened {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            // A link that somebody put there.
            Err(error) if error.raw_os_error() == Some(libc::ELOOP) => {
                fs::remove_file(path)?;
                continue;
            }
            result => result?,
        };
        give_to_owner_of_folder(path);
        match flock(&file, operation) {
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
            result => result?,
        }
        let ours = file.metadata()?.ino();
        if fs::metadata(path).is_ok_and(|now| now.ino() == ours) {
            return Ok(Some(file));
        }
    }
    Err(io::Error::new(io::ErrorKind::ResourceBusy, "another process keeps removing the lock file"))
}

/// Makes a folder, and those above it.
fn make_folder(folder: &Path) -> io::Result<()> {
    if folder.is_dir() {
        return Ok(());
    }
    if let Some(above) = folder.parent() {
        make_folder(above)?;
    }
    match DirBuilder::new().mode(0o700).create(folder) {
        // Another process was faster.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        made => made?,
    }
    give_to_owner_of_folder(folder);
    Ok(())
}

/// A file that root makes in the folder of a service's user belongs to that user, whose processes must be
/// able to change it. Does nothing for other users, and where root has given up that right.
pub(crate) fn give_to_owner_of_folder(path: &Path) {
    let Some(Ok(folder)) = path.parent().map(fs::metadata) else { return };
    let is_other = || fs::symlink_metadata(path).is_ok_and(|own| own.uid() != folder.uid());
    if folder.uid() != 0 && rustix::process::geteuid().is_root() && is_other() {
        let _ = std::os::unix::fs::lchown(path, Some(folder.uid()), Some(folder.gid()));
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
        let _ = fs::remove_dir(&self.folder);
    }
}
