//! Limits for all users together and for each user: of relays and of name look-ups.
//!
//! Shared by the shards of a server, behind a lock that is taken when a connection opens or closes, never for
//! its bytes.

use std::sync::Arc;

use mpvpn_http::limiter::{Limiter, Slot};
use mpvpn_names::resolver::MAX_CONCURRENT_LOOKUPS;
use mpvpn_os::limits;

/// Descriptors kept free for everything but relays. Fewer: the server may run out of descriptors for clients.
/// More: fewer relays. Chosen.
const RESERVED_FDS: u64 = 512;
/// Concurrent name lookups, in all and per user. A name server that does not answer blocks a thread of the
/// resolver for long, so one user must not occupy all of them.
const MAX_LOOKUPS: usize = 4096;
const MAX_LOOKUPS_PER_USER: usize = MAX_CONCURRENT_LOOKUPS / 2;

/// A limit of what users have.
pub type UserLimiter = Arc<Limiter<Arc<str>>>;
/// One unit of it; returned when dropped.
pub(super) type Permit = Slot<Arc<str>>;

/// The limits of relays, as configured, but not more than the process may open descriptors. Raises the
/// process's limit first.
pub fn relay_limiter(max_relays: u32, max_user_relays: u32) -> UserLimiter {
    Limiter::new(most_relays(max_relays), max_user_relays as usize)
}

fn most_relays(max_relays: u32) -> usize {
    let max_open_files = limits::raise_open_file_limit().unwrap_or_else(|error| {
        tracing::warn!(%error, "cannot raise the limit of open files");
        RESERVED_FDS + u64::from(max_relays)
    });
    let available_fds = usize::try_from(max_open_files.saturating_sub(RESERVED_FDS)).unwrap_or(usize::MAX);
    if available_fds < max_relays as usize {
        tracing::debug!(
            max_open_files,
            max_relays,
            "the limit of open files allows fewer relays than --max-relays"
        );
    }
    available_fds.min(max_relays as usize)
}

/// The limits of name lookups.
pub fn lookup_limiter() -> UserLimiter {
    Limiter::new(MAX_LOOKUPS, MAX_LOOKUPS_PER_USER)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_no_more_relays_than_descriptors() {
        let max_open_files = usize::try_from(limits::raise_open_file_limit().unwrap()).unwrap_or(usize::MAX);
        assert_eq!(most_relays(10), 10);
        assert_eq!(most_relays(u32::MAX), (max_open_files - RESERVED_FDS as usize).min(u32::MAX as usize));
        const { assert!(MAX_LOOKUPS_PER_USER < MAX_CONCURRENT_LOOKUPS, "one user can keep the resolver busy") };
    }
}
