//! A connection of a client, and its tunnel, relays and UDP flows.
//!
//! In: events of the connection. Out: [`PeerEvents`] for the server. Always holds: a connection without an
//! authenticated request, or a visit of the site, is closed after [`REQUEST_TIMEOUT`].

use std::{collections::VecDeque, net::IpAddr};

use ipnet::IpNet;
use mpvpn_masque::h3::Side;
use mpvpn_path::Scheduler;
use mpvpn_quic::{
    Connection, ConnectionHandle, Event as QuicEvent, HandshakeResult, LostReason, ReceivedPackets, StreamId,
};
use mpvpn_types::{Duration, Instant, PathId, SessionId};

use super::{
    AuthenticatedUser, ServerEvent, capsules::RequestStream, limits::ConnectionLimits,
    report::ClosedConnection,
};
use crate::{
    AddressSet, ClassProfile, ConnectionNumber, RelayId, SessionSecret,
    events::ClientTag,
    http::Http,
    multipath::{MultipathConnection, Role},
    relay::Relays,
    session_flows::Arrival,
    udp::{EarlyPayloads, UdpFlows},
};

/// A connection that is not authenticated is closed this long after its begin or its last visit. Chosen.
/// Larger: connections of strangers take memory; smaller: fails over links with round trips of seconds.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(15);
/// Visits of the site that a connection may have at a time: as many as a stranger may open streams
/// (`MAX_STRANGER_REQUESTS`), for connections of users, too. Their bytes fit into [`MAX_UNSENT_REPLIES`].
pub(super) const MAX_VISITS: usize = 8;
/// Answers that wait for flow control credit of the client at most (bytes); beyond them its connection is
/// closed. Chosen: the answers to many requests at once. More: memory that a client can demand; fewer: a
/// client that grants credit late loses its connection.
pub(super) const MAX_UNSENT_REPLIES: usize = 256 << 10;
/// A client that sends no ADDRESS_REQUEST (RFC 9484 §4.7.2) gets an address of each family after this time.
/// Chosen: requests follow CONNECT-IP in the same packet or the next. Larger: such clients wait; smaller: a
/// client whose request is late gets addresses that it does not want.
const ADDRESS_REQUEST_TIMEOUT: Duration = Duration::from_millis(30);

/// A connection, from its first packet on.
#[derive(Debug)]
pub(super) struct Peer {
    /// Received UDP payloads that wait to be decrypted, with the bytes of each.
    pub(super) received: VecDeque<(usize, ReceivedPackets)>,
    pub(super) http: Option<Http>,
    pub(super) handshaking: bool,
    /// When it began, or when its last visit of the site began or ended.
    pub(super) since: Instant,
    pub(super) authenticated: Option<Box<AuthenticatedPeer>>,
    pub(super) relays: Relays,
    pub(super) udp: UdpFlows,
    pub(super) early: EarlyPayloads,
    /// The user of the credentials that it has shown first, also by a request that was refused later.
    /// All that it has is this user's, and ends with these credentials.
    pub(super) owner: Option<AuthenticatedUser>,
    /// The limits of its user; `None` if the user has none.
    pub(super) limits: Option<Box<ConnectionLimits>>,
}

/// Events of a connection that need an action of the server.
#[derive(Debug, Default)]
pub(super) struct PeerEvents {
    /// How its handshake ended, if it did now.
    pub(super) handshake: Option<HandshakeResult>,
    pub(super) lost: Option<LostReason>,
    /// The connection cannot be used, for this reason.
    pub(super) broken: Option<String>,
    /// Streams of relays and UDP flows for which the client sent STOP_SENDING.
    pub(super) stopped: Vec<StreamId>,
}

/// State of a connection with an authenticated request: for a tunnel, or for relays only.
#[derive(Debug)]
pub(super) struct AuthenticatedPeer {
    /// The user of the credentials.
    pub(super) user: String,
    pub(super) multipath: MultipathConnection,
    /// The request stream on which extensions were negotiated; each tunnel has one.
    pub(super) request: Option<RequestStream>,
    pub(super) tunnel: Option<Tunnel>,
}

/// The tunnel of a connection.
#[derive(Debug)]
pub(super) struct Tunnel {
    pub(super) session: SessionId,
    pub(super) secret: SessionSecret,
    pub(super) number: ConnectionNumber,
    /// The class of the connection, if its client has classes.
    pub(super) class: Option<ClassProfile>,
    pub(super) serial: u64,
    /// Whether it resumed a session.
    pub(super) resumed: bool,
    /// Whether a later connection with the same number has replaced it.
    pub(super) replaced: bool,
    pub(super) addresses: Option<AddressSet>,
    pub(super) grant: PendingGrant,
    pub(super) since: Instant,
    /// Whether packets for the client may be sent here. A joined connection must have delivered packets
    /// first: then the shard of the client that has it is ready.
    pub(super) downlink_ready: bool,
    /// Whether its client takes SITES capsules.
    pub(super) takes_sites: bool,
    /// The MTU with which it is counted in `ClientMtus` (bytes).
    pub(super) counted_mtu: Option<usize>,
}

impl Tunnel {
    /// Where its packets arrive at this shard.
    pub(super) fn arrival(&self, shard: u8) -> Arrival {
        let is_pinned = self.class.as_ref().is_some_and(|class| class.pinned);
        Arrival { class: self.number.class(), shard, is_pinned }
    }
}

/// An assignment of addresses that waits until packets from these are filtered.
#[derive(Debug, Default)]
pub(super) enum PendingGrant {
    /// There is none.
    #[default]
    None,
    /// The edge was asked to filter.
    Filtering {
        /// Addresses and requests to answer after that.
        next: Option<Box<NextGrant>>,
    },
}

/// An assignment that follows one that waits.
#[derive(Debug)]
pub(super) struct NextGrant {
    pub(super) addresses: AddressSet,
    /// The client's requests that it answers.
    pub(super) requested: Vec<(u64, IpNet)>,
}

impl Peer {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            received: VecDeque::new(),
            http: None,
            handshaking: true,
            since: now,
            authenticated: None,
            relays: Relays::default(),
            udp: UdpFlows::default(),
            early: EarlyPayloads::default(),
            owner: None,
            limits: None,
        }
    }

    /// Handles the events of its connection `id`.
    pub(super) fn poll_events(
        &mut self,
        now: Instant,
        id: ConnectionHandle,
        connection: &mut Connection,
        events: &mut VecDeque<ServerEvent>,
    ) -> PeerEvents {
        let mut happened = PeerEvents::default();
        while let Some(event) = connection.poll_event(now) {
            match event {
                QuicEvent::Connected => {
                    if std::mem::take(&mut self.handshaking) {
                        happened.handshake = Some(HandshakeResult::Completed);
                    }
                    match Http::start(Side::Server, connection) {
                        Ok(http) => self.http = Some(http),
                        Err(error) => happened.broken = Some(error.to_string()),
                    }
                }
                QuicEvent::Lost(reason) => {
                    if std::mem::take(&mut self.handshaking) {
                        happened.handshake = Some(HandshakeResult::Failed);
                    }
                    happened.lost = Some(reason);
                }
                QuicEvent::PathOpened(path) => {
                    if let Some(multipath) = self.multipath() {
                        multipath.path_opened(now, connection, path);
                        multipath.report_path_opened(path, connection.remote_of(path));
                    }
                }
                QuicEvent::PathClosed(path) => {
                    if let Some(multipath) = self.multipath() {
                        multipath.path_closed(now, path);
                    }
                }
                QuicEvent::PeerStatus(path, status) => {
                    if let Some(multipath) = self.multipath() {
                        multipath.on_peer_status(now, path, status);
                    }
                }
                QuicEvent::StreamReadable(stream) if self.relays.has(stream) => {
                    if self.relays.wake(stream) {
                        events.push_back(ServerEvent::RelayReadable(RelayId::new(id, stream)));
                    }
                }
                QuicEvent::StreamReadable(stream) => {
                    if let Some(http) = &mut self.http {
                        http.readable(stream);
                    }
                }
                QuicEvent::StreamWritable(stream) => {
                    events.push_back(ServerEvent::RelayWritable(RelayId::new(id, stream)));
                }
                QuicEvent::StreamStopped(stream, _)
                    if self.relays.breaks_when_stopped(stream) || self.udp.has(stream) =>
                {
                    happened.stopped.push(stream);
                }
                QuicEvent::StreamOpened(_) | QuicEvent::StreamStopped(..) | QuicEvent::StreamsAvailable => {}
            }
        }
        happened
    }

    /// The multipath data plane; `None` before an authenticated request.
    pub(super) fn multipath(&mut self) -> Option<&mut MultipathConnection> {
        self.authenticated.as_mut().map(|authenticated| &mut authenticated.multipath)
    }

    /// Bytes of what has arrived and is incomplete, or waits for the edge: header sections, capsules, packets
    /// that wait for others, contents of relays.
    pub(super) fn held_bytes(&self) -> usize {
        let http = self.http.as_ref().map_or(0, Http::held_bytes);
        let of_tunnel = self.authenticated.as_ref().map_or(0, |own| {
            own.multipath.held_bytes() + own.request.as_ref().map_or(0, RequestStream::held_bytes)
        });
        http + self.udp.held_bytes() + self.relays.held_bytes() + of_tunnel
    }

    pub(super) fn tunnel(&self) -> Option<&Tunnel> {
        self.authenticated.as_ref()?.tunnel.as_ref()
    }

    pub(super) fn tunnel_mut(&mut self) -> Option<&mut Tunnel> {
        self.authenticated.as_mut()?.tunnel.as_mut()
    }

    /// The stream of its accepted request.
    pub(super) fn request_mut(&mut self) -> Option<&mut RequestStream> {
        self.authenticated.as_mut()?.request.as_mut()
    }

    /// The stream of its tunnel.
    pub(super) fn tunnel_stream(&self) -> Option<StreamId> {
        let authenticated =
            self.authenticated.as_ref().filter(|authenticated| authenticated.tunnel.is_some())?;
        authenticated.request.as_ref().map(|request| request.id)
    }

    /// The DSCP of its outer packets, if its class sets one for all paths.
    pub(super) fn dscp(&self) -> Option<u8> {
        self.tunnel()?.class.as_ref()?.dscp
    }

    /// Whether it has sent no authenticated request in time, and visits no page.
    pub(super) fn is_idle(&self, now: Instant) -> bool {
        self.authenticated.is_none()
            && self.relays.visits() == 0
            && now.saturating_duration_since(self.since) >= REQUEST_TIMEOUT
    }

    /// Its next deadline, besides those of its connection.
    pub(super) fn poll_timeout(&self, now: Instant, connection: &Connection) -> Option<Instant> {
        let Some(authenticated) = &self.authenticated else {
            return Some(self.since + REQUEST_TIMEOUT).filter(|at| *at > now);
        };
        let address_due = self.tunnel().filter(|tunnel| tunnel.awaits_address_request());
        let address_due = address_due.map(|tunnel| tunnel.since + ADDRESS_REQUEST_TIMEOUT);
        let limits = self.limits.as_ref().and_then(|limits| limits.poll_timeout(now));
        let all = [authenticated.multipath.poll_timeout(now, connection), address_due, limits];
        all.into_iter().flatten().min()
    }
}

impl AuthenticatedPeer {
    /// The state of a connection whose extensions are negotiated on `stream`, if there is such a request.
    pub(super) fn new(
        now: Instant,
        connection: &mut Connection,
        user: String,
        stream: Option<StreamId>,
    ) -> Self {
        connection.trust();
        let mut multipath = MultipathConnection::new(now, Role::Server, stream, Scheduler::default());
        for path in connection.paths().collect::<Vec<PathId>>() {
            multipath.path_opened(now, connection, path);
        }
        Self { user, multipath, request: stream.map(RequestStream::new), tunnel: None }
    }

    /// Drops the tunnel and the negotiated extensions; counters and user stay.
    pub(super) fn restart(&mut self, now: Instant, connection: &mut Connection) {
        let user = std::mem::take(&mut self.user);
        let before = std::mem::replace(self, Self::new(now, connection, user, None));
        self.multipath.traffic.continue_from(&before.multipath.traffic);
    }

    /// The client as events name it.
    pub(super) fn tag(&self) -> ClientTag {
        let tunnel = self.tunnel.as_ref();
        let first = tunnel.and_then(|tunnel| tunnel.addresses).map(|all| all.first()).unwrap_or_default();
        ClientTag {
            user: self.user.clone(),
            address: first.v4.map(IpAddr::V4).or(first.v6.map(IpAddr::V6)),
            connection: tunnel.map_or(ConnectionNumber::INITIAL, |tunnel| tunnel.number),
            class: self.class_name(),
        }
    }

    /// The name of its class; empty if the client has no classes.
    pub(super) fn class_name(&self) -> String {
        let class = self.tunnel.as_ref().and_then(|tunnel| tunnel.class.as_ref());
        class.map_or(String::new(), |class| class.name.clone())
    }

    /// Its final report.
    pub(super) fn closed_report(&self) -> ClosedConnection {
        let (counters, drops) = (self.multipath.traffic.counters, self.multipath.drops());
        ClosedConnection {
            user: self.user.clone(),
            class: self.class_name(),
            counters,
            drops,
            resequencing: self.multipath.resequencing(),
        }
    }
}

impl Tunnel {
    /// Whether it has no addresses, nor will have them soon.
    fn awaits_address_request(&self) -> bool {
        self.addresses.is_none() && matches!(self.grant, PendingGrant::None)
    }

    /// Whether its client has sent no ADDRESS_REQUEST in time.
    pub(super) fn has_missed_address_request(&self, now: Instant) -> bool {
        self.awaits_address_request() && now.saturating_duration_since(self.since) >= ADDRESS_REQUEST_TIMEOUT
    }
}
