//! The server of a tunnel, or one shard of it.

mod arrivals;
mod bare;
mod capsules;
mod dialogue;
mod groups;
mod peers;
mod relays;
mod report;
mod routes;
mod udp;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    net::{IpAddr, SocketAddr},
};

use bytes::{Bytes, BytesMut};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use mpvpn_masque::{
    connect::Authority,
    connect_ip, connect_udp,
    h3::{self, Side},
    headers::Headers,
    template::{Template, TemplateError},
};
use mpvpn_packet::{Joined, Joiner, VnetHdr, icmp, ip};
use mpvpn_quic::{
    ConnectionId, Endpoint, Event as QuicEvent, Handled, Local, LostReason, ServerSetup, Shard, Transmit,
};
use mpvpn_types::{Duration, Instant, SessionId};
use rustc_hash::FxHashMap;

use crate::{
    AddressSet, Addresses, Carries, ClassProfile, Limits, Member, Registry, RelayId, Seat, Secret, UdpId,
    carrier::{Carrier, Gateway},
    client::{clamp_received, is_link_local},
    events::{Changes, ClientTag, ServerChange},
    http::Http,
    relay::Relays,
    udp::{Early, Inbox, UdpFlows},
};

use bare::Bare;
use capsules::RequestStream;
use groups::Group;
use peers::Peers;
pub use report::{Departed, SessionReport};
use routes::Routes;

/// A connection that has not asked for a tunnel after this time is closed.
const REQUEST: Duration = Duration::from_secs(15);
/// A client that asks for no address gets one after this time.
const UNASKED: Duration = Duration::from_millis(30);

/// An answer to anybody: its head and its content.
pub type Page = (Headers, Bytes);

/// Decides who may use the server.
pub trait Authenticate: Send {
    /// The name of the user whose credentials these are (the value of the `authorization` header).
    ///
    /// # Errors
    /// A sentence for the log if nobody's.
    fn authenticate(&self, authorization: Option<&str>) -> Result<String, String>;

    /// What a user may not exceed.
    fn limits(&self, user: &str) -> Limits {
        let _ = user;
        Limits::default()
    }
}

/// What a server needs to know.
pub struct ServerConfig {
    /// TLS and transport.
    pub setup: ServerSetup,
    /// What it is there for. Without packets, nobody gets an address.
    pub carries: Carries,
    /// IPv4 addresses for clients; the first is the server's own.
    pub subnet: Ipv4Net,
    /// IPv6 addresses for clients.
    pub subnet6: Option<Ipv6Net>,
    /// Where their packets may go, beside `subnet` and `subnet6`: what clients are told. Others are refused.
    pub routes: Vec<IpNet>,
    /// Whether it says to clients that their TCP connections and UDP payloads should come by CONNECT and CONNECT-UDP: it
    /// then answers [`ServerEvent::Connect`] and [`ServerEvent::ConnectUdp`] wherever packets could go.
    pub streams: bool,
    /// Resolvers that it suggests to clients, the best first.
    pub dns: Vec<IpAddr>,
    /// Who may use it.
    pub auth: Box<dyn Authenticate>,
    /// What everybody else sees: the answer to a request of this method, with its content.
    pub site: Box<dyn Fn(&str) -> Page + Send>,
    /// Whether wrong credentials are answered as none at all, instead of by saying so.
    pub hide: bool,
    /// Sessions at a time.
    pub max_clients: usize,
    /// Makes a secret for a new session, from a cryptographic random number generator.
    pub secrets: Box<dyn FnMut() -> Secret + Send>,
}

/// Something that the edge must act on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServerEvent {
    /// The largest packet that some client of any shard can take (bytes) has changed.
    Mtu(usize),
    /// A tunnel of another shard was replaced: [`Server::close_replaced`] is to be called there.
    Replaced(Seat),
    /// A client wants a TCP connection: [`Server::relay_opened`] or [`Server::relay_failed`] answers it.
    Connect {
        /// The stream that will be the connection.
        relay: RelayId,
        /// Who wants it.
        user: String,
        /// Where to.
        to: Authority,
    },
    /// [`Server::relay_read`] has something to say again.
    RelayReadable(RelayId),
    /// [`Server::relay_room`] is there again.
    RelayWritable(RelayId),
    /// The client has broken it off, or is gone; there is no such relay any more.
    RelayGone(RelayId),
    /// A client wants UDP payloads to be carried: [`Server::udp_opened`] or [`Server::udp_failed`] answers it. Its
    /// payloads may come before that ([`Server::poll_udp`]).
    ConnectUdp {
        /// The flow.
        udp: UdpId,
        /// Who wants it.
        user: String,
        /// Where to.
        to: Authority,
    },
    /// The client has ended it, or is gone; there is no such flow any more.
    UdpGone(UdpId),
}

/// What became of a packet that was read from the TUN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Taken {
    /// It is on its way to a client, or answered, or dropped.
    Here,
    /// It is for a client of the shard with this number, for [`Server::handle_handed`] there.
    By(u8),
}

/// A connection, from its first packet on.
#[derive(Debug)]
struct Peer {
    http: Option<Http>,
    handshaking: bool,
    since: Instant,
    tunnel: Option<Box<Tunnel>>,
    /// While there is no tunnel, but relays.
    bare: Option<Box<Bare>>,
    relays: Relays,
    udp: UdpFlows,
    early: Early,
    /// Credentials that were looked at before, and whose they are.
    known: Option<(String, String)>,
    /// Its place in the queue of timers.
    armed: Option<Instant>,
    dirty: bool,
    waiting: bool,
}

impl Peer {
    /// The mark of its packets where its class has one, whatever path they take.
    fn dscp(&self) -> Option<u8> {
        self.tunnel.as_ref()?.class.as_ref()?.dscp
    }

    /// The name of its client in events; `None` while nothing was granted.
    fn tag(&self) -> Option<ClientTag> {
        let (address, member, class) = (None, Member::HOME, String::new());
        match (&self.tunnel, &self.bare) {
            (Some(tunnel), _) => Some(tunnel.tag()),
            (None, Some(bare)) => Some(ClientTag { user: bare.user.clone(), address, member, class }),
            (None, None) => None,
        }
    }

    /// The stream of its request, while that is granted.
    fn request_mut(&mut self) -> Option<&mut RequestStream> {
        match &mut self.tunnel {
            Some(tunnel) => Some(&mut tunnel.request),
            None => self.bare.as_mut()?.request.as_mut(),
        }
    }

    /// What watches and uses its paths; `None` while nothing was granted.
    fn carrier(&mut self) -> Option<&mut Carrier> {
        match &mut self.tunnel {
            Some(tunnel) => Some(&mut tunnel.carrier),
            None => self.bare.as_mut().map(|bare| &mut bare.carrier),
        }
    }
}

/// A session that was granted.
#[derive(Debug)]
struct Tunnel {
    request: RequestStream,
    user: String,
    session: SessionId,
    secret: Secret,
    member: Member,
    /// What its client says of its class, if it has classes.
    class: Option<Box<ClassProfile>>,
    serial: u64,
    /// Whether it resumed a session.
    resumed: bool,
    /// A later connection of the same client has replaced it.
    replaced: bool,
    addresses: Option<AddressSet>,
    since: Instant,
    carrier: Carrier,
    /// Whether packets for the client may go down here. A connection that joined a session must have
    /// brought some up first: then its thread at the client is ready.
    serves: bool,
    /// What it counts for among the MTUs of the clients.
    counted_mtu: Option<usize>,
}

impl Tunnel {
    fn tag(&self) -> ClientTag {
        let first = self.addresses.map(|all| all.first()).unwrap_or_default();
        ClientTag {
            user: self.user.clone(),
            address: first.v4.map(IpAddr::V4).or(first.v6.map(IpAddr::V6)),
            member: self.member,
            class: self.class.as_ref().map_or(String::new(), |class| class.name.clone()),
        }
    }
}

/// A server: gives addresses to clients and moves packets between them and a TUN.
pub struct Server {
    config: ServerConfig,
    template: Template,
    udp_template: Template,
    endpoint: Endpoint,
    shard: Shard,
    registry: Registry,
    /// The server's own addresses, and the networks that clients' addresses are from.
    own: Addresses,
    networks: (Ipv4Net, Option<Ipv6Net>),
    routes: Routes,
    peers: Peers,
    /// The session that has an address, and its connections at this shard.
    by_ip: FxHashMap<IpAddr, Secret>,
    groups: FxHashMap<Secret, Group>,
    by_member: BTreeMap<(Secret, Member), ConnectionId>,
    timers: BTreeSet<(Instant, ConnectionId)>,
    dirty: Vec<ConnectionId>,
    waiting: VecDeque<ConnectionId>,
    joiner: Joiner,
    events: VecDeque<ServerEvent>,
    changes: Changes<ServerChange>,
    departed: VecDeque<Departed>,
    /// Payloads from clients.
    udp_in: Inbox,
    /// How many clients of this shard can take packets of a size (bytes).
    mtus: BTreeMap<usize, u32>,
    /// The largest of them, as the registry knows it.
    mtu: Option<usize>,
    /// Silence until then proves nothing; each session learns it before it is judged.
    forgiven: Option<Instant>,
}

impl Server {
    /// A server without clients and without other shards.
    ///
    /// # Errors
    /// If the URI template is malformed.
    pub fn new(config: ServerConfig) -> Result<Self, TemplateError> {
        let registry = Registry::new(config.subnet, config.subnet6, config.max_clients);
        Self::shard(config, registry, Shard::ONLY)
    }

    /// One of several that share a registry, which alone knows the subnets and how many clients may
    /// come. What arrives must be steered by connection ID ([`mpvpn_quic::shard_of`]).
    ///
    /// # Errors
    /// If the URI template is malformed.
    pub fn shard(config: ServerConfig, registry: Registry, shard: Shard) -> Result<Self, TemplateError> {
        let template = connect_ip::template(connect_ip::DEFAULT_TEMPLATE)?;
        Ok(Self {
            endpoint: Endpoint::server(&config.setup.for_shard(shard)),
            template,
            udp_template: connect_udp::default_template(),
            routes: Routes::new(&config.routes, registry.networks()),
            config,
            shard,
            own: registry.own(),
            networks: registry.networks(),
            registry,
            peers: Peers::default(),
            by_ip: FxHashMap::default(),
            groups: FxHashMap::default(),
            by_member: BTreeMap::new(),
            timers: BTreeSet::new(),
            dirty: Vec::new(),
            waiting: VecDeque::new(),
            joiner: Joiner::new(),
            events: VecDeque::new(),
            changes: Changes::default(),
            departed: VecDeque::new(),
            udp_in: Inbox::default(),
            mtus: BTreeMap::new(),
            mtu: None,
            forgiven: None,
        })
    }

    /// The server's own addresses in the tunnel.
    pub fn own(&self) -> Addresses {
        self.own
    }

    /// Whether both addresses are of clients: such packets leave the TUN and come back through it.
    pub fn are_clients(&self, src: IpAddr, dst: IpAddr) -> bool {
        let (v4, v6) = self.networks;
        let is_client = |ip: IpAddr| match ip {
            _ if self.own.contains(ip) => false,
            IpAddr::V4(ip) => v4.contains(&ip),
            IpAddr::V6(ip) => v6.is_some_and(|net| net.contains(&ip)),
        };
        is_client(src) && is_client(dst)
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
                    bare: None,
                    relays: Relays::default(),
                    udp: UdpFlows::default(),
                    early: Early::default(),
                    known: None,
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
        if let Some(peer) = self.peers.get_mut(id)
            && !peer.dirty
        {
            peer.dirty = true;
            self.dirty.push(id);
        }
    }

    fn mark_waiting(&mut self, id: ConnectionId) {
        if let Some(peer) = self.peers.get_mut(id)
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
            if let Some(peer) = self.peers.get_mut(id) {
                peer.dirty = false;
                self.drive(now, id);
            }
        }
        self.dirty = dirty;
    }

    fn drive(&mut self, now: Instant, id: ConnectionId) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        let Some(connection) = self.endpoint.get(id) else { return self.forget(now, id) };
        if let Some(carrier) = peer.carrier() {
            carrier.note_received(now, connection);
        }
        let mut problem = None;
        let mut lost = None;
        let mut ended = false;
        let mut stopped = Vec::new();
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
                    if let Some(carrier) = peer.carrier() {
                        carrier.path_opened(now, connection, path);
                        carrier.report_opened(path, connection.remote_of(path));
                    }
                }
                QuicEvent::PathClosed(path) => {
                    if let Some(carrier) = peer.carrier() {
                        carrier.path_closed(now, path);
                    }
                }
                QuicEvent::PeerStatus(path, status) => {
                    if let Some(carrier) = peer.carrier() {
                        carrier.peer_status(now, path, status);
                    }
                }
                QuicEvent::StreamReadable(stream) if peer.relays.has(stream) => {
                    if peer.relays.wake(stream) {
                        self.events.push_back(ServerEvent::RelayReadable(RelayId::new(id, stream)));
                    }
                }
                QuicEvent::StreamReadable(stream) => {
                    if let Some(http) = &mut peer.http {
                        http.readable(stream);
                    }
                }
                QuicEvent::StreamWritable(stream) => {
                    self.events.push_back(ServerEvent::RelayWritable(RelayId::new(id, stream)));
                }
                QuicEvent::StreamStopped(stream, _)
                    if peer.relays.breaks_when_stopped(stream) || peer.udp.has(stream) =>
                {
                    stopped.push(stream);
                }
                QuicEvent::StreamOpened(_)
                | QuicEvent::StreamStopped(..)
                | QuicEvent::StreamsAvailable
                | QuicEvent::Datagrams => {}
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
        for stream in stopped {
            match self.peers.get(id).is_some_and(|peer| peer.udp.has(stream)) {
                true => self.udp_broken(id, stream, h3::code::REQUEST_CANCELLED),
                false => self.relay_broken(id, stream),
            }
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
        tracing::debug!(%reason, "connection lost");
        self.end_tunnel(now, id, &reason.to_string());
        self.end_relays(id);
        self.end_udp(id);
        self.after(now, id);
    }

    fn close_peer(&mut self, now: Instant, id: ConnectionId, code: u64, reason: &str) {
        if let Some(connection) = self.endpoint.get(id) {
            tracing::debug!(code, reason, "closing a connection");
            connection.close(now, code, reason);
        }
        if self.peers.get_mut(id).is_some_and(|peer| std::mem::take(&mut peer.handshaking)) {
            self.endpoint.handshake_over();
        }
        self.end_tunnel(now, id, reason);
        self.end_relays(id);
        self.end_udp(id);
        self.after(now, id);
    }

    /// A later connection of the same member has taken this one's place.
    fn replace(&mut self, now: Instant, seat: Seat) {
        if seat.shard == self.shard.index() {
            self.close_replaced(now, seat);
        } else {
            self.events.push_back(ServerEvent::Replaced(seat));
        }
    }

    /// Closes the connection of a tunnel of this shard, if it is still there.
    pub fn close_replaced(&mut self, now: Instant, seat: Seat) {
        let tunnel = self.peers.get_mut(seat.connection).and_then(|peer| peer.tunnel.as_mut());
        if let Some(tunnel) = tunnel.filter(|tunnel| tunnel.serial == seat.serial) {
            tunnel.replaced = true;
            self.close_peer(now, seat.connection, h3::code::NO_ERROR, "the client came back");
        }
    }

    /// Takes a tunnel out of use, and with the session's last one its addresses.
    fn end_tunnel(&mut self, now: Instant, id: ConnectionId, reason: &str) {
        self.take_path_events(id);
        let Some(tunnel) = self.peers.get_mut(id).and_then(|peer| peer.tunnel.take()) else { return };
        self.departed.push_back(Departed::of(tunnel.class.as_deref(), &tunnel.carrier));
        // A replaced connection is reported as resumed, and one without addresses was not reported as connected.
        if tunnel.addresses.is_some() && !tunnel.replaced {
            self.changes.push(ServerChange::Left { client: tunnel.tag(), reason: reason.to_owned() });
        }
        let key = (tunnel.secret, tunnel.member);
        if self.by_member.get(&key) == Some(&id) {
            self.by_member.remove(&key);
        }
        self.serve(&tunnel.secret, tunnel.addresses.unwrap_or_default());
        self.count_mtu(tunnel.counted_mtu, None);
        self.registry.leave(now, &tunnel.secret, tunnel.member, tunnel.serial);
    }

    /// The connections of a session at this shard.
    fn members(&self, secret: &Secret) -> impl Iterator<Item = (Member, ConnectionId)> {
        let from = self.by_member.range((*secret, Member::HOME)..);
        from.take_while(move |((other, _), _)| other == secret).map(|((_, member), id)| (*member, *id))
    }

    /// Lets what goes to the addresses of a session go down the connections of its members here.
    fn serve(&mut self, secret: &Secret, addresses: AddressSet) {
        let members: Vec<_> = self.members(secret).collect();
        let serving = members.iter().filter(|(_, id)| {
            let tunnel = self.peers.get(*id).and_then(|peer| peer.tunnel.as_ref());
            tunnel.is_some_and(|tunnel| tunnel.serves)
        });
        let group = self.groups.entry(*secret).or_default();
        let serves = group.set(serving.map(|(member, id)| (member.class(), *id)));
        if members.is_empty() {
            self.groups.remove(secret);
        }
        for ip in addresses.iter() {
            match serves {
                true => self.by_ip.insert(ip, *secret),
                false => self.by_ip.remove(&ip),
            };
        }
    }

    fn forget(&mut self, now: Instant, id: ConnectionId) {
        self.end_tunnel(now, id, "its connection has ended");
        self.end_relays(id);
        self.end_udp(id);
        let Some(peer) = self.peers.remove(id) else { return };
        self.departed.extend(peer.bare.as_ref().map(|bare| Departed::of(None, &bare.carrier)));
        if let Some(at) = peer.armed {
            self.timers.remove(&(at, id));
        }
        if peer.handshaking {
            self.endpoint.handshake_over();
        }
    }

    /// Takes what was read from the TUN. Answers for it come out of [`Self::poll_tun`].
    pub fn handle_tun(&mut self, now: Instant, hdr: VnetHdr, packet: &mut [u8]) -> Taken {
        let Ok(view) = ip::parse(packet) else { return Taken::Here };
        let (src, dst) = (view.src(), view.dst());
        if self.deliver(now, hdr, packet) || is_link_local(dst) || is_link_local(src) {
            return Taken::Here;
        }
        if self.shard.count() > 1
            && let Some(shard) = self.registry.shard_of(dst)
        {
            // Just leaving this one: nobody can reach it now.
            return if shard == self.shard.index() { Taken::Here } else { Taken::By(shard) };
        }
        let from = self.gateway().for_source(src);
        let error =
            from.and_then(|from| icmp::unreachable(packet, icmp::Unreachable::AddressUnreachable, from));
        self.answer(error);
        Taken::Here
    }

    /// Takes a packet that another shard read and could not carry. Returns whether this one can.
    pub fn handle_handed(&mut self, now: Instant, hdr: VnetHdr, packet: &mut [u8]) -> bool {
        self.deliver(now, hdr, packet)
    }

    /// Queues a packet for the client that it is for, if one of this shard is.
    fn deliver(&mut self, now: Instant, hdr: VnetHdr, packet: &mut [u8]) -> bool {
        let Ok(view) = ip::parse(packet) else { return false };
        let group = self.by_ip.get(&view.dst()).and_then(|secret| self.groups.get_mut(secret));
        let tunnel = |id| self.peers.get(id).and_then(|peer| peer.tunnel.as_ref());
        let works = |id| tunnel(id).is_some_and(|tunnel| tunnel.carrier.any_alive());
        let Some(id) = group.and_then(|group| group.down(now, &view, works)) else { return false };
        let gateway = self.gateway();
        let Some(tunnel) = self.peers.get_mut(id).and_then(|peer| peer.tunnel.as_mut()) else {
            return false;
        };
        let answer = tunnel.carrier.send(now, hdr, packet, gateway, None);
        self.answer(answer);
        self.mark_waiting(id);
        true
    }

    fn gateway(&self) -> Gateway {
        Gateway { v4: self.own.v4.map(IpAddr::V4), v6: self.own.v6.map(IpAddr::V6) }
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

    /// The next thing that the edge must act on. What it does then may be worth another [`Self::poll_transmit`].
    pub fn poll_event(&mut self) -> Option<ServerEvent> {
        self.events.pop_front()
    }

    /// The next change that needs no action.
    pub fn poll_change(&mut self) -> Option<ServerChange> {
        self.changes.pop()
    }

    fn take_path_events(&mut self, id: ConnectionId) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        let events = peer.carrier().map(Carrier::take_events).unwrap_or_default();
        if events.is_empty() {
            return;
        }
        let Some(client) = peer.tag() else { return };
        for event in events {
            self.changes.push(ServerChange::Path { client: client.clone(), event });
        }
    }

    /// The next UDP payload to send, at the end of `buf`, which must be empty.
    pub fn poll_transmit(&mut self, now: Instant, buf: &mut Vec<u8>) -> Option<Transmit> {
        if let Some((transmit, data)) = self.endpoint.poll_stateless() {
            buf.extend_from_slice(&data);
            return Some(transmit);
        }
        while let Some(id) = self.waiting.front().copied() {
            if let Some(peer) = self.peers.get_mut(id)
                && let Some(connection) = self.endpoint.get(id)
            {
                let transmit = match peer.carrier() {
                    Some(carrier) => carrier.poll_transmit(now, connection, buf),
                    None => connection.poll_transmit(now, buf),
                };
                if let Some(transmit) = transmit {
                    // The next one is another client's turn.
                    self.waiting.rotate_left(1);
                    return Some(Transmit { dscp: peer.dscp().unwrap_or(transmit.dscp), ..transmit });
                }
                peer.waiting = false;
                // Room on a stream shows as its bytes leave.
                if connection.has_events() {
                    self.waiting.pop_front();
                    self.drive(now, id);
                    continue;
                }
            }
            self.waiting.pop_front();
            self.take_path_events(id);
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
        let Some(peer) = self.peers.get_mut(id) else { return };
        let Some(connection) = self.endpoint.get(id) else { return };
        let (mut counted, mut mtu) = (None, None);
        let own = match &mut peer.tunnel {
            Some(tunnel) => {
                let unasked = tunnel.addresses.is_none().then_some(tunnel.since + UNASKED);
                mtu = Some(tunnel.carrier.mtu());
                counted = std::mem::replace(&mut tunnel.counted_mtu, mtu);
                let carrier = tunnel.carrier.poll_timeout(now, connection);
                carrier.into_iter().chain(unasked).min()
            }
            None => match &peer.bare {
                Some(bare) => bare.carrier.poll_timeout(now, connection),
                None => Some(peer.since + REQUEST).filter(|at| *at > now),
            },
        };
        let next = own.into_iter().chain(connection.poll_timeout()).min();
        if next != peer.armed {
            if let Some(at) = std::mem::replace(&mut peer.armed, next) {
                self.timers.remove(&(at, id));
            }
            self.timers.extend(next.map(|at| (at, id)));
        }
        self.count_mtu(counted, mtu);
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
            let Some(peer) = self.peers.get_mut(id) else { continue };
            peer.armed = None;
            let Some(connection) = self.endpoint.get(id) else { continue };
            connection.handle_timeout(now);
            match &mut peer.tunnel {
                Some(tunnel) => {
                    if let Some(at) = self.forgiven {
                        tunnel.carrier.forgive(at);
                    }
                    tunnel.carrier.handle_timeout(now, connection);
                    let (mtu, joiner) = (tunnel.carrier.mtu(), &mut self.joiner);
                    tunnel.carrier.release(now, |packet| joiner.push(clamp_received(packet, mtu)));
                    let late = now.saturating_duration_since(tunnel.since) >= UNASKED;
                    if tunnel.addresses.is_none() && late {
                        self.address(now, id, &[]);
                    }
                }
                None if let Some(Bare { carrier, .. }) = peer.bare.as_deref_mut() => {
                    if let Some(at) = self.forgiven {
                        carrier.forgive(at);
                    }
                    carrier.handle_timeout(now, connection);
                }
                None if now.saturating_duration_since(peer.since) >= REQUEST && !connection.is_closed() => {
                    self.close_peer(now, id, h3::code::NO_ERROR, "no request came");
                }
                None => {}
            }
            self.drive(now, id);
        }
    }

    /// Counts what a client can take, instead of what it could before.
    fn count_mtu(&mut self, before: Option<usize>, after: Option<usize>) {
        if before == after {
            return;
        }
        if let Some(count) = before.and_then(|before| self.mtus.get_mut(&before)) {
            *count -= 1;
        }
        self.mtus.retain(|_, count| *count > 0);
        if let Some(after) = after {
            *self.mtus.entry(after).or_default() += 1;
        }
        let mtu = self.mtus.last_key_value().map(|(mtu, _)| *mtu);
        if mtu != self.mtu {
            self.mtu = mtu;
            self.events.extend(self.registry.set_mtu(self.shard.index(), mtu).map(ServerEvent::Mtu));
        }
    }

    /// This end did not run for a while: silence until now proves nothing.
    pub fn forgive(&mut self, now: Instant) {
        self.forgiven = Some(now);
    }

    /// Ends all sessions; what [`Self::poll_transmit`] still gives tells the clients.
    pub fn close(&mut self, now: Instant, reason: &str) {
        for id in self.peers.ids() {
            self.close_peer(now, id, h3::code::NO_ERROR, reason);
        }
    }

    /// Sessions now, of all shards.
    pub fn sessions(&self) -> usize {
        self.registry.sessions()
    }
}
