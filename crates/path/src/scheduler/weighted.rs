//! `weighted`: shares in proportion to the weights of the links.

use super::Policy;
use crate::selector::{MOST_SAVED, PathCandidate, Selection, Work};

/// The path that has done the least, in bytes a unit of its weight.
#[derive(Debug)]
pub(super) struct Weighted;

impl Policy for Weighted {
    fn pick(&self, work: &mut Work, offers: &[PathCandidate], _: u64) -> Option<Selection> {
        work.least(self, offers).map(Selection::best)
    }

    fn share(&self, offer: &PathCandidate) -> f64 {
        f64::from(offer.weight.max(1))
    }

    /// In bytes a unit of weight, the same time is as many bytes as the rate carries.
    fn most_saved(&self, offer: &PathCandidate) -> f64 {
        MOST_SAVED * offer.rate as f64 / self.share(offer)
    }
}
