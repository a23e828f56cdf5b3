//! The paths of a connection.
//!
//! Each path has a queue for its next pass, send limits, stream data in flight, receive activity, losses, and
//! a detector of stalled datagrams. Paths over one link form a path group, which the scheduler sees as one
//! path under the path ID of the first.

mod activity;
mod in_flight;
mod limits;
mod losses;
mod queue;
mod stall;

use std::sync::{Arc, atomic::Ordering::Relaxed};

use mpvpn_types::{Duration, Instant, PathId};

pub(crate) use self::{
    activity::{Origin, ReceiveActivity},
    in_flight::StreamsInFlight,
    limits::{Allowance, SendLimits, SentTotals},
    losses::Losses,
    queue::SendQueue,
    stall::DatagramStall,
};
use crate::{
    config::{INITIAL_MAX_PATHS, MAX_PATHS},
    gate::GateState,
};

/// Paths that are allowed beyond those in use, so that a new one need not wait a round trip. More: memory of
/// unused paths.
const SPARE_PATHS: u32 = 2;
/// The memory that noq keeps for a path ID until the connection ends, even if the path was abandoned (bytes):
/// 376, measured (docs/design/memory.md). Smaller: paths that are opened and abandoned take more than is
/// counted; larger: users may have fewer.
const PATH_ID_BYTES: usize = 384;

/// One path.
#[derive(Debug)]
pub(crate) struct Path {
    pub(crate) id: PathId,
    /// The first path of its group; itself for most.
    pub(crate) head: PathId,
    /// Validated: it can carry data.
    pub(crate) open: bool,
    /// The DSCP of its packets, 0 to 63.
    pub(crate) dscp: u8,
    /// The gate of its congestion controller.
    pub(crate) gate: Arc<GateState>,
    pub(crate) queue: SendQueue,
    pub(crate) limits: SendLimits,
    pub(crate) streams: StreamsInFlight,
    pub(crate) activity: ReceiveActivity,
    pub(crate) losses: Losses,
    pub(crate) stall: DatagramStall,
}

impl Path {
    /// A new path.
    pub(crate) fn new(now: Instant, id: PathId, gate: Arc<GateState>) -> Self {
        Self {
            id,
            head: id,
            open: id == PathId(0),
            dscp: 0,
            gate,
            queue: SendQueue::default(),
            limits: SendLimits::new(now),
            streams: StreamsInFlight::default(),
            activity: ReceiveActivity::default(),
            losses: Losses::default(),
            stall: DatagramStall::default(),
        }
    }

    /// The delivery rate (bytes/s), at most its cap; 0 if unknown.
    pub(crate) fn rate(&self) -> u64 {
        self.limits.under_cap(self.gate.delivery_rate())
    }

    /// Bytes in flight or queued for its next pass.
    pub(crate) fn outstanding(&self) -> u64 {
        self.gate.in_flight() + self.queue.bytes
    }

    /// Sets whether more data waits for the path's group than its available window, and whether the first
    /// path of the group is limited by its cap or shaper, and by its pacer.
    pub(crate) fn set_backlogged(&mut self, limited: bool, capped: bool, paced: bool) {
        // Data that a cap or shaper holds back says nothing about the path.
        self.gate.limited.store(limited && !capped, Relaxed);
        self.gate.window_limited.store(limited && !paced, Relaxed);
        self.limits.set_backlogged(limited, capped);
    }

    /// Drops stream data that was acknowledged, or that noq declared lost.
    pub(crate) fn drop_acked_streams(&mut self) {
        self.streams.on_acked(self.gate.acked_sent());
    }
}

/// All paths of a connection, in the order of their numbers.
#[derive(Debug)]
pub(crate) struct Paths {
    paths: Vec<Path>,
    /// The number of paths that the peer may use.
    allowed: u32,
    /// The path IDs that were used, those of abandoned paths included.
    used: u32,
    has_new_origin: bool,
}

impl Paths {
    pub(crate) fn new() -> Self {
        // Most clients have one link.
        Self { paths: Vec::with_capacity(1), allowed: INITIAL_MAX_PATHS, used: 0, has_new_origin: true }
    }

    /// Adds a path; returns the new number of allowed paths, if that changes.
    pub(crate) fn insert(&mut self, path: Path) -> Option<u32> {
        self.used = self.used.max(path.id.0.saturating_add(1));
        self.paths.push(path);
        self.paths.sort_by_key(|path| path.id);
        if self.paths.len() as u32 + SPARE_PATHS <= self.allowed || self.allowed >= MAX_PATHS {
            return None;
        }
        self.allowed = (2 * self.allowed).min(MAX_PATHS);
        Some(self.allowed)
    }

    /// The memory that noq keeps for path IDs until the connection ends (bytes).
    pub(crate) fn id_bytes(&self) -> usize {
        self.used as usize * PATH_ID_BYTES
    }

    /// Removes a path; if it was the first of a group, the group ends.
    pub(crate) fn remove(&mut self, id: PathId) -> Option<Path> {
        let removed = self.paths.iter().position(|path| path.id == id).map(|at| self.paths.remove(at));
        for path in self.paths.iter_mut().filter(|path| path.head == id) {
            path.head = path.id;
        }
        removed
    }

    pub(crate) fn get(&self, id: PathId) -> Option<&Path> {
        self.paths.iter().find(|path| path.id == id)
    }

    pub(crate) fn get_mut(&mut self, id: PathId) -> Option<&mut Path> {
        self.paths.iter_mut().find(|path| path.id == id)
    }

    /// The path at this index, in the order of path IDs.
    pub(crate) fn at(&self, index: usize) -> Option<&Path> {
        self.paths.get(index)
    }

    /// As [`Self::at`].
    pub(crate) fn at_mut(&mut self, index: usize) -> Option<&mut Path> {
        self.paths.get_mut(index)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Path> {
        self.paths.iter()
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Path> {
        self.paths.iter_mut()
    }

    /// The paths of a group.
    pub(crate) fn group(&self, head: PathId) -> impl Iterator<Item = &Path> {
        self.paths.iter().filter(move |path| path.head == head)
    }

    /// As [`Self::group`].
    pub(crate) fn group_mut(&mut self, head: PathId) -> impl Iterator<Item = &mut Path> {
        self.paths.iter_mut().filter(move |path| path.head == head)
    }

    /// Makes each list of paths a group, under the path ID of the first in it; all other paths are alone.
    /// Controllers that were joined stay joined.
    pub(crate) fn set_groups(&mut self, lists: &[Vec<PathId>]) {
        for at in 0..self.paths.len() {
            let id = self.paths[at].id;
            let head = lists.iter().find(|list| list.contains(&id)).and_then(|list| list.first());
            let head = head.copied().unwrap_or(id);
            if self.paths[at].head == head {
                continue;
            }
            let first = self.get(head).map(|first| (first.gate.clone(), first.limits.cap.clone()));
            let path = &mut self.paths[at];
            path.head = head;
            path.queue.end_turn();
            path.limits.on_group_change(head == id);
            if let Some((gate, cap)) = first.filter(|_| head != id) {
                gate.join(&path.gate);
                path.limits.share_cap(cap.as_ref());
            }
        }
    }

    /// The path of a group whose turn it is; `rtt` returns the round-trip time of a path.
    pub(crate) fn next_of_group(
        &mut self,
        head: PathId,
        rtt: impl Fn(PathId) -> Duration,
    ) -> Option<&mut Path> {
        let mut indices = (0..self.paths.len()).filter(|at| self.paths[*at].head == head);
        let first = indices.next()?;
        if indices.next().is_none() {
            return self.paths.get_mut(first);
        }
        let members = || self.paths.iter().enumerate().filter(|(_, path)| path.head == head);
        let current = members().find(|(_, path)| path.queue.has_turn()).map(|(at, _)| at);
        let at = current.or_else(|| {
            // The waiting time: bytes before the data, times the round-trip time.
            let wait = |path: &Path| u128::from(path.outstanding()) * rtt(path.id).as_nanos();
            members().min_by_key(|(_, path)| wait(path)).map(|(at, _)| at)
        })?;
        let path = self.paths.get_mut(at)?;
        path.queue.give_turn();
        Some(path)
    }

    /// A packet of this origin has arrived: on a path where others of it did, or on any path. Returns whether
    /// there is such a path.
    pub(crate) fn note_arrival(&mut self, origin: Origin) -> bool {
        let is_known = self.paths.iter().any(|path| path.activity.origin == Some(origin));
        for path in &mut self.paths {
            path.activity.is_stale |= !is_known || path.activity.origin == Some(origin);
        }
        self.has_new_origin |= !is_known;
        is_known
    }

    /// Whether a packet has arrived, since the last call, of an origin that no path was known to have.
    pub(crate) fn take_new_origin(&mut self) -> bool {
        std::mem::take(&mut self.has_new_origin)
    }

    /// When something last arrived on any path.
    pub(crate) fn latest_activity(&self) -> Option<Instant> {
        self.paths.iter().filter_map(|path| path.activity.latest).max()
    }

    /// The index of the path whose data pass is next. Acknowledgements for all paths leave with the first
    /// pass, so quick paths come first, and those on which nothing arrived for `silent`, while something
    /// did on others, come last.
    pub(crate) fn next_with_work(&self, silent: Duration) -> Option<usize> {
        let waiting = self.paths.iter().enumerate().filter(|(_, path)| path.queue.has_work());
        let (only, _) = waiting.clone().next()?;
        if waiting.clone().nth(1).is_none() {
            return Some(only);
        }
        let latest = self.latest_activity();
        let rank = |path: &Path| (path.activity.is_silent(latest, silent), path.gate.base_rtt());
        waiting.min_by_key(|(_, path)| rank(path)).map(|(index, _)| index)
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use noq_proto::congestion::ControllerFactory;

    use super::*;
    use crate::{
        LocalAddress,
        gate::{GateFactory, gate_state_of},
    };
    use mpvpn_types::{CongestionControl, LinkId};

    const MS: Duration = Duration::from_millis(1);

    fn paths(now: Instant, count: u32) -> Paths {
        let mut paths = Paths::new();
        // Not in the order of their path IDs.
        for id in (0..count).rev() {
            let controller = Arc::new(GateFactory(CongestionControl::Bbr)).build(now, 1200);
            let gate = gate_state_of(controller.as_ref()).expect("a gate");
            paths.insert(Path::new(now, PathId(id), gate));
        }
        paths
    }

    fn numbers<'a>(paths: impl Iterator<Item = &'a Path>) -> Vec<u32> {
        paths.map(|path| path.id.0).collect()
    }

    #[test]
    fn more_paths_are_allowed_when_few_are_left() {
        let now = Instant::now();
        let mut paths = Paths::new();
        let mut allowed = Vec::new();
        for id in 0..40 {
            let controller = Arc::new(GateFactory(CongestionControl::Bbr)).build(now, 1200);
            let gate = gate_state_of(controller.as_ref()).expect("a gate");
            allowed.extend(paths.insert(Path::new(now, PathId(id), gate)));
        }
        assert_eq!(allowed, [8, 16, 32]);
    }

    #[test]
    fn a_group_ends_with_its_first_path() {
        let mut paths = paths(Instant::now(), 4);
        let list = [1, 2, 3].map(PathId).to_vec();
        paths.set_groups(std::slice::from_ref(&list));
        assert_eq!(numbers(paths.group(PathId(1))), [1, 2, 3]);
        assert_eq!(numbers(paths.group(PathId(0))), [0]);
        assert!(paths.remove(PathId(1)).is_some());
        assert_eq!(numbers(paths.iter()), [0, 2, 3]);
        assert!([2, 3].iter().all(|id| numbers(paths.group(PathId(*id))) == [*id]));
        assert!(paths.remove(PathId(1)).is_none());
    }

    #[test]
    fn a_group_fills_the_path_on_which_packets_wait_least() {
        let mut paths = paths(Instant::now(), 2);
        paths.set_groups(&[vec![PathId(0), PathId(1)]]);
        // Twice the round trip takes half of the bytes.
        let rtt = |id: PathId| MS * (1 + id.0);
        for _ in 0..300 {
            let path = paths.next_of_group(PathId(0), rtt).expect("a path");
            path.queue.push(Bytes::from_static(&[0; 1200]));
        }
        let [near, far] = [0, 1].map(|at| paths.at(at).expect("a path").queue.bytes);
        assert!((2 * far).abs_diff(near) < 2 * 13_000, "{near} and {far} bytes");
    }

    #[test]
    fn a_packet_of_unknown_origin_may_be_of_any_path() {
        let mut paths = paths(Instant::now(), 2);
        let origin = |link: u16, port: u16| {
            Origin::new(Some(LocalAddress::link(LinkId(link))), ([192, 0, 2, 1], port).into())
        };
        let stale = |paths: &mut Paths, origin| {
            let is_known = paths.note_arrival(origin);
            let stale = paths.iter_mut().map(|path| std::mem::take(&mut path.activity.is_stale));
            (is_known, stale.collect::<Vec<_>>())
        };
        assert_eq!(stale(&mut paths, origin(1, 443)), (false, vec![true, true]));
        assert!(paths.take_new_origin() && !paths.take_new_origin());
        for (path, link) in paths.iter_mut().zip([1, 2]) {
            path.activity.origin = Some(origin(link, 443));
        }
        assert_eq!(stale(&mut paths, origin(2, 443)), (true, vec![false, true]));
        assert_eq!(stale(&mut paths, origin(2, 444)), (false, vec![true, true]), "another port");
        assert_eq!(stale(&mut paths, origin(3, 443)), (false, vec![true, true]), "another link");
        assert!(paths.take_new_origin());
    }

    #[test]
    fn silent_paths_send_last() {
        let start = Instant::now();
        let mut paths = paths(start, 2);
        for path in paths.iter_mut() {
            path.queue.push(Bytes::from_static(b"x"));
        }
        assert_eq!(paths.next_with_work(30 * MS), Some(0));
        paths.at_mut(0).expect("a path").activity.update(start, 1);
        paths.at_mut(1).expect("a path").activity.update(start + 40 * MS, 1);
        assert_eq!(paths.next_with_work(30 * MS), Some(1));
        assert_eq!(paths.next_with_work(50 * MS), Some(0));
        for path in paths.iter_mut() {
            path.queue.datagrams.clear();
        }
        assert_eq!(paths.next_with_work(30 * MS), None);
    }
}
