//! What somebody sees over HTTP/3 who is no user.

use crate::world::{TOKEN, World};
use bytes::BytesMut;
use mpvpn_masque::{
    connect, connect_udp,
    h3::{self, Event as HttpEvent, H3, Settings, Side},
    headers::Headers,
    paths,
};
use mpvpn_path::Scheduler;
use mpvpn_quic::{Cc, Endpoint, Event, Local, Read};
use mpvpn_types::{Duration, Instant, LinkId};

/// The answer to one request, with its content, over a connection of its own.
fn answer(request: &Headers) -> (Headers, Vec<u8>) {
    let mut world = World::new();
    let server = &mut world.servers[0];
    let setup = World::new().client_config(TOKEN, Scheduler::Auto, Cc::Bbr).setup;
    let mut client = Endpoint::client(&setup);
    let (local, remote) = (Local::link(LinkId(0)), "192.0.2.1:443".parse().unwrap());
    let mut now = Instant::now();
    let id = client.connect(now, &setup, local, remote, "mpvpn").unwrap();
    let mut http = H3::new(Side::Client, Settings::default());
    let (mut head, mut content, mut buffer) = (None, Vec::new(), Vec::new());
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
                    connection.finish(stream);
                }
                Event::StreamReadable(stream) => loop {
                    match connection.read(stream) {
                        Read::Data(data) => http.handle_stream(stream, data, false).unwrap(),
                        Read::Finished => {
                            http.handle_stream(stream, bytes::Bytes::new(), true).unwrap();
                            break;
                        }
                        Read::Reset(_) | Read::Blocked => break,
                    }
                },
                _ => {}
            }
        }
        while let Some(event) = http.poll() {
            match event {
                HttpEvent::Headers { headers, .. } => head = Some(headers),
                HttpEvent::Data { data, .. } => content.extend_from_slice(&data),
                HttpEvent::Finished { .. } => return (head.expect("a head comes first"), content),
                _ => {}
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
        client.settle(id);
        server.handle_batch(now);
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
fn who_shows_nothing_sees_what_the_site_says() {
    let mut get = Headers::new();
    for (name, value) in
        [(":method", "GET"), (":scheme", "https"), (":authority", "vpn.example"), (":path", "/")]
    {
        get.push(name, value);
    }
    let udp_path = "/.well-known/masque/udp/192.0.2.7/53/";
    let strangers = [
        get,
        connect::request(&"192.0.2.7:80".parse().unwrap(), None),
        connect_udp::request("vpn.example", udp_path, None),
        paths::request("vpn.example", None, Vec::new()),
    ];
    for request in &strangers {
        let (head, content) = answer(request);
        assert_eq!((head.status(), &content[..]), (Some(404), &b"nothing"[..]), "{request:?}");
        assert_eq!(head.value("proxy-status"), None);
    }
}

#[test]
fn who_shows_something_wrong_is_told() {
    let (head, content) = answer(&paths::request("vpn.example", Some("Bearer nobody"), Vec::new()));
    assert_eq!((head.status(), content.len()), (Some(401), 0));
    assert!(head.value("proxy-status").is_some());
    let own = format!("Bearer {TOKEN}");
    let (head, _) = answer(&connect_udp::request("vpn.example", "/nothing", Some(&own)));
    assert_eq!(head.status(), Some(404));
    assert!(head.value("proxy-status").is_some());
}
