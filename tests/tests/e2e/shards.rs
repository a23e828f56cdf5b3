//! Several threads at both ends, each with sockets, connections and a queue of the TUN of its own.

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

const TWO: &[&str] = &["--shards", "2"];
const WAIT: Duration = Duration::from_secs(20);

/// Paths of the default class in a status that are of the shard with this number and active.
fn active(status: &Value, member: u8) -> Vec<&Value> {
    let is_of = |id: &str| match id.split_once('@') {
        None => member == 0,
        Some((_, number)) => number == member.to_string(),
    };
    let all = paths_of(status, "default").into_iter();
    all.filter(|path| path["state"] == "active" && path["id"].as_str().is_some_and(is_of)).collect()
}

/// Waits until both connections of a client have a path over each of `links` links.
fn both_up(client: &MpvpnProcess, links: usize) {
    client.wait_for_status(WAIT, "both connections up", |status| {
        let counts = [0, 1].map(|member| active(status, member).len());
        if counts == [links; 2] { Ok(()) } else { Err(format!("{counts:?} paths")) }
    });
}

fn carried(status: &Value, member: u8, direction: &str) -> u64 {
    active(status, member).iter().filter_map(|path| path[direction].as_u64()).sum()
}

#[test]
fn flows_of_one_client_are_spread_over_the_shards_of_both_ends() {
    let _share = MachineShare::take(Share::Percent(50));
    let testbed = Testbed::two_slow_links();
    let server = testbed.server(TWO);
    let client = testbed.client(TWO);
    both_up(&client, 2);
    for family in [Family::V4, Family::V6] {
        reaches(&testbed, Host::Server, &client.address(family));
    }
    reaches(&testbed, Host::Client, TUNNEL);
    let iperf = IperfServer::start(&testbed, Host::Inet, 5201);
    for (direction, field) in [(Direction::Up, "tx_bytes"), (Direction::Down, "rx_bytes")] {
        let before = client.status();
        let report = iperf.tcp(&testbed, Host::Client, &inet4(), 16, direction, 3).finish();
        assert!(report.megabits() > 48.0, "{direction:?}: {:.0} Mbit/s over 2 × 40", report.megabits());
        let after = client.status();
        for member in [0, 1] {
            let bytes = carried(&after, member, field) - carried(&before, member, field);
            // 3 s at 48 Mbit/s are 18 MB; sixteen flows all meet one queue once in 32,768 runs.
            assert!(bytes > 1_000_000, "{direction:?}: connection {member} carried only {bytes} bytes");
        }
    }
    // After the TCP flows have raised the congestion windows: a flow of 20 Mbit/s through windows of the first second loses
    // packets, the more the busier the machine is, and that says nothing about shards.
    let report = iperf.udp(&testbed, Host::Client, &inet4(), 20, Direction::Down, 3).finish();
    assert!(report.megabits() > 18.0 && report.loss_pct < 2.0, "{report:?}");
    let status = server.status();
    let clients = status["clients"].as_array().expect("a list");
    assert_eq!(clients.len(), 1, "one session: {status:#}");
    for member in [0, 1] {
        assert_eq!(active(&clients[0], member).len(), 2, "{status:#}");
    }
}

#[test]
fn connections_survive_a_restart_of_the_server() {
    let testbed = Testbed::two_links();
    let mut server = testbed.server(TWO);
    let client = testbed.client(TWO);
    both_up(&client, 2);
    let before = (client.address(Family::V4), client.address(Family::V6));
    let site = TestPages::start(&testbed, Host::Server);
    let limit = Duration::from_secs(60);
    let download = Download::start(&testbed, &site, TUNNEL, 24 * MB, limit, &["--limit-rate", "2M"]);
    thread::sleep(Duration::from_secs(2));
    server.kill();
    drop(server);
    let server = testbed.server(TWO);
    server.wait_for_status(WAIT, "both connections are back", |status| {
        let counts = [0, 1].map(|member| active(&status["clients"][0], member).len());
        let sessions = status["clients"].as_array().map(Vec::len);
        if counts == [2; 2] && sessions == Some(1) { Ok(()) } else { Err(format!("{counts:?} paths")) }
    });
    assert_eq!((client.address(Family::V4), client.address(Family::V6)), before, "the same addresses");
    download.finish();
}

#[test]
fn what_is_read_by_the_wrong_shard_is_handed_over() {
    let _share = MachineShare::take(Share::Percent(100));
    let testbed = Testbed::two_clients();
    let server = testbed.server(TWO);
    let first = testbed.client(&[]);
    let args = ["client", "--server", SERVER, "--insecure", "--path", "eth1"];
    let second = testbed.start(Host::Other, &args).wait_until_up();
    for (host, client) in [(Host::Client, &first), (Host::Other, &second)] {
        // The server speaks first: the kernel has not seen these flows and chooses queues at random.
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
            let up: Vec<_> = (0..3).map(|member| active(status, member).len()).collect();
            let wanted: Vec<_> = (0..3).map(|member| if member < connections { 2 } else { 0 }).collect();
            if up == wanted { Ok(()) } else { Err(format!("{up:?} paths")) }
        };
        client.wait_for_status(WAIT, "all connections up", all_up);
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
    let server = testbed.server(TWO);
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
    // The first one has kept all its packets.
    reaches(&testbed, Host::Client, TUNNEL);
    drop((client, server));
}

#[test]
fn nothing_is_left_behind() {
    let testbed = Testbed::two_links();
    let before = [Host::Server, Host::Client].map(|host| testbed.network_state(host));
    let mut server = testbed.server(TWO);
    let mut client = testbed.client(TWO);
    both_up(&client, 2);
    assert!(client.interrupt().success());
    assert!(server.terminate().success());
    let after = [Host::Server, Host::Client].map(|host| testbed.network_state(host));
    assert_eq!(before, after);
}

#[test]
fn a_link_that_is_lost_is_lost_for_all_connections_and_hardly_noticed() {
    let _share = MachineShare::take(Share::Percent(50));
    for failure in [LinkFailure::Carrier, LinkFailure::Silent(Direction::Both)] {
        let testbed = Testbed::two_slow_links();
        let _server = testbed.server(TWO);
        let client = testbed.client(TWO);
        both_up(&client, 2);
        let outcome = cut_under_load(&testbed, &client, failure, Direction::Down, Timeline::SHORT);
        println!("{failure:?}: {outcome:?}");
        assert!(
            outcome.longest_gap <= Duration::from_millis(600),
            "{:?} without an answer",
            outcome.longest_gap
        );
        // A path that was lost is tried again while data moves.
        let load = IperfServer::start(&testbed, Host::Server, 5301);
        let traffic = load.tcp(&testbed, Host::Client, TUNNEL, 16, Direction::Up, 4);
        both_up(&client, 2);
        traffic.finish();
    }
}
