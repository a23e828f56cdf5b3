//! Garbage at UDP ports and inside connections, while another client's tunnel works.

use std::{
    net::{SocketAddr, UdpSocket},
    thread,
    time::Duration,
};

use mpvpn_tests::{
    hostile,
    iperf::IperfServer,
    machine_share::{MachineShare, Share},
    ping::ping,
    random::Random,
    testbed::{Direction, Host, MpvpnProcess, TUNNEL, Testbed, path_of},
};

/// Number of garbage datagrams per sender.
const GARBAGE_DATAGRAMS: u64 = 10_000;
/// Maximum growth of resident memory by garbage, bytes: buffers of a busy tunnel, and far below the garbage
/// sent.
const MAX_GROWTH_BYTES: u64 = 16 << 20;

fn socket(testbed: &Testbed, host: Host) -> UdpSocket {
    let bound = testbed.in_namespace(host, || UdpSocket::bind("[::]:0"));
    bound.expect("a free port")
}

/// The first datagrams of a real client, captured by a socket that never answers.
fn real_datagrams(testbed: &Testbed) -> Vec<Vec<u8>> {
    let listener =
        testbed.in_namespace(Host::Server, || UdpSocket::bind("0.0.0.0:5555")).expect("a free port");
    listener.set_read_timeout(Some(Duration::from_secs(5))).expect("a socket takes a time-out");
    let _client = testbed.start_client(&["--server", "192.0.2.1:5555", "--tun-name", "lost0"]);
    let mut buffer = [0; 2048];
    let mut catch = || listener.recv(&mut buffer).ok().map(|length| buffer[..length].to_vec());
    let caught: Vec<Vec<u8>> = (0..4).map_while(|_| catch()).collect();
    assert!(!caught.is_empty(), "the client sent nothing");
    caught
}

/// Sends garbage: one half random bytes, the other half real datagrams that are modified, truncated or
/// repeated.
fn send_garbage(testbed: &Testbed, from: Host, to: SocketAddr, captured: &[Vec<u8>], random: &mut Random) {
    let socket = socket(testbed, from);
    for number in 0..GARBAGE_DATAGRAMS {
        let mut datagram = if number % 2 == 0 { random.noise(1400) } else { random.pick(captured).clone() };
        random.mutate(&mut datagram);
        // A full socket buffer drops some of the garbage.
        let _ = socket.send_to(&datagram, to);
        if number % 50 == 0 {
            thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Checks that the process still runs, has not panicked, and has not grown.
pub(crate) fn check_unaffected(process: &mut MpvpnProcess, memory_before: u64) {
    let log = process.log();
    assert!(process.is_running() && !log.contains("panicked"), "{log}");
    let grown = process.memory().saturating_sub(memory_before);
    assert!(grown < MAX_GROWTH_BYTES, "grew by {grown} bytes");
    assert!(log.lines().count() < 500, "{} lines of log", log.lines().count());
}

#[test]
fn garbage_at_the_server_is_ignored() {
    let _share = MachineShare::take(Share::Percent(50));
    let testbed = Testbed::two_links();
    let mut random = Random::new(0x5eed_0001);
    let captured = real_datagrams(&testbed);
    let mut server = testbed.server(&[]);
    let mut client = testbed.client(&[]);
    let (at_server, at_client) = (server.memory(), client.memory());
    let iperf = IperfServer::start(&testbed, Host::Server, 5201);
    let load = iperf.tcp(&testbed, Host::Client, TUNNEL, 2, Direction::Down, 6);
    let port = "[::ffff:192.0.2.1]:4433".parse().expect("an address");
    send_garbage(&testbed, Host::Client, port, &captured, &mut random);
    send_garbage(
        &testbed,
        Host::Inet,
        "[::ffff:198.51.100.1]:4433".parse().expect("an address"),
        &captured,
        &mut random,
    );
    let report = load.finish();
    assert!(report.megabits() > 10.0, "{:.0} Mbit/s for the one that behaves", report.megabits());
    let pings = ping(&testbed, Host::Client, TUNNEL, 20);
    assert_eq!(pings.answers.len(), 20);
    check_unaffected(&mut server, at_server);
    check_unaffected(&mut client, at_client);
    assert_eq!(server.status()["clients"].as_array().map(Vec::len), Some(1));
}

#[test]
fn garbage_at_the_client_is_ignored() {
    let testbed = Testbed::two_links();
    let captured = real_datagrams(&testbed);
    let _server = testbed.server(&[]);
    let mut client = testbed.client(&[]);
    let memory = client.memory();
    let status = client.wait_for_path("eth1", "active", Duration::from_secs(5));
    let local: SocketAddr = path_of(&status, "eth1").expect("a path")["local"]
        .as_str()
        .and_then(|text| text.parse().ok())
        .expect("an address with a port");
    let port = format!("[::ffff:{}]:{}", local.ip(), local.port()).parse().expect("an address");
    send_garbage(&testbed, Host::Server, port, &captured, &mut Random::new(0x5eed_0003));
    let pings = ping(&testbed, Host::Client, TUNNEL, 20);
    assert_eq!(pings.answers.len(), 20);
    check_unaffected(&mut client, memory);
}

#[test]
fn the_server_survives_clients_that_send_garbage_in_connections() {
    let _share = MachineShare::take(Share::Percent(50));
    let testbed = Testbed::two_links();
    let mut server = testbed.server(&[]);
    let client = testbed.client(&[]);
    let memory = server.memory();
    let remote = "[::ffff:198.51.100.1]:4433".parse().expect("an address");
    let sent = hostile::client(&testbed, remote, 60, &mut Random::new(0x5eed_0004));
    println!("{sent:?}");
    assert!(sent.connections > 50 && sent.frames > 1000 && sent.datagrams > 1000, "{sent:?}");
    let pings = ping(&testbed, Host::Client, TUNNEL, 20);
    assert_eq!(pings.answers.len(), 20);
    assert_eq!(client.status()["state"], "up");
    check_unaffected(&mut server, memory);
}

#[test]
fn the_client_survives_a_server_that_sends_garbage_in_connections() {
    let testbed = Testbed::two_links();
    let mut client =
        testbed.start_client(&["--server", "192.0.2.1:5556", "--tun-name", "lost0", "--routes", "none"]);
    let sent =
        hostile::server(&testbed, "192.0.2.1:5556", Duration::from_secs(10), &mut Random::new(0x5eed_0005));
    println!("{sent:?}");
    assert!(sent.connections > 1 && sent.frames > 50, "{sent:?}");
    // The client may give up with a reason, but must not panic.
    let log = client.log();
    assert!(!log.contains("panicked") && log.lines().count() < 1000, "{log}");
    if client.is_running() {
        assert!(client.memory() < 64 << 20, "{} bytes", client.memory());
        assert!(client.interrupt().success(), "{}", client.log());
    }
}
