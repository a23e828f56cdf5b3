//! `failover`: the first link that works carries everything.

use super::Policy;
use crate::selector::{PathCandidate, Selection, Work, first_with_room};

/// One path is offered; the others wait.
#[derive(Debug)]
pub(super) struct Failover;

impl Policy for Failover {
    fn pick(&self, _: &mut Work, offers: &[PathCandidate], _: u64) -> Option<Selection> {
        first_with_room(offers).map(Selection::best)
    }

    fn fills_paths_in_order(&self) -> bool {
        true
    }

    fn uses_one_link(&self) -> bool {
        true
    }
}
