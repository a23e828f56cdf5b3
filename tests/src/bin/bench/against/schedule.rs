//! The order of the runs, and how long they will take.
//!
//! The binary that begins changes from pair to pair (before, after; after, before; …), so that neither a
//! machine that becomes slower nor what the first of two runs leaves behind counts for one of them alone.

use std::time::Duration;

/// One of the two binaries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Before,
    After,
}

impl Side {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Before => "before",
            Self::After => "after",
        }
    }
}

/// A run of a rig with one of the binaries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    /// Index of the rig among the compared ones.
    pub(super) rig: usize,
    /// Number of the pair, from 0.
    pub(super) pair: u32,
    pub(super) side: Side,
}

/// All runs of rigs with so many pairs each, in their order; the number of the first pair is `first`.
pub(super) fn schedule(pairs: &[u32], first: u32) -> Vec<Run> {
    let mut all = Vec::new();
    for pair in first..first + pairs.iter().copied().max().unwrap_or(0) {
        let sides = if pair % 2 == 0 { [Side::Before, Side::After] } else { [Side::After, Side::Before] };
        for rig in (0..pairs.len()).filter(|rig| pair - first < pairs[*rig]) {
            all.extend(sides.map(|side| Run { rig, pair, side }));
        }
    }
    all
}

/// How long runs of each rig took.
pub(super) struct Durations(Vec<Vec<Duration>>);

impl Durations {
    pub(super) fn new(rigs: usize) -> Self {
        Self(vec![Vec::new(); rigs])
    }

    pub(super) fn note(&mut self, rig: usize, took: Duration) {
        self.0[rig].push(took);
    }

    /// How long `runs` will take; `None` while a rig among them has not run yet.
    pub(super) fn left(&self, runs: &[Run]) -> Option<Duration> {
        runs.iter().map(|run| self.mean(run.rig)).sum()
    }

    fn mean(&self, rig: usize) -> Option<Duration> {
        let all = &self.0[rig];
        (!all.is_empty()).then(|| all.iter().sum::<Duration>() / all.len() as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_binary_that_begins_changes_from_pair_to_pair() {
        let sides: String = schedule(&[4], 0).iter().map(|run| &run.side.name()[..1]).collect();
        assert_eq!(sides, "baabbaab");
        let again: Vec<(u32, Side)> = schedule(&[1], 3).iter().map(|run| (run.pair, run.side)).collect();
        assert_eq!(again, [(3, Side::After), (3, Side::Before)]);
    }

    #[test]
    fn rigs_take_turns_as_often_as_each_is_asked() {
        let rigs: Vec<usize> = schedule(&[1, 2], 0).iter().map(|run| run.rig).collect();
        assert_eq!(rigs, [0, 0, 1, 1, 1, 1]);
        assert_eq!(schedule(&[], 0), []);
    }

    #[test]
    fn the_remaining_time_is_known_when_every_rig_has_run() {
        let mut durations = Durations::new(2);
        let left = schedule(&[1, 2], 0);
        durations.note(0, Duration::from_secs(10));
        assert_eq!(durations.left(&left), None);
        assert_eq!(durations.left(&left[..2]), Some(Duration::from_secs(20)));
        durations.note(1, Duration::from_secs(4));
        durations.note(1, Duration::from_secs(6));
        assert_eq!(durations.left(&left), Some(Duration::from_secs(40)));
    }
}
