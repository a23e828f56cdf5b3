use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mpvpn_path::Pacer;
use mpvpn_types::{BitRate, Instant};

/// A limit on what one path may send, or several together, acknowledgements, heartbeats and headers included.
///
/// It counts what the transport says it has sent, so nothing passes uncounted; but only data waits
/// for it, because a path that may not acknowledge would look dead.
#[derive(Clone, Debug)]
pub(crate) struct Cap {
    rate: BitRate,
    bucket: Arc<Mutex<Pacer>>,
    /// Bytes of IP and UDP headers in front of every payload.
    header: u64,
    /// UDP payload bytes and datagrams that have been taken out of the bucket.
    counted: (u64, u64),
}

impl Cap {
    /// A limit from now on, on a path that has sent so much before.
    pub(crate) fn new(now: Instant, rate: BitRate, v4: bool, bytes: u64, datagrams: u64) -> Self {
        let header = if v4 { 28 } else { 48 };
        let bucket = Arc::new(Mutex::new(Pacer::new(now, 1200)));
        Self { rate, bucket, header, counted: (bytes, datagrams) }
    }

    /// Makes the limit of another path that of both, if it is the same.
    pub(crate) fn share(&mut self, other: &Self) {
        if self.rate == other.rate {
            self.bucket = other.bucket.clone();
        }
    }

    fn bucket(&self) -> MutexGuard<'_, Pacer> {
        self.bucket.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn rate(&self) -> BitRate {
        self.rate
    }

    pub(crate) fn bytes_per_second(&self) -> u64 {
        self.rate.bps() / 8
    }

    /// Bytes that may leave now, where the path has sent `sent` (UDP payload bytes, datagrams) in all.
    pub(crate) fn left(&mut self, now: Instant, sent: Option<(u64, u64)>, mtu: u16) -> u64 {
        self.bucket().refill(now, Some(self.bytes_per_second()), mtu);
        if let Some((bytes, datagrams)) = sent {
            let payload = bytes.saturating_sub(self.counted.0);
            let headers = datagrams.saturating_sub(self.counted.1) * self.header;
            self.bucket().spend(payload + headers);
            self.counted = (bytes, datagrams);
        }
        self.bucket().budget()
    }

    /// When there is room again; `None` if there is now.
    pub(crate) fn wake_at(&self, now: Instant) -> Option<Instant> {
        self.bucket().wake_at(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mpvpn_types::Duration;

    #[test]
    fn paths_of_a_link_share_its_limit() {
        let start = Instant::now();
        let mut first = Cap::new(start, BitRate::from_bps(8_000_000), true, 0, 0);
        let mut second = Cap::new(start, BitRate::from_bps(8_000_000), true, 0, 0);
        second.share(&first);
        let (mut one, mut two) = ((0, 0), (0, 0));
        for step in 0..100_000u64 {
            let now = start + Duration::from_micros(step * 10);
            let (own, sent) = if step % 3 == 0 { (&mut first, &mut one) } else { (&mut second, &mut two) };
            while own.left(now, Some(*sent), 1472) > 0 {
                *sent = (sent.0 + 1472, sent.1 + 1);
            }
        }
        let on_the_wire = one.0 + two.0 + 28 * (one.1 + two.1);
        assert!((990_000..=1_015_000).contains(&on_the_wire), "{on_the_wire} bytes in a second of 8 Mbit/s");
    }

    #[test]
    fn headers_count_too() {
        let start = Instant::now();
        let mut cap = Cap::new(start, BitRate::from_bps(8_000_000), true, 5000, 5);
        let (mut bytes, mut datagrams) = (5000, 5);
        for step in 0..100_000u64 {
            let now = start + Duration::from_micros(step * 10);
            while cap.left(now, Some((bytes, datagrams)), 1472) > 0 {
                bytes += 72;
                datagrams += 1;
            }
        }
        let on_the_wire = (bytes - 5000) + 28 * (datagrams - 5);
        assert!((990_000..=1_010_000).contains(&on_the_wire), "{on_the_wire} bytes in a second of 8 Mbit/s");
    }
}
