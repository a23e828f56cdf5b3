//! The server stops and starts again; the client reconnects.
//!
//! The connections in these tests end at the server's host. A connection through its NAT may not survive:
//! while the NAT is missing, the server's kernel answers packets from behind the server with a reset.

use std::{thread, time::Duration};

use mpvpn_tests::{
    http::{Download, MB, TestPages},
    ping::reaches,
    testbed::{Family, Host, MpvpnProcess, TUNNEL, Testbed},
};

/// How long a test waits for an expected state. Longer than on any busy machine; only a failing test takes
/// that long.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(20);

/// Runs a download while `end` ends the server and a new server starts; the client keeps running.
fn restart_during_download(end: impl FnOnce(&mut MpvpnProcess)) {
    let testbed = Testbed::two_links();
    let mut server = testbed.server(&[]);
    let mut client = testbed.client(&[]);
    let before = (client.address(Family::V4), client.address(Family::V6));
    let site = TestPages::start(&testbed, Host::Server);
    // 12 s of download, so that the connection spans the restart.
    let limit = Duration::from_secs(60);
    let download = Download::start(&testbed, &site, TUNNEL, 24 * MB, limit, &["--limit-rate", "2M"]);
    thread::sleep(Duration::from_secs(2));

    end(&mut server);
    drop(server);
    thread::sleep(Duration::from_secs(1));
    let server = testbed.server(&[]);
    server.wait_for_status(RECONNECT_TIMEOUT, "the client is back", |status| {
        match status["clients"].as_array().map(Vec::len) {
            Some(1) => Ok(()),
            other => Err(format!("{other:?} sessions")),
        }
    });
    client.wait_for_status(RECONNECT_TIMEOUT, "the client says so", |status| {
        let state = &status["state"];
        if state == "up" { Ok(()) } else { Err(format!("{state}")) }
    });
    assert_eq!((client.address(Family::V4), client.address(Family::V6)), before, "the same addresses");
    reaches(&testbed, Host::Client, TUNNEL);
    download.finish();
    assert!(client.is_running());
}

#[test]
fn connections_survive_a_server_that_is_restarted() {
    restart_during_download(|server| {
        assert!(server.interrupt().success());
    });
}

#[test]
fn connections_survive_a_server_that_is_killed_and_started_again() {
    restart_during_download(MpvpnProcess::kill);
}

#[test]
fn a_client_waits_for_a_server_that_has_not_started_yet() {
    let testbed = Testbed::two_links();
    let mut client = testbed.start_client(&[]);
    thread::sleep(Duration::from_secs(3));
    assert!(client.is_running(), "gave up:\n{}", client.log());
    let _server = testbed.server(&[]);
    client.wait_until_up_within(RECONNECT_TIMEOUT);
    reaches(&testbed, Host::Client, TUNNEL);
}
