use std::time::UNIX_EPOCH;

use super::*;
use crate::events::{EventLog, PathFailure, PathName, Transport};

fn path(class: &str, link: &str) -> PathName {
    PathName {
        client: None,
        class: class.into(),
        link: link.into(),
        path: format!("{class}/{link}/0").into(),
    }
}

fn failed(class: &str, link: &str) -> Event {
    Event::PathFailed {
        path: path(class, link),
        failure: PathFailure::Silent { silence_ms: 90, heartbeats: 3 },
        reinjected_packets: 0,
        reinjected_stream_bytes: 0,
        working_paths: 1,
    }
}

fn recovered(class: &str, link: &str, failed_ms: u64) -> Event {
    Event::PathRecovered { path: path(class, link), failed_ms }
}

fn down(link: &str) -> Event {
    Event::LinkDown { link: link.into(), reason: "no carrier".into() }
}

fn up(link: &str) -> Event {
    Event::LinkUp { link: link.into(), addresses: vec!["192.0.2.7".parse().unwrap()] }
}

fn lost() -> Event {
    Event::Disconnected { reason: "reset".into() }
}

fn connected() -> Event {
    let addresses = vec!["10.0.0.2/24".parse().unwrap()];
    Event::Connected { server: "vpn.example:443".into(), addresses, resumed: true }
}

/// The texts of the main events after these, each with its time (ms), and the number of details.
fn main_events(events: Vec<(u64, Event)>) -> (Vec<String>, usize) {
    let mut log = EventLog::default();
    let count = events.len();
    for (ms, event) in events {
        log.record(UNIX_EPOCH + Duration::from_millis(ms), event);
    }
    let all = log.after(0, usize::MAX);
    assert_eq!(all.len(), count, "each event is listed");
    let main = all.iter().filter(|entry| !entry.detail).map(|entry| entry.sentence.to_string());
    let main: Vec<String> = main.collect();
    let details = count - main.len();
    (main, details)
}

#[test]
fn a_restart_of_the_server_is_one_event() {
    let tcp = Event::TransportChanged {
        link: "eth1".into(),
        transport: Transport::Tcp,
        reason: "UDP gets no answer".into(),
        shard: 0,
    };
    let refused =
        Event::ConnectFailed { link: "eth1".into(), class: "default".into(), reason: "reset".into() };
    let opened = Event::PathOpened { path: path("default", "eth2"), remote: None };
    let events = vec![
        (1000, failed("default", "eth1")),
        (1010, failed("bulk", "eth1")),
        (1040, failed("default", "eth2")),
        (1041, Event::NoAnswer {}),
        (1200, tcp),
        (1300, lost()),
        (1500, refused),
        (2041, connected()),
        (2042, Event::AnswersAgain {}),
        (2050, Event::MtuChanged { mtu: 1400 }),
        (2100, opened),
    ];
    let line = "connected to vpn.example:443: 10.0.0.2/24, session resumed, after 1.0 s \
                (no answer from the server on any link)";
    assert_eq!(main_events(events), (vec![line.to_owned()], 10));
}

#[test]
fn a_server_that_stops_and_one_that_answers_again_are_one_event_each() {
    let stopping = Event::ServerStopping { class: "default".into() };
    let (main, details) = main_events(vec![(0, stopping), (10, lost()), (510, connected())]);
    assert_eq!((main.len(), details), (1, 2), "{main:?}");
    assert!(main[0].ends_with("after 510 ms (the server is about to stop (class default))"), "{main:?}");
    let (main, _) = main_events(vec![(0, Event::NoAnswer {}), (7000, Event::AnswersAgain {})]);
    assert_eq!(main, ["the server answers again, after 7.0 s (no answer from the server on any link)"]);
    assert_eq!(main_events(vec![(0, Event::NoAnswer {}), (180_000, lost())]).1, 1, "it lasts");
}

#[test]
fn a_cut_of_a_link_is_one_event_whatever_classes_notice_it() {
    let cut = |from: u64| {
        vec![
            (from, failed("default", "eth1")),
            (from + 30, failed("bulk", "eth1")),
            (from + 3000, recovered("bulk", "eth1", 2970)),
            (from + 3010, recovered("default", "eth1", 3010)),
        ]
    };
    let line = "eth1 (path bulk/eth1/0) recovered after 3.0 s";
    assert_eq!(main_events(cut(0)), (vec![line.to_owned()], 3));
    let (main, _) = main_events([cut(0), vec![(70_000, failed("default", "eth1"))]].concat());
    assert_eq!(main.len(), 2, "a later failure is new: {main:?}");
}

#[test]
fn a_change_of_the_network_is_one_event() {
    let events = vec![
        (0, down("eth1")),
        (1, failed("default", "eth1")),
        (2, Event::NoAnswer {}),
        (2100, up("eth1")),
        (2110, Event::PathClosed { path: path("default", "eth1") }),
        (2400, recovered("default", "eth1", 2399)),
        (2401, Event::AnswersAgain {}),
    ];
    let line = "eth1 is up: 192.0.2.7, after 2.1 s (eth1 is down: no carrier)";
    assert_eq!(main_events(events), (vec![line.to_owned()], 6));
    // Another address, without a time in between.
    let moved = Event::LinkUp { link: "eth1".into(), addresses: vec!["192.0.2.8".parse().unwrap()] };
    let events = vec![(0, up("eth1")), (10_000, moved), (10_100, failed("default", "eth1"))];
    let (main, details) = main_events(events);
    assert_eq!((main.len(), details), (2, 1), "{main:?}");
}

#[test]
fn a_link_that_fails_soon_after_the_start_is_an_event() {
    let events =
        vec![(0, up("eth1")), (2500, failed("default", "eth1")), (5500, recovered("default", "eth1", 3000))];
    let (main, details) = main_events(events);
    assert_eq!((main.len(), details), (2, 1), "{main:?}");
    assert!(main[1].contains("recovered after 3.0 s"), "{main:?}");
}

#[test]
fn failures_beside_an_outage_that_began_earlier_stay_events() {
    let (main, _) = main_events(vec![(0, failed("default", "eth2")), (60_000, Event::NoAnswer {})]);
    assert_eq!(main.len(), 2, "{main:?}");
    let refused = |at, link: &str| {
        (at, Event::ConnectFailed { link: link.into(), class: "default".into(), reason: "refused".into() })
    };
    let (main, _) = main_events(vec![(0, up("eth1")), refused(10, "eth1"), (900, connected())]);
    assert_eq!(main.len(), 3, "before the first connection each failure tells something: {main:?}");
}

#[test]
fn a_link_that_fails_soon_after_the_server_was_silent_is_an_event() {
    let events = vec![
        (0, Event::NoAnswer {}),
        (1, failed("default", "eth2")),
        (36, Event::AnswersAgain {}),
        (37, recovered("default", "eth2", 36)),
        (3400, failed("default", "eth1")),
        (3440, failed("critical", "eth1")),
    ];
    let (main, details) = main_events(events);
    assert_eq!((main.len(), details), (2, 4), "{main:?}");
    assert!(main[1].starts_with("eth1 (path default/eth1/0) failed"), "{main:?}");
}

#[test]
fn a_client_that_returns_to_a_server_is_one_event_and_known_outages_are_bounded() {
    let client = |number: usize| crate::events::ClientName {
        user: format!("user-{number}").as_str().into(),
        address: None,
    };
    let gone = Event::ClientDisconnected { client: client(7), reason: "timed out".into() };
    let back = Event::ClientConnected { client: client(7), resumed: true };
    let (main, _) = main_events(vec![(0, gone), (90_000, back)]);
    assert_eq!(main, ["user-7 connected, session resumed, after 90.0 s (user-7 disconnected: timed out)"]);
    let mut outages = Outages::default();
    for number in 0..3 * MAX_OUTAGES {
        let gone = Event::ClientDisconnected { client: client(number), reason: "timed out".into() };
        assert!(!outages.judge(UNIX_EPOCH, &gone).is_detail);
    }
    assert!(outages.known.len() <= MAX_OUTAGES);
}
