//! Rates and quotas of users.

use std::{
    process::Output,
    time::{Duration, Instant},
};

use mpvpn_tests::{
    eventually,
    http::TestPages,
    iperf::IperfServer,
    machine_share::{MachineShare, Share},
    ping::{Ping, reaches},
    testbed::{Direction, Host, TUNNEL, Testbed, binary, inet4},
};

use crate::users::Site;

/// How long a test waits for an expected state. Longer than on any busy machine; only a failing test takes
/// that long.
const SOON: Duration = Duration::from_secs(15);
/// Seconds of a measurement.
const SECONDS: u32 = 6;

/// Whether a rate is that of the user within 5 % (Mbit/s).
#[track_caller]
pub(crate) fn is_the_rate(what: &str, found: f64, limit: f64) {
    println!("{what}: {found:.2} of {limit} Mbit/s");
    assert!((0.95 * limit..=1.05 * limit).contains(&found), "{what}: {found:.2} of {limit} Mbit/s");
}

/// The rate without the first second (Mbit/s), in which windows grow and the first burst passes.
pub(crate) fn mean(seconds: &[f64]) -> f64 {
    seconds[1..].iter().sum::<f64>() / (seconds.len() - 1) as f64 / 1e6
}

pub(crate) fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned()
}

#[test]
fn tcp_gets_the_rates_of_its_user_as_packets_and_as_streams() {
    let _share = MachineShare::take(Share::Percent(50));
    let site = Site::new();
    let alice = site.add("alice", &["--up", "10mbit", "--down", "20mbit"]);
    let _alice = site.join_with(Host::Client, &alice, &[]).wait_until_up();
    // To the server's own address TCP travels as packets, to the internet as streams.
    for (host, to, lane) in [(Host::Server, TUNNEL.to_owned(), "packets"), (Host::Inet, inet4(), "streams")] {
        reaches(&site.testbed, Host::Client, &to);
        let iperf = IperfServer::start(&site.testbed, host, 5201);
        for (direction, limit) in [(Direction::Down, 20.0), (Direction::Up, 10.0)] {
            for flows in [1, 8] {
                let run = iperf.tcp(&site.testbed, Host::Client, &to, flows, direction, SECONDS);
                let report = run.finish();
                // The receiver reports its seconds of a download, and the mean of an upload.
                let rate =
                    if direction == Direction::Down { mean(&report.seconds) } else { report.megabits() };
                is_the_rate(&format!("{flows} flows {direction:?} as {lane}"), rate, limit);
            }
        }
    }
}

#[test]
fn udp_gets_the_rates_of_its_user_and_others_feel_nothing() {
    let _share = MachineShare::take(Share::Percent(50));
    let site = Site::new();
    let alice = site.add("alice", &["--up", "5mbit", "--down", "10mbit"]);
    let bob = site.add("bob", &[]);
    let _alice = site.join_with(Host::Client, &alice, &[]).wait_until_up();
    let _bob = site.join_with(Host::Other, &bob, &[]).wait_until_up();
    reaches(&site.testbed, Host::Other, TUNNEL);
    let iperf = IperfServer::start(&site.testbed, Host::Inet, 5201);
    for (direction, limit) in [(Direction::Down, 10.0), (Direction::Up, 5.0)] {
        let pings = Ping::every(&site.testbed, Host::Other, Duration::from_millis(20), TUNNEL, 5);
        let run = iperf.udp(&site.testbed, Host::Client, &inet4(), 30, direction, SECONDS);
        let report = run.finish();
        is_the_rate(&format!("UDP {direction:?}"), report.megabits(), limit);
        let pings = pings.finish();
        assert_eq!(pings.missing(), 0, "of {}", pings.sent);
    }
}

#[test]
fn two_sessions_of_a_user_share_the_rate() {
    let _share = MachineShare::take(Share::Percent(50));
    let site = Site::new();
    let alice = site.add("alice", &["--down", "20mbit"]);
    let _one = site.join_with(Host::Client, &alice, &[]).wait_until_up();
    let _two = site.join_with(Host::Other, &alice, &[]).wait_until_up();
    // Both run in the same seconds. The rate holds over time: what the bucket holds while threads are late,
    // 250 ms of the rate, may come in any of them, and a run ends with what its queue still held.
    let servers = [(Host::Client, 5201), (Host::Other, 5202)].map(|(host, port)| {
        reaches(&site.testbed, host, TUNNEL);
        (host, IperfServer::start(&site.testbed, Host::Server, port))
    });
    let runs = servers
        .each_ref()
        .map(|(host, iperf)| iperf.tcp(&site.testbed, *host, TUNNEL, 4, Direction::Down, 2 * SECONDS));
    let rates = runs.map(|run| {
        let mut seconds = run.finish().seconds;
        seconds.pop();
        mean(&seconds)
    });
    is_the_rate("two sessions together", rates[0] + rates[1], 20.0);
    assert!(rates.iter().all(|rate| *rate > 7.0), "{rates:?}");
}

#[test]
fn clients_of_other_programs_get_the_rates_of_their_user_over_tcp_too() {
    let _share = MachineShare::take(Share::Percent(50));
    let site = Site::new();
    let link = site.add("alice", &["--up", "10mbit", "--down", "20mbit"]);
    let token = link.strip_prefix("mpvpn://").and_then(|rest| rest.split('@').next()).expect("a token");
    let pages = TestPages::start(&site.testbed, Host::Inet);
    // Twelve seconds at the rate; the handshakes before them do not count.
    let url = pages.url(&inet4(), "30000000");
    let header = format!("Proxy-Authorization: Bearer {token}");
    let times = "%{size_download} %{time_starttransfer} %{time_total}";
    let args = ["curl", "-s", "--max-time", "40", "-o", "/dev/null", "-w", times];
    let more = ["--proxy-insecure", "-p", "-x", "https://192.0.2.1:4433", "--proxy-header", &header, &url];
    let printed = site.testbed.run(Host::Client, &[&args[..], &more].concat());
    let numbers: Vec<f64> = printed.split_whitespace().map(|number| number.parse().expect(number)).collect();
    let [bytes, begin, end] = numbers[..] else { panic!("{printed}") };
    println!("from {begin} s to {end} s");
    is_the_rate("CONNECT over HTTP/1.1", bytes * 8e-6 / (end - begin), 20.0);
}

#[test]
fn a_used_up_quota_ends_sessions_and_says_until_when() {
    let mut site = Site::new();
    let link = site.add("alice", &["--quota", "3MB"]);
    let bob = site.add("bob", &[]);
    let alice = site.join_with(Host::Client, &link, &[]).wait_until_up();
    let bob = site.join_with(Host::Other, &bob, &[]).wait_until_up();
    reaches(&site.testbed, Host::Client, &inet4());
    let shown = said(&site.user(&["show", "alice"]));
    assert!(shown.contains("of 3 MB used this month (UTC)"), "{shown}");

    let pages = TestPages::start(&site.testbed, Host::Inet);
    let script = format!("curl -s --max-time 10 -o /dev/null {} || true", pages.url(&inet4(), "5000000"));
    site.testbed.run(Host::Client, &["sh", "-c", &script]);
    let reason = "the quota of this user, 3 MB, is used up; it begins anew on 1 ";
    alice.wait_until_refused(SOON, reason);
    drop(alice);
    assert!(site.server.log().contains("alice used up the quota of 3.0 MB"), "{}", site.server.log());
    let listed = said(&site.user(&["list"]));
    assert!(listed.contains("quota-used-up"), "{listed}");

    // A restart gives nothing back.
    let refused = |site: &Site| {
        let mut again = site.join_with(Host::Client, &link, &[]);
        again.wait_until_refused(SOON, reason);
        assert!(again.interrupt().success());
    };
    refused(&site);
    assert!(site.server.terminate().success());
    site.server = Site::start_server(&site.testbed);
    refused(&site);
    eventually(SOON, "the reason is said", || match site.server.log().contains(reason) {
        true => Ok(()),
        false => Err(site.server.log()),
    });
    assert!(site.user(&["set", "alice", "--quota", "100MB"]).status.success());
    eventually(SOON, "the server knows", || {
        let status = site.server.status();
        let users = status["users"].as_array().expect("a list");
        let alice = users.iter().find(|user| user["name"] == "alice").expect("alice").clone();
        match (alice["state"].as_str(), alice["quota_used_bytes"].as_u64()) {
            (Some("active"), Some(3_000_000..)) => Ok(()),
            _ => Err(alice.to_string()),
        }
    });
    let _alice = site.join_with(Host::Client, &link, &[]).wait_until_up();
    drop(bob);
}

#[test]
fn a_quota_is_exceeded_by_little_at_full_speed_and_its_use_is_shown_within_a_second() {
    let testbed = Testbed::unlimited();
    let site = Site { server: Site::start_server(&testbed), testbed };
    let link = site.add("alice", &["--quota", "60MB"]);
    let alice = site.join_with(Host::Client, &link, &[]).wait_until_up();
    let socket = site.server.socket().to_str().expect("an ASCII path");
    std::fs::write(site.testbed.dir().join("server.toml"), format!("api-socket = '{socket}'\n"))
        .expect("a file");
    let used = || {
        let shown = site.user(&["show", "alice", "--json", "--config", "server.toml"]);
        let shown: serde_json::Value = serde_json::from_slice(&shown.stdout).expect("JSON");
        shown["quota_used_bytes"].as_u64().expect("a number")
    };
    let pages = TestPages::start(&site.testbed, Host::Inet);
    let fetch = |bytes: &str| {
        let script = format!("curl -s --max-time 20 -o /dev/null {} || true", pages.url(&inet4(), bytes));
        site.testbed.run(Host::Client, &["sh", "-c", &script]);
    };
    fetch("5000000");
    std::thread::sleep(Duration::from_secs(1));
    let shown = used();
    assert!((5_000_000..8_000_000).contains(&shown), "{shown} after 5 MB");
    fetch("1000000000");
    alice.wait_until_refused(SOON, "the quota of this user, 60 MB, is used up");
    let excess = used().checked_sub(60_000_000).expect("the whole quota is used");
    println!("{excess} bytes beyond the quota of 60 MB");
    assert!(excess <= 1_200_000, "{excess} bytes: more than 2 %");
}

#[test]
fn proxies_and_clients_inside_tcp_lose_access_at_once_too() {
    let site = Site::new();
    let alice = site.add("alice", &[]);
    let bob = site.add("bob", &[]);
    let inside_tcp = site.join_with(Host::Client, &alice, &["--transport", "tcp"]).wait_until_up();
    reaches(&site.testbed, Host::Client, TUNNEL);
    let token = bob.strip_prefix("mpvpn://").and_then(|rest| rest.split('@').next()).expect("a token");
    let args = ["proxy", "--socks5", "127.0.0.1:1080", "--server", "192.0.2.1:4433", "--insecure"];
    let more = ["--token", token, "--state-dir", "proxy-state"];
    let proxy = site.testbed.start(Host::Other, &[&args[..], &more].concat()).wait_until_up();

    let pages = TestPages::start(&site.testbed, Host::Inet);
    let url = pages.url(&inet4(), "1000000000");
    let mut download = site.testbed.command(Host::Other, "curl");
    download.args(["-s", "--max-time", "30", "-o", "/dev/null", "--limit-rate", "1M"]);
    let mut download = download.args(["-x", "socks5://127.0.0.1:1080", &url]).spawn().expect("curl runs");
    let socks = || site.server.status()["flows"]["stream"].as_u64();
    eventually(SOON, "the download runs", || {
        if socks() == Some(1) { Ok(()) } else { Err(format!("{:?}", socks())) }
    });

    for (name, process) in [("alice", &inside_tcp), ("bob", &proxy)] {
        let begin = Instant::now();
        assert!(site.user(&["revoke", name]).status.success());
        process.wait_until_refused(SOON, "the access of this user was revoked");
        let took = begin.elapsed();
        println!("{name} is gone after {took:?}");
        assert!(took < Duration::from_secs(2), "{took:?}");
    }
    eventually(SOON, "no connection is left", || {
        if socks() == Some(0) { Ok(()) } else { Err(format!("{:?}", socks())) }
    });
    assert_ne!(download.wait().expect("our own child").code(), Some(0));
}

#[test]
fn measurements_as_streams_have_the_rates_of_their_user() {
    let _share = MachineShare::take(Share::Percent(50));
    let testbed = Testbed::two_clients();
    let server = testbed.server(&["--auth", "token", "--state-dir", "state", "--measure"]);
    let site = Site { server, testbed };
    let alice = site.add("alice", &["--up", "10mbit", "--down", "20mbit"]);
    let client = site.join_with(Host::Client, &alice, &[]).wait_until_up();
    let json = site.testbed.dir().join("measured.json");
    let [json_path, socket] = [&json, client.socket()].map(|path| path.to_str().expect("an ASCII path"));
    let words = ["measure", "--link", "eth1", "--lane", "stream", "--seconds", "2", "--json", json_path];
    let binary = binary();
    let command =
        [&[binary.to_str().expect("an ASCII path")], &words[..], &["--api-socket", socket]].concat();
    let output = site.testbed.output_of(Host::Client, Duration::from_secs(120), &command);
    assert!(output.status.success(), "{}", said(&output));
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(printed.contains("TCP down, 1 flow over eth1\n"), "{printed}");
    assert!(printed.contains("## UDP down, over eth1\n") && !printed.contains("all links"), "{printed}");
    let closing = printed.lines().last().unwrap_or_default();
    assert!(closing.starts_with("eth1 carried ") && closing.contains(" Load adds delay: "), "{printed}");
    let text = std::fs::read_to_string(&json).expect("a report");
    let report: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(report["missing"].as_array().map(Vec::len), Some(0), "{}", said(&output));
    let number = |value: &serde_json::Value| value.as_f64().unwrap_or(f64::NAN);
    let limit_of = |row: &serde_json::Value| if row["direction"] == "down" { 20.0 } else { 10.0 };
    let rows = report["tcp"].as_array().expect("rows");
    assert_eq!(rows.len(), 4, "{text}");
    for row in rows {
        // Bytes that pass in the burst of the first half second belong to no rate.
        let series = row["series"].as_array().expect("points");
        let later: Vec<f64> = series[1..].iter().map(|point| number(&point["bits_per_second"])).collect();
        let rate = later.iter().sum::<f64>() / later.len() as f64 / 1e6;
        is_the_rate(&format!("{} flows {}", row["flows"], row["direction"]), rate, limit_of(row));
        assert!(number(&row["loaded"]["answered"]) > 20.0, "the latency under load is measured: {row}");
    }
    let sweeps = report["udp"].as_array().expect("sweeps");
    assert_eq!(sweeps.len(), 2, "{text}");
    for sweep in sweeps {
        // The steps are short here, so a busy machine loses some of them.
        let best = number(&sweep["best_bits_per_second"]) / 1e6;
        assert!(best > 0.3 * limit_of(sweep) && best < 1.05 * limit_of(sweep), "{sweep}");
    }
}
