//! Relays of a client: TCP connections by CONNECT, with and without packets, in simulated time.

use std::net::SocketAddr;

use crate::world::{
    MS, TOKEN, World,
    app::App,
    talk::{RelayedConnection, play, step, streams, world},
};
use mpvpn_masque::connect::{Authority, ProxyError};
use mpvpn_path::{PathState, Scheduler};
use mpvpn_tunnel::{ClientError, ClientEvent, LinkPolicy, TunnelMode};
use mpvpn_types::{Duration, LinkId, Tier};

const S: Duration = Duration::from_secs(1);

fn mbit(bytes: u64, time: Duration) -> f64 {
    bytes as f64 * 8e-6 / time.as_secs_f64()
}

#[test]
fn a_client_without_packets_asks_for_no_addresses_and_uses_all_links() {
    let (mut world, client) = streams(&[(100, 10 * MS), (50, 20 * MS)]);
    let report = world.machines[client].client.report(world.now);
    assert_eq!(report.paths.len(), 2);
    assert!(report.assignment.unwrap().addresses.is_empty());
    let mut connections = [RelayedConnection::new(100, 1000)];
    let time = play(&mut world, client, &mut connections, 20 * S);
    assert_eq!(
        (connections[0].received_bytes, connections[0].ended, connections[0].closed),
        (100_000_000, true, false)
    );
    let rate = mbit(100_000_000, time);
    assert!(rate > 0.85 * 150.0, "{rate:.1} Mbit/s");
    assert_eq!(world.destinations[0].received_bytes, 1000);
    assert_eq!(world.machines[client].client.report(world.now).stream_flows, 0);
}

#[test]
fn uploads_fill_all_links_too() {
    let (mut world, client) = streams(&[(50, 10 * MS), (50, 15 * MS)]);
    let mut connections: Vec<RelayedConnection> =
        (0..4).map(|_| RelayedConnection::new(1, 10_000_000)).collect();
    let start = world.now;
    while world.destinations.iter().filter(|other| other.ended).count() < 4 && world.now < start + 20 * S {
        step(&mut world, client, &mut connections);
    }
    let time = world.now - start;
    assert!(world.destinations.iter().all(|other| other.received_bytes == 10_000_000));
    let rate = mbit(40_000_000, time);
    assert!(rate > 0.8 * 100.0, "{rate:.1} Mbit/s");
}

#[test]
fn an_idle_client_keeps_its_connection_and_its_paths() {
    let (mut world, client) = streams(&[(100, 10 * MS), (50, 20 * MS)]);
    world.run(90 * S);
    assert_eq!(world.machines[client].down_count, 0);
    let report = world.machines[client].client.report(world.now);
    let states: Vec<_> = report.paths.iter().map(|path| path.state).collect();
    assert_eq!(states, [PathState::Active; 2]);
    let mut connections = [RelayedConnection::new(1, 0)];
    assert!(play(&mut world, client, &mut connections, 5 * S) < S);
    assert_eq!(connections[0].received_bytes, 1_000_000);
}

/// The longest time without a byte for a connection while one of two links, of 25 ms both ways, dies without
/// a word.
fn gap_when_a_link_falls_silent(down: u16, up: u64) -> Duration {
    let delay = Duration::from_micros(12_500);
    let (mut world, client) = streams(&[(100, delay), (100, delay)]);
    let mut connections = [RelayedConnection::new(down, up)];
    let moved = |world: &World, connections: &[RelayedConnection]| {
        connections[0].received_bytes + world.destinations.first().map_or(0, |other| other.received_bytes)
    };
    let (start, mut last, mut longest) = (world.now, world.now, Duration::ZERO);
    let is_over = |world: &World, connections: &[RelayedConnection]| {
        connections[0].is_over() && world.destinations.first().is_some_and(|other| other.ended)
    };
    while !is_over(&world, &connections) && world.now < start + 30 * S {
        if world.now > start + S {
            let link = world.machines[client].links.get_mut(&LinkId(0)).unwrap();
            (link.up.loss, link.down.loss) = (1.0, 1.0);
        }
        let before = moved(&world, &connections);
        step(&mut world, client, &mut connections);
        if moved(&world, &connections) > before {
            longest = longest.max(world.now - last);
            last = world.now;
        }
    }
    assert!(is_over(&world, &connections) && !connections[0].closed);
    assert_eq!(moved(&world, &connections), u64::from(down) * 1_000_000 + up);
    println!("{down} MB down, {up} bytes up: longest gap {longest:?}");
    longest
}

#[test]
fn a_link_that_falls_silent_is_hardly_felt_without_packets_either() {
    for (down, up) in [(40, 1000), (1, 40_000_000)] {
        // Now and then a byte is missing that nothing but the end of the path brings.
        let mut gaps: Vec<_> = (0..3).map(|_| gap_when_a_link_falls_silent(down, up)).collect();
        gaps.sort();
        let gap = gaps[1];
        assert!(gap < 250 * MS, "{down} MB down, {up} bytes up: {gap:?}");
    }
}

#[test]
fn the_server_learns_about_links_without_packets_too() {
    let (mut world, client) = world(TunnelMode::RelaysOnly, TOKEN, &[(50, 10 * MS), (50, 10 * MS)]);
    let policy = LinkPolicy { tier: Tier::Backup, ..LinkPolicy::default() };
    world.machines[client].client.set_link(world.now, LinkId(1), policy);
    world.up(client);
    world.run(500 * MS);
    let mut connections = [RelayedConnection::new(10, 1000)];
    play(&mut world, client, &mut connections, 10 * S);
    assert_eq!(connections[0].received_bytes, 10_000_000);
    let down = |link: u16| world.machines[client].links[&LinkId(link)].down.carried;
    assert!(down(1) < 100_000 && down(0) > 10_000_000, "{} and {} bytes", down(0), down(1));
}

#[test]
fn a_link_that_dies_ends_nothing() {
    let (mut world, client) = streams(&[(100, 10 * MS), (100, 10 * MS)]);
    let mut connections = [RelayedConnection::new(50, 0)];
    play(&mut world, client, &mut connections, S);
    let link = world.machines[client].links.get_mut(&LinkId(0)).unwrap();
    (link.up.loss, link.down.loss) = (1.0, 1.0);
    let time = play(&mut world, client, &mut connections, 20 * S);
    assert_eq!(
        (connections[0].received_bytes, connections[0].ended, connections[0].closed),
        (50_000_000, true, false)
    );
    assert!(time < 8 * S, "{time:?}");
}

#[test]
fn connections_survive_when_all_links_are_gone_for_a_while() {
    for seconds in [3, 20, 90] {
        let (mut world, client) = streams(&[(20, 10 * MS), (20, 15 * MS)]);
        let mut connections = [RelayedConnection::new(10, 1000)];
        play(&mut world, client, &mut connections, S);
        for lost in [1.0, 0.0] {
            for link in world.machines[client].links.values_mut() {
                (link.up.loss, link.down.loss) = (lost, lost);
            }
            let before = connections[0].received_bytes;
            let most = if lost == 1.0 { S * seconds } else { 10 * S };
            let time = play(&mut world, client, &mut connections, most);
            println!("{seconds} s: {} bytes in {time:?}", connections[0].received_bytes - before);
        }
        assert_eq!(
            (connections[0].received_bytes, connections[0].ended, connections[0].closed),
            (10_000_000, true, false),
            "{seconds} s"
        );
    }
}

#[test]
fn failures_of_the_server_are_reported() {
    let (mut world, client) = streams(&[(100, 10 * MS)]);
    let failures = [ProxyError::Dns, ProxyError::Prohibited, ProxyError::Refused, ProxyError::TimedOut];
    let mut connections: Vec<RelayedConnection> =
        failures.iter().zip(1..).map(|(_, port)| RelayedConnection::new(port, 0)).collect();
    world.refused_targets =
        connections.iter().map(|connection| connection.to.clone()).zip(failures).collect();
    play(&mut world, client, &mut connections, S);
    let reported: Vec<_> = connections.iter().map(|connection| connection.failed).collect();
    assert_eq!(reported, failures.map(Some));
    assert_eq!(world.machines[client].client.report(world.now).stream_flows, 0);
}

#[test]
fn a_reader_that_stops_is_sent_little_and_others_all_they_read() {
    let (mut world, client) = streams(&[(100, 50 * MS)]);
    let mut connections = [RelayedConnection::new(200, 0), RelayedConnection::new(200, 0)];
    connections[1].reads = false;
    play(&mut world, client, &mut connections, 2 * S);
    let before = connections[0].received_bytes;
    play(&mut world, client, &mut connections, 5 * S);
    let rate = (connections[0].received_bytes - before) as f64 * 16e-7;
    assert!(rate > 90.0, "{rate:.1} Mbit/s");
    let unread = world.destinations.iter().map(|other| other.sent).min().unwrap();
    assert!((900_000..1_500_000).contains(&unread), "{unread} bytes for nobody");
}

#[test]
fn many_stopped_readers_are_sent_less_each() {
    let (mut world, client) = streams(&[(100, 10 * MS)]);
    let mut connections: Vec<_> = (0..32).map(|_| RelayedConnection::new(100, 0)).collect();
    connections.iter_mut().for_each(|connection| connection.reads = false);
    play(&mut world, client, &mut connections, 5 * S);
    let unread: u64 = world.destinations.iter().map(|other| other.sent).sum();
    // And 256 KB for each that wait at the server.
    assert!((10_000_000..24_000_000).contains(&unread), "{unread} bytes for nobody");
}

#[test]
fn a_stopped_reader_stops_its_destination_only() {
    let (mut world, client) = streams(&[(100, 10 * MS)]);
    let mut connections = [RelayedConnection::new(100, 0), RelayedConnection::new(10, 0)];
    connections[0].reads = false;
    world.run(MS);
    let start = world.now;
    while world.now < start + 10 * S && !connections[1].is_over() {
        step(&mut world, client, &mut connections);
    }
    assert_eq!(connections[1].received_bytes, 10_000_000);
    assert!(world.destinations[0].sent < 90_000_000, "{}", world.destinations[0].sent);
    connections[0].reads = true;
    play(&mut world, client, &mut connections, 30 * S);
    assert_eq!(connections[0].received_bytes, 100_000_000);
}

#[test]
fn each_end_learns_that_the_other_has_broken_it_off() {
    let (mut world, client) = streams(&[(100, 10 * MS)]);
    let mut connections = [RelayedConnection::new(1000, 0), RelayedConnection::new(1000, 0)];
    play(&mut world, client, &mut connections, S);
    world.machines[client].client.relay_abort(connections[0].relay.unwrap());
    let (shard, relay) = (world.destinations[1].shard, world.destinations[1].relay);
    world.servers[shard].relay_abort(relay);
    world.destinations[1].closed = true;
    for _ in 0..200 {
        step(&mut world, client, &mut connections[1..]);
    }
    assert!(world.destinations[0].closed);
    assert!(connections[1].closed && !connections[1].ended);
    assert_eq!(world.machines[client].client.report(world.now).stream_flows, 0);
}

#[test]
fn a_server_that_is_lost_takes_its_relays_along_and_new_ones_follow() {
    let (mut world, client) = streams(&[(100, 10 * MS)]);
    let mut connections = [RelayedConnection::new(1000, 0)];
    play(&mut world, client, &mut connections, S);
    world.restart_server();
    world.destinations.clear();
    play(&mut world, client, &mut connections, 10 * S);
    assert!(connections[0].closed);
    let mut connections = [RelayedConnection::new(1, 1000)];
    play(&mut world, client, &mut connections, 10 * S);
    assert_eq!((connections[0].received_bytes, connections[0].ended), (1_000_000, true));
}

#[test]
fn an_early_request_is_notified_when_to_retry() {
    let (mut world, client) = world(TunnelMode::RelaysOnly, TOKEN, &[(100, 10 * MS)]);
    let mut connections = [RelayedConnection::new(1, 0)];
    connections[0].run(&mut world, client);
    assert!(connections[0].relay.is_none());
    world.up(client);
    assert_eq!(world.machines[client].streams.pop_front(), Some(ClientEvent::RelaysAllowed));
    play(&mut world, client, &mut connections, 5 * S);
    assert_eq!(connections[0].received_bytes, 1_000_000);
}

#[test]
fn more_connections_than_the_server_allows_wait_for_their_turn() {
    let (mut world, client) = streams(&[(100, 10 * MS)]);
    let to: Authority = "destination.example:1".parse().unwrap();
    world.refused_targets = vec![(to.clone(), ProxyError::Refused)];
    let asked = (0..100_000).map_while(|_| world.machines[client].client.relay_open(&to)).count();
    assert!(asked < 100_000, "the server allows fewer");
    world.run(5 * S);
    let reported = &world.machines[client].streams;
    let failed = reported.iter().filter(|event| matches!(event, ClientEvent::RelayFailed(..))).count();
    assert_eq!(failed, asked);
    assert!(reported.contains(&ClientEvent::RelaysAllowed));
}

#[test]
fn a_wrong_token_is_found_before_anybody_asks_for_anything() {
    let (mut world, client) = world(TunnelMode::RelaysOnly, "a token that does not open", &[(100, 10 * MS)]);
    world.run(2 * S);
    assert_eq!(world.machines[client].fatal, Some(ClientError::Unauthorized(401)));
}

#[test]
fn relays_work_beside_packets_and_split_tcp_connections() {
    let (mut world, client) = world(TunnelMode::Packets, TOKEN, &[(100, 10 * MS), (50, 20 * MS)]);
    world.up(client);
    world.run(500 * MS);
    let from = SocketAddr::new(world.address(client, true), 40_000);
    let mut app = App::new(from, ([203, 0, 113, 9], 10).into(), 1000);
    let mut connections = [RelayedConnection::new(10, 1000)];
    let start = world.now;
    while world.now < start + 10 * S && !(app.is_over() && connections[0].is_over()) {
        for (_, packet) in std::mem::take(&mut world.machines[client].received) {
            app.take(&packet);
        }
        for packet in app.packets() {
            world.client_sends(client, packet);
        }
        step(&mut world, client, &mut connections);
    }
    assert_eq!((app.received_bytes, app.ended), (10_000_000, true));
    assert_eq!((connections[0].received_bytes, connections[0].ended), (10_000_000, true));
    assert!(world.destinations.iter().all(|other| other.received_bytes == 1000 && other.ended));
    let (up, _) = world.send_both_ways(client, 200 * MS);
    assert!(up < 100 * MS, "{up:?}");
}

#[test]
fn a_server_without_packets_has_relays_and_reports_their_users() {
    let (mut world, _) = world(TunnelMode::RelaysOnly, TOKEN, &[]);
    world.server_mode = TunnelMode::RelaysOnly;
    world.restart_server();
    let client = world.add(TOKEN, Scheduler::Auto, &[(100, 10 * MS), (50, 20 * MS)]);
    world.up(client);
    let mut connections = [RelayedConnection::new(50, 1000)];
    play(&mut world, client, &mut connections, 20 * S);
    assert_eq!((connections[0].received_bytes, connections[0].ended), (50_000_000, true));
    let reports = world.servers[0].report(world.now);
    let [report] = &reports[..] else { panic!("{} reports", reports.len()) };
    assert_eq!((report.user.as_str(), report.session, report.paths.len()), ("alice", None, 2));
    assert!(report.counters.tx_bytes >= 50_000_000, "{:?}", report.counters);
    assert_eq!(world.servers[0].sessions(), 0);
}

#[test]
fn a_server_without_packets_tells_it_only_to_its_users() {
    let (mut world, _) = world(TunnelMode::Packets, TOKEN, &[]);
    world.server_mode = TunnelMode::RelaysOnly;
    world.restart_server();
    let stranger = world.add("a token that does not open", Scheduler::Auto, &[(100, 10 * MS)]);
    world.run(2 * S);
    assert_eq!(world.machines[stranger].fatal, Some(ClientError::Unauthorized(401)));
    assert!(world.servers[0].report(world.now).is_empty());
}
