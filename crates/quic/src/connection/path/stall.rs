//! Detects that noq does not send the datagrams of a path.
//!
//! After a change of the client's address noq sends none until the new address is validated, for which it
//! tries only three probe timeouts. In: the datagrams left over after each pass of the path. Out: since when
//! no datagram has left. Always holds: a backup path is never stalled.

use mpvpn_types::Instant;
use noq_proto::PathStatus;

/// The detector of one path.
#[derive(Debug)]
pub(crate) struct DatagramStall {
    status: PathStatus,
    /// Since when datagrams were left over and none left.
    since: Option<Instant>,
    /// Observed since the status was set last.
    observed: bool,
    /// The total of sent datagrams at the last check.
    sent: u64,
}

impl Default for DatagramStall {
    fn default() -> Self {
        Self { status: PathStatus::Available, since: None, observed: false, sent: 0 }
    }
}

impl DatagramStall {
    /// Sets the status of the path at this end.
    pub(crate) fn set_status(&mut self, status: PathStatus) {
        (self.status, self.observed) = (status, false);
    }

    /// Whether noq should send datagrams: on a backup path it sends none while others are available.
    pub(crate) fn expects_datagrams(&self) -> bool {
        self.status != PathStatus::Backup
    }

    /// No datagrams were left over after a pass.
    pub(crate) fn on_all_sent(&mut self) {
        self.since = None;
    }

    /// Datagrams were left over after a pass, perhaps of another path; `sent` have ever left on this path.
    pub(crate) fn on_left_over(&mut self, now: Instant, sent: u64) {
        let any = std::mem::replace(&mut self.sent, sent) != sent;
        self.since = if any { None } else { self.since.or(Some(now)) };
        self.observed = !any;
    }

    /// Since when no datagram has left although there were some; `None` if they leave.
    pub(crate) fn since(&self) -> Option<Instant> {
        self.since.filter(|_| self.observed)
    }
}

#[cfg(test)]
mod tests {
    use mpvpn_types::Duration;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_stall_lasts_from_the_first_pass_that_sends_none_to_one_that_sends_some() {
        let (mut stall, start) = (DatagramStall::default(), Instant::now());
        stall.on_left_over(start, 5);
        assert_eq!(stall.since(), None, "five have left");
        stall.on_left_over(start + MS, 5);
        stall.on_left_over(start + 2 * MS, 5);
        assert_eq!(stall.since(), Some(start + MS));
        stall.on_left_over(start + 3 * MS, 6);
        assert_eq!(stall.since(), None);
        stall.on_left_over(start + 4 * MS, 6);
        assert_eq!(stall.since(), Some(start + 4 * MS));
        stall.on_all_sent();
        assert_eq!(stall.since(), None);
    }

    #[test]
    fn what_was_observed_before_the_status_changed_does_not_count() {
        let (mut stall, now) = (DatagramStall::default(), Instant::now());
        stall.on_left_over(now, 0);
        assert!(stall.since().is_some());
        stall.set_status(PathStatus::Backup);
        assert_eq!((stall.since(), stall.expects_datagrams()), (None, false));
    }
}
