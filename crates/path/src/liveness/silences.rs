//! The longest silence of the last seconds on a path that works.
//!
//! In: how long it was silent before each arrival. Out: the longest of these silences, of one to two seconds.
//! Always holds: before a second has passed nothing is known.

use mpvpn_types::{Duration, Instant};

/// How long a silence is remembered, at least; twice as long at most. Longer: a link that has calmed down is
/// reported late; shorter: hiccups of the link are reported. Chosen.
const PERIOD: Duration = Duration::from_secs(1);

/// A maximum over this period and the one before.
#[derive(Clone, Debug)]
pub(super) struct RecentSilences {
    since: Instant,
    longest: Duration,
    before: Option<Duration>,
}

impl RecentSilences {
    pub(super) fn new(now: Instant) -> Self {
        Self { since: now, longest: Duration::ZERO, before: None }
    }

    /// Something arrived after `silence`.
    #[inline]
    pub(super) fn note(&mut self, now: Instant, silence: Duration) {
        if now >= self.since + PERIOD {
            (self.since, self.before) = (now, Some(self.longest));
            self.longest = Duration::ZERO;
        }
        self.longest = self.longest.max(silence);
    }

    /// The longest silence, if it is known.
    pub(super) fn longest(&self) -> Option<Duration> {
        self.before.map(|before| before.max(self.longest))
    }
}
