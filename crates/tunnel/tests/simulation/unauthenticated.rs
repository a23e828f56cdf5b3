//! Responses over HTTP/3 to peers without credentials, and to other CONNECT-IP clients.

use std::net::{IpAddr, SocketAddr};

use crate::world::{TOKEN, TOKEN_OF_CAROL, World};
use bytes::{Bytes, BytesMut};
use mpvpn_masque::{
    capsule::{Capsule, CapsuleReader, IpRange},
    connect,
    connect_ip::ConnectIpRequest,
    connect_mpvpn, connect_udp, datagram,
    h3::{self, Event as HttpEvent, H3, Settings, Side},
    headers::Headers,
};
use mpvpn_packet::{VNET_HDR_LEN, ip};
use mpvpn_packets::Packet;
use mpvpn_path::Scheduler;
use mpvpn_quic::{Connection, Endpoint, Event, LocalAddress, Read, StreamId};
use mpvpn_tunnel::{RelayId, Server, ServerEvent};
use mpvpn_types::{CongestionControl, Duration, Instant, LinkId};

/// The answer to one request, with its content, over a connection of its own.
fn answer(request: &Headers) -> (Headers, Vec<u8>) {
    let (mut head, mut content) = (None, Vec::new());
    converse(&mut World::new().servers[0], request, |connection, stream, event| {
        match event {
            None => connection.finish(stream),
            Some(HttpEvent::Headers { headers, .. }) => head = Some(headers),
            Some(HttpEvent::Data { data, .. }) => content.extend_from_slice(&data),
            Some(HttpEvent::Finished { .. }) => return true,
            Some(_) => {}
        }
        false
    });
    (head.expect("a head comes first"), content)
}

/// The bytes of the large page.
const LARGE_PAGE: usize = 1_000_000;
/// The most that may wait for a visitor: the bytes of a connection that are not acknowledged, and a piece.
const MAX_WAITING: usize = (128 << 10) + (16 << 10);

/// A site with one page, at `/large`.
#[derive(Default)]
struct TestSite {
    /// Bytes of the page that were not written.
    left: usize,
}

impl TestSite {
    fn handle(&mut self, now: Instant, server: &mut Server, event: ServerEvent) {
        match event {
            ServerEvent::Visit { visit, headers, from } if headers.path() == Some("/large") => {
                assert_eq!(from, "198.51.100.1:1000".parse().ok());
                self.left = LARGE_PAGE;
                server.visit_respond(visit, &Headers::response(200));
                self.write(now, server, visit);
            }
            ServerEvent::Visit { visit, .. } => {
                server.visit_respond(visit, &Headers::response(404));
                server.relay_write(now, visit, Bytes::from_static(b"nothing"));
                server.visit_finish(now, visit);
            }
            ServerEvent::RelayWritable(visit) if self.left > 0 => self.write(now, server, visit),
            _ => {}
        }
    }

    /// Writes as much as the stream takes, which is bounded.
    fn write(&mut self, now: Instant, server: &mut Server, visit: RelayId) {
        let before = self.left;
        while self.left > 0 {
            let some = server.relay_writable_bytes(now, visit).min(self.left);
            if some == 0 {
                break;
            }
            server.relay_write(now, visit, vec![b'x'; some].into());
            self.left -= some;
            assert!(before - self.left <= MAX_WAITING, "{} bytes wait for a visitor", before - self.left);
        }
        if self.left == 0 {
            server.visit_finish(now, visit);
        }
    }
}

/// Makes one request over a new connection, until `turn` returns that it is complete. That is called for each
/// event on the request's stream, and once in each millisecond without one.
fn converse(
    server: &mut Server,
    request: &Headers,
    mut turn: impl FnMut(&mut Connection, StreamId, Option<HttpEvent>) -> bool,
) {
    let setup = World::new().client_config(TOKEN, Scheduler::Auto, CongestionControl::Bbr).setup;
    let mut client = Endpoint::client(&setup);
    let (local, remote) = (LocalAddress::link(LinkId(0)), "192.0.2.1:443".parse().unwrap());
    let mut now = Instant::now();
    let id = client.connect(now, &setup, local, remote, "mpvpn").unwrap();
    let mut http = H3::new(Side::Client, Settings::default());
    let (mut asked, mut buffer, mut site) = (None, Vec::new(), TestSite::default());
    for _ in 0..1000 {
        now += Duration::from_millis(1);
        let connection = client.get(id).unwrap();
        if connection.poll_timeout().is_some_and(|at| at <= now) {
            connection.handle_timeout(now);
        }
        while let Some(event) = connection.poll_event(now) {
            match event {
                Event::Connected => {
                    let control = connection.open_uni().unwrap();
                    connection.write(control, http.control_preface());
                    let stream = connection.open_bi().unwrap();
                    connection.write(stream, h3::encode_headers(request));
                    asked = Some(stream);
                }
                Event::StreamReadable(stream) => loop {
                    match connection.read(stream) {
                        Read::Data(data) => http.handle_stream(stream, data, false).unwrap(),
                        Read::Finished => {
                            http.handle_stream(stream, Bytes::new(), true).unwrap();
                            break;
                        }
                        Read::Reset(_) | Read::Blocked => break,
                    }
                },
                _ => {}
            }
        }
        if let Some(stream) = asked {
            let events = std::iter::from_fn(|| http.poll()).map(Some).collect::<Vec<_>>();
            if events.into_iter().chain([None]).any(|event| turn(connection, stream, event)) {
                return;
            }
        }
        while let Some(transmit) = connection.poll_transmit(now, &mut buffer) {
            let size = transmit.segment_size.unwrap_or(buffer.len());
            for datagram in buffer.chunks(size) {
                let from = "198.51.100.1:1000".parse().unwrap();
                server.handle_datagram(now, Some(remote.ip()), from, 0, BytesMut::from(datagram));
            }
            buffer.clear();
        }
        client.process_endpoint_events(id);
        server.handle_batch(now);
        while let Some(event) = server.poll_event() {
            site.handle(now, server, event);
        }
        if server.poll_timeout().is_some_and(|at| at <= now) {
            server.handle_timeout(now);
        }
        while let Some(transmit) = server.poll_transmit(now, &mut buffer) {
            let size = transmit.segment_size.unwrap_or(buffer.len());
            for datagram in buffer.chunks(size) {
                client.handle(now, Some(local), remote, 0, BytesMut::from(datagram));
            }
            buffer.clear();
        }
    }
    panic!("no answer within a second");
}

#[test]
fn packets_to_where_the_server_has_no_route_are_answered_and_not_carried() {
    let mut world = World::new();
    world.routes = &["203.0.113.0/25", "203.0.113.64/26", "192.168.7.0/24"];
    world.restart_server();
    let server = &mut world.servers[0];
    let mut request = ConnectIpRequest::new("vpn.example", "/.well-known/masque/ip/*/*/");
    request.authorization = Some(format!("Bearer {TOKEN}"));
    let mut capsules = CapsuleReader::new();
    let (mut routes, mut refusals, mut is_asked) = (Vec::new(), Vec::new(), false);
    converse(server, &request.headers(), |connection, stream, event| {
        if let Some(HttpEvent::Data { data, .. }) = event {
            capsules.push(&data);
        }
        while let Some(capsule) = capsules.next().unwrap() {
            match capsule {
                Capsule::RouteAdvertisement(ranges) => routes = ranges,
                Capsule::AddressAssign(assigned) if !is_asked => {
                    is_asked = true;
                    let own = assigned.iter().map(|entry| entry.net.addr()).find(IpAddr::is_ipv4).unwrap();
                    for to in ["203.0.113.9", "10.0.0.1", "203.0.113.128", "198.51.100.9"] {
                        let to = SocketAddr::new(to.parse().unwrap(), 53);
                        let packet = Packet::between(SocketAddr::new(own, 4000), to).udp(b"?");
                        let prefix = datagram::prefix(stream, 0);
                        let path = connection.paths().next().unwrap();
                        connection.queue_datagram(path, [prefix.as_ref(), &packet].concat().into());
                    }
                }
                _ => {}
            }
        }
        connection.receive_datagrams(|_, datagram| {
            let packet = &datagram[datagram::parse(&datagram).unwrap().payload_at..];
            let answer = ip::parse(packet).unwrap();
            // "Communication administratively prohibited" (RFC 1812 §5.2.7.1), about which packet.
            assert_eq!((answer.src(), &answer.transport()[..2]), ("10.0.0.1".parse().unwrap(), &[3, 13][..]));
            refusals.push(ip::parse(&answer.transport()[8..]).unwrap().dst().to_string());
        });
        refusals.len() == 2
    });
    assert_eq!(
        routes.iter().map(ToString::to_string).collect::<Vec<_>>(),
        [
            "10.0.0.0-10.0.0.255",
            "192.168.7.0-192.168.7.255",
            "203.0.113.0-203.0.113.127",
            "fd00::-fd00::ffff:ffff:ffff:ffff"
        ]
    );
    assert_eq!(refusals, ["203.0.113.128", "198.51.100.9"]);
    let carried: Vec<_> = std::iter::from_fn(|| server.poll_tun())
        .map(|joined| ip::parse(&joined.to_vec()[VNET_HDR_LEN..]).unwrap().dst().to_string())
        .collect();
    assert_eq!(carried, ["203.0.113.9", "10.0.0.1"]);
}

#[test]
fn a_new_route_advertisement_replaces_the_previous_one() {
    let mut world = World::new();
    world.routes = &["203.0.113.0/24", "2001:db8::/32"];
    world.restart_server();
    let client = world.add(TOKEN, Scheduler::Auto, &[(50, Duration::from_millis(10))]);
    world.up(client);
    let reported = |world: &World| {
        let assignment = world.machines[client].assignment.as_ref().expect("an assignment");
        assignment.routes.iter().flat_map(IpRange::to_nets).map(|net| net.to_string()).collect::<Vec<_>>()
    };
    assert_eq!(reported(&world), ["10.0.0.0/24", "203.0.113.0/24", "2001:db8::/32", "fd00::/64"]);
    world.routes = &["198.51.100.0/24"];
    world.restart_server();
    // Its packets show the client that the server does not know it any more.
    world.send_both_ways(client, Duration::from_secs(2));
    assert_eq!(reported(&world), ["10.0.0.0/24", "198.51.100.0/24", "fd00::/64"]);
}

fn get(path: &'static str) -> Headers {
    let mut get = Headers::new();
    for (name, value) in
        [(":method", "GET"), (":scheme", "https"), (":authority", "vpn.example"), (":path", path)]
    {
        get.push(name, value);
    }
    get
}

#[test]
fn a_large_page_reaches_a_visitor_whole_and_waits_in_small_pieces() {
    let (head, content) = answer(&get("/large"));
    assert_eq!((head.status(), content.len()), (Some(200), LARGE_PAGE));
    assert!(content.iter().all(|byte| *byte == b'x'));
}

#[test]
fn without_credentials_a_peer_sees_the_site() {
    let udp_path = "/.well-known/masque/udp/192.0.2.7/53/";
    let strangers = [
        get("/"),
        connect::request(&"192.0.2.7:80".parse().unwrap(), None),
        connect_udp::request("vpn.example", udp_path, None),
        connect_mpvpn::request("vpn.example", None, None),
    ];
    for request in &strangers {
        let (head, content) = answer(request);
        assert_eq!((head.status(), &content[..]), (Some(404), &b"nothing"[..]), "{request:?}");
        assert_eq!(head.value("proxy-status"), None);
    }
}

#[test]
fn wrong_credentials_are_refused_with_401() {
    let (head, content) = answer(&connect_mpvpn::request("vpn.example", Some("Bearer nobody"), None));
    assert_eq!((head.status(), content.len()), (Some(401), 0));
    assert!(head.value("proxy-status").is_some());
    assert_eq!(head.text("proxy-status"), Some("proxy; details=\"unknown token\""));
    let known = format!("Bearer {TOKEN_OF_CAROL}");
    let (head, content) = answer(&connect_mpvpn::request("vpn.example", Some(&known), None));
    assert_eq!((head.status(), content.len()), (Some(403), 0), "a user without access");
    let reason = "proxy; details=\"the access of this user was revoked\"";
    assert_eq!((head.text("proxy-status"), head.text("www-authenticate")), (Some(reason), None));
    let own = format!("Bearer {TOKEN}");
    let (head, _) = answer(&connect_udp::request("vpn.example", "/nothing", Some(&own)));
    assert_eq!(head.status(), Some(404));
    assert!(head.value("proxy-status").is_some());
}
