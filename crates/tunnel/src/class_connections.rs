//! The connections of a client in one thread: one for each class of its traffic.
//!
//! In: what a [`Client`] takes, with links that say for the connection of which class they are. Out: what a client gives,
//! packets of all classes together. Always holds: the first connection, of the default class, makes the session or joins
//! that of another thread, and carries what belongs to others while theirs do not work; a flow stays with the connection
//! that ends it. What comes from the TUN of a class is of that class, whatever the rules say. A class that nobody uses
//! has no connection ([`one`]); only one that goes before others has it from the start.

mod connection;

use std::net::SocketAddr;

use bytes::BytesMut;
use mpvpn_class::{DnsSnooper, FlowClasses, PacketFields, Rules};
use mpvpn_packet::{FlowKey, TunPacket, VnetHdr, ip, protocol};
use mpvpn_path::TransportHealth;
use mpvpn_quic::Transmit;
use mpvpn_types::{ClassId, Instant, LinkId};

use crate::{
    Client, ClientChange, ClientConfig, ClientEvent, ClientReport, ClientState, ConnectionNumber, FlowReport,
    LinkPolicy, shapers::Shapers,
};
use connection::{ClassConnection, Taker};

/// The port of name servers.
const DNS: u16 = 53;

/// A class of a client.
#[derive(Clone)]
pub struct ClassSetup {
    /// Its number.
    pub id: ClassId,
    /// Before all other classes.
    pub priority: bool,
    /// What its connection needs to know; its class must be set where there are several.
    pub config: ClientConfig,
}

/// The connections of a client in one thread.
pub struct ClassConnections {
    /// The default class first.
    all: Vec<ClassConnection>,
    /// Those of classes that are no more; they still have packets to send.
    leaving: Vec<ClassConnection>,
    /// In this order they send.
    order: Vec<usize>,
    /// Whose turn it is to send.
    turn: usize,
    rules: Rules,
    names: DnsSnooper,
    flows: FlowClasses,
    /// The MTU that was told last (bytes).
    mtu: Option<usize>,
    shapers: Shapers,
    shard: u8,
    /// With this others join the session, where the server knows classes.
    secret: Option<Vec<u8>>,
}

impl ClassConnections {
    /// The connections of these classes, of which the default one is the first, in the thread `shard`; the thread 0 makes
    /// the session, and lets others join if `several`.
    pub fn new(now: Instant, classes: Vec<ClassSetup>, rules: Rules, shard: u8, several: bool) -> Self {
        let several = several || classes.len() > 1;
        let mut connections = Self {
            all: Vec::with_capacity(classes.len()),
            leaving: Vec::new(),
            order: Vec::new(),
            turn: 0,
            names: DnsSnooper::new(rules.patterns()),
            rules,
            flows: FlowClasses::default(),
            mtu: None,
            shapers: Shapers::default(),
            shard,
            secret: None,
        };
        for class in classes {
            let one = connections.make(now, class, several);
            connections.all.push(one);
        }
        connections.set_order();
        connections
    }

    fn make(
        &self,
        now: Instant,
        ClassSetup { id, priority, config }: ClassSetup,
        several: bool,
    ) -> ClassConnection {
        if let Some(class) = &config.class {
            self.shapers.set_share(now, id, class.share);
        }
        let member = ConnectionNumber::of(self.shard, id).unwrap_or_default();
        let mut client = match member == ConnectionNumber::INITIAL {
            true => Client::new(now, config),
            false => Client::joining(now, config, member),
        };
        if member == ConnectionNumber::INITIAL && several {
            client.allow_joins();
        }
        client.share_links(self.shapers.clone());
        ClassConnection::new(now, id, priority, client)
    }

    fn set_order(&mut self) {
        self.order = (0..self.all.len()).collect();
        self.order.sort_by_key(|at| !self.all[*at].priority);
        self.turn = 0;
    }

    /// Tells packets apart by other rules, at once.
    pub fn set_rules(&mut self, rules: Rules) {
        self.names.set_patterns(rules.patterns());
        self.rules = rules;
        self.flows.clear();
    }

    /// Adds a class, which has no links yet, or has that of this number travel in another way: its connection alone is
    /// closed, and made anew over the same links.
    pub fn set_class(&mut self, now: Instant, class: ClassSetup) {
        match self.all.iter().position(|one| one.id == class.id) {
            Some(at) => {
                if let Some(profile) = &class.config.class {
                    self.shapers.set_share(now, class.id, profile.share);
                }
                let one = &mut self.all[at];
                one.priority = class.priority;
                one.client.reconfigure(now, class.config);
                if one.priority {
                    one.wake(now);
                }
            }
            None => {
                let mut one = self.make(now, class, true);
                if let Some(secret) = &self.secret {
                    one.client.join(now, secret.clone());
                }
                self.all.push(one);
            }
        }
        self.set_order();
    }

    /// Closes the connection of a class; what belonged to it is of the default class, until rules say otherwise. That
    /// one is never removed.
    pub fn remove_class(&mut self, now: Instant, id: ClassId) {
        let Some(at) = self.all.iter().position(|one| one.id == id && id != ClassId::DEFAULT) else { return };
        let mut one = self.all.remove(at);
        for (hdr, mut packet) in one.take_waiting() {
            self.default_client_mut().handle_tun(now, hdr, &mut packet);
        }
        one.client.close(now, "there is no such class any more");
        self.leaving.push(one);
        self.flows.clear();
        self.set_order();
    }

    /// The connection of the default class.
    pub fn default_client_mut(&mut self) -> &mut Client {
        &mut self.all[0].client
    }

    /// The same.
    pub fn default_client(&self) -> &Client {
        &self.all[0].client
    }

    /// How many classes there are.
    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    fn of(&mut self, link: LinkId) -> Option<(&mut Client, LinkId)> {
        let one = self.all.iter_mut().find(|one| one.id == link.class())?;
        Some((&mut one.client, link.with_class(ClassId::DEFAULT)))
    }

    /// See [`Client::link_up`].
    pub fn link_up(&mut self, now: Instant, link: LinkId, remote: SocketAddr) {
        if let Some((client, link)) = self.of(link) {
            client.link_up(now, link, remote);
        }
    }

    /// See [`Client::link_down`].
    pub fn link_down(&mut self, now: Instant, link: LinkId) {
        if let Some((client, link)) = self.of(link) {
            client.link_down(now, link);
        }
    }

    /// See [`Client::set_link`].
    pub fn set_link(&mut self, now: Instant, link: LinkId, policy: LinkPolicy) {
        if let Some((client, link)) = self.of(link) {
            client.set_link(now, link, policy);
        }
    }

    /// What is heard of the server over the link `uplink`, over UDP and inside TCP. A class whose path died says more
    /// than one that sends nothing there, and would not notice.
    pub fn heard(&self, uplink: LinkId) -> (TransportHealth, TransportHealth) {
        let all = |of: &dyn Fn(&Client) -> TransportHealth| {
            let heard: Vec<TransportHealth> = self.all.iter().map(|one| of(&one.client)).collect();
            let dead = heard.contains(&TransportHealth::Dead).then_some(TransportHealth::Dead);
            dead.or(heard.into_iter().max()).unwrap_or_default()
        };
        let udp = |client: &Client| {
            let pipes = (0..LinkId::TCP_PATH_INDEX).map(|pipe| client.heard_on(uplink.with_path_index(pipe)));
            pipes.max().unwrap_or_default()
        };
        (all(&udp), all(&|client: &Client| client.heard_on(uplink.with_path_index(LinkId::TCP_PATH_INDEX))))
    }

    /// See [`Client::on_local_stall`].
    pub fn on_local_stall(&mut self, now: Instant) {
        self.all.iter_mut().for_each(|one| one.client.on_local_stall(now));
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
        if let Some((client, link)) = self.of(link) {
            client.handle_datagram(now, link, remote, ecn, data);
        }
    }

    /// See [`Client::handle_batch`]; for the connections of the class that `link` is for.
    pub fn handle_batch(&mut self, now: Instant, class: ClassId) {
        if let Some(one) = self.all.iter_mut().find(|one| one.id == class) {
            one.client.handle_batch(now);
        }
    }

    /// The same for all connections.
    pub fn handle_batches(&mut self, now: Instant) {
        self.all.iter_mut().for_each(|one| one.client.handle_batch(now));
    }

    /// Joins the session of another thread, see [`Client::join`].
    pub fn join(&mut self, now: Instant, secret: &[u8]) {
        self.secret = Some(secret.to_vec());
        for one in &mut self.all {
            one.client.join(now, secret.to_vec());
        }
    }

    /// Takes what was read from the TUN, see [`Client::handle_tun`]; `class` says which class has the TUN for itself.
    pub fn handle_tun(&mut self, now: Instant, class: Option<ClassId>, hdr: VnetHdr, packet: &mut [u8]) {
        if self.all.len() == 1 {
            return self.default_client_mut().handle_tun(now, hdr, packet);
        }
        if let Some(at) = self.choose(now, class, hdr, packet) {
            self.all[at].client.handle_tun(now, hdr, packet);
        }
    }

    /// Whose packet it is; `None` if it waits.
    fn choose(&mut self, now: Instant, class: Option<ClassId>, hdr: VnetHdr, packet: &[u8]) -> Option<usize> {
        let Ok(view) = ip::parse(packet) else { return Some(0) };
        let key = FlowKey::of(&view);
        if key.protocol == protocol::UDP && key.dst_port == DNS && self.names.has_patterns() {
            self.names.on_query(now, key.source(), key.destination(), udp_payload(&view));
        }
        let class = class.unwrap_or_else(|| self.class_by_rules(now, &key, &view));
        let own = self.all.iter().position(|one| one.id == class).unwrap_or(0);
        let wanted = match self.all.split_at_mut(own) {
            ([home, ..], [one, ..]) => {
                if self.secret.is_some() {
                    one.note_use(now, &home.client, &view);
                }
                match one.taker(now, &mut home.client, &key, &view) {
                    Taker::Own => Some(own),
                    Taker::Default => Some(0),
                    Taker::Later => None,
                }
            }
            _ => Some(0),
        };
        if key.protocol != protocol::TCP || wanted.is_some_and(|at| self.all[at].client.ends(&key)) {
            return wanted;
        }
        // One that ends at another connection stays there.
        let ends = self.all.iter().position(|one| one.client.ends(&key));
        if ends.is_none() && wanted.is_none() {
            self.all[own].keep(hdr, packet, &key);
        }
        ends.or(wanted)
    }

    /// Hands on what has waited for a class, or for long enough.
    fn release(&mut self, now: Instant) {
        for at in 1..self.all.len() {
            let (taker, packets) = self.all[at].release(now);
            let to = if taker == Taker::Own { at } else { 0 };
            for (hdr, mut packet) in packets {
                self.all[to].client.handle_tun(now, hdr, &mut packet);
            }
        }
    }

    fn class_by_rules(&mut self, now: Instant, key: &FlowKey, view: &ip::IpPacket<'_>) -> ClassId {
        // A backup over SSH is marked otherwise than what is typed, and only once it has begun.
        let flow = key.hash32() ^ u32::from(view.dscp()) << 24;
        if let Some(class) = self.flows.get(now, flow) {
            return class;
        }
        let ports = (view.has_transport_header() && mpvpn_class::has_ports(key.protocol))
            .then_some((key.src_port, key.dst_port));
        let facts =
            PacketFields { protocol: key.protocol, src: key.src, dst: key.dst, ports, dscp: view.dscp() };
        let class = self.rules.classify(now, &facts, &self.names).class;
        self.flows.put(now, flow, class);
        class
    }

    /// The next packet for a TUN: the one of the class that its destination was given to.
    pub fn poll_tun(&mut self, now: Instant) -> Option<TunPacket> {
        let joined = self.all.iter_mut().find_map(|one| one.client.poll_tun(now))?;
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

    /// Bytes that wait for a path.
    pub fn backlog(&self) -> usize {
        self.all.iter().map(|one| one.client.backlog()).sum()
    }

    /// The next thing that the edge must act on: what the connection of the default class says, and the MTU of all.
    pub fn poll_event(&mut self, now: Instant) -> Option<ClientEvent> {
        for one in &mut self.all[1..] {
            // It opens no streams but those of packets, and its failures are never fatal.
            while let Some(event) = one.client.poll_event() {
                one.take_event(now, &event);
            }
            one.settle(now, self.mtu);
        }
        self.release(now);
        while let Some(event) = self.all[0].client.poll_event() {
            match &event {
                ClientEvent::Mtu(mtu) => {
                    self.all[0].mtu = Some(*mtu);
                    continue;
                }
                ClientEvent::JoinsAllowed { secret, other_classes: true } => {
                    self.secret = Some(secret.clone());
                    for one in &mut self.all[1..] {
                        one.client.join(now, secret.clone());
                    }
                }
                _ => {}
            }
            return Some(event);
        }
        // Any packet may go anywhere.
        let mtu = self.all.iter().filter_map(|one| one.mtu).min();
        if mtu != self.mtu {
            self.mtu = mtu;
            return mtu.map(ClientEvent::Mtu);
        }
        None
    }

    /// The next change that needs no action. Its link includes the class.
    pub fn poll_change(&mut self) -> Option<ClientChange> {
        self.all.iter_mut().find_map(ClassConnection::poll_change)
    }

    /// The next UDP payload to send, see [`Client::poll_transmit`]. Its `local` is the token of a link, with its class.
    pub fn poll_transmit(&mut self, now: Instant, buf: &mut Vec<u8>) -> Option<Transmit> {
        while let Some(one) = self.leaving.last_mut() {
            if let Some(transmit) = one.poll_transmit(now, buf) {
                return Some(transmit);
            }
            self.leaving.pop();
        }
        while let Some(at) = self.order.get(self.turn).copied() {
            if let Some(transmit) = self.all[at].poll_transmit(now, buf) {
                return Some(transmit);
            }
            self.turn += 1;
        }
        self.turn = 0;
        None
    }

    /// See [`Client::poll_timeout`].
    pub fn poll_timeout(&mut self, now: Instant) -> Option<Instant> {
        self.all.iter_mut().filter_map(|one| one.poll_timeout(now)).min()
    }

    /// See [`Client::handle_timeout`].
    pub fn handle_timeout(&mut self, now: Instant) {
        for one in &mut self.all {
            if one.client.poll_timeout(now).is_some_and(|at| at <= now) {
                one.client.handle_timeout(now);
            }
            one.rest(now);
        }
        self.release(now);
    }

    /// Ends the tunnel, see [`Client::close`].
    pub fn close(&mut self, now: Instant, reason: &str) {
        self.all.iter_mut().for_each(|one| one.client.close(now, reason));
    }

    /// Figures of each class, the default one first. One is up when it carries its packets itself.
    pub fn reports(&mut self, now: Instant) -> Vec<(ClassId, ClientReport)> {
        let of = |one: &mut ClassConnection| {
            let mut report = one.client.report(now);
            if report.state == ClientState::Up && one.id != ClassId::DEFAULT && !one.is_awake() {
                report.state = ClientState::Connecting;
            }
            (one.id, report)
        };
        self.all.iter_mut().map(of).collect()
    }

    /// The flows of each class.
    pub fn flows(&self, now: Instant) -> Vec<(ClassId, FlowReport)> {
        let of = |one: &ClassConnection| {
            one.client.flows(now).into_iter().map(|flow| (one.id, flow)).collect::<Vec<_>>()
        };
        self.all.iter().flat_map(of).collect()
    }
}

/// The payload of a UDP packet; nothing if it is none.
fn udp_payload<'a>(packet: &ip::IpPacket<'a>) -> &'a [u8] {
    packet.transport().get(8..).unwrap_or_default()
}
