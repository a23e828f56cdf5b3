//! Numbered packets that were lost and wait to be sent again, on whichever path they arrive first.
//!
//! In: datagrams whose loss was detected. Out: the same, oldest first. Always holds: what waits is bounded,
//! no packet is sent again more than [`MOST_TRIES`] times, and none that nobody needs any more.

use std::collections::VecDeque;

use mpvpn_quic::TrackedDatagram;
use mpvpn_types::{Duration, Instant, target::REORDER};

/// A packet is sent again this often at most: at 60 % loss one in 60 is given up (0.6^8). More tries keep the
/// far end waiting for less and less.
pub(super) const MOST_TRIES: u8 = 8;
/// A packet that is older than this is of no use: TCP has sent it again itself by then, and a call has gone
/// on.
const MOST_AGE: Duration = Duration::from_millis(600);
/// Bytes that wait to be sent again, at most: the window of a path of 1 Gbit/s and 64 ms that dies.
const MOST_BYTES: usize = 8 << 20;

/// The queue of lost packets.
#[derive(Debug, Default)]
pub(super) struct Retransmissions {
    queue: VecDeque<TrackedDatagram>,
    bytes: usize,
    /// Packets sent again, since the start.
    sent: u64,
}

impl Retransmissions {
    /// Takes a numbered datagram that was lost, if it is worth sending again.
    pub(super) fn push(&mut self, now: Instant, lost: TrackedDatagram) {
        let age = now.saturating_duration_since(lost.first_sent);
        let (tries, waiting) = (lost.retransmissions, self.bytes);
        if age > MOST_AGE || tries >= MOST_TRIES || waiting > MOST_BYTES {
            tracing::trace!(target: REORDER, ?age, tries, waiting, "a lost packet is given up");
            return;
        }
        tracing::trace!(target: REORDER, ?age, tries, waiting, "a lost packet is sent again");
        self.bytes += lost.data.len();
        self.queue.push_back(TrackedDatagram {
            retransmissions: lost.retransmissions + 1,
            has_copy: false,
            ..lost
        });
    }

    /// The next datagram to send again.
    pub(super) fn pop(&mut self) -> Option<TrackedDatagram> {
        let next = self.queue.pop_front()?;
        self.bytes -= next.data.len();
        self.sent += 1;
        Some(next)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Packets sent again, since the start.
    pub(super) fn sent(&self) -> u64 {
        self.sent
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    fn lost(born: Instant, tries: u8, len: usize) -> TrackedDatagram {
        TrackedDatagram {
            data: Bytes::from(vec![0; len]),
            first_sent: born,
            retransmissions: tries,
            has_copy: true,
            ack_token: None,
        }
    }

    #[test]
    fn a_lost_packet_is_sent_again_as_one_without_copies() {
        let (mut queue, now) = (Retransmissions::default(), Instant::now());
        queue.push(now, lost(now, 2, 100));
        let again = queue.pop().expect("a packet");
        assert_eq!((again.retransmissions, again.has_copy, again.data.len()), (3, false, 100));
        assert_eq!((queue.is_empty(), queue.sent(), queue.pop()), (true, 1, None));
    }

    #[test]
    fn what_is_old_or_was_tried_too_often_is_given_up() {
        let (mut queue, born) = (Retransmissions::default(), Instant::now());
        queue.push(born, lost(born, MOST_TRIES, 100));
        queue.push(born + MOST_AGE + Duration::from_millis(1), lost(born, 0, 100));
        assert!(queue.is_empty());
        queue.push(born + MOST_AGE, lost(born, MOST_TRIES - 1, 100));
        assert!(!queue.is_empty());
    }

    #[test]
    fn what_waits_is_bounded() {
        let (mut queue, now) = (Retransmissions::default(), Instant::now());
        const MIB: usize = 1 << 20;
        (0..20).for_each(|_| queue.push(now, lost(now, 0, MIB)));
        let kept = std::iter::from_fn(|| queue.pop()).count();
        assert_eq!(kept, MOST_BYTES / MIB + 1);
        queue.push(now, lost(now, 0, MIB));
        assert!(!queue.is_empty(), "there is room again");
    }
}
