//! Privileges of this process, read from `/proc`, so that a missing one is reported at the start and in plain
//! words.

use std::fs;

/// Bit of a capability set (linux/capability.h): may bind ports below [`FIRST_UNPRIVILEGED_PORT`].
const CAP_NET_BIND_SERVICE: u32 = 10;
/// Bit of a capability set (linux/capability.h): may configure interfaces, routes and the firewall.
const CAP_NET_ADMIN: u32 = 12;

/// The first port that needs no privilege, if `net.ipv4.ip_unprivileged_port_start` cannot be read: the
/// kernel's default.
const FIRST_UNPRIVILEGED_PORT: u16 = 1024;

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
