//! When the next certificate is ordered.

use std::time::{Duration, SystemTime};

use crate::identity::Identity;

/// The part of a certificate's lifetime after which it is renewed, in thirds: as CAs recommend. Earlier: more
/// orders than a CA likes. Later: less time to repair what keeps a renewal from working.
const RENEWED_AFTER_THIRDS: u32 = 2;
/// The pause after the first failure to reach the CA: mostly the network is not up yet. Shorter: useless
/// packets.
const FIRST_PAUSE_UNREACHED: Duration = Duration::from_secs(10);
/// The longest pause while the CA cannot be reached. Longer: a certificate that comes late.
const MAX_PAUSE_UNREACHED: Duration = Duration::from_secs(3600);
/// The pause after the first order that the CA refused. Let's Encrypt allows five such in an hour: with this
/// pause and the factor there are four.
const FIRST_PAUSE_REFUSED: Duration = Duration::from_secs(120);
/// The longest pause between orders that the CA refuses. Longer: a certificate that comes late after the
/// cause is mended.
const MAX_PAUSE_REFUSED: Duration = Duration::from_secs(12 * 3600);
/// The factor by which each failure lengthens the pause.
const PAUSE_FACTOR: u32 = 3;

/// Why there is no certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The CA did not answer.
    Unreached,
    /// The CA refused, or something on this machine was missing.
    Refused,
}

/// The time in which a CA wants a certificate to be renewed (ARI, RFC 9773).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RenewalWindow {
    /// Its begin.
    pub start: SystemTime,
    /// Its end.
    pub end: SystemTime,
}

impl RenewalWindow {
    /// A moment in the window: `fraction` of it, 0 to 1. Different servers choose different ones, so that
    /// they do not all come at once.
    fn at(self, fraction: f64) -> SystemTime {
        let length = self.end.duration_since(self.start).unwrap_or_default();
        self.start + length.mul_f64(fraction.clamp(0.0, 1.0))
    }
}

/// The times of orders.
#[derive(Clone, Debug)]
pub struct Schedule {
    /// When the certificate has to be renewed; `None` without a certificate.
    renewal: Option<SystemTime>,
    failures: u32,
    /// No order before.
    pause_until: Option<SystemTime>,
    /// Where in a window this server renews, 0 to 1.
    fraction: f64,
}

impl Schedule {
    /// The times for a server with this certificate, if it has one for its names. `fraction`: where in the
    /// time that a CA suggests this server renews, 0 to 1.
    pub fn new(certificate: Option<&Identity>, fraction: f64) -> Self {
        let mut schedule = Self { renewal: None, failures: 0, pause_until: None, fraction };
        if let Some(certificate) = certificate {
            schedule.on_issued(certificate);
        }
        schedule
    }

    /// There is a new certificate.
    pub fn on_issued(&mut self, certificate: &Identity) {
        let (from, to) = certificate.validity();
        let lifetime = to.duration_since(from).unwrap_or_default();
        self.renewal = Some(from + lifetime * RENEWED_AFTER_THIRDS / 3);
        (self.failures, self.pause_until) = (0, None);
    }

    /// The CA suggests this time: an earlier one than after two thirds of the lifetime counts.
    pub fn on_suggested(&mut self, window: RenewalWindow) {
        let suggested = window.at(self.fraction);
        if let Some(renewal) = &mut self.renewal {
            *renewal = suggested.min(*renewal);
        }
    }

    /// An order failed at `now`; returns the pause until the next one.
    pub fn on_failure(&mut self, now: SystemTime, failure: Failure) -> Duration {
        let (first, most) = match failure {
            Failure::Unreached => (FIRST_PAUSE_UNREACHED, MAX_PAUSE_UNREACHED),
            Failure::Refused => (FIRST_PAUSE_REFUSED, MAX_PAUSE_REFUSED),
        };
        let pause = first.saturating_mul(PAUSE_FACTOR.saturating_pow(self.failures)).min(most);
        self.failures = self.failures.saturating_add(1);
        self.pause_until = Some(now + pause);
        pause
    }

    /// How long to wait for the next order; zero if it is due.
    pub fn wait(&self, now: SystemTime) -> Duration {
        let due = self.renewal.unwrap_or(SystemTime::UNIX_EPOCH);
        let until = self.pause_until.map_or(due, |pause| pause.max(due));
        let wait = until.duration_since(now).unwrap_or_default();
        // If the clock was set back after a failure, the pause would last as long as the clock is behind.
        if due <= now { wait.min(MAX_PAUSE_REFUSED) } else { wait }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: Duration = Duration::from_secs(24 * 3600);

    fn certificate(from: SystemTime, lifetime: Duration) -> Identity {
        crate::identity::tests::valid(from, lifetime)
    }

    /// A moment in whole seconds, as certificates have them.
    fn moment() -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000)
    }

    #[test]
    fn without_a_certificate_one_is_ordered_at_once() {
        assert_eq!(Schedule::new(None, 0.5).wait(moment()), Duration::ZERO);
    }

    #[test]
    fn a_certificate_is_renewed_after_two_thirds_of_its_lifetime_or_earlier_if_the_ca_says_so() {
        let start = moment();
        let mut schedule = Schedule::new(Some(&certificate(start, 90 * DAY)), 0.5);
        assert_eq!(schedule.wait(start), 60 * DAY);
        assert_eq!(schedule.wait(start + 61 * DAY), Duration::ZERO);
        schedule.on_suggested(RenewalWindow { start: start + 70 * DAY, end: start + 72 * DAY });
        assert_eq!(schedule.wait(start), 60 * DAY, "the CA does not make it later");
        schedule.on_suggested(RenewalWindow { start: start + 2 * DAY, end: start + 4 * DAY });
        assert_eq!(schedule.wait(start), 3 * DAY);
        schedule.on_issued(&certificate(start + 3 * DAY, 90 * DAY));
        assert_eq!(schedule.wait(start + 3 * DAY), 60 * DAY);
    }

    #[test]
    fn the_pause_grows_with_each_failure_up_to_a_limit() {
        let mut now = moment();
        let mut schedule = Schedule::new(None, 0.0);
        let mut pauses = Vec::new();
        for _ in 0..8 {
            pauses.push(schedule.on_failure(now, Failure::Unreached).as_secs());
            assert!(schedule.wait(now) > Duration::ZERO);
            now += schedule.wait(now);
            assert_eq!(schedule.wait(now), Duration::ZERO);
        }
        assert_eq!(pauses, [10, 30, 90, 270, 810, 2430, 3600, 3600]);

        let mut schedule = Schedule::new(None, 0.0);
        let mut in_an_hour = 0;
        let start = now;
        while now < start + Duration::from_secs(3600) {
            in_an_hour += 1;
            now += schedule.on_failure(now, Failure::Refused);
        }
        assert!(in_an_hour <= 4, "{in_an_hour} orders, and a CA allows 5 failures in an hour");
        for _ in 0..100 {
            assert!(schedule.on_failure(now, Failure::Refused) <= MAX_PAUSE_REFUSED);
        }
    }

    #[test]
    fn a_clock_that_was_set_back_does_not_stop_the_orders() {
        let now = moment();
        let mut schedule = Schedule::new(None, 0.0);
        schedule.on_failure(now, Failure::Refused);
        assert!(schedule.wait(now - 1000 * DAY) <= MAX_PAUSE_REFUSED);
    }
}
