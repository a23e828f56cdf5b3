//! What this process may do. In: `/proc`. Out: answers for early, readable errors.

use std::fs;

/// Bit of CAP_NET_ADMIN in a capability set (linux/capability.h).
const CAP_NET_ADMIN: u32 = 12;

/// Whether the effective user is root.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Whether this thread may configure the network (CAP_NET_ADMIN is in its effective set).
pub fn has_net_admin() -> bool {
    let status = fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    effective_capabilities(&status).is_some_and(|set| set >> CAP_NET_ADMIN & 1 == 1)
}

fn effective_capabilities(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    u64::from_str_radix(line.trim(), 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_effective_set_is_read_from_the_status_file() {
        let status = "Name:\tx\nCapPrm:\t0000000000000000\nCapEff:\t0000000000001000\n";
        assert_eq!(effective_capabilities(status), Some(1 << CAP_NET_ADMIN));
        assert_eq!(effective_capabilities("CapEff:\tzz\n"), None);
        assert_eq!(effective_capabilities(""), None);
    }
}
