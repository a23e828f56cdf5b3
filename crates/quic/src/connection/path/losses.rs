//! What a path loses.
//!
//! In: the totals that the library counts. Out: the bytes lost since the last question, and the share of packets lost in the
//! last 10 s. Always holds: every lost byte is reported once.

use crate::path_stats::LossWindow;

/// A congestion controller is spared this multiple of the losses that there are at all times, as losses come in bunches.
/// Less lets an ordinary bunch shrink the window; more hides congestion.
const SPARED: f64 = 1.25;

/// The losses of one path.
#[derive(Debug, Default)]
pub(crate) struct Losses {
    /// Bytes of lost packets that were reported.
    reported: u64,
    window: LossWindow,
    /// What the path loses is made good without being sent again.
    made_good: bool,
}

impl Losses {
    /// Of the bytes that were ever lost, those since this was asked last.
    pub(crate) fn newly_lost(&mut self, total: u64) -> u64 {
        total.saturating_sub(std::mem::replace(&mut self.reported, total))
    }

    /// Says whether losses are made good without being sent again.
    pub(crate) fn set_made_good(&mut self, made_good: bool) {
        self.made_good = made_good;
    }

    /// Takes the totals of packets sent and lost at `second`; losses of a `dead` path do not count.
    pub(crate) fn update(&mut self, second: u64, (sent, lost): (u64, u64), dead: bool) {
        self.window.update(second, (sent, lost), dead);
    }

    /// The share of packets (0 to 1) whose loss is not to count as congestion.
    pub(crate) fn spared(&self) -> f64 {
        if self.made_good { self.window.floor() * SPARED } else { 0.0 }
    }

    /// The share of packets lost in the last 10 s (0 to 1).
    pub(crate) fn share(&self) -> f64 {
        self.window.share()
    }

    /// Packets sent in the last 10 s.
    pub(crate) fn packets_sent(&self) -> u64 {
        self.window.sent()
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
    fn only_what_is_made_good_is_spared() {
        let mut losses = Losses::default();
        for second in 0..4 {
            losses.update(second, (1000 * (second + 1), 100 * (second + 1)), false);
        }
        assert_eq!(losses.spared(), 0.0);
        losses.set_made_good(true);
        // 10 % and two standard deviations more, by 1.25.
        assert!((0.14..0.16).contains(&losses.spared()), "{}", losses.spared());
    }
}
