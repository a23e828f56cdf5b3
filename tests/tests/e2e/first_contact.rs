//! One working link is enough to connect.

use std::time::Duration;

use mpvpn_tests::{
    eventually,
    ping::reaches,
    testbed::{Direction, Host, MpvpnProcess, TUNNEL, Testbed},
};

/// How long a test waits for an expected state. Longer than on any busy machine; only a failing test takes
/// that long.
const TIMEOUT: Duration = Duration::from_secs(10);

#[test]
fn a_first_link_without_internet_does_not_delay_the_start() {
    let testbed = Testbed::two_links();
    testbed.link(1).silence(Direction::Both);
    let _server = testbed.server(&[]);
    let mut client = testbed.start_client(&[]);
    let took = client.wait_until_up_within(TIMEOUT);
    assert!(took < Duration::from_secs(5), "up only after {took:?}");
    client.wait_for_path("eth2", "active", TIMEOUT);
    reaches(&testbed, Host::Client, TUNNEL);

    testbed.link(1).end_silence();
    client.wait_for_path("eth1", "active", TIMEOUT);
}

#[test]
fn a_link_that_is_unplugged_at_the_start_joins_later() {
    let testbed = Testbed::two_links();
    testbed.link(1).cut();
    let _server = testbed.server(&[]);
    let client = testbed.client(&[]);
    client.wait_for_path("eth2", "active", TIMEOUT);
    reaches(&testbed, Host::Client, TUNNEL);

    testbed.link(1).restore();
    client.wait_for_path("eth1", "active", TIMEOUT);
}

#[test]
fn auto_finds_every_link_with_a_default_route() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&[]);
    let client = testbed.client(&["--path", "auto"]);
    for link in ["eth1", "eth2"] {
        client.wait_for_path(link, "active", TIMEOUT);
    }
}

/// Waits until the status of a client and its log say this.
#[track_caller]
fn assert_said(client: &MpvpnProcess, expected: &str) {
    client.wait_for_status(TIMEOUT, expected, |status| match status["verdict"].as_str() {
        Some(verdict) if verdict.contains(expected) => Ok(()),
        other => Err(format!("{other:?}")),
    });
    eventually(TIMEOUT, expected, || {
        let log = client.log();
        if log.contains("WARN no answer for ") && log.contains(expected) { Ok(()) } else { Err(log) }
    });
}

#[test]
fn a_client_whose_server_does_not_answer_says_so_in_its_terminal_and_its_status() {
    let testbed = Testbed::two_links();
    let wrong_port = testbed.start_client(&["--server", "192.0.2.1:4434"]);
    assert_said(&wrong_port, "(server or all links), trying again");
    drop(wrong_port);
    let unknown_name = testbed.start_client(&["--server", "no-such-host.invalid"]);
    assert_said(&unknown_name, "(the name no-such-host.invalid does not resolve)");
}
