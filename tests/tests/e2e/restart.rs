//! The server goes away and comes back; the client waits for it.
//!
//! The connections that survive end at the server's host: one through its NAT may not, because what comes from behind
//! while there is no NAT is answered with a reset by the server's kernel.

use std::{thread, time::Duration};

use mpvpn_tests::{
    http::{Download, MB, TestPages},
    ping::reaches,
    testbed::{Family, Host, MpvpnProcess, TUNNEL, Testbed},
};

const WAIT: Duration = Duration::from_secs(20);

/// A download runs while `end` ends the server; a new one takes over. The client is never touched.
fn outlive(end: impl FnOnce(&mut MpvpnProcess)) {
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
    server.wait_for_status(WAIT, "the client is back", |status| {
        match status["clients"].as_array().map(Vec::len) {
            Some(1) => Ok(()),
            other => Err(format!("{other:?} sessions")),
        }
    });
    client.wait_for_status(WAIT, "the client says so", |status| {
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
    outlive(|server| {
        assert!(server.interrupt().success());
    });
}

#[test]
fn connections_survive_a_server_that_is_killed_and_started_again() {
    outlive(MpvpnProcess::kill);
}

#[test]
fn a_client_waits_for_a_server_that_is_not_there_yet() {
    let testbed = Testbed::two_links();
    let mut client = testbed.start_client(&[]);
    thread::sleep(Duration::from_secs(3));
    assert!(client.is_running(), "gave up:\n{}", client.log());
    let _server = testbed.server(&[]);
    client.wait_until_up_within(WAIT);
    reaches(&testbed, Host::Client, TUNNEL);
}
