//! The rates of two links add up.

use mpvpn_tests::{
    ping::ping,
    stage::{Place, SERVER6, Stage, TUNNEL, path_of},
    tcp::{Sink, Way},
};

/// Two links of 100 Mbit/s must carry clearly more than one could.
const MORE_THAN_ONE_LINK: f64 = 130.0;

fn rate(way: Way, client: &[&str]) -> f64 {
    let stage = Stage::two_links();
    let server = stage.server(&[]);
    let client = stage.client(client);
    for link in ["eth1", "eth2"] {
        client.until_path(link, "active", std::time::Duration::from_secs(5));
    }
    let sink = Sink::start(&stage, Place::Server, 5201);
    let report = sink.tcp(&stage, Place::Client, TUNNEL, 8, way, 6).finish();
    let sender = if way == Way::Up { client.status() } else { server.status()["clients"][0].clone() };
    // Those of other classes may come first.
    let paths = sender["paths"].as_array().expect("paths");
    let used: Vec<_> = paths.iter().filter(|path| path["class"] == "default").collect();
    assert_eq!(used.len(), 2, "{sender:#}");
    for path in used {
        let sent = path["tx_bytes"].as_u64().expect("tx_bytes");
        assert!(sent > 5_000_000, "{way:?}: {} carried only {sent} bytes: {sender:#}", path["id"]);
    }
    report.megabits()
}

#[test]
fn eight_uploads_use_both_links() {
    let rate = rate(Way::Up, &[]);
    assert!(rate > MORE_THAN_ONE_LINK, "{rate:.0} Mbit/s");
}

#[test]
fn eight_downloads_use_both_links() {
    let rate = rate(Way::Down, &[]);
    assert!(rate > MORE_THAN_ONE_LINK, "{rate:.0} Mbit/s");
}

#[test]
fn eight_flows_that_keep_their_paths_use_both_links() {
    let rate = rate(Way::Up, &["--scheduler", "flow"]);
    assert!(rate > MORE_THAN_ONE_LINK, "{rate:.0} Mbit/s");
}

#[test]
fn links_may_be_ipv6_only_outside() {
    let rate = rate(Way::Up, &["--server", SERVER6]);
    assert!(rate > MORE_THAN_ONE_LINK, "{rate:.0} Mbit/s");
}

#[test]
fn failover_leaves_the_second_link_alone_while_the_first_is_alive() {
    let stage = Stage::two_links();
    let _server = stage.server(&[]);
    let client = stage.client(&["--scheduler", "failover"]);
    let sink = Sink::start(&stage, Place::Server, 5201);
    let before = stage.counters(Place::Client, "eth2").1;
    let report = sink.tcp(&stage, Place::Client, TUNNEL, 4, Way::Up, 3).finish();
    let second = stage.counters(Place::Client, "eth2").1 - before;
    assert!(report.megabits() > 50.0, "{:.0} Mbit/s over the first link", report.megabits());
    assert!(second < 500_000, "{second} bytes over the link that should wait");
    assert!(path_of(&client.status(), "eth2").is_some(), "the second link has a path all the same");
}

#[test]
fn the_tunnel_adds_little_to_an_idle_links_round_trip() {
    let stage = Stage::two_links();
    let _server = stage.server(&[]);
    let _client = stage.client(&[]);
    let pings = ping(&stage, Place::Client, TUNNEL, 20);
    assert!(pings.answers.len() >= 19, "{} of {} pings answered", pings.answers.len(), pings.sent);
    let rtt = pings.median_rtt_ms();
    assert!((25.0..40.0).contains(&rtt), "{rtt} ms over links of 25 ms");
}
