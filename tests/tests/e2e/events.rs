//! `mpvpn events` reports at both ends what changed, and why.

use std::{
    fs::{self, File},
    os::unix::fs::PermissionsExt,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use mpvpn_tests::{
    eventually,
    iperf::IperfServer,
    machine_share::{MachineShare, Share},
    ping::Ping,
    testbed::{Direction, Host, MpvpnProcess, TUNNEL, Testbed, binary},
};
use serde_json::Value;

/// How long a test waits for an expected state. Longer than on any busy machine; only a failing test takes
/// that long.
const TIMEOUT: Duration = Duration::from_secs(10);
/// A silent link is left within this time on a busy machine (ms).
const MAX_SILENCE_MS: u64 = 600;
/// Duration of the silence of the link, ms.
const CUT_MS: u64 = 3000;

/// The number of the last event.
fn last_number(process: &MpvpnProcess) -> u64 {
    process.events().last().and_then(|event| event["number"].as_u64()).expect("it came up")
}

/// The events of link 1 after the event `number`.
fn on_link_1(process: &MpvpnProcess, number: u64) -> Vec<Value> {
    let is_new = |event: &Value| event["number"].as_u64() > Some(number);
    process.events().into_iter().filter(|event| is_new(event) && event["link"] == "eth1").collect()
}

fn is_event(event: &Value, name: &str) -> bool {
    event["event"] == name
}

fn texts(events: &[Value]) -> Vec<&str> {
    events.iter().filter_map(|event| event["text"].as_str()).collect()
}

#[test]
fn a_link_that_falls_silent_and_returns_is_reported_in_five_lines() {
    let _share = MachineShare::take(Share::Percent(100));
    let testbed = Testbed::two_slow_links();
    let server = testbed.server(&[]);
    let client = testbed.client(&[]);
    for link in ["eth1", "eth2"] {
        client.wait_for_path(link, "active", TIMEOUT);
    }
    let iperf = IperfServer::start(&testbed, Host::Server, 5201);
    let load = iperf.tcp(&testbed, Host::Client, TUNNEL, 4, Direction::Up, 12);
    thread::sleep(Duration::from_secs(2));
    let (before, before_at_server) = (last_number(&client), last_number(&server));
    let followed = testbed.file("events", Host::Client);
    let mut follower = Command::new(binary())
        .args(["events", "--follow", "--verbose", "--api-socket"])
        .arg(client.socket())
        .stdin(Stdio::null())
        .stdout(File::create(&followed).expect("a file"))
        .spawn()
        .expect("it starts");

    let cut = Instant::now();
    testbed.link(1).silence(Direction::Both);
    client.wait_for_path("eth1", "down", TIMEOUT);
    thread::sleep(Duration::from_millis(CUT_MS).saturating_sub(cut.elapsed()));
    testbed.link(1).end_silence();
    let healed = cut.elapsed().as_millis() as u64;
    let events = eventually(TIMEOUT, "the return of the link among the events", || {
        let events = on_link_1(&client, before);
        let returned =
            events.iter().any(|event| is_event(event, "path_recovered") && event["class"] == "default");
        if returned { Ok(events) } else { Err(format!("{:#?}", texts(&events))) }
    });
    let back = cut.elapsed().as_millis() as u64;
    println!("{:#?}", texts(&events));

    // Which class notices first depends on the last arrivals; the one with the load is `default`.
    let of_default = |name: &str| {
        events.iter().find(|event| is_event(event, name) && event["class"] == "default").expect(name)
    };
    let lost = of_default("path_failed");
    assert_eq!(lost["kind"], "path", "{lost:#}");
    let reinjected = ["reinjected_packets", "reinjected_stream_bytes"]
        .map(|field| lost[field].as_u64().expect("a number"));
    assert!(reinjected.iter().sum::<u64>() > 0, "a link under load has data in flight: {lost:#}");
    let restored = of_default("path_recovered");
    let failed_ms = restored["failed_ms"].as_u64().expect("a number");
    let shortest = healed.saturating_sub(MAX_SILENCE_MS);
    assert!((shortest..=back).contains(&failed_ms), "not {shortest} to {back} ms: {restored:#}");
    // Its capacity is estimated anew all the time, cut or not. An attempt by TCP that began meanwhile may be
    // quicker than UDP at the end.
    let is_of_tcp = |event: &&Value| {
        event["kind"] == "transport" || event["text"].as_str().is_some_and(|text| text.contains("/tcp)"))
    };
    let of_cut = events.iter().filter(|event| event["kind"] != "capacity" && !is_of_tcp(event)).count();
    assert!(of_cut <= 5, "more than five lines: {:#?}", texts(&events));

    let is_main = |event: &&Value| event["kind"] != "capacity" && event["detail"] != true;
    assert_eq!(events.iter().filter(is_main).count(), 1, "not one line without details: {events:#?}");

    // `--follow --verbose` prints the same events.
    eventually(TIMEOUT, "the same events by `--follow`", || {
        let lines = fs::read_to_string(&followed).expect("its output");
        match texts(&events).into_iter().find(|text| !lines.contains(text)) {
            None => Ok(()),
            Some(text) => Err(format!("`{text}` is missing:\n{lines}")),
        }
    });
    follower.kill().expect("it runs");
    follower.wait().expect("our own child");
    // The log has the event's text.
    let log = client.log();
    let text = lost["text"].as_str().expect("a sentence");
    assert!(log.contains(text), "`{text}` is not in the log:\n{log}");

    // The server's event names the client and the reason.
    let server_events = server.events();
    let is_new = |event: &&Value| event["number"].as_u64() > Some(before_at_server);
    let at_server: Vec<&Value> =
        server_events.iter().filter(is_new).filter(|event| is_event(event, "path_failed")).collect();
    let ours = |event: &&&Value| {
        let silence = event["silence_ms"].as_u64();
        event["address"].as_str().is_some_and(|address| address.starts_with("10.0.0."))
            && silence.is_some_and(|ms| ms <= 2 * MAX_SILENCE_MS)
    };
    assert!(at_server.iter().any(|event| ours(&event)), "{:#?}", texts(&server_events));

    // Both ends hear nothing. The end that notices first tells the other one over the other link, so one of
    // them at least says how long it has waited, and the other one may say that it was told.
    let of_default = at_server.into_iter().filter(|event| event["class"] == "default");
    let failures: Vec<&Value> = std::iter::once(lost).chain(of_default).collect();
    let noticed = failures.iter().find(|event| event["reason"] == "silent");
    let noticed = noticed.unwrap_or_else(|| panic!("nobody noticed: {failures:#?}"));
    let silence = noticed["silence_ms"].as_u64().expect("a number");
    assert!((20..=MAX_SILENCE_MS).contains(&silence), "{noticed:#}");
    let (heartbeats, working) = (noticed["heartbeats"].as_u64(), noticed["working_paths"].as_u64());
    // Silence is reported to the other end one heartbeat before it means death.
    assert!(heartbeats >= Some(2) && working >= Some(1), "{noticed:#}");
    for failure in failures {
        assert!(["silent", "unheard"].iter().any(|reason| failure["reason"] == *reason), "{failure:#}");
    }
    drop(load);
}

/// A program of the user hears what is known of each new event, and of none from before.
#[test]
fn a_program_of_the_user_runs_for_each_event() {
    let testbed = Testbed::two_slow_links();
    let _server = testbed.server(&[]);
    let client = testbed.client(&[]);
    ["eth1", "eth2"].iter().for_each(|link| drop(client.wait_for_path(link, "active", TIMEOUT)));
    let (script, said) = (testbed.dir().join("tell"), testbed.dir().join("said"));
    let text = format!(
        "#!/bin/sh\necho \"$MPVPN_EVENT $MPVPN_KIND $MPVPN_LINK $MPVPN_NUMBER\" >> {}\n",
        said.display()
    );
    fs::write(&script, text).expect("a script");
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).expect("its rights");
    let mut command = Command::new(binary());
    command.args(["events", "--follow", "--kind", "link", "--api-socket"]).arg(client.socket());
    let mut follower = command.arg("--run").arg(&script).stdin(Stdio::null()).spawn().expect("it starts");
    thread::sleep(Duration::from_millis(500));
    let before = last_number(&client);
    testbed.link(1).cut();
    let told = eventually(TIMEOUT, "the program is told of the cut", || {
        let said = fs::read_to_string(&said).unwrap_or_default();
        if said.contains(" link eth1 ") { Ok(said) } else { Err(said) }
    });
    follower.kill().expect("it follows");
    follower.wait().expect("it ends");
    for line in told.lines() {
        let number: u64 = line.rsplit(' ').next().and_then(|number| number.parse().ok()).expect("a number");
        assert!(number > before, "an event from before: {told}");
    }
}

#[test]
fn a_server_reports_connected_and_disconnected_clients() {
    let testbed = Testbed::two_links();
    let mut server = testbed.server(&[]);
    let mut client = testbed.client(&[]);
    let address = client.address(mpvpn_tests::testbed::Family::V4);
    assert!(client.interrupt().success(), "{}", client.log());
    let events = eventually(TIMEOUT, "the end of the client among the events", || {
        let events: Vec<Value> =
            server.events().into_iter().filter(|event| event["address"] == address.as_str()).collect();
        let is_gone = events.iter().any(|event| is_event(event, "client_disconnected"));
        if is_gone { Ok(events) } else { Err(format!("{:#?}", texts(&events))) }
    });
    let connected = events.iter().find(|event| is_event(event, "client_connected")).expect("it came");
    assert_eq!((&connected["kind"], &connected["resumed"]), (&"session".into(), &false.into()));
    let disconnected = events.iter().find(|event| is_event(event, "client_disconnected")).expect("it went");
    assert!(
        disconnected["reason"].as_str().is_some_and(|reason| reason.contains("the client ends")),
        "{disconnected:#}"
    );

    // A client that loses its server reports why, and that it is connected again.
    let client = testbed.client(&[]);
    server.kill();
    let _server = testbed.server(&[]);
    let events = eventually(Duration::from_secs(30), "the second connection among the events", || {
        // A client without traffic would notice after some 15 s.
        testbed.send_empty_udp(Host::Client, (TUNNEL, 9));
        let mut events = client.events();
        events.retain(|event| event["kind"] == "session");
        let lost = events.iter().position(|event| is_event(event, "disconnected"));
        let is_back = lost.is_some_and(|at| events[at..].iter().any(|event| is_event(event, "connected")));
        if is_back { Ok(events) } else { Err(format!("{:#?}", texts(&events))) }
    });
    let lost = events.iter().find(|event| is_event(event, "disconnected")).expect("it was lost");
    assert!(lost["reason"].as_str().is_some_and(|reason| !reason.is_empty()), "{lost:#}");
}

/// The lines of `mpvpn events` with these arguments.
fn lines(process: &MpvpnProcess, args: &[&str]) -> Vec<String> {
    let output = Command::new(binary())
        .args(["events", "--api-socket"])
        .arg(process.socket())
        .args(args)
        .output()
        .expect("it runs");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect()
}

#[test]
fn a_restart_of_the_server_is_one_line_at_each_end() {
    let ends: [fn(&mut MpvpnProcess); 2] =
        [MpvpnProcess::kill, |server| assert!(server.interrupt().success())];
    for end in ends {
        let testbed = Testbed::two_links();
        let mut server = testbed.server(&[]);
        let client = testbed.client(&[]);
        let both_work = || {
            ["eth1", "eth2"].iter().for_each(|link| drop(client.wait_for_path(link, "active", 2 * TIMEOUT)));
        };
        both_work();
        let before = (lines(&client, &[]), lines(&client, &["--verbose"]));
        let _ping = Ping::every(&testbed, Host::Client, Duration::from_millis(100), TUNNEL, 60);
        thread::sleep(Duration::from_secs(1));
        end(&mut server);
        drop(server);
        thread::sleep(Duration::from_secs(1));
        let server = testbed.server(&[]);
        eventually(2 * TIMEOUT, "the second connection among the events", || {
            let all = lines(&client, &[]);
            if all.iter().any(|line| line.contains(", after ")) { Ok(()) } else { Err(format!("{all:#?}")) }
        });
        both_work();
        // Paths of the connection before, and inside TCP, are closed later.
        thread::sleep(Duration::from_secs(8));
        let after = (lines(&client, &[]), lines(&client, &["--verbose"]));
        let new = |before: &[String], after: &[String]| -> Vec<String> {
            after.iter().filter(|line| !before.contains(line)).cloned().collect()
        };
        let (main, all) = (new(&before.0, &after.0), new(&before.1, &after.1));
        println!("{main:#?}\nwith --verbose: {all:#?}");
        // Whichever connection is back first: the default one, or that of a class.
        let is_back = |line: &String| line.contains(" connected to ") || line.contains(" answers again");
        assert!(main.len() == 1 && is_back(&main[0]), "{main:#?}");
        assert!(all.len() > 4, "{all:#?}");
        assert!(!all.iter().any(|line| line.contains("127.0.0.1")), "{all:#?}");
        assert!(!all.iter().any(|line| line.contains("no carrier")), "{all:#?}");
        let of_server = lines(&server, &[]);
        println!("at the server: {of_server:#?}");
        let clients = of_server.iter().filter(|line| line.contains("connected")).count();
        assert!(clients == 1 && of_server.len() == 1, "{of_server:#?}");
    }
}
