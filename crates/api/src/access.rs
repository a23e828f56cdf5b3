//! The programs that may make a request: judged by the user and the groups of the process that connected.

use std::{
    io,
    os::fd::{AsFd, AsRawFd},
    path::Path,
};

use mpvpn_input::{dirs::SOCKET_DIR, groups};
use mpvpn_os::privilege::peer_of;
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags};

/// The requests that a program may make. The larger one includes the smaller ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Access {
    /// No request.
    Nothing,
    /// Requests that change nothing but the links of measured flows.
    Read,
    /// All requests.
    Change,
}

/// The group whose members may connect to sockets in `dir`: in the folder of root and of the services only.
pub(super) fn readers_in(dir: &Path) -> Option<u32> {
    groups::id(groups::READERS).filter(|_| dir == Path::new(SOCKET_DIR))
}

/// Lets this process and members of the group connect to the new socket `path`. Strangers cannot, so that
/// they do not occupy the connections. The owner of the folder may put links there, so none is followed. The
/// services may not call chown(2), and have the group already; others keep the socket for their users.
pub(super) fn admit(path: &Path, readers: Option<u32>) -> io::Result<()> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let socket = rustix::fs::open(path, flags, Mode::empty())?;
    let found = rustix::fs::fstat(&socket)?;
    if !FileType::from_raw_mode(found.st_mode).is_socket() {
        return Err(io::ErrorKind::AlreadyExists.into());
    }
    let by_descriptor = format!("/proc/self/fd/{}", socket.as_raw_fd());
    rustix::fs::chmod(&by_descriptor, Mode::from_raw_mode(0o600))?;
    let give =
        |group| rustix::fs::chownat(&socket, "", None, Some(Gid::from_raw(group)), AtFlags::EMPTY_PATH);
    if readers.is_some_and(|group| found.st_gid == group || give(group).is_ok()) {
        rustix::fs::chmod(&by_descriptor, Mode::from_raw_mode(0o660))?;
    }
    Ok(())
}

/// The requests that the program at the other end of a connection may make.
pub(super) fn of_peer(connection: impl AsFd) -> Access {
    let (own, groups) = (rustix::process::geteuid().as_raw(), groups::ids(groups::ALL));
    peer_of(connection).map_or(Access::Nothing, |(user, of_user)| access(user, &of_user, own, groups))
}

/// `own`: the user of this process.
fn access(user: u32, of_user: &[u32], own: u32, [readers, administrators]: [Option<u32>; 2]) -> Access {
    let is_in = |group: Option<u32>| group.is_some_and(|group| of_user.contains(&group));
    if user == 0 || user == own || is_in(administrators) {
        return Access::Change;
    }
    if is_in(readers) { Access::Read } else { Access::Nothing }
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, Permissions},
        os::unix::{
            fs::{MetadataExt, PermissionsExt},
            net::UnixStream,
        },
    };

    use super::*;

    const GROUPS: [Option<u32>; 2] = [Some(500), Some(501)];

    #[test]
    fn members_read_administrators_change_and_strangers_do_nothing() {
        for (user, groups, expected) in [
            (0, &[][..], Access::Change),
            (42, &[], Access::Change),
            (1000, &[1000, 501], Access::Change),
            (1000, &[500, 501], Access::Change),
            (1000, &[1000, 500], Access::Read),
            (1000, &[1000, 0, 42], Access::Nothing),
            (1000, &[], Access::Nothing),
        ] {
            assert_eq!(access(user, groups, 42, GROUPS), expected, "user {user} in {groups:?}");
        }
    }

    #[test]
    fn without_the_groups_only_root_and_the_own_user_are_answered() {
        assert_eq!(access(1000, &[500, 501, 0], 42, [None; 2]), Access::Nothing);
        assert_eq!([0, 42].map(|user| access(user, &[], 42, [None; 2])), [Access::Change; 2]);
    }

    #[test]
    fn the_kernel_says_the_user_and_the_groups_of_the_peer() {
        let (one, _other) = UnixStream::pair().unwrap();
        let (user, mut groups) = peer_of(&one).unwrap();
        assert_eq!(user, rustix::process::geteuid().as_raw());
        let mut own: Vec<u32> =
            rustix::process::getgroups().unwrap().into_iter().map(|group| group.as_raw()).collect();
        own.push(rustix::process::getegid().as_raw());
        own.sort_unstable();
        groups.sort_unstable();
        assert_eq!(groups, own);
        assert_eq!(of_peer(&one), Access::Change, "the peer is this process");
    }

    #[test]
    fn a_link_in_the_place_of_the_socket_is_not_followed() {
        let home = tempfile::tempdir().unwrap();
        let (victim, link) = (home.path().join("victim"), home.path().join(".1"));
        fs::write(&victim, "").unwrap();
        fs::set_permissions(&victim, Permissions::from_mode(0o644)).unwrap();
        std::os::unix::fs::symlink(&victim, &link).unwrap();
        let before = fs::metadata(&victim).unwrap();
        for path in [&link, &victim] {
            assert!(admit(path, Some(500)).is_err(), "{}", path.display());
        }
        let after = fs::metadata(&victim).unwrap();
        assert_eq!((after.mode(), after.gid()), (before.mode(), before.gid()));
    }

    #[test]
    fn the_socket_is_for_members_where_the_folder_is_shared_and_they_exist() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("a.sock");
        let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let mode = || {
            let found = fs::metadata(&path).unwrap();
            (found.mode() & 0o777, found.gid())
        };
        let own = mode().1;
        assert_eq!(readers_in(home.path()), None);
        admit(&path, None).unwrap();
        assert_eq!(mode(), (0o600, own), "this is a folder of a user");
        admit(&path, Some(500)).unwrap();
        match rustix::process::geteuid().is_root() {
            true => assert_eq!(mode(), (0o660, 500)),
            false => assert_eq!(mode(), (0o600, own), "it may not give files away"),
        }
    }
}
