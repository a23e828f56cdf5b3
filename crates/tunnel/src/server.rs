//! The server of a tunnel.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    net::{IpAddr, SocketAddr},
};

use bytes::{Bytes, BytesMut};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use mpvpn_masque::{
    capsule::{AssignedAddress, Capsule, CapsuleReader, IpRange, routes_sorted},
    connect_ip,
    h3::{self, Event as HttpEvent, Side},
    headers::Headers,
    request::Rejection,
    template::{Template, TemplateError},
};
use mpvpn_packet::{Joined, Joiner, VnetHdr, icmp, ip};
use mpvpn_path::Scheduler;
use mpvpn_quic::{
    Connection, ConnectionId, Endpoint, Event as QuicEvent, Handled, Local, LostReason, ServerSetup,
    StreamId, Transmit,
};
use mpvpn_types::{Duration, Instant, PathId};
use rustc_hash::FxHashMap;

use crate::{
    Addresses, Counters, NETWORKS_HEADER, PathReport, Pool, SCHEDULER_HEADER, Secret,
    carrier::{Carrier, Gateway, Role},
    client::{clamp_received, is_link_local},
    http::Http,
};

/// A connection that has not asked for a tunnel after this time is closed.
const REQUEST: Duration = Duration::from_secs(15);
/// A client that asks for no address gets one after this time.
const UNASKED: Duration = Duration::from_millis(30);

/// The MTU of the TUN follows the clients at this interval.
const MTU_CHECK: Duration = Duration::from_millis(100);

/// Decides who may use the server.
pub trait Authenticate: Send {
    /// The name of the user whose credentials these are (the value of the `authorization` header).
    ///
    /// # Errors
    /// A sentence for the log if nobody's.
    fn authenticate(&self, authorization: Option<&str>) -> Result<String, String>;
}

/// What a server needs to know.
pub struct ServerConfig {
    /// TLS and transport.
    pub setup: ServerSetup,
    /// IPv4 addresses for clients; the first is the server's own.
    pub subnet: Ipv4Net,
    /// IPv6 addresses for clients.
    pub subnet6: Option<Ipv6Net>,
    /// What clients may reach.
    pub routes: Vec<IpNet>,
    /// Who may use it.
    pub auth: Box<dyn Authenticate>,
    /// Sessions at a time.
    pub max_clients: usize,
    /// Makes a secret for a new session, from a cryptographic random number generator.
    pub secrets: Box<dyn FnMut() -> Secret + Send>,
}

/// Something that the edge must act on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServerEvent {
    /// The largest packet that some client can take (bytes) has changed.
    Mtu(usize),
}

/// Figures of one session for status output.
#[derive(Clone, Debug)]
pub struct SessionReport {
    /// Whose it is.
    pub user: String,
    /// Its addresses.
    pub addresses: Addresses,
    /// Since when it is connected.
    pub since: Instant,
    /// Bytes of inner packets.
    pub counters: Counters,
    /// Packets dropped in its queues.
    pub drops: u64,
    /// How long packets wait in its queues.
    pub sojourn: Duration,
    /// Its paths.
    pub paths: Vec<PathReport>,
}

/// A connection, from its first packet on.
#[derive(Debug)]
struct Peer {
    http: Option<Http>,
    handshaking: bool,
    since: Instant,
    tunnel: Option<Tunnel>,
    /// Its place in the queue of timers.
    armed: Option<Instant>,
    dirty: bool,
    waiting: bool,
}

/// A session that was granted.
#[derive(Debug)]
struct Tunnel {
    stream: StreamId,
    user: String,
    secret: Secret,
    addresses: Option<Addresses>,
    since: Instant,
    capsules: CapsuleReader,
    carrier: Carrier,
}

/// A server: gives addresses to clients and moves packets between them and a TUN.
pub struct Server {
    config: ServerConfig,
    template: Template,
    endpoint: Endpoint,
    pool: Pool,
    peers: BTreeMap<ConnectionId, Peer>,
    by_ip: FxHashMap<IpAddr, ConnectionId>,
    by_secret: BTreeMap<Secret, ConnectionId>,
    timers: BTreeSet<(Instant, ConnectionId)>,
    dirty: Vec<ConnectionId>,
    waiting: VecDeque<ConnectionId>,
    joiner: Joiner,
    events: VecDeque<ServerEvent>,
    mtu: usize,
    mtu_checked: Option<Instant>,
}

impl Server {
    /// A server without clients.
    ///
    /// # Errors
    /// If the URI template is malformed.
    pub fn new(config: ServerConfig) -> Result<Self, TemplateError> {
        let template = connect_ip::template(connect_ip::DEFAULT_TEMPLATE)?;
        Ok(Self {
            endpoint: Endpoint::server(&config.setup),
            pool: Pool::new(config.subnet, config.subnet6),
            template,
            config,
            peers: BTreeMap::new(),
            by_ip: FxHashMap::default(),
            by_secret: BTreeMap::new(),
            timers: BTreeSet::new(),
            dirty: Vec::new(),
            waiting: VecDeque::new(),
            joiner: Joiner::new(),
            events: VecDeque::new(),
            mtu: 0,
            mtu_checked: None,
        })
    }

    /// The server's own addresses in the tunnel.
    pub fn own(&self) -> Addresses {
        self.pool.own()
    }

    /// Takes a UDP payload that arrived at `local`.
    pub fn handle_datagram(
        &mut self,
        now: Instant,
        local: Option<IpAddr>,
        remote: SocketAddr,
        ecn: u8,
        data: BytesMut,
    ) {
        match self.endpoint.handle(now, local.map(Local::from), remote, ecn, data) {
            Handled::Connection(id) => self.mark_dirty(id),
            Handled::New(id) => {
                let peer = Peer {
                    http: None,
                    handshaking: true,
                    since: now,
                    tunnel: None,
                    armed: None,
                    dirty: false,
                    waiting: false,
                };
                self.peers.insert(id, peer);
                self.mark_dirty(id);
            }
            Handled::Nothing => {}
        }
    }

    fn mark_dirty(&mut self, id: ConnectionId) {
        if let Some(peer) = self.peers.get_mut(&id)
            && !peer.dirty
        {
            peer.dirty = true;
            self.dirty.push(id);
        }
    }

    fn mark_waiting(&mut self, id: ConnectionId) {
        if let Some(peer) = self.peers.get_mut(&id)
            && !peer.waiting
        {
            peer.waiting = true;
            self.waiting.push_back(id);
        }
    }

    /// To be called after every batch of [`Self::handle_datagram`].
    pub fn handle_batch(&mut self, now: Instant) {
        let mut dirty = std::mem::take(&mut self.dirty);
        for id in dirty.drain(..) {
            if let Some(peer) = self.peers.get_mut(&id) {
                peer.dirty = false;
                self.drive(now, id);
            }
        }
        self.dirty = dirty;
    }

    fn drive(&mut self, now: Instant, id: ConnectionId) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        let Some(connection) = self.endpoint.get(id) else { return self.forget(now, id) };
        if let Some(tunnel) = &mut peer.tunnel {
            tunnel.carrier.note_received(now, connection);
        }
        let mut problem = None;
        let mut lost = None;
        let mut ended = false;
        while let Some(event) = connection.poll_event(now) {
            match event {
                QuicEvent::Connected => {
                    ended |= std::mem::take(&mut peer.handshaking);
                    match Http::start(Side::Server, connection) {
                        Ok(http) => peer.http = Some(http),
                        Err(error) => problem = Some((h3::code::STREAM_CREATION_ERROR, error.to_string())),
                    }
                }
                QuicEvent::Lost(reason) => {
                    ended |= std::mem::take(&mut peer.handshaking);
                    lost = Some(reason);
                }
                QuicEvent::PathOpened(path) => {
                    if let Some(tunnel) = &mut peer.tunnel {
                        tunnel.carrier.path_opened(now, connection, path);
                    }
                }
                QuicEvent::PathClosed(path) => {
                    if let Some(tunnel) = &mut peer.tunnel {
                        tunnel.carrier.path_closed(path);
                    }
                }
                QuicEvent::PeerStatus(path, status) => {
                    if let Some(tunnel) = &mut peer.tunnel {
                        tunnel.carrier.peer_status(now, path, status);
                    }
                }
                QuicEvent::StreamReadable(stream) => {
                    if let Some(http) = &mut peer.http
                        && let Err(error) = http.readable(connection, stream)
                    {
                        problem = Some((error.code, error.reason.to_string()));
                    }
                }
                QuicEvent::StreamOpened(_) | QuicEvent::StreamStopped(..) | QuicEvent::Datagrams => {}
            }
        }
        if ended {
            self.endpoint.handshake_over();
        }
        if let Some(reason) = lost {
            return self.lost(now, id, &reason);
        }
        if let Some((code, reason)) = problem {
            return self.close_peer(now, id, code, &reason);
        }
        self.receive(now, id);
        self.drive_http(now, id);
        self.after(now, id);
    }

    /// Lets the endpoint know what changed, and puts the connection where it is found again.
    fn after(&mut self, now: Instant, id: ConnectionId) {
        if !self.endpoint.settle(id) {
            return self.forget(now, id);
        }
        self.mark_waiting(id);
    }

    fn lost(&mut self, now: Instant, id: ConnectionId, reason: &LostReason) {
        if let Some(tunnel) = self.peers.get(&id).and_then(|peer| peer.tunnel.as_ref()) {
            tracing::info!(user = %tunnel.user, address = ?tunnel.addresses.and_then(|a| a.v4), %reason, "client gone");
        } else {
            tracing::debug!(%reason, "connection lost");
        }
        self.end_tunnel(now, id);
        self.after(now, id);
    }

    fn close_peer(&mut self, now: Instant, id: ConnectionId, code: u64, reason: &str) {
        if let Some(connection) = self.endpoint.get(id) {
            tracing::debug!(code, reason, "closing a connection");
            connection.close(now, code, reason);
        }
        if self.peers.get_mut(&id).is_some_and(|peer| std::mem::take(&mut peer.handshaking)) {
            self.endpoint.handshake_over();
        }
        self.end_tunnel(now, id);
        self.after(now, id);
    }

    /// Takes a session's addresses out of use.
    fn end_tunnel(&mut self, now: Instant, id: ConnectionId) {
        let Some(tunnel) = self.peers.get_mut(&id).and_then(|peer| peer.tunnel.take()) else { return };
        for ip in tunnel.addresses.iter().flat_map(Addresses::iter) {
            if self.by_ip.get(&ip) == Some(&id) {
                self.by_ip.remove(&ip);
            }
        }
        if self.by_secret.get(&tunnel.secret) == Some(&id) {
            self.by_secret.remove(&tunnel.secret);
            self.pool.release(now, &tunnel.secret);
        }
    }

    fn forget(&mut self, now: Instant, id: ConnectionId) {
        self.end_tunnel(now, id);
        let Some(peer) = self.peers.remove(&id) else { return };
        if let Some(at) = peer.armed {
            self.timers.remove(&(at, id));
        }
        if peer.handshaking {
            self.endpoint.handshake_over();
        }
    }

    fn receive(&mut self, now: Instant, id: ConnectionId) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        let Some(connection) = self.endpoint.get(id) else { return };
        let Some(tunnel) = &mut peer.tunnel else {
            // Datagrams before the request was granted: drop them (RFC 9297 §2).
            connection.receive_datagrams(drop);
            return;
        };
        let mut bytes = 0;
        let mut malformed = None;
        let (carrier, joiner, addresses) = (&tunnel.carrier, &mut self.joiner, tunnel.addresses);
        connection.receive_datagrams(|datagram| {
            let packet = match carrier.open_datagram(datagram) {
                Ok(Some(packet)) => packet,
                Ok(None) => return,
                Err(error) => return malformed = Some(error),
            };
            let (Some(src), Some(dst)) = (ip::src_of(&packet), ip::dst_of(&packet)) else { return };
            if !addresses.is_some_and(|addresses| addresses.contains(src)) || is_link_local(dst) {
                return;
            }
            bytes += packet.len() as u64;
            joiner.push(clamp_received(packet, carrier.mtu()));
        });
        if bytes > 0 {
            tunnel.carrier.note_delivered(now, bytes);
        }
        if let Some(error) = malformed {
            self.close_peer(now, id, error.code(), &error.to_string());
        }
    }

    fn drive_http(&mut self, now: Instant, id: ConnectionId) {
        loop {
            let Some(peer) = self.peers.get_mut(&id) else { return };
            let Some(event) = peer.http.as_mut().and_then(Http::poll) else { return };
            let on_tunnel = |stream| peer.tunnel.as_ref().is_some_and(|tunnel| tunnel.stream == stream);
            match event {
                HttpEvent::Headers { stream, headers } if !on_tunnel(stream) => {
                    self.request(now, id, stream, &headers);
                }
                HttpEvent::Data { stream, data } if on_tunnel(stream) => self.capsules(now, id, &data),
                HttpEvent::Finished { stream } if on_tunnel(stream) => {
                    if let Some(connection) = self.endpoint.get(id) {
                        connection.finish(stream);
                    }
                    self.end_tunnel(now, id);
                }
                HttpEvent::Reset { stream, .. } if on_tunnel(stream) => {
                    if let Some(connection) = self.endpoint.get(id) {
                        connection.reset(stream, h3::code::REQUEST_CANCELLED);
                    }
                    self.end_tunnel(now, id);
                }
                HttpEvent::StreamError { stream, code, .. } => {
                    if let Some(connection) = self.endpoint.get(id) {
                        connection.reset(stream, code);
                        connection.stop(stream, code);
                    }
                    if let Some(http) = self.peers.get_mut(&id).and_then(|peer| peer.http.as_mut()) {
                        http.forget(stream);
                    }
                    if peer_stream(&self.peers, id) == Some(stream) {
                        self.end_tunnel(now, id);
                    }
                }
                _ => {}
            }
        }
    }

    fn request(&mut self, now: Instant, id: ConnectionId, stream: StreamId, headers: &Headers) {
        let refusal = match self.admit(now, id, stream, headers) {
            Ok(()) => return,
            Err(refusal) => refusal,
        };
        let Some(connection) = self.endpoint.get(id) else { return };
        tracing::info!(status = refusal.status, reason = %refusal.reason, "request refused");
        connection.write(stream, h3::encode_headers(&refusal.headers()));
        connection.finish(stream);
        connection.stop(stream, h3::code::NO_ERROR);
    }

    fn admit(
        &mut self,
        now: Instant,
        id: ConnectionId,
        stream: StreamId,
        headers: &Headers,
    ) -> Result<(), Rejection> {
        let reject = |status, reason: &'static str| Rejection::new(status, reason);
        let request = connect_ip::parse_request(headers, &self.template)?;
        let user = self.config.auth.authenticate(request.authorization.as_deref());
        let user = user.map_err(Rejection::unauthorized)?;
        let allowed = self.peers.get(&id).and_then(|peer| peer.http.as_ref());
        if !allowed.is_some_and(Http::datagrams_allowed) {
            return Err(reject(400, "the client has not switched HTTP datagrams on"));
        }
        if peer_stream(&self.peers, id).is_some() {
            return Err(reject(409, "this connection has a tunnel already"));
        }
        let shown = request.session.and_then(|secret| Secret::try_from(&secret[..]).ok());
        let resumed = shown.and_then(|secret| Some((secret, self.pool.resume(&secret, &user)?)));
        if resumed.is_none() && self.by_secret.len() >= self.config.max_clients {
            return Err(reject(503, "the server is full"));
        }
        let secret = match resumed {
            Some((secret, _)) => {
                if let Some(old) = self.by_secret.get(&secret).copied() {
                    self.close_peer(now, old, h3::code::NO_ERROR, "the client came back");
                    // What the old connection gave back is in use again.
                    self.pool.resume(&secret, &user);
                }
                secret
            }
            None => (self.config.secrets)(),
        };
        let scheduler = headers.text(SCHEDULER_HEADER).and_then(|name| name.parse::<Scheduler>().ok());
        let mut routes = BytesMut::new();
        self.route_capsule().encode(&mut routes);
        let Some(connection) = self.endpoint.get(id) else {
            return Err(reject(500, "the connection is gone"));
        };
        let mut carrier = Carrier::new(now, Role::Server, stream, scheduler.unwrap_or_default());
        for path in connection.paths().collect::<Vec<PathId>>() {
            carrier.path_opened(now, connection, path);
        }
        let mut answer = connect_ip::accept(Some(&secret));
        let nets = [Some(IpNet::V4(self.pool.v4_net())), self.pool.v6_net().map(IpNet::V6)];
        let nets: Vec<String> = nets.iter().flatten().map(IpNet::to_string).collect();
        answer.push(NETWORKS_HEADER, nets.join(", "));
        connection.write(stream, h3::encode_headers(&answer));
        connection.write(stream, h3::encode_data(&routes));
        self.by_secret.insert(secret, id);
        let addresses = resumed.map(|(_, addresses)| addresses);
        let tunnel = Tunnel {
            stream,
            user,
            secret,
            addresses: None,
            since: now,
            capsules: CapsuleReader::new(),
            carrier,
        };
        if let Some(peer) = self.peers.get_mut(&id) {
            peer.tunnel = Some(tunnel);
        }
        if let Some(addresses) = addresses {
            self.grant(id, addresses, &[]);
        }
        Ok(())
    }

    fn route_capsule(&self) -> Capsule {
        let family = |net: &&IpNet| match net {
            IpNet::V4(_) => true,
            IpNet::V6(_) => self.pool.v6_net().is_some(),
        };
        let ranges = self.config.routes.iter().filter(family).map(|net| IpRange::from_net(*net, 0));
        Capsule::RouteAdvertisement(routes_sorted(ranges.collect()))
    }

    /// Gives a session its addresses and tells the client, answering the requests of `asked`.
    fn grant(&mut self, id: ConnectionId, addresses: Addresses, asked: &[(u64, IpNet)]) {
        let Some(tunnel) = self.peers.get_mut(&id).and_then(|peer| peer.tunnel.as_mut()) else { return };
        if tunnel.addresses.is_none() {
            tracing::info!(user = %tunnel.user, v4 = ?addresses.v4, v6 = ?addresses.v6, "client connected");
        }
        tunnel.addresses = Some(addresses);
        for ip in addresses.iter() {
            self.by_ip.insert(ip, id);
        }
        let mut entries = Vec::new();
        for ip in addresses.iter() {
            let request = asked.iter().find(|(_, net)| net.addr().is_ipv4() == ip.is_ipv4());
            entries.push(AssignedAddress {
                request_id: request.map_or(0, |(request, _)| *request),
                net: IpNet::from(ip),
            });
        }
        // A request beyond one address a family is answered with a refusal (RFC 9484 §4.7.2).
        for (request_id, net) in asked {
            if !entries.iter().any(|entry| entry.request_id == *request_id) {
                let none: IpAddr = if net.addr().is_ipv4() { [0; 4].into() } else { [0u16; 8].into() };
                entries.push(AssignedAddress { request_id: *request_id, net: IpNet::from(none) });
            }
        }
        let mut capsule = BytesMut::new();
        Capsule::AddressAssign(entries).encode(&mut capsule);
        if let Some(connection) = self.endpoint.get(id) {
            connection.write(tunnel.stream, h3::encode_data(&capsule));
        }
    }

    fn capsules(&mut self, now: Instant, id: ConnectionId, data: &[u8]) {
        let Some(tunnel) = self.peers.get_mut(&id).and_then(|peer| peer.tunnel.as_mut()) else { return };
        tunnel.capsules.push(data);
        loop {
            let Some(tunnel) = self.peers.get_mut(&id).and_then(|peer| peer.tunnel.as_mut()) else { return };
            match tunnel.capsules.next() {
                Ok(None) => return,
                Ok(Some(Capsule::AddressRequest(requests))) => {
                    let asked: Vec<_> =
                        requests.iter().map(|request| (request.request_id, request.net)).collect();
                    self.address(now, id, &asked);
                }
                // Routes behind a client are not taken: it shares its address (see docs/protocol.md).
                Ok(Some(_)) => {}
                Err(error) => {
                    tracing::info!(%error, "a client sent a malformed capsule");
                    let stream = tunnel.stream;
                    if let Some(connection) = self.endpoint.get(id) {
                        connection.reset(stream, h3::code::MESSAGE_ERROR);
                        connection.stop(stream, h3::code::MESSAGE_ERROR);
                    }
                    return self.end_tunnel(now, id);
                }
            }
        }
    }

    fn address(&mut self, now: Instant, id: ConnectionId, asked: &[(u64, IpNet)]) {
        let Some(tunnel) = self.peers.get(&id).and_then(|peer| peer.tunnel.as_ref()) else { return };
        let addresses = match tunnel.addresses {
            Some(addresses) => addresses,
            None => {
                let wishes: Vec<_> = asked.iter().map(|(_, net)| net.addr()).collect();
                let user = tunnel.user.clone();
                match self.pool.assign(tunnel.secret, &user, &wishes) {
                    Ok(addresses) => addresses,
                    Err(error) => {
                        tracing::warn!(%error, "a client got no address");
                        return self.close_peer(now, id, h3::code::INTERNAL_ERROR, "no address is free");
                    }
                }
            }
        };
        self.grant(id, addresses, asked);
    }

    /// Takes what was read from the TUN. Answers for it come out of [`Self::poll_tun`].
    pub fn handle_tun(&mut self, now: Instant, hdr: VnetHdr, packet: &mut [u8]) {
        let Ok(view) = ip::parse(packet) else { return };
        let (src, dst) = (view.src(), view.dst());
        let own = self.pool.own();
        let gateway = Gateway { v4: own.v4.map(IpAddr::V4), v6: own.v6.map(IpAddr::V6) };
        let Some(id) = self.by_ip.get(&dst).copied() else {
            if !is_link_local(dst) && !is_link_local(src) {
                let from = gateway.for_source(src);
                let error = from
                    .and_then(|from| icmp::unreachable(packet, icmp::Unreachable::AddressUnreachable, from));
                self.answer(error);
            }
            return;
        };
        let Some(tunnel) = self.peers.get_mut(&id).and_then(|peer| peer.tunnel.as_mut()) else { return };
        let answer = tunnel.carrier.send(now, hdr, packet, gateway);
        self.answer(answer);
        self.mark_waiting(id);
    }

    fn answer(&mut self, packet: Option<Vec<u8>>) {
        if let Some(packet) = packet {
            self.joiner.push(Bytes::from(packet));
        }
    }

    /// The next packet for the TUN.
    pub fn poll_tun(&mut self) -> Option<Joined> {
        if let Some(joined) = self.joiner.pop() {
            return Some(joined);
        }
        self.joiner.flush();
        self.joiner.pop()
    }

    /// Gives the memory of a written packet back.
    pub fn recycle(&mut self, joined: Joined) {
        self.joiner.recycle(joined);
    }

    /// The next thing that the edge must act on.
    pub fn poll_event(&mut self) -> Option<ServerEvent> {
        self.events.pop_front()
    }

    /// The next UDP payload to send, at the end of `buf`, which must be empty.
    pub fn poll_transmit(&mut self, now: Instant, buf: &mut Vec<u8>) -> Option<Transmit> {
        if let Some((transmit, data)) = self.endpoint.poll_stateless() {
            buf.extend_from_slice(&data);
            return Some(transmit);
        }
        while let Some(id) = self.waiting.front().copied() {
            if let Some(peer) = self.peers.get_mut(&id)
                && let Some(connection) = self.endpoint.get(id)
            {
                let transmit = match &mut peer.tunnel {
                    Some(tunnel) => tunnel.carrier.poll_transmit(now, connection, buf),
                    None => connection.poll_transmit(now, buf),
                };
                if let Some(transmit) = transmit {
                    // The next one is another client's turn.
                    self.waiting.rotate_left(1);
                    return Some(transmit);
                }
                peer.waiting = false;
            }
            self.waiting.pop_front();
            if self.endpoint.settle(id) {
                self.arm(now, id);
            } else {
                self.forget(now, id);
            }
        }
        None
    }

    /// Notes when the connection wants to be looked at again.
    fn arm(&mut self, now: Instant, id: ConnectionId) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        let Some(connection) = self.endpoint.get(id) else { return };
        let own = match &peer.tunnel {
            Some(tunnel) => {
                let unasked = tunnel.addresses.is_none().then_some(tunnel.since + UNASKED);
                let carrier = tunnel.carrier.poll_timeout(now, connection);
                carrier.into_iter().chain(unasked).min()
            }
            None => Some(peer.since + REQUEST).filter(|at| *at > now),
        };
        let next = own.into_iter().chain(connection.poll_timeout()).min();
        if next == peer.armed {
            return;
        }
        if let Some(at) = peer.armed.take() {
            self.timers.remove(&(at, id));
        }
        if let Some(at) = next {
            self.timers.insert((at, id));
            peer.armed = Some(at);
        }
    }

    /// When [`Self::handle_timeout`] wants to be called.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// Lets time pass.
    pub fn handle_timeout(&mut self, now: Instant) {
        while let Some((at, id)) = self.timers.first().copied()
            && at <= now
        {
            self.timers.pop_first();
            let Some(peer) = self.peers.get_mut(&id) else { continue };
            peer.armed = None;
            let Some(connection) = self.endpoint.get(id) else { continue };
            connection.handle_timeout(now);
            match &mut peer.tunnel {
                Some(tunnel) => {
                    tunnel.carrier.handle_timeout(now, connection);
                    let late = now.saturating_duration_since(tunnel.since) >= UNASKED;
                    if tunnel.addresses.is_none() && late {
                        self.address(now, id, &[]);
                    }
                }
                None if now.saturating_duration_since(peer.since) >= REQUEST && !connection.is_closed() => {
                    self.close_peer(now, id, h3::code::NO_ERROR, "no request came");
                }
                None => {}
            }
            self.drive(now, id);
        }
        self.follow_mtu(now);
    }

    fn follow_mtu(&mut self, now: Instant) {
        if self.mtu_checked.is_some_and(|at| now.saturating_duration_since(at) < MTU_CHECK) {
            return;
        }
        self.mtu_checked = Some(now);
        let tunnels = self.peers.values().filter_map(|peer| peer.tunnel.as_ref());
        let mtu = tunnels.map(|tunnel| tunnel.carrier.mtu()).max().unwrap_or(0);
        if mtu != 0 && mtu != self.mtu {
            self.mtu = mtu;
            self.events.push_back(ServerEvent::Mtu(mtu));
        }
    }

    /// This end did not run for a while: silence until now proves nothing.
    pub fn forgive(&mut self, now: Instant) {
        for tunnel in self.peers.values_mut().filter_map(|peer| peer.tunnel.as_mut()) {
            tunnel.carrier.forgive(now);
        }
    }

    /// Ends all sessions; what [`Self::poll_transmit`] still gives tells the clients.
    pub fn close(&mut self, now: Instant, reason: &str) {
        for id in self.peers.keys().copied().collect::<Vec<_>>() {
            self.close_peer(now, id, h3::code::NO_ERROR, reason);
        }
    }

    /// Sessions now.
    pub fn sessions(&self) -> usize {
        self.by_secret.len()
    }

    /// Figures for status output.
    pub fn report(&mut self, now: Instant) -> Vec<SessionReport> {
        let mut reports = Vec::new();
        for (id, peer) in &mut self.peers {
            let Some(tunnel) = &peer.tunnel else { continue };
            let Some(connection): Option<&mut Connection> = self.endpoint.get(*id) else { continue };
            reports.push(SessionReport {
                user: tunnel.user.clone(),
                addresses: tunnel.addresses.unwrap_or_default(),
                since: tunnel.since,
                counters: tunnel.carrier.counters,
                drops: tunnel.carrier.drops(),
                sojourn: tunnel.carrier.sojourn(),
                paths: tunnel.carrier.report(now, connection),
            });
        }
        reports
    }
}

fn peer_stream(peers: &BTreeMap<ConnectionId, Peer>, id: ConnectionId) -> Option<StreamId> {
    Some(peers.get(&id)?.tunnel.as_ref()?.stream)
}
