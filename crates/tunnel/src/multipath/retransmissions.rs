//! The queue of lost numbered packets that wait for retransmission.
//!
//! In: datagrams that were declared lost. Out: the same, oldest first. Always holds: the queue is bounded, no
//! packet is retransmitted more than [`MAX_RETRANSMISSIONS`] times or when it is older than
//! [`MAX_PACKET_AGE`].

use std::collections::VecDeque;

use mpvpn_quic::TrackedDatagram;
use mpvpn_types::{Duration, Instant, target::REORDER};

/// Maximum number of retransmissions of a packet: at 60 % loss, one packet in 60 is given up (0.6^8).
/// Smaller: more gaps reach TCP. Larger: the peer waits for longer for few packets.
pub(super) const MAX_RETRANSMISSIONS: u8 = 8;
/// Age at which a packet is no longer retransmitted: TCP has retransmitted it by then, and a call no longer
/// needs it. Smaller: lost packets of paths with long round trips are given up. Larger: useless packets are
/// sent.
const MAX_PACKET_AGE: Duration = Duration::from_millis(600);
/// Maximum bytes that wait for retransmission: the bandwidth-delay product of a path of 1 Gbit/s and 64 ms,
/// for when it dies. Smaller: losses are not repaired. Larger: memory.
const MAX_WAITING_BYTES: usize = 8 << 20;

/// The queue of lost packets.
#[derive(Debug, Default)]
pub(super) struct Retransmissions {
    queue: VecDeque<TrackedDatagram>,
    bytes: usize,
    /// Number of retransmitted packets.
    pub(super) sent: u64,
}

impl Retransmissions {
    /// Queues a lost numbered datagram, unless it is too old or was retransmitted too often.
    pub(super) fn push(&mut self, now: Instant, lost: TrackedDatagram) {
        let age = now.saturating_duration_since(lost.first_sent);
        let (tries, waiting) = (lost.retransmissions, self.bytes);
        if age > MAX_PACKET_AGE || tries >= MAX_RETRANSMISSIONS || waiting > MAX_WAITING_BYTES {
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

    /// Returns the next datagram to retransmit.
    pub(super) fn pop(&mut self) -> Option<TrackedDatagram> {
        let next = self.queue.pop_front()?;
        self.bytes -= next.data.len();
        self.sent += 1;
        Some(next)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
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
        assert_eq!((queue.is_empty(), queue.sent, queue.pop()), (true, 1, None));
    }

    #[test]
    fn packets_too_old_or_retransmitted_too_often_are_given_up() {
        let (mut queue, born) = (Retransmissions::default(), Instant::now());
        queue.push(born, lost(born, MAX_RETRANSMISSIONS, 100));
        queue.push(born + MAX_PACKET_AGE + Duration::from_millis(1), lost(born, 0, 100));
        assert!(queue.is_empty());
        queue.push(born + MAX_PACKET_AGE, lost(born, MAX_RETRANSMISSIONS - 1, 100));
        assert!(!queue.is_empty());
    }

    #[test]
    fn the_retransmission_queue_is_bounded() {
        let (mut queue, now) = (Retransmissions::default(), Instant::now());
        const MIB: usize = 1 << 20;
        (0..20).for_each(|_| queue.push(now, lost(now, 0, MIB)));
        let kept = std::iter::from_fn(|| queue.pop()).count();
        assert_eq!(kept, MAX_WAITING_BYTES / MIB + 1);
        queue.push(now, lost(now, 0, MIB));
        assert!(!queue.is_empty(), "there is room again");
    }
}
