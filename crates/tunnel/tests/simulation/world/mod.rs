//! Clients and a server, of one shard or several, with a simulated network between them, and a clock
//! that jumps.

#![allow(clippy::disallowed_methods, dead_code)]

pub mod app;
mod bbr;
pub mod record;
mod servers;
pub mod talk;
pub mod tcp;
mod wire;

use std::{
    cell::Cell,
    collections::{BTreeMap, VecDeque},
    net::{IpAddr, SocketAddr},
    ops::{Deref, DerefMut},
    sync::Arc,
};

use app::Destination;
use bytes::BytesMut;
use mpvpn_flow::rules::Rules;
use mpvpn_lab::{ChannelParams, LinkSpec};
use mpvpn_masque::connect::{Authority, ProxyError};
use mpvpn_packet::{VNET_HDR_LEN, VnetHdr};
use mpvpn_path::Scheduler;
use mpvpn_quic::{ClientSetup, FlowControlWindows, LocalAddress, ServerSetup, TransportOptions, shard_of};
use mpvpn_tunnel::{
    AddressesInUse, Assignment, ClassConnections, ClassProfile, ClassSetup, Client, ClientConfig,
    ClientError, ClientEvent, ClientState, ConnectionNumber, FilterRequest, Registry, Server, ServerEvent,
    TunOutcome, TunnelMode, UdpId, UserLimits,
};
use mpvpn_types::{BitRate, ClassId, CongestionControl, Duration, Fec, Instant, LinkId};

pub use self::wire::{Link, SharedBottleneck, pipe_of};
use self::{
    record::{Host, Record},
    servers::{ALL_ROUTES, AnyCertificate, Identity, Users, new_servers, options, provider, server_setup},
    wire::{HEADERS, Wire, path_of},
};

thread_local! {
    /// How long the world that runs in this thread has lasted, for its log.
    pub static WORLD_TIME: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

/// How many iterations of an end may follow each other without time between them: events lead to others.
const MOST_ITERATIONS_AT_ONCE: usize = 8;
pub const MS: Duration = Duration::from_millis(1);
pub const TOKEN: &str = "a token that opens";
/// The token of another user.
pub const TOKEN_OF_BOB: &str = "the token of bob";
/// The token of a user who has no access any more.
pub const TOKEN_OF_CAROL: &str = "the token of carol";
/// The server panics when it checks this one.
pub const TOKEN_THAT_PANICS: &str = "a token that panics";
pub const SERVER: &str = "192.0.2.1:443";
/// Resolvers that the server suggests.
pub const DNS: [&str; 2] = ["10.0.0.1", "fd00::1"];

/// The connections of a client. Dereferences to that of the default class, the only one of most clients.
pub struct ClientConnections(pub ClassConnections);

impl Deref for ClientConnections {
    type Target = Client;

    fn deref(&self) -> &Client {
        self.0.default_client()
    }
}

impl DerefMut for ClientConnections {
    fn deref_mut(&mut self) -> &mut Client {
        self.0.default_client_mut()
    }
}

pub struct Machine {
    pub client: ClientConnections,
    pub classes: Vec<ClassId>,
    pub links: BTreeMap<LinkId, Link>,
    /// Pipes of each link.
    pub pipes: u8,
    pub received: Vec<(Instant, Vec<u8>)>,
    pub assignment: Option<Assignment>,
    pub mtu: Option<usize>,
    pub down_count: usize,
    /// Why the last connections were lost or refused.
    pub down_reasons: Vec<String>,
    pub up_count: usize,
    pub fatal: Option<ClientError>,
    /// The secret with which connections may join the session.
    pub session_secret: Option<Vec<u8>>,
    /// Events of relays and UDP flows.
    pub streams: VecDeque<ClientEvent>,
    /// Received UDP payloads.
    pub payloads: Vec<(UdpId, Vec<u8>)>,
    /// The machine whose session this one joins.
    pub initial: Option<usize>,
}

impl Machine {
    /// The paths over a link: one for each class and pipe.
    fn paths_over(&self, id: LinkId) -> impl Iterator<Item = LinkId> + use<> {
        let (classes, pipes) = (self.classes.clone(), self.pipes);
        classes
            .into_iter()
            .flat_map(move |class| (0..pipes).map(move |pipe| id.with_path_index(pipe).with_class(class)))
    }

    /// The kernel reports that a link has a carrier.
    pub fn link_up(&mut self, now: Instant, id: LinkId) {
        for path in self.paths_over(id) {
            self.client.0.link_up(now, path, SERVER.parse().unwrap());
        }
    }

    /// The kernel reports that a link has no carrier.
    pub fn link_down(&mut self, now: Instant, id: LinkId) {
        for path in self.paths_over(id) {
            self.client.0.link_down(now, path);
        }
    }
}

/// The target of a UDP flow of a client.
pub struct Target {
    pub shard: usize,
    pub udp: UdpId,
    pub to: Authority,
    pub user: String,
    /// Payloads received.
    pub received_payloads: usize,
    pub closed: bool,
}

/// UDP payloads, each with the address that it was sent to.
pub type Unclaimed = Vec<(SocketAddr, Vec<u8>)>;

pub struct World {
    began: Instant,
    pub now: Instant,
    /// Pipes of each link of clients that are added.
    pub pipes: u8,
    /// A bottleneck behind links of the first client.
    pub bottleneck: Option<SharedBottleneck>,
    /// Added to the seeds of the random numbers of links.
    pub seed: u64,
    /// The shards of the server.
    pub servers: Vec<Server>,
    pub registry: Registry,
    /// The mode of the next server that is started.
    pub server_mode: TunnelMode,
    /// The routes of the next server that is started.
    pub routes: &'static [&'static str],
    /// Packets that one shard handed over to another.
    pub handed_over: usize,
    /// Sessions that wait until their packets are filtered.
    pub filter_requests: Vec<FilterRequest>,
    pub machines: Vec<Machine>,
    pub received_by_server: Vec<(Instant, Vec<u8>)>,
    /// Which TCP connections of clients that are added travel as streams.
    pub flow_rules: Rules,
    /// FEC policy of clients that are added.
    pub fec: Fec,
    /// Copies of each packet of clients that are added.
    pub copies: u8,
    /// The ECN bits (RFC 3168) of arriving packets: 0 if the network clears them, 2 as they are sent.
    pub ecn: u8,
    /// How many addresses of each family clients that are added request beyond the first.
    pub additional_addresses: usize,
    /// The addresses that the machines of clients have already.
    pub addresses_in_use: AddressesInUse,
    /// The classes of clients that are added, the default class first; empty: clients without classes.
    pub classes: Vec<ClassProfile>,
    /// The congestion controllers of classes, by name, where they are not that of the client.
    pub class_cc: BTreeMap<&'static str, CongestionControl>,
    /// Whether classes connect with their first packet.
    pub classes_connect_at_once: bool,
    /// Extensions that clients that are added do not know.
    pub disabled_at_client: &'static [&'static str],
    /// Extensions that the server does not know from its next restart on.
    pub disabled_at_server: &'static [&'static str],
    /// The rules that give flows their class.
    pub class_rules: mpvpn_class::Rules,
    /// The mode of clients that are added.
    pub mode: TunnelMode,
    /// Targets that the server refuses, and the reason.
    pub refused_targets: Vec<(Authority, ProxyError)>,
    /// The destinations of relays.
    pub destinations: Vec<Destination>,
    /// Targets of the clients' UDP flows, which send payloads back.
    pub targets: Vec<Target>,
    /// The record of datagrams and deliveries, if one is kept.
    pub record: Option<Record>,
    /// The packets that the server sent to addresses of no client, if a test records them.
    pub unclaimed: Option<Unclaimed>,
    /// Whether each expired timer has to be dealt with before time goes on, as a real end would do nothing
    /// else until then.
    pub must_get_done: bool,
    identity: Identity,
    secrets: u8,
}

impl World {
    pub fn new() -> Self {
        Self::with_shards(1)
    }

    /// A server of several shards with limits for its users.
    pub fn with_limits(limits: UserLimits, shards: u8) -> Self {
        Self::with_users(Users { limits, ..Users::default() }, shards)
    }

    /// A server with so much memory (bytes).
    pub fn with_memory(bytes: usize) -> Self {
        Self::with_users(Users { max_held: Some(bytes), ..Users::default() }, 1)
    }

    /// A server with rules for the packets of its users. The test answers its requests in `filter_requests`.
    pub fn with_rules_of_users() -> Self {
        Self::with_users(Users { have_rules: true, ..Users::default() }, 1)
    }

    /// A server of several shards; the client with number n goes to shard n modulo `shards`.
    pub fn with_shards(shards: u8) -> Self {
        Self::with_users(Users::default(), shards)
    }

    fn with_users(users: Users, shards: u8) -> Self {
        let identity = Identity::new();
        let now = Instant::now();
        let (servers, registry) =
            new_servers(&identity, TunnelMode::Packets, 0, shards, users, ALL_ROUTES, &[]);
        Self {
            began: now,
            now,
            pipes: 1,
            bottleneck: None,
            seed: 0,
            servers,
            registry,
            routes: ALL_ROUTES,
            server_mode: TunnelMode::Packets,
            handed_over: 0,
            filter_requests: Vec::new(),
            machines: Vec::new(),
            received_by_server: Vec::new(),
            flow_rules: Rules::default(),
            fec: Fec::Off,
            copies: 1,
            ecn: 0,
            additional_addresses: 0,
            addresses_in_use: AddressesInUse::default(),
            classes: Vec::new(),
            class_cc: BTreeMap::new(),
            classes_connect_at_once: true,
            disabled_at_client: &[],
            disabled_at_server: &[],
            class_rules: mpvpn_class::Rules::default(),
            mode: TunnelMode::default(),
            refused_targets: Vec::new(),
            destinations: Vec::new(),
            targets: Vec::new(),
            record: None,
            unclaimed: None,
            must_get_done: false,
            identity,
            secrets: 0,
        }
    }

    /// Adds a client with links of `rate` Mbit/s and a one-way delay, and switches them on.
    pub fn add(&mut self, token: &str, scheduler: Scheduler, links: &[(u64, Duration)]) -> usize {
        self.add_as(None, token, scheduler, links)
    }

    /// Adds a client that joins the session of another one, as connection `number`.
    pub fn add_joined(&mut self, initial: usize, number: u8, links: &[(u64, Duration)]) -> usize {
        self.add_as(Some((initial, ConnectionNumber::new(number).unwrap())), TOKEN, Scheduler::Auto, links)
    }

    fn add_as(
        &mut self,
        member: Option<(usize, ConnectionNumber)>,
        token: &str,
        scheduler: Scheduler,
        links: &[(u64, Duration)],
    ) -> usize {
        let spec = |(rate, delay): &(u64, Duration)| {
            let rate = Some(BitRate::from_bps(rate * 1_000_000));
            let params = ChannelParams { rate, delay: *delay, mtu: Some(1500), ..ChannelParams::default() };
            LinkSpec { up: params.clone(), down: params, ..LinkSpec::default() }
        };
        self.add_over(
            member,
            token,
            scheduler,
            CongestionControl::Bbr,
            &links.iter().map(spec).collect::<Vec<_>>(),
        )
    }

    /// TLS and transport of a client with these random numbers.
    pub fn client_setup(&self, options: &TransportOptions, secret: [u8; 32]) -> ClientSetup {
        let mut tls = rustls::ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(AnyCertificate))
            .with_no_client_auth();
        tls.alpn_protocols = vec![b"h3".to_vec()];
        ClientSetup::new(Arc::new(tls), options, &secret).unwrap()
    }

    /// The configuration of the next client.
    pub fn client_config(&self, token: &str, scheduler: Scheduler, cc: CongestionControl) -> ClientConfig {
        self.client_config_with(token, scheduler, cc, FlowControlWindows::default())
    }

    /// The same with receive windows of its own.
    pub fn client_config_with(
        &self,
        token: &str,
        scheduler: Scheduler,
        cc: CongestionControl,
        windows: FlowControlWindows,
    ) -> ClientConfig {
        let number = self.machines.len() as u8;
        let options = TransportOptions { cc, windows, ..options(10 + number, self.servers.len() as u8) };
        let setup = self.client_setup(&options, [100 + number; 32]);
        let setup = if self.servers.len() > 1 { setup.steered(number) } else { setup };
        ClientConfig {
            mode: self.mode,
            setup,
            server_name: "mpvpn".to_owned(),
            authority: SERVER.to_owned(),
            path: "/.well-known/masque/ip/*/*/".to_owned(),
            token: Some(token.to_owned()),
            class: None,
            instance: None,
            additional_addresses: self.additional_addresses,
            addresses_in_use: self.addresses_in_use.clone(),
            scheduler,
            fec: self.fec,
            copies: self.copies,
            flow_rules: self.flow_rules.clone(),
            isn_secret: [1, 2],
            disabled_extensions: self.disabled_at_client,
        }
    }

    /// TLS and transport of a server with the identity of this world's.
    pub fn server_setup(&self, windows: FlowControlWindows) -> ServerSetup {
        server_setup(&self.identity, windows)
    }

    /// Adds a client over the links of `links`.
    pub fn add_over(
        &mut self,
        member: Option<(usize, ConnectionNumber)>,
        token: &str,
        scheduler: Scheduler,
        cc: CongestionControl,
        links: &[LinkSpec],
    ) -> usize {
        let number = self.machines.len() as u8;
        let setup = |(number, class): (u8, Option<ClassProfile>)| {
            let cc = class.as_ref().and_then(|class| self.class_cc.get(&*class.name)).copied().unwrap_or(cc);
            ClassSetup {
                id: ClassId(number),
                priority: class.as_ref().is_some_and(|class| class.share.first),
                connects_at_once: self.classes_connect_at_once,
                config: ClientConfig { class, ..self.client_config(token, scheduler, cc) },
            }
        };
        let profiles = self.classes.iter().cloned().map(Some).chain(self.classes.is_empty().then_some(None));
        let setups: Vec<_> = (0..).zip(profiles).map(setup).collect();
        let classes = setups.iter().map(|setup| setup.id).collect();
        let shard = member.map_or(0, |(_, member)| member.number());
        let client =
            ClientConnections(ClassConnections::new(self.now, setups, self.class_rules.clone(), shard, true));
        let mut machine = Machine {
            client,
            classes,
            links: BTreeMap::new(),
            pipes: self.pipes,
            received: Vec::new(),
            assignment: None,
            mtu: None,
            down_count: 0,
            down_reasons: Vec::new(),
            up_count: 0,
            fatal: None,
            session_secret: None,
            streams: VecDeque::new(),
            payloads: Vec::new(),
            initial: member.map(|(initial, _)| initial),
        };
        for (i, spec) in links.iter().enumerate() {
            let id = LinkId(i as u16);
            let address = SocketAddr::from(([198, 51, 100 + number, i as u8 + 1], 5000));
            let seed = self.seed + u64::from(number) * 1000 + i as u64 * 2;
            let up = Wire::new(&spec.up, spec.count, seed, self.now);
            let down = Wire::new(&spec.down, spec.count, seed + 1, self.now);
            machine.links.insert(id, Link { up, down, address });
            machine.link_up(self.now, id);
        }
        self.machines.push(machine);
        self.machines.len() - 1
    }

    /// The server dies and a new one with the same identity takes its place.
    pub fn restart_server(&mut self) {
        self.secrets = self.secrets.wrapping_add(64);
        let shards = self.servers.len() as u8;
        (self.servers, self.registry) = new_servers(
            &self.identity,
            self.server_mode,
            self.secrets,
            shards,
            Users::default(),
            self.routes,
            self.disabled_at_server,
        );
    }

    fn next_time(&mut self) -> Option<Instant> {
        let now = self.now;
        let mut next = self.servers.iter().filter_map(Server::poll_timeout).min();
        next = next.into_iter().chain(self.bottleneck.as_ref().and_then(SharedBottleneck::next)).min();
        for machine in &mut self.machines {
            let wires = machine.links.values().flat_map(|link| [link.up.next(), link.down.next()]);
            let all = wires.flatten().chain(machine.client.0.poll_timeout(now));
            next = next.into_iter().chain(all).min();
        }
        next
    }

    fn assert_nothing_is_due(&mut self) {
        let now = self.now;
        let mut is_done = false;
        for _ in 0..MOST_ITERATIONS_AT_ONCE {
            let servers = self.servers.iter().filter_map(Server::poll_timeout);
            let clients = self.machines.iter_mut().filter_map(|machine| machine.client.0.poll_timeout(now));
            is_done = servers.chain(clients).all(|at| at > now);
            if is_done {
                break;
            }
            self.exchange();
        }
        assert!(is_done, "an end has a timer that has expired, and does nothing about it");
    }

    /// Lets `time` pass.
    pub fn run(&mut self, time: Duration) {
        let end = self.now + time;
        loop {
            self.exchange();
            if self.must_get_done {
                self.assert_nothing_is_due();
            }
            let next = self.next_time().unwrap_or(end).max(self.now + Duration::from_micros(20));
            if next > end {
                self.now = end;
                return;
            }
            self.now = next;
        }
    }

    fn exchange(&mut self) {
        let now = self.now;
        WORLD_TIME.set(now - self.began);
        let server_address: SocketAddr = SERVER.parse().unwrap();
        for (number, machine) in self.machines.iter_mut().enumerate() {
            let mut bottleneck = self.bottleneck.as_mut().filter(|_| number == 0);
            let (mut up, mut down) = (Vec::new(), Vec::new());
            for (id, link) in &mut machine.links {
                for (direction, wire, arrived) in [(0, &mut link.up, &mut up), (1, &mut link.down, &mut down)]
                {
                    while let Some(packet) = wire.pop(now) {
                        let passed = match &mut bottleneck {
                            None => Some(packet),
                            Some(bottleneck) => bottleneck.take(now, direction, *id, packet),
                        };
                        arrived.extend(passed.map(|(pipe, data)| (*id, pipe, data)));
                    }
                }
            }
            if let Some(bottleneck) = bottleneck {
                let [shared_up, shared_down] = &mut bottleneck.channels;
                up.extend(std::iter::from_fn(|| shared_up.pop(now)));
                down.extend(std::iter::from_fn(|| shared_down.pop(now)));
            }
            for (id, pipe, data) in up {
                let data = BytesMut::from(&data[..]);
                let shard = usize::from(shard_of(&data, self.servers.len() as u8));
                let (local, remote) = (Some(server_address.ip()), machine.links[&id].address_of(pipe));
                self.servers[shard].handle_datagram(now, local, remote, self.ecn, data);
            }
            for (id, pipe, data) in down {
                let (path, data) = (path_of(id, pipe), BytesMut::from(&data[..]));
                machine.client.0.handle_datagram(now, path, server_address, self.ecn, data);
            }
            machine.client.0.handle_batches(now);
            machine.client.0.handle_timeout(now);
        }
        for server in &mut self.servers {
            server.handle_batch(now);
            if server.poll_timeout().is_some_and(|at| at <= now) {
                server.handle_timeout(now);
            }
        }
        self.send(now);
        self.deliver(now);
        self.join(now);
    }

    fn send(&mut self, now: Instant) {
        let mut buf = Vec::new();
        for (shard, server) in self.servers.iter_mut().enumerate() {
            let from = Host::Shard(shard);
            let sinks = (&mut self.record, &mut self.unclaimed);
            Self::send_from(from, server, &mut self.machines, now, &mut buf, sinks);
        }
        for (number, machine) in self.machines.iter_mut().enumerate() {
            loop {
                buf.clear();
                let Some(transmit) = machine.client.0.poll_transmit(now, &mut buf) else { break };
                let id = transmit.local.and_then(LocalAddress::as_link).expect("a client sends on links");
                let link = machine.links.get_mut(&id.uplink()).expect("a link that exists");
                for datagram in buf.chunks(transmit.segment_size.unwrap_or(transmit.size).max(1)) {
                    if let Some(record) = &mut self.record {
                        let ends = (Host::Client(number), Host::Server);
                        record.datagram(now, ends, id, &transmit, datagram.len());
                    }
                    link.up.push(now, pipe_of(id), datagram, HEADERS);
                }
            }
        }
    }

    fn send_from(
        from: Host,
        server: &mut Server,
        machines: &mut [Machine],
        now: Instant,
        buf: &mut Vec<u8>,
        (record, unclaimed): (&mut Option<Record>, &mut Option<Unclaimed>),
    ) {
        loop {
            buf.clear();
            let Some(transmit) = server.poll_transmit(now, buf) else { return };
            let mut links = machines.iter_mut().enumerate().flat_map(|(number, machine)| {
                machine.links.iter_mut().map(move |(id, link)| (Host::Client(number), *id, link))
            });
            let mut found = links.find_map(|(to, id, link)| {
                let pipe = link.pipe_at(transmit.remote)?;
                Some((to, path_of(id, pipe), pipe, link))
            });
            let (to, path) = found.as_ref().map_or((Host::Unknown, LinkId(0)), |(to, path, ..)| (*to, *path));
            if let Some((.., link)) = &mut found {
                *link.down.marks.entry(transmit.dscp).or_default() += 1;
            }
            for datagram in buf.chunks(transmit.segment_size.unwrap_or(transmit.size).max(1)) {
                if let Some(record) = record {
                    record.datagram(now, (from, to), path, &transmit, datagram.len());
                }
                match (&mut found, &mut *unclaimed) {
                    (Some((_, _, pipe, link)), _) => link.down.push(now, *pipe, datagram, HEADERS),
                    (None, Some(unclaimed)) => unclaimed.push((transmit.remote, datagram.to_vec())),
                    (None, None) => {}
                }
            }
        }
    }

    fn deliver(&mut self, now: Instant) {
        let mut replaced = Vec::new();
        for (shard, server) in self.servers.iter_mut().enumerate() {
            let mut delivered = |interface, bytes| {
                if let Some(record) = &mut self.record {
                    record.delivery(now, Host::Shard(shard), interface, bytes);
                }
            };
            while let Some(joined) = server.poll_tun() {
                let packet = joined.to_vec()[VNET_HDR_LEN..].to_vec();
                delivered("tun", packet.len());
                self.received_by_server.push((now, packet));
            }
            while let Some(event) = server.poll_event() {
                let theirs =
                    |relay| self.destinations.iter().rposition(|other| other.relay == relay && !other.closed);
                match event {
                    ServerEvent::Replaced(slot) => replaced.push(slot),
                    ServerEvent::Visit { visit, .. } => server.visit_abort(now, visit),
                    ServerEvent::Mtu(_) => {}
                    ServerEvent::Filter(request) => self.filter_requests.push(*request),
                    ServerEvent::Connect { relay, to, .. }
                        if let Some((_, failure)) =
                            self.refused_targets.iter().find(|(other, _)| *other == to) =>
                    {
                        server.relay_failed(relay, *failure, "as asked".to_owned());
                    }
                    ServerEvent::Connect { relay, to, .. } => {
                        let mut destination = Destination::new(shard, relay, to.port);
                        server.relay_opened(relay);
                        destination.run(now, server);
                        self.destinations.push(destination);
                    }
                    ServerEvent::RelayReadable(relay) | ServerEvent::RelayWritable(relay) => {
                        if let Some(at) = theirs(relay) {
                            let destination = &mut self.destinations[at];
                            let before = destination.received_bytes;
                            destination.run(now, server);
                            delivered("relay", (destination.received_bytes - before) as usize);
                        }
                    }
                    ServerEvent::RelayGone(relay) => {
                        if let Some(at) = theirs(relay) {
                            self.destinations[at].closed = true;
                        }
                    }
                    ServerEvent::ConnectUdp { udp, to, .. }
                        if let Some((_, failure)) =
                            self.refused_targets.iter().find(|(other, _)| *other == to) =>
                    {
                        server.udp_failed(udp, *failure, "as asked".to_owned());
                    }
                    ServerEvent::ConnectUdp { udp, user, to } => {
                        server.udp_opened(udp);
                        self.targets.push(Target {
                            shard,
                            udp,
                            to,
                            user,
                            received_payloads: 0,
                            closed: false,
                        });
                    }
                    ServerEvent::UdpGone(udp) => {
                        let own = |target: &&mut Target| target.shard == shard && target.udp == udp;
                        self.targets.iter_mut().filter(own).for_each(|target| target.closed = true);
                    }
                }
            }
            while let Some((udp, payload)) = server.poll_udp() {
                delivered("udp", payload.len());
                let own = |target: &&mut Target| target.shard == shard && target.udp == udp && !target.closed;
                if let Some(target) = self.targets.iter_mut().find(own) {
                    target.received_payloads += 1;
                    server.udp_send(now, udp, &payload);
                }
            }
        }
        for slot in replaced {
            self.servers[usize::from(slot.shard)].close_replaced(now, slot);
        }
        if self.registry.take_sites_due() {
            self.registry.put_sites_in_force(self.registry.wanted_sites());
            self.servers.iter_mut().for_each(|server| server.update_sites(now));
        }
        for (number, machine) in self.machines.iter_mut().enumerate() {
            let mut delivered = |interface, bytes| {
                if let Some(record) = &mut self.record {
                    record.delivery(now, Host::Client(number), interface, bytes);
                }
            };
            while let Some(joined) = machine.client.0.poll_tun(now) {
                let packet = joined.to_vec()[VNET_HDR_LEN..].to_vec();
                delivered("tun", packet.len());
                machine.received.push((now, packet));
            }
            while let Some((udp, payload)) = machine.client.poll_udp() {
                delivered("udp", payload.len());
                machine.payloads.push((udp, payload.to_vec()));
            }
            while machine.client.0.poll_change(now).is_some() {}
            while let Some(event) = machine.client.0.poll_event(now) {
                match event {
                    ClientEvent::Up(assignment) | ClientEvent::AssignmentChanged(assignment) => {
                        machine.assignment = Some(assignment);
                        machine.up_count += 1;
                    }
                    ClientEvent::Mtu(mtu) => machine.mtu = Some(mtu),
                    ClientEvent::Down(reason) => {
                        machine.down_count += 1;
                        machine.down_reasons.push(reason);
                    }
                    ClientEvent::Fatal(error) => machine.fatal = Some(error),
                    ClientEvent::JoinsAllowed { secret, .. } => machine.session_secret = Some(secret),
                    event => machine.streams.push_back(event),
                }
            }
        }
    }

    fn join(&mut self, now: Instant) {
        for at in 0..self.machines.len() {
            let initial = self.machines[at].initial;
            if let Some(secret) = initial.and_then(|initial| self.machines[initial].session_secret.clone()) {
                self.machines[at].client.0.join(now, &secret);
            }
        }
    }

    /// Runs until a client's tunnel is up.
    pub fn up(&mut self, machine: usize) {
        for _ in 0..200 {
            self.run(50 * MS);
            if self.machines[machine].client.report(self.now).state == ClientState::Up {
                return;
            }
        }
        panic!("client {machine} is not up after 10 s");
    }

    pub fn address(&self, machine: usize, v4: bool) -> IpAddr {
        let assignment = self.machines[machine].assignment.as_ref().expect("addresses");
        let net = assignment.addresses.iter().find(|net| net.addr().is_ipv4() == v4);
        net.expect("an address of the family").addr()
    }

    /// A client's machine sends a packet into its TUN.
    pub fn client_sends(&mut self, machine: usize, mut packet: Vec<u8>) {
        self.machines[machine].client.0.handle_tun(self.now, None, VnetHdr::NONE, &mut packet);
    }

    /// A client's machine sends a packet between each of these pairs of own and remote ports, and `time`
    /// passes. Then each of its classes has a connection.
    pub fn wake_classes(&mut self, machine: usize, ports: &[(u16, u16)], time: Duration) {
        for (own, remote) in ports {
            let own = SocketAddr::new(self.address(machine, true), *own);
            let packet = mpvpn_packets::Packet::between(own, ([203, 0, 113, 9], *remote).into()).udp(b"wake");
            self.client_sends(machine, packet);
        }
        self.run(time);
        let reports = self.machines[machine].client.0.reports(self.now);
        let states: Vec<_> = reports.iter().map(|(id, report)| (*id, report.state)).collect();
        assert!(states.iter().all(|(_, state)| *state == ClientState::Up), "{states:?}");
    }

    /// The server's machine sends a packet into its TUN.
    pub fn server_sends(&mut self, packet: Vec<u8>) {
        self.server_sends_through(0, packet);
    }

    /// The same, where the kernel chooses the queue of a shard.
    pub fn server_sends_through(&mut self, queue: usize, mut packet: Vec<u8>) {
        let taken = self.servers[queue].handle_tun(self.now, VnetHdr::NONE, &mut packet);
        if let TunOutcome::ForShard(shard) = taken {
            let other = &mut self.servers[usize::from(shard)];
            self.handed_over += usize::from(other.handle_handed_over(self.now, VnetHdr::NONE, &mut packet));
        }
    }

    /// A UDP packet from a client to somewhere behind the server.
    pub fn packet_to_target(&self, machine: usize, payload: &[u8]) -> Vec<u8> {
        let from = SocketAddr::new(self.address(machine, true), 4000);
        mpvpn_packets::Packet::between(from, "203.0.113.9:53".parse().unwrap()).udp(payload)
    }

    /// A UDP packet from behind the server to a client.
    pub fn packet_to_client(&self, machine: usize, payload: &[u8]) -> Vec<u8> {
        let to = SocketAddr::new(self.address(machine, true), 4000);
        mpvpn_packets::Packet::between("203.0.113.9:53".parse().unwrap(), to).udp(payload)
    }

    /// Sends a packet each way every millisecond, and returns the longest time without an arrival
    /// at the client and at the server.
    pub fn send_both_ways(&mut self, machine: usize, time: Duration) -> (Duration, Duration) {
        let end = self.now + time;
        self.machines[machine].received.clear();
        self.received_by_server.clear();
        let start = self.now;
        while self.now < end {
            let (out, back) =
                (self.packet_to_target(machine, &[1; 100]), self.packet_to_client(machine, &[2; 100]));
            self.client_sends(machine, out);
            self.server_sends(back);
            self.run(MS);
        }
        let gap = |arrivals: &[(Instant, Vec<u8>)]| {
            let times = arrivals.iter().map(|(at, _)| *at).chain([end]);
            times.fold((start, Duration::ZERO), |(last, longest), at| (at, longest.max(at - last))).1
        };
        (gap(&self.machines[machine].received), gap(&self.received_by_server))
    }
}
