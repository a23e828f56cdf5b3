//! Networks that let no UDP through: links go on inside TCP, and come back.

use std::{
    thread,
    time::{Duration, SystemTime},
};

use mpvpn_tests::{
    machine_share::{MachineShare, Share},
    ping::{Ping, reaches},
    stage::{Place, SERVER, Stage, TUNNEL, paths_of},
    tcp::{Sink, Way},
    wall::{Travel, Wall, until_travels},
};
use serde_json::Value;

const SOON: Duration = Duration::from_secs(15);
/// Links that need little of the machine: how they travel is what matters here.
const LINKS: [&str; 2] = ["20mbit,12.5ms,queue=60ms"; 2];
/// What the tunnel is held to.
const BACK: Duration = Duration::from_secs(30);

/// No UDP gets through on these links.
fn block(stage: &Stage, links: &[usize]) {
    Wall { no_udp: links, ..Wall::NONE }.raise(stage);
}

fn unblock(stage: &Stage) {
    Wall::NONE.raise(stage);
}

/// The megabits of each second of a transfer.
fn megabits(seconds: &[f64]) -> Vec<f64> {
    seconds.iter().map(|bits| (bits / 1e5).round() / 10.0).collect()
}

#[test]
fn one_link_of_two_goes_inside_tcp_and_both_are_used() {
    let _share = MachineShare::take(Share::Percent(50));
    let stage = Stage::new(&LINKS);
    block(&stage, &[1]);
    let _server = stage.server(&[]);
    let client = stage.client(&[]);
    let status = until_travels(&client, "eth1", Travel::Tcp, SOON);
    until_travels(&client, "eth2", Travel::Quic, SOON);
    let path = paths_of(&status, "default").into_iter().find(|path| path["id"] == "default/eth1/tcp");
    let path = path.unwrap_or_else(|| panic!("no path inside TCP: {status:#}"));
    assert_eq!(path["remote"], SERVER, "{path:#}");
    assert!(path["local"].as_str().is_some_and(|local| local.starts_with("10.101.")), "{path:#}");
    let reason = status["links"][0]["reason"].as_str().expect("a reason");
    assert!(reason.starts_with("UDP gets no answer for "), "{reason}");
    let sink = Sink::start(&stage, Place::Server, 5201);
    let report = sink.tcp(&stage, Place::Client, TUNNEL, 8, Way::Down, 8).finish();
    println!("{:.1} Mbit/s with 8 flows", report.megabits());
    assert!(report.megabits() > 24.0, "{:.1} Mbit/s over 2 × 20", report.megabits());
}

#[test]
fn where_no_udp_gets_through_from_the_start_there_is_a_tunnel_all_the_same() {
    let stage = Stage::new(&LINKS);
    block(&stage, &[1, 2]);
    let server = stage.server(&[]);
    let mut client = stage.start_client(&[]);
    let took = client.wait_up(SOON);
    println!("up after {took:?}");
    assert!(took < Duration::from_secs(3), "up after {took:?}");
    reaches(&stage, Place::Client, TUNNEL);
    for link in ["eth1", "eth2"] {
        until_travels(&client, link, Travel::Tcp, SOON);
    }
    unblock(&stage);
    for link in ["eth1", "eth2"] {
        until_travels(&client, link, Travel::Quic, BACK);
    }
    client.interrupt();
    server.until(Duration::from_secs(5), "the client said good-bye", |status| match &status["clients"] {
        Value::Array(clients) if clients.is_empty() => Ok(()),
        clients => Err(format!("{clients:#}")),
    });
}

#[test]
fn a_block_in_mid_flow_costs_no_connection_and_udp_returns() {
    let _share = MachineShare::take(Share::Percent(50));
    let stage = Stage::new(&["10mbit,12.5ms,queue=60ms"; 2]);
    let _server = stage.server(&[]);
    let client = stage.client(&[]);
    for link in ["eth1", "eth2"] {
        until_travels(&client, link, Travel::Quic, SOON);
    }
    let sink = Sink::start(&stage, Place::Server, 5201);
    let load = sink.tcp(&stage, Place::Client, TUNNEL, 1, Way::Down, 40);
    thread::sleep(Duration::from_secs(5));
    block(&stage, &[1, 2]);
    for link in ["eth1", "eth2"] {
        until_travels(&client, link, Travel::Tcp, SOON);
    }
    thread::sleep(Duration::from_secs(5));
    unblock(&stage);
    for link in ["eth1", "eth2"] {
        until_travels(&client, link, Travel::Quic, BACK);
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
    let stage = Stage::new(&LINKS);
    let _server = stage.server(&[]);
    let client = stage.client(&[]);
    for link in ["eth1", "eth2"] {
        until_travels(&client, link, Travel::Quic, SOON);
    }
    let from = SystemTime::now();
    let pings = Ping::dense(&stage, Place::Client, TUNNEL, 40);
    thread::sleep(Duration::from_secs(3));
    block(&stage, &[1, 2]);
    thread::sleep(Duration::from_secs(5));
    unblock(&stage);
    for link in ["eth1", "eth2"] {
        until_travels(&client, link, Travel::Quic, BACK);
    }
    let to = SystemTime::now();
    let gap = pings.stop().longest_gap(from, to);
    println!("silence of {gap:?} at most");
    assert!(gap < Duration::from_secs(2), "silence of {gap:?}");
}

#[test]
fn a_link_may_be_told_to_use_one_way_only() {
    let stage = Stage::new(&LINKS);
    let _server = stage.server(&[]);
    let file = "[[link]]\nname = \"eth2\"\ntransport = \"quic\"\n";
    std::fs::write(stage.dir().join("client.toml"), file).expect("a file");
    let client = stage.client(&["--config", "client.toml", "--transport", "tcp"]);
    let status = until_travels(&client, "eth1", Travel::Tcp, SOON);
    until_travels(&client, "eth2", Travel::Quic, SOON);
    let over_udp = |status: &Value| {
        let all = paths_of(status, "default").into_iter().filter(|path| path["link"] == "eth1");
        all.filter(|path| path["transport"] == "quic").count()
    };
    assert_eq!(over_udp(&status), 0, "{status:#}");
    assert_eq!(status["links"][0]["reason"], "TCP as configured");
    client.until(SOON, "pings have their connection on both links", |status| {
        let active = paths_of(status, "critical").iter().filter(|path| path["state"] == "active").count();
        if active == 2 { Ok(()) } else { Err(format!("{active} paths are active")) }
    });
    block(&stage, &[2]);
    reaches(&stage, Place::Client, TUNNEL);
    let from = SystemTime::now();
    let pings = Ping::dense(&stage, Place::Client, TUNNEL, 5);
    client.until(SOON, "the block is noticed", |status| {
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
    let stage = Stage::new(&LINKS);
    let _server = stage.server(&[]);
    let client = stage.client(&["--transport", "tcp"]);
    for link in ["eth1", "eth2"] {
        until_travels(&client, link, Travel::Tcp, SOON);
    }
    let sink = Sink::start(&stage, Place::Server, 5201);
    let load = sink.tcp(&stage, Place::Client, TUNNEL, 1, Way::Down, 20);
    thread::sleep(Duration::from_secs(4));
    stage.link(1).cut();
    client.until_path("eth1", "down", SOON);
    thread::sleep(Duration::from_secs(3));
    stage.link(1).restore();
    until_travels(&client, "eth1", Travel::Tcp, Duration::from_secs(5));
    let report = load.finish();
    let seconds = megabits(&report.seconds);
    println!("{seconds:?} Mbit/s");
    let silent = report.seconds.iter().filter(|bits| **bits < 1e6).count();
    assert!(report.seconds.len() >= 20 && silent <= 2, "{seconds:?}");
}
