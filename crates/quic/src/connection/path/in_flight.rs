//! The data of bulk streams in flight on a path.
//!
//! In: stream chunks as they leave, and when the newest acknowledged packet was sent. Out: the data that is
//! lost if the path dies. Always holds: data that was sent before the newest acknowledged packet has arrived,
//! or noq has declared it lost and retransmits it.

use std::collections::VecDeque;

use mpvpn_types::Instant;

use crate::connection::StreamChunk;

/// The stream data in flight on one path.
#[derive(Debug, Default)]
pub(crate) struct StreamsInFlight {
    /// Each with the time at which it left.
    chunks: VecDeque<(Instant, StreamChunk)>,
    /// Bytes of the chunks.
    bytes: usize,
    /// When noq last may have retransmitted stream data here.
    retransmitted: Option<Instant>,
}

impl StreamsInFlight {
    /// Adds a chunk that leaves now.
    pub(crate) fn push(&mut self, now: Instant, chunk: StreamChunk) {
        self.bytes += chunk.data.len();
        self.chunks.push_back((now, chunk));
    }

    /// The bytes of the chunks.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The number of chunks.
    pub(crate) fn len(&self) -> usize {
        self.chunks.len()
    }

    /// The chunks from this index on.
    pub(crate) fn since(&self, first: usize) -> impl Iterator<Item = &StreamChunk> {
        self.chunks.range(first..).map(|(_, chunk)| chunk)
    }

    /// Drops the chunks that left before `newest`, when the newest acknowledged packet was sent.
    pub(crate) fn on_acked(&mut self, newest: Instant) {
        while let Some((_, chunk)) = self.chunks.pop_front_if(|(sent, _)| *sent < newest) {
            self.bytes -= chunk.data.len();
        }
    }

    /// Takes all chunks, because the path is dead.
    pub(crate) fn take(&mut self) -> Vec<StreamChunk> {
        self.bytes = 0;
        std::mem::take(&mut self.chunks).into_iter().map(|(_, chunk)| chunk).collect()
    }

    /// Notes that noq may retransmit stream data here; it does not report which.
    pub(crate) fn note_retransmission(&mut self, now: Instant) {
        self.retransmitted = Some(now);
    }

    /// Whether retransmitted data may still be in flight, when the newest acknowledged packet was sent at
    /// `newest`.
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

    fn chunk(at: u64) -> StreamChunk {
        StreamChunk { stream: 0, offset: at, data: Bytes::from_static(b"four"), fin: false }
    }

    #[test]
    fn data_sent_before_the_newest_acknowledged_packet_is_not_in_flight() {
        let (mut sent, start) = (StreamsInFlight::default(), Instant::now());
        (0..5).for_each(|n| sent.push(start + n * MS, chunk(4 * u64::from(n))));
        sent.on_acked(start + 3 * MS);
        assert_eq!((sent.len(), sent.since(1).count(), sent.bytes()), (2, 1, 8));
        let places: Vec<u64> = sent.take().iter().map(|chunk| chunk.offset).collect();
        assert_eq!(places, [12, 16]);
        assert_eq!((sent.len(), sent.bytes()), (0, 0));
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
