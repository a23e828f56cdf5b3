//! Networks that block UDP, over links without a rate limit.

use mpvpn_tests::{
    iperf::IperfServer,
    machine_share::{MachineShare, Share},
    testbed::{Direction, Host, TUNNEL, Testbed},
};

#[test]
fn fast_transfers_inside_tcp_end_no_session() {
    let _share = MachineShare::take(Share::Whole);
    let testbed = Testbed::unlimited();
    let _server = testbed.server(&[]);
    let client = testbed.client(&["--transport", "tcp", "--lane", "stream"]);
    let iperf = IperfServer::start(&testbed, Host::Server, 5201);
    for _ in 0..6 {
        for direction in [Direction::Up, Direction::Down] {
            let report = iperf.tcp(&testbed, Host::Client, TUNNEL, 1, direction, 1).finish();
            assert!(report.megabits() > 100.0, "{:.0} Mbit/s", report.megabits());
        }
    }
    assert_eq!(client.status()["session"]["resumed"], 0, "the connection went on");
}
