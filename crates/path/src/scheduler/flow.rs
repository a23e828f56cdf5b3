//! `flow`: a flow stays on its path while that is alive.

use super::Policy;
use crate::selector::{PathCandidate, Selection, Work, first_with_room};

/// The dispatcher places flows; what a path is given are the packets of its own.
#[derive(Debug)]
pub(super) struct Flow;

impl Policy for Flow {
    fn pick(&self, _: &mut Work, offers: &[PathCandidate], _: u64) -> Option<Selection> {
        first_with_room(offers).map(Selection::best)
    }

    fn fills_paths_in_order(&self) -> bool {
        true
    }

    fn keeps_flows_on_paths(&self) -> bool {
        true
    }
}
