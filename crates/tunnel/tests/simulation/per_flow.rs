//! A client with a TUN at a server that carries no packets, in simulated time.

use std::net::SocketAddr;

use crate::world::{MS, TOKEN, World};
use mpvpn_flow::rules::FlowMode;
use mpvpn_masque::connect::ProxyError;
use mpvpn_packet::{ip, protocol};
use mpvpn_packets::Packet;
use mpvpn_path::Scheduler;
use mpvpn_tunnel::{ClientState, FlowTransport, TunnelMode};
use mpvpn_types::Duration;

const S: Duration = Duration::from_secs(1);
const DNS: &str = "198.51.100.9:53";

/// A machine whose flows travel one by one.
fn world() -> (World, usize) {
    let mut world = World::new();
    world.server_mode = TunnelMode::RelaysOnly;
    world.restart_server();
    let client = world.add(TOKEN, Scheduler::Auto, &[(50, 10 * MS), (20, 30 * MS)]);
    world.up(client);
    world.run(S);
    (world, client)
}

fn from_app(world: &World, client: usize, port: u16, to: &str) -> Packet {
    let to: SocketAddr = to.parse().unwrap();
    Packet::between(SocketAddr::new(world.address(client, to.is_ipv4()), port), to)
}

/// Packets for apps since the last call: protocol and IP payload.
fn received(world: &mut World, client: usize) -> Vec<(u8, Vec<u8>)> {
    let packets = std::mem::take(&mut world.machines[client].received);
    let view = |packet: &[u8]| {
        let view = ip::parse(packet).unwrap();
        (view.protocol(), view.transport().to_vec())
    };
    packets.iter().map(|(_, packet)| view(packet)).collect()
}

#[test]
fn udp_of_apps_goes_there_and_back() {
    let (mut world, client) = world();
    for (port, payload) in [(4000, &b"one"[..]), (4001, b"two"), (4000, b"")] {
        let packet = from_app(&world, client, port, DNS).udp(payload);
        world.client_sends(client, packet);
    }
    world.run(200 * MS);
    let mut got: Vec<_> = received(&mut world, client)
        .into_iter()
        .map(|(number, datagram)| (number, datagram[..4].to_vec(), datagram[8..].to_vec()))
        .collect();
    got.sort();
    let expected = [(4000_u16, &b""[..]), (4000, b"one"), (4001, b"two")];
    let expected = expected.map(|(port, payload)| {
        (protocol::UDP, [53_u16.to_be_bytes(), port.to_be_bytes()].concat(), payload.to_vec())
    });
    assert_eq!(got, expected);
    assert_eq!(world.targets.len(), 2, "a flow has one request");
    let report = world.machines[client].client.report(world.now);
    assert_eq!((report.udp_flows, report.per_flow), (2, true));
    let flows = world.machines[client].client.flows(world.now);
    assert!(flows.iter().all(|flow| flow.transport == FlowTransport::UdpPayloads), "{flows:?}");
    assert_eq!(
        flows.iter().map(|flow| (flow.up_bytes, flow.down_bytes)).collect::<Vec<_>>(),
        [(3, 3), (3, 3)]
    );
    // A query of the DNS is soon forgotten, at both ends.
    world.run(30 * S);
    assert_eq!(world.machines[client].client.report(world.now).udp_flows, 0);
    assert!(world.targets.iter().all(|target| target.closed));
}

#[test]
fn protocols_that_cannot_travel_get_an_icmp_error() {
    const PROHIBITED: [u8; 2] = [3, 13];
    let (mut world, client) = world();
    let forbidden = "10.9.9.9:53";
    world.refused_targets = [(forbidden.parse().unwrap(), ProxyError::Prohibited)].into();
    let ping = from_app(&world, client, 1, DNS).echo(7, 1, b"ping");
    world.client_sends(client, ping);
    world.run(MS);
    let reported = received(&mut world, client);
    assert!(matches!(&reported[..], [(protocol::ICMP, error)] if error[..2] == PROHIBITED), "{reported:?}");
    for _ in 0..3 {
        let packet = from_app(&world, client, 4000, forbidden).udp(b"hello");
        world.client_sends(client, packet);
        world.run(100 * MS);
    }
    let reported = received(&mut world, client);
    assert_eq!(reported.len(), 3, "{reported:?}");
    assert!(reported.iter().all(|(number, error)| *number == protocol::ICMP && error[..2] == PROHIBITED));
    assert_eq!(world.targets.len(), 0, "what was refused is not asked for again at once");
}

#[test]
fn flows_go_on_over_a_connection_that_was_made_anew() {
    let (mut world, client) = world();
    let ask = |world: &mut World| {
        let packet = from_app(world, client, 4000, DNS).udp(b"hello");
        world.client_sends(client, packet);
        world.run(300 * MS);
        received(world, client).len()
    };
    assert_eq!(ask(&mut world), 1);
    let address = world.address(client, true);
    world.restart_server();
    world.run(10 * S);
    assert_eq!(world.machines[client].client.report(world.now).state, ClientState::Up);
    assert_eq!(world.address(client, true), address);
    assert_eq!(ask(&mut world), 1);
}

#[test]
fn a_client_that_needs_packets_fails_with_a_reason() {
    let mut world = World::new();
    world.server_mode = TunnelMode::RelaysOnly;
    world.restart_server();
    world.flow_rules.mode = FlowMode::Datagram;
    let client = world.add(TOKEN, Scheduler::Auto, &[(50, 10 * MS)]);
    world.run(5 * S);
    let fatal = world.machines[client].fatal.take().expect("an end").to_string();
    assert!(fatal.contains("no CONNECT-IP"), "{fatal}");
}
