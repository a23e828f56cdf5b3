//! Links fail under load, and recover.

use std::{
    thread,
    time::{Duration, Instant, SystemTime},
};

use mpvpn_tests::{
    eventually,
    iperf::IperfServer,
    machine_share::{MachineShare, Share},
    ping::{Ping, ping},
    testbed::{Direction, Family, Host, TUNNEL, Testbed},
};
use serde_json::Value;

/// Maximum gap between ping replies after a carrier loss.
const MAX_CARRIER_GAP: Duration = Duration::from_millis(200);

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
