//! How long packets may wait at this end so that those that arrive close together are taken together.
//!
//! In: the connections that carry data, with their shortest round trips. Out: the longest delay. Always
//! holds: it is at most [`MAX_DELAY`] and 1 / [`RTT_DIVISOR`] of the shortest round trip of any path in use,
//! and there is none beside traffic with priority, nor before a round trip is known.

use mpvpn_types::{Duration, Instant};

/// The longest delay. Longer: calls and games feel it; shorter: an iteration for each packet from 40 Mbit/s
/// down.
const MAX_DELAY: Duration = Duration::from_micros(300);
/// The share of a round trip that an end may add. Smaller: wider shares slow TCP down on short paths; larger:
/// more iterations.
const RTT_DIVISOR: u32 = 50;
/// How long a connection counts as used after its last data. Shorter: a connection that begins again is
/// delayed by what others allow; longer: others pay for it for longer.
const IN_USE: Duration = Duration::from_millis(500);
/// The same for a connection with priority: ten intervals of a call, which has 50 packets a second. Shorter:
/// a call with pauses is delayed after each; longer: others save less for longer.
const PRIORITY_IN_USE: Duration = Duration::from_millis(200);

/// The longest delay that the connections in use allow.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CoalescingLimit {
    /// When traffic with priority was last seen.
    priority: Option<Instant>,
    /// The shortest round trip of the running period and of the one before, and when the running one began.
    shortest: [Option<Duration>; 2],
    since: Option<Instant>,
}

impl CoalescingLimit {
    /// A connection carries data. `shortest_rtt` is that of its paths; `None`: not known yet, as in a
    /// handshake.
    pub(crate) fn note_use(&mut self, now: Instant, shortest_rtt: Option<Duration>, has_priority: bool) {
        if has_priority {
            self.priority = Some(now);
        }
        self.begin_period(now);
        let rtt = shortest_rtt.unwrap_or_default();
        self.shortest[0] = Some(self.shortest[0].map_or(rtt, |least| least.min(rtt)));
    }

    /// The longest delay now.
    pub(crate) fn delay(&mut self, now: Instant) -> Duration {
        if self.priority.is_some_and(|at| now.saturating_duration_since(at) < PRIORITY_IN_USE) {
            return Duration::ZERO;
        }
        self.begin_period(now);
        let shortest = self.shortest.iter().flatten().min();
        shortest.map_or(Duration::ZERO, |rtt| (*rtt / RTT_DIVISOR).min(MAX_DELAY))
    }

    /// Begins a new period if the running one has lasted for [`IN_USE`].
    fn begin_period(&mut self, now: Instant) {
        let age = self.since.map_or(Duration::MAX, |since| now.saturating_duration_since(since));
        if age < IN_USE {
            return;
        }
        let before = self.shortest[0].filter(|_| age < IN_USE * 2);
        self.shortest = [None, before];
        self.since = Some(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn the_delay_is_a_part_of_the_shortest_round_trip_and_bounded() {
        let now = Instant::now();
        let mut limit = CoalescingLimit::default();
        assert_eq!(limit.delay(now), Duration::ZERO, "nothing is known");
        limit.note_use(now, Some(400 * MS), false);
        assert_eq!(limit.delay(now), MAX_DELAY);
        limit.note_use(now, Some(5 * MS), false);
        assert_eq!(limit.delay(now), MS / 10);
        limit.note_use(now, None, false);
        assert_eq!(limit.delay(now), Duration::ZERO, "a handshake is not delayed");
    }

    #[test]
    fn a_connection_that_is_used_no_more_counts_no_more() {
        let now = Instant::now();
        let mut limit = CoalescingLimit::default();
        limit.note_use(now, Some(MS), false);
        for ms in (0..1100).step_by(10) {
            limit.note_use(now + ms * MS, Some(20 * MS), false);
        }
        assert_eq!(limit.delay(now + 1100 * MS), MAX_DELAY);
        assert_eq!(limit.delay(now + 9000 * MS), Duration::ZERO, "nothing is used");
    }

    #[test]
    fn nothing_waits_beside_a_call() {
        let now = Instant::now();
        let mut limit = CoalescingLimit::default();
        limit.note_use(now, Some(30 * MS), true);
        for ms in (0..400).step_by(10) {
            limit.note_use(now + ms * MS, Some(30 * MS), false);
            let delay = if ms * MS < PRIORITY_IN_USE { Duration::ZERO } else { MAX_DELAY };
            assert_eq!(limit.delay(now + ms * MS), delay, "{ms} ms after the last packet of the call");
        }
    }
}
