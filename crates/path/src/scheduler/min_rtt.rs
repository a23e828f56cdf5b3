//! `minrtt`: the path with the least round-trip time that has available window. `failover`: the same, of the
//! paths of the first link that works; [`super::Scheduler::uses_one_link`] leaves them as the only
//! candidates.

use super::Policy;
use crate::selector::{PathCandidate, Selection, Work, first_with_window};

/// The candidates are in the order of their round-trip times.
#[derive(Debug)]
pub(super) struct MinRtt;

impl Policy for MinRtt {
    fn pick(&self, _: &mut Work, candidates: &[PathCandidate], _: u64) -> Option<Selection> {
        first_with_window(candidates).map(Selection::best)
    }

    fn fills_paths_in_order(&self) -> bool {
        true
    }
}
