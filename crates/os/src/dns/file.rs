//! Rewrites a small text file (`/etc/resolv.conf`) while a tunnel is up, and restores it.
//!
//! In: the path and the new text. Out: a [`FileRewrite`] for the journal, which is applied and reverted.
//! Always holds: a symbolic link is replaced by a regular file, because its target belongs to another
//! program; a regular file is written in place, because a file that is a mount of its own (as `ip netns exec`
//! and containers make it) cannot be replaced, and because it keeps its owner, mode and security label this
//! way.

use std::{
    fs,
    io::{self, Read, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt, symlink},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::{HEADER, RESOLV_CONF, Request, parse};
use crate::{
    error::OsError,
    helper,
    undo::{Owners, namespace_folder, original},
};

/// The folder of named network namespaces (ip-netns(8)).
const NETNS_FOLDER: &str = "/run/netns";
/// Longest file that is read, in bytes. Real files have less than 1 KiB; the journal stores the whole text,
/// so a larger limit lets the journal grow, and a smaller one might refuse a file with many comments.
const MAX_FILE_BYTES: u64 = 64 << 10;

/// The content of a path before the rewrite. Journals on disk have the names of the variants.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum PreviousContent {
    /// Nothing.
    Nothing,
    /// A file with this text.
    Text(String),
    /// A symbolic link to this path.
    Link(PathBuf),
}

/// The replacement of a file's text.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct FileRewrite {
    path: PathBuf,
    before: PreviousContent,
    set: String,
}

/// Plans the rewrite after which `path` has the text `set`.
pub(super) fn plan(path: &Path, set: &str) -> Result<FileRewrite, OsError> {
    let failed = |error| OsError::kernel("read", path.display(), error);
    let is_link = fs::symlink_metadata(path).is_ok_and(|found| found.is_symlink());
    let real = fs::canonicalize(path).ok();
    let own_mount = real.as_deref().filter(|real| is_mount_point(real));
    if own_mount.is_none() && is_in_namespace_of_machine() {
        return Err(OsError::SharedResolvConf { path: path.to_owned() });
    }
    let rewrite = |path: &Path, before| FileRewrite { path: path.to_owned(), before, set: set.to_owned() };
    Ok(match (own_mount, is_link) {
        (Some(real), _) => rewrite(real, PreviousContent::Text(read(real).map_err(failed)?)),
        (None, true) => rewrite(path, PreviousContent::Link(fs::read_link(path).map_err(failed)?)),
        (None, false) if real.is_none() => rewrite(path, PreviousContent::Nothing),
        (None, false) => rewrite(path, PreviousContent::Text(read(path).map_err(failed)?)),
    })
}

/// Writes the new text.
pub(crate) fn apply(rewrite: &FileRewrite, owners: &Owners) -> Result<(), OsError> {
    let set = PreviousContent::Text(rewrite.set.clone());
    owners.claim(&rewrite.key(), &rewrite.before, &set, || change(Request::Write(parse(&rewrite.set))))
}

/// Puts back the text of another instance that still runs, or else what was there before all of them; nothing
/// where a later instance, or another program, has changed the file since.
pub(crate) fn revert(rewrite: &FileRewrite, owners: &Owners) -> Result<(), OsError> {
    let set = PreviousContent::Text(rewrite.set.clone());
    owners.release(&rewrite.key(), &rewrite.before, &set, |before| {
        let of_other_instance = match before {
            PreviousContent::Text(text) if text.starts_with(HEADER) => parse(text),
            _ => Vec::new(),
        };
        change(Request::Restore(of_other_instance))
    })
}

fn change(request: Request) -> Result<(), OsError> {
    helper::change_name_servers(&request)
        .map_err(|why| OsError::kernel("change", RESOLV_CONF, io::Error::other(why)))
}

impl FileRewrite {
    fn key(&self) -> String {
        key(&self.path)
    }

    /// The content of the file at the time of planning.
    pub(super) fn previous(&self) -> &PreviousContent {
        &self.before
    }

    /// The text that was there, if it was a file.
    pub(super) fn previous_text(&self) -> Option<&str> {
        match &self.before {
            PreviousContent::Text(text) => Some(text),
            PreviousContent::Nothing | PreviousContent::Link(_) => None,
        }
    }

    /// The same with another text.
    pub(super) fn with_new_text(&self, set: &str) -> Self {
        Self { set: set.to_owned(), ..self.clone() }
    }
}

/// The name of a file among the settings that have several owners.
pub(super) fn key(path: &Path) -> String {
    format!("file {}", path.display())
}

/// Writes the new text, in this process.
pub(super) fn write(rewrite: &FileRewrite) -> Result<(), OsError> {
    let FileRewrite { path, before, set } = rewrite;
    let written = match before {
        PreviousContent::Text(_) => write_in_place(path, set),
        PreviousContent::Nothing | PreviousContent::Link(_) => replace(path, |draft| {
            let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o644).open(draft)?;
            file.write_all(set.as_bytes())
        }),
    };
    written.map_err(|error| OsError::kernel("write", path.display(), error))
}

/// Puts `before` back, in this process, unless another program has changed the file since.
pub(super) fn restore(rewrite: &FileRewrite, before: &PreviousContent) -> Result<(), OsError> {
    let FileRewrite { path, set, .. } = rewrite;
    // A process killed between creating the draft and renaming it leaves the draft.
    let _ = fs::remove_file(draft_of(path));
    let now = current_content(path);
    let is_ours = match (&now, before) {
        (PreviousContent::Text(now), PreviousContent::Text(before)) => {
            now == set || is_torn(now, before, set) || is_torn(now, set, before)
        }
        (PreviousContent::Text(now), _) => now == set,
        _ => false,
    };
    if !is_ours {
        if now != *before {
            tracing::warn!(
                file = %path.display(),
                "another program has changed the name servers since the tunnel came up: the file stays as it is"
            );
        }
        return Ok(());
    }
    let written = match before {
        PreviousContent::Nothing => fs::remove_file(path),
        PreviousContent::Text(text) => write_in_place(path, text),
        PreviousContent::Link(target) => replace(path, |draft| symlink(target, draft)),
    };
    written.map_err(|error| OsError::kernel("put back", path.display(), error))
}

/// The text of `path` as it was before all instances of this network namespace that have rewritten it.
pub(super) fn text_before_instances(base: &Path, path: &Path) -> Option<String> {
    let real = fs::canonicalize(path).ok()?;
    let namespace = namespace_folder(base).ok()?;
    let before = [path, &real].into_iter().find_map(|path| original(&namespace, &key(path)))?;
    match before {
        PreviousContent::Nothing => None,
        PreviousContent::Text(text) => Some(text),
        PreviousContent::Link(target) => read(&path.parent()?.join(target)).ok(),
    }
}

/// Whether `now` is an incomplete rewrite: `new` written over the beginning of `old` without the truncation
/// that follows. A process that is killed between the two system calls leaves this.
fn is_torn(now: &str, old: &str, new: &str) -> bool {
    now.strip_prefix(new).is_some_and(|rest| old.get(new.len()..) == Some(rest))
}

fn current_content(path: &Path) -> PreviousContent {
    match fs::symlink_metadata(path) {
        Ok(found) if found.is_symlink() => {
            fs::read_link(path).map_or(PreviousContent::Nothing, PreviousContent::Link)
        }
        _ => read(path).map_or(PreviousContent::Nothing, PreviousContent::Text),
    }
}

/// Reads a file of at most [`MAX_FILE_BYTES`].
pub(super) fn read(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    fs::File::open(path)?.take(MAX_FILE_BYTES + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MAX_FILE_BYTES {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the file is longer than 64 KiB"));
    }
    Ok(text)
}

/// Overwrites the file with one write and one truncation, so that a concurrent reader never sees an empty
/// file.
fn write_in_place(path: &Path, text: &str) -> io::Result<()> {
    let mut file = fs::OpenOptions::new().write(true).open(path)?;
    file.write_all(text.as_bytes())?;
    file.set_len(text.len() as u64)
}

/// Creates a file or link under another name, then renames it to `path`.
fn replace(path: &Path, create: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    let draft = draft_of(path);
    let _ = fs::remove_file(&draft);
    let created = create(&draft).and_then(|()| fs::rename(&draft, path));
    created.inspect_err(|_| drop(fs::remove_file(&draft)))
}

fn draft_of(path: &Path) -> PathBuf {
    path.with_extension("mpvpn")
}

fn is_mount_point(path: &Path) -> bool {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    mount_points(&mounts).any(|point| Path::new(&point) == path)
}

/// The fifth field of each line (proc(5)); space, tab, newline and backslash are escaped as octal numbers.
fn mount_points(mountinfo: &str) -> impl Iterator<Item = String> {
    let unescape = |field: &str| {
        let codes = [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")];
        codes.iter().fold(field.to_owned(), |text, (code, character)| text.replace(code, character))
    };
    mountinfo.lines().filter_map(|line| line.split(' ').nth(4)).map(unescape)
}

/// Whether this thread is in another network namespace than the machine's first process, but sees the same
/// files.
fn is_in_namespace_of_machine() -> bool {
    let id = |path: &Path| fs::metadata(path).ok().map(|found| (found.dev(), found.ino()));
    let own = id(Path::new("/proc/thread-self/ns/net"));
    match id(Path::new("/proc/1/ns/net")) {
        // In a container process 1, or its root folder, differs from the machine's.
        first @ Some(_) => own != first && id(Path::new("/")) == id(Path::new("/proc/1/root/")),
        // Without privilege /proc/1/ns cannot be read; the named namespaces are known all the same
        // (ip-netns(8)).
        None => {
            let mut named = fs::read_dir(NETNS_FOLDER).into_iter().flatten().flatten();
            named.any(|entry| id(&entry.path()) == own)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder that is removed when the test ends.
    struct Folder(PathBuf);

    impl Folder {
        fn new(test: &str) -> Self {
            let path = std::env::temp_dir().join(format!("mpvpn-dns-{test}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }

        fn file(&self) -> PathBuf {
            self.0.join("resolv.conf")
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    const OLD: &str = "nameserver 192.0.2.1\nsearch example\noptions edns0 trust-ad\n";
    const NEW: &str = "nameserver 10.0.0.1\n";

    #[test]
    fn a_file_is_written_in_place_and_put_back() {
        let folder = Folder::new("file");
        let path = folder.file();
        fs::write(&path, OLD).unwrap();
        let inode = fs::metadata(&path).unwrap().ino();
        let rewrite = plan(&path, NEW).unwrap();
        write(&rewrite).unwrap();
        assert_eq!(read(&path).unwrap(), NEW);
        restore(&rewrite, &rewrite.before).unwrap();
        assert_eq!((read(&path).unwrap(), fs::metadata(&path).unwrap().ino()), (OLD.to_owned(), inode));
        restore(&rewrite, &rewrite.before).unwrap();
        assert_eq!(read(&path).unwrap(), OLD, "reverting twice changes nothing");
    }

    #[test]
    fn a_link_is_replaced_and_its_target_is_left_alone() {
        let folder = Folder::new("link");
        let path = folder.file();
        fs::write(folder.0.join("stub"), OLD).unwrap();
        symlink("stub", &path).unwrap();
        let rewrite = plan(&path, NEW).unwrap();
        write(&rewrite).unwrap();
        assert_eq!((read(&path).unwrap(), read(&folder.0.join("stub")).unwrap()), (NEW.into(), OLD.into()));
        restore(&rewrite, &rewrite.before).unwrap();
        assert_eq!(fs::read_link(&path).unwrap(), Path::new("stub"));
        assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 2, "a draft was left behind");
    }

    #[test]
    fn a_file_that_did_not_exist_is_removed() {
        let folder = Folder::new("nothing");
        let rewrite = plan(&folder.file(), NEW).unwrap();
        write(&rewrite).unwrap();
        assert_eq!(read(&folder.file()).unwrap(), NEW);
        restore(&rewrite, &rewrite.before).unwrap();
        assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 0);
    }

    #[test]
    fn a_change_by_another_program_stays() {
        let folder = Folder::new("else");
        let path = folder.file();
        for before in [
            PreviousContent::Nothing,
            PreviousContent::Text(OLD.into()),
            PreviousContent::Link("stub".into()),
        ] {
            let rewrite = FileRewrite { path: path.clone(), before, set: NEW.into() };
            fs::write(&path, "nameserver 9.9.9.9\n").unwrap();
            restore(&rewrite, &rewrite.before).unwrap();
            assert_eq!(read(&path).unwrap(), "nameserver 9.9.9.9\n");
        }
    }

    #[test]
    fn a_process_that_was_killed_at_any_point_leaves_nothing_behind() {
        let folder = Folder::new("killed");
        let path = folder.file();
        for (old, new) in [(OLD, NEW), (NEW, OLD)] {
            let rewrite = FileRewrite {
                path: path.clone(),
                before: PreviousContent::Text(old.into()),
                set: new.into(),
            };
            let over = |old: &str, new: &str| format!("{new}{}", old.get(new.len()..).unwrap_or_default());
            for left in [old.to_owned(), over(old, new), new.to_owned(), over(new, old)] {
                fs::write(&path, &left).unwrap();
                restore(&rewrite, &rewrite.before).unwrap();
                assert_eq!(read(&path).unwrap(), old, "{left:?} was left");
            }
        }
    }

    #[test]
    fn escaped_characters_of_mount_points_are_decoded() {
        let text = "22 1 0:5 / /proc rw - proc proc rw\n23 1 0:6 /x /etc/my\\040file\\134 rw - ext4 /dev/a rw\n\n1 2\n";
        assert_eq!(mount_points(text).collect::<Vec<_>>(), ["/proc", "/etc/my file\\"]);
        assert!(is_mount_point(Path::new("/proc")));
        assert!(!is_mount_point(Path::new("/proc/self/status")));
    }
}
