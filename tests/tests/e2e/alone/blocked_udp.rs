//! Networks that let no UDP through, without any other limit.

use mpvpn_tests::{
    machine_share::{MachineShare, Share},
    stage::{Place, Stage, TUNNEL},
    tcp::{Sink, Way},
};

#[test]
fn fast_transfers_inside_tcp_cost_no_session() {
    let _share = MachineShare::take(Share::Whole);
    let stage = Stage::unlimited();
    let _server = stage.server(&[]);
    let client = stage.client(&["--transport", "tcp", "--lane", "stream"]);
    let sink = Sink::start(&stage, Place::Server, 5201);
    for _ in 0..6 {
        for way in [Way::Up, Way::Down] {
            let report = sink.tcp(&stage, Place::Client, TUNNEL, 1, way, 1).finish();
            assert!(report.megabits() > 100.0, "{:.0} Mbit/s", report.megabits());
        }
    }
    assert_eq!(client.status()["session"]["resumed"], 0, "the connection went on");
}
