//! Sixteen links.

use std::time::Duration;

use mpvpn_tests::{
    machine_share::{MachineShare, Share},
    stage::{Place, Stage, TUNNEL, paths_of},
    tcp::{Sink, Way},
};

#[test]
fn sixteen_links_all_carry_traffic() {
    let _share = MachineShare::take(Share::Percent(100));
    let stage = Stage::new(&["10mbit,5ms"; 16]);
    let _server = stage.server(&[]);
    let client = stage.client(&[]);
    for link in 1..=16 {
        client.until_path(&format!("eth{link}"), "active", Duration::from_secs(15));
    }
    let sink = Sink::start(&stage, Place::Server, 5201);
    let report = sink.tcp(&stage, Place::Client, TUNNEL, 16, Way::Up, 4).finish();
    let status = client.status();
    let paths = paths_of(&status, "default");
    assert_eq!(paths.len(), 16);
    for path in paths {
        assert!(path["tx_bytes"].as_u64() > Some(300_000), "hardly used: {path:#}");
    }
    assert!(report.megabits() > 80.0, "{:.0} Mbit/s over sixteen links of 10", report.megabits());
}
