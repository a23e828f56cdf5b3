//! `mpvpn ping`, `mpvpn status --watch` and `mpvpn measure`: what they say is what happens.

use std::{
    fs::{self, File},
    io::{BufRead, BufReader},
    path::PathBuf,
    process::{Child, Output, Stdio},
    time::{Duration, Instant},
};

use mpvpn_tests::{
    eventually,
    machine_share::{MachineShare, Share},
    ping::reaches,
    testbed::{Host, MpvpnProcess, SLOW_LINK, TUNNEL, Testbed, binary, inet4, paths_of},
};
use serde_json::Value;

/// The server's IPv6 address in the tunnel.
const TUNNEL6: &str = "fd00:6d70:766e::1";

/// Runs a command of `mpvpn` for this client.
fn ask(testbed: &Testbed, client: &MpvpnProcess, words: &[&str]) -> Output {
    let socket = client.socket().to_str().expect("an ASCII path").to_owned();
    testbed.mpvpn(Host::Client, &[words, &["--api-socket", &socket]].concat())
}

/// The lines of JSON that a command of `mpvpn` prints.
fn json_of(output: &Output) -> Vec<Value> {
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!text.is_empty(), "nothing was printed: {errors}");
    let parse = |line: &str| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
    text.lines().map(parse).collect()
}

/// The paths on which requests left, and on which answers arrived.
fn paths_of_pings(lines: &[Value]) -> (Vec<String>, Vec<String>) {
    let text = |value: &Value| value.as_str().unwrap_or("none").to_owned();
    let out = lines.iter().flat_map(|line| line["out"].as_array().into_iter().flatten().map(text));
    (out.collect(), lines.iter().map(|line| text(&line["back"])).collect())
}

#[test]
fn ping_says_which_paths_the_answers_took() {
    let testbed = Testbed::new(&[SLOW_LINK, "40mbit,30ms,queue=60ms"]);
    let (_server, client) = (testbed.server(&[]), testbed.client(&[]));
    for (host, more) in [(TUNNEL, &[][..]), (&inet4(), &[]), (TUNNEL6, &["-6"])] {
        reaches(&testbed, Host::Client, host);
        let words = [&["ping", host, "-c", "5", "-i", "0.1", "--json"], more].concat();
        let mut lines = json_of(&ask(&testbed, &client, &words));
        let summary = lines.pop().expect("a summary");
        assert_eq!((&summary["sent"], &summary["answered"]), (&5.into(), &5.into()), "{host}: {summary}");
        let rtt = summary["rtt_ms"]["min"].as_f64().expect("a time");
        assert!((24.0..60.0).contains(&rtt), "{host}: {summary}");
        let (out, back) = paths_of_pings(&lines);
        let is_quick =
            |path: &String| path.starts_with("critical/eth1/") || path.starts_with("default/eth1/");
        assert!(out.len() == 5 && out.iter().chain(&back).all(is_quick), "{host}: {out:?} {back:?}");
    }
    testbed.link(1).cut();
    client.wait_for_path("eth1", "down", Duration::from_secs(10));
    let mut lines = json_of(&ask(&testbed, &client, &["ping", TUNNEL, "-c", "5", "-i", "0.1", "--json"]));
    let summary = lines.pop().expect("a summary");
    assert_eq!(summary["answered"], 5, "{summary}");
    let (out, back) = paths_of_pings(&lines);
    let is_slow = |path: &String| path.contains("/eth2/");
    assert!(out.iter().chain(&back).all(is_slow), "{out:?} {back:?}");
}

#[test]
fn ping_counts_losses_and_names_what_it_cannot_reach() {
    let testbed = Testbed::new(&[SLOW_LINK]);
    let (_server, client) = (testbed.server(&[]), testbed.client(&[]));
    // The filter of the server answers requests to its other addresses with ICMP errors.
    let output = ask(&testbed, &client, &["ping", "10.0.0.77", "-c", "3", "-i", "0.1", "-W", "0.3"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("3 sent, 0 answered, 100.0 % lost") && text.contains("lost  out "), "{text}");
    let output = ask(&testbed, &client, &["ping", "no-such-host.invalid", "-c", "1"]);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(1) && text.contains("`no-such-host.invalid`"), "{text}");
}

#[test]
fn a_watched_status_is_printed_again_and_again_and_survives_a_restart() {
    let testbed = Testbed::new(&[SLOW_LINK]);
    let (_server, mut client) = (testbed.server(&[]), testbed.client(&[]));
    let binary = binary();
    let socket = client.socket().to_owned();
    let mut watch = testbed
        .command(Host::Client, binary.to_str().expect("an ASCII path"))
        .args(["status", "--watch", "0.2", "--json", "--api-socket"])
        .arg(&socket)
        .stdout(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut lines = BufReader::new(watch.stdout.take().expect("a pipe")).lines();
    let began = Instant::now();
    for _ in 0..3 {
        let line = lines.next().expect("it goes on").expect("text");
        let status: Value = serde_json::from_str(&line).expect("JSON");
        assert_eq!(status["state"], "up");
    }
    assert!(began.elapsed() >= Duration::from_millis(350), "it waits in between");
    client.terminate();
    let line = lines.next().expect("it goes on").expect("text");
    // One more status may have been under way.
    let line = if line.starts_with('{') { lines.next().expect("it goes on").expect("text") } else { line };
    assert!(line.starts_with("mpvpn: cannot show the status: "), "{line}");
    drop(lines);
    let ended = watch.wait().expect("it ends when nobody reads any more");
    assert!(ended.success(), "{ended}");
}

/// Starts a command of `mpvpn` for this client, with its output in the lab's directory.
fn start(testbed: &Testbed, client: &MpvpnProcess, words: &[&str]) -> (Child, PathBuf) {
    let (binary, output) = (binary(), testbed.file("measure", Host::Client));
    let file = File::create(&output).expect("a file in the lab's directory");
    let child = testbed
        .command(Host::Client, binary.to_str().expect("an ASCII path"))
        .args(words)
        .arg("--api-socket")
        .arg(client.socket())
        .stdin(Stdio::null())
        .stdout(file.try_clone().expect("a descriptor"))
        .stderr(file)
        .spawn()
        .expect("it starts");
    (child, output)
}

fn interrupt(child: &Child) {
    let pid = rustix::process::Pid::from_child(child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).expect("it runs");
}

/// The links of the paths of a class that carry data.
fn active_links(status: &Value, class: &str) -> Vec<String> {
    let active = paths_of(status, class).into_iter().filter(|path| path["state"] == "active");
    let mut links: Vec<String> = active.filter_map(|path| path["link"].as_str().map(str::to_owned)).collect();
    links.sort();
    links.dedup();
    links
}

fn has_measured_class(status: &Value) -> bool {
    status["classes"].as_array().is_some_and(|all| all.iter().any(|class| class["name"] == "measure"))
}

#[test]
fn a_server_without_a_responder_says_how_to_switch_it_on_and_ctrl_c_restores_everything() {
    let testbed = Testbed::two_slow_links();
    let file = testbed.dir().join("server.toml");
    fs::write(&file, "").expect("a file in the lab's directory");
    let (server, client) = (testbed.server(&["--config", "server.toml"]), testbed.client(&[]));
    let output = ask(&testbed, &client, &["measure"]);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("does not answer measurements at 10.0.0.1:9494"), "{text}");
    assert!(text.contains("set `measure = true` in its file"), "{text}");
    assert!(!has_measured_class(&client.status()), "nothing is left");

    fs::write(&file, "measure = true\n").expect("a file in the lab's directory");
    let reload = ["config", "reload", "--api-socket", server.socket().to_str().expect("an ASCII path")];
    let output = testbed.mpvpn(Host::Server, &reload);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("measure"), "{text}");
    // It is there for the tunnel only.
    for address in ["192.0.2.1", "10.0.0.1"] {
        let connect = ["timeout", "1", "bash", "-c", &format!("exec 3<>/dev/tcp/{address}/9494")];
        let tried = testbed.output_of(Host::Inet, Duration::from_secs(5), &connect);
        assert!(!tried.status.success(), "{address} answers outside of the tunnel");
    }
    let (json, page) = (testbed.dir().join("m.json"), testbed.dir().join("m.md"));
    let words = ["--json", json.to_str().expect("ASCII"), "--report", page.to_str().expect("ASCII")];
    let (mut child, output) =
        start(&testbed, &client, &[&["measure", "--seconds", "3"], &words[..]].concat());
    // The first load over one link alone.
    client.wait_for_status(Duration::from_secs(40), "eth1 alone", |status| {
        match (active_links(status, "measure").as_slice(), active_links(status, "default").as_slice()) {
            ([only], [_, _]) if only == "eth1" => Ok(()),
            (measured, others) => Err(format!("measured flows use {measured:?}, others {others:?}")),
        }
    });
    eventually(Duration::from_secs(30), "a result over eth1", || {
        let text = fs::read_to_string(&output).unwrap_or_default();
        match text.contains("TCP down, 1 flow over eth1\n    ") {
            true => Ok(()),
            false => Err(text),
        }
    });
    interrupt(&child);
    let ended = child.wait().expect("it ends");
    let text = fs::read_to_string(&output).expect("its output");
    assert_eq!(ended.code(), Some(1), "{text}");
    assert!(text.contains("the measurement was interrupted") && text.contains("## TCP"), "{text}");
    assert!(text.lines().last().is_some_and(|line| line.starts_with("Load adds delay: ")), "{text}");
    assert!(!has_measured_class(&client.status()), "nothing is left");
    let report: Value = serde_json::from_str(&fs::read_to_string(&json).expect("a file")).expect("JSON");
    let row = &report["tcp"][0];
    assert!(
        row["link"] == "eth1" && row["bits_per_second"].as_f64().is_some_and(|rate| rate > 15e6),
        "{row}"
    );
    assert!(fs::read_to_string(&page).expect("a page").contains("![TCP with 8 flows over time](m-tcp.svg)"));
    assert!(testbed.dir().join("m-tcp.svg").exists());
}

#[test]
fn a_cut_moves_measured_flows_only() {
    let _share = MachineShare::take(Share::Percent(40));
    let testbed = Testbed::two_slow_links();
    let (_server, client) = (testbed.server(&["--measure"]), testbed.client(&[]));
    let json = testbed.dir().join("cut.json");
    let words = ["measure", "--long-only", "--cut", "eth1", "--json", json.to_str().expect("ASCII")];
    let (mut child, output) = start(&testbed, &client, &words);
    client.wait_for_status(Duration::from_secs(40), "the cut", |status| {
        match (active_links(status, "measure").as_slice(), active_links(status, "default").as_slice()) {
            ([only], [_, _]) if only == "eth2" => Ok(()),
            (measured, others) => Err(format!("measured flows use {measured:?}, others {others:?}")),
        }
    });
    let ended = child.wait().expect("it ends");
    let text = fs::read_to_string(&output).expect("its output");
    assert!(ended.success(), "{text}");
    let report: Value = serde_json::from_str(&fs::read_to_string(&json).expect("a file")).expect("JSON");
    let cut = &report["cut"];
    assert_eq!(cut["rows"].as_array().map(Vec::len), Some(60), "{text}");
    let rate = |key: &str| cut[key].as_f64().expect("a rate");
    let [before, during, after] =
        ["before", "during", "after"].map(|part| rate(&format!("{part}_bits_per_second")));
    assert!(during < 0.75 * before && during < 0.75 * after && during > 20e6, "{before} {during} {after}");
    assert!(rate("longest_silence_ms") < 2000.0, "{cut}");
    let closing = text.lines().last().unwrap_or_default();
    assert!(closing.starts_with("While eth1 was not used, a download carried "), "{text}");
}

#[test]
fn browsers_in_the_lan_measure_the_whole_chain() {
    let testbed = Testbed::with_lan(&[SLOW_LINK]);
    let (_server, client) = (testbed.server(&["--measure"]), testbed.client(&["--share", "lan0"]));
    let (mut child, output) = start(&testbed, &client, &["measure", "--from-lan", "0.0.0.0:8080"]);
    let router = testbed.run(Host::Lan, &["sh", "-c", "ip -4 route show default | cut -d' ' -f3"]);
    let url = format!("http://{}:8080", router.trim());
    let curl = |more: &[&str]| {
        let words = [&["curl", "-sS", "-m", "15"], more].concat();
        let output = testbed.output_of(Host::Lan, Duration::from_secs(20), &words);
        (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    eventually(Duration::from_secs(10), "the page", || match curl(&[&url]) {
        (true, page) if page.contains("<h1>Speed test through the tunnel</h1>") => Ok(()),
        (_, other) => Err(other + &fs::read_to_string(&output).unwrap_or_default()),
    });
    let (works, times) =
        curl(&["-o", "/dev/null", "-w", "%{http_code} %{time_total}", &format!("{url}/ping")]);
    let (code, seconds) = times.split_once(' ').expect("two words");
    let seconds: f64 = seconds.parse().expect("a number");
    assert!(works && code == "200" && (0.024..0.2).contains(&seconds), "a round trip over the link: {times}");
    // The browser ends a download; until then it comes at the rate of the link.
    let (_, bytes) = curl(&["-m", "3", "-o", "/dev/null", "-w", "%{size_download}", &format!("{url}/down")]);
    let bytes: f64 = bytes.parse().expect("a number");
    assert!((4e6..16e6).contains(&bytes), "{bytes} bytes in 3 s of 40 Mbit/s");
    let body = testbed.dir().join("body");
    fs::write(&body, vec![0; 4 << 20]).expect("a file in the lab's directory");
    let data = format!("@{}", body.display());
    let up =
        ["--data-binary", &data, "-o", "/dev/null", "-w", "%{http_code} %{time_total}", &format!("{url}/up")];
    let (works, times) = curl(&up);
    let (code, seconds) = times.split_once(' ').expect("two words");
    let seconds: f64 = seconds.parse().expect("a number");
    // 33.5 Mbit over 40 Mbit/s, without what waits in the sockets.
    assert!(works && code == "200" && seconds > 0.2, "{times}");
    let (_, code) = curl(&[
        "-H",
        "Sec-Fetch-Site: cross-site",
        "-o",
        "/dev/null",
        "-w",
        "%{http_code}",
        &format!("{url}/down"),
    ]);
    assert_eq!(code, "403", "a page of another origin");
    interrupt(&child);
    assert!(child.wait().expect("it ends").success());
}
