//! Packets of paths that lose some are put into groups with packets of repair, and what was lost of the far
//! end's groups is restored.

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

/// In the mark of a datagram, beside the number of its group: it is repair.
const REPAIR: u32 = 1 << 16;
/// Packets from this size on (bytes) are made as long as repair for them is. Path MTU discovery takes it for
/// a smaller MTU when several packets are lost after one that was a little longer arrived, which is so all
/// the time where much is lost; it leaves out packets up to 1200 bytes.
const LONG: usize = 1100;
/// A group waits to become full for this part of a round trip: less than it takes to send what was lost
/// again.
const WAIT_PART: u32 = 4;
/// At least and at most so long.
const WAIT: (Duration, Duration) = (Duration::from_millis(4), Duration::from_millis(20));
/// What becomes of a group is known within this after the first loss, and the time that groups wait:
/// acknowledgements of its packets and its repair come one after the other.
const HOLD: Duration = Duration::from_millis(15);

/// What was sent for repair, and what came of that of the far end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FecCounters {
    /// Repair that paths get now, in percent of the packets, at most; 0 if none is protected.
    pub percent: u8,
    /// Packets sent in groups.
    pub protected: u64,
    /// Packets of repair sent.
    pub repairs: u64,
    /// Their bytes.
    pub repair_bytes: u64,
    /// Packets that were lost on the way to the far end and not sent again, because it has restored them.
    pub made_good: u64,
    /// Packets that the far end sent, that were lost, and that were restored.
    pub recovered: u64,
    /// Packets of repair that came and were not needed.
    pub wasted: u64,
    /// Groups of the far end that lost more than could be restored.
    pub unrecoverable: u64,
}

#[derive(Debug)]
pub(super) struct Protection {
    prefix: DatagramPrefix,
    /// The same in a form that makes up for what repair is longer by, for large packets.
    long: Option<DatagramPrefix>,
    fec: Fec,
    watches: BTreeMap<PathId, LossMonitor>,
    guard: GroupEncoder,
    fates: GroupOutcomes<TrackedDatagram>,
    /// How long the fate of a group may be unknown once something of it was lost.
    hold: Duration,
    /// What was lost for good, to be sent again.
    lost: VecDeque<TrackedDatagram>,
    restorer: GroupDecoder,
    restored: VecDeque<Bytes>,
    arena: Arena,
}

impl Protection {
    pub(super) fn new(stream: u64, context: u64, fec: Fec) -> Self {
        let prefix = datagram::prefix(stream, context);
        Self {
            guard: GroupEncoder::new(prefix.as_ref()),
            prefix,
            long: datagram::long_prefix(stream, context, GroupPosition::REPAIR_OVERHEAD),
            fec,
            watches: BTreeMap::new(),
            fates: GroupOutcomes::new(),
            hold: HOLD,
            lost: VecDeque::new(),
            restorer: GroupDecoder::new(),
            restored: VecDeque::new(),
            arena: Arena::new(),
        }
    }

    /// Bytes that stand in front of the label of a protected packet, and what repair is longer by; the same
    /// whether packets are protected just now or not, so that the MTU stays.
    pub(super) fn around(&self) -> Option<usize> {
        (self.fec != Fec::Off)
            .then(|| self.prefix.as_ref().len() + GroupPosition::LEN + GroupPosition::REPAIR_OVERHEAD)
    }

    pub(super) fn is_on(&self) -> bool {
        self.guard.is_active()
    }

    pub(super) fn protects(&self, path: PathId) -> bool {
        self.guard.protects(path)
    }

    /// Takes over what was measured about the paths in use.
    pub(super) fn measure(&mut self, views: &[PathStats]) {
        let used = |id: PathId| views.iter().any(|view| view.id == id);
        self.guard.retain(used);
        self.watches.retain(|id, _| used(*id));
        for view in views {
            if let Some(plan) = self.watches.entry(view.id).or_default().update(self.fec, loss_of(view)) {
                let percent = plan.map(RepairPlan::repair_percent);
                tracing::debug!(
                    target: FEC,
                    path = view.id.0,
                    percent,
                    loss = view.loss,
                    random_loss = view.random_loss,
                    policy = %self.fec,
                    "a path gets another share of repair"
                );
                self.guard.set_plan(view.id, plan);
            }
            self.guard.set_wait(view.id, (view.rtt / WAIT_PART).clamp(WAIT.0, WAIT.1));
        }
        let slowest = views.iter().map(|view| view.rtt).max().unwrap_or_default();
        self.hold = HOLD + (slowest / WAIT_PART).min(WAIT.1) * FULL_PATH_WAIT_FACTOR;
    }

    /// The datagram of a packet that leaves on a path, and its mark, if that path is protected; `load` is
    /// what it met.
    pub(super) fn frame(
        &mut self,
        now: Instant,
        path: PathId,
        label: &Label,
        packet: &[u8],
        load: Load,
    ) -> Option<(Bytes, u32)> {
        let place = self.guard.assign_position(now, path, Label::LEN + packet.len())?;
        let prefix = self.long.as_ref().filter(|_| packet.len() >= LONG).unwrap_or(&self.prefix).as_ref();
        let room = self.arena.reserve(prefix.len() + GroupPosition::LEN + Label::LEN + packet.len());
        room.extend_from_slice(prefix);
        place.encode(room);
        label.encode(room);
        room.extend_from_slice(packet);
        let data = self.arena.take();
        if place.symbol == Symbol::Source(0) {
            self.fates.open(place.group);
        }
        let Self { guard, fates, lost, .. } = self;
        if let Some(closed) =
            guard.add_packet(now, path, data.slice(prefix.len() + GroupPosition::LEN..), load)
        {
            fates.close(closed, |datagram| lost.push_back(datagram));
        }
        Some((data, place.group.into()))
    }

    /// The bytes of the prefix of a datagram; `None` if it has another one than ours.
    fn behind_prefix(&self, datagram: &[u8]) -> Option<usize> {
        let both = [Some(&self.prefix), self.long.as_ref()].into_iter().flatten();
        both.map(AsRef::as_ref).find(|prefix| datagram.starts_with(prefix)).map(<[u8]>::len)
    }

    /// What stands behind the place in a protected datagram: label and packet.
    fn inside(&self, datagram: &Bytes) -> Bytes {
        let prefix = self.behind_prefix(datagram).unwrap_or(0);
        datagram.slice((prefix + GroupPosition::LEN).min(datagram.len())..)
    }

    /// Takes note of the arrival of a datagram with a mark.
    pub(super) fn arrived(&mut self, mark: u32) {
        let lost = &mut self.lost;
        self.fates.on_arrived(mark as u16, |datagram| lost.push_back(datagram));
    }

    /// The same of one that was lost.
    pub(super) fn lost(&mut self, now: Instant, datagram: TrackedDatagram) {
        let Some(mark) = datagram.ack_token else { return };
        let packet = (mark & REPAIR == 0).then_some(datagram);
        let Self { fates, lost, hold, .. } = self;
        fates.on_lost(now, mark as u16, packet, *hold, |datagram| lost.push_back(datagram));
    }

    /// Closes groups whose time has come, and gives up waiting for the fates of others.
    pub(super) fn handle_timeout(&mut self, now: Instant) {
        let Self { guard, fates, lost, .. } = self;
        guard.close_due(now, |closed| fates.close(closed, |datagram| lost.push_back(datagram)));
        fates.handle_timeout(now, |datagram| lost.push_back(datagram));
    }

    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        self.guard.poll_timeout().into_iter().chain(self.fates.poll_timeout()).min()
    }

    /// The next datagram that the far end cannot restore; its data is without prefix and place.
    pub(super) fn next_lost(&mut self) -> Option<TrackedDatagram> {
        let datagram = self.lost.pop_front()?;
        self.bare(datagram)
    }

    /// A datagram without prefix and place; `None` if it is repair.
    pub(super) fn bare(&self, datagram: TrackedDatagram) -> Option<TrackedDatagram> {
        match datagram.ack_token {
            Some(mark) if mark & REPAIR != 0 => None,
            Some(_) => {
                Some(TrackedDatagram { data: self.inside(&datagram.data), ack_token: None, ..datagram })
            }
            None => Some(datagram),
        }
    }

    pub(super) fn has_repair(&self) -> bool {
        self.guard.has_repair()
    }

    /// The next datagram of repair for a path.
    pub(super) fn next_repair(&mut self, now: Instant, path: PathId) -> Option<TrackedDatagram> {
        let (group, data) = self.guard.next_repair(now, path)?;
        Some(TrackedDatagram {
            data,
            first_sent: now,
            retransmissions: 0,
            has_copy: false,
            ack_token: Some(REPAIR | u32::from(group)),
        })
    }

    pub(super) fn is_own(&self, datagram: &[u8]) -> bool {
        self.behind_prefix(datagram).is_some()
    }

    /// Label and packet of a datagram that arrived; `None` if it is repair, or malformed. What it restores
    /// comes out of [`Self::next_recovered`].
    pub(super) fn take(&mut self, now: Instant, mut datagram: Bytes) -> Option<Bytes> {
        datagram.advance(self.behind_prefix(&datagram)?);
        let (place, len) = GroupPosition::decode(&datagram).ok()?;
        datagram.advance(len);
        let restored = &mut self.restored;
        self.restorer.push(now, place, &datagram, |packet| restored.push_back(packet));
        matches!(place.symbol, Symbol::Source(_)).then_some(datagram)
    }

    /// The next label and packet that was restored.
    pub(super) fn next_recovered(&mut self) -> Option<Bytes> {
        self.restored.pop_front()
    }

    pub(super) fn counters(&self) -> FecCounters {
        let (sent, came) = (self.guard.stats(), self.restorer.stats());
        FecCounters {
            percent: self.guard.max_repair_percent(),
            protected: sent.protected,
            repairs: sent.repair_packets,
            repair_bytes: sent.repair_bytes,
            made_good: self.fates.restored_losses(),
            recovered: came.recovered,
            wasted: came.wasted,
            unrecoverable: came.unrecoverable,
        }
    }

    /// Gives back memory that is not in use.
    pub(super) fn rest(&mut self) {
        self.arena.release();
        self.guard.trim_memory();
        self.restorer.clear();
    }
}

/// The share of packets that repair is made for: what is lost because too many are sent becomes more by
/// repair, and is left to the congestion controller where that can tell.
fn loss_of(view: &PathStats) -> f64 {
    view.random_loss.map_or(view.loss, |random| view.loss.min(random))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{
        super::testing::{self, Received, check_datagrams, prefix, view},
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
            let (bytes, mark) = framed.expect("the path is protected");
            let mark = Some(mark);
            data.push(TrackedDatagram {
                data: bytes,
                first_sent: now,
                retransmissions: 0,
                has_copy: false,
                ack_token: mark,
            });
        }
        let repair = std::iter::from_fn(|| sender.next_repair(now, PATH)).collect();
        (data, repair)
    }

    fn arrive(sender: &mut Protection, receiver: &mut Protection, now: Instant, datagram: &TrackedDatagram) {
        assert!(receiver.is_own(&datagram.data));
        receiver.take(now, datagram.data.clone());
        sender.arrived(datagram.ack_token.expect("it is in a group"));
    }

    #[test]
    fn what_is_lost_is_restored_at_the_far_end_and_not_sent_again() {
        let (mut sender, mut receiver, now) = (sender(), Protection::new(0, 10, Fec::Off), Instant::now());
        let (data, repair) = group(&mut sender, now);
        assert_eq!(repair.len(), 2);
        sender.lost(now, data[1].clone());
        for datagram in [&data[0], &data[2], &data[3], &repair[0]] {
            arrive(&mut sender, &mut receiver, now, datagram);
        }
        let restored = receiver.next_recovered().expect("one is restored");
        let (label, payload) = super::super::resequencer::split_label(restored).expect("with its label");
        assert_eq!((label.number, &payload[..]), (1, &[1; 100][..]));
        sender.handle_timeout(now + 1000 * MS);
        assert_eq!((receiver.next_recovered(), sender.next_lost()), (None, None));
        assert_eq!((sender.counters().made_good, receiver.counters().recovered), (1, 1));
    }

    #[test]
    fn more_than_repair_makes_good_is_sent_again_outside_of_groups() {
        let (mut sender, mut receiver, now) = (sender(), Protection::new(0, 10, Fec::Off), Instant::now());
        let (data, repair) = group(&mut sender, now);
        arrive(&mut sender, &mut receiver, now, &data[0]);
        data[1..].iter().chain(&repair[1..]).for_each(|datagram| sender.lost(now, datagram.clone()));
        let lost: Vec<TrackedDatagram> = std::iter::from_fn(|| sender.next_lost()).collect();
        assert_eq!(lost.len(), 3, "repair is not repeated");
        assert!(lost.iter().all(|lost| lost.ack_token.is_none() && lost.data.len() == Label::LEN + 100));
        assert_eq!(receiver.next_recovered(), None);
    }

    #[test]
    fn a_loss_in_a_group_of_which_nothing_more_is_learned_is_sent_again_after_some_time() {
        let (mut sender, now) = (sender(), Instant::now());
        let (data, _) = group(&mut sender, now);
        sender.lost(now, data[2].clone());
        assert!(sender.next_lost().is_none());
        let due = sender.poll_timeout().expect("its fate is followed");
        assert!((HOLD..HOLD + WAIT.1 * FULL_PATH_WAIT_FACTOR).contains(&(due - now)), "{:?}", due - now);
        sender.handle_timeout(due);
        assert!(sender.next_lost().is_some());
    }

    #[test]
    fn places_in_groups_are_those_of_the_vectors() {
        let parse = |received: Received<'_>| {
            let (place, len) = GroupPosition::decode(received.payload).ok()?;
            let (index, size) = match place.symbol {
                Symbol::Source(index) => (index, None),
                Symbol::Repair { index, source_count: data } => (index, Some(data)),
            };
            let protection = Protection::new(received.stream, received.context, Fec::Off);
            assert!(protection.is_own(received.bytes));
            let content = hex(&received.payload[len..]);
            Some(json!({ "group": place.group, "index": index, "size": size, "content": content }))
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
                let (label, bytes) = (testing::label(packet), vectors::bytes(&packet["packet"]));
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
            let restored = std::iter::from_fn(|| receiver.next_recovered());
            let mut restored: Vec<_> = restored.map(|content| content.to_vec()).collect();
            restored.sort();
            let content = |packet: &Value| receiver.inside(&vectors::bytes(&packet["hex"]).into()).to_vec();
            let mut expected: Vec<_> = lost.iter().map(|(_, packet)| content(packet)).collect();
            expected.sort();
            assert_eq!(restored, expected, "what is restored of {name}");
        }
    }

    #[test]
    fn large_packets_are_as_long_as_their_repair() {
        let (mut sender, now) = (sender(), Instant::now());
        let around = sender.around().expect("repair is sent") + Label::LEN;
        let mut len = |bytes: usize| {
            let framed = sender.frame(now, PATH, &label(0), &vec![0; bytes], Load::Light);
            framed.expect("the path is protected").0.len()
        };
        assert_eq!(len(LONG), around + LONG);
        assert_eq!(len(LONG - 1), around + LONG - 1 - GroupPosition::REPAIR_OVERHEAD);
        assert_eq!(Protection::new(0, 10, Fec::Off).around(), None);
    }
}
