//! Notices that files were replaced or written (inotify(7)).
//!
//! In: paths of files, which need not exist yet. Out: which of them may have changed. Always holds: the
//! folders of the files are watched, because a file that is replaced is another one; what is not one of the
//! files is not reported.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsString,
    fs, io,
    mem::MaybeUninit,
    os::{fd::OwnedFd, unix::ffi::OsStringExt},
    path::{Path, PathBuf},
};

use rustix::{
    fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags},
    io::Errno,
};

/// Bytes of events that are read at once: some dozens. More: memory; fewer: more system calls.
const READ_BYTES: usize = 4096;

/// The files that are watched.
#[derive(Debug)]
pub struct FileWatch {
    inotify: OwnedFd,
    files: Vec<Watched>,
    /// The folders that are watched, which this process may not open any more after it has left root.
    folders: BTreeMap<PathBuf, i32>,
}

#[derive(Debug)]
struct Watched {
    /// As the caller names it.
    file: PathBuf,
    folder: i32,
    name: OsString,
}

impl FileWatch {
    /// Watches these files.
    ///
    /// # Errors
    /// If a folder does not exist, or the kernel has no watch left.
    pub fn new(files: impl IntoIterator<Item = PathBuf>) -> io::Result<Self> {
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        let mut folders = BTreeMap::new();
        let files = watch(&inotify, files, &mut folders)?;
        Ok(Self { inotify, files, folders })
    }

    /// Watches these files instead, with the same descriptor.
    ///
    /// # Errors
    /// As those of [`Self::new`]; then the files before stay.
    pub fn replace(&mut self, files: impl IntoIterator<Item = PathBuf>) -> io::Result<()> {
        // Folders that none of the files is in stay watched: their events are about no file.
        self.files = watch(&self.inotify, files, &mut self.folders)?;
        Ok(())
    }

    /// The files that may have changed since the last call, each once. Does not block.
    pub fn changed(&mut self) -> BTreeSet<PathBuf> {
        let mut changed = BTreeSet::new();
        let mut buffer = [MaybeUninit::uninit(); READ_BYTES];
        let mut reader = Reader::new(&self.inotify, &mut buffer);
        while let Ok(event) = reader.next() {
            if event.events().contains(ReadFlags::QUEUE_OVERFLOW) {
                changed.extend(self.files.iter().map(|watched| watched.file.clone()));
                continue;
            }
            let Some(name) = event.file_name().map(|name| OsString::from_vec(name.to_bytes().to_vec()))
            else {
                continue;
            };
            let is_it = |watched: &&Watched| watched.folder == event.wd() && watched.name == name;
            changed.extend(self.files.iter().filter(is_it).map(|watched| watched.file.clone()));
        }
        changed
    }
}

fn watch(
    inotify: &OwnedFd,
    files: impl IntoIterator<Item = PathBuf>,
    folders: &mut BTreeMap<PathBuf, i32>,
) -> io::Result<Vec<Watched>> {
    let mut watched = Vec::new();
    for file in files {
        let absolute = std::path::absolute(&file)?;
        // A link may lead elsewhere, and what it leads to may be replaced: both folders count.
        let real = fs::canonicalize(&absolute).ok();
        let targets = [Some(absolute.as_path()), real.as_deref().filter(|real| *real != absolute)];
        for target in targets.into_iter().flatten() {
            let folder = target.parent().unwrap_or_else(|| Path::new("/"));
            // Not when it is made: its content comes later.
            let flags = WatchFlags::CLOSE_WRITE | WatchFlags::MOVED_TO | WatchFlags::ATTRIB;
            let number = match (inotify::add_watch(inotify, folder, flags), folders.get(folder)) {
                (Err(Errno::ACCESS), Some(number)) => *number,
                (added, _) => added?,
            };
            folders.insert(folder.to_owned(), number);
            let name = target.file_name().unwrap_or_default().to_owned();
            watched.push(Watched { file: file.clone(), folder: number, name });
        }
    }
    Ok(watched)
}

crate::as_fd!(FileWatch, inotify);

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_file_that_is_written_replaced_or_made_is_reported_and_no_other() {
        let home = tempfile::tempdir().unwrap();
        let [users, config] = ["users.toml", "server.toml"].map(|name| home.path().join(name));
        fs::write(&users, "1").unwrap();
        let mut watch = FileWatch::new([users.clone(), config.clone()]).unwrap();
        assert_eq!(watch.changed(), BTreeSet::new());
        fs::write(home.path().join("other"), "1").unwrap();
        assert_eq!(watch.changed(), BTreeSet::new());
        fs::write(&users, "2").unwrap();
        assert_eq!(watch.changed(), BTreeSet::from([users.clone()]));
        fs::rename(home.path().join("other"), &users).unwrap();
        fs::write(&config, "made").unwrap();
        assert_eq!(watch.changed(), BTreeSet::from([users, config]));
        assert_eq!(watch.changed(), BTreeSet::new());
    }

    #[test]
    fn what_a_link_leads_to_is_watched() {
        let home = tempfile::tempdir().unwrap();
        let (real, link) = (home.path().join("real/users.toml"), home.path().join("users.toml"));
        fs::create_dir(home.path().join("real")).unwrap();
        fs::write(&real, "1").unwrap();
        symlink(&real, &link).unwrap();
        let mut watch = FileWatch::new([link.clone()]).unwrap();
        fs::write(&real, "2").unwrap();
        assert_eq!(watch.changed(), BTreeSet::from([link]));
    }

    #[test]
    fn other_files_are_watched_from_then_on() {
        let home = tempfile::tempdir().unwrap();
        let [old, new] = ["old.toml", "new.toml"].map(|name| home.path().join(name));
        let mut watch = FileWatch::new([old.clone()]).unwrap();
        assert!(watch.replace(["/no/such/file".into()]).is_err());
        fs::write(&old, "1").unwrap();
        assert_eq!(watch.changed(), BTreeSet::from([old.clone()]), "the files before stay");
        watch.replace([new.clone()]).unwrap();
        for file in [&old, &new] {
            fs::write(file, "2").unwrap();
        }
        assert_eq!(watch.changed(), BTreeSet::from([new]));
    }

    #[test]
    fn a_missing_folder_is_an_error() {
        assert_eq!(FileWatch::new(["/no/such/file".into()]).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
