//! Rates of users: whatever carries their data, over whichever links, and in how many sessions.

use std::collections::BTreeMap;

use crate::{
    pipes::carry,
    world::{
        MS, TOKEN, TOKEN_OF_BOB, World,
        talk::{RelayedConnection, play, step, streams},
    },
};
use mpvpn_lab::Direction;
use mpvpn_path::Scheduler;
use mpvpn_tunnel::{TunnelMode, UserRates};
use mpvpn_types::{BitRate, Duration};

const S: Duration = Duration::from_secs(1);

/// Limits the rates of alice (Mbit/s); 0: there is no limit.
fn limit(world: &mut World, up: u64, down: u64) {
    let rate = |mbit: u64| (mbit > 0).then(|| BitRate::from_bps(mbit * 1_000_000));
    let rates = BTreeMap::from([("alice".to_owned(), UserRates { up: rate(up), down: rate(down) })]);
    let now = world.now;
    world.servers[0].set_accounts(now, &rates);
}

fn is_within(mbit: f64, expected: f64) -> bool {
    (0.95 * expected..=1.05 * expected).contains(&mbit)
}

fn received_bytes(world: &mut World, client: usize) -> usize {
    std::mem::take(&mut world.machines[client].received).iter().map(|(_, packet)| packet.len()).sum()
}

#[test]
fn tcp_in_packets_gets_the_rate_of_its_user_and_pings_do_not_wait() {
    let mut world = World::new();
    let client = world.add(TOKEN, Scheduler::Auto, &[(50, 10 * MS), (30, 20 * MS)]);
    world.up(client);
    world.run(S);
    for (mbit, flows, direction) in [
        (10, 1, Direction::Down),
        (10, 8, Direction::Down),
        (40, 1, Direction::Down),
        (2, 1, Direction::Down),
        (10, 1, Direction::Up),
        (10, 8, Direction::Up),
        (40, 1, Direction::Up),
        (2, 1, Direction::Up),
    ] {
        // The other direction carries acknowledgements only.
        limit(&mut world, mbit, mbit);
        let found = carry(&mut world, client, flows, direction, 4 * S);
        println!("{mbit} Mbit/s, {flows} flows {direction:?}: {:.2} Mbit/s, {:?}", found.mbit, found.ping);
        assert!(
            is_within(found.mbit, mbit as f64),
            "{:.2} of {mbit} Mbit/s, {flows} {direction:?}",
            found.mbit
        );
        // A packet of each flow, and the way.
        assert!(found.ping < Duration::from_millis(20 + 8 * 12 / mbit), "{:?}", found.ping);
    }
    limit(&mut world, 0, 0);
    let found = carry(&mut world, client, 8, Direction::Down, 3 * S);
    assert!(found.mbit > 60.0, "{} Mbit/s without a limit", found.mbit);
}

#[test]
fn datagrams_beyond_the_rate_are_dropped() {
    let mut world = World::new();
    let client = world.add(TOKEN, Scheduler::Auto, &[(100, 10 * MS)]);
    world.up(client);
    world.run(S);
    limit(&mut world, 5, 8);
    world.servers[0].take_carried();
    // 20 Mbit/s each way.
    let (start, mut measured) = (world.now, false);
    while world.now < start + 6 * S {
        for _ in 0..2 {
            let (out, back) =
                (world.packet_to_target(client, &[1; 1222]), world.packet_to_client(client, &[2; 1222]));
            world.client_sends(client, out);
            world.server_sends(back);
        }
        world.run(MS);
        if !measured && world.now >= start + S {
            measured = true;
            received_bytes(&mut world, client);
            world.received_by_server.clear();
        }
    }
    let mbit = |bytes: usize| bytes as f64 * 8e-6 / 5.0;
    let down = mbit(received_bytes(&mut world, client));
    let up = mbit(world.received_by_server.iter().map(|(_, packet)| packet.len()).sum());
    assert!(is_within(up, 5.0) && is_within(down, 8.0), "{up:.2} up, {down:.2} down");
    let [(user, carried)] = &world.servers[0].take_carried()[..] else { panic!("one user") };
    assert_eq!(user, "alice");
    // Dropped packets do not count.
    assert!(is_within(*carried as f64 * 8e-6 / 6.0, 13.0), "{carried} bytes");
}

#[test]
fn streams_get_the_rate_of_their_user_and_share_it() {
    let (mut world, client) = streams(&[(50, 10 * MS), (30, 20 * MS)]);
    limit(&mut world, 10, 20);
    for count in [1, 4] {
        let mut downloads: Vec<_> = (0..count).map(|_| RelayedConnection::new(500, 0)).collect();
        play(&mut world, client, &mut downloads, S);
        let before: Vec<_> = downloads.iter().map(|other| other.received_bytes).collect();
        play(&mut world, client, &mut downloads, 3 * S);
        let each: Vec<_> =
            downloads.iter().zip(before).map(|(other, before)| other.received_bytes - before).collect();
        let mbit = each.iter().sum::<u64>() as f64 * 8e-6 / 3.0;
        assert!(is_within(mbit, 20.0), "{count}: {mbit:.2} Mbit/s");
        let (least, most) = (*each.iter().min().unwrap(), *each.iter().max().unwrap());
        assert!(most < least * 5 / 4, "{each:?}");
        for relay in downloads.iter().filter_map(|other| other.relay) {
            world.machines[client].client.relay_abort(relay);
        }
        world.run(S);
        world.destinations.clear();

        let mut uploads: Vec<_> = (0..count).map(|_| RelayedConnection::new(1, 500_000_000)).collect();
        play(&mut world, client, &mut uploads, 2 * S);
        let arrived =
            |world: &World| world.destinations.iter().map(|other| other.received_bytes).collect::<Vec<_>>();
        let before = arrived(&world);
        play(&mut world, client, &mut uploads, 3 * S);
        let each: Vec<_> = arrived(&world).iter().zip(before).map(|(now, before)| now - before).collect();
        let mbit = each.iter().sum::<u64>() as f64 * 8e-6 / 3.0;
        assert!(is_within(mbit, 10.0), "{count}: {mbit:.2} Mbit/s up, {each:?}");
        for relay in uploads.iter().filter_map(|other| other.relay) {
            world.machines[client].client.relay_abort(relay);
        }
        world.run(S);
        world.destinations.clear();
    }
}

#[test]
fn all_bytes_of_limited_streams_arrive_and_a_changed_rate_counts_at_once() {
    let (mut world, client) = streams(&[(50, 10 * MS)]);
    limit(&mut world, 1, 1);
    let mut connections: Vec<_> = (0..4).map(|_| RelayedConnection::new(5, 5_000_000)).collect();
    play(&mut world, client, &mut connections, 3 * S);
    let received: u64 = connections.iter().map(|other| other.received_bytes).sum();
    assert!((350_000..420_000).contains(&received), "{received} bytes in 3 s of 1 Mbit/s");
    limit(&mut world, 20, 20);
    play(&mut world, client, &mut connections, S);
    let more = connections.iter().map(|other| other.received_bytes).sum::<u64>() - received;
    assert!(more > 2_000_000, "{more} bytes in 1 s of 20 Mbit/s");
    // Without a limit nothing waits any more.
    let now = world.now;
    world.servers[0].set_accounts(now, &BTreeMap::new());
    let time = play(&mut world, client, &mut connections, 20 * S);
    assert!(
        connections.iter().all(|other| other.received_bytes == 5_000_000 && other.ended && !other.closed)
    );
    assert!(time < 6 * S, "{time:?}");
    world.run(S);
    assert!(world.destinations.iter().all(|other| other.received_bytes == 5_000_000 && other.ended));
}

#[test]
fn udp_flows_get_the_rate_of_their_user() {
    for mode in [TunnelMode::RelaysOnly, TunnelMode::Packets] {
        let mut world = World::new();
        world.mode = mode;
        let client = world.add(TOKEN, Scheduler::Auto, &[(50, 10 * MS)]);
        world.up(client);
        world.run(S);
        limit(&mut world, 8, 4);
        let now = world.now;
        let udp = world.machines[client].client.udp_open(now, &"target.example:53".parse().unwrap()).unwrap();
        let start = world.now;
        let mut before = None;
        while world.now < start + 6 * S {
            let now = world.now;
            for _ in 0..2 {
                world.machines[client].client.udp_send(now, udp, &[3; 1000]);
            }
            world.run(MS);
            if world.now >= start + S && before.is_none() {
                before = Some((world.targets[0].received_payloads, world.machines[client].payloads.len()));
            }
        }
        let before = before.unwrap();
        // The target sends back what it receives.
        let mbit = |payloads: usize| payloads as f64 * 8e-3 / 5.0;
        let up = mbit(world.targets[0].received_payloads - before.0);
        let down = mbit(world.machines[client].payloads.len() - before.1);
        assert!(is_within(up, 8.0) && is_within(down, 4.0), "{mode:?}: {up:.2} up, {down:.2} down");
    }
}

#[test]
fn the_sessions_of_a_user_share_the_rate_and_other_users_have_none_of_it() {
    let mut world = World::new();
    let add = |world: &mut World, token| {
        let client = world.add(token, Scheduler::Auto, &[(50, 10 * MS)]);
        world.up(client);
        client
    };
    let (one, two) = (add(&mut world, TOKEN), add(&mut world, TOKEN));
    let bob = add(&mut world, TOKEN_OF_BOB);
    world.run(S);
    limit(&mut world, 10, 10);
    let mut received = [0; 3];
    let (start, mut from_clients) = (world.now, [0; 3]);
    while world.now < start + 5 * S {
        for client in [one, two, bob] {
            for _ in 0..2 {
                let (out, back) =
                    (world.packet_to_target(client, &[1; 1222]), world.packet_to_client(client, &[2; 1222]));
                world.client_sends(client, out);
                world.server_sends(back);
            }
        }
        world.run(MS);
        for (at, client) in [one, two, bob].into_iter().enumerate() {
            received[at] += received_bytes(&mut world, client);
            let address = world.address(client, true);
            for (_, packet) in &world.received_by_server {
                let view = mpvpn_packet::ip::parse(packet).unwrap();
                from_clients[at] += if view.src() == address { packet.len() } else { 0 };
            }
        }
        world.received_by_server.clear();
    }
    for bytes in [received, from_clients] {
        let mbit = bytes.map(|bytes| bytes as f64 * 8e-6 / 5.0);
        assert!(is_within(mbit[0] + mbit[1], 10.0) && is_within(mbit[2], 20.0), "{mbit:?}");
        assert!(mbit[0] > 4.0 && mbit[1] > 4.0, "{mbit:?}");
    }
}

#[test]
fn a_limited_client_does_not_keep_the_server_busy() {
    let (mut world, client) = streams(&[(100, 10 * MS)]);
    limit(&mut world, 1, 1);
    let mut connections = [RelayedConnection::new(5, 5_000_000)];
    play(&mut world, client, &mut connections, S);
    // Between two packets of a low rate, the server has nothing to do but its heartbeats.
    let mut timeouts = 0;
    for _ in 0..1000 {
        step(&mut world, client, &mut connections);
        timeouts += usize::from(world.servers[0].poll_timeout().is_some_and(|at| at <= world.now));
    }
    assert!(timeouts < 500, "{timeouts} of 1000 times something is due at once");
}
