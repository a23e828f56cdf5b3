//! When paths are measured, and when they are judged anew.

use mpvpn_types::{Duration, Instant};

/// Measurements of paths are taken over into scheduling at this interval. Shorter costs processor time for
/// each connection; longer, and a path that becomes slow is noticed later.
const INTERVAL: Duration = Duration::from_millis(20);
/// While overflow links are in use it is asked this often whether they are still needed, also when nothing
/// else happens.
const OVERFLOW_INTERVAL: Duration = Duration::from_millis(100);

/// What [`MeasurementTimer::poll`] asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Task {
    /// Measure the paths, and judge them.
    Measure,
    /// Judge them by what is known already.
    Judge,
}

/// Measures at intervals, and judges when something has changed.
#[derive(Debug)]
pub(super) struct MeasurementTimer {
    measured: Option<Instant>,
    changed: bool,
}

impl MeasurementTimer {
    /// Both are due.
    pub(super) fn new() -> Self {
        Self { measured: None, changed: true }
    }

    /// Something has changed: paths have to be judged before the next packet leaves.
    pub(super) fn judge_soon(&mut self) {
        self.changed = true;
    }

    /// So much has changed that they have to be measured before.
    pub(super) fn measure_soon(&mut self) {
        (self.measured, self.changed) = (None, true);
    }

    /// What is due, which is done then.
    pub(super) fn poll(&mut self, now: Instant) -> Option<Task> {
        let due = self.measured.is_none_or(|at| now.saturating_duration_since(at) >= INTERVAL);
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

    /// When a measurement is due although nothing happens; `overflowing`: overflow links are in use.
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
