//! A server with many sessions, one of which has a live client.
//!
//! Every session is established by a complete handshake. All clients except the last are dropped after the
//! server has admitted them; the server's timers do not run, so it keeps their sessions.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use bytes::BytesMut;
use mpvpn_packet::VnetHdr;
use mpvpn_packets::Packet;
use mpvpn_path::PathState;
use mpvpn_quic::LocalAddress;
use mpvpn_tunnel::{AddressPool, Client, ClientEvent, Server};
use mpvpn_types::{Duration, Instant, LinkId};

use crate::identity::{self, Identity};

/// Outer address of the server.
pub(crate) const SERVER: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), 443);
/// A host in a network behind the server.
const BEYOND_SERVER: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(203, 0, 113, 9)), 53);
/// One-way delay of every link.
const LINK_DELAY: Duration = Duration::from_millis(5);
/// Time between the connections of two clients. Chosen: all connect before the first of their timers expires.
const CLIENT_INTERVAL: Duration = Duration::from_micros(100);
/// The address of the subnet that the pool assigns last.
const UNASSIGNED: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 0, 255, 254)), 4000);
/// UDP payload of the counted packets, bytes.
pub(crate) const PAYLOAD_BYTES: usize = 1200;
/// UDP payload of the answers, bytes: their packets are as short as acknowledgements of TCP.
const ANSWER_BYTES: usize = 12;
/// Number of counted packets: single packets differ in cost.
pub(crate) const PACKETS: usize = 50;
/// Rounds of packets in each direction before counting: afterwards the path has its rate and MTU, and the
/// connection has updated its keys, which noq-proto does before the 1000th packet. Smaller: the key update is
/// counted.
pub(crate) const WARM_UP_ROUNDS: usize = 24;
/// Random seed of the live client, independent of the number of others.
const LIVE_CLIENT_SEED: u32 = 0;
/// Maximum number of simulation steps of a wait: a handshake takes 4, all paths of a client a few hundred.
const MAX_STEPS: usize = 2000;

/// UDP payloads in flight, each with the client's link.
type InFlight = Vec<(LinkId, Vec<u8>)>;

/// A server, its last client, and a network without loss between them.
pub(crate) struct BenchTunnel {
    now: Instant,
    server: Server,
    client: Client,
    /// Index of the client among all clients, from 0.
    client_index: u32,
    address: Option<IpAddr>,
    up: InFlight,
    down: InFlight,
    buf: Vec<u8>,
    /// Packets that will be read from a TUN.
    packets: Vec<Vec<u8>>,
}

impl BenchTunnel {
    /// A server with `clients` sessions. The live client has `links` links and gets `routes` routes.
    pub(crate) fn new(clients: u32, links: u16, routes: u32) -> Self {
        let (mut now, identity) = (Instant::now(), Identity::new());
        let mut server = identity.server(routes);
        for client_index in 0..clients - 1 {
            let client = identity.client(now, client_index + 1);
            server = Self::new_pair(now, server, client, client_index, 1).into_server_with_session();
            // A server begins few handshakes at one moment.
            now += CLIENT_INTERVAL;
        }
        let client = identity.client(now, LIVE_CLIENT_SEED);
        let mut tunnel = Self::new_pair(now, server, client, clients - 1, links);
        tunnel.establish(links);
        tunnel
    }

    fn new_pair(now: Instant, server: Server, mut client: Client, client_index: u32, links: u16) -> Self {
        for link in 0..links {
            client.link_up(now, LinkId(link), SERVER);
        }
        let (up, down) = (InFlight::new(), InFlight::new());
        let buf = Vec::with_capacity(128 << 10);
        Self { now, server, client, client_index, address: None, up, down, buf, packets: Vec::new() }
    }

    /// Runs until the server has admitted the client, and drops the client.
    fn into_server_with_session(mut self) -> Server {
        let all = self.client_index as usize + 1;
        for _ in 0..MAX_STEPS {
            if self.server.sessions() == all {
                return self.server;
            }
            self.step(Duration::ZERO);
        }
        panic!("the server did not admit client {}", self.client_index);
    }

    /// Runs until the client's tunnel is up on all links, then exchanges packets to warm up.
    fn establish(&mut self, links: u16) {
        for _ in 0..MAX_STEPS {
            self.step(LINK_DELAY);
            let paths = self.client.report(self.now).paths;
            let active = paths.iter().filter(|path| path.state == PathState::Active).count();
            if self.address.is_some() && active == usize::from(links) {
                break;
            }
        }
        assert!(self.address.is_some(), "client {} is not up on {links} links", self.client_index);
        let mut arrived = (0, 0);
        for _ in 0..WARM_UP_ROUNDS {
            self.packets_down();
            self.server_sends();
            self.packets_up();
            self.client_sends();
            let (down, up) = self.step(LINK_DELAY);
            arrived = (arrived.0 + down, arrived.1 + up);
        }
        assert_eq!(arrived, (WARM_UP_ROUNDS * PACKETS, WARM_UP_ROUNDS * PACKETS), "packets are missing");
    }

    /// Advances time by `delay` and delivers all datagrams in flight. Returns the numbers of packets for the
    /// TUNs of client and server.
    fn step(&mut self, delay: Duration) -> (usize, usize) {
        self.now += delay;
        let arrived = (self.client_receives(), self.server_receives());
        if self.client.poll_timeout(self.now).is_some_and(|at| at <= self.now) {
            self.client.handle_timeout(self.now);
        }
        while let Some(event) = self.client.poll_event() {
            if let ClientEvent::Up(assignment) = event {
                self.address = assignment.addresses.first().map(|net| net.addr());
            }
        }
        transmit_down(&mut self.server, self.now, self.client_index, &mut self.buf, &mut self.down);
        transmit_up(&mut self.client, self.now, &mut self.buf, &mut self.up);
        arrived
    }
}

/// The counted operations and their preparation.
impl BenchTunnel {
    /// Prepares packets from the network behind the server to the client, for the server's TUN.
    pub(crate) fn packets_down(&mut self) {
        let client = SocketAddr::new(self.address.expect("a tunnel that is up"), 4000);
        self.packets = packets(BEYOND_SERVER, client, PAYLOAD_BYTES);
    }

    /// Prepares packets to an unassigned address, for the server's TUN.
    pub(crate) fn packets_to_unassigned_address(&mut self) {
        self.packets = packets(BEYOND_SERVER, UNASSIGNED, PAYLOAD_BYTES);
    }

    /// Prepares packets from the client to the network behind the server, for the client's TUN.
    pub(crate) fn packets_up(&mut self) {
        let client = SocketAddr::new(self.address.expect("a tunnel that is up"), 4000);
        self.packets = packets(client, BEYOND_SERVER, PAYLOAD_BYTES);
    }

    /// The server reads the packets from its TUN: client lookup and queueing. Returns the number of answers.
    pub(crate) fn server_tun(&mut self) -> usize {
        let mut answers = 0;
        for packet in &mut self.packets {
            let _ = self.server.handle_tun(self.now, VnetHdr::NONE, packet);
            while let Some(joined) = self.server.poll_tun() {
                answers += 1;
                self.server.recycle(joined);
            }
        }
        answers
    }

    /// The server reads each packet from its TUN and sends it. Returns the number of UDP datagrams.
    pub(crate) fn server_sends(&mut self) -> usize {
        let before = self.down.len();
        for packet in &mut self.packets {
            let _ = self.server.handle_tun(self.now, VnetHdr::NONE, packet);
            transmit_down(&mut self.server, self.now, self.client_index, &mut self.buf, &mut self.down);
        }
        self.down.len() - before
    }

    /// The client reads the packets from its TUN.
    pub(crate) fn client_tun(&mut self) {
        for packet in &mut self.packets {
            self.client.handle_tun(self.now, VnetHdr::NONE, packet);
        }
    }

    /// The client reads each packet from its TUN and sends it. Returns the number of UDP datagrams.
    pub(crate) fn client_sends(&mut self) -> usize {
        let before = self.up.len();
        for packet in &mut self.packets {
            self.client.handle_tun(self.now, VnetHdr::NONE, packet);
            transmit_up(&mut self.client, self.now, &mut self.buf, &mut self.up);
        }
        self.up.len() - before
    }

    /// The server receives the client's datagrams one by one. Returns the number of packets for its TUN.
    pub(crate) fn server_receives(&mut self) -> usize {
        let mut count = 0;
        for (link, data) in self.up.drain(..) {
            let from = address_of(self.client_index, link);
            self.server.handle_datagram(self.now, Some(SERVER.ip()), from, 0, BytesMut::from(&data[..]));
            self.server.handle_batch(self.now);
            while let Some(joined) = self.server.poll_tun() {
                count += 1;
                self.server.recycle(joined);
            }
        }
        count
    }

    /// Prepares what a client's event loop does when packets arrive one at a time: the server has sent the
    /// packets, and the client will answer each with a short one, as TCP does with an acknowledgement.
    pub(crate) fn turns(&mut self) {
        self.packets_down();
        self.server_sends();
        let client = SocketAddr::new(self.address.expect("a tunnel that is up"), 4000);
        self.packets = packets(client, BEYOND_SERVER, ANSWER_BYTES);
    }

    /// The iterations of a client's event loop in which packets arrive one at a time, are written to the TUN
    /// and answered. Returns the number of packets for the TUN, and that of UDP datagrams.
    pub(crate) fn client_turns(&mut self) -> (usize, usize) {
        let (mut count, before) = (0, self.up.len());
        for ((link, data), answer) in self.down.drain(..).zip(&mut self.packets) {
            let (now, client) = (self.now, &mut self.client);
            count += receive(client, now, link, &data);
            client.handle_tun(now, VnetHdr::NONE, answer);
            if client.is_due(now) {
                client.handle_timeout(now);
            }
            transmit_up(client, now, &mut self.buf, &mut self.up);
            while client.poll_event().is_some() {}
            while client.poll_change().is_some() {}
            let _ = client.poll_timeout(now);
        }
        (count, self.up.len() - before)
    }

    /// The client receives the server's datagrams. Returns the number of packets for its TUN.
    fn client_receives(&mut self) -> usize {
        let mut count = 0;
        for (link, data) in self.down.drain(..) {
            count += receive(&mut self.client, self.now, link, &data);
        }
        count
    }
}

/// A client receives a datagram. Returns the number of packets for its TUN.
fn receive(client: &mut Client, now: Instant, link: LinkId, data: &[u8]) -> usize {
    let mut count = 0;
    client.handle_datagram(now, link, SERVER, 0, BytesMut::from(data));
    client.handle_batch(now);
    while let Some(joined) = client.poll_tun(now) {
        count += 1;
        client.recycle(joined);
    }
    count
}

fn transmit_down(
    server: &mut Server,
    now: Instant,
    client_index: u32,
    buf: &mut Vec<u8>,
    down: &mut InFlight,
) {
    while let Some(transmit) = server.poll_transmit(now, buf) {
        if let Some(link) = link_of(client_index, transmit.remote) {
            split_segments(buf, transmit.segment_size, |data| down.push((link, data)));
        }
        buf.clear();
    }
}

fn transmit_up(client: &mut Client, now: Instant, buf: &mut Vec<u8>, up: &mut InFlight) {
    while let Some(transmit) = client.poll_transmit(now, buf) {
        let link = transmit.local.and_then(LocalAddress::as_link).expect("a client sends on links");
        split_segments(buf, transmit.segment_size, |data| up.push((link, data)));
        buf.clear();
    }
}

fn packets(from: SocketAddr, to: SocketAddr, payload_bytes: usize) -> Vec<Vec<u8>> {
    (0..PACKETS).map(|_| Packet::between(from, to).udp(&vec![7; payload_bytes])).collect()
}

fn split_segments(buf: &[u8], size: Option<usize>, mut push: impl FnMut(Vec<u8>)) {
    buf.chunks(size.unwrap_or(buf.len()).max(1)).for_each(|data| push(data.to_vec()));
}

/// Client `client_index`'s address on a link: every client has an address, every link a port.
fn address_of(client_index: u32, link: LinkId) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::from(u32::from(Ipv4Addr::new(198, 18, 0, 0)) + client_index), 5000 + link.0))
}

fn link_of(client_index: u32, address: SocketAddr) -> Option<LinkId> {
    let link = LinkId(address.port().wrapping_sub(5000));
    (address == address_of(client_index, link)).then_some(link)
}

/// A pool with `leases` assigned addresses.
pub(crate) fn pool(leases: u32) -> AddressPool {
    let mut pool =
        AddressPool::new(identity::SUBNET.parse().expect("a subnet"), identity::SUBNET6.parse().ok());
    for lease in 0..leases {
        pool.assign(u128::from(lease).to_be_bytes(), "user", &[]).expect("a free address");
    }
    pool
}
