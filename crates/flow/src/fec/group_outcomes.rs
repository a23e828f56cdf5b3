//! At the sender: which lost packets the receiver restores, and which have to be sent again.

use std::collections::{BTreeMap, VecDeque};

use mpvpn_types::{Duration, Instant, PathId, target::FEC};
use rustc_hash::FxHashMap;

use super::group_encoder::ClosedGroup;

/// Groups that are tracked at most: those of two seconds at 1 Gbit/s, of 20 packets each. Fewer: restorable
/// losses are sent again; more: memory.
const MAX_GROUPS: usize = 8192;

/// Counters of the use that repair packets of a path had.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OutcomeStats {
    /// Lost packets that the receiver could restore.
    pub restored: u64,
    /// Repair packets that arrived and were not needed.
    pub wasted: u64,
}

/// Tracks acknowledged and lost packets of each group. `T` is a packet that can be sent again.
#[derive(Debug)]
pub struct GroupOutcomes<T> {
    groups: FxHashMap<u16, GroupOutcome<T>>,
    /// All in `groups`, and some that were removed, the oldest first.
    order: VecDeque<u16>,
    /// Groups with losses that may be restored, and until when this may stay unknown.
    held: VecDeque<(Instant, u16)>,
    /// Counters of open paths.
    stats: BTreeMap<PathId, OutcomeStats>,
    /// Lost packets of closed paths that the receiver could restore.
    restored_on_closed: u64,
}

#[derive(Debug)]
struct GroupOutcome<T> {
    /// The size of the group, once it is closed.
    closed: Option<ClosedGroup>,
    /// Acknowledged source and repair packets.
    arrived: u16,
    /// Lost source and repair packets.
    lost: u16,
    /// Lost source packets that may be restored.
    held: Vec<T>,
    /// The receiver cannot restore the losses, or this stayed unknown for too long: they are sent again.
    given_up: bool,
}

impl<T> Default for GroupOutcomes<T> {
    fn default() -> Self {
        Self {
            groups: FxHashMap::default(),
            order: VecDeque::new(),
            held: VecDeque::new(),
            stats: BTreeMap::new(),
            restored_on_closed: 0,
        }
    }
}

impl<T> GroupOutcomes<T> {
    /// Before the first group.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a group.
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

    /// Notes that a group is closed. Here and below, packets to be sent again are passed to `out`.
    pub fn close(&mut self, closed: ClosedGroup, out: impl FnMut(T)) {
        if let Some(outcome) = self.groups.get_mut(&closed.group) {
            outcome.closed = Some(closed);
            self.stats.entry(closed.path).or_default();
            self.decide(closed.group, out);
        }
    }

    /// A source or repair packet of a group was acknowledged.
    pub fn on_arrived(&mut self, group: u16, out: impl FnMut(T)) {
        if let Some(outcome) = self.groups.get_mut(&group) {
            outcome.arrived += 1;
            self.decide(group, out);
        }
    }

    /// A source packet of a group, or a repair packet (`None`), was lost; `wait` is how long the outcome of
    /// the other packets may stay unknown.
    pub fn on_lost(
        &mut self,
        now: Instant,
        group: u16,
        packet: Option<T>,
        wait: Duration,
        mut out: impl FnMut(T),
    ) {
        let Some(outcome) = self.groups.get_mut(&group) else {
            // The group is no longer tracked.
            packet.into_iter().for_each(out);
            return;
        };
        outcome.lost += 1;
        if let Some(packet) = packet {
            if outcome.held.is_empty() && !outcome.given_up {
                self.held.push_back((now + wait, group));
            }
            outcome.held.push(packet);
        }
        self.decide(group, &mut out);
    }

    /// Passes to `out` the losses whose wait is over.
    pub fn handle_timeout(&mut self, now: Instant, mut out: impl FnMut(T)) {
        while let Some((_, group)) = self.held.pop_front_if(|(until, _)| *until <= now) {
            if let Some(outcome) = self.groups.get_mut(&group) {
                let (arrived, lost) = (outcome.arrived, outcome.lost);
                tracing::trace!(
                    target: FEC,
                    group,
                    arrived,
                    lost,
                    packets = outcome.held.len(),
                    "not known whether losses are restored: they are sent again"
                );
                outcome.given_up = true;
                outcome.held.drain(..).for_each(&mut out);
            }
        }
    }

    /// When [`Self::handle_timeout`] has something to do.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.held.front().map(|(until, _)| *until)
    }

    /// Lost packets of all paths that the receiver could restore.
    pub fn restored_losses(&self) -> u64 {
        self.restored_on_closed + self.stats.values().map(|stats| stats.restored).sum::<u64>()
    }

    /// The counters of an open path.
    pub fn stats_of(&self, path: PathId) -> OutcomeStats {
        self.stats.get(&path).copied().unwrap_or_default()
    }

    /// Keeps no counters of this path any more, which is closed. Its last groups count for all paths only.
    pub fn on_path_closed(&mut self, path: PathId) {
        self.restored_on_closed += self.stats.remove(&path).unwrap_or_default().restored;
    }

    fn decide(&mut self, group: u16, out: impl FnMut(T)) {
        let Some(outcome) = self.groups.get_mut(&group) else { return };
        if let Some(ClosedGroup { path, source_count: data, repair_count: repair, .. }) = outcome.closed {
            if outcome.arrived >= data.into() {
                if !outcome.held.is_empty() {
                    tracing::trace!(
                        target: FEC,
                        group,
                        packets = outcome.held.len(),
                        "the receiver restores the lost packets"
                    );
                }
                match self.stats.get_mut(&path) {
                    Some(stats) => stats.restored += outcome.held.len() as u64,
                    None => self.restored_on_closed += outcome.held.len() as u64,
                }
                outcome.held.clear();
            } else if outcome.lost > repair.into() {
                if !outcome.given_up {
                    tracing::trace!(
                        target: FEC,
                        group,
                        data,
                        repair,
                        lost = outcome.lost,
                        "more packets are lost than can be restored: they are sent again"
                    );
                }
                outcome.given_up = true;
            }
        }
        if outcome.given_up {
            outcome.held.drain(..).for_each(out);
        }
        if let Some(all) = outcome.closed
            && outcome.arrived + outcome.lost >= u16::from(all.source_count) + u16::from(all.repair_count)
        {
            // The receiver needs as many packets of a group as it has source packets.
            let wasted = outcome.arrived.saturating_sub(all.source_count.into());
            if let Some(stats) = self.stats.get_mut(&all.path) {
                stats.wasted += u64::from(wasted);
            }
            self.groups.remove(&group);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const PATH: PathId = PathId(5);

    /// A group of 4 source and 2 repair packets, of which `lost` are lost (0 is a repair packet) and
    /// `arrived` packets arrive; returns the packets to be sent again.
    fn run(lost: &[u8], arrived: usize) -> (Vec<u8>, GroupOutcomes<u8>) {
        let now = Instant::now();
        let (mut outcomes, mut again) = (GroupOutcomes::new(), Vec::new());
        outcomes.open(3);
        outcomes.close(ClosedGroup { path: PATH, group: 3, source_count: 4, repair_count: 2 }, |_| {});
        for _ in 0..arrived {
            outcomes.on_arrived(3, |packet| again.push(packet));
        }
        for packet in lost {
            let packet = (*packet > 0).then_some(*packet);
            outcomes.on_lost(now, 3, packet, 10 * MS, |packet| again.push(packet));
        }
        (again, outcomes)
    }

    #[test]
    fn restorable_losses_are_not_sent_again() {
        let (again, outcomes) = run(&[1, 2], 4);
        assert_eq!((again, outcomes.restored_losses(), outcomes.groups.len()), (vec![], 2, 0));
    }

    #[test]
    fn losses_beyond_repair_are_sent_again_without_repair_packets() {
        let (again, outcomes) = run(&[1, 0, 2], 3);
        assert_eq!((again, outcomes.restored_losses(), outcomes.groups.len()), (vec![1, 2], 0, 0));
    }

    #[test]
    fn repair_packets_that_arrive_beyond_the_losses_are_wasted() {
        for (lost, arrived, restored, wasted) in
            [(&[][..], 6, 0, 2), (&[1], 5, 1, 1), (&[1, 2], 4, 2, 0), (&[0], 5, 0, 1), (&[1, 0, 2], 3, 0, 0)]
        {
            let (_, mut outcomes) = run(lost, arrived);
            assert_eq!(outcomes.stats_of(PATH), OutcomeStats { restored, wasted }, "{lost:?}");
            assert_eq!(outcomes.stats_of(PathId(6)), OutcomeStats::default());
            outcomes.on_path_closed(PATH);
            assert_eq!((outcomes.restored_losses(), outcomes.stats.len()), (restored, 0));
        }
    }

    #[test]
    fn the_last_groups_of_a_closed_path_count_and_leave_nothing_behind() {
        let mut outcomes: GroupOutcomes<u8> = GroupOutcomes::new();
        outcomes.open(3);
        outcomes.close(ClosedGroup { path: PATH, group: 3, source_count: 1, repair_count: 1 }, |_| {});
        outcomes.on_path_closed(PATH);
        outcomes.on_lost(Instant::now(), 3, Some(1), MS, |_| panic!("it is restored"));
        outcomes.on_arrived(3, |_| panic!("it is restored"));
        assert_eq!((outcomes.restored_losses(), outcomes.stats.len(), outcomes.groups.len()), (1, 0, 0));
    }

    #[test]
    fn losses_of_unknown_outcome_are_held_for_a_while() {
        let (again, mut outcomes) = run(&[1], 2);
        assert_eq!(again, []);
        let until = outcomes.poll_timeout().unwrap();
        let mut again = Vec::new();
        outcomes.handle_timeout(until - MS, |packet| again.push(packet));
        assert_eq!(again, []);
        outcomes.handle_timeout(until, |packet| again.push(packet));
        assert_eq!((again, outcomes.poll_timeout()), (vec![1], None));
        let mut again = Vec::new();
        outcomes.on_lost(until, 3, Some(2), 10 * MS, |packet| again.push(packet));
        assert_eq!(again, [2], "the group is given up");
    }

    #[test]
    fn groups_are_forgotten_in_the_end() {
        let mut outcomes: GroupOutcomes<u8> = GroupOutcomes::new();
        (0..=u16::MAX).for_each(|group| outcomes.open(group));
        assert_eq!((outcomes.groups.len(), outcomes.order.len()), (MAX_GROUPS, MAX_GROUPS));
        let mut again = Vec::new();
        outcomes.on_lost(Instant::now(), 3, Some(7), MS, |packet| again.push(packet));
        assert_eq!(again, [7], "it is no longer tracked");
    }
}
