//! How large the packets become that are sent over UDP, and inside TCP.

use std::net::SocketAddr;

use bytes::BytesMut;
use mpvpn_quic::{Endpoint, Handled, LocalAddress, TransportOptions};
use mpvpn_types::{Duration, Instant, LinkId};

const MS: Duration = Duration::from_millis(1);
/// The UDP payload of an Ethernet frame, and of a datagram inside TCP (bytes).
const ETHERNET: u16 = 1472;
const INSIDE_TCP: u16 = 4096;

/// The datagram limits at both ends of a connection over `link` after some time, and the largest packet that
/// each sent (bytes). The path carries up to `largest`.
fn grow(link: LinkId, client: &str, server: &str, largest: usize) -> [(usize, usize); 2] {
    let options = |udp, tcp| TransportOptions {
        max_udp_payload: udp,
        max_udp_payload_inside_tcp: tcp,
        rng_seed: Some([3; 32]),
        ..TransportOptions::default()
    };
    let (accepts, setup) = crate::tls::pair(&options(ETHERNET, 65_000), &options(ETHERNET, INSIDE_TCP));
    let mut ends = [Endpoint::client(&setup), accepts];
    let addresses: [SocketAddr; 2] = [client, server].map(|address| address.parse().unwrap());
    let locals = [LocalAddress::link(link), LocalAddress::from(addresses[1].ip())];
    let mut now = Instant::now();
    let mut ids = [Some(ends[0].connect(now, &setup, locals[0], addresses[1], "mpvpn").unwrap()), None];
    let (mut sent, mut buf) = ([0; 2], Vec::new());
    for _ in 0..1000 {
        now += 5 * MS;
        for end in 0..2 {
            let Some(id) = ids[end] else { continue };
            let connection = ends[end].get(id).expect("a connection");
            if connection.poll_timeout().is_some_and(|at| at <= now) {
                connection.handle_timeout(now);
            }
            while connection.poll_event(now).is_some() {}
            let mut packets = Vec::new();
            while let Some(transmit) = {
                buf.clear();
                connection.poll_transmit(now, &mut buf)
            } {
                let segment = transmit.segment_size.unwrap_or(transmit.size).max(1);
                packets.extend(buf.chunks(segment).map(BytesMut::from));
            }
            assert!(ends[end].process_endpoint_events(id));
            sent[end] = packets.iter().map(BytesMut::len).fold(sent[end], usize::max);
            let far = 1 - end;
            for packet in packets.into_iter().filter(|packet| packet.len() <= largest) {
                let handled = ends[far].handle(now, Some(locals[far]), addresses[end], 0, packet);
                if let Handled::New(id) = handled {
                    ids[far] = Some(id);
                }
            }
        }
    }
    [0, 1].map(|end| {
        let connection = ends[end].get(ids[end].expect("connected")).expect("a connection");
        (connection.max_datagram_size().expect("datagrams"), sent[end])
    })
}

#[test]
fn packets_inside_tcp_are_larger_than_those_over_udp() {
    let [ethernet, inside_tcp] = [ETHERNET, INSIDE_TCP].map(usize::from);
    let link = LinkId(0);
    for (datagram, sent) in grow(link, "198.51.100.1:5000", "192.0.2.1:443", ETHERNET.into()) {
        assert!(datagram > ethernet - 50 && sent <= ethernet, "{datagram}, {sent} over UDP");
    }
    let link = link.with_path_index(LinkId::TCP_PATH_INDEX);
    for (datagram, sent) in grow(link, "127.0.0.1:5000", "127.0.0.1:443", usize::MAX) {
        assert!(datagram > inside_tcp - 50 && sent <= inside_tcp, "{datagram}, {sent} inside TCP");
    }
}
