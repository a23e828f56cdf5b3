//! A client that misuses every extension, beside one whose throughput is measured.

use std::time::Duration;

use mpvpn_tests::{
    hostile::{self, SentCounts},
    iperf::IperfServer,
    machine_share::{MachineShare, Share},
    ping::Ping,
    testbed::{Direction, Host, TUNNEL, Testbed},
};

use crate::hostile::check_unaffected;

#[test]
fn a_client_that_misuses_every_extension_leaves_the_others_alone() {
    let _share = MachineShare::take(Share::Whole);
    let testbed = Testbed::two_slow_links();
    let mut server = testbed.server(&[]);
    let _client = testbed.client(&[]);
    let iperf = IperfServer::start(&testbed, Host::Server, 5201);
    let measure = |meanwhile: &dyn Fn() -> SentCounts| {
        let pings = Ping::dense(&testbed, Host::Client, TUNNEL, 4);
        let load = iperf.tcp(&testbed, Host::Client, TUNNEL, 2, Direction::Up, 4);
        let sent = meanwhile();
        (load.finish().megabits(), pings.finish().median_rtt_ms(), sent)
    };
    let (usual, usual_ping, _) = measure(&SentCounts::default);
    let memory = server.memory();
    let remote = "[::ffff:198.51.100.1]:4433".parse().expect("an address");
    let (megabits, ping_ms, sent) = measure(&|| hostile::misuse(&testbed, remote, Duration::from_secs(5)));
    println!("{sent:?}, {megabits:.1} of {usual:.1} Mbit/s, ping {ping_ms:.1} of {usual_ping:.1} ms");
    assert!(sent.datagrams > 10_000 && sent.frames > 20, "{sent:?}");
    assert!(megabits > 0.8 * usual, "{megabits:.1} of {usual:.1} Mbit/s");
    assert!(ping_ms < usual_ping + 30.0, "{ping_ms:.1} instead of {usual_ping:.1} ms");
    check_unaffected(&mut server, memory);
}
