//! The shapers of the links of a client, shared by all its connections at this end.
//!
//! In: shares of classes, capacities of links. Out: a [`ShaperHandle`] for each class and link. Always holds:
//! a link has one shaper, whichever connection asks.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use mpvpn_class::{Shaper, ShaperHandle, Share};
use mpvpn_types::{BitRate, ClassId, Instant};

/// Links from which on those that no connection uses are forgotten: a client has at most 16 links, each with
/// its number. Fewer: what was measured of a link is forgotten while none of its paths is open; more: memory
/// of a client that makes numbers up (1 KB each).
const MAX_UNUSED_LINKS: usize = 32;

#[derive(Debug, Default)]
struct Inner {
    shares: BTreeMap<ClassId, Share>,
    /// Configured capacity and shaper, by the client's number of the link.
    links: BTreeMap<u16, (Option<BitRate>, Arc<Mutex<Shaper>>)>,
}

/// The shapers of one client. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Shapers(Arc<Mutex<Inner>>);

impl Shapers {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        // No code panics while it holds the lock.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the share of a class on each link.
    pub(crate) fn set_share(&self, now: Instant, class: ClassId, share: Share) {
        let mut inner = self.lock();
        inner.shares.insert(class, share);
        for (_, shaper) in inner.links.values() {
            ShaperHandle::new(shaper.clone(), class).shaper().set_share(now, class, share);
        }
    }

    /// The handle of a class at the shaper of a link with this `capacity`; `None`: the shaper measures it.
    pub(crate) fn handle(
        &self,
        now: Instant,
        link: u16,
        class: ClassId,
        capacity: Option<BitRate>,
    ) -> ShaperHandle {
        let inner = &mut *self.lock();
        if inner.links.len() >= MAX_UNUSED_LINKS && !inner.links.contains_key(&link) {
            inner.links.retain(|_, (_, shaper)| Arc::strong_count(shaper) > 1);
        }
        let (given, shaper) = inner.links.entry(link).or_insert_with(|| {
            let mut shaper = Shaper::new(now, capacity).with_link_number(link);
            for (class, share) in &inner.shares {
                shaper.set_share(now, *class, *share);
            }
            (capacity, Arc::new(Mutex::new(shaper)))
        });
        let handle = ShaperHandle::new(shaper.clone(), class);
        if std::mem::replace(given, capacity) != capacity {
            handle.shaper().set_capacity(now, capacity);
        }
        handle
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_share_the_shaper_of_a_link() {
        let (shapers, now) = (Shapers::default(), Instant::now());
        let rate = |mbit: u64| Some(BitRate::from_bps(mbit * 1_000_000));
        let one = shapers.handle(now, 3, ClassId(0), rate(10));
        let two = shapers.clone().handle(now, 3, ClassId(1), rate(20));
        assert!(!one.is_same(&shapers.handle(now, 4, ClassId(0), None)));
        assert_eq!(one.shaper().capacity(), rate(20), "the last capacity applies");
        assert_eq!(two.shaper().capacity(), rate(20));
    }

    #[test]
    fn link_numbers_that_are_made_up_are_forgotten_and_links_in_use_are_kept() {
        let (shapers, now) = (Shapers::default(), Instant::now());
        let used: Vec<_> = (0..5).map(|link| shapers.handle(now, link, ClassId(0), None)).collect();
        for link in 5..10_000 {
            drop(shapers.handle(now, link, ClassId(0), None));
            assert!(shapers.lock().links.len() <= MAX_UNUSED_LINKS);
        }
        for (link, handle) in (0..).zip(&used) {
            assert!(handle.is_same(&shapers.handle(now, link, ClassId(0), None)), "link {link}");
        }
    }
}
