//! QUIC handshakes of a client, the back-off between them, and probes of links that have no connection.
//!
//! In: the time, and packets that may answer a probe. Out: probes to send, and when to try again. Always
//! holds: a probe is sent at most every 250 ms; handshakes and probes become ever less frequent while nothing
//! is heard ([`probe_pause`]).

use mpvpn_path::probe_pause;
use mpvpn_quic::ConnectionHandle;
use mpvpn_types::{Duration, Instant, LinkId};

/// A handshake that is not complete after this time is closed. Chosen. Larger: a client holds on to a dead
/// handshake, though others run beside it; smaller: fails over links with round trips of seconds.
pub(crate) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(8);
/// How long a completed handshake waits before it replaces a connection that still has streams: these end
/// with their connection. Chosen. Larger: streams over a dead connection hang for longer; smaller: a short
/// outage breaks them.
pub(crate) const REPLACEMENT_DELAY: Duration = Duration::from_secs(1);
/// Pause after the first failure; doubles with each failure up to [`MAX_BACKOFF`], and grows further with the
/// silence of the server. Chosen. Larger: a client is back later; smaller: more handshakes at a server that
/// refuses them.
const MIN_BACKOFF: Duration = Duration::from_millis(250);
/// The longest pause at a server that is heard. Chosen. Larger: a client is back later after an outage;
/// smaller: more load at a server that is full.
const MAX_BACKOFF: Duration = Duration::from_secs(4);
/// The longest pause after the server has refused this client. Larger: a client whose user has access again
/// is back later; smaller: more load by clients that are refused for days. Chosen.
pub(crate) const MAX_REFUSED_BACKOFF: Duration = Duration::from_secs(60);

/// A handshake over a link.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Handshake {
    pub(crate) connection: ConnectionHandle,
    pub(crate) link: LinkId,
    pub(crate) started_at: Instant,
    /// When a packet of the server last arrived for it.
    pub(crate) last_received: Option<Instant>,
    /// When it completed, if it waits as a replacement for the connection in use.
    pub(crate) completed_at: Option<Instant>,
}

/// Exponential back-off between handshakes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backoff {
    failures: u32,
    /// When to try next; `None` while handshakes run or none is wanted.
    pub(crate) next_try: Option<Instant>,
}

impl Backoff {
    pub(crate) fn new(now: Instant) -> Self {
        Self { failures: 0, next_try: Some(now) }
    }

    /// All handshakes have failed, and nothing was heard since `since`.
    pub(crate) fn failed(&mut self, now: Instant, since: Instant) {
        let least = self.doubled(MAX_BACKOFF);
        self.next_try = Some(now + probe_pause(now.saturating_duration_since(since), least, false));
    }

    /// The server refuses this client.
    pub(crate) fn refused(&mut self, now: Instant) {
        self.next_try = Some(now + self.doubled(MAX_REFUSED_BACKOFF));
    }

    /// The pause after one more failure: twice the one before, up to the longest one.
    fn doubled(&mut self, longest: Duration) -> Duration {
        let pause = MIN_BACKOFF.saturating_mul(1 << self.failures.min(8)).min(longest);
        self.failures += 1;
        pause
    }

    /// Tries at once, and forgets earlier failures: a link, the server's address or the configuration has
    /// changed.
    pub(crate) fn reset(&mut self, now: Instant) {
        self.failures = 0;
        self.next_try = Some(now);
    }

    /// Handshakes are under way, or none is wanted: no further try is due.
    pub(crate) fn cancel(&mut self) {
        self.next_try = None;
    }

    /// The tunnel is up: the next failure starts with the shortest pause.
    pub(crate) fn succeeded(&mut self) {
        self.failures = 0;
    }
}

/// Probes whether a server answers over a link, without a connection: a server answers a packet of an unknown
/// version with a Version Negotiation packet (RFC 9000 §6.1). A path that is opened and never validated would
/// keep the MTU of the whole connection low and use up path IDs.
#[derive(Clone, Debug)]
pub(crate) struct VersionProbe {
    since: Instant,
    next: Instant,
    pub(crate) answered: bool,
}

/// The shortest pause between probes of a link. Longer: a path is opened later; shorter: more packets into
/// links that lead nowhere. Chosen.
pub(crate) const MIN_PROBE_PAUSE: Duration = Duration::from_millis(250);
/// Bytes of a probe: a server need not answer less than 1200 (RFC 9000 §14.1).
const PROBE_LEN: usize = 1200;
/// Destination connection ID of probes; its value has no meaning.
const PROBE_CID: &[u8; 8] = b"mpvpnask";
/// A version that is reserved to force version negotiation (RFC 9000 §15).
const PROBE_VERSION: [u8; 4] = [0x1a, 0x2a, 0x3a, 0x4a];

impl VersionProbe {
    pub(crate) fn new(now: Instant) -> Self {
        Self { since: now, next: now, answered: false }
    }

    /// Starts anew, because the link has changed.
    pub(crate) fn restart(&mut self, now: Instant) {
        *self = Self::new(now);
    }

    /// Asks again from `now` on, as nothing has been heard `since`.
    pub(crate) fn ask_again(&mut self, now: Instant, since: Instant) {
        *self = Self { since, next: now, answered: false };
    }

    /// The time since [`Self::new`] or [`Self::restart`].
    pub(crate) fn age(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.since)
    }

    pub(crate) fn mark_answered(&mut self) {
        self.answered = true;
    }

    pub(crate) fn next(&self) -> Option<Instant> {
        (!self.answered).then_some(self.next)
    }

    /// Writes the next probe to `buf` if it is due.
    pub(crate) fn poll(&mut self, now: Instant, (link, metered): (LinkId, bool), buf: &mut Vec<u8>) -> bool {
        if self.answered || now < self.next {
            return false;
        }
        self.next = now + probe_pause(self.age(now), MIN_PROBE_PAUSE, metered);
        buf.push(0xc0);
        buf.extend_from_slice(&PROBE_VERSION);
        buf.push(8);
        buf.extend_from_slice(PROBE_CID);
        buf.push(8);
        buf.extend_from_slice(&source_cid(link));
        buf.resize(PROBE_LEN, 0);
        true
    }
}

fn source_cid(link: LinkId) -> [u8; 8] {
    let [a, b] = link.0.to_be_bytes();
    [b'm', b'p', b'v', b'p', b'n', b'?', a, b]
}

/// Whether a packet is the Version Negotiation packet (RFC 9000 §17.2.1) that answers the probe of `link`.
pub(crate) fn answers_probe(link: LinkId, data: &[u8]) -> bool {
    let Some((head, rest)) = data.split_at_checked(5) else { return false };
    let versions = head[0] & 0x80 != 0 && head[1..] == [0; 4];
    versions && rest.len() > 18 && rest[0] == 8 && rest[1..9] == source_cid(link) && rest[9] == 8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_recognised_by_its_connection_id() {
        let now = Instant::now();
        let mut sent = Vec::new();
        assert!(VersionProbe::new(now).poll(now, (LinkId(3), false), &mut sent));
        assert_eq!(sent.len(), 1200, "smaller packets need not be answered (RFC 9000 §14.1)");
        let mut answer = vec![0xff, 0, 0, 0, 0, 8];
        answer.extend_from_slice(&sent[15..23]);
        answer.push(8);
        answer.extend_from_slice(&sent[6..14]);
        answer.extend_from_slice(&[0, 0, 0, 1]);
        assert!(answers_probe(LinkId(3), &answer));
        assert!(!answers_probe(LinkId(4), &answer));
        for len in 0..answer.len() - 3 {
            assert!(!answers_probe(LinkId(3), &answer[..len]));
        }
    }

    #[test]
    fn probes_become_rarer_and_end_with_the_answer() {
        let start = Instant::now();
        let mut probe = VersionProbe::new(start);
        let mut count = |seconds: std::ops::Range<u64>| {
            let mut sends =
                |ms| probe.poll(start + Duration::from_millis(ms), (LinkId(0), false), &mut Vec::new());
            (seconds.start * 1000..seconds.end * 1000).filter(|ms| sends(*ms)).count()
        };
        let (minute, hour) = (count(0..60), count(60..3600));
        assert!((50..=70).contains(&minute), "{minute} in a minute");
        assert!((140..=143).contains(&hour), "{hour} in the rest of an hour");
        probe.mark_answered();
        assert_eq!(probe.next(), None);
    }

    #[test]
    fn pauses_grow_up_to_the_longest_one() {
        let now = Instant::now();
        let mut backoff = Backoff::new(now);
        let mut last = Duration::ZERO;
        for _ in 0..20 {
            backoff.failed(now, now);
            let pause = backoff.next_try.unwrap() - now;
            assert!(pause >= last && pause <= MAX_BACKOFF);
            last = pause;
        }
        assert_eq!(last, MAX_BACKOFF);
        let later = now + Duration::from_secs(180);
        backoff.reset(later);
        backoff.failed(later, now);
        assert_eq!(backoff.next_try, Some(later + Duration::from_secs(25)), "nothing was heard for long");
    }
}
