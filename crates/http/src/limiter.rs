//! Limits how many connections there are, in all and per key, so that nobody can take all slots, and how many
//! log lines say so.
//!
//! In: a key, such as a client network or a user. Out: a slot, released when dropped. Always holds: at most
//! the given numbers of slots are in use; where new connections evict, the oldest slot is given up for them.

use std::{
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
pub struct ConnectionLimiter<K> {
    max_total: usize,
    max_per_key: usize,
    state: Mutex<LimiterState<K>>,
}

#[derive(Debug)]
struct LimiterState<K> {
    next: u64,
    /// Notified when the slot is given to another connection; in the order of arrival.
    slots: BTreeMap<u64, Arc<Notify>>,
    counts: HashMap<K, usize>,
}

impl<K: Clone + Eq + Hash> ConnectionLimiter<K> {
    /// A pool of `max_total` slots, of which one key may hold `max_per_key`.
    pub fn new(max_total: usize, max_per_key: usize) -> Arc<Self> {
        let state = LimiterState { next: 0, slots: BTreeMap::new(), counts: HashMap::new() };
        Arc::new(Self { max_total, max_per_key, state: Mutex::new(state) })
    }

    /// A slot, if one is free.
    pub fn try_acquire(self: &Arc<Self>, key: K) -> Result<Slot<K>, LimitReached> {
        self.acquire(key, false)
    }

    /// A slot; if all are in use, the oldest is evicted.
    pub fn acquire_evicting(self: &Arc<Self>, key: K) -> Result<Slot<K>, LimitReached> {
        self.acquire(key, true)
    }

    fn acquire(self: &Arc<Self>, key: K, evicts: bool) -> Result<Slot<K>, LimitReached> {
        let mut state = self.state();
        if state.counts.get(&key).is_some_and(|count| *count >= self.max_per_key) {
            return Err(LimitReached::PerKey(self.max_per_key));
        }
        if state.slots.len() >= self.max_total {
            let oldest = if evicts { state.slots.pop_first() } else { None };
            let (_, left) = oldest.ok_or(LimitReached::Total(self.max_total))?;
            left.notify_one();
        }
        let number = state.next;
        state.next += 1;
        let evicted = Arc::new(Notify::new());
        state.slots.insert(number, Arc::clone(&evicted));
        *state.counts.entry(key.clone()).or_default() += 1;
        Ok(Slot { limiter: Arc::clone(self), number, key, evicted })
    }

    /// The number of slots in use.
    pub fn in_use(&self) -> usize {
        self.state().slots.len()
    }

    fn state(&self) -> std::sync::MutexGuard<'_, LimiterState<K>> {
        // The counts are consistent even after a panic elsewhere.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A slot in use.
#[derive(Debug)]
pub struct Slot<K: Clone + Eq + Hash> {
    limiter: Arc<ConnectionLimiter<K>>,
    number: u64,
    key: K,
    evicted: Arc<Notify>,
}

impl<K: Clone + Eq + Hash> Slot<K> {
    /// Notified once, when the slot is given to another connection.
    pub fn evicted(&self) -> Arc<Notify> {
        Arc::clone(&self.evicted)
    }
}

impl<K: Clone + Eq + Hash> Drop for Slot<K> {
    fn drop(&mut self) {
        let mut state = self.limiter.state();
        state.slots.remove(&self.number);
        if let Some(count) = state.counts.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                state.counts.remove(&self.key);
            }
        }
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
        let limiter = ConnectionLimiter::new(4, 2);
        let (a, b) = (source("192.0.2.1"), source("192.0.2.2"));
        let first = [limiter.try_acquire(a).unwrap(), limiter.try_acquire(a).unwrap()];
        assert_eq!(limiter.try_acquire(a).unwrap_err(), LimitReached::PerKey(2));
        let _second = [limiter.try_acquire(b).unwrap(), limiter.try_acquire(b).unwrap()];
        let c = source("192.0.2.3");
        assert_eq!(limiter.try_acquire(c).unwrap_err(), LimitReached::Total(4));
        drop(first);
        let _third = limiter.try_acquire(c).unwrap();
        let _fourth = limiter.try_acquire(a).unwrap();
        assert_eq!(limiter.state().counts.len(), 3);
    }

    #[tokio::test]
    async fn who_has_waited_longest_makes_room() {
        let limiter = ConnectionLimiter::new(2, 2);
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
        assert_eq!(limiter.state().slots.len(), 2);
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
