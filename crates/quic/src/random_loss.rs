//! The random loss of a path: the share of packets that it loses at any rate.
//!
//! In: which packets were sent below the path's rate, and which packets were acknowledged or lost. Out: the
//! share of losses among them. Always holds: losses while the path was full do not count.

/// Packets from which an estimate is made. Fewer: noise; more: slow to follow.
const MIN_PACKETS: u32 = 60;
/// When this many packets are counted, all counts are halved. Fewer: noise; more: slow to follow.
const MAX_PACKETS: u32 = 600;
/// Losses up to this share are not compensated: a path whose rate is slightly overrated loses as much.
/// Smaller: overload is compensated; larger: random loss lowers the rate.
pub(crate) const MIN_COMPENSATED_LOSS: f64 = 0.01;
/// The largest share that is compensated: a path that loses more is useless.
pub(crate) const MAX_COMPENSATED_LOSS: f64 = 0.6;
/// Periods of slow sending that are remembered: the packets of the last but one have been acknowledged or
/// lost.
const SLOW_PERIODS: usize = 4;

/// The losses among packets that were sent below the path's rate.
///
/// An overflowing queue loses packets only while too many are sent; a bad radio link loses them at any rate.
#[derive(Clone, Debug, Default)]
pub(crate) struct RandomLoss {
    /// Ranges of packet numbers that were sent slowly: the first, and one behind the last.
    slow_ranges: [(u64, u64); SLOW_PERIODS],
    newest: usize,
    /// Whether the newest range still grows.
    open: bool,
    acked: u32,
    lost: u32,
}

impl RandomLoss {
    /// A packet is sent; `slowly`: below the path's rate.
    pub(crate) fn on_sent(&mut self, packet: u64, slowly: bool) {
        if !slowly {
            self.open = false;
        } else if self.open {
            self.slow_ranges[self.newest].1 = packet + 1;
        } else {
            self.newest = (self.newest + 1) % SLOW_PERIODS;
            self.slow_ranges[self.newest] = (packet, packet + 1);
            self.open = true;
        }
    }

    /// A packet was acknowledged or lost.
    pub(crate) fn on_outcome(&mut self, packet: u64, lost: bool) {
        if !self.slow_ranges.iter().any(|(first, end)| (*first..*end).contains(&packet)) {
            return;
        }
        if lost {
            self.lost += 1;
        } else {
            self.acked += 1;
        }
        if self.acked + self.lost >= MAX_PACKETS {
            (self.acked, self.lost) = (self.acked / 2, self.lost / 2);
        }
    }

    /// Gives the packets so far the least weight.
    pub(crate) fn forget(&mut self) {
        let all = self.acked + self.lost;
        if all > MIN_PACKETS {
            self.lost = self.lost * MIN_PACKETS / all;
            self.acked = MIN_PACKETS - self.lost;
        }
    }

    /// The share of packets (0 to 1) to compensate.
    pub(crate) fn share(&self) -> f64 {
        self.measured().map_or(0.0, compensated)
    }

    /// The most that the share may be (0 to 1): two standard deviations above what was counted.
    pub(crate) fn most(&self) -> f64 {
        let (lost, all) = (f64::from(self.lost), f64::from(self.acked + self.lost));
        ((lost + 2.0 * (lost + 1.0).sqrt()) / all.max(1.0)).min(1.0)
    }

    /// The share of losses among packets that were sent slowly, once there were enough of them.
    pub(crate) fn measured(&self) -> Option<f64> {
        let all = self.acked + self.lost;
        (all >= MIN_PACKETS).then(|| f64::from(self.lost) / f64::from(all))
    }
}

/// The share of packets (0 to 1) to compensate where this share is lost.
pub(crate) fn compensated(share: f64) -> f64 {
    (share - MIN_COMPENSATED_LOSS).clamp(0.0, MAX_COMPENSATED_LOSS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_of_a_full_path_do_not_count() {
        let mut loss = RandomLoss::default();
        for packet in 0..2000u64 {
            let slowly = packet % 400 < 50;
            loss.on_sent(packet, slowly);
            loss.on_outcome(packet, !slowly && packet % 5 == 0);
        }
        assert_eq!(loss.share(), 0.0);
    }

    #[test]
    fn a_path_that_loses_a_third_is_known_for_it() {
        let mut loss = RandomLoss::default();
        for packet in 0..9000u64 {
            loss.on_sent(packet, packet % 400 < 50);
            loss.on_outcome(packet, packet % 3 == 0);
        }
        assert!((0.29..0.35).contains(&loss.share()), "{}", loss.share());
        for packet in 9000..12_000u64 {
            loss.on_sent(packet, true);
            loss.on_outcome(packet, false);
        }
        assert_eq!(loss.share(), 0.0, "and not for ever");
    }
}
