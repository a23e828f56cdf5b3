//! The client of a tunnel.

mod by_flows;
mod dialogue;
mod flows;
mod lane;
mod links;
mod member;
mod packets;
mod reach;
mod relays;
mod seen;
mod told;
mod udp;
mod udp_lane;

use std::{
    collections::{BTreeMap, VecDeque},
    net::SocketAddr,
};

use bytes::BytesMut;
use mpvpn_lane::rules::{FlowMode, Rules};
use mpvpn_masque::{
    capsule::{AssignedAddress, CapsuleReader, IpRange, LinkNotice, LinkPolicy},
    connect_udp,
    h3::{self, H3Error, Side},
    template::Template,
};
use mpvpn_packet::Joiner;
use mpvpn_path::Scheduler;
use mpvpn_quic::{
    ClientSetup, ConnectionId, Endpoint, Event as QuicEvent, Handled, Local, LostReason, StreamId, Transmit,
};
use mpvpn_types::{Duration, Fec, Instant, LinkId, PathId};

use crate::{
    ClassProfile, Counters, Rates, RelayId,
    attempt::{ATTEMPT, Attempt, Backoff, Probe, is_answer},
    carrier::{Carrier, Role, extensions::Agreed},
    events::{Changes, ClassChange, ClientChange},
    http::Http,
    relay::Relays,
    shapers::Shapers,
    udp::Inbox,
};
pub use flows::{Carried, FlowReport};
use lane::Lane;
pub(crate) use links::at_this_end;
use member::Part;
pub(crate) use packets::{clamp_received, is_link_local};
use reach::REVIVE;
use relays::Own;
pub(crate) use seen::Seen;
pub use told::{Assignment, ClientError, ClientEvent, ClientReport, ClientState};
use udp::Udp;
pub use udp::UdpNews;
use udp_lane::UdpLane;

/// The server answers a request within this time, or the connection is given up.
const ANSWER: Duration = Duration::from_secs(10);

/// What a client or a server is there for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Carries {
    /// The packets of a TUN, by CONNECT-IP, and relays.
    #[default]
    Packets,
    /// Relays only: a client is up as soon as the server speaks HTTP/3, and gets no addresses; a server refuses
    /// CONNECT-IP.
    Streams,
}

/// What a client needs to know.
#[derive(Clone)]
pub struct ClientConfig {
    /// What it is there for.
    pub carries: Carries,
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
    pub more_addresses: usize,
    /// How packets are spread over paths.
    pub scheduler: Scheduler,
    /// Repair that is sent beside packets, in both directions, where the server knows it.
    pub fec: Fec,
    /// How often each packet is sent, each time over another link, in both directions: 1 to 4. More than once keeps TCP
    /// connections that no rule takes out of streams, of which there are no copies.
    pub copies: u8,
    /// Which TCP connections travel as streams.
    pub lane: Rules,
    /// Random bits, which make sequence numbers of these hard to guess.
    pub lane_secret: [u64; 2],
}

#[derive(Debug)]
struct Link {
    remote: SocketAddr,
    up: bool,
    probe: Probe,
    /// When a path may be opened again, and the one that is being opened.
    opening: Option<Instant>,
    path: Option<PathId>,
}

/// The connection in use.
#[derive(Debug)]
struct Session {
    connection: ConnectionId,
    http: Http,
    /// The tunnel's request, or without packets the one on which was agreed what both ends know.
    request: Option<StreamId>,
    /// Without packets: where the server was asked whether it knows more than the RFCs, until it answers.
    asked: Option<StreamId>,
    /// Streams that carry the bytes of connections.
    relays: Relays,
    /// Flows of UDP payloads.
    udp: Udp,
    since: Instant,
    accepted: bool,
    up: bool,
    capsules: CapsuleReader,
    addresses: Vec<AssignedAddress>,
    routes: Vec<IpRange>,
    /// What the server has said it knows.
    agreed: Agreed,
    /// It carries no packets: the addresses are made up, and each flow travels by itself.
    by_flows: bool,
    /// What the server was told about the links under the paths.
    told: BTreeMap<PathId, LinkNotice>,
    carrier: Carrier,
}

/// A client: takes packets from a TUN, keeps a connection over all links, survives its loss.
pub struct Client {
    config: ClientConfig,
    /// The credentials, as header fields have them.
    authorization: Option<String>,
    endpoint: Endpoint,
    links: BTreeMap<LinkId, Link>,
    policies: BTreeMap<LinkId, LinkPolicy>,
    attempts: Vec<Attempt>,
    backoff: Backoff,
    session: Option<Session>,
    /// Connections that are closing; they still have packets to send.
    closing: Vec<ConnectionId>,
    part: Part,
    /// It wants no connection until it is woken.
    asleep: bool,
    shapers: Shapers,
    secret: Option<Vec<u8>>,
    assignment: Option<Assignment>,
    resumed: u32,
    was_up: bool,
    joiner: Joiner,
    lane: Lane,
    own: Own,
    udp_lane: UdpLane,
    udp_template: Template,
    /// Payloads from targets.
    udp_in: Inbox,
    seen: Seen,
    events: VecDeque<ClientEvent>,
    changes: Changes<ClientChange>,
    probes: VecDeque<(LinkId, Vec<u8>)>,
    before: Counters,
    drops_before: u64,
    /// Why there was no connection last.
    down: String,
    ended: bool,
}

impl Client {
    /// A client without links; it does nothing until [`Self::link_up`].
    pub fn new(now: Instant, config: ClientConfig) -> Self {
        let lane = lane_of(&config);
        Self {
            endpoint: Endpoint::client(&config.setup),
            links: BTreeMap::new(),
            policies: BTreeMap::new(),
            attempts: Vec::new(),
            backoff: Backoff::new(now),
            session: None,
            closing: Vec::new(),
            part: Part::Only,
            asleep: false,
            shapers: Shapers::default(),
            secret: None,
            assignment: None,
            resumed: 0,
            was_up: false,
            joiner: Joiner::new(),
            lane: Lane::new(now, lane, config.lane_secret),
            authorization: config.token.as_ref().map(|token| format!("Bearer {token}")),
            own: Own::default(),
            udp_lane: UdpLane::default(),
            udp_template: connect_udp::default_template(),
            udp_in: Inbox::default(),
            seen: Seen::default(),
            config,
            events: VecDeque::new(),
            changes: Changes::default(),
            probes: VecDeque::new(),
            before: Counters::default(),
            drops_before: 0,
            down: String::new(),
            ended: false,
        }
    }

    /// A link can carry packets to the server at `remote`. Also to be called when its address or
    /// the server's has changed.
    pub fn link_up(&mut self, now: Instant, id: LinkId, remote: SocketAddr) {
        let link = self.links.entry(id).or_insert_with(|| Link {
            remote,
            up: false,
            probe: Probe::new(now),
            opening: None,
            path: None,
        });
        let moved = std::mem::replace(&mut link.remote, remote) != remote;
        link.up = true;
        link.probe.restart(now);
        if id.is_tcp() {
            // The server has taken the connection.
            link.probe.answer();
        }
        if moved {
            self.drop_attempts(now, id, "the server has another address");
        }
        if let Some(session) = &mut self.session {
            session.carrier.link_carrier(now, id, true);
        }
        if self.session.as_ref().is_none_or(|session| !session.carrier.any_alive()) {
            self.try_link(now, id);
        }
        if id.is_tcp() {
            self.open_paths(now);
        }
    }

    /// A link cannot carry packets: no carrier, no address, or gone.
    pub fn link_down(&mut self, now: Instant, id: LinkId) {
        let Some(link) = self.links.get_mut(&id) else { return };
        link.up = false;
        link.opening = None;
        if let Some(session) = &mut self.session {
            session.carrier.link_carrier(now, id, false);
        }
        self.drop_attempts(now, id, "the link is down");
        self.attempts_over(now);
    }

    /// This end did not run for a while: silence until now proves nothing.
    pub fn forgive(&mut self, now: Instant) {
        if let Some(session) = &mut self.session {
            session.carrier.forgive(now);
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
            if let Some(link) = self.links.get_mut(&link).filter(|link| link.remote == remote) {
                link.probe.answer();
                self.open_paths(now);
            }
            return;
        }
        if let Handled::Connection(id) = self.endpoint.handle(now, Some(Local::link(link)), remote, ecn, data)
            && self.session.as_ref().is_none_or(|session| session.connection != id)
        {
            // The session is looked at once a batch, in `handle_batch`.
            if let Some(attempt) = self.attempts.iter_mut().find(|attempt| attempt.connection == id) {
                attempt.heard = Some(now);
            }
            self.drive_attempt(now, id);
        }
    }

    /// To be called after every batch of [`Self::handle_datagram`].
    pub fn handle_batch(&mut self, now: Instant) {
        self.drive_session(now);
    }

    fn drive_attempt(&mut self, now: Instant, id: ConnectionId) {
        let Some(position) = self.attempts.iter().position(|attempt| attempt.connection == id) else {
            self.settle(id);
            return;
        };
        if self.attempts[position].ready.is_some() {
            self.settle(id);
            return;
        }
        while let Some(event) = self.endpoint.get(id).and_then(|connection| connection.poll_event(now)) {
            match event {
                // With the old connection its streams would end: it is asked once more.
                QuicEvent::Connected
                    if let Some(session) = &mut self.session
                        && self.lane.flows() + self.own.len() + session.udp.flows.len() > 0 =>
                {
                    let attempt = &mut self.attempts[position];
                    attempt.ready = Some(now);
                    session.carrier.beat_on(attempt.link);
                    // Where it has no path there it may open one.
                    if let Some(link) = self.links.get_mut(&attempt.link) {
                        link.probe.answer();
                        link.opening = None;
                    }
                    self.open_paths(now);
                    break;
                }
                QuicEvent::Connected => {
                    let attempt = self.attempts.remove(position);
                    self.connected(now, attempt);
                    return;
                }
                QuicEvent::Lost(reason) => {
                    let attempt = self.attempts.remove(position);
                    self.changes.push(ClientChange::ConnectFailed(attempt.link, reason.to_string()));
                    self.settle(id);
                    if let LostReason::Tls(reason) = reason
                        && !self.was_up
                    {
                        self.fail(now, ClientError::Tls(reason));
                    }
                    self.attempts_over(now);
                    return;
                }
                _ => {}
            }
        }
        self.settle(id);
    }

    fn settle(&mut self, id: ConnectionId) {
        if !self.endpoint.settle(id) {
            self.closing.retain(|closing| *closing != id);
        }
    }

    fn connected(&mut self, now: Instant, attempt: Attempt) {
        let id = attempt.connection;
        if self.session.as_ref().is_some_and(|session| session.request.is_some() && !session.accepted) {
            let class = self.class_name();
            tracing::warn!(
                class,
                "the server has not answered the request, asking again on another connection"
            );
        }
        self.close_session(now, "replaced by a new connection");
        let others = std::mem::take(&mut self.attempts);
        for other in others {
            self.close_connection(now, other.connection, "another link was quicker");
        }
        self.backoff.trying();
        let Some(connection) = self.endpoint.get(id) else { return };
        let http = match Http::start(Side::Client, connection) {
            Ok(http) => http,
            Err(error) => {
                tracing::warn!(class = self.class_name(), %error, "the server allows no HTTP/3 control streams");
                self.close_connection(now, id, "no control streams");
                self.attempts_over(now);
                return;
            }
        };
        // Replaced by the tunnel's own once the number of the request stream is known.
        let mut carrier = Carrier::new(now, Role::Client, None, self.config.scheduler);
        carrier.set_class(self.config.class.as_ref());
        carrier.path_opened(now, connection, PathId(0));
        self.session = Some(Session {
            connection: id,
            http,
            request: None,
            asked: None,
            relays: Relays::default(),
            udp: Udp::default(),
            since: now,
            accepted: false,
            up: false,
            capsules: CapsuleReader::lenient(),
            addresses: Vec::new(),
            routes: Vec::new(),
            agreed: Agreed::default(),
            by_flows: false,
            told: BTreeMap::new(),
            carrier,
        });
        for link in self.links.values_mut() {
            link.probe.restart(now);
            (link.opening, link.path) = (None, None);
        }
        self.drive_session(now);
    }

    fn drive_session(&mut self, now: Instant) {
        let Some(session) = &mut self.session else { return };
        let id = session.connection;
        let Some(connection) = self.endpoint.get(id) else {
            // It ended in a moment when nobody asked what happened to it.
            return self.lost(now, &LostReason::TimedOut);
        };
        session.carrier.note_received(now, connection);
        let mut stopped = Vec::new();
        while let Some(event) = connection.poll_event(now) {
            match event {
                QuicEvent::Lost(reason) => {
                    self.lost(now, &reason);
                    return;
                }
                QuicEvent::PathOpened(path) => {
                    session.carrier.path_opened(now, connection, path);
                    session.carrier.report_opened(path, connection.remote_of(path));
                    let up = connection.local_of(path).and_then(Local::as_link);
                    if let Some(link) = up.and_then(|link| self.links.get_mut(&link)) {
                        (link.opening, link.path) = (None, None);
                    }
                }
                QuicEvent::PathClosed(path) => {
                    let link = session.carrier.path_closed(now, path);
                    if let Some(link) = link.and_then(|link| self.links.get_mut(&link)) {
                        link.probe.restart(now);
                        link.opening = None;
                    }
                }
                QuicEvent::PeerStatus(path, status) => session.carrier.peer_status(now, path, status),
                QuicEvent::StreamReadable(stream) if session.relays.has(stream) => {
                    let relay = RelayId::new(id, stream);
                    if session.relays.wake(stream) && !self.own.readable(relay, &mut self.events) {
                        self.lane.readable(stream);
                    }
                }
                QuicEvent::StreamReadable(stream) => session.http.readable(stream),
                QuicEvent::StreamWritable(stream) => {
                    if !self.own.writable(RelayId::new(id, stream), &mut self.events) {
                        self.lane.writable(stream);
                    }
                }
                QuicEvent::StreamsAvailable => {
                    self.lane.streams_available();
                    self.own.allowed(&mut self.events);
                }
                QuicEvent::StreamStopped(stream, _) if self.lane.stopped(&session.relays, stream) => {}
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
        self.settle(id);
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

    fn close_connection(&mut self, now: Instant, id: ConnectionId, reason: &str) {
        if let Some(connection) = self.endpoint.get(id) {
            connection.close(now, h3::code::NO_ERROR, reason);
            self.closing.push(id);
        }
    }

    fn close_session(&mut self, now: Instant, reason: &str) {
        self.take_path_events();
        if let Some(session) = self.session.take() {
            self.before.tx_bytes += session.carrier.counters().tx_bytes;
            self.before.rx_bytes += session.carrier.counters().rx_bytes;
            self.drops_before += session.carrier.drops();
            self.lane.end_streams();
            self.own.end(session.connection, &mut self.events);
            session.udp.end(session.connection, &std::mem::take(&mut self.udp_lane), &mut self.events);
            self.close_connection(now, session.connection, reason);
        }
    }

    fn lost(&mut self, now: Instant, reason: &LostReason) {
        let (id, was_up) = self.session.as_ref().map_or((None, false), |s| (Some(s.connection), s.up));
        self.close_session(now, "lost");
        if let Some(id) = id {
            self.settle(id);
        }
        self.down = reason.to_string();
        self.events.push_back(ClientEvent::Down(self.down.clone()));
        if self.attempts.is_empty() {
            match reason {
                LostReason::Reset | LostReason::TimedOut if was_up => self.backoff.now(now),
                _ => self.backoff.failed(now),
            }
        }
    }

    fn fail(&mut self, now: Instant, error: ClientError) {
        if self.part.is_member() {
            // Whether going on makes sense is for the home to say.
            let reason = error.to_string();
            if self.down != reason {
                let refused = ClassChange::Refused(reason.clone());
                self.changes.push(ClientChange::Class(self.part.class(), refused));
            }
            return self.lost(now, &LostReason::Transport(reason));
        }
        self.close(now, "giving up");
        self.events.push_back(ClientEvent::Fatal(error));
    }

    /// Ends the tunnel; what [`Self::poll_transmit`] still gives tells the server.
    pub fn close(&mut self, now: Instant, reason: &str) {
        self.ended = true;
        self.close_session(now, reason);
        for attempt in std::mem::take(&mut self.attempts) {
            self.close_connection(now, attempt.connection, reason);
        }
        self.backoff.trying();
    }

    /// What its class is called, where there are several.
    pub(crate) fn class_name(&self) -> Option<&str> {
        self.config.class.as_ref().map(|class| class.name.as_str())
    }

    /// Takes another configuration: the connection is closed, and made anew for the same session. The links, and what
    /// was counted, stay.
    pub fn reconfigure(&mut self, now: Instant, config: ClientConfig) {
        const REASON: &str = "configured in another way";
        self.lane.set_rules(lane_of(&config));
        self.config = config;
        for attempt in std::mem::take(&mut self.attempts) {
            self.close_connection(now, attempt.connection, REASON);
        }
        if self.session.is_some() {
            self.close_session(now, REASON);
            self.events.push_back(ClientEvent::Down(REASON.to_owned()));
        }
        self.backoff.now(now);
    }

    /// The next thing that the edge must act on.
    pub fn poll_event(&mut self) -> Option<ClientEvent> {
        self.events.pop_front()
    }

    /// The next change that needs no action.
    pub fn poll_change(&mut self) -> Option<ClientChange> {
        self.take_path_events();
        self.changes.pop()
    }

    fn take_path_events(&mut self) {
        let Some(session) = &mut self.session else { return };
        for event in session.carrier.take_events() {
            self.changes.push(ClientChange::Path(event));
        }
    }

    /// How often the session was taken up again.
    pub fn resumed(&self) -> u32 {
        self.resumed
    }

    /// The next UDP payload to send, at the end of `buf`, which must be empty. Its `local` is the
    /// token of a link.
    pub fn poll_transmit(&mut self, now: Instant, buf: &mut Vec<u8>) -> Option<Transmit> {
        self.drive_lane(now);
        if let Some((link, packet)) = self.probes.pop_front() {
            let remote = self.links.get(&link)?.remote;
            buf.extend_from_slice(&packet);
            return Some(Transmit {
                local: Some(Local::link(link)),
                remote,
                ecn: None,
                dscp: 0,
                size: packet.len(),
                segment_size: None,
            });
        }
        while let Some(session) = &mut self.session
            && let Some(connection) = self.endpoint.get(session.connection)
        {
            if let Some(transmit) = session.carrier.poll_transmit(now, connection, buf) {
                return Some(transmit);
            }
            // Room on a stream shows as its bytes leave.
            if connection.has_events() {
                self.drive_session(now);
                continue;
            }
            let id = session.connection;
            self.endpoint.settle(id);
            break;
        }
        let others: Vec<_> = self
            .attempts
            .iter()
            .map(|attempt| attempt.connection)
            .chain(self.closing.iter().copied())
            .collect();
        for id in others {
            if let Some(transmit) = self.endpoint.get(id).and_then(|c| c.poll_transmit(now, buf)) {
                return Some(transmit);
            }
            self.settle(id);
        }
        None
    }

    /// When [`Self::handle_timeout`] wants to be called.
    pub fn poll_timeout(&mut self, now: Instant) -> Option<Instant> {
        let useless = self.useless_since(now).map(|since| (since + REVIVE).max(now + REVIVE / 8));
        let mut next = if self.may_connect() { self.backoff.next } else { None };
        let lane = self.lane.poll_timeout();
        let mut at_most = |at: Option<Instant>| {
            next = match (next, at) {
                (Some(a), Some(b)) => Some(a.min(b)),
                (a, b) => a.or(b),
            };
        };
        at_most(lane);
        at_most(self.udp_lane.poll_timeout());
        for attempt in &self.attempts {
            at_most(self.replaces_at(attempt));
            at_most(Some(attempt.since + ATTEMPT));
            at_most(Some(self.renewal(attempt)).filter(|at| self.session.is_none() && *at > now));
            at_most(self.endpoint.get(attempt.connection).and_then(|c| c.poll_timeout()));
        }
        for id in &self.closing {
            at_most(self.endpoint.get(*id).and_then(|c| c.poll_timeout()));
        }
        if let Some(session) = &self.session
            && self.endpoint.get(session.connection).is_none()
        {
            at_most(Some(now));
        }
        if let Some(session) = &self.session
            && let Some(connection) = self.endpoint.get(session.connection)
        {
            at_most(connection.poll_timeout());
            at_most(session.carrier.poll_timeout(now, connection));
            at_most(useless);
            if !session.accepted {
                at_most(Some(session.since + ANSWER));
            }
            for (id, link) in &self.links {
                if link.up && self.allows(*id) && session.carrier.path_on(*id).is_none() {
                    at_most(link.probe.next());
                    at_most(link.opening);
                }
            }
        }
        next
    }

    /// Lets time pass.
    pub fn handle_timeout(&mut self, now: Instant) {
        self.lane.handle_timeout(now);
        self.expire_udp(now);
        if self.may_connect() && self.backoff.next.is_some_and(|at| now >= at) && self.session.is_none() {
            self.backoff.trying();
            self.try_all_links(now);
            self.attempts_over(now);
        }
        if self.session.is_none() && !self.attempts.is_empty() {
            self.try_all_links(now);
        }
        self.expire_attempts(now);
        for id in self.closing.clone() {
            if let Some(connection) = self.endpoint.get(id) {
                connection.handle_timeout(now);
                while connection.poll_event(now).is_some() {}
            }
            self.settle(id);
        }
        let Some(session) = &mut self.session else { return };
        let Some(connection) = self.endpoint.get(session.connection) else { return self.drive_session(now) };
        connection.handle_timeout(now);
        session.carrier.handle_timeout(now, connection);
        let (mtu, joiner) = (session.carrier.mtu(), &mut self.joiner);
        session.carrier.release(now, |packet| joiner.push(clamp_received(packet, mtu)));
        joiner.flush();
        if !session.accepted && now.saturating_duration_since(session.since) >= ANSWER {
            self.lost(now, &LostReason::TimedOut);
            return;
        }
        self.drive_session(now);
        self.open_paths(now);
        self.revive(now);
        if let Some(session) = &mut self.session
            && session.up
            && let Some(mtu) = session.carrier.take_mtu()
        {
            self.lane.set_mtu(mtu);
            self.events.push_back(ClientEvent::Mtu(mtu));
        }
        self.check_up(now);
    }

    /// Figures for status output.
    pub fn report(&mut self, now: Instant) -> ClientReport {
        let mut report = ClientReport {
            state: ClientState::Connecting,
            reason: self.down.clone(),
            assignment: self.assignment.clone(),
            resumed: self.resumed,
            counters: self.before,
            rates: Rates::default(),
            drops: self.drops_before,
            sojourn: Duration::ZERO,
            lane: None,
            peer_cc: None,
            by_flows: self.session.as_ref().is_some_and(|session| session.by_flows),
            streams: self.lane.flows() + self.own.len(),
            udp: 0,
            datagrams: self.seen.flows(now).count(),
            paths: Vec::new(),
            mtu: 0,
        };
        if self.asleep {
            report.state = ClientState::Asleep;
        }
        let Some(session) = &mut self.session else { return report };
        let Some(connection) = self.endpoint.get(session.connection) else { return report };
        if session.up {
            (report.state, report.reason) = (ClientState::Up, String::new());
        }
        report.counters.tx_bytes += session.carrier.counters().tx_bytes;
        report.counters.rx_bytes += session.carrier.counters().rx_bytes;
        report.rates = session.carrier.rates(now);
        report.udp = session.udp.flows.len();
        report.drops += session.carrier.drops();
        report.sojourn = session.carrier.sojourn();
        report.lane = session.carrier.lane();
        report.peer_cc = session.agreed.cc;
        report.paths = session.carrier.report(now, connection);
        report.mtu = session.carrier.mtu();
        report
    }
}

/// Which TCP connections travel as streams: of those there are no copies.
fn lane_of(config: &ClientConfig) -> Rules {
    let mut lane = config.lane.clone();
    if config.copies > 1 && lane.mode == FlowMode::Auto {
        lane.mode = FlowMode::Datagram;
    }
    lane
}
