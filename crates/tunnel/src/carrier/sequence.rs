//! What lets a flow take several paths: its packets are numbered, what is lost is sent again over another
//! path, and the far end restores the order.

use std::collections::VecDeque;

use bytes::{Buf, Bytes};
use mpvpn_class::Queued;
use mpvpn_lane::{Join, Label, Numbers, Part, Reorder, ReorderStats, fec::Load};
use mpvpn_masque::datagram::{self, DatagramPrefix};
use mpvpn_packet::{Arena, ip, protocol};
use mpvpn_quic::{Fate, PathView, Tracked};
use mpvpn_types::{Duration, Instant, PathId};

use super::protect::{FecCounters, Protection};

/// A packet is sent again this often at most.
const MOST_TRIES: u8 = 8;
/// A packet that is older than this is of no use to anyone.
const MOST_AGE: Duration = Duration::from_millis(600);
/// Bytes that wait to be sent again at most; more only if a fast path dies.
const MOST_REPAIRS: usize = 8 << 20;
/// Packets are numbered for this long after a path lost some, also if only one path is left.
const LOSSY_FOR: Duration = Duration::from_secs(30);
/// The share of packets (0 to 1) whose loss is worth repair.
const LOSSY: f64 = 0.003;
/// A packet whose repairs fail is one in so many: ln(1e-4).
const LN_UNREPAIRED: f64 = -9.2;
/// What a repair takes beyond a round trip: acknowledgements are held back for 5 ms, and processors busy.
const REPAIR_TIME: Duration = Duration::from_millis(8);
/// What a packet may come late for no reason.
const SLACK: Duration = Duration::from_millis(4);
/// The most that can be asked of the far end.
const MOST_PATIENCE: Duration = Duration::from_millis(500);
/// Flows of UDP get order above this rate (bytes in 100 ms, twice): those are downloads, not calls.
const BULK: u32 = 200_000;
const METER_STEP: Duration = Duration::from_millis(100);
/// A flow of QUIC is forgotten after so many steps of silence.
const QUIC_STEPS: u32 = 600;
/// Versions of QUIC (RFC 9000, RFC 9369).
const QUIC_VERSIONS: [u32; 2] = [1, 0x6b33_43cf];

/// Counters of repair and order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaneCounters {
    /// Whether packets are numbered now.
    pub on: bool,
    /// Packets that got a number.
    pub numbered: u64,
    /// Packets sent again because they were lost.
    pub repairs: u64,
    /// Copies sent beside the first one.
    pub copies: u64,
    /// What became of the packets that arrived.
    pub arrived: ReorderStats,
    /// Repair without asking, where both ends agreed on that.
    pub fec: Option<FecCounters>,
}

#[derive(Debug)]
pub(super) struct Sequencer {
    prefix: DatagramPrefix,
    numbers: Numbers,
    meter: Meter,
    /// Packets are numbered now.
    on: bool,
    lossy: Option<Instant>,
    patience: Duration,
    repairs: VecDeque<Tracked>,
    repair_bytes: usize,
    join: Join,
    reorder: Reorder,
    arena: Arena,
    /// Where both ends know groups with repair.
    protection: Option<Box<Protection>>,
    counters: LaneCounters,
}

impl Sequencer {
    pub(super) fn new(stream: u64, context: u64) -> Self {
        Self {
            prefix: datagram::prefix(stream, context),
            numbers: Numbers::new(),
            meter: Meter::default(),
            on: false,
            lossy: None,
            patience: Duration::ZERO,
            repairs: VecDeque::new(),
            repair_bytes: 0,
            join: Join::new(),
            reorder: Reorder::new(),
            arena: Arena::new(),
            protection: None,
            counters: LaneCounters::default(),
        }
    }

    pub(super) fn protect(&mut self, protection: Protection) {
        self.protection = Some(Box::new(protection));
    }

    /// Whether what a path loses is made good by repair.
    pub(super) fn protects(&self, path: PathId) -> bool {
        self.protection.as_ref().is_some_and(|protection| protection.protects(path))
    }

    pub(super) fn protection(&mut self) -> Option<&mut Protection> {
        self.protection.as_deref_mut()
    }

    /// Bytes that a numbered datagram has beyond a plain one.
    pub(super) fn overhead(&self, plain: &DatagramPrefix) -> usize {
        let protected = self.protection.as_ref().and_then(|protection| protection.around()).unwrap_or(0);
        (self.prefix.as_ref().len().max(protected) + Label::LEN).saturating_sub(plain.as_ref().len())
    }

    pub(super) fn is_on(&self) -> bool {
        self.on
    }

    /// Takes over what was measured about the paths in use, of which `several` may carry one flow.
    pub(super) fn measure(&mut self, now: Instant, several: bool, views: &[PathView]) {
        let loss = views.iter().map(|view| view.loss).fold(0.0, f64::max);
        if loss >= LOSSY {
            self.lossy = Some(now);
        }
        let lossy = self.lossy.is_some_and(|at| now.saturating_duration_since(at) < LOSSY_FOR);
        let mut protects = false;
        if let Some(protection) = &mut self.protection {
            protection.measure(views);
            protects = protection.is_on();
        }
        self.on = several || lossy || protects;
        if !self.on {
            return;
        }
        let slowest = views.iter().map(|view| view.rtt + view.jitter * 2).max().unwrap_or_default();
        let quickest = views.iter().filter_map(|view| view.min_rtt).min().unwrap_or_default();
        let rounds = match loss {
            // Without any loss one is still expected now and then.
            ..0.001 => 1,
            loss => (LN_UNREPAIRED / loss.min(0.6).ln()).ceil() as u32,
        };
        let repair = (slowest + REPAIR_TIME) * rounds.clamp(1, u32::from(MOST_TRIES));
        self.patience = (slowest.saturating_sub(quickest) + SLACK + repair).min(MOST_PATIENCE);
    }

    /// The label of a packet that leaves; `payload` are its bytes without the prefix behind which it waited.
    pub(super) fn label(&mut self, now: Instant, packet: &Queued, payload: &[u8]) -> Label {
        let bucket = Numbers::bucket(packet.flow);
        self.counters.numbered += 1;
        Label {
            bucket,
            ordered: packet.ordered || self.meter.wants_order(now, bucket, payload),
            patience: self.patience,
            number: self.numbers.take(bucket),
            part: None,
        }
    }

    /// The datagram of a packet that leaves on a path, and its mark; `load` is what it met.
    pub(super) fn frame(
        &mut self,
        now: Instant,
        path: PathId,
        label: Label,
        payload: &[u8],
        load: Load,
    ) -> (Bytes, Option<u32>) {
        let protection = self.protection.as_mut();
        match protection.and_then(|protection| protection.frame(now, path, &label, payload, load)) {
            Some((data, mark)) => (data, Some(mark)),
            None => (self.datagram(label, payload), None),
        }
    }

    /// The datagram of a packet outside of all groups.
    pub(super) fn datagram(&mut self, label: Label, payload: &[u8]) -> Bytes {
        let prefix = self.prefix.as_ref();
        let room = self.arena.room(prefix.len() + Label::LEN + Part::LEN + payload.len());
        room.extend_from_slice(prefix);
        label.encode(room);
        room.extend_from_slice(payload);
        self.arena.take()
    }

    /// A numbered datagram as several of at most `max` bytes; none if it cannot be cut, as it is a part itself.
    #[cold]
    pub(super) fn in_parts(&mut self, datagram: &Bytes, max: usize) -> Vec<Bytes> {
        let labelled = datagram.slice(self.prefix.as_ref().len()..);
        let Some((label, payload)) = read(labelled) else { return Vec::new() };
        let around = self.prefix.as_ref().len() + Label::LEN + Part::LEN;
        let most = max.saturating_sub(around);
        if most == 0 || label.part.is_some() || payload.len() > most * (usize::from(Part::MOST) + 1) {
            return Vec::new();
        }
        let count = payload.len().div_ceil(most).max(1);
        let cut = payload.chunks(payload.len().div_ceil(count).max(1));
        let last = cut.len().saturating_sub(1) as u8;
        cut.zip(0u8..)
            .map(|(bytes, index)| self.datagram(Label { part: Some(Part { index, last }), ..label }, bytes))
            .collect()
    }

    /// Takes a datagram that was lost, if it is worth sending again: outside of all groups.
    pub(super) fn keep(&mut self, now: Instant, lost: Tracked) {
        let lost = match &self.protection {
            Some(protection) if lost.mark.is_some() => match protection.bare(lost) {
                Some(lost) => self.renewed(lost),
                None => return,
            },
            _ => lost,
        };
        self.keep_numbered(now, lost);
    }

    /// Takes what became of a datagram with a mark.
    pub(super) fn settle(&mut self, now: Instant, fate: Fate) {
        match (fate, &mut self.protection) {
            (Fate::Arrived(mark), Some(protection)) => protection.arrived(mark),
            (Fate::Lost(datagram), Some(protection)) => protection.lost(now, datagram),
            (_, None) => {}
        }
    }

    /// Closes groups whose time has come, and takes what the far end will not restore.
    pub(super) fn handle_timeout(&mut self, now: Instant) {
        let Some(protection) = &mut self.protection else { return };
        protection.handle_timeout(now);
        while let Some(lost) = self.protection.as_mut().and_then(|protection| protection.next_lost()) {
            let lost = self.renewed(lost);
            self.keep_numbered(now, lost);
        }
    }

    /// A datagram of what stood behind a place in a group.
    fn renewed(&mut self, bare: Tracked) -> Tracked {
        let prefix = self.prefix.as_ref();
        let room = self.arena.room(prefix.len() + bare.data.len());
        room.extend_from_slice(prefix);
        room.extend_from_slice(&bare.data);
        Tracked { data: self.arena.take(), ..bare }
    }

    fn keep_numbered(&mut self, now: Instant, lost: Tracked) {
        let old = now.saturating_duration_since(lost.born) > MOST_AGE;
        if old || lost.tries >= MOST_TRIES || self.repair_bytes > MOST_REPAIRS {
            return;
        }
        self.repair_bytes += lost.data.len();
        self.repairs.push_back(Tracked { tries: lost.tries + 1, copied: false, ..lost });
    }

    pub(super) fn has_repairs(&self) -> bool {
        !self.repairs.is_empty() || self.protection.as_ref().is_some_and(|protection| protection.has_repair())
    }

    /// The next datagram to send again.
    pub(super) fn next_repair(&mut self) -> Option<Tracked> {
        let next = self.repairs.pop_front()?;
        self.repair_bytes -= next.data.len();
        self.counters.repairs += 1;
        Some(next)
    }

    pub(super) fn count_copy(&mut self) {
        self.counters.copies += 1;
    }

    /// Whether a datagram has a numbered packet, or repair.
    pub(super) fn is_own(&self, datagram: &[u8]) -> bool {
        datagram.starts_with(self.prefix.as_ref())
            || self.protection.as_ref().is_some_and(|protection| protection.is_own(datagram))
    }

    /// The label and the packet of a numbered datagram; `None` if it is a part of a packet and others are missing, or repair.
    pub(super) fn open(&mut self, now: Instant, mut datagram: Bytes) -> Option<(Label, Bytes)> {
        match &mut self.protection {
            Some(protection) if protection.is_own(&datagram) => datagram = protection.take(now, datagram)?,
            _ => datagram.advance(self.prefix.as_ref().len()),
        }
        self.joined(datagram)
    }

    /// The same of what was restored.
    pub(super) fn next_restored(&mut self) -> Option<(Label, Bytes)> {
        loop {
            let restored = self.protection.as_mut()?.next_restored()?;
            if let Some(opened) = self.joined(restored) {
                return Some(opened);
            }
        }
    }

    fn joined(&mut self, labelled: Bytes) -> Option<(Label, Bytes)> {
        let (label, payload) = read(labelled)?;
        self.join.push(label, payload).map(|packet| (label, packet))
    }

    pub(super) fn reorder(&mut self) -> &mut Reorder {
        &mut self.reorder
    }

    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        let groups = self.protection.as_ref().and_then(|protection| protection.poll_timeout());
        self.reorder.poll_timeout().into_iter().chain(groups).min()
    }

    pub(super) fn counters(&self) -> LaneCounters {
        let fec = self.protection.as_ref().map(|protection| protection.counters());
        LaneCounters { on: self.on, arrived: self.reorder.stats(), fec, ..self.counters }
    }

    /// Gives back memory that is not in use.
    pub(super) fn rest(&mut self) {
        self.arena.release();
        self.reorder.rest();
        // Parts that are left are of packets that nobody waits for, and their numbers will come again.
        self.join = Join::new();
        self.meter = Meter::default();
        if let Some(protection) = &mut self.protection {
            protection.rest();
        }
    }
}

/// The label and the bytes behind it.
fn read(mut labelled: Bytes) -> Option<(Label, Bytes)> {
    let (label, len) = Label::decode(&labelled).ok()?;
    labelled.advance(len);
    Some((label, labelled))
}

/// How much each sequence of numbers carried lately.
#[derive(Debug, Default)]
struct Meter {
    origin: Option<Instant>,
    sequences: Vec<Metered>,
}

#[derive(Clone, Debug, Default)]
struct Metered {
    /// The step of 100 ms in which a packet came last.
    last: u32,
    /// Bytes, halved each step.
    sum: u32,
    bulk: bool,
    /// It began as QUIC does.
    quic: bool,
}

impl Meter {
    /// Whether overtaking hurts the flow of a packet that is not TCP's. QUIC takes what is overtaken by three
    /// packets for lost (RFC 9002 §6.1.1), and would never become quick enough to be told by its rate.
    fn wants_order(&mut self, now: Instant, bucket: u16, packet: &[u8]) -> bool {
        if self.sequences.is_empty() {
            self.sequences = vec![Metered::default(); mpvpn_lane::BUCKETS as usize];
        }
        let step = step(*self.origin.get_or_insert(now), now);
        let Some(metered) = self.sequences.get_mut(usize::from(bucket)) else { return false };
        metered.wants_order(step, packet.len(), || begins_quic(packet))
    }
}

impl Metered {
    fn wants_order(&mut self, step: u32, bytes: usize, begins_quic: impl FnOnce() -> bool) -> bool {
        if step != self.last {
            self.quic &= step.saturating_sub(self.last) < QUIC_STEPS;
            self.sum = self.sum.checked_shr(step.saturating_sub(self.last)).unwrap_or(0);
            self.last = step;
            self.bulk &= self.sum > BULK / 4;
        }
        self.sum = self.sum.saturating_add(bytes as u32);
        self.bulk |= self.sum > BULK;
        self.quic = self.quic || begins_quic();
        self.bulk || self.quic
    }
}

fn step(origin: Instant, now: Instant) -> u32 {
    (now.saturating_duration_since(origin).as_millis() / METER_STEP.as_millis()) as u32
}

/// How much one flow of UDP payloads carried lately.
#[derive(Debug)]
pub(crate) struct FlowMeter {
    origin: Instant,
    metered: Metered,
}

impl FlowMeter {
    pub(crate) fn new(now: Instant) -> Self {
        Self { origin: now, metered: Metered::default() }
    }

    /// Whether overtaking hurts the flow of a payload.
    pub(crate) fn wants_order(&mut self, now: Instant, payload: &[u8]) -> bool {
        self.metered.wants_order(step(self.origin, now), payload.len(), || is_long_header(payload))
    }
}

/// Whether an IP packet carries a QUIC packet with a long header, as connections begin (RFC 9000 §17.2).
fn begins_quic(packet: &[u8]) -> bool {
    const UDP_HEADER: usize = 8;
    let Ok(view) = ip::parse(packet) else { return false };
    if view.protocol() != protocol::UDP || !view.has_transport_header() {
        return false;
    }
    view.transport().get(UDP_HEADER..).is_some_and(is_long_header)
}

fn is_long_header(payload: &[u8]) -> bool {
    let Some([first, version @ ..]) = payload.first_chunk::<5>() else { return false };
    first & 0xc0 == 0xc0 && QUIC_VERSIONS.contains(&u32::from_be_bytes(*version))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_download_is_told_from_a_call() {
        let start = Instant::now();
        let mut meter = Meter::default();
        let mut bulk = |bucket, interval_ms, bytes| {
            let packets = (0..2000u64).map(|n| start + Duration::from_millis(n * interval_ms));
            let packet = vec![0; bytes];
            packets.map(|at| meter.wants_order(at, bucket, &packet)).filter(|bulk| *bulk).count()
        };
        assert_eq!(bulk(1, 20, 200), 0, "50 packets/s of 200 bytes");
        assert_eq!(bulk(2, 2, 1200), 0, "4.8 Mbit/s");
        assert!(bulk(3, 1, 1400) > 1500, "11 Mbit/s");
    }

    /// A datagram with such a payload, from one host to another.
    fn datagram(payload: &[u8]) -> Vec<u8> {
        let mut packet = vec![0x45, 0, 0, 0, 0, 0, 0, 0, 64, protocol::UDP, 0, 0, 10, 0, 0, 2, 10, 0, 0, 1];
        packet.extend([0x9c, 0x40, 0x01, 0xbb, 0, 8 + payload.len() as u8, 0, 0]);
        packet.extend(payload);
        let len = packet.len() as u16;
        packet[2..4].copy_from_slice(&len.to_be_bytes());
        packet
    }

    #[test]
    fn a_flow_that_begins_as_quic_is_kept_in_order_from_then_on() {
        let now = Instant::now();
        let later = |seconds| now + Duration::from_secs(seconds);
        let mut meter = Meter::default();
        let short = datagram(&[0x40; 30]);
        assert!(!meter.wants_order(now, 1, &short));
        assert!(meter.wants_order(now, 1, &datagram(&[0xc3, 0, 0, 0, 1, 8, 7, 7])));
        assert!(meter.wants_order(later(1), 1, &short) && meter.wants_order(later(50), 1, &short));
        assert!(!meter.wants_order(later(50), 2, &short), "another flow");
        assert!(!meter.wants_order(later(111), 1, &short), "a minute of silence");
        for other in [&[0xc3, 0, 0, 0, 9, 8, 7, 7][..], &[0x43, 0, 0, 0, 1, 8], &[0xc3, 0, 0, 0], &[]] {
            assert!(!meter.wants_order(later(111), 3, &datagram(other)), "{other:?}");
        }
    }
}
