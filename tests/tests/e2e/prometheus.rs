//! The dashboard and the alert rules of docs/operations, evaluated by a real Prometheus.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use mpvpn_tests::{
    eventually,
    iperf::IperfServer,
    machine_share::{MachineShare, Share},
    prometheus::{Prometheus, promtool},
    testbed::{Direction, Host, SERVER, TUNNEL, Testbed},
};
use serde_json::Value;

/// Address of the metrics at each host, the server's as it is inside the tunnel.
const CLIENT_METRICS: &str = "127.0.0.1:9464";
const SERVER_METRICS: &str = "10.0.0.1:9464";
/// How long a test waits for an expected state. Only a failing test takes that long.
const TIMEOUT: Duration = Duration::from_secs(60);
/// How often Prometheus is asked: it scrapes once a second.
const POLL_INTERVAL: Duration = Duration::from_millis(300);

fn operations(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/operations").join(name)
}

fn dashboard() -> Value {
    let text = fs::read_to_string(operations("mpvpn-dashboard.json")).expect("the dashboard");
    serde_json::from_str(&text).expect("JSON")
}

/// The expressions of the dashboard with their panels, as Grafana sends them: with values for its variables.
fn expressions(dashboard: &Value) -> Vec<(String, String)> {
    let panels = dashboard["panels"].as_array().expect("panels");
    let targets = panels.iter().flat_map(|panel| {
        let targets = panel["targets"].as_array().into_iter().flatten();
        targets.map(|target| (panel["title"].to_string(), target["expr"].as_str().expect("an expression")))
    });
    let filled = |expression: &str| expression.replace("$__rate_interval", "10s").replace("$instance", ".*");
    targets.map(|(panel, expression)| (panel, filled(expression))).collect()
}

/// The alert rules with short waits.
fn hurried_rules(testbed: &Testbed) -> PathBuf {
    let rules = fs::read_to_string(operations("mpvpn-alerts.yml")).expect("the rules");
    let hurried = ["1m", "2m", "5m", "10m"]
        .iter()
        .fold(rules, |rules, wait| rules.replace(&format!("for: {wait}\n"), "for: 1s\n"));
    let file = testbed.dir().join("rules.yml");
    fs::write(&file, hurried).expect("a file");
    file
}

/// Checks with `promtool` the metrics that a process serves.
fn check_metrics(testbed: &Testbed, address: &str) {
    let url = format!("http://{address}/metrics");
    let text = testbed.run(Host::Client, &["curl", "-sSf", "--max-time", "10", &url]);
    let file = testbed.file("metrics", Host::Client);
    fs::write(&file, &text).expect("a file");
    let output = promtool(&["check", "metrics"], &file);
    let said =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && said.trim().is_empty(), "promtool about {address}: {said}\n{text}");
}

fn value(series: &Value) -> f64 {
    series["value"][1].as_str().and_then(|text| text.parse().ok()).unwrap_or(f64::NAN)
}

/// Names of the alerts that fire, and labels of these.
fn firing(prometheus: &Prometheus<'_>) -> Result<Vec<Value>, String> {
    prometheus.query("ALERTS{alertstate=\"firing\"}")
}

#[test]
fn promtool_finds_nothing_wrong_with_the_alert_rules() {
    let output = promtool(
        &["check", "rules", operations("mpvpn-alerts.yml").to_str().expect("UTF-8")],
        Path::new("/dev/null"),
    );
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("rules found"), "{said}\n{output:?}");
}

#[test]
fn the_dashboard_and_the_rules_work_and_an_alert_fires_when_a_link_is_cut() {
    let _share = MachineShare::take(Share::Percent(50));
    let testbed = Testbed::new(&["50mbit,10ms,loss=4%", "50mbit,10ms"]);
    let users = ["--auth", "token", "--state-dir", "state"];
    let _server =
        testbed.server(&[&users[..], &["--metrics", "0.0.0.0:9464", "--metrics-users", "5"]].concat());
    let add = ["user", "add", "alice", "--json", "--host", SERVER, "--quota", "1TB", "--state-dir", "state"];
    let added = testbed.mpvpn(Host::Server, &add);
    let added: Value =
        serde_json::from_slice(&added.stdout).unwrap_or_else(|error| panic!("{error}: {added:?}"));
    let config = "[[link]]\nname = \"eth1\"\nquota = \"1TB\"\nup = \"50mbit\"\n[[class]]\nname = \"default\"\nfec = \"auto\"\n";
    fs::write(testbed.dir().join("client.toml"), config).expect("a file");
    let link = added["link"].as_str().expect("a join link");
    let args =
        ["client", link, "--config", "client.toml", "--path", "eth1", "--path", "eth2", "--lane", "datagram"];
    let client =
        testbed.start(Host::Client, &[&args[..], &["--metrics", CLIENT_METRICS]].concat()).wait_until_up();
    let prometheus = Prometheus::start(&testbed, &[CLIENT_METRICS, SERVER_METRICS], &hurried_rules(&testbed));
    let iperf = IperfServer::start(&testbed, Host::Server, 5201);
    let load = iperf.tcp(&testbed, Host::Client, TUNNEL, 4, Direction::Up, 15);
    let mut missing = vec![
        "8 * rate(mpvpn_link_transmit_bytes_total[5s]) > 1e5",
        "mpvpn_path_fec_ratio > 0",
        "rate(mpvpn_path_fec_made_good_packets_total[5s]) > 0",
        "rate(mpvpn_class_fec_recovered_packets_total[5s]) > 0",
        "rate(mpvpn_class_reorder_wait_seconds_total[5s]) > 0",
    ];
    eventually(TIMEOUT, "rates while traffic flows", || {
        missing.retain(|query| !prometheus.query(query).is_ok_and(|found| !found.is_empty()));
        if missing.is_empty() {
            return Ok(());
        }
        thread::sleep(POLL_INTERVAL);
        Err(format!("no data: {missing:?}"))
    });
    check_metrics(&testbed, CLIENT_METRICS);
    check_metrics(&testbed, SERVER_METRICS);

    let dashboard = dashboard();
    let mut empty = BTreeSet::new();
    let all = expressions(&dashboard);
    for (panel, expression) in &all {
        let series =
            prometheus.query(expression).unwrap_or_else(|error| panic!("{panel}: {expression}: {error}"));
        if series.is_empty() {
            empty.insert(panel.as_str());
        }
    }
    assert_eq!(empty, BTreeSet::new(), "panels without data, of {} expressions", all.len());
    let alice = prometheus.query("mpvpn_user_receive_bytes_total{user=\"alice\"}").expect("a query");
    assert!(value(&alice[0]) > 1e6, "{alice:?}");
    load.finish();

    eventually(TIMEOUT, "no alert but that of the lossy link", || {
        let rules = prometheus.rules()?;
        assert!(rules.len() > 10, "{} rules", rules.len());
        for rule in &rules {
            if rule["health"] != "ok" {
                return Err(format!("{rule:#}"));
            }
        }
        match firing(&prometheus)?
            .iter()
            .find(|alert| alert["metric"]["alertname"] != "MpvpnLinkLosesPackets")
        {
            Some(other) => Err(other.to_string()),
            None => Ok(()),
        }
    });
    testbed.link(2).cut();
    eventually(TIMEOUT, "the alert of the cut link", || {
        let alerts = firing(&prometheus)?;
        let fires = |name: &str| alerts.iter().any(|alert| alert["metric"]["alertname"] == name);
        let link = alerts.iter().find(|alert| alert["metric"]["alertname"] == "MpvpnLinkDown");
        match link.map(|alert| alert["metric"]["link"].as_str() == Some("eth2")) {
            Some(true) if fires("MpvpnOneLinkLeft") && !fires("MpvpnTunnelDown") => Ok(()),
            _ => Err(format!("{alerts:#?}")),
        }
    });
    testbed.link(2).restore();
    eventually(TIMEOUT, "the alert ends when the link is back", || {
        match firing(&prometheus)?.iter().find(|alert| alert["metric"]["alertname"] == "MpvpnLinkDown") {
            None => Ok(()),
            Some(alert) => Err(alert.to_string()),
        }
    });
    let up = prometheus.query("mpvpn_up").expect("a query");
    assert_eq!(up.iter().map(value).collect::<Vec<_>>(), [1.0, 1.0]);
    drop(client);
}
