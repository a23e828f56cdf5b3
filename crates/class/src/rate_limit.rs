//! The limit of one user's rate in one direction, shared by everything that carries data of this user.
//!
//! In: the rate, bytes that were carried, which members of the limit wait, and the time. Out: how many bytes
//! a member may carry now, when to ask again, and how many bytes all have carried. Always holds: all members
//! together carry no more than the rate and a burst; a member that waits is not passed over for longer than
//! the others need for half of that.
//!
//! This is a token bucket. Members that wait take turns: what a member has carried moves its next turn
//! forward by the time that its share of the rate needs for it. A turn that is not taken is lost when the
//! bucket is half full, so that a member that does not come in time costs nothing.

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, Ordering},
};

use mpvpn_types::{BitRate, Duration, Instant};

/// Depth of the bucket, in seconds of the rate (at least [`MIN_DEPTH_BYTES`]): the largest burst after a
/// pause, and what a member that does not take its turn costs the others in time. Smaller: more turns are
/// lost. Larger: bursts. Chosen.
const DEPTH_SECONDS: f64 = 0.03;
/// Depth while a member waits: it would have carried these bytes if its thread had got the processor in time.
/// Smaller: the rate is not reached on a busy machine. Larger: bursts after such a time. Chosen: threads of a
/// busy machine were up to 100 ms late.
const LATE_SECONDS: f64 = 0.25;
/// Least depth in bytes: four packets of an Ethernet. Less: packets that leave together wait although the
/// rate allows them.
const MIN_DEPTH_BYTES: f64 = 6000.0;
/// A member that waits is woken for this much of the rate, in seconds, but not for less than a packet.
/// Smaller: more wake-ups. Larger: bursts, which delay other flows. Chosen.
const WAKEUP_SECONDS: f64 = 0.001;
/// Size of a full packet in bytes (Ethernet MTU).
const PACKET_BYTES: f64 = 1500.0;
/// Shortest time until a member asks again. Shorter: a loop without pause. Longer: bursts. Chosen.
const MIN_WAIT_SECONDS: f64 = 0.000_1;
/// Longest debt, in seconds of the rate: a member may carry more than the bucket has, as the last packet of a
/// turn does. Smaller: such bytes are forgotten; larger: a rate that was raised counts late. Chosen.
const MAX_DEBT_SECONDS: f64 = 0.5;

/// The limit of a user's rate in one direction.
#[derive(Debug)]
pub struct RateLimit {
    /// Bytes/s; `None`: no limit, bytes are only counted.
    rate: Option<f64>,
    /// Bytes that may be carried now; negative after more was carried.
    tokens: f64,
    last_update: Instant,
    /// Number of members that wait.
    waiting: u32,
    /// Bytes carried since they were taken.
    carried: u64,
    /// The number of them at which they have to be taken, and the flag that says so then.
    count_at: Option<(u64, Arc<AtomicBool>)>,
}

impl RateLimit {
    /// A limit whose bucket is full; `None`: bytes are only counted.
    pub fn new(now: Instant, rate: Option<BitRate>) -> Self {
        let mut limit =
            Self { rate: None, tokens: 0.0, last_update: now, waiting: 0, carried: 0, count_at: None };
        limit.set_rate(now, rate);
        limit.tokens = limit.depth();
        limit
    }

    /// Changes the rate.
    pub fn set_rate(&mut self, now: Instant, rate: Option<BitRate>) {
        self.advance(now);
        self.rate = rate.map(|rate| (rate.bps() as f64 / 8.0).max(1.0));
        self.tokens = self.tokens.clamp(-self.max_debt(), self.depth());
    }

    /// The rate; `None`: there is no limit.
    pub fn rate(&self) -> Option<BitRate> {
        self.rate.map(|rate| BitRate::from_bytes_per_second(rate as u64))
    }

    /// Bytes carried since the last call.
    pub fn take_carried(&mut self) -> u64 {
        std::mem::take(&mut self.carried)
    }

    /// Sets `due` once so many bytes were carried since they were taken, and then not again.
    pub fn count_at(&mut self, bytes: u64, due: &Arc<AtomicBool>) {
        self.count_at = Some((bytes, Arc::clone(due)));
    }

    fn depth(&self) -> f64 {
        self.rate.map_or(0.0, |rate| (rate * DEPTH_SECONDS).max(MIN_DEPTH_BYTES))
    }

    fn max_debt(&self) -> f64 {
        self.rate.map_or(0.0, |rate| (rate * MAX_DEBT_SECONDS).max(MIN_DEPTH_BYTES))
    }

    fn advance(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.last_update).as_secs_f64();
        self.last_update = self.last_update.max(now);
        if let Some(rate) = self.rate {
            let most = if self.waiting > 0 { self.depth().max(rate * LATE_SECONDS) } else { self.depth() };
            // Tokens that were added while members waited stay, also beyond the depth.
            self.tokens = (self.tokens + rate * passed).min(self.tokens.max(most));
        }
    }
}

/// The share of one data-carrying part of the server in a user's rate limit.
#[derive(Debug)]
pub struct RateLimitMember {
    limit: Arc<Mutex<RateLimit>>,
    /// When the others, if any wait, have had their turns.
    next_turn: Option<Instant>,
    /// Counted in `waiting`.
    waits: bool,
}

impl RateLimitMember {
    /// A member that does not wait.
    pub fn new(limit: Arc<Mutex<RateLimit>>) -> Self {
        Self { limit, next_turn: None, waits: false }
    }

    fn lock(&self) -> MutexGuard<'_, RateLimit> {
        // No code panics while it holds the lock.
        self.limit.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the rate is limited.
    pub fn is_limited(&self) -> bool {
        self.lock().rate.is_some()
    }

    /// The rate; `None`: there is no limit.
    pub fn rate(&self) -> Option<BitRate> {
        self.lock().rate()
    }

    /// Bytes that may be carried now: a packet of any size if it is not 0.
    pub fn available_bytes(&self, now: Instant) -> u64 {
        let mut limit = self.lock();
        if limit.rate.is_none() {
            return u64::MAX;
        }
        limit.advance(now);
        let others_turn = self.others_wait(&limit)
            && self.next_turn.is_some_and(|at| now < at)
            && limit.tokens < limit.depth() / 2.0;
        if limit.tokens <= 0.0 || others_turn { 0 } else { (limit.tokens as u64).max(1) }
    }

    fn others_wait(&self, limit: &RateLimit) -> bool {
        limit.waiting > u32::from(self.waits)
    }

    /// Counts bytes that were carried.
    pub fn on_carried(&mut self, now: Instant, bytes: u64) {
        let mut limit = self.limit.lock().unwrap_or_else(PoisonError::into_inner);
        limit.carried = limit.carried.saturating_add(bytes);
        let carried = limit.carried;
        if let Some((_, due)) = limit.count_at.take_if(|(at, _)| carried >= *at) {
            due.store(true, Ordering::Relaxed);
        }
        let Some(rate) = limit.rate else { return };
        limit.tokens = (limit.tokens - bytes as f64).max(-limit.max_debt());
        let members = limit.waiting + u32::from(!self.waits);
        let turns = (bytes as f64 * f64::from(members) / rate).min(MAX_DEBT_SECONDS);
        let from = self.next_turn.map_or(now, |at| at.max(now));
        // Bytes carried while nobody waited count against the member only briefly.
        let latest = now + Duration::from_secs_f64(DEPTH_SECONDS);
        self.next_turn = Some((from + Duration::from_secs_f64(turns)).min(latest));
    }

    /// Sets whether the member has more to carry than it may.
    pub fn set_waiting(&mut self, waits: bool) {
        if self.waits != waits {
            self.waits = waits;
            let mut limit = self.lock();
            limit.waiting = if waits { limit.waiting + 1 } else { limit.waiting.saturating_sub(1) };
        }
    }

    /// When to ask again; `None` if something may be carried now.
    pub fn retry_at(&self, now: Instant) -> Option<Instant> {
        if self.available_bytes(now) > 0 {
            return None;
        }
        let limit = self.lock();
        let rate = limit.rate?;
        let half = limit.depth() / 2.0;
        let until = |bytes: f64| (bytes - limit.tokens) / rate;
        let mut wait = until((rate * WAKEUP_SECONDS).max(PACKET_BYTES).min(half));
        if let Some(turn) = self.next_turn.filter(|_| self.others_wait(&limit)) {
            let turn = turn.saturating_duration_since(now).as_secs_f64();
            wait = wait.max(turn.min(until(half)));
        }
        Some(now + Duration::from_secs_f64(wait.max(MIN_WAIT_SECONDS)))
    }
}

impl Drop for RateLimitMember {
    fn drop(&mut self) {
        self.set_waiting(false);
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use super::*;

    const MBIT: BitRate = BitRate::from_bps(1_000_000);

    fn limit(start: Instant, rate: BitRate) -> Arc<Mutex<RateLimit>> {
        Arc::new(Mutex::new(RateLimit::new(start, Some(rate))))
    }

    /// Members that always have more, with packets of their sizes, and come `late` after they asked to; the
    /// bytes that each carried in `seconds`.
    fn carried(
        limit: &Arc<Mutex<RateLimit>>,
        start: Instant,
        sizes: &[u64],
        late: Duration,
        seconds: u64,
    ) -> Vec<u64> {
        let mut members: Vec<_> = sizes.iter().map(|_| RateLimitMember::new(limit.clone())).collect();
        let mut due = vec![start; sizes.len()];
        let mut carried = vec![0; sizes.len()];
        let end = start + Duration::from_secs(seconds);
        loop {
            let (at, now) = due.iter().copied().enumerate().min_by_key(|(_, due)| *due).unwrap();
            if now >= end {
                return carried;
            }
            let mut allowed = members[at].available_bytes(now);
            while allowed > 0 {
                members[at].on_carried(now, sizes[at]);
                carried[at] += sizes[at];
                allowed = allowed.saturating_sub(sizes[at]);
            }
            members[at].set_waiting(true);
            due[at] = members[at].retry_at(now).unwrap_or(now) + late;
        }
    }

    #[test]
    fn the_rate_is_kept_to_a_percent_also_by_members_that_come_late() {
        let start = Instant::now();
        for rate in [64_000, 1_000_000, 20_000_000, 1_000_000_000] {
            for late in [0, 1, 8, 100] {
                let limit = limit(start, BitRate::from_bps(rate));
                let bytes: u64 =
                    carried(&limit, start, &[1400], Duration::from_millis(late), 20).iter().sum();
                let expected = 20.0 * rate as f64 / 8.0 + limit.lock().unwrap().depth();
                let ratio = bytes as f64 / expected;
                assert!((0.98..=1.02).contains(&ratio), "{rate} bit/s, {late} ms late: {ratio}");
                assert_eq!(limit.lock().unwrap().take_carried(), bytes);
            }
        }
    }

    #[test]
    fn a_pause_gives_a_short_burst_and_waiting_gives_back_what_was_missed() {
        let start = Instant::now();
        let limit = limit(start, BitRate::from_bps(80_000_000));
        let mut member = RateLimitMember::new(limit);
        // 30 ms of 10 MB/s.
        assert_eq!(member.available_bytes(start + Duration::from_secs(10)), 300_000);
        member.on_carried(start + Duration::from_secs(10), 300_000);
        member.set_waiting(true);
        let late = start + Duration::from_millis(10_100);
        assert_eq!(member.available_bytes(late), 1_000_000);
        member.set_waiting(false);
        assert_eq!(member.available_bytes(late + Duration::from_millis(1)), 1_000_000);
        member.on_carried(late, 1_000_000);
        assert_eq!(member.available_bytes(late + Duration::from_secs(1)), 300_000);
    }

    #[test]
    fn members_share_the_rate_whatever_the_size_of_their_packets() {
        let start = Instant::now();
        for sizes in [&[1400, 1400][..], &[1400, 200], &[1400; 5], &[16_000, 1400]] {
            let limit = limit(start, BitRate::from_bps(50_000_000));
            let each = carried(&limit, start, sizes, Duration::ZERO, 10);
            let total: u64 = each.iter().sum();
            assert!((61_000_000..=64_000_000).contains(&total), "{sizes:?}: {each:?}");
            let (least, most) = (each.iter().min().unwrap(), each.iter().max().unwrap());
            assert!(*most as f64 <= 1.3 * *least as f64, "{sizes:?}: {each:?}");
        }
    }

    #[test]
    fn a_member_that_waits_and_never_comes_costs_the_others_nothing() {
        let start = Instant::now();
        let limit = limit(start, MBIT);
        let mut stuck = RateLimitMember::new(limit.clone());
        stuck.set_waiting(true);
        let each = carried(&limit, start, &[1000], Duration::ZERO, 20);
        assert!((2_450_000..=2_520_000).contains(&each[0]), "{each:?}");
        drop(stuck);
        assert_eq!(limit.lock().unwrap().waiting, 0);
    }

    #[test]
    fn without_a_rate_bytes_are_counted_and_a_rate_counts_from_when_it_is_set() {
        let start = Instant::now();
        let shared = Arc::new(Mutex::new(RateLimit::new(start, None)));
        let mut member = RateLimitMember::new(shared.clone());
        member.on_carried(start, 1 << 40);
        assert_eq!((member.available_bytes(start), member.retry_at(start)), (u64::MAX, None));
        assert_eq!(shared.lock().unwrap().take_carried(), 1 << 40);
        shared.lock().unwrap().set_rate(start, Some(MBIT));
        member.on_carried(start, 100_000_000);
        // A hundred megabytes are not paid back for minutes.
        let retry = member.retry_at(start).unwrap();
        assert!(retry < start + Duration::from_secs(1), "{:?}", retry - start);
        // A higher rate counts at once.
        shared.lock().unwrap().set_rate(start, Some(BitRate::from_bps(1_000_000_000)));
        let retry = member.retry_at(start).unwrap();
        assert!(retry < start + Duration::from_millis(10), "{:?}", retry - start);
        shared.lock().unwrap().set_rate(start, None);
        assert_eq!(member.available_bytes(start), u64::MAX);
    }
}
