//! What the sender knows of its groups: which losses the receiver makes good by itself.

use std::collections::VecDeque;

use mpvpn_types::{Duration, Instant};
use rustc_hash::FxHashMap;

use super::{Place, Shard, guard::Closed};

/// Groups that are followed at most: those of a second at 1 Gbit/s.
const MOST_GROUPS: usize = 8192;

/// Follows what of groups arrived and what was lost. `T` is what was lost.
#[derive(Debug)]
pub struct Fates<T> {
    groups: FxHashMap<u16, Fate<T>>,
    /// All in `groups`, and some that are not any more, the oldest in front.
    order: VecDeque<u16>,
    /// Groups with losses about which nothing is known yet, and until when that may be so.
    held: VecDeque<(Instant, u16)>,
    made_good: u64,
}

#[derive(Debug)]
struct Fate<T> {
    /// Its size, once it is closed.
    closed: Option<Closed>,
    /// Packets and repair that arrived.
    arrived: u16,
    /// The same that were lost.
    lost: u16,
    /// Packets among those.
    held: Vec<T>,
    /// What is lost is sent again.
    given_up: bool,
}

impl<T> Default for Fates<T> {
    fn default() -> Self {
        Self { groups: FxHashMap::default(), order: VecDeque::new(), held: VecDeque::new(), made_good: 0 }
    }
}

impl<T> Fates<T> {
    /// No group is open.
    pub fn new() -> Self {
        Self::default()
    }

    /// A group is opened.
    pub fn open(&mut self, group: u16) {
        let fresh = Fate { closed: None, arrived: 0, lost: 0, held: Vec::new(), given_up: false };
        self.groups.insert(group, fresh);
        self.order.push_back(group);
        if self.order.len() > MOST_GROUPS
            && let Some(oldest) = self.order.pop_front()
        {
            self.groups.remove(&oldest);
        }
    }

    /// A group is closed. Here as below `out` gets what has to be sent again.
    pub fn close(&mut self, closed: Closed, out: impl FnMut(T)) {
        if let Some(fate) = self.groups.get_mut(&closed.group) {
            fate.closed = Some(closed);
            self.settle(closed.group, out);
        }
    }

    /// A part of a group arrived.
    pub fn arrived(&mut self, place: Place, out: impl FnMut(T)) {
        if let Some(fate) = self.groups.get_mut(&place.group) {
            fate.arrived += 1;
            self.settle(place.group, out);
        }
    }

    /// A part of a group was lost; `wait` is how long it may take to learn what became of the rest.
    pub fn lost(&mut self, now: Instant, place: Place, what: T, wait: Duration, mut out: impl FnMut(T)) {
        let is_data = matches!(place.shard, Shard::Data(_));
        let Some(fate) = self.groups.get_mut(&place.group) else {
            // It was sent too long ago.
            if is_data {
                out(what);
            }
            return;
        };
        fate.lost += 1;
        if is_data {
            if fate.held.is_empty() && !fate.given_up {
                self.held.push_back((now + wait, place.group));
            }
            fate.held.push(what);
        }
        self.settle(place.group, out);
    }

    /// Hands out losses about which nothing was learned for too long.
    pub fn handle_timeout(&mut self, now: Instant, mut out: impl FnMut(T)) {
        while let Some((_, group)) = self.held.pop_front_if(|(until, _)| *until <= now) {
            if let Some(fate) = self.groups.get_mut(&group) {
                fate.given_up = true;
                fate.held.drain(..).for_each(&mut out);
            }
        }
    }

    /// When [`Self::handle_timeout`] has something to do.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.held.front().map(|(until, _)| *until)
    }

    /// Losses that the receiver made good.
    pub fn made_good(&self) -> u64 {
        self.made_good
    }

    fn settle(&mut self, group: u16, out: impl FnMut(T)) {
        let Some(fate) = self.groups.get_mut(&group) else { return };
        if let Some(Closed { data, repair, .. }) = fate.closed {
            if fate.arrived >= data.into() {
                self.made_good += fate.held.len() as u64;
                fate.held.clear();
            } else if fate.lost > repair.into() {
                fate.given_up = true;
            }
        }
        if fate.given_up {
            fate.held.drain(..).for_each(out);
        }
        if fate
            .closed
            .is_some_and(|all| fate.arrived + fate.lost >= u16::from(all.data) + u16::from(all.repair))
        {
            self.groups.remove(&group);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn data(index: u8) -> Place {
        Place { group: 3, shard: Shard::Data(index) }
    }

    fn repair(index: u8) -> Place {
        Place { group: 3, shard: Shard::Repair { index, data: 4 } }
    }

    /// A group of 4 packets and 2 of repair, of which these are lost and these arrive; what is to be sent again.
    fn run(lost: &[Place], arrived: &[Place]) -> (Vec<Place>, Fates<Place>) {
        let now = Instant::now();
        let (mut fates, mut again) = (Fates::new(), Vec::new());
        fates.open(3);
        fates.close(Closed { group: 3, data: 4, repair: 2 }, |_| {});
        for place in arrived {
            fates.arrived(*place, |place| again.push(place));
        }
        for place in lost {
            fates.lost(now, *place, *place, 10 * MS, |place| again.push(place));
        }
        (again, fates)
    }

    #[test]
    fn what_repair_makes_good_is_not_sent_again() {
        let (again, fates) = run(&[data(0), data(2)], &[data(1), data(3), repair(0), repair(1)]);
        assert_eq!((again, fates.made_good(), fates.groups.len()), (vec![], 2, 0));
    }

    #[test]
    fn what_is_beyond_repair_is_sent_again_and_repair_is_not() {
        let (again, fates) = run(&[data(0), repair(1), data(2)], &[data(1), data(3), repair(0)]);
        assert_eq!((again, fates.made_good(), fates.groups.len()), (vec![data(0), data(2)], 0, 0));
    }

    #[test]
    fn what_nobody_knows_enough_about_is_held_for_a_while() {
        let (again, mut fates) = run(&[data(0)], &[data(1), data(3)]);
        assert_eq!(again, []);
        let until = fates.poll_timeout().unwrap();
        let mut again = Vec::new();
        fates.handle_timeout(until - MS, |place| again.push(place));
        assert_eq!(again, []);
        fates.handle_timeout(until, |place| again.push(place));
        assert_eq!((again, fates.poll_timeout()), (vec![data(0)], None));
        let mut again = Vec::new();
        fates.lost(until, data(2), data(2), 10 * MS, |place| again.push(place));
        assert_eq!(again, [data(2)], "the group is given up");
    }

    #[test]
    fn groups_are_forgotten_in_the_end() {
        let mut fates = Fates::new();
        (0..=u16::MAX).for_each(|group| fates.open(group));
        assert_eq!((fates.groups.len(), fates.order.len()), (MOST_GROUPS, MOST_GROUPS));
        let mut again = Vec::new();
        fates.lost(Instant::now(), data(0), 7, MS, |what| again.push(what));
        assert_eq!(again, [7], "nothing is known of it any more");
    }
}
