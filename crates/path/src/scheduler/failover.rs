//! `failover`: the first link that works carries everything.

use super::Policy;
use crate::selector::{PathCandidate, Selection, Work, first_with_window};

/// There is one candidate; the other paths wait.
#[derive(Debug)]
pub(super) struct Failover;

impl Policy for Failover {
    fn pick(&self, _: &mut Work, candidates: &[PathCandidate], _: u64) -> Option<Selection> {
        first_with_window(candidates).map(Selection::best)
    }

    fn fills_paths_in_order(&self) -> bool {
        true
    }

    fn uses_one_link(&self) -> bool {
        true
    }
}
