use std::{
    io::{Read, Write},
    net::{Shutdown, TcpStream, UdpSocket},
};

use mpvpn_os::poll::Events;
use mpvpn_sockets::splice::RelayRead;

use super::{refusal::REFUSAL_TIMEOUT, *};

/// A fake tunnel.
#[derive(Default)]
struct Fake {
    streams: Vec<Stream>,
    /// The number of streams that may be opened.
    allowed: usize,
    /// UDP flows: target, payloads sent, and whether it was closed.
    flows: Vec<(String, Vec<Vec<u8>>, bool)>,
}

impl DatagramFlows for Fake {
    type Flow = usize;

    fn open_flow(&mut self, _: Instant, to: &Authority) -> Option<usize> {
        self.flows.push((to.to_string(), Vec::new(), false));
        Some(self.flows.len() - 1)
    }

    fn send(&mut self, _: Instant, flow: usize, payload: &[u8]) {
        assert!(!self.flows[flow].2);
        self.flows[flow].1.push(payload.to_vec());
    }

    fn close(&mut self, flow: usize) {
        assert!(!std::mem::replace(&mut self.flows[flow].2, true), "closed twice");
    }
}

#[derive(Default)]
struct Stream {
    to: String,
    got: Vec<u8>,
    window: usize,
    sends: VecDeque<Bytes>,
    has_finished: bool,
    is_ended: bool,
    is_aborted: bool,
}

impl ByteStreams for Fake {
    type Id = usize;

    fn read(&mut self, _: Instant, id: usize) -> RelayRead {
        let stream = &mut self.streams[id];
        match stream.sends.pop_front() {
            Some(data) => RelayRead::Data(data),
            None if stream.has_finished => RelayRead::Finished,
            None => RelayRead::Blocked,
        }
    }

    fn writable_bytes(&mut self, _: Instant, id: usize) -> usize {
        self.streams[id].window
    }

    fn write(&mut self, _: Instant, id: usize, data: Bytes) {
        let stream = &mut self.streams[id];
        assert!(!stream.is_ended && !stream.is_aborted && !data.is_empty());
        stream.window = stream.window.checked_sub(data.len()).expect("written beyond the window");
        stream.got.extend_from_slice(&data);
    }

    fn finish(&mut self, _: Instant, id: usize) {
        assert!(!std::mem::replace(&mut self.streams[id].is_ended, true), "ended twice");
    }
}

impl ProxyTunnel for Fake {
    fn open(&mut self, to: &Authority) -> Option<usize> {
        if self.allowed == 0 {
            return None;
        }
        self.allowed -= 1;
        self.streams.push(Stream { to: to.to_string(), window: 1 << 20, ..Stream::default() });
        Some(self.streams.len() - 1)
    }

    fn abort(&mut self, id: usize) {
        assert!(!std::mem::replace(&mut self.streams[id].is_aborted, true), "aborted twice");
    }
}

/// A proxy of each kind, with a fake tunnel.
struct World {
    proxy: Proxy<usize, usize>,
    tunnel: Fake,
    poller: Poller,
    events: Events,
    /// Added to the clock.
    skipped: Duration,
}

impl World {
    fn new() -> Self {
        let poller = Poller::new().unwrap();
        let local = "127.0.0.1:0".parse().unwrap();
        let proxy = Proxy::bind(&[(Protocol::Socks5, local), (Protocol::Http, local)], &poller).unwrap();
        let tunnel = Fake { allowed: 100, ..Fake::default() };
        Self { proxy, tunnel, poller, events: Events::with_capacity(64), skipped: Duration::ZERO }
    }

    fn now(&self) -> Instant {
        Instant::now() + self.skipped
    }

    /// An app that has sent `words` to the proxy.
    fn app(&mut self, protocol: Protocol, words: &[u8]) -> TcpStream {
        let listener = self.proxy.listeners.iter().find(|listener| listener.protocol == protocol).unwrap();
        let mut app = TcpStream::connect(listener.acceptor.local_addr().unwrap()).unwrap();
        app.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        app.write_all(words).unwrap();
        self.run();
        app
    }

    fn socks(&mut self) -> TcpStream {
        let mut app = self.app(Protocol::Socks5, &[5, 1, 0]);
        assert_eq!(read(&mut app, 2), [5, 0]);
        app.write_all(&[5, 1, 0, 3, 1, b'a', 0, 80]).unwrap();
        self.run();
        app
    }

    /// Calls the proxy as the event loop does.
    fn act(&mut self, call: impl FnOnce(&mut Proxy<usize, usize>, &mut Context<'_, Fake>)) {
        let (now, poller, streams) = (self.now(), &self.poller, &mut self.tunnel);
        call(&mut self.proxy, &mut Context { now, poller, streams });
    }

    /// Runs the proxy until it is idle.
    fn run(&mut self) {
        let mut idle = 0;
        while idle < 3 {
            let count = self.poller.wait(&mut self.events, Some(Duration::from_millis(5))).unwrap();
            idle = if count == 0 { idle + 1 } else { 0 };
            let now = self.now();
            for event in self.events.iter().collect::<Vec<_>>() {
                self.act(|proxy, cx| proxy.on_socket_ready(cx, event));
            }
            if self.proxy.poll_timeout().is_some_and(|at| at <= now) {
                self.act(|proxy, cx| proxy.handle_timeout(cx));
            }
        }
    }

    fn send_event(&mut self, event: StreamEvent<usize>) {
        self.act(|proxy, cx| proxy.on_stream_event(cx, event));
        self.run();
    }

    fn skip(&mut self, time: Duration) {
        self.skipped += time;
        self.run();
    }
}

fn read(app: &mut TcpStream, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    app.read_exact(&mut bytes).unwrap();
    bytes
}

fn read_all(app: &mut TcpStream) -> String {
    let mut text = String::new();
    app.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn bytes_go_both_ways_and_each_half_ends_by_itself() {
    let mut world = World::new();
    let mut app = world.socks();
    assert_eq!(world.tunnel.streams[0].to, "a:80");
    world.send_event(StreamEvent::Opened(0));
    assert_eq!(read(&mut app, 10)[..2], [5, 0]);
    app.write_all(b"question").unwrap();
    app.shutdown(Shutdown::Write).unwrap();
    world.run();
    let stream = &mut world.tunnel.streams[0];
    assert_eq!((&stream.got[..], stream.is_ended), (&b"question"[..], true));
    stream.sends.push_back(Bytes::from_static(b"answer"));
    stream.has_finished = true;
    world.send_event(StreamEvent::Readable(0));
    assert_eq!(read_all(&mut app), "answer");
    assert!(world.proxy.apps.is_empty() && world.proxy.tokens.is_empty() && world.proxy.timers.is_empty());
    assert!(!world.tunnel.streams[0].is_aborted);
}

#[test]
fn what_comes_with_the_request_arrives_first_and_as_there_is_room() {
    let mut world = World::new();
    let mut app = world.app(Protocol::Http, b"CONNECT a:1 HTTP/1.1\r\n\r\nearly");
    world.tunnel.streams[0].window = 3;
    app.write_all(b" and late").unwrap();
    world.send_event(StreamEvent::Opened(0));
    assert_eq!(world.tunnel.streams[0].got, b"ear");
    world.tunnel.streams[0].window = 100;
    world.send_event(StreamEvent::Writable(0));
    assert_eq!(world.tunnel.streams[0].got, b"early and late");
    assert_eq!(read(&mut app, http::ESTABLISHED.len()), http::ESTABLISHED);
}

#[test]
fn a_plain_request_is_rewritten_and_its_answer_comes_as_it_is() {
    let mut world = World::new();
    let mut app = world.app(Protocol::Http, b"POST http://a/x HTTP/1.1\r\nContent-Length: 2\r\n\r\nhi");
    assert_eq!(world.tunnel.streams[0].to, "a:80");
    world.send_event(StreamEvent::Opened(0));
    let wanted = b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi";
    assert_eq!(world.tunnel.streams[0].got, wanted);
    let stream = &mut world.tunnel.streams[0];
    stream.sends.push_back(Bytes::from_static(b"HTTP/1.1 204 No Content\r\n\r\n"));
    stream.has_finished = true;
    world.send_event(StreamEvent::Readable(0));
    assert_eq!(read_all(&mut app), "HTTP/1.1 204 No Content\r\n\r\n");
}

#[test]
fn a_failure_is_told_in_the_words_of_the_protocol() {
    let mut world = World::new();
    let mut socks = world.socks();
    let mut http = world.app(Protocol::Http, b"CONNECT b.example:1 HTTP/1.1\r\n\r\nmore than it should");
    world.send_event(StreamEvent::Failed(0, ProxyError::Refused));
    world.send_event(StreamEvent::Failed(1, ProxyError::TimedOut));
    assert_eq!(read(&mut socks, 10)[..2], [5, 5]);
    assert_eq!(socks.read(&mut [0]).unwrap(), 0);
    let answer = read_all(&mut http);
    assert!(answer.starts_with("HTTP/1.1 504 Gateway Timeout\r\n"), "{answer}");
    assert!(answer.ends_with("mpvpn: no connection to b.example:1: it does not answer\n"), "{answer}");
    drop((socks, http));
    world.run();
    assert!(world.proxy.apps.is_empty());
    assert!(world.tunnel.streams.iter().all(|stream| !stream.is_aborted), "they were over");
}

#[test]
fn a_reset_is_passed_on_in_both_directions() {
    let mut world = World::new();
    let (mut first, second) = (world.socks(), world.socks());
    world.send_event(StreamEvent::Opened(0));
    world.send_event(StreamEvent::Opened(1));
    world.send_event(StreamEvent::Gone(0));
    read(&mut first, 10);
    assert_eq!(first.read(&mut [0]).unwrap_err().kind(), io::ErrorKind::ConnectionReset);
    // Unread bytes turn the close into a reset.
    drop(second);
    world.run();
    assert!(world.tunnel.streams[1].is_aborted && !world.tunnel.streams[0].is_aborted);
    assert!(world.proxy.apps.is_empty() && world.proxy.tokens.is_empty());
}

#[test]
fn apps_wait_for_a_tunnel_and_not_for_ever() {
    let mut world = World::new();
    world.tunnel.allowed = 0;
    let mut first = world.app(Protocol::Http, b"CONNECT a:1 HTTP/1.1\r\n\r\n");
    assert!(world.tunnel.streams.is_empty());
    world.tunnel.allowed = 1;
    world.send_event(StreamEvent::Allowed);
    assert_eq!(world.tunnel.streams[0].to, "a:1");
    let mut second = world.app(Protocol::Http, b"CONNECT b:1 HTTP/1.1\r\n\r\n");
    world.skip(CONNECT_TIMEOUT + Duration::from_secs(1));
    assert!(world.tunnel.streams[0].is_aborted);
    assert!(read_all(&mut first).contains("the mpvpn server does not answer"));
    let answer = read_all(&mut second);
    assert!(answer.starts_with("HTTP/1.1 504 ") && answer.contains("the mpvpn server is not reached"));
    world.skip(REFUSAL_TIMEOUT);
    assert!(world.proxy.apps.is_empty());
}

#[test]
fn who_says_too_little_or_too_much_is_left() {
    let mut world = World::new();
    let mut slow = [world.app(Protocol::Socks5, &[5]), world.app(Protocol::Http, b"GET http")];
    world.skip(REQUEST_TIMEOUT + Duration::from_secs(1));
    assert_eq!(slow[0].read(&mut [0]).unwrap(), 0);
    assert!(read_all(&mut slow[1]).starts_with("HTTP/1.1 408 "));
    let endless = [&b"GET http://a/ HTTP/1.1\r\nx: "[..], &[b'y'; MAX_REQUEST_BYTES]].concat();
    let mut loud = world.app(Protocol::Http, &endless);
    assert!(read_all(&mut loud).starts_with("HTTP/1.1 431 "));
    world.skip(REFUSAL_TIMEOUT + Duration::from_secs(1));
    assert!(world.proxy.apps.is_empty() && world.tunnel.streams.is_empty());
}

#[test]
fn an_app_that_leaves_while_it_waits_leaves_nothing_behind() {
    let mut world = World::new();
    // The app does not read the method selection, so its close is a reset.
    let app = world.app(Protocol::Socks5, &[5, 1, 0, 5, 1, 0, 1, 192, 0, 2, 1, 0, 80]);
    assert_eq!(world.tunnel.streams[0].to, "192.0.2.1:80");
    drop(app);
    world.run();
    assert!(world.tunnel.streams[0].is_aborted);
    world.send_event(StreamEvent::Opened(0));
    assert!(world.proxy.apps.is_empty() && world.proxy.tokens.is_empty());
}

#[test]
fn more_apps_than_there_is_room_for_wait_in_the_kernel() {
    let mut world = World::new();
    world.proxy.max_apps = 2;
    let first = world.app(Protocol::Socks5, &[]);
    let _second = world.app(Protocol::Socks5, &[]);
    let mut third = world.app(Protocol::Socks5, &[5, 1, 0]);
    assert_eq!((world.proxy.apps.len(), world.proxy.is_accepting), (2, false));
    drop(first);
    world.run();
    assert_eq!(read(&mut third, 2), [5, 0]);
    assert_eq!(world.proxy.apps.len(), 2);
}

/// An app's datagram for a target.
fn wrapped(to: [u8; 4], payload: &[u8]) -> Vec<u8> {
    [&[0, 0, 0, 1][..], &to, &[0, 53], payload].concat()
}

/// An app with an association, and its UDP socket.
fn open_association(world: &mut World) -> (TcpStream, UdpSocket) {
    let mut app = world.app(Protocol::Socks5, &[5, 1, 0]);
    assert_eq!(read(&mut app, 2), [5, 0]);
    app.write_all(&[5, 3, 0, 1, 0, 0, 0, 0, 0, 0]).unwrap();
    world.run();
    let reply = read(&mut app, 10);
    assert_eq!(reply[..8], [5, 0, 0, 1, 127, 0, 0, 1]);
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    socket.connect(("127.0.0.1", u16::from_be_bytes([reply[8], reply[9]]))).unwrap();
    (app, socket)
}

#[test]
fn datagrams_of_an_app_go_to_their_targets_and_back() {
    let mut world = World::new();
    let (app, socket) = open_association(&mut world);
    for (to, payload) in [(1, b"one"), (2, b"two"), (1, b"six")] {
        socket.send(&wrapped([192, 0, 2, to], payload)).unwrap();
    }
    let mut fragment = wrapped([192, 0, 2, 1], b"part");
    fragment[2] = 1;
    socket.send(&fragment).unwrap();
    world.run();
    let flow =
        |to: &str, sent: &[&[u8]]| (to.to_owned(), sent.iter().map(|one| one.to_vec()).collect(), false);
    let expected = [flow("192.0.2.1:53", &[b"one", b"six"]), flow("192.0.2.2:53", &[b"two"])];
    assert_eq!(world.tunnel.flows, expected);
    let now = world.now();
    world.proxy.deliver_payload(now, 1, b"answer");
    let mut buffer = [0; 100];
    let length = socket.recv(&mut buffer).unwrap();
    assert_eq!(buffer[..length], wrapped([192, 0, 2, 2], b"answer"));
    // Datagrams of another sender are dropped, and a refused target is not requested again at once.
    let other = UdpSocket::bind("127.0.0.1:0").unwrap();
    other.send_to(&wrapped([192, 0, 2, 9], b"not mine"), socket.peer_addr().unwrap()).unwrap();
    world.proxy.on_flow_closed(now, 0, true);
    socket.send(&wrapped([192, 0, 2, 1], b"refused")).unwrap();
    world.run();
    assert_eq!(world.tunnel.flows, expected);
    drop(app);
    world.run();
    assert!(world.tunnel.flows[1].2, "it ends with the connection that asked for it");
    assert!(world.proxy.apps.is_empty());
}

#[test]
fn targets_of_an_association_are_bounded_and_end_when_they_are_silent() {
    let mut world = World::new();
    let (_app, socket) = open_association(&mut world);
    for to in 0..100 {
        socket.send(&wrapped([192, 0, 2, to], b"x")).unwrap();
        world.run();
    }
    let closed = |world: &World| world.tunnel.flows.iter().filter(|flow| flow.2).count();
    assert_eq!((world.tunnel.flows.len(), closed(&world)), (100, 36));
    assert!(world.tunnel.flows[..36].iter().all(|flow| flow.2), "the oldest are closed");
    world.skipped += Duration::from_secs(200);
    world.run();
    assert_eq!(closed(&world), 100);
}
