//! Thousands of clients in one thread.
//!
//! In: the server's address, the number of clients, how many may connect at the same time, the loss on their
//! links, and how long each stays. Out: the numbers of connected clients, of lost connections and of clients
//! that came again. Each is a complete client of [`mpvpn_tunnel`] with the built-in classes and a UDP socket;
//! only the TUN device is missing. Once it is up it resolves a name, pings, and asks for a page. Always
//! holds: every client performs a full handshake, because clients do not share TLS tickets; a client that
//! comes again is a new one, which resumes the session of the one before, as a program does that was started
//! again.

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
use mpvpn_config::{ClassConfig, MatchRule, rules_of};
use mpvpn_identity::{tls, trust::Trust};
use mpvpn_os::poll::{Events, Interest, Poller};
use mpvpn_packet::VnetHdr;
use mpvpn_packets::Packet;
use mpvpn_quic::{ClientSetup, TransportOptions};
use mpvpn_tunnel::{
    Assignment, ClassConnections, ClassProfile, ClassSetup, ClientConfig, ClientEvent, ClientState,
    TunnelMode,
};
use mpvpn_types::{ClassId, LinkId};

use crate::{
    flood::{SOURCES, own_addresses, source},
    random::Random,
    testbed::{Host, Testbed},
};

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

/// The clients of a crowd.
#[derive(Clone, Copy, Debug)]
pub struct CrowdPlan {
    /// Number of clients.
    pub count: usize,
    /// How many of them may connect at the same time.
    pub at_once: usize,
    /// Percent of the datagrams that are lost, in each direction.
    pub loss_percent: usize,
    /// How long a client stays after it has come up; `None`: until the crowd leaves. Then each second client
    /// says goodbye, the others just end, and each comes again from another port. While the crowd does not
    /// talk, all stay.
    pub stay: Option<Duration>,
}

/// A handle of the running clients; they close their connections when it is dropped.
pub struct Crowd {
    counters: Arc<SharedCounters>,
    thread: Option<JoinHandle<()>>,
    began: Instant,
}

#[derive(Default)]
struct SharedCounters {
    up: AtomicUsize,
    lost: AtomicUsize,
    /// Clients that have come up again.
    returned: AtomicU64,
    /// Packets that came back.
    answers: AtomicU64,
    /// Whether each client sends a packet a second.
    talk: AtomicBool,
    leave: AtomicBool,
}

impl Crowd {
    /// Connects clients on `host` to `server`. Each has an address of its own in [`SOURCES`], because a
    /// server limits how fast connections come from one address.
    pub fn start(testbed: &Testbed, host: Host, server: SocketAddr, plan: CrowdPlan) -> Self {
        own_addresses(testbed, host, SOURCES, HOST);
        let counters = Arc::new(SharedCounters::default());
        let shared = counters.clone();
        let began = Instant::now();
        let thread = thread::Builder::new().name("crowd".into());
        // A thread is in the namespace of the thread that starts it.
        let thread = testbed
            .in_namespace(host, || thread.spawn(move || CrowdClients::new(server, shared, plan).run()));
        Self { counters, thread: Some(thread.expect("a thread")), began }
    }

    /// Waits until `count` clients are up; returns the time since the start.
    pub fn wait_until_up_within(&self, count: usize, limit: Duration) -> Duration {
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
    pub fn talk(&self, talk: bool) {
        self.counters.talk.store(talk, Relaxed);
    }

    /// Number of packets that came back.
    pub fn answers(&self) -> u64 {
        self.counters.answers.load(Relaxed)
    }

    /// Number of lost connections of clients that were up.
    pub fn lost(&self) -> usize {
        self.counters.lost.load(Relaxed)
    }

    /// Number of clients that came up again after their stay.
    pub fn returned(&self) -> u64 {
        self.counters.returned.load(Relaxed)
    }

    /// Closes all clients.
    pub fn leave(mut self) {
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
    /// Its addresses in the tunnel.
    assignment: Option<Assignment>,
    /// When it ends, once it is up.
    leaves_at: Option<Instant>,
    /// Whether another client was there before it.
    came_again: bool,
}

impl CrowdClient {
    fn address(&self) -> Option<IpAddr> {
        self.assignment.iter().flat_map(|given| &given.addresses).map(|net| net.addr()).find(IpAddr::is_ipv4)
    }
}

struct CrowdClients {
    all: Vec<CrowdClient>,
    plan: CrowdPlan,
    server: SocketAddr,
    setup: ClientSetup,
    rules: Rules,
    random: Random,
    /// Number of clients that were made.
    made: u128,
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
    fn new(server: SocketAddr, counters: Arc<SharedCounters>, plan: CrowdPlan) -> Self {
        let tls = tls::client_config(&Trust::Insecure, &[b"h3"]).expect("a TLS configuration");
        let setup = ClientSetup::new(Arc::new(tls), &TransportOptions::default(), b"crowd");
        let mut clients = Self {
            all: Vec::with_capacity(plan.count),
            plan,
            server,
            setup: setup.expect("a QUIC configuration"),
            rules: rules_of(&MatchRule::built_in()),
            random: Random::new(1),
            made: 0,
            counters,
            poller: Poller::new().expect("an epoll instance"),
            timers: BTreeSet::new(),
            started: 0,
            out: Vec::with_capacity(64 << 10),
            last_activity: Instant::now(),
            talking: None,
        };
        for number in 0..plan.count {
            let client = clients.new_client(number);
            clients.all.push(client);
        }
        clients
    }

    /// A client with a socket of its own.
    fn new_client(&mut self, number: usize) -> CrowdClient {
        let socket = socket(source(number as u32, 1 << 16), self.server);
        self.poller.add(&socket, number as u64, Interest::Read).expect("a socket to watch");
        self.made += 1;
        let config = ClientConfig {
            mode: TunnelMode::Packets,
            setup: self.setup.clone(),
            // TLS tickets are stored by server name: unique names prevent sharing.
            server_name: format!("client-{}.example", self.made),
            authority: self.server.to_string(),
            path: "/.well-known/masque/ip/*/*/".to_owned(),
            token: None,
            scheduler: Default::default(),
            class: None,
            instance: Some(self.made.to_be_bytes()),
            additional_addresses: 0,
            addresses_in_use: Default::default(),
            copies: 1,
            fec: Default::default(),
            flow_rules: Default::default(),
            isn_secret: Default::default(),
            disabled_extensions: &[],
        };
        let rules = self.rules.clone();
        let connections = ClassConnections::new(Instant::now(), classes(&config), rules, 0, false);
        CrowdClient {
            connections,
            socket,
            timer_at: None,
            up: false,
            assignment: None,
            leaves_at: None,
            came_again: false,
        }
    }

    /// Replaces the clients whose stay is over.
    fn replace_clients(&mut self) {
        if self.talking.is_none() {
            return;
        }
        let now = Instant::now();
        for number in 0..self.started {
            if self.all[number].leaves_at.is_none_or(|at| now < at) {
                continue;
            }
            if self.random.one_in(2) {
                self.all[number].connections.close(now, "the client ends");
                self.send_and_poll(now, number);
            }
            if let Some(at) = self.all[number].timer_at {
                self.timers.remove(&(at, number));
            }
            let mut client = self.new_client(number);
            let old = &mut self.all[number];
            let secret = old.connections.default_client().session_secret().map(<[u8]>::to_vec);
            if let (Some(secret), Some(assignment)) = (secret, old.assignment.take()) {
                client.connections.default_client_mut().resume(secret, assignment);
            }
            if old.up {
                self.counters.up.fetch_sub(1, Relaxed);
            }
            client.came_again = true;
            client.connections.link_up(now, LINK, self.server);
            self.all[number] = client;
            self.send_and_poll(now, number);
        }
    }

    /// Connects all clients and serves them until they have to close.
    fn run(mut self) {
        let mut events = Events::with_capacity(1024);
        while !self.counters.leave.load(Relaxed) {
            let now = Instant::now();
            while self.started < self.all.len() && self.is_place_free() {
                let client = &mut self.all[self.started];
                client.connections.link_up(now, LINK, self.server);
                self.started += 1;
                self.send_and_poll(now, self.started - 1);
            }
            self.replace_clients();
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

    /// Whether another client may connect.
    fn is_place_free(&self) -> bool {
        self.started.saturating_sub(self.counters.up.load(Relaxed)) < self.plan.at_once
    }

    /// Whether the link of a client loses a datagram.
    fn is_lost(&mut self) -> bool {
        self.plan.loss_percent > 0 && self.random.below(100) < self.plan.loss_percent
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
            let Some(address) = self.all[number].address() else { continue };
            let mut request = Packet::between((address, 0).into(), (TUNNEL, 0).into()).echo(0, 0, &[0; 56]);
            self.all[number].connections.handle_tun(now, None, VnetHdr::NONE, &mut request);
            self.send_and_poll(now, number);
        }
        self.talking = Some((since, due));
    }

    /// Resolves a name, pings, and asks for a page with a request in 10 packets, so that packets of several
    /// classes leave.
    fn use_tunnel(&mut self, now: Instant, number: usize) {
        let Some(address) = self.all[number].address() else { return };
        let to = |port| Packet::between((address, 40_000).into(), (TUNNEL, port).into());
        let query = b"\0\x01\x01\0\0\x01\0\0\0\0\0\0\x04name\x07example\0\0\x01\0\x01";
        let mut packets = vec![to(53).udp(query), to(0).echo(0, 0, &[0; 56])];
        packets.extend((0..10).map(|_| to(443).udp(&[0; 1200])));
        for packet in &mut packets {
            self.all[number].connections.handle_tun(now, None, VnetHdr::NONE, packet);
        }
        self.send_and_poll(now, number);
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
        if self.is_lost() {
            return;
        }
        let data = BytesMut::from(&datagram[..length]);
        let client = &mut self.all[number];
        client.connections.handle_datagram(now, LINK, self.server, 0, data);
        client.connections.handle_batch(now, ClassId::DEFAULT);
    }

    /// Sends a client's datagrams, handles its events, and updates its timer.
    fn send_and_poll(&mut self, now: Instant, number: usize) {
        let mut out = std::mem::take(&mut self.out);
        loop {
            out.clear();
            let Some(transmit) = self.all[number].connections.poll_transmit(now, &mut out) else { break };
            for datagram in out.chunks(transmit.segment_size.unwrap_or(transmit.size).max(1)) {
                if !self.is_lost() {
                    // A datagram that the socket cannot take is lost, as on any link.
                    let _ = self.all[number].socket.send(datagram);
                }
            }
            self.last_activity = now;
        }
        self.out = out;
        let mut is_new = false;
        let client = &mut self.all[number];
        while client.connections.poll_tun(now).is_some() {
            self.counters.answers.fetch_add(1, Relaxed);
        }
        while let Some(event) = client.connections.poll_event(now) {
            match event {
                ClientEvent::Up(assignment) => {
                    client.assignment = Some(assignment);
                    is_new = true;
                }
                ClientEvent::Down(_) if std::mem::take(&mut client.up) => {
                    self.counters.up.fetch_sub(1, Relaxed);
                    self.counters.lost.fetch_add(1, Relaxed);
                }
                ClientEvent::Fatal(error) => panic!("client {number}: {error}"),
                _ => {}
            }
        }
        if is_new {
            self.use_tunnel(now, number);
        }
        let client = &mut self.all[number];
        let connecting = |state| state == ClientState::Connecting;
        if !client.up && !client.connections.reports(now).iter().any(|(_, report)| connecting(report.state)) {
            client.up = true;
            client.leaves_at = client.leaves_at.or(self.plan.stay.map(|stay| now + stay));
            self.counters.up.fetch_add(1, Relaxed);
            self.counters.returned.fetch_add(u64::from(client.came_again), Relaxed);
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
        let profile = ClassProfile { name: class.name, share, dscp: class.dscp, ..ClassProfile::default() };
        let config = ClientConfig { class: Some(profile), ..config.clone() };
        ClassSetup { id: class.id, priority: class.priority, connects_at_once: false, config }
    };
    ClassConfig::built_in().map(setup).into()
}
