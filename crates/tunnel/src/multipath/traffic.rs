//! How much data moves through a tunnel, and when the last of it did.
//!
//! In: bytes of inner IP and of streams, as they are sent and received. Out: counters, rates, and the time of
//! the last one. Always holds: counters only grow.

use mpvpn_types::{BitRate, Duration, Instant};

/// TrafficCounters of a tunnel (bytes and packets of inner IP).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TrafficCounters {
    /// Bytes taken from the TUN and sent.
    pub tx_bytes: u64,
    /// Bytes received and given to the TUN.
    pub rx_bytes: u64,
    /// Bytes of streams sent again because a path stalled or died.
    pub reinjected_bytes: u64,
}

/// TrafficRates are averages over at least this time. A shorter one shows bursts as rates, a longer one shows
/// changes late.
const RATE_PERIOD: Duration = Duration::from_secs(1);

/// How much moves through a tunnel now (of inner IP), measured over about a second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TrafficRates {
    /// What is sent.
    pub tx: BitRate,
    /// What is received.
    pub rx: BitRate,
}

/// Counts what moves.
#[derive(Debug)]
pub(super) struct Traffic {
    counters: TrafficCounters,
    rates: RateMeter,
    last_data_at: Option<Instant>,
    /// UDP payloads dropped because they fit no datagram.
    too_big: u64,
}

impl Traffic {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            counters: TrafficCounters::default(),
            rates: RateMeter::new(now),
            last_data_at: None,
            too_big: 0,
        }
    }

    /// Counts on where another one has ended.
    pub(super) fn continue_from(&mut self, before: &Self) {
        (self.counters, self.rates) = (before.counters, before.rates);
    }

    #[inline]
    pub(super) fn count_sent(&mut self, bytes: u64) {
        self.counters.tx_bytes += bytes;
    }

    #[inline]
    pub(super) fn count_received(&mut self, bytes: u64) {
        self.counters.rx_bytes += bytes;
    }

    /// Bytes of streams were sent again.
    pub(super) fn count_reinjected(&mut self, bytes: u64) {
        self.counters.reinjected_bytes += bytes;
    }

    /// A UDP payload that fits no datagram was dropped.
    pub(super) fn count_oversized(&mut self) {
        self.too_big += 1;
    }

    /// Data is on its way, in either direction. Returns whether that was not known at this instant.
    #[inline]
    pub(super) fn moves(&mut self, now: Instant) -> bool {
        self.last_data_at.replace(now) != Some(now)
    }

    /// Takes note of the time; to be called often while something moves.
    pub(super) fn measure(&mut self, now: Instant) {
        self.rates.measure(now, &self.counters);
    }

    pub(super) fn counters(&self) -> TrafficCounters {
        self.counters
    }

    /// UDP payloads dropped because they fit no datagram.
    pub(super) fn too_big(&self) -> u64 {
        self.too_big
    }

    pub(super) fn rates(&self, now: Instant) -> TrafficRates {
        self.rates.rates(now, &self.counters)
    }

    /// When data was last on its way, in either direction.
    #[inline]
    pub(super) fn last_data_at(&self) -> Option<Instant> {
        self.last_data_at
    }
}

/// Makes rates of counters.
#[derive(Clone, Copy, Debug)]
struct RateMeter {
    since: Instant,
    at: TrafficCounters,
    rates: TrafficRates,
}

impl RateMeter {
    fn new(now: Instant) -> Self {
        Self { since: now, at: TrafficCounters::default(), rates: TrafficRates::default() }
    }

    /// Begins anew when the period is over.
    fn measure(&mut self, now: Instant, counters: &TrafficCounters) {
        if now.saturating_duration_since(self.since) >= RATE_PERIOD {
            *self = Self { since: now, at: *counters, rates: self.rates(now, counters) };
        }
    }

    /// The last ones, or if nothing has moved for so long that they are old, those since then.
    fn rates(&self, now: Instant, counters: &TrafficCounters) -> TrafficRates {
        let passed = now.saturating_duration_since(self.since);
        if passed < RATE_PERIOD {
            return self.rates;
        }
        let rate = |before: u64, bytes: u64| {
            let bits = u128::from(bytes.saturating_sub(before)) * 8_000_000;
            BitRate::from_bps(u64::try_from(bits / passed.as_micros().max(1)).unwrap_or(u64::MAX))
        };
        TrafficRates {
            tx: rate(self.at.tx_bytes, counters.tx_bytes),
            rx: rate(self.at.rx_bytes, counters.rx_bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_those_of_the_last_second_and_fade_when_nothing_moves() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut traffic = Traffic::new(start);
        for ms in (0..=2000).step_by(20) {
            traffic.measure(at(ms));
            traffic.count_sent(20_000);
            traffic.count_received(40_000);
        }
        let full = TrafficRates { tx: BitRate::from_bps(8_000_000), rx: BitRate::from_bps(16_000_000) };
        assert_eq!(traffic.rates(at(2500)), full);
        assert!(traffic.rates(at(6000)).tx < BitRate::from_bps(50_000), "nothing but the last packet");
        traffic.measure(at(4000));
        traffic.count_sent(500_000);
        assert!(traffic.rates(at(4500)).tx < BitRate::from_bps(100_000), "the last whole second counts");
    }

    #[test]
    fn a_tunnel_that_replaces_another_counts_on() {
        let start = Instant::now();
        let (mut old, mut new) = (Traffic::new(start), Traffic::new(start));
        (0..3).for_each(|_| old.count_reinjected(7));
        old.moves(start);
        new.continue_from(&old);
        assert_eq!(new.counters().reinjected_bytes, 21);
        assert_eq!(
            (old.last_data_at(), new.last_data_at()),
            (Some(start), None),
            "nothing has moved through it itself"
        );
    }
}
