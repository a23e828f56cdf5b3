//! Which losses say nothing to a controller that takes every loss for congestion.
//!
//! In: packets sent, acknowledged and lost, the window, and what the path loses however little is sent. Out:
//! whether a loss is one that the medium explains. Always holds: no more packets are spared than the share
//! that was lost in the round trips after the window became smaller, since a queue no longer overflows there.

use mpvpn_types::Instant;

use crate::random_loss::{MIN_COMPENSATED_LOSS, RandomLoss};

/// Losses (packets) that may be spared at once, because those of a round trip are detected together. Smaller:
/// an ordinary bunch counts as congestion; larger: congestion is hidden. Chosen
/// (docs/design/congestion-control.md).
const MAX_SPARED: f64 = 32.0;

/// The losses of one path that are no sign of congestion.
#[derive(Clone, Debug, Default)]
pub(super) struct MediumLosses {
    /// The losses in the round trips after the window became smaller.
    after_reduction: RandomLoss,
    /// When it did, until a packet that was sent later is acknowledged.
    reduced: Option<Instant>,
    /// The window when the last packet was sent (bytes).
    window: u64,
    /// Losses (packets) that may still be spared; a token bucket that sent packets fill.
    spared: f64,
    /// Whether the medium is known to lose packets.
    known: bool,
    /// Whether a loss was not spared since the controller was last told of congestion.
    counts: bool,
}

impl MediumLosses {
    /// A packet is sent; `slow`: what is lost however little is sent. Returns whether this is the first
    /// packet for which the medium is known to lose some.
    pub(super) fn on_sent(&mut self, now: Instant, packet: u64, window: u64, slow: &RandomLoss) -> bool {
        if window < self.window {
            self.reduced = Some(now);
        }
        self.window = window;
        self.after_reduction.on_sent(packet, self.reduced.is_some());
        let share = slow.most().min(self.after_reduction.most());
        let is_known = slow.measured().is_some_and(|measured| measured.min(share) >= MIN_COMPENSATED_LOSS);
        let was_known = std::mem::replace(&mut self.known, is_known);
        self.spared = match (was_known, is_known) {
            (_, false) => 0.0,
            (false, true) => MAX_SPARED,
            (true, true) => (self.spared + share).min(MAX_SPARED),
        };
        let begins = is_known && !was_known;
        self.counts &= !begins;
        begins
    }

    /// A packet that was sent at `sent` is acknowledged.
    pub(super) fn on_acked(&mut self, packet: u64, sent: Instant) {
        self.after_reduction.on_outcome(packet, false);
        self.reduced = self.reduced.filter(|reduced| sent < *reduced);
    }

    /// A packet is lost.
    pub(super) fn on_lost(&mut self, packet: u64) {
        self.after_reduction.on_outcome(packet, true);
        if self.spared >= 1.0 {
            self.spared -= 1.0;
        } else {
            self.counts = true;
        }
    }

    /// Whether more was lost since the last call than the medium explains.
    pub(super) fn take_congestion(&mut self) -> bool {
        std::mem::take(&mut self.counts)
    }
}

#[cfg(test)]
mod tests {
    use mpvpn_types::Duration;

    use super::*;

    /// Packets that the path holds.
    const HELD: u64 = 100;

    /// The mean window (packets) over the last half of 400 round trips of a sender that is less by a third
    /// after congestion, and more by two packets in other round trips. The path loses one packet of `one_in`,
    /// and every second one of those that it does not hold.
    fn mean_window(one_in: u64) -> u64 {
        let start = Instant::now();
        let (mut slow, mut medium) = (RandomLoss::default(), MediumLosses::default());
        let (mut window, mut next, mut sum) = (32, 0, 0);
        for trip in 0..400 {
            let sent = start + trip * Duration::from_millis(20);
            let all = next..next + window;
            next = all.end;
            for packet in all.clone() {
                slow.on_sent(packet, window < HELD);
                if medium.on_sent(sent, packet, window, &slow) {
                    window = 32;
                }
            }
            for packet in all.clone() {
                let is_lost = packet % one_in == 0 || packet >= all.start + HELD && packet.is_multiple_of(2);
                slow.on_outcome(packet, is_lost);
                if is_lost { medium.on_lost(packet) } else { medium.on_acked(packet, sent) }
            }
            window = if medium.take_congestion() { (window * 2 / 3).max(2) } else { window + 2 };
            sum += if trip >= 200 { window } else { 0 };
        }
        sum / 200
    }

    #[test]
    fn what_is_lost_however_little_is_sent_is_no_congestion() {
        let usual = mean_window(u64::MAX);
        assert!((70..120).contains(&usual), "{usual}");
        for one_in in [40, 8, 3] {
            let lossy = mean_window(one_in);
            assert!((70..150).contains(&lossy), "one in {one_in}: {lossy} packets");
        }
    }
}
