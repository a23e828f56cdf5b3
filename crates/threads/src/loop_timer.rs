//! How an event loop waits for a deadline: by the timeout of the wait, or by a timer that stays set.
//!
//! To set a timer that is the processor's next one takes several microseconds, most of all in a virtual
//! machine, which has to ask the hypervisor. A loop that carries packets waits thousands of times a second,
//! always with a deadline, and is nearly always woken by a packet first. So there is a timer that stays set,
//! also if the deadline has moved to a later time, as long as a packet is expected before it expires. In:
//! when the loop waits, until when, and when it is woken. Out: the timeout of the wait, and what to
//! do with the timer. Always holds: the loop is woken at the deadline, at most [`MAX_LATE`] late; it may be
//! woken before.

use std::time::{Duration, Instant};

/// How much later than the deadline the timer may expire; it is set to half of it later. Larger: later
/// packets. Smaller: it is set anew, or expires in vain, where a deadline is computed again with a slightly
/// different result.
const MAX_LATE: Duration = Duration::from_micros(20);
/// The longest recent pause between two iterations is forgotten by this part with each iteration. Larger: the
/// timer expires in vain where packets come irregularly. Smaller: it is set anew in vain for longer after a
/// pause.
const FORGET: u32 = 8;

/// A deadline that is nearer than this many times that pause is the timeout of the wait: a timer would have
/// to be set anew for one of the next waits already. Larger: timeouts that are seldom needed. Smaller: as
/// many timers are set as there are waits.
const MIN_PAUSES: u32 = 2;

/// How to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wait {
    /// The timeout of the wait; `None`: the timer wakes the loop.
    pub(crate) timeout: Option<Duration>,
    /// When the timer has to expire if it is to be set (`None`: never).
    pub(crate) timer: Option<Option<Duration>>,
}

/// The timer of an event loop, with the moment for which it is set.
#[derive(Debug, Default)]
pub(crate) struct LoopTimer {
    expires: Option<Instant>,
    /// When the loop was woken last.
    woken: Option<Instant>,
    /// About the longest recent time between two wake-ups: how long it may take until the next.
    pause: Duration,
}

impl LoopTimer {
    /// The loop waits from `now` on, at most until `deadline`.
    pub(crate) fn before_wait(&mut self, now: Instant, deadline: Option<Instant>) -> Wait {
        let is_near = |at: Instant| at < now + self.pause * MIN_PAUSES;
        let (timeout, deadline) = match deadline {
            Some(at) if is_near(at) => (Some(at.saturating_duration_since(now)), None),
            other => (None, other),
        };
        let keeps = match self.expires {
            // An expiry in the past has made the timer ready.
            Some(expires) => {
                let is_late = deadline.is_some_and(|at| expires > at + MAX_LATE);
                let is_early = deadline.is_none_or(|at| expires < at) && expires < now + self.pause;
                expires > now && !is_late && !is_early
            }
            None => deadline.is_none(),
        };
        if keeps {
            return Wait { timeout, timer: None };
        }
        self.expires = deadline.map(|at| at + MAX_LATE / 2);
        Wait { timeout, timer: Some(self.expires.map(|at| at.saturating_duration_since(now))) }
    }

    /// The loop was woken.
    pub(crate) fn on_woken(&mut self, now: Instant) {
        let pause = self.woken.map_or(Duration::ZERO, |last| now.saturating_duration_since(last));
        self.pause = pause.max(self.pause - self.pause / FORGET);
        self.woken = Some(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MICROSECOND: Duration = Duration::from_micros(1);

    /// How often a loop sets its timer, and how often it is woken in vain, if packets come every `gap` for a
    /// second and each is followed by a deadline `time` later.
    fn run(gap: Duration, time: Duration) -> (u32, u32) {
        let (mut timer, mut now) = (LoopTimer::default(), Instant::now());
        let (end, mut packet, mut deadline) = (now + Duration::from_secs(1), now + gap, None);
        let (mut expires, mut set, mut in_vain) = (None, 0, 0);
        while packet < end {
            let wait = timer.before_wait(now, deadline);
            if let Some(after) = wait.timer {
                expires = after.map(|after| now + after);
                set += 1;
            }
            let times_out = wait.timeout.map(|timeout| now + timeout);
            let rings =
                [expires, times_out].into_iter().flatten().filter(|at| *at > now && *at < packet).min();
            now = rings.unwrap_or(packet);
            timer.on_woken(now);
            if let Some(at) = deadline.filter(|at| *at <= now) {
                assert!(now <= at + MAX_LATE, "{:?} late", now - at);
                deadline = None;
            } else if rings.is_some() {
                in_vain += 1;
            }
            if now == packet {
                (packet, deadline) = (packet + gap, Some(now + time));
            }
        }
        (set, in_vain)
    }

    #[test]
    fn a_timer_behind_many_packets_is_seldom_set() {
        let (set, in_vain) = run(600 * MICROSECOND, 5000 * MICROSECOND);
        assert!(set <= 1700 / 7 && in_vain <= 1, "1,667 packets: set {set} times, in vain {in_vain}");
    }

    #[test]
    fn a_timer_that_expires_before_the_next_packet_is_met_each_time() {
        let (set, in_vain) = run(5000 * MICROSECOND, 600 * MICROSECOND);
        assert!(set <= 2 && in_vain == 0, "the waits have timeouts: set {set} times, in vain {in_vain}");
    }

    #[test]
    fn a_deadline_that_comes_closer_is_met() {
        let (mut timer, now) = (LoopTimer::default(), Instant::now());
        let (late, soon) = (now + 5000 * MICROSECOND, now + 300 * MICROSECOND);
        let by_timer = |at: Instant| Wait { timeout: None, timer: Some(Some(at + MAX_LATE / 2 - now)) };
        assert_eq!(timer.before_wait(now, Some(late)), by_timer(late));
        let keep = Wait { timeout: None, timer: None };
        assert_eq!(timer.before_wait(now, Some(late - MAX_LATE / 2)), keep, "close enough");
        assert_eq!(timer.before_wait(now, Some(soon)), by_timer(soon));
    }

    #[test]
    fn an_idle_loop_is_not_woken_in_vain() {
        let (mut timer, mut now) = (LoopTimer::default(), Instant::now());
        timer.on_woken(now);
        now += Duration::from_secs(5);
        timer.on_woken(now);
        let second = Duration::from_secs(1);
        let timeout = Wait { timeout: Some(second), timer: None };
        assert_eq!(timer.before_wait(now, Some(now + second)), timeout, "it is the timeout of the wait");
        let later = now + 15 * second;
        assert!(matches!(timer.before_wait(now, Some(later)).timer, Some(Some(_))));
        assert_eq!(timer.before_wait(now, None).timer, None, "something will happen in 5 s");
        assert_eq!(timer.before_wait(now + 11 * second, None).timer, Some(None));
    }
}
