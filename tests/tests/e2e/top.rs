//! `mpvpn top` in a terminal: the live screen of a running client and server, and its keys.

use std::time::Duration;

use mpvpn_tests::{
    iperf::IperfServer,
    terminal::Terminal,
    testbed::{Direction, Host, MpvpnProcess, Testbed, binary, inet4},
};

/// How long a test waits for an expected screen: paths, rates and events follow within a second or two. Only
/// a failing test takes longer.
const SOON: Duration = Duration::from_secs(15);

fn top(testbed: &Testbed, host: Host, process: &MpvpnProcess) -> Terminal {
    let mut command = testbed.command(host, binary().to_str().expect("ASCII"));
    command.args(["top", "--api-socket"]).arg(process.socket());
    Terminal::start(command)
}

/// The cells of the row that begins with `name`.
fn row<'a>(lines: &'a [String], name: &str) -> Option<Vec<&'a str>> {
    let line = lines.iter().find(|line| line.split_whitespace().next() == Some(name))?;
    Some(line.split_whitespace().collect())
}

/// Whether the row of a link says this state, and both of its rates have a unit.
fn link_is(lines: &[String], name: &str, state: &str) -> bool {
    row(lines, name).is_some_and(|cells| {
        cells[1] == state && cells.iter().filter(|cell| cell.ends_with("bit/s")).count() == 2
    })
}

#[test]
fn the_screen_of_a_client_has_its_links_paths_classes_flows_and_events() {
    let testbed = Testbed::two_slow_links();
    let _server = testbed.server(&[]);
    let mut client = testbed.client(&[]);
    let iperf = IperfServer::start(&testbed, Host::Inet, 5201);
    let _load = iperf.tcp(&testbed, Host::Client, &inet4(), 4, Direction::Down, 60);
    let mut top = top(&testbed, Host::Client, &client);

    let lines = top.wait_for(SOON, "both links carry the download", |lines| {
        let carries = |name| row(lines, name).is_some_and(|cells| cells.contains(&"Mbit/s"));
        lines[0].contains("down ") && lines[0].contains(" Mbit/s up ") && carries("eth1") && carries("eth2")
    });
    assert!(lines[0].starts_with("mpvpn client up "), "{lines:#?}");
    assert_eq!(lines[1].trim(), "1 links   2 paths   3 classes   4 flows   5 events");
    assert!(link_is(&lines, "eth1", "up") && link_is(&lines, "eth2", "up"), "{lines:#?}");
    assert!(lines[2].starts_with("link     state   tier"), "{lines:#?}");
    assert!(lines.iter().any(|line| line == "events, the latest first"), "{lines:#?}");

    top.press("2");
    top.wait_for(SOON, "an active path over each link", |lines| {
        lines[2].starts_with("path ") && lines.iter().filter(|line| line.contains(" active ")).count() >= 2
    });
    top.press("3");
    top.wait_for(SOON, "the classes", |lines| {
        lines[2].starts_with("class ") && row(lines, "default").is_some_and(|cells| cells[1] == "up")
    });
    top.press("4");
    let to = format!("{}:5201", inet4());
    top.wait_for(SOON, "the flows of the download", |lines| {
        lines.iter().filter(|line| line.starts_with("tcp ") && line.contains(&to)).count() >= 4
    });

    top.press("1");
    testbed.link(2).cut();
    top.wait_for(SOON, "the cut link, and its event", |lines| {
        let events = lines.iter().position(|line| line == "events, the latest first").unwrap_or(lines.len());
        link_is(lines, "eth2", "down") && lines[events..].iter().any(|line| line.contains("eth2"))
    });
    top.press("/eth2\r");
    top.wait_for(SOON, "the filter leaves one link", |lines| {
        row(lines, "eth2").is_some()
            && row(lines, "eth1").is_none()
            && lines.iter().any(|line| line.starts_with("filter: eth2"))
    });
    top.press("/\x1b");
    top.wait_for(SOON, "all links again", |lines| row(lines, "eth1").is_some());
    top.press("p");
    top.wait_for(SOON, "the pause", |lines| lines[1].ends_with("paused"));
    top.press("p?");
    top.wait_for(SOON, "the keys", |lines| {
        lines.iter().any(|line| line.contains("keys; any key closes this"))
    });
    top.press(" 5");
    // A class may have said something since the cut.
    top.wait_for(SOON, "the events alone", |lines| {
        !lines.iter().any(|line| line.contains("any key closes"))
            && lines[2].as_bytes().get(..9).is_some_and(|time| time[2] == b':' && time[5] == b':')
            && lines[2..].iter().any(|line| line.contains("eth2 is down"))
    });

    client.kill();
    top.wait_for(SOON, "the client is away", |lines| {
        lines[0].starts_with("mpvpn client: no answer, trying again: ")
    });
    top.press("q");
    let (status, is_restored) = top.wait_for_end(SOON);
    assert!(status.success() && is_restored, "{status}, restored: {is_restored}");
}

#[test]
fn the_screen_of_a_server_has_its_clients_and_users() {
    let testbed = Testbed::two_slow_links();
    let server = testbed.server(&[]);
    let _client = testbed.client(&[]);
    let mut top = top(&testbed, Host::Server, &server);
    let lines = top.wait_for(SOON, "the client", |lines| {
        lines.iter().any(|line| line.starts_with("anonymous 10.0.0.2 "))
    });
    assert!(lines[0].starts_with("mpvpn server up ") && lines[0].contains("  1 client "), "{lines:#?}");
    assert_eq!(lines[1].trim(), "1 clients   2 paths   3 classes   4 flows   5 users   6 events");
    top.press("6");
    top.wait_for(SOON, "the event of the client", |lines| {
        lines.iter().any(|line| line.ends_with("  session        anonymous (10.0.0.2) connected"))
    });
    top.press("q");
    let (status, is_restored) = top.wait_for_end(SOON);
    assert!(status.success() && is_restored, "{status}, restored: {is_restored}");
}

#[test]
fn without_a_terminal_or_a_process_the_screen_is_an_error() {
    let testbed = Testbed::two_slow_links();
    let output = testbed.mpvpn(Host::Client, &["top", "--api-socket", "none.sock"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("not a terminal\n  next: run it in a terminal"), "{said}");

    let mut command = testbed.command(Host::Client, binary().to_str().expect("ASCII"));
    command.args(["top", "--api-socket", "none.sock"]);
    let mut top = Terminal::start(command);
    let (status, _) = top.wait_for_end(SOON);
    let lines = top.wait_for(SOON, "the error", |lines| lines[1].starts_with("  next: "));
    assert_eq!(status.code(), Some(1), "{lines:#?}");
    assert!(lines[0].starts_with("mpvpn: cannot show the live screen: "), "{lines:#?}");
}
