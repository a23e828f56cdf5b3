//! Losses of a path.
//!
//! In: noq's counters of packets sent and lost. Out: the bytes lost since the last call, and the share of
//! packets lost in the last 10 s. Always holds: every lost byte is reported once.

use crate::path_stats::LossWindow;

/// Losses up to this multiple of the constant loss do not count as congestion (CUBIC on a path with FEC), as
/// losses come in bunches. Smaller: an ordinary bunch shrinks the window; larger: congestion is hidden.
const IGNORED_LOSS_RATIO: f64 = 1.25;

/// The losses of one path.
#[derive(Debug, Default)]
pub(crate) struct Losses {
    /// Lost bytes that were reported so far.
    reported: u64,
    pub(crate) window: LossWindow,
    /// Whether FEC restores the constant loss.
    pub(crate) repaired: bool,
}

impl Losses {
    /// The bytes lost since the last call; `total`: the bytes that were ever lost.
    pub(crate) fn newly_lost(&mut self, total: u64) -> u64 {
        total.saturating_sub(std::mem::replace(&mut self.reported, total))
    }

    /// The share of packets (0 to 1) whose loss does not count as congestion.
    pub(crate) fn ignored_loss_share(&self) -> f64 {
        if self.repaired { self.window.constant_loss() * IGNORED_LOSS_RATIO } else { 0.0 }
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

    #[test]
    fn only_repaired_losses_are_ignored() {
        let mut losses = Losses::default();
        for second in 0..4 {
            losses.window.update(second, (1000 * (second + 1), 100 * (second + 1)), false);
        }
        assert_eq!(losses.ignored_loss_share(), 0.0);
        losses.repaired = true;
        // 10 % and two standard deviations more, by 1.25.
        assert!((0.14..0.16).contains(&losses.ignored_loss_share()), "{}", losses.ignored_loss_share());
    }
}
