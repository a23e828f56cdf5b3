use std::{
    collections::VecDeque,
    io::{Read, Write},
    net::{TcpListener, TcpStream, UdpSocket},
    thread::JoinHandle,
};

use bytes::Bytes;
use mpvpn_access::AccessRule;
use mpvpn_http::limiter::Limiter;
use mpvpn_input::rules::Ports;
use mpvpn_names::resolver::{Resolver, resolver};
use mpvpn_os::poll::{Events, PollWaker, Poller};
use mpvpn_sockets::splice::RelayRead;

use super::*;

mod udp;

const LONG: Duration = Duration::from_secs(20);
const MB: usize = 1 << 20;

/// Fake streams of clients.
#[derive(Default)]
struct Fake(HashMap<u32, Stream>);

#[derive(Default)]
struct Stream {
    /// Bytes from the client, not yet read.
    sent: VecDeque<Bytes>,
    has_finished: bool,
    /// Bytes to the client.
    got: Vec<u8>,
    window: usize,
    is_open: bool,
    is_ended: bool,
    is_aborted: bool,
    /// UDP payloads to the client.
    payloads: Vec<Vec<u8>>,
    /// Bytes that the kernel holds.
    in_kernel: usize,
    failure: Option<(ProxyError, String)>,
}

impl Stream {
    fn has_outcome(&self) -> bool {
        self.is_open || self.failure.is_some()
    }
}

impl Fake {
    fn stream(&mut self, id: u32) -> &mut Stream {
        self.0.entry(id).or_default()
    }
}

impl ByteStreams for Fake {
    type Id = u32;

    fn read(&mut self, _: Instant, id: u32) -> RelayRead {
        let stream = self.stream(id);
        match stream.sent.pop_front() {
            Some(data) => RelayRead::Data(data),
            None if stream.has_finished => RelayRead::Finished,
            None => RelayRead::Blocked,
        }
    }

    fn writable_bytes(&mut self, _: Instant, id: u32) -> usize {
        self.stream(id).window
    }

    fn write(&mut self, _: Instant, id: u32, data: Bytes) {
        let stream = self.stream(id);
        assert!(stream.is_open && !stream.is_ended && !data.is_empty());
        stream.window = stream.window.checked_sub(data.len()).expect("written beyond the window");
        stream.got.extend_from_slice(&data);
    }

    fn finish(&mut self, _: Instant, id: u32) {
        assert!(!std::mem::replace(&mut self.stream(id).is_ended, true), "ended twice");
    }
}

impl Relays for Fake {
    fn opened(&mut self, _: Instant, id: u32) {
        assert!(!std::mem::replace(&mut self.stream(id).is_open, true), "told twice");
    }

    fn failed(&mut self, _: Instant, id: u32, failure: ProxyError, reason: String) {
        assert!(!self.stream(id).has_outcome(), "told twice");
        self.stream(id).failure = Some((failure, reason));
    }

    fn abort(&mut self, _: Instant, id: u32) {
        assert!(!std::mem::replace(&mut self.stream(id).is_aborted, true), "aborted twice");
    }

    fn in_kernel(&mut self, _: Instant, id: u32, bytes: usize) {
        self.stream(id).in_kernel = bytes;
    }

    fn payload(&mut self, _: Instant, id: u32, payload: &[u8]) {
        assert!(self.stream(id).is_open, "a payload before it is open");
        self.stream(id).payloads.push(payload.to_vec());
    }
}

/// An egress with fake clients.
struct World {
    egress: Egress<u32>,
    relays: Fake,
    poller: Poller,
    events: Events,
    wake: PollWaker,
    budget: UserLimiter,
    /// Added to the clock.
    skipped: Duration,
    turns: usize,
    resolver: Option<Resolver>,
    thread: Option<JoinHandle<()>>,
}

const WAKE: u64 = 1;

impl World {
    /// Clients may connect to this machine.
    fn new() -> Self {
        let here = ["127.0.0.1/32", "::1/128"].map(|net| net.parse().unwrap());
        let rule = AccessRule { allow: true, users: vec![], to: here.into(), ports: vec![] };
        Self::with(vec![rule], Limiter::new(100, 50))
    }

    fn with(rules: Vec<AccessRule>, budget: UserLimiter) -> Self {
        let (wake, poller) = (PollWaker::new().unwrap(), Poller::new().unwrap());
        poller.add(&wake, WAKE, Interest::Read).unwrap();
        let (names, resolver) = resolver();
        let setup = EgressSetup {
            access: Arc::new(Access::new(rules, vec!["10.9.0.1/24".parse().unwrap()])),
            addresses: Box::new(|| Ok(vec!["203.0.113.7".parse().unwrap()])),
            resolver: names.client(wake.clone()),
            relays: budget.clone(),
            lookups: Limiter::new(100, 2),
        };
        Self {
            egress: Egress::new(Instant::now(), setup).unwrap(),
            relays: Fake::default(),
            poller,
            events: Events::with_capacity(64),
            wake,
            budget,
            skipped: Duration::ZERO,
            turns: 0,
            resolver: Some(resolver),
            thread: None,
        }
    }

    /// Starts the resolver.
    fn resolve(&mut self) {
        let resolver = self.resolver.take().expect("once");
        self.thread = Some(std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(resolver.serve());
        }));
    }

    fn now(&self) -> Instant {
        Instant::now() + self.skipped
    }

    /// Calls the egress as the event loop does.
    fn act(&mut self, call: impl FnOnce(&mut Egress<u32>, &mut Context<'_, Fake>)) {
        let (now, poller, streams) = (self.now(), &self.poller, &mut self.relays);
        call(&mut self.egress, &mut Context { now, poller, streams });
    }

    /// One iteration of the event loop; waits at most 10 ms.
    fn turn(&mut self) {
        let Self { egress, relays: streams, poller, events, .. } = self;
        poller.wait(events, Some(Duration::from_millis(10))).unwrap();
        let now = Instant::now() + self.skipped;
        let cx = &mut Context { now, poller, streams };
        for event in events.iter() {
            match event.token {
                WAKE => {
                    self.wake.drain();
                    egress.poll_resolver(cx);
                }
                _ => {
                    assert!(event.token >= FIRST_EGRESS_TOKEN);
                    self.turns += 1;
                    egress.on_socket_ready(cx, event);
                }
            }
        }
        if egress.poll_timeout().is_some_and(|at| at <= now) {
            egress.handle_timeout(cx);
        }
        assert_eq!(egress.table.len(), egress.timers.len());
        assert_eq!(egress.table.len(), egress.slots.len());
    }

    #[track_caller]
    fn until(&mut self, what: &str, mut is_so: impl FnMut(&mut Self) -> bool) {
        let begin = Instant::now();
        while !is_so(self) {
            assert!(begin.elapsed() < LONG, "not in time: {what}");
            self.turn();
        }
    }

    /// The time passes after which the kernel's memory is looked at.
    fn look_at_the_kernel(&mut self) {
        self.skipped += KERNEL_LOOK_DELAY;
        self.turn();
    }

    fn connect(&mut self, id: u32, to: &str) {
        let request = ("anna", to.parse().unwrap(), Transport::Tcp);
        self.act(|egress, cx| egress.connect(cx, id, request));
    }

    fn readable(&mut self, id: u32) {
        self.act(|egress, cx| egress.on_stream_readable(cx, id));
    }

    fn send(&mut self, id: u32, data: &[u8], piece: usize) {
        self.relays.stream(id).sent.extend(data.chunks(piece).map(Bytes::copy_from_slice));
        self.readable(id);
    }

    fn finish(&mut self, id: u32) {
        self.relays.stream(id).has_finished = true;
        self.readable(id);
    }

    /// The client's stream accepts `bytes` more.
    fn add_window(&mut self, id: u32, bytes: usize) {
        self.relays.stream(id).window += bytes;
        self.act(|egress, cx| egress.on_stream_writable(cx, id));
    }

    /// The failure of a relay that was not established.
    #[track_caller]
    fn failure(&mut self, id: u32) -> (ProxyError, String) {
        self.until("a failure", |world| world.relays.stream(id).has_outcome());
        let failure = self.relays.stream(id).failure.take().expect("a failure");
        assert_eq!((self.egress.table.len(), self.budget.in_use()), (0, 0), "something is left");
        failure
    }

    /// An established connection, and its other end.
    fn open(&mut self, id: u32) -> TcpStream {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        self.connect(id, &listener.local_addr().unwrap().to_string());
        let (peer, _) = listener.accept().unwrap();
        self.until("a connection", |world| world.relays.stream(id).is_open);
        assert_eq!(self.egress.open_connections, 1);
        peer
    }

    #[track_caller]
    fn is_empty(&mut self) {
        assert_eq!((self.egress.table.len(), self.egress.open_connections, self.budget.in_use()), (0, 0, 0));
        assert!(self.egress.slots.is_empty() && self.egress.timers.is_empty());
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // A resolver that still waits for a name server is left to the end of the process.
        drop(self.thread.take());
    }
}

/// Opens a UDP flow to `to`, with payloads that the client sends before it is established.
fn flow(world: &mut World, id: u32, to: &str, early: &[&[u8]]) {
    let now = world.now();
    let asked = ("anna", to.parse().unwrap(), Transport::Udp);
    world.act(|egress, cx| egress.connect(cx, id, asked));
    early.iter().for_each(|payload| world.egress.send_payload(now, id, payload));
}

fn noise(length: usize) -> Vec<u8> {
    let mut state = 1_u32;
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    std::iter::repeat_with(next).take(length).collect()
}

#[test]
fn megabytes_go_both_ways_unchanged() {
    let mut world = World::new();
    let mut peer = world.open(1);
    let (there, back) = (noise(5 * MB + 3), noise(7 * MB + 1));
    let mut reading = peer.try_clone().unwrap();
    let reader = std::thread::spawn(move || {
        let mut got = Vec::new();
        reading.read_to_end(&mut got).unwrap();
        got
    });
    let sent = back.clone();
    let writer = std::thread::spawn(move || {
        peer.write_all(&sent).unwrap();
        peer.shutdown(std::net::Shutdown::Write).unwrap();
    });
    // As many datagrams, and as one large chunk.
    world.send(1, &there[..4 * MB], 1250);
    world.send(1, &there[4 * MB..], MB);
    world.finish(1);
    world.until("the end", |world| {
        if world.relays.stream(1).window < MB / 2 {
            world.add_window(1, MB / 3);
        }
        world.relays.stream(1).is_ended && world.egress.open_connections == 0
    });
    writer.join().unwrap();
    assert!(reader.join().unwrap() == there, "the destination got something else");
    assert!(world.relays.stream(1).got == back, "the client got something else");
    assert!(!world.relays.stream(1).is_aborted);
    world.is_empty();
}

#[test]
fn each_half_ends_by_itself() {
    let mut world = World::new();
    let mut peer = world.open(1);
    // The client closes first.
    world.send(1, b"question", 3);
    world.finish(1);
    let mut got = String::new();
    peer.read_to_string(&mut got).unwrap();
    assert_eq!((got.as_str(), world.egress.open_connections), ("question", 1));
    peer.write_all(b"answer").unwrap();
    world.add_window(1, 100);
    world.until("the answer", |world| world.relays.stream(1).got == b"answer");
    assert!(!world.relays.stream(1).is_ended);
    drop(peer);
    world.until("the end", |world| world.relays.stream(1).is_ended);
    world.is_empty();

    // The target closes first.
    let mut peer = world.open(2);
    world.add_window(2, 100);
    peer.write_all(b"greeting").unwrap();
    peer.shutdown(std::net::Shutdown::Write).unwrap();
    world.until("the end", |world| world.relays.stream(2).is_ended);
    assert_eq!(world.relays.stream(2).got, b"greeting");
    let before = world.turns;
    (0..5).for_each(|_| world.turn());
    assert_eq!(world.turns, before, "woken for an end that is known");
    world.send(2, b"more", 4);
    let mut got = [0; 4];
    peer.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"more");
    world.finish(2);
    assert_eq!(peer.read(&mut got).unwrap(), 0);
    assert!(!world.relays.stream(2).is_aborted);
    world.is_empty();
}

#[test]
fn what_the_client_sends_before_the_connection_stands_arrives() {
    let mut world = World::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    world.connect(1, &listener.local_addr().unwrap().to_string());
    world.send(1, b"early", 2);
    world.finish(1);
    let (mut peer, _) = listener.accept().unwrap();
    world.until("a connection", |world| world.relays.stream(1).is_open);
    let mut got = String::new();
    peer.read_to_string(&mut got).unwrap();
    assert_eq!(got, "early");
}

#[test]
fn a_client_without_room_stops_the_destination() {
    let mut world = World::new();
    let mut peer = world.open(1);
    peer.set_nonblocking(true).unwrap();
    let mut sent = 0;
    let chunk = noise(MB);
    // The kernel's buffers take some megabytes.
    let mut fill = |world: &mut World| {
        let mut stalled = 0;
        while stalled < 5 {
            match peer.write(&chunk) {
                Ok(count) => (sent, stalled) = (sent + count, 0),
                Err(_) => stalled += 1,
            }
            world.turn();
        }
        sent
    };
    let first = fill(&mut world);
    assert!(world.relays.stream(1).got.is_empty());
    let before = world.turns;
    (0..5).for_each(|_| world.turn());
    assert_eq!(world.turns, before, "woken for what nobody has a window for");
    assert_eq!(world.relays.stream(1).in_kernel, 0, "it may be read at once");
    world.look_at_the_kernel();
    assert!(world.relays.stream(1).in_kernel > 64 << 10, "{}", world.relays.stream(1).in_kernel);
    assert_eq!(fill(&mut world), first, "the destination did not stall");
    world.add_window(1, 100);
    world.until("the bytes that fit the window", |world| world.relays.stream(1).got.len() == 100);
    world.add_window(1, first - 100);
    world.until("the rest", |world| world.relays.stream(1).got.len() == first);
    world.look_at_the_kernel();
    assert_eq!(world.relays.stream(1).in_kernel, 0);
    assert!(fill(&mut world) > first);
}

#[test]
fn a_destination_that_reads_slowly_stops_the_client() {
    let mut world = World::new();
    let mut peer = world.open(1);
    let data = noise(40 * MB);
    world.send(1, &data, 1250);
    let left = |world: &mut World| world.relays.stream(1).sent.iter().map(Bytes::len).sum::<usize>();
    let mut before = usize::MAX;
    world.until("a stall", |world| {
        (0..5).for_each(|_| world.turn());
        std::mem::replace(&mut before, left(world)) == before
    });
    assert!(before > 0, "all was taken");
    world.look_at_the_kernel();
    assert!(world.relays.stream(1).in_kernel > 64 << 10, "{}", world.relays.stream(1).in_kernel);
    assert_eq!(world.egress.table.iter().count(), 1);
    world.finish(1);
    let reader = std::thread::spawn(move || {
        let mut got = Vec::new();
        peer.read_to_end(&mut got).unwrap();
        got
    });
    world.until("the rest", |world| left(world) == 0 && !world.relays.stream(1).is_ended);
    world.add_window(1, 1);
    world.until("the end", |world| world.relays.stream(1).is_ended);
    assert!(reader.join().unwrap() == data);
    world.is_empty();
}

fn break_it(peer: TcpStream) {
    // Unread bytes turn the close into a reset.
    drop(peer);
}

#[test]
fn a_reset_of_the_destination_is_told() {
    for window in [0, 100] {
        let mut world = World::new();
        let peer = world.open(1);
        world.send(1, b"never read", 100);
        world.add_window(1, window);
        // It has to be there.
        peer.peek(&mut [0]).unwrap();
        break_it(peer);
        world.until("the reset", |world| world.relays.stream(1).is_aborted);
        assert!(!world.relays.stream(1).is_ended);
        world.is_empty();
        world.readable(1);
        world.add_window(1, 5);
        world.egress.on_client_gone(1);
    }
}

#[test]
fn a_reset_after_the_end_of_the_destination_is_told() {
    let mut world = World::new();
    let peer = world.open(1);
    world.add_window(1, 100);
    drop(peer);
    world.until("the end", |world| world.relays.stream(1).is_ended);
    world.send(1, b"to nobody", 100);
    world.until("the reset", |world| world.relays.stream(1).is_aborted);
    world.is_empty();
}

#[test]
fn a_client_that_is_gone_resets_the_connection() {
    let mut world = World::new();
    let mut peer = world.open(1);
    world.send(1, b"some", 4);
    peer.read_exact(&mut [0; 4]).unwrap();
    world.egress.on_client_gone(1);
    let error = peer.read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
    world.turn();
    let stream = world.relays.stream(1);
    assert!(!stream.is_aborted && !stream.is_ended, "told about what was given up");
    world.is_empty();

    let mut peer = world.open(2);
    world.egress.end();
    assert!(peer.read(&mut [0]).is_err());
    world.is_empty();
}

#[test]
fn both_have_ended_but_the_client_has_no_room_yet() {
    let mut world = World::new();
    let mut peer = world.open(1);
    peer.write_all(b"the last words").unwrap();
    world.finish(1);
    assert_eq!(peer.read(&mut [0]).unwrap(), 0);
    drop(peer);
    (0..5).for_each(|_| world.turn());
    let before = world.turns;
    (0..5).for_each(|_| world.turn());
    assert_eq!(world.turns, before, "woken again and again");
    world.add_window(1, 3);
    assert_eq!(world.relays.stream(1).got, b"the");
    world.add_window(1, 100);
    world.until("the end", |world| world.relays.stream(1).is_ended);
    assert_eq!(world.relays.stream(1).got, b"the last words");
    world.is_empty();
}

#[test]
fn why_there_is_no_connection_is_told() {
    let mut world = World::new();
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    world.connect(1, &closed.to_string());
    let (failure, reason) = world.failure(1);
    assert_eq!(failure, ProxyError::Refused);
    assert!(reason.contains(&closed.to_string()), "{reason}");

    for (id, to) in ["10.0.0.1:80", "[::ffff:192.168.0.1]:80", "169.254.169.254:80", "203.0.113.7:22"]
        .into_iter()
        .enumerate()
    {
        world.connect(10 + id as u32, to);
        assert_eq!(world.failure(10 + id as u32).0, ProxyError::Prohibited, "{to}");
    }
}

#[test]
fn this_machine_is_reached_by_none_of_its_addresses() {
    let all = local_address_reader().unwrap()().unwrap();
    assert!(all.iter().any(IpAddr::is_loopback), "{all:?}");
    let mut world = World::with(vec![], Limiter::new(9, 9));
    world.egress.access = Arc::default();
    world.egress.local_addresses = LocalAddresses::new(world.now(), local_address_reader().unwrap()).unwrap();
    for ip in all {
        world.connect(1, &Authority::from(SocketAddr::new(ip, 80)).to_string());
        assert_eq!(world.failure(1).0, ProxyError::Prohibited, "{ip}");
    }
}

#[test]
fn rules_are_about_users_and_ports() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to: Authority = listener.local_addr().unwrap().into();
    let rule = AccessRule {
        allow: true,
        users: vec!["bob".into()],
        to: vec!["127.0.0.1/32".parse().unwrap()],
        ports: vec![Ports::new(to.port, to.port).unwrap()],
    };
    let mut world = World::with(vec![rule], Limiter::new(9, 9));
    world.act(|egress, cx| egress.connect(cx, 1, ("anna", to.clone(), Transport::Tcp)));
    assert_eq!(world.failure(1).0, ProxyError::Prohibited);
    world.act(|egress, cx| egress.connect(cx, 2, ("bob", to, Transport::Tcp)));
    world.until("a connection", |world| world.relays.stream(2).is_open);
}

/// Names have addresses of this machine among others, as names of an attacker may.
#[test]
fn rules_that_do_not_name_an_address_of_the_machine_do_not_lead_there() {
    let listener = TcpListener::bind("127.0.0.2:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let port = listener.local_addr().unwrap().port();
    let target = UdpSocket::bind(("127.0.0.2", port)).unwrap();
    target.set_nonblocking(true).unwrap();
    let rule = |to: &[&str], ports: &[Ports]| AccessRule {
        allow: true,
        users: vec![],
        to: to.iter().map(|net| net.parse().unwrap()).collect(),
        ports: ports.to_vec(),
    };
    let web = [Ports::new(port, port).unwrap()];
    for broad in [rule(&[], &[]), rule(&[], &web), rule(&["127.0.0.0/8"], &[]), rule(&["0.0.0.0/0"], &web)] {
        let shown = format!("{broad:?}");
        let mut world = World::with(vec![rule(&["127.0.0.1/32"], &[]), broad], Limiter::new(9, 9));
        let now = world.now();
        for (name, answer) in [
            ("own.example", &["127.0.0.2"][..]),
            ("mapped.example", &["::ffff:127.0.0.2", "169.254.169.254", "203.0.113.7"]),
            ("first.example", &["127.0.0.2", "127.0.0.1"]),
            ("second.example", &["127.0.0.1", "127.0.0.2"]),
        ] {
            let answer = answer.iter().map(|ip| ip.parse().unwrap()).collect();
            let _ = world.egress.name_cache.complete(now, name, Ok(answer));
        }
        let forbidden = ["127.0.0.2", "[::ffff:127.0.0.2]", "[64:ff9b::127.0.0.2]", "0.0.0.0", "[::]"];
        let others = ["169.254.169.254", "[fd00:ec2::254]", "[fe80::1]", "203.0.113.7"];
        for host in forbidden.iter().chain(&others).chain(&["own.example", "mapped.example"]) {
            world.connect(1, &format!("{host}:{port}"));
            assert_eq!(world.failure(1).0, ProxyError::Prohibited, "TCP to {host}: {shown}");
            flow(&mut world, 2, &format!("{host}:{port}"), &[b"no"]);
            assert_eq!(world.failure(2).0, ProxyError::Prohibited, "UDP to {host}: {shown}");
        }
        for host in ["first.example", "second.example"] {
            world.connect(1, &format!("{host}:{port}"));
            let (failure, reason) = world.failure(1);
            assert_eq!(failure, ProxyError::Refused, "nothing listens at 127.0.0.1: {shown}");
            assert!(reason.contains("127.0.0.1"), "{reason}");
            flow(&mut world, 2, &format!("{host}:{port}"), &[b"no"]);
            world.until("a flow", |world| world.relays.stream(2).is_open);
            world.egress.on_client_gone(2);
            world.relays.0.clear();
        }
        assert_eq!(listener.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock, "{shown}");
        assert_eq!(target.recv(&mut [0]).unwrap_err().kind(), io::ErrorKind::WouldBlock, "{shown}");
    }
}

#[test]
fn rules_that_are_set_count_for_connections_after_that() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = listener.local_addr().unwrap().to_string();
    let mut world = World::new();
    let before = Arc::clone(&world.egress.access);
    world.egress.set_access(Arc::default());
    world.connect(1, &to);
    assert_eq!(world.failure(1).0, ProxyError::Prohibited);
    world.egress.set_access(before);
    world.connect(2, &to);
    world.until("a connection", |world| world.relays.stream(2).is_open);
}

#[test]
fn a_name_of_the_hosts_file_leads_to_the_address_that_listens() {
    let mut world = World::new();
    world.resolve();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    // Nothing listens at the IPv6 address, which is tried first if the hosts file has it.
    for id in [1, 2, 3] {
        world.connect(id, &format!("localhost:{port}"));
    }
    world.until("connections", |world| [1, 2, 3].into_iter().all(|id| world.relays.stream(id).is_open));
    assert_eq!(world.egress.open_connections, 3);
    // Now the name is cached.
    world.connect(4, &format!("localhost:{port}"));
    assert!(matches!(world.egress.table[world.egress.slots[&4]].stage, Stage::Connecting(..)));
}

#[test]
fn a_name_leads_nowhere_that_its_addresses_must_not() {
    let mut world = World::with(vec![], Limiter::new(9, 9));
    world.resolve();
    world.connect(1, "localhost:80");
    let (failure, reason) = world.failure(1);
    assert_eq!(failure, ProxyError::Prohibited);
    assert!(reason.contains("localhost:80") && !reason.contains("127.0.0.1"), "{reason}");
}

#[test]
fn what_the_resolver_says_is_passed_on() {
    let mut world = World::new();
    world.connect(1, "nowhere.example:80");
    world.connect(2, "nowhere.example:443");
    world.connect(3, "other.example:443");
    let now = world.now();
    let mut answer = |name: &str, found: Result<Vec<IpAddr>, String>| {
        let (waiting, found) = world.egress.name_cache.complete(now, name, found);
        for token in waiting {
            let (slot, _) = world.egress.locate(token).expect("who waits is there");
            world.act(|egress, cx| egress.on_resolved(cx, slot, &found));
        }
    };
    answer("nowhere.example", Err("no such name".into()));
    answer("other.example", Ok(vec![]));
    for id in [1, 2, 3] {
        let (failure, reason) = world.relays.stream(id).failure.take().expect("an answer");
        assert_eq!(failure, ProxyError::Dns);
        assert!(reason.contains("example"), "{reason}");
    }
    world.is_empty();
}

#[test]
fn the_next_address_is_tried_when_the_first_is_dead() {
    let mut world = World::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let good = listener.local_addr().unwrap();
    world.connect(1, &format!("two.example:{}", good.port()));
    let now = world.now();
    // No route to it, or nothing listens there.
    let found = vec![good.ip(), "::1".parse().unwrap()];
    let (waiting, found) = world.egress.name_cache.complete(now, "two.example", Ok(found));
    let (slot, _) = world.egress.locate(waiting.into_iter().next().unwrap()).unwrap();
    world.act(|egress, cx| egress.on_resolved(cx, slot, &found));
    world.until("a connection", |world| world.relays.stream(1).is_open);
    assert_eq!(world.budget.in_use(), 1);
}

#[test]
fn limits_hold_for_a_user_for_all_and_for_names() {
    let mut world = World::with(vec![], Limiter::new(3, 2));
    let connect = |world: &mut World, id: u32, user: &str, to: &str| {
        let request = (user, to.parse().unwrap(), Transport::Tcp);
        world.act(|egress, cx| egress.connect(cx, id, request));
        world.relays.stream(id).failure.clone().map(|(failure, _)| failure)
    };
    assert_eq!(connect(&mut world, 1, "anna", "a.example:1"), None);
    assert_eq!(connect(&mut world, 2, "anna", "a.example:1"), None);
    assert_eq!(connect(&mut world, 3, "anna", "a.example:1"), Some(ProxyError::Busy));
    assert_eq!(connect(&mut world, 4, "bob", "a.example:1"), None);
    assert_eq!(connect(&mut world, 5, "carl", "a.example:1"), Some(ProxyError::Busy));
    // A second request for the same stream ends the first relay.
    assert_eq!(connect(&mut world, 4, "bob", "b.example:1"), None);
    for id in [1, 2, 4] {
        world.egress.on_client_gone(id);
    }
    world.is_empty();
    assert_eq!(connect(&mut world, 6, "bob", "c.example:1"), None);
    world.egress.on_client_gone(6);
    // A relay that ends does not end its lookup.
    assert_eq!(connect(&mut world, 7, "bob", "d.example:1"), Some(ProxyError::Busy));
    assert_eq!(connect(&mut world, 8, "anna", "d.example:1"), None);
}

#[test]
fn requests_that_are_taken_back_for_ever_leave_nothing() {
    let mut world = World::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = listener.local_addr().unwrap().to_string();
    for id in 0..2000 {
        world.connect(id, &to);
        assert!(world.budget.in_use() == 1 && !world.relays.stream(id).has_outcome());
        world.egress.on_client_gone(id);
        world.is_empty();
    }
    world.turn();
    assert!((0..2000).all(|id| !world.relays.stream(id).has_outcome()), "nobody is told any more");
}

#[test]
fn what_takes_too_long_is_given_up() {
    let mut world = World::new();
    world.connect(1, "slow.example:80");
    world.skipped += CONNECT_TIMEOUT - Duration::from_secs(1);
    world.turn();
    assert!(!world.relays.stream(1).has_outcome());
    world.skipped += Duration::from_secs(1);
    assert_eq!(world.failure(1).0, ProxyError::TimedOut);

    let mut peer = world.open(2);
    world.add_window(2, 100);
    world.skipped += Duration::from_secs(7000);
    peer.write_all(b"x").unwrap();
    world.until("a byte", |world| world.relays.stream(2).got.len() == 1);
    world.skipped += Duration::from_secs(7000);
    world.turn();
    assert!(!world.relays.stream(2).is_aborted, "the byte counts");
    world.finish(2);
    world.skipped += Duration::from_secs(599);
    world.turn();
    assert!(!world.relays.stream(2).is_aborted, "the end counts");
    world.skipped += Duration::from_secs(1);
    world.until("an end", |world| world.relays.stream(2).is_aborted);
    assert_eq!(peer.read(&mut [0]).unwrap(), 0, "the end of the client's half came before");
    world.is_empty();
}

#[test]
fn tokens_of_the_past_are_ignored() {
    let mut world = World::new();
    let _first = world.open(1);
    let token = world.egress.token(world.egress.slots[&1], 0);
    world.egress.on_client_gone(1);
    let _second = world.open(2);
    assert_ne!(world.egress.token(world.egress.slots[&2], 0), token);
    for token in [token, FIRST_EGRESS_TOKEN, u64::MAX, 0] {
        let event = Event { token, readable: true, writable: true, closed: true };
        world.act(|egress, cx| egress.on_socket_ready(cx, event));
    }
    assert_eq!(world.egress.open_connections, 1);
    assert!(!world.relays.stream(2).is_aborted);
}
