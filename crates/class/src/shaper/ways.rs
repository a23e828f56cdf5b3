//! On which way of a link packets wait: told apart by the clocks of both ends.
//!
//! In: how much later packets arrived than their sender's clock said, on the way there as the far end reports it, and on
//! the way back as this end finds it. Out: by how much each exceeds its least of the last seconds. What the clocks differ
//! by is in both and cancels; what they drift apart by in these seconds is far less than a queue that matters.
//!
//! Always holds: whatever is reported, what is kept is bounded, and no time is negative.

use mpvpn_types::{Duration, Instant};

/// The least is that of the last one or two such times. Clocks drift apart by at most 100 µs in a second.
const HALF: Duration = Duration::from_secs(5);
/// A difference that moves by more (µs) is that of another clock.
const MOST: i32 = 4_000_000;
/// What was found counts for so long.
const FRESH: Duration = Duration::from_millis(300);
/// A clock of the far end that was silent for so long gives way to another one.
const SILENT: Duration = Duration::from_secs(1);

/// The time that packets wait on each way (s), where both are known.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Queues {
    pub(super) own: f64,
    pub(super) other: f64,
}

impl Queues {
    /// The least of both.
    pub(super) fn min(self, other: Self) -> Self {
        Self { own: self.own.min(other.own), other: self.other.min(other.other) }
    }

    /// How long packets wait on our way, of which all wait for `total` on both.
    pub(super) fn of(self, total: f64, slack: f64) -> f64 {
        self.own.min(total).max(total - self.other - slack)
    }
}

/// One way.
#[derive(Clone, Copy, Debug)]
struct Way {
    /// The differences of the clocks are counted from this one on (µs modulo 2^32).
    zero: u32,
    /// The least of them since then, in this time, which began then, and in the one before.
    least: i32,
    since: Instant,
    before: i32,
    /// How much longer than the least the newest was (µs), and when it came.
    late: i32,
    at: Instant,
}

impl Way {
    fn new(now: Instant, difference: u32) -> Self {
        Self { zero: difference, least: 0, since: now, before: 0, late: 0, at: now }
    }

    /// Takes an arrival so much later than the sender's clock said (µs modulo 2^32).
    fn take(&mut self, now: Instant, difference: u32) {
        let place = difference.wrapping_sub(self.zero) as i32;
        let age = now.saturating_duration_since(self.since);
        let moved = place.saturating_sub(self.least.min(self.before));
        if age >= 2 * HALF || moved.saturating_abs() > MOST {
            *self = Self::new(now, difference);
            return;
        }
        if age >= HALF {
            // Counted from a new place, so that clocks may drift apart for ever.
            let shift = self.least;
            (self.zero, self.since) = (self.zero.wrapping_add_signed(shift), now);
            (self.before, self.least) = (0, place - shift);
            self.late = 0;
        }
        let place = difference.wrapping_sub(self.zero) as i32;
        self.least = self.least.min(place);
        (self.late, self.at) = (place - self.least.min(self.before), now);
    }

    fn late(&self, now: Instant) -> Option<f64> {
        (now.saturating_duration_since(self.at) < FRESH).then(|| f64::from(self.late) * 1e-6)
    }
}

/// Both ways of a link.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ways {
    /// Where this end's clock begins.
    zero: Instant,
    /// Whose clock the far end's is, if it has several, and when it was heard.
    clock: Option<(u8, Instant)>,
    own: Option<Way>,
    other: Option<Way>,
}

impl Ways {
    pub(super) fn new(now: Instant) -> Self {
        Self { zero: now, clock: None, own: None, other: None }
    }

    /// What this end's clock says (µs modulo 2^32).
    pub(super) fn clock(&self, now: Instant) -> u32 {
        now.saturating_duration_since(self.zero).as_micros() as u32
    }

    /// Takes a report from the clock `of` of the far end. Returns how much later it arrived than was on that (µs modulo
    /// 2^32).
    pub(super) fn told(&mut self, now: Instant, of: u8, sent: u32, found: Option<u32>) -> u32 {
        let difference = self.clock(now).wrapping_sub(sent);
        let (clock, heard) = self.clock.unwrap_or((of, now));
        if clock != of {
            if now.saturating_duration_since(heard) < SILENT {
                return difference;
            }
            (self.own, self.other) = (None, None);
        }
        self.clock = Some((of, now));
        self.other.get_or_insert_with(|| Way::new(now, difference)).take(now, difference);
        if let Some(found) = found {
            self.own.get_or_insert_with(|| Way::new(now, found)).take(now, found);
        }
        difference
    }

    /// How long packets wait now, as far as that was told lately.
    pub(super) fn queues(&self, now: Instant) -> Option<Queues> {
        Some(Queues { own: self.own?.late(now)?, other: self.other?.late(now)? })
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Two ends of a link, and what their clocks say.
    struct Link {
        now: Instant,
        here: Ways,
        /// The far end's clock: ahead by so much (µs), and faster by this part.
        ahead: u32,
        drift: f64,
        start: Instant,
        dice: u64,
    }

    impl Link {
        fn new(ahead: u32, drift: f64) -> Self {
            let now = Instant::now();
            Self { now, here: Ways::new(now), ahead, drift, start: now, dice: 1 }
        }

        fn far(&self, at: Instant) -> u32 {
            let passed = (at - self.start).as_secs_f64() * 1e6;
            self.ahead.wrapping_add((passed * (1.0 + self.drift)) as u64 as u32)
        }

        fn jitter(&mut self, most: Duration) -> Duration {
            self.dice = self.dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            most * (self.dice >> 40) as u32 / (1 << 24)
        }

        /// Both ends tell each other, while packets wait so long on the way there and back. What comes of it.
        fn tell(&mut self, queues: [Duration; 2], jitter: Duration) -> Option<Queues> {
            let mut least: Option<Queues> = None;
            for _ in 0..6 {
                let [up, down] = queues.map(|queue| 5 * MS + queue + self.jitter(jitter));
                let found = self.far(self.now + up).wrapping_sub(self.here.clock(self.now));
                self.now += 10 * MS;
                let sent = self.far(self.now - down);
                self.here.told(self.now, 0, sent, Some(found));
                least = least.into_iter().chain(self.here.queues(self.now)).reduce(Queues::min);
            }
            least
        }
    }

    fn assert_near(found: Option<Queues>, queues: [Duration; 2], most: f64) {
        let found = found.expect("both ways are known");
        for (found, queue) in [found.own, found.other].into_iter().zip(queues) {
            assert!((found - queue.as_secs_f64()).abs() < most, "{found} instead of {queue:?}");
        }
    }

    #[test]
    fn a_queue_is_seen_on_the_way_where_it_is_whatever_the_clocks_say() {
        for ahead in [0, 7, u32::MAX - 100_000, 1 << 31, 123_456_789] {
            let mut link = Link::new(ahead, 0.0);
            link.tell([Duration::ZERO; 2], Duration::ZERO);
            for queues in [[3, 0], [0, 8], [40, 2], [0, 0]].map(|queues| queues.map(Duration::from_millis)) {
                assert_near(link.tell(queues, Duration::ZERO), queues, 2e-6);
            }
        }
    }

    #[test]
    fn clocks_that_drift_apart_make_no_queue() {
        for drift in [50e-6, -50e-6] {
            let mut link = Link::new(u32::MAX - 5_000_000, drift);
            for round in 0..10_000 {
                // A queue comes and goes, as where a shaper tries more now and then.
                let queue = if round % 50 >= 45 { 3 * MS } else { Duration::ZERO };
                let queues = [queue, 3 * MS - queue];
                let found = link.tell(queues, Duration::ZERO);
                if round >= 50 {
                    assert_near(found, queues, 0.6e-3);
                }
            }
            assert!(link.now - link.start >= Duration::from_secs(600));
        }
    }

    #[test]
    fn what_comes_late_by_chance_is_no_queue() {
        let mut link = Link::new(99, 0.0);
        for _ in 0..200 {
            link.tell([Duration::ZERO; 2], 4 * MS);
        }
        let mut wrong = 0;
        for round in 0..500 {
            let queue = if round % 10 == 9 { 5 * MS } else { Duration::ZERO };
            let found = link.tell([queue, Duration::ZERO], 4 * MS).expect("both ways are known");
            wrong += usize::from((found.own > 3e-3) != (queue > Duration::ZERO));
        }
        assert!(wrong < 10, "{wrong} of 500");
    }

    #[test]
    fn what_was_told_long_ago_does_not_count() {
        let mut link = Link::new(5, 0.0);
        link.tell([Duration::ZERO; 2], Duration::ZERO);
        assert!(link.here.queues(link.now).is_some());
        assert_eq!(link.here.queues(link.now + FRESH), None);
        // The next one is the first for long.
        link.now += 3 * HALF;
        assert_near(link.tell([20 * MS; 2], Duration::ZERO), [Duration::ZERO; 2], 1e-6);
        // It was the longest of all.
        link.tell([Duration::ZERO; 2], Duration::ZERO);
        assert_near(link.tell([20 * MS; 2], Duration::ZERO), [20 * MS; 2], 2e-6);
    }

    #[test]
    fn another_clock_counts_only_when_the_first_is_silent() {
        let mut link = Link::new(5, 0.0);
        link.tell([Duration::ZERO; 2], Duration::ZERO);
        let known = link.here.queues(link.now);
        link.here.told(link.now, 1, 0x8000_0000, Some(7));
        assert_eq!(link.here.queues(link.now), known);
        let later = link.now + SILENT;
        link.here.told(later, 1, 0x8000_0000, Some(7));
        assert_eq!(link.here.queues(later), Some(Queues { own: 0.0, other: 0.0 }));
    }

    #[test]
    fn a_round_trip_bounds_what_is_told() {
        let ways = |own, other| Queues { own, other };
        assert_eq!(ways(0.003, 0.004).of(0.007, 0.005), 0.003);
        assert_eq!(ways(9.0, 0.0).of(0.001, 0.005), 0.001, "there is no such queue");
        assert!((ways(0.0, 0.001).of(0.02, 0.005) - 0.014).abs() < 1e-9, "nobody has seen the link empty");
        assert_eq!(ways(0.0, 9.0).of(0.02, 0.005), 0.0);
    }

    proptest! {
        /// Whatever is told, no queue is negative or longer than clocks are taken to differ.
        #[test]
        fn any_times_are_taken(told in proptest::collection::vec(any::<(u32, Option<u32>, u8, u16)>(), 1..200)) {
            let mut now = Instant::now();
            let mut ways = Ways::new(now);
            for (sent, found, clock, passed) in told {
                now += Duration::from_micros(u64::from(passed) * 100);
                ways.told(now, clock % 2, sent, found);
                if let Some(Queues { own, other }) = ways.queues(now) {
                    for queue in [own, other] {
                        prop_assert!((0.0..=f64::from(MOST) * 1e-6).contains(&queue), "{queue} s");
                    }
                }
            }
        }
    }
}
