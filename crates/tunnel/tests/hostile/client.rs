//! A rogue client: what the server holds of it, and what one unit of it costs, for each way to misuse an
//! extension.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use bytes::Bytes;
use mpvpn_flow::{
    Label, Part,
    fec::{GroupPosition, Symbol},
};
use mpvpn_masque::{
    capsule::{ADDRESS_REQUEST, DATAGRAM, LINK},
    h3,
    headers::Headers,
};
use mpvpn_packets::Packet;
use mpvpn_quic::FlowControlWindows;
use mpvpn_types::{Duration, LinkId, PathId};

use crate::{
    MAX_BOOKKEEPING, MAX_HELD, heap,
    rogue::{Rogue, Targets, context, cpu_time, every_extension, raw_capsule, varints},
    world::{MS, TOKEN, TOKEN_OF_BOB, World},
};

const SECOND: Duration = Duration::from_secs(1);
/// Units whose cost is compared.
const MANY: u64 = 20_000;

/// Numbers that look random, the same in each run.
struct Dice(u64);

impl Dice {
    fn next(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % below
    }
}

pub fn label(bucket: u16, number: u32, part: Option<Part>) -> Vec<u8> {
    let mut out = Vec::new();
    let reorder_timeout = Duration::from_millis(1000);
    Label { ordered: true, bucket, reorder_timeout, number, part }.encode(&mut out);
    out
}

/// The least IP packet that the server forwards for the client.
pub fn packet(rogue: &Rogue) -> Vec<u8> {
    let from = rogue.connections[0].addresses.iter().find(|ip| ip.is_ipv4()).copied().expect("an address");
    let to = "203.0.113.9:9".parse().unwrap();
    Packet::between(SocketAddr::new(from, 9), to).udp(b"")
}

#[test]
fn only_packets_from_the_addresses_of_their_sender_are_forwarded() {
    let mut rogue = Rogue::with_tunnel();
    let to = |is_v4| if is_v4 { "203.0.113.9:9" } else { "[2001:db8:9::9]:9" }.parse().unwrap();
    // A rogue has no check of its own. Context 0 carries packets as they are (RFC 9484 §6).
    let send = |rogue: &mut Rogue, from: IpAddr| {
        let packet = Packet::between(SocketAddr::new(from, 9), to(from.is_ipv4())).udp(b"");
        let (plain, ordered) = (packet.clone(), [label(7, rogue.sent as u32, None), packet].concat());
        rogue.datagram(0, &plain);
        rogue.run(20 * MS);
        rogue.datagram(context::ORDER, &ordered);
        // Longer than the reorder timeout, as numbers are left out.
        rogue.run(1500 * MS);
        std::mem::take(&mut rogue.forwarded)
    };
    rogue.forwarded = 0;
    let own = rogue.connections[0].addresses.clone();
    assert!(own.iter().any(IpAddr::is_ipv4) && own.iter().any(IpAddr::is_ipv6), "{own:?}");
    for from in own {
        assert_eq!(send(&mut rogue, from), 2, "its own address {from}");
        let next: IpAddr = match from {
            IpAddr::V4(ip) => Ipv4Addr::from(u32::from(ip) + 1).into(),
            IpAddr::V6(ip) => Ipv6Addr::from(u128::from(ip) + 1).into(),
        };
        assert_eq!(send(&mut rogue, next), 0, "an address of another client, {next}");
    }
    for stranger in ["192.0.2.66", "2001:db8:66::66"] {
        assert_eq!(
            send(&mut rogue, stranger.parse().unwrap()),
            0,
            "an address outside the tunnel, {stranger}"
        );
    }
}

/// Runs one way of misuse; the server must hold at most `most` bytes more than before at any time, and none
/// of it two minutes after the connection is closed.
fn holds_at_most(most: usize, rogue: &mut Rogue, misuse: impl FnOnce(&mut Rogue)) {
    let baseline = heap::held();
    rogue.peak = baseline;
    misuse(rogue);
    rogue.run(500 * MS);
    let over = rogue.over(baseline);
    println!("{} KiB over the baseline of {} KiB", over >> 10, baseline >> 10);
    assert!(over <= most, "{over} bytes over the baseline");
    for at in 0..rogue.connections.len() {
        let now = rogue.world.now;
        if let Some(connection) = rogue.quic(at) {
            connection.close(now, 0x100, "enough");
        }
    }
    rogue.run(5 * SECOND);
    let left = heap::held();
    assert!(left < baseline.max(MAX_BOOKKEEPING), "{left} bytes are left of {baseline} and {over}");
}

#[test]
fn far_numbers_in_all_sequences() {
    let mut rogue = Rogue::with_tunnel();
    let packet = packet(&rogue);
    holds_at_most(MAX_BOOKKEEPING, &mut rogue, |rogue| {
        let mut dice = Dice(1);
        for bucket in (0..4096).chain(0..4096) {
            let number = dice.next(1 << 24) as u32;
            rogue.datagram(context::ORDER, &[label(bucket, number, None), packet.clone()].concat());
        }
    });
}

#[test]
fn parts_of_packets_that_never_become_whole() {
    let mut rogue = Rogue::with_tunnel();
    holds_at_most(MAX_BOOKKEEPING, &mut rogue, |rogue| {
        for number in 0..2000 {
            for index in 0..15 {
                let part = Some(Part { index, last: 15 });
                rogue.datagram(context::ORDER, &[label(1, number, part), vec![7]].concat());
            }
        }
    });
}

fn in_group(group: u16, symbol: Symbol, content: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    GroupPosition { group, symbol }.encode(&mut out);
    out.extend_from_slice(content);
    out
}

#[test]
fn groups_of_repair_that_are_never_complete() {
    let mut rogue = Rogue::with_tunnel();
    holds_at_most(MAX_BOOKKEEPING, &mut rogue, |rogue| {
        for group in 0..3000 {
            for index in 0..8 {
                let repair = Symbol::Repair { index, source_count: 64 };
                rogue.datagram(context::FEC, &in_group(group, repair, b""));
                let content = label(group % 4096, 0, None);
                rogue.datagram(context::FEC, &in_group(group, Symbol::Source(index), &content));
            }
        }
    });
}

#[test]
fn reinjected_bytes_of_streams_that_were_never_opened() {
    let mut rogue = Rogue::with_tunnel();
    holds_at_most(MAX_BOOKKEEPING, &mut rogue, |rogue| {
        let mut dice = Dice(2);
        for _ in 0..20_000 {
            let stream = 4 * dice.next(2000);
            let offset = dice.next(1 << 40) << 1;
            rogue.datagram(context::REINJECTION, &[varints(&[stream, offset]), vec![1]].concat());
        }
    });
}

#[test]
fn reinjected_bytes_of_what_relays_have_read() {
    let mut rogue = Rogue::with_tunnel();
    let streams: Vec<_> = (0..40).filter_map(|_| rogue.connect_tcp(0)).collect();
    rogue.run(50 * MS);
    for stream in &streams {
        let data = h3::encode_data(&[5; 1400]);
        rogue.quic(0).expect("it is connected").write(*stream, data);
    }
    rogue.run(100 * MS);
    rogue.targets = Targets::Stop;
    holds_at_most(MAX_BOOKKEEPING, &mut rogue, |rogue| {
        for stream in &streams {
            // All begin before the next byte, and end behind it.
            for offset in 300..1100 {
                let bytes = vec![9; 1000];
                rogue.datagram(context::REINJECTION, &[varints(&[*stream, offset << 1]), bytes].concat());
            }
        }
    });
}

#[test]
fn data_acks_heartbeats_and_clocks_of_what_was_never_sent() {
    let mut rogue = Rogue::with_tunnel();
    holds_at_most(MAX_BOOKKEEPING, &mut rogue, |rogue| {
        let mut dice = Dice(3);
        for number in 0..10_000u32 {
            let far = (1 << 61) + dice.next(1 << 20);
            let gaps: Vec<u64> = (0..16).flat_map(|_| [dice.next(9), far >> 8]).collect();
            let entry = [vec![dice.next(1 << 30), far, 16], gaps].concat();
            rogue.datagram(context::DATA_ACK, &varints(&entry));
            let paths = varints(&(0..64).map(|_| dice.next(1 << 32)).collect::<Vec<_>>());
            rogue.datagram(context::HEARTBEATS, &[vec![0b11], number.to_be_bytes().to_vec(), paths].concat());
            let clock = [varints(&[dice.next(1 << 31)]), vec![0xff; 8]].concat();
            rogue.datagram(context::CLOCKS, &clock);
        }
    });
}

#[test]
fn every_link_number_for_every_path() {
    let mut rogue = Rogue::with_tunnel();
    holds_at_most(MAX_BOOKKEEPING, &mut rogue, |rogue| {
        for link in 1..10_000u64 {
            for path in [0, 1, 2 + link] {
                let value = varints(&[path, 0, 1000, 1, 0, link, 0]);
                rogue.capsule(0, &raw_capsule(LINK, value.len() as u64, &value));
            }
            if link % 10 == 0 {
                rogue.run(MS);
            }
        }
    });
}

#[test]
fn capsules_that_are_huge_partial_or_empty() {
    for (kind, declared) in
        [(0x1234_5678, 1 << 60), (DATAGRAM, 65_000), (ADDRESS_REQUEST, 65_536), (LINK, 64)]
    {
        let mut rogue = Rogue::with_tunnel();
        holds_at_most(MAX_BOOKKEEPING, &mut rogue, |rogue| {
            rogue.capsule(0, &raw_capsule(kind, declared, b""));
            for _ in 0..63 {
                rogue.capsule(0, &[0; 1000]);
                rogue.run(MS);
            }
        });
    }
    let mut rogue = Rogue::with_tunnel();
    holds_at_most(MAX_BOOKKEEPING, &mut rogue, |rogue| {
        for round in 0..200 {
            let empty = raw_capsule(0x1234_5600 + round, 0, b"").repeat(200);
            rogue.capsule(0, &empty);
            rogue.write(0, Bytes::from(vec![0; 2000]));
            rogue.run(MS);
        }
    });
    assert!(rogue.connections[0].response.is_some());
}

#[test]
fn streams_that_are_opened_and_left() {
    let beginnings: [&[u8]; 4] = [b"", &[1], &[1, 0x44], &[0x40, 0x21, 0x80, 0xff, 0xff, 0xff]];
    let mut rogue = Rogue::with_tunnel();
    let mut opened = 0;
    holds_at_most(MAX_BOOKKEEPING, &mut rogue, |rogue| {
        for round in 0..200 {
            for _ in 0..100 {
                let Some(connection) = rogue.quic(0) else { return };
                let Ok(stream) = connection.open_bi() else { break };
                // The last one is half-closed after an empty DATA frame's place.
                connection.write(stream, Bytes::from_static(beginnings[round % 4]));
                opened += 1;
            }
            while let Some(Ok(stream)) = rogue.quic(0).map(mpvpn_quic::Connection::open_uni) {
                rogue.quic(0).expect("it is connected").write(stream, Bytes::from_static(&[0x40]));
            }
            rogue.run(MS);
        }
    });
    assert!(opened >= 256, "{opened} streams");
}

fn get() -> Headers {
    let mut get = Headers::new();
    for (name, value) in
        [(":method", "GET"), (":scheme", "https"), (":authority", "vpn.example"), (":path", "/")]
    {
        get.push(name, value);
    }
    get
}

#[test]
fn streams_that_are_opened_and_reset_for_ever() {
    type Open = fn(&mut Rogue) -> Option<u64>;
    let ways: [(&str, Open); 5] = [
        ("nothing", |rogue| rogue.quic(0)?.open_bi().ok()),
        ("the beginning of a header section", |rogue| {
            let connection = rogue.quic(0)?;
            let stream = connection.open_bi().ok()?;
            connection.write(stream, Bytes::from_static(&[1, 0x44, 0]));
            Some(stream)
        }),
        ("a visit", |rogue| rogue.request(0, &get())),
        ("a connection", |rogue| rogue.connect_tcp(0)),
        ("a UDP flow", |rogue| rogue.connect_udp(0)),
    ];
    for (what, open) in ways {
        let mut rogue = Rogue::with_tunnel();
        let mut opened = 0;
        holds_at_most(MAX_BOOKKEEPING, &mut rogue, |rogue| {
            for _ in 0..400 {
                let streams: Vec<_> = (0..50).filter_map(|_| open(rogue)).collect();
                opened += streams.len();
                rogue.run(MS);
                rogue.cancel(0, &streams);
                rogue.run(MS);
            }
        });
        println!("{what}: {opened} streams");
        assert!(opened > 15_000, "{what}: {opened} streams, and no more");
        assert!(rogue.relays.is_empty() && rogue.udp_flows.is_empty(), "{what}: the edge keeps some");
    }
}

#[test]
fn requests_whose_responses_are_never_taken() {
    let get = get();
    let windows = FlowControlWindows { stream: 20, connection: 4000 };
    let mut rogue = Rogue::with_tunnel_and(windows);
    holds_at_most(MAX_BOOKKEEPING, &mut rogue, |rogue| {
        for _ in 0..200 {
            for _ in 0..100 {
                rogue.request(0, &get);
            }
            rogue.run(MS);
        }
    });
}

#[test]
fn requests_for_addresses_without_credit() {
    let mut rogue = Rogue::with_tunnel_and(FlowControlWindows { stream: 2000, connection: 20_000 });
    holds_at_most(MAX_BOOKKEEPING, &mut rogue, |rogue| {
        for round in 1..300u64 {
            let one = |at: u64| [varints(&[round * 1000 + at]), vec![4, 0, 0, 0, 0, 32]].concat();
            let value: Vec<u8> = (0..300).flat_map(one).collect();
            rogue.capsule(0, &raw_capsule(ADDRESS_REQUEST, value.len() as u64, &value));
            rogue.run(MS);
        }
    });
}

#[test]
fn udp_flows_by_the_thousand_with_partial_capsules() {
    let mut rogue = Rogue::with_tunnel();
    holds_at_most(MAX_HELD, &mut rogue, |rogue| {
        let mut flows = Vec::new();
        for _ in 0..100 {
            flows.extend((0..50).filter_map(|_| rogue.connect_udp(0)));
            rogue.run(10 * MS);
        }
        println!("{} flows", rogue.udp_flows.len());
        assert!(rogue.udp_flows.len() > 4000, "{} flows", rogue.udp_flows.len());
        for stream in flows {
            let capsule = raw_capsule(DATAGRAM, 9000, &[0; 8990]);
            let Some(connection) = rogue.quic(0) else { return };
            connection.write(stream, h3::encode_data(&capsule));
            rogue.run(MS);
        }
    });
}

#[test]
fn downloads_that_are_never_read() {
    let mut rogue = Rogue::with_tunnel_and(FlowControlWindows { stream: 4000, connection: 100_000 });
    rogue.targets = Targets::Flood;
    holds_at_most(MAX_HELD, &mut rogue, |rogue| {
        for _ in 0..40 {
            (0..50).for_each(|_| _ = rogue.connect_tcp(0));
            rogue.run(10 * MS);
        }
        assert!(rogue.relays.len() > 1500, "{} relays", rogue.relays.len());
        rogue.run(100 * MS);
    });
}

#[test]
fn downloads_that_are_never_read_over_many_connections() {
    // Twice what one connection may queue, so that only those who have several feel it.
    let windows = FlowControlWindows { stream: 4000, connection: 100_000 };
    let mut rogue = Rogue::in_world(World::with_memory(24 << 20), windows);
    rogue.targets = Targets::Flood;
    let connections: Vec<usize> = (0..20).map(|_| rogue.connect()).collect();
    connections.iter().for_each(|at| rogue.ask_for_tunnel(*at, every_extension("rogue", 0), None));
    holds_at_most(MAX_HELD, &mut rogue, |rogue| {
        for _ in 0..20 {
            for at in connections.iter().filter(|at| !rogue.connections[**at].is_lost).collect::<Vec<_>>() {
                (0..20).for_each(|_| _ = rogue.connect_tcp(*at));
            }
            rogue.run(10 * MS);
        }
        assert!(rogue.relays.len() > 3000, "{} relays", rogue.relays.len());
        rogue.run(100 * MS);
    });
}

#[test]
fn uploads_to_targets_that_take_nothing() {
    let mut rogue = Rogue::with_tunnel();
    rogue.targets = Targets::Stop;
    holds_at_most(MAX_HELD, &mut rogue, |rogue| {
        let streams: Vec<_> = (0..100).filter_map(|_| rogue.connect_tcp(0)).collect();
        rogue.run(50 * MS);
        for stream in &streams {
            // The smallest frames cost most.
            let tiny = h3::encode_data(b"x").repeat(100_000);
            rogue.quic(0).expect("it is connected").write(*stream, tiny.into());
        }
        for stream in &streams {
            let data = h3::encode_data(&vec![7; 2 << 20]);
            rogue.quic(0).expect("it is connected").write(*stream, data);
        }
        rogue.run(2 * SECOND);
    });
}

#[test]
fn uploads_that_nobody_takes_count_for_their_user_and_end_no_connection_of_another() {
    const MIB: usize = 1 << 20;
    let mut rogue = Rogue::in_world(World::with_memory(32 * MIB), FlowControlWindows::default());
    rogue.targets = Targets::Stop;
    let mut connect = |token, count: usize| {
        rogue.token = token;
        let all: Vec<usize> = (0..count).map(|_| rogue.connect()).collect();
        all.iter().for_each(|at| rogue.ask_for_tunnel(*at, every_extension("rogue", 0), None));
        all
    };
    // But for the uploads, bob's connections take most.
    let (of_bob, of_alice) = (connect(TOKEN_OF_BOB, 40), connect(TOKEN, 20));
    let uploads: Vec<_> = (0..100)
        .filter_map(|number| Some((of_alice[number % 20], rogue.connect_tcp(of_alice[number % 20])?)))
        .collect();
    rogue.run(50 * MS);
    let held = |rogue: &Rogue| rogue.world.registry.held_by_user()["alice"].0;
    holds_at_most(MAX_HELD, &mut rogue, |rogue| {
        let before = (heap::held(), held(rogue));
        // 800 Mbit/s for two seconds.
        for round in 0..200 {
            let (at, stream) = uploads[round % uploads.len()];
            if let Some(connection) = rogue.quic(at) {
                connection.write(stream, h3::encode_data(&vec![7; MIB]));
            }
            of_bob.iter().for_each(|at| rogue.capsule(*at, &raw_capsule(0x1234_5678, 1, b"x")));
            rogue.run(10 * MS);
            if round == 10 {
                let taken = heap::held().saturating_sub(before.0);
                let counted = held(rogue).saturating_sub(before.1);
                // The library takes some memory for each piece.
                assert!(
                    taken > 8 * MIB && (taken * 4 / 5..taken * 6 / 5).contains(&counted),
                    "{counted} bytes are counted for {taken} bytes of memory"
                );
            }
            // As the edge does it.
            if round % 25 == 0 {
                rogue.world.registry.process_bytes().on_measured(heap::held());
            }
        }
        let left = |all: &[usize]| all.iter().filter(|at| rogue.is_alive(**at)).count();
        assert_eq!(left(&of_bob), of_bob.len(), "bob uploads nothing");
        assert!(left(&of_alice) < of_alice.len(), "alice keeps all her connections");
    });
}

#[test]
fn a_client_that_acknowledges_nothing() {
    let mut rogue = Rogue::with_tunnel();
    rogue.targets = Targets::Flood;
    holds_at_most(MAX_HELD, &mut rogue, |rogue| {
        let streams: Vec<_> = (0..20).filter_map(|_| rogue.connect_tcp(0)).collect();
        rogue.run(500 * MS);
        rogue.hears = false;
        for number in 0..1200u32 {
            // Its readers wait for the first byte, as it says, on paths that work.
            for stream in &streams {
                rogue.datagram(context::DATA_ACK, &varints(&[stream << 1 | 1, 0, 0]));
            }
            let paths = varints(&[1, 5]);
            let report = [vec![0b01], (number + 1_000_000).to_be_bytes().to_vec(), paths].concat();
            rogue.datagram(context::HEARTBEATS, &report);
            rogue.run(50 * MS);
        }
    });
}

#[test]
fn paths_that_open_and_close() {
    let mut rogue = Rogue::with_tunnel();
    holds_at_most(MAX_BOOKKEEPING, &mut rogue, |rogue| {
        for round in 0..300u16 {
            rogue.open_path(LinkId(2 + round));
            let now = rogue.world.now;
            let Some(connection) = rogue.quic(0) else { return };
            let newest = connection.paths().max().unwrap_or(PathId(0));
            if newest > PathId(1) {
                connection.close_path(now, newest);
            }
            rogue.run(20 * MS);
        }
    });
}

#[test]
fn tunnels_that_are_asked_for_again_and_again() {
    let mut rogue = Rogue::with_tunnel();
    holds_at_most(MAX_BOOKKEEPING, &mut rogue, |rogue| {
        for round in 0..500 {
            let Some(stream) = rogue.connections[0].request else { return };
            if let Some(connection) = rogue.quic(0) {
                connection.finish(stream);
            }
            rogue.run(2 * MS);
            rogue.ask_for_tunnel(0, every_extension(&format!("class-{round}"), 0), None);
        }
    });
}

#[test]
fn joins_by_the_hundred_and_with_the_secrets_of_others() {
    let mut rogue = Rogue::with_tunnel();
    let (secret, sessions) =
        (rogue.connections[0].secret().expect("a session"), rogue.world.servers[0].sessions());
    let baseline = heap::held();
    rogue.peak = baseline;
    for round in 0..300u64 {
        let at = rogue.connect();
        let (number, shown) = match round % 3 {
            0 => (1 + (round % 15) as u8, secret.clone()),
            1 => (1 + (round % 127) as u8, [vec![0xff], vec![round as u8; 15]].concat()),
            _ => (17, secret.clone()),
        };
        rogue.ask_for_tunnel(at, every_extension("other", number), Some(shown));
    }
    rogue.run(SECOND);
    assert_eq!(rogue.world.servers[0].sessions(), sessions, "no join makes a session");
    let refused = rogue
        .connections
        .iter()
        .filter(|own| own.response.as_ref().is_some_and(|it| it.status() == Some(409)));
    assert_eq!(refused.count(), 100, "joins with secrets of nobody are refused");
    // Those that were replaced are gone; 16 tunnels and 100 connections without one are left.
    let over = heap::held().saturating_sub(baseline);
    println!("{} KiB for the connections of a session", over >> 10);
    assert!(over < MAX_HELD, "{over} bytes");
}

/// The cost of a unit of misuse, compared with an ordinary packet. In each world the rogue's own work is
/// included.
#[test]
fn a_unit_of_misuse_costs_little_more_than_a_packet_and_many_cost_no_more_each() {
    type Unit = fn(&mut Rogue, u64);
    let mut rogue = Rogue::with_tunnel();
    let packet = packet(&rogue);
    let start = cpu_time();
    for number in 0..MANY {
        rogue.datagram(context::ORDER, &[label(3, number as u32, None), packet.clone()].concat());
    }
    rogue.run(200 * MS);
    let usual = (cpu_time() - start) / MANY as u32;
    assert!(rogue.forwarded > MANY * 9 / 10, "{} packets of {MANY} have arrived", rogue.forwarded);
    let units: [(&str, Unit); 7] = [
        ("a far number", |rogue, at| {
            let mut dice = Dice(at);
            let content = label((at % 4096) as u16, dice.next(1 << 24) as u32, None);
            rogue.datagram(context::ORDER, &content);
        }),
        ("a packet that waits for one that never comes", |rogue, at| {
            // Each is one place behind the one before, in an order that never ends.
            let content = label(7, 1 + (at % 11_000) as u32, None);
            rogue.datagram(context::ORDER, &content);
        }),
        ("a source packet of a group", |rogue, at| {
            let content = label(1, at as u32, None);
            rogue.datagram(
                context::FEC,
                &in_group((at / 64) as u16, Symbol::Source((at % 64) as u8), &content),
            );
        }),
        ("reinjected bytes from the last to the first", |rogue, at| {
            let offset = (1_000_000 - 2 * at) << 1;
            rogue.datagram(context::REINJECTION, &[varints(&[4, offset]), vec![1]].concat());
        }),
        ("a heartbeat with 64 paths", |rogue, at| {
            let paths = varints(&(0..64).collect::<Vec<_>>());
            rogue.datagram(
                context::HEARTBEATS,
                &[vec![0b11], (at as u32).to_be_bytes().to_vec(), paths].concat(),
            );
        }),
        ("a DataAck of 100 streams", |rogue, _| {
            let entries: Vec<u64> = (0..100u64).flat_map(|at| [8 * at, 1 << 40, 0]).collect();
            rogue.datagram(context::DATA_ACK, &varints(&entries));
        }),
        ("a stream that is reset", |rogue, at| {
            if at % 50 == 0 {
                rogue.run(MS);
            }
            if let Some(connection) = rogue.quic(0)
                && let Ok(stream) = connection.open_bi()
            {
                connection.write(stream, Bytes::from_static(&[1]));
                connection.reset(stream, 0x10c);
            }
        }),
    ];
    for (name, unit) in units {
        let mut rogue = Rogue::with_tunnel();
        let start = cpu_time();
        (0..MANY / 4).for_each(|at| unit(&mut rogue, at));
        let first = (cpu_time() - start) / (MANY / 4) as u32;
        (MANY / 4..MANY).for_each(|at| unit(&mut rogue, at));
        rogue.run(200 * MS);
        let all = (cpu_time() - start) / MANY as u32;
        println!("{name}: {first:?} each at first, {all:?} each of {MANY}; an ordinary packet {usual:?}");
        assert!(all < 20 * usual, "{name}: {all:?}, an ordinary packet {usual:?}");
        assert!(all < 3 * first + usual, "{name}: {first:?} each at first, {all:?} each of all");
    }
}
