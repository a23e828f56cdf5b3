//! Requests that a gateway received over TCP: a forwarder and a server on one machine, in simulated time.

use std::net::SocketAddr;

use crate::world::{MS, SERVER, TOKEN, World};
use bytes::{Bytes, BytesMut};
use mpvpn_masque::{
    capsule::{Capsule, CapsuleReader},
    connect::{self, ProxyError},
    connect_ip::ConnectIpRequest,
    connect_udp,
    h3::code,
    headers::Headers,
};
use mpvpn_packet::VNET_HDR_LEN;
use mpvpn_path::Scheduler;
use mpvpn_tunnel::{ForwardEvent, Forwarder, RelayId, RelayRead, ResponseStatus, ServerEvent, UdpId};
use mpvpn_types::{CongestionControl, Duration};

const HERE: &str = "127.0.0.1:40000";

pub(super) struct Inside {
    world: World,
    forwarder: Forwarder,
    events: Vec<ForwardEvent>,
    requests: Vec<ServerEvent>,
    /// Packets that came out of the server's TUN.
    packets: Vec<Vec<u8>>,
}

impl Inside {
    fn begun() -> Self {
        let world = World::new();
        let setup = world.client_config(TOKEN, Scheduler::Auto, CongestionControl::Bbr).setup;
        let remote = SERVER.parse().unwrap();
        let forwarder = Forwarder::connect(world.now, &setup, remote, "mpvpn").unwrap();
        Self { world, forwarder, events: Vec::new(), requests: Vec::new(), packets: Vec::new() }
    }

    pub(super) fn new() -> Self {
        let mut inside = Self::begun();
        inside.run(50 * MS);
        assert_eq!(inside.events.remove(0), ForwardEvent::Ready);
        inside
    }

    fn run(&mut self, time: Duration) {
        let end = self.world.now + time;
        while self.world.now < end {
            self.turn();
            self.world.now += MS;
        }
    }

    fn turn(&mut self) {
        self.forwarder.handle_timeout(self.world.now);
        self.world.servers[0].handle_timeout(self.world.now);
        // Both ends are on one machine: sent packets arrive at once.
        for _ in 0..20 {
            self.exchange();
        }
        let server = &mut self.world.servers[0];
        self.requests.extend(std::iter::from_fn(|| server.poll_event()));
        self.events.extend(std::iter::from_fn(|| self.forwarder.poll_event()));
        while let Some(packet) = server.poll_tun() {
            self.packets.push(packet.to_vec()[VNET_HDR_LEN..].to_vec());
        }
    }

    /// Exchanges the packets of both ends.
    fn exchange(&mut self) {
        self.send_up();
        let datagrams = self.sent_down();
        self.receive(datagrams);
    }

    fn send_up(&mut self) {
        let (now, server) = (self.world.now, &mut self.world.servers[0]);
        let mut buf = Vec::new();
        while let Some(transmit) = self.forwarder.poll_transmit(now, &mut buf) {
            for datagram in buf.chunks(transmit.segment_size.unwrap_or(transmit.size)) {
                let (local, datagram) = (Some(at(SERVER).ip()), BytesMut::from(datagram));
                server.handle_datagram(now, local, at(HERE), 0, datagram);
            }
            buf.clear();
        }
        server.handle_batch(now);
    }

    fn sent_down(&mut self) -> Vec<BytesMut> {
        let (mut buf, mut all) = (Vec::new(), Vec::new());
        while let Some(transmit) = self.world.servers[0].poll_transmit(self.world.now, &mut buf) {
            all.extend(buf.chunks(transmit.segment_size.unwrap_or(transmit.size)).map(BytesMut::from));
            buf.clear();
        }
        all
    }

    fn receive(&mut self, datagrams: Vec<BytesMut>) {
        for datagram in datagrams {
            self.forwarder.handle_datagram(self.world.now, at(SERVER), 0, datagram);
        }
        self.forwarder.handle_batch(self.world.now);
    }

    pub(super) fn ask(&mut self, headers: &Headers) -> RelayId {
        let request = self.forwarder.request(headers).expect("a stream");
        self.run(20 * MS);
        request
    }

    pub(super) fn answer(&mut self, request: RelayId) -> Headers {
        match self.forwarder.answer(self.world.now, request) {
            ResponseStatus::Received(headers) => headers,
            other => panic!("{other:?}"),
        }
    }

    /// A TCP connection that the server has granted, and the server's name for it.
    fn connected(&mut self) -> (RelayId, RelayId) {
        let request = self.ask(&connect::request(&"target.example:80".parse().unwrap(), Some(&bearer())));
        assert_eq!(self.forwarder.answer(self.world.now, request), ResponseStatus::Pending);
        let Some(ServerEvent::Connect { relay, user, to }) = self.requests.pop() else {
            panic!("no request")
        };
        assert_eq!((&*user, &*to.to_string()), ("alice", "target.example:80"));
        self.world.servers[0].relay_opened(relay);
        self.run(5 * MS);
        assert_eq!(self.answer(request).status(), Some(200));
        (request, relay)
    }

    fn read(&mut self, request: RelayId) -> (Vec<u8>, RelayRead) {
        let mut all = Vec::new();
        loop {
            match self.forwarder.read(self.world.now, request) {
                RelayRead::Data(data) => all.extend(data),
                end => return (all, end),
            }
        }
    }

    fn read_at_server(&mut self, relay: RelayId) -> (Vec<u8>, RelayRead) {
        let mut all = Vec::new();
        loop {
            match self.world.servers[0].relay_read(self.world.now, relay) {
                RelayRead::Data(data) => all.extend(data),
                end => return (all, end),
            }
        }
    }

    fn udp(&mut self) -> (RelayId, UdpId) {
        let path = connect_udp::path(&"192.0.2.9:53".parse().unwrap());
        let request = self.ask(&connect_udp::request(SERVER, &path, Some(&bearer())));
        let Some(ServerEvent::ConnectUdp { udp, .. }) = self.requests.pop() else { panic!("no request") };
        self.world.servers[0].udp_opened(udp);
        self.run(5 * MS);
        let answer = self.answer(request);
        assert_eq!((answer.status(), answer.text("capsule-protocol")), (Some(200), Some("?1")));
        (request, udp)
    }
}

fn at(address: &str) -> SocketAddr {
    address.parse().unwrap()
}

pub(super) fn bearer() -> String {
    format!("Bearer {TOKEN}")
}

#[test]
fn an_end_that_is_slow_in_the_middle_of_the_handshake_goes_on_with_it() {
    // So many datagrams of the server arrive before the others.
    for early in 0..4 {
        let mut inside = Inside::begun();
        inside.send_up();
        let mut flight = inside.sent_down();
        for late in [flight.split_off(early.min(flight.len())), Vec::new()] {
            inside.receive(std::mem::replace(&mut flight, late));
            if !flight.is_empty() {
                inside.send_up();
            }
        }
        // TLS is complete here, and the server does not know yet: earlier packets should have been answered
        // long ago.
        inside.world.now += 2000 * MS;
        inside.run(50 * MS);
        assert_eq!(inside.events, [ForwardEvent::Ready], "{early}");
    }
}

#[test]
fn bytes_go_both_ways_and_each_half_ends_by_itself() {
    let mut inside = Inside::new();
    let (request, relay) = inside.connected();
    inside.forwarder.write(request, Bytes::from_static(b"up"));
    inside.forwarder.finish(request);
    inside.run(5 * MS);
    assert_eq!(inside.read_at_server(relay), (b"up".to_vec(), RelayRead::Finished));
    assert!(inside.forwarder.is_open(request), "the other half goes on");
    inside.world.servers[0].relay_write(inside.world.now, relay, Bytes::from_static(b"down"));
    inside.world.servers[0].relay_finish(relay);
    inside.run(5 * MS);
    assert!(inside.events.contains(&ForwardEvent::Readable(request)));
    assert_eq!(inside.read(request), (b"down".to_vec(), RelayRead::Finished));
    inside.forwarder.end(request, code::REQUEST_CANCELLED);
    assert_eq!(inside.forwarder.requests(), 0);
}

#[test]
fn a_connection_that_breaks_at_either_end_is_broken_at_the_other() {
    let mut inside = Inside::new();
    let (request, relay) = inside.connected();
    inside.world.servers[0].relay_write(inside.world.now, relay, Bytes::from_static(b"part of it"));
    inside.run(5 * MS);
    inside.world.servers[0].relay_abort(relay);
    inside.run(5 * MS);
    assert_eq!(inside.read(request).1, RelayRead::Broken);
    assert!(!inside.forwarder.is_open(request));
    inside.forwarder.end(request, code::REQUEST_CANCELLED);

    let (request, relay) = inside.connected();
    inside.forwarder.end(request, code::REQUEST_CANCELLED);
    inside.run(5 * MS);
    assert_eq!(inside.requests.last(), Some(&ServerEvent::RelayGone(relay)));
}

#[test]
fn refusals_and_their_reasons_come_back() {
    let mut inside = Inside::new();
    let target = "target.example:80".parse().unwrap();
    let request = inside.ask(&connect::request(&target, Some("Bearer wrong")));
    let answer = inside.answer(request);
    assert_eq!((answer.status(), answer.text("www-authenticate")), (Some(401), Some("Bearer")));
    inside.forwarder.end(request, code::REQUEST_CANCELLED);

    let request = inside.ask(&connect::request(&target, Some(&bearer())));
    let Some(ServerEvent::Connect { relay, .. }) = inside.requests.pop() else { panic!("no request") };
    inside.world.servers[0].relay_failed(relay, ProxyError::Dns, "no such name".to_owned());
    inside.run(5 * MS);
    let answer = inside.answer(request);
    assert_eq!(answer.status(), Some(502));
    assert!(answer.text("proxy-status").unwrap().contains("dns_error"));
    assert_eq!(inside.read(request), (Vec::new(), RelayRead::Finished));
}

#[test]
fn a_reader_that_stops_stops_the_sender() {
    let mut inside = Inside::new();
    let (request, relay) = inside.connected();
    let mut sent = 0;
    for _ in 0..2000 {
        let room = inside.world.servers[0].relay_writable_bytes(inside.world.now, relay);
        inside.world.servers[0].relay_write(inside.world.now, relay, vec![7; room].into());
        sent += room;
        inside.turn();
        inside.world.now += MS;
    }
    assert!(sent < 4 << 20, "{sent} bytes for nobody");
    let mut got = 0;
    for _ in 0..200 {
        got += inside.read(request).0.len();
        inside.run(MS);
    }
    assert_eq!(got, sent, "all of it comes when it is read");
}

#[test]
fn payloads_travel_in_datagrams_and_those_too_large_are_reported() {
    let mut inside = Inside::new();
    let (request, udp) = inside.udp();
    let now = inside.world.now;
    assert!(inside.forwarder.send_datagram(now, request, b"\0ping"));
    assert!(!inside.forwarder.send_datagram(now, request, &[0; 9000]), "no datagram takes that");
    assert!(!inside.forwarder.send_datagram(now, request, b""), "it has no context ID");
    let capsule = Capsule::Datagram(Bytes::from(vec![0; 5001])).to_bytes();
    inside.forwarder.write(request, capsule);
    inside.run(5 * MS);
    let arrived: Vec<_> = std::iter::from_fn(|| inside.world.servers[0].poll_udp()).collect();
    assert_eq!(
        arrived.iter().map(|(of, payload)| (*of, payload.len())).collect::<Vec<_>>(),
        [(udp, 4), (udp, 5000)]
    );
    inside.world.servers[0].udp_send(inside.world.now, udp, b"pong");
    inside.run(5 * MS);
    assert!(inside.events.contains(&ForwardEvent::Readable(request)));
    let now = inside.world.now;
    assert_eq!(inside.forwarder.next_datagram(now, request), Some(Bytes::from_static(b"\0pong")));
    assert_eq!(inside.forwarder.next_datagram(now, request), None);
}

#[test]
fn datagrams_that_nobody_takes_are_dropped_and_not_kept() {
    let mut inside = Inside::new();
    let (request, udp) = inside.udp();
    for _ in 0..100 {
        for _ in 0..20 {
            inside.world.servers[0].udp_send(inside.world.now, udp, &[1; 1000]);
        }
        inside.run(5 * MS);
    }
    inside.world.servers[0].udp_send(inside.world.now, udp, b"the newest");
    inside.run(5 * MS);
    let now = inside.world.now;
    let left: Vec<_> = std::iter::from_fn(|| inside.forwarder.next_datagram(now, request)).collect();
    assert!(!left.is_empty() && left.len() <= 256, "{} of 2001", left.len());
    inside.world.servers[0].udp_send(inside.world.now, udp, b"late");
    inside.run(300 * MS);
    assert_eq!(inside.forwarder.next_datagram(inside.world.now, request), None, "it is too old");
}

#[test]
fn packets_and_the_capsules_of_their_request_pass() {
    let mut inside = Inside::new();
    let request = ConnectIpRequest {
        authorization: Some(bearer()),
        ..ConnectIpRequest::new(SERVER, "/.well-known/masque/ip/*/*/")
    };
    let request = inside.ask(&request.headers());
    assert_eq!(inside.answer(request).status(), Some(200));
    inside.run(100 * MS);
    let mut capsules = CapsuleReader::new();
    capsules.push(&inside.read(request).0);
    let mut address = None;
    while let Some(capsule) = capsules.next().unwrap() {
        if let Capsule::AddressAssign(list) = capsule {
            address = list.iter().map(|entry| entry.net.addr()).find(|ip| ip.is_ipv4());
        }
    }
    let from = SocketAddr::new(address.expect("an address"), 1000);
    let to: SocketAddr = "203.0.113.9:53".parse().unwrap();
    let packet = mpvpn_packets::Packet::between(from, to).udp(b"out");
    let value = [b"\0", &packet[..]].concat();
    assert!(inside.forwarder.send_datagram(inside.world.now, request, &value));
    inside.run(5 * MS);
    assert_eq!(inside.packets, [packet]);
    let back = mpvpn_packets::Packet::between(to, from).udp(b"back");
    inside.world.server_sends(back.clone());
    inside.run(5 * MS);
    let arrived = inside.forwarder.next_datagram(inside.world.now, request).expect("a packet");
    assert_eq!((arrived[0], &arrived[1..]), (0, &back[..]));
}

#[test]
fn with_the_connection_everything_is_over() {
    let mut inside = Inside::new();
    let (request, _) = inside.connected();
    inside.world.servers[0].close(inside.world.now, "the end");
    inside.run(20 * MS);
    assert!(matches!(inside.events.last(), Some(ForwardEvent::Lost(_))), "{:?}", inside.events);
    assert!(inside.forwarder.is_over() && inside.forwarder.requests() == 0);
    assert_eq!(inside.read(request).1, RelayRead::Broken);
    let target = "target.example:80".parse().unwrap();
    assert_eq!(inside.forwarder.request(&connect::request(&target, None)), None);
}
