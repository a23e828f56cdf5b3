//! Numbers the packets that leave, so that a flow may take several paths and what is lost can be sent again.
//!
//! In: packets that leave, and what is measured about the paths in use. Out: whether packets are numbered
//! now, their labels and datagrams. Always holds: the far end is never asked to hold packets for longer than
//! [`MOST_TIMEOUT`].

use bytes::Bytes;
use mpvpn_class::QueuedPacket;
use mpvpn_flow::{Label, Part, SequenceNumbers};
use mpvpn_masque::datagram::{self, DatagramPrefix};
use mpvpn_packet::Arena;
use mpvpn_quic::{PathStats, TrackedDatagram};
use mpvpn_types::{Duration, Instant, target::REORDER};

use super::{flow_order::FlowOrder, resequencer::split_label, retransmissions::MOST_TRIES};

/// Packets are numbered for this long after a path lost some, also if only one path is left: loss comes in
/// bursts, and without numbers the next burst costs TCP a round trip.
const LOSSY_FOR: Duration = Duration::from_secs(30);
/// The share of packets (0 to 1) whose loss is worth numbers: 0.3 %. Less hurts TCP little (Mathis et al.,
/// CCR 1997), and six bytes a packet cost as much.
const LOSSY: f64 = 0.003;
/// A packet whose retransmissions all fail is one in so many: ln(1e-4).
const LN_UNREPAIRED: f64 = -9.2;
/// What a retransmission takes beyond a round trip: acknowledgements are held back for 5 ms, and processors
/// busy.
const RETRANSMISSION_TIME: Duration = Duration::from_millis(8);
/// By how much packets of one path differ without loss: what a scheduler of an operating system takes.
const SLACK: Duration = Duration::from_millis(4);
/// The most that can be asked of the far end; beyond it TCP's own timer ends the wait.
const MOST_TIMEOUT: Duration = Duration::from_millis(500);

/// Gives packets their numbers.
#[derive(Debug)]
pub(super) struct Numbering {
    prefix: DatagramPrefix,
    numbers: SequenceNumbers,
    flows: FlowOrder,
    /// Packets are numbered now.
    on: bool,
    /// When a path last lost more than [`LOSSY`].
    lossy_at: Option<Instant>,
    /// How long the far end shall wait for packets that are missing.
    reorder_timeout: Duration,
    arena: Arena,
    /// Packets that got a number, since the start.
    numbered: u64,
}

impl Numbering {
    /// For the context with this ID of a request stream.
    pub(super) fn new(stream: u64, context: u64) -> Self {
        Self {
            prefix: datagram::prefix(stream, context),
            numbers: SequenceNumbers::new(),
            flows: FlowOrder::default(),
            on: false,
            lossy_at: None,
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

    /// Packets that got a number, since the start.
    pub(super) fn numbered(&self) -> u64 {
        self.numbered
    }

    /// Bytes in front of the label of a datagram.
    #[inline]
    pub(super) fn prefix_len(&self) -> usize {
        self.prefix.as_ref().len()
    }

    /// Whether a datagram has a numbered packet.
    #[inline]
    pub(super) fn is_own(&self, datagram: &[u8]) -> bool {
        datagram.starts_with(self.prefix.as_ref())
    }

    /// Decides whether packets are numbered, by what was measured about the paths in use: where `several` may
    /// carry one flow, where some lose packets, and where packets are `protected`, as repair needs numbers.
    pub(super) fn measure(&mut self, now: Instant, several: bool, protected: bool, views: &[PathStats]) {
        let loss = views.iter().map(|view| view.loss).fold(0.0, f64::max);
        if loss >= LOSSY {
            self.lossy_at = Some(now);
        }
        let lossy = self.lossy_at.is_some_and(|at| now.saturating_duration_since(at) < LOSSY_FOR);
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
                "how long the far end waits for missing packets"
            );
        }
    }

    /// The label of a packet that leaves; `payload` are its bytes without the prefix behind which it waited.
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

    /// The datagram of a packet outside of all FEC groups.
    pub(super) fn datagram(&mut self, label: Label, payload: &[u8]) -> Bytes {
        let prefix = self.prefix.as_ref();
        let room = self.arena.reserve(prefix.len() + Label::LEN + Part::LEN + payload.len());
        room.extend_from_slice(prefix);
        label.encode(room);
        room.extend_from_slice(payload);
        self.arena.take()
    }

    /// The datagram of label and packet that were in a FEC group, outside of all groups.
    pub(super) fn reframe(&mut self, bare: TrackedDatagram) -> TrackedDatagram {
        let prefix = self.prefix.as_ref();
        let room = self.arena.reserve(prefix.len() + bare.data.len());
        room.extend_from_slice(prefix);
        room.extend_from_slice(&bare.data);
        TrackedDatagram { data: self.arena.take(), ..bare }
    }

    /// A numbered datagram as several of at most `max` bytes; none if it cannot be cut, as it is a part
    /// itself.
    #[cold]
    pub(super) fn in_parts(&mut self, datagram: &Bytes, max: usize) -> Vec<Bytes> {
        let labelled = datagram.slice(self.prefix.as_ref().len()..);
        let Some((label, payload)) = split_label(labelled) else { return Vec::new() };
        let around = self.prefix.as_ref().len() + Label::LEN + Part::LEN;
        let most = max.saturating_sub(around);
        if most == 0 || label.part.is_some() || payload.len() > most * (usize::from(Part::MAX_INDEX) + 1) {
            return Vec::new();
        }
        let count = payload.len().div_ceil(most).max(1);
        let cut = payload.chunks(payload.len().div_ceil(count).max(1));
        let last = cut.len().saturating_sub(1) as u8;
        cut.zip(0u8..)
            .map(|(bytes, index)| self.datagram(Label { part: Some(Part { index, last }), ..label }, bytes))
            .collect()
    }

    /// Gives back memory that is not in use; for when nothing has moved for some time.
    pub(super) fn trim(&mut self) {
        self.arena.release();
        self.flows = FlowOrder::default();
    }
}

/// How long the far end has to wait for a packet that others overtook: the difference between the slowest and
/// the quickest path, and as many rounds of retransmission as leave one packet in 10,000 missing at this
/// `loss` (0 to 1).
fn reorder_timeout(loss: f64, views: &[PathStats]) -> Duration {
    let slowest = views.iter().map(|view| view.rtt + view.jitter * 2).max().unwrap_or_default();
    let quickest = views.iter().filter_map(|view| view.min_rtt).min().unwrap_or_default();
    let rounds = match loss {
        // Without any loss one is still expected now and then.
        ..0.001 => 1,
        loss => (LN_UNREPAIRED / loss.min(0.6).ln()).ceil() as u32,
    };
    let repair = (slowest + RETRANSMISSION_TIME) * rounds.clamp(1, u32::from(MOST_TRIES));
    (slowest.saturating_sub(quickest) + SLACK + repair).min(MOST_TIMEOUT)
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::{
        super::testing::{self, Received, check_datagrams, fields_of, view},
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
    fn the_far_end_waits_longer_where_paths_differ_and_where_much_is_lost() {
        let timeout = |paths: &[(u64, f64)]| {
            let views: Vec<_> =
                (0..).zip(paths).map(|(id, (rtt, loss))| view(id, *rtt as u32 * MS, *loss)).collect();
            reorder_timeout(paths.iter().map(|(_, loss)| *loss).fold(0.0, f64::max), &views)
        };
        assert_eq!(timeout(&[(20, 0.0), (20, 0.0)]), (4 + 28) * MS, "slack and one retransmission");
        assert_eq!(timeout(&[(20, 0.0), (50, 0.0)]), (30 + 4 + 58) * MS);
        assert_eq!(timeout(&[(20, 0.01)]), (4 + 2 * 28) * MS, "two rounds at 1 % loss");
        assert_eq!(timeout(&[(600, 0.5)]), MOST_TIMEOUT);
    }

    #[test]
    fn each_flow_has_its_own_numbers() {
        let (mut numbering, now) = (Numbering::new(0, 2), Instant::now());
        let mut number = |flow| numbering.label(now, &packet(flow, true), b"").number;
        let first = number(1);
        assert_eq!(number(1), first.wrapping_add(1));
        number(2);
        assert_eq!(number(1), first.wrapping_add(2));
        assert_eq!(numbering.numbered(), 4);
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
            let datagram = numbering.datagram(testing::label(fields), &bytes(&fields["packet"]));
            assert!(numbering.is_own(&datagram));
            datagram.to_vec()
        };
        check_datagrams(include_str!("../../../../docs/vectors/numbered.json"), parse, encode);
    }

    #[test]
    fn a_datagram_that_outgrew_the_paths_travels_in_parts_that_make_the_same_packet() {
        let (mut numbering, now) = (Numbering::new(4, 2), Instant::now());
        let payload: Vec<u8> = (0..3000u32).map(|n| n as u8).collect();
        let label = numbering.label(now, &packet(1, true), &payload);
        let whole = numbering.datagram(label, &payload);
        let parts = numbering.in_parts(&whole, 1200);
        assert!(parts.len() == 3 && parts.iter().all(|part| part.len() <= 1200), "{parts:?}");
        let mut resequencer = super::super::resequencer::Resequencer::new();
        let opened = parts.iter().filter_map(|part| resequencer.open(part.slice(numbering.prefix_len()..)));
        let opened: Vec<_> = opened.map(|(label, packet)| (label.number, packet)).collect();
        assert_eq!(opened, [(label.number, Bytes::from(payload))]);
        assert_eq!(numbering.in_parts(&parts[0], 100), Vec::<Bytes>::new(), "a part is not cut again");
        assert_eq!(numbering.in_parts(&whole, 20), Vec::<Bytes>::new(), "more parts than there may be");
    }
}
