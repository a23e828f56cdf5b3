//! `balanced`: shares in proportion to the measured rates of the paths.

use super::Policy;
use crate::selector::{PathCandidate, Selection, Work};

/// The path that has carried the least, in seconds of its rate.
#[derive(Debug)]
pub(super) struct Balanced;

impl Policy for Balanced {
    fn pick(&self, work: &mut Work, candidates: &[PathCandidate], _: u64) -> Option<Selection> {
        work.least(self, candidates).map(Selection::best)
    }
}
