//! Caches resolved names, and joins concurrent lookups of the same name.
//!
//! In: names, and results of lookups. Out: whether to start a lookup, and the waiters of a result. Always
//! holds: one lookup at a time per name; results are cached for a short time only, because the system's
//! resolver does not report TTLs; the number of cached names is bounded.

use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    net::IpAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use super::budget::Permit;

/// How long addresses are cached. Longer: stale addresses. Shorter: load on name servers. Chosen.
const POSITIVE_TTL: Duration = Duration::from_secs(30);
/// How long a failure is cached. Longer: a repaired name fails for longer. Chosen.
const NEGATIVE_TTL: Duration = Duration::from_secs(5);
/// Cached names. More: memory. Fewer: more lookups. Chosen.
const MAX_CACHED_NAMES: usize = 4096;
/// Addresses of a name that are used. Chosen.
const MAX_ADDRESSES_PER_NAME: usize = 32;

/// The addresses in the resolver's order, or the error.
pub(super) type LookupResult = Result<Arc<[IpAddr]>, Arc<str>>;

/// The name cache of one shard. `W` identifies a waiter.
pub(super) struct NameCache<W> {
    cached: HashMap<Arc<str>, CachedName>,
    /// The cached names, oldest first.
    oldest_first: VecDeque<(Arc<str>, Instant)>,
    pending: HashMap<Arc<str>, PendingLookup<W>>,
}

struct CachedName {
    result: LookupResult,
    until: Instant,
}

struct PendingLookup<W> {
    waiters: BTreeSet<W>,
    /// Held until the lookup is complete.
    _permit: Permit,
}

impl<W: Ord + Copy> NameCache<W> {
    pub(super) fn new() -> Self {
        Self { cached: HashMap::new(), oldest_first: VecDeque::new(), pending: HashMap::new() }
    }

    /// The cached result for a name.
    pub(super) fn cached(&self, now: Instant, name: &str) -> Option<LookupResult> {
        self.cached.get(name).filter(|entry| now < entry.until).map(|entry| entry.result.clone())
    }

    /// Adds a waiter to a running lookup. Returns false if there is none.
    pub(super) fn add_waiter(&mut self, name: &str, waiter: W) -> bool {
        self.pending.get_mut(name).is_some_and(|lookup| lookup.waiters.insert(waiter))
    }

    /// Records a started lookup, with its permit and first waiter.
    pub(super) fn start_lookup(&mut self, name: &str, waiter: W, permit: Permit) {
        self.pending
            .insert(name.into(), PendingLookup { waiters: BTreeSet::from([waiter]), _permit: permit });
    }

    /// Removes a waiter. The lookup continues for the cache.
    pub(super) fn remove_waiter(&mut self, name: &str, waiter: W) {
        if let Some(lookup) = self.pending.get_mut(name) {
            lookup.waiters.remove(&waiter);
        }
    }

    /// Caches the result of a lookup; returns its waiters.
    pub(super) fn complete(
        &mut self,
        now: Instant,
        name: &str,
        result: Result<Vec<IpAddr>, String>,
    ) -> (BTreeSet<W>, LookupResult) {
        let result: LookupResult = match result {
            Ok(list) => Ok(list.into_iter().take(MAX_ADDRESSES_PER_NAME).collect()),
            Err(reason) => Err(reason.into()),
        };
        let until = now + if result.is_ok() { POSITIVE_TTL } else { NEGATIVE_TTL };
        let key: Arc<str> = name.into();
        self.cached.insert(key.clone(), CachedName { result: result.clone(), until });
        self.oldest_first.push_back((key, until));
        while self.oldest_first.len() > MAX_CACHED_NAMES {
            self.forget_oldest();
        }
        let waiters = self.pending.remove(name).map(|lookup| lookup.waiters).unwrap_or_default();
        (waiters, result)
    }

    fn forget_oldest(&mut self) {
        let Some((name, until)) = self.oldest_first.pop_front() else { return };
        // The entry may belong to a newer lookup.
        if self.cached.get(&name).is_some_and(|entry| entry.until == until) {
            self.cached.remove(&name);
        }
    }
}

#[cfg(test)]
mod tests {
    use mpvpn_http::limiter::Limiter;

    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn a_name_is_asked_for_once_and_all_who_wait_are_told() {
        let (mut names, now) = (NameCache::new(), Instant::now());
        let budget = Limiter::new(10, 10);
        assert!(!names.add_waiter("a", 1));
        names.start_lookup("a", 1, budget.try_acquire("anna".into()).unwrap());
        assert!(names.add_waiter("a", 2) && names.add_waiter("a", 3) && !names.add_waiter("b", 4));
        names.remove_waiter("a", 2);
        let (waiters, result) = names.complete(now, "a", Ok(vec![ip("192.0.2.1")]));
        assert_eq!(waiters, BTreeSet::from([1, 3]));
        assert_eq!(result.unwrap()[..], [ip("192.0.2.1")]);
        assert_eq!(budget.in_use(), 0, "the question is over");
        assert!(!names.add_waiter("a", 5), "nobody asks any more");
    }

    #[test]
    fn what_was_found_counts_for_a_while() {
        let (mut names, now) = (NameCache::<u8>::new(), Instant::now());
        drop(names.complete(now, "good", Ok(vec![ip("192.0.2.1")])));
        drop(names.complete(now, "bad", Err("no such name".into())));
        let at = |seconds| now + Duration::from_secs(seconds);
        assert!(names.cached(at(29), "good").unwrap().is_ok());
        assert!(names.cached(at(30), "good").is_none());
        assert_eq!(names.cached(at(4), "bad").unwrap().unwrap_err().as_ref(), "no such name");
        assert!(names.cached(at(5), "bad").is_none());
        assert!(names.cached(now, "other").is_none());
        // Forgetting an older result keeps the newer one.
        drop(names.complete(at(31), "good", Ok(vec![])));
        names.forget_oldest();
        assert!(names.cached(at(32), "good").is_some());
    }

    #[test]
    fn names_and_their_addresses_are_bounded() {
        let (mut names, now) = (NameCache::<u8>::new(), Instant::now());
        for n in 0..MAX_CACHED_NAMES + 10 {
            drop(names.complete(now, &n.to_string(), Ok(vec![ip("192.0.2.1"); 1000])));
        }
        assert_eq!((names.cached.len(), names.oldest_first.len()), (MAX_CACHED_NAMES, MAX_CACHED_NAMES));
        assert!(names.cached(now, "9").is_none());
        assert_eq!(names.cached(now, "10").unwrap().unwrap().len(), MAX_ADDRESSES_PER_NAME);
    }
}
