//! TCP connections on streams use all links.

use std::time::Duration;

use mpvpn_tests::{
    iperf::IperfServer,
    machine_share::{MachineShare, Share},
    testbed::{Direction, Host, TUNNEL, Testbed},
};

#[test]
fn one_connection_fills_both_links_in_both_directions() {
    let _share = MachineShare::take(Share::Whole);
    let testbed = Testbed::new(&["30mbit,10ms", "20mbit,20ms"]);
    let _server = testbed.server(&[]);
    let client = testbed.client(&["--lane", "stream"]);
    for link in ["eth1", "eth2"] {
        client.wait_for_path(link, "active", Duration::from_secs(5));
    }
    let iperf = IperfServer::start(&testbed, Host::Server, 5201);
    for direction in [Direction::Up, Direction::Down] {
        let report = iperf.tcp(&testbed, Host::Client, TUNNEL, 1, direction, 6).finish();
        let last = &report.seconds[2..];
        let rate = last.iter().sum::<f64>() / last.len() as f64 / 1e6;
        assert!(rate > 44.0, "{direction:?}: {rate:.1} of 50 Mbit/s");
    }
}
