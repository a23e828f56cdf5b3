//! Reading of bounded files, and writing of files with secrets: atomically, and with mode 0600 from the
//! beginning.

use std::{
    fs,
    io::{self, Read, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::OnceLock,
};

use rustix::fs::{Mode, OFlags};
use toml_edit::DocumentMut;

use crate::{
    Error, Result,
    groups::{self, ADMINISTRATORS},
};

/// Largest file that is read (bytes): a users' file with 10,000 users has 1.2 MB. A larger limit lets a wrong
/// path, as `/dev/zero`, fill memory.
const MAX_FILE_BYTES: u64 = 4 << 20;

/// Reads a whole file.
pub type ReadFile = fn(&Path) -> io::Result<Vec<u8>>;

/// The reader of files that this process may not read.
static READER: OnceLock<ReadFile> = OnceLock::new();

/// Makes `reader` read the files that this process may not read, from now on.
pub fn read_by(reader: ReadFile) {
    let _ = READER.set(reader);
}

/// Whether something is at `path`, or might be: where this process may not look, another one reads.
pub fn may_exist(path: &Path) -> bool {
    path.try_exists().unwrap_or(true)
}

/// The whole text of `path`.
pub fn read_text(path: &Path) -> Result<String> {
    let bytes = read(path)?;
    String::from_utf8(bytes).map_err(|_| Error::content(path, "text in UTF-8", "other bytes"))
}

/// The TOML in `path`, whose comments stay when it is changed; that of `new` if there is no such file.
pub fn read_toml(path: &Path, new: &str, expected: &'static str) -> Result<DocumentMut> {
    let text = if path.exists() { read_text(path)? } else { new.to_owned() };
    text.parse::<DocumentMut>().map_err(|error| Error::content(path, expected, error))
}

/// The whole content of `path`, at most `MAX_FILE_BYTES` bytes.
pub fn read(path: &Path) -> Result<Vec<u8>> {
    read_up_to(path, MAX_FILE_BYTES)
}

/// The whole content of `path`, at most `limit` bytes.
pub fn read_up_to(path: &Path, limit: u64) -> Result<Vec<u8>> {
    let error = || Error::file("read", path);
    let bytes = match fs::File::open(path) {
        Ok(file) => {
            let mut bytes = Vec::new();
            file.take(limit + 1).read_to_end(&mut bytes).map(|_| bytes)
        }
        // An error of the other process is about its own rights, and means less to people than the refusal
        // itself.
        Err(refused) if refused.kind() == io::ErrorKind::PermissionDenied => {
            READER.get().ok_or(()).and_then(|read| read(path).map_err(drop)).map_err(|()| refused)
        }
        Err(error) => Err(error),
    }
    .map_err(error())?;
    if bytes.len() as u64 > limit {
        let expected = if limit == MAX_FILE_BYTES { "at most 4 MiB" } else { "at most 128 MiB" };
        return Err(Error::content(path, expected, "more than that"));
    }
    Ok(bytes)
}

/// The result of reading a file; `None` if there is no such file.
pub fn if_present<T>(read: Result<T>) -> Result<Option<T>> {
    match read {
        Err(Error::File { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(None),
        read => read.map(Some),
    }
}

/// Reads a file with a secret, and warns if other users can read it, too.
pub fn read_secret(path: &Path) -> Result<Vec<u8>> {
    let bytes = read(path)?;
    if fs::metadata(path).is_ok_and(|meta| meta.mode() & 0o077 != 0) {
        tracing::warn!(
            "other users of this machine can read the secret in {0}: run `chmod 600 {0}`",
            path.display()
        );
    }
    Ok(bytes)
}

/// Creates `dir` and its parents with mode 0700; an existing folder stays as it is. In a folder of another
/// user, root makes folders of that user.
///
/// # Errors
/// If it cannot be created.
pub fn create_private_dir(dir: &Path) -> Result<()> {
    create_dirs(dir).map_err(Error::file("create", dir))
}

fn create_dirs(dir: &Path) -> io::Result<()> {
    if dir.as_os_str().is_empty() || dir.is_dir() {
        return Ok(());
    }
    dir.parent().map_or(Ok(()), create_dirs)?;
    match fs::DirBuilder::new().mode(0o700).create(dir) {
        // Another process was quicker.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && dir.is_dir() => return Ok(()),
        done => done?,
    }
    // The owner of the folder above must not be able to put a link to another folder into its place.
    let flags = OFlags::NOFOLLOW | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let new = rustix::fs::open(dir, flags, Mode::empty())?;
    give_to_owner_of_folder(dir, &new.into())
}

/// Writes `content` to `path` atomically: after a crash the file is the old one or the new one. A new file
/// has mode 0600; a file that exists keeps its mode, and, if root writes it, its owner; a new one of root
/// belongs to the owner of the folder.
pub fn write_secret(path: &Path, content: &[u8]) -> Result<()> {
    let temporary = temporary(path);
    let written = write_beside(path, &temporary, content).and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    written.map_err(Error::file("write", path))
}

/// Writes several files as [`write_secret`] does, and makes their folders. None is replaced before all are
/// written.
pub fn write_secrets<'a>(all: impl Iterator<Item = (PathBuf, &'a [u8])>) -> Result<()> {
    let mut written = Vec::new();
    let mut write = |path: PathBuf, content: &[u8]| {
        if let Some(folder) = path.parent() {
            create_private_dir(folder)?;
        }
        let temporary = temporary(&path);
        written.push((temporary.clone(), path.clone()));
        write_beside(&path, &temporary, content).map_err(Error::file("write", path))
    };
    let all = all.map(|(path, content)| write(path, content)).collect::<Result<Vec<()>>>();
    if let Err(error) = all {
        written.iter().for_each(|(temporary, _)| drop(fs::remove_file(temporary)));
        return Err(error);
    }
    written
        .iter()
        .try_for_each(|(temporary, path)| fs::rename(temporary, path).map_err(Error::file("write", path)))
}

/// The name under which a new content of `path` is written first.
fn temporary(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.new", std::process::id()));
    path.with_file_name(name)
}

fn write_beside(path: &Path, temporary: &Path, content: &[u8]) -> io::Result<()> {
    write_new(temporary, content).and_then(|file| keep_owner_and_mode(path, &file))
}

/// Opens `path` for a lock; a new file has mode 0600 and no content.
pub fn open_private(path: &Path) -> Result<fs::File> {
    let mut options = fs::OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    options.open(path).map_err(Error::file("open", path))
}

/// Writes a configuration file, as [`write_secret`] does. A new one is for root and the members of the group
/// `mpvpn-admin`, to which the services belong, if there is one; everybody may list a new folder, and read no
/// file in it.
pub fn write_config(path: &Path, text: &str) -> Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(Error::file("create", folder))?;
    }
    let is_new = !path.exists();
    write_secret(path, text.as_bytes())?;
    if is_new { allow_administrators(path) } else { Ok(()) }
}

/// Renames a file that cannot be understood to `*.EXTENSION.bad`, in place of an earlier one. Returns its new
/// name.
pub fn move_away(path: &Path) -> Result<PathBuf> {
    let mut name = path.as_os_str().to_owned();
    name.push(".bad");
    let bad = PathBuf::from(name);
    fs::rename(path, &bad).map_err(Error::file("move away", path))?;
    Ok(bad)
}

/// `content` as JSON, for the file `path`.
pub fn json(path: &Path, content: &impl serde::Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec(content).map_err(|error| Error::content(path, "what can be written as JSON", error))
}

/// Gives `new` the owner and the mode of the file that it is about to replace. If there is none, and root
/// writes into the folder of another user, it is that user's: a service that is not root must read what
/// root's commands make in its state folder.
fn keep_owner_and_mode(replaced: &Path, new: &fs::File) -> io::Result<()> {
    let old = match fs::metadata(replaced) {
        Ok(old) => old,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return give_to_owner_of_folder(replaced, new);
        }
        Err(error) => return Err(error),
    };
    let is_other = |new: fs::Metadata| (new.uid(), new.gid()) != (old.uid(), old.gid());
    if new.metadata().is_ok_and(is_other) {
        match std::os::unix::fs::fchown(new, Some(old.uid()), Some(old.gid())) {
            // Another user than root, who may write into the folder.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
            done => done?,
        }
    }
    new.set_permissions(fs::Permissions::from_mode(old.mode() & 0o777))
}

fn give_to_owner_of_folder(path: &Path, new: &fs::File) -> io::Result<()> {
    let folder = fs::metadata(
        path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new(".")),
    )?;
    let own = new.metadata()?;
    if own.uid() != 0 || folder.uid() == 0 {
        return Ok(());
    }
    match std::os::unix::fs::fchown(new, Some(folder.uid()), Some(folder.gid())) {
        // Root has given up that right.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
        done => done,
    }
}

/// Lets the members of the group [`ADMINISTRATORS`] read `path`, if there is such a group.
fn allow_administrators(path: &Path) -> Result<()> {
    let Some(id) = groups::id(ADMINISTRATORS) else { return Ok(()) };
    std::os::unix::fs::chown(path, None, Some(id))
        .and_then(|()| fs::set_permissions(path, fs::Permissions::from_mode(0o640)))
        .map_err(Error::file("change the owner of", path))
}

fn write_new(path: &Path, content: &[u8]) -> io::Result<fs::File> {
    // A temporary file that a crashed process with the same process ID left behind would keep its own mode.
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(content)?;
    file.sync_all()?;
    Ok(file)
}

/// Locks `dir` until dropped (flock(2)), waiting for other processes: of two processes that start together,
/// only one creates the missing files.
pub fn lock_dir(dir: &Path) -> Result<fs::File> {
    let folder = fs::File::open(dir).map_err(Error::file("open", dir))?;
    rustix::fs::flock(&folder, rustix::fs::FlockOperation::LockExclusive)
        .map_err(|errno| Error::file("lock", dir)(errno.into()))?;
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_in_the_folder_of_another_user_are_that_users() {
        let top = tempfile::tempdir().unwrap();
        let dir = top.path().join("state/second");
        create_private_dir(&dir).unwrap();
        create_private_dir(&dir).unwrap();
        assert_eq!(fs::metadata(&dir).unwrap().mode() & 0o777, 0o700);
        let Ok(()) = std::os::unix::fs::chown(top.path(), Some(1234), Some(1235)) else {
            eprintln!("skipped: only root makes folders for others");
            return;
        };
        let dir = top.path().join("others/second");
        create_private_dir(&dir).unwrap();
        for folder in [dir.parent().unwrap(), &dir] {
            let about = fs::metadata(folder).unwrap();
            assert_eq!((about.uid(), about.gid()), (1234, 1235), "{}", folder.display());
        }
    }
}
