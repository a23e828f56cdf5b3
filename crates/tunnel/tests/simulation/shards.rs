//! Stories of a server of two shards, and of sessions with several connections, in simulated time.

use std::net::IpAddr;

use crate::world::{MS, TOKEN, World};
use mpvpn_path::Scheduler;
use mpvpn_tunnel::{ClientState, UserLimits};
use mpvpn_types::{Duration, LinkId};

const LINK: [(u64, Duration); 1] = [(100, Duration::from_millis(10))];
/// A server that was not heard for longer than a minute is found within this time.
const FOUND_AFTER: Duration = Duration::from_secs(30);

/// A home at the first shard and a member at the second, both up.
fn initial_and_joined() -> (World, usize, usize) {
    let mut world = World::with_shards(2);
    let initial = world.add(TOKEN, Scheduler::Auto, &LINK);
    let joined = world.add_joined(initial, 1, &LINK);
    world.up(initial);
    world.up(joined);
    (world, initial, joined)
}

fn state(world: &mut World, machine: usize) -> ClientState {
    let now = world.now;
    world.machines[machine].client.report(now).state
}

/// Connections of each shard.
fn connections(world: &mut World) -> Vec<usize> {
    let now = world.now;
    world.servers.iter_mut().map(|server| server.report(now).len()).collect()
}

fn silence(world: &mut World, machine: usize, loss: f64) {
    for link in world.machines[machine].links.values_mut() {
        (link.up.loss, link.down.loss) = (loss, loss);
    }
}

/// Packets that a machine receives of 20 sent to it through each queue of the server's TUN.
fn received(world: &mut World, machines: &[usize], to: usize) -> Vec<usize> {
    for machine in machines {
        world.machines[*machine].received.clear();
    }
    for n in 0..20 {
        for queue in 0..world.servers.len() {
            let packet = world.packet_to_client(to, &[n; 100]);
            world.server_sends_through(queue, packet);
            // One at a time: packets that arrive together are joined.
            world.run(3 * MS);
        }
    }
    world.run(100 * MS);
    machines.iter().map(|machine| world.machines[*machine].received.len()).collect()
}

#[test]
fn clients_of_different_shards_are_reached_through_any_queue() {
    let mut world = World::with_shards(2);
    let a = world.add(TOKEN, Scheduler::Auto, &LINK);
    let b = world.add(TOKEN, Scheduler::Auto, &LINK);
    world.up(a);
    world.up(b);
    assert_eq!(connections(&mut world), [1, 1]);
    assert_eq!(world.servers[0].sessions(), 2);
    assert_ne!(world.address(a, true), world.address(b, true));
    assert_eq!(received(&mut world, &[a, b], a), [40, 0]);
    assert_eq!(received(&mut world, &[a, b], b), [0, 40]);
    assert_eq!(world.handed_over, 40, "half of the packets came to the wrong shard");
    // No client has this address: the sender gets an ICMP error, and no shard gets the packet.
    let to = "10.0.0.99:4000".parse().unwrap();
    let packet = mpvpn_packets::Packet::between("203.0.113.9:53".parse().unwrap(), to).udp(b"x");
    world.received_by_server.clear();
    world.server_sends_through(1, packet);
    world.run(MS);
    assert_eq!((world.handed_over, world.received_by_server.len()), (40, 1));
}

#[test]
fn a_joined_connection_gets_the_answers_to_its_flows() {
    let (mut world, initial, joined) = initial_and_joined();
    assert_eq!(connections(&mut world), [1, 1]);
    assert_eq!(world.servers[0].sessions(), 1);
    for v4 in [true, false] {
        assert_eq!(world.address(initial, v4), world.address(joined, v4));
    }
    // Nothing has come up through the member yet: its thread may not be ready.
    assert_eq!(received(&mut world, &[initial, joined], initial), [40, 0]);
    let packet = world.packet_to_target(joined, b"up");
    world.received_by_server.clear();
    world.client_sends(joined, packet.clone());
    world.run(50 * MS);
    assert_eq!(world.received_by_server.iter().map(|(_, packet)| packet).collect::<Vec<_>>(), [&packet]);
    // From now on each queue is served by its own shard.
    assert_eq!(received(&mut world, &[initial, joined], initial), [20, 20]);
}

#[test]
fn a_joined_connection_that_dies_affects_no_other_and_comes_back() {
    let (mut world, initial, joined) = initial_and_joined();
    let packet = world.packet_to_target(joined, b"up");
    world.client_sends(joined, packet);
    world.run(50 * MS);
    silence(&mut world, joined, 1.0);
    let (a, b) = world.send_both_ways(initial, Duration::from_secs(2));
    assert!(a.max(b) < 50 * MS, "{a:?} {b:?}");
    world.run(Duration::from_secs(70));
    assert_eq!(connections(&mut world), [1, 0]);
    assert_eq!(received(&mut world, &[initial, joined], initial), [40, 0]);
    silence(&mut world, joined, 0.0);
    world.run(FOUND_AFTER);
    assert_eq!(state(&mut world, joined), ClientState::Up);
    assert_eq!(connections(&mut world), [1, 1]);
    assert_eq!(world.machines[initial].down_count, 0);
}

#[test]
fn the_session_outlives_its_initial_connection_and_resumes_it() {
    let (mut world, initial, joined) = initial_and_joined();
    let before = world.address(initial, true);
    world.send_both_ways(joined, Duration::from_secs(1));
    silence(&mut world, initial, 1.0);
    // The server's kernel chooses the queue of the joined connection for its flows.
    world.run(Duration::from_secs(75));
    assert_eq!(connections(&mut world), [0, 1]);
    assert_eq!(received(&mut world, &[initial, joined], joined), [0, 40]);
    silence(&mut world, initial, 0.0);
    world.run(FOUND_AFTER);
    assert_eq!(state(&mut world, initial), ClientState::Up);
    assert_eq!(world.address(initial, true), before);
    assert_eq!((connections(&mut world), world.servers[0].sessions()), (vec![1, 1], 1));
    assert_eq!(world.machines[joined].down_count, 0, "the member lost its connection");
}

#[test]
fn after_a_restart_joined_connections_follow_the_initial_one() {
    let (mut world, initial, joined) = initial_and_joined();
    let before = world.machines[initial].session_secret.clone();
    let address = world.address(initial, true);
    world.send_both_ways(joined, Duration::from_secs(1));
    world.restart_server();
    for _ in 0..100 {
        let (out, other) = (world.packet_to_target(initial, b"x"), world.packet_to_target(joined, b"y"));
        world.client_sends(initial, out);
        world.client_sends(joined, other);
        world.run(100 * MS);
    }
    assert_ne!(world.machines[initial].session_secret, before, "a new server makes a new secret");
    for machine in [initial, joined] {
        assert_eq!(state(&mut world, machine), ClientState::Up);
        assert_eq!(world.address(machine, true), address);
    }
    assert_eq!((connections(&mut world), world.servers[0].sessions()), (vec![1, 1], 1));
}

#[test]
fn a_later_connection_with_the_same_number_replaces_one_of_another_shard() {
    let (mut world, initial, old) = initial_and_joined();
    silence(&mut world, old, 1.0);
    // The third client uses the first shard.
    let new = world.add_joined(initial, 1, &LINK);
    world.up(new);
    world.run(100 * MS);
    assert_eq!(connections(&mut world), [2, 0]);
    assert_eq!(received(&mut world, &[initial], initial), [40]);
}

#[test]
fn a_joined_connection_without_the_secret_is_refused() {
    let mut world = World::with_shards(2);
    let initial = world.add(TOKEN, Scheduler::Auto, &LINK);
    world.up(initial);
    let stranger = world.add_joined(initial, 1, &LINK);
    world.machines[stranger].initial = None;
    let now = world.now;
    world.machines[stranger].client.join(now, vec![99; 16]);
    world.run(Duration::from_secs(10));
    let machine = &world.machines[stranger];
    assert!(machine.down_count >= 2 && machine.assignment.is_none(), "{} refusals", machine.down_count);
    assert_eq!(machine.fatal, None, "the member does not decide about the end");
    assert_eq!(world.servers[0].sessions(), 1);
}

#[test]
fn two_joined_connections_share_a_shard() {
    let mut world = World::new();
    let initial = world.add(TOKEN, Scheduler::Auto, &LINK);
    let joined = world.add_joined(initial, 1, &LINK);
    world.up(initial);
    world.up(joined);
    let packet = world.packet_to_target(joined, b"up");
    world.client_sends(joined, packet);
    assert_eq!(received(&mut world, &[initial, joined], initial), [20, 0]);
    let now = world.now;
    let initial_address: IpAddr = world.address(initial, true);
    world.machines[initial].client.close(now, "gone");
    world.run(Duration::from_secs(1));
    assert_eq!(received(&mut world, &[initial, joined], joined), [0, 20]);
    assert_eq!(world.address(joined, true), initial_address);
    assert_eq!(world.machines[joined].links[&LinkId(0)].up.loss, 0.0);
}

#[test]
fn every_thread_of_a_client_has_its_connection_where_its_user_may_have_one_session() {
    let limits = UserLimits { max_sessions: Some(1), max_classes: 1, ..UserLimits::default() };
    let mut world = World::with_limits(limits, 1);
    let initial = world.add(TOKEN, Scheduler::Auto, &LINK);
    let joined = [1, 2, 3].map(|number| world.add_joined(initial, number, &LINK));
    world.up(initial);
    joined.iter().for_each(|machine| world.up(*machine));
    assert_eq!((connections(&mut world), world.servers[0].sessions()), (vec![4], 1));
}

/// The second IPv4 address of a machine, as it is wanted for the TUN of a class.
fn second(world: &World, machine: usize) -> IpAddr {
    let assignment = world.machines[machine].assignment.as_ref().expect("addresses");
    let own = assignment.additional[0].iter().map(|net| net.addr()).find(IpAddr::is_ipv4);
    own.expect("a second address")
}

/// The packets for `to` that the machines of a session receive, sent through each queue of the server's TUN.
fn arrive(world: &mut World, machines: &[usize], to: IpAddr) -> usize {
    for machine in machines {
        world.machines[*machine].received.clear();
    }
    for queue in 0..world.servers.len() {
        let to = std::net::SocketAddr::new(to, 4000);
        let packet = mpvpn_packets::Packet::between("203.0.113.9:53".parse().unwrap(), to).udp(b"down");
        world.server_sends_through(queue, packet);
    }
    world.run(100 * MS);
    machines.iter().map(|machine| world.machines[*machine].received.len()).sum()
}

#[test]
fn further_addresses_belong_to_all_connections_of_a_session_and_return_with_it() {
    let mut world = World::with_shards(2);
    world.additional_addresses = 2;
    let initial = world.add(TOKEN, Scheduler::Auto, &LINK);
    let joined = world.add_joined(initial, 1, &LINK);
    world.up(initial);
    world.up(joined);
    let assignment = world.machines[initial].assignment.clone().unwrap();
    assert_eq!((assignment.addresses.len(), assignment.additional.len()), (2, 2));
    let all = assignment.addresses.iter().chain(assignment.additional.iter().flatten());
    assert_eq!(all.map(|net| net.addr()).collect::<std::collections::BTreeSet<_>>().len(), 6);
    assert_eq!(world.machines[joined].assignment.as_ref().unwrap().additional, assignment.additional);
    let own = second(&world, initial);
    assert_eq!(own.to_string(), "10.0.0.3");
    for machine in [initial, joined] {
        world.received_by_server.clear();
        let from = std::net::SocketAddr::new(own, 4000);
        let packet = mpvpn_packets::Packet::between(from, "203.0.113.9:53".parse().unwrap()).udp(b"up");
        world.client_sends(machine, packet);
        world.run(50 * MS);
        assert_eq!(world.received_by_server.len(), 1, "the server does not take it from machine {machine}");
    }
    assert_eq!(arrive(&mut world, &[initial, joined], own), 2);
    // Another client gets others, and the server remembers them by the session's secret, the client by its
    // wishes.
    world.additional_addresses = 0;
    let other = world.add(TOKEN, Scheduler::Auto, &LINK);
    world.up(other);
    assert_eq!(world.address(other, true).to_string(), "10.0.0.5");
    for restart in [false, true] {
        match restart {
            true => world.restart_server(),
            false => silence(&mut world, initial, 1.0),
        }
        world.run(Duration::from_secs(20));
        silence(&mut world, initial, 0.0);
        world.run(Duration::from_secs(20));
        world.up(initial);
        assert_eq!(
            world.machines[initial].assignment.as_ref().unwrap().additional,
            assignment.additional,
            "restart: {restart}"
        );
        assert!(arrive(&mut world, &[initial, joined], own) > 0, "restart: {restart}");
    }
}
