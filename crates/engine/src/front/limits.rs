//! How many may be served at once, in all and of one kind, so that nobody can take all the room.
//!
//! In: who comes, with what it counts as: an address, a user. Out: a place, given back when it is dropped. Always holds: as
//! many places as were said; where newcomers go first, the one that has waited longest makes room for them.

use std::{
    collections::{BTreeMap, HashMap},
    hash::Hash,
    net::{IpAddr, Ipv6Addr},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use tokio::sync::Notify;

/// One line for a source in so much time.
const TOLD_AGAIN: Duration = Duration::from_secs(60);
/// Sources that are told of in that time, at most.
const TOLD_OF: usize = 64;

/// Where connections come from: an IPv4 address, or the 64 bits of an IPv6 network, as whoever has one has all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Source(IpAddr);

impl Source {
    pub(super) fn of(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V4(v4) => Self(v4.into()),
            IpAddr::V6(v6) => Self(Ipv6Addr::from(u128::from(v6) >> 64 << 64).into()),
        }
    }
}

impl std::fmt::Display for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            IpAddr::V4(v4) => v4.fmt(f),
            IpAddr::V6(v6) => write!(f, "{v6}/64"),
        }
    }
}

/// What there is no place for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Crowded {
    #[error("there are as many as there may be of one: {0}")]
    OfOne(usize),
    #[error("there are as many as there may be in all: {0}")]
    All(usize),
}

/// Places.
#[derive(Debug)]
pub(super) struct Room<K> {
    most: usize,
    most_of_one: usize,
    taken: Mutex<Taken<K>>,
}

#[derive(Debug)]
struct Taken<K> {
    next: u64,
    /// Who is to be told when its place is given to another, in the order of arrival.
    places: BTreeMap<u64, Arc<Notify>>,
    of_each: HashMap<K, usize>,
}

impl<K: Clone + Eq + Hash> Room<K> {
    /// `most` places, of which one may have `most_of_one`.
    pub(super) fn new(most: usize, most_of_one: usize) -> Arc<Self> {
        let taken = Taken { next: 0, places: BTreeMap::new(), of_each: HashMap::new() };
        Arc::new(Self { most, most_of_one, taken: Mutex::new(taken) })
    }

    /// A place, if one is free.
    pub(super) fn enter(self: &Arc<Self>, who: K) -> Result<Place<K>, Crowded> {
        self.admit(who, false)
    }

    /// A place, if need be that of who has been here longest.
    pub(super) fn push_in(self: &Arc<Self>, who: K) -> Result<Place<K>, Crowded> {
        self.admit(who, true)
    }

    fn admit(self: &Arc<Self>, who: K, pushes: bool) -> Result<Place<K>, Crowded> {
        let mut taken = self.taken();
        if taken.of_each.get(&who).is_some_and(|count| *count >= self.most_of_one) {
            return Err(Crowded::OfOne(self.most_of_one));
        }
        if taken.places.len() >= self.most {
            let oldest = if pushes { taken.places.pop_first() } else { None };
            let (_, left) = oldest.ok_or(Crowded::All(self.most))?;
            left.notify_one();
        }
        let number = taken.next;
        taken.next += 1;
        let pushed_out = Arc::new(Notify::new());
        taken.places.insert(number, Arc::clone(&pushed_out));
        *taken.of_each.entry(who.clone()).or_default() += 1;
        Ok(Place { room: Arc::clone(self), number, who, pushed_out })
    }

    /// Places that are taken.
    pub(super) fn len(&self) -> usize {
        self.taken().places.len()
    }

    fn taken(&self) -> std::sync::MutexGuard<'_, Taken<K>> {
        // Counting goes on after a panic elsewhere.
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A place that is taken.
#[derive(Debug)]
pub(super) struct Place<K: Clone + Eq + Hash> {
    room: Arc<Room<K>>,
    number: u64,
    who: K,
    pushed_out: Arc<Notify>,
}

impl<K: Clone + Eq + Hash> Place<K> {
    /// Tells, once, that another has this place now.
    pub(super) fn pushed_out(&self) -> Arc<Notify> {
        Arc::clone(&self.pushed_out)
    }
}

impl<K: Clone + Eq + Hash> Drop for Place<K> {
    fn drop(&mut self) {
        let mut taken = self.room.taken();
        taken.places.remove(&self.number);
        if let Some(count) = taken.of_each.get_mut(&self.who) {
            *count -= 1;
            if *count == 0 {
                taken.of_each.remove(&self.who);
            }
        }
    }
}

/// What was refused, told in few lines.
#[derive(Debug)]
pub(super) struct Complaints(Mutex<Told>);

#[derive(Debug)]
struct Told {
    since: Instant,
    of: HashMap<Source, u64>,
}

impl Complaints {
    pub(super) fn new() -> Self {
        Self(Mutex::new(Told { since: Instant::now(), of: HashMap::new() }))
    }

    /// Something of `source` was refused at `now`: whether to tell that, and how much more there was in the last minute.
    pub(super) fn tell(&self, now: Instant, source: Source) -> Option<u64> {
        let mut told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut before = 0;
        if now.saturating_duration_since(told.since) >= TOLD_AGAIN {
            told.since = now;
            before = told.of.remove(&source).unwrap_or(1) - 1;
            told.of.clear();
        }
        if told.of.len() >= TOLD_OF && !told.of.contains_key(&source) {
            return None;
        }
        let count = told.of.entry(source).or_default();
        *count += 1;
        (*count == 1).then_some(before)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(text: &str) -> Source {
        Source::of(text.parse().unwrap())
    }

    #[test]
    fn nobody_takes_all_the_room_and_what_is_left_is_free_again() {
        let room = Room::new(4, 2);
        let (a, b) = (source("192.0.2.1"), source("192.0.2.2"));
        let first = [room.enter(a).unwrap(), room.enter(a).unwrap()];
        assert_eq!(room.enter(a).unwrap_err(), Crowded::OfOne(2));
        let _second = [room.enter(b).unwrap(), room.enter(b).unwrap()];
        let c = source("192.0.2.3");
        assert_eq!(room.enter(c).unwrap_err(), Crowded::All(4));
        drop(first);
        let _third = room.enter(c).unwrap();
        let _fourth = room.enter(a).unwrap();
        assert_eq!(room.taken().of_each.len(), 3);
    }

    #[tokio::test]
    async fn who_has_waited_longest_makes_room() {
        let room = Room::new(2, 2);
        let oldest = room.push_in(source("192.0.2.1")).unwrap();
        let other = room.push_in(source("192.0.2.2")).unwrap();
        let _new = room.push_in(source("192.0.2.3")).unwrap();
        oldest.pushed_out().notified().await;
        let waits = other.pushed_out();
        tokio::select! {
            biased;
            () = waits.notified() => panic!("the wrong one was pushed out"),
            () = std::future::ready(()) => {}
        }
        drop(oldest);
        assert_eq!(room.taken().places.len(), 2);
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
        let complaints = Complaints::new();
        let now = Instant::now();
        let one = source("192.0.2.1");
        assert_eq!(complaints.tell(now, one), Some(0));
        assert_eq!(complaints.tell(now, one), None);
        assert_eq!(complaints.tell(now, one), None);
        let told =
            (0..10_000_u32).filter(|n| complaints.tell(now, Source::of(IpAddr::V4((*n).into()))).is_some());
        assert_eq!(told.count(), TOLD_OF - 1);
        assert_eq!(complaints.tell(now + TOLD_AGAIN, one), Some(2));
    }
}
