//! The outcomes of the datagrams of a path: acknowledged or lost.
//!
//! noq tells its congestion controller the number of every packet that is sent, acknowledged or lost, but not
//! its frames. They follow from order and size: a packet takes datagrams in the order in which they were
//! queued, as many as fit, each whole. Sizes alone would never agree again after one surprise, so after each
//! pass the bytes that noq still holds say how many are in packets. In: queued datagrams, and packets that
//! were sent, acknowledged and lost. Out: outcomes of tracked datagrams.
//! Always holds: each tracked datagram has one outcome at most; a packet whose outcome noq never tells, as
//! one that was sent before the peer's address changed, keeps no other in memory, and counts as lost after
//! [`MAX_LATER_PACKETS`] packets.

use std::collections::VecDeque;

use bytes::Bytes;
use mpvpn_types::Instant;

/// The least overhead of a 1-RTT packet (bytes): flags, connection ID, packet number of one byte, AEAD tag
/// (RFC 9000 §17.3.1).
const MIN_PACKET_OVERHEAD: usize = 1 + 8 + 1 + 16;

/// A packet without an outcome counts as lost once this many later ones were sent: 1 Gbit/s with a round trip
/// of 600 ms has 54,000 in flight. Smaller: packets in flight are sent again; larger: memory, and late
/// retransmissions.
const MAX_LATER_PACKETS: u64 = 1 << 16;
/// Entries with an outcome that may stay behind one without. Fewer: entries are moved more often; more:
/// memory.
const MAX_RESOLVED: usize = 64;

/// A datagram whose outcome is reported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrackedDatagram {
    /// The datagram.
    pub data: Bytes,
    /// When the datagram was sent for the first time.
    pub first_sent: Instant,
    /// How often the datagram was sent again.
    pub retransmissions: u8,
    /// Whether a copy was sent on another path.
    pub has_copy: bool,
    /// The token of [`Outcome::Arrived`], if an acknowledgement is to be reported, too.
    pub ack_token: Option<u32>,
}

/// The outcome of a tracked datagram.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It was acknowledged; reported only for datagrams with an `ack_token`, which this is.
    Arrived(u32),
    /// It was lost.
    Lost(TrackedDatagram),
}

#[derive(Debug)]
struct Sent {
    packet: u64,
    /// `None` once its outcome is known.
    datagram: Option<TrackedDatagram>,
}

/// The datagrams in flight on one path.
#[derive(Debug, Default)]
pub(crate) struct SentDatagrams {
    /// Datagrams inside noq that are not in a packet yet: their lengths, and the datagram if it is tracked.
    queued: VecDeque<(usize, Option<TrackedDatagram>)>,
    /// The sum of these lengths (bytes).
    queued_bytes: usize,
    /// The last packet that was sent.
    last_packet: u64,
    /// Tracked datagrams in packets, by packet number.
    sent: VecDeque<Sent>,
    /// Number of them whose outcome is unknown.
    open: usize,
    lost: Vec<TrackedDatagram>,
    /// Tokens of acknowledged datagrams.
    arrived: Vec<u32>,
}

impl SentDatagrams {
    /// A datagram of `len` bytes was handed to noq.
    pub(crate) fn on_queued(&mut self, len: usize, datagram: Option<TrackedDatagram>) {
        self.queued.push_back((len, datagram));
        self.queued_bytes += len;
    }

    /// noq refused the datagrams that were handed over last.
    pub(crate) fn lose_queued(&mut self) {
        self.lost.extend(self.queued.drain(..).filter_map(|(_, datagram)| datagram));
        self.queued_bytes = 0;
    }

    /// A packet of `bytes` bytes was sent.
    pub(crate) fn on_sent(&mut self, packet: u64, bytes: usize) {
        self.last_packet = packet;
        let mut room = bytes.saturating_sub(MIN_PACKET_OVERHEAD);
        while let Some((len, datagram)) = self.queued.pop_front_if(|(len, _)| frame_bytes(*len) <= room) {
            room -= frame_bytes(len);
            self.queued_bytes -= len;
            self.add_sent(datagram);
        }
    }

    /// A pass has ended, and noq still holds `left` bytes of datagrams. It has written all datagrams that
    /// were queued before these; they count as part of the last packet.
    pub(crate) fn on_pass_end(&mut self, left: usize) {
        while let Some(datagram) = self.pop_written(left) {
            self.add_sent(datagram);
        }
    }

    /// A pass begins, and noq still holds `left` bytes of datagrams. What this path queued earlier, and noq
    /// has written since, left on other paths: its outcome is not known.
    pub(crate) fn forget_written_elsewhere(&mut self, left: usize) {
        while self.pop_written(left).is_some() {}
    }

    /// The first queued datagram, if noq has written it, as it holds only `left` bytes.
    fn pop_written(&mut self, left: usize) -> Option<Option<TrackedDatagram>> {
        let (len, datagram) = self.queued.pop_front_if(|_| self.queued_bytes > left)?;
        self.queued_bytes -= len;
        Some(datagram)
    }

    fn add_sent(&mut self, datagram: Option<TrackedDatagram>) {
        if datagram.is_some() {
            self.sent.push_back(Sent { packet: self.last_packet, datagram });
            self.open += 1;
        }
    }

    /// A packet was acknowledged.
    pub(crate) fn on_acked(&mut self, packet: u64) {
        let mut arrived = std::mem::take(&mut self.arrived);
        self.resolve(packet, |datagram| arrived.extend(datagram.ack_token));
        self.arrived = arrived;
    }

    /// A packet was lost.
    pub(crate) fn on_lost(&mut self, packet: u64) {
        let mut lost = Vec::new();
        self.resolve(packet, |datagram| lost.push(datagram));
        self.lost.append(&mut lost);
    }

    fn resolve(&mut self, packet: u64, mut each: impl FnMut(TrackedDatagram)) {
        let first = self.sent.partition_point(|sent| sent.packet < packet);
        for sent in self.sent.iter_mut().skip(first).take_while(|sent| sent.packet == packet) {
            if let Some(datagram) = sent.datagram.take() {
                self.open -= 1;
                each(datagram);
            }
        }
        self.forget_resolved(packet);
    }

    /// Forgets datagrams whose outcome is known, and gives up those that were sent long before `packet`.
    fn forget_resolved(&mut self, packet: u64) {
        let is_done = |sent: &mut Sent| sent.datagram.is_none() || sent.packet + MAX_LATER_PACKETS < packet;
        while let Some(sent) = self.sent.pop_front_if(is_done) {
            if let Some(datagram) = sent.datagram {
                self.open -= 1;
                self.lost.push(datagram);
            }
        }
        if self.sent.len() > 2 * self.open + MAX_RESOLVED {
            self.sent.retain(|sent| sent.datagram.is_some());
        }
    }

    /// Whether there are outcomes to report.
    pub(crate) fn has_outcomes(&self) -> bool {
        !self.lost.is_empty() || !self.arrived.is_empty()
    }

    /// Takes the outcomes: acknowledged datagrams first, as FEC may restore losses by them.
    pub(crate) fn drain_outcomes(&mut self, mut each: impl FnMut(Outcome)) {
        self.arrived.drain(..).for_each(|mark| each(Outcome::Arrived(mark)));
        self.lost.drain(..).for_each(|datagram| each(Outcome::Lost(datagram)));
    }

    /// Takes all datagrams without a known outcome, because the path is dead.
    pub(crate) fn take_unacked(&mut self) -> Vec<TrackedDatagram> {
        let mut all = std::mem::take(&mut self.lost);
        all.extend(std::mem::take(&mut self.sent).into_iter().filter_map(|sent| sent.datagram));
        self.open = 0;
        all
    }

    /// Whether no datagram is tracked.
    pub(crate) fn is_empty(&self) -> bool {
        self.queued.is_empty() && self.sent.is_empty()
    }
}

/// The size of a DATAGRAM frame with `len` bytes (RFC 9221 §4).
fn frame_bytes(len: usize) -> usize {
    let length_field = if len < 64 { 1 } else { 2 };
    1 + length_field + len
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tracked(len: usize) -> TrackedDatagram {
        TrackedDatagram {
            data: Bytes::from(vec![0; len]),
            first_sent: Instant::now(),
            retransmissions: 0,
            has_copy: false,
            ack_token: None,
        }
    }

    fn datagrams(lens: &[usize]) -> SentDatagrams {
        let mut datagrams = SentDatagrams::default();
        for len in lens {
            datagrams.on_queued(*len, Some(tracked(*len)));
        }
        datagrams
    }

    fn lens(datagrams: &[TrackedDatagram]) -> Vec<usize> {
        datagrams.iter().map(|datagram| datagram.data.len()).collect()
    }

    fn lost(datagrams: &mut SentDatagrams) -> Vec<usize> {
        let mut lost = Vec::new();
        datagrams.drain_outcomes(|outcome| match outcome {
            Outcome::Lost(datagram) => lost.push(datagram),
            Outcome::Arrived(mark) => panic!("{mark}"),
        });
        lens(&lost)
    }

    #[test]
    fn a_lost_packet_gives_back_what_was_in_it() {
        let mut datagrams = datagrams(&[1400, 1400, 50, 60, 1400]);
        datagrams.on_sent(10, 1432);
        datagrams.on_sent(11, 1432);
        // Two small ones with an acknowledgement of 40 bytes; the large one did not fit behind them.
        datagrams.on_sent(12, 26 + 40 + 52 + 62);
        datagrams.on_sent(14, 1432);
        datagrams.on_acked(10);
        datagrams.on_lost(12);
        assert_eq!(lost(&mut datagrams), [50, 60]);
        datagrams.on_acked(14);
        datagrams.on_acked(11);
        assert!(datagrams.is_empty());
    }

    #[test]
    fn what_sizes_hide_is_in_the_last_packet_of_its_pass() {
        let mut datagrams = datagrams(&[1400, 600, 1400]);
        // noq has written the second one on its own; the last one is still in noq.
        datagrams.on_sent(1, 632);
        datagrams.on_sent(2, 1432);
        datagrams.on_pass_end(1400);
        datagrams.on_lost(2);
        assert_eq!(lost(&mut datagrams), [1400, 600]);
        datagrams.on_sent(3, 1432);
        datagrams.on_pass_end(0);
        datagrams.on_lost(3);
        assert_eq!(lost(&mut datagrams), [1400]);
        assert!(datagrams.is_empty());
    }

    #[test]
    fn what_another_path_has_sent_does_not_shift_what_follows() {
        let mut datagrams = datagrams(&[1400]);
        datagrams.on_pass_end(1400);
        datagrams.forget_written_elsewhere(0);
        for packet in 0..100_000 {
            let len = if packet % 7 == 0 { 600 } else { 1400 };
            datagrams.on_queued(len, Some(tracked(len)));
            datagrams.on_sent(packet, len + 32);
            datagrams.on_pass_end(0);
            assert!(datagrams.queued.is_empty() && datagrams.sent.len() == 1, "packet {packet}");
            datagrams.on_acked(packet);
        }
        assert!(datagrams.is_empty() && !datagrams.has_outcomes());
    }

    #[test]
    fn packets_without_datagrams_are_nobodys_loss() {
        let mut datagrams = datagrams(&[1400]);
        datagrams.on_sent(1, 60);
        datagrams.on_sent(2, 1432);
        datagrams.on_lost(1);
        assert!(!datagrams.has_outcomes());
        datagrams.on_lost(2);
        datagrams.on_acked(2);
        assert_eq!(lost(&mut datagrams), [1400]);
    }

    #[test]
    fn the_arrival_of_what_has_a_mark_is_told_before_losses() {
        let mut datagrams = SentDatagrams::default();
        for mark in [Some(7), None, Some(9)] {
            datagrams.on_queued(1400, Some(TrackedDatagram { ack_token: mark, ..tracked(1400) }));
        }
        (0..3).for_each(|packet| datagrams.on_sent(packet, 1432));
        datagrams.on_lost(2);
        datagrams.on_acked(1);
        datagrams.on_acked(0);
        let mut news = Vec::new();
        datagrams.drain_outcomes(|outcome| news.push(outcome));
        assert_eq!(news[0], Outcome::Arrived(7));
        assert!(matches!(&news[1], Outcome::Lost(datagram) if datagram.ack_token == Some(9)), "{news:?}");
        assert_eq!((news.len(), datagrams.has_outcomes()), (2, false));
    }

    #[test]
    fn a_packet_without_an_outcome_keeps_no_other_in_memory_and_is_lost_in_the_end() {
        let mut datagrams = datagrams(&[1400]);
        datagrams.on_sent(0, 1432);
        let mut most = 0;
        for packet in 1..=MAX_LATER_PACKETS + 1 {
            datagrams.on_queued(1300, Some(tracked(1300)));
            datagrams.on_sent(packet, 1332);
            most = most.max(datagrams.sent.len());
            if packet == 5 {
                continue;
            }
            assert!(!datagrams.has_outcomes(), "packet {packet}");
            datagrams.on_acked(packet);
        }
        assert!(most <= 2 * MAX_RESOLVED, "{most} entries");
        assert_eq!(lost(&mut datagrams), [1400]);
        datagrams.on_lost(5);
        assert_eq!(lost(&mut datagrams), [1300]);
        assert!(datagrams.is_empty());
    }

    #[test]
    fn what_is_not_followed_keeps_its_place() {
        let mut datagrams = SentDatagrams::default();
        datagrams.on_queued(1400, None);
        datagrams.on_queued(1300, Some(tracked(1300)));
        datagrams.on_sent(1, 1432);
        datagrams.on_sent(2, 1332);
        assert_eq!(lens(&datagrams.take_unacked()), [1300]);
        assert!(datagrams.is_empty());
    }
}
