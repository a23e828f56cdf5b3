//! curl to a web server behind the server's NAT, which knows no way to the tunnel's addresses.

use std::{thread, time::Duration};

use mpvpn_tests::{
    http::{Download, MB, Site, upload},
    machine_share::{MachineShare, Share},
    stage::{Family, Place, Stage, inet},
};

const LIMIT: Duration = Duration::from_secs(60);

/// 50 MB through NAT; link 1 is cut meanwhile and comes back.
fn whole(family: Family, cut: bool) {
    let _share = MachineShare::take(Share::Percent(50));
    let stage = Stage::two_slower_links();
    let _server = stage.server(&[]);
    let _client = stage.client(&[]);
    let site = Site::start(&stage, Place::Inet);
    let host = inet(family);
    let download = Download::start(&stage, &site, &host, 50 * MB, LIMIT, &[]);
    if cut {
        thread::sleep(Duration::from_secs(1));
        stage.link(1).cut();
        thread::sleep(Duration::from_secs(3));
        stage.link(1).restore();
    }
    download.finish();
}

#[test]
fn ipv4_brings_every_byte() {
    whole(Family::V4, false);
}

#[test]
fn ipv6_brings_every_byte() {
    whole(Family::V6, false);
}

#[test]
fn ipv4_brings_every_byte_across_a_cut() {
    whole(Family::V4, true);
}

#[test]
fn ipv6_brings_every_byte_across_a_cut() {
    whole(Family::V6, true);
}

#[test]
fn uploads_bring_every_byte_in_both_families() {
    let _share = MachineShare::take(Share::Percent(50));
    let stage = Stage::two_slower_links();
    let _server = stage.server(&[]);
    let _client = stage.client(&[]);
    let site = Site::start(&stage, Place::Inet);
    for family in [Family::V4, Family::V6] {
        upload(&stage, &site, &inet(family), 15 * MB, LIMIT);
    }
}
