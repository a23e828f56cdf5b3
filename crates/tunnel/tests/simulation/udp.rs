//! CONNECT-UDP flows, with and without packets, in simulated time.

use crate::world::{MS, TOKEN, World};
use mpvpn_masque::connect::{Authority, ProxyError};
use mpvpn_path::Scheduler;
use mpvpn_tunnel::{ClientEvent, TunnelMode, UdpFlowEvent, UdpId};
use mpvpn_types::{Duration, LinkId};

const S: Duration = Duration::from_secs(1);
const BOTH: [TunnelMode; 2] = [TunnelMode::RelaysOnly, TunnelMode::Packets];

/// A client that is up.
fn world(mode: TunnelMode, links: &[(u64, Duration)]) -> (World, usize) {
    let mut world = World::new();
    world.mode = mode;
    let client = world.add(TOKEN, Scheduler::Auto, links);
    world.up(client);
    world.run(S);
    (world, client)
}

fn target(port: u16) -> Authority {
    format!("target.example:{port}").parse().unwrap()
}

fn open(world: &mut World, client: usize, port: u16) -> UdpId {
    world.machines[client].client.udp_open(world.now, &target(port)).expect("a flow")
}

fn send(world: &mut World, client: usize, udp: UdpId, payload: &[u8]) {
    world.machines[client].client.udp_send(world.now, udp, payload);
}

/// Events of flows since the last call.
fn news(world: &mut World, client: usize) -> Vec<(UdpId, UdpFlowEvent)> {
    let events = std::mem::take(&mut world.machines[client].streams);
    let reported = events.into_iter().filter_map(|event| match event {
        ClientEvent::Udp(udp, news) => Some((udp, news)),
        _ => None,
    });
    reported.collect()
}

#[test]
fn payloads_go_there_and_back_from_the_first_one_on() {
    for mode in BOTH {
        let (mut world, client) = world(mode, &[(50, 10 * MS), (20, 30 * MS)]);
        assert!(world.machines[client].client.has_udp_extension(), "{mode:?}");
        let udp = open(&mut world, client, 53);
        send(&mut world, client, udp, b"early");
        world.run(35 * MS);
        assert_eq!(news(&mut world, client), [(udp, UdpFlowEvent::Opened)], "{mode:?}");
        assert_eq!(world.machines[client].payloads, [(udp, b"early".to_vec())], "{mode:?}");
        let room = world.machines[client].client.max_udp_payload(udp);
        assert!((1200..1500).contains(&room), "{room}");
        for payload in [vec![7; room], vec![], vec![9; room + 1]] {
            send(&mut world, client, udp, &payload);
        }
        world.run(100 * MS);
        let sizes: Vec<_> =
            world.machines[client].payloads.iter().map(|(_, payload)| payload.len()).collect();
        assert_eq!(
            sizes,
            [5, room, 0],
            "{mode:?}: the largest and the empty one arrive, a larger one does not"
        );
        let report = world.machines[client].client.report(world.now);
        assert_eq!((report.udp_flows, report.drops), (1, 1), "{mode:?}");
        assert_eq!((&world.targets[0].to, &*world.targets[0].user), (&target(53), "alice"));
    }
}

#[test]
fn failures_of_the_server_are_reported() {
    for mode in BOTH {
        let (mut world, client) = world(mode, &[(50, 10 * MS)]);
        let failures = [ProxyError::Dns, ProxyError::Prohibited, ProxyError::Unroutable, ProxyError::Busy];
        world.refused_targets = (1..).map(target).zip(failures).collect();
        let flows: Vec<_> = (1..=4).map(|port| open(&mut world, client, port)).collect();
        send(&mut world, client, flows[0], b"in vain");
        world.run(S);
        let expected: Vec<_> = flows.into_iter().zip(failures.map(UdpFlowEvent::Refused)).collect();
        assert_eq!(news(&mut world, client), expected, "{mode:?}");
        assert_eq!(world.machines[client].client.report(world.now).udp_flows, 0);
    }
}

#[test]
fn each_end_learns_that_the_other_has_closed_a_flow() {
    let (mut world, client) = world(TunnelMode::RelaysOnly, &[(50, 10 * MS)]);
    let (mine, theirs) = (open(&mut world, client, 1), open(&mut world, client, 2));
    world.run(100 * MS);
    assert_eq!(news(&mut world, client).len(), 2);
    world.machines[client].client.udp_close(mine);
    world.servers[0].udp_close(world.targets[1].udp);
    send(&mut world, client, mine, b"too late");
    world.run(100 * MS);
    assert_eq!(news(&mut world, client), [(theirs, UdpFlowEvent::Closed)]);
    assert!(world.targets[0].closed && !world.targets[1].closed, "who closes is told nothing");
    assert_eq!(world.machines[client].client.max_udp_payload(theirs), 0);
    send(&mut world, client, theirs, b"too late");
    world.run(100 * MS);
    assert_eq!(world.targets[0].received_payloads + world.targets[1].received_payloads, 0);
}

#[test]
fn flows_of_two_sessions_do_not_meet() {
    let (mut world, first) = world(TunnelMode::RelaysOnly, &[(50, 10 * MS)]);
    let second = world.add(TOKEN, Scheduler::Auto, &[(50, 10 * MS)]);
    world.up(second);
    world.run(S);
    // The same stream of each connection.
    let flows = [first, second].map(|client| (client, open(&mut world, client, 1)));
    for (client, udp) in flows {
        send(&mut world, client, udp, &[client as u8; 3]);
    }
    world.run(200 * MS);
    for (client, udp) in flows {
        assert_eq!(world.machines[client].payloads, [(udp, vec![client as u8; 3])]);
    }
    assert_ne!(world.targets[0].udp, world.targets[1].udp);
}

#[test]
fn a_call_goes_on_when_a_link_dies() {
    for mode in BOTH {
        let (mut world, client) = world(mode, &[(50, 10 * MS), (50, 20 * MS)]);
        let udp = open(&mut world, client, 1);
        let talk = |world: &mut World, time: Duration| {
            let (end, mut sent) = (world.now + time, 0);
            world.machines[client].payloads.clear();
            while world.now < end {
                send(world, client, udp, &[1; 160]);
                sent += 1;
                world.run(20 * MS);
            }
            world.run(100 * MS);
            sent - world.machines[client].payloads.len()
        };
        assert_eq!(talk(&mut world, 2 * S), 0, "{mode:?}");
        let link = world.machines[client].links.get_mut(&LinkId(0)).unwrap();
        (link.up.loss, link.down.loss) = (1.0, 1.0);
        let lost = talk(&mut world, 3 * S);
        assert!(lost <= 30, "{mode:?}: {lost} of 150 lost");
        assert_eq!(talk(&mut world, 2 * S), 0, "{mode:?}: after that nothing is lost");
    }
}

#[test]
fn a_flow_that_hurts_when_overtaken_stays_in_order_and_others_use_the_rest() {
    for mode in BOTH {
        let (mut world, client) = world(mode, &[(30, 5 * MS), (30, 25 * MS)]);
        let quic = [0xc3, 0, 0, 0, 1, 0, 0, 0];
        let flows = [1, 2, 3].map(|port| open(&mut world, client, port));
        let end = world.now + 2 * S;
        let mut number = 0_u32;
        while world.now < end {
            for udp in flows {
                // 10 Mbit/s each: the whole rate of one path.
                number += 1;
                let mut payload = vec![0; 1200];
                payload[..8].copy_from_slice(&quic);
                payload[8..12].copy_from_slice(&number.to_be_bytes());
                send(&mut world, client, udp, &payload);
            }
            world.run(MS);
        }
        world.run(500 * MS);
        for udp in flows {
            let own = world.machines[client].payloads.iter().filter(|(of, _)| *of == udp);
            let numbers: Vec<_> = own.map(|(_, payload)| payload[8..12].to_vec()).collect();
            // While a path is too full flows are moved.
            let overtaken = numbers.windows(2).filter(|pair| pair[0] > pair[1]).count();
            assert!(overtaken * 10 < numbers.len(), "{mode:?}: {overtaken} of {}", numbers.len());
            assert!(numbers.len() > 1800, "{mode:?}: {} of 2000", numbers.len());
        }
    }
}

#[test]
fn a_thousand_flows_work_and_their_memory_is_bounded() {
    let (mut world, client) = world(TunnelMode::RelaysOnly, &[(100, 10 * MS)]);
    // A server allows about 500 requests more than it has granted.
    let mut flows: Vec<_> = (1..=500).map(|port| open(&mut world, client, port)).collect();
    world.run(100 * MS);
    flows.extend((501..=1000).map(|port| open(&mut world, client, port)));
    for udp in &flows {
        send(&mut world, client, *udp, &udp_name(*udp));
    }
    world.run(2 * S);
    assert_eq!(world.targets.len(), 1000);
    let mut back = std::mem::take(&mut world.machines[client].payloads);
    // The first ones may be ahead of their requests, of which the server keeps few.
    let first = back.len();
    assert!(first > 100, "{first}");
    for udp in &flows {
        send(&mut world, client, *udp, &udp_name(*udp));
    }
    world.run(2 * S);
    back.clear();
    back.append(&mut world.machines[client].payloads);
    assert_eq!(back.len(), 1000);
    assert!(back.iter().all(|(udp, payload)| *payload == udp_name(*udp)));
    flows.iter().for_each(|udp| world.machines[client].client.udp_close(*udp));
    world.run(S);
    assert!(world.targets.iter().all(|target| target.closed));
    // Before the answer little may be sent.
    let udp = open(&mut world, client, 1);
    (0..1000).for_each(|_| send(&mut world, client, udp, &[0; 1000]));
    world.run(S);
    assert!(world.targets[1000].received_payloads <= 33, "{}", world.targets[1000].received_payloads);
}

fn udp_name(udp: UdpId) -> Vec<u8> {
    format!("{udp:?}").into_bytes()
}

#[test]
fn a_server_that_is_lost_takes_its_flows_along_and_new_ones_follow() {
    let (mut world, client) = world(TunnelMode::RelaysOnly, &[(50, 10 * MS)]);
    let udp = open(&mut world, client, 1);
    world.run(100 * MS);
    world.restart_server();
    world.targets.clear();
    send(&mut world, client, udp, b"lost");
    world.run(10 * S);
    assert_eq!(news(&mut world, client), [(udp, UdpFlowEvent::Opened), (udp, UdpFlowEvent::Closed)]);
    let udp = open(&mut world, client, 1);
    send(&mut world, client, udp, b"again");
    world.run(S);
    assert_eq!(world.machines[client].payloads, [(udp, b"again".to_vec())]);
}

#[test]
fn an_early_request_is_notified_when_to_retry() {
    let mut world = World::new();
    world.mode = TunnelMode::RelaysOnly;
    let client = world.add(TOKEN, Scheduler::Auto, &[(50, 10 * MS)]);
    assert_eq!(world.machines[client].client.udp_open(world.now, &target(1)), None);
    assert!(!world.machines[client].client.udp_possible());
    world.up(client);
    assert_eq!(world.machines[client].streams.pop_front(), Some(ClientEvent::RelaysAllowed));
    open(&mut world, client, 1);
}
