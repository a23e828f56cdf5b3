//! Downloads and uploads by curl through the server's NAT. The web server has no route to the tunnel's
//! addresses.

use std::{thread, time::Duration};

use mpvpn_tests::{
    http::{Download, MB, TestPages, upload},
    machine_share::{MachineShare, Share},
    testbed::{Family, Host, Testbed, inet},
};

/// Limit of a transfer. Longer than on any busy machine; only a failing test takes that long.
const TRANSFER_TIMEOUT: Duration = Duration::from_secs(60);

/// Downloads 50 MB through the NAT; with `cut`, link 1 is cut meanwhile and restored.
fn download_through_nat(family: Family, cut: bool) {
    let _share = MachineShare::take(Share::Percent(50));
    let testbed = Testbed::two_slow_links();
    let _server = testbed.server(&[]);
    let _client = testbed.client(&[]);
    let site = TestPages::start(&testbed, Host::Inet);
    let host = inet(family);
    let download = Download::start(&testbed, &site, &host, 50 * MB, TRANSFER_TIMEOUT, &[]);
    if cut {
        thread::sleep(Duration::from_secs(1));
        testbed.link(1).cut();
        thread::sleep(Duration::from_secs(3));
        testbed.link(1).restore();
    }
    download.finish();
}

#[test]
fn ipv4_brings_every_byte() {
    download_through_nat(Family::V4, false);
}

#[test]
fn ipv6_brings_every_byte() {
    download_through_nat(Family::V6, false);
}

#[test]
fn ipv4_brings_every_byte_across_a_cut() {
    download_through_nat(Family::V4, true);
}

#[test]
fn ipv6_brings_every_byte_across_a_cut() {
    download_through_nat(Family::V6, true);
}

#[test]
fn uploads_bring_every_byte_in_both_families() {
    let _share = MachineShare::take(Share::Percent(50));
    let testbed = Testbed::two_slow_links();
    let _server = testbed.server(&[]);
    let _client = testbed.client(&[]);
    let site = TestPages::start(&testbed, Host::Inet);
    for family in [Family::V4, Family::V6] {
        upload(&testbed, &site, &inet(family), 15 * MB, TRANSFER_TIMEOUT);
    }
}
