//! Limits for all users together and for each user.
//!
//! Shared by the shards of a server, behind a lock that is taken when a connection opens or closes, never for
//! its bytes.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use derive_more::Display;
use mpvpn_names::resolver::MAX_CONCURRENT_LOOKUPS;
use mpvpn_os::limits;

/// Descriptors kept free for everything but relays. Fewer: the server may run out of descriptors for clients.
/// More: fewer relays. Chosen.
const RESERVED_FDS: u64 = 512;
/// Concurrent name lookups, in all and per user. A name server that does not answer blocks a thread of the
/// resolver for long, so one user must not occupy all of them.
const MAX_LOOKUPS: usize = 4096;
const MAX_LOOKUPS_PER_USER: usize = MAX_CONCURRENT_LOOKUPS / 2;

/// The limits and the present use. Clones share both.
#[derive(Clone)]
pub struct Budget(Arc<Shared>);

struct Shared {
    total: usize,
    per_user: usize,
    used: Mutex<Used>,
}

#[derive(Default)]
struct Used {
    total: usize,
    /// Users that hold at least one permit.
    users: HashMap<Arc<str>, usize>,
}

/// One unit of a budget; returned when dropped.
pub(super) struct Permit {
    budget: Budget,
    user: Arc<str>,
}

/// A limit is reached.
#[derive(Clone, Copy, Debug, Display, PartialEq, Eq)]
pub(super) enum LimitReached {
    /// The limit for all users.
    #[display("the server's limit of {_0} is reached")]
    Total(usize),
    /// The limit for one user.
    #[display("the limit of {_0} for a user is reached")]
    PerUser(usize),
}

impl Budget {
    /// The budget of relays: the configured limits, but not more than the process may open descriptors.
    /// Raises the process's limit first.
    pub fn for_relays(max_relays: u32, max_user_relays: u32) -> Self {
        let max_open_files = limits::raise_open_file_limit().unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot raise the limit of open files");
            RESERVED_FDS + u64::from(max_relays)
        });
        let available_fds =
            usize::try_from(max_open_files.saturating_sub(RESERVED_FDS)).unwrap_or(usize::MAX);
        if available_fds < max_relays as usize {
            tracing::info!(
                max_open_files,
                max_relays,
                "the limit of open files allows fewer relays than --max-relays"
            );
        }
        Self::new(available_fds.min(max_relays as usize), max_user_relays as usize)
    }

    /// The budget of name lookups.
    pub fn for_lookups() -> Self {
        Self::new(MAX_LOOKUPS, MAX_LOOKUPS_PER_USER)
    }

    /// A budget of `total`, and `per_user` for each user.
    pub fn new(total: usize, per_user: usize) -> Self {
        Self(Arc::new(Shared { total, per_user, used: Mutex::default() }))
    }

    /// Takes one unit for `user`.
    pub(super) fn take(&self, user: &str) -> Result<Permit, LimitReached> {
        let mut used = self.used();
        if used.total >= self.0.total {
            return Err(LimitReached::Total(self.0.total));
        }
        let user = match used.users.get_key_value(user) {
            Some((_, count)) if *count >= self.0.per_user => {
                return Err(LimitReached::PerUser(self.0.per_user));
            }
            Some((name, _)) => name.clone(),
            None if self.0.per_user == 0 => return Err(LimitReached::PerUser(0)),
            None => Arc::from(user),
        };
        *used.users.entry(user.clone()).or_default() += 1;
        used.total += 1;
        Ok(Permit { budget: self.clone(), user })
    }

    /// Units in use.
    #[cfg(test)]
    pub fn in_use(&self) -> usize {
        self.used().total
    }

    fn used(&self) -> MutexGuard<'_, Used> {
        // The lock is never held during anything that can panic.
        self.0.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Permit {
    /// Takes another unit for the same user.
    pub(super) fn another(&self) -> Result<Self, LimitReached> {
        self.budget.take(&self.user)
    }

    /// The user of this permit.
    pub(super) fn user(&self) -> &str {
        &self.user
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut used = self.budget.used();
        used.total -= 1;
        if let Some(count) = used.users.get_mut(&self.user) {
            *count -= 1;
            if *count == 0 {
                used.users.remove(&self.user);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_user_takes_all_and_what_is_given_back_can_be_had_again() {
        let budget = Budget::new(3, 2);
        let other = budget.clone();
        let first = budget.take("anna").unwrap();
        let second = first.another().unwrap();
        assert_eq!(other.take("anna").err(), Some(LimitReached::PerUser(2)));
        let bob = other.take("bob").unwrap();
        assert_eq!(bob.user(), "bob");
        assert_eq!(other.take("carl").err(), Some(LimitReached::Total(3)));
        drop(second);
        assert_eq!(budget.in_use(), 2);
        let third = budget.take("anna").unwrap();
        drop((first, third, bob));
        assert_eq!(budget.in_use(), 0);
        assert!(budget.used().users.is_empty(), "users who have nothing are forgotten");
    }

    #[test]
    fn there_are_no_more_relays_than_descriptors() {
        let max_open_files = usize::try_from(limits::raise_open_file_limit().unwrap()).unwrap_or(usize::MAX);
        assert_eq!(Budget::for_relays(10, 5).0.total, 10);
        assert_eq!(
            Budget::for_relays(u32::MAX, 5).0.total,
            (max_open_files - RESERVED_FDS as usize).min(u32::MAX as usize)
        );
        assert!(
            Budget::for_lookups().0.per_user < MAX_CONCURRENT_LOOKUPS,
            "one user can keep the resolver busy"
        );
    }
}
