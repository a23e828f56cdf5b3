//! A rogue client beside a real server: one endpoint with as many connections as it likes, without delay on
//! the way.

use std::{collections::VecDeque, net::SocketAddr};

use bytes::{BufMut, Bytes, BytesMut};
use mpvpn_masque::{
    capsule::{Capsule, CapsuleReader, Family, RequestedAddress},
    connect,
    connect_ip::ConnectIpRequest,
    connect_udp, datagram,
    extensions::Extensions,
    h3::{self, Event as HttpEvent, H3, Settings, Side},
    headers::Headers,
    structured::Typed,
    varint,
};
use mpvpn_path::Scheduler;
use mpvpn_quic::{
    ClientSetup, Connection, ConnectionHandle, Endpoint, Event, FlowControlWindows, LocalAddress, PathStatus,
    Read, StreamId,
};
use mpvpn_tunnel::{RelayId, RelayRead, ServerEvent, UdpId};
use mpvpn_types::{CongestionControl, Duration, LinkId, PathId};
use rustix::time::{ClockId, clock_gettime};

use crate::{
    heap,
    world::{MS, SERVER, TOKEN, World},
};

/// The context IDs that it asks for.
pub mod context {
    pub const ORDER: u64 = 2;
    pub const HEARTBEATS: u64 = 4;
    pub const REINJECTION: u64 = 6;
    pub const DATA_ACK: u64 = 8;
    pub const FEC: u64 = 10;
    pub const CLOCKS: u64 = 12;
}

/// A request for every extension.
pub fn every_extension(class: &str, number: u8) -> Extensions {
    let field = format!(
        "v=1, class=\"{class}\";weight=1000, clocks=12, order=2;copies=4, fec=10;source=1;repair=32, \
         connection={number}, cc=bbr, scheduler=redundant, heartbeats=4, reinjection=6, data-ack=8, links"
    );
    Extensions::parse([field.as_bytes()].into_iter()).expect("a valid field")
}

/// One connection of the rogue.
pub struct RogueConnection {
    pub id: ConnectionHandle,
    pub is_established: bool,
    pub is_lost: bool,
    http: H3,
    /// The request of its tunnel, the response, and the secret of the session.
    pub request: Option<StreamId>,
    pub response: Option<Headers>,
    pub addresses: Vec<std::net::IpAddr>,
    capsules: CapsuleReader,
}

impl RogueConnection {
    pub fn secret(&self) -> Option<Vec<u8>> {
        Some(Extensions::of(self.response.as_ref()?)?.get("session")?.bytes()?.to_vec())
    }
}

/// The edge of the server: what targets of relays do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Targets {
    /// Take what comes, send nothing.
    #[default]
    Read,
    /// Take nothing, send nothing.
    Stop,
    /// Take what comes, send as much as the server takes.
    Flood,
}

pub struct Rogue {
    pub world: World,
    setup: ClientSetup,
    endpoint: Endpoint,
    pub connections: Vec<RogueConnection>,
    /// The credentials of its requests.
    pub token: &'static str,
    /// The streams of all requests so far.
    pub requests: Vec<StreamId>,
    pub targets: Targets,
    /// Whether what the server sends arrives.
    pub hears: bool,
    pub relays: Vec<RelayId>,
    pub udp_flows: Vec<UdpId>,
    /// The most that the server held at the end of a millisecond, bytes.
    pub peak: usize,
    /// Datagrams that the rogue has queued, and packets that the server has forwarded.
    pub sent: u64,
    pub forwarded: u64,
    buffer: Vec<u8>,
    from_server: VecDeque<(SocketAddr, BytesMut)>,
}

fn address_of(link: LinkId) -> SocketAddr {
    SocketAddr::from(([203, 0, 113, 7], 1000 + link.0))
}

impl Rogue {
    /// Before its first connection, with the receive windows that it grants the server.
    pub fn new(windows: FlowControlWindows) -> Self {
        Self::in_world(World::new(), windows)
    }

    pub fn in_world(world: World, windows: FlowControlWindows) -> Self {
        let setup = world.rogue_setup(windows);
        let endpoint = Endpoint::client(&setup);
        Self {
            world,
            setup,
            endpoint,
            connections: Vec::new(),
            token: TOKEN,
            requests: Vec::new(),
            targets: Targets::default(),
            hears: true,
            relays: Vec::new(),
            udp_flows: Vec::new(),
            peak: 0,
            sent: 0,
            forwarded: 0,
            buffer: Vec::with_capacity(1 << 17),
            from_server: VecDeque::new(),
        }
    }

    /// With a tunnel that has every extension, two paths, and addresses; `peak` is counted from here on.
    pub fn with_tunnel() -> Self {
        Self::with_tunnel_and(FlowControlWindows::default())
    }

    pub fn with_tunnel_and(windows: FlowControlWindows) -> Self {
        let mut rogue = Self::new(windows);
        rogue.connect();
        rogue.ask_for_tunnel(0, every_extension("rogue", 0), None);
        rogue.open_path(LinkId(1));
        rogue.run(300 * MS);
        rogue.peak = 0;
        rogue
    }

    /// Opens a connection; returns its index.
    pub fn connect(&mut self) -> usize {
        let at = self.start();
        for _ in 0..500 {
            if self.connections[at].is_established {
                return at;
            }
            self.run(MS);
        }
        panic!("no connection after half a second");
    }

    /// Begins a handshake; returns its index.
    pub fn start(&mut self) -> usize {
        let (local, remote) = (LocalAddress::link(LinkId(0)), SERVER.parse().unwrap());
        let id = self.endpoint.connect(self.world.now, &self.setup, local, remote, "mpvpn").unwrap();
        self.connections.push(RogueConnection {
            id,
            is_established: false,
            is_lost: false,
            http: H3::new(Side::Client, Settings::default()),
            request: None,
            response: None,
            addresses: Vec::new(),
            capsules: CapsuleReader::new(),
        });
        self.connections.len() - 1
    }

    /// The QUIC connection with this index, if it still exists.
    pub fn quic(&mut self, at: usize) -> Option<&mut Connection> {
        self.endpoint.get(self.connections[at].id)
    }

    /// Asks for a tunnel; `secret` is the session that it shows.
    pub fn ask_for_tunnel(&mut self, at: usize, offered: Extensions, secret: Option<Vec<u8>>) {
        self.send_request(at, offered, secret);
        self.run(20 * MS);
    }

    /// The same without waiting for the response.
    pub fn send_request(&mut self, at: usize, mut offered: Extensions, secret: Option<Vec<u8>>) {
        if let Some(secret) = secret {
            offered.set("session", secret.into());
        }
        let mut request = ConnectIpRequest::new("vpn.example", "/.well-known/masque/ip/*/*/");
        request.authorization = Some(format!("Bearer {}", self.token));
        request.extensions = Some(offered.value());
        let headers = request.headers();
        let Some(stream) = self.request(at, &headers) else { return };
        self.connections[at].request = Some(stream);
        let any = [RequestedAddress::any(1, Family::V4), RequestedAddress::any(2, Family::V6)];
        self.capsule(at, &Capsule::AddressRequest(any.to_vec()).to_bytes());
    }

    /// Makes a request; `None` where the server allows no stream.
    pub fn request(&mut self, at: usize, headers: &Headers) -> Option<StreamId> {
        let bytes = h3::encode_headers(headers);
        let connection = self.quic(at)?;
        let stream = connection.open_bi().ok()?;
        connection.write(stream, bytes);
        self.requests.push(stream);
        Some(stream)
    }

    /// Cancels requests (RFC 9114 §4.1.1).
    pub fn cancel(&mut self, at: usize, streams: &[StreamId]) {
        let Some(connection) = self.quic(at) else { return };
        for stream in streams {
            connection.reset(*stream, h3::code::REQUEST_CANCELLED);
            connection.stop(*stream, h3::code::REQUEST_CANCELLED);
        }
    }

    pub fn connect_tcp(&mut self, at: usize) -> Option<StreamId> {
        let to = "target.example:80".parse().unwrap();
        self.request(at, &connect::request(&to, Some(&format!("Bearer {}", self.token))))
    }

    pub fn connect_udp(&mut self, at: usize) -> Option<StreamId> {
        let path = "/.well-known/masque/udp/192.0.2.7/53/";
        self.request(at, &connect_udp::request("vpn.example", path, Some(&format!("Bearer {TOKEN}"))))
    }

    /// Opens a path over another link.
    pub fn open_path(&mut self, link: LinkId) {
        let now = self.world.now;
        let remote = SERVER.parse().unwrap();
        if let Some(connection) = self.quic(0) {
            let _ = connection.open_path(now, LocalAddress::link(link), remote, PathStatus::Available);
        }
        self.run(20 * MS);
    }

    /// Writes a capsule, or a part of one, on the stream of a tunnel.
    pub fn capsule(&mut self, at: usize, bytes: &[u8]) {
        let frame = h3::encode_data(bytes);
        self.write(at, frame);
    }

    /// Writes on the stream of a tunnel.
    pub fn write(&mut self, at: usize, bytes: Bytes) {
        let Some(stream) = self.connections[at].request else { return };
        if let Some(connection) = self.quic(at) {
            connection.write(stream, bytes);
        }
    }

    /// Queues a datagram of the first tunnel in a context, on its first path.
    pub fn datagram(&mut self, context: u64, payload: &[u8]) {
        let Some(stream) = self.connections[0].request else { return };
        let prefix = datagram::prefix(stream, context);
        let bytes = Bytes::from([prefix.as_ref(), payload].concat());
        if let Some(connection) = self.quic(0) {
            connection.queue_datagram_on_path(PathId(0), bytes);
        }
        self.sent += 1;
        if self.sent.is_multiple_of(100) {
            self.run(MS);
        }
    }

    pub fn run(&mut self, time: Duration) {
        let end = self.world.now + time;
        while self.world.now < end {
            match self.world.machines.is_empty() {
                true => self.world.now += MS,
                false => self.world.run(MS),
            }
            self.step();
        }
    }

    fn step(&mut self) {
        // A request that crosses without delay is answered within the millisecond.
        for _ in 0..3 {
            self.drive();
            self.send();
            if self.world.machines.is_empty() {
                self.serve();
            }
            self.hear();
        }
        self.peak = self.peak.max(heap::held());
    }

    fn hear(&mut self) {
        let mine = |(to, _): &(SocketAddr, _)| to.ip() == address_of(LinkId(0)).ip();
        let unclaimed = self.world.unclaimed.as_mut().map(std::mem::take).unwrap_or_default();
        let unclaimed = unclaimed.into_iter().filter(mine);
        self.from_server.extend(unclaimed.map(|(to, data)| (to, BytesMut::from(&data[..]))));
        for (to, data) in std::mem::take(&mut self.from_server) {
            let local = Some(LocalAddress::link(LinkId(to.port() - 1000)));
            let remote = SERVER.parse().unwrap();
            if self.hears {
                self.endpoint.handle(self.world.now, local, remote, 0, data);
            }
        }
    }

    /// Handles the events of its own connections.
    fn drive(&mut self) {
        let now = self.world.now;
        for state in self.connections.iter_mut().filter(|state| !state.is_lost) {
            let Some(connection) = self.endpoint.get(state.id) else {
                state.is_lost = true;
                continue;
            };
            if connection.poll_timeout().is_some_and(|at| at <= now) {
                connection.handle_timeout(now);
            }
            while let Some(event) = connection.poll_event(now) {
                match event {
                    Event::Connected => {
                        state.is_established = true;
                        if let Ok(control) = connection.open_uni() {
                            connection.write(control, state.http.control_preface());
                        }
                    }
                    Event::Lost(_) => state.is_lost = true,
                    Event::StreamReadable(stream) => loop {
                        match connection.read(stream) {
                            Read::Data(data) => _ = state.http.handle_stream(stream, data, false),
                            Read::Finished => {
                                _ = state.http.handle_stream(stream, Bytes::new(), true);
                                break;
                            }
                            Read::Reset(_) | Read::Blocked => break,
                        }
                    },
                    _ => {}
                }
            }
            connection.receive_datagrams(|_, _| ());
            while let Some(event) = state.http.poll() {
                match event {
                    HttpEvent::Headers { stream, headers } if Some(stream) == state.request => {
                        state.response = Some(headers);
                    }
                    HttpEvent::Data { stream, data } if Some(stream) == state.request => {
                        state.capsules.push(&data);
                        while let Ok(Some(capsule)) = state.capsules.next() {
                            if let Capsule::AddressAssign(all) = capsule {
                                state.addresses = all.iter().map(|entry| entry.net.addr()).collect();
                            }
                        }
                    }
                    _ => {}
                }
            }
        }
    }

    /// Sends what its connections have for the server.
    fn send(&mut self) {
        let now = self.world.now;
        let server = &mut self.world.servers[0];
        for state in self.connections.iter().filter(|state| !state.is_lost) {
            let Some(connection) = self.endpoint.get(state.id) else { continue };
            while let Some(transmit) = connection.poll_transmit(now, &mut self.buffer) {
                let from = address_of(transmit.local.and_then(LocalAddress::as_link).unwrap_or(LinkId(0)));
                let size = transmit.segment_size.unwrap_or(self.buffer.len()).max(1);
                heap::counted(|| {
                    for datagram in self.buffer.chunks(size) {
                        let local = Some(SERVER.parse::<SocketAddr>().unwrap().ip());
                        server.handle_datagram(now, local, from, 0, BytesMut::from(datagram));
                    }
                    server.handle_batch(now);
                });
                self.buffer.clear();
            }
            self.endpoint.process_endpoint_events(state.id);
        }
    }

    /// The server's turn, with its edge.
    fn serve(&mut self) {
        let now = self.world.now;
        let Self { world, buffer, from_server, targets, relays, udp_flows, forwarded, .. } = self;
        let server = &mut world.servers[0];
        heap::counted(|| {
            if server.poll_timeout().is_some_and(|at| at <= now) {
                server.handle_timeout(now);
            }
            while let Some(event) = server.poll_event() {
                match event {
                    ServerEvent::Connect { relay, .. } => {
                        server.relay_opened(relay);
                        heap::uncounted(|| relays.push(relay));
                    }
                    ServerEvent::ConnectUdp { udp, .. } => {
                        server.udp_opened(udp);
                        heap::uncounted(|| udp_flows.push(udp));
                    }
                    ServerEvent::RelayReadable(relay) if *targets != Targets::Stop => {
                        while let RelayRead::Data(_) = server.relay_read(now, relay) {}
                    }
                    // The edge takes one chunk, which its target does not take.
                    ServerEvent::RelayReadable(relay) => drop(server.relay_read(now, relay)),
                    ServerEvent::RelayGone(relay) => relays.retain(|other| *other != relay),
                    ServerEvent::UdpGone(udp) => udp_flows.retain(|other| *other != udp),
                    _ => {}
                }
            }
            if *targets == Targets::Flood {
                for relay in relays.iter() {
                    let room = server.relay_writable_bytes(now, *relay);
                    if room > 0 {
                        server.relay_write(now, *relay, Bytes::from(vec![7; room]));
                    }
                }
            }
            while server.poll_udp().is_some() {}
            while let Some(packet) = server.poll_tun() {
                *forwarded += 1;
                server.recycle(packet);
            }
            while server.poll_change().is_some() {}
            while server.poll_closed_connection().is_some() {}
            while let Some(transmit) = server.poll_transmit(now, buffer) {
                heap::uncounted(|| {
                    let size = transmit.segment_size.unwrap_or(buffer.len()).max(1);
                    let datagrams = buffer.chunks(size).map(|data| (transmit.remote, BytesMut::from(data)));
                    from_server.extend(datagrams);
                });
                buffer.clear();
            }
        });
    }

    /// The most memory that the server held over `baseline` since then (bytes).
    pub fn over(&self, baseline: usize) -> usize {
        self.peak.saturating_sub(baseline)
    }

    pub fn is_alive(&self, at: usize) -> bool {
        !self.connections[at].is_lost
    }
}

/// The numbers one after the other as variable-length integers.
pub fn varints(numbers: &[u64]) -> Vec<u8> {
    let mut out = BytesMut::new();
    numbers.iter().for_each(|number| varint::encode(*number, &mut out));
    out.to_vec()
}

/// A capsule of any type that declares `declared` bytes and has `value`.
pub fn raw_capsule(kind: u64, declared: u64, value: &[u8]) -> Vec<u8> {
    let mut out = BytesMut::from(&varints(&[kind, declared])[..]);
    out.put_slice(value);
    out.to_vec()
}

/// Processor time of this thread.
pub fn cpu_time() -> Duration {
    // The kernel brings schedstat up to date at its ticks only.
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or_default())
}

/// The setup of a peer whose messages are its own.
impl World {
    pub fn rogue_setup(&self, windows: FlowControlWindows) -> ClientSetup {
        self.client_config_with(TOKEN, Scheduler::Auto, CongestionControl::Bbr, windows).setup
    }
}
