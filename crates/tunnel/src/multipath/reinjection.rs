//! Reinjection: sends stream bytes that were in flight on a dead path again at once, as datagrams on another
//! path (like MPTCP, RFC 8684 §3.3.6).
//!
//! noq retransmits these bytes as well, but only when the path is closed or after three probe timeouts; until
//! then the streams would wait for them.
//!
//! In: chunks of streams, and datagrams of the peer. Out: datagrams with the path for each, and chunks for
//! local streams. Always holds: reinjected bytes wait until a path takes them and are never dropped, since a
//! stream waits for them.

use std::collections::VecDeque;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use mpvpn_masque::{
    datagram::{self, DatagramPrefix},
    varint,
};
use mpvpn_path::{PathCandidate, first_to_arrive_if};
use mpvpn_quic::{StreamChunk, TrackedDatagram};
use mpvpn_types::{Duration, Instant, PathId, target::REORDER};

/// Time after which a dead path is closed if streams wait for bytes that noq retransmits only then. Smaller:
/// a short silence costs the path. Larger: streams wait for longer.
const CLOSE_DELAY_STUCK: Duration = Duration::from_millis(50);
/// Time after which a dead path is closed if it is not known whether streams wait for its bytes. Value:
/// chosen, not measured (docs/design/reinjection.md, open questions).
const CLOSE_DELAY_UNKNOWN: Duration = Duration::from_millis(400);
/// Maximum size of stream ID and offset in a datagram: two varints of 8 bytes.
const MAX_HEADER_BYTES: usize = 16;
/// Minimum datagram size (bytes) for which a queued datagram is split again; smaller ones would be mostly
/// headers. QUIC paths take at least 1200 bytes, so no working path is excluded.
const MIN_DATAGRAM_BYTES: usize = 256;

/// Reinjection in both directions.
#[derive(Debug)]
pub(super) struct Reinjection {
    prefix: DatagramPrefix,
    /// Datagrams that wait for a path, each with the path to avoid.
    waiting: VecDeque<(Option<PathId>, TrackedDatagram)>,
    /// Bytes of `waiting`.
    pub(super) waiting_bytes: u64,
    /// Pieces that the peer has reinjected, for local streams.
    received: Vec<StreamChunk>,
}

impl Reinjection {
    /// Creates the reinjection of the datagram context `context` of a request stream.
    pub(super) fn new(stream: u64, context: u64) -> Self {
        Self {
            prefix: datagram::prefix(stream, context),
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            received: Vec::new(),
        }
    }

    /// Whether a datagram, sent or received, contains reinjected bytes.
    pub(super) fn has_prefix(&self, datagram: &[u8]) -> bool {
        datagram.starts_with(self.prefix.as_ref())
    }

    /// Takes a datagram of the peer; malformed ones are dropped.
    pub(super) fn on_datagram(&mut self, datagram: Bytes) {
        self.received.extend(self.decode(datagram));
    }

    /// Whether the peer has reinjected chunks since [`Self::drain_received`].
    pub(super) fn has_received(&self) -> bool {
        !self.received.is_empty()
    }

    /// Returns the chunks that the peer has reinjected since the last call.
    pub(super) fn drain_received(&mut self) -> impl Iterator<Item = StreamChunk> + '_ {
        self.received.drain(..)
    }

    /// Whether datagrams wait for a path.
    pub(super) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    fn wait(&mut self, avoid: Option<PathId>, datagram: TrackedDatagram) {
        self.waiting_bytes += datagram.data.len() as u64;
        self.waiting.push_back((avoid, datagram));
    }

    /// Queues a chunk as datagrams of at most `max` bytes, for any path other than `avoid` if there is one.
    pub(super) fn push(&mut self, now: Instant, chunk: &StreamChunk, max: usize, avoid: Option<PathId>) {
        let max_bytes = max.saturating_sub(self.prefix.as_ref().len() + MAX_HEADER_BYTES).max(1);
        let mut at = 0;
        loop {
            let bytes = chunk.data.slice(at..chunk.data.len().min(at + max_bytes));
            let is_last = at + bytes.len() == chunk.data.len();
            let mut data =
                BytesMut::with_capacity(self.prefix.as_ref().len() + MAX_HEADER_BYTES + bytes.len());
            data.put_slice(self.prefix.as_ref());
            varint::encode(chunk.stream, &mut data);
            varint::encode((chunk.offset + at as u64) << 1 | u64::from(chunk.fin && is_last), &mut data);
            data.put_slice(&bytes);
            at += bytes.len();
            let data = TrackedDatagram {
                data: data.freeze(),
                first_sent: now,
                retransmissions: 0,
                has_copy: false,
                ack_token: None,
            };
            self.wait(avoid, data);
            if is_last {
                return;
            }
        }
    }

    /// Queues a lost datagram again, as often as needed, since its stream waits for it.
    pub(super) fn on_lost(&mut self, lost: TrackedDatagram) {
        self.wait(None, lost);
    }

    /// Returns the next datagram of at most `max` bytes, and the index of the candidate on which it arrives
    /// first; `None` if no datagram waits or no path has an available window.
    pub(super) fn next(
        &mut self,
        now: Instant,
        max: usize,
        candidates: &[PathCandidate],
    ) -> Option<(usize, TrackedDatagram)> {
        loop {
            let (avoid, _) = *self.waiting.front()?;
            let others = candidates.iter().any(|candidate| Some(candidate.id) != avoid);
            let may = |candidate: &PathCandidate| !(others && Some(candidate.id) == avoid);
            let at = first_to_arrive_if(candidates, may)?;
            let (avoid, datagram) = self.waiting.pop_front()?;
            self.waiting_bytes -= datagram.data.len() as u64;
            if datagram.data.len() <= max {
                return Some((at, datagram));
            }
            // The MTU became smaller while the datagram waited: split it again.
            if let Some(chunk) = self.decode(datagram.data).filter(|_| max > MIN_DATAGRAM_BYTES) {
                self.push(now, &chunk, max, avoid);
            }
        }
    }

    fn decode(&self, mut datagram: Bytes) -> Option<StreamChunk> {
        datagram.advance(self.prefix.as_ref().len());
        let (stream, at) = (varint::take(&mut datagram)?, varint::take(&mut datagram)?);
        Some(StreamChunk { stream, offset: at >> 1, data: datagram, fin: at & 1 == 1 })
    }
}

/// The timer after which a dead path is closed because streams wait for bytes sent on it.
#[derive(Debug, Default)]
pub(super) struct CloseTimer(Option<Instant>);

impl CloseTimer {
    /// Starts the timer: the path is dead and streams are open. `stuck`: noq retransmits some of their bytes
    /// only when the path is closed.
    pub(super) fn start(&mut self, now: Instant, stuck: bool) {
        let after = if stuck { CLOSE_DELAY_STUCK } else { CLOSE_DELAY_UNKNOWN };
        tracing::debug!(
            target: REORDER,
            stuck,
            ?after,
            "a dead path with open streams will be closed unless it works again"
        );
        self.0 = Some(now + after);
    }

    /// Whether the timer has expired; this stops it.
    pub(super) fn expires(&mut self, now: Instant) -> bool {
        self.0.take_if(|at| now >= *at).is_some()
    }

    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{
        super::tests::{Received, check_datagrams},
        *,
    };
    use crate::vectors::{self, hex, number};

    const MS: Duration = Duration::from_millis(1);

    fn chunk(at: u64, bytes: &'static [u8], ends: bool) -> StreamChunk {
        StreamChunk { stream: 8, offset: at, data: Bytes::from_static(bytes), fin: ends }
    }

    fn candidate(id: u32, delay_ms: u64, window: u64) -> PathCandidate {
        let delay = Duration::from_millis(delay_ms);
        PathCandidate {
            id: PathId(id),
            available_window: window,
            one_way_delay: delay,
            round_trip: 2 * delay,
            outstanding: 0,
            rate: 1_000_000,
            weight: 1,
        }
    }

    #[test]
    fn reinjected_bytes_arrive_unchanged() {
        let (mut here, mut there) = (Reinjection::new(0, 6), Reinjection::new(0, 6));
        let now = Instant::now();
        here.push(now, &chunk(1000, b"0123456789", true), 19 + 4, None);
        while let Some((at, datagram)) = here.next(now, 100, &[candidate(0, 5, 100)]) {
            assert!(at == 0 && there.has_prefix(&datagram.data));
            there.on_datagram(datagram.data);
        }
        let received: Vec<_> = there.drain_received().collect();
        assert!(received.len() > 1, "{received:?}");
        let bytes: Vec<u8> = received.iter().flat_map(|chunk| chunk.data.to_vec()).collect();
        assert_eq!((received[0].offset, bytes), (1000, b"0123456789".to_vec()));
        let ends: Vec<bool> = received.iter().map(|chunk| chunk.fin).collect();
        assert_eq!(ends.iter().rposition(|ends| !ends), Some(ends.len() - 2), "only the last one ends it");
    }

    #[test]
    fn datagrams_are_those_of_the_vectors() {
        let now = Instant::now();
        let parse = |received: Received<'_>| {
            let mut reinjection = Reinjection::new(received.stream, received.context);
            assert!(reinjection.has_prefix(received.bytes));
            reinjection.on_datagram(Bytes::copy_from_slice(received.bytes));
            let StreamChunk { stream, offset: at, data: bytes, fin: ends } =
                reinjection.drain_received().next()?;
            Some(json!({ "target_stream_id": stream, "offset": at, "fin": ends, "bytes": hex(&bytes) }))
        };
        let encode = |stream, context, fields: &Value| {
            let chunk = StreamChunk {
                stream: number(&fields["target_stream_id"]),
                offset: number(&fields["offset"]),
                data: vectors::bytes(&fields["bytes"]).into(),
                fin: fields["fin"].as_bool().unwrap(),
            };
            let mut reinjection = Reinjection::new(stream, context);
            reinjection.push(now, &chunk, 1200, None);
            let (_, datagram) = reinjection.next(now, 1200, &[candidate(0, 5, 9000)]).unwrap();
            assert!(!reinjection.has_waiting());
            datagram.data.to_vec()
        };
        check_datagrams(include_str!("../../../../docs/vectors/reinjection.json"), parse, encode);
    }

    #[test]
    fn a_stalled_path_is_used_only_if_there_is_no_other() {
        let (mut reinjection, now) = (Reinjection::new(0, 6), Instant::now());
        reinjection.push(now, &chunk(0, b"abc", false), 100, Some(PathId(1)));
        let (quick, slow) = (candidate(1, 5, 1000), candidate(2, 90, 1000));
        assert_eq!(
            reinjection.next(now, 100, &[quick, PathCandidate { available_window: 0, ..slow }]),
            None,
            "it waits"
        );
        let (at, lost) = reinjection.next(now, 100, &[quick, slow]).expect("a path has an available window");
        assert_eq!(at, 1);
        assert_eq!(reinjection.waiting_bytes, 0);
        reinjection.on_lost(lost.clone());
        assert_eq!(reinjection.waiting_bytes, lost.data.len() as u64);
        assert_eq!(reinjection.next(now, 100, &[quick, slow]), Some((0, lost.clone())), "lost there, too");
        reinjection.push(now, &chunk(0, b"abc", false), 100, Some(PathId(1)));
        assert_eq!(reinjection.next(now, 100, &[quick]).map(|(at, _)| at), Some(0), "no other path");
    }

    #[test]
    fn a_datagram_that_exceeds_a_reduced_mtu_is_split_again() {
        let (mut reinjection, now) = (Reinjection::new(0, 6), Instant::now());
        let bytes = Bytes::from(vec![7; 1000]);
        reinjection.push(now, &StreamChunk { stream: 0, offset: 0, data: bytes, fin: false }, 1400, None);
        let mut sizes = Vec::new();
        while let Some((_, datagram)) = reinjection.next(now, 400, &[candidate(0, 5, 9000)]) {
            sizes.push(datagram.data.len());
        }
        assert!(sizes.len() == 3 && sizes.iter().all(|size| *size <= 400), "{sizes:?}");
        reinjection.push(now, &chunk(0, &[7; 300], false), 1400, None);
        assert_eq!(
            reinjection.next(now, MIN_DATAGRAM_BYTES, &[candidate(0, 5, 9000)]),
            None,
            "such paths are of no use"
        );
        assert!(!reinjection.has_waiting());
    }

    #[test]
    fn a_dead_path_is_closed_sooner_if_streams_are_stuck() {
        let start = Instant::now();
        for (stuck, after) in [(true, CLOSE_DELAY_STUCK), (false, CLOSE_DELAY_UNKNOWN)] {
            let mut timer = CloseTimer::default();
            assert!(!timer.expires(start));
            timer.start(start, stuck);
            assert_eq!(timer.poll_timeout(), Some(start + after));
            assert!(!timer.expires(start + after - MS));
            assert!(timer.expires(start + after) && !timer.expires(start + after), "once");
        }
    }
}
