//! The stage itself, without a tunnel: what the other stories take for granted.

use std::{thread, time::Duration, time::SystemTime};

use mpvpn_tests::{
    http::{Download, MB, Site, upload},
    machine_share::{MachineShare, Share},
    ping::{Ping, ping, reaches},
    stage::{Direction, Place, Stage, TUNNEL, inet4},
};
use serde_json::Value;

const SERVER: &str = "192.0.2.1";

#[test]
fn a_silent_link_shows_as_a_gap_between_pings() {
    let _share = MachineShare::take(Share::Percent(50));
    let stage = Stage::two_links();
    let dense = Ping::dense(&stage, Place::Client, SERVER, 3);
    thread::sleep(Duration::from_millis(800));
    let from = SystemTime::now();
    stage.link(1).silence(Direction::Down);
    thread::sleep(Duration::from_millis(500));
    stage.link(1).heal();
    thread::sleep(Duration::from_millis(500));
    let gap = dense.finish().longest_gap(from, SystemTime::now());
    assert!((400..700).contains(&gap.as_millis()), "{gap:?} of silence, 500 ms were made");
}

#[test]
fn bytes_arrive_whole_and_the_host_behind_is_out_of_reach() {
    let stage = Stage::two_links();
    let site = Site::start(&stage, Place::Server);
    let limit = Duration::from_secs(20);
    Download::start(&stage, &site, SERVER, 10 * MB, limit, &[]).finish();
    Download::start(&stage, &site, "2001:db8::1", 10 * MB, limit, &[]).finish();
    upload(&stage, &site, SERVER, 10 * MB, limit);
    assert!(ping(&stage, Place::Client, &inet4(), 3).answers.is_empty(), "reached without a tunnel");
    assert_eq!(stage.network_state(Place::Client), stage.network_state(Place::Client));
}

#[test]
fn stages_side_by_side_have_hosts_sockets_and_files_of_their_own() {
    const SERVER: [&str; 11] = [
        "server",
        "--listen",
        "0.0.0.0:4433",
        "--cert",
        "server.crt",
        "--key",
        "server.key",
        "--subnet",
        "10.0.0.0/24",
        "--auth",
        "none",
    ];
    let (one, other) = (Stage::two_links(), Stage::two_links());
    // The same command with the same names at the same time.
    let start = |stage: &Stage| {
        let socket = stage.default_sockets().join("server-mpvpn0.sock");
        stage.start_as_is(Place::Server, &SERVER, &socket).up()
    };
    let (first, second) = (start(&one), start(&other));
    let client = one.client(&[]);
    reaches(&one, Place::Client, TUNNEL);
    for (stage, server, clients) in [(&one, &first, 1), (&other, &second, 0)] {
        // Where nothing is named, status finds the only one that there is.
        let shown = stage.mpvpn(Place::Server, &["status", "--json"]);
        assert!(shown.status.success(), "{}", String::from_utf8_lossy(&shown.stderr));
        let shown: Value = serde_json::from_slice(&shown.stdout).expect("JSON");
        for status in [shown, server.status()] {
            assert_eq!(status["clients"].as_array().map(Vec::len), Some(clients), "{status:#}");
        }
    }
    let gone = one.dir().to_owned();
    drop((client, first, one));
    assert!(!gone.exists());
    assert_eq!(second.status()["state"], "up");
    let _client = other.client(&[]);
    reaches(&other, Place::Client, TUNNEL);
}
