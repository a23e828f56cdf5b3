//! `balanced`: shares in proportion to the rates that the paths have shown.

use super::Policy;
use crate::choice::{Offer, Pick, Work};

/// The path that has done the least, in seconds of its rate.
#[derive(Debug)]
pub(super) struct Balanced;

impl Policy for Balanced {
    fn pick(&self, work: &mut Work, offers: &[Offer], _: u64) -> Option<Pick> {
        work.least(self, offers).map(Pick::best)
    }
}
