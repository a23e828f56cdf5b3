//! How much a path loses however little is sent on it.

/// Packets that an estimate is made of at least.
const ENOUGH: u32 = 60;
/// Older packets count half when this many are known.
const MANY: u32 = 600;
/// Losses up to this share are left alone: a path that is a little overrated may drop as much even then.
const NOISE: f64 = 0.01;
/// No more than this share is made up for.
pub(crate) const MOST: f64 = 0.6;
/// Spans that are remembered: packets of the span before last are settled.
const SPANS: usize = 4;

/// The losses among packets that were sent more slowly than the path can.
///
/// A queue that overflows loses packets while too many are sent; a bad radio link loses them always.
#[derive(Clone, Debug, Default)]
pub(crate) struct RandomLoss {
    /// Numbers of packets that were sent slowly: first, and one behind the last.
    spans: [(u64, u64); SPANS],
    newest: usize,
    /// The newest span is not over.
    open: bool,
    acked: u32,
    lost: u32,
}

impl RandomLoss {
    /// A packet is sent; `slowly`: below the rate of the path.
    pub(crate) fn on_sent(&mut self, packet: u64, slowly: bool) {
        if !slowly {
            self.open = false;
        } else if self.open {
            self.spans[self.newest].1 = packet + 1;
        } else {
            self.newest = (self.newest + 1) % SPANS;
            self.spans[self.newest] = (packet, packet + 1);
            self.open = true;
        }
    }

    /// A packet was acknowledged or lost.
    pub(crate) fn on_fate(&mut self, packet: u64, lost: bool) {
        if !self.spans.iter().any(|(first, end)| (*first..*end).contains(&packet)) {
            return;
        }
        if lost {
            self.lost += 1;
        } else {
            self.acked += 1;
        }
        if self.acked + self.lost >= MANY {
            (self.acked, self.lost) = (self.acked / 2, self.lost / 2);
        }
    }

    /// What was seen so far counts little from now on.
    pub(crate) fn forget(&mut self) {
        let all = self.acked + self.lost;
        if all > ENOUGH {
            self.lost = self.lost * ENOUGH / all;
            self.acked = ENOUGH - self.lost;
        }
    }

    /// The share of packets (0 to 1) that is lost for no fault of the sender.
    pub(crate) fn share(&self) -> f64 {
        self.measured().map_or(0.0, |share| (share - NOISE).clamp(0.0, MOST))
    }

    /// The share that was lost of packets that were sent slowly, once there were enough of them.
    pub(crate) fn measured(&self) -> Option<f64> {
        let all = self.acked + self.lost;
        (all >= ENOUGH).then(|| f64::from(self.lost) / f64::from(all))
    }
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
            loss.on_fate(packet, !slowly && packet % 5 == 0);
        }
        assert_eq!(loss.share(), 0.0);
    }

    #[test]
    fn a_path_that_loses_a_third_is_known_for_it() {
        let mut loss = RandomLoss::default();
        for packet in 0..9000u64 {
            loss.on_sent(packet, packet % 400 < 50);
            loss.on_fate(packet, packet % 3 == 0);
        }
        assert!((0.29..0.35).contains(&loss.share()), "{}", loss.share());
        for packet in 9000..12_000u64 {
            loss.on_sent(packet, true);
            loss.on_fate(packet, false);
        }
        assert_eq!(loss.share(), 0.0, "and not for ever");
    }
}
