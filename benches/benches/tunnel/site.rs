//! A server with many sessions, and one client that is really there.
//!
//! Every session comes about by a whole handshake, but all clients except the last are dropped once the server has
//! let them in: to the server they are silent. Its timers do not run, so it keeps them.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use bytes::BytesMut;
use mpvpn_packet::VnetHdr;
use mpvpn_packets::Packet;
use mpvpn_path::PathState;
use mpvpn_quic::LocalAddress;
use mpvpn_tunnel::{AddressPool, Client, ClientEvent, Server};
use mpvpn_types::{Duration, Instant, LinkId};

use crate::identity::{self, Identity};

const SERVER: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), 443);
/// Behind the server.
const OUTSIDE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(203, 0, 113, 9)), 53);
/// One way over every link.
const DELAY: Duration = Duration::from_millis(5);
/// An address of the subnet that the pool gives out last.
const NOBODY: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 0, 255, 254)), 4000);
/// Payload of the packets that are counted (bytes).
const PAYLOAD: usize = 1200;
/// Packets that are counted, one after the other, since not all of them cost the same.
const PACKETS: usize = 50;
/// Rounds of packets each way before counting: by then a path has its rate and its MTU, and the connection its second
/// keys, which noq-proto takes before the 1000th packet.
const WARM_UP: usize = 24;
/// Seed of the live client, the same however many others there are.
const LIVE: u32 = 0;
/// Every wait ends: a handshake takes four steps, all paths of a client a few hundred.
const MOST_STEPS: usize = 2000;

/// UDP payloads under way, each with the client's link.
type Flight = Vec<(LinkId, Vec<u8>)>;

/// A server, its last client, and the network between them, which loses nothing.
pub(crate) struct Site {
    now: Instant,
    server: Server,
    client: Client,
    /// The client's place among all, from 0.
    number: u32,
    address: Option<IpAddr>,
    up: Flight,
    down: Flight,
    buf: Vec<u8>,
    /// Packets that are about to be read from a TUN.
    packets: Vec<Vec<u8>>,
}

impl Site {
    /// A server with `clients` sessions. The last one has `links` links and is told `routes` routes.
    pub(crate) fn new(clients: u32, links: u16, routes: u32) -> Self {
        let (now, identity) = (Instant::now(), Identity::new());
        let mut server = identity.server(routes);
        for number in 0..clients - 1 {
            let client = identity.client(now, number + 1);
            server = Self::pair(now, server, client, number, 1).into_server_with_session();
        }
        let client = identity.client(now, LIVE);
        let mut site = Self::pair(now, server, client, clients - 1, links);
        site.come_up(links);
        site
    }

    fn pair(now: Instant, server: Server, mut client: Client, number: u32, links: u16) -> Self {
        for link in 0..links {
            client.link_up(now, LinkId(link), SERVER);
        }
        let (up, down) = (Flight::new(), Flight::new());
        let buf = Vec::with_capacity(128 << 10);
        Self { now, server, client, number, address: None, up, down, buf, packets: Vec::new() }
    }

    /// Lets the server admit the client, and drops the client.
    fn into_server_with_session(mut self) -> Server {
        let all = self.number as usize + 1;
        for _ in 0..MOST_STEPS {
            if self.server.sessions() == all {
                return self.server;
            }
            self.step(Duration::ZERO);
        }
        panic!("the server did not admit client {}", self.number);
    }

    /// Brings the client's tunnel up on all links, and some packets through it.
    fn come_up(&mut self, links: u16) {
        for _ in 0..MOST_STEPS {
            self.step(DELAY);
            let paths = self.client.report(self.now).paths;
            let active = paths.iter().filter(|path| path.state == PathState::Active).count();
            if self.address.is_some() && active == usize::from(links) {
                break;
            }
        }
        assert!(self.address.is_some(), "client {} is not up on {links} links", self.number);
        let mut arrived = (0, 0);
        for _ in 0..WARM_UP {
            self.packets_down();
            self.server_sends();
            self.packets_up();
            self.client_sends();
            let (down, up) = self.step(DELAY);
            arrived = (arrived.0 + down, arrived.1 + up);
        }
        assert_eq!(arrived, (WARM_UP * PACKETS, WARM_UP * PACKETS), "packets are missing");
    }

    /// What was sent arrives after `delay`, and is answered. Returns the packets that came out at the client and at
    /// the server.
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
        transmit_down(&mut self.server, self.now, self.number, &mut self.buf, &mut self.down);
        transmit_up(&mut self.client, self.now, &mut self.buf, &mut self.up);
        arrived
    }
}

/// What is counted, and what leads to it.
impl Site {
    /// Packets from behind the server for the client are about to be read from the server's TUN.
    pub(crate) fn packets_down(&mut self) {
        let client = SocketAddr::new(self.address.expect("a tunnel that is up"), 4000);
        self.packets = packets(OUTSIDE, client);
    }

    /// Packets that no client has the address of are about to be read from the server's TUN.
    pub(crate) fn packets_astray(&mut self) {
        self.packets = packets(OUTSIDE, NOBODY);
    }

    /// Packets of the client's machine are about to be read from its TUN.
    pub(crate) fn packets_up(&mut self) {
        let client = SocketAddr::new(self.address.expect("a tunnel that is up"), 4000);
        self.packets = packets(client, OUTSIDE);
    }

    /// The server takes the packets from its TUN: whose are they, and where do they wait? Returns what it answers.
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

    /// The server takes each packet from its TUN and sends it; returns the UDP datagrams.
    pub(crate) fn server_sends(&mut self) -> usize {
        let before = self.down.len();
        for packet in &mut self.packets {
            let _ = self.server.handle_tun(self.now, VnetHdr::NONE, packet);
            transmit_down(&mut self.server, self.now, self.number, &mut self.buf, &mut self.down);
        }
        self.down.len() - before
    }

    /// The client takes the packets from its TUN.
    pub(crate) fn client_tun(&mut self) {
        for packet in &mut self.packets {
            self.client.handle_tun(self.now, VnetHdr::NONE, packet);
        }
    }

    /// The client takes each packet from its TUN and sends it; returns the UDP datagrams.
    pub(crate) fn client_sends(&mut self) -> usize {
        let before = self.up.len();
        for packet in &mut self.packets {
            self.client.handle_tun(self.now, VnetHdr::NONE, packet);
            transmit_up(&mut self.client, self.now, &mut self.buf, &mut self.up);
        }
        self.up.len() - before
    }

    /// The server receives what the client has sent, one datagram after the other; returns the packets for its TUN.
    pub(crate) fn server_receives(&mut self) -> usize {
        let mut count = 0;
        for (link, data) in self.up.drain(..) {
            let from = address_of(self.number, link);
            self.server.handle_datagram(self.now, Some(SERVER.ip()), from, 0, BytesMut::from(&data[..]));
            self.server.handle_batch(self.now);
            while let Some(joined) = self.server.poll_tun() {
                count += 1;
                self.server.recycle(joined);
            }
        }
        count
    }

    /// The client receives what the server has sent; returns the packets for its TUN.
    fn client_receives(&mut self) -> usize {
        let mut count = 0;
        for (link, data) in self.down.drain(..) {
            self.client.handle_datagram(self.now, link, SERVER, 0, BytesMut::from(&data[..]));
            self.client.handle_batch(self.now);
            while let Some(joined) = self.client.poll_tun(self.now) {
                count += 1;
                self.client.recycle(joined);
            }
        }
        count
    }
}

fn transmit_down(server: &mut Server, now: Instant, number: u32, buf: &mut Vec<u8>, down: &mut Flight) {
    while let Some(transmit) = server.poll_transmit(now, buf) {
        if let Some(link) = link_of(number, transmit.remote) {
            cut(buf, transmit.segment_size, |data| down.push((link, data)));
        }
        buf.clear();
    }
}

fn transmit_up(client: &mut Client, now: Instant, buf: &mut Vec<u8>, up: &mut Flight) {
    while let Some(transmit) = client.poll_transmit(now, buf) {
        let link = transmit.local.and_then(LocalAddress::as_link).expect("a client sends on links");
        cut(buf, transmit.segment_size, |data| up.push((link, data)));
        buf.clear();
    }
}

fn packets(from: SocketAddr, to: SocketAddr) -> Vec<Vec<u8>> {
    (0..PACKETS).map(|_| Packet::between(from, to).udp(&[7; PAYLOAD])).collect()
}

fn cut(buf: &[u8], size: Option<usize>, mut push: impl FnMut(Vec<u8>)) {
    buf.chunks(size.unwrap_or(buf.len()).max(1)).for_each(|data| push(data.to_vec()));
}

/// Client `number`'s address on a link: every client has an address, every link a port.
fn address_of(number: u32, link: LinkId) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::from(u32::from(Ipv4Addr::new(198, 18, 0, 0)) + number), 5000 + link.0))
}

fn link_of(number: u32, address: SocketAddr) -> Option<LinkId> {
    let link = LinkId(address.port().wrapping_sub(5000));
    (address == address_of(number, link)).then_some(link)
}

/// A pool of which `leases` addresses are given out.
pub(crate) fn pool(leases: u32) -> AddressPool {
    let mut pool =
        AddressPool::new(identity::SUBNET.parse().expect("a subnet"), identity::SUBNET6.parse().ok());
    for lease in 0..leases {
        pool.assign(u128::from(lease).to_be_bytes(), "user", &[]).expect("a free address");
    }
    pool
}
