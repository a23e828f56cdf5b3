//! Privileges of this process, read from `/proc`, so that a missing one is reported at the start and in plain
//! words.

use std::{fs, io, os::unix::fs::MetadataExt, path::Path};

use rustix::{
    process::{Gid, Uid, geteuid, parent_process_death_signal, set_parent_process_death_signal},
    thread::{
        CapabilitySet, CapabilitySets, capabilities, set_capabilities, set_keep_capabilities,
        set_thread_groups, set_thread_res_gid, set_thread_res_uid,
    },
};

use crate::{error::OsError, option};

/// Bit of a capability set (linux/capability.h): may bind ports below [`FIRST_UNPRIVILEGED_PORT`].
const CAP_NET_BIND_SERVICE: u32 = 10;
/// Bit of a capability set (linux/capability.h): may configure interfaces, routes and the firewall.
const CAP_NET_ADMIN: u32 = 12;

/// The first port that needs no privilege, if `net.ipv4.ip_unprivileged_port_start` cannot be read: the
/// kernel's default.
const FIRST_UNPRIVILEGED_PORT: u16 = 1024;

/// Groups of a process at most (`NGROUPS_MAX` of linux/limits.h).
const MAX_GROUPS: usize = 65_536;

/// Whether this thread may configure the network (CAP_NET_ADMIN in its effective set).
pub fn has_net_admin() -> bool {
    has_capability(CAP_NET_ADMIN)
}

/// Whether this thread has the privilege to bind `port`; another socket may still occupy it.
pub fn may_bind(port: u16) -> bool {
    let first = fs::read_to_string("/proc/sys/net/ipv4/ip_unprivileged_port_start");
    let first = first.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(FIRST_UNPRIVILEGED_PORT);
    port >= first || has_capability(CAP_NET_BIND_SERVICE)
}

/// The user of the process that connected to this UNIX socket, and all its groups at that moment.
///
/// # Errors
/// If the kernel does not tell (before Linux 4.13).
pub fn peer_of(connection: impl std::os::fd::AsFd) -> io::Result<(u32, Vec<u32>)> {
    // Process ID, user and group (unix(7)).
    let (mut ucred, mut groups) = ([0; 12], vec![0; 4 * MAX_GROUPS]);
    let ucred = option::read_bytes(&connection, libc::SOL_SOCKET, libc::SO_PEERCRED, &mut ucred)?;
    let groups = option::read_bytes(&connection, libc::SOL_SOCKET, libc::SO_PEERGROUPS, &mut groups)?;
    let number = |bytes, at| option::number(bytes, at).ok_or(io::ErrorKind::UnexpectedEof.into());
    let groups = groups.chunks(4).chain(ucred.get(8..)).map(|group| number(group, 0));
    Ok((number(ucred, 4)?, groups.collect::<io::Result<_>>()?))
}

/// Whether this process is root, and `folder` belongs to another user: a record there may ask for no more
/// than that user may do.
pub fn is_root_at_folder_of_other(folder: &Path) -> bool {
    geteuid().is_root() && fs::metadata(folder).is_ok_and(|found| found.uid() != 0)
}

/// Leaves root for the owner and group of `folder`, for ever; of all capabilities CAP_NET_ADMIN stays. Counts
/// for the calling thread and those that it starts.
///
/// # Errors
/// If the folder is not there, or the kernel refuses.
pub fn become_owner_of(folder: &Path) -> Result<(), OsError> {
    let leave = || {
        let owner = fs::metadata(folder)?;
        become_user(Uid::from_raw(owner.uid()), Gid::from_raw(owner.gid()))?;
        let kept = CapabilitySet::NET_ADMIN;
        let sets = CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() };
        Ok::<(), io::Error>(set_capabilities(None, sets)?)
    };
    leave().map_err(|error| OsError::kernel("become the owner of", folder.display(), error))
}

/// Makes the calling thread of root that of another user, for ever; it keeps its capabilities.
pub(crate) fn become_user(user: Uid, group: Gid) -> rustix::io::Result<()> {
    let permitted = capabilities(None)?.permitted;
    // The kernel forgets the signal when the user changes.
    let signal = parent_process_death_signal()?;
    set_keep_capabilities(true)?;
    set_thread_groups(&[])?;
    set_thread_res_gid(group, group, group)?;
    set_thread_res_uid(user, user, user)?;
    set_parent_process_death_signal(signal)?;
    let inheritable = CapabilitySet::empty();
    set_capabilities(None, CapabilitySets { effective: permitted, permitted, inheritable })
}

fn has_capability(capability: u32) -> bool {
    let status = fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    effective_capabilities(&status).is_some_and(|set| set >> capability & 1 == 1)
}

fn effective_capabilities(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    u64::from_str_radix(line.trim(), 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn high_ports_need_no_privilege() {
        assert!(may_bind(u16::MAX));
    }

    #[test]
    fn the_effective_set_is_read_from_the_status_file() {
        let status = "Name:\tx\nCapPrm:\t0000000000000000\nCapEff:\t0000000000001000\n";
        assert_eq!(effective_capabilities(status), Some(1 << CAP_NET_ADMIN));
        assert_eq!(effective_capabilities("CapEff:\tzz\n"), None);
        assert_eq!(effective_capabilities(""), None);
    }
}
