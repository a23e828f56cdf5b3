//! Queueing delay in each direction of a link, from the clocks of both ends.
//!
//! In: one-way delays plus the offset of the two clocks, in the own direction as the peer reports them, in
//! the peer's direction as measured here. Out: the queueing delay of each direction, that is, the excess of
//! the delay over its minimum of the last seconds. The offset of the clocks is contained in both and cancels;
//! their drift in these seconds is far less than a relevant queue.
//!
//! Always holds: whatever the peer reports, the state is bounded, and no delay is negative.

use mpvpn_types::{Duration, Instant};

/// The minimum delay is that of the last one or two windows of this length. Clocks drift by at most 100 µs
/// per second, so by 1 ms in 10 s: less than a relevant queue. In a shorter window a standing queue becomes
/// the minimum; in a longer one drift looks like a queue.
const MIN_WINDOW: Duration = Duration::from_secs(5);
/// A delay that changes by more than this (µs) comes from another clock, for example after a restart of the
/// peer: no queue is that long. A smaller bound would reset the minimum on a very long queue; a larger one
/// would take a clock jump for a queue.
const MAX_CLOCK_STEP_MICROS: i32 = 4_000_000;
/// A measured delay is valid for this long: six times the interval of clock reports while data moves.
/// Shorter, and a gap in the reports hides the queue; longer, and old delays count.
const MEASUREMENT_LIFETIME: Duration = Duration::from_millis(300);
/// Another clock of the peer (another of its threads) replaces the current one after this long without a
/// report from it. Shorter, and two clocks that both report would alternate; longer, and the queue is unknown
/// after a session moved to another thread. Chosen (docs/design/shaper.md, open questions).
const CLOCK_SWITCH_AFTER: Duration = Duration::from_secs(1);

/// Queueing delay in each direction, in seconds: `own` is the direction in which this end sends.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct OneWayQueues {
    pub(super) own: f64,
    pub(super) peer: f64,
}

impl OneWayQueues {
    /// The minimum in each direction.
    pub(super) fn min(self, other: Self) -> Self {
        Self { own: self.own.min(other.own), peer: self.peer.min(other.peer) }
    }

    /// The queueing delay in the own direction, limited by the round trip: at most `total`, the queueing
    /// delay in both directions together, and at least `total` less the peer's and an error of `slack`
    /// (s).
    pub(super) fn own_within(self, total: f64, slack: f64) -> f64 {
        self.own.min(total).max(total - self.peer - slack)
    }
}

/// The one-way delay in one direction.
#[derive(Clone, Copy, Debug)]
struct OneWayDelay {
    /// Delays are counted from this one (µs modulo 2^32).
    reference: u32,
    /// Minimum delay in the current window, start of that window, and minimum delay in the window before
    /// (µs).
    min: i32,
    window_start: Instant,
    previous_min: i32,
    /// Excess of the newest delay over the minimum (µs), and when it was measured.
    excess_micros: i32,
    updated: Instant,
}

impl OneWayDelay {
    fn new(now: Instant, difference: u32) -> Self {
        Self {
            reference: difference,
            min: 0,
            window_start: now,
            previous_min: 0,
            excess_micros: 0,
            updated: now,
        }
    }

    /// Takes a measured delay plus clock offset (µs modulo 2^32).
    fn take(&mut self, now: Instant, difference: u32) {
        let place = difference.wrapping_sub(self.reference) as i32;
        let age = now.saturating_duration_since(self.window_start);
        let moved = place.saturating_sub(self.min.min(self.previous_min));
        if age >= 2 * MIN_WINDOW || moved.saturating_abs() > MAX_CLOCK_STEP_MICROS {
            *self = Self::new(now, difference);
            return;
        }
        if age >= MIN_WINDOW {
            // Move the reference, so that clocks may drift apart without bound.
            let shift = self.min;
            (self.reference, self.window_start) = (self.reference.wrapping_add_signed(shift), now);
            (self.previous_min, self.min) = (0, place - shift);
            self.excess_micros = 0;
        }
        let place = difference.wrapping_sub(self.reference) as i32;
        self.min = self.min.min(place);
        (self.excess_micros, self.updated) = (place - self.min.min(self.previous_min), now);
    }

    fn queue_seconds(&self, now: Instant) -> Option<f64> {
        (now.saturating_duration_since(self.updated) < MEASUREMENT_LIFETIME)
            .then(|| f64::from(self.excess_micros) * 1e-6)
    }
}

/// Compares the clocks of both ends of a link.
#[derive(Clone, Copy, Debug)]
pub(super) struct ClockComparison {
    /// Time 0 of this end's clock.
    clock_start: Instant,
    /// Number of the peer's clock in use, and when its last report arrived.
    clock: Option<(u8, Instant)>,
    own: Option<OneWayDelay>,
    peer: Option<OneWayDelay>,
}

impl ClockComparison {
    pub(super) fn new(now: Instant) -> Self {
        Self { clock_start: now, clock: None, own: None, peer: None }
    }

    /// The time of this end's clock (µs modulo 2^32).
    pub(super) fn clock_micros(&self, now: Instant) -> u32 {
        now.saturating_duration_since(self.clock_start).as_micros() as u32
    }

    /// Takes a report of the peer's clock `of`: its time `sent`, and the delay `found` in the own direction,
    /// if known. Returns the delay of the report in the peer's direction. All in µs modulo 2^32.
    pub(super) fn on_report(&mut self, now: Instant, of: u8, sent: u32, found: Option<u32>) -> u32 {
        let difference = self.clock_micros(now).wrapping_sub(sent);
        let (clock, heard) = self.clock.unwrap_or((of, now));
        if clock != of {
            if now.saturating_duration_since(heard) < CLOCK_SWITCH_AFTER {
                return difference;
            }
            (self.own, self.peer) = (None, None);
        }
        self.clock = Some((of, now));
        self.peer.get_or_insert_with(|| OneWayDelay::new(now, difference)).take(now, difference);
        if let Some(found) = found {
            self.own.get_or_insert_with(|| OneWayDelay::new(now, found)).take(now, found);
        }
        difference
    }

    /// The current queueing delay in each direction; `None` without recent reports.
    pub(super) fn queues(&self, now: Instant) -> Option<OneWayQueues> {
        Some(OneWayQueues { own: self.own?.queue_seconds(now)?, peer: self.peer?.queue_seconds(now)? })
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Two ends of a link with their clocks.
    struct Link {
        now: Instant,
        here: ClockComparison,
        /// Offset of the peer's clock (µs), and its drift (relative).
        ahead: u32,
        drift: f64,
        start: Instant,
        dice: u64,
    }

    impl Link {
        fn new(ahead: u32, drift: f64) -> Self {
            let now = Instant::now();
            Self { now, here: ClockComparison::new(now), ahead, drift, start: now, dice: 1 }
        }

        fn far(&self, at: Instant) -> u32 {
            let passed = (at - self.start).as_secs_f64() * 1e6;
            self.ahead.wrapping_add((passed * (1.0 + self.drift)) as u64 as u32)
        }

        fn jitter(&mut self, most: Duration) -> Duration {
            self.dice = self.dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            most * (self.dice >> 40) as u32 / (1 << 24)
        }

        /// Exchanges reports while packets are queued for these times, there and back. Returns the measured
        /// queues.
        fn tell(&mut self, queues: [Duration; 2], jitter: Duration) -> Option<OneWayQueues> {
            let mut least: Option<OneWayQueues> = None;
            for _ in 0..6 {
                let [up, down] = queues.map(|queue| 5 * MS + queue + self.jitter(jitter));
                let found = self.far(self.now + up).wrapping_sub(self.here.clock_micros(self.now));
                self.now += 10 * MS;
                let sent = self.far(self.now - down);
                self.here.on_report(self.now, 0, sent, Some(found));
                least = least.into_iter().chain(self.here.queues(self.now)).reduce(OneWayQueues::min);
            }
            least
        }
    }

    fn assert_near(found: Option<OneWayQueues>, queues: [Duration; 2], most: f64) {
        let found = found.expect("both ways are known");
        for (found, queue) in [found.own, found.peer].into_iter().zip(queues) {
            assert!((found - queue.as_secs_f64()).abs() < most, "{found} instead of {queue:?}");
        }
    }

    #[test]
    fn a_queue_is_measured_in_its_direction_with_any_clock_offset() {
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
                // A queue comes and goes, as when a shaper probes for more capacity.
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
    fn jitter_is_no_queue() {
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
    fn old_reports_do_not_count() {
        let mut link = Link::new(5, 0.0);
        link.tell([Duration::ZERO; 2], Duration::ZERO);
        assert!(link.here.queues(link.now).is_some());
        assert_eq!(link.here.queues(link.now + MEASUREMENT_LIFETIME), None);
        // The next report is the first after a long time.
        link.now += 3 * MIN_WINDOW;
        assert_near(link.tell([20 * MS; 2], Duration::ZERO), [Duration::ZERO; 2], 1e-6);
        // That delay was the longest of all.
        link.tell([Duration::ZERO; 2], Duration::ZERO);
        assert_near(link.tell([20 * MS; 2], Duration::ZERO), [20 * MS; 2], 2e-6);
    }

    #[test]
    fn another_clock_counts_only_when_the_first_is_silent() {
        let mut link = Link::new(5, 0.0);
        link.tell([Duration::ZERO; 2], Duration::ZERO);
        let known = link.here.queues(link.now);
        link.here.on_report(link.now, 1, 0x8000_0000, Some(7));
        assert_eq!(link.here.queues(link.now), known);
        let later = link.now + CLOCK_SWITCH_AFTER;
        link.here.on_report(later, 1, 0x8000_0000, Some(7));
        assert_eq!(link.here.queues(later), Some(OneWayQueues { own: 0.0, peer: 0.0 }));
    }

    #[test]
    fn the_round_trip_limits_the_reported_delays() {
        let ways = |own, peer| OneWayQueues { own, peer };
        assert_eq!(ways(0.003, 0.004).own_within(0.007, 0.005), 0.003);
        assert_eq!(ways(9.0, 0.0).own_within(0.001, 0.005), 0.001, "there is no such queue");
        assert!(
            (ways(0.0, 0.001).own_within(0.02, 0.005) - 0.014).abs() < 1e-9,
            "nobody has seen the link empty"
        );
        assert_eq!(ways(0.0, 9.0).own_within(0.02, 0.005), 0.0);
    }

    proptest! {
        /// For any reported times, no queue is negative or longer than the largest clock step.
        #[test]
        fn any_reported_times_are_accepted(
            reported in proptest::collection::vec(any::<(u32, Option<u32>, u8, u16)>(), 1..200)
        ) {
            let mut now = Instant::now();
            let mut ways = ClockComparison::new(now);
            for (sent, found, clock, passed) in reported {
                now += Duration::from_micros(u64::from(passed) * 100);
                ways.on_report(now, clock % 2, sent, found);
                if let Some(OneWayQueues { own, peer }) = ways.queues(now) {
                    for queue in [own, peer] {
                        prop_assert!((0.0..=f64::from(MAX_CLOCK_STEP_MICROS) * 1e-6).contains(&queue), "{queue} s");
                    }
                }
            }
        }
    }
}
