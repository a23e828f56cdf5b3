//! Losses of a path.
//!
//! In: noq's counters of packets sent and lost. Out: the bytes lost since the last call, and the share of
//! packets lost in the last 10 s. Always holds: every lost byte is reported once.

use crate::path_stats::LossWindow;

/// The losses of one path.
#[derive(Debug, Default)]
pub(crate) struct Losses {
    /// Lost bytes that were reported so far.
    reported: u64,
    pub(crate) window: LossWindow,
}

impl Losses {
    /// The bytes lost since the last call; `total`: the bytes that were ever lost.
    pub(crate) fn newly_lost(&mut self, total: u64) -> u64 {
        total.saturating_sub(std::mem::replace(&mut self.reported, total))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_lost_byte_is_reported_once() {
        let mut losses = Losses::default();
        assert_eq!([1200, 1200, 3000].map(|total| losses.newly_lost(total)), [1200, 0, 1800]);
    }
}
