//! A link dies under load, and comes back.

use std::{thread, time::Duration};

use mpvpn_tests::{
    cut::{Death, survive},
    eventually,
    ping::ping,
    stage::{Direction, Family, Place, Stage, TUNNEL},
    tcp::Way,
};

// Twice what is promised, and what `./dev bench cut` measures: machines that run tests are busy.

/// The longest silence when the kernel tells that the link has gone.
const CARRIER_GAP: Duration = Duration::from_millis(200);
/// The longest silence when packets just vanish.
const SILENT_GAP: Duration = Duration::from_millis(600);
/// How soon traffic uses a link again that has come back.
const BACK: Duration = Duration::from_secs(4);

fn hardly_noticed(death: Death, way: Way, longest: Duration) {
    let stage = Stage::two_links();
    let _server = stage.server(&[]);
    let client = stage.client(&[]);
    let outcome = survive(&stage, &client, death, way);
    println!("{death:?} {way:?}: {outcome:?}");
    assert!(outcome.gap <= longest, "{:?} without an answer", outcome.gap);
    assert!(outcome.back <= BACK, "used again only after {:?}", outcome.back);
    let silent = outcome.load.seconds.iter().filter(|rate| **rate < 1e6).count();
    assert!(silent <= 1, "{silent} seconds without traffic: {:?}", outcome.load.seconds);
}

#[test]
fn carrier_loss_is_hardly_noticed_by_uploads() {
    hardly_noticed(Death::Carrier, Way::Up, CARRIER_GAP);
}

#[test]
fn carrier_loss_is_hardly_noticed_by_downloads() {
    hardly_noticed(Death::Carrier, Way::Down, CARRIER_GAP);
}

#[test]
fn a_link_that_falls_silent_is_left_by_uploads() {
    hardly_noticed(Death::Silent(Direction::Both), Way::Up, SILENT_GAP);
}

#[test]
fn a_link_that_falls_silent_is_left_by_downloads() {
    hardly_noticed(Death::Silent(Direction::Both), Way::Down, SILENT_GAP);
}

#[test]
fn a_link_that_no_longer_sends_is_left() {
    hardly_noticed(Death::Silent(Direction::Up), Way::Up, SILENT_GAP);
}

#[test]
fn a_link_that_no_longer_receives_is_left() {
    hardly_noticed(Death::Silent(Direction::Down), Way::Down, SILENT_GAP);
}

#[test]
fn losing_every_link_for_a_while_ends_nothing() {
    let stage = Stage::two_links();
    let _server = stage.server(&[]);
    let client = stage.client(&[]);
    let address = client.address(Family::V4);
    stage.link(1).cut();
    stage.link(2).cut();
    thread::sleep(Duration::from_secs(8));
    stage.link(1).restore();
    stage.link(2).restore();
    eventually(Duration::from_secs(10), "the tunnel is back", || {
        let pings = ping(&stage, Place::Client, TUNNEL, 3);
        if pings.answers.is_empty() { Err("no answer".to_owned()) } else { Ok(()) }
    });
    assert_eq!(client.address(Family::V4), address, "the same address as before");
}
