//! A server without CONNECT-IP: the client carries each TCP connection and UDP flow by its own request.

use std::{thread, time::Duration};

use mpvpn_tests::{
    http::{Download, MB, TestPages},
    iperf::IperfServer,
    machine_share::{MachineShare, Share},
    testbed::{Direction, Family, Host, MpvpnProcess, Testbed, inet, inet4},
    user_home::UserHome,
};

/// Limit of a transfer. Longer than on any busy machine; only a failing test takes that long.
const TRANSFER_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a test waits for an expected state. Longer than on any busy machine; only a failing test takes
/// that long.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Starts the server of an unprivileged user, without authentication.
fn server(testbed: &Testbed, home: &UserHome) -> MpvpnProcess {
    let args = ["server", "--auth", "none"];
    testbed.start_as_user(Host::Server, home, &args, &home.file("server-server.sock")).wait_until_up()
}

#[test]
fn tcp_and_udp_of_a_whole_machine_travel_without_packets() {
    let _share = MachineShare::take(Share::Percent(50));
    let testbed = Testbed::two_slow_links();
    let home = UserHome::new(&testbed);
    let server = server(&testbed, &home);
    let client = testbed.client(&[]);
    for link in ["eth1", "eth2"] {
        client.wait_for_path(link, "active", TIMEOUT);
    }
    assert!(client.address(Family::V4).starts_with("192.0.0.2"), "{:#}", client.status());
    assert!(client.log().contains("carries no packets"), "{}", client.log());

    let iperf = IperfServer::start(&testbed, Host::Inet, 5201);
    let report = iperf.tcp(&testbed, Host::Client, &inet4(), 4, Direction::Down, 3).finish();
    assert!(report.megabits() > 60.0, "{:.0} Mbit/s of TCP over 2 × 40", report.megabits());
    for direction in [Direction::Up, Direction::Down] {
        let report = iperf.udp(&testbed, Host::Client, &inet4(), 20, direction, 2).finish();
        assert!(report.megabits() > 19.0 && report.loss_pct < 1.0, "{direction:?}: {report:?}");
    }
    let status = server.status();
    assert!(status["flows"]["udp"].as_u64() > Some(0), "{status:#}");
}

#[test]
fn downloads_travel_without_packets_also_across_a_silent_cut() {
    let _share = MachineShare::take(Share::Percent(50));
    let testbed = Testbed::two_slow_links();
    let home = UserHome::new(&testbed);
    let _server = server(&testbed, &home);
    let client = testbed.client(&[]);
    for link in ["eth1", "eth2"] {
        client.wait_for_path(link, "active", TIMEOUT);
    }
    let site = TestPages::start(&testbed, Host::Inet);
    Download::start(&testbed, &site, &inet(Family::V6), 10 * MB, TRANSFER_TIMEOUT, &[]).finish();
    let download = Download::start(&testbed, &site, &inet4(), 30 * MB, TRANSFER_TIMEOUT, &[]);
    thread::sleep(Duration::from_secs(1));
    testbed.link(1).silence(Direction::Both);
    download.finish();
    testbed.link(1).end_silence();
}

#[test]
fn traffic_that_cannot_be_carried_is_refused_at_once() {
    let testbed = Testbed::two_links();
    let home = UserHome::new(&testbed);
    let _server = server(&testbed, &home);
    let _client = testbed.client(&["--lane", "stream"]);
    let output = testbed.output_of(Host::Client, TIMEOUT, &["ping", "-c", "1", "-W", "3", &inet4()]);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(!output.status.success() && said.contains("filtered"), "{said}");
    let output = testbed.output_of(
        Host::Client,
        TIMEOUT,
        &["curl", "-sS", "--max-time", "8", &format!("http://{}:81/", inet4())],
    );
    assert_eq!(output.status.code(), Some(7), "{}", String::from_utf8_lossy(&output.stderr));
    // The server refuses private addresses, which are in its own network.
    let output =
        testbed.output_of(Host::Client, TIMEOUT, &["python3", "-c", SEND_UDP_SCRIPT, "192.168.77.1"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// A Python script that sends UDP until the kernel reports an ICMP error.
const SEND_UDP_SCRIPT: &str = "\
import socket, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(socket.SOL_IP, 11, 1)
s.connect((sys.argv[1], 9))
s.settimeout(0.5)
for _ in range(10):
    try:
        s.send(b'hello')
        s.recv(9)
    except TimeoutError:
        continue
    except OSError as error:
        print(error, file=sys.stderr)
        sys.exit(0 if error.errno in (101, 111, 113) else 1)
sys.exit(2)
";

#[test]
fn a_client_in_datagram_mode_fails_with_the_reason() {
    let testbed = Testbed::two_links();
    let home = UserHome::new(&testbed);
    let _server = server(&testbed, &home);
    let mut client = testbed.start_client(&["--lane", "datagram"]);
    assert_eq!(client.wait(TRANSFER_TIMEOUT).code(), Some(1), "{}", client.log());
    assert!(client.log().contains("no CONNECT-IP"), "{}", client.log());
}
