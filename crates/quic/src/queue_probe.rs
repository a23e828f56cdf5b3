//! Whether the delay of a path is a queue: less is sent for a moment, and packets get quicker or they do not.
//!
//! A stream on a path whose delay varies is slower than a lone packet, and so is one behind a queue. Nothing in the
//! delays themselves tells one from the other, nor whether a queue is on the way there or on the way back; a queue on
//! the way there alone goes away when less is sent than the path carries. This costs half of the rate for tens of
//! milliseconds, and only where the two differ.

use mpvpn_types::{Duration, Instant};

/// The share of the rate that is sent meanwhile.
pub(crate) const GAIN: f64 = 0.5;
/// A finding counts for this long.
const VALID: Duration = Duration::from_secs(15);
/// A queue that was found counts as there for this long.
const PROVEN: Duration = Duration::from_millis(1500);
/// A queue that is back after this time is looked at again, which ends it.
const EVERY: Duration = Duration::from_secs(1);
/// How long packets are looked at once the queue must be gone.
const LOOK: Duration = Duration::from_millis(15);
/// The longest queue that is waited for.
const MOST: Duration = Duration::from_millis(100);

/// One look at a path.
#[derive(Clone, Copy, Debug)]
struct Look {
    /// Packets that are sent from here on find no queue.
    from: Instant,
    /// Until here less is sent.
    to: Instant,
    /// By then their acknowledgements have come.
    end: Instant,
    shortest: Duration,
    /// All round trips of these packets, and how many they are.
    sum: Duration,
    count: u32,
    /// At this mean, or below, there was a queue.
    less: Duration,
    /// At this mean of late, or below, the queue is gone already.
    gone: Duration,
    /// Less is sent still.
    slow: bool,
}

/// The looks at a path, and what the last one showed.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct QueueProbe {
    look: Option<Look>,
    /// The shortest round trip of a stream without a queue, and when it was found.
    found: Option<(Duration, Instant)>,
    /// When a queue went away.
    proven: Option<Instant>,
    /// When the last look ended.
    last: Option<Instant>,
}

impl QueueProbe {
    /// Begins a look if it is time: a stream's round trip is at least `stream` and `mean` in the mean, that of a lone
    /// packet at most `lone`.
    pub(crate) fn begin(&mut self, now: Instant, stream: Duration, mean: Duration, lone: Duration) {
        let recent = self.last.is_some_and(|at| now.saturating_duration_since(at) < EVERY);
        if self.look.is_some() || recent || stream <= lone {
            return;
        }
        // At half of the rate a queue shrinks by half of the time.
        let queue = (stream - lone).min(MOST);
        let from = now + queue * 2 + queue / 2;
        let to = from + LOOK;
        let less = mean.saturating_sub((stream - lone) / 2);
        let end = to + mean.max(stream) * 2;
        self.look = Some(Look {
            from,
            to,
            end,
            shortest: Duration::MAX,
            sum: Duration::ZERO,
            count: 0,
            less,
            gone: lone + (stream - lone) / 4,
            slow: true,
        });
    }

    /// Takes a sample of the round-trip time, and the mean of late with it.
    pub(crate) fn on_rtt(&mut self, now: Instant, rtt: Duration, mean: Duration) {
        if self.found.is_some_and(|(_, at)| now.saturating_duration_since(at) > VALID) {
            self.found = None;
        }
        let Some(look) = &mut self.look else { return };
        look.slow = now < look.to;
        if mean <= look.gone {
            // What a lone packet takes is all that is left.
            (self.look, self.found, self.proven, self.last) = (None, None, Some(now), Some(now));
            return;
        }
        let sent = now.checked_sub(rtt).unwrap_or(now);
        if (look.from..look.to).contains(&sent) {
            look.shortest = look.shortest.min(rtt);
            look.sum += rtt;
            look.count += 1;
        }
        if now >= look.end || sent >= look.to {
            if look.count > 0 {
                // Where delay varies some packets are quick whatever is done: it is the mean that counts.
                let mean = look.sum / look.count;
                let is_queue = mean <= look.less;
                self.found = Some((if is_queue { look.shortest } else { mean }, now));
                self.proven = is_queue.then_some(now);
                self.last = Some(now);
            }
            self.look = None;
        }
    }

    /// Whether there was a queue at the last look, not long ago.
    pub(crate) fn is_proven(&self, now: Instant) -> bool {
        self.proven.is_some_and(|at| now.saturating_duration_since(at) < PROVEN)
    }

    /// When a queue went away last.
    pub(crate) fn proven(&self) -> Option<Instant> {
        self.proven
    }

    /// Whether less is to be sent now.
    pub(crate) fn is_slow(&self) -> bool {
        self.look.is_some_and(|look| look.slow)
    }

    /// Whether what is delivered now says nothing about what the path can do.
    pub(crate) fn is_looking(&self) -> bool {
        self.look.is_some()
    }

    /// The shortest round trip of a stream without a queue, if that was looked at lately.
    pub(crate) fn found(&self) -> Option<Duration> {
        self.found.map(|(rtt, _)| rtt)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// A path of 10 ms with a standing queue, and delay of `varies` beyond; what a look finds, and whether a queue.
    fn look(queue: Duration, varies: Duration) -> (Option<Duration>, bool) {
        let start = Instant::now();
        let mut settle = QueueProbe::default();
        let stream = 10 * MS + queue + varies;
        settle.begin(start, stream, stream, 10 * MS);
        assert!(settle.is_slow());
        let (mut waiting, mut mean) = (queue, stream);
        for tenth in 0..3000 {
            let sent = start + tenth * MS / 10;
            // Half of what the path carries is sent while the look lasts, as much as it carries after it.
            if settle.is_slow() {
                waiting = waiting.saturating_sub(MS / 20);
            }
            let rtt = 10 * MS + waiting + varies;
            mean = (mean * 7 + rtt) / 8;
            settle.on_rtt(sent + rtt, rtt, mean);
        }
        assert!(!settle.is_looking());
        (settle.found(), settle.is_proven(start + 300 * MS))
    }

    #[test]
    fn a_queue_goes_away_and_other_delay_stays() {
        assert_eq!(look(20 * MS, Duration::ZERO), (None, true), "nothing is left of it");
        assert_eq!(look(Duration::ZERO, 12 * MS), (Some(22 * MS), false));
        assert_eq!(look(15 * MS, 6 * MS), (Some(16 * MS), true));
    }

    #[test]
    fn some_quick_packets_are_no_sign_of_a_queue() {
        let start = Instant::now();
        let mut settle = QueueProbe::default();
        settle.begin(start, 15 * MS, 20 * MS, 8 * MS);
        let mut mean = 20 * MS;
        for ms in 0..200 {
            let rtt = if ms % 10 == 3 { 9 * MS } else { 20 * MS };
            mean = (mean * 7 + rtt) / 8;
            settle.on_rtt(start + ms * MS, rtt, mean);
        }
        assert!(!settle.is_proven(start + 200 * MS));
        assert!(settle.found() > Some(17 * MS));
    }

    #[test]
    fn a_path_is_looked_at_anew_only_after_a_while() {
        let start = Instant::now();
        let mut settle = QueueProbe::default();
        settle.begin(start, 10 * MS, 10 * MS, 10 * MS);
        assert!(!settle.is_looking(), "nothing to find out");
        settle.begin(start, 20 * MS, 20 * MS, 10 * MS);
        for ms in 0..100 {
            settle.on_rtt(start + ms * MS, 20 * MS, 20 * MS);
        }
        settle.begin(start + 100 * MS, 20 * MS, 20 * MS, 10 * MS);
        assert!(!settle.is_looking());
        settle.begin(start + 1_100 * MS, 20 * MS, 20 * MS, 10 * MS);
        assert!(settle.is_looking());
        for ms in 20_000..20_200 {
            settle.on_rtt(start + ms * MS, 20 * MS, 20 * MS);
        }
        assert!(!settle.is_looking(), "nothing was acknowledged for long");
        assert_eq!(settle.found(), None, "what was found is too old");
    }
}
