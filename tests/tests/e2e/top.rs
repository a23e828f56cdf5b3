//! `mpvpn top` in a terminal: the live screen of a running client and server, and its keys.

use std::{process::Command, time::Duration};

use mpvpn_tests::{
    iperf::IperfServer,
    ping::reaches,
    terminal::Terminal,
    testbed::{Direction, Host, MpvpnProcess, TUNNEL, Testbed, binary, inet4},
};

/// How long a test waits for an expected screen: paths, rates and events follow within a second or two. Only
/// a failing test takes longer.
const SOON: Duration = Duration::from_secs(15);

/// A command that asks this process.
fn command(testbed: &Testbed, host: Host, name: &str, process: &MpvpnProcess) -> Command {
    let mut command = testbed.command(host, binary().to_str().expect("ASCII"));
    command.args([name, "--api-socket"]).arg(process.socket());
    command
}

fn top(testbed: &Testbed, host: Host, process: &MpvpnProcess) -> Terminal {
    Terminal::start(command(testbed, host, "top", process))
}

/// The lines from that with the names of the views on: a sentence about what fails may be above.
fn from_views(lines: &[String]) -> &[String] {
    &lines[lines.iter().position(|line| line.starts_with(" 1 ")).unwrap_or(lines.len() - 1)..]
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
    assert!(lines[2].starts_with("link     state   "), "{lines:#?}");
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
    top.wait_for(SOON, "the pause", |lines| from_views(lines)[0].ends_with("paused"));
    top.press("p?");
    top.wait_for(SOON, "the keys", |lines| {
        lines.iter().any(|line| line.contains("keys; any key closes this"))
    });
    top.press(" 5");
    let is_time = |time: &[u8]| time[2] == b':' && time[5] == b':';
    // A class may have said something since the cut.
    top.wait_for(SOON, "the events alone", |lines| {
        !lines.iter().any(|line| line.contains("any key closes"))
            && from_views(lines)[1..].first().and_then(|line| line.as_bytes().get(..9)).is_some_and(is_time)
            && from_views(lines)[1..].iter().any(|line| line.contains("eth2 is down"))
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
fn eighty_columns_hold_each_links_round_trip_and_the_sentence_about_an_outage_of_all_links() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&[]);
    let client = testbed.client(&[]);
    for link in ["eth1", "eth2"] {
        client.wait_for_path(link, "active", SOON);
    }
    reaches(&testbed, Host::Client, TUNNEL);
    // Links of 25 and 40 ms in each of two directions.
    let has_round_trip = |lines: &[String], name: &str| {
        let cells = row(lines, name).unwrap_or_default();
        let at = cells.iter().position(|cell| *cell == "ms").unwrap_or(1);
        cells.get(at - 1).and_then(|cell| cell.parse().ok()).is_some_and(|ms: f64| ms > 10.0)
    };

    let mut status = Terminal::with_size([24, 80], command(&testbed, Host::Client, "status", &client));
    assert!(status.wait_for_end(SOON).0.success());
    let lines = status.wait_for(SOON, "the links first", |lines| {
        let heads = lines.iter().filter_map(|line| line.split_whitespace().next());
        heads.eq([
            "mpvpn",
            "link",
            "eth1",
            "eth2",
            "class",
            "default",
            "critical",
            "bulk",
            "session",
            "addresses",
        ])
    });
    assert!(lines[0].contains(": up, running for ") && lines[2].contains("  share"), "{lines:#?}");
    assert!(["eth1", "eth2"].iter().all(|link| has_round_trip(&lines, link)), "{lines:#?}");

    let mut top = Terminal::with_size([24, 80], command(&testbed, Host::Client, "top", &client));
    let lines = top.wait_for(SOON, "both links with their round trips", |lines| {
        ["eth1", "eth2"].iter().all(|link| link_is(lines, link, "up") && has_round_trip(lines, link))
    });
    assert!(lines[1].starts_with(" 1 links ") && lines[2].contains(" loss tier"), "{lines:#?}");
    testbed.link(1).cut();
    testbed.link(2).cut();
    let lines = top.wait_for(SOON, "the outage of both links", |lines| {
        lines[0].starts_with("mpvpn client no-answer ")
            && lines[1].starts_with("no answer for ")
            && ["eth1", "eth2"].iter().all(|link| row(lines, link).is_some_and(|cells| cells[1] == "down"))
    });
    let sentence = lines[1..3].join(" ").split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(sentence.contains("(no link can be used: eth1 down for "), "{lines:#?}");
    assert!(lines[3].starts_with(" 1 links ") && lines[23].ends_with("q end"), "{lines:#?}");
    testbed.link(1).restore();
    testbed.link(2).restore();
    top.wait_for(SOON, "the end of the outage", |lines| {
        lines[0].starts_with("mpvpn client up ") && lines[1].starts_with(" 1 links ")
    });
    top.press("q");
    assert!(top.wait_for_end(SOON).0.success());
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
