//! The delivery rate of a path.
//!
//! In: acknowledged and lost packets. Out: the delivery rate, measured in windows of about a round trip, and
//! whether more was lost in a window than the random loss explains. Always holds: the rate falls only if the
//! path was full or overflowed.

use mpvpn_types::{Duration, Instant};

use crate::bbr::{MIN_EASE, QUEUE_CRUISE_GAIN};

/// Windows over which the variation of delay evens out before the rate is lowered. Fewer: the rate falls by
/// noise; more: it falls late.
const AVERAGED_WINDOWS: usize = 8;
/// Losses of this many standard deviations above the random loss are an overflow. Fewer: windows overflow by
/// chance; more: real congestion is missed.
const OVERFLOW_DEVIATIONS: f64 = 3.0;
/// If losses without a queue go on while the rate has fallen below this share of what it was before, they are
/// random. Not derived (docs/design/congestion-control.md).
const FALLEN_RATE_SHARE: f64 = 0.75;

/// The bytes and durations of one window.
#[derive(Clone, Copy, Debug, Default)]
struct DeliveryWindow {
    bytes: u64,
    /// In what time the bytes were acknowledged, and in what time they had been sent.
    acked_in: Duration,
    sent_in: Duration,
}

impl DeliveryWindow {
    /// The delivery rate (bytes/s), limited by the rate at which the bytes were sent: acknowledgements that
    /// were held up arrive all at once.
    fn rate(&self) -> u64 {
        let time = self.acked_in.max(self.sent_in);
        (u128::from(self.bytes) * 1_000_000_000 / time.as_nanos().max(1)) as u64
    }
}

/// The delivery rate of a path, measured in windows of about a round trip.
#[derive(Clone, Debug)]
pub(crate) struct Delivery {
    since: Instant,
    /// When the newest acknowledgement arrived; all packets of one belong to one window.
    last: Instant,
    acked: u64,
    lost: u64,
    /// The number of acknowledged and lost packets of this window.
    packets: (u32, u32),
    /// The rate before losses without a queue began (0 for none), and the windows since the last of them.
    before_losses: (u64, usize),
    /// When the newest acknowledged packet of this window, and of the one before, was sent.
    sent: Instant,
    sent_before: Instant,
    /// Whether data always waited for the path in this window.
    full: bool,
    /// The least share of the rate that was sent in this window, and in the one before.
    paced: f64,
    paced_before: f64,
    queued: bool,
    /// The last windows, because one alone says little where delay varies.
    spans: [DeliveryWindow; AVERAGED_WINDOWS],
    newest: usize,
    /// The shortest round trip of this window.
    shortest: Duration,
    /// The longest round trip of this window.
    longest: Duration,
    /// The delivery rate (bytes/s), 0 before the first window.
    pub(crate) rate: u64,
}

/// The measurements of a complete window.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Window {
    /// The delivery rate (bytes/s).
    pub(crate) rate: u64,
    /// The shortest round trip.
    pub(crate) shortest: Duration,
    /// The longest one.
    pub(crate) longest: Duration,
    /// The share of bytes (0 to 1) that was lost.
    pub(crate) lost: f64,
    /// Whether data always waited for the path.
    pub(crate) full: bool,
    /// Whether more was lost than the random loss explains.
    pub(crate) overflows: bool,
}

/// One acknowledged packet, with the state of its path.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Acked {
    pub(crate) bytes: u64,
    /// When the newest acknowledged packet was sent; the mean over the paths of a group.
    pub(crate) sent: Instant,
    /// The round trip of this packet.
    pub(crate) rtt: Duration,
    /// The random loss of the path (share of packets, 0 to 1).
    pub(crate) random_loss: f64,
    /// The base round-trip time of the path.
    pub(crate) base: Duration,
    /// Whether no more data waited, less was sent on purpose, or this process was late.
    pub(crate) idle: bool,
    /// The share of the rate that was sent on purpose (0 to 1).
    pub(crate) paced: f64,
    /// Whether a queue probe has found a queue lately.
    pub(crate) queued: bool,
    /// Whether a loss delays all later packets, as inside TCP.
    pub(crate) in_order: bool,
}

impl Delivery {
    /// The least duration of a window. Shorter: bunches of acknowledgements are measured; longer: slow
    /// reaction.
    const MIN_WINDOW: Duration = Duration::from_millis(20);
    /// Extra delay of a round trip that is no queue: the peer holds acknowledgements back (5 ms) or waits for
    /// a processor. Shorter: a late processor looks like a queue; longer: short queues are not seen.
    pub(crate) const ACK_DELAY: Duration = Duration::from_millis(8);
    /// The share of losses beyond random loss that is an overflow. Smaller: chance looks like congestion;
    /// larger: overflow goes unnoticed.
    const OVERFLOW_LOSS: f64 = 0.05;

    pub(crate) fn new(now: Instant) -> Self {
        Self {
            since: now,
            last: now,
            acked: 0,
            lost: 0,
            packets: (0, 0),
            before_losses: (0, 0),
            sent: now,
            sent_before: now,
            full: true,
            paced: 1.0,
            paced_before: 1.0,
            queued: false,
            spans: [DeliveryWindow::default(); AVERAGED_WINDOWS],
            newest: 0,
            shortest: Duration::MAX,
            longest: Duration::ZERO,
            rate: 0,
        }
    }

    /// The delivery rate (bytes/s) over the last windows together.
    fn recent_rate(&self) -> u64 {
        self.rate_over(Duration::MAX)
    }

    /// The delivery rate (bytes/s) over the newest windows that together lasted `time`, or over all of them.
    fn rate_over(&self, time: Duration) -> u64 {
        let mut all = DeliveryWindow::default();
        for ago in 0..AVERAGED_WINDOWS {
            let span = self.spans[(self.newest + AVERAGED_WINDOWS - ago) % AVERAGED_WINDOWS];
            all.bytes += span.bytes;
            all.acked_in += span.acked_in;
            all.sent_in += span.sent_in;
            if all.acked_in >= time {
                break;
            }
        }
        all.rate()
    }

    /// Raises the rate to at least `rate` (bytes/s), because the shaper of the link lets that pass.
    pub(crate) fn raise(&mut self, rate: u64) {
        self.rate = self.rate.max(rate);
    }

    /// Counts a lost packet.
    pub(crate) fn on_lost(&mut self, bytes: u64) {
        self.lost += bytes;
        self.packets.1 += 1;
    }

    /// Whether losses without a queue have lowered the rate below [`FALLEN_RATE_SHARE`] of what it was
    /// before.
    pub(crate) fn has_fallen(&self) -> bool {
        (self.rate as f64) < self.before_losses.0 as f64 * FALLEN_RATE_SHARE
    }

    /// Whether more is lost in this window than random loss explains.
    fn overflows(&self, random_loss: f64) -> bool {
        let (acked, lost) = self.packets;
        let (all, lost) = (f64::from(acked + lost), f64::from(lost));
        let by_chance = OVERFLOW_DEVIATIONS * (all * random_loss * (1.0 - random_loss) + 1.0).sqrt();
        lost > all * random_loss + by_chance.max(all * Self::OVERFLOW_LOSS)
    }

    /// Counts an acknowledged packet; returns the window that it completes.
    pub(crate) fn on_ack(&mut self, now: Instant, acked: Acked) -> Option<Window> {
        let time = self.last.saturating_duration_since(self.since);
        let mut complete = None;
        if now > self.last && time >= acked.base.max(Self::MIN_WINDOW) {
            let sent_in = self.sent.saturating_duration_since(self.sent_before);
            let span = DeliveryWindow { bytes: self.acked, acked_in: time, sent_in };
            self.newest = (self.newest + 1) % AVERAGED_WINDOWS;
            self.spans[self.newest] = span;
            let lost = self.lost as f64 / (self.acked + self.lost).max(1) as f64;
            let overflows = self.overflows(acked.random_loss);
            // With a forward queue in all of this window the path was full; a queue on the return path says
            // nothing.
            let longer = self.shortest > acked.base + acked.base / 8 + Self::ACK_DELAY;
            // Inside TCP, delayed packets arrive all at once after a gap, so the rate is measured over the
            // whole round trip.
            let measured_over = if acked.in_order && longer { self.shortest } else { Duration::ZERO };
            let sample = span.rate().min(self.rate_over(measured_over).max(self.rate));
            let paced = self.paced.min(self.paced_before);
            let drained = paced < MIN_EASE;
            let queued = self.queued && longer && sample > self.rate / 2 && !drained;
            let before_losses = match self.before_losses {
                (before, _) if overflows && self.shortest <= acked.base + Self::ACK_DELAY => {
                    (before.max(self.rate), 0)
                }
                (before, windows) if !overflows && windows < AVERAGED_WINDOWS => (before, windows + 1),
                _ => (0, 0),
            };
            // A full path that delivered less than was sent has become slower, or was overrated; otherwise
            // less was sent.
            let share = if drained { QUEUE_CRUISE_GAIN } else { paced };
            let whole = (sample.max(self.recent_rate()) as f64 / share) as u64;
            self.rate = match self.full || queued {
                _ if overflows => (self.rate - self.rate / 16).max(sample),
                true => (self.rate - self.rate / 32).max(whole.min(self.rate)).max(sample),
                false => self.rate.max(sample),
            };
            let Self { shortest, longest, full, .. } = *self;
            complete = Some(Window { rate: sample, shortest, longest, lost, full, overflows });
            *self = Self {
                since: self.last,
                rate: self.rate,
                before_losses,
                sent: self.sent,
                sent_before: self.sent,
                paced_before: self.paced,
                spans: self.spans,
                newest: self.newest,
                ..Self::new(now)
            };
        }
        self.last = now;
        self.acked += acked.bytes;
        self.packets.0 += 1;
        self.sent = self.sent.max(acked.sent);
        self.full &= !acked.idle;
        self.paced = self.paced.min(acked.paced);
        self.queued = acked.queued;
        self.shortest = self.shortest.min(acked.rtt);
        self.longest = self.longest.max(acked.rtt);
        complete
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// An acknowledgement of `bytes` that were sent `rtt` ago, on a path of 20 ms.
    fn acked(now: Instant, bytes: u64, rtt: Duration) -> Acked {
        Acked {
            bytes,
            sent: now - rtt,
            rtt,
            random_loss: 0.0,
            base: 20 * MS,
            idle: true,
            paced: 1.0,
            queued: true,
            in_order: false,
        }
    }

    #[test]
    fn the_delivery_rate_follows_a_full_path_and_remembers_it_while_idle() {
        let start = Instant::now();
        let mut delivery = Delivery::new(start);
        let mut run = |from: u32, to: u32, bytes: u64, idle, rtt: u32| {
            for at in from..to {
                let acked = Acked { idle, ..acked(start + at * MS, bytes, rtt * MS) };
                // Two packets an acknowledgement.
                delivery.on_ack(start + at * MS, acked);
                delivery.on_ack(start + at * MS, acked);
            }
            delivery.rate
        };
        assert!((9_900_000..10_100_000).contains(&run(1, 1000, 5_000, false, 20)));
        assert!((9_900_000..10_100_000).contains(&run(1000, 5000, 50, true, 20)));
        assert!((4_900_000..5_100_000).contains(&run(5000, 7000, 2_500, false, 20)));
        assert!((3_900_000..4_100_000).contains(&run(7000, 9000, 2_000, true, 50)), "a standing queue");
        assert!((3_800_000..4_100_000).contains(&run(9000, 11_000, 100, true, 50)), "little was sent");
    }

    #[test]
    fn a_queue_on_the_way_back_does_not_lower_the_rate() {
        let start = Instant::now();
        let mut delivery = Delivery { rate: 150_000, ..Delivery::new(start) };
        for at in 0..5000u32 {
            let acked = Acked { queued: false, ..acked(start + at * MS, 100, 50 * MS) };
            delivery.on_ack(start + at * MS, acked);
        }
        assert!(delivery.rate >= 150_000, "{}", delivery.rate);
    }

    #[test]
    fn acknowledgements_in_a_bunch_are_no_higher_rate() {
        let start = Instant::now();
        let mut delivery = Delivery::new(start);
        // 10 MB/s sent evenly; what was held up for 60 ms is acknowledged within 20.
        for at in 1..2000u32 {
            let arrival = 20 + at + 40_u32.saturating_sub(at % 60);
            let now = start + arrival * MS;
            delivery.on_ack(now, acked(now, 10_000, (arrival - at) * MS));
        }
        assert!((9_500_000..12_000_000).contains(&delivery.rate), "{}", delivery.rate);
    }

    #[test]
    fn packets_delayed_by_a_loss_inside_tcp_are_no_higher_rate() {
        let start = Instant::now();
        let mut delivery = Delivery::new(start);
        // More and more is sent, and 1 MB/s is carried. What arrives from 100 ms on is acknowledged from 200
        // ms on.
        let mut told = 0;
        for at in 20..400u32 {
            let now = start + at * MS;
            let more = if (100..200).contains(&at) { 0 } else { 4 };
            for _ in 0..more.min(at - 20 - told) {
                told += 1;
                let acked = Acked { in_order: true, ..acked(now, 1_000, (at - told * 2 / 5) * MS) };
                delivery.on_ack(now, acked);
            }
            assert!(delivery.rate < 1_300_000, "{} after {at} ms", delivery.rate);
        }
        assert!(delivery.rate > 950_000, "{}", delivery.rate);
    }

    #[test]
    fn losses_beyond_random_loss_lower_the_rate_also_if_less_was_sent() {
        let start = Instant::now();
        let mut delivery = Delivery { rate: 10_000_000, ..Delivery::new(start) };
        let mut run = |from: u32, random_loss| {
            for at in from..from + 1000 {
                let acked = Acked { random_loss, ..acked(start + at * MS, 1_000, 20 * MS) };
                for _ in 0..8 {
                    delivery.on_ack(start + at * MS, acked);
                }
                delivery.on_lost(1_000);
            }
            delivery.rate
        };
        assert_eq!(run(1, 0.1), 10_000_000);
        assert!(run(1001, 0.0) < 8_500_000);
    }

    #[test]
    fn losses_that_go_on_while_less_is_sent_are_noticed_and_chance_is_no_loss() {
        let start = Instant::now();
        let mut delivery = Delivery { rate: 10_000_000, ..Delivery::new(start) };
        let mut fallen = None;
        for at in 1..1000u32 {
            let acked = acked(start + at * MS, 1_000, 20 * MS);
            for _ in 0..4 {
                delivery.on_ack(start + at * MS, acked);
            }
            delivery.on_lost(1_000);
            if delivery.has_fallen() {
                fallen.get_or_insert((at, delivery.rate));
            }
        }
        let (at, rate) = fallen.expect("it has fallen");
        assert!(at < 300 && rate > 6_500_000, "after {at} ms, {rate} bytes/s are left");

        let mut quiet = Delivery { rate: 10_000_000, ..Delivery::new(start) };
        for at in 1..1000u32 {
            let acked = Acked { random_loss: 0.1, ..acked(start + at * MS, 1_000, 20 * MS) };
            // Three or four packets a window, one of which is lost at times.
            if at % 6 == 0 {
                quiet.on_ack(start + at * MS, acked);
            }
            if at % 60 == 0 {
                quiet.on_lost(1_000);
            }
        }
        assert_eq!(quiet.rate, 10_000_000);
    }
}
