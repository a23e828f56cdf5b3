//! A link dies under load, and comes back.

use std::{
    thread,
    time::{Duration, Instant, SystemTime},
};

use mpvpn_tests::{
    cut::{LinkFailure, Timeline, cut_under_load},
    eventually,
    iperf::IperfServer,
    machine_share::{MachineShare, Share},
    ping::{Ping, ping},
    testbed::{Direction, Family, Host, TUNNEL, Testbed},
};
use serde_json::Value;

// Twice what is promised, and what `./dev bench cut` measures: machines that run tests are busy.

/// The longest silence when the kernel tells that the link has gone.
const CARRIER_GAP: Duration = Duration::from_millis(200);
/// The longest silence when packets just vanish.
const SILENT_GAP: Duration = Duration::from_millis(600);
/// How soon traffic uses a link again that has come back.
const BACK: Duration = Duration::from_secs(4);

/// A machine that stands still for a moment would fail it, so it has two chances.
fn hardly_noticed(failure: LinkFailure, direction: Direction, longest: Duration) {
    let complaints: Vec<_> = (0..2).map_while(|_| complaint(failure, direction, longest)).collect();
    assert!(complaints.len() < 2, "{complaints:#?}");
}

fn complaint(failure: LinkFailure, direction: Direction, longest: Duration) -> Option<String> {
    let _share = MachineShare::take(Share::Percent(50));
    let testbed = Testbed::two_slow_links();
    let _server = testbed.server(&[]);
    let client = testbed.client(&[]);
    let outcome = cut_under_load(&testbed, &client, failure, direction, Timeline::SHORT);
    println!("{failure:?} {direction:?}: {outcome:?}");
    let silent = outcome.load.seconds.iter().filter(|rate| **rate < 1e6).count();
    let is_fine = outcome.longest_gap <= longest && outcome.recovery_time <= BACK && silent <= 1;
    (!is_fine).then(|| {
        testbed.keep_logs();
        format!(
            "{:?} without an answer, used again after {:?}, {silent} seconds without traffic: {:?}",
            outcome.longest_gap, outcome.recovery_time, outcome.load.seconds
        )
    })
}

#[test]
fn carrier_loss_is_hardly_noticed_by_uploads() {
    hardly_noticed(LinkFailure::Carrier, Direction::Up, CARRIER_GAP);
}

#[test]
fn carrier_loss_is_hardly_noticed_by_downloads() {
    hardly_noticed(LinkFailure::Carrier, Direction::Down, CARRIER_GAP);
}

#[test]
fn a_link_that_falls_silent_is_left_by_uploads() {
    hardly_noticed(LinkFailure::Silent(Direction::Both), Direction::Up, SILENT_GAP);
}

#[test]
fn a_link_that_falls_silent_is_left_by_downloads() {
    hardly_noticed(LinkFailure::Silent(Direction::Both), Direction::Down, SILENT_GAP);
}

#[test]
fn a_link_that_no_longer_sends_is_left() {
    hardly_noticed(LinkFailure::Silent(Direction::Up), Direction::Up, SILENT_GAP);
}

#[test]
fn a_link_that_no_longer_receives_is_left() {
    hardly_noticed(LinkFailure::Silent(Direction::Down), Direction::Down, SILENT_GAP);
}

#[test]
fn a_link_that_is_unplugged_again_and_again_is_used_over_udp_each_time() {
    let _share = MachineShare::take(Share::Percent(50));
    let testbed = Testbed::two_slow_links();
    let _server = testbed.server(&[]);
    let client = testbed.client(&[]);
    client.wait_for_path("eth1", "active", Duration::from_secs(5));
    let iperf = IperfServer::start(&testbed, Host::Server, 5201);
    let _load = iperf.tcp(&testbed, Host::Client, TUNNEL, 2, Direction::Up, 12);
    let pings = Ping::dense(&testbed, Host::Client, TUNNEL, 12);
    thread::sleep(Duration::from_secs(1));
    let began = SystemTime::now();
    for round in 0..3 {
        // The kernel asks for the router every second, and has just done so.
        testbed.link(1).cut();
        thread::sleep(Duration::from_millis(1100));
        testbed.link(1).restore();
        let recovery_time = Instant::now();
        client.wait_for_path("eth1", "active", Duration::from_secs(4));
        let took = recovery_time.elapsed();
        assert!(took <= Duration::from_millis(700), "round {round}: used again after {took:?}");
        thread::sleep(Duration::from_millis(1600));
        let status = client.status();
        let over_tcp = |path: &&Value| path["transport"] != "quic";
        let all = status["paths"].as_array().expect("paths is a list");
        assert_eq!(all.iter().find(over_tcp), None, "round {round}");
    }
    let ended = SystemTime::now();
    let longest = pings.stop().longest_gap(began, ended);
    assert!(longest <= CARRIER_GAP, "{longest:?} without an answer");
}

#[test]
fn losing_every_link_for_a_while_ends_nothing() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&[]);
    let client = testbed.client(&[]);
    let address = client.address(Family::V4);
    testbed.link(1).cut();
    testbed.link(2).cut();
    thread::sleep(Duration::from_secs(8));
    testbed.link(1).restore();
    testbed.link(2).restore();
    eventually(Duration::from_secs(10), "the tunnel is back", || {
        let pings = ping(&testbed, Host::Client, TUNNEL, 3);
        if pings.answers.is_empty() { Err("no answer".to_owned()) } else { Ok(()) }
    });
    assert_eq!(client.address(Family::V4), address, "the same address as before");
}
