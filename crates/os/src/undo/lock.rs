//! A lock file that one living process holds.

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use rustix::fs::{FlockOperation, flock};

/// A lock held; dropping it removes the file, and the folder if nothing else is in it.
#[derive(Debug)]
pub(super) struct Lock {
    folder: PathBuf,
    path: PathBuf,
    _file: File,
}

impl Lock {
    /// Takes `<folder>/<name>.lock`, making the folder if need be; `None` if somebody holds it.
    pub(super) fn take(folder: &Path, name: &str) -> io::Result<Option<Self>> {
        let path = folder.join(format!("{name}.lock"));
        // An owner that ends may remove the file, or the folder, between any two of our steps.
        for _ in 0..100 {
            DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
            let opened = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .open(&path);
            let file = match opened {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                result => result?,
            };
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
                result => result?,
            }
            let ours = file.metadata()?.ino();
            if fs::metadata(&path).is_ok_and(|now| now.ino() == ours) {
                return Ok(Some(Self { folder: folder.to_owned(), path, _file: file }));
            }
        }
        Err(io::Error::new(io::ErrorKind::ResourceBusy, "the lock file keeps vanishing"))
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
        let _ = fs::remove_dir(&self.folder);
    }
}
