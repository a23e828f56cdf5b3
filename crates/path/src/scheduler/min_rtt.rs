//! `minrtt`: the path with the least round-trip time that has room.

use super::Policy;
use crate::selector::{PathCandidate, Selection, Work, first_with_room};

/// Paths are offered in the order of their round-trip times.
#[derive(Debug)]
pub(super) struct MinRtt;

impl Policy for MinRtt {
    fn pick(&self, _: &mut Work, offers: &[PathCandidate], _: u64) -> Option<Selection> {
        first_with_room(offers).map(Selection::best)
    }

    fn fills_paths_in_order(&self) -> bool {
        true
    }
}
