use std::net::IpAddr;

use super::*;
use crate::events::{CapacityReason, ClientName, PathFailure, PathName};

fn at(seconds: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(1_790_000_000 + seconds)
}

fn down(link: &str) -> Event {
    Event::LinkDown { link: link.into(), reason: "no carrier".into() }
}

fn up(link: &str) -> Event {
    Event::LinkUp { link: link.into(), addresses: vec![IpAddr::from([192, 0, 2, 7])] }
}

fn path() -> PathName {
    PathName { client: None, class: "default".into(), link: "eth1".into(), path: "default/eth1/0".into() }
}

fn failed(silence_ms: u64, reinjected_packets: u64) -> Event {
    let failure = PathFailure::Silent { silence_ms, heartbeats: 3 };
    Event::PathFailed {
        path: path(),
        failure,
        reinjected_packets,
        reinjected_stream_bytes: 0,
        working_paths: 1,
    }
}

fn times(log: &EventLog) -> Vec<(u64, u64, u64)> {
    let seconds = |time: SystemTime| time.duration_since(at(0)).unwrap().as_secs();
    let of = |entry: &Entry| (seconds(entry.first), seconds(entry.last), entry.count);
    log.after(0, usize::MAX).into_iter().map(of).collect()
}

#[test]
fn a_repeated_event_is_merged_with_its_first_and_last_time_and_its_last_figures() {
    let mut log = EventLog::default();
    log.record(at(0), failed(93, 4));
    log.record(at(5), down("eth1"));
    log.record(at(50), failed(120, 9));
    log.record(at(100), failed(88, 0));
    assert_eq!(times(&log), [(5, 5, 1), (0, 100, 3)]);
    let last = log.after(0, usize::MAX).pop().unwrap();
    assert_eq!((&last.sentence.event, last.number), (&failed(88, 0), 4));
}

#[test]
fn a_flapping_link_takes_two_entries() {
    let mut log = EventLog::default();
    for round in 0..500 {
        log.record(at(2 * round), down("eth1"));
        log.record(at(2 * round + 1), up("eth1"));
    }
    assert_eq!(times(&log), [(0, 998, 500), (1, 999, 500)]);
}

#[test]
fn an_event_after_a_minute_or_of_another_link_or_reason_is_an_entry_of_its_own() {
    let mut log = EventLog::default();
    log.record(at(0), down("eth1"));
    log.record(at(60), down("eth1"));
    log.record(at(121), down("eth1"));
    log.record(at(121), down("eth2"));
    log.record(at(122), Event::LinkDown { link: "eth1".into(), reason: "no address".into() });
    assert_eq!(times(&log), [(0, 60, 2), (121, 121, 1), (121, 121, 1), (122, 122, 1)]);
}

#[test]
fn a_clock_that_is_set_back_breaks_nothing() {
    let mut log = EventLog::default();
    log.record(at(100), down("eth1"));
    log.record(at(10), down("eth1"));
    log.record(UNIX_EPOCH - Duration::from_secs(5), down("eth2"));
    assert_eq!(log.after(0, usize::MAX).len(), 2);
    let json = serde_json::to_value(log.after(0, usize::MAX)[1]).unwrap();
    assert_eq!(json["first"], "1970-01-01T00:00:00.000Z");
}

#[test]
fn each_kind_keeps_its_last_thousand_entries() {
    let mut log = EventLog::default();
    log.record(at(0), failed(93, 0));
    assert_eq!(log.last_evicted(), 0);
    for number in 0..10_000 {
        log.record(at(0), down(&format!("eth{number}")));
    }
    let kept = log.after(0, usize::MAX);
    assert_eq!(kept.len(), MAX_ENTRIES_PER_KIND + 1);
    assert_eq!((kept[0].kind, kept[1].number), (EventKind::Path, 9002));
    assert_eq!(log.last_evicted(), 9001);
    assert!(kept.iter().is_sorted_by_key(|entry| entry.number));
    let some: Vec<u64> = log.after(9500, 3).iter().map(|entry| entry.number).collect();
    assert_eq!(some, [9501, 9502, 9503]);
}

#[test]
fn an_entry_is_one_object_with_fields_and_a_sentence() {
    let mut log = EventLog::default();
    log.record(at(0) + Duration::from_micros(7_300), failed(93, 4));
    let entry = log.after(0, 1)[0];
    assert_eq!(
        serde_json::to_string(entry).unwrap(),
        concat!(
            r#"{"number":1,"kind":"path","first":"2026-09-21T14:13:20.007Z","last":"2026-09-21T14:13:20.007Z","#,
            r#""count":1,"event":"path_failed","class":"default","link":"eth1","path":"default/eth1/0","#,
            r#""reason":"silent","silence_ms":93,"heartbeats":3,"reinjected_packets":4,"reinjected_stream_bytes":0,"#,
            r#""working_paths":1,"text":"eth1 (path default/eth1/0) failed: nothing received for 93 ms, 3 heartbeats missed; "#,
            r#"4 packets reinjected; 1 other path works"}"#
        )
    );
}

#[test]
fn events_of_a_server_name_the_client() {
    let client = ClientName { user: "alice".into(), address: Some(IpAddr::from([10, 0, 0, 2])) };
    let path =
        PathName { client: Some(client.clone()), link: "".into(), path: "default/path/1".into(), ..path() };
    let mut log = EventLog::default();
    log.record(at(0), Event::PathRecovered { path, failed_ms: 5214 });
    log.record(at(0), Event::ClientDisconnected { client, reason: "timed out".into() });
    let reason = CapacityReason::Queue { queue_ms: 12.34 };
    let (before_bps, bps) = (Some(20_000_000), 12_300_000);
    log.record(at(0), Event::CapacityChanged { client: None, link: "eth0".into(), before_bps, bps, reason });
    let all = log.after(0, usize::MAX);
    let texts: Vec<String> = all.iter().map(|entry| entry.sentence.to_string()).collect();
    assert_eq!(
        texts,
        [
            "alice (10.0.0.2): path default/path/1 recovered after 5.2 s",
            "alice (10.0.0.2) disconnected: timed out",
            "eth0: capacity 12.3 Mbit/s, before 20.0 Mbit/s: queueing delay of 12.3 ms",
        ]
    );
    let json = serde_json::to_value(all[0]).unwrap();
    assert_eq!((&json["user"], &json["address"]), (&"alice".into(), &"10.0.0.2".into()));
}

#[test]
fn the_latest_events_of_all_kinds_are_found_in_order() {
    let mut log = EventLog::default();
    for second in 0..10 {
        log.record(at(100 * second), down(&format!("wwan{second}")));
        log.record(at(100 * second + 1), failed(60, second));
    }
    log.record(at(950), Event::LinkUnusable { link: "wwan99".into(), reason: "no address".into() });
    let latest = |since, max_entries| log.latest(at(since), max_entries);
    let all = latest(0, 1000);
    assert!(all.is_sorted_by_key(|entry| entry.number) && all.len() >= 20, "{all:?}");
    let last = latest(0, 3);
    assert_eq!(last, all[all.len() - 3..]);
    assert!(latest(805, 1000).iter().all(|entry| entry.last >= at(805)));
    assert!(latest(960, 1000).is_empty());
}
