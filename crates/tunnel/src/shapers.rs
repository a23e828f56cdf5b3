//! The shapers in front of the links of a client, which all its connections at this end share.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use mpvpn_class::{Shaper, ShaperHandle, Share};
use mpvpn_types::{BitRate, ClassId, Instant};

#[derive(Debug, Default)]
struct Inner {
    shares: BTreeMap<ClassId, Share>,
    /// By the client's number of the link; the capacity as it was given.
    links: BTreeMap<u16, (Option<BitRate>, Arc<Mutex<Shaper>>)>,
}

/// The shapers of one client. Clones are the same.
#[derive(Clone, Debug, Default)]
pub(crate) struct Shapers(Arc<Mutex<Inner>>);

impl Shapers {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Nothing here panics half-way.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Says what a class may have of each link.
    pub(crate) fn set_share(&self, now: Instant, class: ClassId, share: Share) {
        let mut inner = self.lock();
        inner.shares.insert(class, share);
        for (_, shaper) in inner.links.values() {
            ShaperHandle::new(shaper.clone(), class).shaper().set_share(now, class, share);
        }
    }

    /// The place of a class at the shaper of a link that carries `capacity`; `None`: that is to be measured.
    pub(crate) fn seat(
        &self,
        now: Instant,
        link: u16,
        class: ClassId,
        capacity: Option<BitRate>,
    ) -> ShaperHandle {
        let inner = &mut *self.lock();
        let (given, shaper) = inner.links.entry(link).or_insert_with(|| {
            let mut shaper = Shaper::new(now, capacity).with_link_number(link);
            for (class, share) in &inner.shares {
                shaper.set_share(now, *class, *share);
            }
            (capacity, Arc::new(Mutex::new(shaper)))
        });
        let seat = ShaperHandle::new(shaper.clone(), class);
        if std::mem::replace(given, capacity) != capacity {
            seat.shaper().set_capacity(now, capacity);
        }
        seat
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_meet_at_the_shaper_of_a_link() {
        let (shapers, now) = (Shapers::default(), Instant::now());
        let rate = |mbit: u64| Some(BitRate::from_bps(mbit * 1_000_000));
        let one = shapers.seat(now, 3, ClassId(0), rate(10));
        let two = shapers.clone().seat(now, 3, ClassId(1), rate(20));
        assert!(!one.is_same(&shapers.seat(now, 4, ClassId(0), None)));
        assert_eq!(one.shaper().capacity(), rate(20), "what was said last counts");
        assert_eq!(two.shaper().capacity(), rate(20));
    }
}
