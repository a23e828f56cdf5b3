//! A connection of a client, and what it was granted.

use std::{collections::VecDeque, net::IpAddr};

use mpvpn_masque::h3::Side;
use mpvpn_path::Scheduler;
use mpvpn_quic::{Connection, ConnectionHandle, Event as QuicEvent, LostReason, StreamId};
use mpvpn_types::{Duration, Instant, PathId, SessionId};

use super::{ServerEvent, capsules::RequestStream, report::ClosedConnection};
use crate::{
    AddressSet, ClassProfile, ConnectionNumber, RelayId, SessionSecret,
    events::ClientTag,
    http::Http,
    multipath::{MultipathConnection, Role},
    relay::Relays,
    udp::{EarlyPayloads, UdpFlows},
};

/// A connection that has not asked for a tunnel after this time is closed.
const REQUEST: Duration = Duration::from_secs(15);
/// A client that asks for no address gets one after this time.
const UNASKED: Duration = Duration::from_millis(30);

/// A connection, from its first packet on.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) http: Option<Http>,
    pub(super) handshaking: bool,
    pub(super) since: Instant,
    pub(super) granted: Option<Box<Granted>>,
    pub(super) relays: Relays,
    pub(super) udp: UdpFlows,
    pub(super) early: EarlyPayloads,
    /// Credentials that were looked at before, and whose they are.
    pub(super) known: Option<(String, String)>,
}

/// What the server must act on of what has happened to a connection.
#[derive(Debug, Default)]
pub(super) struct Happened {
    pub(super) handshake_over: bool,
    pub(super) lost: Option<LostReason>,
    /// It is of no use, for this reason.
    pub(super) broken: Option<String>,
    /// Streams of relays and flows that the client reads no more.
    pub(super) stopped: Vec<StreamId>,
}

/// What watches and uses the paths of a client to which something was granted: a tunnel, or only relays.
#[derive(Debug)]
pub(super) struct Granted {
    /// Whose connection it is.
    pub(super) user: String,
    pub(super) multipath: MultipathConnection,
    /// The stream on which the two ends agreed on more than the RFCs say; a tunnel has one.
    pub(super) request: Option<RequestStream>,
    pub(super) tunnel: Option<Tunnel>,
}

/// A session that was granted.
#[derive(Debug)]
pub(super) struct Tunnel {
    pub(super) session: SessionId,
    pub(super) secret: SessionSecret,
    pub(super) member: ConnectionNumber,
    /// What its client says of its class, if it has classes.
    pub(super) class: Option<ClassProfile>,
    pub(super) serial: u64,
    /// Whether it resumed a session.
    pub(super) resumed: bool,
    /// A later connection of the same client has replaced it.
    pub(super) replaced: bool,
    pub(super) addresses: Option<AddressSet>,
    pub(super) since: Instant,
    /// Whether packets for the client may go down here. A connection that joined a session must have
    /// brought some up first: then its thread at the client is ready.
    pub(super) serves: bool,
    /// What it counts for among the MTUs of the clients.
    pub(super) counted_mtu: Option<usize>,
}

impl Peer {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            http: None,
            handshaking: true,
            since: now,
            granted: None,
            relays: Relays::default(),
            udp: UdpFlows::default(),
            early: EarlyPayloads::default(),
            known: None,
        }
    }

    /// Takes what has happened to its connection, the number of which is `id`.
    pub(super) fn poll_events(
        &mut self,
        now: Instant,
        id: ConnectionHandle,
        connection: &mut Connection,
        events: &mut VecDeque<ServerEvent>,
    ) -> Happened {
        let mut happened = Happened::default();
        while let Some(event) = connection.poll_event(now) {
            match event {
                QuicEvent::Connected => {
                    happened.handshake_over |= std::mem::take(&mut self.handshaking);
                    match Http::start(Side::Server, connection) {
                        Ok(http) => self.http = Some(http),
                        Err(error) => happened.broken = Some(error.to_string()),
                    }
                }
                QuicEvent::Lost(reason) => {
                    happened.handshake_over |= std::mem::take(&mut self.handshaking);
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
                QuicEvent::StreamOpened(_)
                | QuicEvent::StreamStopped(..)
                | QuicEvent::StreamsAvailable
                | QuicEvent::Datagrams => {}
            }
        }
        happened
    }

    /// What watches and uses its paths; `None` while nothing was granted.
    pub(super) fn multipath(&mut self) -> Option<&mut MultipathConnection> {
        self.granted.as_mut().map(|granted| &mut granted.multipath)
    }

    pub(super) fn tunnel(&self) -> Option<&Tunnel> {
        self.granted.as_ref()?.tunnel.as_ref()
    }

    pub(super) fn tunnel_mut(&mut self) -> Option<&mut Tunnel> {
        self.granted.as_mut()?.tunnel.as_mut()
    }

    /// The stream of its request, while that is granted.
    pub(super) fn request_mut(&mut self) -> Option<&mut RequestStream> {
        self.granted.as_mut()?.request.as_mut()
    }

    /// The stream of its tunnel.
    pub(super) fn tunnel_stream(&self) -> Option<StreamId> {
        let granted = self.granted.as_ref().filter(|granted| granted.tunnel.is_some())?;
        granted.request.as_ref().map(|request| request.id)
    }

    /// The mark of its packets where its class has one, whatever path they take.
    pub(super) fn dscp(&self) -> Option<u8> {
        self.tunnel()?.class.as_ref()?.dscp
    }

    /// Whether it has asked for nothing for too long.
    pub(super) fn is_idle(&self, now: Instant) -> bool {
        self.granted.is_none() && now.saturating_duration_since(self.since) >= REQUEST
    }

    /// When something is to be done for it, beside what its connection says.
    pub(super) fn poll_timeout(&self, now: Instant, connection: &Connection) -> Option<Instant> {
        let Some(granted) = &self.granted else {
            return Some(self.since + REQUEST).filter(|at| *at > now);
        };
        let unasked = self.tunnel().filter(|tunnel| tunnel.addresses.is_none());
        let unasked = unasked.map(|tunnel| tunnel.since + UNASKED);
        granted.multipath.poll_timeout(now, connection).into_iter().chain(unasked).min()
    }
}

impl Granted {
    /// On a connection whose paths are used by what is agreed on `stream`, if anything is.
    pub(super) fn new(
        now: Instant,
        connection: &mut Connection,
        user: String,
        stream: Option<StreamId>,
    ) -> Self {
        let mut multipath = MultipathConnection::new(now, Role::Server, stream, Scheduler::default());
        for path in connection.paths().collect::<Vec<PathId>>() {
            multipath.path_opened(now, connection, path);
        }
        Self { user, multipath, request: stream.map(RequestStream::new), tunnel: None }
    }

    /// Forgets what was agreed on.
    pub(super) fn restart(&mut self, now: Instant, connection: &mut Connection) {
        let user = std::mem::take(&mut self.user);
        let before = std::mem::replace(self, Self::new(now, connection, user, None));
        self.multipath.continue_counters_from(&before.multipath);
    }

    /// The name of its client in events.
    pub(super) fn tag(&self) -> ClientTag {
        let tunnel = self.tunnel.as_ref();
        let first = tunnel.and_then(|tunnel| tunnel.addresses).map(|all| all.first()).unwrap_or_default();
        ClientTag {
            user: self.user.clone(),
            address: first.v4.map(IpAddr::V4).or(first.v6.map(IpAddr::V6)),
            member: tunnel.map_or(ConnectionNumber::INITIAL, |tunnel| tunnel.member),
            class: self.class_name(),
        }
    }

    /// Empty where the client has no classes.
    pub(super) fn class_name(&self) -> String {
        let class = self.tunnel.as_ref().and_then(|tunnel| tunnel.class.as_ref());
        class.map_or(String::new(), |class| class.name.clone())
    }

    /// What it has come to.
    pub(super) fn departed(&self) -> ClosedConnection {
        let (counters, drops) = (self.multipath.counters(), self.multipath.drops());
        ClosedConnection {
            class: self.class_name(),
            counters,
            drops,
            resequencing: self.multipath.resequencing(),
        }
    }
}

impl Tunnel {
    /// Whether its client has not asked for an address in time.
    pub(super) fn is_unasked(&self, now: Instant) -> bool {
        self.addresses.is_none() && now.saturating_duration_since(self.since) >= UNASKED
    }
}
