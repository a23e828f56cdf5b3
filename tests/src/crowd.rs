//! Thousands of clients in one thread.
//!
//! In: the server's address, the number of clients, and how many may connect at the same time. Out: the
//! numbers of connected clients and of lost connections. Each is a complete client of [`mpvpn_tunnel`] with
//! the built-in classes, all of whose packets belong to `default`, and a UDP socket; only the TUN device is
//! missing. Always holds: every client performs a full handshake, because clients do not share TLS tickets.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use bytes::BytesMut;
use mpvpn_class::{Rules, Share};
use mpvpn_config::ClassConfig;
use mpvpn_identity::{tls, trust::Trust};
use mpvpn_os::poll::{Events, Interest, Poller};
use mpvpn_packet::VnetHdr;
use mpvpn_packets::Packet;
use mpvpn_quic::{ClientSetup, TransportOptions};
use mpvpn_tests::{
    flood::{SOURCES, own_addresses, source},
    testbed::{Host, Testbed},
};
use mpvpn_tunnel::{
    ClassConnections, ClassProfile, ClassSetup, ClientConfig, ClientEvent, ClientState, TunnelMode,
};
use mpvpn_types::{ClassId, LinkId};

/// The address of [`Host::Inet`] towards the server.
const HOST: &str = "198.51.100.2";
/// The only link of a client.
const LINK: LinkId = LinkId(0);
/// Maximum wait for events: how soon the stop flag is noticed.
const MAX_POLL_WAIT: Duration = Duration::from_millis(20);
/// The same while clients send packets.
const MAX_POLL_WAIT_TALKING: Duration = Duration::from_millis(1);
/// Clients whose timers are handled before datagrams are received again, as a server does.
const MAX_TIMERS: usize = 16;
/// A client whose timer is handled later than this was not served meanwhile, as a machine of its own would
/// have.
const MAX_LATE: Duration = Duration::from_millis(40);
/// The server's address in the tunnel.
const TUNNEL: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
/// Time without datagrams after which all clients have closed their connections.
const CLOSE_QUIET_TIME: Duration = Duration::from_millis(300);

/// A handle of the running clients; they close their connections when it is dropped.
pub(crate) struct Crowd {
    counters: Arc<SharedCounters>,
    thread: Option<JoinHandle<()>>,
    began: Instant,
}

#[derive(Default)]
struct SharedCounters {
    up: AtomicUsize,
    lost: AtomicUsize,
    /// Packets that came back.
    answers: AtomicU64,
    /// Whether each client sends a packet a second.
    talk: AtomicBool,
    leave: AtomicBool,
}

impl Crowd {
    /// Connects `count` clients on `host` to `server`, at most `at_once` at a time. Each has an address of
    /// its own in [`SOURCES`], because a server limits how fast connections come from one address.
    pub(crate) fn start(
        testbed: &Testbed,
        host: Host,
        server: SocketAddr,
        count: usize,
        at_once: usize,
    ) -> Self {
        own_addresses(testbed, host, SOURCES, HOST);
        let own = |number: usize| socket(source(number as u32, 1 << 16), server);
        let sockets = testbed.in_namespace(host, || (0..count).map(own).collect::<Vec<_>>());
        let counters = Arc::new(SharedCounters::default());
        let shared = counters.clone();
        let began = Instant::now();
        let thread = thread::Builder::new().name("crowd".into());
        let thread = thread.spawn(move || CrowdClients::new(sockets, server, shared).run(at_once));
        Self { counters, thread: Some(thread.expect("a thread")), began }
    }

    /// Waits until `count` clients are up; returns the time since the start.
    pub(crate) fn wait_until_up_within(&self, count: usize, limit: Duration) -> Duration {
        while self.counters.up.load(Relaxed) < count {
            assert!(
                self.began.elapsed() < limit && self.thread.as_ref().is_some_and(|it| !it.is_finished()),
                "{} of {count} clients are up after {:?}",
                self.counters.up.load(Relaxed),
                self.began.elapsed()
            );
            thread::sleep(Duration::from_millis(1));
        }
        self.began.elapsed()
    }

    /// From now on each client sends an ICMP echo request to the server's address in the tunnel a second, or
    /// no more.
    pub(crate) fn talk(&self, talk: bool) {
        self.counters.talk.store(talk, Relaxed);
    }

    /// Number of packets that came back.
    pub(crate) fn answers(&self) -> u64 {
        self.counters.answers.load(Relaxed)
    }

    /// Number of lost connections of clients that were up.
    pub(crate) fn lost(&self) -> usize {
        self.counters.lost.load(Relaxed)
    }

    /// Closes all clients.
    pub(crate) fn leave(mut self) {
        self.end();
    }

    fn end(&mut self) {
        self.counters.leave.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has been printed and makes [`Crowd::wait_until_up_within`] fail.
            let _ = thread.join();
        }
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        self.end();
    }
}

fn socket(from: Ipv4Addr, server: SocketAddr) -> UdpSocket {
    let socket = UdpSocket::bind((from, 0));
    let socket = socket.unwrap_or_else(|error| panic!("a socket for each client: {error} (see ulimit -n)"));
    socket.connect(server).expect("a way to the server");
    socket.set_nonblocking(true).expect("a socket that does not block");
    socket
}

struct CrowdClient {
    connections: ClassConnections,
    /// The socket of the class `default`; the others stay asleep.
    socket: UdpSocket,
    /// Its entry in the timer queue.
    timer_at: Option<Instant>,
    up: bool,
    /// Its address in the tunnel.
    address: Option<IpAddr>,
}

struct CrowdClients {
    all: Vec<CrowdClient>,
    server: SocketAddr,
    counters: Arc<SharedCounters>,
    poller: Poller,
    timers: BTreeSet<(Instant, usize)>,
    /// Number of clients that have begun to connect.
    started: usize,
    out: Vec<u8>,
    /// When a datagram was last sent or received.
    last_activity: Instant,
    /// Since when clients send a packet a second, and how many packets they have sent.
    talking: Option<(Instant, u64)>,
}

impl CrowdClients {
    fn new(sockets: Vec<UdpSocket>, server: SocketAddr, counters: Arc<SharedCounters>) -> Self {
        let now = Instant::now();
        let tls = tls::client_config(&Trust::Insecure, &[b"h3"]).expect("a TLS configuration");
        let setup = ClientSetup::new(Arc::new(tls), &TransportOptions::default(), b"crowd");
        let setup = setup.expect("a QUIC configuration");
        let poller = Poller::new().expect("an epoll instance");
        let mut all = Vec::with_capacity(sockets.len());
        for (number, socket) in sockets.into_iter().enumerate() {
            poller.add(&socket, number as u64, Interest::Read).expect("a socket to watch");
            let config = ClientConfig {
                mode: TunnelMode::Packets,
                setup: setup.clone(),
                // TLS tickets are stored by server name: unique names prevent sharing.
                server_name: format!("client-{number}.example"),
                authority: server.to_string(),
                path: "/.well-known/masque/ip/*/*/".to_owned(),
                token: None,
                scheduler: Default::default(),
                class: None,
                instance: None,
                additional_addresses: 0,
                addresses_in_use: Default::default(),
                copies: 1,
                fec: Default::default(),
                flow_rules: Default::default(),
                isn_secret: Default::default(),
                disabled_extensions: &[],
            };
            let connections = ClassConnections::new(now, classes(&config), Rules::default(), 0, false);
            all.push(CrowdClient { connections, socket, timer_at: None, up: false, address: None });
        }
        Self {
            all,
            server,
            counters,
            poller,
            timers: BTreeSet::new(),
            started: 0,
            out: Vec::with_capacity(64 << 10),
            last_activity: now,
            talking: None,
        }
    }

    /// Connects all clients and serves them until they have to close.
    fn run(mut self, at_once: usize) {
        let mut events = Events::with_capacity(1024);
        while !self.counters.leave.load(Relaxed) {
            let now = Instant::now();
            while self.started < self.all.len() && self.started - self.counters.up.load(Relaxed) < at_once {
                let client = &mut self.all[self.started];
                client.connections.link_up(now, LINK, self.server);
                self.started += 1;
                self.send_and_poll(now, self.started - 1);
            }
            self.talk();
            self.poll_once(&mut events);
        }
        let now = Instant::now();
        for number in 0..self.started {
            self.all[number].connections.close(now, "the crowd leaves");
            self.send_and_poll(now, number);
        }
        while self.last_activity.elapsed() < CLOSE_QUIET_TIME {
            self.poll_once(&mut events);
        }
    }

    /// Sends the packets of the clients whose turn has come in this second.
    fn talk(&mut self) {
        if !self.counters.talk.load(Relaxed) {
            self.talking = None;
            return;
        }
        let now = Instant::now();
        let (since, sent) = self.talking.unwrap_or((now, 0));
        let due = (now.saturating_duration_since(since).as_secs_f64() * self.all.len() as f64) as u64;
        for packet in sent..due {
            let number = (packet % self.all.len() as u64) as usize;
            let Some(address) = self.all[number].address else { continue };
            let mut request = Packet::between((address, 0).into(), (TUNNEL, 0).into()).echo(0, 0, &[0; 56]);
            self.all[number].connections.handle_tun(now, None, VnetHdr::NONE, &mut request);
            self.send_and_poll(now, number);
        }
        self.talking = Some((since, due));
    }

    /// Waits for datagrams or a timer, and serves the clients concerned.
    fn poll_once(&mut self, events: &mut Events) {
        let now = Instant::now();
        let most = if self.talking.is_some() { MAX_POLL_WAIT_TALKING } else { MAX_POLL_WAIT };
        let next = self.timers.first().map_or(most, |(at, _)| at.saturating_duration_since(now).min(most));
        self.poller.wait(events, Some(next)).expect("epoll");
        let now = Instant::now();
        for event in events.iter() {
            let number = event.token as usize;
            self.receive(now, number);
            self.send_and_poll(now, number);
        }
        for _ in 0..MAX_TIMERS {
            let Some((at, number)) = self.timers.first().copied().filter(|(at, _)| *at <= now) else { break };
            self.timers.pop_first();
            let client = &mut self.all[number];
            client.timer_at = None;
            if now - at > MAX_LATE {
                client.connections.on_local_stall(now);
            }
            client.connections.handle_timeout(now);
            self.send_and_poll(now, number);
        }
    }

    /// Takes one datagram of a client. If there is another, epoll says so again; to ask for it would be a
    /// second call for each.
    fn receive(&mut self, now: Instant, number: usize) {
        let mut datagram = [0; 2048];
        let client = &mut self.all[number];
        // An ICMP error for an earlier datagram, if it is one: the client's timers handle the loss.
        let Ok(length) = client.socket.recv(&mut datagram) else { return };
        self.last_activity = now;
        let data = BytesMut::from(&datagram[..length]);
        client.connections.handle_datagram(now, LINK, self.server, 0, data);
        client.connections.handle_batch(now, ClassId::DEFAULT);
    }

    /// Sends a client's datagrams, handles its events, and updates its timer.
    fn send_and_poll(&mut self, now: Instant, number: usize) {
        let client = &mut self.all[number];
        loop {
            self.out.clear();
            let Some(transmit) = client.connections.poll_transmit(now, &mut self.out) else { break };
            for datagram in self.out.chunks(transmit.segment_size.unwrap_or(transmit.size).max(1)) {
                // A datagram that the socket cannot take is lost, as on any link.
                let _ = client.socket.send(datagram);
            }
            self.last_activity = now;
        }
        while client.connections.poll_tun(now).is_some() {
            self.counters.answers.fetch_add(1, Relaxed);
        }
        while let Some(event) = client.connections.poll_event(now) {
            match event {
                ClientEvent::Up(assignment) => {
                    client.address = assignment.addresses.iter().map(|net| net.addr()).find(IpAddr::is_ipv4);
                }
                ClientEvent::Down(_) if std::mem::take(&mut client.up) => {
                    self.counters.up.fetch_sub(1, Relaxed);
                    self.counters.lost.fetch_add(1, Relaxed);
                }
                ClientEvent::Fatal(error) => panic!("client {number}: {error}"),
                _ => {}
            }
        }
        let connecting = |state| state == ClientState::Connecting;
        if !client.up && !client.connections.reports(now).iter().any(|(_, report)| connecting(report.state)) {
            client.up = true;
            self.counters.up.fetch_add(1, Relaxed);
        }
        let next = client.connections.poll_timeout(now);
        if next == client.timer_at {
            return;
        }
        if let Some(at) = client.timer_at.take() {
            self.timers.remove(&(at, number));
        }
        if let Some(at) = next {
            self.timers.insert((at, number));
        }
        client.timer_at = next;
    }
}

/// The built-in classes for a client of this configuration.
fn classes(config: &ClientConfig) -> Vec<ClassSetup> {
    let setup = |class: ClassConfig| {
        let share = Share { first: class.priority, weight: class.weight, min: class.min, max: class.max };
        let profile = ClassProfile { name: class.name, share, dscp: class.dscp };
        let config = ClientConfig { class: Some(profile), ..config.clone() };
        ClassSetup { id: class.id, priority: class.priority, config }
    };
    ClassConfig::built_in().map(setup).into()
}
