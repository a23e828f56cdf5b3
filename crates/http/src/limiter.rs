//! Limits how much there is at a time, in all and per key, so that nobody can take all slots: connections,
//! relays, name look-ups, tasks. And how many log lines say so.
//!
//! In: a key, such as a client network or a user. Out: a slot, released when dropped. Always holds: at most
//! the given numbers of slots are in use; where a new one evicts, the key with the most slots gives up its
//! oldest one, and no key takes a slot from one that has fewer.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap},
    hash::Hash,
    net::{IpAddr, Ipv6Addr},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use tokio::sync::Notify;

/// At most one log line per network in this time.
const LOG_INTERVAL: Duration = Duration::from_secs(60);
/// Networks that are logged in that time. More: a flood from many addresses fills the log.
const MAX_LOGGED_NETWORKS: usize = 64;

/// The key of a client: an IPv4 address, or the /64 of an IPv6 address, because whoever has one address of a
/// /64 has all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ClientNetwork(IpAddr);

impl ClientNetwork {
    /// The network of an address.
    pub fn of(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V4(v4) => Self(v4.into()),
            IpAddr::V6(v6) => Self(Ipv6Addr::from(u128::from(v6) >> 64 << 64).into()),
        }
    }
}

impl std::fmt::Display for ClientNetwork {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            IpAddr::V4(v4) => v4.fmt(f),
            IpAddr::V6(v6) => write!(f, "{v6}/64"),
        }
    }
}

/// No slot is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LimitReached {
    /// This key has this many.
    #[error("the limit per client network or user is reached: {0}")]
    PerKey(usize),
    /// All keys together have this many.
    #[error("the limit for all is reached: {0}")]
    Total(usize),
}

/// A pool of slots.
#[derive(Debug)]
pub struct Limiter<K> {
    max_total: usize,
    max_per_key: usize,
    state: Mutex<LimiterState<K>>,
}

#[derive(Debug)]
struct LimiterState<K> {
    next: u64,
    in_use: usize,
    /// The slots of each key that has any, by number: the oldest first; each is notified when it is given
    /// away.
    slots: HashMap<K, BTreeMap<u64, Arc<Notify>>>,
}

impl<K: Clone + Eq + Hash> LimiterState<K> {
    fn release(&mut self, key: &K, number: u64) {
        let Some(slots) = self.slots.get_mut(key) else { return };
        self.in_use -= usize::from(slots.remove(&number).is_some());
        if slots.is_empty() {
            self.slots.remove(key);
        }
    }

    /// Releases the oldest slot of the key with the most slots, if it has more than `key`; of several such
    /// keys, of that with the oldest slot. Returns whether there was one.
    fn evict_for(&mut self, key: &K) -> bool {
        let own = self.slots.get(key).map_or(0, BTreeMap::len);
        let age =
            |slots: &BTreeMap<u64, Arc<Notify>>| Reverse(slots.first_key_value().map(|(number, _)| *number));
        let largest = self.slots.iter().max_by_key(|(_, slots)| (slots.len(), age(slots)));
        let Some((largest, slots)) = largest.filter(|(_, slots)| slots.len() > own) else { return false };
        let Some((number, evicted)) = slots.first_key_value() else { return false };
        evicted.notify_one();
        let (largest, number) = (largest.clone(), *number);
        self.release(&largest, number);
        true
    }
}

impl<K: Clone + Eq + Hash> Limiter<K> {
    /// A pool of `max_total` slots, of which one key may hold `max_per_key`.
    pub fn new(max_total: usize, max_per_key: usize) -> Arc<Self> {
        let state = LimiterState { next: 0, in_use: 0, slots: HashMap::new() };
        Arc::new(Self { max_total, max_per_key, state: Mutex::new(state) })
    }

    /// A slot, if one is free.
    pub fn try_acquire(self: &Arc<Self>, key: K) -> Result<Slot<K>, LimitReached> {
        self.acquire(key, false)
    }

    /// A slot; if all are in use, the oldest of the key with the most slots is evicted, if that has more than
    /// this one.
    pub fn acquire_evicting(self: &Arc<Self>, key: K) -> Result<Slot<K>, LimitReached> {
        self.acquire(key, true)
    }

    fn acquire(self: &Arc<Self>, key: K, evicts: bool) -> Result<Slot<K>, LimitReached> {
        let mut state = self.state();
        if state.slots.get(&key).map_or(0, BTreeMap::len) >= self.max_per_key {
            return Err(LimitReached::PerKey(self.max_per_key));
        }
        if state.in_use >= self.max_total && !(evicts && state.evict_for(&key)) {
            return Err(LimitReached::Total(self.max_total));
        }
        let number = state.next;
        state.next += 1;
        state.in_use += 1;
        let evicted = Arc::new(Notify::new());
        state.slots.entry(key.clone()).or_default().insert(number, Arc::clone(&evicted));
        Ok(Slot { limiter: Arc::clone(self), number, key, evicted })
    }

    /// Runs `work` in a task of its own, with a slot that may evict. The task ends when the slot is given to
    /// another key. Returns whether it runs.
    pub fn spawn(self: &Arc<Self>, key: K, work: impl Future<Output = ()> + Send + 'static) -> bool
    where
        K: Send + 'static,
    {
        let Ok(slot) = self.acquire_evicting(key) else { return false };
        tokio::spawn(async move {
            tokio::select! {
                () = slot.evicted.notified() => {}
                () = work => {}
            }
        });
        true
    }

    /// The number of slots in use.
    pub fn in_use(&self) -> usize {
        self.state().in_use
    }

    fn state(&self) -> std::sync::MutexGuard<'_, LimiterState<K>> {
        // The counts are consistent even after a panic elsewhere.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A slot in use.
#[derive(Debug)]
pub struct Slot<K: Clone + Eq + Hash> {
    limiter: Arc<Limiter<K>>,
    number: u64,
    key: K,
    evicted: Arc<Notify>,
}

impl<K: Clone + Eq + Hash> Slot<K> {
    /// The key that holds the slot.
    pub fn key(&self) -> &K {
        &self.key
    }

    /// Another slot for the same key, if one is free.
    pub fn another(&self) -> Result<Self, LimitReached> {
        self.limiter.try_acquire(self.key.clone())
    }

    /// Notified once, when the slot is given to another key.
    pub fn evicted(&self) -> Arc<Notify> {
        Arc::clone(&self.evicted)
    }
}

impl<K: Clone + Eq + Hash> Drop for Slot<K> {
    fn drop(&mut self) {
        self.limiter.state().release(&self.key, self.number);
    }
}

/// Limits log lines about refusals.
#[derive(Debug)]
pub struct RefusalLog(Mutex<RefusalWindow>);

#[derive(Debug)]
struct RefusalWindow {
    since: Instant,
    counts: HashMap<ClientNetwork, u64>,
}

impl Default for RefusalLog {
    fn default() -> Self {
        Self(Mutex::new(RefusalWindow { since: Instant::now(), counts: HashMap::new() }))
    }
}

impl RefusalLog {
    /// Counts a refusal. Returns `None` if it must not be logged, else the number of refusals that were not
    /// logged in the previous interval.
    pub fn on_refused(&self, now: Instant, source: ClientNetwork) -> Option<u64> {
        let mut window = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut before = 0;
        if now.saturating_duration_since(window.since) >= LOG_INTERVAL {
            window.since = now;
            before = window.counts.remove(&source).unwrap_or(1) - 1;
            window.counts.clear();
        }
        if window.counts.len() >= MAX_LOGGED_NETWORKS && !window.counts.contains_key(&source) {
            return None;
        }
        let count = window.counts.entry(source).or_default();
        *count += 1;
        (*count == 1).then_some(before)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(text: &str) -> ClientNetwork {
        ClientNetwork::of(text.parse().unwrap())
    }

    #[test]
    fn nobody_takes_all_the_room_and_what_is_left_is_free_again() {
        let limiter = Limiter::new(4, 2);
        let (a, b) = (source("192.0.2.1"), source("192.0.2.2"));
        let first = [limiter.try_acquire(a).unwrap(), limiter.try_acquire(a).unwrap()];
        assert_eq!(limiter.try_acquire(a).unwrap_err(), LimitReached::PerKey(2));
        let _second = [limiter.try_acquire(b).unwrap(), limiter.try_acquire(b).unwrap()];
        let c = source("192.0.2.3");
        assert_eq!(limiter.try_acquire(c).unwrap_err(), LimitReached::Total(4));
        drop(first);
        let _third = limiter.try_acquire(c).unwrap();
        let _fourth = limiter.try_acquire(a).unwrap();
        assert_eq!(limiter.state().slots.len(), 3);
    }

    #[tokio::test]
    async fn who_has_waited_longest_makes_room() {
        let limiter = Limiter::new(2, 2);
        let oldest = limiter.acquire_evicting(source("192.0.2.1")).unwrap();
        let other = limiter.acquire_evicting(source("192.0.2.2")).unwrap();
        let _new = limiter.acquire_evicting(source("192.0.2.3")).unwrap();
        oldest.evicted().notified().await;
        let waits = other.evicted();
        tokio::select! {
            biased;
            () = waits.notified() => panic!("the wrong one was pushed out"),
            () = std::future::ready(()) => {}
        }
        drop(oldest);
        assert_eq!(limiter.in_use(), 2);
    }

    #[tokio::test]
    async fn who_holds_most_loses_its_oldest_task() {
        use std::future::pending;
        let limiter = Limiter::new(8, 8);
        assert!((0..8).all(|_| limiter.spawn(1, pending())));
        assert!(!limiter.spawn(1, pending()), "it would lose one of its own");
        let held = || [1, 2, 3].map(|key| limiter.state().slots.get(&key).map_or(0, BTreeMap::len));
        assert!((0..4).all(|_| limiter.spawn(2, pending())), "as many as the other one");
        assert!(!limiter.spawn(2, pending()));
        assert_eq!(held(), [4, 4, 0]);
        assert!(limiter.spawn(3, pending()) && limiter.spawn(3, pending()));
        tokio::task::yield_now().await;
        assert_eq!(held(), [3, 3, 2]);
    }

    #[tokio::test]
    async fn a_slot_is_free_when_its_task_has_ended() {
        let limiter = Limiter::new(2, 2);
        for _ in 0..10 {
            assert!(limiter.spawn(1, async {}) && limiter.spawn(2, async {}));
            tokio::task::yield_now().await;
            tokio::task::yield_now().await;
        }
        assert!(limiter.state().slots.is_empty(), "keys are forgotten with their last task");
    }

    #[test]
    fn a_network_of_ipv6_is_one_source_and_a_mapped_address_is_ipv4() {
        assert_eq!(source("2001:db8::1"), source("2001:db8::ffff:0:1"));
        assert_ne!(source("2001:db8::1"), source("2001:db8:0:1::1"));
        assert_eq!(source("::ffff:192.0.2.1"), source("192.0.2.1"));
        assert_eq!(source("2001:db8::1").to_string(), "2001:db8::/64");
    }

    #[test]
    fn a_source_is_told_of_once_a_minute() {
        let refusal_log = RefusalLog::default();
        let now = Instant::now();
        let one = source("192.0.2.1");
        assert_eq!(refusal_log.on_refused(now, one), Some(0));
        assert_eq!(refusal_log.on_refused(now, one), None);
        assert_eq!(refusal_log.on_refused(now, one), None);
        let window = (0..10_000_u32)
            .filter(|n| refusal_log.on_refused(now, ClientNetwork::of(IpAddr::V4((*n).into()))).is_some());
        assert_eq!(window.count(), MAX_LOGGED_NETWORKS - 1);
        assert_eq!(refusal_log.on_refused(now + LOG_INTERVAL, one), Some(2));
    }
}
