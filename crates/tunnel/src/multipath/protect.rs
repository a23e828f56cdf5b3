//! FEC: puts packets of lossy paths into groups with repair packets, and recovers lost packets of the peer's
//! groups.
//!
//! In: packets to send, measured loss, outcomes of datagrams, received datagrams. Out: datagrams with their
//! group, repair packets, packets that the peer cannot recover, recovered packets. Always holds: a lost
//! packet is retransmitted only when the peer cannot recover it; memory is bounded by the flow crate's FEC
//! modules.

use std::collections::{BTreeMap, VecDeque};

use bytes::{Buf, Bytes};
use mpvpn_flow::{
    Label,
    fec::{
        FULL_PATH_WAIT_FACTOR, GroupDecoder, GroupEncoder, GroupOutcomes, GroupPosition, Load, LossMonitor,
        RepairPlan, Symbol,
    },
};
use mpvpn_masque::datagram::{self, DatagramPrefix};
use mpvpn_packet::Arena;
use mpvpn_quic::{PathStats, TrackedDatagram};
use mpvpn_types::{Duration, Fec, Instant, PathId, target::FEC};

/// Flag in the ack token of a datagram, beside the number of its FEC group: the datagram is a repair packet.
const REPAIR_FLAG: u32 = 1 << 16;
/// Packets of at least this size (bytes) are padded to the size of their repair packets. DPLPMTUD takes it
/// for a smaller MTU if packets are lost after one that was slightly longer arrived, which happens all the
/// time at high loss; it ignores packets of up to 1200 bytes. Smaller: bytes are wasted. Larger: the MTU
/// falls without cause.
const MIN_LONG_BYTES: usize = 1100;
/// A group waits to become full for a quarter of the round-trip time, which is less than a retransmission
/// takes. Smaller: later repair. Larger: smaller groups, so more repair packets.
const GROUP_WAIT_DIVISOR: u32 = 4;
/// Lower and upper bound of that wait.
const GROUP_WAIT_RANGE: (Duration, Duration) = (Duration::from_millis(4), Duration::from_millis(20));
/// Time after the first loss in a group, beyond the wait of the group, until the outcome of all its packets
/// is known: acknowledgements of data and repair packets arrive one after the other. Smaller: packets are
/// retransmitted although the peer recovers them. Larger: retransmissions are late.
const OUTCOME_WAIT: Duration = Duration::from_millis(15);

/// Counters of FEC in both directions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FecCounters {
    /// Current share of repair packets on the path with the most, in percent of the data packets; 0 if no
    /// path is protected.
    pub max_repair_percent: u8,
    /// Data packets sent in FEC groups.
    pub protected: u64,
    /// Repair packets sent.
    pub repair_packets: u64,
    /// Bytes of repair packets sent.
    pub repair_bytes: u64,
    /// Packets that were lost on the way to the peer and not retransmitted, because the peer recovered them.
    pub recovered_by_peer: u64,
    /// Lost packets of the peer that this end recovered.
    pub recovered: u64,
    /// Received repair packets that were not needed.
    pub unneeded_repairs: u64,
    /// Groups of the peer that lost more packets than could be recovered.
    pub unrecoverable: u64,
}

/// Counters of FEC on one path, for what this end sends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathFecCounters {
    /// Repair packets per 100 source packets now.
    pub repair_percent: u8,
    /// Source packets sent in groups.
    pub protected: u64,
    /// Repair packets sent.
    pub repair_packets: u64,
    /// Bytes of repair packets sent.
    pub repair_bytes: u64,
    /// Lost packets that the peer recovered.
    pub recovered_by_peer: u64,
    /// Repair packets that arrived and that the peer did not need.
    pub unneeded_repairs: u64,
}

#[derive(Debug)]
pub(super) struct Protection {
    prefix: DatagramPrefix,
    /// The same prefix with longer varints, which pad large packets to the size of repair packets.
    long_prefix: Option<DatagramPrefix>,
    fec: Fec,
    loss_monitors: BTreeMap<PathId, LossMonitor>,
    encoder: GroupEncoder,
    outcomes: GroupOutcomes<TrackedDatagram>,
    /// How long the outcome of a group's packets may stay unknown after the first loss.
    outcome_wait: Duration,
    /// Lost packets that the peer cannot recover, to be retransmitted.
    lost: VecDeque<TrackedDatagram>,
    decoder: GroupDecoder,
    recovered: VecDeque<Bytes>,
    arena: Arena,
}

impl Protection {
    pub(super) fn new(stream: u64, context: u64, fec: Fec) -> Self {
        let prefix = datagram::prefix(stream, context);
        Self {
            encoder: GroupEncoder::new(prefix.as_ref()),
            prefix,
            long_prefix: datagram::long_prefix(stream, context, GroupPosition::REPAIR_OVERHEAD),
            fec,
            loss_monitors: BTreeMap::new(),
            outcomes: GroupOutcomes::new(),
            outcome_wait: OUTCOME_WAIT,
            lost: VecDeque::new(),
            decoder: GroupDecoder::new(),
            recovered: VecDeque::new(),
            arena: Arena::new(),
        }
    }

    /// Returns the bytes before the label of a protected packet, plus the bytes by which repair packets are
    /// longer; `None` if FEC is off. Does not depend on whether packets are protected now, so the MTU is
    /// stable.
    pub(super) fn overhead_bytes(&self) -> Option<usize> {
        (self.fec != Fec::Off)
            .then(|| self.prefix.as_ref().len() + GroupPosition::LEN + GroupPosition::REPAIR_OVERHEAD)
    }

    pub(super) fn is_on(&self) -> bool {
        self.encoder.is_active()
    }

    /// Takes the measurements of the paths in use.
    pub(super) fn measure(&mut self, views: &[PathStats]) {
        let used = |id: PathId| views.iter().any(|view| view.id == id);
        self.encoder.retain(used);
        self.loss_monitors.retain(|id, _| used(*id));
        for view in views {
            if let Some(plan) =
                self.loss_monitors.entry(view.id).or_default().update(self.fec, repairable_loss(view))
            {
                let percent = plan.map(RepairPlan::repair_percent);
                tracing::debug!(
                    target: FEC,
                    path = view.id.0,
                    percent,
                    loss = view.loss,
                    random_loss = view.random_loss,
                    policy = %self.fec,
                    "the FEC share of a path has changed"
                );
                self.encoder.set_plan(view.id, plan);
            }
            self.encoder.set_wait(
                view.id,
                (view.rtt / GROUP_WAIT_DIVISOR).clamp(GROUP_WAIT_RANGE.0, GROUP_WAIT_RANGE.1),
            );
        }
        let slowest = views.iter().map(|view| view.rtt).max().unwrap_or_default();
        self.outcome_wait =
            OUTCOME_WAIT + (slowest / GROUP_WAIT_DIVISOR).min(GROUP_WAIT_RANGE.1) * FULL_PATH_WAIT_FACTOR;
    }

    /// Encodes the datagram of a packet sent on a protected path and returns it with its ack token; `None` if
    /// the path is not protected. `load` is the load of the path.
    pub(super) fn frame(
        &mut self,
        now: Instant,
        path: PathId,
        label: &Label,
        packet: &[u8],
        load: Load,
    ) -> Option<(Bytes, u32)> {
        let position = self.encoder.assign_position(now, path, Label::LEN + packet.len())?;
        let prefix = self
            .long_prefix
            .as_ref()
            .filter(|_| packet.len() >= MIN_LONG_BYTES)
            .unwrap_or(&self.prefix)
            .as_ref();
        let room = self.arena.reserve(prefix.len() + GroupPosition::LEN + Label::LEN + packet.len());
        room.extend_from_slice(prefix);
        position.encode(room);
        label.encode(room);
        room.extend_from_slice(packet);
        let data = self.arena.take();
        if position.symbol == Symbol::Source(0) {
            self.outcomes.open(position.group);
        }
        let Self { encoder, outcomes, lost, .. } = self;
        if let Some(closed) =
            encoder.add_packet(now, path, data.slice(prefix.len() + GroupPosition::LEN..), load)
        {
            outcomes.close(closed, |datagram| lost.push_back(datagram));
        }
        Some((data, position.group.into()))
    }

    /// Returns the length of the FEC prefix of a datagram; `None` if it has another prefix.
    fn prefix_len_of(&self, datagram: &[u8]) -> Option<usize> {
        let both = [Some(&self.prefix), self.long_prefix.as_ref()].into_iter().flatten();
        both.map(AsRef::as_ref).find(|prefix| datagram.starts_with(prefix)).map(<[u8]>::len)
    }

    /// Returns label and packet of a protected datagram.
    fn labelled_packet(&self, datagram: &Bytes) -> Bytes {
        let prefix = self.prefix_len_of(datagram).unwrap_or(0);
        datagram.slice((prefix + GroupPosition::LEN).min(datagram.len())..)
    }

    /// A datagram with this ack token was acknowledged.
    pub(super) fn on_arrived(&mut self, ack_token: u32) {
        let lost = &mut self.lost;
        self.outcomes.on_arrived(ack_token as u16, |datagram| lost.push_back(datagram));
    }

    /// A datagram with an ack token was lost.
    pub(super) fn on_lost(&mut self, now: Instant, datagram: TrackedDatagram) {
        let Some(ack_token) = datagram.ack_token else { return };
        let packet = (ack_token & REPAIR_FLAG == 0).then_some(datagram);
        let Self { outcomes, lost, outcome_wait, .. } = self;
        outcomes.on_lost(now, ack_token as u16, packet, *outcome_wait, |datagram| lost.push_back(datagram));
    }

    /// Closes groups whose wait has ended, and stops waiting for the outcome of others.
    pub(super) fn handle_timeout(&mut self, now: Instant) {
        let Self { encoder, outcomes, lost, .. } = self;
        encoder.close_due(now, |closed| outcomes.close(closed, |datagram| lost.push_back(datagram)));
        outcomes.handle_timeout(now, |datagram| lost.push_back(datagram));
    }

    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        self.encoder.poll_timeout().into_iter().chain(self.outcomes.poll_timeout()).min()
    }

    /// Returns the next datagram that the peer cannot recover, without FEC prefix and group header.
    pub(super) fn next_lost(&mut self) -> Option<TrackedDatagram> {
        let datagram = self.lost.pop_front()?;
        self.unprotect(datagram)
    }

    /// Removes FEC prefix and group header of a datagram; `None` if it is a repair packet.
    pub(super) fn unprotect(&self, datagram: TrackedDatagram) -> Option<TrackedDatagram> {
        match datagram.ack_token {
            Some(ack_token) if ack_token & REPAIR_FLAG != 0 => None,
            Some(_) => Some(TrackedDatagram {
                data: self.labelled_packet(&datagram.data),
                ack_token: None,
                ..datagram
            }),
            None => Some(datagram),
        }
    }

    pub(super) fn has_repair(&self) -> bool {
        self.encoder.has_repair()
    }

    /// Returns the next repair packet for a path.
    pub(super) fn next_repair(&mut self, now: Instant, path: PathId) -> Option<TrackedDatagram> {
        let (group, data) = self.encoder.next_repair(now, path)?;
        Some(TrackedDatagram {
            data,
            first_sent: now,
            retransmissions: 0,
            has_copy: false,
            ack_token: Some(REPAIR_FLAG | u32::from(group)),
        })
    }

    pub(super) fn has_prefix(&self, datagram: &[u8]) -> bool {
        self.prefix_len_of(datagram).is_some()
    }

    /// Takes a received datagram; returns its label and packet, or `None` if it is a repair packet or
    /// malformed. Packets that it recovers are returned by [`Self::next_recovered`].
    pub(super) fn take(&mut self, now: Instant, mut datagram: Bytes) -> Option<Bytes> {
        datagram.advance(self.prefix_len_of(&datagram)?);
        let (position, len) = GroupPosition::decode(&datagram).ok()?;
        datagram.advance(len);
        let recovered = &mut self.recovered;
        self.decoder.push(now, position, &datagram, |packet| recovered.push_back(packet));
        matches!(position.symbol, Symbol::Source(_)).then_some(datagram)
    }

    /// The counters of a path for what this end sends.
    pub(super) fn path_counters(&self, path: PathId) -> PathFecCounters {
        let (sent, outcomes) = (self.encoder.stats_of(path), self.outcomes.stats_of(path));
        PathFecCounters {
            repair_percent: self.encoder.repair_percent_of(path),
            protected: sent.protected,
            repair_packets: sent.repair_packets,
            repair_bytes: sent.repair_bytes,
            recovered_by_peer: outcomes.restored,
            unneeded_repairs: outcomes.wasted,
        }
    }

    /// Forgets a closed path.
    pub(super) fn on_path_closed(&mut self, path: PathId) {
        self.encoder.on_path_closed(path);
        self.outcomes.on_path_closed(path);
        self.loss_monitors.remove(&path);
    }

    /// Returns label and packet of the next recovered packet.
    pub(super) fn next_recovered(&mut self) -> Option<Bytes> {
        self.recovered.pop_front()
    }

    pub(super) fn counters(&self) -> FecCounters {
        let (sent, received) = (self.encoder.stats(), self.decoder.stats());
        FecCounters {
            max_repair_percent: self.encoder.max_repair_percent(),
            protected: sent.protected,
            repair_packets: sent.repair_packets,
            repair_bytes: sent.repair_bytes,
            recovered_by_peer: self.outcomes.restored_losses(),
            recovered: received.recovered,
            unneeded_repairs: received.wasted,
            unrecoverable: received.unrecoverable,
        }
    }

    /// Releases unused memory.
    pub(super) fn trim(&mut self) {
        self.arena.release();
        self.encoder.trim_memory();
        self.decoder.clear();
    }
}

/// Returns the loss ratio (0 to 1) that FEC repairs: random loss, if the congestion controller can tell it
/// apart. Repair packets would increase loss caused by congestion.
fn repairable_loss(view: &PathStats) -> f64 {
    view.random_loss.map_or(view.loss, |random| view.loss.min(random))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{
        super::tests::{self, Received, check_datagrams, prefix, view},
        *,
    };
    use crate::vectors::{self, hex, number};

    const MS: Duration = Duration::from_millis(1);
    const PATH: PathId = PathId(0);

    /// The sender of groups of 4 packets and 2 of repair, on one path.
    fn sender() -> Protection {
        let mut sender = Protection::new(0, 10, Fec::Fixed { data: 4, repair: 2 });
        sender.measure(&[view(PATH.0, 20 * MS, 0.0)]);
        sender
    }

    fn label(number: u32) -> Label {
        Label { bucket: 1, ordered: true, reorder_timeout: Duration::ZERO, number, part: None }
    }

    /// A group of 4 packets, and its repair.
    fn group(sender: &mut Protection, now: Instant) -> (Vec<TrackedDatagram>, Vec<TrackedDatagram>) {
        let mut data = Vec::new();
        for number in 0..4 {
            let framed = sender.frame(now, PATH, &label(number), &[number as u8; 100], Load::Light);
            let (bytes, ack_token) = framed.expect("the path is protected");
            let ack_token = Some(ack_token);
            data.push(TrackedDatagram {
                data: bytes,
                first_sent: now,
                retransmissions: 0,
                has_copy: false,
                ack_token,
            });
        }
        let repair = std::iter::from_fn(|| sender.next_repair(now, PATH)).collect();
        (data, repair)
    }

    fn arrive(sender: &mut Protection, receiver: &mut Protection, now: Instant, datagram: &TrackedDatagram) {
        assert!(receiver.has_prefix(&datagram.data));
        receiver.take(now, datagram.data.clone());
        sender.on_arrived(datagram.ack_token.expect("it is in a group"));
    }

    #[test]
    fn packets_that_the_peer_recovers_are_not_retransmitted() {
        let (mut sender, mut receiver, now) = (sender(), Protection::new(0, 10, Fec::Off), Instant::now());
        let (data, repair) = group(&mut sender, now);
        assert_eq!(repair.len(), 2);
        sender.on_lost(now, data[1].clone());
        for datagram in [&data[0], &data[2], &data[3], &repair[0]] {
            arrive(&mut sender, &mut receiver, now, datagram);
        }
        let recovered = receiver.next_recovered().expect("one is recovered");
        let (label, payload) = super::super::resequencer::split_label(recovered).expect("with its label");
        assert_eq!((label.number, &payload[..]), (1, &[1; 100][..]));
        sender.handle_timeout(now + 1000 * MS);
        assert_eq!((receiver.next_recovered(), sender.next_lost()), (None, None));
        assert_eq!((sender.counters().recovered_by_peer, receiver.counters().recovered), (1, 1));
    }

    #[test]
    fn packets_that_the_peer_cannot_recover_are_retransmitted_outside_of_groups() {
        let (mut sender, mut receiver, now) = (sender(), Protection::new(0, 10, Fec::Off), Instant::now());
        let (data, repair) = group(&mut sender, now);
        arrive(&mut sender, &mut receiver, now, &data[0]);
        data[1..].iter().chain(&repair[1..]).for_each(|datagram| sender.on_lost(now, datagram.clone()));
        let lost: Vec<TrackedDatagram> = std::iter::from_fn(|| sender.next_lost()).collect();
        assert_eq!(lost.len(), 3, "repair is not repeated");
        assert!(lost.iter().all(|lost| lost.ack_token.is_none() && lost.data.len() == Label::LEN + 100));
        assert_eq!(receiver.next_recovered(), None);
    }

    #[test]
    fn a_loss_in_a_group_without_further_outcomes_is_retransmitted_after_a_timeout() {
        let (mut sender, now) = (sender(), Instant::now());
        let (data, _) = group(&mut sender, now);
        sender.on_lost(now, data[2].clone());
        assert!(sender.next_lost().is_none());
        let due = sender.poll_timeout().expect("its outcome is followed");
        assert!(
            (OUTCOME_WAIT..OUTCOME_WAIT + GROUP_WAIT_RANGE.1 * FULL_PATH_WAIT_FACTOR).contains(&(due - now)),
            "{:?}",
            due - now
        );
        sender.handle_timeout(due);
        assert!(sender.next_lost().is_some());
    }

    #[test]
    fn places_in_groups_are_those_of_the_vectors() {
        let parse = |received: Received<'_>| {
            let (position, len) = GroupPosition::decode(received.payload).ok()?;
            let (index, size) = match position.symbol {
                Symbol::Source(index) => (index, None),
                Symbol::Repair { index, source_count: data } => (index, Some(data)),
            };
            let protection = Protection::new(received.stream, received.context, Fec::Off);
            assert!(protection.has_prefix(received.bytes));
            let content = hex(&received.payload[len..]);
            Some(json!({ "group": position.group, "index": index, "size": size, "content": content }))
        };
        let encode = |_, _, fields: &Value| {
            let index = number(&fields["index"]) as u8;
            let shard = fields["size"]
                .as_u64()
                .map_or(Symbol::Source(index), |size| Symbol::Repair { index, source_count: size as u8 });
            let mut out = prefix(fields).as_ref().to_vec();
            GroupPosition { group: number(&fields["group"]) as u16, symbol: shard }.encode(&mut out);
            [out, vectors::bytes(&fields["content"])].concat()
        };
        check_datagrams(include_str!("../../../../docs/vectors/fec-packets.json"), parse, encode);
    }

    #[test]
    fn groups_are_protected_and_restored_as_the_vectors_say() {
        for vector in vectors::vectors(include_str!("../../../../docs/vectors/fec.json")) {
            let (name, now) = (&vector["name"], Instant::now());
            let (stream, context) = (number(&vector["stream_id"]), number(&vector["context_id"]));
            let policy = vector["policy"].as_str().unwrap().parse().unwrap();
            let mut sender = Protection::new(stream, context, policy);
            sender.measure(&[view(PATH.0, 20 * MS, 0.0)]);
            let source = vector["source_packets"].as_array().unwrap();
            for packet in source {
                let (label, bytes) = (tests::label(packet), vectors::bytes(&packet["packet"]));
                let (datagram, group) = sender.frame(now, PATH, &label, &bytes, Load::Light).unwrap();
                assert_eq!(
                    (json!(hex(&datagram)), json!(group)),
                    (packet["hex"].clone(), vector["group"].clone())
                );
            }
            let repair = std::iter::from_fn(|| sender.next_repair(now, PATH));
            let repair: Vec<_> = repair.map(|repair| hex(&repair.data)).collect();
            assert_eq!(json!(repair), vector["repair_packets"], "repair of {name}");

            let mut receiver = Protection::new(stream, context, Fec::Off);
            let lost: Vec<_> = vector["lost"].as_array().unwrap().iter().map(number).collect();
            let (lost, came): (Vec<_>, Vec<_>) =
                (0u64..).zip(source).partition(|(index, _)| lost.contains(index));
            for (_, packet) in came {
                receiver.take(now, vectors::bytes(&packet["hex"]).into());
            }
            for packet in vector["repair_packets"].as_array().unwrap() {
                assert_eq!(receiver.take(now, vectors::bytes(packet).into()), None);
            }
            let recovered = std::iter::from_fn(|| receiver.next_recovered());
            let mut recovered: Vec<_> = recovered.map(|content| content.to_vec()).collect();
            recovered.sort();
            let content =
                |packet: &Value| receiver.labelled_packet(&vectors::bytes(&packet["hex"]).into()).to_vec();
            let mut expected: Vec<_> = lost.iter().map(|(_, packet)| content(packet)).collect();
            expected.sort();
            assert_eq!(recovered, expected, "what is recovered of {name}");
        }
    }

    #[test]
    fn large_packets_are_as_long_as_their_repair() {
        let (mut sender, now) = (sender(), Instant::now());
        let around = sender.overhead_bytes().expect("repair is sent") + Label::LEN;
        let mut len = |bytes: usize| {
            let framed = sender.frame(now, PATH, &label(0), &vec![0; bytes], Load::Light);
            framed.expect("the path is protected").0.len()
        };
        assert_eq!(len(MIN_LONG_BYTES), around + MIN_LONG_BYTES);
        assert_eq!(len(MIN_LONG_BYTES - 1), around + MIN_LONG_BYTES - 1 - GroupPosition::REPAIR_OVERHEAD);
        assert_eq!(Protection::new(0, 10, Fec::Off).overhead_bytes(), None);
    }
}
