//! The server of tunnels, or one shard of it.
//!
//! In: UDP payloads, TUN packets, bytes of relays, the time. Out: UDP payloads, TUN packets, events, the next
//! deadline. Always holds: a client sends packets only from addresses of its session, and gets only packets
//! for these.

mod addresses;
mod capsules;
mod client_mtus;
mod config;
mod connect_mpvpn;
mod isolation;
mod limits;
mod metering;
mod packets;
mod peer;
mod peers;
mod reconfiguration;
mod relays;
mod report;
mod requests;
mod routes;
mod session_connections;
mod sessions;
mod sites;
mod udp;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use bytes::BytesMut;
use mpvpn_masque::h3;
use mpvpn_packet::GroCoalescer;
use mpvpn_quic::{
    ConnectionHandle, Endpoint, Handled, HandshakeResult, LocalAddress, LostReason, ProcessBytes, Shard,
    Transmit,
};
use mpvpn_types::{Duration, Instant, target::TURNS};

use crate::{
    AddressSet, ConnectionSlot, Registry, RelayId, SessionSecret, SiteTable, UdpId,
    client::clamp_received,
    coalescing::CoalescingLimit,
    events::{Changes, ServerChange},
    udp::PayloadInbox,
};

use client_mtus::ClientMtus;
pub use config::{
    Authenticate, AuthenticatedUser, CertificateId, CredentialId, FilterRequest, ServerConfig, ServerEvent,
    TunOutcome,
};
use packets::pass_on;
use peer::{AuthenticatedPeer, Peer};
use peers::{Peers, TURN_TIME};
pub use reconfiguration::Reconfiguration;
pub use report::{ClosedConnection, ServerCounters, SessionReport};
use routes::Routes;
use sessions::Sessions;

/// Connections whose timers are handled before packets are received again. More: where thousands of timers
/// are due at once, as after an outage or on a machine that is too slow, the acknowledgements wait that would
/// stop them, and each timer that expires meanwhile sends more. Fewer: more system calls.
const MAX_TIMERS: usize = 16;
/// How long an iteration handles received packets: the first if nothing comes from the TUN and relays, the
/// second if something does. Packets that are left wait for the next iteration, undecrypted. Longer: a user
/// whose packets cost much delays those for whom something comes from the TUN or relays. Shorter: more
/// iterations. Chosen.
const RECEIVE_TIME: Duration = Duration::from_millis(1);
const RECEIVE_TIME_BESIDE: Duration = Duration::from_micros(200);
/// UDP payloads that a connection takes in a turn at most, and after how many of them the time is looked at:
/// after [`TURN_TIME`] it takes no more. More: the others wait. Fewer: what a turn costs beside its packets
/// counts. Chosen.
const MAX_TURN_PACKETS: usize = 64;
const TURN_CHECK: usize = 8;

/// Measures the turns of users.
#[derive(Debug)]
struct TurnClock {
    clock: fn() -> Instant,
    /// The time of this iteration for received packets.
    time: Duration,
    /// The end of the turns of this iteration, once the first has begun.
    until: Option<Instant>,
}

/// A server: assigns addresses to clients, and moves packets between them and a TUN.
pub struct Server {
    config: ServerConfig,
    endpoint: Endpoint,
    shard: Shard,
    registry: Registry,
    /// The memory of the process.
    process_bytes: Arc<ProcessBytes>,
    routes: Routes,
    /// The networks behind clients.
    sites: Arc<SiteTable>,
    peers: Peers<Peer>,
    sessions: Sessions,
    joiner: GroCoalescer,
    events: VecDeque<ServerEvent>,
    changes: Changes<ServerChange>,
    closed: VecDeque<ClosedConnection>,
    /// Refused requests by HTTP status.
    refused: BTreeMap<u16, u64>,
    /// UDP payloads from clients.
    udp_in: PayloadInbox,
    mtus: ClientMtus,
    /// The end of the last local stall: silence until then says nothing about paths. Passed to each
    /// connection before its timers.
    stalled_until: Option<Instant>,
    /// The time of the last call that had one, for the end of a tunnel by a panic in a call without a time.
    last_time: Option<Instant>,
    coalescing: CoalescingLimit,
    /// `None`: no event loop has said anything, and all packets are handled at once.
    turns: Option<TurnClock>,
}

impl Server {
    /// A server without clients and without other shards.
    pub fn new(config: ServerConfig) -> Self {
        let registry = Registry::new(config.subnet, config.subnet6, config.max_clients);
        Self::shard(config, registry, Shard::ONLY)
    }

    /// A shard of a server. The shards share the registry, which has the subnets and the limit of clients.
    /// UDP payloads must be steered to shards by connection ID ([`mpvpn_quic::shard_of`]).
    pub fn shard(config: ServerConfig, registry: Registry, shard: Shard) -> Self {
        Self {
            endpoint: Endpoint::server(&config.setup.for_shard(shard)),
            routes: Routes::new(&config.routes, registry.server_addresses(), registry.networks()),
            config,
            shard,
            process_bytes: registry.process_bytes(),
            sites: registry.sites(),
            registry,
            peers: Peers::default(),
            sessions: Sessions::default(),
            joiner: GroCoalescer::new(),
            events: VecDeque::new(),
            changes: Changes::default(),
            closed: VecDeque::new(),
            refused: BTreeMap::new(),
            udp_in: PayloadInbox::default(),
            mtus: ClientMtus::default(),
            stalled_until: None,
            last_time: None,
            coalescing: CoalescingLimit::default(),
            turns: None,
        }
    }

    /// Whether both addresses belong to clients, or to networks behind them: such packets are written to the
    /// TUN and come back through it.
    pub fn are_clients(&self, src: IpAddr, dst: IpAddr) -> bool {
        let is_of_client = |ip| self.routes.is_client(ip) || self.sites.session_of(ip).is_some();
        is_of_client(src) && is_of_client(dst)
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
        let bytes = data.len();
        match self.endpoint.route(now, local.map(LocalAddress::from), remote, ecn, data) {
            (Handled::Connection(id), Some(packets)) => match self.peers.receive(id, bytes) {
                Some(peer) => peer.received.push_back((bytes, packets)),
                None => {
                    tracing::trace!(target: TURNS, %remote, bytes, "dropped: its user has its share of what may wait")
                }
            },
            (Handled::New(id), _) => self.insert(now, id),
            (Handled::Connection(_) | Handled::Nothing, _) => {}
        }
    }

    /// A new connection.
    fn insert(&mut self, now: Instant, id: ConnectionHandle) {
        self.peers.insert(id, Peer::new(now));
        self.peers.mark_received(id);
    }

    /// An iteration of the event loop begins. `is_busy`: sockets are ready, which come before handshakes that
    /// wait; `others_wait`: those of the TUN or of relays are, too. `clock` measures the turns of users.
    pub fn begin_iteration(&mut self, is_busy: bool, others_wait: bool, clock: fn() -> Instant) {
        self.endpoint.begin_iteration(is_busy);
        let time = if others_wait { RECEIVE_TIME_BESIDE } else { RECEIVE_TIME };
        self.turns = Some(TurnClock { clock, time, until: None });
    }

    /// Must be called after each batch of [`Self::handle_datagram`].
    pub fn handle_batch(&mut self, now: Instant) {
        self.handle_batch_and(now, |_| {});
    }

    /// As [`Self::handle_batch`]; `deliver` takes the packets of [`Self::poll_tun`] after each turn, so
    /// that its time counts for the user whose packets they are. In an event loop that calls
    /// [`Self::begin_iteration`], packets are left for the next iteration if those of this one took long.
    pub fn handle_batch_and(&mut self, now: Instant, deliver: impl FnMut(&mut Self)) {
        self.last_time = Some(now);
        while let Some(id) = self.endpoint.accept_waiting(now) {
            self.insert(now, id);
        }
        self.take_turns(now, deliver);
        while let Some(id) = self.endpoint.excess_stranger() {
            let why = "too many connections without a request";
            self.isolated(id, |server| server.close_peer(now, id, h3::code::EXCESSIVE_LOAD, why));
        }
    }

    /// Connections take the packets that they have received, as long as the time of this iteration lasts.
    fn take_turns(&mut self, now: Instant, mut deliver: impl FnMut(&mut Self)) {
        let Some(TurnClock { clock, time, until }) = &mut self.turns else {
            while let Some(id) = self.peers.next_received() {
                self.isolated(id, |server| server.take_turn(now, id, |_| false));
                self.peers.end_received_turn(id, Duration::ZERO);
            }
            return deliver(self);
        };
        let clock = *clock;
        let mut began = clock();
        let until = *until.get_or_insert(began + *time);
        while began < until
            && let Some(id) = self.peers.next_received()
        {
            let is_over = |taken| taken % TURN_CHECK == 0 && clock() - began >= TURN_TIME;
            self.isolated(id, |server| server.take_turn(now, id, is_over));
            deliver(self);
            let ended = clock();
            self.peers.end_received_turn(id, ended - began);
            began = ended;
        }
    }

    /// A connection takes packets that it has received, and acts on them. `is_over` says whether that is
    /// enough for this turn, from the number of those that it has taken.
    fn take_turn(&mut self, now: Instant, id: ConnectionHandle, is_over: impl Fn(usize) -> bool) {
        for taken in 1..=MAX_TURN_PACKETS {
            let next = self.peers.get_mut(id).and_then(|peer| peer.received.pop_front());
            let Some((bytes, packets)) = next else { break };
            self.peers.take_received(id, bytes);
            if let Some(connection) = self.endpoint.get(id) {
                connection.take(packets);
            }
            if is_over(taken) {
                break;
            }
        }
        self.drive(now, id);
    }

    fn drive(&mut self, now: Instant, id: ConnectionHandle) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        let Some(connection) = self.endpoint.get(id) else { return self.forget(now, id) };
        if let Some(multipath) = peer.multipath() {
            multipath.note_path_arrivals(now, connection);
        }
        let happened = peer.poll_events(now, id, connection, &mut self.events);
        if let Some(result) = happened.handshake {
            self.endpoint.on_handshake_ended(result);
        }
        if let Some(reason) = happened.lost {
            return self.lost(now, id, &reason);
        }
        if let Some(reason) = happened.broken {
            return self.close_peer(now, id, h3::code::STREAM_CREATION_ERROR, &reason);
        }
        for stream in happened.stopped {
            match self.peers.get(id).is_some_and(|peer| peer.udp.has(stream)) {
                true => self.on_udp_stream_broken(id, stream, h3::code::REQUEST_CANCELLED),
                false => self.on_relay_broken(id, stream),
            }
        }
        self.receive(now, id);
        self.note_use(now, id);
        self.drive_http(now, id);
        self.reap_or_mark(now, id);
        let arrived = self.peers.received_bytes(id);
        if let (Some(peer), Some(connection)) = (self.peers.get(id), self.endpoint.get(id))
            && peer.owner.is_some()
        {
            connection.count_held(arrived, peer.held_bytes());
            connection.count_in_kernel(peer.relays.in_kernel());
            self.end_if_too_much_is_held(now, id);
        }
    }

    /// Records that a connection is in use, if it is.
    fn note_use(&mut self, now: Instant, id: ConnectionHandle) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        let share = peer.tunnel().and_then(|tunnel| tunnel.class.as_ref()).map(|class| class.share);
        let has_priority = share.is_some_and(|share| share.first);
        match peer.multipath() {
            Some(multipath) if multipath.traffic.last_data_at != Some(now) => {}
            Some(multipath) => self.coalescing.note_use(now, multipath.shortest_rtt, has_priority),
            // A handshake.
            None => self.coalescing.note_use(now, None, false),
        }
    }

    /// How long packets that arrive from now on may wait, so that those that arrive close together are taken
    /// together.
    pub fn max_coalescing_delay(&mut self, now: Instant) -> Duration {
        match self.peers.is_behind() {
            true => Duration::ZERO,
            false => self.coalescing.delay(now),
        }
    }

    /// Removes a connection that the endpoint has dropped, or queues it to send.
    fn reap_or_mark(&mut self, now: Instant, id: ConnectionHandle) {
        if !self.endpoint.process_endpoint_events(id) {
            return self.forget(now, id);
        }
        self.peers.mark_sends(id);
    }

    fn lost(&mut self, now: Instant, id: ConnectionHandle, reason: &LostReason) {
        tracing::debug!(%reason, "connection lost");
        self.end_all(now, id, &reason.to_string());
        self.reap_or_mark(now, id);
    }

    fn close_peer(&mut self, now: Instant, id: ConnectionHandle, code: u64, reason: &str) {
        if let Some(connection) = self.endpoint.get(id) {
            tracing::debug!(code, reason, "closing a connection");
            connection.close(now, code, reason);
        }
        if self.peers.get_mut(id).is_some_and(|peer| std::mem::take(&mut peer.handshaking)) {
            self.endpoint.on_handshake_ended(HandshakeResult::Failed);
        }
        self.end_all(now, id, reason);
        self.reap_or_mark(now, id);
    }

    /// Ends everything that these users have by credentials which count no more; each connection is told the
    /// reason. The caller may be late: a user may have access again meanwhile, by other credentials.
    pub fn end_users(&mut self, now: Instant, users: &BTreeMap<String, String>) {
        self.end_connections(now, |auth, owner| {
            let reason = users.get(&owner.name)?;
            (!auth.has_access(owner)).then_some(reason.as_str())
        });
    }

    /// Ends all connections that these certificates authenticated; each is told the reason.
    pub fn end_certificates(&mut self, now: Instant, ended: &BTreeSet<CertificateId>, reason: &str) {
        let has_ended = |owner: &AuthenticatedUser| owner.credential.is_some_and(|own| ended.contains(&own));
        self.end_connections(now, |_, owner| has_ended(owner).then_some(reason));
    }

    /// Ends the connections for whose owners there is a reason.
    fn end_connections<'a>(
        &mut self,
        now: Instant,
        reason_for: impl Fn(&dyn Authenticate, &AuthenticatedUser) -> Option<&'a str>,
    ) {
        for id in self.peers.ids() {
            let owner = self.peers.get(id).and_then(|peer| peer.owner.as_ref());
            if let Some(reason) = owner.and_then(|owner| reason_for(&*self.config.auth, owner)) {
                self.isolated(id, |server| server.close_peer(now, id, h3::code::NO_ERROR, reason));
            }
        }
    }

    /// Closes a connection that a later one with the same number has replaced.
    fn replace(&mut self, now: Instant, slot: ConnectionSlot) {
        if slot.shard == self.shard.index() {
            self.close_replaced(now, slot);
        } else {
            self.events.push_back(ServerEvent::Replaced(slot));
        }
    }

    /// Closes a replaced connection of this shard, if it still exists.
    pub fn close_replaced(&mut self, now: Instant, slot: ConnectionSlot) {
        let tunnel = self.peers.get_mut(slot.connection).and_then(Peer::tunnel_mut);
        if let Some(tunnel) = tunnel.filter(|tunnel| tunnel.serial == slot.serial) {
            tunnel.replaced = true;
            self.close_peer(now, slot.connection, h3::code::NO_ERROR, "the client came back");
        }
    }

    /// Ends the tunnel, relays and UDP flows of a connection.
    fn end_all(&mut self, now: Instant, id: ConnectionHandle, reason: &str) {
        self.end_tunnel(now, id, reason);
        self.end_flows(id);
    }

    /// Ends the relays and UDP flows of a connection.
    fn end_flows(&mut self, id: ConnectionHandle) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        let relays = std::mem::take(&mut peer.relays).ids().into_iter();
        self.events.extend(relays.map(|stream| ServerEvent::RelayGone(RelayId::new(id, stream))));
        let flows = std::mem::take(&mut peer.udp).ids().into_iter();
        self.events.extend(flows.map(|stream| ServerEvent::UdpGone(UdpId::new(id, stream))));
    }

    /// Ends the tunnel of a connection; the session ends with its last tunnel.
    fn end_tunnel(&mut self, now: Instant, id: ConnectionHandle, reason: &str) {
        self.take_path_events(id);
        let ended =
            self.peers.get_mut(id).and_then(|peer| peer.authenticated.take_if(|own| own.tunnel.is_some()));
        if let Some(authenticated) = ended {
            self.remove_tunnel(now, id, &authenticated, reason);
            self.closed.push_back(authenticated.closed_report());
        }
    }

    /// Removes a tunnel that has ended from its session.
    fn remove_tunnel(
        &mut self,
        now: Instant,
        id: ConnectionHandle,
        authenticated: &AuthenticatedPeer,
        reason: &str,
    ) {
        let Some(tunnel) = &authenticated.tunnel else { return };
        // A replaced connection is reported as resumed, and one without addresses was not reported as
        // connected.
        if tunnel.addresses.is_some() && !tunnel.replaced {
            let client = authenticated.tag();
            self.changes.push(ServerChange::Left { client, reason: reason.to_owned() });
        }
        self.sessions.remove(tunnel.secret, tunnel.number, id);
        self.update_downlink(&tunnel.secret, tunnel.addresses.unwrap_or_default());
        self.count_mtu(tunnel.counted_mtu, None);
        self.registry.remove(now, &tunnel.secret, tunnel.number, tunnel.serial);
    }

    /// Sends packets for the addresses of a session down the connections of this shard that are ready for it.
    fn update_downlink(&mut self, secret: &SessionSecret, addresses: AddressSet) {
        let is_ready =
            |id| self.peers.get(id).and_then(Peer::tunnel).is_some_and(|tunnel| tunnel.downlink_ready);
        self.sessions.update_downlink(secret, addresses, is_ready);
    }

    fn forget(&mut self, now: Instant, id: ConnectionHandle) {
        self.end_all(now, id, "its connection has ended");
        let Some(peer) = self.peers.remove(id) else { return };
        self.closed.extend(peer.authenticated.map(|authenticated| authenticated.closed_report()));
        if peer.handshaking {
            self.endpoint.on_handshake_ended(HandshakeResult::Failed);
        }
    }

    /// The next event that needs an action of the edge, after which [`Self::poll_transmit`] must be called
    /// again.
    pub fn poll_event(&mut self) -> Option<ServerEvent> {
        loop {
            match self.events.pop_front()? {
                // Its session may have ended, and its addresses may be another user's.
                ServerEvent::Filter(request) if !self.awaits(&request) => {}
                event => return Some(event),
            }
        }
    }

    /// The next change that needs no action.
    pub fn poll_change(&mut self) -> Option<ServerChange> {
        self.changes.pop()
    }

    fn take_path_events(&mut self, id: ConnectionHandle) {
        let authenticated = self.peers.get_mut(id).and_then(|peer| peer.authenticated.as_mut());
        let Some(authenticated) = authenticated else { return };
        let events = authenticated.multipath.events.take();
        if events.is_empty() {
            return;
        }
        let client = authenticated.tag();
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
        while let Some(id) = self.peers.sender() {
            match self.isolated(id, |server| server.poll_sender(now, id, buf)) {
                Some(None) => {}
                Some(transmit) => return transmit,
                None => buf.clear(),
            }
        }
        None
    }

    /// The next UDP payload of the connection whose turn it is; its turn ends if it has none.
    fn poll_sender(&mut self, now: Instant, id: ConnectionHandle, buf: &mut Vec<u8>) -> Option<Transmit> {
        let mut has_events = false;
        if let (Some(peer), Some(connection)) = (self.peers.get_mut(id), self.endpoint.get(id)) {
            let granted = peer.relays.len() + peer.udp.len();
            let transmit = match peer.multipath() {
                Some(multipath) => {
                    connection.set_granted_requests(granted);
                    multipath.poll_transmit(now, connection, buf)
                }
                None => connection.poll_transmit(now, buf),
            };
            if let Some(transmit) = transmit {
                let dscp = peer.dscp().unwrap_or(transmit.dscp);
                self.peers.pass_turn();
                return Some(Transmit { dscp, ..transmit });
            }
            // Streams become writable as their bytes leave.
            has_events = connection.has_events();
        }
        self.peers.end_turn();
        if has_events {
            self.drive(now, id);
            return None;
        }
        self.take_path_events(id);
        if self.endpoint.process_endpoint_events(id) {
            self.arm(now, id);
        } else {
            self.forget(now, id);
        }
        None
    }

    /// Sets the timer of a connection, and counts its MTU.
    fn arm(&mut self, now: Instant, id: ConnectionHandle) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        let Some(connection) = self.endpoint.get(id) else { return };
        let own = peer.poll_timeout(now, connection);
        let mtu = peer.multipath().map(|multipath| multipath.mtu.announced());
        let counted = peer.tunnel_mut().map(|tunnel| std::mem::replace(&mut tunnel.counted_mtu, mtu));
        self.peers.arm(id, own.into_iter().chain(connection.poll_timeout()).min());
        if connection.has_events() {
            // The calls above have events only after a panic.
            self.peers.mark_sends(id);
        }
        if let Some(counted) = counted {
            self.count_mtu(counted, mtu);
        }
    }

    /// When to call [`Self::handle_timeout`].
    pub fn poll_timeout(&self) -> Option<Instant> {
        let behind = self.last_time.filter(|_| self.peers.is_behind());
        self.peers.poll_timeout().into_iter().chain(self.endpoint.poll_timeout()).chain(behind).min()
    }

    /// Handles timers that have expired, of at most 16 connections: those of the others are still due then.
    pub fn handle_timeout(&mut self, now: Instant) {
        // Handshakes that waited may begin now.
        self.handle_batch(now);
        for _ in 0..MAX_TIMERS {
            let Some(id) = self.peers.next_due(now) else { return };
            self.isolated(id, |server| server.handle_timers(now, id));
        }
    }

    /// Handles the timers of a connection that have expired.
    fn handle_timers(&mut self, now: Instant, id: ConnectionHandle) {
        let (Some(peer), Some(connection)) = (self.peers.get_mut(id), self.endpoint.get(id)) else {
            return;
        };
        connection.handle_timeout(now);
        let limits = &mut peer.limits;
        if let Some(multipath) = peer.authenticated.as_mut().map(|authenticated| &mut authenticated.multipath)
        {
            if let Some(at) = self.stalled_until {
                multipath.on_local_stall(at);
            }
            multipath.handle_timeout(now, connection);
            let (mtu, joiner) = (multipath.mtu.announced(), &mut self.joiner);
            multipath.release_timed_out(now, |packet| {
                pass_on(now, limits.as_deref_mut(), joiner, clamp_received(packet, mtu));
            });
        }
        let has_limits = limits.is_some();
        if peer.tunnel().is_some_and(|tunnel| tunnel.has_missed_address_request(now)) {
            self.address(now, id, &[]);
        } else if peer.is_idle(now) && !connection.is_closed() {
            self.close_peer(now, id, h3::code::NO_ERROR, "no request came");
        }
        if has_limits {
            self.release_limited(now, id);
        }
        self.drive(now, id);
    }

    /// Counts the MTU of a client instead of its previous one.
    fn count_mtu(&mut self, before: Option<usize>, after: Option<usize>) {
        if let Some(mtu) = self.mtus.count(before, after) {
            self.events.extend(self.registry.set_mtu(self.shard.index(), mtu).map(ServerEvent::Mtu));
        }
    }

    /// This process got no processor for a while: silence until `now` says nothing about paths.
    pub fn on_local_stall(&mut self, now: Instant) {
        self.stalled_until = Some(now);
    }

    /// Ends all sessions; [`Self::poll_transmit`] still returns the CONNECTION_CLOSE frames.
    pub fn close(&mut self, now: Instant, reason: &str) {
        for id in self.peers.ids() {
            self.isolated(id, |server| server.close_peer(now, id, h3::code::NO_ERROR, reason));
        }
    }

    /// Number of sessions of all shards.
    pub fn sessions(&self) -> usize {
        self.registry.sessions()
    }
}
