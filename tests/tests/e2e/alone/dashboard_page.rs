//! How soon the dashboard's page shows what happens.

use std::time::Duration;

use mpvpn_tests::{
    machine_share::{MachineShare, Share},
    testbed::Testbed,
};

use crate::dashboard_page::WatchedDownload;

/// Bar: a cut link and its event are shown within this time.
const MAX_DELAY: Duration = Duration::from_secs(1);
/// Cuts that are measured.
const CUTS: usize = 2;

#[test]
fn a_link_that_is_cut_is_shown_within_a_second() {
    let _share = MachineShare::take(Share::Whole);
    let testbed = Testbed::two_slow_links();
    let mut watched = WatchedDownload::start(&testbed);
    for _ in 0..CUTS {
        let delays = watched.cut();
        assert!(delays.iter().all(|delay| *delay <= MAX_DELAY), "{delays:?} until a cut link was shown");
        watched.heal();
    }
}
