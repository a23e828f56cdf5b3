//! The server of a tunnel, or one shard of it.

mod addresses;
mod bare;
mod capsules;
mod config;
mod dialogue;
mod groups;
mod mtus;
mod packets;
mod peer;
mod peers;
mod relays;
mod report;
mod routes;
mod sessions;
mod udp;

use std::{
    collections::VecDeque,
    net::{IpAddr, SocketAddr},
};

use bytes::BytesMut;
use mpvpn_masque::{
    connect_ip, connect_udp, h3,
    template::{Template, TemplateError},
};
use mpvpn_packet::GroCoalescer;
use mpvpn_quic::{ConnectionHandle, Endpoint, Handled, LocalAddress, LostReason, Shard, Transmit};
use mpvpn_types::Instant;

use crate::{
    AddressSet, Addresses, ConnectionSlot, Registry, RelayId, SessionSecret, UdpId,
    client::clamp_received,
    events::{Changes, ServerChange},
    udp::PayloadInbox,
};

pub use config::{Authenticate, ServerConfig, ServerEvent, SiteResponse, TunOutcome};
use mtus::Mtus;
use peer::Peer;
use peers::Peers;
pub use report::{ClosedConnection, SessionReport};
use routes::Routes;
use sessions::Sessions;

/// A server: gives addresses to clients and moves packets between them and a TUN.
pub struct Server {
    config: ServerConfig,
    template: Template,
    udp_template: Template,
    endpoint: Endpoint,
    shard: Shard,
    registry: Registry,
    routes: Routes,
    peers: Peers<Peer>,
    sessions: Sessions,
    joiner: GroCoalescer,
    events: VecDeque<ServerEvent>,
    changes: Changes<ServerChange>,
    departed: VecDeque<ClosedConnection>,
    /// Payloads from clients.
    udp_in: PayloadInbox,
    mtus: Mtus,
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
            routes: Routes::new(&config.routes, registry.own(), registry.networks()),
            config,
            shard,
            registry,
            peers: Peers::default(),
            sessions: Sessions::default(),
            joiner: GroCoalescer::new(),
            events: VecDeque::new(),
            changes: Changes::default(),
            departed: VecDeque::new(),
            udp_in: PayloadInbox::default(),
            mtus: Mtus::default(),
            forgiven: None,
        })
    }

    /// The server's own addresses in the tunnel.
    pub fn own_addresses(&self) -> Addresses {
        self.routes.own()
    }

    /// Whether both addresses are of clients: such packets leave the TUN and come back through it.
    pub fn are_clients(&self, src: IpAddr, dst: IpAddr) -> bool {
        self.routes.is_client(src) && self.routes.is_client(dst)
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
        match self.endpoint.handle(now, local.map(LocalAddress::from), remote, ecn, data) {
            Handled::Connection(id) => self.peers.mark_received(id),
            Handled::New(id) => {
                self.peers.insert(id, Peer::new(now));
                self.peers.mark_received(id);
            }
            Handled::Nothing => {}
        }
    }

    /// To be called after every batch of [`Self::handle_datagram`].
    pub fn handle_batch(&mut self, now: Instant) {
        while let Some(id) = self.peers.next_received() {
            self.drive(now, id);
        }
    }

    fn drive(&mut self, now: Instant, id: ConnectionHandle) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        let Some(connection) = self.endpoint.get(id) else { return self.forget(now, id) };
        if let Some(multipath) = peer.multipath() {
            multipath.note_path_arrivals(now, connection);
        }
        let happened = peer.poll_events(now, id, connection, &mut self.events);
        if happened.handshake_over {
            self.endpoint.on_handshake_ended();
        }
        if let Some(reason) = happened.lost {
            return self.lost(now, id, &reason);
        }
        if let Some(reason) = happened.broken {
            return self.close_peer(now, id, h3::code::STREAM_CREATION_ERROR, &reason);
        }
        for stream in happened.stopped {
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
    fn after(&mut self, now: Instant, id: ConnectionHandle) {
        if !self.endpoint.process_endpoint_events(id) {
            return self.forget(now, id);
        }
        self.peers.mark_sends(id);
    }

    fn lost(&mut self, now: Instant, id: ConnectionHandle, reason: &LostReason) {
        tracing::debug!(%reason, "connection lost");
        self.end_all(now, id, &reason.to_string());
        self.after(now, id);
    }

    fn close_peer(&mut self, now: Instant, id: ConnectionHandle, code: u64, reason: &str) {
        if let Some(connection) = self.endpoint.get(id) {
            tracing::debug!(code, reason, "closing a connection");
            connection.close(now, code, reason);
        }
        if self.peers.get_mut(id).is_some_and(|peer| std::mem::take(&mut peer.handshaking)) {
            self.endpoint.on_handshake_ended();
        }
        self.end_all(now, id, reason);
        self.after(now, id);
    }

    /// A later connection of the same member has taken this one's place.
    fn replace(&mut self, now: Instant, seat: ConnectionSlot) {
        if seat.shard == self.shard.index() {
            self.close_replaced(now, seat);
        } else {
            self.events.push_back(ServerEvent::Replaced(seat));
        }
    }

    /// Closes the connection of a tunnel of this shard, if it is still there.
    pub fn close_replaced(&mut self, now: Instant, seat: ConnectionSlot) {
        let tunnel = self.peers.get_mut(seat.connection).and_then(Peer::tunnel_mut);
        if let Some(tunnel) = tunnel.filter(|tunnel| tunnel.serial == seat.serial) {
            tunnel.replaced = true;
            self.close_peer(now, seat.connection, h3::code::NO_ERROR, "the client came back");
        }
    }

    /// Ends all that a connection was granted.
    fn end_all(&mut self, now: Instant, id: ConnectionHandle, reason: &str) {
        self.end_tunnel(now, id, reason);
        let Some(peer) = self.peers.get_mut(id) else { return };
        let relays = std::mem::take(&mut peer.relays).ids().into_iter();
        self.events.extend(relays.map(|stream| ServerEvent::RelayGone(RelayId::new(id, stream))));
        let flows = std::mem::take(&mut peer.udp).ids().into_iter();
        self.events.extend(flows.map(|stream| ServerEvent::UdpGone(UdpId::new(id, stream))));
    }

    /// Takes a tunnel out of use, and with the session's last one its addresses.
    fn end_tunnel(&mut self, now: Instant, id: ConnectionHandle, reason: &str) {
        self.take_path_events(id);
        let Some(peer) = self.peers.get_mut(id) else { return };
        let Some(granted) = peer.granted.take_if(|granted| granted.tunnel.is_some()) else { return };
        self.departed.push_back(granted.departed());
        let client = granted.tag();
        let Some(tunnel) = granted.tunnel else { return };
        // A replaced connection is reported as resumed, and one without addresses was not reported as connected.
        if tunnel.addresses.is_some() && !tunnel.replaced {
            self.changes.push(ServerChange::Left { client, reason: reason.to_owned() });
        }
        self.sessions.leave(tunnel.secret, tunnel.member, id);
        self.serve(&tunnel.secret, tunnel.addresses.unwrap_or_default());
        self.count_mtu(tunnel.counted_mtu, None);
        self.registry.leave(now, &tunnel.secret, tunnel.member, tunnel.serial);
    }

    /// Lets what goes to the addresses of a session go down the connections of its members here.
    fn serve(&mut self, secret: &SessionSecret, addresses: AddressSet) {
        let serves = |id| self.peers.get(id).and_then(Peer::tunnel).is_some_and(|tunnel| tunnel.serves);
        self.sessions.serve(secret, addresses, serves);
    }

    fn forget(&mut self, now: Instant, id: ConnectionHandle) {
        self.end_all(now, id, "its connection has ended");
        let Some(peer) = self.peers.remove(id) else { return };
        self.departed.extend(peer.granted.map(|granted| granted.departed()));
        if peer.handshaking {
            self.endpoint.on_handshake_ended();
        }
    }

    /// The next thing that the edge must act on. What it does then may be worth another [`Self::poll_transmit`].
    pub fn poll_event(&mut self) -> Option<ServerEvent> {
        self.events.pop_front()
    }

    /// The next change that needs no action.
    pub fn poll_change(&mut self) -> Option<ServerChange> {
        self.changes.pop()
    }

    fn take_path_events(&mut self, id: ConnectionHandle) {
        let granted = self.peers.get_mut(id).and_then(|peer| peer.granted.as_mut());
        let Some(granted) = granted else { return };
        let events = granted.multipath.take_events();
        if events.is_empty() {
            return;
        }
        let client = granted.tag();
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
            let connection = self.endpoint.get(id);
            let mut has_events = false;
            if let (Some(peer), Some(connection)) = (self.peers.get_mut(id), connection) {
                let transmit = match peer.multipath() {
                    Some(multipath) => multipath.poll_transmit(now, connection, buf),
                    None => connection.poll_transmit(now, buf),
                };
                if let Some(transmit) = transmit {
                    let dscp = peer.dscp().unwrap_or(transmit.dscp);
                    self.peers.pass_turn();
                    return Some(Transmit { dscp, ..transmit });
                }
                // Room on a stream shows as its bytes leave.
                has_events = connection.has_events();
            }
            self.peers.end_turn();
            if has_events {
                self.drive(now, id);
                continue;
            }
            self.take_path_events(id);
            if self.endpoint.process_endpoint_events(id) {
                self.arm(now, id);
            } else {
                self.forget(now, id);
            }
        }
        None
    }

    /// Notes when the connection wants to be looked at again.
    fn arm(&mut self, now: Instant, id: ConnectionHandle) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        let Some(connection) = self.endpoint.get(id) else { return };
        let own = peer.poll_timeout(now, connection);
        let mtu = peer.multipath().map(|multipath| multipath.announced_mtu());
        let counted = peer.tunnel_mut().map(|tunnel| std::mem::replace(&mut tunnel.counted_mtu, mtu));
        self.peers.arm(id, own.into_iter().chain(connection.poll_timeout()).min());
        if let Some(counted) = counted {
            self.count_mtu(counted, mtu);
        }
    }

    /// When [`Self::handle_timeout`] wants to be called.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.peers.poll_timeout()
    }

    /// Lets time pass.
    pub fn handle_timeout(&mut self, now: Instant) {
        while let Some(id) = self.peers.next_due(now) {
            let (Some(peer), Some(connection)) = (self.peers.get_mut(id), self.endpoint.get(id)) else {
                continue;
            };
            connection.handle_timeout(now);
            if let Some(multipath) = peer.multipath() {
                if let Some(at) = self.forgiven {
                    multipath.on_local_stall(at);
                }
                multipath.handle_timeout(now, connection);
                let (mtu, joiner) = (multipath.announced_mtu(), &mut self.joiner);
                multipath.release_timed_out(now, |packet| joiner.push(clamp_received(packet, mtu)));
            }
            if peer.tunnel().is_some_and(|tunnel| tunnel.is_unasked(now)) {
                self.address(now, id, &[]);
            } else if peer.is_idle(now) && !connection.is_closed() {
                self.close_peer(now, id, h3::code::NO_ERROR, "no request came");
            }
            self.drive(now, id);
        }
    }

    /// Counts what a client can take, instead of what it could before.
    fn count_mtu(&mut self, before: Option<usize>, after: Option<usize>) {
        if let Some(mtu) = self.mtus.count(before, after) {
            self.events.extend(self.registry.set_mtu(self.shard.index(), mtu).map(ServerEvent::Mtu));
        }
    }

    /// This end did not run for a while: silence until now proves nothing.
    pub fn on_local_stall(&mut self, now: Instant) {
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
