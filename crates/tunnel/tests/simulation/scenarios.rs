//! Stories of a client and a server, in simulated time.

use std::net::SocketAddr;

use crate::world::{DNS, MS, TOKEN, TOKEN_OF_CAROL, World};
use mpvpn_packet::ip;
use mpvpn_path::{PathState, Scheduler};
use mpvpn_tunnel::{ClientError, ClientState, TunnelMode};
use mpvpn_types::{Duration, LinkId};

fn two_links() -> (World, usize) {
    let mut world = World::new();
    let client = world.add(TOKEN, Scheduler::MinRtt, &[(100, 12 * MS), (100, 12 * MS)]);
    world.up(client);
    world.run(Duration::from_secs(1));
    (world, client)
}

#[test]
fn a_client_learns_which_resolvers_the_server_suggests() {
    let (world, client) = two_links();
    let assignment = world.machines[client].assignment.as_ref().unwrap();
    let suggested: Vec<String> = assignment.dns.iter().map(ToString::to_string).collect();
    assert_eq!(suggested, DNS);
}

fn states(world: &mut World, client: usize) -> Vec<PathState> {
    let now = world.now;
    world.machines[client].client.report(now).paths.iter().map(|path| path.state).collect()
}

#[test]
fn a_tunnel_comes_up_with_both_families_and_carries_packets_both_ways() {
    let (mut world, client) = two_links();
    assert!(world.address(client, true).is_ipv4() && world.address(client, false).is_ipv6());
    let (there, back) = (world.packet_to_target(client, b"ping"), world.packet_to_client(client, b"pong"));
    world.client_sends(client, there.clone());
    world.server_sends(back.clone());
    world.run(50 * MS);
    assert_eq!(world.received_by_server.iter().map(|(_, packet)| packet).collect::<Vec<_>>(), [&there]);
    let received: Vec<_> = world.machines[client].received.iter().map(|(_, packet)| packet).collect();
    assert_eq!(received, [&back]);
    assert_eq!(states(&mut world, client), [PathState::Active; 2]);
    let mtu = world.machines[client].mtu.expect("an MTU");
    assert!((1420..=1440).contains(&mtu), "{mtu}");
}

#[test]
fn a_first_link_without_internet_does_not_matter() {
    let mut world = World::new();
    let client = world.add(TOKEN, Scheduler::Auto, &[(100, 12 * MS), (100, 12 * MS)]);
    let first = world.machines[client].links.get_mut(&LinkId(0)).unwrap();
    first.up.loss = 1.0;
    first.down.loss = 1.0;
    world.up(client);
    let mtu = world.machines[client].mtu.unwrap();
    assert!(mtu >= 1420, "the dead link holds the MTU down to {mtu}");
    let first = world.machines[client].links.get_mut(&LinkId(0)).unwrap();
    first.up.loss = 0.0;
    first.down.loss = 0.0;
    world.run(Duration::from_secs(3));
    assert_eq!(states(&mut world, client), [PathState::Active; 2]);
}

#[test]
fn flows_that_keep_their_paths_wait_for_no_other() {
    let mut world = World::new();
    let client = world.add(TOKEN, Scheduler::Flow, &[(100, 12 * MS), (100, 14 * MS)]);
    world.up(client);
    world.run(Duration::from_secs(1));
    let before: Vec<u64> = sent(&mut world, client);
    for port in 4000..4020 {
        let from = SocketAddr::new(world.address(client, true), port);
        let packet = mpvpn_packets::Packet::between(from, "203.0.113.9:53".parse().unwrap()).udp(&[1; 1000]);
        world.client_sends(client, packet);
        world.run(30 * MS);
        assert_eq!(world.received_by_server.drain(..).count(), 1, "a packet of port {port} arrives at once");
    }
    for (before, after) in before.into_iter().zip(sent(&mut world, client)) {
        assert!(after > before + 5_000, "both paths were used: {} bytes", after - before);
    }
}

#[test]
fn packets_that_outgrow_their_paths_travel_in_parts() {
    let (mut world, client) = two_links();
    let now = world.now;
    for link in world.machines[client].links.values_mut() {
        link.up.limit_mtu(now, 1290);
        link.down.limit_mtu(now, 1290);
    }
    let packet =
        |world: &World, n: u16| world.packet_to_target(client, &[&n.to_be_bytes()[..], &[7; 1378]].concat());
    let mut sent = Vec::new();
    for n in 0..1500 {
        let large = packet(&world, n);
        sent.push(large.clone());
        world.client_sends(client, large);
        world.run(MS);
    }
    // Until path MTU discovery notices, larger packets than the link takes are lost.
    let arrived: Vec<&Vec<u8>> = world.received_by_server.iter().map(|(_, packet)| packet).collect();
    let late = &sent[500..1400];
    let missing = late.iter().filter(|packet| !arrived.contains(packet)).count();
    assert_eq!(missing, 0, "of {} packets that the paths do not take whole", late.len());
}

fn sent(world: &mut World, client: usize) -> Vec<u64> {
    let now = world.now;
    world.machines[client].client.report(now).paths.iter().map(|path| path.view.tx_bytes).collect()
}

#[test]
fn silent_loss_of_a_link_costs_less_than_a_tenth_of_a_second_and_it_comes_back() {
    for (up, down) in [(1.0, 1.0), (1.0, 0.0), (0.0, 1.0)] {
        let (mut world, client) = two_links();
        let (a, b) = world.send_both_ways(client, Duration::from_secs(3));
        assert!(a.max(b) < 20 * MS, "{a:?} {b:?} without a cut");
        let link = world.machines[client].links.get_mut(&LinkId(0)).unwrap();
        (link.up.loss, link.down.loss) = (up, down);
        let (a, b) = world.send_both_ways(client, Duration::from_secs(2));
        assert!(a.max(b) <= 130 * MS, "gaps of {a:?} and {b:?} with loss {up} up, {down} down");
        let link = world.machines[client].links.get_mut(&LinkId(0)).unwrap();
        (link.up.loss, link.down.loss) = (0.0, 0.0);
        let (a, b) = world.send_both_ways(client, Duration::from_secs(1));
        assert!(a.max(b) < 30 * MS, "{a:?} {b:?} at the return");
        assert_eq!(states(&mut world, client), [PathState::Active; 2], "loss {up} up, {down} down");
        assert_eq!(world.machines[client].down_count, 0);
    }
}

#[test]
fn carrier_loss_is_hardly_noticed_and_the_link_is_used_again() {
    let (mut world, client) = two_links();
    world.send_both_ways(client, Duration::from_secs(2));
    let now = world.now;
    let machine = &mut world.machines[client];
    machine.client.link_down(now, LinkId(0));
    let link = machine.links.get_mut(&LinkId(0)).unwrap();
    (link.up.loss, link.down.loss) = (1.0, 1.0);
    let (a, b) = world.send_both_ways(client, Duration::from_secs(2));
    assert!(a.max(b) <= 60 * MS, "{a:?} {b:?}");
    let now = world.now;
    let machine = &mut world.machines[client];
    let link = machine.links.get_mut(&LinkId(0)).unwrap();
    (link.up.loss, link.down.loss) = (0.0, 0.0);
    machine.client.link_up(now, LinkId(0), crate::world::SERVER.parse().unwrap());
    world.send_both_ways(client, Duration::from_secs(1));
    assert_eq!(states(&mut world, client), [PathState::Active; 2]);
}

#[test]
fn a_restarted_server_gives_the_same_addresses() {
    let (mut world, client) = two_links();
    let before = world.address(client, true);
    world.send_both_ways(client, Duration::from_secs(1));
    world.restart_server();
    world.send_both_ways(client, Duration::from_secs(3));
    let now = world.now;
    assert_eq!(world.machines[client].client.report(now).state, ClientState::Up);
    assert_eq!(world.address(client, true), before);
    assert_eq!(world.machines[client].down_count, 1);
    let (a, b) = world.send_both_ways(client, Duration::from_secs(1));
    assert!(a.max(b) < 50 * MS, "{a:?} {b:?}");
}

#[test]
fn all_links_gone_for_a_minute_keep_the_addresses() {
    let (mut world, client) = two_links();
    let before = world.address(client, true);
    for link in world.machines[client].links.values_mut() {
        (link.up.loss, link.down.loss) = (1.0, 1.0);
    }
    world.run(Duration::from_secs(75));
    for link in world.machines[client].links.values_mut() {
        (link.up.loss, link.down.loss) = (0.0, 0.0);
    }
    world.send_both_ways(client, Duration::from_secs(6));
    let now = world.now;
    assert_eq!(world.machines[client].client.report(now).state, ClientState::Up);
    assert_eq!(world.address(client, true), before);
    let (a, b) = world.send_both_ways(client, Duration::from_secs(1));
    assert!(a.max(b) < 50 * MS, "{a:?} {b:?}");
}

#[test]
fn a_request_that_overtakes_the_settings_waits_for_them() {
    let mut world = World::new();
    for _ in 0..80 {
        let client = world.add(TOKEN, Scheduler::Auto, &[(20, 15 * MS)]);
        let link = world.machines[client].links.get_mut(&LinkId(0)).unwrap();
        (link.up.loss, link.down.loss) = (0.2, 0.2);
    }
    world.run(Duration::from_secs(20));
    for machine in &world.machines {
        assert_eq!(machine.fatal, None, "what was lost on the way is not the client's fault");
    }
    let now = world.now;
    let up = |machine: &mut crate::world::Machine| machine.client.report(now).state == ClientState::Up;
    let up = world.machines.iter_mut().map(up).filter(|up| *up).count();
    assert!(up >= 78, "{up} of 80 clients are up after 20 s with a loss of 20 %");
}

#[test]
fn a_wrong_token_ends_the_client() {
    let mut world = World::new();
    let client = world.add("wrong", Scheduler::Auto, &[(100, 5 * MS)]);
    world.run(Duration::from_secs(2));
    assert_eq!(world.machines[client].fatal, Some(ClientError::Unauthorized(401)));
    assert_eq!(world.servers[0].sessions(), 0);
}

#[test]
fn a_client_that_is_refused_says_why_and_asks_ever_less_often() {
    for mode in [TunnelMode::Packets, TunnelMode::RelaysOnly] {
        let mut world = World::new();
        world.mode = mode;
        let client = world.add(TOKEN_OF_CAROL, Scheduler::Auto, &[(100, 5 * MS), (50, 20 * MS)]);
        world.run(Duration::from_secs(2));
        let reason = "the access of this user was revoked";
        let report = world.machines[client].client.report(world.now);
        assert_eq!((report.state, report.reason.as_str()), (ClientState::Refused, reason), "{mode:?}");
        assert_eq!(world.machines[client].fatal, None);
        assert_eq!(world.machines[client].down_reasons, [reason], "said once");
        world.run(Duration::from_secs(58));
        let after_a_minute = world.machines[client].client.report(world.now).handshakes.completed;
        world.run(Duration::from_secs(300));
        let report = world.machines[client].client.report(world.now);
        assert_eq!((report.state, report.reason.as_str()), (ClientState::Refused, reason), "{mode:?}");
        let later = report.handshakes.completed - after_a_minute;
        assert!((4..=20).contains(&later), "{mode:?}: {later} handshakes over two links in five minutes");
        assert_eq!(world.machines[client].down_reasons, [reason], "said once");
        assert_eq!(world.servers[0].sessions(), 0);
        assert!(world.servers[0].report(world.now).is_empty(), "it is nobody's connection");
    }
}

#[test]
fn a_server_that_is_gone_refuses_nobody() {
    let mut world = World::new();
    let client = world.add(TOKEN_OF_CAROL, Scheduler::Auto, &[(100, 5 * MS)]);
    world.run(Duration::from_secs(2));
    assert_eq!(world.machines[client].client.report(world.now).state, ClientState::Refused);
    for link in world.machines[client].links.values_mut() {
        (link.up.loss, link.down.loss) = (1.0, 1.0);
    }
    world.run(Duration::from_secs(130));
    let report = world.machines[client].client.report(world.now);
    assert_eq!(report.state, ClientState::Connecting, "two attempts were not answered");
    assert!(report.outage.is_some());
}

#[test]
fn an_address_that_is_in_use_is_refused_and_another_asked_for() {
    let mut world = World::new();
    let taken = SocketAddr::new("10.0.0.2".parse().unwrap(), 4000);
    world.addresses_in_use.set([taken.ip()]);
    let client = world.add(TOKEN, Scheduler::Auto, &[(100, 5 * MS)]);
    world.up(client);
    world.run(Duration::from_secs(1));
    let own = SocketAddr::new(world.address(client, true), 4000);
    assert_eq!(own.ip().to_string(), "10.0.0.3");
    // The server counts both as the client's. Packets to the refused one are not delivered.
    let from = "203.0.113.9:53".parse().unwrap();
    let packet = |to| mpvpn_packets::Packet::between(from, to).udp(b"x");
    world.server_sends(packet(taken));
    world.server_sends(packet(own));
    world.run(Duration::from_secs(1));
    let received: Vec<_> = world.machines[client].received.iter().map(|(_, packet)| packet.clone()).collect();
    assert_eq!(received, [packet(own)]);
}

#[test]
fn a_client_whose_machine_has_all_addresses_gives_up() {
    let mut world = World::new();
    let other = world.add(TOKEN, Scheduler::Auto, &[(100, 5 * MS)]);
    world.up(other);
    let first = [true, false].map(|v4| world.address(other, v4));
    let after = |ip: std::net::IpAddr, number: u8| match ip {
        std::net::IpAddr::V4(ip) => std::net::IpAddr::V4((u32::from(ip) + u32::from(number)).into()),
        std::net::IpAddr::V6(ip) => std::net::IpAddr::V6((u128::from(ip) + u128::from(number)).into()),
    };
    world.addresses_in_use.set((0..20).flat_map(|number| first.map(|ip| after(ip, number))));
    let client = world.add(TOKEN, Scheduler::Auto, &[(100, 5 * MS)]);
    world.run(Duration::from_secs(5));
    assert_eq!(world.machines[client].fatal, Some(ClientError::AddressInUse(after(first[0], 1))));
}

#[test]
fn clients_get_addresses_of_their_own_and_cannot_use_each_others() {
    let mut world = World::new();
    let a = world.add(TOKEN, Scheduler::Auto, &[(100, 5 * MS)]);
    let b = world.add(TOKEN, Scheduler::Auto, &[(100, 5 * MS)]);
    world.up(a);
    world.up(b);
    assert_ne!(world.address(a, true), world.address(b, true));
    assert_ne!(world.address(a, false), world.address(b, false));
    let own = world.packet_to_target(a, b"mine");
    world.client_sends(a, own.clone());
    world.run(50 * MS);
    assert_eq!(world.received_by_server.len(), 1);
    // A client that forges addresses must get past its own check first: ask the server directly.
    let forged = world.packet_to_target(b, b"forged");
    world.client_sends(a, forged);
    world.run(50 * MS);
    assert_eq!(world.received_by_server.len(), 1, "a packet with a foreign source got through");
}

#[test]
fn packets_that_are_too_big_are_answered() {
    let (mut world, client) = two_links();
    let from = SocketAddr::new(world.address(client, true), 4000);
    let packet = mpvpn_packets::Packet::between(from, "203.0.113.9:53".parse().unwrap()).udp(&[0; 1472]);
    world.client_sends(client, packet);
    world.run(50 * MS);
    assert!(world.received_by_server.is_empty());
    let answer = &world.machines[client].received[0].1;
    let view = ip::parse(answer).unwrap();
    assert_eq!((view.protocol(), answer[20], answer[21]), (1, 3, 4), "fragmentation needed");
    assert_eq!(
        usize::from(u16::from_be_bytes([answer[26], answer[27]])),
        world.machines[client].mtu.unwrap()
    );
}

#[test]
fn failover_uses_the_second_link_only_when_the_first_is_lost() {
    let mut world = World::new();
    let client = world.add(TOKEN, Scheduler::Failover, &[(100, 30 * MS), (100, 5 * MS)]);
    world.up(client);
    world.run(Duration::from_secs(2));
    world.send_both_ways(client, Duration::from_secs(2));
    assert_eq!(states(&mut world, client).iter().filter(|s| **s == PathState::Standby).count(), 1);
    let passed = |world: &World, id| {
        let link = &world.machines[client].links[&LinkId(id)];
        (link.up.passed, link.down.passed)
    };
    let (before, standby) = (passed(&world, 0), passed(&world, 1));
    world.send_both_ways(client, Duration::from_secs(2));
    let (after, standby_after) = (passed(&world, 0), passed(&world, 1));
    assert!(after.0 - before.0 > 1000 && after.1 - before.1 > 1000, "the first link carries nothing");
    let carried = (standby_after.0 - standby.0, standby_after.1 - standby.1);
    assert!(carried.0 < 300 && carried.1 < 300, "standby carries data: {carried:?}");
    let link = world.machines[client].links.get_mut(&LinkId(0)).unwrap();
    (link.up.loss, link.down.loss) = (1.0, 1.0);
    let (a, b) = world.send_both_ways(client, Duration::from_secs(2));
    assert!(a.max(b) <= 250 * MS, "{a:?} {b:?}");
}

#[test]
fn junk_harms_nobody() {
    let (mut world, client) = two_links();
    let mut random = 88_172_645_463_325_252u64;
    let mut next = move || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    };
    let server = "192.0.2.1".parse().unwrap();
    for n in 0..10_000u64 {
        let length = (next() % 1500) as usize;
        let mut junk: Vec<u8> = (0..length).map(|_| next() as u8).collect();
        if n % 2 == 0 && length > 20 {
            // Looks like a first packet of QUIC version 1.
            junk[..6].copy_from_slice(&[0xc3, 0, 0, 0, 1, 8]);
        }
        let from = SocketAddr::from(([203, 0, 113, n as u8], 1000));
        let now = world.now;
        world.servers[0].handle_datagram(now, Some(server), from, 0, bytes::BytesMut::from(&junk[..]));
        let peer = crate::world::SERVER.parse().unwrap();
        world.machines[client].client.handle_datagram(
            now,
            LinkId(0),
            peer,
            0,
            bytes::BytesMut::from(&junk[..]),
        );
        if n % 100 == 0 {
            world.run(MS);
        }
    }
    let (a, b) = world.send_both_ways(client, Duration::from_secs(1));
    assert!(a.max(b) < 30 * MS, "{a:?} {b:?}");
    assert_eq!(world.machines[client].down_count, 0);
    assert_eq!(world.servers[0].sessions(), 1);
}

#[test]
fn a_tunnel_that_was_idle_fills_its_link_within_a_quarter_of_a_second() {
    let mut world = World::new();
    let client = world.add(TOKEN, Scheduler::MinRtt, &[(100, 12 * MS)]);
    world.up(client);
    world.run(Duration::from_secs(1));
    let mut carried = Vec::new();
    for _ in 0..500 {
        while world.machines[client].client.backlog() < 300_000 {
            let packet = world.packet_to_target(client, &[0; 1300]);
            world.client_sends(client, packet);
        }
        world.run(MS);
        carried.push(world.machines[client].links[&LinkId(0)].up.passed);
    }
    // 100 Mbit/s are 900 packets of 1389 bytes in 100 ms.
    let late = carried[499] - carried[250];
    assert!(late > 2100, "{late} packets in 250 ms");
}

#[test]
fn the_counters_of_a_departed_client_are_reported_once() {
    let (mut world, client) = two_links();
    for n in 0..20 {
        let (there, back) =
            (world.packet_to_target(client, &[n; 100]), world.packet_to_client(client, &[n; 200]));
        world.client_sends(client, there);
        world.server_sends(back);
        world.run(5 * MS);
    }
    world.run(Duration::from_secs(1));
    let now = world.now;
    let counters = world.servers[0].report(now)[0].counters;
    assert!(counters.tx_bytes > 4000 && counters.rx_bytes > 2000, "{counters:?}");
    assert!(world.servers[0].poll_closed_connection().is_none(), "it is there still");
    world.machines[client].client.close(now, "gone");
    world.run(Duration::from_secs(1));
    assert!(world.servers[0].report(world.now).is_empty());
    let departed = world.servers[0].poll_closed_connection().expect("what it carried");
    assert_eq!((departed.class.as_str(), departed.counters), ("", counters));
    assert!(world.servers[0].poll_closed_connection().is_none(), "told once");
}
