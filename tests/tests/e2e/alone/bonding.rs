//! The rates of two links add up, and the tunnel adds little delay.

use mpvpn_tests::{
    machine_share::{MachineShare, Share},
    ping::ping,
    testbed::{Direction, Host, SERVER6, TUNNEL, Testbed},
};

use crate::bonding::{MIN_RATIO_TO_ONE_LINK, measure_rate};

/// The rate of one link.
const LINK_MBIT: f64 = 100.0;
/// The rate of one slow link, Mbit/s.
const SLOW_LINK_MBIT: f64 = 40.0;

#[test]
fn eight_uploads_use_both_links() {
    let _share = MachineShare::take(Share::Whole);
    let testbed = Testbed::two_links();
    let rate = measure_rate(&testbed, Direction::Up, &[]);
    assert!(rate > MIN_RATIO_TO_ONE_LINK * LINK_MBIT, "{rate:.0} Mbit/s");
}

#[test]
fn eight_downloads_use_both_links() {
    let _share = MachineShare::take(Share::Whole);
    let testbed = Testbed::two_links();
    let rate = measure_rate(&testbed, Direction::Down, &[]);
    assert!(rate > MIN_RATIO_TO_ONE_LINK * LINK_MBIT, "{rate:.0} Mbit/s");
}

#[test]
fn eight_flows_that_keep_their_paths_use_both_links() {
    let _share = MachineShare::take(Share::Whole);
    let testbed = Testbed::two_slow_links();
    let rate = measure_rate(&testbed, Direction::Up, &["--scheduler", "flow"]);
    assert!(rate > MIN_RATIO_TO_ONE_LINK * SLOW_LINK_MBIT, "{rate:.0} Mbit/s");
}

#[test]
fn links_may_be_ipv6_only_outside() {
    let _share = MachineShare::take(Share::Whole);
    let testbed = Testbed::two_slow_links();
    let rate = measure_rate(&testbed, Direction::Up, &["--server", SERVER6]);
    assert!(rate > MIN_RATIO_TO_ONE_LINK * SLOW_LINK_MBIT, "{rate:.0} Mbit/s");
}

#[test]
fn the_tunnel_adds_little_to_an_idle_links_round_trip() {
    let _share = MachineShare::take(Share::Whole);
    let testbed = Testbed::two_links();
    let _server = testbed.server(&[]);
    let _client = testbed.client(&[]);
    let pings = ping(&testbed, Host::Client, TUNNEL, 20);
    assert!(pings.answers.len() >= 19, "{} of {} pings answered", pings.answers.len(), pings.sent);
    let rtt = pings.median_rtt_ms();
    assert!((25.0..40.0).contains(&rtt), "{rtt} ms over links of 25 ms");
}
