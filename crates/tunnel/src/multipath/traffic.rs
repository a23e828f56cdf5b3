//! Counts the data of a tunnel, and records when data last moved.
//!
//! In: bytes of inner IP packets and of streams that are sent or received. Out: counters, rates, and the time
//! of the last data. Always holds: counters only grow.

use derive_more::AddAssign;
use mpvpn_types::{BitRate, Duration, Instant};

/// Counters of a tunnel in bytes of inner IP packets, stream data and UDP payloads.
#[derive(AddAssign, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TrafficCounters {
    /// Bytes sent.
    pub tx_bytes: u64,
    /// Bytes received.
    pub rx_bytes: u64,
    /// Stream bytes that were reinjected because a path stalled or died.
    pub reinjected_bytes: u64,
    /// TCP acknowledgements that were not sent because a later one superseded them while they waited.
    pub superseded_acks: u64,
}

/// Minimum time over which rates are averaged. Smaller: bursts show as rates. Larger: changes show late.
const MIN_RATE_PERIOD: Duration = Duration::from_secs(1);

/// The current rates of a tunnel, in the units of [`TrafficCounters`], averaged over at least one second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TrafficRates {
    /// Sending rate.
    pub tx: BitRate,
    /// Receiving rate.
    pub rx: BitRate,
}

/// Counters, rates and the time of the last data.
#[derive(Debug)]
pub(crate) struct Traffic {
    pub(crate) counters: TrafficCounters,
    rates: RateMeter,
    /// When data moved last, in either direction.
    pub(crate) last_data_at: Option<Instant>,
    /// Number of UDP payloads dropped because they do not fit a datagram.
    pub(crate) oversized: u64,
}

impl Traffic {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            counters: TrafficCounters::default(),
            rates: RateMeter::new(now),
            last_data_at: None,
            oversized: 0,
        }
    }

    /// Continues the counters and rates of `before`.
    pub(crate) fn continue_from(&mut self, before: &Self) {
        (self.counters, self.rates) = (before.counters, before.rates);
    }

    /// Records that data moves at `now`; returns false if it was already recorded for this instant.
    #[inline]
    pub(super) fn note_data(&mut self, now: Instant) -> bool {
        self.last_data_at.replace(now) != Some(now)
    }

    /// Updates the rates; to be called often while data moves.
    pub(super) fn measure(&mut self, now: Instant) {
        self.rates.measure(now, &self.counters);
    }

    pub(crate) fn rates(&self, now: Instant) -> TrafficRates {
        self.rates.rates(now, &self.counters)
    }
}

/// Computes rates from counters.
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

    /// Starts a new averaging period when [`MIN_RATE_PERIOD`] is over.
    fn measure(&mut self, now: Instant, counters: &TrafficCounters) {
        if now.saturating_duration_since(self.since) >= MIN_RATE_PERIOD {
            *self = Self { since: now, at: *counters, rates: self.rates(now, counters) };
        }
    }

    /// Returns the rates of the last period, or those since its end if it ended long ago.
    fn rates(&self, now: Instant, counters: &TrafficCounters) -> TrafficRates {
        let passed = now.saturating_duration_since(self.since);
        if passed < MIN_RATE_PERIOD {
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
            traffic.counters.tx_bytes += 20_000;
            traffic.counters.rx_bytes += 40_000;
        }
        let full = TrafficRates { tx: BitRate::from_bps(8_000_000), rx: BitRate::from_bps(16_000_000) };
        assert_eq!(traffic.rates(at(2500)), full);
        assert!(traffic.rates(at(6000)).tx < BitRate::from_bps(50_000), "nothing but the last packet");
        traffic.measure(at(4000));
        traffic.counters.tx_bytes += 500_000;
        assert!(traffic.rates(at(4500)).tx < BitRate::from_bps(100_000), "the last whole second counts");
    }

    #[test]
    fn a_tunnel_that_replaces_another_counts_on() {
        let start = Instant::now();
        let (mut old, mut new) = (Traffic::new(start), Traffic::new(start));
        old.counters.reinjected_bytes = 21;
        old.note_data(start);
        new.continue_from(&old);
        assert_eq!(new.counters.reinjected_bytes, 21);
        assert_eq!(
            (old.last_data_at, new.last_data_at),
            (Some(start), None),
            "nothing has moved through it itself"
        );
    }
}
