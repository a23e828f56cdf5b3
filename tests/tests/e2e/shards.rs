//! Several shards at both ends, each with its own sockets, connections and TUN queue.

use std::{thread, time::Duration};

use mpvpn_tests::{
    cut::{LinkFailure, Timeline, cut_under_load},
    http::{Download, MB, TestPages},
    iperf::IperfServer,
    machine_share::{MachineShare, Share},
    ping::reaches,
    testbed::{Direction, Family, Host, MpvpnProcess, SERVER, TUNNEL, Testbed, inet4, paths_of},
};
use serde_json::Value;

/// Options for two shards.
const TWO_SHARDS: &[&str] = &["--shards", "2"];
/// How long a test waits for an expected state. Longer than on any busy machine; only a failing test takes
/// that long.
const TIMEOUT: Duration = Duration::from_secs(20);

/// The active paths of the default class of the connection with this number in a status.
fn active_paths(status: &Value, connection: u8) -> Vec<&Value> {
    let is_of = |id: &str| match id.split_once('@') {
        None => connection == 0,
        Some((_, number)) => number == connection.to_string(),
    };
    let all = paths_of(status, "default").into_iter();
    all.filter(|path| path["state"] == "active" && path["id"].as_str().is_some_and(is_of)).collect()
}

/// Waits until both connections of a client have active paths over `links` links.
fn wait_for_both_connections(client: &MpvpnProcess, links: usize) {
    client.wait_for_status(TIMEOUT, "both connections up", |status| {
        let counts = [0, 1].map(|number| active_paths(status, number).len());
        if counts == [links; 2] { Ok(()) } else { Err(format!("{counts:?} paths")) }
    });
}

fn bytes_of_connection(status: &Value, number: u8, direction: &str) -> u64 {
    active_paths(status, number).iter().filter_map(|path| path[direction].as_u64()).sum()
}

#[test]
fn flows_of_one_client_are_spread_over_the_shards_of_both_ends() {
    let _share = MachineShare::take(Share::Percent(100));
    let testbed = Testbed::two_slow_links();
    let server = testbed.server(TWO_SHARDS);
    let client = testbed.client(TWO_SHARDS);
    wait_for_both_connections(&client, 2);
    for family in [Family::V4, Family::V6] {
        reaches(&testbed, Host::Server, &client.address(family));
    }
    reaches(&testbed, Host::Client, TUNNEL);
    let iperf = IperfServer::start(&testbed, Host::Inet, 5201);
    for (direction, field) in [(Direction::Up, "tx_bytes"), (Direction::Down, "rx_bytes")] {
        let before = client.status();
        let report = iperf.tcp(&testbed, Host::Client, &inet4(), 16, direction, 3).finish();
        // More than one link carries. How full both become is measured by other stories, with nothing beside
        // them.
        assert!(report.megabits() > 42.0, "{direction:?}: {:.0} Mbit/s over 2 × 40", report.megabits());
        let after = client.status();
        for number in [0, 1] {
            let bytes =
                bytes_of_connection(&after, number, field) - bytes_of_connection(&before, number, field);
            // 3 s at 42 Mbit/s are 16 MB; sixteen flows all meet one queue once in 32,768 runs.
            assert!(bytes > 1_000_000, "{direction:?}: connection {number} carried only {bytes} bytes");
        }
    }
    // After the TCP flows have raised the congestion windows: a flow of 20 Mbit/s through windows of the
    // first second loses packets, the more the busier the machine is, and that says nothing about shards.
    let report = iperf.udp(&testbed, Host::Client, &inet4(), 20, Direction::Down, 3).finish();
    assert!(report.megabits() > 18.0 && report.loss_pct < 2.0, "{report:?}");
    let status = server.status();
    let clients = status["clients"].as_array().expect("a list");
    assert_eq!(clients.len(), 1, "one session: {status:#}");
    for number in [0, 1] {
        assert_eq!(active_paths(&clients[0], number).len(), 2, "{status:#}");
    }
}

#[test]
fn connections_survive_a_restart_of_the_server() {
    let testbed = Testbed::two_links();
    let mut server = testbed.server(TWO_SHARDS);
    let client = testbed.client(TWO_SHARDS);
    wait_for_both_connections(&client, 2);
    let before = (client.address(Family::V4), client.address(Family::V6));
    let site = TestPages::start(&testbed, Host::Server);
    let limit = Duration::from_secs(60);
    let download = Download::start(&testbed, &site, TUNNEL, 24 * MB, limit, &["--limit-rate", "2M"]);
    thread::sleep(Duration::from_secs(2));
    server.kill();
    drop(server);
    let server = testbed.server(TWO_SHARDS);
    server.wait_for_status(TIMEOUT, "both connections are back", |status| {
        let counts = [0, 1].map(|number| active_paths(&status["clients"][0], number).len());
        let sessions = status["clients"].as_array().map(Vec::len);
        if counts == [2; 2] && sessions == Some(1) { Ok(()) } else { Err(format!("{counts:?} paths")) }
    });
    assert_eq!((client.address(Family::V4), client.address(Family::V6)), before, "the same addresses");
    download.finish();
}

#[test]
fn packets_read_by_the_wrong_shard_are_handed_over() {
    let _share = MachineShare::take(Share::Percent(100));
    let testbed = Testbed::two_clients();
    let server = testbed.server(TWO_SHARDS);
    let first = testbed.client(&[]);
    let args = ["client", "--server", SERVER, "--insecure", "--path", "eth1"];
    let second = testbed.start(Host::Other, &args).wait_until_up();
    for (host, client) in [(Host::Client, &first), (Host::Other, &second)] {
        // The server opens these connections: the kernel has not seen the flows and chooses queues at random.
        let iperf = IperfServer::start(&testbed, host, 5201);
        let to = client.address(Family::V4);
        let report = iperf.tcp(&testbed, Host::Server, &to, 8, Direction::Up, 2).finish();
        assert!(report.megabits() > 60.0, "{host:?}: {:.0} Mbit/s from the server", report.megabits());
    }
    reaches(&testbed, Host::Client, &second.address(Family::V4));
    reaches(&testbed, Host::Other, &first.address(Family::V6));
    assert_eq!(server.status()["clients"].as_array().map(Vec::len), Some(2));
}

#[test]
fn one_end_may_have_fewer_shards() {
    let _share = MachineShare::take(Share::Percent(50));
    for (server, client, connections) in [("1", "3", 3), ("3", "1", 1), ("2", "3", 3)] {
        let testbed = Testbed::two_slow_links();
        let server = testbed.server(&["--shards", server]);
        let client = testbed.client(&["--shards", client]);
        let all_up = |status: &Value| {
            let up: Vec<_> = (0..3).map(|number| active_paths(status, number).len()).collect();
            let wanted: Vec<_> = (0..3).map(|number| if number < connections { 2 } else { 0 }).collect();
            if up == wanted { Ok(()) } else { Err(format!("{up:?} paths")) }
        };
        client.wait_for_status(TIMEOUT, "all connections up", all_up);
        let iperf = IperfServer::start(&testbed, Host::Inet, 5201);
        for direction in [Direction::Up, Direction::Down] {
            let report = iperf.tcp(&testbed, Host::Client, &inet4(), 6, direction, 2).finish();
            assert!(report.megabits() > 40.0, "{direction:?}: {:.0} Mbit/s", report.megabits());
        }
        assert_eq!(server.status()["clients"].as_array().map(Vec::len), Some(1));
    }
}

#[test]
fn a_second_server_at_the_same_port_is_refused() {
    let testbed = Testbed::two_links();
    let server = testbed.server(TWO_SHARDS);
    let client = testbed.client(&[]);
    let args = ["server", "--listen", "0.0.0.0:4433", "--cert", "server.crt", "--key", "server.key"];
    for shards in ["1", "2"] {
        let more =
            ["--subnet", "10.9.0.0/24", "--subnet6", "none", "--tun-name", "second0", "--auth", "none"];
        let output = testbed.mpvpn(Host::Server, &[&args[..], &more, &["--shards", shards]].concat());
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(text.contains("0.0.0.0:4433") && text.contains("ss -ulpn"), "{text}");
    }
    // The first server still receives all its packets.
    reaches(&testbed, Host::Client, TUNNEL);
    drop((client, server));
}

#[test]
fn nothing_is_left_behind() {
    let testbed = Testbed::two_links();
    let before = [Host::Server, Host::Client].map(|host| testbed.network_state(host));
    let mut server = testbed.server(TWO_SHARDS);
    let mut client = testbed.client(TWO_SHARDS);
    wait_for_both_connections(&client, 2);
    assert!(client.interrupt().success());
    assert!(server.terminate().success());
    let after = [Host::Server, Host::Client].map(|host| testbed.network_state(host));
    assert_eq!(before, after);
}

#[test]
fn all_connections_survive_the_failure_of_a_link() {
    let _share = MachineShare::take(Share::Percent(50));
    for failure in [LinkFailure::Carrier, LinkFailure::Silent(Direction::Both)] {
        let testbed = Testbed::two_slow_links();
        let _server = testbed.server(TWO_SHARDS);
        let client = testbed.client(TWO_SHARDS);
        wait_for_both_connections(&client, 2);
        let outcome = cut_under_load(&testbed, &client, failure, Direction::Down, &Timeline::SHORT);
        println!("{failure:?}: {outcome:?}");
        let (_, gap) = outcome.median_and_max_gap();
        assert!(gap <= Duration::from_millis(600), "{gap:?} without an answer");
        // A failed path is probed again while there is traffic.
        let load = IperfServer::start(&testbed, Host::Server, 5301);
        let traffic = load.tcp(&testbed, Host::Client, TUNNEL, 16, Direction::Up, 4);
        wait_for_both_connections(&client, 2);
        traffic.finish();
    }
}
