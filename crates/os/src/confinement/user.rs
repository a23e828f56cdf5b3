//! The user as whom a process of root goes on, and the folders that root leaves to it.

use std::{
    fs,
    ops::RangeInclusive,
    os::{fd::OwnedFd, unix::fs::MetadataExt},
    path::Path,
};

use rustix::{
    fs::{Access, AtFlags, Dir, FileType, Mode, OFlags},
    io::Errno,
    process::{Gid, Uid, geteuid},
};

use crate::{error::OsError, privilege, undo};

/// The user of the package's services, and the last part of the names of the default folders.
const NAME: &str = "mpvpn";
/// Users that nobody has ("Users, Groups, UIDs and GIDs on systemd systems": between the dynamic users of
/// services and `nobody`).
const UNUSED: RangeInclusive<u32> = 65_520..=65_533;
/// Folders in each other at most; a state folder has two. More: work for a folder that is none; fewer: files
/// stay root's.
const MAX_DEPTH: u8 = 8;
/// The folder of `mpvpn lab` below that of journals.
const LAB: &[u8] = b"lab";

type User = (Uid, Gid);

/// Makes this process of root go on as another user, for ever, and keeps its capabilities: as `mpvpn` if
/// there is such a user, else as the owner of the folder of journals, else as one that nobody has. Folders
/// `own` of root become that user's with all that is in them, if only root may enter them, or they are empty
/// or named `mpvpn`; `read` are others that the user must be able to read. Does nothing for a process that is
/// not root's.
///
/// # Errors
/// If that user cannot use a folder.
pub fn leave_root(own: &[&Path], read: &[&Path]) -> Result<(), OsError> {
    if !geteuid().is_root() {
        return Ok(());
    }
    let passwd = fs::read_to_string("/etc/passwd").unwrap_or_default();
    let (user, group) = unprivileged(Path::new(undo::DEFAULT_FOLDER), &passwd);
    if let Err(error) = privilege::become_user(user, group) {
        // A container without CAP_SETUID, or a user namespace without other users.
        tracing::warn!(%error, "this process stays root's, because it cannot become another user");
        return Ok(());
    }
    let write = own.iter().map(|folder| (folder, Access::WRITE_OK | Access::EXEC_OK));
    for (folder, access) in write.chain(read.iter().map(|folder| (folder, Access::READ_OK | Access::EXEC_OK)))
    {
        let given = if access.contains(Access::WRITE_OK) { give(folder, (user, group)) } else { Ok(()) };
        // The kernel judges by the user alone, whatever capabilities are left.
        match given.and_then(|()| rustix::fs::access(*folder, access)) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(_) => return Err(OsError::Folder { path: folder.to_path_buf(), user: user.as_raw() }),
        }
    }
    Ok(())
}

fn unprivileged(folder: &Path, passwd: &str) -> User {
    let users = passwd.lines().filter_map(|line| {
        let fields: Vec<_> = line.split(':').collect();
        let number = |at: usize| fields.get(at)?.parse::<u32>().ok();
        Some((*fields.first()?, number(2)?, number(3)?))
    });
    let users: Vec<_> = users.filter(|(_, user, _)| *user != 0).collect();
    let named = users.iter().find(|(name, ..)| *name == NAME).map(|(_, user, group)| (*user, *group));
    let owner =
        || fs::metadata(folder).ok().map(|found| (found.uid(), found.gid())).filter(|(user, _)| *user != 0);
    let unused = || {
        let is_free = |number: &u32| users.iter().all(|(_, user, _)| user != number);
        let number = UNUSED.into_iter().find(is_free).unwrap_or(*UNUSED.start());
        (number, number)
    };
    let (user, group) = named.or_else(owner).unwrap_or_else(unused);
    (Uid::from_raw(user), Gid::from_raw(group))
}

/// Gives a folder of root, which nobody else could change, to `user`.
fn give(folder: &Path, user: User) -> rustix::io::Result<()> {
    let folder =
        &fs::canonicalize(folder).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
    let opened = rustix::fs::open(folder, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let found = rustix::fs::fstat(&opened)?;
    let is_of_system =
        folder.starts_with("/etc") || folder.parent().is_none_or(|parent| parent.parent().is_none());
    let is_empty = || fs::read_dir(folder).is_ok_and(|mut all| all.next().is_none());
    let is_own = found.st_mode & 0o077 == 0 || folder.ends_with(NAME) || is_empty();
    if found.st_uid == 0 && found.st_mode & 0o022 == 0 && !is_of_system && is_own {
        give_all(&opened, user, MAX_DEPTH)?;
    }
    Ok(())
}

fn give_all(folder: &OwnedFd, user: User, depth: u8) -> rustix::io::Result<()> {
    let link = AtFlags::SYMLINK_NOFOLLOW;
    for entry in Dir::read_from(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        let Ok(found) = rustix::fs::statat(folder, name, link) else { continue };
        if [&b"."[..], b"..", LAB].contains(&name.to_bytes()) || found.st_uid != 0 {
            continue;
        }
        if FileType::from_raw_mode(found.st_mode).is_dir() && depth > 0 {
            let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            give_all(&rustix::fs::openat(folder, name, flags, Mode::empty())?, user, depth - 1)?;
            continue;
        }
        match rustix::fs::chownat(folder, name, Some(user.0), Some(user.1), link) {
            // Its process has ended.
            Err(Errno::NOENT) => {}
            given => given?,
        }
    }
    rustix::fs::fchown(folder, Some(user.0), Some(user.1))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use super::*;

    #[test]
    fn the_user_is_that_of_the_package_or_the_owner_of_the_folder_or_nobodys() {
        let folder = tempfile::tempdir().unwrap();
        let numbers = |passwd: &str| {
            let (user, group) = unprivileged(folder.path(), passwd);
            (user.as_raw(), group.as_raw())
        };
        let others = "root:x:0:0::/root:/bin/sh\nbroken\nx:x:65520:1::/:/x\n";
        if geteuid().is_root() {
            assert_eq!(numbers(others), (65_521, 65_521));
            chown(folder.path(), Some(1234), Some(1235)).unwrap();
            assert_eq!(numbers(others), (1234, 1235));
        }
        assert_eq!(numbers(&format!("{others}mpvpn:x:998:997::/:/x\n")), (998, 997));
        assert_ne!(numbers("mpvpn:x:0:0::/:/x\n").0, 0, "never root");
    }

    #[test]
    fn only_what_root_has_for_itself_is_given() {
        if !geteuid().is_root() {
            return eprintln!("skipped: without root");
        }
        let top = tempfile::tempdir().unwrap();
        let user = (Uid::from_raw(1234), Gid::from_raw(1235));
        let owner = |path: &str| fs::symlink_metadata(top.path().join(path)).unwrap().uid();
        for folder in ["private/inner", "public", "empty", "writable"] {
            fs::create_dir_all(top.path().join(folder)).unwrap();
        }
        let mode = |path: &str, mode| {
            fs::set_permissions(top.path().join(path), fs::Permissions::from_mode(mode)).unwrap();
        };
        mode("private", 0o700);
        mode("writable", 0o777);
        for file in ["private/file", "private/inner/file", "private/others", "public/file", "victim"] {
            fs::write(top.path().join(file), "").unwrap();
        }
        symlink(top.path().join("victim"), top.path().join("private/link")).unwrap();
        chown(top.path().join("private/others"), Some(99), None).unwrap();
        for folder in ["private", "public", "empty", "writable"] {
            give(&top.path().join(folder), user).unwrap();
        }
        for (path, expected) in [
            ("private", 1234),
            ("private/file", 1234),
            ("private/inner", 1234),
            ("private/inner/file", 1234),
            ("private/link", 1234),
            ("private/others", 99),
            ("victim", 0),
            ("public", 0),
            ("public/file", 0),
            ("empty", 1234),
            ("writable", 0),
        ] {
            assert_eq!(owner(path), expected, "{path}");
        }
    }
}
