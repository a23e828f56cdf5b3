//! The connections of a client in one thread: one QUIC connection for each traffic class.
//!
//! In: the inputs of a [`Client`], with link IDs that contain the class. Out: the outputs of a client, with
//! the packets of all classes together. Always holds: the connection of the default class comes first; it
//! makes the session or joins that of another thread, and carries the traffic of classes whose own
//! connections do not work and that are not pinned. A flow that the split-TCP proxy of a connection has
//! accepted stays with that connection. Packets from the TUN device of a class belong to that class,
//! whatever the rules say. An unused class has no connection ([`connection`]) unless it is pinned, and a
//! session in which nothing moves has only that of the default class. A packet with priority that another
//! connection carries leaves before those that wait there.

mod connection;

use std::net::SocketAddr;

use bytes::{Bytes, BytesMut};
use mpvpn_class::{DnsSnooper, FlowClasses, PacketFields, Rules};
use mpvpn_packet::{FlowKey, TunPacket, VnetHdr, ip, protocol};
use mpvpn_path::TransportHealth;
use mpvpn_quic::Transmit;
use mpvpn_types::{ClassId, Duration, Instant, LinkId};

use crate::{
    Client, ClientChange, ClientConfig, ClientEvent, ClientReport, ClientState, ConnectionNumber, EchoWatch,
    FailureReason, FlowReport, LinkPolicy, PathChange, PathEvent, UdpId, coalescing::CoalescingLimit,
    shapers::Shapers,
};
use connection::{ClassConnection, PacketOwner};

/// The port of DNS servers (RFC 1035 §4.2).
const DNS: u16 = 53;

/// The setup of a traffic class.
#[derive(Clone)]
pub struct ClassSetup {
    /// The number of the class.
    pub id: ClassId,
    /// Whether the class is served before all other classes.
    pub priority: bool,
    /// Whether the class has a connection of its own from its first packet on; else while a link is full or
    /// loses packets.
    pub connects_at_once: bool,
    /// The configuration of the connection; its `class` must be set if there are several classes.
    pub config: ClientConfig,
}

/// The transports over which a link is heard.
#[derive(Clone, Copy, Debug)]
pub struct Heard {
    /// Over UDP, by the connection for which it is worst.
    pub udp: TransportHealth,
    /// Whether packets arrive over UDP for any connection.
    pub udp_heard_by_any: bool,
    /// Inside TCP, likewise the worst.
    pub tcp: TransportHealth,
}

/// The class of a packet, and the class whose connection carries it: indices into [`ClassConnections::all`].
#[derive(Clone, Copy, Debug)]
struct Choice {
    class: usize,
    carrier: usize,
}

fn is_pinned(config: &ClientConfig) -> bool {
    config.class.as_ref().is_some_and(|class| class.pinned)
}

/// The connections of a client in one thread.
pub struct ClassConnections {
    /// The connections of all classes, the default class first.
    all: Vec<ClassConnection>,
    /// Connections of removed classes, until their last packets are sent.
    closing: Vec<ClassConnection>,
    /// Indices into `all` in the order in which the connections send: classes with priority first.
    send_order: Vec<usize>,
    /// The index into `send_order` of the next connection to send.
    next_to_send: usize,
    rules: Rules,
    names: DnsSnooper,
    flows: FlowClasses,
    /// The MTU that was last announced (bytes).
    mtu: Option<usize>,
    shapers: Shapers,
    shard: u8,
    /// The secret with which connections join the session, if the server supports classes.
    session_secret: Option<Vec<u8>>,
    echo_watch: Option<EchoWatch>,
    coalescing: CoalescingLimit,
    /// Whether connections may ask for others, too.
    is_sharing: bool,
}

impl ClassConnections {
    /// Creates the connections of these classes in the thread `shard`; the default class must be the first.
    /// Thread 0 makes the session and lets other threads join it if `several`.
    pub fn new(now: Instant, classes: Vec<ClassSetup>, rules: Rules, shard: u8, several: bool) -> Self {
        let several = several || classes.len() > 1;
        let mut connections = Self {
            all: Vec::with_capacity(classes.len()),
            closing: Vec::new(),
            send_order: Vec::new(),
            next_to_send: 0,
            names: DnsSnooper::new(rules.patterns()),
            rules,
            flows: FlowClasses::default(),
            mtu: None,
            shapers: Shapers::default(),
            shard,
            session_secret: None,
            echo_watch: None,
            coalescing: CoalescingLimit::default(),
            is_sharing: false,
        };
        for class in classes {
            let connection = connections.connect(now, class, several);
            connections.all.push(connection);
        }
        connections.update_send_order();
        connections
    }

    fn connect(
        &self,
        now: Instant,
        ClassSetup { id, priority, connects_at_once, config }: ClassSetup,
        several: bool,
    ) -> ClassConnection {
        if let Some(class) = &config.class {
            self.shapers.set_share(now, id, class.share);
        }
        let is_pinned = is_pinned(&config);
        let member = ConnectionNumber::of(self.shard, id).unwrap_or_default();
        let config = ClientConfig { setup: config.setup.for_endpoint(member.number()), ..config };
        let mut client = match member == ConnectionNumber::INITIAL {
            true => Client::new(now, config),
            false => Client::joining(now, config, member),
        };
        if member == ConnectionNumber::INITIAL && several {
            client.allow_joins();
        }
        client.share_links(self.shapers.clone());
        if let Some(watch) = &self.echo_watch {
            client.watch_echoes(watch.of_class(id));
        }
        ClassConnection::new(now, id, priority, connects_at_once, is_pinned, client)
    }

    /// Records the links of ICMP echoes in `watch`.
    pub fn watch_echoes(&mut self, watch: EchoWatch) {
        for connection in &mut self.all {
            let watch = watch.of_class(connection.id);
            connection.client_mut().watch_echoes(watch);
        }
        self.echo_watch = Some(watch);
    }

    fn update_send_order(&mut self) {
        self.send_order = (0..self.all.len()).collect();
        self.send_order.sort_by_key(|at| !self.all[*at].priority);
        self.next_to_send = 0;
    }

    /// Sets the rules that classify packets, with immediate effect on all flows.
    pub fn set_rules(&mut self, rules: Rules) {
        self.names.set_patterns(rules.patterns());
        self.rules = rules;
        self.flows.clear();
    }

    /// Adds a class, which has no links yet, or replaces the class of the same number: its connection, if it
    /// has one, is closed and made again over the same links.
    pub fn set_class(&mut self, now: Instant, class: ClassSetup) {
        match self.all.iter().position(|connection| connection.id == class.id) {
            Some(at) => {
                if let Some(profile) = &class.config.class {
                    self.shapers.set_share(now, class.id, profile.share);
                }
                let connection = &mut self.all[at];
                connection.priority = class.priority;
                connection.connects_at_once = class.connects_at_once;
                connection.set_pinned(now, is_pinned(&class.config));
                connection.client_mut().reconfigure(now, class.config);
            }
            None => {
                let mut connection = self.connect(now, class, true);
                if let Some(secret) = &self.session_secret {
                    connection.client_mut().join(now, secret.clone());
                }
                self.all.push(connection);
            }
        }
        self.update_send_order();
    }

    /// Uses another server: all connections are closed, and made again with these setups for another session
    /// once their links lead there.
    pub fn use_server(&mut self, now: Instant, classes: Vec<ClassSetup>) {
        self.session_secret = None;
        for ClassSetup { id, config, .. } in classes {
            if let Some(connection) = self.all.iter_mut().find(|connection| connection.id == id) {
                connection.client_mut().use_server(now, config);
            }
        }
        self.flows.clear();
    }

    /// Removes a class and closes its connection; its traffic uses the default class. The default class is
    /// never removed.
    pub fn remove_class(&mut self, now: Instant, id: ClassId) {
        let Some(at) = self.all.iter().position(|connection| connection.id == id && id != ClassId::DEFAULT)
        else {
            return;
        };
        let mut connection = self.all.remove(at);
        for (hdr, mut packet) in connection.take_waiting() {
            self.default_client_mut().handle_tun(now, hdr, &mut packet);
        }
        connection.client_mut().close(now, "there is no such class any more");
        self.closing.push(connection);
        self.flows.clear();
        self.update_send_order();
    }

    /// Returns the client of the default class.
    pub fn default_client_mut(&mut self) -> &mut Client {
        self.all[0].client_mut()
    }

    /// Returns the client of the default class.
    pub fn default_client(&self) -> &Client {
        &self.all[0].client
    }

    /// Whether packets of a class reach the server: on its own connection if it is pinned, else on that of
    /// the default class. An idle connection does not notice that its links are silent; one over the same
    /// links does, where data moves.
    pub fn reaches_server(&self, class: ClassId) -> bool {
        let own = self.all.iter().find(|connection| connection.id == class && connection.is_pinned);
        let own = &own.unwrap_or(&self.all[0]).client;
        own.reaches_server() && !self.all.iter().any(|other| other.client.found_silence_after(own))
    }

    /// See [`Client::poll_udp`]; flows belong to the default class.
    pub fn poll_udp(&mut self) -> Option<(UdpId, Bytes)> {
        self.all[0].client.poll_udp()
    }

    fn connection_of(&mut self, link: LinkId) -> Option<(&mut Client, LinkId)> {
        let connection = self.all.iter_mut().find(|connection| connection.id == link.class())?;
        Some((connection.client_mut(), link.with_class(ClassId::DEFAULT)))
    }

    /// See [`Client::link_up`].
    pub fn link_up(&mut self, now: Instant, link: LinkId, remote: SocketAddr) {
        if let Some((client, link)) = self.connection_of(link) {
            client.link_up(now, link, remote);
        }
    }

    /// See [`Client::link_down`].
    pub fn link_down(&mut self, now: Instant, link: LinkId) {
        if let Some((client, link)) = self.connection_of(link) {
            client.link_down(now, link);
        }
    }

    /// See [`Client::set_link`].
    pub fn set_link(&mut self, now: Instant, link: LinkId, policy: LinkPolicy) {
        if let Some((client, link)) = self.connection_of(link) {
            client.set_link(now, link, policy);
        }
    }

    /// Returns whether packets of the server arrive over the link `uplink`: over UDP, and inside TCP. If the
    /// path of any class is dead the result is dead, as a class that sends nothing there would not
    /// notice.
    pub fn heard(&self, uplink: LinkId) -> Heard {
        let of_all = |of: &dyn Fn(&Client) -> TransportHealth| -> Vec<TransportHealth> {
            self.all.iter().map(|connection| of(&connection.client)).collect()
        };
        let all = |heard: Vec<TransportHealth>| {
            let dead = heard.contains(&TransportHealth::Dead).then_some(TransportHealth::Dead);
            dead.or(heard.into_iter().max()).unwrap_or_default()
        };
        let udp = |client: &Client| {
            let pipes = (0..LinkId::TCP_PATH_INDEX).map(|pipe| client.heard_on(uplink.with_path_index(pipe)));
            pipes.max().unwrap_or_default()
        };
        let hears = |client: &Client| {
            (0..LinkId::TCP_PATH_INDEX).any(|pipe| client.hears_on(uplink.with_path_index(pipe)))
        };
        let (udp, tcp_path) = (of_all(&udp), uplink.with_path_index(LinkId::TCP_PATH_INDEX));
        Heard {
            udp_heard_by_any: self.all.iter().any(|connection| hears(&connection.client)),
            udp: all(udp),
            tcp: all(of_all(&|client| client.heard_on(tcp_path))),
        }
    }

    /// See [`Client::on_local_stall`].
    pub fn on_local_stall(&mut self, now: Instant) {
        self.all.iter_mut().for_each(|connection| connection.client_mut().on_local_stall(now));
    }

    /// See [`Client::handle_datagram`].
    pub fn handle_datagram(
        &mut self,
        now: Instant,
        link: LinkId,
        remote: SocketAddr,
        ecn: u8,
        data: BytesMut,
    ) {
        if let Some(connection) = self.all.iter_mut().find(|connection| connection.id == link.class()) {
            let link = link.with_class(ClassId::DEFAULT);
            connection.packet_client().handle_datagram(now, link, remote, ecn, data);
        }
    }

    /// See [`Client::handle_batch`]; for the connection of one class.
    pub fn handle_batch(&mut self, now: Instant, class: ClassId) {
        if let Some(connection) = self.all.iter_mut().find(|connection| connection.id == class) {
            connection.handle_batch(now);
        }
    }

    /// See [`Client::handle_batch`]; for all connections.
    pub fn handle_batches(&mut self, now: Instant) {
        self.all.iter_mut().for_each(|connection| connection.handle_batch(now));
    }

    /// Joins the session of another thread, see [`Client::join`].
    pub fn join(&mut self, now: Instant, secret: &[u8]) {
        self.session_secret = Some(secret.to_vec());
        for connection in &mut self.all {
            connection.client_mut().join(now, secret.to_vec());
        }
    }

    /// Takes a packet read from a TUN device, see [`Client::handle_tun`]. `class` is set if the device
    /// belongs to one class.
    pub fn handle_tun(&mut self, now: Instant, class: Option<ClassId>, hdr: VnetHdr, packet: &mut [u8]) {
        if self.all.len() == 1 {
            return self.all[0].packet_client().handle_tun(now, hdr, packet);
        }
        // It asks for a server that is not heard, for all classes.
        self.all[0].packet_client().on_wanted(now);
        if let Some(choice) = self.choose_connection(now, class, hdr, packet) {
            self.send(now, choice, hdr, packet);
        }
    }

    /// Hands a packet to its connection.
    fn send(&mut self, now: Instant, Choice { class, carrier }: Choice, hdr: VnetHdr, packet: &mut [u8]) {
        let is_urgent = class != carrier && self.all[class].priority;
        let client = self.all[carrier].packet_client();
        if is_urgent {
            client.handle_urgent_tun(now, hdr, packet);
            client.note_use(now, &mut self.coalescing, true);
        } else {
            client.handle_tun(now, hdr, packet);
        }
    }

    /// Returns the connection for a packet; `None` if the packet was kept until its class is connected.
    fn choose_connection(
        &mut self,
        now: Instant,
        class: Option<ClassId>,
        hdr: VnetHdr,
        packet: &[u8],
    ) -> Option<Choice> {
        let Ok(view) = ip::parse(packet) else { return Some(Choice { class: 0, carrier: 0 }) };
        let key = FlowKey::of(&view);
        if key.protocol == protocol::UDP && key.dst_port == DNS && self.names.has_patterns() {
            self.names.on_query(now, key.source(), key.destination(), udp_payload(&view));
        }
        let class = class.unwrap_or_else(|| self.class_by_rules(now, &key, &view));
        let own = self.all.iter().position(|connection| connection.id == class).unwrap_or(0);
        let is_crowded = self.all[own].is_asleep()
            && (self.all[0].client.is_crowded(now)
                || self.all[1..].iter().any(|other| other.moves_data(now)));
        let wanted = match self.all.split_at_mut(own) {
            ([default, ..], [connection, ..]) => {
                if self.session_secret.is_some() {
                    connection.note_use(now, &default.client, is_crowded, &view);
                }
                match connection.packet_owner(now, &default.client, &view) {
                    PacketOwner::OwnClass => Some(own),
                    PacketOwner::DefaultClass => Some(0),
                    PacketOwner::Undecided => None,
                }
            }
            _ => Some(0),
        };
        let is_settled = key.protocol != protocol::TCP || self.all[own].is_pinned;
        if is_settled || wanted.is_some_and(|at| self.all[at].client.terminates(&key)) {
            return wanted.map(|carrier| Choice { class: own, carrier });
        }
        // A TCP flow that another connection's split-TCP proxy has accepted stays there.
        let ends = self.all.iter().position(|connection| connection.client.terminates(&key));
        if ends.is_none() && wanted.is_none() {
            self.all[own].keep(hdr, packet, &key);
        }
        ends.or(wanted).map(|carrier| Choice { class: own, carrier })
    }

    /// Lets one connection ask for all on a link where nothing arrives: one in which data moves, or the
    /// first. While nothing of the server arrives at all, that of the default class asks, and after a minute
    /// others end, as acknowledgements that are awaited are questions, too.
    fn share_questions(&mut self, now: Instant) {
        let has_questions =
            self.all.len() > 1 && self.all.iter().any(|connection| connection.client.has_questions(now));
        if !has_questions && !self.is_sharing {
            return;
        }
        self.is_sharing = has_questions;
        let mut questions = Vec::new();
        for (at, connection) in self.all.iter().enumerate() {
            let own = connection.client.questions(now);
            questions.extend(own.map(|(link, is_dense)| (link, (!is_dense, at))));
        }
        for at in 0..self.all.len() {
            let (before, [connection, ..]) = self.all.split_at_mut(at) else { return };
            let is_shared =
                before.first().is_some_and(|default| connection.client.may_leave_to(now, &default.client));
            let asks_over = |link, is_dense: bool| {
                questions.iter().any(|(other, rank)| *other == link && *rank < (!is_dense, at))
            };
            if connection.client.share_questions(now, is_shared, asks_over) {
                connection.client_mut();
            }
            if is_shared {
                connection.end_if_long_silent(now);
            }
        }
    }

    /// Sends the packets that waited for a class which is connected now, or that have waited for too long.
    fn release_waiting(&mut self, now: Instant) {
        for at in 1..self.all.len() {
            let (owner, packets) = self.all[at].release(now);
            let carrier = if owner == PacketOwner::OwnClass { at } else { 0 };
            for (hdr, mut packet) in packets {
                self.send(now, Choice { class: at, carrier }, hdr, &mut packet);
            }
        }
    }

    fn class_by_rules(&mut self, now: Instant, key: &FlowKey, view: &ip::IpPacket<'_>) -> ClassId {
        // The DSCP is part of the key: SSH marks interactive and bulk traffic differently, and only after the
        // start.
        let flow = key.hash32() ^ u32::from(view.dscp()) << 24;
        if let Some(class) = self.flows.get(now, flow) {
            return class;
        }
        let ports = (view.has_transport_header() && mpvpn_class::has_ports(key.protocol))
            .then_some((key.src_port, key.dst_port));
        let facts =
            PacketFields { protocol: key.protocol, src: key.src, dst: key.dst, ports, dscp: view.dscp() };
        let class = self.rules.classify(now, &facts, &self.names).class;
        self.flows.insert(now, flow, class);
        class
    }

    /// Returns the next packet for a TUN device; the device is that of the class to which the destination
    /// address belongs.
    pub fn poll_tun(&mut self, now: Instant) -> Option<TunPacket> {
        let joined = self.all.iter_mut().find_map(|connection| connection.client.poll_tun(now))?;
        if self.all.len() > 1
            && self.names.has_patterns()
            && let Some(view) = joined.as_single_packet().and_then(|packet| ip::parse(packet).ok())
            && view.protocol() == protocol::UDP
            && view.ports().is_some_and(|(from, _)| from == DNS)
        {
            let key = FlowKey::of(&view);
            self.names.on_response(now, key.destination(), key.source(), udp_payload(&view));
        }
        Some(joined)
    }

    /// See [`Client::recycle`].
    pub fn recycle(&mut self, joined: TunPacket) {
        self.all[0].client.recycle(joined);
    }

    /// Returns the bytes that wait for a path.
    pub fn backlog(&self) -> usize {
        self.all.iter().map(|connection| connection.client.backlog()).sum()
    }

    /// Returns the next event that requires action: an event of the default class's client, or a change of
    /// the MTU, which is the minimum of all classes.
    pub fn poll_event(&mut self, now: Instant) -> Option<ClientEvent> {
        for connection in &mut self.all[1..] {
            // Clients of other classes open no app streams, and their failures are never fatal.
            while let Some(event) = connection.client.poll_event() {
                connection.take_event(now, &event);
            }
            connection.update_readiness(now, self.mtu);
        }
        self.share_questions(now);
        self.release_waiting(now);
        while let Some(event) = self.all[0].client.poll_event() {
            match &event {
                ClientEvent::Mtu(mtu) => {
                    self.all[0].mtu = Some(*mtu);
                    continue;
                }
                ClientEvent::JoinsAllowed { secret, other_classes: true } => {
                    self.session_secret = Some(secret.clone());
                    for connection in &mut self.all[1..] {
                        connection.client_mut().join(now, secret.clone());
                    }
                }
                _ => {}
            }
            return Some(event);
        }
        // Any connection may have to carry any packet, so the smallest MTU counts.
        let mtu = self.all.iter().filter_map(|connection| connection.mtu).min();
        if mtu != self.mtu {
            self.mtu = mtu;
            return mtu.map(ClientEvent::Mtu);
        }
        None
    }

    /// Returns the next event that requires no action. Its link ID contains the class.
    pub fn poll_change(&mut self, now: Instant) -> Option<ClientChange> {
        let change = self.all.iter_mut().find_map(ClassConnection::poll_change)?;
        if let ClientChange::Path(PathEvent { link, change: PathChange::Failed(failure), .. }) = &change
            && failure.reason != FailureReason::NoCarrier
        {
            // A class in which nothing moves would not notice that the link is silent.
            let others = self.all.iter_mut().filter(|connection| connection.id != link.class());
            others.for_each(|connection| connection.client_mut().probe_paths(now));
        }
        Some(change)
    }

    /// Returns the next UDP payload to send, see [`Client::poll_transmit`]. The link ID in `local` contains
    /// the class.
    pub fn poll_transmit(&mut self, now: Instant, buf: &mut Vec<u8>) -> Option<Transmit> {
        while let Some(connection) = self.closing.last_mut() {
            if let Some(transmit) = connection.poll_transmit(now, buf) {
                return Some(transmit);
            }
            self.closing.pop();
        }
        while let Some(at) = self.send_order.get(self.next_to_send).copied() {
            if let Some(transmit) = self.all[at].poll_transmit(now, buf) {
                return Some(transmit);
            }
            self.next_to_send += 1;
        }
        self.next_to_send = 0;
        None
    }

    /// How long packets that arrive from now on may wait, so that those that arrive close together are taken
    /// together. To be called at the end of each iteration of the event loop, with its time.
    pub fn max_coalescing_delay(&mut self, now: Instant) -> Duration {
        for connection in &self.all {
            connection.client.note_use(now, &mut self.coalescing, connection.priority);
        }
        self.coalescing.delay(now)
    }

    /// See [`Client::poll_timeout`].
    pub fn poll_timeout(&mut self, now: Instant) -> Option<Instant> {
        let last_use = self.last_use();
        self.all.iter_mut().filter_map(|connection| connection.poll_timeout(now, last_use)).min()
    }

    /// When data last moved in any class.
    fn last_use(&self) -> Instant {
        self.all.iter().map(ClassConnection::last_use).fold(self.all[0].last_use(), Instant::max)
    }

    /// See [`Client::handle_timeout`].
    pub fn handle_timeout(&mut self, now: Instant) {
        let last_use = self.last_use();
        self.all.iter_mut().for_each(|connection| connection.handle_timeout(now, last_use));
        self.release_waiting(now);
    }

    /// Ends the tunnel, see [`Client::close`].
    pub fn close(&mut self, now: Instant, reason: &str) {
        self.all.iter_mut().for_each(|connection| connection.client_mut().close(now, reason));
    }

    /// Returns the report of each class, the default class first. Another class is up once its own connection
    /// carries its packets.
    pub fn reports(&mut self, now: Instant) -> Vec<(ClassId, ClientReport)> {
        let of = |connection: &mut ClassConnection| {
            let mut report = connection.client.report(now);
            if report.state == ClientState::Up && connection.id != ClassId::DEFAULT && !connection.is_ready()
            {
                report.state = ClientState::Connecting;
            }
            (connection.id, report)
        };
        self.all.iter_mut().map(of).collect()
    }

    /// Returns the flows of each class.
    pub fn flows(&self, now: Instant) -> Vec<(ClassId, FlowReport)> {
        let of = |connection: &ClassConnection| {
            connection.client.flows(now).into_iter().map(|flow| (connection.id, flow)).collect::<Vec<_>>()
        };
        self.all.iter().flat_map(of).collect()
    }
}

/// Returns the payload of a UDP packet; empty if the packet is too short.
fn udp_payload<'a>(packet: &ip::IpPacket<'a>) -> &'a [u8] {
    packet.transport().get(8..).unwrap_or_default()
}
