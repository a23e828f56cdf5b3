//! Numbers the packets that are sent, so that a flow can use several paths and lost packets can be
//! retransmitted.
//!
//! In: packets to send, and measurements of the paths in use. Out: whether packets are numbered now, their
//! labels and datagrams. Always holds: the reorder timeout that the peer is asked to apply is at most
//! [`MAX_REORDER_TIMEOUT`].

use bytes::Bytes;
use mpvpn_class::QueuedPacket;
use mpvpn_flow::{Label, Part, SequenceNumbers};
use mpvpn_masque::datagram::{self, DatagramPrefix};
use mpvpn_packet::Arena;
use mpvpn_quic::{PathStats, TrackedDatagram};
use mpvpn_types::{Duration, Instant, target::REORDER};

use super::{flow_order::FlowOrder, resequencer::split_label, retransmissions::MAX_RETRANSMISSIONS};

/// How long packets are numbered after loss on a path, even with a single path: loss comes in bursts.
/// Smaller: the next burst reaches TCP and costs it a round trip. Larger: more overhead (6 bytes a packet).
const NUMBERED_AFTER_LOSS: Duration = Duration::from_secs(30);
/// Loss ratio (0 to 1) from which on packets are numbered: 0.3 %. Lower loss costs TCP little throughput
/// (Mathis et al., CCR 1997), about as much as the 6 bytes of a label. Smaller: overhead. Larger: TCP loses
/// throughput.
const MIN_LOSS_FOR_NUMBERS: f64 = 0.003;
/// Natural logarithm of the share of packets that may stay missing after all retransmissions: ln(1e-4).
/// Smaller: the peer waits for longer. Larger: more gaps reach TCP. Value: chosen
/// (docs/design/reordering.md).
const LN_RESIDUAL_LOSS: f64 = -9.2;
/// Time that a retransmission takes beyond a round trip: 5 ms of acknowledgement delay, and busy processors.
/// Smaller: the peer gives up on packets that are on their way. Larger: longer waits for lost packets.
const RETRANSMISSION_OVERHEAD: Duration = Duration::from_millis(8);
/// Delay difference of packets of one path without loss: scheduling latency of the operating system. Smaller:
/// the peer gives up on packets that are on their way. Larger: longer waits for lost packets.
const JITTER_SLACK: Duration = Duration::from_millis(4);
/// Maximum reorder timeout. Beyond it the retransmission timer of TCP ends the wait anyway. Larger: later
/// packets wait without use. Smaller: links with long round trips reorder.
const MAX_REORDER_TIMEOUT: Duration = Duration::from_millis(500);

/// Gives packets their numbers.
#[derive(Debug)]
pub(super) struct Numbering {
    prefix: DatagramPrefix,
    numbers: SequenceNumbers,
    flows: FlowOrder,
    /// Whether packets are numbered now.
    on: bool,
    /// When a path last lost at least [`MIN_LOSS_FOR_NUMBERS`].
    last_loss_at: Option<Instant>,
    /// How long the peer is to wait for missing packets.
    reorder_timeout: Duration,
    arena: Arena,
    /// Number of packets that got a number.
    pub(super) numbered: u64,
}

impl Numbering {
    /// Creates the numbering of the datagram context `context` of a request stream.
    pub(super) fn new(stream: u64, context: u64) -> Self {
        Self {
            prefix: datagram::prefix(stream, context),
            numbers: SequenceNumbers::new(),
            flows: FlowOrder::default(),
            on: false,
            last_loss_at: None,
            reorder_timeout: Duration::ZERO,
            arena: Arena::new(),
            numbered: 0,
        }
    }

    /// Whether packets are numbered now.
    #[inline]
    pub(super) fn is_on(&self) -> bool {
        self.on
    }

    /// Bytes in front of the label of a datagram.
    #[inline]
    pub(super) fn prefix_len(&self) -> usize {
        self.prefix.as_ref().len()
    }

    /// Whether a datagram contains a numbered packet.
    #[inline]
    pub(super) fn has_prefix(&self, datagram: &[u8]) -> bool {
        datagram.starts_with(self.prefix.as_ref())
    }

    /// Decides whether packets are numbered: if a flow may use `several` paths, if a path loses packets, or
    /// if packets are `protected` by FEC. `views` are the measurements of the paths in use.
    pub(super) fn measure(&mut self, now: Instant, several: bool, protected: bool, views: &[PathStats]) {
        let loss = views.iter().map(|view| view.loss).fold(0.0, f64::max);
        if loss >= MIN_LOSS_FOR_NUMBERS {
            self.last_loss_at = Some(now);
        }
        let lossy =
            self.last_loss_at.is_some_and(|at| now.saturating_duration_since(at) < NUMBERED_AFTER_LOSS);
        let on = several || lossy || protected;
        if on != self.on {
            tracing::debug!(
                target: REORDER,
                on,
                several,
                lossy,
                protected,
                loss,
                "whether packets are numbered has changed"
            );
        }
        self.on = on;
        if on {
            self.reorder_timeout = reorder_timeout(loss, views);
            tracing::trace!(
                target: REORDER,
                timeout = ?self.reorder_timeout,
                loss,
                paths = views.len(),
                "the reorder timeout of the peer was computed"
            );
        }
    }

    /// Returns the label of a packet to send; `payload` is the IP packet without the prefix of its queue
    /// entry.
    pub(super) fn label(&mut self, now: Instant, packet: &QueuedPacket, payload: &[u8]) -> Label {
        let bucket = SequenceNumbers::bucket(packet.flow);
        self.numbered += 1;
        Label {
            bucket,
            ordered: packet.needs_order || self.flows.wants_order(now, bucket, payload),
            reorder_timeout: self.reorder_timeout,
            number: self.numbers.next(bucket),
            part: None,
        }
    }

    /// Encodes the datagram of a packet that belongs to no FEC group.
    pub(super) fn datagram(&mut self, label: Label, payload: &[u8]) -> Bytes {
        let prefix = self.prefix.as_ref();
        let buffer = self.arena.reserve(prefix.len() + Label::LEN + Part::LEN + payload.len());
        buffer.extend_from_slice(prefix);
        label.encode(buffer);
        buffer.extend_from_slice(payload);
        self.arena.take()
    }

    /// Encodes a datagram outside of FEC groups from the label and packet of a datagram that was in one.
    pub(super) fn reframe(&mut self, labelled: TrackedDatagram) -> TrackedDatagram {
        let prefix = self.prefix.as_ref();
        let buffer = self.arena.reserve(prefix.len() + labelled.data.len());
        buffer.extend_from_slice(prefix);
        buffer.extend_from_slice(&labelled.data);
        TrackedDatagram { data: self.arena.take(), ..labelled }
    }

    /// Splits a numbered datagram into parts of at most `max` bytes; returns none if the datagram is itself a
    /// part or needs too many parts.
    #[cold]
    pub(super) fn split_into_parts(&mut self, datagram: &Bytes, max: usize) -> Vec<Bytes> {
        let labelled = datagram.slice(self.prefix.as_ref().len()..);
        let Some((label, payload)) = split_label(labelled) else { return Vec::new() };
        let overhead = self.prefix.as_ref().len() + Label::LEN + Part::LEN;
        let max_part_bytes = max.saturating_sub(overhead);
        if max_part_bytes == 0
            || label.part.is_some()
            || payload.len() > max_part_bytes * (usize::from(Part::MAX_INDEX) + 1)
        {
            return Vec::new();
        }
        let count = payload.len().div_ceil(max_part_bytes).max(1);
        let cut = payload.chunks(payload.len().div_ceil(count).max(1));
        let last = cut.len().saturating_sub(1) as u8;
        cut.zip(0u8..)
            .map(|(bytes, index)| self.datagram(Label { part: Some(Part { index, last }), ..label }, bytes))
            .collect()
    }

    /// Releases unused memory and the state of flows, after an idle time.
    pub(super) fn trim(&mut self) {
        self.arena.release();
        self.flows = FlowOrder::default();
    }
}

/// Computes how long the peer waits for a packet that others overtook: the path delay difference between the
/// slowest and the quickest path, plus as many retransmissions as leave one packet in 10,000 missing at a
/// loss ratio of `loss` (0 to 1).
fn reorder_timeout(loss: f64, views: &[PathStats]) -> Duration {
    let slowest = views.iter().map(|view| view.rtt + view.jitter * 2).max().unwrap_or_default();
    let quickest = views.iter().filter_map(|view| view.min_rtt).min().unwrap_or_default();
    let rounds = match loss {
        // Allow for one retransmission even if no loss was measured.
        ..0.001 => 1,
        loss => (LN_RESIDUAL_LOSS / loss.min(0.6).ln()).ceil() as u32,
    };
    let repair = (slowest + RETRANSMISSION_OVERHEAD) * rounds.clamp(1, u32::from(MAX_RETRANSMISSIONS));
    (slowest.saturating_sub(quickest) + JITTER_SLACK + repair).min(MAX_REORDER_TIMEOUT)
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::{
        super::tests::{self, Received, check_datagrams, fields_of, view},
        *,
    };
    use crate::vectors::{bytes, hex};

    const MS: Duration = Duration::from_millis(1);

    fn packet(flow: u32, ordered: bool) -> QueuedPacket {
        QueuedPacket { data: Bytes::from_static(b"packet"), flow, needs_order: ordered, unnumbered: false }
    }

    #[test]
    fn one_path_without_loss_needs_no_numbers_and_one_that_lost_some_keeps_them_for_half_a_minute() {
        let (mut numbering, start) = (Numbering::new(0, 2), Instant::now());
        numbering.measure(start, false, false, &[view(0, 20 * MS, 0.002)]);
        assert!(!numbering.is_on());
        numbering.measure(start, true, false, &[view(0, 20 * MS, 0.0), view(1, 20 * MS, 0.0)]);
        assert!(numbering.is_on(), "several paths");
        numbering.measure(start, false, false, &[view(0, 20 * MS, 0.01)]);
        numbering.measure(start + 29_999 * MS, false, false, &[view(0, 20 * MS, 0.0)]);
        assert!(numbering.is_on());
        numbering.measure(start + 30_000 * MS, false, false, &[view(0, 20 * MS, 0.0)]);
        assert!(!numbering.is_on());
        numbering.measure(start + 30_000 * MS, false, true, &[view(0, 20 * MS, 0.0)]);
        assert!(numbering.is_on(), "repair needs numbers");
    }

    #[test]
    fn the_reorder_timeout_grows_with_delay_difference_and_loss() {
        let timeout = |paths: &[(u64, f64)]| {
            let views: Vec<_> =
                (0..).zip(paths).map(|(id, (rtt, loss))| view(id, *rtt as u32 * MS, *loss)).collect();
            reorder_timeout(paths.iter().map(|(_, loss)| *loss).fold(0.0, f64::max), &views)
        };
        assert_eq!(timeout(&[(20, 0.0), (20, 0.0)]), (4 + 28) * MS, "slack and one retransmission");
        assert_eq!(timeout(&[(20, 0.0), (50, 0.0)]), (30 + 4 + 58) * MS);
        assert_eq!(timeout(&[(20, 0.01)]), (4 + 2 * 28) * MS, "two rounds at 1 % loss");
        assert_eq!(timeout(&[(600, 0.5)]), MAX_REORDER_TIMEOUT);
    }

    #[test]
    fn each_flow_has_its_own_numbers() {
        let (mut numbering, now) = (Numbering::new(0, 2), Instant::now());
        let mut number = |flow| numbering.label(now, &packet(flow, true), b"").number;
        let first = number(1);
        assert_eq!(number(1), first.wrapping_add(1));
        number(2);
        assert_eq!(number(1), first.wrapping_add(2));
        assert_eq!(numbering.numbered, 4);
    }

    #[test]
    fn datagrams_are_those_of_the_vectors() {
        let parse = |received: Received<'_>| {
            let (label, packet) = split_label(Bytes::copy_from_slice(received.payload))?;
            let mut fields = fields_of(&label);
            fields["packet"] = hex(&packet).into();
            Some(fields)
        };
        let encode = |stream, context, fields: &Value| {
            let mut numbering = Numbering::new(stream, context);
            let datagram = numbering.datagram(tests::label(fields), &bytes(&fields["packet"]));
            assert!(numbering.has_prefix(&datagram));
            datagram.to_vec()
        };
        check_datagrams(include_str!("../../../../docs/vectors/numbered.json"), parse, encode);
    }

    #[test]
    fn a_datagram_that_exceeds_the_mtu_is_sent_in_parts_that_rejoin_to_the_same_packet() {
        let (mut numbering, now) = (Numbering::new(4, 2), Instant::now());
        let payload: Vec<u8> = (0..3000u32).map(|n| n as u8).collect();
        let label = numbering.label(now, &packet(1, true), &payload);
        let whole = numbering.datagram(label, &payload);
        let parts = numbering.split_into_parts(&whole, 1200);
        assert!(parts.len() == 3 && parts.iter().all(|part| part.len() <= 1200), "{parts:?}");
        let mut resequencer = super::super::resequencer::Resequencer::new();
        let opened = parts.iter().filter_map(|part| resequencer.open(part.slice(numbering.prefix_len()..)));
        let opened: Vec<_> = opened.map(|(label, packet)| (label.number, packet)).collect();
        assert_eq!(opened, [(label.number, Bytes::from(payload))]);
        assert_eq!(
            numbering.split_into_parts(&parts[0], 100),
            Vec::<Bytes>::new(),
            "a part is not cut again"
        );
        assert_eq!(
            numbering.split_into_parts(&whole, 20),
            Vec::<Bytes>::new(),
            "more parts than there may be"
        );
    }
}
