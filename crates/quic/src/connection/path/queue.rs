//! The queue of a path's next pass: datagrams, and a quota of bulk stream data.
//!
//! In: datagrams and quotas from the scheduler. Out: all of it at once, when the pass begins. Always holds:
//! datagrams keep their order, also in the path's [`SentDatagrams`].

use bytes::Bytes;
use mpvpn_types::Instant;

use crate::{
    DATAGRAM_OVERHEAD,
    sent_datagrams::{SentDatagrams, TrackedDatagram},
};

/// Bytes that one path of a group takes before another one has its turn: few enough to spread a round trip's
/// data, enough for segmentation offload (eight packets). Smaller: short sends; larger: uneven paths.
const GROUP_TURN_BYTES: u64 = 12 * 1024;

/// The size of a pass, and its stream data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PassSize {
    /// All bytes of the pass, framing included.
    pub(crate) bytes: u64,
    /// Bytes of bulk streams, retransmissions first.
    pub(crate) stream_bytes: u64,
    /// If set, only long transfers: streams whose queues have always been full since then.
    pub(crate) long_since: Option<Instant>,
}

/// The queue of one path.
#[derive(Debug, Default)]
pub(crate) struct SendQueue {
    pub(crate) datagrams: Vec<Bytes>,
    /// The tracked ones, with their indices.
    pub(crate) tracked: Vec<(usize, TrackedDatagram)>,
    pub(crate) stream_bytes: u64,
    long_since: Option<Instant>,
    /// All bytes, framing included.
    pub(crate) bytes: u64,
    /// Bytes until another path of the group has its turn; 0 if it is not this path's turn.
    turn: u64,
    /// The datagram that leaves after everything else, whatever the window.
    report: Option<Bytes>,
}

impl SendQueue {
    /// Queues a datagram; returns the bytes of available window that it takes.
    pub(crate) fn push(&mut self, datagram: Bytes) -> u64 {
        let cost = (datagram.len() + DATAGRAM_OVERHEAD) as u64;
        self.add_bytes(cost);
        self.datagrams.push(datagram);
        cost
    }

    /// Queues a tracked datagram; returns the bytes of available window that it takes.
    pub(crate) fn push_tracked(&mut self, datagram: TrackedDatagram) -> u64 {
        let data = datagram.data.clone();
        self.tracked.push((self.datagrams.len(), datagram));
        self.push(data)
    }

    /// Adds a quota of `bytes` stream bytes, which take `cost` bytes of available window; see [`PassSize`].
    pub(crate) fn add_stream_bytes(&mut self, bytes: u64, cost: u64, long_since: Option<Instant>) {
        self.add_bytes(cost);
        self.stream_bytes += bytes;
        self.long_since = self.long_since.or(long_since);
    }

    fn add_bytes(&mut self, cost: u64) {
        self.bytes += cost;
        self.turn = self.turn.saturating_sub(cost);
    }

    /// Whether a pass would send something.
    pub(crate) fn has_work(&self) -> bool {
        !self.datagrams.is_empty() || self.stream_bytes > 0
    }

    /// Begins the pass; the datagrams stay until it is over.
    pub(crate) fn begin_pass(&mut self) -> PassSize {
        PassSize {
            bytes: std::mem::take(&mut self.bytes),
            stream_bytes: std::mem::take(&mut self.stream_bytes),
            long_since: self.long_since.take(),
        }
    }

    /// Adds all datagrams to `sent`, in order.
    pub(crate) fn track(&mut self, sent: &mut SentDatagrams) {
        let mut tracked = self.tracked.drain(..).peekable();
        for (at, data) in self.datagrams.iter().enumerate() {
            let tracked = tracked.next_if(|(place, _)| *place == at).map(|(_, tracked)| tracked);
            sent.on_queued(data.len(), tracked);
        }
    }

    /// Whether it is this path's turn among those of its group.
    pub(crate) fn has_turn(&self) -> bool {
        self.turn > 0
    }

    /// Gives this path its turn, unless it has it.
    pub(crate) fn give_turn(&mut self) {
        if self.turn == 0 {
            self.turn = GROUP_TURN_BYTES;
        }
    }

    /// The path belongs to another group.
    pub(crate) fn end_turn(&mut self) {
        self.turn = 0;
    }

    /// Sets the datagram that leaves after everything else; one that still waits is replaced.
    pub(crate) fn set_report(&mut self, datagram: Bytes) {
        self.report = Some(datagram);
    }

    /// Takes the datagram that leaves after everything else.
    pub(crate) fn take_report(&mut self) -> Option<Bytes> {
        self.report.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tracked(len: usize, mark: u32) -> TrackedDatagram {
        let data = Bytes::from(vec![0; len]);
        TrackedDatagram {
            data,
            first_sent: Instant::now(),
            retransmissions: 0,
            has_copy: false,
            ack_token: Some(mark),
        }
    }

    #[test]
    fn a_pass_takes_everything_and_leaves_nothing() {
        let (mut queue, since) = (SendQueue::default(), Instant::now());
        assert!(!queue.has_work());
        assert_eq!(queue.push(Bytes::from_static(&[0; 100])), 100 + DATAGRAM_OVERHEAD as u64);
        queue.add_stream_bytes(1000, 1040, None);
        queue.add_stream_bytes(500, 520, Some(since));
        let bytes = 100 + DATAGRAM_OVERHEAD as u64 + 1560;
        assert_eq!((queue.bytes, queue.has_work()), (bytes, true));
        let load = queue.begin_pass();
        assert_eq!(load, PassSize { bytes, stream_bytes: 1500, long_since: Some(since) });
        assert_eq!(queue.datagrams.len(), 1);
        queue.datagrams.clear();
        assert_eq!(queue.begin_pass(), PassSize { bytes: 0, stream_bytes: 0, long_since: None });
        assert!(!queue.has_work());
    }

    #[test]
    fn all_datagrams_are_recorded_in_order() {
        let mut queue = SendQueue::default();
        queue.push(Bytes::from_static(&[0; 1300]));
        queue.push_tracked(tracked(1400, 1));
        queue.push_tracked(tracked(1200, 2));
        let mut sent = SentDatagrams::default();
        queue.track(&mut sent);
        assert!(queue.tracked.is_empty());
        // One packet each, the last one lost.
        [1332, 1432, 1232].into_iter().enumerate().for_each(|(pn, len)| sent.on_sent(pn as u64, len));
        sent.on_acked(1);
        sent.on_lost(2);
        let mut outcomes = Vec::new();
        sent.drain_outcomes(|outcome| outcomes.push(outcome));
        assert_eq!(outcomes[0], crate::Outcome::Arrived(1));
        assert!(
            matches!(&outcomes[1], crate::Outcome::Lost(lost) if lost.ack_token == Some(2)),
            "{outcomes:?}"
        );
    }

    #[test]
    fn a_turn_ends_after_12_kb() {
        let mut queue = SendQueue::default();
        queue.give_turn();
        let mut count = 0;
        while queue.has_turn() {
            queue.push(Bytes::from_static(&[0; 1200]));
            count += 1;
        }
        assert_eq!(count, 10);
        queue.give_turn();
        queue.end_turn();
        assert!(!queue.has_turn());
    }

    #[test]
    fn a_report_that_still_waits_is_replaced() {
        let mut queue = SendQueue::default();
        queue.set_report(Bytes::from_static(b"old"));
        queue.set_report(Bytes::from_static(b"new"));
        assert_eq!(queue.take_report(), Some(Bytes::from_static(b"new")));
        assert_eq!(queue.take_report(), None);
        assert!(!queue.has_work(), "it is no work for a data pass");
    }
}
