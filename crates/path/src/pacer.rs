use mpvpn_types::{Duration, Instant, bytes_in};

/// The shortest time between two bursts. Shorter: more wake-ups than they smooth; longer: burstier. 1 ms
/// changed nothing with 16 flows over 300 + 80 Mbit/s (docs/design/scheduler.md).
const MIN_BURST_INTERVAL: Duration = Duration::from_micros(500);
/// How much of the rate a late wake-up may catch up on. Shorter: a busy machine falls behind the rate, which
/// the congestion controller takes for the path's; longer: larger bursts after a pause.
const MAX_CATCH_UP: Duration = Duration::from_millis(5);
/// The largest burst, at any rate: 5 ms at 3.4 Gbit/s. Larger: longer bursts on very fast paths; smaller:
/// those fall behind their rate after late wake-ups.
const MAX_BURST_BYTES: u64 = 2 << 20;
/// Packets that a burst may always hold, so that slow paths can send. More: bursts on slow paths.
const MIN_BURST_PACKETS: u64 = 4;

/// A batch is what the rate carries in this time …
const BATCH_TIME: Duration = Duration::from_millis(8);
/// … but at most this many bytes: a TLS record (RFC 8446 §5.1). Each write inside TCP costs a TLS record and
/// mostly a segment that is not full: without batches segments had 950 instead of 1190 bytes. Smaller:
/// half-empty segments; larger: bursts.
const MAX_BATCH_BYTES: u64 = 16 << 10;

/// A token bucket that spreads a path's packets over time.
///
/// Tokens are bytes; they grow with the rate that the congestion controller asks for, up to one
/// burst, and may go below zero by the packet that used the last of them.
#[derive(Clone, Debug)]
pub struct Pacer {
    tokens: i64,
    rate: Option<u64>,
    mtu: u64,
    last: Instant,
    batching: bool,
    /// Tokens are saved up for the next batch.
    saving: bool,
}

impl Pacer {
    /// A pacer that may send its first packets at once.
    pub fn new(now: Instant, mtu: u16) -> Self {
        let mtu = u64::from(mtu);
        Self {
            tokens: (mtu * MIN_BURST_PACKETS) as i64,
            rate: None,
            mtu,
            last: now,
            batching: false,
            saving: false,
        }
    }

    /// Sets whether packets leave in batches rather than one by one, because each write costs bytes on the
    /// wire.
    pub fn set_batching(&mut self, batching: bool) {
        (self.batching, self.saving) = (batching, self.saving && batching);
    }

    /// Sets the rate (bytes/s; `None` for no limit) and lets the tokens grow up to `now`. Returns whether
    /// more has grown than a late wake-up may catch up on.
    pub fn refill(&mut self, now: Instant, rate: Option<u64>, mtu: u16) -> bool {
        self.mtu = u64::from(mtu);
        let elapsed = now.saturating_duration_since(self.last);
        self.rate = rate;
        let Some(rate) = rate else {
            self.last = now;
            return false;
        };
        let grown = bytes_in(rate, elapsed);
        // Time too short for one byte is kept for the next call, so that frequent calls do not starve a slow
        // path.
        let capacity = self.capacity(rate);
        if grown == 0 && self.tokens < capacity {
            return false;
        }
        self.last = now;
        let tokens = self.tokens.saturating_add_unsigned(grown);
        self.tokens = tokens.min(capacity);
        self.saving &= self.tokens < self.batch_bytes(rate);
        tokens > capacity
    }

    fn capacity(&self, rate: u64) -> i64 {
        self.burst_bytes(rate, if self.batching { MAX_CATCH_UP + BATCH_TIME } else { MAX_CATCH_UP })
    }

    fn batch_bytes(&self, rate: u64) -> i64 {
        bytes_in(rate, BATCH_TIME).min(MAX_BATCH_BYTES).max(self.mtu) as i64
    }

    fn burst_bytes(&self, rate: u64, time: Duration) -> i64 {
        bytes_in(rate, time).clamp(self.mtu * MIN_BURST_PACKETS, MAX_BURST_BYTES) as i64
    }

    /// Bytes that may leave now.
    pub fn budget(&self) -> u64 {
        match self.rate {
            None => u64::MAX,
            Some(_) if self.saving => 0,
            Some(_) => u64::try_from(self.tokens).unwrap_or(0),
        }
    }

    /// Takes the bytes that were sent out of the bucket.
    pub fn spend(&mut self, bytes: u64) {
        if self.rate.is_some() {
            self.tokens = self.tokens.saturating_sub_unsigned(bytes);
            self.saving |= self.batching && self.tokens <= 0;
        }
    }

    /// When the next burst may leave; `None` if one may leave now.
    pub fn wake_at(&self, now: Instant) -> Option<Instant> {
        let rate = self.rate?.max(1);
        if self.tokens > 0 && !self.saving {
            return None;
        }
        let wanted =
            if self.saving { self.batch_bytes(rate) } else { self.burst_bytes(rate, MIN_BURST_INTERVAL) / 2 };
        let missing = u64::try_from(wanted - self.tokens).unwrap_or(0);
        let nanos = u128::from(missing) * 1_000_000_000 / u128::from(rate);
        Some(now + Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX).min(1_000_000_000)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bytes_sent_follow_the_rate() {
        let start = Instant::now();
        let mut pacer = Pacer::new(start, 1500);
        let rate = 12_500_000; // 100 Mbit/s
        let mut sent = 0;
        for step in 0..10_000u64 {
            pacer.refill(start + Duration::from_micros(step * 100), Some(rate), 1500);
            while pacer.budget() > 0 {
                pacer.spend(1500);
                sent += 1500;
            }
        }
        let off = (sent as f64 - rate as f64).abs() / rate as f64;
        assert!(off < 0.01, "{sent} bytes in a second at {rate} bytes/s");
    }

    #[test]
    fn a_slow_path_is_not_starved_by_frequent_calls() {
        let start = Instant::now();
        let mut pacer = Pacer::new(start, 1500);
        pacer.refill(start, Some(1000), 1500);
        pacer.spend(10_000);
        for step in 0..8_000_000u64 / 100 {
            pacer.refill(start + Duration::from_micros(step * 100), Some(1000), 1500);
        }
        assert!(pacer.budget() > 0, "8000 bytes must have grown in 8 s: {pacer:?}");
    }

    #[test]
    fn a_wake_up_finds_tokens() {
        let start = Instant::now();
        let mut pacer = Pacer::new(start, 1500);
        pacer.refill(start, Some(1_000_000), 1500);
        pacer.spend(20_000);
        let at = pacer.wake_at(start).expect("the bucket is empty");
        pacer.refill(at, Some(1_000_000), 1500);
        assert!(pacer.budget() > 0);
    }

    #[test]
    fn batches_keep_the_rate() {
        for (rate, most) in [(1_250_000, 230), (125_000_000, 8_000), (100_000, 90)] {
            let start = Instant::now();
            let mut pacer = Pacer::new(start, 1472);
            pacer.set_batching(true);
            let (mut sent, mut lumps, mut now) = (0, 0, start);
            while now < start + Duration::from_secs(1) {
                pacer.refill(now, Some(rate), 1472);
                lumps += u32::from(pacer.budget() > 0);
                while pacer.budget() > 0 {
                    pacer.spend(1472);
                    sent += 1472;
                }
                // It is woken for other reasons all the time.
                now = (now + Duration::from_micros(50)).min(pacer.wake_at(now).unwrap_or(now));
            }
            let off = (sent as f64 - rate as f64).abs() / rate as f64;
            assert!(off < 0.07 && lumps <= most, "{sent} bytes in {lumps} lumps at {rate} bytes/s");
        }
    }

    #[test]
    fn without_a_rate_every_packet_may_leave() {
        let start = Instant::now();
        let mut pacer = Pacer::new(start, 1500);
        pacer.refill(start, None, 1500);
        pacer.spend(1 << 40);
        assert_eq!((pacer.budget(), pacer.wake_at(start)), (u64::MAX, None));
    }
}
