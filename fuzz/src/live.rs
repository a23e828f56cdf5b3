//! A whole server, and a whole client, with a live peer at the other end of a simulated connection.
//!
//! The peer is a QUIC connection with HTTP/3 on top that this module speaks itself. It sets up a valid
//! session with all extensions on two paths; from then on the input decides what it sends: datagrams, bytes
//! of streams, capsules, requests, resets, paths, and how time passes. So mutations reach what encryption
//! hides from fuzzers of UDP payloads.

mod client;
mod identity;
pub(crate) mod peer;
mod server;

use std::net::{IpAddr, SocketAddr};

use bytes::BytesMut;
use mpvpn_masque::{
    capsule::{AssignedAddress, Capsule, IpRange, LinkNotice, RequestedAddress, Site, SiteState},
    connect, connect_mpvpn, connect_udp,
    headers::Headers,
};
use mpvpn_packet::{ip, protocol};
use mpvpn_packets::{Packet, Tcp};
use mpvpn_types::{Duration, Instant, LinkId, PathId};

use crate::input::Input;
use peer::Peer;

pub use self::{
    client::{client, client_with_session},
    server::{server, server_with_session},
};

/// The server's address outside of the tunnel.
const SERVER: SocketAddr = SocketAddr::new(IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1)), 443);
/// Links of the client, one path each.
const LINKS: u16 = 2;
/// One-way delay of a link.
const DELAY: Duration = Duration::from_millis(5);
/// The largest number of datagrams that one end may send without time that passes: far more than windows
/// allow.
const MAX_BURST: usize = 20_000;
/// Exchanges of both ends in one wait at most. More: long waits take most of the time of fuzzing. Fewer:
/// timers run later than they are due.
const MAX_EXCHANGES_PER_WAIT: u32 = 16;
/// Exchanges and datagrams for one input. More: fewer inputs a second. Fewer: states that take long are not
/// reached.
const MAX_WORK: usize = 250;

/// A UDP payload on a link of the client.
type Datagram = (LinkId, Vec<u8>);

/// The end that is tested.
trait Subject {
    fn receive(&mut self, now: Instant, link: LinkId, data: BytesMut);
    /// After a batch of datagrams: drives it, answers its events and checks what it delivers.
    fn after_batch(&mut self, now: Instant);
    fn transmit(&mut self, now: Instant, out: &mut Vec<Datagram>);
    fn poll_timeout(&mut self, now: Instant) -> Option<Instant>;
    fn handle_timeout(&mut self, now: Instant);
    /// A packet is read from its TUN device.
    fn tun(&mut self, now: Instant, packet: Vec<u8>);
    /// The application side of relays and flows does something.
    fn act(&mut self, now: Instant, input: &mut Input<'_>);
}

/// Both ends with the links between them.
struct World<S> {
    now: Instant,
    subject: S,
    peer: Peer,
    /// In flight to the subject, and to the peer.
    to_subject: Vec<Datagram>,
    to_peer: Vec<Datagram>,
    /// The exchanges, and the datagrams that they delivered.
    work: usize,
}

impl<S: Subject> World<S> {
    fn new(now: Instant, subject: S, peer: Peer) -> Self {
        Self { now, subject, peer, to_subject: Vec::new(), to_peer: Vec::new(), work: 0 }
    }

    /// Delivers what is in flight, runs timers that are due, and collects what both ends send.
    fn exchange(&mut self) {
        let now = self.now;
        self.work += 1 + self.to_subject.len();
        for (link, data) in std::mem::take(&mut self.to_subject) {
            self.subject.receive(now, link, BytesMut::from(&data[..]));
        }
        self.subject.after_batch(now);
        if self.subject.poll_timeout(now).is_some_and(|at| at <= now) {
            self.subject.handle_timeout(now);
            self.subject.after_batch(now);
        }
        let before = self.to_peer.len();
        self.subject.transmit(now, &mut self.to_peer);
        assert!(self.to_peer.len() - before <= MAX_BURST, "the subject sends without end");
        self.work += self.to_peer.len();
        for (link, data) in std::mem::take(&mut self.to_peer) {
            self.peer.receive(now, link, BytesMut::from(&data[..]));
        }
        self.peer.drive(now, &mut self.to_subject);
    }

    /// Lets time pass; datagrams take [`DELAY`] in one direction and none in the other. Timers that are due
    /// in the same part of a long wait run together, as in a process that gets no processor for so long.
    fn run(&mut self, time: Duration) {
        let end = self.now + time;
        let part = (time / MAX_EXCHANGES_PER_WAIT).max(Duration::from_micros(100));
        loop {
            self.exchange();
            let timers = self.subject.poll_timeout(self.now).into_iter().chain(self.peer.poll_timeout());
            let arrival = (!self.to_subject.is_empty()).then_some(self.now + DELAY);
            let next = timers.chain(arrival).min().unwrap_or(end).max(self.now + part);
            self.now = next.min(end);
            if next > end {
                return;
            }
        }
    }

    /// Plays the rest of an input.
    fn play(&mut self, input: &mut Input<'_>) {
        while !input.is_empty() && self.work < MAX_WORK {
            // An operation without an exchange takes about as long as the shortest exchange.
            self.work += 1;
            match input.byte() % 16 {
                0 => self.run(Duration::from_millis(1 << (input.byte() % 12))),
                1 => self.exchange(),
                2 => {
                    // Some of what is in flight is lost, damaged or repeated.
                    let (from, count, how) = (input.below(8), input.below(8), input.byte());
                    let flying = if how & 1 == 0 { &mut self.to_subject } else { &mut self.to_peer };
                    let end = (from + count).min(flying.len());
                    let picked: Vec<Datagram> = flying.get(from..end).unwrap_or_default().to_vec();
                    match how >> 1 & 3 {
                        0 if from < end => drop(flying.drain(from..end)),
                        1 => flying.extend(picked),
                        2 => flying.extend(
                            picked.into_iter().rev().map(|(link, data)| (LinkId(1 - link.0.min(1)), data)),
                        ),
                        _ => {
                            for byte in picked.iter().enumerate().map(|(at, _)| from + at) {
                                let data = &mut flying[byte].1;
                                let at = usize::from(input.byte()) % data.len().max(1);
                                data.iter_mut().skip(at).take(1).for_each(|byte| *byte ^= 1 << (how >> 5));
                            }
                        }
                    }
                }
                3 => {
                    let data = input.long().to_vec();
                    self.subject.receive(self.now, LinkId(0), BytesMut::from(&data[..]));
                }
                4 => {
                    let packet = packet(input, self.peer.inner(), self.peer.beyond());
                    self.subject.tun(self.now, packet);
                }
                5 => self.subject.act(self.now, input),
                _ => self.peer.act(self.now, input),
            }
        }
        self.run(Duration::from_millis(50));
    }
}

/// The flag of an input that says how its session is set up.
fn first_flag(data: &[u8]) -> bool {
    data.first().is_some_and(|flags| flags & 1 != 0)
}

/// Sets up both kinds of session, and plays an input with the one that it needs.
fn with_session<S>(establish: fn(bool) -> World<S>, play: fn(World<S>, &[u8])) -> impl FnMut(&[u8]) {
    let mut worlds = [false, true].map(|flag| Some(establish(flag)));
    move |data| {
        let world = worlds[usize::from(first_flag(data))].take().expect("a session is used once");
        play(world, data);
    }
}

/// An IP packet by a few bytes, from `src` to `dst` or the other way round, or raw bytes.
fn packet(input: &mut Input<'_>, mut src: SocketAddr, mut dst: SocketAddr) -> Vec<u8> {
    let (kind, port) = (input.byte(), u16::from(input.byte() % 8));
    if kind & 0x80 != 0 {
        std::mem::swap(&mut src, &mut dst);
    }
    if kind & 0x40 != 0 {
        // A stranger's address.
        src.set_ip(if src.is_ipv4() {
            [198, 18, 0, port as u8].into()
        } else {
            "2001:db8::1".parse().expect("an address")
        });
    }
    src.set_port(4000 + port);
    let base = Packet { dont_fragment: kind & 8 == 0, id: port, ..Packet::between(src, dst) };
    match kind & 7 {
        0 => input.long().to_vec(),
        1 | 2 => base.udp(&vec![kind; usize::from(input.u16()) % 9000]),
        3 => base.echo(port, 1, input.short()),
        4 => base.other(132, input.short()),
        _ => {
            let flags = input.byte();
            let tcp = Tcp { seq: input.u32(), ack: input.u32(), flags, ..Tcp::default() };
            let len = if flags & 8 == 0 { 0 } else { usize::from(input.u16()) % 3000 };
            base.tcp_with(&tcp, &vec![kind; len])
        }
    }
}

/// Whether a packet is an ICMP error or echo of this end, which has an address of its own.
fn is_icmp(packet: &ip::IpPacket<'_>) -> bool {
    [protocol::ICMP, protocol::ICMPV6].contains(&packet.protocol())
}

/// A capsule by a few bytes, or raw bytes.
fn capsule(input: &mut Input<'_>) -> Vec<u8> {
    let kind = input.byte();
    let net = |input: &mut Input<'_>| {
        let (v6, len) = (input.bool(), input.byte());
        let ip: IpAddr = if v6 {
            [0xfd00, 0, 0, 0, 0, 0, 0, input.u16()].into()
        } else {
            [10, 0, input.byte() % 2, input.byte()].into()
        };
        let max = if v6 { 128 } else { 32 };
        ipnet::IpNet::new_assert(ip, if len & 1 == 0 { max } else { len % (max + 1) }).trunc()
    };
    let count = input.below(5);
    let capsule = match kind % 7 {
        0 => Capsule::AddressRequest(
            (0..=count)
                .map(|_| RequestedAddress { request_id: u64::from(input.byte()), net: net(input) })
                .collect(),
        ),
        1 => Capsule::AddressAssign(
            (0..count)
                .map(|_| AssignedAddress { request_id: input.byte().into(), net: net(input) })
                .collect(),
        ),
        2 => {
            let ranges = (0..count).map(|_| IpRange::from_net(net(input), input.byte() % 2 * 17)).collect();
            Capsule::RouteAdvertisement(mpvpn_masque::capsule::routes_sorted(ranges))
        }
        3 => {
            let mut notice = LinkNotice::with_defaults(PathId(input.below(4) as u32));
            notice.link = input.bool().then(|| input.byte().into());
            notice.first_path = input.bool().then(|| PathId(input.below(4) as u32));
            notice.policy.metered = input.bool();
            notice.policy.up =
                input.bool().then(|| mpvpn_types::BitRate::from_bps(u64::from(input.u32()) * 1000));
            notice.policy.tier =
                [mpvpn_types::Tier::Primary, mpvpn_types::Tier::Overflow, mpvpn_types::Tier::Backup]
                    [input.below(3)];
            Capsule::Link(notice)
        }
        4 => Capsule::Datagram(input.short().to_vec().into()),
        5 => {
            let states = [SiteState::OfAnother, SiteState::InUse, SiteState::Taken];
            let sites = (0..count).map(|_| Site { net: net(input), state: states[input.below(3)] });
            Capsule::Sites(sites.collect())
        }
        _ => return input.short().to_vec(),
    };
    capsule.to_bytes().to_vec()
}

/// A head of a request, by a byte.
fn request(input: &mut Input<'_>, connect_ip: &Headers) -> Headers {
    let targets = ["192.0.2.7:80", "example.com:443", "[2001:db8::7]:53", "10.0.0.1:53"];
    let target = targets[input.below(4)].parse().expect("an authority");
    let credentials = input.bool().then_some("Bearer token");
    let mut headers = match input.byte() % 6 {
        0 => connect_ip.clone(),
        1 => connect::request(&target, credentials),
        2 => {
            let path = connect_udp::path(&target);
            connect_udp::request("mpvpn", &path, credentials)
        }
        3 => connect_mpvpn::request("mpvpn", credentials, Some("v=1, heartbeats=4, links".to_owned())),
        4 => Headers::response([100, 200, 401, 404, 501, 503][input.below(6)]),
        _ => {
            let mut get = Headers::new();
            for (name, value) in
                [(":method", "GET"), (":scheme", "https"), (":authority", "mpvpn"), (":path", "/")]
            {
                get.push(name, value);
            }
            get
        }
    };
    for _ in 0..input.below(4) {
        let names = crate::masque::NAMES;
        let name = names[usize::from(input.byte()) % names.len()];
        headers.push(name, input.short().to_vec());
    }
    headers
}

/// The common parts of the sessions of both targets.
#[cfg(test)]
pub(crate) mod tests_support {
    use mpvpn_masque::extensions::Extensions;

    use super::{LINKS, client, peer, server};

    /// Both sessions are set up as their targets need them.
    pub(crate) fn assert_established() {
        let mut at_server = server::established(false);
        let answer = at_server.peer.answer.take().expect("an answer");
        let answer = Extensions::of(&answer).expect("extensions");
        let expected = Extensions::parse([peer::ACCEPTED.as_bytes()].into_iter()).expect("a valid field");
        assert_eq!(Vec::from_iter(answer.keys()), Vec::from_iter(expected.keys()));
        assert_eq!((at_server.peer.paths(), at_server.subject.server.sessions()), (usize::from(LINKS), 1));
        let mut at_client = client::established(true);
        let report = at_client.subject.client.report(at_client.now);
        assert_eq!((at_client.peer.paths(), report.paths.len()), (usize::from(LINKS), usize::from(LINKS)));
        assert!(report.resequencing.is_some() && at_client.subject.client.has_udp_extension());
    }
}
