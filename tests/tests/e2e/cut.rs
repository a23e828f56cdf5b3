//! Links fail under load, and recover.

use std::{
    thread,
    time::{Duration, Instant, SystemTime},
};

use mpvpn_tests::{
    cut::{LinkFailure, MAX_P99, Timeline, cut_under_load},
    eventually,
    iperf::IperfServer,
    machine_share::{MachineShare, Share},
    ping::{Ping, ping},
    testbed::{Direction, Family, Host, TUNNEL, Testbed},
};
use serde_json::Value;

/// Number of cuts of a story; the median of as many is that of a hundred within a few milliseconds.
const CUTS: u32 = 9;
/// Maximum gap between ping replies after a carrier loss.
const MAX_CARRIER_GAP: Duration = Duration::from_millis(200);
/// Maximum time until a restored link carries data again.
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(4);

/// Cuts a link under load nine times, and checks the gaps. None of so few may be more than twice as long as
/// one in a hundred (`simulation/cuts.rs`).
fn check_cuts(failure: LinkFailure, direction: Direction) {
    let _share = MachineShare::take(Share::Percent(50));
    let testbed = Testbed::two_slow_links().log_decisions();
    let _server = testbed.server(&[]);
    let client = testbed.client(&[]);
    let outcome = cut_under_load(&testbed, &client, failure, direction, &Timeline::repeated(CUTS));
    println!("{failure:?}, load {direction:?}: gaps of {:.0?} ms", outcome.gaps_ms());
    println!("{:#?}", outcome.cuts);
    let (median, max) = outcome.median_and_max_gap();
    assert!(median <= failure.max_median(), "half of all gaps are longer than {median:?}");
    assert!(max <= 2 * MAX_P99, "a gap of {max:?}");
    let recovery_time = outcome.max_recovery_time();
    assert!(recovery_time <= RECOVERY_TIMEOUT, "used again after {recovery_time:?}");
    let rates = &outcome.rates;
    assert!(rates.iter().all(|rate| *rate >= 1e6), "a second without traffic: {rates:?}");
}

#[test]
fn carrier_loss_is_hardly_noticed_by_uploads() {
    check_cuts(LinkFailure::Carrier, Direction::Up);
}

#[test]
fn carrier_loss_is_hardly_noticed_by_downloads() {
    check_cuts(LinkFailure::Carrier, Direction::Down);
}

#[test]
fn uploads_leave_a_silent_link() {
    check_cuts(LinkFailure::Silent(Direction::Both), Direction::Up);
}

#[test]
fn downloads_leave_a_silent_link() {
    check_cuts(LinkFailure::Silent(Direction::Both), Direction::Down);
}

#[test]
fn uploads_leave_a_link_that_only_loses_sent_packets() {
    check_cuts(LinkFailure::Silent(Direction::Up), Direction::Up);
}

#[test]
fn downloads_leave_a_link_that_only_loses_received_packets() {
    check_cuts(LinkFailure::Silent(Direction::Down), Direction::Down);
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
        // The kernel sends neighbour solicitations every second; this one has just been sent.
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
    let max_gap = pings.stop().longest_gap(began, ended);
    assert!(max_gap <= MAX_CARRIER_GAP, "{max_gap:?} without an answer");
}

#[test]
fn losing_every_link_for_8_s_ends_no_session() {
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
