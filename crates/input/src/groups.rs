//! The groups of this machine whose members use mpvpn without being root.
//!
//! In: the name of a group. Out: its number. Always holds: a group that is not there has no members.

use std::fs;

/// The group whose members may ask the processes of root and of the services what they do.
pub const READERS: &str = "mpvpn";
/// The group whose members may change them as well, and read their configuration files, which have tokens.
pub const ADMINISTRATORS: &str = "mpvpn-admin";

/// The group whose programs leave past the tunnel (`mpvpn exec --bypass`).
pub const BYPASS: &str = "mpvpn-bypass";
/// The group whose programs use the tunnel, whatever the rules say (`mpvpn exec --tunnel`).
pub const TUNNEL: &str = "mpvpn-tunnel";

/// The groups of readers and administrators.
pub const ALL: [&str; 2] = [READERS, ADMINISTRATORS];
/// The remedies of [`Error::Denied`](crate::Error::Denied) for requests of readers, and of administrators.
pub const JOIN_READERS: &str = " or join the group mpvpn (sudo usermod -aG mpvpn NAME, then log in again)";
/// See [`JOIN_READERS`]. The socket is in a folder that readers reach.
pub const JOIN_ADMINISTRATORS: &str = " or join the groups mpvpn and mpvpn-admin \
    (sudo usermod -aG mpvpn,mpvpn-admin NAME, then log in again)";

/// The number of a group in `/etc/group`; `None` if there is no such group. Groups of other sources, as LDAP,
/// are not found.
pub fn id(name: &str) -> Option<u32> {
    ids([name])[0]
}

/// As [`id`], of several groups with one look.
pub fn ids<const N: usize>(names: [&str; N]) -> [Option<u32>; N] {
    let groups = fs::read_to_string("/etc/group").unwrap_or_default();
    names.map(|name| {
        groups.lines().find_map(|line| {
            let mut fields = line.split(':');
            (fields.next() == Some(name)).then(|| fields.nth(1)?.parse().ok()).flatten()
        })
    })
}
