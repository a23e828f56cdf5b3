//! `mpvpn measure` beside iperf3 and ping in the same tunnel.

use std::{fs, time::Duration};

use mpvpn_tests::{
    iperf::IperfServer,
    machine_share::{MachineShare, Share},
    ping::Ping,
    testbed::{Direction, Host, TUNNEL, Testbed, binary},
};
use serde_json::Value;

/// How far rates may differ: the bound of the project.
const RATE_TOLERANCE: f64 = 0.05;
/// How far round-trip times may differ (ms).
const RTT_TOLERANCE_MS: f64 = 0.5;
/// How far losses may differ (points).
const LOSS_TOLERANCE: f64 = 0.3;

#[test]
#[ignore = "minutes, on a machine where nothing else runs: ./dev soak"]
fn figures_agree_with_iperf3_and_ping_in_the_tunnel() {
    let _share = MachineShare::take(Share::Whole);
    let testbed = Testbed::two_links();
    let (_server, client) = (testbed.server(&["--measure"]), testbed.client(&[]));
    let iperf = IperfServer::start(&testbed, Host::Server, 5201);
    // A number of pings, not a time: at the end of a time, those under way would count as lost.
    let ping = Ping::dense_count(&testbed, Host::Client, TUNNEL, 200).finish();
    let rates = || {
        [(1, Direction::Down), (1, Direction::Up), (8, Direction::Down), (8, Direction::Up)]
            .map(|(flows, way)| iperf.tcp(&testbed, Host::Client, TUNNEL, flows, way, 4).finish().rate)
    };
    let before = rates();

    let json = testbed.dir().join("measure.json");
    let (binary, socket) = (binary(), client.socket());
    let words = [
        binary.to_str().expect("ASCII"),
        "measure",
        "--seconds",
        "4",
        "--json",
        json.to_str().expect("ASCII"),
        "--api-socket",
        socket.to_str().expect("ASCII"),
    ];
    let output = testbed.output_of(Host::Client, Duration::from_secs(300), &words);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_str(&fs::read_to_string(&json).expect("a file")).expect("JSON");
    assert_eq!(report["missing"], Value::Array(Vec::new()), "{text}");

    let over_all = |row: &&Value| row["link"] == "";
    let tcp: Vec<&Value> = report["tcp"].as_array().expect("rows").iter().filter(over_all).collect();
    // Rates of iperf3 itself differ from run to run: those before and afterwards are the bounds.
    for (row, (a, b)) in tcp.iter().zip(before.into_iter().zip(rates())) {
        let rate = row["bits_per_second"].as_f64().expect("a rate");
        let (least, most) = (a.min(b) * (1.0 - RATE_TOLERANCE), a.max(b) * (1.0 + RATE_TOLERANCE));
        assert!((least..=most).contains(&rate), "{rate:.0} is not {a:.0} or {b:.0} bit/s of iperf3\n{text}");
    }
    assert_eq!(tcp.len(), 4);
    let alone: Vec<f64> = report["tcp"]
        .as_array()
        .expect("rows")
        .iter()
        .filter(|row| row["link"] != "")
        .map(|row| row["bits_per_second"].as_f64().expect("a rate"))
        .collect();
    assert!(
        alone.len() == 8 && alone.iter().all(|rate| (80e6..97e6).contains(rate)),
        "one link has 100 Mbit/s: {alone:?}"
    );

    let idle: Vec<&Value> = report["idle"].as_array().expect("rows").iter().collect();
    assert_eq!(idle.len(), 5, "directly and through the tunnel over each link, and over all\n{text}");
    let through_all = idle.iter().copied().find(over_all).expect("a row over all links");
    let rtts: Vec<f64> = ping.answers.iter().map(|answer| answer.rtt_ms).collect();
    let (min, mean) =
        (rtts.iter().copied().fold(f64::INFINITY, f64::min), rtts.iter().sum::<f64>() / rtts.len() as f64);
    let figures = &through_all["latency"];
    for (name, expected) in [("min", min), ("mean", mean)] {
        let found = figures["rtt_ms"][name].as_f64().expect("a time");
        assert!(
            (found - expected).abs() <= RTT_TOLERANCE_MS,
            "{name} {found} is not {expected} ms of ping\n{text}"
        );
    }
    let loss = figures["loss_pct"].as_f64().expect("a loss");
    assert!(
        (loss - ping.loss_pct()).abs() <= LOSS_TOLERANCE,
        "{loss} is not {} % of ping\n{text}",
        ping.loss_pct()
    );
    for sweep in report["udp"].as_array().expect("sweeps") {
        let best = sweep["best_bits_per_second"].as_f64().expect("a rate without loss");
        let least = if sweep["link"] == "" { 120e6 } else { 80e6 };
        assert!(best > least, "{best:.0} bit/s over links of 100 Mbit/s\n{text}");
    }
    assert!(report["seconds"].as_f64().is_some_and(|seconds| seconds < 300.0), "{text}");
}
