//! The memory that a process holds for its peers, counted by user.
//!
//! In: bytes that each connection holds, and from time to time all that the process has allocated. Out: how
//! many more bytes a user may hold, and whether all hold too many. Always holds: the bytes of a connection
//! are given back when it is dropped.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

/// The least memory of a connection (bytes): 59 KiB of an idle one, measured (docs/performance.md). Smaller:
/// connections that are opened and left take more than is counted; larger: users may have fewer.
pub(crate) const CONNECTION_BYTES: usize = 60 << 10;

/// The bytes of all users of a process, and how many there may be.
#[derive(Debug)]
pub struct ProcessBytes {
    most: usize,
    held: AtomicUsize,
    /// Allocated, but not counted for a user.
    uncounted: AtomicUsize,
    /// In sockets of the kernel, for relays.
    in_kernel: AtomicUsize,
}

impl ProcessBytes {
    /// At most `most` bytes.
    pub fn new(most: usize) -> Arc<Self> {
        let (held, uncounted, in_kernel) = Default::default();
        Arc::new(Self { most, held, uncounted, in_kernel })
    }

    /// The bytes that there may be.
    pub fn most(&self) -> usize {
        self.most
    }

    /// The bytes that there are: those that are counted, and the others as of the last
    /// [`Self::on_measured`].
    pub fn used(&self) -> usize {
        self.held.load(Relaxed) + self.uncounted.load(Relaxed) + self.in_kernel.load(Relaxed)
    }

    /// Whether there are more bytes than there may be.
    pub fn is_exceeded(&self) -> bool {
        self.used() > self.most
    }

    /// Takes what the process has allocated (bytes).
    pub fn on_measured(&self, allocated: usize) {
        self.uncounted.store(allocated.saturating_sub(self.held.load(Relaxed)), Relaxed);
    }

    /// A connection for which `bytes` were counted is gone: until the next measurement, its share of what was
    /// not counted is gone as well, and what was `estimated` for it.
    fn on_ended(&self, bytes: usize, estimated: usize) {
        let held = self.held.load(Relaxed).max(bytes).max(1);
        let left = |uncounted: usize| {
            let uncounted = uncounted.saturating_sub(estimated);
            let share = uncounted as f64 * bytes as f64 / held as f64;
            Some(uncounted.saturating_sub(share as usize))
        };
        let _ = self.uncounted.fetch_update(Relaxed, Relaxed, left);
    }
}

#[derive(Debug, Default)]
struct UserCounts {
    held: AtomicUsize,
    connections: AtomicUsize,
}

/// The bytes and connections of one user. Clones count together.
#[derive(Clone, Debug)]
pub struct UserBytes {
    process: Arc<ProcessBytes>,
    counts: Arc<UserCounts>,
}

impl UserBytes {
    /// A new user, for whom nothing is held.
    pub fn new(process: &Arc<ProcessBytes>) -> Self {
        Self { process: Arc::clone(process), counts: Arc::default() }
    }

    /// Whether connections count with it, besides this clone.
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.counts) > 1
    }

    /// The bytes that are held for the user.
    pub fn held(&self) -> usize {
        self.counts.held.load(Relaxed)
    }

    /// The connections of the user.
    pub fn connections(&self) -> usize {
        self.counts.connections.load(Relaxed)
    }

    /// Counts another connection, if there is memory for it and the user has fewer than `most`.
    pub fn connect(&self, most: usize) -> Option<CountedConnection> {
        if self.left() < CONNECTION_BYTES {
            return None;
        }
        let one_more = |count| (count < most).then_some(count + 1);
        self.counts.connections.fetch_update(Relaxed, Relaxed, one_more).ok()?;
        Some(CountedConnection(self.clone()))
    }

    /// Bytes that the user may still take: as many may be held as the process has left (dynamic thresholds,
    /// Choudhury and Hahne 1998). So one user alone takes half, and who comes later always finds something.
    fn left(&self) -> usize {
        self.process.most.saturating_sub(self.process.used()).saturating_sub(self.held())
    }
}

/// A connection of a user, which counts until it is dropped.
#[derive(Debug)]
pub struct CountedConnection(UserBytes);

impl CountedConnection {
    pub(crate) fn user(&self) -> UserBytes {
        self.0.clone()
    }
}

impl Drop for CountedConnection {
    fn drop(&mut self) {
        self.0.counts.connections.fetch_sub(1, Relaxed);
    }
}

/// Bytes that are held for one connection.
#[derive(Debug, Default)]
pub(crate) struct HeldBytes {
    bytes: usize,
    /// Bytes that count for the user only: the process measures how many there are in truth.
    estimated: usize,
    /// Bytes that the kernel holds.
    in_kernel: usize,
    user: Option<UserBytes>,
}

impl HeldBytes {
    /// Counts them for a user from now on.
    pub(crate) fn set_user(&mut self, user: UserBytes) {
        let bytes = std::mem::take(self).bytes;
        *self = Self { user: Some(user), ..Self::default() };
        self.add(bytes);
    }

    #[cfg(test)]
    pub(crate) fn get(&self) -> usize {
        self.bytes
    }

    pub(crate) fn add(&mut self, bytes: usize) {
        self.bytes += bytes;
        if let Some(user) = &self.user {
            user.counts.held.fetch_add(bytes, Relaxed);
            user.process.held.fetch_add(bytes, Relaxed);
        }
    }

    pub(crate) fn sub(&mut self, bytes: usize) {
        self.bytes -= bytes;
        if let Some(user) = &self.user {
            user.counts.held.fetch_sub(bytes, Relaxed);
            user.process.held.fetch_sub(bytes, Relaxed);
        }
    }

    pub(crate) fn set(&mut self, bytes: usize) {
        match bytes.checked_sub(self.bytes) {
            Some(0) => {}
            Some(more) => self.add(more),
            None => self.sub(self.bytes - bytes),
        }
    }

    /// Sets how many more bytes the user seems to hold.
    pub(crate) fn set_estimated(&mut self, bytes: usize) {
        let before = std::mem::replace(&mut self.estimated, bytes);
        if let Some(user) = &self.user {
            // Wraps around where there are fewer.
            user.counts.held.fetch_add(bytes.wrapping_sub(before), Relaxed);
        }
    }

    /// Sets how many bytes the kernel holds.
    pub(crate) fn set_in_kernel(&mut self, bytes: usize) {
        let more = bytes.wrapping_sub(std::mem::replace(&mut self.in_kernel, bytes));
        if let Some(user) = self.user.as_ref().filter(|_| more != 0) {
            // Wraps around where there are fewer.
            user.counts.held.fetch_add(more, Relaxed);
            user.process.in_kernel.fetch_add(more, Relaxed);
        }
    }

    /// Bytes that may still be held, of at most `most` of this connection.
    pub(crate) fn left(&self, most: usize) -> usize {
        let left = most.saturating_sub(self.bytes);
        self.user.as_ref().map_or(left, |user| left.min(user.left()))
    }
}

impl Drop for HeldBytes {
    fn drop(&mut self) {
        if let Some(user) = &self.user {
            user.process.on_ended(self.bytes, self.estimated);
        }
        self.set_estimated(0);
        self.set_in_kernel(0);
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
            let mut connection = HeldBytes::default();
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
    fn what_is_allocated_counts_also_where_no_user_is_known() {
        let process = ProcessBytes::new(1000);
        let mut connections = [(); 2].map(|()| HeldBytes::default());
        let user = UserBytes::new(&process);
        connections.iter_mut().for_each(|connection| connection.set_user(user.clone()));
        connections.iter_mut().for_each(|connection| connection.set(100));
        assert_eq!(connections[0].left(usize::MAX), 600);
        process.on_measured(1100);
        assert_eq!((process.used(), connections[0].left(usize::MAX)), (1100, 0));
        assert!(process.is_exceeded() && user.connect(usize::MAX).is_none());
        connections[1].set(50);
        assert_eq!(process.used(), 1050);
        let [first, _second] = connections;
        drop(first);
        assert_eq!(
            process.used(),
            350,
            "the connection had two thirds of the counted bytes, and takes as much of the others along"
        );
    }

    #[test]
    fn what_the_kernel_holds_counts_for_its_user_beside_what_is_allocated() {
        let process = ProcessBytes::new(1000);
        let (mut connection, user) = (HeldBytes::default(), UserBytes::new(&process));
        connection.set_user(user.clone());
        connection.set(100);
        connection.set_in_kernel(500);
        process.on_measured(300);
        assert_eq!((process.used(), user.held(), process.is_exceeded()), (800, 600, false));
        connection.set_in_kernel(800);
        assert!(process.is_exceeded());
        connection.set_in_kernel(1);
        assert_eq!((process.used(), user.held()), (301, 101));
        drop(connection);
        assert_eq!((process.in_kernel.load(Relaxed), user.held()), (0, 0));
    }

    #[test]
    fn bytes_that_were_queued_before_the_user_was_known_count() {
        let process = ProcessBytes::new(1000);
        let user = UserBytes::new(&process);
        let mut connection = HeldBytes::default();
        connection.add(70);
        connection.set_user(user.clone());
        assert_eq!((user.held(), connection.get(), connection.left(100)), (70, 70, 30));
        connection.sub(20);
        assert_eq!(user.held(), 50);
    }
}
