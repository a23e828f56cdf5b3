//! Several clients at one server. The second one has a single, unlimited link.

use std::time::Duration;

use mpvpn_tests::{
    machine_share::{MachineShare, Share},
    ping::{ping, reaches},
    stage::{Direction, Family, Peer, Place, SERVER, Stage, TUNNEL},
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
    let _share = MachineShare::take(Share::Percent(100));
    let stage = Stage::two_clients();
    let _server = stage.server(&[]);
    let (_first, second) = (stage.client(&[]), second_client(&stage, &[]));
    let sink = Sink::start(&stage, Place::Other, 5201);
    let to = second.address(Family::V4);
    for way in [Way::Up, Way::Down] {
        let report = sink.tcp(&stage, Place::Client, &to, 4, way, 2).finish();
        assert!(report.megabits() > 60.0, "{way:?}: {:.0} Mbit/s from client to client", report.megabits());
    }
}

#[test]
fn one_client_ending_badly_does_not_touch_the_other() {
    let _share = MachineShare::take(Share::Percent(100));
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
fn clients_that_reconnect_keep_their_addresses_whoever_comes_first() {
    let stage = Stage::two_clients();
    let mut server = stage.server(&[]);
    let (first, second) = (stage.client(&[]), second_client(&stage, &[]));
    let before = (first.status()["addresses"].clone(), second.status()["addresses"].clone());
    server.kill();
    // The first client cannot come back at once.
    stage.link(1).silence(Direction::Both);
    stage.link(2).silence(Direction::Both);
    let server = stage.server(&[]);
    let sessions = |wanted: usize| {
        server.until(Duration::from_secs(30), "reconnected", |status| {
            match status["clients"].as_array().map(Vec::len) {
                Some(count) if count == wanted => Ok(()),
                other => Err(format!("{other:?} sessions")),
            }
        });
    };
    sessions(1);
    stage.link(1).heal();
    stage.link(2).heal();
    sessions(2);
    reaches(&stage, Place::Client, TUNNEL);
    reaches(&stage, Place::Other, TUNNEL);
    assert_eq!((first.status()["addresses"].clone(), second.status()["addresses"].clone()), before);
}
