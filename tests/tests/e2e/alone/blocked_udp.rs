//! Networks that block UDP: how soon the tunnel is up, and transfers over links without a rate limit.

use std::time::Duration;

use mpvpn_tests::{
    iperf::IperfServer,
    machine_share::{MachineShare, Share},
    testbed::{Direction, Host, TUNNEL, Testbed},
};

use crate::blocked_udp::{LINKS, block};

/// Bar: time until the tunnel is up where UDP is blocked from the start.
const MAX_TIME_UNTIL_UP: Duration = Duration::from_secs(3);

#[test]
fn with_udp_blocked_from_the_start_the_tunnel_is_up_within_three_seconds() {
    let _share = MachineShare::take(Share::Whole);
    let testbed = Testbed::new(&LINKS);
    block(&testbed, &[1, 2]);
    let _server = testbed.server(&[]);
    let took = testbed.start_client(&[]).wait_until_up_within(2 * MAX_TIME_UNTIL_UP);
    println!("up after {took:?}");
    assert!(took < MAX_TIME_UNTIL_UP, "up after {took:?}");
}

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
