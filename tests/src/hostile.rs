//! Hostile QUIC peers: complete the handshake, then send valid and damaged HTTP/3 frames, capsules and
//! datagrams.
//!
//! In: a testbed, an address, random numbers. Out: counts of what was sent. Frames are encoded by this file,
//! so that the code under test is not tested with its own encoder.

use std::{
    io,
    net::{SocketAddr, UdpSocket},
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::{Bytes, BytesMut};
use mpvpn_identity::{identity::Identity, tls, trust::Trust};
use mpvpn_quic::{
    ClientSetup, Connection, ConnectionHandle, Endpoint, Event, Handled, LocalAddress, ServerSetup,
    TransportOptions,
};
use mpvpn_types::LinkId;

use crate::{
    random::Random,
    testbed::{Host, Testbed},
};

/// Counts of what a hostile peer has sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SentCounts {
    /// Established connections.
    pub connections: u64,
    /// Frames and capsules.
    pub frames: u64,
    /// Datagrams.
    pub datagrams: u64,
}

/// Connects `rounds` times to the server at `remote`, and sends damaged data each time.
pub fn client(testbed: &Testbed, remote: SocketAddr, rounds: u32, random: &mut Random) -> SentCounts {
    let tls = tls::client_config(&Trust::Insecure, &[b"h3"]).expect("a TLS configuration");
    let setup = ClientSetup::new(Arc::new(tls), &TransportOptions::default(), b"rogue")
        .expect("a QUIC configuration");
    let mut sent = SentCounts::default();
    for _ in 0..rounds {
        let local = LocalAddress::link(LinkId(0));
        let mut driver =
            EndpointDriver::new(testbed, Host::Inet, "[::]:0", Endpoint::client(&setup), Some(local));
        let connect = driver.endpoint.connect(Instant::now(), &setup, local, remote, "mpvpn");
        let id = connect.expect("a name and an address that can be connected to");
        let mut session = HostileSession::client();
        let end = Instant::now() + Duration::from_millis(150);
        while Instant::now() < end
            && driver.drive_once(&mut |event_id, connection, event| {
                if event_id == id {
                    session.handle_event(connection, event, random, &mut sent);
                }
            })
        {}
        if !random.one_in(4)
            && let Some(connection) = driver.endpoint.get(id)
        {
            connection.close(Instant::now(), random.bits() % 0x200, "enough");
            driver.drive_once(&mut |_, _, _| ());
        }
    }
    sent
}

/// Listens at `address` of the server's host for `time`, and sends damaged data to every client.
pub fn server(testbed: &Testbed, address: &str, time: Duration, random: &mut Random) -> SentCounts {
    let identity = Identity::load(&testbed.dir().join("server.crt"), &testbed.dir().join("server.key"));
    let tls = tls::server_config(&identity.expect("the stage's certificate").into(), &[b"h3"])
        .expect("a TLS configuration");
    let setup = ServerSetup::new(Arc::new(tls), &TransportOptions::default(), b"rogue")
        .expect("a QUIC configuration");
    let mut driver = EndpointDriver::new(testbed, Host::Server, address, Endpoint::server(&setup), None);
    let (mut sent, mut sessions) = (SentCounts::default(), Vec::<(ConnectionHandle, HostileSession)>::new());
    let end = Instant::now() + time;
    while Instant::now() < end {
        driver.drive_once(&mut |id, connection, event| {
            if event == Some(&Event::Connected) {
                sessions.retain(|(known, _)| *known != id);
                sessions.push((id, HostileSession::server()));
            }
            if let Some((_, session)) = sessions.iter_mut().find(|(known, _)| *known == id) {
                session.handle_event(connection, event, random, &mut sent);
            }
        });
    }
    sent
}

/// Connects to the server at `remote`, agrees on every extension of ours, and misuses all of them for `time`:
/// far numbers, groups that are never complete, reports of what was never sent, links that do not exist, and
/// streams that are left.
pub fn misuse(testbed: &Testbed, remote: SocketAddr, time: Duration) -> SentCounts {
    let tls = tls::client_config(&Trust::Insecure, &[b"h3"]).expect("a TLS configuration");
    let setup = ClientSetup::new(Arc::new(tls), &TransportOptions::default(), b"rogue")
        .expect("a QUIC configuration");
    let local = LocalAddress::link(LinkId(0));
    let mut driver =
        EndpointDriver::new(testbed, Host::Inet, "[::]:0", Endpoint::client(&setup), Some(local));
    let connect = driver.endpoint.connect(Instant::now(), &setup, local, remote, "mpvpn");
    connect.expect("a name and an address that can be connected to");
    let mut sent = SentCounts::default();
    let (mut request, mut number) = (None, 0);
    let end = Instant::now() + time;
    while Instant::now() < end
        && driver.drive_once(&mut |_, connection, event| match (event, request) {
            (Some(Event::Connected), _) => {
                sent.connections += 1;
                for bytes in
                    [[vec![0x00], frame(SETTINGS, &[0x08, 1, 0x33, 1])].concat(), vec![0x02], vec![0x03]]
                {
                    let stream = connection.open_uni().expect("the server allows some");
                    connection.write(stream, bytes.into());
                }
                let stream = connection.open_bi().expect("the server allows some");
                connection.write(stream, request_for_every_extension().into());
                request = Some(stream);
            }
            (None, Some(stream)) => misuse_once(connection, stream, &mut number, &mut sent),
            _ => {}
        })
    {}
    sent
}

/// A CONNECT-IP request that asks for every extension of docs/protocol.md.
fn request_for_every_extension() -> Vec<u8> {
    let all = fields(&[
        (":method", "CONNECT"),
        (":protocol", "connect-ip"),
        (":scheme", "https"),
        (":authority", "mpvpn"),
        (":path", "/.well-known/masque/ip/*/*/"),
        ("capsule-protocol", "?1"),
        (
            "mpvpn",
            "v=1, class=\"rogue\", clocks=12, order=2;copies=4, fec=10;source=1;repair=32, connection=0, \
             heartbeats=4, reinjection=6, data-ack=8, links",
        ),
    ]);
    frame(HEADERS, &all)
}

/// Some units of each misuse, unless those of before still wait.
fn misuse_once(connection: &mut Connection, stream: u64, number: &mut u32, sent: &mut SentCounts) {
    const UNITS: u32 = 100;
    let Some(path) = connection.paths().next() else { return };
    for _ in 0..UNITS {
        *number += 1;
        let far = number.wrapping_mul(2_654_435_761);
        // Ordered, in one of 4096 buckets, waits 1 s, far number.
        let label = [&[0x80 | (far >> 8) as u8 & 0x0f, far as u8, 250][..], &far.to_be_bytes()[..3]].concat();
        let group = number.to_be_bytes();
        let ids: [(u64, Vec<u8>); 6] = [
            (2, [&label[..], &[0x45; 20]].concat()),
            (10, [&group[2..], &[group[3] & 0x3f], &label[..]].concat()),
            (10, [&group[2..], &[0x80, 63], &[7; 20][..]].concat()),
            (6, [varint(4 * u64::from(far % 4000)), varint(u64::from(far)), vec![1]].concat()),
            (8, [varint(u64::from(far)), varint(1 << 40), varint(0)].concat()),
            (4, [&[0x03][..], &group[..], &varint(u64::from(*number % 8))].concat()),
        ];
        for (context, payload) in ids {
            connection.queue_datagram(path, [varint(stream / 4), varint(context), payload].concat().into());
            sent.datagrams += 1;
        }
    }
    if connection.unsent(stream) < 10_000 {
        // LINK of path 0: primary, no cap, weight 1, alone, another link each time.
        let link =
            [vec![0, 0], varint(0), varint(1), varint(0), varint(u64::from(*number % 65_000) + 1)].concat();
        connection.write(stream, frame(DATA, &frame(0x2d70_766c, &link)).into());
        sent.frames += 1;
    }
    if let Ok(left) = connection.open_bi() {
        connection.write(left, Bytes::from_static(&[0x01, 0x44]));
        sent.frames += 1;
    }
}

/// Called with every event of a connection, and with `None` once per iteration.
type Listener<'a> = &'a mut dyn FnMut(ConnectionHandle, &mut Connection, Option<&Event>);

/// Connects an endpoint with a socket and the clock.
struct EndpointDriver {
    socket: UdpSocket,
    endpoint: Endpoint,
    local: Option<LocalAddress>,
    connections: Vec<ConnectionHandle>,
    buffer: Vec<u8>,
}

impl EndpointDriver {
    fn new(
        testbed: &Testbed,
        host: Host,
        address: &str,
        endpoint: Endpoint,
        local: Option<LocalAddress>,
    ) -> Self {
        let socket = testbed.in_namespace(host, || UdpSocket::bind(address)).expect("a free port");
        socket.set_read_timeout(Some(Duration::from_millis(1))).expect("a socket takes a time-out");
        // A client has one connection, the first.
        let connections = if local.is_some() { vec![ConnectionHandle(0)] } else { Vec::new() };
        Self { socket, endpoint, local, connections, buffer: Vec::new() }
    }

    /// Receives pending datagrams, reports events, and sends. Returns `false` if no connection is left.
    fn drive_once(&mut self, on_event: Listener<'_>) -> bool {
        let mut datagram = [0; 2048];
        for _ in 0..64 {
            let Ok((length, remote)) = self.socket.recv_from(&mut datagram) else { break };
            let data = BytesMut::from(&datagram[..length]);
            if let Handled::New(id) = self.endpoint.handle(Instant::now(), self.local, remote, 0, data) {
                self.connections.push(id);
            }
        }
        let mut open = Vec::new();
        for id in std::mem::take(&mut self.connections) {
            if self.serve(id, on_event) {
                open.push(id);
            }
        }
        while let Some((transmit, data)) = self.endpoint.poll_stateless() {
            let _ = self.socket.send_to(&data, transmit.remote);
        }
        self.connections = open;
        !self.connections.is_empty()
    }

    fn serve(&mut self, id: ConnectionHandle, on_event: Listener) -> bool {
        let Some(connection) = self.endpoint.get(id) else { return false };
        let now = Instant::now();
        if connection.poll_timeout().is_some_and(|at| at <= now) {
            connection.handle_timeout(now);
        }
        while let Some(event) = connection.poll_event(now) {
            on_event(id, connection, Some(&event));
        }
        connection.receive_datagrams(|_, _| ());
        on_event(id, connection, None);
        self.buffer.clear();
        while let Some(transmit) = connection.poll_transmit(now, &mut self.buffer) {
            let _ = send(&self.socket, transmit.remote, &self.buffer, transmit.segment_size);
            self.buffer.clear();
        }
        self.endpoint.process_endpoint_events(id)
    }
}

fn send(socket: &UdpSocket, remote: SocketAddr, data: &[u8], segment: Option<usize>) -> io::Result<()> {
    let size = segment.unwrap_or(data.len()).max(1);
    data.chunks(size).try_for_each(|datagram| socket.send_to(datagram, remote).map(drop))
}

/// State of a hostile peer on one connection.
struct HostileSession {
    is_client: bool,
    request: Option<u64>,
    last_sent: Instant,
    rounds_sent: u32,
}

/// Interval between bursts of damaged data: short enough for dozens of bursts in the 150 ms of a client's
/// connection.
const SEND_INTERVAL: Duration = Duration::from_millis(4);
/// Number of bursts after which a hostile server closes the connection.
const MAX_ROUNDS: u32 = 60;

impl HostileSession {
    fn client() -> Self {
        Self { is_client: true, request: None, last_sent: Instant::now(), rounds_sent: 0 }
    }

    fn server() -> Self {
        Self { is_client: false, request: None, last_sent: Instant::now(), rounds_sent: 0 }
    }

    fn handle_event(
        &mut self,
        connection: &mut Connection,
        event: Option<&Event>,
        random: &mut Random,
        sent: &mut SentCounts,
    ) {
        match event {
            Some(Event::Connected) => {
                sent.connections += 1;
                self.open_control_streams(connection, random, sent);
                if self.is_client {
                    self.send_requests(connection, random, sent);
                }
            }
            Some(Event::StreamReadable(id)) if !self.is_client && id % 4 == 0 && self.request.is_none() => {
                self.request = Some(*id);
                let mut answer = frame(HEADERS, &fields(&[(":status", "200"), ("capsule-protocol", "?1")]));
                if random.one_in(3) {
                    random.mutate(&mut answer);
                }
                connection.write(*id, answer.into());
                sent.frames += 1;
                self.send_random_frames(connection, *id, random, sent);
            }
            _ => {}
        }
        let Some(id) = self.request.filter(|_| event.is_none() && self.last_sent.elapsed() > SEND_INTERVAL)
        else {
            return;
        };
        self.last_sent = Instant::now();
        self.rounds_sent += 1;
        self.send_random_frames(connection, id, random, sent);
        self.send_datagrams(connection, id, random, sent);
        if !self.is_client && self.rounds_sent == MAX_ROUNDS {
            connection.close(Instant::now(), random.bits() % 0x200, "enough");
        }
    }

    /// Opens the control and QPACK streams; damages SETTINGS only in one of four cases, since that ends the
    /// connection.
    fn open_control_streams(&self, connection: &mut Connection, random: &mut Random, sent: &mut SentCounts) {
        let settings = [&[0x08, 0x01, 0x33, 0x01, 0x01, 0x00, 0x07, 0x00][..]].concat();
        let mut control = [vec![0x00], frame(SETTINGS, &settings)].concat();
        if random.one_in(4) {
            random.mutate(&mut control);
        }
        for bytes in [control, vec![0x02], vec![0x03], random.noise(40)] {
            if let Ok(id) = connection.open_uni() {
                connection.write(id, bytes.into());
                sent.frames += 1;
            }
        }
    }

    /// Sends one valid request and five that may be damaged.
    fn send_requests(&mut self, connection: &mut Connection, random: &mut Random, sent: &mut SentCounts) {
        for number in 0..6 {
            let Ok(id) = connection.open_bi() else { return };
            let protocol = *random.pick(&["connect-ip", "connect-ip", "connect-udp", "websocket"]);
            let path = *random.pick(&[
                "/.well-known/masque/ip/*/*/",
                "/.well-known/masque/ip/*/*/",
                "/.well-known/masque/ip/10.0.0.0%2F8/6/",
                "/.well-known/masque/ip/%2F/999/",
                "/",
            ]);
            let mut request = frame(
                HEADERS,
                &fields(&[
                    (":method", "CONNECT"),
                    (":protocol", protocol),
                    (":scheme", "https"),
                    (":authority", "mpvpn"),
                    (":path", path),
                    ("capsule-protocol", "?1"),
                ]),
            );
            if number > 0 && random.one_in(2) {
                random.mutate(&mut request);
            }
            connection.write(id, request.into());
            sent.frames += 1;
            self.request.get_or_insert(id);
            if random.one_in(4) {
                connection.finish(id);
            } else if random.one_in(4) {
                connection.reset(id, random.bits() % 0x200);
            }
        }
    }

    /// Sends capsules in DATA frames, frames of unknown types, and random bytes.
    fn send_random_frames(
        &self,
        connection: &mut Connection,
        id: u64,
        random: &mut Random,
        sent: &mut SentCounts,
    ) {
        // Limits the memory for data that the peer does not read.
        if connection.unsent(id) > 100_000 {
            return;
        }
        for _ in 0..4 {
            let unknown = random.bits() >> 2;
            let kind = *random.pick(&[0x00, 0x01, 0x02, 0x03, 0x1ace_79ec, unknown]);
            let bodies: [&[u8]; 5] = [
                &[0, 4, 10, 0, 0, 9, 32],
                &[1, 4, 0, 0, 0, 0, 32, 2, 6, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 128],
                &[4, 0, 0, 0, 0, 255, 255, 255, 255, 0],
                &[4, 10, 0, 0, 9, 10, 0, 0, 1, 0],
                &[],
            ];
            let mut body = random.pick(&bodies).to_vec();
            if random.one_in(2) {
                random.mutate(&mut body);
            }
            let mut bytes = frame(DATA, &frame(kind, &body));
            match random.below(16) {
                0 => random.mutate(&mut bytes),
                1 => bytes = frame(random.bits() >> (2 + random.below(60)), &random.noise(300)),
                2 => bytes = random.noise(200),
                _ => {}
            }
            connection.write(id, bytes.into());
            sent.frames += 1;
        }
    }

    /// Sends HTTP datagrams with IP packets of wrong source addresses and lengths.
    fn send_datagrams(
        &self,
        connection: &mut Connection,
        id: u64,
        random: &mut Random,
        sent: &mut SentCounts,
    ) {
        let Some(path) = connection.paths().next() else { return };
        for _ in 0..20 {
            let mut packet = vec![0x45, 0, 0, 84, 0, 0, 0, 0, 64, 1, 0, 0, 10, 0, 0, 2, 10, 0, 0, 1];
            if random.one_in(3) {
                packet = [&[0x60, 0, 0, 0, 0, 64, 58, 64][..], &random.noise(80)].concat();
            }
            packet.extend(random.noise(200));
            random.mutate(&mut packet);
            let mut datagram = varint(if random.one_in(4) { random.bits() >> 2 } else { id / 4 });
            datagram.extend(varint(if random.one_in(4) { random.bits() >> 2 } else { 0 }));
            datagram.extend(packet);
            if random.one_in(10) {
                datagram.truncate(random.below(3));
            }
            connection.queue_datagram(path, Bytes::from(datagram));
            sent.datagrams += 1;
        }
    }
}

/// RFC 9114 §11.2.1.
const DATA: u64 = 0x00;
const HEADERS: u64 = 0x01;
const SETTINGS: u64 = 0x04;

/// RFC 9000 §16, shortest form.
fn varint(value: u64) -> Vec<u8> {
    match value {
        0..64 => vec![value as u8],
        64..16_384 => (value as u16 | 0x4000).to_be_bytes().to_vec(),
        16_384..1_073_741_824 => (value as u32 | 0x8000_0000).to_be_bytes().to_vec(),
        _ => (value & (u64::MAX >> 2) | 0xc000_0000_0000_0000).to_be_bytes().to_vec(),
    }
}

/// A frame (RFC 9114 §7.1) or capsule (RFC 9297 §3.2): both have the same encoding.
fn frame(kind: u64, body: &[u8]) -> Vec<u8> {
    [varint(kind), varint(body.len() as u64), body.to_vec()].concat()
}

/// A field section of literal field lines without Huffman coding (RFC 9204 §4.5.6).
fn fields(all: &[(&str, &str)]) -> Vec<u8> {
    let mut section = vec![0, 0];
    for (name, value) in all {
        section.extend(prefixed(0x20, 3, name.len()));
        section.extend(name.as_bytes());
        section.extend(prefixed(0x00, 7, value.len()));
        section.extend(value.as_bytes());
    }
    section
}

/// An integer with an N-bit prefix (RFC 7541 §5.1), below `2^N − 1 + 128`.
fn prefixed(flags: u8, bits: u32, value: usize) -> Vec<u8> {
    let most = (1 << bits) - 1;
    if value < most { vec![flags | value as u8] } else { vec![flags | most as u8, (value - most) as u8] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encodings_match_the_examples_of_the_rfcs() {
        // RFC 9000 §A.1.
        assert_eq!(varint(37), [0x25]);
        assert_eq!(varint(15_293), [0x7b, 0xbd]);
        assert_eq!(varint(494_878_333), [0x9d, 0x7f, 0x3e, 0x7d]);
        assert_eq!(varint(151_288_809_941_952_652), [0xc2, 0x19, 0x7c, 0x5e, 0xff, 0x14, 0xe8, 0x8c]);
        // RFC 7541 §C.1.1 and the second byte beyond the prefix.
        assert_eq!(prefixed(0, 5, 10), [10]);
        assert_eq!(prefixed(0x20, 3, 9), [0x27, 2]);
        assert_eq!(frame(SETTINGS, &[1, 0]), [4, 2, 1, 0]);
    }
}
