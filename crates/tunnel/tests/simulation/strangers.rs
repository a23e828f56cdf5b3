//! Clients of a server before they are authenticated, and many at once.

use std::{
    collections::{BTreeMap, VecDeque},
    net::SocketAddr,
};

use bytes::BytesMut;
use mpvpn_masque::{
    capsule::{Capsule, Family, RequestedAddress},
    connect_ip::ConnectIpRequest,
    connect_mpvpn,
    h3::{self, Event as HttpEvent, H3, Settings, Side},
    headers::Headers,
};
use mpvpn_quic::{
    Connection, ConnectionHandle, Endpoint, Event, LocalAddress, Read, StreamId, TransportOptions,
};
use mpvpn_tunnel::{Server, ServerEvent, UserLimits};
use mpvpn_types::{Duration, Instant, LinkId};

use crate::world::{MS, SERVER, TOKEN, World};

const LINK: LinkId = LinkId(0);

/// A client with one connection, which does what the test says.
struct Peer {
    endpoint: Endpoint,
    id: ConnectionHandle,
    address: SocketAddr,
    http: H3,
    /// Requests that it sends as soon as it is connected.
    requests: VecDeque<Headers>,
    /// The responses, in the order of arrival.
    responses: Vec<(StreamId, u16)>,
    connected: bool,
    /// Whether it reads what arrives, and so grants credit.
    reads: bool,
    lost: Option<String>,
}

impl Peer {
    fn new(world: &World, now: Instant, address: &str) -> Self {
        // Each has random numbers of its own, because connection IDs are made of them.
        let mut seed = [0; 32];
        seed[..address.len()].copy_from_slice(address.as_bytes());
        let options = TransportOptions { rng_seed: Some(seed), ..TransportOptions::default() };
        let setup = world.client_setup(&options, seed);
        let mut endpoint = Endpoint::client(&setup);
        let id = endpoint
            .connect(now, &setup, LocalAddress::link(LINK), SERVER.parse().unwrap(), "mpvpn")
            .unwrap();
        Self {
            endpoint,
            id,
            address: address.parse().unwrap(),
            http: H3::new(Side::Client, Settings::default()),
            requests: VecDeque::new(),
            responses: Vec::new(),
            connected: false,
            reads: true,
            lost: None,
        }
    }

    fn request(mut self, request: Headers) -> Self {
        self.requests.push_back(request);
        self
    }

    fn connection(&mut self) -> &mut Connection {
        self.endpoint.get(self.id).expect("a connection")
    }

    /// Sends SETTINGS.
    fn send_settings(&mut self) {
        let preface = self.http.control_preface();
        let connection = self.connection();
        let control = connection.open_uni().expect("a control stream");
        connection.write(control, preface);
    }

    /// Handles events and timers, and returns the UDP payloads to send and when it wants to be called again.
    fn poll(&mut self, now: Instant) -> (Vec<BytesMut>, Option<Instant>) {
        let Some(connection) = self.endpoint.get(self.id) else { return (Vec::new(), None) };
        if connection.poll_timeout().is_some_and(|at| at <= now) {
            connection.handle_timeout(now);
        }
        let mut readable = Vec::new();
        while let Some(event) = connection.poll_event(now) {
            match event {
                Event::Connected => self.connected = true,
                Event::Lost(reason) => self.lost = Some(reason.to_string()),
                Event::StreamReadable(stream) if self.reads => readable.push(stream),
                _ => {}
            }
        }
        for stream in readable {
            while let Read::Data(data) = connection.read(stream) {
                self.http.handle_stream(stream, data, false).unwrap();
            }
        }
        while let Some(event) = self.http.poll() {
            if let HttpEvent::Headers { stream, headers } = event {
                self.responses.push((stream, headers.status().unwrap()));
            }
        }
        while self.connected && !self.requests.is_empty() {
            let Ok(stream) = connection.open_bi() else { break };
            let request = self.requests.pop_front().expect("it is not empty");
            connection.write(stream, h3::encode_headers(&request));
        }
        let (mut packets, mut buffer) = (Vec::new(), Vec::new());
        while let Some(transmit) = connection.poll_transmit(now, &mut buffer) {
            packets.extend(buffer.chunks(transmit.segment_size.unwrap_or(transmit.size)).map(BytesMut::from));
            buffer.clear();
        }
        let next = connection.poll_timeout();
        self.endpoint.process_endpoint_events(self.id);
        (packets, next)
    }
}

/// A server and its peers, with a link without limits between them.
struct Net {
    now: Instant,
    server: Server,
    delay: Duration,
    peers: Vec<Peer>,
    /// When each peer wants to be called.
    due: Vec<Option<Instant>>,
    /// UDP payloads on the way, by arrival: from a peer, or to it.
    to_server: BTreeMap<(Instant, usize), (usize, BytesMut)>,
    to_peers: BTreeMap<(Instant, usize), (usize, BytesMut)>,
    sent: usize,
}

impl Net {
    fn new(world: &mut World, delay: Duration) -> Self {
        let server = world.servers.remove(0);
        let (to_server, to_peers) = (BTreeMap::new(), BTreeMap::new());
        Self {
            now: world.now,
            server,
            delay,
            peers: Vec::new(),
            due: Vec::new(),
            to_server,
            to_peers,
            sent: 0,
        }
    }

    fn add(&mut self, peer: Peer) -> usize {
        self.peers.push(peer);
        self.due.push(Some(self.now));
        self.peers.len() - 1
    }

    /// Polls this peer, whose connection the test has used.
    fn wake(&mut self, peer: usize) {
        self.due[peer] = Some(self.now);
    }

    /// Lets time pass, a millisecond at a time.
    fn run(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            self.now += MS;
            self.step();
        }
    }

    fn step(&mut self) {
        let now = self.now;
        while let Some(entry) = self.to_peers.first_entry().filter(|entry| entry.key().0 <= now) {
            let (peer, data) = entry.remove();
            let at = Some(LocalAddress::link(LINK));
            self.peers[peer].endpoint.handle(now, at, SERVER.parse().unwrap(), 0, data);
            self.due[peer] = Some(now);
        }
        for (number, peer) in self.peers.iter_mut().enumerate() {
            if self.due[number].is_none_or(|at| at > now) {
                continue;
            }
            let (packets, next) = peer.poll(now);
            self.due[number] = next;
            for data in packets {
                self.sent += 1;
                self.to_server.insert((now + self.delay, self.sent), (number, data));
            }
        }
        let local = Some(SERVER.parse::<SocketAddr>().unwrap().ip());
        while let Some(entry) = self.to_server.first_entry().filter(|entry| entry.key().0 <= now) {
            let (peer, data) = entry.remove();
            self.server.handle_datagram(now, local, self.peers[peer].address, 0, data);
        }
        self.server.handle_batch(now);
        if self.server.poll_timeout().is_some_and(|at| at <= now) {
            self.server.handle_timeout(now);
        }
        // The site has no pages.
        while let Some(event) = self.server.poll_event() {
            if let ServerEvent::Visit { visit, .. } = event {
                self.server.visit_respond(visit, &Headers::response(404));
                self.server.visit_finish(now, visit);
            }
        }
        let by_address: BTreeMap<_, _> =
            self.peers.iter().enumerate().map(|(number, peer)| (peer.address, number)).collect();
        let mut buffer = Vec::new();
        while let Some(transmit) = self.server.poll_transmit(now, &mut buffer) {
            let peer = by_address[&transmit.remote];
            for data in buffer.chunks(transmit.segment_size.unwrap_or(transmit.size)) {
                self.sent += 1;
                self.to_peers.insert((now + self.delay, self.sent), (peer, BytesMut::from(data)));
            }
            buffer.clear();
        }
    }
}

/// A request that authenticates its connection.
fn authenticated() -> Headers {
    connect_mpvpn::request("mpvpn", Some(&format!("Bearer {TOKEN}")), None)
}

fn get() -> Headers {
    let mut get = Headers::new();
    for (name, value) in [(":method", "GET"), (":scheme", "https"), (":authority", "mpvpn"), (":path", "/")] {
        get.push(name, value);
    }
    get
}

/// How many streams a peer can open now, and how many bytes leave on the last of them.
fn allowance(net: &mut Net, peer: usize) -> (usize, usize) {
    const BYTES: usize = 4 << 20;
    let connection = net.peers[peer].connection();
    let streams: Vec<_> = std::iter::from_fn(|| connection.open_bi().ok()).collect();
    let last = *streams.last().expect("a stream");
    connection.write(last, vec![0x21; BYTES].into());
    net.wake(peer);
    net.run(2000 * MS);
    let connection = net.peers[peer].connection();
    (streams.len(), BYTES - connection.unsent(last))
}

#[test]
fn a_stranger_has_few_streams_and_a_small_window_until_it_is_authenticated() {
    let mut world = World::new();
    let mut net = Net::new(&mut world, 10 * MS);
    let stranger = net.add(Peer::new(&world, net.now, "198.51.100.1:1000"));
    let user = net.add(Peer::new(&world, net.now, "198.51.100.2:1000").request(authenticated()));
    let relay = net.add(Peer::new(&world, net.now, "127.0.0.1:1000"));
    let local = net.add(Peer::new(&world, net.now, "127.0.0.2:1000"));
    net.run(30 * MS);
    net.peers[user].send_settings();
    net.wake(user);
    net.run(100 * MS);
    assert_eq!(net.peers[user].responses, [(0, 200)]);
    let (streams, bytes) = allowance(&mut net, stranger);
    assert_eq!((streams, bytes), (8, 128 << 10), "of a stranger");
    // One stream has its request.
    let (streams, bytes) = allowance(&mut net, user);
    assert!(streams == 511 && bytes >= 2304 << 10, "of a user: {streams} streams, {bytes} bytes");
    // Another program of the server's machine, as a proxy for UDP.
    let (streams, bytes) = allowance(&mut net, local);
    assert_eq!((streams, bytes), (8, 128 << 10), "of a stranger behind a local proxy");
    // A socket of the server itself, which only valid credentials open.
    let (streams, bytes) = allowance(&mut net, relay);
    assert!(streams == 512 && bytes >= 2304 << 10, "of a relay: {streams} streams, {bytes} bytes");
}

#[test]
fn a_connection_beyond_those_of_its_user_is_refused_at_any_shard_however_often_it_asks() {
    // A session of one class has a connection in each of 16 threads of its client, and as many that these
    // have replaced.
    const MOST: usize = 32;
    let limits = UserLimits { max_sessions: Some(1), max_classes: 1, ..UserLimits::default() };
    let mut world = World::with_limits(limits, 2);
    let mut shards = [Net::new(&mut world, 10 * MS), Net::new(&mut world, 10 * MS)];
    let ask = |net: &mut Net, peer: usize| {
        net.peers[peer].requests.push_back(authenticated());
        net.wake(peer);
        net.run(100 * MS);
    };
    let connect = |net: &mut Net| {
        let address = format!("198.51.100.{}:1000", net.peers.len());
        let peer = net.add(Peer::new(&world, net.now, &address));
        net.run(30 * MS);
        net.peers[peer].send_settings();
        ask(net, peer);
        peer
    };
    // More at one shard than at the other.
    for number in 0..MOST {
        let net = &mut shards[usize::from(number % 4 == 0)];
        let peer = connect(net);
        assert_eq!(net.peers[peer].responses, [(0, 200)], "number {number}");
    }
    let beyond = shards.each_mut().map(connect);
    for (net, peer) in shards.iter_mut().zip(beyond) {
        ask(net, peer);
        assert_eq!(net.peers[peer].responses, [(0, 503), (4, 503)]);
    }
    let [first, second] = &mut shards;
    let now = first.now;
    first.peers[0].connection().close(now, 0, "enough");
    first.wake(0);
    first.run(Duration::from_secs(3));
    ask(second, beyond[1]);
    assert_eq!(
        second.peers[beyond[1]].responses,
        [(0, 503), (4, 503), (8, 200)],
        "the place of a connection at the other shard"
    );
    ask(first, beyond[0]);
    assert_eq!(first.peers[beyond[0]].responses.last(), Some(&(8, 503)), "that was the only place");
}

#[test]
fn requests_before_settings_are_answered_once_each_after_them() {
    let mut world = World::new();
    let mut net = Net::new(&mut world, 10 * MS);
    let mut peer = Peer::new(&world, net.now, "198.51.100.1:1000");
    peer.requests.extend(std::iter::repeat_n(get(), 7));
    peer.requests.push_back(authenticated());
    let peer = net.add(peer);
    net.run(200 * MS);
    assert!(net.peers[peer].connected);
    assert_eq!(net.peers[peer].responses, [], "its SETTINGS are missing");
    // More frames for the same streams.
    for stream in [0, 4, 8] {
        net.peers[peer].connection().finish(stream);
        net.wake(peer);
        net.run(50 * MS);
    }
    net.peers[peer].send_settings();
    net.wake(peer);
    net.run(200 * MS);
    let mut responses = net.peers[peer].responses.clone();
    responses.sort_unstable();
    let expected: Vec<_> = (0..7).map(|number| (4 * number, 404)).chain([(28, 200)]).collect();
    assert_eq!(responses, expected);
}

#[test]
fn two_hundred_clients_behind_one_address_are_back_within_10_s_of_a_restart() {
    const CONNECTIONS: usize = 4 * 200;
    let mut world = World::new();
    // The server has restarted: it knows none of them, and all connect at the same moment, with a connection
    // for each of four classes.
    let mut net = Net::new(&mut world, 20 * MS);
    for number in 0..CONNECTIONS {
        let address = format!("198.51.100.1:{}", 1000 + number);
        net.add(Peer::new(&world, net.now, &address).request(authenticated()));
    }
    let start = net.now;
    let mut settled = vec![false; CONNECTIONS];
    while net.now < start + Duration::from_secs(10)
        && !net.peers.iter().all(|peer| !peer.responses.is_empty())
    {
        net.run(10 * MS);
        for (number, settled) in settled.iter_mut().enumerate() {
            if net.peers[number].connected && !std::mem::replace(settled, true) {
                net.peers[number].send_settings();
                net.wake(number);
            }
        }
    }
    let back = net.peers.iter().filter(|peer| peer.responses == [(0, 200)]).count();
    assert_eq!(back, CONNECTIONS, "after {:?}", net.now - start);
}

#[test]
fn strangers_who_complete_the_handshake_and_stop_there_do_not_keep_a_client_out() {
    const STRANGERS: usize = 1100;
    let mut world = World::new();
    let mut net = Net::new(&mut world, 10 * MS);
    for number in 0..STRANGERS {
        let address = format!("203.0.{}.{}:1000", number / 200, number % 200 + 1);
        net.add(Peer::new(&world, net.now, &address));
        // 500 in a second.
        net.run(2 * MS);
    }
    let client = net.add(Peer::new(&world, net.now, "198.51.100.1:1000").request(authenticated()));
    let start = net.now;
    while !net.peers[client].connected {
        net.run(MS);
        assert!(net.now < start + Duration::from_secs(2), "it is not connected");
    }
    net.peers[client].send_settings();
    net.wake(client);
    net.run(100 * MS);
    assert_eq!(net.peers[client].responses, [(0, 200)]);
    let closed = net.peers.iter().filter(|peer| peer.lost.is_some()).count();
    assert!(closed >= STRANGERS - 1024, "only {closed} were closed");
    // An authenticated client is no stranger: it stays when more of them come.
    for number in 0..200 {
        net.add(Peer::new(&world, net.now, &format!("203.0.113.{}:1000", number + 1)));
        net.run(2 * MS);
    }
    net.run(Duration::from_secs(3));
    assert_eq!(net.peers[client].lost, None);
}

#[test]
fn a_client_that_takes_no_answers_loses_its_connection_before_they_take_memory() {
    let mut world = World::new();
    let mut net = Net::new(&mut world, 10 * MS);
    let mut connect = ConnectIpRequest::new("mpvpn", "/.well-known/masque/ip/*/*/");
    connect.authorization = Some(format!("Bearer {TOKEN}"));
    let mut client = Peer::new(&world, net.now, "198.51.100.1:1000").request(connect.headers());
    client.reads = false;
    let client = net.add(client);
    net.run(50 * MS);
    net.peers[client].send_settings();
    net.wake(client);
    net.run(50 * MS);
    // Requests for 32 addresses each; the client's windows hold 2304 KiB of answers, and it reads none.
    let asked = (1..=32).map(|request_id| RequestedAddress::any(request_id, Family::V4)).collect();
    let mut capsule = BytesMut::new();
    Capsule::AddressRequest(asked).encode(&mut capsule);
    let mut sent = 0;
    while net.peers[client].lost.is_none() {
        net.peers[client].connection().write(0, h3::encode_data(&capsule.repeat(100)));
        sent += 100 * capsule.len();
        net.wake(client);
        net.run(10 * MS);
        assert!(sent < 8 << 20, "still connected after {sent} bytes of requests");
    }
    let reason = net.peers[client].lost.as_ref().unwrap();
    assert!(reason.contains("the client takes no answers"), "{reason}");
    // Not before its windows were full: a client may read late.
    assert!(sent > 1 << 20, "closed after {sent} bytes");
}
