//! When the datagrams have arrived that noq holds: it forgets the time.
//!
//! In: the time of each packet before noq takes it, and what noq holds. Out: datagrams with their times, in
//! order of arrival. Always holds: at most [`MAX_BYTES`] wait here; what arrives beyond that has the time of
//! the last packet.

use bytes::Bytes;
use mpvpn_types::Instant;

/// Bytes that wait here at most. Fewer: of a batch with many times of arrival the last datagrams seem
/// younger. More: memory, for a peer that sends datagrams before anybody takes them. A batch has at most 16
/// messages of 64 KiB.
const MAX_BYTES: usize = 1 << 20;

/// The times of datagrams that nobody has taken yet.
#[derive(Debug, Default)]
pub(super) struct Arrivals {
    /// Those that arrived before the last packet.
    earlier: Vec<(Instant, Bytes)>,
    /// Bytes of `earlier`.
    bytes: usize,
    /// When those have arrived that noq holds; `None` if all were taken.
    last: Option<Instant>,
}

impl Arrivals {
    /// A packet has arrived at `at`, which noq has not taken yet. Returns the time of what noq holds if that
    /// has to be told first, by [`Self::push`].
    pub(super) fn on_packet(&mut self, at: Instant) -> Option<Instant> {
        let before = self.last.replace(at);
        before.filter(|before| *before != at && self.bytes < MAX_BYTES)
    }

    /// Takes a datagram that noq has held, which arrived at `at`.
    pub(super) fn push(&mut self, at: Instant, datagram: Bytes) {
        self.bytes += datagram.len();
        self.earlier.push((at, datagram));
    }

    /// When those have arrived that noq holds, which are taken now.
    pub(super) fn take_last(&mut self) -> Option<Instant> {
        self.last.take()
    }

    /// Takes those that arrived before.
    pub(super) fn take_earlier(&mut self) -> Vec<(Instant, Bytes)> {
        self.bytes = 0;
        std::mem::take(&mut self.earlier)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn datagrams_of_one_train_stay_where_they_are() {
        let (mut arrivals, start) = (Arrivals::default(), Instant::now());
        assert_eq!(arrivals.on_packet(start), None, "noq holds nothing yet");
        assert_eq!(arrivals.on_packet(start), None, "the same time");
        let later = start + Duration::from_micros(200);
        assert_eq!(arrivals.on_packet(later), Some(start));
        arrivals.push(start, Bytes::from_static(b"first"));
        assert_eq!(arrivals.take_last(), Some(later));
        assert_eq!(arrivals.take_earlier(), [(start, Bytes::from_static(b"first"))]);
        assert!(arrivals.take_earlier().is_empty());
    }

    #[test]
    fn little_waits_for_somebody_to_take_it() {
        let (mut arrivals, mut now) = (Arrivals::default(), Instant::now());
        let datagram = Bytes::from_static(&[0; 1200]);
        for _ in 0..10_000 {
            now += Duration::from_micros(1);
            if let Some(at) = arrivals.on_packet(now) {
                arrivals.push(at, datagram.clone());
            }
        }
        let waiting: usize = arrivals.take_earlier().iter().map(|(_, datagram)| datagram.len()).sum();
        assert!((MAX_BYTES..MAX_BYTES + 1200).contains(&waiting), "{waiting} bytes");
    }
}
