//! A small text file that is rewritten for a while.
//!
//! A symbolic link is replaced by a file of our own, because what it points to is somebody else's. Everything else is
//! written in place: a file that is a mount of its own (as `ip netns exec` and containers make it) cannot be replaced,
//! and a file keeps its owner, its mode and its label this way.

use std::{
    fs,
    io::{self, Read, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt, symlink},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::error::OsError;

/// Where network namespaces have names.
const NAMED: &str = "/run/netns";
/// Longest file that is read, in bytes.
const LONGEST: u64 = 64 << 10;

/// What was at a path.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) enum Before {
    /// Nothing.
    Nothing,
    /// A file with this text.
    Text(String),
    /// A symbolic link to this path.
    Link(PathBuf),
}

/// A file that gets another text.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Rewrite {
    path: PathBuf,
    before: Before,
    set: String,
}

/// What has to be done so that who reads `path` finds `set`.
pub(super) fn plan(path: &Path, set: &str) -> Result<Rewrite, OsError> {
    let failed = |error| OsError::kernel("read", path.display(), error);
    let is_link = fs::symlink_metadata(path).is_ok_and(|found| found.is_symlink());
    let real = fs::canonicalize(path).ok();
    let own_mount = real.as_deref().filter(|real| is_mount_point(real));
    if own_mount.is_none() && is_in_namespace_of_machine() {
        return Err(OsError::SharedResolvConf { path: path.to_owned() });
    }
    let rewrite = |path: &Path, before| Rewrite { path: path.to_owned(), before, set: set.to_owned() };
    Ok(match (own_mount, is_link) {
        (Some(real), _) => rewrite(real, Before::Text(read(real).map_err(failed)?)),
        (None, true) => rewrite(path, Before::Link(fs::read_link(path).map_err(failed)?)),
        (None, false) if real.is_none() => rewrite(path, Before::Nothing),
        (None, false) => rewrite(path, Before::Text(read(path).map_err(failed)?)),
    })
}

/// Makes the change.
pub(crate) fn make(rewrite: &Rewrite) -> Result<(), OsError> {
    let Rewrite { path, before, set } = rewrite;
    let written = match before {
        Before::Text(_) => write_in_place(path, set),
        Before::Nothing | Before::Link(_) => replace(path, |draft| {
            let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o644).open(draft)?;
            file.write_all(set.as_bytes())
        }),
    };
    written.map_err(|error| OsError::kernel("write", path.display(), error))
}

/// Takes it back, unless somebody else has changed the file since.
pub(crate) fn revert(rewrite: &Rewrite) -> Result<(), OsError> {
    let Rewrite { path, before, set } = rewrite;
    // A process that was killed between making and renaming it left it.
    let _ = fs::remove_file(draft_of(path));
    let now = look(path);
    let is_ours = match (&now, before) {
        (Before::Text(now), Before::Text(before)) => {
            now == set || is_torn(now, before, set) || is_torn(now, set, before)
        }
        (Before::Text(now), _) => now == set,
        _ => false,
    };
    if !is_ours {
        if now != *before {
            tracing::warn!(file = %path.display(), "somebody else has changed the name servers: they stay as they are");
        }
        return Ok(());
    }
    let written = match before {
        Before::Nothing => fs::remove_file(path),
        Before::Text(text) => write_in_place(path, text),
        Before::Link(target) => replace(path, |draft| symlink(target, draft)),
    };
    written.map_err(|error| OsError::kernel("put back", path.display(), error))
}

/// Whether `now` is what a process leaves that is killed after it has written `new` over `old`, and before it has cut
/// off the rest.
fn is_torn(now: &str, old: &str, new: &str) -> bool {
    now.strip_prefix(new).is_some_and(|rest| old.get(new.len()..) == Some(rest))
}

fn look(path: &Path) -> Before {
    match fs::symlink_metadata(path) {
        Ok(found) if found.is_symlink() => fs::read_link(path).map_or(Before::Nothing, Before::Link),
        _ => read(path).map_or(Before::Nothing, Before::Text),
    }
}

/// The text of a file.
pub(super) fn read(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    fs::File::open(path)?.take(LONGEST + 1).read_to_string(&mut text)?;
    if text.len() as u64 > LONGEST {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the file is too long"));
    }
    Ok(text)
}

/// One write, then one cut: never empty for who reads meanwhile.
fn write_in_place(path: &Path, text: &str) -> io::Result<()> {
    let mut file = fs::OpenOptions::new().write(true).open(path)?;
    file.write_all(text.as_bytes())?;
    file.set_len(text.len() as u64)
}

/// Makes something under another name and renames it.
fn replace(path: &Path, make: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    let draft = draft_of(path);
    let _ = fs::remove_file(&draft);
    let made = make(&draft).and_then(|()| fs::rename(&draft, path));
    made.inspect_err(|_| drop(fs::remove_file(&draft)))
}

fn draft_of(path: &Path) -> PathBuf {
    path.with_extension("mpvpn")
}

fn is_mount_point(path: &Path) -> bool {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    mount_points(&mounts).any(|point| Path::new(&point) == path)
}

/// The fifth field of each line (proc(5)), where space, tab, newline and backslash are octal numbers.
fn mount_points(mountinfo: &str) -> impl Iterator<Item = String> {
    let unescape = |field: &str| {
        let codes = [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")];
        codes.iter().fold(field.to_owned(), |text, (code, character)| text.replace(code, character))
    };
    mountinfo.lines().filter_map(|line| line.split(' ').nth(4)).map(unescape)
}

/// Whether this is a network namespace of its own, but with the files of the machine.
fn is_in_namespace_of_machine() -> bool {
    let id = |path: &Path| fs::metadata(path).ok().map(|found| (found.dev(), found.ino()));
    let own = id(Path::new("/proc/thread-self/ns/net"));
    match id(Path::new("/proc/1/ns/net")) {
        // A container has a first process, or files, of its own.
        first @ Some(_) => own != first && id(Path::new("/")) == id(Path::new("/proc/1/root/")),
        // Not everybody may look at it. Then those that have a name are known at least (ip-netns(8)).
        None => {
            let mut named = fs::read_dir(NAMED).into_iter().flatten().flatten();
            named.any(|entry| id(&entry.path()) == own)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder that goes when the test does.
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
        make(&rewrite).unwrap();
        assert_eq!(read(&path).unwrap(), NEW);
        revert(&rewrite).unwrap();
        assert_eq!((read(&path).unwrap(), fs::metadata(&path).unwrap().ino()), (OLD.to_owned(), inode));
        revert(&rewrite).unwrap();
        assert_eq!(read(&path).unwrap(), OLD, "twice is as good as once");
    }

    #[test]
    fn a_link_is_replaced_and_what_it_leads_to_is_left_alone() {
        let folder = Folder::new("link");
        let path = folder.file();
        fs::write(folder.0.join("stub"), OLD).unwrap();
        symlink("stub", &path).unwrap();
        let rewrite = plan(&path, NEW).unwrap();
        make(&rewrite).unwrap();
        assert_eq!((read(&path).unwrap(), read(&folder.0.join("stub")).unwrap()), (NEW.into(), OLD.into()));
        revert(&rewrite).unwrap();
        assert_eq!(fs::read_link(&path).unwrap(), Path::new("stub"));
        assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 2, "a draft was left behind");
    }

    #[test]
    fn where_nothing_was_nothing_is_left() {
        let folder = Folder::new("nothing");
        let rewrite = plan(&folder.file(), NEW).unwrap();
        make(&rewrite).unwrap();
        assert_eq!(read(&folder.file()).unwrap(), NEW);
        revert(&rewrite).unwrap();
        assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 0);
    }

    #[test]
    fn what_somebody_else_wrote_stays() {
        let folder = Folder::new("else");
        let path = folder.file();
        for before in [Before::Nothing, Before::Text(OLD.into()), Before::Link("stub".into())] {
            let rewrite = Rewrite { path: path.clone(), before, set: NEW.into() };
            fs::write(&path, "nameserver 9.9.9.9\n").unwrap();
            revert(&rewrite).unwrap();
            assert_eq!(read(&path).unwrap(), "nameserver 9.9.9.9\n");
        }
    }

    #[test]
    fn a_process_that_was_killed_at_any_point_leaves_nothing_behind() {
        let folder = Folder::new("killed");
        let path = folder.file();
        for (old, new) in [(OLD, NEW), (NEW, OLD)] {
            let rewrite = Rewrite { path: path.clone(), before: Before::Text(old.into()), set: new.into() };
            let over = |old: &str, new: &str| format!("{new}{}", old.get(new.len()..).unwrap_or_default());
            for left in [old.to_owned(), over(old, new), new.to_owned(), over(new, old)] {
                fs::write(&path, &left).unwrap();
                revert(&rewrite).unwrap();
                assert_eq!(read(&path).unwrap(), old, "{left:?} was left");
            }
        }
    }

    #[test]
    fn mount_points_are_read_with_their_strange_characters() {
        let text = "22 1 0:5 / /proc rw - proc proc rw\n23 1 0:6 /x /etc/my\\040file\\134 rw - ext4 /dev/a rw\n\n1 2\n";
        assert_eq!(mount_points(text).collect::<Vec<_>>(), ["/proc", "/etc/my file\\"]);
        assert!(is_mount_point(Path::new("/proc")));
        assert!(!is_mount_point(Path::new("/proc/self/status")));
    }
}
