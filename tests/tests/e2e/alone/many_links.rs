//! Sixteen links.

use std::time::Duration;

use mpvpn_tests::{
    iperf::IperfServer,
    machine_share::{MachineShare, Share},
    testbed::{Direction, Host, TUNNEL, Testbed, paths_of},
};

#[test]
fn sixteen_links_all_carry_traffic() {
    let _share = MachineShare::take(Share::Whole);
    let testbed = Testbed::new(&["10mbit,5ms"; 16]);
    let _server = testbed.server(&[]);
    // A path inside TCP would come beside the one over UDP where the emulated links get no processor.
    let client = testbed.client(&["--transport", "quic"]);
    for link in 1..=16 {
        client.wait_for_path(&format!("eth{link}"), "active", Duration::from_secs(15));
    }
    let iperf = IperfServer::start(&testbed, Host::Server, 5201);
    let report = iperf.tcp(&testbed, Host::Client, TUNNEL, 16, Direction::Up, 4).finish();
    let status = client.status();
    let paths = paths_of(&status, "default");
    assert_eq!(paths.len(), 16);
    for path in paths {
        assert!(path["tx_bytes"].as_u64() > Some(300_000), "hardly used: {path:#}");
    }
    assert!(report.megabits() > 80.0, "{:.0} Mbit/s over sixteen links of 10", report.megabits());
}
