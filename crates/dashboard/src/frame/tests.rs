use std::net::SocketAddr;

use mpvpn_status::SessionSummary;

use super::*;

fn path(link: &str, state: PathState, rtt_ms: f64, tx_bytes: u64) -> Path {
    let address: SocketAddr = "192.0.2.1:4433".parse().unwrap();
    let value = serde_json::json!({
        "id": format!("default/{link}/0"), "class": "default", "link": link, "local": address, "remote": address,
        "state": state, "reason": "", "rtt_ms": rtt_ms, "min_rtt_ms": 1.0, "jitter_ms": 0.0, "loss_pct": 2.0,
        "recent_packets": 100,
        "cwnd_bytes": 0, "in_flight_bytes": 0, "rate_bps": 0, "tx_bytes": tx_bytes, "rx_bytes": 0, "tx_packets": 0,
        "rx_packets": 0, "lost_packets": 0, "mtu": 1400,
    });
    serde_json::from_value(value).unwrap()
}

#[test]
fn a_link_is_sampled_with_its_best_path_and_a_silent_one_without() {
    let mut status = Status::new(Role::Client);
    status.links = vec![Link::new("eth0"), Link::new("wwan0")];
    status.paths = vec![
        path("eth0", PathState::Active, 30.0, 0),
        path("eth0", PathState::Active, 20.0, 0),
        path("eth0", PathState::Standby, 1.0, 0),
        path("wwan0", PathState::Down, 5.0, 0),
    ];
    let mut meter = RateMeter::between_all();
    meter.take_status(&status);
    let sample = meter.sample(&status);
    assert_eq!((sample.links[0].1.rtt_ms, sample.links[0].1.loss), (Some(20.0), Some(2.0)));
    assert_eq!((sample.links[1].1.rtt_ms, sample.links[1].1.loss), (None, None));
}

#[test]
fn live_rates_are_measured_over_half_a_second_at_least() {
    let mut meter = RateMeter::live();
    let mut status = Status::new(Role::Client);
    let mut rate_at = |uptime, rx_bytes| {
        status.uptime_s = uptime;
        status.links = vec![Link { rx_bytes, ..Link::new("eth0") }];
        meter.take_status(&status);
        meter.total(&status).down
    };
    assert_eq!(rate_at(10.0, 0), 0.0);
    assert_eq!(rate_at(10.25, 1000), 0.0);
    assert_eq!(rate_at(10.5, 1000), 16_000.0);
    assert_eq!(rate_at(10.75, 900_000), 16_000.0);
    assert_eq!(rate_at(0.1, 5000), 0.0, "another process");
}

/// At a server `tx` is towards the client.
#[test]
fn a_shown_session_has_an_identifier_and_rates_like_its_paths() {
    let mut meter = RateMeter::between_all();
    let overview = |uptime_s, tx_bytes| {
        let mut status = Status::new(Role::Server);
        status.uptime_s = uptime_s;
        status.clients = vec![Client {
            user: "alice".into(),
            addresses: vec!["10.0.0.7/24".parse().unwrap()],
            connected_s: 5.0,
            tx_bytes,
            rx_bytes: 0,
            classes: Vec::new(),
            resequencing: None,
            paths: vec![path("", PathState::Active, 9.0, 2 * tx_bytes)],
        }];
        let sessions = (7..9).map(|id| SessionSummary {
            id,
            user: "alice".into(),
            address: None,
            connected_s: 5.0,
            tx_bytes,
            rx_bytes: 0,
        });
        Overview { status, shown: vec![7], sessions: sessions.collect() }
    };
    meter.take_overview(&overview(1.0, 0));
    meter.take_overview(&overview(2.0, 1000));
    let shown = Shown { ids: vec![7, 99], found: 2 };
    let frames = meter.server_frames(overview(2.0, 1000), &[&shown]).unwrap();
    let frame: Value = serde_json::from_slice(&frames[0]).unwrap();
    let client = &frame["clients"][0];
    assert_eq!((&client["id"], &client["tx_bps"], &client["rx_bps"]), (&"7".into(), &8000.into(), &0.into()));
    assert_eq!(
        (&client["addresses"][0], &client["paths"][0]["tx_bps"]),
        (&"10.0.0.7/24".into(), &16_000.into())
    );
    assert_eq!(client["paths"][0]["id"], "default//0");
    assert_eq!((&frame["sessions_total"], &frame["sessions_found"]), (&2.into(), &2.into()));
    assert_eq!(frame["clients"].as_array().unwrap().len(), 1, "the other one has left");
    let sample = meter.server_sample(&overview(2.0, 1000), &[7].into());
    assert_eq!(sample.sessions, [(7, "alice".to_owned(), history::Rates { down: 8000.0, up: 0.0 })]);
}
