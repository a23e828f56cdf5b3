//! The testbed itself, without a tunnel: properties on which the other tests rely.

use std::{thread, time::Duration, time::SystemTime};

use mpvpn_tests::{
    http::{Download, MB, TestPages, upload},
    machine_share::{MachineShare, Share},
    ping::{Ping, ping, reaches},
    testbed::{Direction, Host, SERVER_ARGS, TUNNEL, Testbed, inet4},
};
use serde_json::Value;

const SERVER: &str = "192.0.2.1";

#[test]
fn a_silent_link_shows_as_a_gap_between_pings() {
    let _share = MachineShare::take(Share::Percent(50));
    let testbed = Testbed::two_links();
    let dense = Ping::dense(&testbed, Host::Client, SERVER, 3);
    thread::sleep(Duration::from_millis(800));
    let from = SystemTime::now();
    testbed.link(1).silence(Direction::Down);
    thread::sleep(Duration::from_millis(500));
    testbed.link(1).end_silence();
    thread::sleep(Duration::from_millis(500));
    let gap = dense.finish().longest_gap(from, SystemTime::now());
    assert!((400..700).contains(&gap.as_millis()), "{gap:?} of silence, 500 ms were made");
}

#[test]
fn bytes_arrive_unchanged_and_the_host_behind_the_server_is_unreachable() {
    let testbed = Testbed::two_links();
    let site = TestPages::start(&testbed, Host::Server);
    let limit = Duration::from_secs(20);
    Download::start(&testbed, &site, SERVER, 10 * MB, limit, &[]).finish();
    Download::start(&testbed, &site, "2001:db8::1", 10 * MB, limit, &[]).finish();
    upload(&testbed, &site, SERVER, 10 * MB, limit);
    assert!(ping(&testbed, Host::Client, &inet4(), 3).answers.is_empty(), "reached without a tunnel");
    assert_eq!(testbed.network_state(Host::Client), testbed.network_state(Host::Client));
}

#[test]
fn concurrent_testbeds_have_separate_hosts_sockets_and_files() {
    let (one, other) = (Testbed::two_links(), Testbed::two_links());
    // Both testbeds run the same command with the same names at the same time.
    let start = |testbed: &Testbed| {
        let socket = testbed.default_sockets().join("server-mpvpn0.sock");
        let args = [&SERVER_ARGS[..], &["--subnet", "10.0.0.0/24"]].concat();
        testbed.start_as_is(Host::Server, &args, &socket).wait_until_up()
    };
    let (first, second) = (start(&one), start(&other));
    let client = one.client(&[]);
    reaches(&one, Host::Client, TUNNEL);
    for (testbed, server, clients) in [(&one, &first, 1), (&other, &second, 0)] {
        // Without a socket path, `status` finds the only running process.
        let shown = testbed.mpvpn(Host::Server, &["status", "--json"]);
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
    reaches(&other, Host::Client, TUNNEL);
}
