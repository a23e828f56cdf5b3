//! The client of a tunnel.

mod addresses;
mod by_flows;
mod connector;
mod dialogue;
mod flows;
mod lane;
mod links;
mod member;
mod packets;
mod reach;
mod relays;
mod reports;
mod seen;
mod session;
mod told;
mod udp;
mod udp_lane;

use std::net::SocketAddr;

use bytes::BytesMut;
use mpvpn_flow::rules::{FlowMode, Rules};
use mpvpn_masque::{
    connect_udp,
    h3::{H3Error, Side},
    template::Template,
};
use mpvpn_path::Scheduler;
use mpvpn_quic::{
    ClientSetup, Connection, ConnectionHandle, Endpoint, Event as QuicEvent, Handled, LocalAddress,
    LostReason, Transmit,
};
use mpvpn_types::{Duration, Fec, Instant, LinkId, PathId};

use crate::{
    ClassProfile, RelayId,
    attempt::is_answer,
    events::{ClassChange, ClientChange},
    http::Http,
    multipath::{MultipathConnection, Role},
    udp::PayloadInbox,
};
use connector::{Connector, Wanted};
pub use flows::{FlowReport, FlowTransport};
use lane::Lane;
pub(crate) use links::Links;
use member::{Membership, Part};
use packets::Apps;
pub(crate) use packets::{clamp_received, is_link_local};
use reach::REVIVE;
use relays::Own;
use reports::Reports;
pub(crate) use seen::Seen;
use session::Session;
pub use told::{Assignment, ClientError, ClientEvent, ClientReport, ClientState};
pub use udp::UdpFlowEvent;

/// The server answers a request within this time, or the connection is given up.
const ANSWER: Duration = Duration::from_secs(10);

/// What a client or a server is there for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TunnelMode {
    /// The packets of a TUN, by CONNECT-IP, and relays.
    #[default]
    Packets,
    /// Relays only: a client is up as soon as the server speaks HTTP/3, and gets no addresses; a server refuses
    /// CONNECT-IP.
    RelaysOnly,
}

/// What a client needs to know.
#[derive(Clone)]
pub struct ClientConfig {
    /// What it is there for.
    pub mode: TunnelMode,
    /// TLS and transport.
    pub setup: ClientSetup,
    /// The name that the certificate must have.
    pub server_name: String,
    /// Host and port for the `:authority` of the request.
    pub authority: String,
    /// The path of the request; `/.well-known/masque/ip/*/*/` at most servers.
    pub path: String,
    /// Bearer token.
    pub token: Option<String>,
    /// What its class is, if the client has several.
    pub class: Option<ClassProfile>,
    /// How many addresses of each family it asks for beyond the first.
    pub additional_addresses: usize,
    /// How packets are spread over paths.
    pub scheduler: Scheduler,
    /// Repair that is sent beside packets, in both directions, where the server knows it.
    pub fec: Fec,
    /// How often each packet is sent, each time over another link, in both directions: 1 to 4. More than once keeps TCP
    /// connections that no rule takes out of streams, of which there are no copies.
    pub copies: u8,
    /// Which TCP connections travel as streams.
    pub flow_rules: Rules,
    /// Random bits, which make sequence numbers of these hard to guess.
    pub isn_secret: [u64; 2],
}

/// A client: takes packets from a TUN, keeps a connection over all links, survives its loss.
pub struct Client {
    config: ClientConfig,
    /// The credentials, as header fields have them.
    authorization: Option<String>,
    endpoint: Endpoint,
    connector: Connector,
    links: Links,
    /// The connection in use.
    session: Option<Session>,
    membership: Membership,
    apps: Apps,
    own: Own,
    udp_template: Template,
    /// Payloads from targets.
    udp_in: PayloadInbox,
    reports: Reports,
    was_up: bool,
}

impl Client {
    /// A client without links; it does nothing until [`Self::link_up`].
    pub fn new(now: Instant, config: ClientConfig) -> Self {
        let lane = Lane::new(now, lane_of(&config), config.isn_secret);
        Self {
            authorization: config.token.as_ref().map(|token| format!("Bearer {token}")),
            endpoint: Endpoint::client(&config.setup),
            config,
            connector: Connector::new(now),
            links: Links::default(),
            session: None,
            membership: Membership::new(Part::Only),
            apps: Apps::new(lane),
            own: Own::default(),
            udp_template: connect_udp::default_template(),
            udp_in: PayloadInbox::default(),
            reports: Reports::default(),
            was_up: false,
        }
    }

    /// This end did not run for a while: silence until now proves nothing.
    pub fn on_local_stall(&mut self, now: Instant) {
        if let Some(session) = &mut self.session {
            session.multipath.on_local_stall(now);
        }
    }

    /// Takes a UDP payload that arrived on a link.
    pub fn handle_datagram(
        &mut self,
        now: Instant,
        link: LinkId,
        remote: SocketAddr,
        ecn: u8,
        data: BytesMut,
    ) {
        if is_answer(link, &data) {
            if self.links.on_answer(link, remote) {
                self.open_paths(now);
            }
            return;
        }
        if let Handled::Connection(id) =
            self.endpoint.handle(now, Some(LocalAddress::link(link)), remote, ecn, data)
            && self.session.as_ref().is_none_or(|session| session.connection != id)
        {
            // The session is looked at once a batch, in `handle_batch`.
            if let Some(attempt) = self.connector.attempt(id) {
                attempt.heard = Some(now);
            }
            self.drive_attempt(now, id);
        }
    }

    /// To be called after every batch of [`Self::handle_datagram`].
    pub fn handle_batch(&mut self, now: Instant) {
        self.drive_session(now);
    }

    fn connected(&mut self, now: Instant, id: ConnectionHandle) {
        if self.session.as_ref().is_some_and(|session| session.request.is_some() && !session.accepted) {
            let class = self.class_name();
            tracing::warn!(
                class,
                "the server has not answered the request, asking again on another connection"
            );
        }
        self.close_session(now, "replaced by a new connection");
        self.connector.give_up(now, &mut self.endpoint, |_| true, "another link was quicker");
        self.connector.backoff.trying();
        let Some(connection) = self.endpoint.get(id) else { return };
        let http = match Http::start(Side::Client, connection) {
            Ok(http) => http,
            Err(error) => {
                tracing::warn!(class = self.class_name(), %error, "the server allows no HTTP/3 control streams");
                self.connector.close(now, &mut self.endpoint, id, "no control streams");
                self.attempts_over(now);
                return;
            }
        };
        // Replaced by the tunnel's own once the number of the request stream is known.
        let mut multipath = MultipathConnection::new(now, Role::Client, None, self.config.scheduler);
        multipath.set_class(self.config.class.as_ref());
        multipath.path_opened(now, connection, PathId(0));
        self.session = Some(Session::new(now, id, http, multipath));
        self.links.restart(now);
        self.drive_session(now);
    }

    fn drive_session(&mut self, now: Instant) {
        let Some(session) = &mut self.session else { return };
        let id = session.connection;
        let Some(connection) = self.endpoint.get(id) else {
            // It ended in a moment when nobody asked what happened to it.
            return self.lost(now, &LostReason::TimedOut);
        };
        session.multipath.note_path_arrivals(now, connection);
        let mut stopped = Vec::new();
        while let Some(event) = connection.poll_event(now) {
            match event {
                QuicEvent::Lost(reason) => {
                    self.lost(now, &reason);
                    return;
                }
                QuicEvent::PathOpened(path) => {
                    session.multipath.path_opened(now, connection, path);
                    session.multipath.report_path_opened(path, connection.remote_of(path));
                    if let Some(link) = connection.local_of(path).and_then(LocalAddress::as_link) {
                        self.links.on_opened(link);
                    }
                }
                QuicEvent::PathClosed(path) => {
                    if let Some(link) = session.multipath.path_closed(now, path) {
                        self.links.ask_again(now, link);
                    }
                }
                QuicEvent::PeerStatus(path, status) => session.multipath.on_peer_status(now, path, status),
                QuicEvent::StreamReadable(stream) if session.relays.has(stream) => {
                    let relay = RelayId::new(id, stream);
                    if session.relays.wake(stream) && !self.own.readable(relay, &mut self.reports.events) {
                        self.apps.lane.readable(stream);
                    }
                }
                QuicEvent::StreamReadable(stream) => session.http.readable(stream),
                QuicEvent::StreamWritable(stream) => {
                    if !self.own.writable(RelayId::new(id, stream), &mut self.reports.events) {
                        self.apps.lane.writable(stream);
                    }
                }
                QuicEvent::StreamsAvailable => {
                    self.apps.lane.streams_available();
                    self.own.allowed(&mut self.reports.events);
                }
                QuicEvent::StreamStopped(stream, _) if self.apps.lane.stopped(&session.relays, stream) => {}
                QuicEvent::StreamStopped(stream, _) if self.own.has(stream) => stopped.push(stream),
                // A server that refuses stops reading the request, too: the answer says why.
                QuicEvent::StreamStopped(stream, _)
                    if Some(stream) == session.request && session.accepted =>
                {
                    self.gone(now, "the server has ended the tunnel".to_owned());
                    return;
                }
                QuicEvent::Connected
                | QuicEvent::StreamOpened(_)
                | QuicEvent::StreamStopped(..)
                | QuicEvent::Datagrams => {}
            }
        }
        self.receive(now);
        self.drive_http(now);
        self.drive_lane(now);
        stopped.into_iter().for_each(|stream| self.own_stopped(stream));
        self.drive_own(now);
        self.tell_links();
        self.connector.settle(&mut self.endpoint, id);
    }

    /// The server said what HTTP/3 does not allow.
    fn broken(&mut self, now: Instant, error: &H3Error) {
        if let Some(session) = &self.session
            && let Some(connection) = self.endpoint.get(session.connection)
        {
            connection.close(now, error.code, &error.reason);
        }
        self.lost(now, &LostReason::Transport(format!("the server broke HTTP/3: {}", error.reason)));
    }

    fn close_session(&mut self, now: Instant, reason: &str) {
        if let Some(mut session) = self.session.take() {
            self.reports.take_path_events(&mut session.multipath);
            self.reports.count(&session.multipath);
            self.apps.lane.end_streams();
            self.own.end(session.connection, &mut self.reports.events);
            session.udp.end(
                session.connection,
                &std::mem::take(&mut self.apps.udp_lane),
                &mut self.reports.events,
            );
            self.connector.close(now, &mut self.endpoint, session.connection, reason);
        }
    }

    /// Closes the connection in use, and gives up all handshakes.
    fn close_all(&mut self, now: Instant, reason: &str) {
        self.close_session(now, reason);
        self.connector.give_up(now, &mut self.endpoint, |_| true, reason);
    }

    fn lost(&mut self, now: Instant, reason: &LostReason) {
        let (id, was_up) = self.session.as_ref().map_or((None, false), |s| (Some(s.connection), s.up));
        self.close_session(now, "lost");
        if let Some(id) = id {
            self.connector.settle(&mut self.endpoint, id);
        }
        self.reports.down(reason.to_string());
        if self.connector.attempts().is_empty() {
            match reason {
                LostReason::Reset | LostReason::TimedOut if was_up => self.connector.backoff.now(now),
                _ => self.connector.backoff.failed(now),
            }
        }
    }

    fn fail(&mut self, now: Instant, error: ClientError) {
        if self.membership.part.is_member() {
            // Whether going on makes sense is for the home to say.
            let reason = error.to_string();
            if self.reports.why_down() != reason {
                let refused = ClassChange::Refused(reason.clone());
                self.reports.changes.push(ClientChange::Class(self.membership.part.class(), refused));
            }
            return self.lost(now, &LostReason::Transport(reason));
        }
        self.close(now, "giving up");
        self.reports.events.push_back(ClientEvent::Fatal(error));
    }

    /// Ends the tunnel; what [`Self::poll_transmit`] still gives tells the server.
    pub fn close(&mut self, now: Instant, reason: &str) {
        self.connector.end();
        self.close_all(now, reason);
    }

    /// Whether the server has said that it knows this client, by the answer to what it was asked first.
    pub fn is_authenticated(&self) -> bool {
        let answered = |session: &Session| session.accepted && session.request.is_some();
        self.session.as_ref().is_some_and(answered)
    }

    /// Whether the server is reached: the tunnel is up, and a path works.
    pub fn reaches_server(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.up && session.multipath.any_path_works())
    }

    /// What its class is called, where there are several.
    pub(crate) fn class_name(&self) -> Option<&str> {
        self.config.class.as_ref().map(|class| class.name.as_str())
    }

    /// Takes another configuration: the connection is closed, and made anew for the same session. The links, and what
    /// was counted, stay.
    pub fn reconfigure(&mut self, now: Instant, config: ClientConfig) {
        const REASON: &str = "configured in another way";
        self.apps.lane.set_rules(lane_of(&config));
        self.config = config;
        self.connector.give_up(now, &mut self.endpoint, |_| true, REASON);
        if self.session.is_some() {
            self.close_session(now, REASON);
            self.reports.events.push_back(ClientEvent::Down(REASON.to_owned()));
        }
        self.connector.backoff.now(now);
    }

    /// The next thing that the edge must act on.
    pub fn poll_event(&mut self) -> Option<ClientEvent> {
        self.reports.events.pop_front()
    }

    /// The next change that needs no action.
    pub fn poll_change(&mut self) -> Option<ClientChange> {
        if let Some(session) = &mut self.session {
            self.reports.take_path_events(&mut session.multipath);
        }
        self.reports.changes.pop()
    }

    /// How often the session was taken up again.
    pub fn resumed(&self) -> u32 {
        self.reports.resumed
    }

    /// The next UDP payload to send, at the end of `buf`, which must be empty. Its `local` is the
    /// token of a link.
    pub fn poll_transmit(&mut self, now: Instant, buf: &mut Vec<u8>) -> Option<Transmit> {
        self.drive_lane(now);
        if let Some(transmit) = self.links.poll_transmit(buf) {
            return Some(transmit);
        }
        while let Some(session) = &mut self.session
            && let Some(connection) = self.endpoint.get(session.connection)
        {
            if let Some(transmit) = session.multipath.poll_transmit(now, connection, buf) {
                return Some(transmit);
            }
            // Room on a stream shows as its bytes leave.
            if connection.has_events() {
                self.drive_session(now);
                continue;
            }
            let id = session.connection;
            self.endpoint.process_endpoint_events(id);
            break;
        }
        self.connector.poll_transmit(now, &mut self.endpoint, buf)
    }

    /// When [`Self::handle_timeout`] wants to be called.
    pub fn poll_timeout(&mut self, now: Instant) -> Option<Instant> {
        let useless = self.useless_since(now).map(|since| (since + REVIVE).max(now + REVIVE / 8));
        let mut next = if self.may_connect() { self.connector.backoff.next } else { None };
        let lane = self.apps.lane.poll_timeout();
        let mut at_most = |at: Option<Instant>| {
            next = match (next, at) {
                (Some(a), Some(b)) => Some(a.min(b)),
                (a, b) => a.or(b),
            };
        };
        at_most(lane);
        at_most(self.apps.udp_lane.poll_timeout());
        at_most(self.connector.poll_timeout(now, &mut self.endpoint, &self.links, self.session.is_some()));
        if let Some(session) = &self.session
            && self.endpoint.get(session.connection).is_none()
        {
            at_most(Some(now));
        }
        if let Some(session) = &self.session
            && let Some(connection) = self.endpoint.get(session.connection)
        {
            at_most(connection.poll_timeout());
            at_most(session.multipath.poll_timeout(now, connection));
            at_most(useless);
            if !session.accepted {
                at_most(Some(session.since + ANSWER));
            }
            at_most(self.links.poll_timeout(&session.multipath));
        }
        next
    }

    /// Lets time pass.
    pub fn handle_timeout(&mut self, now: Instant) {
        self.apps.lane.handle_timeout(now);
        self.expire_udp(now);
        if self.may_connect()
            && self.connector.backoff.next.is_some_and(|at| now >= at)
            && self.session.is_none()
        {
            self.connector.backoff.trying();
            self.try_all_links(now);
            self.attempts_over(now);
        }
        if self.session.is_none() && !self.connector.attempts().is_empty() {
            self.try_all_links(now);
        }
        self.expire_attempts(now);
        self.connector.handle_timeout(now, &mut self.endpoint);
        let Some(session) = &mut self.session else { return };
        let Some(connection) = self.endpoint.get(session.connection) else { return self.drive_session(now) };
        connection.handle_timeout(now);
        session.multipath.handle_timeout(now, connection);
        self.apps.release(now, &mut session.multipath);
        if !session.accepted && now.saturating_duration_since(session.since) >= ANSWER {
            self.lost(now, &LostReason::TimedOut);
            return;
        }
        self.drive_session(now);
        self.open_paths(now);
        self.revive(now);
        if let Some(session) = &mut self.session
            && session.up
            && let Some(mtu) = session.multipath.take_mtu_change()
        {
            self.apps.lane.set_mtu(mtu);
            self.reports.events.push_back(ClientEvent::Mtu(mtu));
        }
        self.check_up();
    }

    /// Figures for status output.
    pub fn report(&mut self, now: Instant) -> ClientReport {
        let state = match self.connector.wanted {
            Wanted::Asleep => ClientState::Asleep,
            Wanted::Yes | Wanted::Ended => ClientState::Connecting,
        };
        let mut report = self.reports.report(state);
        report.per_flow = self.session.as_ref().is_some_and(|session| session.by_flows);
        report.stream_flows = self.apps.lane.flows() + self.own.len();
        report.datagram_flows = self.apps.seen.flows(now).count();
        let Some(session) = &mut self.session else { return report };
        let Some(connection) = self.endpoint.get(session.connection) else { return report };
        if session.up {
            (report.state, report.reason) = (ClientState::Up, String::new());
        }
        report.counters.tx_bytes += session.multipath.counters().tx_bytes;
        report.counters.rx_bytes += session.multipath.counters().rx_bytes;
        report.rates = session.multipath.rates(now);
        report.udp_flows = session.udp.flows.len();
        report.drops += session.multipath.drops();
        report.sojourn = session.multipath.sojourn();
        report.resequencing = session.multipath.resequencing();
        report.peer_cc = session.agreed.cc;
        report.paths = session.multipath.report(now, connection);
        report.mtu = session.multipath.announced_mtu();
        report
    }
}

/// The connection in use, as long as it is there.
fn in_use<'a>(
    session: &'a mut Option<Session>,
    endpoint: &'a mut Endpoint,
) -> Option<(&'a mut Session, &'a mut Connection)> {
    let session = session.as_mut()?;
    let connection = endpoint.get(session.connection)?;
    Some((session, connection))
}

/// Which TCP connections travel as streams: of those there are no copies.
fn lane_of(config: &ClientConfig) -> Rules {
    let mut lane = config.flow_rules.clone();
    if config.copies > 1 && lane.mode == FlowMode::Auto {
        lane.mode = FlowMode::Datagram;
    }
    lane
}
