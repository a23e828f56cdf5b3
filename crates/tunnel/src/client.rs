//! The client of a tunnel: one QUIC connection over all links, which carries the packets and streams of apps.
//!
//! In: UDP payloads, TUN packets, links, relay requests, the time. Out: UDP payloads, TUN packets, events,
//! the next deadline. Always holds: at most one connection is in use; while it is lost, the client reconnects
//! and asks for the same session.

mod addresses;
mod addresses_in_use;
mod app_tcp;
mod app_udp;
mod config;
mod connector;
mod events;
mod flow_table;
mod flows;
mod isolation;
mod join;
mod links;
mod packets;
mod per_flow;
mod reachability;
mod relays;
mod reports;
mod requests;
mod session;
mod silence;
mod udp;

use std::net::SocketAddr;

use bytes::BytesMut;
use ipnet::IpNet;
use mpvpn_masque::h3::{H3Error, Side};
use mpvpn_quic::{
    Connection, ConnectionHandle, Endpoint, Event as QuicEvent, Handled, LocalAddress, LostReason, Transmit,
};
use mpvpn_types::{Duration, Instant, LinkId, PathId, earliest};

use crate::{
    EchoWatch, RelayId, SecretSharing,
    events::{ClassChange, ClientChange},
    handshake::answers_probe,
    http::Http,
    multipath::{MultipathConnection, Role},
    udp::PayloadInbox,
};
pub use addresses_in_use::AddressesInUse;
use app_tcp::AppTcp;
pub use config::{ClientConfig, TunnelMode};
use connector::{Connector, DesiredState};
pub use events::{Assignment, ClientError, ClientEvent, ClientReport, ClientState, Outage, UdpFlowEvent};
pub(crate) use flow_table::FlowTable;
pub use flows::{FlowReport, FlowTransport};
use join::{Membership, SessionRole};
pub(crate) use links::Links;
use packets::AppTraffic;
pub(crate) use packets::{clamp_received, is_link_local};
use reachability::RECONNECT_AFTER;
use relays::EdgeRelays;
use reports::Reports;
use session::Session;
use silence::Silence;

/// The connection is closed if the server has not answered the request for a tunnel after this time. Chosen.
/// Larger: a client waits longer at a server that hangs; smaller: fails over links with round trips of
/// seconds.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);

/// A client of a tunnel.
pub struct Client {
    config: ClientConfig,
    /// The value of `authorization` header fields.
    authorization: Option<String>,
    endpoint: Endpoint,
    connector: Connector,
    links: Links,
    /// The connection in use.
    session: Option<Session>,
    membership: Membership,
    apps: AppTraffic,
    edge_relays: EdgeRelays,
    /// UDP payloads from targets.
    udp_in: PayloadInbox,
    reports: Reports,
    was_up: bool,
    /// The MTU that the TUN got last (bytes).
    mtu: Option<usize>,
    silence: Silence,
    echo_watch: Option<EchoWatch>,
    /// The networks behind this client that it announces.
    announced: Vec<IpNet>,
    /// The result of [`Self::poll_timeout`], unless something has happened since that may make another
    /// deadline earlier; packets of the tunnel do not.
    deadline: Option<Instant>,
}

impl Client {
    /// A client without links; it does nothing until [`Self::link_up`].
    pub fn new(now: Instant, config: ClientConfig) -> Self {
        let tcp = AppTcp::new(now, config.flow_rules(), config.isn_secret);
        Self {
            authorization: config.authorization(),
            endpoint: Endpoint::client(&config.setup),
            config,
            connector: Connector::new(now),
            links: Links::default(),
            session: None,
            membership: Membership::new(SessionRole::Only),
            apps: AppTraffic::new(tcp),
            edge_relays: EdgeRelays::default(),
            udp_in: PayloadInbox::default(),
            reports: Reports::default(),
            was_up: false,
            mtu: None,
            silence: Silence::new(now),
            echo_watch: None,
            announced: Vec::new(),
            deadline: None,
        }
    }

    /// Records the links of ICMP echoes in `watch`.
    pub(crate) fn watch_echoes(&mut self, watch: EchoWatch) {
        self.echo_watch = Some(watch);
        if let Some(session) = &mut self.session {
            session.multipath.echo_watch = self.echo_watch.clone();
        }
    }

    /// Announces these networks behind this client in place of those before; packets of theirs pass once the
    /// server takes them.
    pub fn announce(&mut self, now: Instant, networks: Vec<IpNet>) {
        if self.announced != networks {
            self.announced = networks;
            self.send_announcement();
            self.drive_session(now);
        }
    }

    fn send_announcement(&mut self) {
        if let Some((session, connection)) = in_use(&mut self.session, &mut self.endpoint) {
            session.announce(connection, &self.announced);
        }
    }

    /// This process got no processor for a while: silence until `now` says nothing about paths.
    pub fn on_local_stall(&mut self, now: Instant) {
        if let Some(session) = &mut self.session {
            session.multipath.on_local_stall(now);
        }
    }

    /// Finds out which paths work, as something else has lost one or doubts them.
    pub fn probe_paths(&mut self, now: Instant) {
        if let Some(session) = &mut self.session {
            session.multipath.probe_paths(now);
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
        if answers_probe(link, &data) {
            self.deadline = None;
            if self.links.on_probe_answer(link, remote) {
                self.silence.on_heard(now);
                self.try_if_none_works(now, link);
                self.open_paths(now);
            }
            return;
        }
        let handled = self.endpoint.handle(now, Some(LocalAddress::link(link)), remote, ecn, data);
        let Handled::Connection(id) = handled else { return };
        self.silence.on_heard(now);
        if self.session.as_ref().is_some_and(|session| session.connection == id) {
            // Events of the session are handled once a batch, in `handle_batch`. After a batch it is not
            // known any more on which link a packet arrived.
            if self.echo_watch.as_ref().is_some_and(|watch| watch.is_active(now)) {
                self.isolated(now, |client| client.receive(now, Some(link)));
            }
            return;
        }
        self.deadline = None;
        self.connector.on_received(now, id);
        self.isolated(now, |client| client.drive_handshake(now, id));
    }

    /// To be called after every batch of [`Self::handle_datagram`].
    pub fn handle_batch(&mut self, now: Instant) {
        self.isolated(now, |client| client.drive_session(now));
    }

    fn use_connection(&mut self, now: Instant, id: ConnectionHandle) {
        if self.session.as_ref().is_some_and(|session| session.request.is_some() && !session.accepted) {
            let class = self.class_name();
            tracing::warn!(
                class,
                "the server has not answered the request, asking again on another connection"
            );
        }
        self.close_session(now, "replaced by a new connection");
        self.connector.abandon(now, &mut self.endpoint, |_| true, "another link was quicker");
        self.connector.backoff.cancel();
        let Some(connection) = self.endpoint.get(id) else { return };
        let http = match Http::start(Side::Client, connection) {
            Ok(http) => http,
            Err(error) => {
                tracing::warn!(class = self.class_name(), %error, "the server allows no HTTP/3 control streams");
                self.connector.close(now, &mut self.endpoint, id, "no control streams");
                self.back_off_if_all_failed(now);
                return;
            }
        };
        // Replaced in `send_request`, once the ID of the request stream is known.
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
            // The connection was reaped between two calls.
            return self.on_lost(now, &LostReason::TimedOut);
        };
        session.multipath.note_path_arrivals(now, connection);
        let mut stopped = Vec::new();
        while let Some(event) = connection.poll_event(now) {
            self.deadline = None;
            match event {
                QuicEvent::Lost(LostReason::CertificateRefused(reason)) => {
                    // The server verifies it when the handshake is over for the client (RFC 8446 §2).
                    return self.fail(now, ClientError::CertificateRefused(reason));
                }
                QuicEvent::Lost(reason) => {
                    self.on_lost(now, &reason);
                    return;
                }
                QuicEvent::PathOpened(path) => {
                    session.multipath.path_opened(now, connection, path);
                    session.multipath.report_path_opened(path, connection.remote_of(path));
                    session.notices_due = true;
                    if let Some(link) = connection.local_of(path).and_then(LocalAddress::as_link) {
                        self.links.on_opened(link);
                    }
                    self.links.apply_carriers(now, &mut session.multipath);
                }
                QuicEvent::PathClosed(path) => {
                    session.notices_due = true;
                    if let Some(link) = session.multipath.path_closed(now, path) {
                        self.links.probe_again(now, link);
                    }
                }
                QuicEvent::PeerStatus(path, status) => session.multipath.on_peer_status(now, path, status),
                QuicEvent::StreamReadable(stream) if session.relays.has(stream) => {
                    let relay = RelayId::new(id, stream);
                    if session.relays.wake(stream)
                        && !self.edge_relays.readable(relay, &mut self.reports.events)
                    {
                        self.apps.tcp.readable.push_back(stream);
                    }
                }
                QuicEvent::StreamReadable(stream) => session.http.readable(stream),
                QuicEvent::StreamWritable(stream) => {
                    if !self.edge_relays.writable(RelayId::new(id, stream), &mut self.reports.events) {
                        self.apps.tcp.writable.push_back(stream);
                    }
                }
                QuicEvent::StreamsAvailable => {
                    self.apps.tcp.may_open = true;
                    self.edge_relays.notify_if_waiting(&mut self.reports.events);
                }
                QuicEvent::StreamStopped(stream, _) if self.apps.tcp.on_stopped(&session.relays, stream) => {}
                QuicEvent::StreamStopped(stream, _) if self.edge_relays.has(stream) => stopped.push(stream),
                // A server that refuses the request stops reading it, too: its response says why.
                QuicEvent::StreamStopped(stream, _)
                    if Some(stream) == session.request && session.accepted =>
                {
                    self.on_tunnel_lost(now, "the server has ended the tunnel".to_owned());
                    return;
                }
                QuicEvent::Connected | QuicEvent::StreamOpened(_) | QuicEvent::StreamStopped(..) => {}
            }
        }
        self.receive(now, None);
        self.drive_http(now);
        self.drive_app_tcp(now);
        stopped.into_iter().for_each(|stream| self.on_relay_stopped(stream));
        self.drive_edge_relays(now);
        self.send_link_notices();
        self.connector.reap(&mut self.endpoint, id);
    }

    /// The server violated HTTP/3: closes the connection.
    fn close_on_h3_error(&mut self, now: Instant, error: &H3Error) {
        if let Some(session) = &self.session
            && let Some(connection) = self.endpoint.get(session.connection)
        {
            connection.close(now, error.code, &error.reason);
        }
        self.on_lost(now, &LostReason::Transport(format!("the server broke HTTP/3: {}", error.reason)));
    }

    fn close_session(&mut self, now: Instant, reason: &str) {
        if let Some(mut session) = self.session.take() {
            self.reports.take_path_events(&mut session.multipath);
            self.reports.add_closed(&session.multipath);
            self.apps.tcp.end_streams();
            self.edge_relays.end(session.connection, &mut self.reports.events);
            session.udp.end(
                session.connection,
                &std::mem::take(&mut self.apps.udp),
                &mut self.reports.events,
            );
            self.connector.close(now, &mut self.endpoint, session.connection, reason);
        }
    }

    /// Closes the connection in use, and gives up all handshakes.
    fn close_all(&mut self, now: Instant, reason: &str) {
        self.close_session(now, reason);
        self.connector.abandon(now, &mut self.endpoint, |_| true, reason);
    }

    fn on_lost(&mut self, now: Instant, reason: &LostReason) {
        let (id, was_up) = self.session.as_ref().map_or((None, false), |s| (Some(s.connection), s.up));
        self.close_session(now, "lost");
        if let Some(id) = id {
            self.connector.reap(&mut self.endpoint, id);
        }
        self.reports.down(reason.to_string());
        if self.connector.handshakes.is_empty() {
            match reason {
                LostReason::Reset | LostReason::TimedOut if was_up => self.connector.backoff.reset(now),
                _ => self.connector.backoff.failed(now, self.silence.since()),
            }
        }
    }

    /// The server knows this client and refuses it, for this reason: closes all connections, and asks again
    /// later.
    fn refused(&mut self, now: Instant, reason: String) {
        self.close_all(now, "refused");
        self.reports.refused(now, reason);
        self.connector.backoff.refused(now);
    }

    /// The server has refused a TCP connection of this client, which it knows, for this reason.
    pub fn on_refused_over_tcp(&mut self, now: Instant, reason: String) {
        if self.session.is_none() {
            self.reports.refused(now, reason);
        }
    }

    /// Whether the server has refused this client, which it knows, when it was asked last.
    pub fn is_refused(&self, now: Instant) -> bool {
        self.reports.is_refused(now)
    }

    /// Whether links are asked or will be: nothing of the server arrives, and no pause after a refusal runs.
    fn asks_links(&self, now: Instant) -> bool {
        let waits = self.connector.backoff.next_try.is_some() && self.is_refused(now);
        self.may_connect() && !self.reaches_server() && !waits && !self.silence.is_shared
    }

    fn fail(&mut self, now: Instant, error: ClientError) {
        if self.membership.role.is_joined() {
            // Only the initial connection reports fatal errors.
            let reason = error.to_string();
            if self.reports.down_reason() != reason {
                let refused = ClassChange::Refused(reason.clone());
                self.reports.changes.push(ClientChange::Class(self.membership.role.class(), refused));
            }
            return self.on_lost(now, &LostReason::Transport(reason));
        }
        self.close(now, "giving up");
        self.reports.events.push_back(ClientEvent::Fatal(error));
    }

    /// Ends the tunnel; [`Self::poll_transmit`] still returns the CONNECTION_CLOSE frames.
    pub fn close(&mut self, now: Instant, reason: &str) {
        self.connector.end();
        self.close_all(now, reason);
    }

    /// Whether the server has accepted the credentials with its response to the first request.
    pub fn is_authenticated(&self) -> bool {
        let answered = |session: &Session| session.accepted && session.request.is_some();
        self.session.as_ref().is_some_and(answered)
    }

    /// Whether the server is reached: the tunnel is up, and a path works.
    pub fn reaches_server(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.up && session.multipath.paths.any_works())
    }

    /// When the network, the configuration or the wishes of the user last gave a reason to ask anew for a
    /// server that is not heard.
    pub fn probes_restarted_at(&self) -> Instant {
        self.silence.restarted_at
    }

    /// The time since which nothing of the server arrives, while it is not reached.
    fn outage(&self) -> Option<Outage> {
        let wants = self.connector.desired == DesiredState::Connected;
        let asks = self.silence.is_probing;
        let next_try = if asks { self.links.next_probe() } else { self.connector.backoff.next_try };
        (wants && !self.reaches_server()).then_some(Outage { since: self.silence.heard, next_try })
    }

    /// The name of its class, if the client has several.
    pub(crate) fn class_name(&self) -> Option<&str> {
        self.config.class.as_ref().map(|class| class.name.as_str())
    }

    /// Takes another configuration: reconnects for the same session. Links and counters stay.
    pub fn reconfigure(&mut self, now: Instant, config: ClientConfig) {
        self.reconnect(now, config, "the configuration changed");
    }

    fn reconnect(&mut self, now: Instant, config: ClientConfig, reason: &str) {
        self.apps.tcp.rules = config.flow_rules();
        self.config = config;
        self.silence.probe_anew(now);
        self.connector.abandon(now, &mut self.endpoint, |_| true, reason);
        if self.session.is_some() {
            self.close_session(now, reason);
            self.reports.events.push_back(ClientEvent::Down(reason.to_owned()));
        }
        self.connector.backoff.reset(now);
    }

    /// Uses another server, with which it has no session yet; links lead there by [`Self::link_up`]. A client
    /// that has given up begins again.
    pub(crate) fn use_server(&mut self, now: Instant, config: ClientConfig) {
        self.authorization = config.authorization();
        self.membership.leave();
        (self.was_up, self.reports.assignment) = (false, None);
        self.connector.reopen();
        self.reconnect(now, config, "another server is used");
    }

    /// The next event that needs an action of the edge.
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

    /// How often the session was resumed.
    pub fn resumed(&self) -> u32 {
        self.reports.resumed
    }

    /// Whether another machine has shown the secret of the session since the start.
    pub fn secret_sharing(&self) -> SecretSharing {
        self.reports.sharing
    }

    /// The next UDP payload to send, at the end of `buf`, which must be empty. Its `local` is the
    /// token of a link.
    pub fn poll_transmit(&mut self, now: Instant, buf: &mut Vec<u8>) -> Option<Transmit> {
        let transmit = self.isolated(now, |client| client.transmit(now, buf));
        if transmit.is_none() {
            buf.clear();
        }
        transmit
    }

    fn transmit(&mut self, now: Instant, buf: &mut Vec<u8>) -> Option<Transmit> {
        self.drive_app_tcp(now);
        if let Some(transmit) = self.links.poll_transmit(buf) {
            return Some(transmit);
        }
        while let Some(session) = &mut self.session
            && let Some(connection) = self.endpoint.get(session.connection)
        {
            if let Some(transmit) = session.multipath.poll_transmit(now, connection, buf) {
                return Some(transmit);
            }
            // Streams become writable as their bytes leave.
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

    /// Forgets what [`Self::poll_timeout`] said, as something has happened that may make a deadline earlier.
    pub(crate) fn forget_deadline(&mut self) {
        self.deadline = None;
    }

    /// Whether [`Self::handle_timeout`] is to be called now.
    pub fn is_due(&mut self, now: Instant) -> bool {
        let is_past = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        if self.deadline.is_some_and(|at| now < at)
            && let Some((session, connection)) = in_use(&mut self.session, &mut self.endpoint)
            && session.up
            && !session.multipath.may_be_due(now, connection)
        {
            return is_past(earliest(connection.poll_timeout(), self.apps.tcp.split_tcp.poll_timeout()));
        }
        is_past(self.poll_timeout(now))
    }

    /// When to call [`Self::handle_timeout`].
    pub fn poll_timeout(&mut self, now: Instant) -> Option<Instant> {
        let mut next = if self.may_connect() { self.connector.backoff.next_try } else { None };
        let mut at_most = |at: Option<Instant>| next = earliest(next, at);
        if self.asks_links(now) {
            let asks = self.silence.is_probing;
            at_most(if asks {
                self.links.next_probe()
            } else {
                Some(self.silence.long_at()).filter(|at| *at > now)
            });
        }
        at_most(self.apps.tcp.split_tcp.poll_timeout());
        at_most(self.apps.udp.flows.poll_timeout());
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
            if !session.accepted {
                at_most(Some(session.since + RESPONSE_TIMEOUT));
            }
            at_most(session.further.overdue_at);
            at_most(self.links.poll_timeout(&session.multipath));
        }
        // Links that are asked ever less often are looked at with each probe.
        let unusable_at = now + RECONNECT_AFTER / 8;
        if !self.silence.is_probing && next.is_none_or(|next| unusable_at < next) {
            let since = self.unusable_since(now);
            next = earliest(next, since.map(|since| (since + RECONNECT_AFTER).max(unusable_at)));
        }
        self.deadline = next;
        next
    }

    /// Handles timers that have expired.
    pub fn handle_timeout(&mut self, now: Instant) {
        self.deadline = None;
        self.isolated(now, |client| client.on_timeout(now));
    }

    fn on_timeout(&mut self, now: Instant) {
        self.apps.tcp.handle_timeout(now);
        self.expire_udp(now);
        self.probe_if_silent(now);
        if self.may_connect()
            && self.connector.backoff.next_try.is_some_and(|at| now >= at)
            && self.session.is_none()
        {
            self.connector.backoff.cancel();
            self.try_all_links(now);
            self.back_off_if_all_failed(now);
        }
        if self.session.is_none() && !self.connector.handshakes.is_empty() {
            self.try_all_links(now);
        }
        self.expire_handshakes(now);
        self.connector.handle_timeout(now, &mut self.endpoint);
        let Some(session) = &mut self.session else { return };
        let Some(connection) = self.endpoint.get(session.connection) else { return self.drive_session(now) };
        connection.handle_timeout(now);
        session.multipath.handle_timeout(now, connection);
        self.apps.release(now, &mut session.multipath);
        if !session.accepted && now.saturating_duration_since(session.since) >= RESPONSE_TIMEOUT {
            self.on_lost(now, &LostReason::TimedOut);
            return;
        }
        if session.further.is_overdue(now) {
            return self.fail_without_address(now);
        }
        self.drive_session(now);
        self.open_paths(now);
        self.reconnect_if_unusable(now);
        if let Some(session) = &mut self.session
            && session.up
            && let Some(mtu) = session.multipath.mtu.take_change()
        {
            self.set_mtu(mtu);
        }
        self.check_up();
    }

    /// Figures for status output.
    pub fn report(&mut self, now: Instant) -> ClientReport {
        let state = match self.connector.desired {
            DesiredState::Asleep => ClientState::Asleep,
            DesiredState::Connected if self.is_refused(now) => ClientState::Refused,
            DesiredState::Connected | DesiredState::Closed => ClientState::Connecting,
        };
        let mut report = self.reports.report(state);
        report.outage = self.outage();
        report.per_flow = self.session.as_ref().is_some_and(|session| session.per_flow);
        report.stream_flows = self.apps.tcp.split_tcp.flow_count() + self.edge_relays.len();
        report.datagram_flows = self.apps.flow_table.flows(now).count();
        report.handshakes = self.endpoint.handshakes();
        let Some(session) = &mut self.session else { return report };
        let Some(connection) = self.endpoint.get(session.connection) else { return report };
        if session.up {
            (report.state, report.reason) = (ClientState::Up, String::new());
        }
        report.counters += session.multipath.traffic.counters;
        report.rates = session.multipath.traffic.rates(now);
        report.udp_flows = session.udp.flows.len();
        report.drops += session.multipath.drops();
        report.sojourn = session.multipath.scheduler.sojourn();
        report.queued_bytes = session.multipath.scheduler.dispatcher.bytes();
        report.resequencing = session.multipath.resequencing();
        report.peer_cc = session.agreed.cc;
        report.paths = session.multipath.report(now, connection);
        report.mtu = session.multipath.mtu.announced();
        report
    }
}

/// The session and its connection, if there is one.
fn in_use<'a>(
    session: &'a mut Option<Session>,
    endpoint: &'a mut Endpoint,
) -> Option<(&'a mut Session, &'a mut Connection)> {
    let session = session.as_mut()?;
    let connection = endpoint.get(session.connection)?;
    Some((session, connection))
}
