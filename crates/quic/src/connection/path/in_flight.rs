//! Bytes of bulk streams that are on their way on a path.
//!
//! In: pieces as they leave, and when the newest acknowledged packet was sent. Out: what is lost with the path if it dies.
//! Always holds: what was sent before the newest acknowledged packet has arrived, or the library has found it lost and sends
//! it again itself.

use std::collections::VecDeque;

use mpvpn_types::Instant;

use crate::connection::StreamChunk;

/// The stream data in flight on one path.
#[derive(Debug, Default)]
pub(crate) struct StreamsInFlight {
    /// With the time when each left.
    pieces: VecDeque<(Instant, StreamChunk)>,
    /// When the library may have sent bytes of streams here that had been lost elsewhere, last.
    retransmitted: Option<Instant>,
}

impl StreamsInFlight {
    /// A piece leaves.
    pub(crate) fn push(&mut self, now: Instant, piece: StreamChunk) {
        self.pieces.push_back((now, piece));
    }

    /// How many pieces there are.
    pub(crate) fn len(&self) -> usize {
        self.pieces.len()
    }

    /// The pieces from this place on.
    pub(crate) fn since(&self, first: usize) -> impl Iterator<Item = &StreamChunk> {
        self.pieces.range(first..).map(|(_, piece)| piece)
    }

    /// The newest acknowledged packet was sent at `newest`.
    pub(crate) fn on_acked(&mut self, newest: Instant) {
        while self.pieces.pop_front_if(|(sent, _)| *sent < newest).is_some() {}
    }

    /// Takes all of them: the path is dead.
    pub(crate) fn take(&mut self) -> Vec<StreamChunk> {
        std::mem::take(&mut self.pieces).into_iter().map(|(_, piece)| piece).collect()
    }

    /// The library may send bytes here that had been lost elsewhere; which, it does not say.
    pub(crate) fn note_retransmission(&mut self, now: Instant) {
        self.retransmitted = Some(now);
    }

    /// Whether such bytes may still be on their way, when the newest acknowledged packet was sent at `newest`.
    pub(crate) fn may_hold_retransmissions(&self, newest: Instant) -> bool {
        self.retransmitted.is_some_and(|at| at >= newest)
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use mpvpn_types::Duration;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn piece(at: u64) -> StreamChunk {
        StreamChunk { stream: 0, offset: at, data: Bytes::from_static(b"four"), fin: false }
    }

    #[test]
    fn what_left_before_the_newest_acknowledged_packet_is_no_longer_in_flight() {
        let (mut sent, start) = (StreamsInFlight::default(), Instant::now());
        (0..5).for_each(|n| sent.push(start + n * MS, piece(4 * u64::from(n))));
        sent.on_acked(start + 3 * MS);
        assert_eq!((sent.len(), sent.since(1).count()), (2, 1));
        let places: Vec<u64> = sent.take().iter().map(|piece| piece.offset).collect();
        assert_eq!(places, [12, 16]);
        assert_eq!(sent.len(), 0);
    }

    #[test]
    fn retransmissions_are_in_flight_until_something_later_is_acknowledged() {
        let (mut sent, start) = (StreamsInFlight::default(), Instant::now());
        assert!(!sent.may_hold_retransmissions(start));
        sent.note_retransmission(start + MS);
        assert!(sent.may_hold_retransmissions(start) && sent.may_hold_retransmissions(start + MS));
        assert!(!sent.may_hold_retransmissions(start + 2 * MS));
    }
}
