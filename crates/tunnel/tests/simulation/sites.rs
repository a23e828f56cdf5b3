//! Networks behind clients (RFC 9484 §4.7.3), in simulated time: which packets pass, who has a network, and
//! how soon it changes hands.

use mpvpn_flow::rules::{FlowMode, Rules};
use mpvpn_packets::{Packet, Tcp};
use mpvpn_path::Scheduler;
use mpvpn_tunnel::{Site, SiteState};
use mpvpn_types::Duration;

use crate::world::{MS, TOKEN, TOKEN_OF_BOB, World};

const LINKS: [(u64, Duration); 2] = [(50, Duration::from_millis(10)), (20, Duration::from_millis(30))];
const SYN: u8 = 0x02;

fn add(world: &mut World, token: &str) -> usize {
    let client = world.add(token, Scheduler::Auto, &LINKS);
    world.up(client);
    client
}

fn announce(world: &mut World, client: usize, networks: &[&str]) {
    let networks = networks.iter().map(|net| net.parse().unwrap()).collect();
    let now = world.now;
    world.machines[client].client.announce(now, networks);
    world.run(200 * MS);
}

/// The states of the networks that a client announced, as it knows them.
fn states(world: &World, client: usize) -> Vec<SiteState> {
    let sites = world.machines[client].assignment.as_ref().and_then(|given| given.sites.clone());
    let own = |site: &Site| (site.state != SiteState::OfAnother).then_some(site.state);
    sites.iter().flat_map(|all| all.iter()).filter_map(own).collect()
}

fn udp(from: &str, to: &str) -> Vec<u8> {
    let end = |ip: &str| (ip.parse::<std::net::IpAddr>().unwrap(), 4000).into();
    Packet::between(end(from), end(to)).udp(b"a datagram")
}

/// Whether a packet that a client reads from its TUN reaches the TUN of the server.
fn goes_up(world: &mut World, client: usize, packet: Vec<u8>) -> bool {
    world.received_by_server.clear();
    world.client_sends(client, packet.clone());
    world.run(100 * MS);
    world.received_by_server.iter().any(|(_, received)| *received == packet)
}

/// The clients that receive a packet which the server reads from this queue of its TUN.
fn goes_down(world: &mut World, queue: usize, packet: Vec<u8>) -> Vec<usize> {
    world.machines.iter_mut().for_each(|machine| machine.received.clear());
    world.server_sends_through(queue, packet.clone());
    world.run(100 * MS);
    let got = world.machines.iter().map(|machine| machine.received.iter().any(|(_, other)| *other == packet));
    got.enumerate().filter_map(|(client, got)| got.then_some(client)).collect()
}

#[test]
fn packets_of_a_network_behind_a_client_pass_in_both_directions_at_every_shard() {
    let mut world = World::with_shards(2);
    let (alice, bob) = (add(&mut world, TOKEN), add(&mut world, TOKEN_OF_BOB));
    announce(&mut world, alice, &["192.168.7.0/24", "fd77:7::/64", "172.16.0.0/16"]);
    announce(&mut world, bob, &["10.77.1.0/24"]);
    assert_eq!(states(&world, alice), [SiteState::NotAllowed, SiteState::InUse, SiteState::InUse]);
    assert_eq!(states(&world, bob), [SiteState::InUse]);
    for (client, from, to, passes) in [
        (alice, "192.168.7.5", "203.0.113.9", true),
        (alice, "192.168.7.5", "10.77.1.9", true),
        (alice, "fd77:7::5", "2001:db8::9", true),
        (alice, "192.168.8.5", "203.0.113.9", false),
        (alice, "172.16.0.5", "203.0.113.9", false),
        (bob, "192.168.7.5", "203.0.113.9", false),
        (bob, "10.77.1.9", "192.168.7.5", true),
    ] {
        assert_eq!(goes_up(&mut world, client, udp(from, to)), passes, "{client}: {from} to {to}");
    }
    for queue in 0..2 {
        for (from, to, expected) in [
            ("203.0.113.9", "192.168.7.5", vec![alice]),
            ("10.77.1.9", "192.168.7.255", vec![alice]),
            ("2001:db8::9", "fd77:7::ffff", vec![alice]),
            ("192.168.7.5", "10.77.1.9", vec![bob]),
            ("203.0.113.9", "192.168.8.5", vec![]),
            ("203.0.113.9", "172.16.0.5", vec![]),
        ] {
            assert_eq!(
                goes_down(&mut world, queue, udp(from, to)),
                expected,
                "{from} to {to}, queue {queue}"
            );
        }
    }
    announce(&mut world, alice, &[]);
    assert!(!goes_up(&mut world, alice, udp("192.168.7.5", "203.0.113.9")), "it takes it back");
    assert_eq!(goes_down(&mut world, 0, udp("203.0.113.9", "192.168.7.5")), [0; 0]);
}

#[test]
fn a_client_that_lies_sends_nothing_from_a_network_of_another() {
    let mut world = World::new();
    let alice = add(&mut world, TOKEN);
    announce(&mut world, alice, &["192.168.7.0/24"]);
    // It does not learn that the network is taken.
    world.disabled_at_client = &["sites"];
    let bob = add(&mut world, TOKEN_OF_BOB);
    announce(&mut world, bob, &["192.168.7.0/24", "10.77.1.0/24", "172.16.0.0/16"]);
    for (from, passes) in [("192.168.7.5", false), ("172.16.0.1", false), ("10.77.1.1", true)] {
        assert_eq!(goes_up(&mut world, bob, udp(from, "203.0.113.9")), passes, "{from}");
    }
    assert_eq!(goes_down(&mut world, 0, udp("203.0.113.9", "192.168.7.5")), [alice]);
}

#[test]
fn a_second_session_of_the_user_takes_over_when_the_first_ends_and_other_users_are_told_why_not() {
    let mut world = World::with_shards(2);
    let (first, second) = (add(&mut world, TOKEN), add(&mut world, TOKEN));
    let bob = add(&mut world, TOKEN_OF_BOB);
    for client in [first, second, bob] {
        announce(&mut world, client, &["192.168.1.0/24"]);
    }
    let all = |world: &World| [first, second, bob].map(|client| states(world, client)[0]);
    use SiteState::{InUse, Standby, Taken};
    assert_eq!(all(&world), [InUse, Standby, Taken]);
    assert_eq!(goes_down(&mut world, 0, udp("203.0.113.9", "192.168.1.5")), [first]);
    assert!(!goes_up(&mut world, second, udp("192.168.1.5", "203.0.113.9")), "it only waits");
    let now = world.now;
    world.machines[first].client.0.close(now, "the machine is switched off");
    world.run(300 * MS);
    assert_eq!(states(&world, second), [InUse]);
    assert_eq!(goes_down(&mut world, 1, udp("203.0.113.9", "192.168.1.5")), [second]);
    assert!(goes_up(&mut world, second, udp("192.168.1.5", "203.0.113.9")));
    let now = world.now;
    world.machines[second].client.0.close(now, "this one, too");
    world.run(300 * MS);
    assert_eq!(states(&world, bob), [InUse], "nobody has it any more");
}

#[test]
fn what_is_announced_changes_without_a_lost_packet_and_comes_back_with_the_server() {
    let mut world = World::new();
    let alice = add(&mut world, TOKEN);
    announce(&mut world, alice, &["192.168.7.0/24"]);
    world.received_by_server.clear();
    for n in 0..300 {
        if n == 100 {
            let now = world.now;
            let networks = ["192.168.7.0/24", "192.168.8.0/24"].map(|net| net.parse().unwrap());
            world.machines[alice].client.announce(now, networks.to_vec());
        }
        world.client_sends(alice, udp("192.168.7.5", "203.0.113.9"));
        world.run(MS);
    }
    world.run(100 * MS);
    assert_eq!(world.received_by_server.len(), 300);
    assert!(goes_up(&mut world, alice, udp("192.168.8.5", "203.0.113.9")));
    world.restart_server();
    world.run(10 * Duration::from_secs(1));
    assert_eq!(states(&world, alice), [SiteState::InUse; 2]);
    assert!(goes_up(&mut world, alice, udp("192.168.8.5", "203.0.113.9")));
}

#[test]
fn tcp_of_and_to_networks_behind_clients_travels_as_packets() {
    let mut world = World::new();
    world.flow_rules = Rules { mode: FlowMode::Auto, rules: Vec::new() };
    let (alice, bob) = (add(&mut world, TOKEN), add(&mut world, TOKEN_OF_BOB));
    announce(&mut world, alice, &["192.168.7.0/24"]);
    announce(&mut world, bob, &["10.77.1.0/24"]);
    let own = world.address(alice, true).to_string();
    let syn = |from: &str, to: &str| {
        let end = |ip: &str, port| (ip.parse::<std::net::IpAddr>().unwrap(), port).into();
        let tcp = Tcp { flags: SYN, ack: 0, ..Tcp::default() };
        Packet::between(end(from, 40_000), end(to, 80)).tcp_with(&tcp, b"")
    };
    for (from, to, as_packet) in [
        (own.as_str(), "203.0.113.9", false),
        ("192.168.7.5", "203.0.113.9", true),
        (own.as_str(), "10.77.1.9", true),
        ("192.168.7.5", "10.77.1.9", true),
    ] {
        world.received_by_server.clear();
        let streams = world.destinations.len();
        world.client_sends(alice, syn(from, to));
        world.run(100 * MS);
        let seen = (world.received_by_server.len(), world.destinations.len() - streams);
        assert_eq!(seen, if as_packet { (1, 0) } else { (0, 1) }, "{from} to {to}");
    }
}

#[test]
fn public_addresses_and_networks_of_a_user_pass_at_every_shard_and_need_no_extension() {
    let extensions: [&[&str]; 2] = [&[], &["sites", "streams"]];
    for disabled in extensions {
        let mut world = World::with_shards(2);
        (world.disabled_at_client, world.flow_rules) =
            (disabled, Rules { mode: FlowMode::Auto, rules: vec![] });
        let of_alice = ["203.0.113.7/32", "203.0.113.8/29", "2001:db8:7::/64", "2001:db8:9::7/128"];
        let fixed = of_alice.map(|net| (net.parse().unwrap(), "alice".to_owned()));
        world.registry.set_fixed_addresses(fixed.clone());
        let (alice, bob) = (add(&mut world, TOKEN), add(&mut world, TOKEN_OF_BOB));
        world.run(200 * MS);
        let given = world.machines[alice].assignment.clone().unwrap();
        let texts = |nets: &[ipnet::IpNet]| nets.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(texts(&given.networks), [of_alice[1], of_alice[2]]);
        assert_eq!(world.address(alice, true).to_string(), "203.0.113.7");
        assert!(texts(&given.addresses).contains(&of_alice[3].to_owned()), "{given:?}");
        for (from, to) in [
            ("203.0.113.7", "192.0.2.9"),
            ("203.0.113.9", "192.0.2.9"),
            ("2001:db8:7::5", "2001:db8::9"),
            ("2001:db8:9::7", "2001:db8::9"),
        ] {
            assert!(goes_up(&mut world, alice, udp(from, to)), "{from}");
            assert!(!goes_up(&mut world, bob, udp(from, to)), "{from} of bob");
            for queue in 0..2 {
                assert_eq!(goes_down(&mut world, queue, udp(to, from)), [alice], "to {from}, queue {queue}");
            }
        }
        // A stream would hide the address behind that of the server.
        let end = |ip: &str, port| (ip.parse::<std::net::IpAddr>().unwrap(), port).into();
        let tcp = Packet::between(end("203.0.113.7", 40_000), end("192.0.2.9", 80));
        let syn = tcp.tcp_with(&Tcp { flags: SYN, ack: 0, ..Tcp::default() }, b"");
        world.received_by_server.clear();
        world.client_sends(alice, syn);
        world.run(100 * MS);
        assert_eq!((world.received_by_server.len(), world.destinations.len()), (1, 0));

        // They are hers until they are taken back.
        world.registry.set_fixed_addresses(fixed.into_iter().take(1));
        world.run(200 * MS);
        assert!(world.machines[alice].assignment.as_ref().unwrap().networks.is_empty());
        assert!(!goes_up(&mut world, alice, udp("2001:db8:7::5", "2001:db8::9")));
        assert!(goes_up(&mut world, alice, udp("203.0.113.7", "192.0.2.9")));
    }
}
