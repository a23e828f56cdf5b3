//! `weighted`: shares in proportion to the weights of the links.

use super::Policy;
use crate::selector::{MAX_WORK_DEFICIT_SECS, PathCandidate, Selection, Work};

/// The path that has carried the least, in bytes per unit of its weight.
#[derive(Debug)]
pub(super) struct Weighted;

impl Policy for Weighted {
    fn pick(&self, work: &mut Work, candidates: &[PathCandidate], _: u64) -> Option<Selection> {
        work.least(self, candidates).map(Selection::best)
    }

    fn share(&self, candidate: &PathCandidate) -> f64 {
        f64::from(candidate.weight.max(1))
    }

    /// The same time as for other schedulers, in bytes of the path's rate per unit of weight.
    fn max_deficit(&self, candidate: &PathCandidate) -> f64 {
        MAX_WORK_DEFICIT_SECS * candidate.rate as f64 / self.share(candidate)
    }
}
