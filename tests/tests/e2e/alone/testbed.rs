//! Rates and delays of the testbed itself, without a tunnel.

use mpvpn_tests::{
    iperf::IperfServer,
    machine_share::{MachineShare, Share},
    ping::ping,
    testbed::{Direction, Host, Testbed},
};

const SERVER: &str = "192.0.2.1";

#[test]
fn links_have_the_rate_and_delay_of_their_description() {
    let _share = MachineShare::take(Share::Whole);
    let testbed = Testbed::two_links();
    let pings = ping(&testbed, Host::Client, SERVER, 10);
    let rtt = pings.median_rtt_ms();
    assert!((25.0..28.0).contains(&rtt), "{rtt} ms over a link of 25 ms");
    let iperf = IperfServer::start(&testbed, Host::Server, 5201);
    for way in [Direction::Up, Direction::Down] {
        let rate = iperf.tcp(&testbed, Host::Client, SERVER, 4, way, 2).finish().megabits();
        assert!((70.0..98.0).contains(&rate), "{way:?}: {rate:.0} Mbit/s over a link of 100");
    }
    // iperf3 answers UDP from the address of the interface, not from the destination of the request.
    let report = iperf.udp(&testbed, Host::Client, "10.101.0.1", 80, Direction::Up, 2).finish();
    assert!(report.loss_pct < 1.0, "{} % of 80 Mbit/s lost on a link of 100", report.loss_pct);
}
