//! Schedules measurements of the paths, and decisions about their use.
//!
//! In: the time, and notices that something has changed. Out: whether to measure and judge, or only to judge.
//! Always holds: paths are measured at most once each [`INTERVAL`], unless a measurement is asked for.

use mpvpn_types::{Duration, Instant};

/// Interval at which measurements of paths are taken over. Smaller: more processor time for each connection.
/// Larger: a path that becomes slow is noticed later.
const INTERVAL: Duration = Duration::from_millis(20);
/// Interval of measurements while overflow links are in use and no packets move, to stop using links that are
/// not needed. Smaller: more processor time. Larger: overflow links are used for longer.
const OVERFLOW_INTERVAL: Duration = Duration::from_millis(100);

/// A task that is due according to [`MeasurementTimer::poll`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Task {
    /// Measure the paths and judge them.
    Measure,
    /// Judge the paths by the last measurements.
    Judge,
}

/// The timer of measurements and judgements.
#[derive(Debug)]
pub(super) struct MeasurementTimer {
    measured: Option<Instant>,
    changed: bool,
}

impl MeasurementTimer {
    /// Creates a timer for which both are due.
    pub(super) fn new() -> Self {
        Self { measured: None, changed: true }
    }

    /// Requests that paths are judged before the next packet is sent.
    pub(super) fn judge_soon(&mut self) {
        self.changed = true;
    }

    /// Requests that paths are measured and judged before the next packet is sent.
    pub(super) fn measure_soon(&mut self) {
        (self.measured, self.changed) = (None, true);
    }

    /// Returns the task that is due, and marks it as done.
    pub(super) fn poll(&mut self, now: Instant) -> Option<Task> {
        let due = self.measured.is_none_or(|at| now >= at + INTERVAL);
        let changed = std::mem::take(&mut self.changed);
        if due {
            self.measured = Some(now);
        }
        match (due, changed) {
            (true, _) => Some(Task::Measure),
            (false, true) => Some(Task::Judge),
            (false, false) => None,
        }
    }

    /// Returns when a measurement is due although no packets move; `overflowing`: overflow links are in use.
    pub(super) fn poll_timeout(&self, overflowing: bool) -> Option<Instant> {
        self.measured.filter(|_| overflowing).map(|at| at + OVERFLOW_INTERVAL)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_measured_at_intervals_and_judged_when_something_changed() {
        let (mut timer, start) = (MeasurementTimer::new(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        assert_eq!(timer.poll(at(0)), Some(Task::Measure));
        assert_eq!(timer.poll(at(19)), None);
        timer.judge_soon();
        assert_eq!((timer.poll(at(19)), timer.poll(at(19))), (Some(Task::Judge), None));
        timer.judge_soon();
        assert_eq!((timer.poll(at(20)), timer.poll(at(20))), (Some(Task::Measure), None));
        timer.measure_soon();
        assert_eq!(timer.poll(at(21)), Some(Task::Measure));
        assert_eq!((timer.poll_timeout(false), timer.poll_timeout(true)), (None, Some(at(121))));
    }
}
