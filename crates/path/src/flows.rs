use mpvpn_types::{Duration, Instant, PathId};
use rustc_hash::FxHashMap;

/// A generation ends at this age, so an idle flow is forgotten after one to two of them.
const GENERATION: Duration = Duration::from_secs(30);
/// A generation also ends when it holds this many flows: the memory of a session stays bounded.
const MAX_FLOWS: usize = 4096;

/// Which path each flow was given.
///
/// Two generations: a flow that is looked up moves to the young one; what stays in the old one
/// for a whole generation is forgotten with it. Constant time, no list to keep.
#[derive(Debug, Default)]
pub(crate) struct FlowTable {
    young: FxHashMap<u32, PathId>,
    old: FxHashMap<u32, PathId>,
    /// Flows a path has, both generations; few paths, so a list.
    counts: Vec<(PathId, u32)>,
    since: Option<Instant>,
}

impl FlowTable {
    /// The path that `flow` has, if it is still known.
    pub(crate) fn get(&mut self, now: Instant, flow: u32) -> Option<PathId> {
        self.turn(now);
        if let Some(path) = self.young.get(&flow) {
            return Some(*path);
        }
        let path = self.old.remove(&flow)?;
        self.young.insert(flow, path);
        Some(path)
    }

    /// Gives `flow` the path `path`, instead of the one that it may have had.
    pub(crate) fn put(&mut self, flow: u32, path: PathId) {
        if let Some(before) = self.old.remove(&flow) {
            self.count(before, -1);
        }
        if let Some(before) = self.young.insert(flow, path) {
            self.count(before, -1);
        }
        self.count(path, 1);
    }

    /// How many flows `path` has.
    pub(crate) fn on(&self, path: PathId) -> u32 {
        self.counts.iter().find(|(id, _)| *id == path).map_or(0, |(_, n)| *n)
    }

    /// A flow that is on `path` and was used lately: any, but always the same for the same table.
    #[allow(clippy::disallowed_methods, reason = "the least of all is the same in any order")]
    pub(crate) fn any_on(&self, path: PathId) -> Option<u32> {
        self.young.iter().filter(|(_, on)| **on == path).map(|(flow, _)| *flow).min()
    }

    /// Forgets every placement.
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

    fn turn(&mut self, now: Instant) {
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
        let mut table = FlowTable::default();
        table.put(1, PathId(0));
        table.put(2, PathId(1));
        for second in 0..200 {
            assert_eq!(table.get(start + Duration::from_secs(second), 1), Some(PathId(0)));
        }
        assert_eq!(table.get(start + Duration::from_secs(200), 2), None);
        assert_eq!((table.on(PathId(0)), table.on(PathId(1))), (1, 0));
    }

    #[test]
    fn counts_follow_moves() {
        let mut table = FlowTable::default();
        table.put(1, PathId(0));
        table.put(1, PathId(3));
        assert_eq!((table.on(PathId(0)), table.on(PathId(3))), (0, 1));
    }

    #[test]
    fn memory_is_bounded() {
        let start = Instant::now();
        let mut table = FlowTable::default();
        for flow in 0..100_000 {
            if table.get(start, flow).is_none() {
                table.put(flow, PathId(flow % 3));
            }
        }
        assert!(table.young.len() + table.old.len() <= 2 * MAX_FLOWS + 1);
    }
}
