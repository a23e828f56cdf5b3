//! Any one link that works is enough to start.

use std::time::Duration;

use mpvpn_tests::{
    ping::reaches,
    stage::{Direction, Place, Stage, TUNNEL},
};

const WAIT: Duration = Duration::from_secs(10);

#[test]
fn a_first_link_without_internet_holds_up_nothing() {
    let stage = Stage::two_links();
    stage.link(1).silence(Direction::Both);
    let _server = stage.server(&[]);
    let mut client = stage.start_client(&[]);
    let took = client.wait_up(WAIT);
    assert!(took < Duration::from_secs(5), "up only after {took:?}");
    client.until_path("eth2", "active", WAIT);
    reaches(&stage, Place::Client, TUNNEL);

    stage.link(1).heal();
    client.until_path("eth1", "active", WAIT);
}

#[test]
fn a_link_that_is_unplugged_at_the_start_joins_later() {
    let stage = Stage::two_links();
    stage.link(1).cut();
    let _server = stage.server(&[]);
    let client = stage.client(&[]);
    client.until_path("eth2", "active", WAIT);
    reaches(&stage, Place::Client, TUNNEL);

    stage.link(1).restore();
    client.until_path("eth1", "active", WAIT);
}

#[test]
fn auto_finds_every_link_with_a_default_route() {
    let stage = Stage::two_links();
    let _server = stage.server(&[]);
    let client = stage.client(&["--path", "auto"]);
    for link in ["eth1", "eth2"] {
        client.until_path(link, "active", WAIT);
    }
}
