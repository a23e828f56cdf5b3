use mpvpn_types::{Duration, Instant, PathId, bytes_in, target::SCHEDULER};

use crate::scheduler::{Policy, Scheduler};

/// How far a path may fall behind in carried work, in seconds of its rate, and still catch up. Larger: longer
/// bursts on that path afterwards; smaller: a path with gaps loses its share. Chosen.
pub(crate) const MAX_WORK_DEFICIT_SECS: f64 = 0.05;
/// How long a packet with copies waits for available window on enough paths: a path without a limit has some
/// several times in this time. Larger: packets wait for slow paths; smaller: fewer packets get copies.
const COPY_WAIT: Duration = Duration::from_millis(5);

/// A path that could carry the next packets, with what the scheduler knows of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathCandidate {
    /// The number of the path.
    pub id: PathId,
    /// Bytes that congestion control, pacing and the shaper of its link allow now.
    pub available_window: u64,
    /// Time to the peer while the path has no queue ([`set_one_way_delays`]).
    pub one_way_delay: Duration,
    /// Time until an acknowledgement is back while the path has no queue, over the path on which it returns.
    pub round_trip: Duration,
    /// Bytes in flight or queued for the path.
    pub outstanding: u64,
    /// Delivery rate in bytes/s; 0 if unknown.
    pub rate: u64,
    /// Weight of its link under [`Scheduler::Weighted`].
    pub weight: u32,
}

impl PathCandidate {
    /// Time until `bytes` that are sent now have arrived, behind what is on the path already.
    pub fn arrival_delay(&self, bytes: u64) -> Duration {
        // A bandwidth-delay product of bytes is in flight, or acknowledged on the way back, without a queue.
        let queue = self.outstanding.saturating_sub(bytes_in(self.rate, self.round_trip)) + bytes;
        if queue == 0 {
            return self.one_way_delay;
        }
        let nanos = u128::from(queue) * 1_000_000_000 / u128::from(self.rate.max(1));
        self.one_way_delay.saturating_add(Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)))
    }

    /// Counts `bytes` that were handed to the path.
    pub fn assign(&mut self, bytes: u64) {
        self.available_window = self.available_window.saturating_sub(bytes);
        self.outstanding += bytes;
    }
}

/// Computes how long packets travel on each path without queues, and adds that to the one-way delays that are
/// set already. Acknowledgements of all paths return on the quickest one, whose way there is taken to be as
/// long as its way back.
pub fn set_one_way_delays(candidates: [&mut [PathCandidate]; 2]) {
    let back = candidates.iter().flat_map(|some| some.iter()).map(|candidate| candidate.round_trip).min();
    let back = back.unwrap_or_default() / 2;
    for candidate in candidates.into_iter().flatten() {
        let way = candidate.round_trip.saturating_sub(back);
        candidate.one_way_delay = candidate.one_way_delay.saturating_add(way);
    }
}

/// The path that [`PathSelector::pick`] chose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Selection {
    /// The index of the path among the candidates.
    pub index: usize,
    /// No other path would deliver earlier, whether it has available window or not.
    pub arrives_first: bool,
}

impl Selection {
    /// The path that delivers first of all.
    pub(crate) fn best(at: usize) -> Self {
        Self { index: at, arrives_first: true }
    }
}

/// How much each path has carried, as bytes / [`Policy::share`]: in seconds of its rate, or per unit of
/// weight.
#[derive(Debug, Default)]
pub(crate) struct Work(Vec<(PathId, f64)>);

impl Work {
    fn of(&self, id: PathId) -> f64 {
        self.0.iter().find(|(other, _)| *other == id).map_or(0.0, |(_, work)| *work)
    }

    fn add(&mut self, policy: &dyn Policy, candidate: &PathCandidate, bytes: u64) {
        let done = bytes as f64 / policy.share(candidate);
        match self.0.iter_mut().find(|(id, _)| *id == candidate.id) {
            Some((_, work)) => *work += done,
            None => self.0.push((candidate.id, done)),
        }
    }

    /// The index of the path with available window that has carried the least of its share. A path that had
    /// no window for a while catches up on at most [`Policy::max_deficit`].
    pub(crate) fn least(&mut self, policy: &dyn Policy, candidates: &[PathCandidate]) -> Option<usize> {
        self.0.retain(|(id, _)| candidates.iter().any(|candidate| candidate.id == *id));
        let most = self.0.iter().map(|(_, work)| *work).fold(0.0, f64::max);
        for candidate in candidates {
            let saved = policy.max_deficit(candidate);
            match self.0.iter_mut().find(|(id, _)| *id == candidate.id) {
                Some((_, work)) => *work = work.max(most - saved),
                None => self.0.push((candidate.id, most)),
            }
        }
        let with_room = candidates.iter().enumerate().filter(|(_, candidate)| candidate.available_window > 0);
        with_room.min_by(|(_, a), (_, b)| self.of(a.id).total_cmp(&self.of(b.id))).map(|(at, _)| at)
    }
}

/// Decides which path carries the next packets.
#[derive(Debug, Default)]
pub struct PathSelector {
    work: Work,
    /// Copies of each packet beside the original, each on another path.
    copies: u8,
    /// Since when a packet could be sent, but not with all of its copies.
    waiting_since: Option<Instant>,
}

impl PathSelector {
    /// Before the first packet; each packet leaves once.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets on how many paths every packet leaves, under each scheduler; [`Scheduler::Redundant`] takes all
    /// paths anyway.
    pub fn set_copies(&mut self, copies: u8) {
        self.copies = copies.saturating_sub(1);
    }

    /// On how many paths every packet leaves.
    pub fn copies(&self) -> u8 {
        self.copies + 1
    }

    /// The path that carries the next packets while `backlog` bytes wait; `None` to wait for a better path.
    /// `candidates` are in the scheduler's order of preference.
    pub fn pick(
        &mut self,
        now: Instant,
        scheduler: Scheduler,
        candidates: &[PathCandidate],
        backlog: u64,
    ) -> Option<Selection> {
        let policy = scheduler.policy();
        let pick = policy.pick(&mut self.work, candidates, backlog)?;
        let copies_wanted = if scheduler.uses_all_paths() { 1 } else { self.copies };
        if copies_wanted > 0 && !self.has_window_for_copies(now, candidates, pick.index, copies_wanted.into())
        {
            tracing::trace!(
                target: SCHEDULER,
                path = candidates[pick.index].id.0,
                copies_wanted,
                "too few paths have window for the copies: the packet waits"
            );
            return None;
        }
        tracing::trace!(
            target: SCHEDULER,
            path = candidates[pick.index].id.0,
            best = pick.arrives_first,
            arrival = ?candidates[pick.index].arrival_delay(0),
            room = candidates[pick.index].available_window,
            ahead = candidates[pick.index].outstanding,
            rate = candidates[pick.index].rate,
            backlog,
            "path chosen for the next packets"
        );
        Some(pick)
    }

    /// When [`Self::pick`] stops waiting for copies.
    pub fn poll_timeout(&self, now: Instant) -> Option<Instant> {
        self.waiting_since.map(|since| since + COPY_WAIT).filter(|at| *at > now)
    }

    /// Whether `copies` paths beside the one at `index` have available window, or [`COPY_WAIT`] is over.
    /// Paths with less than half of the rate of the path at `index` are not waited for: they could copy
    /// no more than half of the packets.
    fn has_window_for_copies(
        &mut self,
        now: Instant,
        candidates: &[PathCandidate],
        at: usize,
        copies_wanted: usize,
    ) -> bool {
        let others = || {
            candidates.iter().enumerate().filter(|(other, _)| *other != at).map(|(_, candidate)| candidate)
        };
        let able = |candidate: &&PathCandidate| {
            candidate.available_window > 0 || candidate.rate >= candidates[at].rate / 2
        };
        let with_room = others().filter(|candidate| candidate.available_window > 0).count();
        if with_room >= copies_wanted.min(others().filter(able).count()) {
            self.waiting_since = None;
            return true;
        }
        now >= *self.waiting_since.get_or_insert(now) + COPY_WAIT
    }

    /// Counts `bytes` that were handed to a path.
    pub fn charge(&mut self, scheduler: Scheduler, candidate: &PathCandidate, bytes: u64) {
        self.work.add(scheduler.policy(), candidate, bytes);
    }
}

/// The index of the first candidate with available window.
pub(crate) fn first_with_window(candidates: &[PathCandidate]) -> Option<usize> {
    candidates.iter().position(|candidate| candidate.available_window > 0)
}

/// The index of the candidate with available window on which a packet that is sent now arrives first.
pub(crate) fn first_to_arrive(candidates: &[PathCandidate]) -> Option<usize> {
    first_to_arrive_if(candidates, |_| true)
}

/// As [`first_to_arrive`]; `None` also if a packet would arrive there later than a round trip after it could
/// on another path, which has window again by then.
pub fn first_to_arrive_soon(candidates: &[PathCandidate]) -> Option<usize> {
    let best = candidates.iter().min_by_key(|candidate| candidate.arrival_delay(0))?;
    let limit = best.arrival_delay(0).saturating_add(best.round_trip);
    first_to_arrive(candidates).filter(|at| candidates[*at].arrival_delay(0) <= limit)
}

/// As [`first_to_arrive`], among the candidates that `may` accepts.
pub fn first_to_arrive_if(
    candidates: &[PathCandidate],
    may: impl Fn(&PathCandidate) -> bool,
) -> Option<usize> {
    let with_room = candidates
        .iter()
        .enumerate()
        .filter(|(_, candidate)| candidate.available_window > 0 && may(candidate));
    with_room.min_by_key(|(_, candidate)| candidate.arrival_delay(0)).map(|(at, _)| at)
}

/// The path delay difference of `candidates[index]`: how much later data arrives there than on the quickest
/// path, without queues; and how many bytes from quicker paths the peer has to hold for that long.
pub fn delay_difference(candidates: &[PathCandidate], at: usize) -> (Duration, u64) {
    let (mut most, mut held) = (Duration::ZERO, 0u64);
    for other in candidates {
        let apart = candidates[at].one_way_delay.saturating_sub(other.one_way_delay);
        held = held.saturating_add(bytes_in(other.rate, apart));
        most = most.max(apart);
    }
    (most, held)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(id: u32, delay_ms: u64, mbit: u64, room: u64) -> PathCandidate {
        PathCandidate {
            id: PathId(id),
            available_window: room,
            one_way_delay: Duration::from_millis(delay_ms),
            round_trip: Duration::from_millis(2 * delay_ms),
            outstanding: 0,
            rate: mbit * 125_000,
            weight: 1,
        }
    }

    /// Sends `packets` packets each millisecond for a second, on paths whose available window follows their
    /// rate; returns the share of each path.
    fn run(scheduler: Scheduler, mut candidates: Vec<PathCandidate>, packets: u32) -> Vec<f64> {
        let (mut choice, now) = (PathSelector::new(), Instant::now());
        let mut sent = vec![0u64; candidates.len()];
        for _ in 0..1000 {
            for candidate in &mut candidates {
                candidate.available_window =
                    (candidate.available_window + candidate.rate / 1000).min(candidate.rate / 200);
            }
            for _ in 0..packets {
                let Some(Selection { index: at, .. }) = choice.pick(now, scheduler, &candidates, 1 << 20)
                else {
                    break;
                };
                candidates[at].available_window = candidates[at].available_window.saturating_sub(1400);
                sent[at] += 1400;
                choice.charge(scheduler, &candidates[at], 1400);
            }
        }
        let all: u64 = sent.iter().sum();
        sent.iter().map(|bytes| *bytes as f64 / all as f64).collect()
    }

    #[test]
    fn auto_takes_the_path_on_which_a_packet_arrives_first() {
        let (mut choice, now) = (PathSelector::new(), Instant::now());
        let mut candidates = [candidate(0, 20, 100, 9000), candidate(1, 5, 10, 9000)];
        assert_eq!(
            choice.pick(now, Scheduler::Auto, &candidates, 1400),
            Some(Selection { index: 1, arrives_first: true })
        );
        candidates[1].outstanding = 40_000;
        assert_eq!(
            choice.pick(now, Scheduler::Auto, &candidates, 1400),
            Some(Selection { index: 0, arrives_first: true })
        );
    }

    #[test]
    fn auto_spills_over_only_when_that_is_quicker_than_waiting() {
        let (mut choice, now) = (PathSelector::new(), Instant::now());
        let candidates = [candidate(0, 5, 100, 0), candidate(1, 15, 80, 9000)];
        assert_eq!(choice.pick(now, Scheduler::Auto, &candidates, 14_000), None);
        // 10 ms of the first path's rate.
        assert_eq!(
            choice.pick(now, Scheduler::Auto, &candidates, 125_000),
            Some(Selection { index: 1, arrives_first: false })
        );
    }

    #[test]
    fn auto_leaves_a_path_alone_that_is_much_slower() {
        let (mut choice, now) = (PathSelector::new(), Instant::now());
        let candidates = [candidate(0, 7, 50, 0), candidate(1, 150, 20, 9000)];
        assert_eq!(choice.pick(now, Scheduler::Auto, &candidates, 100 << 20), None);
        assert_eq!(
            choice.pick(now, Scheduler::Auto, &candidates[1..], 1400),
            Some(Selection { index: 0, arrives_first: true })
        );
    }

    #[test]
    fn acknowledgements_return_on_the_quickest_path() {
        let mut paths = [candidate(0, 0, 8, 0), candidate(1, 0, 20, 0)];
        // 30 ms each way, and 280 there with 30 back.
        (paths[0].round_trip, paths[1].round_trip) = (Duration::from_millis(60), Duration::from_millis(310));
        // A delay that is known already.
        paths[0].one_way_delay = Duration::from_millis(5);
        let (first, second) = paths.split_at_mut(1);
        set_one_way_delays([first, second]);
        assert_eq!(paths.map(|path| path.one_way_delay.as_millis()), [35, 280]);
        set_one_way_delays([&mut [], &mut []]);
    }

    #[test]
    fn what_is_sent_again_waits_for_a_path_on_which_it_arrives_much_earlier() {
        let mut paths = [candidate(0, 30, 8, 0), candidate(1, 280, 20, 9000)];
        assert_eq!((first_to_arrive(&paths), first_to_arrive_soon(&paths)), (Some(1), None));
        // A round trip of the quick one is 60 ms.
        paths[1].one_way_delay = Duration::from_millis(90);
        assert_eq!(first_to_arrive_soon(&paths), Some(1));
        paths[0].available_window = 9000;
        assert_eq!(first_to_arrive_soon(&paths), Some(0));
    }

    #[test]
    fn the_peer_holds_what_quicker_paths_deliver_before_a_slower_one() {
        let candidates = [candidate(0, 15, 8, 0), candidate(1, 5, 16, 0), candidate(2, 65, 80, 0)];
        assert_eq!(delay_difference(&candidates, 1), (Duration::ZERO, 0));
        assert_eq!(delay_difference(&candidates, 0), (Duration::from_millis(10), 20_000));
        assert_eq!(delay_difference(&candidates, 2), (Duration::from_millis(60), 50_000 + 120_000));
    }

    #[test]
    fn redundant_waits_a_little_for_window_on_two_paths_unless_the_other_is_slow() {
        let (mut choice, now) = (PathSelector::new(), Instant::now());
        let mut candidates = [candidate(0, 5, 100, 9000), candidate(1, 15, 80, 9000)];
        let first = Some(Selection { index: 0, arrives_first: true });
        assert_eq!(choice.pick(now, Scheduler::Redundant, &candidates, 1400), first);
        assert_eq!(choice.pick(now, Scheduler::Redundant, &candidates[..1], 1400), first);
        candidates[1].available_window = 0;
        assert_eq!(choice.pick(now, Scheduler::Redundant, &candidates, 1400), None);
        assert_eq!(choice.poll_timeout(now), Some(now + COPY_WAIT));
        let later = now + COPY_WAIT;
        assert_eq!(choice.pick(later, Scheduler::Redundant, &candidates, 1400), first);
        assert_eq!(choice.poll_timeout(later), None, "nothing changes any more");
        candidates[1].available_window = 9000;
        assert_eq!(choice.pick(later, Scheduler::Redundant, &candidates, 1400), first);
        candidates[1].available_window = 0;
        assert_eq!(
            choice.pick(later, Scheduler::Redundant, &candidates, 1400),
            None,
            "it is waited for again"
        );
        candidates[1] = candidate(1, 15, 40, 0);
        assert_eq!(choice.pick(later, Scheduler::Redundant, &candidates, 1400), first);
    }

    #[test]
    fn copies_wait_a_little_for_window_on_enough_paths() {
        let (mut choice, now) = (PathSelector::new(), Instant::now());
        choice.set_copies(3);
        let mut candidates =
            [candidate(0, 5, 100, 9000), candidate(1, 15, 80, 0), candidate(2, 15, 80, 9000)];
        let first = Some(Selection { index: 0, arrives_first: true });
        assert_eq!(choice.pick(now, Scheduler::Auto, &candidates, 1400), None);
        assert_eq!(choice.pick(now + COPY_WAIT, Scheduler::Auto, &candidates, 1400), first);
        candidates[1].available_window = 9000;
        assert_eq!(choice.pick(now, Scheduler::MinRtt, &candidates, 1400), first);
        assert_eq!(
            choice.pick(now, Scheduler::MinRtt, &candidates[..2], 1400),
            first,
            "as many as there are"
        );
        candidates[1] = candidate(1, 15, 40, 0);
        assert_eq!(choice.pick(now, Scheduler::Balanced, &candidates, 1400).map(|pick| pick.index), Some(0));
    }

    #[test]
    fn balanced_shares_by_capacity() {
        let shares = run(Scheduler::Balanced, vec![candidate(0, 5, 30, 0), candidate(1, 90, 10, 0)], 2);
        assert!((0.72..0.78).contains(&shares[0]), "{shares:?}");
    }

    #[test]
    fn weighted_shares_by_weight() {
        let mut candidates = vec![candidate(0, 5, 50, 0), candidate(1, 5, 50, 0)];
        candidates[0].weight = 4;
        let shares = run(Scheduler::Weighted, candidates, 4);
        assert!((0.75..0.85).contains(&shares[0]), "{shares:?}");
    }

    #[test]
    fn a_path_without_window_catches_up_on_little() {
        let (mut choice, now) = (PathSelector::new(), Instant::now());
        let mut candidates = [candidate(0, 5, 10, 9000), candidate(1, 5, 10, 0)];
        for _ in 0..10_000 {
            let at = choice.pick(now, Scheduler::Balanced, &candidates, 1400).unwrap().index;
            choice.charge(Scheduler::Balanced, &candidates[at], 1400);
        }
        candidates[1].available_window = 9000;
        let mut run = 0;
        while choice.pick(now, Scheduler::Balanced, &candidates, 1400).unwrap().index == 1 {
            choice.charge(Scheduler::Balanced, &candidates[1], 1400);
            run += 1;
        }
        assert!(run <= 46, "{run} packets in a row are more than 50 ms of the rate");
    }
}
