//! `mpvpn events` reports at both ends what changed, and why.

use std::{
    fs::File,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use mpvpn_tests::{
    eventually,
    iperf::IperfServer,
    testbed::{Direction, Host, MpvpnProcess, TUNNEL, Testbed, binary},
};
use serde_json::Value;

const SOON: Duration = Duration::from_secs(10);
/// A silent link is left within this time on a busy machine (ms).
const LONGEST_SILENCE: u64 = 600;
/// How long the link is silent (ms).
const CUT: u64 = 3000;

/// The number of the last event.
fn last_number(process: &MpvpnProcess) -> u64 {
    process.events().last().and_then(|event| event["number"].as_u64()).expect("it came up")
}

/// The events of link 1 after the event `number`.
fn on_link_1(process: &MpvpnProcess, number: u64) -> Vec<Value> {
    let is_new = |event: &Value| event["number"].as_u64() > Some(number);
    process.events().into_iter().filter(|event| is_new(event) && event["link"] == "eth1").collect()
}

fn is(event: &Value, name: &str) -> bool {
    event["event"] == name
}

fn texts(events: &[Value]) -> Vec<&str> {
    events.iter().filter_map(|event| event["text"].as_str()).collect()
}

#[test]
fn a_link_that_falls_silent_and_returns_is_reported_in_five_lines() {
    let testbed = Testbed::two_links();
    let server = testbed.server(&[]);
    let client = testbed.client(&[]);
    for link in ["eth1", "eth2"] {
        client.wait_for_path(link, "active", SOON);
    }
    let iperf = IperfServer::start(&testbed, Host::Server, 5201);
    let load = iperf.tcp(&testbed, Host::Client, TUNNEL, 4, Direction::Up, 12);
    thread::sleep(Duration::from_secs(2));
    let (before, before_at_server) = (last_number(&client), last_number(&server));
    let followed = testbed.file("events", Host::Client);
    let mut follower = Command::new(binary())
        .args(["events", "--follow", "--api-socket"])
        .arg(client.socket())
        .stdin(Stdio::null())
        .stdout(File::create(&followed).expect("a file"))
        .spawn()
        .expect("it starts");

    let cut = Instant::now();
    testbed.link(1).silence(Direction::Both);
    client.wait_for_path("eth1", "down", SOON);
    thread::sleep(Duration::from_millis(CUT).saturating_sub(cut.elapsed()));
    testbed.link(1).end_silence();
    let healed = cut.elapsed().as_millis() as u64;
    let story = eventually(SOON, "the return of the link among the events", || {
        let story = on_link_1(&client, before);
        let returned = story.iter().any(|event| is(event, "path_recovered") && event["class"] == "default");
        if returned { Ok(story) } else { Err(format!("{:#?}", texts(&story))) }
    });
    let back = cut.elapsed().as_millis() as u64;
    println!("{:#?}", texts(&story));

    let lost = story.iter().find(|event| is(event, "path_failed")).expect("the path was lost");
    assert_eq!(
        (&lost["kind"], &lost["class"], &lost["reason"]),
        (&"path".into(), &"default".into(), &"silent".into())
    );
    let silence = lost["silence_ms"].as_u64().expect("a number");
    assert!((20..=LONGEST_SILENCE).contains(&silence), "{lost:#}");
    assert!(lost["heartbeats"].as_u64() >= Some(3) && lost["working_paths"].as_u64() >= Some(1), "{lost:#}");
    let moved = ["reinjected_packets", "reinjected_stream_bytes"]
        .map(|field| lost[field].as_u64().expect("a number"));
    assert!(moved.iter().sum::<u64>() > 0, "a link under load has data in flight: {lost:#}");
    let restored = story.iter().find(|event| is(event, "path_recovered")).expect("it returned");
    let failed_ms = restored["failed_ms"].as_u64().expect("a number");
    let shortest = healed.saturating_sub(LONGEST_SILENCE);
    assert!((shortest..=back).contains(&failed_ms), "not {shortest} to {back} ms: {restored:#}");
    assert!(story.len() <= 5, "more than five lines: {:#?}", texts(&story));

    // A follower reads the same.
    eventually(SOON, "the same events by `--follow`", || {
        let lines = std::fs::read_to_string(&followed).expect("its output");
        match texts(&story).into_iter().find(|text| !lines.contains(text)) {
            None => Ok(()),
            Some(text) => Err(format!("`{text}` is missing:\n{lines}")),
        }
    });
    follower.kill().expect("it runs");
    follower.wait().expect("our own child");
    // The line of the log is the event.
    let log = client.log();
    let text = lost["text"].as_str().expect("a sentence");
    assert!(log.contains(text), "`{text}` is not in the log:\n{log}");

    // The server names the client, and why its path failed.
    let theirs = server.events();
    let is_new = |event: &&Value| event["number"].as_u64() > Some(before_at_server);
    let at_server: Vec<&Value> =
        theirs.iter().filter(is_new).filter(|event| is(event, "path_failed")).collect();
    let ours = |event: &&&Value| {
        let silence = event["silence_ms"].as_u64();
        event["address"].as_str().is_some_and(|address| address.starts_with("10.0.0."))
            && silence.is_some_and(|ms| ms <= 2 * LONGEST_SILENCE)
    };
    assert!(at_server.iter().any(|event| ours(&event)), "{:#?}", texts(&theirs));
    drop(load);
}

#[test]
fn a_server_reports_which_clients_came_and_went() {
    let testbed = Testbed::two_links();
    let mut server = testbed.server(&[]);
    let mut client = testbed.client(&[]);
    let address = client.address(mpvpn_tests::testbed::Family::V4);
    assert!(client.interrupt().success(), "{}", client.log());
    let story = eventually(SOON, "the end of the client among the events", || {
        let story: Vec<Value> =
            server.events().into_iter().filter(|event| event["address"] == address.as_str()).collect();
        let is_gone = story.iter().any(|event| is(event, "client_disconnected"));
        if is_gone { Ok(story) } else { Err(format!("{:#?}", texts(&story))) }
    });
    let came = story.iter().find(|event| is(event, "client_connected")).expect("it came");
    assert_eq!((&came["kind"], &came["resumed"]), (&"session".into(), &false.into()));
    let gone = story.iter().find(|event| is(event, "client_disconnected")).expect("it went");
    assert!(gone["reason"].as_str().is_some_and(|reason| reason.contains("the client ends")), "{gone:#}");

    // A client that loses its server reports why, and that it is connected again.
    let client = testbed.client(&[]);
    server.kill();
    let _server = testbed.server(&[]);
    let story = eventually(Duration::from_secs(30), "the second connection among the events", || {
        // A client without traffic would notice after some 15 s.
        testbed.send_empty_udp(Host::Client, (TUNNEL, 9));
        let mut story = client.events();
        story.retain(|event| event["kind"] == "session");
        let lost = story.iter().position(|event| is(event, "disconnected"));
        let is_back = lost.is_some_and(|at| story[at..].iter().any(|event| is(event, "connected")));
        if is_back { Ok(story) } else { Err(format!("{:#?}", texts(&story))) }
    });
    let lost = story.iter().find(|event| is(event, "disconnected")).expect("it was lost");
    assert!(lost["reason"].as_str().is_some_and(|reason| !reason.is_empty()), "{lost:#}");
}
