//! The time that a failed link costs, under load.

use std::time::Duration;

use mpvpn_tests::{
    cut::{LinkFailure, MAX_P99, Timeline, cut_under_load},
    machine_share::{MachineShare, Share},
    testbed::{Direction, Testbed},
};

/// Number of cuts of a story; the median of as many is that of a hundred within a few milliseconds.
const CUTS: u32 = 9;
/// Maximum time until a restored link carries data again.
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(4);

/// Cuts a link under load nine times, and checks the gaps. None of so few may be more than twice as long as
/// one in a hundred (`simulation/cuts.rs`).
fn check_cuts(failure: LinkFailure, direction: Direction) {
    let _share = MachineShare::take(Share::Whole);
    let testbed = Testbed::two_slow_links().log_decisions();
    let _server = testbed.server(&[]);
    let client = testbed.client(&[]);
    let outcome = cut_under_load(&testbed, &client, failure, direction, &Timeline::repeated(CUTS));
    println!("{failure:?}, load {direction:?}: gaps of {:.0?} ms", outcome.gaps_ms());
    println!("{:#?}", outcome.cuts);
    let (median, max) = outcome.median_and_max_gap();
    assert!(median <= failure.max_median(), "half of all gaps are longer than {median:?}");
    assert!(max <= 2 * MAX_P99, "a gap of {max:?}");
    let recovery_time = outcome.max_recovery_time();
    assert!(recovery_time <= RECOVERY_TIMEOUT, "used again after {recovery_time:?}");
    let rates = &outcome.rates;
    assert!(rates.iter().all(|rate| *rate >= 1e6), "a second without traffic: {rates:?}");
}

#[test]
fn carrier_loss_is_hardly_noticed_by_uploads() {
    check_cuts(LinkFailure::Carrier, Direction::Up);
}

#[test]
fn carrier_loss_is_hardly_noticed_by_downloads() {
    check_cuts(LinkFailure::Carrier, Direction::Down);
}

#[test]
fn uploads_leave_a_silent_link() {
    check_cuts(LinkFailure::Silent(Direction::Both), Direction::Up);
}

#[test]
fn downloads_leave_a_silent_link() {
    check_cuts(LinkFailure::Silent(Direction::Both), Direction::Down);
}

#[test]
fn uploads_leave_a_link_that_only_loses_sent_packets() {
    check_cuts(LinkFailure::Silent(Direction::Up), Direction::Up);
}

#[test]
fn downloads_leave_a_link_that_only_loses_received_packets() {
    check_cuts(LinkFailure::Silent(Direction::Down), Direction::Down);
}
