//! The rates of two links add up.

use mpvpn_tests::{
    iperf::IperfServer,
    machine_share::{MachineShare, Share},
    testbed::{Direction, Host, TUNNEL, Testbed, path_of},
};

/// Minimum goodput over two links as a multiple of the rate of one.
pub(crate) const MIN_RATIO_TO_ONE_LINK: f64 = 1.3;

/// Goodput of eight flows over two links, Mbit/s, with these client options. Both links must carry a part of
/// it.
pub(crate) fn measure_rate(testbed: &Testbed, direction: Direction, client: &[&str]) -> f64 {
    let server = testbed.server(&[]);
    let client = testbed.client(client);
    for link in ["eth1", "eth2"] {
        client.wait_for_path(link, "active", std::time::Duration::from_secs(5));
    }
    let iperf = IperfServer::start(testbed, Host::Server, 5201);
    let report = iperf.tcp(testbed, Host::Client, TUNNEL, 8, direction, 4).finish();
    println!("{:.1?} Mbit/s", report.seconds.iter().map(|bits| bits / 1e6).collect::<Vec<_>>());
    let sender =
        if direction == Direction::Up { client.status() } else { server.status()["clients"][0].clone() };
    // The list also has the paths of other classes.
    let paths = sender["paths"].as_array().expect("paths");
    let used: Vec<_> = paths.iter().filter(|path| path["class"] == "default").collect();
    assert_eq!(used.len(), 2, "{sender:#}");
    for path in used {
        let sent = path["tx_bytes"].as_u64().expect("tx_bytes");
        assert!(sent > 5_000_000, "{direction:?}: {} carried only {sent} bytes: {sender:#}", path["id"]);
    }
    report.megabits()
}

#[test]
fn failover_does_not_use_the_second_link_while_the_first_works() {
    let _share = MachineShare::take(Share::Percent(50));
    let testbed = Testbed::two_links();
    let _server = testbed.server(&[]);
    let client = testbed.client(&["--scheduler", "failover"]);
    let iperf = IperfServer::start(&testbed, Host::Server, 5201);
    let before = testbed.interface_bytes(Host::Client, "eth2").1;
    let report = iperf.tcp(&testbed, Host::Client, TUNNEL, 4, Direction::Up, 3).finish();
    let second = testbed.interface_bytes(Host::Client, "eth2").1 - before;
    assert!(report.megabits() > 50.0, "{:.0} Mbit/s over the first link", report.megabits());
    assert!(second < 500_000, "{second} bytes over the link that should wait");
    assert!(path_of(&client.status(), "eth2").is_some(), "the second link has a path all the same");
}
