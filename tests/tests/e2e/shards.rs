//! Several threads at both ends, each with sockets, connections and a queue of the TUN of its own.

use std::{thread, time::Duration};

use mpvpn_tests::{
    cut::{Course, Death, survive},
    http::{Download, MB, Site},
    machine_share::{MachineShare, Share},
    ping::reaches,
    stage::{Direction, Family, Peer, Place, SERVER, Stage, TUNNEL, inet4, paths_of},
    tcp::{Sink, Way},
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
fn both_up(client: &Peer, links: usize) {
    client.until(WAIT, "both connections up", |status| {
        let counts = [0, 1].map(|member| active(status, member).len());
        if counts == [links; 2] { Ok(()) } else { Err(format!("{counts:?} paths")) }
    });
}

fn carried(status: &Value, member: u8, way: &str) -> u64 {
    active(status, member).iter().filter_map(|path| path[way].as_u64()).sum()
}

#[test]
fn flows_of_one_client_are_spread_over_the_shards_of_both_ends() {
    let _share = MachineShare::take(Share::Percent(50));
    let stage = Stage::two_slower_links();
    let server = stage.server(TWO);
    let client = stage.client(TWO);
    both_up(&client, 2);
    for family in [Family::V4, Family::V6] {
        reaches(&stage, Place::Server, &client.address(family));
    }
    reaches(&stage, Place::Client, TUNNEL);
    let sink = Sink::start(&stage, Place::Inet, 5201);
    for (way, field) in [(Way::Up, "tx_bytes"), (Way::Down, "rx_bytes")] {
        let before = client.status();
        let report = sink.tcp(&stage, Place::Client, &inet4(), 16, way, 3).finish();
        assert!(report.megabits() > 48.0, "{way:?}: {:.0} Mbit/s over 2 × 40", report.megabits());
        let after = client.status();
        for member in [0, 1] {
            let bytes = carried(&after, member, field) - carried(&before, member, field);
            // 3 s at 48 Mbit/s are 18 MB; sixteen flows all meet one queue once in 32,768 runs.
            assert!(bytes > 1_000_000, "{way:?}: connection {member} carried only {bytes} bytes");
        }
    }
    // After the TCP flows have raised the congestion windows: a flow of 20 Mbit/s through windows of the first second loses
    // packets, the more the busier the machine is, and that says nothing about shards.
    let report = sink.udp(&stage, Place::Client, &inet4(), 20, Way::Down, 3).finish();
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
    let stage = Stage::two_links();
    let mut server = stage.server(TWO);
    let client = stage.client(TWO);
    both_up(&client, 2);
    let before = (client.address(Family::V4), client.address(Family::V6));
    let site = Site::start(&stage, Place::Server);
    let limit = Duration::from_secs(60);
    let download = Download::start(&stage, &site, TUNNEL, 24 * MB, limit, &["--limit-rate", "2M"]);
    thread::sleep(Duration::from_secs(2));
    server.kill();
    drop(server);
    let server = stage.server(TWO);
    server.until(WAIT, "both connections are back", |status| {
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
    let stage = Stage::two_clients();
    let server = stage.server(TWO);
    let first = stage.client(&[]);
    let words = ["client", "--server", SERVER, "--insecure", "--path", "eth1"];
    let second = stage.start(Place::Other, &words).up();
    for (place, client) in [(Place::Client, &first), (Place::Other, &second)] {
        // The server speaks first: the kernel has not seen these flows and chooses queues at random.
        let sink = Sink::start(&stage, place, 5201);
        let to = client.address(Family::V4);
        let report = sink.tcp(&stage, Place::Server, &to, 8, Way::Up, 2).finish();
        assert!(report.megabits() > 60.0, "{place:?}: {:.0} Mbit/s from the server", report.megabits());
    }
    reaches(&stage, Place::Client, &second.address(Family::V4));
    reaches(&stage, Place::Other, &first.address(Family::V6));
    assert_eq!(server.status()["clients"].as_array().map(Vec::len), Some(2));
}

#[test]
fn one_end_may_have_fewer_shards() {
    let _share = MachineShare::take(Share::Percent(50));
    for (server, client, connections) in [("1", "3", 3), ("3", "1", 1), ("2", "3", 3)] {
        let stage = Stage::two_slower_links();
        let server = stage.server(&["--shards", server]);
        let client = stage.client(&["--shards", client]);
        let all_up = |status: &Value| {
            let up: Vec<_> = (0..3).map(|member| active(status, member).len()).collect();
            let wanted: Vec<_> = (0..3).map(|member| if member < connections { 2 } else { 0 }).collect();
            if up == wanted { Ok(()) } else { Err(format!("{up:?} paths")) }
        };
        client.until(WAIT, "all connections up", all_up);
        let sink = Sink::start(&stage, Place::Inet, 5201);
        for way in [Way::Up, Way::Down] {
            let report = sink.tcp(&stage, Place::Client, &inet4(), 6, way, 2).finish();
            assert!(report.megabits() > 40.0, "{way:?}: {:.0} Mbit/s", report.megabits());
        }
        assert_eq!(server.status()["clients"].as_array().map(Vec::len), Some(1));
    }
}

#[test]
fn a_second_server_at_the_same_port_is_refused() {
    let stage = Stage::two_links();
    let server = stage.server(TWO);
    let client = stage.client(&[]);
    let words = ["server", "--listen", "0.0.0.0:4433", "--cert", "server.crt", "--key", "server.key"];
    for shards in ["1", "2"] {
        let more =
            ["--subnet", "10.9.0.0/24", "--subnet6", "none", "--tun-name", "second0", "--auth", "none"];
        let output = stage.mpvpn(Place::Server, &[&words[..], &more, &["--shards", shards]].concat());
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(text.contains("0.0.0.0:4433") && text.contains("ss -ulpn"), "{text}");
    }
    // The first one has kept all its packets.
    reaches(&stage, Place::Client, TUNNEL);
    drop((client, server));
}

#[test]
fn nothing_is_left_behind() {
    let stage = Stage::two_links();
    let before = [Place::Server, Place::Client].map(|place| stage.network_state(place));
    let mut server = stage.server(TWO);
    let mut client = stage.client(TWO);
    both_up(&client, 2);
    assert!(client.interrupt().success());
    assert!(server.terminate().success());
    let after = [Place::Server, Place::Client].map(|place| stage.network_state(place));
    assert_eq!(before, after);
}

#[test]
fn a_link_that_is_lost_is_lost_for_all_connections_and_hardly_noticed() {
    let _share = MachineShare::take(Share::Percent(50));
    for death in [Death::Carrier, Death::Silent(Direction::Both)] {
        let stage = Stage::two_slower_links();
        let _server = stage.server(TWO);
        let client = stage.client(TWO);
        both_up(&client, 2);
        let outcome = survive(&stage, &client, death, Way::Down, Course::SHORT);
        println!("{death:?}: {outcome:?}");
        assert!(outcome.gap <= Duration::from_millis(600), "{:?} without an answer", outcome.gap);
        // A path that was lost is tried again while data moves.
        let load = Sink::start(&stage, Place::Server, 5301);
        let traffic = load.tcp(&stage, Place::Client, TUNNEL, 16, Way::Up, 4);
        both_up(&client, 2);
        traffic.finish();
    }
}
