//! At the sender: puts packets into groups, and makes repair packets for them.

use std::collections::{BTreeMap, VecDeque};

use bytes::{BufMut, Bytes};
use derive_more::AddAssign;
use mpvpn_packet::Arena;
use mpvpn_types::{Duration, Instant, PathId, target::FEC};

use super::{GroupPosition, Load, RepairPlan, Symbol, code::Encoder};

/// Packets up to this size (bytes) form groups of their own, because a repair packet is as long as the
/// longest packet of its group. Larger: small packets pay for long repair; no measurement
/// (docs/design/fec.md).
const MAX_SMALL_PACKET: usize = 300;
/// Bytes of repair that may be saved up at most: about those of one group of large packets (11 packets of
/// 1472 bytes). Smaller: groups go without repair; larger: bursts of repair.
const MAX_SAVED_BYTES: f64 = 16_384.0;
/// How long a group waits to become full by default; [`GroupEncoder::set_wait`] sets a quarter of the round
/// trip. Shorter: small groups with more repair; longer: late repair.
const DEFAULT_WAIT: Duration = Duration::from_millis(5);
/// On a full path a group waits this many times as long: its packets have waited for longer anyway.
pub const FULL_PATH_WAIT_FACTOR: u32 = 3;
/// Repair packets that could not leave for this long are dropped, because retransmissions have arrived by
/// then on most paths.
const MAX_REPAIR_AGE: Duration = Duration::from_millis(100);

/// Counters of the sender, of one path or of all.
#[derive(AddAssign, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EncoderStats {
    /// Source packets in groups.
    pub protected: u64,
    /// Repair packets.
    pub repair_packets: u64,
    /// Bytes of repair packets.
    pub repair_bytes: u64,
}

/// Puts packets into groups, and makes repair packets for them.
#[derive(Debug, Default)]
pub struct GroupEncoder {
    /// The bytes in front of every datagram.
    prefix: Bytes,
    next: u16,
    paths: BTreeMap<PathId, ProtectedPath>,
    encoder: Encoder,
    arena: Arena,
    /// Counters of open paths that are not protected now.
    unprotected: BTreeMap<PathId, EncoderStats>,
    /// Counters of closed paths.
    closed: EncoderStats,
}

#[derive(Debug)]
struct ProtectedPath {
    plan: RepairPlan,
    stats: EncoderStats,
    /// How long a group may wait to become full.
    wait: Duration,
    /// Bytes of repair that may be sent now; a token bucket that source packets fill.
    saved: f64,
    /// The open group of small packets, and that of larger ones.
    open: [Option<OpenGroup>; 2],
    /// Empty lists of earlier groups, for reuse.
    spare: Vec<Vec<Bytes>>,
    /// Repair packets that wait to leave: when each was made, its group, and the datagram.
    ready: VecDeque<(Instant, u16, Bytes)>,
}

#[derive(Debug)]
struct OpenGroup {
    group: u16,
    since: Instant,
    packets: Vec<Bytes>,
    /// How many of them waited for available window.
    waited: usize,
}

impl OpenGroup {
    fn load(&self) -> Load {
        // An eighth may not have waited: packets of new flows go first, and a queue may be empty for a
        // moment.
        if self.waited * 8 >= self.packets.len() * 7 { Load::Full } else { Load::Light }
    }

    /// When the group is closed at the latest, if groups wait for `wait`: packets that waited in a queue may
    /// wait longer for their repair, and a larger group needs less of it.
    fn closes_at(&self, wait: Duration) -> Instant {
        self.since + if self.load() == Load::Full { wait * FULL_PATH_WAIT_FACTOR } else { wait }
    }
}

impl GroupEncoder {
    /// Before any path is protected; repair packets begin with `prefix`.
    pub fn new(prefix: &[u8]) -> Self {
        Self { prefix: Bytes::copy_from_slice(prefix), ..Self::default() }
    }

    /// Protects a path by the plan from now on, or no longer (`None`).
    pub fn set_plan(&mut self, path: PathId, plan: Option<&RepairPlan>) {
        let Self { paths, unprotected, .. } = self;
        let Some(plan) = plan else {
            unprotected.extend(paths.remove(&path).map(|protected| (path, protected.stats)));
            return;
        };
        let fresh = || ProtectedPath {
            plan: plan.clone(),
            stats: unprotected.remove(&path).unwrap_or_default(),
            wait: DEFAULT_WAIT,
            saved: 0.0,
            open: [None, None],
            spare: Vec::new(),
            ready: VecDeque::new(),
        };
        paths.entry(path).or_insert_with(fresh).plan = plan.clone();
    }

    /// Sets how long after their first packet the groups of a path are closed, unless they are full before;
    /// [`FULL_PATH_WAIT_FACTOR`] times as long while the path is full.
    pub fn set_wait(&mut self, path: PathId, wait: Duration) {
        if let Some(protected) = self.paths.get_mut(&path) {
            protected.wait = wait;
        }
    }

    /// Ends the protection of all paths that `keep` refuses.
    pub fn retain(&mut self, mut keep: impl FnMut(PathId) -> bool) {
        let ended = self.paths.extract_if(.., |id, _| !keep(*id));
        self.unprotected.extend(ended.map(|(id, protected)| (id, protected.stats)));
    }

    /// Keeps no counters of this path any more, which is closed.
    pub fn on_path_closed(&mut self, path: PathId) {
        self.set_plan(path, None);
        self.closed += self.unprotected.remove(&path).unwrap_or_default();
    }

    /// Whether packets of any path are protected.
    pub fn is_active(&self) -> bool {
        !self.paths.is_empty()
    }

    /// The group position of the next packet, of `len` bytes, on a path; `None` if the path is not protected.
    pub fn assign_position(&mut self, now: Instant, path: PathId, len: usize) -> Option<GroupPosition> {
        let protected = self.paths.get_mut(&path)?;
        let open = protected.open.get_mut(usize::from(len > MAX_SMALL_PACKET))?;
        let open = open.get_or_insert_with(|| {
            let group = self.next;
            self.next = self.next.wrapping_add(1);
            OpenGroup { group, since: now, packets: protected.spare.pop().unwrap_or_default(), waited: 0 }
        });
        Some(GroupPosition { group: open.group, symbol: Symbol::Source(open.packets.len() as u8) })
    }

    /// Adds the packet of the last [`Self::assign_position`] to its group; `load`: whether the packet waited
    /// for the path. Returns the group if that closes it.
    pub fn add_packet(
        &mut self,
        now: Instant,
        path: PathId,
        packet: Bytes,
        load: Load,
    ) -> Option<ClosedGroup> {
        let protected = self.paths.get_mut(&path)?;
        protected.saved =
            (protected.saved + packet.len() as f64 * protected.plan.max_share).min(MAX_SAVED_BYTES);
        protected.stats.protected += 1;
        let at = usize::from(packet.len() > MAX_SMALL_PACKET);
        let open = protected.open.get_mut(at)?.as_mut()?;
        // Repair of small packets costs little, and small packets are urgent: their groups never wait longer.
        let may_wait_longer = packet.len() > MAX_SMALL_PACKET && protected.plan.depends_on_load();
        open.waited += usize::from(load == Load::Full && may_wait_longer);
        open.packets.push(packet);
        let full = open.packets.len() >= protected.plan.max_group_size(open.load());
        if full { self.close(now, path, at) } else { None }
    }

    /// Closes the groups whose wait is over, and passes them to `closed`.
    pub fn close_due(&mut self, now: Instant, mut closed: impl FnMut(ClosedGroup)) {
        let due = |protected: &ProtectedPath| {
            let is_due = |open: &Option<OpenGroup>| {
                open.as_ref().is_some_and(|open| open.closes_at(protected.wait) <= now)
            };
            protected.open.iter().position(is_due)
        };
        while let Some((path, at)) =
            self.paths.iter().find_map(|(path, protected)| Some((*path, due(protected)?)))
        {
            if let Some(group) = self.close(now, path, at) {
                closed(group);
            }
        }
    }

    /// When [`Self::close_due`] has something to do.
    pub fn poll_timeout(&self) -> Option<Instant> {
        let closes_at = |protected: &ProtectedPath| {
            protected.open.iter().flatten().map(|open| open.closes_at(protected.wait)).min()
        };
        self.paths.values().filter_map(closes_at).min()
    }

    fn close(&mut self, now: Instant, path: PathId, at: usize) -> Option<ClosedGroup> {
        let Self { paths, encoder, arena, prefix, .. } = self;
        let protected = paths.get_mut(&path)?;
        let open = protected.open.get_mut(at)?.take()?;
        let load = open.load();
        let OpenGroup { group, mut packets, .. } = open;
        let data = packets.len() as u8;
        let longest = packets.iter().map(Bytes::len).max().unwrap_or(0) as f64;
        // The savings may be overdrawn by less than one repair packet.
        let affordable = (protected.saved / longest.max(1.0)).ceil().max(0.0) as u8;
        let repair = protected.plan.repair_count(packets.len(), load).min(affordable);
        protected.saved -= f64::from(repair) * longest;
        for (index, repair_packet) in (0..).zip(encoder.encode(&packets, repair)) {
            let position = GroupPosition { group, symbol: Symbol::Repair { index, source_count: data } };
            let room = arena.reserve(prefix.len() + GroupPosition::LEN + 1 + repair_packet.len());
            room.put_slice(prefix);
            position.encode(room);
            room.put_slice(repair_packet);
            protected.ready.push_back((now, group, arena.take()));
        }
        packets.clear();
        protected.spare.push(packets);
        tracing::trace!(
            target: FEC,
            path = path.0,
            group,
            data,
            repair,
            affordable,
            ?load,
            "a group is closed"
        );
        Some(ClosedGroup { path, group, source_count: data, repair_count: repair })
    }

    /// Whether a repair packet waits on any path.
    pub fn has_repair(&self) -> bool {
        self.paths.values().any(|protected| !protected.ready.is_empty())
    }

    /// The next repair packet for a path, with the number of its group.
    pub fn next_repair(&mut self, now: Instant, path: PathId) -> Option<(u16, Bytes)> {
        let ProtectedPath { ready, stats, .. } = self.paths.get_mut(&path)?;
        while ready.pop_front_if(|(made, ..)| now.saturating_duration_since(*made) > MAX_REPAIR_AGE).is_some()
        {
        }
        let (_, group, datagram) = ready.pop_front()?;
        stats.repair_packets += 1;
        stats.repair_bytes += datagram.len() as u64;
        Some((group, datagram))
    }

    /// The counters of all paths since the start.
    pub fn stats(&self) -> EncoderStats {
        let mut all = self.closed;
        let protected = self.paths.values().map(|protected| &protected.stats);
        protected.chain(self.unprotected.values()).for_each(|stats| all += *stats);
        all
    }

    /// The counters of an open path.
    pub fn stats_of(&self, path: PathId) -> EncoderStats {
        let protected = self.paths.get(&path).map(|protected| protected.stats);
        protected.or_else(|| self.unprotected.get(&path).copied()).unwrap_or_default()
    }

    /// The share of repair on a path, in percent of the data; 0 without protection.
    pub fn repair_percent_of(&self, path: PathId) -> u8 {
        self.paths.get(&path).map_or(0, |protected| protected.plan.repair_percent())
    }

    /// The highest share of repair among the paths, in percent of the data.
    pub fn max_repair_percent(&self) -> u8 {
        self.paths.values().map(|protected| protected.plan.repair_percent()).max().unwrap_or(0)
    }

    /// Frees memory that is not in use.
    pub fn trim_memory(&mut self) {
        self.arena.release();
        self.encoder = Encoder::default();
        for protected in self.paths.values_mut() {
            protected.spare = Vec::new();
        }
    }
}

/// A group that takes no more packets, with its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClosedGroup {
    /// Its path.
    pub path: PathId,
    /// The number of the group.
    pub group: u16,
    /// Source packets.
    pub source_count: u8,
    /// Repair packets that follow.
    pub repair_count: u8,
}

#[cfg(test)]
mod tests {
    use mpvpn_types::Fec;

    use super::*;
    use crate::fec::LossMonitor;

    const MS: Duration = Duration::from_millis(1);

    fn guard(fec: Fec, loss: f64, paths: u32) -> GroupEncoder {
        let mut guard = GroupEncoder::new(&[0, 10]);
        for path in 0..paths {
            let mut watch = LossMonitor::default();
            guard.set_plan(PathId(path), watch.update(fec, loss).flatten());
        }
        guard
    }

    fn send(
        guard: &mut GroupEncoder,
        now: Instant,
        path: u32,
        len: usize,
    ) -> (GroupPosition, Option<ClosedGroup>) {
        let position = guard.assign_position(now, PathId(path), len).expect("protected");
        (position, guard.add_packet(now, PathId(path), vec![1; len].into(), Load::Light))
    }

    fn ready(guard: &mut GroupEncoder, now: Instant, path: u32) -> usize {
        std::iter::from_fn(|| guard.next_repair(now, PathId(path))).count()
    }

    #[test]
    fn a_group_stays_on_its_path_and_has_its_repair_there() {
        let now = Instant::now();
        let mut guard = guard(Fec::Fixed { data: 4, repair: 2 }, 0.0, 2);
        let mut groups = [Vec::new(), Vec::new()];
        for n in 0..8 {
            let (position, closed) = send(&mut guard, now, n % 2, 1000);
            groups[(n % 2) as usize].push(position);
            assert_eq!(closed.is_some(), n >= 6);
        }
        for (path, places) in groups.iter().enumerate() {
            let expected = |index| GroupPosition { group: path as u16, symbol: Symbol::Source(index) };
            assert_eq!(places[..], [0, 1, 2, 3].map(expected));
            assert_eq!(ready(&mut guard, now, path as u32), 2);
        }
        assert!(!guard.has_repair());
        assert_eq!(
            guard.stats(),
            EncoderStats { protected: 8, repair_packets: 4, repair_bytes: 4 * (2 + 4 + 1002) }
        );
    }

    #[test]
    fn counters_of_a_path_outlive_its_protection_and_those_of_all_outlive_the_path() {
        let now = Instant::now();
        let mut guard = guard(Fec::Fixed { data: 2, repair: 1 }, 0.0, 2);
        let plan = guard.paths[&PathId(0)].plan.clone();
        for path in [0, 0, 1, 1] {
            send(&mut guard, now, path, 1000);
        }
        assert_eq!([ready(&mut guard, now, 0), ready(&mut guard, now, 1)], [1, 1]);
        let one = EncoderStats { protected: 2, repair_packets: 1, repair_bytes: 2 + 4 + 1002 };
        let both = EncoderStats { protected: 4, repair_packets: 2, repair_bytes: 2 * one.repair_bytes };
        assert_eq!((guard.stats_of(PathId(0)), guard.stats_of(PathId(2))), (one, EncoderStats::default()));
        assert_eq!((guard.repair_percent_of(PathId(0)), guard.stats()), (50, both));
        guard.retain(|path| path == PathId(1));
        assert_eq!((guard.stats_of(PathId(0)), guard.repair_percent_of(PathId(0))), (one, 0));
        guard.set_plan(PathId(0), Some(&plan));
        send(&mut guard, now, 0, 1000);
        assert_eq!(guard.stats_of(PathId(0)).protected, 3);
        guard.on_path_closed(PathId(0));
        guard.on_path_closed(PathId(1));
        assert_eq!(guard.stats_of(PathId(0)), EncoderStats::default());
        assert_eq!(guard.stats(), EncoderStats { protected: 5, ..both });
        assert!(guard.unprotected.is_empty());
    }

    #[test]
    fn a_group_that_does_not_become_full_is_closed_in_time() {
        let now = Instant::now();
        let mut guard = guard(Fec::Fixed { data: 10, repair: 5 }, 0.0, 1);
        send(&mut guard, now, 0, 1000);
        send(&mut guard, now + MS, 0, 1000);
        assert_eq!(guard.poll_timeout(), Some(now + 5 * MS));
        let mut closed = Vec::new();
        guard.close_due(now + 4 * MS, |group| closed.push(group));
        assert_eq!(closed, []);
        guard.close_due(now + 5 * MS, |group| closed.push(group));
        assert_eq!(closed, [ClosedGroup { path: PathId(0), group: 0, source_count: 2, repair_count: 1 }]);
        assert_eq!(guard.poll_timeout(), None);
        assert_eq!(ready(&mut guard, now + 5 * MS, 0), 1);
    }

    #[test]
    fn a_group_of_a_full_path_waits_longer_and_grows_larger() {
        let now = Instant::now();
        let put = |guard: &mut GroupEncoder, at: u32, len: usize, load| {
            guard.assign_position(now + at * MS / 10, PathId(0), len).expect("protected");
            guard.add_packet(now + at * MS / 10, PathId(0), vec![1; len].into(), load)
        };
        let mut crowded = guard(Fec::Auto, 0.12, 1);
        for n in 0..31 {
            // One of them overtook the others.
            let load = if n == 20 { Load::Light } else { Load::Full };
            assert_eq!(put(&mut crowded, n, 1000, load), None);
            assert_eq!(crowded.poll_timeout(), Some(now + DEFAULT_WAIT * FULL_PATH_WAIT_FACTOR));
        }
        assert_eq!(
            put(&mut crowded, 31, 1000, Load::Full),
            Some(ClosedGroup { path: PathId(0), group: 0, source_count: 32, repair_count: 6 })
        );

        let mut left = guard(Fec::Auto, 0.12, 1);
        assert!((0..24).all(|n| put(&mut left, n, 1000, Load::Full).is_none()));
        assert!((24..27).all(|n| put(&mut left, n, 1000, Load::Light).is_none()));
        let closed = put(&mut left, 27, 1000, Load::Light);
        assert_eq!(
            closed,
            Some(ClosedGroup { path: PathId(0), group: 0, source_count: 28, repair_count: 6 }),
            "there is room again"
        );

        let mut small = guard(Fec::Auto, 0.12, 1);
        let mut fixed = guard(Fec::Fixed { data: 20, repair: 5 }, 0.0, 1);
        for (guard, len) in [(&mut small, 100), (&mut fixed, 1000)] {
            assert!((0..19).all(|n| put(guard, n, len, Load::Full).is_none()));
            assert_eq!(guard.poll_timeout(), Some(now + DEFAULT_WAIT));
            assert_eq!(put(guard, 19, len, Load::Full).map(|closed| closed.source_count), Some(20));
        }
    }

    #[test]
    fn repair_is_bounded_whatever_the_packets() {
        for (len, apart) in [(1400, 0u32), (1400, 20), (100, 20), (0, 1)] {
            let start = Instant::now();
            let mut guard = guard(Fec::Auto, 0.4, 1);
            let (mut data, mut repair) = (0, 0);
            for n in 0..3000u32 {
                let now = start + n * apart * MS;
                let len = if len == 0 { 60 + 1300 * (n as usize % 2) } else { len };
                guard.close_due(now, |_| {});
                send(&mut guard, now, 0, len);
                data += len;
                while let Some((_, datagram)) = guard.next_repair(now, PathId(0)) {
                    repair += datagram.len();
                }
            }
            let share = repair as f64 / data as f64;
            assert!((0.2..0.4).contains(&share), "{share} of packets of {len} bytes {apart} ms apart");
        }
    }

    #[test]
    fn small_packets_have_groups_of_their_own() {
        let now = Instant::now();
        let mut guard = guard(Fec::Fixed { data: 4, repair: 1 }, 0.0, 1);
        let groups: Vec<u16> = [60, 1400, 60, 1400].map(|len| send(&mut guard, now, 0, len).0.group).into();
        assert_eq!(groups, [0, 1, 0, 1]);
    }

    #[test]
    fn repair_packets_that_waited_too_long_are_dropped() {
        let now = Instant::now();
        let mut guard = guard(Fec::Fixed { data: 1, repair: 1 }, 0.0, 1);
        send(&mut guard, now, 0, 1000);
        assert!(guard.has_repair());
        assert_eq!(ready(&mut guard, now + MAX_REPAIR_AGE * 2, 0), 0);
    }
}
