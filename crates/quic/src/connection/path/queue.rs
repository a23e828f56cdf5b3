//! What the next pass of a path sends: datagrams, and so many bytes of bulk streams.
//!
//! In: what the scheduler puts on the path. Out: all of it at once, when the pass begins. Always holds: datagrams keep their
//! order, and those whose outcome is asked for are known to the path's ledger in that order.

use bytes::Bytes;
use mpvpn_types::Instant;

use crate::{
    DATAGRAM_OVERHEAD,
    sent_datagrams::{SentDatagrams, TrackedDatagram},
};

/// Bytes that one of several paths of a group takes before another one has its turn: few enough to spread a round trip's
/// data, enough to make use of segmentation.
const TURN: u64 = 12 * 1024;

/// What a pass sends beside the datagrams of [`SendQueue::datagrams`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PassLoad {
    /// Size of everything with framing (bytes).
    pub(crate) bytes: u64,
    /// Bytes of bulk streams, lost ones first.
    pub(crate) stream_bytes: u64,
    /// Only of streams whose owners have had more than there was room for since then.
    pub(crate) lasting_since: Option<Instant>,
}

/// The queue of one path.
#[derive(Debug, Default)]
pub(crate) struct SendQueue {
    datagrams: Vec<Bytes>,
    /// Those whose outcome is asked for, with their places.
    tracked: Vec<(usize, TrackedDatagram)>,
    stream_bytes: u64,
    lasting_since: Option<Instant>,
    /// Size of all that with framing.
    bytes: u64,
    /// Bytes until another path of the group has its turn; 0 if it is not this one's.
    turn: u64,
    /// A datagram that leaves after everything else, whatever the window.
    report: Option<Bytes>,
}

impl SendQueue {
    /// Queues a datagram; returns the bytes of room that it takes.
    pub(crate) fn push(&mut self, datagram: Bytes) -> u64 {
        let cost = (datagram.len() + DATAGRAM_OVERHEAD) as u64;
        self.add_load(cost);
        self.datagrams.push(datagram);
        cost
    }

    /// The same for a datagram whose outcome is asked for.
    pub(crate) fn push_tracked(&mut self, datagram: TrackedDatagram) -> u64 {
        let data = datagram.data.clone();
        self.tracked.push((self.datagrams.len(), datagram));
        self.push(data)
    }

    /// Lets the next pass send so many bytes of bulk streams, which take `cost` bytes of room; see [`PassLoad`].
    pub(crate) fn add_stream_bytes(&mut self, bytes: u64, cost: u64, lasting_since: Option<Instant>) {
        self.add_load(cost);
        self.stream_bytes += bytes;
        self.lasting_since = self.lasting_since.or(lasting_since);
    }

    fn add_load(&mut self, cost: u64) {
        self.bytes += cost;
        self.turn = self.turn.saturating_sub(cost);
    }

    /// Size of what is queued, with framing (bytes).
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes of bulk streams that the next pass may send.
    pub(crate) fn stream_bytes(&self) -> u64 {
        self.stream_bytes
    }

    /// Whether a pass would send something.
    pub(crate) fn has_work(&self) -> bool {
        !self.datagrams.is_empty() || self.stream_bytes > 0
    }

    /// The path's pass begins: what it sends beside the datagrams, which [`Self::clear`] takes out.
    pub(crate) fn begin_pass(&mut self) -> PassLoad {
        PassLoad {
            bytes: std::mem::take(&mut self.bytes),
            stream_bytes: std::mem::take(&mut self.stream_bytes),
            lasting_since: self.lasting_since.take(),
        }
    }

    /// The datagrams, in order.
    pub(crate) fn datagrams(&self) -> &[Bytes] {
        &self.datagrams
    }

    /// Whether the outcome of any datagram is asked for.
    pub(crate) fn has_tracked(&self) -> bool {
        !self.tracked.is_empty()
    }

    /// Tells the ledger of all datagrams, in order.
    pub(crate) fn track(&mut self, ledger: &mut SentDatagrams) {
        let mut tracked = self.tracked.drain(..).peekable();
        for (at, data) in self.datagrams.iter().enumerate() {
            let tracked = tracked.next_if(|(place, _)| *place == at).map(|(_, tracked)| tracked);
            ledger.on_queued(data.len(), tracked);
        }
    }

    /// Forgets the datagrams: the library has them, or does not take them.
    pub(crate) fn clear(&mut self) {
        self.datagrams.clear();
    }

    /// Whether it is this path's turn among those of its group.
    pub(crate) fn has_turn(&self) -> bool {
        self.turn > 0
    }

    /// Gives this path its turn, unless it has it.
    pub(crate) fn give_turn(&mut self) {
        if self.turn == 0 {
            self.turn = TURN;
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
        assert_eq!((queue.bytes(), queue.has_work()), (bytes, true));
        let load = queue.begin_pass();
        assert_eq!(load, PassLoad { bytes, stream_bytes: 1500, lasting_since: Some(since) });
        assert_eq!(queue.datagrams().len(), 1);
        queue.clear();
        assert_eq!(queue.begin_pass(), PassLoad { bytes: 0, stream_bytes: 0, lasting_since: None });
        assert!(!queue.has_work());
    }

    #[test]
    fn the_ledger_learns_of_all_datagrams_in_their_order() {
        let mut queue = SendQueue::default();
        queue.push(Bytes::from_static(&[0; 1300]));
        queue.push_tracked(tracked(1400, 1));
        queue.push_tracked(tracked(1200, 2));
        let mut ledger = SentDatagrams::default();
        queue.track(&mut ledger);
        assert!(!queue.has_tracked());
        // One packet each, the last one lost.
        [1332, 1432, 1232].into_iter().enumerate().for_each(|(pn, len)| ledger.on_sent(pn as u64, len));
        ledger.on_acked(1);
        ledger.on_lost(2);
        let mut outcomes = Vec::new();
        ledger.drain_outcomes(|outcome| outcomes.push(outcome));
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
