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
