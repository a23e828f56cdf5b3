//! How a client asks for a server of which it hears nothing.
//!
//! In: when something arrived, reasons to ask anew, the time. Out: whether it is time to ask with single
//! packets, and whether a handshake may begin. Always holds: the longer nothing arrives or changes, the
//! longer are the pauses between packets ([`pause_after`](mpvpn_path::pause_after)).

use mpvpn_path::{LivenessConfig, probe_pause};
use mpvpn_types::{Duration, Instant};

use crate::handshake::{HANDSHAKE_TIMEOUT, MIN_PROBE_PAUSE};

/// Handshakes begin as often as a quick answer asks for, for this long after something was heard or has
/// changed. Longer: an outage costs more (a handshake without an answer repeats its packets, 13 kB in all);
/// shorter: a server that does not answer packets of an unknown version is found later. Chosen.
const IMPATIENCE: Duration = Duration::from_secs(10);
/// Questions of single packets for each handshake. More: a server that does not answer them (RFC 9000 §6.1
/// asks for it, and does not demand it) is found later; fewer: an outage costs more. Chosen.
const PROBES_PER_HANDSHAKE: u32 = 12;

/// How long a handshake waits for its first answer where nothing has been heard for long: its packets are
/// questions, too, and it repeats them ever less often. Longer: an outage costs more; shorter: a server over
/// links with round trips of seconds, which does not answer single packets, is not found. Chosen.
const FIRST_ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// The silence of the server.
#[derive(Clone, Copy, Debug)]
pub(super) struct Silence {
    /// When something of the server last arrived; if nothing has, when the client was made.
    pub(super) heard: Instant,
    /// The last reason to ask anew.
    pub(super) restarted_at: Instant,
    wanted: Option<Instant>,
    /// Whether links are asked with single packets.
    pub(super) is_probing: bool,
    /// Whether another connection over the same links asks for this one, too.
    pub(super) is_shared: bool,
}

impl Silence {
    pub(super) fn new(now: Instant) -> Self {
        Self { heard: now, restarted_at: now, wanted: None, is_probing: false, is_shared: false }
    }

    /// Something of the server has arrived.
    #[inline]
    pub(super) fn on_heard(&mut self, now: Instant) {
        (self.heard, self.is_probing) = (now, false);
    }

    /// The network, the configuration or the wishes of the user have changed.
    pub(super) fn probe_anew(&mut self, now: Instant) {
        (self.restarted_at, self.is_probing) = (now, false);
    }

    /// An app sends. Returns whether this is a reason to ask anew.
    pub(super) fn on_wanted(&mut self, now: Instant) -> bool {
        let before = self.wanted.replace(now);
        before.is_none_or(|at| now >= at + LivenessConfig::TRAFFIC_PAUSE)
    }

    /// The begin of the silence.
    pub(super) fn since(&self) -> Instant {
        self.heard.max(self.restarted_at)
    }

    /// Whether the silence is so long that single packets ask.
    pub(super) fn is_long(&self, now: Instant) -> bool {
        now >= self.long_at()
    }

    /// When the silence becomes long.
    pub(super) fn long_at(&self) -> Instant {
        self.since() + IMPATIENCE
    }

    /// How long a handshake may take whose last answer came then.
    pub(super) fn handshake_limit(&self, now: Instant, answered: Option<Instant>) -> Duration {
        if self.is_long(now) && answered.is_none() { FIRST_ANSWER_TIMEOUT } else { HANDSHAKE_TIMEOUT }
    }

    /// When a handshake may begin over a link that has not answered, after one that began at `last`.
    pub(super) fn next_handshake(&self, now: Instant, last: Option<Instant>, metered: bool) -> Instant {
        let silence = now.saturating_duration_since(self.since());
        let pause = probe_pause(silence, MIN_PROBE_PAUSE, metered).saturating_mul(PROBES_PER_HANDSHAKE);
        last.map_or(now, |last| last + if self.is_long(now) { pause } else { Duration::ZERO })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handshakes_become_rare_until_something_is_heard() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut silence = Silence::new(start);
        let pause = |silence: &Silence, now, metered| silence.next_handshake(now, Some(now), metered) - now;
        assert_eq!(pause(&silence, at(9), false), Duration::ZERO);
        assert!(!silence.is_long(at(9)) && silence.is_long(at(10)));
        assert_eq!(pause(&silence, at(16), false), Duration::from_secs(12));
        assert_eq!(pause(&silence, at(100), false), Duration::from_secs(300));
        assert_eq!(pause(&silence, at(100), true), Duration::from_secs(1800));
        assert_eq!(silence.handshake_limit(at(9), None), HANDSHAKE_TIMEOUT);
        assert_eq!(silence.handshake_limit(at(100), None), FIRST_ANSWER_TIMEOUT);
        assert_eq!(silence.handshake_limit(at(100), Some(at(99))), HANDSHAKE_TIMEOUT);
        silence.on_heard(at(100));
        assert_eq!(pause(&silence, at(105), false), Duration::ZERO);
        assert!(silence.on_wanted(at(200)) && !silence.on_wanted(at(205)) && silence.on_wanted(at(215)));
    }
}
