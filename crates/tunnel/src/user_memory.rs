//! The memory that is held for clients, by user.
//!
//! In: names of users. Out: what each one's connections count their bytes with, and who holds too much.
//! Always holds: users are forgotten some time after their last connection.

use std::{collections::BTreeMap, sync::Arc};

use mpvpn_quic::{ProcessBytes, UserBytes};

/// Users without connections are looked for when there are twice as many users as last time, and at least
/// so many. Fewer: looked for more often. Chosen.
const MIN_PRUNED: usize = 64;

/// The bytes that are held for the users of a server.
#[derive(Clone, Debug)]
pub(crate) struct MemoryOfUsers {
    process: Arc<ProcessBytes>,
    users: BTreeMap<String, UserBytes>,
    prune_at: usize,
}

impl MemoryOfUsers {
    /// For all users together at most `most` bytes.
    pub(crate) fn new(most: usize) -> Self {
        Self { process: ProcessBytes::new(most), users: BTreeMap::new(), prune_at: MIN_PRUNED }
    }

    /// The bytes of all users.
    pub(crate) fn process(&self) -> Arc<ProcessBytes> {
        Arc::clone(&self.process)
    }

    /// The bytes of one user, with which its connections count.
    pub(crate) fn of(&mut self, user: &str) -> UserBytes {
        if let Some(bytes) = self.users.get(user) {
            return bytes.clone();
        }
        if self.users.len() >= self.prune_at {
            self.users.retain(|_, bytes| bytes.is_shared());
            self.prune_at = (2 * self.users.len()).max(MIN_PRUNED);
        }
        let bytes = UserBytes::new(&self.process);
        self.users.insert(user.to_owned(), bytes.clone());
        bytes
    }

    /// The bytes and connections of users, by name.
    pub(crate) fn held(&self) -> impl Iterator<Item = (&str, usize, usize)> {
        self.users.iter().map(|(name, user)| (name.as_str(), user.held(), user.connections()))
    }

    /// Whether for nobody more is held than for this user.
    pub(crate) fn holds_most(&self, user: &str) -> bool {
        let held = self.users.get(user).map_or(0, UserBytes::held);
        self.users.values().all(|other| other.held() <= held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_known_while_they_have_connections() {
        let mut memory = MemoryOfUsers::new(1000);
        let kept = memory.of("kept");
        (0..10_000).for_each(|number| drop(memory.of(&number.to_string())));
        assert!(memory.users.len() <= 2 * MIN_PRUNED, "{} users", memory.users.len());
        assert!(memory.users["kept"].is_shared());
        drop(kept);
        memory.of("other");
        assert!(memory.holds_most("kept") && memory.holds_most("other"), "nothing is held");
    }
}
