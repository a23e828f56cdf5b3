use mpvpn_types::{Duration, Instant, PathId};
use rustc_hash::FxHashMap;

/// The age at which a generation ends: an idle flow is forgotten after one to two of them. Smaller: flows may
/// change paths after short pauses; larger: more memory. Chosen.
const GENERATION: Duration = Duration::from_secs(30);
/// The number of flows at which a generation also ends, which bounds the memory of a session. Smaller: busy
/// sessions forget flows sooner; larger: more memory. Chosen.
const MAX_FLOWS: usize = 4096;

/// The path that each flow is pinned to.
///
/// Two generations: a flow that is looked up moves to the young one; a flow that stays in the old one for a
/// whole generation is forgotten with it. Lookups take constant time.
#[derive(Debug, Default)]
pub(crate) struct PinnedFlows {
    young: FxHashMap<u32, PathId>,
    old: FxHashMap<u32, PathId>,
    /// The number of flows of each path, in both generations; a list because there are few paths.
    counts: Vec<(PathId, u32)>,
    since: Option<Instant>,
}

impl PinnedFlows {
    /// The path of `flow`, unless it was forgotten.
    pub(crate) fn get(&mut self, now: Instant, flow: u32) -> Option<PathId> {
        self.start_generation_if_due(now);
        if let Some(path) = self.young.get(&flow) {
            return Some(*path);
        }
        let path = self.old.remove(&flow)?;
        self.young.insert(flow, path);
        Some(path)
    }

    /// Pins `flow` to `path`, instead of to any other one.
    pub(crate) fn put(&mut self, flow: u32, path: PathId) {
        if let Some(before) = self.old.remove(&flow) {
            self.count(before, -1);
        }
        if let Some(before) = self.young.insert(flow, path) {
            self.count(before, -1);
        }
        self.count(path, 1);
    }

    /// The number of flows that are pinned to `path`.
    pub(crate) fn count_on(&self, path: PathId) -> u32 {
        self.counts.iter().find(|(id, _)| *id == path).map_or(0, |(_, n)| *n)
    }

    /// A flow that is pinned to `path` and was used lately: the same one for the same table, so that
    /// simulations repeat.
    #[allow(clippy::disallowed_methods, reason = "the minimum is the same in any order")]
    pub(crate) fn any_on(&self, path: PathId) -> Option<u32> {
        self.young.iter().filter(|(_, on)| **on == path).map(|(flow, _)| *flow).min()
    }

    /// Forgets all flows.
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    fn count(&mut self, path: PathId, by: i32) {
        match self.counts.iter_mut().find(|(id, _)| *id == path) {
            Some((_, n)) => *n = n.saturating_add_signed(by),
            None if by > 0 => self.counts.push((path, by as u32)),
            None => {}
        }
        self.counts.retain(|(_, n)| *n > 0);
    }

    fn start_generation_if_due(&mut self, now: Instant) {
        let since = *self.since.get_or_insert(now);
        if now.saturating_duration_since(since) < GENERATION && self.young.len() < MAX_FLOWS {
            return;
        }
        self.since = Some(now);
        let forgotten = std::mem::replace(&mut self.old, std::mem::take(&mut self.young));
        for path in forgotten.into_values() {
            self.count(path, -1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_used_flow_keeps_its_path_and_an_idle_one_is_forgotten() {
        let start = Instant::now();
        let mut table = PinnedFlows::default();
        table.put(1, PathId(0));
        table.put(2, PathId(1));
        for second in 0..200 {
            assert_eq!(table.get(start + Duration::from_secs(second), 1), Some(PathId(0)));
        }
        assert_eq!(table.get(start + Duration::from_secs(200), 2), None);
        assert_eq!((table.count_on(PathId(0)), table.count_on(PathId(1))), (1, 0));
    }

    #[test]
    fn counts_follow_moves() {
        let mut table = PinnedFlows::default();
        table.put(1, PathId(0));
        table.put(1, PathId(3));
        assert_eq!((table.count_on(PathId(0)), table.count_on(PathId(3))), (0, 1));
    }

    #[test]
    fn memory_is_bounded() {
        let start = Instant::now();
        let mut table = PinnedFlows::default();
        for flow in 0..100_000 {
            if table.get(start, flow).is_none() {
                table.put(flow, PathId(flow % 3));
            }
        }
        assert!(table.young.len() + table.old.len() <= 2 * MAX_FLOWS + 1);
    }
}
