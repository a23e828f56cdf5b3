//! Networks that block UDP: links switch to TCP, and return to UDP when it is unblocked.

use std::{
    thread,
    time::{Duration, SystemTime},
};

use mpvpn_tests::{
    firewall::{Firewall, Transport, wait_for_transport},
    iperf::IperfServer,
    machine_share::{MachineShare, Share},
    ping::{Ping, reaches},
    testbed::{Direction, Host, SERVER, TUNNEL, Testbed, paths_of},
};
use serde_json::Value;

/// How long a test waits for an expected state. Longer than on any busy machine; only a failing test takes
/// that long.
const TIMEOUT: Duration = Duration::from_secs(15);
/// Slow links, which need little processor time: these tests are about the transport.
pub(crate) const LINKS: [&str; 2] = ["20mbit,12.5ms,queue=60ms"; 2];
/// Bar: time until a link returns to UDP.
const RETURN_TIMEOUT: Duration = Duration::from_secs(30);

/// Blocks UDP on these links.
pub(crate) fn block(testbed: &Testbed, links: &[usize]) {
    Firewall { no_udp: links, ..Firewall::OPEN }.apply(testbed);
}

fn unblock(testbed: &Testbed) {
    Firewall::OPEN.apply(testbed);
}

/// Mbit/s in each second of a transfer.
fn mbit_per_second(seconds: &[f64]) -> Vec<f64> {
    seconds.iter().map(|bits| (bits / 1e5).round() / 10.0).collect()
}

#[test]
fn with_udp_blocked_on_one_link_of_two_both_are_used() {
    let _share = MachineShare::take(Share::Percent(50));
    let testbed = Testbed::new(&LINKS);
    block(&testbed, &[1]);
    let _server = testbed.server(&[]);
    let client = testbed.client(&[]);
    let status = wait_for_transport(&client, "eth1", Transport::Tcp, TIMEOUT);
    wait_for_transport(&client, "eth2", Transport::Quic, TIMEOUT);
    let path = paths_of(&status, "default").into_iter().find(|path| path["id"] == "default/eth1/tcp");
    let path = path.unwrap_or_else(|| panic!("no path inside TCP: {status:#}"));
    assert_eq!(path["remote"], SERVER, "{path:#}");
    assert!(path["local"].as_str().is_some_and(|local| local.starts_with("10.101.")), "{path:#}");
    let reason = status["links"][0]["reason"].as_str().expect("a reason");
    assert!(reason.starts_with("UDP gets no answer for "), "{reason}");
    let iperf = IperfServer::start(&testbed, Host::Server, 5201);
    let report = iperf.tcp(&testbed, Host::Client, TUNNEL, 8, Direction::Down, 8).finish();
    println!("{:.1} Mbit/s with 8 flows", report.megabits());
    assert!(report.megabits() > 24.0, "{:.1} Mbit/s over 2 × 20", report.megabits());
}

#[test]
fn with_udp_blocked_from_the_start_the_tunnel_comes_up_inside_tcp() {
    let testbed = Testbed::new(&LINKS);
    block(&testbed, &[1, 2]);
    let server = testbed.server(&[]);
    let mut client = testbed.start_client(&[]);
    client.wait_until_up_within(TIMEOUT);
    reaches(&testbed, Host::Client, TUNNEL);
    for link in ["eth1", "eth2"] {
        wait_for_transport(&client, link, Transport::Tcp, TIMEOUT);
    }
    // The server names the client's end of each TCP connection, not its own socket.
    let socket = server.socket().to_str().expect("an ASCII path").to_owned();
    let shown = testbed.mpvpn(Host::Server, &["status", "--paths", "--api-socket", &socket]);
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    let is_named = |link: &str| shown.lines().any(|line| line.contains(link) && line.ends_with(" over TCP"));
    assert!(is_named(" 10.101.") && is_named(" 10.102.") && !shown.contains("127.0.0.1"), "{shown}");
    unblock(&testbed);
    for link in ["eth1", "eth2"] {
        wait_for_transport(&client, link, Transport::Quic, RETURN_TIMEOUT);
    }
    client.interrupt();
    server.wait_for_status(
        Duration::from_secs(5),
        "the client said good-bye",
        |status| match &status["clients"] {
            Value::Array(clients) if clients.is_empty() => Ok(()),
            clients => Err(format!("{clients:#}")),
        },
    );
}

#[test]
fn blocking_udp_in_mid_flow_ends_no_connection_and_udp_returns() {
    let _share = MachineShare::take(Share::Percent(50));
    let testbed = Testbed::new(&["10mbit,12.5ms,queue=60ms"; 2]);
    let _server = testbed.server(&[]);
    let client = testbed.client(&[]);
    for link in ["eth1", "eth2"] {
        wait_for_transport(&client, link, Transport::Quic, TIMEOUT);
    }
    let iperf = IperfServer::start(&testbed, Host::Server, 5201);
    let load = iperf.tcp(&testbed, Host::Client, TUNNEL, 1, Direction::Down, 40);
    thread::sleep(Duration::from_secs(5));
    block(&testbed, &[1, 2]);
    for link in ["eth1", "eth2"] {
        wait_for_transport(&client, link, Transport::Tcp, TIMEOUT);
    }
    thread::sleep(Duration::from_secs(5));
    unblock(&testbed);
    for link in ["eth1", "eth2"] {
        wait_for_transport(&client, link, Transport::Quic, RETURN_TIMEOUT);
    }
    let report = load.finish();
    let seconds = mbit_per_second(&report.seconds);
    println!("{seconds:?} Mbit/s");
    // iperf3 ends when one of its connections ends.
    let silent = report.seconds.iter().filter(|bits| **bits < 1e6).count();
    assert!(report.seconds.len() >= 40 && silent <= 4, "{seconds:?}");
    assert_eq!(client.status()["session"]["resumed"], 0, "the connection went on");
}

#[test]
fn blocking_udp_interrupts_pings_for_less_than_two_seconds() {
    let testbed = Testbed::new(&LINKS);
    let _server = testbed.server(&[]);
    let client = testbed.client(&[]);
    for link in ["eth1", "eth2"] {
        wait_for_transport(&client, link, Transport::Quic, TIMEOUT);
    }
    let from = SystemTime::now();
    let pings = Ping::dense(&testbed, Host::Client, TUNNEL, 40);
    thread::sleep(Duration::from_secs(3));
    block(&testbed, &[1, 2]);
    thread::sleep(Duration::from_secs(5));
    unblock(&testbed);
    for link in ["eth1", "eth2"] {
        wait_for_transport(&client, link, Transport::Quic, RETURN_TIMEOUT);
    }
    let to = SystemTime::now();
    let gap = pings.stop().longest_gap(from, to);
    println!("silence of {gap:?} at most");
    assert!(gap < Duration::from_secs(2), "silence of {gap:?}");
}

#[test]
fn the_transport_of_a_link_can_be_configured() {
    let testbed = Testbed::new(&LINKS);
    let _server = testbed.server(&[]);
    let file = "[[link]]\nname = \"eth2\"\ntransport = \"quic\"\n[[class]]\nname = \"critical\"\n";
    std::fs::write(testbed.dir().join("client.toml"), file).expect("a file");
    let client = testbed.client(&["--config", "client.toml", "--transport", "tcp"]);
    let status = wait_for_transport(&client, "eth1", Transport::Tcp, TIMEOUT);
    wait_for_transport(&client, "eth2", Transport::Quic, TIMEOUT);
    let over_udp = |status: &Value| {
        let all = paths_of(status, "default").into_iter().filter(|path| path["link"] == "eth1");
        all.filter(|path| path["transport"] == "quic").count()
    };
    assert_eq!(over_udp(&status), 0, "{status:#}");
    assert_eq!(status["links"][0]["reason"], "TCP as configured");
    client.wait_for_status(TIMEOUT, "pings have their connection on both links", |status| {
        testbed.wake_class("critical");
        let active = paths_of(status, "critical").iter().filter(|path| path["state"] == "active").count();
        if active == 2 { Ok(()) } else { Err(format!("{active} paths are active")) }
    });
    block(&testbed, &[2]);
    reaches(&testbed, Host::Client, TUNNEL);
    let from = SystemTime::now();
    let pings = Ping::dense(&testbed, Host::Client, TUNNEL, 5);
    client.wait_for_status(TIMEOUT, "the block is noticed", |status| {
        let down = |path: &&Value| path["link"] == "eth2" && path["state"] == "down";
        paths_of(status, "critical").iter().find(|path| down(path)).map(|_| ()).ok_or("it works".to_owned())
    });
    let gap = pings.finish().longest_gap(from, from + Duration::from_secs(4));
    assert!(gap < Duration::from_secs(1), "silence of {gap:?}");
    let paths = client.status()["paths"].as_array().expect("a list").clone();
    let has_tcp = |path: &Value| path["link"] == "eth2" && path["transport"] != "quic";
    assert!(!paths.iter().any(has_tcp), "{paths:#?}");
}

#[test]
fn a_short_carrier_loss_ends_no_connection_inside_tcp() {
    let _share = MachineShare::take(Share::Percent(50));
    let testbed = Testbed::new(&LINKS);
    let _server = testbed.server(&[]);
    let client = testbed.client(&["--transport", "tcp"]);
    for link in ["eth1", "eth2"] {
        wait_for_transport(&client, link, Transport::Tcp, TIMEOUT);
    }
    let iperf = IperfServer::start(&testbed, Host::Server, 5201);
    let load = iperf.tcp(&testbed, Host::Client, TUNNEL, 1, Direction::Down, 20);
    thread::sleep(Duration::from_secs(4));
    testbed.link(1).cut();
    client.wait_for_path("eth1", "down", TIMEOUT);
    thread::sleep(Duration::from_secs(3));
    testbed.link(1).restore();
    wait_for_transport(&client, "eth1", Transport::Tcp, Duration::from_secs(5));
    let report = load.finish();
    let seconds = mbit_per_second(&report.seconds);
    println!("{seconds:?} Mbit/s");
    let silent = report.seconds.iter().filter(|bits| **bits < 1e6).count();
    assert!(report.seconds.len() >= 20 && silent <= 2, "{seconds:?}");
}
