//! Users take turns: a user's packets are taken when they come, whatever waits of another one.

use std::{cell::Cell, net::SocketAddr, sync::LazyLock};

use bytes::{Bytes, BytesMut};
use mpvpn_masque::datagram;
use mpvpn_packets::Packet;
use mpvpn_types::{Duration, Instant, PathId};

use crate::{
    heap,
    rogue::{Rogue, every_extension},
    world::{MS, SERVER, TOKEN, TOKEN_OF_BOB},
};

/// Connections of the user who sends too much, and packets to each of them in an iteration.
const CONNECTIONS: usize = 40;
const COPIES: usize = 100;
/// The memory that packets which wait take at most (bytes): the server lets 8 MiB wait, and each packet here
/// has a buffer of its own, which takes more than its bytes.
const MAX_HELD: usize = 20 << 20;

thread_local! {
    static READ: Cell<u32> = const { Cell::new(0) };
}

/// A clock that is 20 µs later each time it is read.
fn clock() -> Instant {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    READ.set(READ.get() + 1);
    *START + Duration::from_micros(20) * READ.get()
}

/// The UDP payload in which a connection of the rogue sends a packet with so many bytes.
fn sent_by(rogue: &mut Rogue, at: usize, bytes: usize) -> Vec<u8> {
    let address = rogue.connections[at].addresses.iter().find(|ip| ip.is_ipv4()).expect("an address");
    let to = "203.0.113.9:9".parse().unwrap();
    let packet = Packet::between(SocketAddr::new(*address, 9), to).udp(&vec![1; bytes]);
    let stream = rogue.connections[at].request.expect("a tunnel");
    let bytes = Bytes::from([datagram::prefix(stream, 0).as_ref(), &packet].concat());
    let (now, mut buffer) = (rogue.world.now, Vec::new());
    let connection = rogue.quic(at).expect("a connection");
    connection.queue_datagram_on_path(PathId(0), bytes);
    connection.poll_transmit(now, &mut buffer).expect("a packet");
    buffer
}

#[test]
fn a_packet_is_taken_in_the_iteration_in_which_it_came_whatever_waits_of_another_user() {
    let mut rogue = Rogue::new(Default::default());
    let mut connect = |token| {
        rogue.token = token;
        let at = rogue.connect();
        rogue.ask_for_tunnel(at, every_extension("rogue", 0), None);
        at
    };
    let alice = connect(TOKEN);
    let of_bob: Vec<usize> = (0..CONNECTIONS).map(|_| connect(TOKEN_OF_BOB)).collect();
    rogue.run(300 * MS);
    let repeated: Vec<_> = of_bob.iter().map(|at| sent_by(&mut rogue, *at, 900)).collect();
    let local = Some(SERVER.parse::<SocketAddr>().unwrap().ip());
    let from = SocketAddr::from(([203, 0, 113, 7], 1000));
    let before = heap::held();
    for number in 0..20 {
        let (now, own) = (rogue.world.now, sent_by(&mut rogue, alice, 10));
        let server = &mut rogue.world.servers[0];
        heap::counted(|| {
            server.begin_iteration(true, false, clock);
            for data in std::iter::repeat_n(&repeated, COPIES).flatten().chain([&own]) {
                server.handle_datagram(now, local, from, 0, BytesMut::from(&data[..]));
            }
            server.handle_batch(now);
            let taken = std::iter::from_fn(|| server.poll_tun()).count();
            assert!(taken >= 1, "iteration {number}: the packet waits");
            assert!(server.poll_timeout().is_some_and(|at| at <= now), "the other packets are forgotten");
        });
        let held = heap::held() - before;
        assert!(held < MAX_HELD, "{held} bytes after {number} iterations");
    }
    // The rest is taken in some iterations.
    let now = rogue.world.now;
    let server = &mut rogue.world.servers[0];
    for _ in 0..2000 {
        server.begin_iteration(false, false, clock);
        server.handle_timeout(now);
        while server.poll_transmit(now, &mut Vec::new()).is_some() {}
    }
    assert!(server.poll_timeout().is_none_or(|at| at > now), "something still waits");
}

#[test]
fn of_a_flood_of_name_queries_to_the_server_as_many_pass_as_a_user_may_ask() {
    let forwarded = |to: &str| {
        let mut rogue = Rogue::with_tunnel();
        let from =
            rogue.connections[0].addresses.iter().find(|ip| ip.is_ipv4()).copied().expect("an address");
        let before = rogue.forwarded;
        for port in 1000..5000 {
            // Packets of one flow would be joined.
            let query = Packet::between(SocketAddr::new(from, port), to.parse().unwrap()).udp(&[1; 30]);
            rogue.datagram(0, &query);
        }
        rogue.run(100 * MS);
        rogue.forwarded - before
    };
    assert!(forwarded("203.0.113.9:53") > 3000, "another resolver is none of the server's");
    assert!(forwarded("10.0.0.1:54") > 3000, "another port");
    let passed = forwarded("10.0.0.1:53");
    assert!((1000..1300).contains(&passed), "{passed} queries");
}
