//! `redundant`: every packet leaves on all paths, and the first copy to arrive wins.

use super::Policy;
use crate::selector::{PathCandidate, Selection, Work, first_to_arrive};

/// The original leaves on the path where it arrives first; copies leave on all others.
#[derive(Debug)]
pub(super) struct Redundant;

impl Policy for Redundant {
    fn pick(&self, _: &mut Work, candidates: &[PathCandidate], _: u64) -> Option<Selection> {
        first_to_arrive(candidates).map(Selection::best)
    }
}
