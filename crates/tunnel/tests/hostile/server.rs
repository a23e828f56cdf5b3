//! A rogue server: what the client holds of it, for each way to misuse an extension, and that the client goes
//! on.

use bytes::Bytes;
use mpvpn_flow::{
    Part,
    fec::{GroupPosition, Symbol},
};
use mpvpn_masque::{
    capsule::{Capsule, DATAGRAM, IpRange, ROUTE_ADVERTISEMENT},
    h3,
    headers::Headers,
};
use mpvpn_quic::FlowControlWindows;
use mpvpn_types::Duration;

use crate::{
    MAX_BOOKKEEPING, MAX_HELD,
    client::label,
    heap,
    rogue::{context, raw_capsule, varints},
    rogue_server::RogueServer,
    world::MS,
};

/// The least IP packet for the client.
pub fn packet_down() -> Vec<u8> {
    let to = "10.0.0.2:9".parse().unwrap();
    mpvpn_packets::Packet::between("203.0.113.9:9".parse().unwrap(), to).udp(b"")
}

/// Runs one way of misuse; the client must hold at most `most` bytes more than before at any time.
fn holds_at_most(most: usize, rogue: &mut RogueServer, misuse: impl FnOnce(&mut RogueServer)) {
    let baseline = heap::held();
    rogue.peak = baseline;
    misuse(rogue);
    rogue.run(500 * MS);
    let over = rogue.peak.saturating_sub(baseline);
    println!("{} KiB over the baseline of {} KiB", over >> 10, baseline >> 10);
    assert!(over <= most, "{over} bytes over the baseline");
}

#[test]
fn numbers_parts_and_groups_that_lead_nowhere() {
    let mut rogue = RogueServer::with_tunnel(FlowControlWindows::default());
    let packet = packet_down();
    holds_at_most(MAX_BOOKKEEPING, &mut rogue, |rogue| {
        for at in 0..8192u32 {
            let number = at.wrapping_mul(2_654_435_761) >> 8;
            rogue.datagram(
                context::ORDER,
                &[label((at % 4096) as u16, number, None), packet.clone()].concat(),
            );
        }
    });
    let mut rogue = RogueServer::with_tunnel(FlowControlWindows::default());
    holds_at_most(MAX_BOOKKEEPING, &mut rogue, |rogue| {
        for number in 0..20_000 {
            let part = Some(Part { index: (number % 15) as u8, last: 15 });
            rogue.datagram(context::ORDER, &[label(1, number / 15, part), vec![7]].concat());
        }
    });
    let mut rogue = RogueServer::with_tunnel(FlowControlWindows::default());
    holds_at_most(MAX_BOOKKEEPING, &mut rogue, |rogue| {
        for at in 0..30_000u32 {
            let mut content = Vec::new();
            let (group, index) = ((at / 8) as u16, (at % 8) as u8);
            let symbol = match at % 2 {
                0 => Symbol::Source(index),
                _ => Symbol::Repair { index, source_count: 64 },
            };
            GroupPosition { group, symbol }.encode(&mut content);
            content.extend(label(1, at, None));
            rogue.datagram(context::FEC, &content);
        }
    });
}

#[test]
fn reports_of_what_was_never_sent() {
    let mut rogue = RogueServer::with_tunnel(FlowControlWindows::default());
    holds_at_most(MAX_BOOKKEEPING, &mut rogue, |rogue| {
        for number in 0..10_000u32 {
            let far = (1 << 61) + u64::from(number);
            rogue.datagram(context::DATA_ACK, &varints(&[u64::from(number) * 8, far, 1, 0, far]));
            rogue.datagram(context::REINJECTION, &[varints(&[4 * u64::from(number), far]), vec![1]].concat());
            let paths = varints(&(0..64).map(|path| path * 4 + u64::from(number) % 4).collect::<Vec<_>>());
            rogue.datagram(context::HEARTBEATS, &[vec![0b11], number.to_be_bytes().to_vec(), paths].concat());
            rogue.datagram(context::CLOCKS, &[varints(&[u64::from(number % 40)]), vec![0xff; 8]].concat());
        }
    });
}

#[test]
fn capsules_that_are_huge_partial_or_many() {
    for (kind, declared) in [(0x1234_5678, 1 << 60), (DATAGRAM, 65_000), (ROUTE_ADVERTISEMENT, 65_536)] {
        let mut rogue = RogueServer::with_tunnel(FlowControlWindows::default());
        holds_at_most(MAX_BOOKKEEPING, &mut rogue, |rogue| {
            rogue.capsule(&raw_capsule(kind, declared, b""));
            for _ in 0..63 {
                rogue.capsule(&[0; 1000]);
                rogue.run(MS);
            }
        });
        assert!(rogue.is_up());
    }
    let mut rogue = RogueServer::with_tunnel(FlowControlWindows::default());
    holds_at_most(MAX_BOOKKEEPING, &mut rogue, |rogue| {
        for round in 0..50u32 {
            let range = |at: u32| {
                let start = std::net::Ipv4Addr::from((at << 12) + (round << 4));
                IpRange::new(start.into(), start.into(), 0).unwrap()
            };
            rogue.capsule(&Capsule::RouteAdvertisement((1..3000).map(range).collect()).to_bytes());
            rogue.run(2 * MS);
        }
    });
}

#[test]
fn streams_and_responses_that_a_client_never_asked_for() {
    let mut rogue = RogueServer::with_tunnel(FlowControlWindows::default());
    holds_at_most(MAX_BOOKKEEPING, &mut rogue, |rogue| {
        rogue.open_streams(&[0x40]);
        for _ in 0..1000 {
            rogue.write(Bytes::from_static(&[0, 0]).repeat(100).into());
            rogue.run(MS);
        }
    });
    assert!(rogue.is_up());
    let mut early = Headers::new();
    early.push(":status", "103");
    let before = rogue.handshakes;
    rogue.write(h3::encode_headers(&early).repeat(20).into());
    rogue.run(Duration::from_secs(5));
    assert!(rogue.handshakes > before, "HEADERS in a tunnel end the connection, and the client comes again");
}

#[test]
fn a_server_that_takes_nothing() {
    let mut rogue = RogueServer::with_tunnel(FlowControlWindows { stream: 3000, connection: 20_000 });
    holds_at_most(MAX_HELD, &mut rogue, |rogue| {
        for _ in 0..20_000 {
            rogue.client_sends(1000);
            rogue.client_sends(10);
        }
        rogue.run(Duration::from_secs(1));
    });
}

#[test]
fn a_field_of_extensions_that_is_malformed_or_of_a_later_version_leaves_the_tunnel_up() {
    let session = "session=:CQkJCQkJCQkJCQkJCQkJCQ==:";
    for later in ["v=2, {}", "v=999999999999999, warp=(1 \"a\");b=:AA==:, {}, order=2", "{}, v=1, order=(2)"]
    {
        let field = later.replace("{}", session);
        let mut rogue = RogueServer::with_answer(FlowControlWindows::default(), Some(field.clone()));
        assert_eq!(rogue.client.default_client_mut().session_secret(), Some(&[9; 16][..]), "{field}");
    }
    let many: String = (0..100).map(|key| format!("k{key}, ")).collect();
    let long = format!("x=\"{}\", ", "y".repeat(5000));
    let nested = format!("x=({}), ", "(".repeat(1000));
    for malformed in ["", "v=0, ", "v=1, =, ", "v=1, \u{e9}, ", "v=1, v=x, ", &many, &long, &nested] {
        let field = match malformed {
            "" => session.to_owned(),
            _ => format!("v=1, {malformed}{session}").replacen("v=1, v", "v", 1),
        };
        let mut rogue = RogueServer::with_answer(FlowControlWindows::default(), Some(field.clone()));
        assert_eq!(rogue.client.default_client_mut().session_secret(), None, "{field}");
    }
}
