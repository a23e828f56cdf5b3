//! Metrics for Prometheus, fetched by curl.

use std::{collections::BTreeMap, fs, time::Duration};

use mpvpn_tests::{
    eventually,
    ping::reaches,
    testbed::{Host, TUNNEL, Testbed},
};

/// Value of `--metrics`, on both hosts.
pub(crate) const METRICS_ADDRESS: &str = "127.0.0.1:9464";

/// The samples by name and labels.
pub(crate) fn scrape(testbed: &Testbed, host: Host) -> BTreeMap<String, f64> {
    let text = testbed
        .run(host, &["curl", "-sSf", "--max-time", "10", &format!("http://{METRICS_ADDRESS}/metrics")]);
    let samples = text.lines().filter(|line| !line.starts_with('#'));
    let parsed = samples.map(|line| {
        let (series, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("no sample: {line}"));
        (series.to_owned(), value.parse().unwrap_or_else(|_| panic!("no number: {line}")))
    });
    parsed.collect()
}

/// The value of a series, which must exist.
fn value_of(samples: &BTreeMap<String, f64>, series: &str) -> f64 {
    *samples.get(series).unwrap_or_else(|| panic!("no {series} in {samples:#?}"))
}

#[test]
fn counters_of_classes_links_and_paths_rise_with_traffic_at_both_ends() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&["--metrics", METRICS_ADDRESS]);
    // A class with a table has a connection of its own.
    fs::write(testbed.dir().join("client.toml"), "[[class]]\nname = 'critical'\n").expect("a file");
    let mut client = testbed.client(&["--metrics", METRICS_ADDRESS, "--config", "client.toml"]);
    reaches(&testbed, Host::Client, TUNNEL);
    for series in [
        "mpvpn_up",
        "mpvpn_link_up{link=\"eth2\"}",
        "mpvpn_class_up{class=\"critical\"}",
        "mpvpn_path_active{class=\"critical\",link=\"eth1\",path=\"0\"}",
    ] {
        eventually(Duration::from_secs(10), series, || match scrape(&testbed, Host::Client).get(series) {
            Some(1.0) => Ok(()),
            other => Err(format!("{other:?}")),
        });
    }
    let rising = [
        (Host::Client, "mpvpn_class_transmit_bytes_total{class=\"critical\"}"),
        (Host::Client, "mpvpn_class_receive_bytes_total{class=\"critical\"}"),
        (Host::Client, "mpvpn_link_transmit_bytes_total{link=\"eth1\"}"),
        (Host::Client, "mpvpn_path_transmit_packets_total{class=\"critical\",link=\"eth1\",path=\"0\"}"),
        (Host::Server, "mpvpn_class_receive_bytes_total{class=\"critical\"}"),
    ];
    let look = || rising.map(|(host, series)| value_of(&scrape(&testbed, host), series));
    let before = look();
    // Pings belong to `critical`.
    testbed.run(Host::Client, &["ping", "-q", "-i", "0.01", "-c", "100", "-s", "1000", TUNNEL]);
    let after = look();
    for (at, (_, series)) in rising.iter().enumerate() {
        assert!(after[at] > before[at], "{series}: {} after {}", after[at], before[at]);
    }
    // A stall of the machine counts in the smoothed round-trip time until further samples replace it.
    eventually(Duration::from_secs(10), "the round-trip time of a link of 25 ms", || {
        reaches(&testbed, Host::Client, TUNNEL);
        let samples = scrape(&testbed, Host::Client);
        let rtt = value_of(&samples, "mpvpn_path_rtt_seconds{class=\"critical\",link=\"eth1\",path=\"0\"}");
        if (0.02..0.06).contains(&rtt) { Ok(()) } else { Err(format!("{rtt} s")) }
    });
    assert_eq!(value_of(&scrape(&testbed, Host::Server), "mpvpn_clients"), 1.0);
    assert!(client.interrupt().success());
    // Counters keep the traffic of a client that has disconnected.
    eventually(Duration::from_secs(10), "the client to be gone", || {
        let samples = scrape(&testbed, Host::Server);
        let bytes = value_of(&samples, "mpvpn_class_receive_bytes_total{class=\"critical\"}");
        assert!(bytes >= after[4], "{bytes} after {}", after[4]);
        match value_of(&samples, "mpvpn_clients") {
            0.0 => Ok(()),
            clients => Err(format!("{clients} clients")),
        }
    });
}

#[test]
fn a_server_counts_handshakes_and_refusals_and_names_no_users_unless_it_is_told_to() {
    let testbed = Testbed::two_links();
    let args = ["--auth", "token", "--state-dir", "state", "--metrics", METRICS_ADDRESS];
    let mut server = testbed.server(&args);
    let refused = "mpvpn_refused_requests_total{status=\"401\"}";
    let completed = "mpvpn_handshakes_total{result=\"completed\"}";
    let samples = scrape(&testbed, Host::Server);
    assert_eq!((value_of(&samples, refused), value_of(&samples, completed)), (0.0, 0.0));

    let made_up = format!("mpvpn_{}", "A".repeat(43));
    testbed.start_client(&["--token", &made_up]).wait(Duration::from_secs(15));
    let samples = scrape(&testbed, Host::Server);
    assert!(value_of(&samples, refused) >= 1.0 && value_of(&samples, completed) >= 1.0, "{samples:#?}");

    let token = fs::read_to_string(testbed.dir().join("state/client-token")).expect("a token");
    let client = testbed.client(&["--token", token.trim(), "--metrics", METRICS_ADDRESS]);
    reaches(&testbed, Host::Client, TUNNEL);
    assert!(value_of(&scrape(&testbed, Host::Client), completed) >= 1.0);
    let users =
        |samples: &BTreeMap<String, f64>| samples.keys().filter(|name| name.contains("_user_")).count();
    assert_eq!(users(&scrape(&testbed, Host::Server)), 0, "nobody asked for users");
    drop(client);
    assert!(server.interrupt().success());

    let _server = testbed.server(&[&args[..], &["--metrics-users", "1"]].concat());
    let _client = testbed.client(&["--token", token.trim()]);
    reaches(&testbed, Host::Client, TUNNEL);
    let samples = scrape(&testbed, Host::Server);
    assert_eq!(value_of(&samples, "mpvpn_user_sessions{user=\"default\"}"), 1.0);
    assert!(value_of(&samples, "mpvpn_user_receive_bytes_total{user=\"default\"}") > 0.0);
}

#[test]
fn a_used_port_is_named_with_advice() {
    let testbed = Testbed::new(&["100mbit"]);
    let _server = testbed.server(&["--metrics", METRICS_ADDRESS]);
    let args = [
        "server",
        "--listen",
        "0.0.0.0:4434",
        "--auth",
        "none",
        "--tun-name",
        "other",
        "--metrics",
        METRICS_ADDRESS,
    ];
    let more = ["--cert", "server.crt", "--key", "server.key", "--api-socket", "other.sock"];
    let output = testbed.mpvpn(Host::Server, &[&args[..], &more].concat());
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    for word in [METRICS_ADDRESS, "in use", "--metrics", "ss -ltnp"] {
        assert!(said.contains(word), "no {word:?} in:\n{said}");
    }
}
