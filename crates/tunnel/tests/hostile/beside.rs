//! Other clients of a server beside a rogue client: their goodput and their pings.

use mpvpn_flow::Label;
use mpvpn_masque::h3;
use mpvpn_path::Scheduler;
use mpvpn_quic::FlowControlWindows;
use mpvpn_types::{Duration, LinkId};

use crate::{
    rogue::{Rogue, context, every_extension, raw_capsule, varints},
    world::{MS, TOKEN, World},
};

/// The service of an honest client in 0.6 s beside the rogue: the bytes of a transfer to the server
/// that fills its link, and the delays of its pings through the tunnel (two ways), sorted.
fn beside(misuse: impl Fn(&mut Rogue, u64)) -> (usize, Vec<Duration>) {
    let mut world = World::new();
    world.unclaimed = Some(Vec::new());
    let client = world.add(TOKEN, Scheduler::Auto, &[(50, 10 * MS)]);
    world.up(client);
    let mut rogue = Rogue::in_world(world, FlowControlWindows::default());
    rogue.connect();
    rogue.ask_for_tunnel(0, every_extension("rogue", 0), None);
    rogue.open_path(LinkId(1));
    rogue.run(300 * MS);
    let start = rogue.world.now;
    rogue.world.received_by_server.clear();
    rogue.world.machines[client].received.clear();
    let (mut asked, mut delays, mut bytes) = (Vec::new(), Vec::new(), 0);
    let ping = |number: usize| [[9; 36].to_vec(), (number as u32).to_be_bytes().to_vec()].concat();
    let number_of = |packet: &[u8]| {
        let (start, number) = packet.split_last_chunk::<4>()?;
        start.ends_with(&[9; 36]).then_some(u32::from_be_bytes(*number) as usize)
    };
    for ms in 0..600u64 {
        for _ in 0..4 {
            let packet = rogue.world.packet_to_target(client, &[1; 1000]);
            rogue.world.client_sends(client, packet);
        }
        if ms % 20 == 0 {
            let packet = rogue.world.packet_to_target(client, &ping(asked.len()));
            rogue.world.client_sends(client, packet);
            asked.push(rogue.world.now);
        }
        misuse(&mut rogue, ms);
        rogue.run(MS);
        for (_, packet) in std::mem::take(&mut rogue.world.received_by_server) {
            bytes += packet.len();
            if let Some(number) = number_of(&packet) {
                let answer = rogue.world.packet_to_client(client, &ping(number));
                rogue.world.server_sends(answer);
            }
        }
        let pongs = std::mem::take(&mut rogue.world.machines[client].received);
        for (at, packet) in pongs {
            delays.extend(number_of(&packet).map(|number| at - asked[number]));
        }
    }
    let answered = delays.len();
    assert!(rogue.world.now > start && answered > 25, "{answered} answers");
    delays.sort_unstable();
    (bytes, delays)
}

#[test]
fn other_clients_keep_their_goodput_and_pings_beside_a_rogue() {
    let (usual_bytes, usual_delays) = beside(|_, _| {});
    let p99 = |delays: &[Duration]| delays[delays.len() * 99 / 100];
    let usual = p99(&usual_delays);
    type Misuse = fn(&mut Rogue, u64);
    let all: [(&str, Misuse); 5] = [
        ("datagrams of all extensions", |rogue, ms| {
            for at in ms * 40..ms * 40 + 40 {
                let mut content = Vec::new();
                let number = (at as u32).wrapping_mul(2_654_435_761) >> 8;
                let reorder_timeout = Duration::from_secs(1);
                let label =
                    Label { ordered: true, bucket: (at % 4096) as u16, reorder_timeout, number, part: None };
                label.encode(&mut content);
                rogue.datagram(context::ORDER, &content);
                rogue.datagram(
                    context::FEC,
                    &[vec![(at >> 8) as u8, at as u8, 0x80, 63], vec![0; 20]].concat(),
                );
                rogue.datagram(context::DATA_ACK, &varints(&[8 * at, 1 << 40, 0]));
                rogue.datagram(context::REINJECTION, &varints(&[4 * (at % 4000), at << 8, 7]));
                let report = [vec![0b11], (at as u32).to_be_bytes().to_vec(), varints(&[at % 4, 5])].concat();
                rogue.datagram(context::HEARTBEATS, &report);
            }
        }),
        ("streams and requests", |rogue, _| {
            for _ in 0..20 {
                rogue.connect_tcp(0);
                rogue.connect_udp(0);
                if let Some(connection) = rogue.quic(0)
                    && let Ok(stream) = connection.open_bi()
                {
                    connection.write(stream, h3::encode_data(b""));
                }
            }
        }),
        ("requests that are cancelled", |rogue, _| {
            let earlier = std::mem::take(&mut rogue.requests);
            rogue.cancel(0, &earlier);
            (0..10).for_each(|_| _ = rogue.connect_tcp(0));
        }),
        ("capsules", |rogue, ms| {
            let value = varints(&[ms % 2, 0, 1000, 1, 0, ms, 0]);
            let link = raw_capsule(mpvpn_masque::capsule::LINK, value.len() as u64, &value);
            rogue.capsule(0, &link.repeat(20));
        }),
        ("joins", |rogue, ms| {
            let newest = rogue.connections.len() - 1;
            match ms % 20 {
                0 => _ = rogue.start(),
                10 => {
                    let secret = rogue.connections[0].secret();
                    rogue.send_request(newest, every_extension("other", (1 + ms / 20 % 100) as u8), secret);
                }
                _ => {}
            }
        }),
    ];
    for (name, misuse) in all {
        let (bytes, delays) = beside(misuse);
        let now = p99(&delays);
        println!("{name}: {bytes} bytes of {usual_bytes}, ping p99 {now:?}, usually {usual:?}");
        assert!(bytes * 100 >= usual_bytes * 95, "{name}: {bytes} bytes instead of {usual_bytes}");
        assert!(now <= usual + 10 * MS, "{name}: ping p99 {now:?} instead of {usual:?}");
    }
}
