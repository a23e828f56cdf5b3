//! Packets of paths that lose some are put into groups with packets of repair, and what was lost of the far end's groups is
//! restored.

use std::collections::{BTreeMap, VecDeque};

use bytes::{Buf, Bytes};
use mpvpn_lane::{
    Label,
    fec::{FULL_WAIT, Fates, Guard, Load, Place, Plan, Restorer, Shard, Watch},
};
use mpvpn_masque::datagram::{self, DatagramPrefix};
use mpvpn_packet::Arena;
use mpvpn_quic::{PathView, Tracked};
use mpvpn_types::{Duration, Fec, Instant, PathId};

/// In the mark of a datagram, beside the number of its group: it is repair.
const REPAIR: u32 = 1 << 16;
/// Packets from this size on (bytes) are made as long as repair for them is. Path MTU discovery takes it for a smaller MTU
/// when several packets are lost after one that was a little longer arrived, which is so all the time where much is lost;
/// it leaves out packets up to 1200 bytes.
const LONG: usize = 1100;
/// A group waits to become full for this part of a round trip: less than it takes to send what was lost again.
const WAIT_PART: u32 = 4;
/// At least and at most so long.
const WAIT: (Duration, Duration) = (Duration::from_millis(4), Duration::from_millis(20));
/// What becomes of a group is known within this after the first loss, and the time that groups wait: acknowledgements of
/// its packets and its repair come one after the other.
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
    watches: BTreeMap<PathId, Watch>,
    guard: Guard,
    fates: Fates<Tracked>,
    /// How long the fate of a group may be unknown once something of it was lost.
    hold: Duration,
    /// What was lost for good, to be sent again.
    lost: VecDeque<Tracked>,
    restorer: Restorer,
    restored: VecDeque<Bytes>,
    arena: Arena,
}

impl Protection {
    pub(super) fn new(stream: u64, context: u64, fec: Fec) -> Self {
        let prefix = datagram::prefix(stream, context);
        Self {
            guard: Guard::new(prefix.as_ref()),
            prefix,
            long: datagram::long_prefix(stream, context, Place::REPAIR_EXTRA),
            fec,
            watches: BTreeMap::new(),
            fates: Fates::new(),
            hold: HOLD,
            lost: VecDeque::new(),
            restorer: Restorer::new(),
            restored: VecDeque::new(),
            arena: Arena::new(),
        }
    }

    /// Bytes that stand in front of the label of a protected packet, and what repair is longer by; the same whether
    /// packets are protected just now or not, so that the MTU stays.
    pub(super) fn around(&self) -> Option<usize> {
        (self.fec != Fec::Off).then(|| self.prefix.as_ref().len() + Place::LEN + Place::REPAIR_EXTRA)
    }

    pub(super) fn is_on(&self) -> bool {
        self.guard.is_on()
    }

    pub(super) fn protects(&self, path: PathId) -> bool {
        self.guard.protects(path)
    }

    /// Takes over what was measured about the paths in use.
    pub(super) fn measure(&mut self, views: &[PathView]) {
        let used = |id: PathId| views.iter().any(|view| view.id == id);
        self.guard.retain(used);
        self.watches.retain(|id, _| used(*id));
        for view in views {
            if let Some(plan) = self.watches.entry(view.id).or_default().measured(self.fec, loss_of(view)) {
                let percent = plan.map(Plan::percent);
                tracing::debug!(path = view.id.0, loss = view.loss, ?percent, "repair");
                self.guard.set(view.id, plan);
            }
            self.guard.set_wait(view.id, (view.rtt / WAIT_PART).clamp(WAIT.0, WAIT.1));
        }
        let slowest = views.iter().map(|view| view.rtt).max().unwrap_or_default();
        self.hold = HOLD + (slowest / WAIT_PART).min(WAIT.1) * FULL_WAIT;
    }

    /// The datagram of a packet that leaves on a path, and its mark, if that path is protected; `load` is what it met.
    pub(super) fn frame(
        &mut self,
        now: Instant,
        path: PathId,
        label: &Label,
        packet: &[u8],
        load: Load,
    ) -> Option<(Bytes, u32)> {
        let place = self.guard.place(now, path, Label::LEN + packet.len())?;
        let prefix = self.long.as_ref().filter(|_| packet.len() >= LONG).unwrap_or(&self.prefix).as_ref();
        let room = self.arena.room(prefix.len() + Place::LEN + Label::LEN + packet.len());
        room.extend_from_slice(prefix);
        place.encode(room);
        label.encode(room);
        room.extend_from_slice(packet);
        let data = self.arena.take();
        if place.shard == Shard::Data(0) {
            self.fates.open(place.group);
        }
        let Self { guard, fates, lost, .. } = self;
        if let Some(closed) = guard.put(now, path, data.slice(prefix.len() + Place::LEN..), load) {
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
        datagram.slice((prefix + Place::LEN).min(datagram.len())..)
    }

    /// Takes note of the arrival of a datagram with a mark.
    pub(super) fn arrived(&mut self, mark: u32) {
        let lost = &mut self.lost;
        self.fates.arrived(mark as u16, |datagram| lost.push_back(datagram));
    }

    /// The same of one that was lost.
    pub(super) fn lost(&mut self, now: Instant, datagram: Tracked) {
        let Some(mark) = datagram.mark else { return };
        let packet = (mark & REPAIR == 0).then_some(datagram);
        let Self { fates, lost, hold, .. } = self;
        fates.lost(now, mark as u16, packet, *hold, |datagram| lost.push_back(datagram));
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
    pub(super) fn next_lost(&mut self) -> Option<Tracked> {
        let datagram = self.lost.pop_front()?;
        self.bare(datagram)
    }

    /// A datagram without prefix and place; `None` if it is repair.
    pub(super) fn bare(&self, datagram: Tracked) -> Option<Tracked> {
        match datagram.mark {
            Some(mark) if mark & REPAIR != 0 => None,
            Some(_) => Some(Tracked { data: self.inside(&datagram.data), mark: None, ..datagram }),
            None => Some(datagram),
        }
    }

    pub(super) fn has_repair(&self) -> bool {
        self.guard.has_ready()
    }

    /// The next datagram of repair for a path.
    pub(super) fn next_repair(&mut self, now: Instant, path: PathId) -> Option<Tracked> {
        let (group, data) = self.guard.next_repair(now, path)?;
        Some(Tracked { data, born: now, tries: 0, copied: false, mark: Some(REPAIR | u32::from(group)) })
    }

    pub(super) fn is_own(&self, datagram: &[u8]) -> bool {
        self.behind_prefix(datagram).is_some()
    }

    /// Label and packet of a datagram that arrived; `None` if it is repair, or malformed. What it restores comes out of
    /// [`Self::next_restored`].
    pub(super) fn take(&mut self, now: Instant, mut datagram: Bytes) -> Option<Bytes> {
        datagram.advance(self.behind_prefix(&datagram)?);
        let (place, len) = Place::decode(&datagram).ok()?;
        datagram.advance(len);
        let restored = &mut self.restored;
        self.restorer.push(now, place, &datagram, |packet| restored.push_back(packet));
        matches!(place.shard, Shard::Data(_)).then_some(datagram)
    }

    /// The next label and packet that was restored.
    pub(super) fn next_restored(&mut self) -> Option<Bytes> {
        self.restored.pop_front()
    }

    pub(super) fn counters(&self) -> FecCounters {
        let (sent, came) = (self.guard.stats(), self.restorer.stats());
        FecCounters {
            percent: self.guard.percent(),
            protected: sent.protected,
            repairs: sent.repairs,
            repair_bytes: sent.repair_bytes,
            made_good: self.fates.made_good(),
            recovered: came.recovered,
            wasted: came.wasted,
            unrecoverable: came.unrecoverable,
        }
    }

    /// Gives back memory that is not in use.
    pub(super) fn rest(&mut self) {
        self.arena.release();
        self.guard.rest();
        self.restorer.rest();
    }
}

/// The share of packets that repair is made for: what is lost because too many are sent becomes more by repair, and is left
/// to the congestion controller where that can tell.
fn loss_of(view: &PathView) -> f64 {
    view.random_loss.map_or(view.loss, |random| view.loss.min(random))
}
