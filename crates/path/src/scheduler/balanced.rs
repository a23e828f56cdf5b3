//! `balanced`: shares in proportion to the rates that the paths have shown.

use super::Policy;
use crate::selector::{PathCandidate, Selection, Work};

/// The path that has done the least, in seconds of its rate.
#[derive(Debug)]
pub(super) struct Balanced;

impl Policy for Balanced {
    fn pick(&self, work: &mut Work, offers: &[PathCandidate], _: u64) -> Option<Selection> {
        work.least(self, offers).map(Selection::best)
    }
}
