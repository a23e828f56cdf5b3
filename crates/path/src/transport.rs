//! By which way the packets of a link travel: over UDP, or inside a TCP connection where UDP does not get through.
//!
//! In: what is heard over the link by either way, and what became of TCP connections that were ordered. Out: orders to make
//! a TCP connection or to give it up, and which of two ways that work carries data. Always holds: UDP has a head start;
//! attempts that fail come ever less often; of two ways that work one is given up.

use mpvpn_types::{Duration, Instant, Transport, target::TRANSPORT};
use tracing::{debug, trace};

/// How long nothing but UDP is tried on a link that has come up (as RFC 8305 §5 has it for addresses).
const HEAD_START: Duration = Duration::from_millis(250);
/// The same once something was heard over UDP: handshakes are on their way.
const ANSWERED: Duration = Duration::from_millis(1500);
/// The same where it fell silent: some heartbeats that were lost are no reason yet.
const DIED: Duration = Duration::from_millis(200);
/// UDP that works again carries data after this time …
const TRUST: Duration = Duration::from_secs(1);
/// … doubled each time that it failed again soon, up to this.
const TRUST_MOST: Duration = Duration::from_secs(16);
/// The TCP connection stays open for so long after that, doubled likewise.
const KEEP: Duration = Duration::from_secs(3);
const KEEP_MOST: Duration = Duration::from_secs(60);
/// UDP that carries data for less than this has failed again soon.
const STEADY: Duration = Duration::from_secs(60);
/// An attempt at TCP is given up when UDP has worked for so long.
const WORKS: Duration = Duration::from_millis(500);
/// A TCP connection on which nothing has come for so long is made anew: it repeats what was lost ever less often.
const SILENT: Duration = Duration::from_secs(1);
/// The same when the link was just away: what can come back does so soon.
const SILENT_AFTER_CUT: Duration = Duration::from_millis(400);
/// The same before anything has come at all.
const SILENT_AT_FIRST: Duration = Duration::from_secs(4);
/// A TCP connection that worked for so long was worth making.
const WORTH: Duration = Duration::from_secs(10);
/// From the start of an attempt that failed to the next one, doubled each time, up to the most: one that took long to
/// fail is followed at once.
const PAUSE: Duration = Duration::from_millis(500);
const PAUSE_MOST: Duration = Duration::from_secs(15);

/// What is heard over a link by one way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum TransportHealth {
    /// There is no path, and nothing came.
    #[default]
    Unknown,
    /// There is a path on which nothing comes.
    Dead,
    /// There is no path yet, but the server answers.
    Answering,
    /// There is a path that works.
    Working,
}

/// What is known of a link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkSigns {
    /// It can carry packets, as far as the kernel knows.
    pub carrier: bool,
    /// Over UDP.
    pub udp: TransportHealth,
    /// Over TCP.
    pub tcp: TransportHealth,
}

/// What to do about the TCP connection of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TcpAction {
    /// Make one; one that is there stays until the new one stands.
    Connect,
    /// Give it up, or the attempt, or what is left of an earlier one.
    Close,
}

/// What packets travel in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathTransport {
    /// UDP.
    Udp,
    /// A TCP connection.
    Tcp,
}

#[derive(Clone, Copy, Debug)]
enum Udp {
    Works { since: Instant },
    Silent { since: Instant, died: bool },
}

/// A TCP connection that stands.
#[derive(Clone, Copy, Debug)]
struct Open {
    since: Instant,
    /// Since when what is sent there arrives, or nothing is heard.
    works: Option<Instant>,
    silent: Option<Instant>,
    has_worked: bool,
}

/// Decides for one link.
#[derive(Clone, Debug)]
pub struct TransportSelector {
    /// The name of the link, in events.
    link: String,
    wanted: Transport,
    signs: LinkSigns,
    /// Since when it is up, in this network.
    up: Option<Instant>,
    udp: Udp,
    answered: Option<Instant>,
    open: Option<Open>,
    dialling: bool,
    /// When an attempt was ordered last.
    ordered: Instant,
    /// Something of a TCP connection is left to be given up.
    lingers: bool,
    main: (PathTransport, Instant),
    /// When UDP was trusted again last, and how often it failed soon after.
    returned: Option<Instant>,
    relapses: u32,
    failures: u32,
    retry: Instant,
    reason: String,
    next: Option<Instant>,
}

impl TransportSelector {
    /// For a link of which nothing is known.
    pub fn new(now: Instant, wanted: Transport) -> Self {
        Self {
            link: String::new(),
            wanted,
            signs: LinkSigns::default(),
            up: None,
            udp: Udp::Silent { since: now, died: false },
            answered: None,
            open: None,
            dialling: false,
            ordered: now,
            lingers: false,
            main: (main_of(wanted), now),
            returned: None,
            relapses: 0,
            failures: 0,
            retry: now,
            reason: String::new(),
            next: None,
        }
    }

    /// The same for the link of this name, which events about it have.
    #[must_use]
    pub fn with_link_name(self, link: &str) -> Self {
        Self { link: link.to_owned(), ..self }
    }

    /// Wants something else from now on.
    pub fn set_wanted(&mut self, now: Instant, wanted: Transport) {
        if self.wanted != wanted {
            debug!(target: TRANSPORT, link = self.link, from = ?self.wanted, to = ?wanted, reason = "it is configured so", "transport wanted");
            (self.wanted, self.main) = (wanted, (main_of(wanted), now));
            (self.failures, self.retry, self.next) = (0, now, Some(now));
        }
    }

    /// The link is in another network, or has another address: what failed may work now.
    pub fn on_network_changed(&mut self, now: Instant) {
        self.up = self.up.map(|_| now);
        self.answered = None;
        debug!(target: TRANSPORT, link = self.link, failures = self.failures, reason = "what failed may work in another network", "attempts begin anew");
        (self.failures, self.retry, self.next) = (0, now, Some(now));
    }

    /// The TCP connection that was ordered stands.
    pub fn on_tcp_connected(&mut self, now: Instant) {
        self.open = Some(Open { since: now, works: None, silent: None, has_worked: false });
        (self.dialling, self.lingers, self.next) = (false, true, Some(now));
        self.reason.clear();
        debug!(target: TRANSPORT, link = self.link, took = ?now.saturating_duration_since(self.ordered), "TCP connection established");
    }

    /// The TCP connection that was ordered could not be made, for this reason.
    pub fn on_tcp_failed(&mut self, now: Instant, reason: String) {
        self.dialling = false;
        if self.open.is_none() {
            self.pause(self.ordered);
        }
        debug!(
            target: TRANSPORT, link = self.link, failures = self.failures, reason,
            retry_in = ?self.retry.saturating_duration_since(now), "TCP connection failed"
        );
        (self.reason, self.next) = (reason, Some(now));
    }

    /// The TCP connection is over, for this reason.
    pub fn on_tcp_closed(&mut self, now: Instant, reason: String) {
        if let Some(open) = self.open.take()
            && open.works.is_none_or(|since| now.saturating_duration_since(since) < WORTH)
        {
            self.pause(now);
        }
        debug!(
            target: TRANSPORT, link = self.link, failures = self.failures, reason,
            retry_in = ?self.retry.saturating_duration_since(now), "TCP connection ended"
        );
        (self.reason, self.next) = (reason, Some(now));
    }

    fn pause(&mut self, from: Instant) {
        self.retry = from + PAUSE.saturating_mul(1 << self.failures.min(8)).min(PAUSE_MOST);
        self.failures += 1;
    }

    /// Which way carries data where both work.
    pub fn preferred(&self) -> PathTransport {
        self.main.0
    }

    /// Whether there may be paths over UDP. Where TCP is wanted, those that are there go when it works.
    pub fn allows_udp(&self) -> bool {
        let works = |heard| heard == TransportHealth::Working;
        self.wanted != Transport::Tcp || works(self.signs.udp) && !works(self.signs.tcp)
    }

    /// When [`Self::look`] wants to be called, beside when something has changed.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.next
    }

    /// Judges what is known now.
    pub fn update(&mut self, now: Instant, signs: LinkSigns) -> Option<TcpAction> {
        if self.signs != signs {
            trace!(target: TRANSPORT, link = self.link, up = signs.carrier, udp = ?signs.udp, tcp = ?signs.tcp, "signs changed");
        }
        (self.signs, self.next) = (signs, None);
        if !signs.carrier {
            self.up = None;
            return None;
        }
        if self.up.is_none() {
            self.up = Some(now);
            self.on_network_changed(now);
            self.next = None;
        }
        self.note_udp(now, signs.udp);
        self.note_tcp(now, signs.tcp);
        self.choose(now);
        self.order(now)
    }

    fn note_udp(&mut self, now: Instant, heard: TransportHealth) {
        let up = self.up_since(now);
        match (heard, self.udp) {
            (TransportHealth::Working, Udp::Works { since }) => {
                self.udp = Udp::Works { since: since.max(up) }
            }
            (TransportHealth::Working, Udp::Silent { since, died }) => {
                let silent_for = now.saturating_duration_since(since);
                debug!(target: TRANSPORT, link = self.link, ?silent_for, died, reason = "a path over UDP works", "UDP works");
                self.udp = Udp::Works { since: now };
            }
            // What was heard before the link went is not heard at once, which says nothing against UDP.
            (_, Udp::Works { .. }) if !self.is_over(now, up + HEAD_START) => {}
            (_, Udp::Works { since }) => {
                if self.main.0 == PathTransport::Udp {
                    let soon = |at| now.saturating_duration_since(at) < STEADY;
                    self.relapses =
                        if self.returned.take().is_some_and(soon) { self.relapses + 1 } else { 0 };
                }
                debug!(
                    target: TRANSPORT, link = self.link, worked_for = ?now.saturating_duration_since(since),
                    relapses = self.relapses, heard = ?heard, reason = "no path over UDP works any more", "UDP is silent"
                );
                self.udp = Udp::Silent { since: if since < up { up } else { now }, died: true };
            }
            _ => {}
        }
        self.answered = match heard {
            TransportHealth::Unknown => self.answered,
            _ => self.answered.or(Some(now)),
        };
    }

    fn note_tcp(&mut self, now: Instant, heard: TransportHealth) {
        let Some(open) = &mut self.open else { return };
        if heard != TransportHealth::Working {
            (open.works, open.silent) = (None, Some(open.silent.unwrap_or(now)));
            return;
        }
        let since = *open.works.get_or_insert(now);
        (open.silent, open.has_worked) = (None, true);
        if self.failures > 0 && self.is_over(now, since + WORTH) {
            self.failures = 0;
        }
    }

    fn choose(&mut self, now: Instant) {
        if self.wanted != Transport::Auto {
            return;
        }
        let (way, reason) = match (self.main.0, self.udp, self.open) {
            (PathTransport::Udp, Udp::Silent { .. }, Some(_)) => {
                (PathTransport::Tcp, "UDP is silent, and a TCP connection stands")
            }
            (PathTransport::Tcp, _, None) => (PathTransport::Udp, "there is no TCP connection"),
            (PathTransport::Tcp, Udp::Works { since }, Some(_))
                if self.is_over(now, since + self.trust()) =>
            {
                self.returned = Some(now);
                (PathTransport::Udp, "UDP has worked for long enough to be trusted")
            }
            (way, ..) => (way, ""),
        };
        if way != self.main.0 {
            debug!(
                target: TRANSPORT, link = self.link, from = ?self.main.0, to = ?way, trust = ?self.trust(),
                relapses = self.relapses, reason, "transport changed"
            );
            self.main = (way, now);
        }
    }

    fn order(&mut self, now: Instant) -> Option<TcpAction> {
        let settled = match self.udp {
            _ if self.wanted == Transport::Quic => true,
            _ if self.wanted == Transport::Tcp => false,
            Udp::Works { since } if self.open.is_none() => self.is_over(now, since + WORKS),
            Udp::Works { since } => {
                self.main.0 == PathTransport::Udp && self.is_over(now, self.main.1.max(since) + self.keep())
            }
            Udp::Silent { .. } => false,
        };
        if settled && (self.open.is_some() || self.dialling || self.lingers) {
            (self.open, self.dialling, self.lingers) = (None, false, false);
            let reason = match self.wanted {
                Transport::Quic => "nothing but UDP is wanted",
                _ => "UDP has carried data for long enough",
            };
            debug!(target: TRANSPORT, link = self.link, keep = ?self.keep(), reason, "TCP connection given up");
            return Some(TcpAction::Close);
        }
        if self.dialling || !self.wants_tcp(now) || !self.is_over(now, self.retry) {
            return None;
        }
        if self.open.is_some() {
            self.pause(now);
        }
        (self.dialling, self.ordered) = (true, now);
        let reason = match (self.wanted, self.open) {
            (_, Some(_)) => "nothing comes on the TCP connection that there is",
            (Transport::Tcp, None) => "TCP is wanted",
            (_, None) => "UDP gets no answer",
        };
        debug!(
            target: TRANSPORT, link = self.link, failures = self.failures, udp = ?self.udp, reason,
            "TCP connection ordered"
        );
        Some(TcpAction::Connect)
    }

    /// Whether a TCP connection is to be made: there is none, or none that works, and UDP has had its time.
    fn wants_tcp(&mut self, now: Instant) -> bool {
        let up = self.up_since(now);
        if let Some(open) = self.open {
            let Some(silent) = open.silent else { return false };
            let patience = match open.has_worked {
                false => SILENT_AT_FIRST,
                // It was silent when the link came back.
                true if silent <= up && open.since <= up => SILENT_AFTER_CUT,
                true => SILENT,
            };
            if !self.is_over(now, silent.max(up).max(open.since) + patience) {
                return false;
            }
        }
        match (self.wanted, self.udp) {
            (Transport::Quic, _) | (Transport::Auto, Udp::Works { .. }) => false,
            (Transport::Tcp, _) => true,
            (Transport::Auto, Udp::Silent { since, died }) => {
                let answered = self.answered.filter(|_| !died).map(|at| at + ANSWERED);
                let patience = if died && since > up { since + DIED } else { up + HEAD_START };
                self.is_over(now, answered.unwrap_or(patience))
            }
        }
    }

    fn up_since(&self, now: Instant) -> Instant {
        self.up.unwrap_or(now)
    }

    /// Whether it is `at` already; if not, it will be looked at again then.
    fn is_over(&mut self, now: Instant, at: Instant) -> bool {
        if now < at {
            self.next = Some(self.next.map_or(at, |next| next.min(at)));
        }
        now >= at
    }

    fn trust(&self) -> Duration {
        TRUST.saturating_mul(1 << self.relapses.min(8)).min(TRUST_MOST)
    }

    fn keep(&self) -> Duration {
        KEEP.saturating_mul(1 << self.relapses.min(8)).min(KEEP_MOST)
    }

    /// What there is to say about it; empty where packets travel over UDP as they should.
    pub fn explanation(&self, now: Instant) -> String {
        let udp = match (self.wanted, self.udp) {
            (Transport::Quic, _) => return String::new(),
            (Transport::Tcp, _) => "TCP as configured".to_owned(),
            (_, Udp::Works { .. }) if self.main.0 == PathTransport::Tcp => {
                "UDP answers again, and is tried".to_owned()
            }
            (_, Udp::Works { .. }) => return String::new(),
            (_, Udp::Silent { since, .. })
                if self.open.is_some() || self.dialling || !self.reason.is_empty() =>
            {
                format!("UDP gets no answer for {}", said(now.saturating_duration_since(since)))
            }
            _ => return String::new(),
        };
        match (&self.open, self.dialling, self.reason.as_str()) {
            (Some(_), ..) => udp,
            (None, true, "") => format!("{udp}, trying TCP"),
            (None, _, "") => udp,
            (None, _, reason) => format!("{udp}, and TCP does not work: {reason}"),
        }
    }
}

fn main_of(wanted: Transport) -> PathTransport {
    if wanted == Transport::Tcp { PathTransport::Tcp } else { PathTransport::Udp }
}

fn said(time: Duration) -> String {
    match time.as_secs() {
        secs @ ..120 => format!("{secs} s"),
        secs @ ..7200 => format!("{} min", secs / 60),
        secs => format!("{} h", secs / 3600),
    }
}

#[cfg(test)]
mod tests;
