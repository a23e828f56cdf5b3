//! What the sender knows of its groups: which losses the receiver makes good by itself.

use std::collections::VecDeque;

use mpvpn_types::{Duration, Instant, target::FEC};
use rustc_hash::FxHashMap;

use super::group_encoder::ClosedGroup;

/// Groups that are followed at most: those of a second at 1 Gbit/s.
const MAX_GROUPS: usize = 8192;

/// Follows what of groups arrived and what was lost. `T` is what was lost.
#[derive(Debug)]
pub struct GroupOutcomes<T> {
    groups: FxHashMap<u16, GroupOutcome<T>>,
    /// All in `groups`, and some that are not any more, the oldest in front.
    order: VecDeque<u16>,
    /// Groups with losses about which nothing is known yet, and until when that may be so.
    held: VecDeque<(Instant, u16)>,
    made_good: u64,
}

#[derive(Debug)]
struct GroupOutcome<T> {
    /// Its size, once it is closed.
    closed: Option<ClosedGroup>,
    /// Packets and repair that arrived.
    arrived: u16,
    /// The same that were lost.
    lost: u16,
    /// Packets among those.
    held: Vec<T>,
    /// What is lost is sent again.
    given_up: bool,
}

impl<T> Default for GroupOutcomes<T> {
    fn default() -> Self {
        Self { groups: FxHashMap::default(), order: VecDeque::new(), held: VecDeque::new(), made_good: 0 }
    }
}

impl<T> GroupOutcomes<T> {
    /// No group is open.
    pub fn new() -> Self {
        Self::default()
    }

    /// A group is opened.
    pub fn open(&mut self, group: u16) {
        let fresh = GroupOutcome { closed: None, arrived: 0, lost: 0, held: Vec::new(), given_up: false };
        self.groups.insert(group, fresh);
        self.order.push_back(group);
        if self.order.len() > MAX_GROUPS
            && let Some(oldest) = self.order.pop_front()
        {
            self.groups.remove(&oldest);
        }
    }

    /// A group is closed. Here as below `out` gets what has to be sent again.
    pub fn close(&mut self, closed: ClosedGroup, out: impl FnMut(T)) {
        if let Some(fate) = self.groups.get_mut(&closed.group) {
            fate.closed = Some(closed);
            self.settle(closed.group, out);
        }
    }

    /// A packet of a group, or repair for it, arrived.
    pub fn on_arrived(&mut self, group: u16, out: impl FnMut(T)) {
        if let Some(fate) = self.groups.get_mut(&group) {
            fate.arrived += 1;
            self.settle(group, out);
        }
    }

    /// A packet of a group was lost, or repair for it (`None`); `wait` is how long it may take to learn what became of the
    /// rest.
    pub fn on_lost(
        &mut self,
        now: Instant,
        group: u16,
        packet: Option<T>,
        wait: Duration,
        mut out: impl FnMut(T),
    ) {
        let Some(fate) = self.groups.get_mut(&group) else {
            // It was sent too long ago.
            packet.into_iter().for_each(out);
            return;
        };
        fate.lost += 1;
        if let Some(packet) = packet {
            if fate.held.is_empty() && !fate.given_up {
                self.held.push_back((now + wait, group));
            }
            fate.held.push(packet);
        }
        self.settle(group, &mut out);
    }

    /// Hands out losses about which nothing was learned for too long.
    pub fn handle_timeout(&mut self, now: Instant, mut out: impl FnMut(T)) {
        while let Some((_, group)) = self.held.pop_front_if(|(until, _)| *until <= now) {
            if let Some(fate) = self.groups.get_mut(&group) {
                let (arrived, lost) = (fate.arrived, fate.lost);
                tracing::trace!(
                    target: FEC,
                    group,
                    arrived,
                    lost,
                    packets = fate.held.len(),
                    "fate unknown for too long: sent again"
                );
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
    pub fn restored_losses(&self) -> u64 {
        self.made_good
    }

    fn settle(&mut self, group: u16, out: impl FnMut(T)) {
        let Some(fate) = self.groups.get_mut(&group) else { return };
        if let Some(ClosedGroup { source_count: data, repair_count: repair, .. }) = fate.closed {
            if fate.arrived >= data.into() {
                if !fate.held.is_empty() {
                    tracing::trace!(
                        target: FEC,
                        group,
                        packets = fate.held.len(),
                        "the far end restores what was lost"
                    );
                }
                self.made_good += fate.held.len() as u64;
                fate.held.clear();
            } else if fate.lost > repair.into() {
                if !fate.given_up {
                    tracing::trace!(
                        target: FEC,
                        group,
                        data,
                        repair,
                        lost = fate.lost,
                        "more is lost than repair makes good: sent again"
                    );
                }
                fate.given_up = true;
            }
        }
        if fate.given_up {
            fate.held.drain(..).for_each(out);
        }
        if fate.closed.is_some_and(|all| {
            fate.arrived + fate.lost >= u16::from(all.source_count) + u16::from(all.repair_count)
        }) {
            self.groups.remove(&group);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// A group of 4 packets and 2 of repair, of which these are lost (0 is repair) and so many arrive; what is to be sent
    /// again.
    fn run(lost: &[u8], arrived: usize) -> (Vec<u8>, GroupOutcomes<u8>) {
        let now = Instant::now();
        let (mut fates, mut again) = (GroupOutcomes::new(), Vec::new());
        fates.open(3);
        fates.close(ClosedGroup { group: 3, source_count: 4, repair_count: 2 }, |_| {});
        for _ in 0..arrived {
            fates.on_arrived(3, |packet| again.push(packet));
        }
        for packet in lost {
            let packet = (*packet > 0).then_some(*packet);
            fates.on_lost(now, 3, packet, 10 * MS, |packet| again.push(packet));
        }
        (again, fates)
    }

    #[test]
    fn what_repair_makes_good_is_not_sent_again() {
        let (again, fates) = run(&[1, 2], 4);
        assert_eq!((again, fates.restored_losses(), fates.groups.len()), (vec![], 2, 0));
    }

    #[test]
    fn what_is_beyond_repair_is_sent_again_and_repair_is_not() {
        let (again, fates) = run(&[1, 0, 2], 3);
        assert_eq!((again, fates.restored_losses(), fates.groups.len()), (vec![1, 2], 0, 0));
    }

    #[test]
    fn what_nobody_knows_enough_about_is_held_for_a_while() {
        let (again, mut fates) = run(&[1], 2);
        assert_eq!(again, []);
        let until = fates.poll_timeout().unwrap();
        let mut again = Vec::new();
        fates.handle_timeout(until - MS, |packet| again.push(packet));
        assert_eq!(again, []);
        fates.handle_timeout(until, |packet| again.push(packet));
        assert_eq!((again, fates.poll_timeout()), (vec![1], None));
        let mut again = Vec::new();
        fates.on_lost(until, 3, Some(2), 10 * MS, |packet| again.push(packet));
        assert_eq!(again, [2], "the group is given up");
    }

    #[test]
    fn groups_are_forgotten_in_the_end() {
        let mut fates: GroupOutcomes<u8> = GroupOutcomes::new();
        (0..=u16::MAX).for_each(|group| fates.open(group));
        assert_eq!((fates.groups.len(), fates.order.len()), (MAX_GROUPS, MAX_GROUPS));
        let mut again = Vec::new();
        fates.on_lost(Instant::now(), 3, Some(7), MS, |packet| again.push(packet));
        assert_eq!(again, [7], "nothing is known of it any more");
    }
}
