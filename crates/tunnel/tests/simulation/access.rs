//! Rights of users: sessions wait until their packets are filtered, and have a limit.

use std::net::SocketAddr;

use crate::world::{MS, TOKEN, World};
use mpvpn_path::Scheduler;
use mpvpn_tunnel::{ClientState, UserLimits};

#[test]
fn a_session_has_no_addresses_before_its_packets_are_filtered() {
    let mut world = World::with_rules_of_users();
    world.additional_addresses = 1;
    let client = world.add(TOKEN, Scheduler::Auto, &[(100, 12 * MS)]);
    world.run(400 * MS);
    assert!(world.machines[client].assignment.is_none(), "it is up without a filter");
    // It asks for its addresses once, however often the server looks at it.
    assert_eq!(world.filter_requests.len(), 1);
    let request = world.filter_requests.remove(0);
    assert_eq!((request.user.as_str(), request.addresses.count()), ("alice", 2));
    let addresses = request.addresses;
    world.servers[0].on_filtered(&request);
    world.run(100 * MS);
    assert_eq!(world.machines[client].up_count, 1);
    assert!(
        addresses.contains(world.address(client, true)) && addresses.contains(world.address(client, false))
    );
    let packet = world.packet_to_target(client, b"x");
    world.client_sends(client, packet);
    world.run(50 * MS);
    assert_eq!(world.received_by_server.len(), 1);
    // A connection that joins the session waits, too.
    let joined = world.add_joined(client, 1, &[(100, 12 * MS)]);
    world.run(400 * MS);
    assert!(world.machines[joined].assignment.is_none());
    // Its own request for addresses came meanwhile, and is answered after another look at the filter.
    let mut answered = 0;
    while let Some(request) = world.filter_requests.pop() {
        assert_eq!(request.addresses, addresses);
        world.servers[0].on_filtered(&request);
        world.run(100 * MS);
        answered += 1;
        assert!(answered <= 2, "it asks again and again");
    }
    world.up(joined);
}

#[test]
fn a_session_that_has_ended_is_not_filtered() {
    let mut world = World::with_rules_of_users();
    let client = world.add(TOKEN, Scheduler::Auto, &[(100, 12 * MS)]);
    while world.filter_requests.is_empty() {
        world.run(MS);
    }
    let request = world.filter_requests.remove(0);
    let now = world.now;
    world.servers[0].close(now, "a test");
    world.servers[0].on_filtered(&request);
    world.run(100 * MS);
    assert!(world.machines[client].assignment.is_none());
    // A later session may have the same address and connection ID.
    let later = world.filter_requests.pop();
    world.servers[0].on_filtered(&request);
    world.run(100 * MS);
    assert!(world.machines[client].assignment.is_none(), "the answer for another session counted");
    if let Some(later) = later {
        world.servers[0].on_filtered(&later);
        world.run(100 * MS);
        assert!(world.machines[client].assignment.is_some());
    }
}

#[test]
fn metadata_at_link_local_addresses_is_refused_at_once() {
    let mut world = World::new();
    let client = world.add(TOKEN, Scheduler::Auto, &[(100, 12 * MS)]);
    world.up(client);
    world.machines[client].received.clear();
    for to in ["169.254.169.254:80", "[fe80::1]:80", "224.0.0.251:5353", "[ff02::fb]:5353"] {
        let to: SocketAddr = to.parse().unwrap();
        let from = SocketAddr::new(world.address(client, to.is_ipv4()), 4000);
        world.client_sends(client, mpvpn_packets::Packet::between(from, to).udp(b"x"));
    }
    world.run(100 * MS);
    assert!(world.received_by_server.is_empty());
    let errors: Vec<_> = world.machines[client]
        .received
        .iter()
        .map(|(_, packet)| if packet[0] >> 4 == 4 { &packet[20..22] } else { &packet[40..42] })
        .collect();
    assert_eq!(errors, [[3, 13], [1, 1]], "administratively prohibited; nobody answers multicast");
}

#[test]
fn a_further_session_of_a_user_waits_until_another_ends() {
    let mut world = World::with_limits(UserLimits { max_sessions: Some(2), ..UserLimits::default() }, 1);
    let clients: Vec<_> = (0..3)
        .map(|_| {
            let client = world.add(TOKEN, Scheduler::Auto, &[(100, 12 * MS)]);
            world.run(300 * MS);
            client
        })
        .collect();
    let is_up = |world: &World, client: usize| world.machines[client].assignment.is_some();
    assert!(is_up(&world, clients[0]) && is_up(&world, clients[1]) && !is_up(&world, clients[2]));
    let report = world.machines[clients[2]].client.report(world.now);
    assert_eq!(report.state, ClientState::Refused, "the server answers");
    let reason = report.reason;
    assert!(
        reason.contains("503") && reason.contains("alice has as many sessions as max-sessions allows: 2"),
        "{reason}"
    );
    assert_eq!(world.servers[0].sessions(), 2);
    let now = world.now;
    world.machines[clients[0]].client.0.close(now, "a test");
    for _ in 0..100 {
        world.run(100 * MS);
        if is_up(&world, clients[2]) {
            return;
        }
    }
    panic!("the third client never came up: {:?}", world.machines[clients[2]].fatal);
}
