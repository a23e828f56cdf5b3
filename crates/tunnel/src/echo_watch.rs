//! Records which links ICMP echo requests leave on, and on which link each reply arrives, for `mpvpn ping`.
//!
//! In: identifiers that are watched for a while, packets of the tunnel with their links. Out: the links of
//! each sequence number. Always holds: nothing is recorded for identifiers that nobody watches; at most
//! [`MAX_WATCHED`] identifiers with [`MAX_ECHOES`] echoes each are kept; while nothing is watched, a packet
//! costs one atomic load.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use mpvpn_packet::icmp::{Echo, EchoKind, echo_of};
use mpvpn_types::{ClassId, Duration, Instant, LinkId};

/// How long an identifier is watched after it was last asked for. `mpvpn ping` asks once a second, so that a
/// watch survives a busy machine, and a killed command leaves none for long. Chosen.
const WATCH_DURATION: Duration = Duration::from_secs(10);
/// Identifiers that are watched at a time: each is one running `mpvpn ping`. Chosen: more need more memory.
const MAX_WATCHED: usize = 16;
/// Echoes that are kept for an identifier: 6 s of 20 requests a second, so that an answer that is lost loses
/// none. Chosen: more make every answer longer.
const MAX_ECHOES: usize = 128;
/// Links that are kept for one request: the first transmission, copies and retransmissions. Chosen.
const MAX_LINKS_OF_REQUEST: usize = 8;

/// The links of one ICMP echo.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EchoLinks {
    /// The sequence number.
    pub sequence: u16,
    /// The links on which the request left: several for copies and retransmissions, the first one first.
    pub request: Vec<LinkId>,
    /// The link on which the reply arrived; `None` if it has not arrived, or was recovered by FEC.
    pub reply: Option<LinkId>,
    /// Whether the reply has arrived.
    pub answered: bool,
}

/// The watch over ICMP echoes of a client. Clones share it.
#[derive(Clone, Debug)]
pub struct EchoWatch {
    shared: Arc<Shared>,
    /// The class of the packets of this clone.
    class: ClassId,
}

#[derive(Debug)]
struct Shared {
    origin: Instant,
    /// Milliseconds after `origin` until which an identifier is watched.
    active_until: AtomicU64,
    watched: Mutex<BTreeMap<u16, Watched>>,
}

#[derive(Debug)]
struct Watched {
    until: Instant,
    /// In the order of their requests.
    echoes: VecDeque<EchoLinks>,
}

impl EchoWatch {
    /// A watch that watches nothing.
    pub fn new(now: Instant) -> Self {
        let (active_until, watched) = (AtomicU64::new(0), Mutex::new(BTreeMap::new()));
        let shared = Arc::new(Shared { origin: now, active_until, watched });
        Self { shared, class: ClassId::DEFAULT }
    }

    /// The same watch, for the packets of a class.
    pub(crate) fn of_class(&self, class: ClassId) -> Self {
        Self { class, ..self.clone() }
    }

    /// Whether an identifier is watched.
    #[inline]
    pub(crate) fn is_active(&self, now: Instant) -> bool {
        let until = self.shared.active_until.load(Relaxed);
        until > 0 && self.millis(now) < until
    }

    fn millis(&self, at: Instant) -> u64 {
        u64::try_from(at.saturating_duration_since(self.shared.origin).as_millis()).unwrap_or(u64::MAX)
    }

    fn watched(&self) -> MutexGuard<'_, BTreeMap<u16, Watched>> {
        // No code panics while it holds the lock.
        self.shared.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Watches an identifier for 10 s from now on, and returns its latest echoes. `None` if too many
    /// identifiers are watched.
    pub fn read(&self, now: Instant, identifier: u16) -> Option<Vec<EchoLinks>> {
        let mut all = self.watched();
        all.retain(|_, watched| watched.until > now);
        if !all.contains_key(&identifier) && all.len() >= MAX_WATCHED {
            return None;
        }
        let until = now + WATCH_DURATION;
        self.shared.active_until.store(self.millis(until), Relaxed);
        let watched = all.entry(identifier).or_insert_with(|| Watched { until, echoes: VecDeque::new() });
        watched.until = until;
        Some(watched.echoes.iter().cloned().collect())
    }

    /// Records that a packet leaves on a link, if it is a watched request.
    pub(crate) fn on_sent(&self, now: Instant, packet: &[u8], link: LinkId) {
        self.record(now, packet, EchoKind::Request, |echo| {
            if echo.request.len() < MAX_LINKS_OF_REQUEST {
                echo.request.push(link.with_class(self.class));
            }
        });
    }

    /// Records that a packet has arrived on a link, if it is a reply to a watched request. Of copies the
    /// first counts.
    pub(crate) fn on_received(&self, now: Instant, packet: &[u8], link: Option<LinkId>) {
        self.record(now, packet, EchoKind::Reply, |echo| {
            if !echo.answered {
                (echo.answered, echo.reply) = (true, link.map(|link| link.with_class(self.class)));
            }
        });
    }

    fn record(&self, now: Instant, packet: &[u8], kind: EchoKind, note: impl FnOnce(&mut EchoLinks)) {
        let Some(Echo { identifier, sequence, .. }) = echo_of(packet).filter(|echo| echo.kind == kind) else {
            return;
        };
        let mut all = self.watched();
        let Some(watched) = all.get_mut(&identifier).filter(|watched| watched.until > now) else { return };
        // The latest one: sequence numbers begin again after 65,535.
        if let Some(echo) = watched.echoes.iter_mut().rfind(|echo| echo.sequence == sequence) {
            return note(echo);
        }
        // A reply without a request is no answer to a packet of this client.
        if kind == EchoKind::Request {
            if watched.echoes.len() >= MAX_ECHOES {
                watched.echoes.pop_front();
            }
            let mut echo = EchoLinks { sequence, ..EchoLinks::default() };
            note(&mut echo);
            watched.echoes.push_back(echo);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINKS: [LinkId; 2] = [LinkId(1), LinkId(2)];

    /// An ICMP echo (type 8 or 0) over IPv4, without checksums, which nobody reads here.
    fn packet(kind: u8, identifier: u16, sequence: u16) -> Vec<u8> {
        let mut bytes = vec![0x45, 0, 0, 28, 0, 0, 0, 0, 64, 1, 0, 0, 10, 0, 0, 2, 10, 0, 0, 1];
        bytes.extend_from_slice(&[kind, 0, 0, 0]);
        bytes.extend_from_slice(&identifier.to_be_bytes());
        bytes.extend_from_slice(&sequence.to_be_bytes());
        bytes
    }

    #[test]
    fn the_links_of_a_watched_echo_are_known_and_of_others_nothing_is_kept() {
        let now = Instant::now();
        let watch = EchoWatch::new(now);
        watch.on_sent(now, &packet(8, 7, 1), LINKS[0]);
        assert!(!watch.is_active(now), "nobody watches");
        assert_eq!(watch.read(now, 7), Some(Vec::new()));
        assert!(watch.is_active(now));
        watch.on_sent(now, &packet(8, 7, 2), LINKS[0]);
        watch.on_sent(now, &packet(8, 7, 2), LINKS[1]);
        watch.on_sent(now, &packet(8, 8, 2), LINKS[1]);
        watch.on_received(now, &packet(0, 7, 3), Some(LINKS[0]));
        let mut echo = EchoLinks { sequence: 2, request: LINKS.to_vec(), ..EchoLinks::default() };
        assert_eq!(watch.read(now, 7), Some(vec![echo.clone()]));
        watch.on_received(now, &packet(0, 7, 2), Some(LINKS[1]));
        watch.on_received(now, &packet(0, 7, 2), Some(LINKS[0]));
        (echo.reply, echo.answered) = (Some(LINKS[1]), true);
        assert_eq!(watch.read(now, 7), Some(vec![echo]), "the first reply counts");
    }

    #[test]
    fn a_watch_ends_on_its_own_and_is_bounded() {
        let now = Instant::now();
        let watch = EchoWatch::new(now);
        for identifier in 0..MAX_WATCHED as u16 {
            assert!(watch.read(now, identifier).is_some());
        }
        assert_eq!(watch.read(now, 99), None);
        for sequence in (0..500).chain(0..10) {
            (0..20).for_each(|_| watch.on_sent(now, &packet(8, 0, sequence), LINKS[0]));
        }
        let kept = watch.read(now, 0).unwrap();
        let last = kept.last().unwrap();
        assert_eq!((kept.len(), last.sequence, last.request.len()), (MAX_ECHOES, 9, MAX_LINKS_OF_REQUEST));
        let later = now + WATCH_DURATION;
        assert!(!watch.is_active(later));
        assert_eq!(watch.read(later, 99), Some(Vec::new()), "the others have expired");
    }

    #[test]
    fn other_packets_are_passed_over() {
        let now = Instant::now();
        let watch = EchoWatch::new(now);
        watch.read(now, 0);
        for bytes in [&[][..], &[0x45; 20], &[0x60; 44], &packet(8, 0, 1)[..27], &[0xff; 60]] {
            watch.on_sent(now, bytes, LINKS[0]);
        }
        assert_eq!(watch.read(now, 0), Some(Vec::new()));
    }
}
