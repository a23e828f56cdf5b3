//! Decides when a client logs its state while its server does not answer.
//!
//! In: whether something of the server arrives, time. Out: when to log. Always holds: no line while the
//! server is reached, and at most one each interval.

use std::time::{Duration, Instant};

use crate::verdict::NO_ANSWER_AFTER;

/// The interval of lines. Longer: a terminal looks as if nothing happened; shorter: the log of a long outage
/// grows. Chosen.
const INTERVAL: Duration = Duration::from_secs(60);

/// When the next line is due.
#[derive(Debug, Default)]
pub(super) struct SilenceLog {
    /// The time; `None` while the server is reached.
    pub(super) next: Option<Instant>,
}

impl SilenceLog {
    /// Whether to log now. `was_reached`: the session worked, so its outage is an event of its own, and the
    /// first line comes later.
    pub(super) fn is_due(&mut self, now: Instant, is_reached: bool, was_reached: bool) -> bool {
        let first = now + if was_reached { INTERVAL } else { NO_ANSWER_AFTER };
        self.next = (!is_reached).then(|| self.next.unwrap_or(first));
        let is_due = self.next.is_some_and(|at| at <= now);
        if is_due {
            self.next = Some(now + INTERVAL);
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The seconds in which a client logs, of so many in which nothing arrives.
    fn lines(log: &mut SilenceLog, begin: Instant, seconds: u64, was_reached: bool) -> Vec<u64> {
        let is_due = |second: &u64| log.is_due(begin + Duration::from_secs(*second), false, was_reached);
        (0..seconds).filter(is_due).collect()
    }

    #[test]
    fn a_client_that_was_never_connected_logs_soon_and_then_each_minute() {
        let (mut log, begin) = (SilenceLog::default(), Instant::now());
        assert_eq!(lines(&mut log, begin, 130, false), [3, 63, 123]);
        assert_eq!(log.next, Some(begin + Duration::from_secs(183)));
    }

    #[test]
    fn an_outage_that_was_logged_as_an_event_is_logged_again_after_a_minute() {
        let (mut log, begin) = (SilenceLog::default(), Instant::now());
        assert!(!log.is_due(begin, true, true));
        assert_eq!(log.next, None);
        assert_eq!(lines(&mut log, begin, 130, true), [60, 120]);
        assert!(!log.is_due(begin + Duration::from_secs(500), true, true), "the server answers");
        assert_eq!(log.next, None);
    }
}
