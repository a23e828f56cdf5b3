//! Bytes that wait for peers in the queues of streams, counted by user and by process.
//!
//! In: bytes that a connection queues and sends. Out: how many more it may queue. Always holds: the bytes of
//! a connection are given back when it is dropped.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

/// The bytes of all users of a process, and how many there may be.
#[derive(Debug)]
pub struct ProcessBytes {
    most: usize,
    held: AtomicUsize,
}

impl ProcessBytes {
    /// At most `most` bytes.
    pub fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { most, held: AtomicUsize::new(0) })
    }

    /// Whether more bytes wait than may.
    pub fn is_exceeded(&self) -> bool {
        self.held.load(Relaxed) > self.most
    }
}

/// The bytes of one user. Clones count together.
#[derive(Clone, Debug)]
pub struct UserBytes {
    process: Arc<ProcessBytes>,
    held: Arc<AtomicUsize>,
}

impl UserBytes {
    /// A new user, for whom nothing waits.
    pub fn new(process: &Arc<ProcessBytes>) -> Self {
        Self { process: Arc::clone(process), held: Arc::default() }
    }

    /// Whether connections count with it, besides this clone.
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.held) > 1
    }

    /// The bytes that wait.
    pub fn held(&self) -> usize {
        self.held.load(Relaxed)
    }

    /// Bytes that the user may still queue: as many may wait as the process has left (dynamic thresholds,
    /// Choudhury and Hahne 1998). So one user alone takes half, and who comes later always finds something.
    fn left(&self) -> usize {
        let left = self.process.most.saturating_sub(self.process.held.load(Relaxed));
        left.saturating_sub(self.held())
    }
}

/// The queued bytes of one connection.
#[derive(Debug, Default)]
pub(crate) struct QueuedBytes {
    bytes: usize,
    user: Option<UserBytes>,
}

impl QueuedBytes {
    /// Counts them for a user from now on.
    pub(crate) fn set_user(&mut self, user: UserBytes) {
        let bytes = std::mem::take(self).bytes;
        *self = Self { bytes: 0, user: Some(user) };
        self.add(bytes);
    }

    #[cfg(test)]
    pub(crate) fn get(&self) -> usize {
        self.bytes
    }

    pub(crate) fn add(&mut self, bytes: usize) {
        self.bytes += bytes;
        if let Some(user) = &self.user {
            user.held.fetch_add(bytes, Relaxed);
            user.process.held.fetch_add(bytes, Relaxed);
        }
    }

    pub(crate) fn sub(&mut self, bytes: usize) {
        self.bytes -= bytes;
        if let Some(user) = &self.user {
            user.held.fetch_sub(bytes, Relaxed);
            user.process.held.fetch_sub(bytes, Relaxed);
        }
    }

    /// Bytes that may still be queued, of at most `most` of this connection.
    pub(crate) fn left(&self, most: usize) -> usize {
        let left = most.saturating_sub(self.bytes);
        self.user.as_ref().map_or(left, |user| left.min(user.left()))
    }
}

impl Drop for QueuedBytes {
    fn drop(&mut self) {
        self.sub(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_may_hold_as_much_as_is_left_and_gives_it_back() {
        let process = ProcessBytes::new(1200);
        let fill = |user: &UserBytes| {
            let mut connection = QueuedBytes::default();
            connection.set_user(user.clone());
            while connection.left(usize::MAX) > 0 {
                connection.add(1);
            }
            connection
        };
        let [greedy, other] = [(); 2].map(|()| UserBytes::new(&process));
        let first = [fill(&greedy), fill(&greedy)];
        assert_eq!((first[0].get(), first[1].get()), (600, 0), "all connections of a user count together");
        let second = fill(&other);
        assert_eq!(second.get(), 300, "half of what is left");
        drop(first);
        assert_eq!((greedy.held(), other.held(), process.is_exceeded()), (0, 300, false));
        let mut beyond = fill(&greedy);
        beyond.add(1200);
        assert!(process.is_exceeded());
    }

    #[test]
    fn bytes_that_were_queued_before_the_user_was_known_count() {
        let process = ProcessBytes::new(1000);
        let user = UserBytes::new(&process);
        let mut connection = QueuedBytes::default();
        connection.add(70);
        connection.set_user(user.clone());
        assert_eq!((user.held(), connection.get(), connection.left(100)), (70, 70, 30));
        connection.sub(20);
        assert_eq!(user.held(), 50);
    }
}
