use mpvpn_types::{Duration, Instant, PathId, target::SCHEDULER};

use crate::scheduler::{Policy, Scheduler};

/// Nobody may save up more than this (seconds of a path's rate) while others carry everything.
pub(crate) const MOST_SAVED: f64 = 0.05;
/// A packet that is to leave on several paths waits no longer for room on all of them: a path with nothing to slow it has
/// room several times in this.
const COMPANY: Duration = Duration::from_millis(5);

/// What a path can do for the next packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathCandidate {
    /// Which path.
    pub id: PathId,
    /// Bytes that it may take now.
    pub available_window: u64,
    /// Time from here to the far end with the path's queue empty.
    pub one_way_delay: Duration,
    /// Bytes sent and not acknowledged, or queued for the path.
    pub outstanding: u64,
    /// Estimated rate in bytes/s; 0 if nothing is known.
    pub rate: u64,
    /// Share of the work that it shall have under [`Scheduler::Weighted`].
    pub weight: u32,
}

impl PathCandidate {
    /// When `bytes` that are sent now, behind what is on the path already, would have arrived.
    pub(crate) fn arrival_delay(&self, bytes: u64) -> Duration {
        // What is only under way, there or as an acknowledgement back, is nobody's hindrance.
        let under_way = (u128::from(self.rate) * self.one_way_delay.as_nanos() * 2 / 1_000_000_000) as u64;
        let queue = self.outstanding.saturating_sub(under_way) + bytes;
        let nanos = u128::from(queue) * 1_000_000_000 / u128::from(self.rate.max(1));
        self.one_way_delay.saturating_add(Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)))
    }

    /// The path was given `bytes` bytes.
    pub fn assign(&mut self, bytes: u64) {
        self.available_window = self.available_window.saturating_sub(bytes);
        self.outstanding += bytes;
    }
}

/// What [`PathSelector::pick`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Selection {
    /// The place of the path in the offers.
    pub index: usize,
    /// Nothing would arrive earlier on another path, whether that has room or not.
    pub arrives_first: bool,
}

impl Selection {
    /// Nothing would arrive earlier elsewhere.
    pub(crate) fn best(at: usize) -> Self {
        Self { index: at, arrives_first: true }
    }
}

/// What each path has done: seconds of its rate, or what else [`Policy::share`] makes of bytes.
#[derive(Debug, Default)]
pub(crate) struct Work(Vec<(PathId, f64)>);

impl Work {
    fn of(&self, id: PathId) -> f64 {
        self.0.iter().find(|(other, _)| *other == id).map_or(0.0, |(_, work)| *work)
    }

    fn add(&mut self, policy: &dyn Policy, offer: &PathCandidate, bytes: u64) {
        let done = bytes as f64 / policy.share(offer);
        match self.0.iter_mut().find(|(id, _)| *id == offer.id) {
            Some((_, work)) => *work += done,
            None => self.0.push((offer.id, done)),
        }
    }

    /// The path with room that has done the least for its share. One that could not do its share for a
    /// while does not make up for it.
    pub(crate) fn least(&mut self, policy: &dyn Policy, offers: &[PathCandidate]) -> Option<usize> {
        self.0.retain(|(id, _)| offers.iter().any(|offer| offer.id == *id));
        let most = self.0.iter().map(|(_, work)| *work).fold(0.0, f64::max);
        for offer in offers {
            let saved = policy.most_saved(offer);
            match self.0.iter_mut().find(|(id, _)| *id == offer.id) {
                Some((_, work)) => *work = work.max(most - saved),
                None => self.0.push((offer.id, most)),
            }
        }
        let with_room = offers.iter().enumerate().filter(|(_, offer)| offer.available_window > 0);
        with_room.min_by(|(_, a), (_, b)| self.of(a.id).total_cmp(&self.of(b.id))).map(|(at, _)| at)
    }
}

/// Decides which path carries the next packets.
#[derive(Debug, Default)]
pub struct PathSelector {
    work: Work,
    /// Copies of each packet beside the first one, each on another path.
    copies: u8,
    /// Since when a packet could be sent, but not as often as it should be.
    lonely: Option<Instant>,
}

impl PathSelector {
    /// Nothing has been sent yet, and each packet is to leave once.
    pub fn new() -> Self {
        Self::default()
    }

    /// Every packet is to leave so often, each time on another path, whatever the scheduler; [`Scheduler::Redundant`] takes
    /// all paths anyway.
    pub fn set_copies(&mut self, copies: u8) {
        self.copies = copies.saturating_sub(1);
    }

    /// What was said last with [`Self::set_copies`].
    pub fn copies(&self) -> u8 {
        self.copies + 1
    }

    /// The path that carries the next packets, with `backlog` bytes waiting; `None` if it is better to
    /// wait. `offers` are in the order of preference of the scheduler.
    pub fn pick(
        &mut self,
        now: Instant,
        scheduler: Scheduler,
        offers: &[PathCandidate],
        backlog: u64,
    ) -> Option<Selection> {
        let policy = scheduler.policy();
        let pick = policy.pick(&mut self.work, offers, backlog)?;
        let company = if policy.uses_all_paths() { 1 } else { self.copies };
        if company > 0 && !self.has_company(now, offers, pick.index, company.into()) {
            tracing::trace!(
                target: SCHEDULER,
                path = offers[pick.index].id.0,
                company,
                "no room for copies: wait"
            );
            return None;
        }
        tracing::trace!(
            target: SCHEDULER,
            path = offers[pick.index].id.0,
            best = pick.arrives_first,
            arrival = ?offers[pick.index].arrival_delay(0),
            room = offers[pick.index].available_window,
            ahead = offers[pick.index].outstanding,
            rate = offers[pick.index].rate,
            backlog,
            "this path is next"
        );
        Some(pick)
    }

    /// When [`Self::pick`] decides otherwise, whatever happens to the paths.
    pub fn poll_timeout(&self, now: Instant) -> Option<Instant> {
        self.lonely.map(|since| since + COMPANY).filter(|at| *at > now)
    }

    /// Whether there is room for copies on so many paths beside the one at `at`, or has been none for some time. Nobody
    /// waits for a path that is so slow that it could copy no more than half.
    fn has_company(&mut self, now: Instant, offers: &[PathCandidate], at: usize, company: usize) -> bool {
        let others = || offers.iter().enumerate().filter(|(other, _)| *other != at).map(|(_, offer)| offer);
        let able = |offer: &&PathCandidate| offer.available_window > 0 || offer.rate >= offers[at].rate / 2;
        let with_room = others().filter(|offer| offer.available_window > 0).count();
        if with_room >= company.min(others().filter(able).count()) {
            self.lonely = None;
            return true;
        }
        now >= *self.lonely.get_or_insert(now) + COMPANY
    }

    /// A path was given `bytes` bytes.
    pub fn charge(&mut self, scheduler: Scheduler, offer: &PathCandidate, bytes: u64) {
        self.work.add(scheduler.policy(), offer, bytes);
    }
}

/// The first path with room, in the order of the offers.
pub(crate) fn first_with_room(offers: &[PathCandidate]) -> Option<usize> {
    offers.iter().position(|offer| offer.available_window > 0)
}

/// The place of the path on which a packet that is sent now arrives first, of those with room.
pub fn first_to_arrive(offers: &[PathCandidate]) -> Option<usize> {
    first_to_arrive_if(offers, |_| true)
}

/// The same of those for which `may` says yes.
pub fn first_to_arrive_if(offers: &[PathCandidate], may: impl Fn(&PathCandidate) -> bool) -> Option<usize> {
    let with_room = offers.iter().enumerate().filter(|(_, offer)| offer.available_window > 0 && may(offer));
    with_room.min_by_key(|(_, offer)| offer.arrival_delay(0)).map(|(at, _)| at)
}

/// By how much what is sent on the path of `offers[at]` arrives later than on the quickest path, with no queue on either,
/// and how many bytes the far end would have to hold for it meanwhile, from the paths that are quicker.
///
/// Acknowledgements come back on the quickest path, so round trips differ by as much as the ways there.
pub fn delay_difference(offers: &[PathCandidate], at: usize) -> (Duration, u64) {
    let (mut most, mut held) = (Duration::ZERO, 0u64);
    for other in offers {
        let apart = offers[at].one_way_delay.saturating_sub(other.one_way_delay) * 2;
        let bytes = apart.as_nanos() * u128::from(other.rate) / 1_000_000_000;
        held = held.saturating_add(u64::try_from(bytes).unwrap_or(u64::MAX));
        most = most.max(apart);
    }
    (most, held)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(id: u32, delay_ms: u64, mbit: u64, room: u64) -> PathCandidate {
        PathCandidate {
            id: PathId(id),
            available_window: room,
            one_way_delay: Duration::from_millis(delay_ms),
            outstanding: 0,
            rate: mbit * 125_000,
            weight: 1,
        }
    }

    /// Sends some packets each millisecond, for a second, on paths that have room for what their rate
    /// carries; shares of what was sent.
    fn run(scheduler: Scheduler, mut offers: Vec<PathCandidate>, packets: u32) -> Vec<f64> {
        let (mut choice, now) = (PathSelector::new(), Instant::now());
        let mut sent = vec![0u64; offers.len()];
        for _ in 0..1000 {
            for offer in &mut offers {
                offer.available_window = (offer.available_window + offer.rate / 1000).min(offer.rate / 200);
            }
            for _ in 0..packets {
                let Some(Selection { index: at, .. }) = choice.pick(now, scheduler, &offers, 1 << 20) else {
                    break;
                };
                offers[at].available_window = offers[at].available_window.saturating_sub(1400);
                sent[at] += 1400;
                choice.charge(scheduler, &offers[at], 1400);
            }
        }
        let all: u64 = sent.iter().sum();
        sent.iter().map(|bytes| *bytes as f64 / all as f64).collect()
    }

    #[test]
    fn auto_takes_the_path_on_which_a_packet_arrives_first() {
        let (mut choice, now) = (PathSelector::new(), Instant::now());
        let mut offers = [offer(0, 20, 100, 9000), offer(1, 5, 10, 9000)];
        assert_eq!(
            choice.pick(now, Scheduler::Auto, &offers, 1400),
            Some(Selection { index: 1, arrives_first: true })
        );
        offers[1].outstanding = 40_000;
        assert_eq!(
            choice.pick(now, Scheduler::Auto, &offers, 1400),
            Some(Selection { index: 0, arrives_first: true })
        );
    }

    #[test]
    fn auto_spills_over_only_when_that_is_quicker_than_waiting() {
        let (mut choice, now) = (PathSelector::new(), Instant::now());
        let offers = [offer(0, 5, 100, 0), offer(1, 15, 80, 9000)];
        assert_eq!(choice.pick(now, Scheduler::Auto, &offers, 14_000), None);
        // 10 ms of the first path's rate.
        assert_eq!(
            choice.pick(now, Scheduler::Auto, &offers, 125_000),
            Some(Selection { index: 1, arrives_first: false })
        );
    }

    #[test]
    fn auto_leaves_a_path_alone_that_is_much_slower() {
        let (mut choice, now) = (PathSelector::new(), Instant::now());
        let offers = [offer(0, 7, 50, 0), offer(1, 150, 20, 9000)];
        assert_eq!(choice.pick(now, Scheduler::Auto, &offers, 100 << 20), None);
        assert_eq!(
            choice.pick(now, Scheduler::Auto, &offers[1..], 1400),
            Some(Selection { index: 0, arrives_first: true })
        );
    }

    #[test]
    fn what_comes_late_is_held_for_by_all_that_is_quicker() {
        let offers = [offer(0, 10, 8, 0), offer(1, 5, 16, 0), offer(2, 35, 80, 0)];
        assert_eq!(delay_difference(&offers, 1), (Duration::ZERO, 0));
        assert_eq!(delay_difference(&offers, 0), (Duration::from_millis(10), 20_000));
        assert_eq!(delay_difference(&offers, 2), (Duration::from_millis(60), 50_000 + 120_000));
    }

    #[test]
    fn redundant_waits_a_little_for_room_on_two_paths_unless_the_other_is_slow() {
        let (mut choice, now) = (PathSelector::new(), Instant::now());
        let mut offers = [offer(0, 5, 100, 9000), offer(1, 15, 80, 9000)];
        let first = Some(Selection { index: 0, arrives_first: true });
        assert_eq!(choice.pick(now, Scheduler::Redundant, &offers, 1400), first);
        assert_eq!(choice.pick(now, Scheduler::Redundant, &offers[..1], 1400), first);
        offers[1].available_window = 0;
        assert_eq!(choice.pick(now, Scheduler::Redundant, &offers, 1400), None);
        assert_eq!(choice.poll_timeout(now), Some(now + COMPANY));
        let later = now + COMPANY;
        assert_eq!(choice.pick(later, Scheduler::Redundant, &offers, 1400), first);
        assert_eq!(choice.poll_timeout(later), None, "nothing changes any more");
        offers[1].available_window = 9000;
        assert_eq!(choice.pick(later, Scheduler::Redundant, &offers, 1400), first);
        offers[1].available_window = 0;
        assert_eq!(choice.pick(later, Scheduler::Redundant, &offers, 1400), None, "it is waited for again");
        offers[1] = offer(1, 15, 40, 0);
        assert_eq!(choice.pick(later, Scheduler::Redundant, &offers, 1400), first);
    }

    #[test]
    fn copies_wait_a_little_for_room_on_as_many_paths_as_they_need() {
        let (mut choice, now) = (PathSelector::new(), Instant::now());
        choice.set_copies(3);
        let mut offers = [offer(0, 5, 100, 9000), offer(1, 15, 80, 0), offer(2, 15, 80, 9000)];
        let first = Some(Selection { index: 0, arrives_first: true });
        assert_eq!(choice.pick(now, Scheduler::Auto, &offers, 1400), None);
        assert_eq!(choice.pick(now + COMPANY, Scheduler::Auto, &offers, 1400), first);
        offers[1].available_window = 9000;
        assert_eq!(choice.pick(now, Scheduler::MinRtt, &offers, 1400), first);
        assert_eq!(choice.pick(now, Scheduler::MinRtt, &offers[..2], 1400), first, "as many as there are");
        offers[1] = offer(1, 15, 40, 0);
        assert_eq!(choice.pick(now, Scheduler::Balanced, &offers, 1400).map(|pick| pick.index), Some(0));
    }

    #[test]
    fn balanced_shares_by_capacity() {
        let shares = run(Scheduler::Balanced, vec![offer(0, 5, 30, 0), offer(1, 90, 10, 0)], 2);
        assert!((0.72..0.78).contains(&shares[0]), "{shares:?}");
    }

    #[test]
    fn weighted_shares_by_weight() {
        let mut offers = vec![offer(0, 5, 50, 0), offer(1, 5, 50, 0)];
        offers[0].weight = 4;
        let shares = run(Scheduler::Weighted, offers, 4);
        assert!((0.75..0.85).contains(&shares[0]), "{shares:?}");
    }

    #[test]
    fn a_path_that_had_no_room_does_not_make_up_for_it() {
        let (mut choice, now) = (PathSelector::new(), Instant::now());
        let mut offers = [offer(0, 5, 10, 9000), offer(1, 5, 10, 0)];
        for _ in 0..10_000 {
            let at = choice.pick(now, Scheduler::Balanced, &offers, 1400).unwrap().index;
            choice.charge(Scheduler::Balanced, &offers[at], 1400);
        }
        offers[1].available_window = 9000;
        let mut run = 0;
        while choice.pick(now, Scheduler::Balanced, &offers, 1400).unwrap().index == 1 {
            choice.charge(Scheduler::Balanced, &offers[1], 1400);
            run += 1;
        }
        assert!(run <= 46, "{run} packets in a row are more than 50 ms of the rate");
    }
}
