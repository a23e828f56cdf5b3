//! Files with secrets: made whole or not at all, and never readable by others, not even for a moment.

use std::{
    fs,
    io::{Read, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::Path,
};

use crate::{Error, Result};

/// No file that we read is larger than this, in bytes.
const MAX_FILE_BYTES: u64 = 4 << 20;

/// The whole text of `path`.
pub(crate) fn read_text(path: &Path) -> Result<String> {
    let bytes = read(path)?;
    String::from_utf8(bytes).map_err(|_| Error::Content {
        path: path.into(),
        expected: "text in UTF-8",
        found: "other bytes".into(),
    })
}

/// The whole content of `path`, at most [`MAX_FILE_BYTES`] bytes.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>> {
    let error = || Error::file("read", path);
    let file = fs::File::open(path).map_err(error())?;
    let mut bytes = Vec::new();
    file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes).map_err(error())?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(Error::Content {
            path: path.into(),
            expected: "at most 4 MiB",
            found: "more than that".into(),
        });
    }
    Ok(bytes)
}

/// A secret from a file; warns when other users can read it too.
pub(crate) fn read_secret(path: &Path) -> Result<Vec<u8>> {
    let bytes = read(path)?;
    if fs::metadata(path).is_ok_and(|meta| meta.mode() & 0o077 != 0) {
        tracing::warn!(
            "other users of this machine can read the secret in {0}: run `chmod 600 {0}`",
            path.display()
        );
    }
    Ok(bytes)
}

/// Makes `dir` and its parents, for this user only; a folder that is there stays as it is.
pub(crate) fn create_private_dir(dir: &Path) -> Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(Error::file("create", dir))
}

/// Puts `content` at `path` with mode 0600: after a crash the file is the old one or the new one.
pub(crate) fn write_secret(path: &Path, content: &[u8]) -> Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.new", std::process::id()));
    let temporary = path.with_file_name(name);
    let written = write_new(&temporary, content).and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    written.map_err(Error::file("write", path))
}

fn write_new(path: &Path, content: &[u8]) -> std::io::Result<()> {
    // A temporary that a crashed process of the same pid left would keep its own mode.
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(content)?;
    file.sync_all()
}

/// Holds `dir` for this process until dropped, so that two that start together do not both make what
/// is missing in it. Waits for the other.
pub(crate) fn lock_dir(dir: &Path) -> Result<fs::File> {
    let folder = fs::File::open(dir).map_err(Error::file("open", dir))?;
    rustix::fs::flock(&folder, rustix::fs::FlockOperation::LockExclusive)
        .map_err(|errno| Error::file("lock", dir)(errno.into()))?;
    Ok(folder)
}
