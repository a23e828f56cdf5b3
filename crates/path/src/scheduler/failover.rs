//! `failover`: the first link that works carries everything.

use super::Policy;
use crate::choice::{Offer, Pick, Work, first_with_room};

/// One path is offered; the others wait.
#[derive(Debug)]
pub(super) struct Failover;

impl Policy for Failover {
    fn pick(&self, _: &mut Work, offers: &[Offer], _: u64) -> Option<Pick> {
        first_with_room(offers).map(Pick::best)
    }

    fn fills_paths_in_order(&self) -> bool {
        true
    }

    fn uses_one_link(&self) -> bool {
        true
    }
}
