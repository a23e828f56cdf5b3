//! `redundant`: every packet leaves on all paths, and the first copy to arrive wins.

use super::Policy;
use crate::choice::{Offer, Pick, Work, first_to_arrive};

/// The original leaves on the path where it arrives first.
#[derive(Debug)]
pub(super) struct Redundant;

impl Policy for Redundant {
    fn pick(&self, _: &mut Work, offers: &[Offer], _: u64) -> Option<Pick> {
        first_to_arrive(offers).map(Pick::best)
    }

    fn uses_all_paths(&self) -> bool {
        true
    }
}
