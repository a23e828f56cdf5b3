//! `flow`: a flow is pinned to a path while that is alive.

use super::Policy;
use crate::selector::{PathCandidate, Selection, Work, first_with_window};

/// The dispatcher pins flows to paths; a path carries the packets of its own flows.
#[derive(Debug)]
pub(super) struct Flow;

impl Policy for Flow {
    fn pick(&self, _: &mut Work, candidates: &[PathCandidate], _: u64) -> Option<Selection> {
        first_with_window(candidates).map(Selection::best)
    }

    fn fills_paths_in_order(&self) -> bool {
        true
    }

    fn keeps_flows_on_paths(&self) -> bool {
        true
    }
}
