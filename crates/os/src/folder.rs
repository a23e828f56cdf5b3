//! Opens files below one folder for paths that come from the network (a website).
//!
//! In: a folder, and the path of a file in it. Out: the open file. Always holds: the kernel itself confines
//! the lookup to the folder (`openat2` with RESOLVE_BENEATH), so neither `..` nor a symbolic link leads out
//! of it, even if a link is replaced during the lookup; only regular files are returned.

use std::{
    fs::{File, Metadata},
    io,
    path::{Path, PathBuf},
};

use rustix::fs::{Mode, OFlags, ResolveFlags};

/// The path of a folder. It is opened again for each file, so the folder may be replaced while the process
/// runs.
#[derive(Clone, Debug)]
pub struct Folder(PathBuf);

/// The object at a path.
#[derive(Debug)]
pub enum Entry {
    /// A regular file.
    File(File, Metadata),
    /// A folder.
    Folder,
}

impl Folder {
    /// The folder at `path`.
    ///
    /// # Errors
    /// If it cannot be opened, or is none.
    pub fn new(path: &Path) -> io::Result<Self> {
        let folder = Self(path.into());
        folder.open()?;
        Ok(folder)
    }

    fn open(&self) -> io::Result<File> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(rustix::fs::open(&self.0, flags, Mode::empty())?.into())
    }

    /// Opens `path`, which is relative to the folder. Blocks while the disk does.
    ///
    /// # Errors
    /// If nothing exists there, the path leads out of the folder, this process may not read it, or it is
    /// neither a regular file nor a folder.
    pub fn entry(&self, path: &Path) -> io::Result<Entry> {
        let beneath = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        // Without NONBLOCK, opening a named pipe for reading would wait for a writer.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let file: File = rustix::fs::openat2(self.open()?, path, flags, Mode::empty(), beneath)?.into();
        let metadata = file.metadata()?;
        match metadata.file_type() {
            kind if kind.is_file() => Ok(Entry::File(file, metadata)),
            kind if kind.is_dir() => Ok(Entry::Folder),
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, io::Read, os::unix::fs::symlink};

    use super::*;

    #[test]
    fn nothing_outside_of_the_folder_is_found() {
        let home = tempfile::tempdir().unwrap();
        let root = home.path().join("www");
        fs::create_dir_all(root.join("sub")).unwrap();
        fs::write(home.path().join("secret"), "secret").unwrap();
        fs::write(root.join("page"), "page").unwrap();
        symlink("../secret", root.join("out")).unwrap();
        symlink(home.path().join("secret"), root.join("absolute")).unwrap();
        symlink("page", root.join("inside")).unwrap();
        symlink("/proc/self/root", root.join("magic")).unwrap();
        let folder = Folder::new(&root).unwrap();
        let read = |path: &str| match folder.entry(Path::new(path)) {
            Ok(Entry::File(mut file, _)) => {
                let mut text = String::new();
                file.read_to_string(&mut text).unwrap();
                Some(text)
            }
            _ => None,
        };
        assert_eq!(read("page").as_deref(), Some("page"));
        assert_eq!(read("inside").as_deref(), Some("page"));
        assert_eq!(read("sub/../page").as_deref(), Some("page"));
        for path in
            ["out", "absolute", "../secret", "sub/../../secret", "/etc/passwd", "magic/etc/passwd", "no"]
        {
            assert_eq!(read(path), None, "{path}");
        }
        assert!(matches!(folder.entry(Path::new("sub")), Ok(Entry::Folder)));
        Folder::new(&root.join("page")).unwrap_err();
    }
}
