//! Two clients at one server. The second one has a single link without a rate limit.

use std::time::Duration;

use mpvpn_tests::{
    iperf::IperfServer,
    machine_share::{MachineShare, Share},
    ping::{ping, reaches},
    testbed::{Direction, Family, Host, MpvpnProcess, SERVER, TUNNEL, Testbed},
};

fn second_client(testbed: &Testbed, more: &[&str]) -> MpvpnProcess {
    let args = ["client", "--server", SERVER, "--insecure", "--path", "eth1"];
    testbed.start(Host::Other, &[&args[..], more].concat()).wait_until_up()
}

#[test]
fn two_clients_have_their_own_addresses_and_reach_each_other() {
    let testbed = Testbed::two_clients();
    let server = testbed.server(&[]);
    let (first, second) = (testbed.client(&[]), second_client(&testbed, &[]));
    for family in [Family::V4, Family::V6] {
        let (one, two) = (first.address(family), second.address(family));
        assert_ne!(one, two);
        reaches(&testbed, Host::Client, &two);
        reaches(&testbed, Host::Other, &one);
        reaches(&testbed, Host::Server, &one);
        reaches(&testbed, Host::Server, &two);
    }
    reaches(&testbed, Host::Other, TUNNEL);
    let sessions = server.status()["clients"].as_array().map(Vec::len);
    assert_eq!(sessions, Some(2), "sessions the server knows");
}

#[test]
fn clients_exchange_traffic_both_ways() {
    let _share = MachineShare::take(Share::Percent(100));
    let testbed = Testbed::two_clients();
    let _server = testbed.server(&[]);
    let (_first, second) = (testbed.client(&[]), second_client(&testbed, &[]));
    let iperf = IperfServer::start(&testbed, Host::Other, 5201);
    let to = second.address(Family::V4);
    for direction in [Direction::Up, Direction::Down] {
        let report = iperf.tcp(&testbed, Host::Client, &to, 4, direction, 2).finish();
        assert!(
            report.megabits() > 60.0,
            "{direction:?}: {:.0} Mbit/s from client to client",
            report.megabits()
        );
    }
}

#[test]
fn a_killed_client_does_not_affect_the_other() {
    let _share = MachineShare::take(Share::Percent(100));
    let testbed = Testbed::two_clients();
    let _server = testbed.server(&[]);
    let (_first, mut second) = (testbed.client(&[]), second_client(&testbed, &[]));
    let iperf = IperfServer::start(&testbed, Host::Server, 5201);
    let load = iperf.tcp(&testbed, Host::Client, TUNNEL, 4, Direction::Down, 4);
    second.kill();
    let report = load.finish();
    assert!(report.seconds.iter().all(|rate| *rate > 20e6), "{:?}", report.seconds);
    let pings = ping(&testbed, Host::Client, TUNNEL, 10);
    assert_eq!(pings.answers.len(), 10);
}

#[test]
fn clients_that_reconnect_keep_their_addresses_in_any_order() {
    let testbed = Testbed::two_clients();
    let mut server = testbed.server(&[]);
    let (first, second) = (testbed.client(&[]), second_client(&testbed, &[]));
    let before = (first.status()["addresses"].clone(), second.status()["addresses"].clone());
    server.kill();
    // The first client cannot come back at once.
    testbed.link(1).silence(Direction::Both);
    testbed.link(2).silence(Direction::Both);
    let server = testbed.server(&[]);
    let sessions = |wanted: usize| {
        server.wait_for_status(Duration::from_secs(30), "reconnected", |status| {
            match status["clients"].as_array().map(Vec::len) {
                Some(count) if count == wanted => Ok(()),
                other => Err(format!("{other:?} sessions")),
            }
        });
    };
    sessions(1);
    testbed.link(1).end_silence();
    testbed.link(2).end_silence();
    sessions(2);
    reaches(&testbed, Host::Client, TUNNEL);
    reaches(&testbed, Host::Other, TUNNEL);
    assert_eq!((first.status()["addresses"].clone(), second.status()["addresses"].clone()), before);
}
