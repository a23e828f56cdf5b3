//! Many links, many clients, and long silence, in simulated time.

use std::net::SocketAddr;

use crate::world::{MS, TOKEN, World};
use mpvpn_packets::Packet;
use mpvpn_path::{PathState, Scheduler};
use mpvpn_types::{Duration, LinkId};

const SECOND: Duration = Duration::from_secs(1);

fn active(world: &mut World, client: usize) -> usize {
    let now = world.now;
    let paths = world.machines[client].client.report(now).paths;
    paths.iter().filter(|path| path.state == PathState::Active).count()
}

/// Datagrams that all links of all clients have delivered, up and down.
fn delivered(world: &World) -> (u64, u64) {
    let links = world.machines.iter().flat_map(|machine| machine.links.values());
    links.fold((0, 0), |(up, down), link| (up + link.up.passed, down + link.down.passed))
}

/// A world with so many clients that are up, each with one link.
fn with_clients(count: usize) -> World {
    let mut world = World::new();
    for _ in 0..count {
        let client = world.add(TOKEN, Scheduler::Auto, &[(100, 12 * MS)]);
        world.up(client);
    }
    world
}

#[test]
fn every_link_of_a_client_with_twelve_gets_a_path() {
    let mut world = World::new();
    let client = world.add(TOKEN, Scheduler::Auto, &[(100, 12 * MS); 12]);
    world.up(client);
    world.run(2 * SECOND);
    assert_eq!(active(&mut world, client), 12);
}

#[test]
fn links_that_are_plugged_in_one_by_one_get_paths_at_once() {
    let mut world = World::new();
    let client = world.add(TOKEN, Scheduler::Auto, &[(100, 12 * MS); 9]);
    for link in 1..9 {
        let now = world.now;
        world.machines[client].client.link_down(now, LinkId(link));
    }
    world.up(client);
    world.run(SECOND);
    assert_eq!(active(&mut world, client), 1);
    for link in 1..9 {
        let now = world.now;
        world.machines[client].client.link_up(now, LinkId(link), crate::world::SERVER.parse().unwrap());
        world.run(200 * MS);
        assert_eq!(active(&mut world, client), usize::from(link) + 1);
    }
}

#[test]
fn an_idle_client_costs_a_datagram_in_a_few_seconds() {
    let mut world = with_clients(20);
    world.run(30 * SECOND);
    let before = delivered(&world);
    world.run(120 * SECOND);
    let after = delivered(&world);
    // A heartbeat of either end in 15 s, and an acknowledgement of each.
    let most = 20 * 2 * (120 / 15 + 1);
    assert!(after.0 - before.0 <= most && after.1 - before.1 <= most, "{before:?}, then {after:?}");
    assert!(after.0 - before.0 >= 20 * (120 / 15), "{before:?}, then {after:?}");
}

/// The first client asks a host behind the server once a second, and gets an answer. Returns how many
/// datagrams a second that took, up and down.
fn questions(world: &mut World, seconds: usize) -> [f64; 2] {
    let ours = SocketAddr::new(world.address(0, true), 7);
    let theirs = SocketAddr::from(([203, 0, 113, 9], 7));
    let before = delivered(world);
    let mut received = 0;
    for _ in 0..seconds {
        let end = world.now + SECOND;
        world.received_by_server.clear();
        world.client_sends(0, Packet::between(ours, theirs).udp(b"question"));
        while world.received_by_server.is_empty() {
            assert!(world.now < end);
            world.run(MS);
        }
        world.server_sends(Packet::between(theirs, ours).udp(b"answer"));
        world.run(end - world.now);
        received += std::mem::take(&mut world.machines[0].received).len();
    }
    assert_eq!(received, seconds);
    let after = delivered(world);
    [after.0 - before.0, after.1 - before.1].map(|datagrams| datagrams as f64 / seconds as f64)
}

#[test]
fn a_packet_a_second_and_its_answer_cost_three_datagrams() {
    let mut world = with_clients(1);
    world.run(5 * SECOND);
    let cost = questions(&mut world, 60);
    // The question and the acknowledgement of the answer; the answer, with the acknowledgement of the
    // question. Now and then clock reports leave, too.
    assert!((2.0..2.2).contains(&cost[0]) && (1.0..1.2).contains(&cost[1]), "{cost:?} a second");
}

#[test]
fn an_end_that_has_become_slow_is_not_asked_more_often() {
    for late in [50, 150, 400] {
        let mut world = with_clients(1);
        world.run(5 * SECOND);
        questions(&mut world, 5);
        let now = world.now;
        let link = world.machines[0].links.get_mut(&LinkId(0)).expect("its link");
        link.down.adjust(now, |params| params.delay = late * MS);
        questions(&mut world, 2);
        let cost = questions(&mut world, 20);
        assert!(cost[0] < 2.2 && cost[1] < 1.2, "with {late} ms: {cost:?} a second");
        let report = world.servers[0].report(world.now);
        let states: Vec<_> = report[0].paths.iter().map(|path| path.state).collect();
        assert_eq!(states, [PathState::Active], "with {late} ms");
    }
}

#[test]
fn a_server_whose_timers_are_all_due_at_once_looks_for_packets_in_between() {
    let mut world = with_clients(60);
    world.run(5 * SECOND);
    let later = world.now + 60 * SECOND;
    let server = &mut world.servers[0];
    let is_due = |server: &mpvpn_tunnel::Server| server.poll_timeout().is_some_and(|at| at <= later);
    let calls = (0..100)
        .take_while(|_| {
            let due = is_due(server);
            server.handle_timeout(later);
            due
        })
        .count();
    assert!((3..100).contains(&calls), "60 clients have timers that are due, handled in {calls} calls");
}

/// A busy client, both ends of which stand still for half a second. Whether the server then takes its path
/// for dead.
fn stands_still(on_local_stall: bool) -> bool {
    let mut world = World::new();
    let client = world.add(TOKEN, Scheduler::Auto, &[(100, 12 * MS)]);
    world.up(client);
    world.send_both_ways(client, SECOND);
    // Nothing may arrive afterwards that proves the opposite.
    let link = world.machines[client].links.get_mut(&LinkId(0)).expect("its link");
    (link.up.loss, link.down.loss) = (1.0, 1.0);
    world.run(20 * MS);
    world.now += 500 * MS;
    let now = world.now;
    if on_local_stall {
        world.servers[0].on_local_stall(now);
        world.machines[client].client.on_local_stall(now);
    }
    world.run(5 * MS);
    let report = world.servers[0].report(world.now);
    report[0].paths.iter().any(|path| path.state == PathState::Down)
}

#[test]
fn a_server_that_comes_late_does_not_send_all_the_probes_of_the_time_it_missed() {
    let mut world = with_clients(1);
    world.run(5 * SECOND);
    let ours = SocketAddr::new(world.address(0, true), 7);
    let theirs = SocketAddr::from(([203, 0, 113, 9], 7));
    let link = world.machines[0].links.get_mut(&LinkId(0)).expect("its link");
    (link.up.loss, link.down.loss) = (1.0, 1.0);
    world.server_sends(Packet::between(theirs, ours).udp(b"question"));
    world.run(5 * MS);
    world.now += SECOND;
    let (now, server) = (world.now, &mut world.servers[0]);
    server.on_local_stall(now);
    let (mut sent, mut buf) = (0, Vec::new());
    for _ in 0..20 {
        server.handle_timeout(now);
        while server.poll_transmit(now, &mut buf).is_some() {
            sent += 1;
            buf.clear();
        }
    }
    // A probe timeout's two probes (RFC 9002 section 6.2.4).
    assert!((1..=2).contains(&sent), "{sent} datagrams in one moment");
}

#[test]
fn an_end_whose_only_path_comes_back_has_no_timer_that_expires_in_vain() {
    let mut world = World::new();
    let client = world.add(TOKEN, Scheduler::Auto, &[(100, 12 * MS)]);
    world.up(client);
    world.send_both_ways(client, SECOND);
    world.must_get_done = true;
    for (loss, time) in [(1.0, 400 * MS), (0.0, 2 * SECOND)] {
        let link = world.machines[client].links.get_mut(&LinkId(0)).expect("its link");
        (link.up.loss, link.down.loss) = (loss, loss);
        let end = world.now + time;
        while world.now < end {
            // Not in step with the measurements, which are 20 ms apart.
            world.run(MS * 13 / 10);
            let packet = world.packet_to_target(client, &[1; 100]);
            world.client_sends(client, packet);
        }
    }
}

#[test]
fn an_end_that_stood_still_does_not_take_its_own_silence_for_that_of_a_path() {
    assert!(stands_still(false), "half a second of silence is death");
    assert!(!stands_still(true), "but not if this end did not listen");
}
