use super::*;

fn udp_target() -> UdpSocket {
    let target = UdpSocket::bind("127.0.0.1:0").unwrap();
    target.set_read_timeout(Some(LONG)).unwrap();
    target
}

#[test]
fn payloads_go_to_the_target_and_only_its_own_come_back() {
    let mut world = World::new();
    world.resolve();
    let target = udp_target();
    let port = target.local_addr().unwrap().port();
    // The name is not cached yet, so the payloads wait.
    flow(&mut world, 1, &format!("localhost:{port}"), &[b"first", b""]);
    world.until("a flow", |world| world.relays.stream(1).is_open);
    let mut buffer = [0; 2000];
    let (length, from) = target.recv_from(&mut buffer).unwrap();
    assert_eq!(&buffer[..length], b"first");
    assert_eq!(target.recv_from(&mut buffer).unwrap(), (0, from));
    udp_target().send_to(b"not the target", from).unwrap();
    for n in 0..60_u8 {
        target.send_to(&[n; 1200], from).unwrap();
    }
    target.send_to(b"", from).unwrap();
    world.until("payloads", |world| world.relays.stream(1).payloads.len() > 60);
    let got = &world.relays.stream(1).payloads;
    assert!(got[60].is_empty());
    assert!(
        got[..60].iter().zip(0..).all(|(payload, n)| *payload == [n; 1200]),
        "other payloads, or another order"
    );
    assert_eq!(
        (world.egress.open_udp_flows, world.egress.open_connections, world.budget.in_use()),
        (1, 0, 1)
    );
    world.egress.on_client_gone(1);
    assert_eq!(world.egress.open_udp_flows, 0);
    world.is_empty();
}

#[test]
fn a_port_where_nobody_listens_ends_no_flow() {
    let mut world = World::new();
    let target = udp_target();
    let to = target.local_addr().unwrap();
    drop(target);
    flow(&mut world, 1, &to.to_string(), &[]);
    for _ in 0..5 {
        let now = world.now();
        world.egress.send_payload(now, 1, b"anybody?");
        world.turn();
    }
    assert!(world.relays.stream(1).is_open && !world.relays.stream(1).is_aborted);
    let target = UdpSocket::bind(to).unwrap();
    target.set_read_timeout(Some(LONG)).unwrap();
    let now = world.now();
    world.egress.send_payload(now, 1, b"now?");
    assert_eq!(target.recv(&mut [0; 10]).unwrap(), 4, "the error was about an earlier payload");
}

#[test]
fn a_flow_of_udp_ends_when_it_is_silent_for_long() {
    let mut world = World::new();
    let target = udp_target();
    flow(&mut world, 1, &target.local_addr().unwrap().to_string(), &[]);
    for _ in 0..3 {
        world.skipped += Duration::from_secs(150);
        world.turn();
        let now = world.now();
        world.egress.send_payload(now, 1, b"still here");
    }
    assert!(!world.relays.stream(1).is_aborted);
    world.skipped += Duration::from_secs(181);
    world.turn();
    assert!(world.relays.stream(1).is_aborted);
    world.is_empty();
}

#[test]
fn udp_leads_nowhere_that_tcp_may_not_and_counts_like_it() {
    let mut world = World::with(vec![], Limiter::new(9, 9));
    for to in ["127.0.0.1:53", "10.0.0.1:53", "10.9.0.2:53", "[::ffff:192.168.0.1]:53", "203.0.113.7:53"] {
        flow(&mut world, 1, to, &[b"no"]);
        assert_eq!(world.failure(1).0, ProxyError::Prohibited, "{to}");
    }
    let mut world = World::with(vec![], Limiter::new(9, 0));
    flow(&mut world, 1, "198.51.100.1:53", &[]);
    assert_eq!(world.failure(1).0, ProxyError::Busy);
}
