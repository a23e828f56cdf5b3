//! The connection of one traffic class, which exists only while the class is used.
//!
//! In: packets that the rules put into the class, events of its client, and the time. Out: whether its own
//! connection carries a packet, the default class does, or the packet waits. Always holds: a class that was
//! unused for [`IDLE_BEFORE_CLOSE`], or in a session that was unused for [`SESSION_IDLE_BEFORE_CLOSE`], has
//! no connection, unless it is the default class or flows would end with the connection. A class other than
//! the default one has none before there is something that its packets would feel; a pinned one always has.
//! While a connection is being made, only TCP SYN packets of streams wait, for at most [`MAX_SYN_WAIT`].

use std::collections::VecDeque;

use mpvpn_packet::{FlowKey, VnetHdr, ip, protocol, tcp::Segment, tcp_flags};
use mpvpn_quic::{LocalAddress, Transmit};
use mpvpn_types::{ClassId, Duration, Instant, earliest, target::CLASSES};
use tracing::debug;

use crate::{ClassChange, Client, ClientChange, ClientEvent, PathEvent, events::Changes};

/// Idle time after which the connection of a class is closed. Smaller: a class that is used seldom pays a
/// handshake more often. Larger: idle clients cost memory at both ends (docs/performance.md, "How cost
/// grows"). Value: chosen.
const IDLE_BEFORE_CLOSE: Duration = Duration::from_secs(600);
/// The same where no class of the session has moved data: nobody who would wait for a handshake is there.
/// Smaller: a call that begins after a short pause is carried by the default class for a moment. Larger: idle
/// clients cost memory at both ends, and heartbeats.
const SESSION_IDLE_BEFORE_CLOSE: Duration = Duration::from_secs(60);
/// How long a SYN waits for the connection of its class, since a proxied TCP connection stays where it
/// begins: less than the initial retransmission timeout of TCP of 1 s (RFC 6298 §2). Smaller: connections
/// over slow links use the default class. Larger: the SYN is retransmitted meanwhile.
const MAX_SYN_WAIT: Duration = Duration::from_millis(900);
/// Maximum number of SYNs that wait. Larger: more memory. Smaller: bursts of new connections use the default
/// class. Value: chosen.
const MAX_WAITING_SYNS: usize = 64;
/// A new connection searches its path MTU. If the MTU did not change for this time plus
/// [`MTU_SEARCH_ROUND_TRIPS`] round trips, the search counts as finished. Smaller: the tunnel's MTU falls for
/// a moment. Larger: the class uses the default class's connection for longer. Values: chosen.
const MTU_SEARCH_BASE: Duration = Duration::from_millis(500);
const MTU_SEARCH_ROUND_TRIPS: u32 = 4;
/// Minimum time between two records of the last use of a class, which cost a check of the packet. Larger: the
/// idle time is less exact.
const USE_NOTE_INTERVAL: Duration = Duration::from_secs(1);

/// The state of the connection of a class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ConnectionState {
    /// There is no connection, because the class is unused.
    Asleep,
    /// A connection is being made since this time, because a packet needs it.
    Waking(Instant),
    /// A connection is being made, and no packet waits for it.
    Down,
    /// Connected, but the path MTU may still grow: it has not changed since this time.
    Up(Instant),
    /// The connection carries the packets of the class.
    Ready,
}

impl ConnectionState {
    fn name(self) -> &'static str {
        match self {
            Self::Asleep => "asleep",
            Self::Waking(_) => "waking",
            Self::Down => "down",
            Self::Up(_) => "up",
            Self::Ready => "ready",
        }
    }
}

/// The connection that carries a packet of a class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PacketOwner {
    /// The connection of the class.
    OwnClass,
    /// The connection of the default class.
    DefaultClass,
    /// Not decided: the packet waits for the connection of the class.
    Undecided,
}

/// Whether a client has to be looked at. Idle classes must cost nothing while another one is busy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Attention {
    /// Datagrams have reached it, or something else that [`Client::handle_batch`] takes.
    Unhandled,
    /// Something has reached it since it last had nothing to send.
    Due,
    /// It rests: nothing waits, and no data has moved for a while.
    AtRest,
    /// The same, and its next timer expires then.
    AtRestUntil(Option<Instant>),
}

/// The connection of one traffic class, with its state.
pub(super) struct ClassConnection {
    pub(super) id: ClassId,
    pub(super) priority: bool,
    /// Whether its first packet wakes it, whatever the connection of the default class carries.
    pub(super) connects_at_once: bool,
    /// Whether no other connection carries its packets, which wait or are lost while its own does not work.
    pub(super) is_pinned: bool,
    /// The client, for reading it and for taking results and reports, which makes nothing due; else
    /// [`Self::client_mut`].
    pub(super) client: Client,
    attention: Attention,
    state: ConnectionState,
    /// When a packet last belonged to the class; at first, when the class was created.
    last_used: Instant,
    /// The MTU of the connection (bytes), and the MTU that counts for the tunnel. They differ while a new
    /// connection searches its path MTU; a closed connection keeps the latter.
    own_mtu: Option<usize>,
    pub(super) mtu: Option<usize>,
    /// SYN packets that wait, as read from the TUN device.
    waiting_syns: VecDeque<(VnetHdr, Vec<u8>)>,
    changes: Changes<ClassChange>,
}

impl ClassConnection {
    /// Creates a class. The default class and pinned ones connect at once, others when they are used.
    pub(super) fn new(
        now: Instant,
        id: ClassId,
        priority: bool,
        connects_at_once: bool,
        is_pinned: bool,
        client: Client,
    ) -> Self {
        let waiting_syns = VecDeque::new();
        let (state, changes) = (ConnectionState::Down, Changes::default());
        let mut class = Self {
            id,
            priority,
            connects_at_once,
            is_pinned,
            client,
            attention: Attention::Unhandled,
            state,
            last_used: now,
            own_mtu: None,
            mtu: None,
            waiting_syns,
            changes,
        };
        if class.may_sleep() {
            class.sleep(now);
        }
        class
    }

    /// The client, which may have something to do afterwards.
    pub(super) fn client_mut(&mut self) -> &mut Client {
        self.client.forget_deadline();
        self.packet_client()
    }

    /// The client, for handing packets to it.
    pub(super) fn packet_client(&mut self) -> &mut Client {
        self.attention = Attention::Unhandled;
        &mut self.client
    }

    /// See [`Client::handle_batch`].
    pub(super) fn handle_batch(&mut self, now: Instant) {
        if self.attention == Attention::Unhandled {
            self.attention = Attention::Due;
            self.client.handle_batch(now);
        }
    }

    /// Handles the timers that have expired.
    pub(super) fn handle_timeout(&mut self, now: Instant, session_last_use: Instant) {
        let is_due = match self.attention {
            Attention::AtRestUntil(at) => at.is_some_and(|at| at <= now),
            _ => {
                let own = self.own_timeout(session_last_use);
                own.is_some_and(|at| at <= now) || self.client.is_due(now)
            }
        };
        if is_due {
            self.client_mut().handle_timeout(now);
            self.close_if_idle(now, session_last_use);
        }
    }

    /// Whether the connection carries the packets of the class.
    pub(super) fn is_ready(&self) -> bool {
        matches!(self.state, ConnectionState::Ready)
    }

    /// Changes the state, and logs the reason.
    fn enter(&mut self, state: ConnectionState, reason: &str) {
        debug!(
            target: CLASSES, class = self.id.0, name = self.client.class_name(), from = self.state.name(),
            to = state.name(), waiting = self.waiting_syns.len(), mtu = self.own_mtu, reason, "class changed"
        );
        self.state = state;
        self.attention = Attention::Unhandled;
    }

    fn may_sleep(&self) -> bool {
        self.id != ClassId::DEFAULT && !self.is_pinned
    }

    /// Pins the class to its own connection, or ends that.
    pub(super) fn set_pinned(&mut self, now: Instant, is_pinned: bool) {
        self.is_pinned = is_pinned;
        if is_pinned && self.state == ConnectionState::Asleep {
            self.wake(now);
        }
    }

    /// Closes the connection until the class is used.
    fn sleep(&mut self, now: Instant) {
        self.client_mut().sleep(now);
        self.enter(ConnectionState::Asleep, "the class needs no connection");
    }

    /// Makes a connection.
    fn wake(&mut self, now: Instant) {
        self.changes.push(ClassChange::Used);
        self.enter(ConnectionState::Waking(now), "a packet needs the class");
        self.client_mut().wake(now);
    }

    /// Whether there is no connection.
    pub(super) fn is_asleep(&self) -> bool {
        self.state == ConnectionState::Asleep
    }

    /// Whether data has moved on this connection lately, which another class might feel.
    pub(super) fn moves_data(&self, now: Instant) -> bool {
        !self.is_asleep() && self.client.last_activity().is_some_and(|at| now < at + USE_NOTE_INTERVAL * 2)
    }

    /// Records that a packet belongs to the class, if `default_client` would carry it. A class that sleeps
    /// wakes where the packet would feel what others send (`is_crowded`), or could not follow to another
    /// connection later; but not while `default_client` asks for a server that is silent, which asks for
    /// both.
    pub(super) fn note_use(
        &mut self,
        now: Instant,
        default_client: &Client,
        is_crowded: bool,
        packet: &ip::IpPacket<'_>,
    ) {
        let wakes = self.is_asleep()
            && (is_crowded || self.connects_at_once || self.begins_stream(default_client, packet));
        let is_due = wakes || now.saturating_duration_since(self.last_used) >= USE_NOTE_INTERVAL;
        if is_due && default_client.admits(packet) {
            self.last_used = now;
            if wakes && !self.client.may_leave_to(now, default_client) {
                self.wake(now);
            }
        }
    }

    /// Returns which connection carries a packet of the class.
    pub(super) fn packet_owner(
        &self,
        now: Instant,
        default_client: &Client,
        packet: &ip::IpPacket<'_>,
    ) -> PacketOwner {
        match self.state {
            _ if self.is_pinned => PacketOwner::OwnClass,
            // Nothing would arrive; the other connection would send as much as may be unacknowledged.
            ConnectionState::Asleep if self.client.may_leave_to(now, default_client) => PacketOwner::OwnClass,
            // The connection of the default class uses the same links, and may be the only one that works.
            ConnectionState::Ready if !self.client.reaches_server() && default_client.reaches_server() => {
                PacketOwner::DefaultClass
            }
            ConnectionState::Ready => PacketOwner::OwnClass,
            ConnectionState::Waking(woken)
                if now < woken + MAX_SYN_WAIT && self.begins_stream(default_client, packet) =>
            {
                PacketOwner::Undecided
            }
            ConnectionState::Up(_) if self.begins_stream(default_client, packet) => PacketOwner::OwnClass,
            _ => PacketOwner::DefaultClass,
        }
    }

    /// Whether a packet begins a connection that may travel as a stream, which stays in the connection in
    /// which it begins.
    fn begins_stream(&self, default_client: &Client, packet: &ip::IpPacket<'_>) -> bool {
        begins_connection(packet)
            && [&self.client, default_client].iter().any(|client| client.wants_stream(default_client, packet))
    }

    /// Keeps a SYN until its connection is decided. A retransmitted SYN replaces the first one.
    pub(super) fn keep(&mut self, hdr: VnetHdr, packet: &[u8], flow: &FlowKey) {
        let is_same = |other: &[u8]| ip::parse(other).is_ok_and(|view| FlowKey::of(&view) == *flow);
        self.waiting_syns.retain(|(_, other)| !is_same(other));
        if self.waiting_syns.len() < MAX_WAITING_SYNS {
            self.waiting_syns.push_back((hdr, packet.to_vec()));
            self.attention = Attention::Unhandled;
        }
    }

    /// Returns the SYNs whose wait has ended, and the connection that carries them.
    pub(super) fn release(&mut self, now: Instant) -> (PacketOwner, VecDeque<(VnetHdr, Vec<u8>)>) {
        let owner = match self.state {
            // A stream does not depend on the MTU.
            ConnectionState::Up(_) | ConnectionState::Ready => PacketOwner::OwnClass,
            _ if self.is_pinned => PacketOwner::OwnClass,
            ConnectionState::Waking(woken) if now < woken + MAX_SYN_WAIT => {
                return (PacketOwner::Undecided, VecDeque::new());
            }
            _ => PacketOwner::DefaultClass,
        };
        (owner, self.take_waiting())
    }

    /// Takes all SYNs that wait.
    pub(super) fn take_waiting(&mut self) -> VecDeque<(VnetHdr, Vec<u8>)> {
        std::mem::take(&mut self.waiting_syns)
    }

    /// Whether SYNs wait.
    fn has_waiting(&self) -> bool {
        !self.waiting_syns.is_empty()
    }

    /// Takes an event of the client. Events of a connection that was closed as unused are ignored.
    pub(super) fn take_event(&mut self, now: Instant, event: &ClientEvent) {
        if let (ClientEvent::Up(_), ConnectionState::Waking(_) | ConnectionState::Down) = (event, self.state)
        {
            self.changes.push(ClassChange::Connected);
        }
        match (event, self.state) {
            (_, ConnectionState::Asleep) => {}
            (ClientEvent::Up(_), _) => self.enter(ConnectionState::Up(now), "its connection stands"),
            (ClientEvent::Mtu(mtu), state) => {
                self.own_mtu = Some(*mtu);
                if matches!(state, ConnectionState::Up(_)) {
                    self.state = ConnectionState::Up(now);
                    self.attention = Attention::Unhandled;
                }
            }
            (ClientEvent::Down(reason), _) => {
                self.enter(ConnectionState::Down, reason);
                self.changes.push(ClassChange::Disconnected(reason.clone()));
            }
            _ => {}
        }
    }

    /// Marks the connection as ready when it carries packets of the tunnel's MTU `mtu`, or its MTU no longer
    /// grows.
    pub(super) fn update_readiness(&mut self, now: Instant, mtu: Option<usize>) {
        if let ConnectionState::Up(since) = self.state
            && (self.own_mtu >= mtu || now >= since + self.mtu_search_duration())
        {
            let fits = self.own_mtu >= mtu;
            let reason =
                if fits { "it carries packets of the tunnel's MTU" } else { "its MTU grows no more" };
            self.enter(ConnectionState::Ready, reason);
        }
        if matches!(self.state, ConnectionState::Ready) {
            self.mtu = self.own_mtu;
        }
    }

    fn mtu_search_duration(&mut self) -> Duration {
        MTU_SEARCH_BASE + self.client.rtt().unwrap_or_default() * MTU_SEARCH_ROUND_TRIPS
    }

    /// When data last moved in the class, or a packet belonged to it.
    pub(super) fn last_use(&self) -> Instant {
        self.client.last_activity().map_or(self.last_used, |at| at.max(self.last_used))
    }

    /// Closes the connection if the class or the session has been unused for long enough.
    fn close_if_idle(&mut self, now: Instant, session_last_use: Instant) {
        if self.idle_deadline(session_last_use).is_some_and(|at| now >= at) {
            self.changes.push(ClassChange::Idle);
            self.sleep(now);
        }
    }

    /// Closes a connection on which nothing has been heard for long, unless flows would end with it.
    pub(super) fn end_if_long_silent(&mut self, now: Instant) {
        if self.may_sleep() && self.client.has_long_silent_connection(now) && !self.client.has_flows() {
            self.sleep(now);
        }
    }

    fn idle_deadline(&self, session_last_use: Instant) -> Option<Instant> {
        let may = self.may_sleep() && self.state != ConnectionState::Asleep && !self.client.has_flows();
        may.then(|| (self.last_use() + IDLE_BEFORE_CLOSE).min(session_last_use + SESSION_IDLE_BEFORE_CLOSE))
    }

    /// Returns when a timer of the client or of this state expires. `session_last_use`: when data last moved
    /// in any class.
    pub(super) fn poll_timeout(&mut self, now: Instant, session_last_use: Instant) -> Option<Instant> {
        if let Attention::AtRestUntil(at) = self.attention {
            return at;
        }
        let next = earliest(self.client.poll_timeout(now), self.own_timeout(session_last_use));
        if self.attention == Attention::AtRest {
            self.attention = Attention::AtRestUntil(next);
        }
        next
    }

    /// Returns when a timer of this state expires.
    fn own_timeout(&mut self, session_last_use: Instant) -> Option<Instant> {
        let change = match self.state {
            ConnectionState::Waking(woken) => self.has_waiting().then_some(woken + MAX_SYN_WAIT),
            ConnectionState::Up(since) => Some(since + self.mtu_search_duration()),
            ConnectionState::Asleep | ConnectionState::Down | ConnectionState::Ready => None,
        };
        earliest(self.idle_deadline(session_last_use), change)
    }

    /// Returns the next event of the connection or its paths that requires no action.
    pub(super) fn poll_change(&mut self) -> Option<ClientChange> {
        if let Some(change) = self.changes.pop() {
            return Some(ClientChange::Class(self.id, change));
        }
        Some(match self.client.poll_change()? {
            ClientChange::Path(event) => {
                ClientChange::Path(PathEvent { link: event.link.with_class(self.id), ..event })
            }
            ClientChange::ConnectFailed(link, reason) => {
                ClientChange::ConnectFailed(link.with_class(self.id), reason)
            }
            change => change,
        })
    }

    pub(super) fn poll_transmit(&mut self, now: Instant, buf: &mut Vec<u8>) -> Option<Transmit> {
        if matches!(self.attention, Attention::AtRest | Attention::AtRestUntil(_)) {
            return None;
        }
        let Some(mut transmit) = self.client.poll_transmit(now, buf) else {
            if self.client.is_at_rest(now) {
                self.attention = Attention::AtRest;
            }
            return None;
        };
        let link = transmit.local.and_then(LocalAddress::as_link);
        transmit.local = link.map(|link| LocalAddress::link(link.with_class(self.id))).or(transmit.local);
        Some(transmit)
    }
}

/// Whether a packet is the first SYN of a TCP connection (RFC 9293 §3.5).
fn begins_connection(packet: &ip::IpPacket<'_>) -> bool {
    packet.protocol() == protocol::TCP
        && Segment::of(packet)
            .is_some_and(|segment| segment.has(tcp_flags::SYN) && !segment.has(tcp_flags::ACK))
}
