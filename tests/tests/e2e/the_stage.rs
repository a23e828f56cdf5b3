//! The stage itself, without a tunnel: what the other stories take for granted.

use std::{thread, time::Duration, time::SystemTime};

use mpvpn_tests::{
    http::{Download, MB, Site, upload},
    ping::{Ping, ping},
    stage::{Direction, Place, Stage, inet4},
    tcp::{Sink, Way},
};

const SERVER: &str = "192.0.2.1";

#[test]
fn links_have_the_rate_and_the_delay_that_they_say() {
    let stage = Stage::two_links();
    let pings = ping(&stage, Place::Client, SERVER, 10);
    let rtt = pings.median_rtt_ms();
    assert!((25.0..28.0).contains(&rtt), "{rtt} ms over a link of 25 ms");
    let sink = Sink::start(&stage, Place::Server, 5201);
    for way in [Way::Up, Way::Down] {
        let rate = sink.tcp(&stage, Place::Client, SERVER, 4, way, 3).finish().megabits();
        assert!((70.0..98.0).contains(&rate), "{way:?}: {rate:.0} Mbit/s over a link of 100");
    }
    // iperf3 answers UDP from the address of the interface, not from the one that was asked.
    let report = sink.udp(&stage, Place::Client, "10.101.0.1", 80, Way::Up, 2).finish();
    assert!(report.loss_pct < 1.0, "{} % of 80 Mbit/s lost on a link of 100", report.loss_pct);
}

#[test]
fn a_silent_link_shows_as_a_gap_between_pings() {
    let stage = Stage::two_links();
    let dense = Ping::dense(&stage, Place::Client, SERVER, 3);
    thread::sleep(Duration::from_millis(800));
    let from = SystemTime::now();
    stage.link(1).silence(Direction::Down);
    thread::sleep(Duration::from_millis(500));
    stage.link(1).heal();
    thread::sleep(Duration::from_millis(500));
    let gap = dense.finish().longest_gap(from, SystemTime::now());
    assert!((400..700).contains(&gap.as_millis()), "{gap:?} of silence, 500 ms were made");
}

#[test]
fn bytes_arrive_whole_and_the_host_behind_is_out_of_reach() {
    let stage = Stage::two_links();
    let site = Site::start(&stage, Place::Server);
    let limit = Duration::from_secs(20);
    Download::start(&stage, &site, SERVER, 10 * MB, limit, &[]).finish();
    Download::start(&stage, &site, "2001:db8::1", 10 * MB, limit, &[]).finish();
    upload(&stage, &site, SERVER, 10 * MB, limit);
    assert!(ping(&stage, Place::Client, &inet4(), 3).answers.is_empty(), "reached without a tunnel");
    assert_eq!(stage.network_state(Place::Client), stage.network_state(Place::Client));
}
