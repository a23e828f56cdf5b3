use std::collections::BTreeMap;

use mpvpn_class::{FqCodel, QueueConfig, QueuedPacket};
use mpvpn_types::{Duration, Instant, LinkId, PathId, target::SCHEDULER};

use crate::{PathState, Scheduler, flows::PinnedFlows};

/// The state of a path, as the dispatcher sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathInfo {
    /// The path's number in its connection.
    pub id: PathId,
    /// The link that it runs over; a smaller number comes first under [`Scheduler::Failover`].
    pub link: LinkId,
    /// Whether it may carry data.
    pub state: PathState,
    /// Smoothed round-trip time.
    pub rtt: Duration,
    /// Estimated delivery rate in bytes/s; 0 if not known yet.
    pub rate: u64,
    /// How much of its capacity is in use.
    pub utilization: Utilization,
}

/// How much of a path's capacity was in use lately.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Utilization {
    /// Packets hardly ever waited for the path: it could carry more.
    Spare,
    /// Neither spare nor full.
    Partial,
    /// Packets waited for the path all the time.
    Full,
}

/// Which of the waiting packets a path may carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EligiblePackets {
    /// All: no other path would deliver earlier.
    Any,
    /// Not those of flows that send little: they wait for the path that delivers first, which is another one.
    OldFlows,
    /// Only those of old flows whose order the peer restores, so that it may hold others for them.
    OrderedFlows,
    /// Only those of flows that send little, or have just begun.
    NewFlows,
    /// Only those of flows that are pinned to this path.
    Pinned,
}

impl EligiblePackets {
    /// The next packet of the queue that all paths share.
    fn of(self, shared: &mut FqCodel, now: Instant) -> Option<QueuedPacket> {
        match self {
            Self::Any => shared.pop(now),
            Self::OldFlows => shared.pop_old_flow(now),
            Self::OrderedFlows => shared.pop_ordered_flow(now),
            Self::NewFlows => shared.pop_new_flow(now),
            Self::Pinned => None,
        }
    }
}

/// Holds the packets of a session until a path has available window.
///
/// One shared queue for packets that may take any path, one for those of them that leave first, and one queue
/// a path for flows that are pinned to it. Each is FQ-CoDel (RFC 8290).
#[derive(Debug)]
pub struct Dispatcher {
    scheduler: Scheduler,
    config: QueueConfig,
    /// Packets that leave before all others, while there are any.
    first: Option<Box<FqCodel>>,
    shared: FqCodel,
    pinned: BTreeMap<PathId, PinnedQueue>,
    flows: PinnedFlows,
    /// Packets are numbered, so that the peer restores their order.
    numbered: bool,
    /// Packets dropped in queues that were removed.
    removed_drops: u64,
    /// The paths that may be used now, best first.
    eligible: Vec<PathInfo>,
}

#[derive(Debug)]
struct PinnedQueue {
    queue: FqCodel,
    /// Bytes that the shared queue has sent more than this one while packets waited in both: it is the turn
    /// of the one that sent less. A queue that was empty has no right to catch up, as in deficit round robin.
    deficit: i64,
}

impl Dispatcher {
    /// A dispatcher without paths; packets wait until there is one.
    pub fn new(scheduler: Scheduler, config: QueueConfig) -> Self {
        Self {
            scheduler,
            first: None,
            shared: FqCodel::new(config.clone()),
            config,
            pinned: BTreeMap::new(),
            flows: PinnedFlows::default(),
            numbered: false,
            removed_drops: 0,
            eligible: Vec::new(),
        }
    }

    /// The scheduler in use.
    pub fn scheduler(&self) -> Scheduler {
        self.scheduler
    }

    /// Sets how many bytes may wait in the shared queue and in each path's own queue, and the FQ-CoDel
    /// quantum: the bytes that a flow may send in a turn.
    pub fn set_limits(&mut self, waiting: usize, turn: usize) {
        self.config.limit_bytes = waiting;
        for queue in self.queues_mut() {
            queue.set_limit(waiting);
            queue.set_quantum(turn);
        }
    }

    /// Sets how long packets may wait without losses (CoDel's target).
    pub fn set_target(&mut self, target: Duration) {
        self.config.target = target;
        self.queues_mut().for_each(|queue| queue.set_target(target));
    }

    /// Whether the peer restores the order of packets, so that a flow may take several paths.
    pub fn is_numbered(&self) -> bool {
        self.numbered
    }

    /// Sets whether packets are numbered, so that the peer restores their order and a flow may take several
    /// paths.
    pub fn set_numbered(&mut self, now: Instant, numbered: bool) {
        if self.numbered != numbered {
            self.numbered = numbered;
            tracing::debug!(target: SCHEDULER, numbered, "changed whether a flow may take several paths");
            let pinned = self.pinned.keys().copied().collect();
            self.move_packets_of(now, pinned);
        }
    }

    /// Sets the paths. Packets that waited for a path that may no longer be used move to another one.
    pub fn set_paths(&mut self, now: Instant, paths: &[PathInfo]) {
        let before: Vec<PathId> = self.paths_by_preference().collect();
        self.eligible.clear();
        for state in [PathState::Active, PathState::Standby, PathState::Down] {
            if self.eligible.is_empty() {
                self.eligible.extend(paths.iter().filter(|path| path.state == state));
            }
        }
        if self.scheduler.uses_one_link() {
            self.eligible.sort_by_key(|path| (path.link, path.id));
            self.eligible.truncate(1);
        } else {
            self.eligible.sort_by_key(|path| (path.rtt, path.id));
        }
        if !self.paths_by_preference().eq(before.iter().copied()) {
            self.report_eligible(&before);
        }
        if self.eligible.iter().any(|path| !before.contains(&path.id)) {
            // Flows that were assigned while this path was missing would leave it empty.
            self.flows.clear();
        }
        self.move_stranded(now);
        if self.scheduler.policy().moves_flows_off_full_paths() {
            self.move_flow_off_full_path();
        }
    }

    /// Logs which paths carry packets from now on.
    fn report_eligible(&self, before: &[PathId]) {
        let state = self.eligible.first().map(|path| path.state.as_str());
        let paths = || self.eligible.iter().map(|path| (path.id.0, path.rtt, path.rate)).collect::<Vec<_>>();
        if self.eligible.len() == before.len() && before.iter().all(|id| self.is_eligible(*id)) {
            tracing::trace!(
                target: SCHEDULER,
                scheduler = %self.scheduler,
                paths = ?paths(),
                "the order of the paths has changed"
            );
            return;
        }
        tracing::debug!(
            target: SCHEDULER,
            scheduler = %self.scheduler,
            before = ?before.iter().map(|id| id.0).collect::<Vec<_>>(),
            state,
            paths = ?paths(),
            "the set of usable paths has changed (number, round-trip time, bytes/s)"
        );
    }

    /// Moves one flow from a full path to one with spare capacity.
    fn move_flow_off_full_path(&mut self) {
        let Some(spare) = self.eligible.iter().find(|path| path.utilization == Utilization::Spare) else {
            return;
        };
        let to = spare.id;
        let full = self.eligible.iter().filter(|path| path.utilization == Utilization::Full && path.id != to);
        let crowded = full.max_by_key(|path| self.flows.count_on(path.id)).map(|path| path.id);
        let Some(from) = crowded.filter(|from| self.flows.count_on(*from) > 1) else { return };
        if let Some(flow) = self.flows.any_on(from) {
            self.flows.put(flow, to);
            tracing::debug!(
                target: SCHEDULER,
                flow,
                from = from.0,
                to = to.0,
                "a flow moves from a full path to one with spare capacity"
            );
        }
    }

    fn move_stranded(&mut self, now: Instant) {
        if self.eligible.is_empty() {
            return;
        }
        let stranded = self.pinned.keys().copied().filter(|id| !self.is_eligible(*id)).collect();
        self.move_packets_of(now, stranded);
    }

    fn move_packets_of(&mut self, now: Instant, paths: Vec<PathId>) {
        for id in paths {
            let Some(mut own) = self.pinned.remove(&id) else { continue };
            self.removed_drops += own.queue.drops();
            tracing::debug!(
                target: SCHEDULER,
                path = id.0,
                bytes = own.queue.bytes(),
                "packets that were pinned to this path move to other paths"
            );
            while let Some(packet) = own.queue.pop(now) {
                self.push(now, packet);
            }
        }
    }

    fn is_eligible(&self, id: PathId) -> bool {
        self.eligible.iter().any(|path| path.id == id)
    }

    /// The paths that may be used, in the scheduler's order of preference.
    pub fn paths_by_preference(&self) -> impl Iterator<Item = PathId> + '_ {
        self.eligible.iter().map(|path| path.id)
    }

    /// Queues a packet; returns the bytes of other packets that were dropped for it.
    pub fn push(&mut self, now: Instant, packet: QueuedPacket) -> usize {
        self.queue_of(now, &packet).push(now, packet)
    }

    /// Queues a packet, in the place of the one that waits before it if `supersedes` says so for the bytes of
    /// both, the later one first ([`FqCodel::push_superseding`]). Returns whether it replaced that one.
    pub fn push_superseding(
        &mut self,
        now: Instant,
        packet: QueuedPacket,
        supersedes: impl FnOnce(&[u8], &[u8]) -> bool,
    ) -> bool {
        self.queue_of(now, &packet).push_superseding(now, packet, supersedes)
    }

    /// The queue in which a packet waits.
    #[inline]
    fn queue_of(&mut self, now: Instant, packet: &QueuedPacket) -> &mut FqCodel {
        let pin = self.scheduler.policy().pins(packet, self.numbered);
        match pin.then(|| self.path_of(now, packet.flow)).flatten() {
            Some(path) => {
                let config = &self.config;
                let own = self
                    .pinned
                    .entry(path)
                    .or_insert_with(|| PinnedQueue { queue: FqCodel::new(config.clone()), deficit: 0 });
                &mut own.queue
            }
            None => &mut self.shared,
        }
    }

    /// Queues a packet that leaves before those of [`Self::push`], unless its flow has to stay on one path;
    /// returns the bytes of other packets that were dropped for it.
    pub fn push_first(&mut self, now: Instant, packet: QueuedPacket) -> usize {
        if self.scheduler.policy().pins(&packet, self.numbered) {
            return self.push(now, packet);
        }
        self.first.get_or_insert_with(|| Box::new(FqCodel::new(self.config.clone()))).push(now, packet)
    }

    fn path_of(&mut self, now: Instant, flow: u32) -> Option<PathId> {
        if let Some(path) = self.flows.get(now, flow).filter(|path| self.is_eligible(*path)) {
            return Some(path);
        }
        let best = self.eligible.iter().min_by(|a, b| {
            let load = |path: &PathInfo| {
                (f64::from(self.flows.count_on(path.id)) + 1.0) / (path.rate.max(self.floor_rate()) as f64)
            };
            load(a).total_cmp(&load(b))
        })?;
        let path = best.id;
        tracing::trace!(
            target: SCHEDULER,
            flow,
            path = path.0,
            flows = self.flows.count_on(path),
            rate = best.rate,
            "a flow is pinned to a path"
        );
        self.flows.put(flow, path);
        Some(path)
    }

    /// The rate (bytes/s) that every path counts as at least, a quarter of the highest: a rate that was not
    /// measured, or measured while the path was idle, must not keep flows away.
    fn floor_rate(&self) -> u64 {
        self.eligible.iter().map(|path| path.rate).max().unwrap_or(0).max(4) / 4
    }

    /// The packet that `path` carries next, among the eligible ones.
    pub fn pop(&mut self, now: Instant, path: PathId, want: EligiblePackets) -> Option<QueuedPacket> {
        if !self.is_eligible(path) {
            return None;
        }
        if matches!(want, EligiblePackets::Any | EligiblePackets::NewFlows)
            && let Some(packet) = self.first.as_mut().and_then(|first| first.pop(now))
        {
            return Some(packet);
        }
        let Some(own) = self.pinned.get_mut(&path) else {
            return want.of(&mut self.shared, now);
        };
        match want {
            EligiblePackets::Pinned => return own.queue.pop(now),
            EligiblePackets::NewFlows => {
                return own.queue.pop_new_flow(now).or_else(|| self.shared.pop_new_flow(now));
            }
            EligiblePackets::OrderedFlows => return want.of(&mut self.shared, now),
            EligiblePackets::Any | EligiblePackets::OldFlows => {}
        }
        if own.deficit > 0
            && let Some(packet) = own.queue.pop(now)
        {
            own.deficit -= packet.data.len() as i64;
            return Some(packet);
        }
        if !self.shared.is_empty()
            && let Some(packet) = want.of(&mut self.shared, now)
        {
            own.deficit = if own.queue.is_empty() { 0 } else { own.deficit + packet.data.len() as i64 };
            return Some(packet);
        }
        own.deficit = 0;
        own.queue.pop(now)
    }

    fn queues_mut(&mut self) -> impl Iterator<Item = &mut FqCodel> {
        let pinned = self.pinned.values_mut().map(|own| &mut own.queue);
        self.first.as_deref_mut().into_iter().chain([&mut self.shared]).chain(pinned)
    }

    /// The queues beside the shared one; mostly there are none.
    fn other_queues(&self) -> impl Iterator<Item = &FqCodel> {
        self.pinned.values().map(|own| &own.queue).chain(self.first.as_deref())
    }

    /// Bytes that wait in all queues.
    pub fn bytes(&self) -> usize {
        self.shared.bytes() + self.other_queues().map(FqCodel::bytes).sum::<usize>()
    }

    /// Whether a packet waits that `path` may carry.
    pub fn has_packet_for(&self, path: PathId) -> bool {
        !self.shared.is_empty()
            || self.pinned.get(&path).is_some_and(|own| !own.queue.is_empty())
            || self.first.as_ref().is_some_and(|first| !first.is_empty())
    }

    /// Whether packets of flows that are pinned to a path wait.
    pub fn has_pinned(&self) -> bool {
        self.pinned.values().any(|own| !own.queue.is_empty())
    }

    /// Whether no packet waits.
    pub fn is_empty(&self) -> bool {
        self.shared.is_empty() && self.other_queues().all(FqCodel::is_empty)
    }

    /// Frees the memory that empty queues keep for further packets.
    pub fn trim_memory(&mut self) {
        if let Some(first) = self.first.take_if(|first| first.is_empty()) {
            self.removed_drops += first.drops();
        }
        self.queues_mut().for_each(FqCodel::trim_memory);
    }

    /// Packets that the queues have dropped since the start.
    pub fn drops(&self) -> u64 {
        self.removed_drops + self.shared.drops() + self.other_queues().map(FqCodel::drops).sum::<u64>()
    }

    /// The longest sojourn time among the queues: how long the packet that left last had waited.
    pub fn sojourn(&self) -> Duration {
        let owns = self.pinned.values().filter(|own| !own.queue.is_empty());
        owns.map(|own| own.queue.sojourn()).fold(self.shared.sojourn(), Duration::max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;

    const ORDERED: bool = true;
    const UNORDERED: bool = false;

    fn path(id: u32, rtt_ms: u64, state: PathState) -> PathInfo {
        PathInfo {
            id: PathId(id),
            link: LinkId(id as u16),
            state,
            rtt: Duration::from_millis(rtt_ms),
            rate: 10_000_000,
            utilization: Utilization::Partial,
        }
    }

    fn packet(flow: u32, n: u8, ordered: bool) -> QueuedPacket {
        QueuedPacket { data: Bytes::from(vec![n; 1000]), flow, needs_order: ordered, unnumbered: false }
    }

    fn dispatcher(scheduler: Scheduler, paths: &[PathInfo]) -> (Dispatcher, Instant) {
        let now = Instant::now();
        let mut dispatcher = Dispatcher::new(scheduler, QueueConfig::default());
        dispatcher.set_paths(now, paths);
        (dispatcher, now)
    }

    #[test]
    fn a_flow_without_numbers_stays_on_a_path_beside_numbered_ones() {
        let paths = [path(1, 10, PathState::Active), path(2, 20, PathState::Active)];
        let (mut dispatcher, now) = dispatcher(Scheduler::Auto, &paths);
        dispatcher.set_numbered(now, true);
        for n in 0..4 {
            dispatcher.push(now, QueuedPacket { unnumbered: true, ..packet(7, n, ORDERED) });
        }
        let mut gets = |id| dispatcher.pop(now, PathId(id), EligiblePackets::Any).is_some();
        assert_ne!(gets(1), gets(2), "one path has all of them");
    }

    #[test]
    fn minrtt_fills_the_quickest_path_first() {
        let paths = [path(0, 50, PathState::Active), path(1, 20, PathState::Active)];
        let (dispatcher, _) = dispatcher(Scheduler::MinRtt, &paths);
        assert_eq!(dispatcher.paths_by_preference().collect::<Vec<_>>(), [PathId(1), PathId(0)]);
    }

    #[test]
    fn failover_uses_the_first_link_that_works() {
        let paths =
            [path(0, 50, PathState::Down), path(1, 80, PathState::Active), path(2, 5, PathState::Active)];
        let (mut dispatcher, now) = dispatcher(Scheduler::Failover, &paths);
        assert_eq!(dispatcher.paths_by_preference().collect::<Vec<_>>(), [PathId(1)]);
        dispatcher.push(now, packet(1, 1, ORDERED));
        assert!(dispatcher.pop(now, PathId(2), EligiblePackets::Any).is_none());
        assert!(dispatcher.pop(now, PathId(1), EligiblePackets::Any).is_some());
    }

    #[test]
    fn a_flow_stays_on_its_path_and_new_flows_go_where_fewer_are() {
        let paths = [path(0, 20, PathState::Active), path(1, 30, PathState::Active)];
        let (mut dispatcher, now) = dispatcher(Scheduler::Auto, &paths);
        for flow in 0..8 {
            for n in 0..5 {
                dispatcher.push(now, packet(flow, n, ORDERED));
            }
        }
        for id in [PathId(0), PathId(1)] {
            let mut seen = BTreeMap::<u32, u8>::new();
            while let Some(packet) = dispatcher.pop(now, id, EligiblePackets::Any) {
                let next = seen.entry(packet.flow).or_default();
                assert_eq!(packet.data[0], *next, "flow {} out of order", packet.flow);
                *next += 1;
            }
            assert_eq!(seen.len(), 4, "half of the flows belong on each path");
            assert!(seen.values().all(|n| *n == 5));
        }
    }

    #[test]
    fn a_path_gets_its_own_packets_and_leaves_those_that_may_take_any() {
        let paths = [path(0, 20, PathState::Active), path(1, 30, PathState::Active)];
        let (mut dispatcher, now) = dispatcher(Scheduler::Auto, &paths);
        dispatcher.push(now, packet(1, 1, UNORDERED));
        for flow in 2..4 {
            dispatcher.push(now, packet(flow, 1, ORDERED));
        }
        for id in [PathId(0), PathId(1)] {
            assert_eq!(
                dispatcher.pop(now, id, EligiblePackets::Pinned).map(|packet| packet.flow),
                Some(2 + id.0)
            );
            assert_eq!(dispatcher.pop(now, id, EligiblePackets::Pinned).map(|packet| packet.flow), None);
        }
        assert_eq!(dispatcher.pop(now, PathId(1), EligiblePackets::Any).map(|packet| packet.flow), Some(1));
    }

    #[test]
    fn a_packet_supersedes_the_one_before_it_where_that_waits() {
        for (ordered, numbered) in [(ORDERED, false), (ORDERED, true), (UNORDERED, false)] {
            let paths = [path(0, 20, PathState::Active), path(1, 30, PathState::Active)];
            let (mut dispatcher, now) = dispatcher(Scheduler::Auto, &paths);
            dispatcher.set_numbered(now, numbered);
            dispatcher.push(now, packet(1, 0, ordered));
            dispatcher.push(now, packet(2, 1, ordered));
            let is_next = |later: &[u8], earlier: &[u8]| later[0] == earlier[0] + 2;
            assert!(dispatcher.push_superseding(now, packet(1, 2, ordered), is_next));
            assert!(!dispatcher.push_superseding(now, packet(2, 4, ordered), is_next));
            let mut left: Vec<u8> = Vec::new();
            for id in [PathId(0), PathId(1)] {
                let popped = std::iter::from_fn(|| dispatcher.pop(now, id, EligiblePackets::Any));
                left.extend(popped.map(|packet| packet.data[0]));
            }
            left.sort_unstable();
            assert_eq!((left, dispatcher.bytes()), (vec![1, 2, 4], 0));
        }
    }

    #[test]
    fn packets_of_a_dead_path_move_to_one_that_lives() {
        let paths = [path(0, 20, PathState::Active), path(1, 30, PathState::Active)];
        let (mut dispatcher, now) = dispatcher(Scheduler::Flow, &paths);
        for flow in 0..4 {
            dispatcher.push(now, packet(flow, 0, ORDERED));
        }
        dispatcher.set_paths(now, &[path(0, 20, PathState::Down), path(1, 30, PathState::Active)]);
        let mut moved = 0;
        while dispatcher.pop(now, PathId(1), EligiblePackets::Any).is_some() {
            moved += 1;
        }
        assert_eq!((moved, dispatcher.bytes()), (4, 0));
    }

    #[test]
    fn flows_spread_over_a_path_that_returns() {
        let both = [path(0, 20, PathState::Active), path(1, 30, PathState::Active)];
        let (mut dispatcher, now) = dispatcher(Scheduler::Auto, &both[..1]);
        for flow in 0..8 {
            dispatcher.push(now, packet(flow, 0, ORDERED));
        }
        while dispatcher.pop(now, PathId(0), EligiblePackets::Any).is_some() {}
        dispatcher.set_paths(now, &both);
        for flow in 0..8 {
            dispatcher.push(now, packet(flow, 1, ORDERED));
        }
        let on = |id| dispatcher.flows.count_on(PathId(id));
        assert_eq!((on(0), on(1)), (4, 4));
    }

    #[test]
    fn a_full_path_gives_flows_to_one_with_spare_capacity() {
        let mut paths = [path(0, 20, PathState::Active), path(1, 30, PathState::Active)];
        paths[1].rate = 2_500_000;
        let (mut dispatcher, now) = dispatcher(Scheduler::Auto, &paths);
        for flow in 0..10 {
            dispatcher.push(now, packet(flow, 0, ORDERED));
        }
        let on = |dispatcher: &Dispatcher| {
            (dispatcher.flows.count_on(PathId(0)), dispatcher.flows.count_on(PathId(1)))
        };
        assert_eq!(on(&dispatcher), (8, 2));
        (paths[0].utilization, paths[1].utilization) = (Utilization::Full, Utilization::Spare);
        for _ in 0..3 {
            dispatcher.set_paths(now, &paths);
        }
        assert_eq!(on(&dispatcher), (5, 5));
        paths[1].utilization = Utilization::Full;
        dispatcher.set_paths(now, &paths);
        assert_eq!(on(&dispatcher), (5, 5), "two full paths have nothing to give");
    }

    #[test]
    fn with_every_path_dead_all_are_tried() {
        let paths = [path(0, 20, PathState::Down), path(1, 30, PathState::Down)];
        let (dispatcher, _) = dispatcher(Scheduler::Auto, &paths);
        assert_eq!(dispatcher.paths_by_preference().count(), 2);
    }

    #[test]
    fn standby_carries_nothing_while_an_active_path_is_there() {
        let paths = [path(0, 20, PathState::Standby), path(1, 90, PathState::Active)];
        let (mut dispatcher, now) = dispatcher(Scheduler::Auto, &paths);
        assert_eq!(dispatcher.paths_by_preference().collect::<Vec<_>>(), [PathId(1)]);
        dispatcher.set_paths(now, &paths[..1]);
        assert_eq!(dispatcher.paths_by_preference().collect::<Vec<_>>(), [PathId(0)]);
    }

    #[test]
    fn pinned_and_unordered_packets_share_a_path() {
        let (mut dispatcher, now) = dispatcher(Scheduler::Auto, &[path(0, 20, PathState::Active)]);
        for n in 0..200 {
            dispatcher.push(now, packet(1, n, ORDERED));
            dispatcher.push(now, packet(2, n, UNORDERED));
        }
        let first: Vec<u32> = std::iter::from_fn(|| dispatcher.pop(now, PathId(0), EligiblePackets::Any))
            .take(200)
            .map(|p| p.flow)
            .collect();
        let free = first.iter().filter(|flow| **flow == 2).count();
        assert!((60..=140).contains(&free), "{free} of the first 200 are free packets");
    }

    #[test]
    fn a_flow_takes_every_path_where_the_far_end_restores_order() {
        let paths = [path(0, 20, PathState::Active), path(1, 30, PathState::Active)];
        let (mut dispatcher, now) = dispatcher(Scheduler::Auto, &paths);
        for n in 0..10 {
            dispatcher.push(now, packet(1, n, ORDERED));
        }
        dispatcher.set_numbered(now, true);
        let first: Vec<u8> = [PathId(0), PathId(1)]
            .map(|id| dispatcher.pop(now, id, EligiblePackets::Any).unwrap().data[0])
            .into();
        assert_eq!(first, [0, 1]);
    }

    #[test]
    fn a_flow_that_sends_little_waits_for_the_best_path() {
        let paths = [path(0, 20, PathState::Active), path(1, 30, PathState::Active)];
        let (mut dispatcher, now) = dispatcher(Scheduler::Auto, &paths);
        for n in 0..50 {
            dispatcher.push(now, packet(1, n, UNORDERED));
        }
        for _ in 0..4 {
            dispatcher.pop(now, PathId(0), EligiblePackets::Any).unwrap();
        }
        dispatcher.push(now, packet(2, 0, UNORDERED));
        assert_eq!(dispatcher.pop(now, PathId(1), EligiblePackets::OldFlows).unwrap().flow, 1);
        assert_eq!(dispatcher.pop(now, PathId(0), EligiblePackets::Any).unwrap().flow, 2);
    }

    fn push(dispatcher: &mut Dispatcher, now: Instant, count: u8, flow: u32, ordered: bool) {
        for n in 0..count {
            dispatcher.push(now, packet(flow, n, ordered));
        }
    }

    #[test]
    fn a_queue_that_was_empty_does_not_keep_the_other_one_waiting() {
        let (mut dispatcher, now) = dispatcher(Scheduler::Auto, &[path(0, 20, PathState::Active)]);
        let take = |dispatcher: &mut Dispatcher, count| {
            let mut next = || dispatcher.pop(now, PathId(0), EligiblePackets::Any);
            (0..count).map(|_| next().expect("a packet").flow).collect::<Vec<_>>()
        };
        push(&mut dispatcher, now, 50, 1, ORDERED);
        dispatcher.push(now, packet(2, 0, UNORDERED));
        assert_eq!(take(&mut dispatcher, 1), [2], "a turn of the pinned queue has not begun");
        push(&mut dispatcher, now, 50, 2, UNORDERED);
        let taken = take(&mut dispatcher, 100);
        assert!((20..=30).contains(&taken[..50].iter().filter(|flow| **flow == 1).count()), "{taken:?}");
        push(&mut dispatcher, now, 50, 2, UNORDERED);
        take(&mut dispatcher, 49);
        push(&mut dispatcher, now, 3, 1, ORDERED);
        assert_eq!(take(&mut dispatcher, 2), [2, 1], "bytes from before do not count");
    }

    #[test]
    fn packets_of_flows_that_send_little_can_be_taken_alone() {
        let paths = [path(0, 20, PathState::Active)];
        let (mut dispatcher, now) = dispatcher(Scheduler::Auto, &paths);
        push(&mut dispatcher, now, 50, 1, UNORDERED);
        for _ in 0..4 {
            dispatcher.pop(now, PathId(0), EligiblePackets::Any).unwrap();
        }
        dispatcher.push(now, packet(2, 0, UNORDERED));
        dispatcher.push_first(now, packet(3, 0, UNORDERED));
        let mut take = |want| dispatcher.pop(now, PathId(0), want).map(|packet| packet.flow);
        assert_eq!([(); 3].map(|()| take(EligiblePackets::NewFlows)), [Some(3), Some(2), None]);
        assert_eq!(take(EligiblePackets::Any), Some(1), "the rest is in its place");
    }

    #[test]
    fn a_path_that_is_late_gets_no_packets_of_flows_without_order() {
        let paths = [path(0, 20, PathState::Active), path(1, 300, PathState::Active)];
        let (mut dispatcher, now) = dispatcher(Scheduler::Auto, &paths);
        dispatcher.set_numbered(now, true);
        push(&mut dispatcher, now, 9, 1, ORDERED);
        let late = |dispatcher: &mut Dispatcher| {
            dispatcher.pop(now, PathId(1), EligiblePackets::OrderedFlows).map(|packet| packet.flow)
        };
        assert_eq!(late(&mut dispatcher), None, "the flow has just begun");
        for _ in 0..4 {
            dispatcher.pop(now, PathId(0), EligiblePackets::Any).unwrap();
        }
        assert_eq!(late(&mut dispatcher), Some(1));
        push(&mut dispatcher, now, 9, 2, UNORDERED);
        for _ in 0..40 {
            assert_ne!(late(&mut dispatcher), Some(2));
            dispatcher.pop(now, PathId(0), EligiblePackets::Any);
        }
    }

    #[test]
    fn packets_that_leave_first_overtake_those_of_new_flows_on_the_best_path() {
        let paths = [path(0, 20, PathState::Active), path(1, 30, PathState::Active)];
        let (mut dispatcher, now) = dispatcher(Scheduler::Auto, &paths);
        dispatcher.push(now, packet(1, 0, UNORDERED));
        dispatcher.push_first(now, packet(2, 0, UNORDERED));
        assert_eq!(dispatcher.bytes(), 2000);
        assert_eq!(
            dispatcher.pop(now, PathId(1), EligiblePackets::OldFlows),
            None,
            "they wait for the best path"
        );
        let flow = |dispatcher: &mut Dispatcher| {
            dispatcher.pop(now, PathId(0), EligiblePackets::Any).map(|packet| packet.flow)
        };
        assert_eq!(
            [flow(&mut dispatcher), flow(&mut dispatcher), flow(&mut dispatcher)],
            [Some(2), Some(1), None]
        );
        assert!(dispatcher.is_empty() && !dispatcher.has_packet_for(PathId(0)));
        dispatcher.trim_memory();
        assert!(dispatcher.first.is_none(), "its memory is free");
    }

    #[test]
    fn packets_wait_for_the_first_path() {
        let now = Instant::now();
        let mut dispatcher = Dispatcher::new(Scheduler::Auto, QueueConfig::default());
        dispatcher.push(now, packet(1, 1, ORDERED));
        dispatcher.set_paths(now, &[path(0, 10, PathState::Active)]);
        assert!(dispatcher.pop(now, PathId(0), EligiblePackets::Any).is_some());
    }
}
