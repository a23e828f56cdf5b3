//! The MTU that a tunnel announces.
//!
//! In: the largest packet that fits a datagram now, and the time. Out: the MTU to announce, seldom. Always
//! holds: it is at least [`MIN_MTU`]; growth is announced after [`GROWTH_HOLD`], a smaller value after
//! [`SHRINK_HOLD`] (docs/design/mtu.md).

use mpvpn_packet::ip::MAX_PACKET;
use mpvpn_types::{Duration, Instant, target::TRANSPORT};

/// The least MTU that is announced (bytes): what IPv6 requires (RFC 8200 §5).
const MIN_MTU: usize = 1280;
/// A larger MTU is announced once it has not changed for this long: path MTU discovery takes several steps.
/// Larger: small packets for longer; smaller: the MTU of the interface changes at each step.
const GROWTH_HOLD: Duration = Duration::from_millis(80);
/// A smaller MTU is announced once it has lasted for this long: a new path starts small, and a black hole
/// that the QUIC library detected by mistake lasts a second or two. Larger: packets travel in parts for
/// longer; smaller: the MTU flaps.
const SHRINK_HOLD: Duration = Duration::from_millis(2500);
/// The first MTU is announced after this time at the latest, steady or not. Chosen. Larger: the tunnel is up
/// later; smaller: the first MTU is changed soon.
const MAX_FIRST_DELAY: Duration = Duration::from_millis(1500);

/// Follows the MTU that datagrams allow, without announcing each step of path MTU discovery.
#[derive(Clone, Debug)]
pub(crate) struct MtuFollower {
    started_at: Instant,
    /// The largest packet that fits a datagram now (bytes), and since when.
    pub(crate) limit: Option<usize>,
    limit_since: Instant,
    announced: Option<usize>,
    /// The announced MTU that [`Self::take_change`] returned last.
    last_taken: Option<usize>,
}

impl MtuFollower {
    pub(crate) fn new(now: Instant) -> Self {
        Self { started_at: now, limit: None, limit_since: now, announced: None, last_taken: None }
    }

    /// Keeps the MTU that an earlier connection of the session announced. A new connection changes it no
    /// sooner than a new path does.
    pub(crate) fn continue_from(&mut self, announced: Option<usize>) {
        self.announced = announced;
    }

    /// Sets the largest packet that fits a datagram now (bytes).
    pub(crate) fn update(&mut self, now: Instant, limit: Option<usize>) {
        if limit != self.limit {
            self.limit = limit;
            self.limit_since = now;
        }
        self.update_announced(now);
    }

    /// Announces another MTU if it is time.
    pub(crate) fn update_announced(&mut self, now: Instant) {
        let Some(limit) = self.limit else { return };
        let steady = now.saturating_duration_since(self.limit_since);
        let announce = match self.announced {
            None => {
                steady >= GROWTH_HOLD || now.saturating_duration_since(self.started_at) >= MAX_FIRST_DELAY
            }
            Some(announced) if limit > announced => steady >= GROWTH_HOLD,
            Some(announced) if limit < announced => steady >= SHRINK_HOLD,
            Some(_) => false,
        };
        if announce {
            // Linux removes the IPv6 addresses of an interface with a smaller MTU. Packets that do not fit
            // are split, or answered with an ICMP error.
            let mtu = limit.max(MIN_MTU);
            tracing::debug!(
                target: TRANSPORT,
                mtu,
                before = self.announced,
                limit,
                ?steady,
                "the tunnel announces another MTU"
            );
            self.announced = Some(mtu);
        }
    }

    /// The MTU announced last (bytes).
    pub(crate) fn announced(&self) -> usize {
        self.announced.unwrap_or(MIN_MTU)
    }

    /// The largest packet that senders are not to be told to make smaller (bytes): any before the first MTU
    /// is announced, as they would remember one that was too small for ten minutes (RFC 1191 §6.3).
    pub(crate) fn largest_taken(&self) -> usize {
        self.announced.unwrap_or(MAX_PACKET)
    }

    /// The announced MTU, if it changed since the last call.
    pub(crate) fn take_change(&mut self) -> Option<usize> {
        if self.announced == self.last_taken {
            return None;
        }
        self.last_taken = self.announced;
        self.announced
    }

    /// When to call [`Self::update_announced`].
    pub(crate) fn poll_timeout(&self) -> Option<Instant> {
        let limit = self.limit?;
        match self.announced {
            None => Some((self.limit_since + GROWTH_HOLD).min(self.started_at + MAX_FIRST_DELAY)),
            Some(announced) if limit > announced => Some(self.limit_since + GROWTH_HOLD),
            Some(announced) if limit < announced => Some(self.limit_since + SHRINK_HOLD),
            Some(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn growth_is_announced_when_it_is_steady() {
        let start = Instant::now();
        let mut mtu = MtuFollower::new(start);
        for (at, limit) in [(0, 1280), (30, 1350), (60, 1400), (90, 1430)] {
            mtu.update(start + at * MS, Some(limit));
            assert_eq!(mtu.take_change(), None, "at {at} ms");
        }
        assert_eq!(mtu.poll_timeout(), Some(start + 170 * MS));
        mtu.update_announced(start + 170 * MS);
        assert_eq!((mtu.take_change(), mtu.take_change()), (Some(1430), None));
    }

    #[test]
    fn a_new_path_that_starts_small_changes_nothing() {
        let start = Instant::now();
        let mut mtu = MtuFollower::new(start);
        mtu.update(start, Some(1430));
        mtu.update_announced(start + 100 * MS);
        assert_eq!(mtu.take_change(), Some(1430));
        mtu.update(start + 200 * MS, Some(1280));
        mtu.update_announced(start + 900 * MS);
        assert_eq!((mtu.limit, mtu.announced()), (Some(1280), 1430));
        mtu.update(start + 1000 * MS, Some(1430));
        mtu.update_announced(start + 9000 * MS);
        assert_eq!(mtu.take_change(), None);
    }

    #[test]
    fn a_new_connection_keeps_what_the_one_before_announced_and_follows_what_lasts() {
        let start = Instant::now();
        let mut mtu = MtuFollower::new(start);
        mtu.continue_from(Some(1430));
        assert_eq!((mtu.take_change(), mtu.largest_taken()), (Some(1430), 1430));
        mtu.update(start, Some(1280));
        mtu.update_announced(start + 2500 * MS);
        assert_eq!(mtu.take_change(), Some(1280));
    }

    #[test]
    fn before_the_first_announcement_nothing_is_too_big() {
        let start = Instant::now();
        let mut mtu = MtuFollower::new(start);
        mtu.update(start, Some(1280));
        assert_eq!((mtu.announced(), mtu.largest_taken()), (1280, 65_535));
        mtu.update_announced(start + 80 * MS);
        assert_eq!(mtu.largest_taken(), 1280);
    }

    #[test]
    fn a_lasting_smaller_mtu_is_followed() {
        let start = Instant::now();
        let mut mtu = MtuFollower::new(start);
        mtu.update(start, Some(1430));
        mtu.update_announced(start + 100 * MS);
        mtu.take_change();
        mtu.update(start + 200 * MS, Some(1300));
        mtu.update_announced(start + 2700 * MS);
        assert_eq!(mtu.take_change(), Some(1300));
    }
}
