//! Whether the library sends the datagrams that it is given for a path.
//!
//! After a change of the client's address it sends none until the new address is validated, and it tries that for three
//! probe timeouts only. In: what was left over after each of the path's passes. Out: since when no datagram has left.

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
    /// Datagrams that had ever left when that was noted last.
    sent: u64,
}

impl Default for DatagramStall {
    fn default() -> Self {
        Self { status: PathStatus::Available, since: None, observed: false, sent: 0 }
    }
}

impl DatagramStall {
    /// This end means to use the path so.
    pub(crate) fn set_status(&mut self, status: PathStatus) {
        (self.status, self.observed) = (status, false);
    }

    /// Whether datagrams have to leave: on a backup path none do while others are available.
    pub(crate) fn expects_datagrams(&self) -> bool {
        self.status != PathStatus::Backup
    }

    /// After a pass nothing was left over.
    pub(crate) fn on_all_sent(&mut self) {
        self.since = None;
    }

    /// After a pass datagrams were left over, maybe another path's; `sent` have ever left on this one.
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
