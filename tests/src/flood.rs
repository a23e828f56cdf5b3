//! Floods of a server: garbage, Initial packets with forged sources, handshakes that stop there, and
//! half-open TCP connections.
//!
//! In: what to send, where to, for how long. Out: packets and connections at a fixed rate, from the addresses
//! of [`SOURCES`], and the count of them on stdout. Runs as a process of its own, a subcommand of the program
//! that starts it.

use std::{
    collections::VecDeque,
    fs::File,
    io::Write,
    net::{Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket},
    os::fd::OwnedFd,
    path::PathBuf,
    process::Child,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use bytes::BytesMut;
use mpvpn_identity::{tls, trust::Trust};
use mpvpn_quic::{ClientSetup, ConnectionHandle, Endpoint, Event, LocalAddress, TransportOptions};
use mpvpn_types::LinkId;
use rustix::net::{
    AddressFamily, SendFlags, SocketFlags, SocketType, bind, connect, ipproto, sendto, socket, socket_with,
};

use crate::{
    files::allow_files,
    random::Random,
    testbed::{Host, Testbed},
};

type Result<T> = std::result::Result<T, String>;

/// The first argument of the program that runs [`run`].
pub const SUBCOMMAND: &str = "flood-generator";
/// The addresses of hosts that answer. 198.18.0.0/15 is for benchmarks (RFC 2544).
pub const SOURCES: &str = "198.18.0.0/16";
/// The forged addresses, of hosts that do not answer.
const FORGED: &str = "198.19.0.0/16";
/// The address of [`Host::Other`] towards the server.
const OTHER: &str = "10.199.0.2";
/// Hosts that complete handshakes and hold TCP connections.
const HOSTS: u32 = 1000;
/// Packets in a second, of garbage and of Initial packets.
const PACKETS_PER_SECOND: u32 = 40_000;
/// Handshakes in a second.
const HANDSHAKES_PER_SECOND: u32 = 500;
/// TCP connections that are open at a time, and new ones in a second.
const OPEN_CONNECTIONS: usize = 10_000;
const CONNECTIONS_PER_SECOND: u32 = 2000;
/// Different Initial packets; each is used again with another source.
const INITIALS: usize = 2048;
/// A handshake that takes longer is given up.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(3);
/// How often the generator acts.
const TICK: Duration = Duration::from_millis(1);

/// The kind of packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flood {
    /// 40,000 UDP packets of 1200 random bytes in a second, each from another source.
    Garbage,
    /// 40,000 valid Initial packets in a second, each from another source that does not answer.
    Initials,
    /// 500 handshakes in a second that complete, also where a Retry is demanded, and stop there; from 1000
    /// sources.
    Handshakes,
    /// 10,000 TCP connections, from 1000 sources, that send nothing; 2000 in a second are opened anew.
    HalfOpenTcp,
    /// 40,000 first messages of a WireGuard handshake in a second, each from another source, without a valid
    /// MAC.
    WireguardInitiations,
}

impl Flood {
    /// Those that this project's server is measured with.
    pub const OF_QUIC: [Self; 4] = [Self::Garbage, Self::Initials, Self::Handshakes, Self::HalfOpenTcp];

    /// Its name in tables and arguments.
    pub fn name(self) -> &'static str {
        match self {
            Self::Garbage => "garbage",
            Self::Initials => "initials",
            Self::Handshakes => "handshakes",
            Self::HalfOpenTcp => "half-open-tcp",
            Self::WireguardInitiations => "wireguard-initiations",
        }
    }

    fn of_name(name: &str) -> Option<Self> {
        Self::OF_QUIC.into_iter().chain([Self::WireguardInitiations]).find(|flood| flood.name() == name)
    }
}

/// A running flood; it ends when dropped.
pub struct RunningFlood {
    child: Child,
    count: PathBuf,
}

impl RunningFlood {
    /// Makes the sources belong to [`Host::Other`], to which the server's answers go.
    pub fn prepare(testbed: &Testbed) {
        own_addresses(testbed, Host::Other, SOURCES, OTHER);
        testbed.run(Host::Server, &["ip", "route", "add", FORGED, "via", OTHER]);
    }

    /// Starts to send to `target` from [`Host::Other`].
    ///
    /// # Errors
    ///
    /// If this program cannot be run again.
    pub fn start(testbed: &Testbed, flood: Flood, target: SocketAddrV4) -> Result<Self> {
        let program = std::env::current_exe().map_err(|error| format!("this program's own path: {error}"))?;
        let program = program.to_str().ok_or("this program's own path is not UTF-8")?;
        let count = testbed.file("flood", Host::Other);
        let file = File::create(&count).map_err(|error| format!("{}: {error}", count.display()))?;
        let mut command = testbed.command(Host::Other, program);
        command.args([SUBCOMMAND, flood.name(), &target.to_string()]).stdout(file);
        let child = command.spawn().map_err(|error| format!("the flood does not start: {error}"))?;
        Ok(Self { child, count })
    }

    /// The amount sent so far: packets, completed handshakes, or opened TCP connections.
    pub fn sent(&self) -> u64 {
        let text = std::fs::read_to_string(&self.count).unwrap_or_default();
        text.lines().last().and_then(|line| line.parse().ok()).unwrap_or(0)
    }

    /// Whether it still runs.
    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }
}

impl Drop for RunningFlood {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Makes all addresses of `net` belong to `host`, and the server send packets for them to its address
/// `gateway`.
pub fn own_addresses(testbed: &Testbed, host: Host, net: &str, gateway: &str) {
    testbed.run(host, &["ip", "route", "add", "local", net, "dev", "lo"]);
    testbed.run(Host::Server, &["ip", "route", "add", net, "via", gateway]);
}

/// One of the first `of` addresses of [`SOURCES`].
pub fn source(number: u32, of: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits(u32::from_be_bytes([198, 18, 0, 1]) + number % of)
}

/// One of the forged addresses.
fn forged_source(number: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits(u32::from_be_bytes([198, 19, 0, 0]) + number % (1 << 16))
}

/// Sends until it is killed.
///
/// # Errors
///
/// If the arguments are wrong or a socket cannot be made.
pub fn run(args: &[String]) -> Result<()> {
    let [name, target] = args else { return Err(format!("{SUBCOMMAND}: expected FLOOD ADDRESS:PORT")) };
    let flood = Flood::of_name(name).ok_or(format!("there is no flood {name}"))?;
    let target: SocketAddrV4 = target.parse().map_err(|error| format!("{target}: {error}"))?;
    // The parent may be killed.
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
        .map_err(|error| format!("the parent's end cannot be noticed: {error}"))?;
    let mut random = Random::new(7);
    match flood {
        Flood::Garbage => forged(target, &(0..100).map(|_| noise(&mut random, 1200)).collect::<Vec<_>>()),
        Flood::Initials => forged(target, &initials(target)?),
        Flood::WireguardInitiations => {
            // Type 1, and 144 bytes of which the last 32 are the MACs.
            let message = |_| [&[1, 0, 0, 0][..], &noise(&mut random, 144)].concat();
            forged(target, &(0..100).map(message).collect::<Vec<_>>())
        }
        Flood::Handshakes => handshakes(target),
        Flood::HalfOpenTcp => half_open_tcp(target),
    }
}

fn noise(random: &mut Random, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|_| random.bits() as u8).collect()
}

/// Calls `each` `per_second` times in a second, and prints how often it was told of a success.
fn at_rate(per_second: u32, mut each: impl FnMut(u64) -> Result<u64>) -> Result<()> {
    let (start, mut calls, mut done, mut printed) = (Instant::now(), 0_u64, 0_u64, 0_u64);
    loop {
        let due = (start.elapsed().as_secs_f64() * f64::from(per_second)) as u64;
        // Missed calls are not made up for: a burst is another flood.
        calls = calls.max(due.saturating_sub(u64::from(per_second) / 50));
        while calls < due {
            done += each(calls)?;
            calls += 1;
        }
        if start.elapsed().as_secs() > printed {
            printed += 1;
            println!("{done}");
            std::io::stdout().flush().map_err(|error| error.to_string())?;
        }
        thread::sleep(TICK);
    }
}

/// Sends UDP payloads, each from another source.
fn forged(target: SocketAddrV4, payloads: &[Vec<u8>]) -> Result<()> {
    let raw = socket(AddressFamily::INET, SocketType::RAW, Some(ipproto::RAW))
        .map_err(|error| format!("no raw socket: {error}"))?;
    let mut packet = Vec::new();
    at_rate(PACKETS_PER_SECOND, |number| {
        let payload = &payloads[number as usize % payloads.len()];
        let from = forged_source(number as u32);
        // The kernel fills in total length, identification and header checksum (raw(7)). The UDP checksum may
        // be 0.
        packet.clear();
        packet.extend_from_slice(&[0x45, 0, 0, 0, 0, 0, 0, 0, 64, 17, 0, 0]);
        packet.extend_from_slice(&from.octets());
        packet.extend_from_slice(&target.ip().octets());
        packet.extend_from_slice(&(1024 + (number >> 16) as u16 % 60_000).to_be_bytes());
        packet.extend_from_slice(&target.port().to_be_bytes());
        packet.extend_from_slice(&(8 + payload.len() as u16).to_be_bytes());
        packet.extend_from_slice(&[0, 0]);
        packet.extend_from_slice(payload);
        // A full queue drops, as a link does.
        Ok(u64::from(sendto(&raw, &packet, SendFlags::empty(), &target).is_ok()))
    })
}

/// A QUIC client, and what tells its connection to `target` from others.
fn client(setup: &ClientSetup, target: SocketAddrV4) -> Result<(Endpoint, ConnectionHandle)> {
    let mut endpoint = Endpoint::client(setup);
    let local = LocalAddress::link(LinkId(0));
    let connected = endpoint.connect(Instant::now(), setup, local, SocketAddr::V4(target), "mpvpn");
    let id = connected.map_err(|error| format!("{target}: {error}"))?;
    Ok((endpoint, id))
}

fn setup() -> Result<ClientSetup> {
    let tls = tls::client_config(&Trust::Insecure, &[b"h3"]).map_err(|error| error.to_string())?;
    ClientSetup::new(Arc::new(tls), &TransportOptions::default(), b"flood").map_err(|error| error.to_string())
}

/// First packets of connections.
fn initials(target: SocketAddrV4) -> Result<Vec<Vec<u8>>> {
    let setup = setup()?;
    let one = |_| {
        let (mut endpoint, id) = client(&setup, target)?;
        let mut buffer = Vec::new();
        let connection = endpoint.get(id).ok_or("no connection")?;
        let transmit = connection.poll_transmit(Instant::now(), &mut buffer).ok_or("no first packet")?;
        buffer.truncate(transmit.segment_size.unwrap_or(transmit.size));
        Ok(buffer)
    };
    (0..INITIALS).map(one).collect()
}

/// A handshake under way.
struct Handshake {
    socket: UdpSocket,
    endpoint: Endpoint,
    id: ConnectionHandle,
    since: Instant,
}

impl Handshake {
    fn start(setup: &ClientSetup, target: SocketAddrV4, from: Ipv4Addr) -> Result<Self> {
        let socket = UdpSocket::bind((from, 0)).map_err(|error| format!("a socket of {from}: {error}"))?;
        socket.set_nonblocking(true).map_err(|error| error.to_string())?;
        let (endpoint, id) = client(setup, target)?;
        Ok(Self { socket, endpoint, id, since: Instant::now() })
    }

    /// Receives, and sends what is due. `Some`: it is complete, or has failed.
    fn poll(&mut self, target: SocketAddrV4) -> Option<bool> {
        let now = Instant::now();
        let mut datagram = [0; 2048];
        while let Ok((length, remote)) = self.socket.recv_from(&mut datagram) {
            let data = BytesMut::from(&datagram[..length]);
            self.endpoint.handle(now, Some(LocalAddress::link(LinkId(0))), remote, 0, data);
        }
        let connection = self.endpoint.get(self.id)?;
        if connection.poll_timeout().is_some_and(|at| at <= now) {
            connection.handle_timeout(now);
        }
        let mut ended = (now - self.since > HANDSHAKE_TIMEOUT).then_some(false);
        while let Some(event) = connection.poll_event(now) {
            match event {
                Event::Connected => ended = Some(true),
                Event::Lost(_) => ended = Some(false),
                _ => {}
            }
        }
        let mut buffer = Vec::new();
        while let Some(transmit) = connection.poll_transmit(now, &mut buffer) {
            let size = transmit.segment_size.unwrap_or(buffer.len()).max(1);
            for datagram in buffer.chunks(size) {
                let _ = self.socket.send_to(datagram, target);
            }
            buffer.clear();
        }
        self.endpoint.process_endpoint_events(self.id);
        ended
    }
}

/// Completes handshakes. The server hears no more of a connection after that.
fn handshakes(target: SocketAddrV4) -> Result<()> {
    let setup = setup()?;
    let mut open: VecDeque<Handshake> = VecDeque::new();
    at_rate(HANDSHAKES_PER_SECOND, |number| {
        open.push_back(Handshake::start(&setup, target, source(number as u32, HOSTS))?);
        let mut done = 0;
        open.retain_mut(|handshake| match handshake.poll(target) {
            Some(complete) => {
                done += u64::from(complete);
                false
            }
            None => true,
        });
        Ok(done)
    })
}

/// Opens TCP connections, and closes the oldest ones for new ones.
fn half_open_tcp(target: SocketAddrV4) -> Result<()> {
    allow_files(OPEN_CONNECTIONS as u64 + 100)?;
    let mut open: VecDeque<OwnedFd> = VecDeque::new();
    at_rate(CONNECTIONS_PER_SECOND, |number| {
        if open.len() >= OPEN_CONNECTIONS {
            open.pop_front();
        }
        let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::NONBLOCK, None)
            .map_err(|error| format!("no socket: {error}"))?;
        let from = SocketAddrV4::new(source(number as u32, HOSTS), 0);
        bind(&socket, &from).map_err(|error| format!("a socket of {from}: {error}"))?;
        // It is in progress.
        let _ = connect(&socket, &target);
        open.push_back(socket);
        Ok(1)
    })
}
