//! What a path delivers, as its acknowledgements show it.
//!
//! In: acknowledged and lost packets. Out: the rate that the path has shown, in windows of about a round trip, and whether
//! more was lost in one than the path loses anyway.

use mpvpn_types::{Duration, Instant};

use crate::bbr::{EASE, LEAST_EASE};

/// FlowControlWindows over which the variation of delay evens out.
const SPANS: usize = 8;
/// More is lost than usual if chance alone would hardly ever do that: so many standard deviations.
const CHANCE: f64 = 3.0;
/// When the rate has fallen to this share for losses that no queue explains, and they go on, they come anyway.
const FALLEN: f64 = 0.75;

/// What was delivered in a window.
#[derive(Clone, Copy, Debug, Default)]
struct Span {
    bytes: u64,
    /// In what time it was acknowledged, and in what time it had been sent.
    acked_in: Duration,
    sent_in: Duration,
}

impl Span {
    /// Bytes/s. Acknowledgements that were held up and come all at once say nothing: no more was delivered in a time
    /// than was sent in it.
    fn rate(&self) -> u64 {
        let time = self.acked_in.max(self.sent_in);
        (u128::from(self.bytes) * 1_000_000_000 / time.as_nanos().max(1)) as u64
    }
}

/// What a path delivers, measured over windows of a round trip.
#[derive(Clone, Debug)]
pub(crate) struct Delivery {
    since: Instant,
    /// When the newest acknowledgement came: all packets of one are counted in one window.
    last: Instant,
    acked: u64,
    lost: u64,
    /// How many packets these are.
    packets: (u32, u32),
    /// The rate before losses began that no queue explains, and the windows since the last of them; 0 for none.
    before_losses: (u64, usize),
    /// When the newest packet acknowledged in this window and in the one before was sent.
    sent: Instant,
    sent_before: Instant,
    /// The path was never short of data in this window.
    full: bool,
    /// The least share of the rate that was sent in this window and in the one before.
    paced: f64,
    paced_before: f64,
    queued: bool,
    /// The last windows: where delay varies, one alone says little.
    spans: [Span; SPANS],
    newest: usize,
    /// The shortest round trip of this window.
    shortest: Duration,
    /// The longest round trip of this window.
    longest: Duration,
    rate: u64,
}

/// What [`Delivery`] found in a window.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Window {
    /// Bytes/s that were delivered.
    pub(crate) rate: u64,
    /// The shortest round trip.
    pub(crate) shortest: Duration,
    /// The longest one.
    pub(crate) longest: Duration,
    /// The share of bytes (0 to 1) that was lost.
    pub(crate) lost: f64,
    /// The path was never short of data.
    pub(crate) full: bool,
    /// Much more was lost than the path loses anyway.
    pub(crate) overflows: bool,
}

/// One acknowledged packet, as [`Delivery`] sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Acked {
    pub(crate) bytes: u64,
    /// When the newest packet acknowledged so far was sent; of several paths, their mean.
    pub(crate) sent: Instant,
    /// Its own round trip.
    pub(crate) rtt: Duration,
    /// The share of packets (0 to 1) that the path loses anyway.
    pub(crate) random_loss: f64,
    /// The shortest round trip of the path, with its queue empty.
    pub(crate) base: Duration,
    /// The sender had nothing more to send, or did not send all that it could.
    pub(crate) idle: bool,
    /// Less was sent than the path carries, on purpose: by this share (0 to 1, 1 is all).
    pub(crate) paced: f64,
    /// There is a queue on the way there for sure, or was a moment ago.
    pub(crate) queued: bool,
    /// What is lost on the way keeps back everything behind it, as inside TCP.
    pub(crate) in_order: bool,
}

impl Delivery {
    /// Acknowledgements come in bunches: shorter windows would measure those.
    const WINDOW: Duration = Duration::from_millis(20);
    /// A round trip may be this much longer because the far end holds acknowledgements back (5 ms) or
    /// waits for a processor.
    pub(crate) const ACK_DELAY: Duration = Duration::from_millis(8);
    /// Losses beyond what the path loses anyway, from which on too much is sent.
    const CONGESTION: f64 = 0.05;

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
            spans: [Span::default(); SPANS],
            newest: 0,
            shortest: Duration::MAX,
            longest: Duration::ZERO,
            rate: 0,
        }
    }

    /// Bytes/s in the last windows together.
    fn of_late(&self) -> u64 {
        self.over(Duration::MAX)
    }

    /// Bytes/s in the newest windows that together took so long, as far as there are so many.
    fn over(&self, time: Duration) -> u64 {
        let mut all = Span::default();
        for ago in 0..SPANS {
            let span = self.spans[(self.newest + SPANS - ago) % SPANS];
            all.bytes += span.bytes;
            all.acked_in += span.acked_in;
            all.sent_in += span.sent_in;
            if all.acked_in >= time {
                break;
            }
        }
        all.rate()
    }

    /// The rate shown (bytes/s), 0 if the path has not carried anything.
    pub(crate) fn rate(&self) -> u64 {
        self.rate
    }

    /// Takes the path for one that delivers at least `rate` (bytes/s), because that is known of its link.
    pub(crate) fn raise(&mut self, rate: u64) {
        self.rate = self.rate.max(rate);
    }

    /// Counts a lost packet.
    pub(crate) fn on_lost(&mut self, bytes: u64) {
        self.lost += bytes;
        self.packets.1 += 1;
    }

    /// Whether less is sent, for losses that no queue explains, than before they began.
    pub(crate) fn has_fallen(&self) -> bool {
        (self.rate as f64) < self.before_losses.0 as f64 * FALLEN
    }

    /// Whether more is lost in this window than the path loses anyway.
    fn overflows(&self, random_loss: f64) -> bool {
        let (acked, lost) = self.packets;
        let (all, lost) = (f64::from(acked + lost), f64::from(lost));
        let by_chance = CHANCE * (all * random_loss * (1.0 - random_loss) + 1.0).sqrt();
        lost > all * random_loss + by_chance.max(all * Self::CONGESTION)
    }

    /// Counts an acknowledged packet; returns the window that is complete.
    pub(crate) fn on_ack(&mut self, now: Instant, acked: Acked) -> Option<Window> {
        let time = self.last.saturating_duration_since(self.since);
        let mut complete = None;
        if now > self.last && time >= acked.base.max(Self::WINDOW) {
            let sent_in = self.sent.saturating_duration_since(self.sent_before);
            let span = Span { bytes: self.acked, acked_in: time, sent_in };
            self.newest = (self.newest + 1) % SPANS;
            self.spans[self.newest] = span;
            let lost = self.lost as f64 / (self.acked + self.lost).max(1) as f64;
            let overflows = self.overflows(acked.random_loss);
            // A queue that was never empty in this window was fed as fast as the path could go. One of the way back
            // says nothing.
            let longer = self.shortest > acked.base + acked.base / 8 + Self::ACK_DELAY;
            // What was kept back comes all at once, and nothing came before it.
            let kept = if acked.in_order && longer { self.shortest } else { Duration::ZERO };
            let sample = span.rate().min(self.over(kept).max(self.rate));
            let paced = self.paced.min(self.paced_before);
            let drained = paced < LEAST_EASE;
            let queued = self.queued && longer && sample > self.rate / 2 && !drained;
            let before_losses = match self.before_losses {
                (before, _) if overflows && self.shortest <= acked.base + Self::ACK_DELAY => {
                    (before.max(self.rate), 0)
                }
                (before, windows) if !overflows && windows < SPANS => (before, windows + 1),
                _ => (0, 0),
            };
            // A path that was full and delivered less than was sent has become slower, or was overrated; one that
            // was not full may only have been asked for less.
            let share = if drained { EASE } else { paced };
            let whole = (sample.max(self.of_late()) as f64 / share) as u64;
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

    /// So many bytes are acknowledged, a round trip after they were sent, on a path of 20 ms.
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
        assert!((9_500_000..12_000_000).contains(&delivery.rate()), "{}", delivery.rate());
    }

    #[test]
    fn what_a_loss_inside_tcp_kept_back_is_no_higher_rate() {
        let start = Instant::now();
        let mut delivery = Delivery::new(start);
        // More and more is sent, and 1 MB/s is carried. What the far end has from 100 ms on it tells at 200 and after.
        let mut told = 0;
        for at in 20..400u32 {
            let now = start + at * MS;
            let more = if (100..200).contains(&at) { 0 } else { 4 };
            for _ in 0..more.min(at - 20 - told) {
                told += 1;
                let acked = Acked { in_order: true, ..acked(now, 1_000, (at - told * 2 / 5) * MS) };
                delivery.on_ack(now, acked);
            }
            assert!(delivery.rate() < 1_300_000, "{} after {at} ms", delivery.rate());
        }
        assert!(delivery.rate() > 950_000, "{}", delivery.rate());
    }

    #[test]
    fn losses_beyond_the_usual_lower_the_rate_also_if_less_was_asked() {
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
                fallen.get_or_insert((at, delivery.rate()));
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
        assert_eq!(quiet.rate(), 10_000_000);
    }
}
