//! Opens files whose folder belongs to somebody else, who may put something else in their place.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read},
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

/// The treatment of a symbolic link at the end of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Links {
    Follow,
    Refuse,
}

/// Opens the regular file at `path` for reading. It never waits for the writer of a pipe.
pub(crate) fn open(path: &Path, links: Links) -> io::Result<File> {
    let flags = if links == Links::Follow { 0 } else { libc::O_NOFOLLOW };
    let file = OpenOptions::new().read(true).custom_flags(flags | libc::O_NONBLOCK).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is no regular file"));
    }
    Ok(file)
}

/// The first `max` bytes of the regular file at `path`.
pub(crate) fn read(path: &Path, links: Links, max: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path, links)?.take(max).read_to_end(&mut bytes)?;
    Ok(bytes)
}
