//! Several clients at one server. The second one has a single, unlimited link.

use std::time::Duration;

use mpvpn_tests::{
    ping::{ping, reaches},
    stage::{Family, Peer, Place, SERVER, Stage, TUNNEL},
    tcp::{Sink, Way},
};

fn second_client(stage: &Stage, more: &[&str]) -> Peer {
    let words = ["client", "--server", SERVER, "--insecure", "--path", "eth1"];
    stage.start(Place::Other, &[&words[..], more].concat()).up()
}

#[test]
fn two_clients_have_their_own_addresses_and_reach_each_other() {
    let stage = Stage::two_clients();
    let server = stage.server(&[]);
    let (first, second) = (stage.client(&[]), second_client(&stage, &[]));
    for family in [Family::V4, Family::V6] {
        let (one, two) = (first.address(family), second.address(family));
        assert_ne!(one, two);
        reaches(&stage, Place::Client, &two);
        reaches(&stage, Place::Other, &one);
        reaches(&stage, Place::Server, &one);
        reaches(&stage, Place::Server, &two);
    }
    reaches(&stage, Place::Other, TUNNEL);
    let sessions = server.status()["clients"].as_array().map(Vec::len);
    assert_eq!(sessions, Some(2), "sessions the server knows");
}

#[test]
fn clients_exchange_traffic_both_ways() {
    let stage = Stage::two_clients();
    let _server = stage.server(&[]);
    let (_first, second) = (stage.client(&[]), second_client(&stage, &[]));
    let sink = Sink::start(&stage, Place::Other, 5201);
    let to = second.address(Family::V4);
    for way in [Way::Up, Way::Down] {
        let report = sink.tcp(&stage, Place::Client, &to, 4, way, 3).finish();
        assert!(report.megabits() > 60.0, "{way:?}: {:.0} Mbit/s from client to client", report.megabits());
    }
}

#[test]
fn one_client_ending_badly_does_not_touch_the_other() {
    let stage = Stage::two_clients();
    let _server = stage.server(&[]);
    let (_first, mut second) = (stage.client(&[]), second_client(&stage, &[]));
    let sink = Sink::start(&stage, Place::Server, 5201);
    let load = sink.tcp(&stage, Place::Client, TUNNEL, 4, Way::Down, 4);
    second.kill();
    let report = load.finish();
    assert!(report.seconds.iter().all(|rate| *rate > 20e6), "{:?}", report.seconds);
    let pings = ping(&stage, Place::Client, TUNNEL, 10);
    assert_eq!(pings.answers.len(), 10);
}

#[test]
fn a_client_that_comes_back_keeps_its_addresses() {
    let stage = Stage::two_links();
    let server = stage.server(&["--auth", "token", "--state-dir", "server-state"]);
    let token = std::fs::read_to_string(stage.dir().join("server-state/client-token"))
        .expect("a token of the first start");
    let words = ["--token", token.trim()];
    let mut first = stage.client(&words);
    let addresses = first.status()["addresses"].clone();
    assert!(first.interrupt().success());
    server.until(Duration::from_secs(10), "the session ends", |status| {
        let left = status["clients"].as_array().map_or(0, Vec::len);
        if left == 0 { Ok(()) } else { Err(format!("{left} sessions")) }
    });
    let again = stage.client(&words);
    assert_eq!(again.status()["addresses"], addresses);
}
