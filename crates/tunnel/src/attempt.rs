use mpvpn_quic::ConnectionHandle;
use mpvpn_types::{Duration, Instant, LinkId};

/// A handshake that has not succeeded after this time is given up.
pub(crate) const ATTEMPT: Duration = Duration::from_secs(8);
/// A connection whose end would end streams has so long to show that it works, when another one stands.
pub(crate) const GRACE: Duration = Duration::from_secs(1);
/// Pause after the first failure; doubles up to [`PAUSE_MAX`].
const PAUSE: Duration = Duration::from_millis(250);
const PAUSE_MAX: Duration = Duration::from_secs(4);

/// One handshake over one link.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attempt {
    pub(crate) connection: ConnectionHandle,
    pub(crate) link: LinkId,
    pub(crate) since: Instant,
    /// When the server was heard last.
    pub(crate) heard: Option<Instant>,
    /// When it succeeded, where the connection in use may still turn out to work.
    pub(crate) ready: Option<Instant>,
}

/// When to try again.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backoff {
    failures: u32,
    pub(crate) next: Option<Instant>,
}

impl Backoff {
    pub(crate) fn new(now: Instant) -> Self {
        Self { failures: 0, next: Some(now) }
    }

    /// All attempts have failed.
    pub(crate) fn failed(&mut self, now: Instant) {
        let pause = PAUSE.saturating_mul(1 << self.failures.min(8)).min(PAUSE_MAX);
        self.failures += 1;
        self.next = Some(now + pause);
    }

    /// Something has changed that makes trying at once worthwhile.
    pub(crate) fn now(&mut self, now: Instant) {
        self.failures = 0;
        self.next = Some(now);
    }

    /// Attempts are under way.
    pub(crate) fn trying(&mut self) {
        self.next = None;
    }

    /// The tunnel works.
    pub(crate) fn succeeded(&mut self) {
        self.failures = 0;
    }
}

/// Asks a server over a link, without a connection, whether it is there: it must answer a packet of
/// an unknown version with the versions that it knows (RFC 9000 §6.1).
///
/// A path that is opened and never validated would hold the MTU of the whole connection down and
/// use up path numbers; so links are asked first.
#[derive(Clone, Debug)]
pub(crate) struct Probe {
    since: Instant,
    next: Instant,
    answered: bool,
}

/// First byte, version and connection ID lengths around two IDs of 8 bytes.
const PROBE_LEN: usize = 1200;
const PROBE_CID: &[u8; 8] = b"mpvpnask";
/// Reserved to force version negotiation (RFC 9000 §15).
const PROBE_VERSION: [u8; 4] = [0x1a, 0x2a, 0x3a, 0x4a];

impl Probe {
    pub(crate) fn new(now: Instant) -> Self {
        Self { since: now, next: now, answered: false }
    }

    /// Starts over: something about the link has changed.
    pub(crate) fn restart(&mut self, now: Instant) {
        *self = Self::new(now);
    }

    /// How long ago that was.
    pub(crate) fn age(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.since)
    }

    pub(crate) fn answered(&self) -> bool {
        self.answered
    }

    pub(crate) fn answer(&mut self) {
        self.answered = true;
    }

    pub(crate) fn next(&self) -> Option<Instant> {
        (!self.answered).then_some(self.next)
    }

    /// The packet to send now, if it is time.
    pub(crate) fn poll(&mut self, now: Instant, link: LinkId, buf: &mut Vec<u8>) -> bool {
        if self.answered || now < self.next {
            return false;
        }
        let age = now.saturating_duration_since(self.since);
        let pause = match age.as_secs() {
            0 => Duration::from_millis(250),
            1..60 => Duration::from_secs(1),
            60..600 => Duration::from_secs(5),
            _ => Duration::from_secs(15),
        };
        self.next = now + pause;
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

/// Whether a received packet answers the probe of `link` (RFC 9000 §17.2.1).
pub(crate) fn is_answer(link: LinkId, data: &[u8]) -> bool {
    let Some((head, rest)) = data.split_at_checked(5) else { return false };
    let versions = head[0] & 0x80 != 0 && head[1..] == [0; 4];
    versions && rest.len() > 18 && rest[0] == 8 && rest[1..9] == source_cid(link) && rest[9] == 8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_is_known_by_its_connection_id() {
        let now = Instant::now();
        let mut sent = Vec::new();
        assert!(Probe::new(now).poll(now, LinkId(3), &mut sent));
        assert_eq!(sent.len(), 1200, "smaller packets need not be answered (RFC 9000 §14.1)");
        let mut answer = vec![0xff, 0, 0, 0, 0, 8];
        answer.extend_from_slice(&sent[15..23]);
        answer.push(8);
        answer.extend_from_slice(&sent[6..14]);
        answer.extend_from_slice(&[0, 0, 0, 1]);
        assert!(is_answer(LinkId(3), &answer));
        assert!(!is_answer(LinkId(4), &answer));
        for len in 0..answer.len() - 3 {
            assert!(!is_answer(LinkId(3), &answer[..len]));
        }
    }

    #[test]
    fn asking_becomes_rarer_and_ends_with_the_answer() {
        let start = Instant::now();
        let mut probe = Probe::new(start);
        let mut count = 0;
        for ms in 0..60_000u64 {
            count += u32::from(probe.poll(start + Duration::from_millis(ms), LinkId(0), &mut Vec::new()));
        }
        assert!((55..=70).contains(&count), "{count} in a minute");
        probe.answer();
        assert_eq!(probe.next(), None);
    }

    #[test]
    fn pauses_grow_and_have_an_end() {
        let now = Instant::now();
        let mut backoff = Backoff::new(now);
        let mut last = Duration::ZERO;
        for _ in 0..20 {
            backoff.failed(now);
            let pause = backoff.next.unwrap() - now;
            assert!(pause >= last && pause <= PAUSE_MAX);
            last = pause;
        }
        assert_eq!(last, PAUSE_MAX);
    }
}
