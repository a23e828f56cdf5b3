//! A server that carries no packets: every flow of the client's machine travels by itself.

use std::{thread, time::Duration};

use mpvpn_tests::{
    home::Home,
    http::{Download, MB, Site},
    machine_share::{MachineShare, Share},
    stage::{Direction, Family, Peer, Place, Stage, inet, inet4},
    tcp::{Sink, Way},
};

const LIMIT: Duration = Duration::from_secs(60);
const SOON: Duration = Duration::from_secs(10);

/// The server of an ordinary user, without credentials.
fn server(stage: &Stage, home: &Home) -> Peer {
    let words = ["server", "--auth", "none"];
    stage.start_as_user(Place::Server, home, &words, &home.file("server-server.sock")).up()
}

#[test]
fn tcp_and_udp_of_a_whole_machine_travel_without_packets() {
    let _share = MachineShare::take(Share::Percent(50));
    let stage = Stage::two_slower_links();
    let home = Home::new(&stage);
    let server = server(&stage, &home);
    let client = stage.client(&[]);
    for link in ["eth1", "eth2"] {
        client.until_path(link, "active", SOON);
    }
    assert!(client.address(Family::V4).starts_with("192.0.0.2"), "{:#}", client.status());
    assert!(client.log().contains("carries no packets"), "{}", client.log());

    let sink = Sink::start(&stage, Place::Inet, 5201);
    let report = sink.tcp(&stage, Place::Client, &inet4(), 4, Way::Down, 3).finish();
    assert!(report.megabits() > 60.0, "{:.0} Mbit/s of TCP over 2 × 40", report.megabits());
    for way in [Way::Up, Way::Down] {
        let report = sink.udp(&stage, Place::Client, &inet4(), 20, way, 2).finish();
        assert!(report.megabits() > 19.0 && report.loss_pct < 1.0, "{way:?}: {report:?}");
    }
    let status = server.status();
    assert!(status["flows"]["udp"].as_u64() > Some(0), "{status:#}");
}

#[test]
fn downloads_travel_without_packets_also_across_a_silent_cut() {
    let _share = MachineShare::take(Share::Percent(50));
    let stage = Stage::two_slower_links();
    let home = Home::new(&stage);
    let _server = server(&stage, &home);
    let client = stage.client(&[]);
    for link in ["eth1", "eth2"] {
        client.until_path(link, "active", SOON);
    }
    let site = Site::start(&stage, Place::Inet);
    Download::start(&stage, &site, &inet(Family::V6), 10 * MB, LIMIT, &[]).finish();
    let download = Download::start(&stage, &site, &inet4(), 30 * MB, LIMIT, &[]);
    thread::sleep(Duration::from_secs(1));
    stage.link(1).silence(Direction::Both);
    download.finish();
    stage.link(1).heal();
}

#[test]
fn what_cannot_travel_is_refused_at_once() {
    let stage = Stage::two_links();
    let home = Home::new(&stage);
    let _server = server(&stage, &home);
    let _client = stage.client(&["--lane", "stream"]);
    let output = stage.attempt(Place::Client, SOON, &["ping", "-c", "1", "-W", "3", &inet4()]);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(!output.status.success() && said.contains("filtered"), "{said}");
    let output = stage.attempt(
        Place::Client,
        SOON,
        &["curl", "-sS", "--max-time", "8", &format!("http://{}:81/", inet4())],
    );
    assert_eq!(output.status.code(), Some(7), "{}", String::from_utf8_lossy(&output.stderr));
    // Private addresses are near the server, and none of the client's business.
    let output = stage.attempt(Place::Client, SOON, &["python3", "-c", ASKS, "192.168.77.1"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Sends UDP until the kernel says why there is no answer.
const ASKS: &str = "\
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
fn who_wants_packets_is_told_that_there_are_none() {
    let stage = Stage::two_links();
    let home = Home::new(&stage);
    let _server = server(&stage, &home);
    let mut client = stage.start_client(&["--lane", "datagram"]);
    assert_eq!(client.wait(LIMIT).code(), Some(1), "{}", client.log());
    assert!(client.log().contains("no CONNECT-IP"), "{}", client.log());
}
