//! Whether the packets of a link travel over UDP, or inside a TCP connection where the network blocks UDP.
//!
//! In: the health of both transports of the link, and the outcome of TCP connection attempts. Out: when to
//! open or close a TCP connection, and which transport carries data if both work. Always holds: UDP has a
//! head start; after failed attempts the pause doubles; of two working transports one is closed in the end.

use mpvpn_types::{Duration, Instant, Transport, target::TRANSPORT};
use tracing::{debug, trace};

use crate::probe_pause;

/// How long only UDP is tried on a link that has come up (the Connection Attempt Delay of RFC 8305 §5).
/// Shorter: needless TCP connections; longer: slow start where UDP is blocked.
const HEAD_START: Duration = Duration::from_millis(250);
/// As [`HEAD_START`], once something arrived over UDP: QUIC handshakes are in progress.
const ANSWERED_HEAD_START: Duration = Duration::from_millis(1500);
/// As [`HEAD_START`], where UDP fell silent: a few lost heartbeats are no reason for TCP yet.
const SILENCE_HEAD_START: Duration = Duration::from_millis(200);
/// How long UDP must work again before it carries data; doubled for each relapse. Shorter: flapping; longer:
/// TCP is used for longer. Chosen (docs/design/transport.md).
const TRUST_TIME: Duration = Duration::from_secs(1);
/// The longest such time.
const MAX_TRUST_TIME: Duration = Duration::from_secs(16);
/// How long the TCP connection stays open after that; doubled for each relapse. Shorter: a new TCP connection
/// at each relapse; longer: an idle connection. Chosen.
const KEEP_TIME: Duration = Duration::from_secs(3);
const MAX_KEEP_TIME: Duration = Duration::from_secs(60);
/// A failure of UDP within this time after it was trusted again is a relapse.
const RELAPSE_WINDOW: Duration = Duration::from_secs(60);
/// How long UDP must work before a TCP connection is given up that has carried no data, established or not.
/// Longer: needless attempts end late.
const UDP_WORKS_TIME: Duration = Duration::from_millis(500);
/// How long a TCP connection may be silent before another one is opened: TCP's retransmission timer doubles
/// each time, so a new connection is quicker. Shorter: needless connections; longer: longer gaps.
const MAX_TCP_SILENCE: Duration = Duration::from_secs(1);
/// As [`MAX_TCP_SILENCE`], after the link itself was down: a connection that survives answers soon.
const MAX_TCP_SILENCE_AFTER_OUTAGE: Duration = Duration::from_millis(400);
/// As [`MAX_TCP_SILENCE`], before anything arrived on the connection.
const MAX_TCP_SILENCE_AT_FIRST: Duration = Duration::from_secs(4);
/// A TCP connection that worked for this long resets the pause between attempts. Chosen.
const MIN_USEFUL_LIFETIME: Duration = Duration::from_secs(10);
/// The time from the start of a failed attempt to the next one; it doubles up to [`MAX_ATTEMPT_INTERVAL`],
/// and grows further with the silence of the link ([`probe_pause`]). An attempt that takes longer to fail is
/// followed at once. Shorter: load; longer: the link stays down for longer. Chosen.
const ATTEMPT_INTERVAL: Duration = Duration::from_millis(500);
/// The pause between probes after nearly a minute without an answer.
const MAX_ATTEMPT_INTERVAL: Duration = Duration::from_millis(3750);
/// Probes for each attempt that something answers, which takes 5 kB: a server with another certificate as
/// captive portals have, or a connection that carries no packets. Fewer: such links cost more; more: a link
/// that works again is used later.
const PROBES_PER_ANSWERED_ATTEMPT: u32 = 4;

/// The health of one transport of a link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum TransportHealth {
    /// There is no path, and nothing has arrived.
    #[default]
    Unknown,
    /// There is a path on which nothing arrives.
    Dead,
    /// There is no path yet, but the server answers.
    Answering,
    /// There is a path that works.
    Working,
}

/// The observed state of a link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkSigns {
    /// The kernel reports a carrier and an address.
    pub carrier: bool,
    /// The health of UDP: that of the connection for which it is worst.
    pub udp: TransportHealth,
    /// Whether packets arrive over UDP for any connection.
    pub udp_heard_by_any: bool,
    /// The health of TCP.
    pub tcp: TransportHealth,
    /// Whether each packet costs money.
    pub metered: bool,
    /// When the client last had a reason to ask anew for a server that is not heard.
    pub restarted_at: Option<Instant>,
}

/// An action on the TCP connection of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TcpAction {
    /// Open one; an existing one stays until the new one is established.
    Connect,
    /// Close it, cancel the attempt, and remove remains of earlier ones.
    Close,
}

/// The transport that carries the QUIC packets of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathTransport {
    /// UDP.
    Udp,
    /// Inside a TCP connection.
    Tcp,
}

#[derive(Clone, Copy, Debug)]
enum Udp {
    Works { since: Instant },
    Silent { since: Instant, died: bool },
}

/// An established TCP connection.
#[derive(Clone, Copy, Debug)]
struct Established {
    since: Instant,
    /// Since when it works, and since when it is silent.
    works: Option<Instant>,
    silent: Option<Instant>,
    has_worked: bool,
}

/// Chooses the transport of one link.
#[derive(Clone, Debug)]
pub struct TransportSelector {
    /// The name of the link, for log lines.
    link: String,
    wanted: Transport,
    signs: LinkSigns,
    /// Since when the link has been up in this network.
    up: Option<Instant>,
    /// When either transport last worked.
    heard_at: Instant,
    udp: Udp,
    /// While UDP is silent: since when packets arrive over it for a connection again.
    udp_returns_since: Option<Instant>,
    answered: Option<Instant>,
    open: Option<Established>,
    connecting: bool,
    /// When the last attempt began.
    attempt_started: Instant,
    /// Remains of a TCP connection have to be closed.
    has_remains: bool,
    preferred: (PathTransport, Instant),
    /// When UDP was last trusted again, and how often it failed soon after that.
    returned: Option<Instant>,
    relapses: u32,
    failures: u32,
    retry: Instant,
    reason: String,
    next: Option<Instant>,
}

impl TransportSelector {
    /// For a link of unknown state.
    pub fn new(now: Instant, wanted: Transport) -> Self {
        Self {
            link: String::new(),
            wanted,
            signs: LinkSigns::default(),
            up: None,
            heard_at: now,
            udp: Udp::Silent { since: now, died: false },
            udp_returns_since: None,
            answered: None,
            open: None,
            connecting: false,
            attempt_started: now,
            has_remains: false,
            preferred: (default_transport(wanted), now),
            returned: None,
            relapses: 0,
            failures: 0,
            retry: now,
            reason: String::new(),
            next: None,
        }
    }

    /// Sets the name of the link for log lines.
    #[must_use]
    pub fn with_link_name(self, link: &str) -> Self {
        Self { link: link.to_owned(), ..self }
    }

    /// Sets the configured transport.
    pub fn set_wanted(&mut self, now: Instant, wanted: Transport) {
        if self.wanted != wanted {
            debug!(target: TRANSPORT, link = self.link, from = ?self.wanted, to = ?wanted, reason = "the configuration changed", "configured transport changed");
            (self.wanted, self.preferred) = (wanted, (default_transport(wanted), now));
            (self.failures, self.retry, self.next) = (0, now, Some(now));
        }
    }

    /// The link is in another network or has another address: attempts that failed may succeed now.
    pub fn on_network_changed(&mut self, now: Instant) {
        self.up = self.up.map(|_| now);
        self.answered = None;
        debug!(target: TRANSPORT, link = self.link, failures = self.failures, reason = "the network changed", "TCP attempts restart without a pause");
        (self.failures, self.retry, self.next) = (0, now, Some(now));
    }

    /// The requested TCP connection is established.
    pub fn on_tcp_connected(&mut self, now: Instant) {
        self.open = Some(Established { since: now, works: None, silent: None, has_worked: false });
        (self.connecting, self.has_remains, self.next) = (false, true, Some(now));
        self.reason.clear();
        debug!(
            target: TRANSPORT, link = self.link, took = ?now.saturating_duration_since(self.attempt_started),
            "TCP connection established"
        );
    }

    /// The requested TCP connection could not be established, for this reason; `is_answered`: something
    /// answered the attempt.
    pub fn on_tcp_failed(&mut self, now: Instant, reason: String, is_answered: bool) {
        self.connecting = false;
        if self.open.is_none() {
            self.delay_next_attempt(now, self.attempt_started, is_answered);
        }
        debug!(
            target: TRANSPORT, link = self.link, failures = self.failures, reason,
            retry_in = ?self.retry.saturating_duration_since(now), "TCP connection failed"
        );
        (self.reason, self.next) = (reason, Some(now));
    }

    /// The TCP connection was closed, for this reason.
    pub fn on_tcp_closed(&mut self, now: Instant, reason: String) {
        if let Some(open) = self.open.take()
            && open.works.is_none_or(|since| now.saturating_duration_since(since) < MIN_USEFUL_LIFETIME)
        {
            self.delay_next_attempt(now, now, true);
        }
        debug!(
            target: TRANSPORT, link = self.link, failures = self.failures, reason,
            retry_in = ?self.retry.saturating_duration_since(now), "TCP connection ended"
        );
        (self.reason, self.next) = (reason, Some(now));
    }

    fn delay_next_attempt(&mut self, now: Instant, from: Instant, is_answered: bool) {
        let since =
            self.heard_at.max(self.up_since(now)).max(self.signs.restarted_at.unwrap_or(self.heard_at));
        let probes = if is_answered { PROBES_PER_ANSWERED_ATTEMPT } else { 1 };
        let least =
            (ATTEMPT_INTERVAL.saturating_mul(1 << self.failures.min(8)) / probes).min(MAX_ATTEMPT_INTERVAL);
        let pause = probe_pause(now.saturating_duration_since(since), least, self.signs.metered);
        self.retry = from + pause * probes;
        self.failures += 1;
    }

    /// The transport that carries data if both work.
    pub fn preferred(&self) -> PathTransport {
        self.preferred.0
    }

    /// Whether there may be paths over UDP. If TCP is configured, existing ones end when TCP works.
    pub fn allows_udp(&self) -> bool {
        let works = |heard| heard == TransportHealth::Working;
        self.wanted != Transport::Tcp || works(self.signs.udp) && !works(self.signs.tcp)
    }

    /// When [`Self::update`] has to be called at the latest.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.next
    }

    /// Takes the observed state; returns what to do about the TCP connection.
    pub fn update(&mut self, now: Instant, signs: LinkSigns) -> Option<TcpAction> {
        if self.signs != signs {
            trace!(
                target: TRANSPORT, link = self.link, up = signs.carrier, udp = ?signs.udp, tcp = ?signs.tcp,
                "signs changed"
            );
        }
        let restarts = signs.restarted_at > self.signs.restarted_at && self.open.is_none();
        (self.signs, self.next) = (signs, None);
        if !signs.carrier {
            self.up = None;
            return None;
        }
        if self.up.is_none() {
            self.up = Some(now);
            self.on_network_changed(now);
            self.next = None;
        } else if restarts {
            (self.failures, self.retry) = (0, now);
        }
        if signs.udp == TransportHealth::Working || signs.tcp == TransportHealth::Working {
            self.heard_at = now;
        }
        self.update_udp(now);
        self.update_tcp(now, signs.tcp);
        self.choose_transport(now);
        self.tcp_action(now)
    }

    fn update_udp(&mut self, now: Instant) {
        let (up, signs) = (self.up_since(now), self.signs);
        let heard = signs.udp;
        match (heard, self.udp) {
            (TransportHealth::Working, Udp::Works { since }) => {
                self.udp = Udp::Works { since: since.max(up) }
            }
            (TransportHealth::Working, Udp::Silent { since, died }) => {
                let silent_for = now.saturating_duration_since(since);
                debug!(target: TRANSPORT, link = self.link, ?silent_for, died, reason = "a path over UDP works", "UDP works");
                self.udp = Udp::Works { since: now };
            }
            // A link that has just come up needs a moment until its UDP path works again.
            (_, Udp::Works { .. }) if !self.is_over(now, up + HEAD_START) => {}
            (_, Udp::Works { since }) => {
                if self.preferred.0 == PathTransport::Udp {
                    let soon = |at| now.saturating_duration_since(at) < RELAPSE_WINDOW;
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
        let returns = signs.udp_heard_by_any && matches!(self.udp, Udp::Silent { .. });
        self.udp_returns_since = returns.then_some(self.udp_returns_since.unwrap_or(now));
        self.answered = match heard {
            TransportHealth::Unknown => self.answered,
            _ => self.answered.or(Some(now)),
        };
    }

    fn update_tcp(&mut self, now: Instant, heard: TransportHealth) {
        let Some(open) = &mut self.open else { return };
        if heard != TransportHealth::Working {
            (open.works, open.silent) = (None, Some(open.silent.unwrap_or(now)));
            return;
        }
        let since = *open.works.get_or_insert(now);
        (open.silent, open.has_worked) = (None, true);
        if self.failures > 0 && self.is_over(now, since + MIN_USEFUL_LIFETIME) {
            self.failures = 0;
        }
    }

    fn choose_transport(&mut self, now: Instant) {
        if self.wanted != Transport::Auto {
            return;
        }
        // A connection that sends less finds out later that UDP works again.
        let returns = self.udp_returns_since.is_some_and(|since| !self.is_over(now, since + UDP_WORKS_TIME));
        let (transport, reason) = match (self.preferred.0, self.udp, self.open) {
            (PathTransport::Udp, Udp::Silent { .. }, _) if returns => (PathTransport::Udp, ""),
            // Where UDP worked before, the whole link may be silent, and UDP may be back before TCP is.
            (PathTransport::Udp, Udp::Silent { died, .. }, Some(open)) if open.works.is_some() || !died => {
                (PathTransport::Tcp, "UDP is silent, and TCP is not")
            }
            (PathTransport::Tcp, _, None) => (PathTransport::Udp, "there is no TCP connection"),
            (PathTransport::Tcp, Udp::Works { since }, Some(_))
                if self.is_over(now, since + self.trust_time()) =>
            {
                self.returned = Some(now);
                (PathTransport::Udp, "UDP has worked for long enough to be trusted")
            }
            (transport, ..) => (transport, ""),
        };
        if transport != self.preferred.0 {
            debug!(
                target: TRANSPORT, link = self.link, from = ?self.preferred.0, to = ?transport,
                trust = ?self.trust_time(),
                relapses = self.relapses, reason, "transport changed"
            );
            self.preferred = (transport, now);
        }
    }

    fn tcp_action(&mut self, now: Instant) -> Option<TcpAction> {
        let settled = match self.udp {
            _ if self.wanted == Transport::Quic => true,
            _ if self.wanted == Transport::Tcp => false,
            Udp::Works { .. } if self.preferred.0 == PathTransport::Tcp => false,
            Udp::Works { since } if self.open.is_none_or(|open| self.preferred.1 < open.since) => {
                self.is_over(now, since + UDP_WORKS_TIME)
            }
            Udp::Works { since } => self.is_over(now, self.preferred.1.max(since) + self.keep_time()),
            Udp::Silent { .. } => false,
        };
        if settled && (self.open.is_some() || self.connecting || self.has_remains) {
            (self.open, self.connecting, self.has_remains) = (None, false, false);
            let reason = match self.wanted {
                Transport::Quic => "only UDP is configured",
                _ => "UDP has worked for long enough",
            };
            debug!(target: TRANSPORT, link = self.link, keep = ?self.keep_time(), reason, "TCP connection no longer needed");
            return Some(TcpAction::Close);
        }
        if self.connecting || !self.wants_tcp(now) || !self.is_over(now, self.retry) {
            return None;
        }
        if self.open.is_some() {
            self.delay_next_attempt(now, now, true);
        }
        (self.connecting, self.attempt_started) = (true, now);
        let reason = match (self.wanted, self.open) {
            (_, Some(_)) => "nothing arrives on the existing TCP connection",
            (Transport::Tcp, None) => "TCP is configured",
            (_, None) => "UDP gets no answer",
        };
        debug!(
            target: TRANSPORT, link = self.link, failures = self.failures, udp = ?self.udp, reason,
            "TCP connection requested"
        );
        Some(TcpAction::Connect)
    }

    /// Whether to open a TCP connection: there is none that works, and the time for UDP is over.
    fn wants_tcp(&mut self, now: Instant) -> bool {
        let up = self.up_since(now);
        if let Some(open) = self.open {
            let Some(silent) = open.silent else { return false };
            let max_silence = match open.has_worked {
                false => MAX_TCP_SILENCE_AT_FIRST,
                // It has been silent since the link came back.
                true if silent <= up && open.since <= up => MAX_TCP_SILENCE_AFTER_OUTAGE,
                true => MAX_TCP_SILENCE,
            };
            if !self.is_over(now, silent.max(up).max(open.since) + max_silence) {
                return false;
            }
        }
        match (self.wanted, self.udp) {
            (Transport::Quic, _) | (Transport::Auto, Udp::Works { .. }) => false,
            (Transport::Tcp, _) => true,
            (Transport::Auto, Udp::Silent { since, died }) => {
                let answered = self.answered.filter(|_| !died).map(|at| at + ANSWERED_HEAD_START);
                let max_silence =
                    if died && since > up { since + SILENCE_HEAD_START } else { up + HEAD_START };
                self.is_over(now, answered.unwrap_or(max_silence))
            }
        }
    }

    fn up_since(&self, now: Instant) -> Instant {
        self.up.unwrap_or(now)
    }

    /// Whether `at` has passed; if not, [`Self::poll_timeout`] includes it.
    fn is_over(&mut self, now: Instant, at: Instant) -> bool {
        if now < at {
            self.next = Some(self.next.map_or(at, |next| next.min(at)));
        }
        now >= at
    }

    fn trust_time(&self) -> Duration {
        TRUST_TIME.saturating_mul(1 << self.relapses.min(8)).min(MAX_TRUST_TIME)
    }

    fn keep_time(&self) -> Duration {
        KEEP_TIME.saturating_mul(1 << self.relapses.min(8)).min(MAX_KEEP_TIME)
    }

    /// Why the link does not use UDP, for people; empty if it uses UDP normally.
    pub fn explanation(&self, now: Instant) -> String {
        let udp = match (self.wanted, self.udp) {
            (Transport::Quic, _) => return String::new(),
            (Transport::Tcp, _) => "TCP as configured".to_owned(),
            (_, Udp::Works { .. }) if self.preferred.0 == PathTransport::Tcp => {
                "UDP answers again, and is tried".to_owned()
            }
            (_, Udp::Works { .. }) => return String::new(),
            (_, Udp::Silent { since, .. })
                if self.open.is_some() || self.connecting || !self.reason.is_empty() =>
            {
                format!("UDP gets no answer for {}", duration_text(now.saturating_duration_since(since)))
            }
            _ => return String::new(),
        };
        match (&self.open, self.connecting, self.reason.as_str()) {
            (Some(_), ..) => udp,
            (None, true, "") => format!("{udp}, trying TCP"),
            (None, _, "") => udp,
            (None, _, reason) => format!("{udp}, and TCP does not work: {reason}"),
        }
    }
}

fn default_transport(wanted: Transport) -> PathTransport {
    if wanted == Transport::Tcp { PathTransport::Tcp } else { PathTransport::Udp }
}

fn duration_text(time: Duration) -> String {
    match time.as_secs() {
        secs @ ..120 => format!("{secs} s"),
        secs @ ..7200 => format!("{} min", secs / 60),
        secs => format!("{} h", secs / 3600),
    }
}

#[cfg(test)]
mod tests;
