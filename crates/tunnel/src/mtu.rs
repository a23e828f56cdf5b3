use mpvpn_types::{Duration, Instant, target::TRANSPORT};

/// What a path certainly carries before it was probed; IPv6 asks for it (RFC 8200 §5).
const FLOOR: usize = 1280;
/// A larger MTU is promised once it has not grown for this long.
const SETTLE: Duration = Duration::from_millis(80);
/// A smaller one is promised once it has been smaller for this long: a new path starts small.
const SHRINK: Duration = Duration::from_millis(2500);
/// The first promise is made after this time, settled or not.
const FIRST: Duration = Duration::from_millis(1500);

/// Follows the MTU that datagrams allow, without handing every twitch of path MTU discovery on to
/// the applications.
#[derive(Clone, Debug)]
pub(crate) struct MtuFollower {
    since: Instant,
    limit: Option<usize>,
    limit_since: Instant,
    announced: Option<usize>,
    taken: Option<usize>,
}

impl MtuFollower {
    pub(crate) fn new(now: Instant) -> Self {
        Self { since: now, limit: None, limit_since: now, announced: None, taken: None }
    }

    /// Takes the largest packet that fits a datagram now (bytes).
    pub(crate) fn update(&mut self, now: Instant, limit: Option<usize>) {
        if limit != self.limit {
            self.limit = limit;
            self.limit_since = now;
        }
        self.tick(now);
    }

    /// Lets time pass.
    pub(crate) fn tick(&mut self, now: Instant) {
        let Some(limit) = self.limit else { return };
        let steady = now.saturating_duration_since(self.limit_since);
        let promise = match self.announced {
            None => steady >= SETTLE || now.saturating_duration_since(self.since) >= FIRST,
            Some(announced) if limit > announced => steady >= SETTLE,
            Some(announced) if limit < announced => steady >= SHRINK,
            Some(_) => false,
        };
        if promise {
            // A device with less loses its IPv6 addresses; what does not fit is cut or answered.
            let mtu = limit.max(FLOOR);
            tracing::debug!(
                target: TRANSPORT,
                mtu,
                before = self.announced,
                limit,
                ?steady,
                "another MTU is promised"
            );
            self.announced = Some(mtu);
        }
    }

    /// The largest packet that fits a datagram now.
    pub(crate) fn limit(&self) -> Option<usize> {
        self.limit
    }

    /// What was promised last.
    pub(crate) fn announced(&self) -> usize {
        self.announced.unwrap_or(FLOOR)
    }

    /// A promise that has not been taken yet.
    pub(crate) fn take_change(&mut self) -> Option<usize> {
        if self.announced == self.taken {
            return None;
        }
        self.taken = self.announced;
        self.announced
    }

    /// When [`Self::tick`] may have something to say.
    pub(crate) fn poll_timeout(&self) -> Option<Instant> {
        let limit = self.limit?;
        match self.announced {
            None => Some((self.limit_since + SETTLE).min(self.since + FIRST)),
            Some(announced) if limit > announced => Some(self.limit_since + SETTLE),
            Some(announced) if limit < announced => Some(self.limit_since + SHRINK),
            Some(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn growth_is_promised_when_it_has_settled() {
        let start = Instant::now();
        let mut mtu = MtuFollower::new(start);
        for (at, limit) in [(0, 1280), (30, 1350), (60, 1400), (90, 1430)] {
            mtu.update(start + at * MS, Some(limit));
            assert_eq!(mtu.take_change(), None, "at {at} ms");
        }
        assert_eq!(mtu.poll_timeout(), Some(start + 170 * MS));
        mtu.tick(start + 170 * MS);
        assert_eq!((mtu.take_change(), mtu.take_change()), (Some(1430), None));
    }

    #[test]
    fn a_new_path_that_starts_small_changes_no_promise() {
        let start = Instant::now();
        let mut mtu = MtuFollower::new(start);
        mtu.update(start, Some(1430));
        mtu.tick(start + 100 * MS);
        assert_eq!(mtu.take_change(), Some(1430));
        mtu.update(start + 200 * MS, Some(1280));
        mtu.tick(start + 900 * MS);
        assert_eq!((mtu.limit(), mtu.announced()), (Some(1280), 1430));
        mtu.update(start + 1000 * MS, Some(1430));
        mtu.tick(start + 9000 * MS);
        assert_eq!(mtu.take_change(), None);
    }

    #[test]
    fn a_lasting_smaller_mtu_is_followed() {
        let start = Instant::now();
        let mut mtu = MtuFollower::new(start);
        mtu.update(start, Some(1430));
        mtu.tick(start + 100 * MS);
        mtu.take_change();
        mtu.update(start + 200 * MS, Some(1300));
        mtu.tick(start + 2700 * MS);
        assert_eq!(mtu.take_change(), Some(1300));
    }
}
