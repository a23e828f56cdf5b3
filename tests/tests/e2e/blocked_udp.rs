//! Networks that let no UDP through: links go on inside TCP, and come back.

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

const SOON: Duration = Duration::from_secs(15);
/// Links that need little of the machine: how they travel is what matters here.
const LINKS: [&str; 2] = ["20mbit,12.5ms,queue=60ms"; 2];
/// What the tunnel is held to.
const BACK: Duration = Duration::from_secs(30);

/// No UDP gets through on these links.
fn block(testbed: &Testbed, links: &[usize]) {
    Firewall { no_udp: links, ..Firewall::OPEN }.apply(testbed);
}

fn unblock(testbed: &Testbed) {
    Firewall::OPEN.apply(testbed);
}

/// The megabits of each second of a transfer.
fn megabits(seconds: &[f64]) -> Vec<f64> {
    seconds.iter().map(|bits| (bits / 1e5).round() / 10.0).collect()
}

#[test]
fn one_link_of_two_goes_inside_tcp_and_both_are_used() {
    let _share = MachineShare::take(Share::Percent(50));
    let testbed = Testbed::new(&LINKS);
    block(&testbed, &[1]);
    let _server = testbed.server(&[]);
    let client = testbed.client(&[]);
    let status = wait_for_transport(&client, "eth1", Transport::Tcp, SOON);
    wait_for_transport(&client, "eth2", Transport::Quic, SOON);
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
fn where_no_udp_gets_through_from_the_start_there_is_a_tunnel_all_the_same() {
    let testbed = Testbed::new(&LINKS);
    block(&testbed, &[1, 2]);
    let server = testbed.server(&[]);
    let mut client = testbed.start_client(&[]);
    let took = client.wait_until_up_within(SOON);
    println!("up after {took:?}");
    assert!(took < Duration::from_secs(3), "up after {took:?}");
    reaches(&testbed, Host::Client, TUNNEL);
    for link in ["eth1", "eth2"] {
        wait_for_transport(&client, link, Transport::Tcp, SOON);
    }
    unblock(&testbed);
    for link in ["eth1", "eth2"] {
        wait_for_transport(&client, link, Transport::Quic, BACK);
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
fn a_block_in_mid_flow_costs_no_connection_and_udp_returns() {
    let _share = MachineShare::take(Share::Percent(50));
    let testbed = Testbed::new(&["10mbit,12.5ms,queue=60ms"; 2]);
    let _server = testbed.server(&[]);
    let client = testbed.client(&[]);
    for link in ["eth1", "eth2"] {
        wait_for_transport(&client, link, Transport::Quic, SOON);
    }
    let iperf = IperfServer::start(&testbed, Host::Server, 5201);
    let load = iperf.tcp(&testbed, Host::Client, TUNNEL, 1, Direction::Down, 40);
    thread::sleep(Duration::from_secs(5));
    block(&testbed, &[1, 2]);
    for link in ["eth1", "eth2"] {
        wait_for_transport(&client, link, Transport::Tcp, SOON);
    }
    thread::sleep(Duration::from_secs(5));
    unblock(&testbed);
    for link in ["eth1", "eth2"] {
        wait_for_transport(&client, link, Transport::Quic, BACK);
    }
    let report = load.finish();
    let seconds = megabits(&report.seconds);
    println!("{seconds:?} Mbit/s");
    // iperf3 ends when a connection of its does.
    let silent = report.seconds.iter().filter(|bits| **bits < 1e6).count();
    assert!(report.seconds.len() >= 40 && silent <= 4, "{seconds:?}");
    assert_eq!(client.status()["session"]["resumed"], 0, "the connection went on");
}

#[test]
fn a_block_is_silence_for_less_than_two_seconds() {
    let testbed = Testbed::new(&LINKS);
    let _server = testbed.server(&[]);
    let client = testbed.client(&[]);
    for link in ["eth1", "eth2"] {
        wait_for_transport(&client, link, Transport::Quic, SOON);
    }
    let from = SystemTime::now();
    let pings = Ping::dense(&testbed, Host::Client, TUNNEL, 40);
    thread::sleep(Duration::from_secs(3));
    block(&testbed, &[1, 2]);
    thread::sleep(Duration::from_secs(5));
    unblock(&testbed);
    for link in ["eth1", "eth2"] {
        wait_for_transport(&client, link, Transport::Quic, BACK);
    }
    let to = SystemTime::now();
    let gap = pings.stop().longest_gap(from, to);
    println!("silence of {gap:?} at most");
    assert!(gap < Duration::from_secs(2), "silence of {gap:?}");
}

#[test]
fn a_link_may_be_told_to_use_one_way_only() {
    let testbed = Testbed::new(&LINKS);
    let _server = testbed.server(&[]);
    let file = "[[link]]\nname = \"eth2\"\ntransport = \"quic\"\n";
    std::fs::write(testbed.dir().join("client.toml"), file).expect("a file");
    let client = testbed.client(&["--config", "client.toml", "--transport", "tcp"]);
    let status = wait_for_transport(&client, "eth1", Transport::Tcp, SOON);
    wait_for_transport(&client, "eth2", Transport::Quic, SOON);
    let over_udp = |status: &Value| {
        let all = paths_of(status, "default").into_iter().filter(|path| path["link"] == "eth1");
        all.filter(|path| path["transport"] == "quic").count()
    };
    assert_eq!(over_udp(&status), 0, "{status:#}");
    assert_eq!(status["links"][0]["reason"], "TCP as configured");
    client.wait_for_status(SOON, "pings have their connection on both links", |status| {
        let active = paths_of(status, "critical").iter().filter(|path| path["state"] == "active").count();
        if active == 2 { Ok(()) } else { Err(format!("{active} paths are active")) }
    });
    block(&testbed, &[2]);
    reaches(&testbed, Host::Client, TUNNEL);
    let from = SystemTime::now();
    let pings = Ping::dense(&testbed, Host::Client, TUNNEL, 5);
    client.wait_for_status(SOON, "the block is noticed", |status| {
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
fn a_cable_that_is_pulled_for_a_moment_costs_no_connection_inside_tcp() {
    let _share = MachineShare::take(Share::Percent(50));
    let testbed = Testbed::new(&LINKS);
    let _server = testbed.server(&[]);
    let client = testbed.client(&["--transport", "tcp"]);
    for link in ["eth1", "eth2"] {
        wait_for_transport(&client, link, Transport::Tcp, SOON);
    }
    let iperf = IperfServer::start(&testbed, Host::Server, 5201);
    let load = iperf.tcp(&testbed, Host::Client, TUNNEL, 1, Direction::Down, 20);
    thread::sleep(Duration::from_secs(4));
    testbed.link(1).cut();
    client.wait_for_path("eth1", "down", SOON);
    thread::sleep(Duration::from_secs(3));
    testbed.link(1).restore();
    wait_for_transport(&client, "eth1", Transport::Tcp, Duration::from_secs(5));
    let report = load.finish();
    let seconds = megabits(&report.seconds);
    println!("{seconds:?} Mbit/s");
    let silent = report.seconds.iter().filter(|bits| **bits < 1e6).count();
    assert!(report.seconds.len() >= 20 && silent <= 2, "{seconds:?}");
}
