//! One working link is enough to connect.

use std::time::Duration;

use mpvpn_tests::{
    ping::reaches,
    testbed::{Direction, Host, TUNNEL, Testbed},
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
