//! The queue probe: less is sent for a moment, to see whether the delay of a path is a queue.
//!
//! In: round-trip samples. Out: whether less is to be sent, whether there was a queue, and the round-trip
//! time without one.
//!
//! A busy stream is slower than a lone packet both on a path with varying delay and behind a queue. The
//! delays do not show which, nor whether the queue is on the forward path; but only a queue on the forward
//! path shrinks when less is sent. A probe costs half of the rate for tens of milliseconds. Always holds:
//! probes run only where the delays differ, and at least a second apart.

use mpvpn_types::{Duration, Instant};

/// The share of the rate that is sent during a probe: a queue shrinks by half of the time. Smaller: costs
/// more rate; larger: takes longer.
pub(crate) const GAIN: f64 = 0.5;
/// How long the result of a probe counts. Shorter: more probes; longer: old results count. Chosen
/// (docs/design/congestion-control.md).
const MAX_RESULT_AGE: Duration = Duration::from_secs(15);
/// How long a found queue counts as present. Chosen.
const QUEUE_PRESENT_FOR: Duration = Duration::from_millis(1500);
/// The shortest time between two probes. Shorter: more rate is lost; longer: queues stand for longer. Chosen.
const MIN_PROBE_INTERVAL: Duration = Duration::from_secs(1);
/// How long packets are measured once the queue must be gone. Shorter: chance decides; longer: half of the
/// rate for longer.
const MEASURING_TIME: Duration = Duration::from_millis(15);
/// The longest queue that a probe waits for. Longer: half of the rate for longer; shorter: longer queues are
/// not recognised.
const MAX_QUEUE: Duration = Duration::from_millis(100);

/// A running probe.
#[derive(Clone, Copy, Debug)]
struct RunningProbe {
    /// Packets sent from here on find no queue.
    from: Instant,
    /// Less is sent until here.
    to: Instant,
    /// By then the acknowledgements of these packets have arrived.
    end: Instant,
    shortest: Duration,
    /// The sum and number of the round trips of these packets.
    sum: Duration,
    count: u32,
    /// With this mean round trip, or a shorter one, there was a queue.
    less: Duration,
    /// With this smoothed round trip, or a shorter one, the queue is gone already.
    gone: Duration,
    /// Less is sent now.
    sending_less: bool,
}

/// The probes of a path, and the result of the last one.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct QueueProbe {
    probe: Option<RunningProbe>,
    /// The round trip of a stream without a queue, and when it was measured.
    rtt_without_queue: Option<(Duration, Instant)>,
    /// When a queue was last found.
    pub(crate) queue_found: Option<Instant>,
    /// When the last probe ended.
    last: Option<Instant>,
}

impl QueueProbe {
    /// Begins a probe unless one runs or has just ended. `stream` and `mean`: the shortest and the mean round
    /// trip of a busy stream; `lone`: that of a lone packet.
    pub(crate) fn begin(&mut self, now: Instant, stream: Duration, mean: Duration, lone: Duration) {
        let recent = self.last.is_some_and(|at| now.saturating_duration_since(at) < MIN_PROBE_INTERVAL);
        if self.probe.is_some() || recent || stream <= lone {
            return;
        }
        // At half of the rate a queue shrinks by half of the time.
        let queue = (stream - lone).min(MAX_QUEUE);
        let from = now + queue * 2 + queue / 2;
        let to = from + MEASURING_TIME;
        let less = mean.saturating_sub((stream - lone) / 2);
        let end = to + mean.max(stream) * 2;
        self.probe = Some(RunningProbe {
            from,
            to,
            end,
            shortest: Duration::MAX,
            sum: Duration::ZERO,
            count: 0,
            less,
            gone: lone + (stream - lone) / 4,
            sending_less: true,
        });
    }

    /// Takes a round-trip sample, and the smoothed round-trip time that includes it.
    pub(crate) fn on_rtt(&mut self, now: Instant, rtt: Duration, mean: Duration) {
        if self.rtt_without_queue.is_some_and(|(_, at)| now.saturating_duration_since(at) > MAX_RESULT_AGE) {
            self.rtt_without_queue = None;
        }
        let Some(probe) = &mut self.probe else { return };
        probe.sending_less = now < probe.to;
        if mean <= probe.gone {
            // Only the round trip of a lone packet is left.
            (self.probe, self.rtt_without_queue, self.queue_found, self.last) =
                (None, None, Some(now), Some(now));
            return;
        }
        let sent = now.checked_sub(rtt).unwrap_or(now);
        if (probe.from..probe.to).contains(&sent) {
            probe.shortest = probe.shortest.min(rtt);
            probe.sum += rtt;
            probe.count += 1;
        }
        if now >= probe.end || sent >= probe.to {
            if probe.count > 0 {
                // Where delay varies some packets are always quick, so the mean decides.
                let mean = probe.sum / probe.count;
                let is_queue = mean <= probe.less;
                self.rtt_without_queue = Some((if is_queue { probe.shortest } else { mean }, now));
                self.queue_found = is_queue.then_some(now);
                self.last = Some(now);
            }
            self.probe = None;
        }
    }

    /// Whether a probe has found a queue in the last 1.5 s.
    pub(crate) fn found_queue_lately(&self, now: Instant) -> bool {
        self.queue_found.is_some_and(|at| now.saturating_duration_since(at) < QUEUE_PRESENT_FOR)
    }

    /// Whether less is to be sent now.
    pub(crate) fn is_sending_less(&self) -> bool {
        self.probe.is_some_and(|probe| probe.sending_less)
    }

    /// Whether a probe is running, so that the delivery rate does not show the path's capacity.
    pub(crate) fn is_running(&self) -> bool {
        self.probe.is_some()
    }

    /// The round trip of a stream without a queue, if a probe measured it in the last 15 s.
    pub(crate) fn rtt_without_queue(&self) -> Option<Duration> {
        self.rtt_without_queue.map(|(rtt, _)| rtt)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Probes a path of 10 ms with a standing queue and another delay of `varies`; returns the result, and
    /// whether it is a queue.
    fn probe(queue: Duration, varies: Duration) -> (Option<Duration>, bool) {
        let start = Instant::now();
        let mut probes = QueueProbe::default();
        let stream = 10 * MS + queue + varies;
        probes.begin(start, stream, stream, 10 * MS);
        assert!(probes.is_sending_less());
        let (mut waiting, mut mean) = (queue, stream);
        for tenth in 0..3000 {
            let sent = start + tenth * MS / 10;
            // Half of the capacity is sent during the probe, and the whole capacity after it.
            if probes.is_sending_less() {
                waiting = waiting.saturating_sub(MS / 20);
            }
            let rtt = 10 * MS + waiting + varies;
            mean = (mean * 7 + rtt) / 8;
            probes.on_rtt(sent + rtt, rtt, mean);
        }
        assert!(!probes.is_running());
        (probes.rtt_without_queue(), probes.found_queue_lately(start + 300 * MS))
    }

    #[test]
    fn a_queue_shrinks_and_other_delay_stays() {
        assert_eq!(probe(20 * MS, Duration::ZERO), (None, true), "nothing is left of it");
        assert_eq!(probe(Duration::ZERO, 12 * MS), (Some(22 * MS), false));
        assert_eq!(probe(15 * MS, 6 * MS), (Some(16 * MS), true));
    }

    #[test]
    fn some_quick_packets_are_no_sign_of_a_queue() {
        let start = Instant::now();
        let mut probes = QueueProbe::default();
        probes.begin(start, 15 * MS, 20 * MS, 8 * MS);
        let mut mean = 20 * MS;
        for ms in 0..200 {
            let rtt = if ms % 10 == 3 { 9 * MS } else { 20 * MS };
            mean = (mean * 7 + rtt) / 8;
            probes.on_rtt(start + ms * MS, rtt, mean);
        }
        assert!(!probes.found_queue_lately(start + 200 * MS));
        assert!(probes.rtt_without_queue() > Some(17 * MS));
    }

    #[test]
    fn a_path_is_probed_again_only_after_a_while() {
        let start = Instant::now();
        let mut probes = QueueProbe::default();
        probes.begin(start, 10 * MS, 10 * MS, 10 * MS);
        assert!(!probes.is_running(), "nothing to find out");
        probes.begin(start, 20 * MS, 20 * MS, 10 * MS);
        for ms in 0..100 {
            probes.on_rtt(start + ms * MS, 20 * MS, 20 * MS);
        }
        probes.begin(start + 100 * MS, 20 * MS, 20 * MS, 10 * MS);
        assert!(!probes.is_running());
        probes.begin(start + 1_100 * MS, 20 * MS, 20 * MS, 10 * MS);
        assert!(probes.is_running());
        for ms in 20_000..20_200 {
            probes.on_rtt(start + ms * MS, 20 * MS, 20 * MS);
        }
        assert!(!probes.is_running(), "nothing was acknowledged for long");
        assert_eq!(probes.rtt_without_queue(), None, "what was found is too old");
    }
}
