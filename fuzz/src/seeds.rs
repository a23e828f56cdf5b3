//! The inputs from which fuzzing starts, made with the encoders of the product.
//!
//! `MPVPN_WRITE_SEEDS=1 cargo test -p mpvpn-fuzz seeds` writes them to `fuzz/seeds/`; without it that test
//! says which differ.

mod https;
pub(crate) mod texts;

use mpvpn_flow::{
    Label, Part,
    fec::{GroupPosition, Symbol},
};
use mpvpn_masque::{
    capsule::{AssignedAddress, Capsule, Family, IpRange, LinkNotice, RequestedAddress},
    connect, connect_ip, connect_mpvpn, connect_udp, extensions,
    h3::{H3, Settings, Side},
    headers::Headers,
    qpack,
    request::Rejection,
};
use mpvpn_packet::VnetHdr;
use mpvpn_packets::{Packet, Tcp};
use mpvpn_status::measure::{Datagram, DatagramKind, Order};
use mpvpn_types::{Duration, PathId};

use crate::{
    live::peer::ACCEPTED,
    masque::{NAMES, http_datagram, message},
};

/// An input: its target, its name, its bytes.
pub type Seed = (&'static str, &'static str, Vec<u8>);

/// All seeds, by target.
pub fn all() -> Vec<Seed> {
    let mut seeds = capsules();
    seeds.extend(h3());
    seeds.extend(heads());
    seeds.extend(datagrams());
    seeds.extend(packets());
    seeds.extend(front());
    seeds.extend(texts::all());
    seeds.extend(live());
    seeds.extend(measure());
    seeds
}

/// Bytes after their length in one byte, as `Input::short` reads them.
fn short(bytes: &[u8]) -> Vec<u8> {
    let bytes = &bytes[..bytes.len().min(255)];
    [&[bytes.len() as u8], bytes].concat()
}

/// The same with a length of two bytes.
fn long(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u16).to_be_bytes(), bytes].concat()
}

fn some_capsules() -> Vec<Capsule> {
    let assigned = |net: &str| AssignedAddress { request_id: 1, net: net.parse().expect("a network") };
    let range = |net: &str| IpRange::from_net(net.parse().expect("a network"), 0);
    let mut notice = LinkNotice::with_defaults(PathId(1));
    (notice.link, notice.first_path) = (Some(1), Some(PathId(0)));
    vec![
        Capsule::AddressRequest(vec![
            RequestedAddress::any(1, Family::V4),
            RequestedAddress::any(2, Family::V6),
        ]),
        Capsule::AddressAssign(vec![assigned("10.0.0.2/32"), assigned("fd00::2/128")]),
        Capsule::RouteAdvertisement(vec![range("0.0.0.0/0"), range("::/0")]),
        Capsule::Link(notice),
        Capsule::Datagram(b"\0payload"[..].into()),
    ]
}

fn capsules() -> Vec<Seed> {
    let stream: Vec<u8> = some_capsules().iter().flat_map(|capsule| capsule.to_bytes()).collect();
    let unknown = [&stream[..], &[0x21, 5, 1, 2, 3, 4, 5], &stream].concat();
    [("strict", 0u8, &stream), ("lenient", 1, &unknown), ("datagrams", 2, &unknown)]
        .map(|(name, kind, stream)| ("capsules", name, [&[kind, 6], &stream[..]].concat()))
        .to_vec()
}

fn h3() -> Vec<Seed> {
    let exchange = |side: Side, head: &Headers| {
        let h3 = H3::new(side, Settings { grease: 0x1f * 0x0002_5a17 + 0x21, ..Settings::default() });
        let [encoder, decoder] = h3.qpack_prefaces();
        // The streams that the other end opens: 2, 6, 10 at a client, 3, 7, 11 at a server.
        let first = if side == Side::Client { 2 } else { 3 };
        let request = [message(head, b"content"), message(head, b"")].concat();
        let streams: [(u8, u8, &[u8]); 4] = [
            (first, 0, &h3.control_preface()),
            (first + 4, 0, &encoder),
            (first + 8, 0, &decoder),
            (0, 5, &request),
        ];
        let heard_by = u8::from(side == Side::Client);
        let steps = streams.iter().flat_map(|(stream, flags, bytes)| {
            let bytes = if flags & 4 == 0 { short(bytes) } else { long(bytes) };
            [&[*stream, *flags], &bytes[..]].concat()
        });
        [heard_by].into_iter().chain(steps).collect::<Vec<u8>>()
    };
    let request = connect_ip::ConnectIpRequest::new("mpvpn", "/.well-known/masque/ip/*/*/").headers();
    vec![
        ("h3_frames", "client", exchange(Side::Client, &request)),
        ("h3_frames", "server", exchange(Side::Server, &connect_ip::accept())),
    ]
}

fn some_heads() -> Vec<(&'static str, Headers)> {
    let target = "192.0.2.7:80".parse().expect("an authority");
    let udp = connect_udp::path(&target);
    let mut ip = connect_ip::ConnectIpRequest::new("mpvpn", "/.well-known/masque/ip/192.0.2.0%2F24/17/");
    ip.authorization = Some("Bearer token".to_owned());
    ip.extensions = Some(
        "v=1, session=:BwcHBwcHBwcHBwcHBwcHBw==:, class=\"bulk\";weight=2;max-percent=50, clocks=12, \
         order=2;copies=3, fec=10;source=10;repair=2, connection=16, cc=bbr, scheduler=auto, links"
            .to_owned(),
    );
    let mut accepted = connect_ip::accept();
    accepted.push(extensions::FIELD, ACCEPTED);
    vec![
        ("connect-ip", ip.headers()),
        ("connect-udp", connect_udp::request("mpvpn", &udp, Some("Bearer token"))),
        ("connect", connect::request(&target, Some("Basic dXNlcjp0b2tlbg=="))),
        (
            "connect-mpvpn",
            connect_mpvpn::request(
                "mpvpn",
                Some("Bearer token"),
                Some("v=2, heartbeats=4, x=(1 a)".to_owned()),
            ),
        ),
        ("accepted", accepted),
        ("refused", Rejection::new(502, "no such name").headers()),
    ]
}

fn heads() -> Vec<Seed> {
    let mut seeds = Vec::new();
    for (name, head) in some_heads() {
        seeds.push(("qpack", name, [&[9], &qpack::encode(&head)[..]].concat()));
        let fields = head.iter().flat_map(|field| {
            let known = NAMES.iter().position(|name| name.as_bytes() == field.name);
            let name = known.map_or_else(|| [&[255], &short(&field.name)[..]].concat(), |at| vec![at as u8]);
            let is_long = field.name == extensions::FIELD.as_bytes();
            [name, if is_long { long(&field.value) } else { short(&field.value) }].concat()
        });
        let path = short(b"/.well-known/masque/ip/{target}/{ipproto}/");
        seeds.push(("requests", name, path.into_iter().chain(fields).collect()));
    }
    seeds
}

fn label(number: u32, part: Option<Part>) -> Vec<u8> {
    let timeout = Duration::from_millis(100);
    let mut bytes = Vec::new();
    Label { bucket: 1, ordered: true, reorder_timeout: timeout, number, part }.encode(&mut bytes);
    bytes
}

fn datagrams() -> Vec<Seed> {
    let packet = |number, part| [label(number, part), short(b"packet")].concat();
    let part = |index| packet(7, Some(Part { index, last: 1 }));
    let labels =
        [packet(0, None), packet(2, None), vec![0xff, 50, 1], packet(1, None), part(1), part(0)].concat();
    let mut forged = vec![0];
    for symbol in [Symbol::Source(0), Symbol::Repair { index: 0, source_count: 2 }] {
        GroupPosition { group: 3, symbol }.encode(&mut forged);
        forged.extend([1, 6, 0, 2, 9, 9, 9, 9]);
    }
    // Groups of four with two repair packets; some packets and repair packets get lost.
    let sent = (0..16)
        .flat_map(|at| [&[if at % 4 == 1 { 0 } else { 24 + 32 }], &short(&[at; 40])[..], &[1, 1]].concat());
    let lossy = [1, 3, 1, 0, 0].into_iter().chain(sent).collect();
    vec![("labels", "order", labels), ("fec", "forged", forged), ("fec", "lossy", lossy)]
}

fn measure() -> Vec<Seed> {
    let udp = Order::SendUdp { port: 9, run: 3, bits_per_second: 1_000_000, milliseconds: 2000 };
    let data = Datagram { kind: DatagramKind::Data, run: 3, sequence: 7, sent_us: 1 << 33 };
    vec![
        ("measure", "order", udp.line().trim_end().into()),
        ("measure", "datagram", [&data.encode()[..], &[0; 40]].concat()),
    ]
}

fn packets() -> Vec<Seed> {
    let syn = Tcp { flags: 2, options: vec![2, 4, 5, 0xb4, 3, 3, 7, 0], ..Tcp::default() };
    let behind = Packet::v6().udp_behind_extension_headers(&[(0, vec![0; 6]), (43, vec![0; 6])], b"x");
    let single = [
        ("tcp4", Packet::v4().tcp_with(&syn, b"")),
        ("tcp6", Packet::v6().tcp_with(&syn, b"data")),
        ("udp4", Packet::v4().udp(b"payload")),
        ("echo6", Packet::v6().echo(1, 2, b"ping")),
        ("extensions", behind),
        (
            "options",
            Packet { ip_options: vec![0x94, 4, 0, 0], dont_fragment: false, ..Packet::v4() }.udp(&[0; 64]),
        ),
    ];
    let mut seeds: Vec<Seed> = single
        .into_iter()
        .map(|(name, packet)| ("ip_packets", name, [&[4, 0], &packet[..]].concat()))
        .collect();
    let tso: (VnetHdr, Vec<u8>) = Packet::v4().tcp_super_packet(&Tcp::default(), &[7; 900], 300);
    let uso: (VnetHdr, Vec<u8>) = Packet::v6().udp_super_packet(&[7; 900], 300);
    for (name, (header, packet)) in [("tso", tso), ("uso", uso)] {
        seeds.push(("split_join", name, [&[5, 0, 0], &header.to_bytes()[..], &packet[..]].concat()));
    }
    let described = (0..12u8).flat_map(|at| [(at % 6) << 2 | at & 1, at % 2, 100 + at, 2, at, 0x10]);
    seeds.push(("split_join", "described", [5, 0, 3].into_iter().chain(described).collect()));
    // A connection is requested, accepted, used in both directions and ended.
    let open: &[u8] = &[0, 0, 0x80, 2, 0, 255, 255, 4, 0, 0, 0, 0, 0x10, 0, 255, 255];
    let data: &[u8] = &[0, 0, 0, 0x18, 0, 255, 255, 1, 0, 6, 0, 8, 7, 0, 2, 0, 9, 0, 10];
    let end: &[u8] = &[0, 0, 0, 0x11, 0, 255, 255, 6, 0, 8, 8, 0, 1, 0, 0, 0, 0x10, 0, 255, 255, 9, 0, 20];
    seeds.push(("split_tcp", "connection", [open, data, end].concat()));
    seeds.push(("split_tcp", "refused", [&open[..7], &[5, 0, 2, 9, 0, 18]].concat()));
    seeds
}

fn front() -> Vec<Seed> {
    let v1 = b"PROXY TCP4 192.0.2.1 192.0.2.2 1234 443\r\nrest".to_vec();
    let v2 =
        [&b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c"[..], &[192, 0, 2, 1, 192, 0, 2, 2, 4, 210, 1, 187]].concat();
    let local = b"\r\n\r\n\0\r\nQUIT\n\x20\0\0\0".to_vec();
    let mut seeds = vec![
        ("proxy_protocol", "v1", v1),
        ("proxy_protocol", "v2", v2),
        ("proxy_protocol", "health", local),
        (
            "proxy_heads",
            "socks5",
            [&[0, 3, 5, 1, 0, 5, 1, 0, 3, 11], &b"example.com\x01\xbbearly"[..]].concat(),
        ),
        ("proxy_heads", "associate", vec![0, 0, 5, 1, 0, 5, 3, 0, 1, 0, 0, 0, 0, 0, 0]),
        (
            "proxy_heads",
            "connect",
            b"\x01\x06CONNECT example.com:443 HTTP/1.1\r\nHost: a\r\n\r\nearly".to_vec(),
        ),
        (
            "proxy_heads",
            "absolute",
            b"\x01\x06GET http://a:81/b?c HTTP/1.1\r\nHost: a\r\nConnection: x\r\nx: 1\r\n\r\n".to_vec(),
        ),
        ("proxy_heads", "datagram", [&[2, 0, 0, 0, 0, 3, 11], &b"example.com\x00\x35payload"[..]].concat()),
    ];
    seeds.extend(https::all());
    let query = [&[0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 7], &b"example\x03com\0\0\x01\0\x01"[..]].concat();
    let answer =
        [&[0, 7, 0x81, 0x80, 0, 1, 0, 1, 0, 0, 0, 0, 7], &b"example\x03com\0\0\x01\0\x01"[..]].concat();
    let answer = [&answer[..], &[0xc0, 12, 0, 1, 0, 1, 0, 0, 1, 0, 0, 4, 192, 0, 2, 1]].concat();
    let dns = [&[0], &short(&query)[..], &[0x81], &short(&answer), &[2], &short(b"")].concat();
    seeds.push(("dns", "answer", dns));
    let forwarder = [&long(&answer)[..], &long(&query), &long(&query)].concat();
    seeds.push(("dns_forwarder", "answer", forwarder));
    seeds.push(("dns_forwarder", "failure", [&[0, 0], &long(&query)[..]].concat()));
    seeds
}

/// Operations of the peer: what the world does, stream, path, operation, arguments.
fn peer(stream: u8, path: u8, operation: u8, arguments: &[u8]) -> Vec<u8> {
    [&[6, stream, path, operation], arguments].concat()
}

fn live() -> Vec<Seed> {
    let wait = |exponent: u8| vec![0, exponent];
    let tun = |kind: u8| vec![4, kind, 1, 2, 0];
    let raw = |payload: &[u8]| peer(3, 0, 0, &long(payload));
    let numbered = |number: u8| peer(3, 1, 3, &[0, 1, 0, number, 1, 1, 0, 64]);
    let protected = |number: u8, flags: u8| peer(3, 0, 3, &[1, flags, number, number, 0, 1, 1, 1, 0, 64]);
    let capsules: Vec<u8> = some_capsules()
        .iter()
        .flat_map(|capsule| peer(3, 0, 5, &[&[5, 0], &short(&capsule.to_bytes())[..]].concat()))
        .collect();
    let open = |kind: u8| peer(3, 0, 7, &[&[0, 1, kind, 0], &short(b"hello")[..]].concat());
    let edge = |what: u8| vec![5, what, 0, 1, 0];
    let packets = [
        tun(1),
        tun(0x81),
        numbered(0),
        numbered(2),
        wait(3),
        numbered(1),
        protected(0, 0),
        protected(2, 8),
        wait(8),
    ];
    let heartbeat = raw(&http_datagram(0, 4, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]));
    let reinjected = raw(&http_datagram(0, 6, &[0, 0, 1, 2, 3]));
    let ack = raw(&http_datagram(0, 8, &[0, 4]));
    let programs: [(&'static str, u8, Vec<u8>); 6] = [
        ("packets", 0, packets.concat()),
        ("capsules", 0, [capsules, wait(6)].concat()),
        (
            "requests",
            0,
            [
                open(1),
                wait(4),
                edge(0),
                wait(4),
                edge(2),
                wait(4),
                open(2),
                wait(4),
                edge(0),
                edge(3),
                wait(5),
            ]
            .concat(),
        ),
        ("reports", 1, [heartbeat, reinjected, ack, wait(4), tun(5), wait(9)].concat()),
        ("paths", 0, [peer(3, 1, 11, &[]), wait(9), peer(3, 0, 10, &[3]), wait(9)].concat()),
        ("silence", 6, [tun(1), wait(4), vec![2, 0, 7, 0], wait(11)].concat()),
    ];
    let mut seeds = Vec::new();
    for (name, flags, program) in programs {
        for target in ["server", "client"] {
            seeds.push((target, name, [&[flags], &program[..]].concat()));
        }
    }
    seeds
}
