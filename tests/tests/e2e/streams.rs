//! TCP connections in stream mode: they end at the client's split-TCP proxy.

use std::{thread, time::Duration};

use mpvpn_tests::{
    http::{Download, MB, TestPages},
    iperf::IperfServer,
    machine_share::{MachineShare, Share},
    ping::reaches,
    testbed::{Direction, Host, TUNNEL, Testbed, inet4},
};
use serde_json::Value;

/// Limit of a transfer. Longer than on any busy machine; only a failing test takes that long.
const TRANSFER_TIMEOUT: Duration = Duration::from_secs(60);

fn stream_count(status: &Value) -> u64 {
    status["flows"]["stream"].as_u64().expect("a count of streams")
}

/// curl's exit code for a connection to a port of a host, and its duration.
fn curl(testbed: &Testbed, host: &str, port: u16, seconds: u32) -> (Option<i32>, Duration) {
    let start = std::time::Instant::now();
    let url = format!("http://{host}:{port}/");
    let limit = seconds.to_string();
    let status = testbed
        .command(Host::Client, "curl")
        .args(["--silent", "--output", "/dev/null", "--max-time", &limit, &url])
        .status()
        .expect("curl runs");
    (status.code(), start.elapsed())
}

#[test]
fn auto_carries_tcp_to_the_internet_as_streams_and_the_rest_as_packets() {
    let _share = MachineShare::take(Share::Percent(50));
    let testbed = Testbed::two_slow_links();
    let server = testbed.server(&[]);
    let client = testbed.client(&[]);
    reaches(&testbed, Host::Client, &inet4());
    for (host, address, wanted) in [(Host::Inet, inet4(), true), (Host::Server, TUNNEL.to_owned(), false)] {
        let iperf = IperfServer::start(&testbed, host, 5201);
        let load = iperf.tcp(&testbed, Host::Client, &address, 4, Direction::Up, 4);
        thread::sleep(Duration::from_secs(1));
        // The control connection of iperf3, and four for data.
        let expected = if wanted { 5 } else { 0 };
        for process in [&client, &server] {
            process.wait_for_status(
                Duration::from_secs(2),
                &format!("{expected} streams to {address}"),
                |status| match stream_count(status) {
                    count if count == expected => Ok(()),
                    count => Err(format!("{count} streams")),
                },
            );
        }
        let report = load.finish();
        assert!(report.megabits() > 48.0, "{address}: {:.0} Mbit/s over 2 × 40", report.megabits());
        client.wait_for_status(Duration::from_secs(10), "no streams are left", |status| {
            match stream_count(status) {
                0 => Ok(()),
                left => Err(format!("{left} streams")),
            }
        });
    }
    let iperf = IperfServer::start(&testbed, Host::Inet, 5202);
    let report = iperf.udp(&testbed, Host::Client, &inet4(), 20, Direction::Down, 2).finish();
    assert!(report.megabits() > 19.0 && report.loss_pct < 1.0, "{report:?}");
}

#[test]
fn a_refused_connection_fails_at_once() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&[]);
    let _client = testbed.client(&["--lane", "stream"]);
    const NO_CONNECTION: Option<i32> = Some(7);
    // There is no listener.
    let (code, time) = curl(&testbed, &inet4(), 81, 10);
    assert!(code == NO_CONNECTION && time < Duration::from_secs(2), "{code:?} after {time:?}");
    // Forbidden by the server, which is reported by an ICMP error.
    let (code, time) = curl(&testbed, "192.168.77.1", 80, 10);
    assert!(code == NO_CONNECTION && time < Duration::from_secs(2), "{code:?} after {time:?}");
}

#[test]
fn connections_that_the_server_refuses_as_streams_travel_as_packets() {
    let _share = MachineShare::take(Share::Percent(50));
    let testbed = Testbed::two_slow_links();
    // Clients reach private networks behind the server by packets only.
    let private = "192.168.9.9";
    testbed.run(Host::Inet, &["ip", "address", "add", &format!("{private}/32"), "dev", "lo"]);
    testbed.run(Host::Server, &["ip", "route", "add", private, "via", &inet4()]);
    let server = testbed.server(&[]);
    let _client = testbed.client(&[]);
    let iperf = IperfServer::start(&testbed, Host::Inet, 5201);
    // The first SYN is tried as a stream, and its retransmission a second later as packets.
    let report = iperf.tcp(&testbed, Host::Client, private, 1, Direction::Down, 4).finish();
    assert!(report.megabits() > 20.0, "{:.0} Mbit/s", report.megabits());
    assert_eq!(stream_count(&server.status()), 0);
}

#[test]
fn a_download_brings_every_byte_across_a_silent_cut() {
    let _share = MachineShare::take(Share::Percent(50));
    let testbed = Testbed::two_slow_links();
    let _server = testbed.server(&[]);
    let client = testbed.client(&["--lane", "stream"]);
    for link in ["eth1", "eth2"] {
        client.wait_for_path(link, "active", Duration::from_secs(5));
    }
    let site = TestPages::start(&testbed, Host::Inet);
    let download = Download::start(&testbed, &site, &inet4(), 50 * MB, TRANSFER_TIMEOUT, &[]);
    thread::sleep(Duration::from_secs(2));
    testbed.link(1).silence(Direction::Both);
    thread::sleep(Duration::from_secs(3));
    testbed.link(1).end_silence();
    download.finish();
}
