use std::{fs, os::unix::fs::PermissionsExt};

use mpvpn_quic::QlogMetrics;
use mpvpn_types::PathId;
use serde_json::Value;

use super::*;

const MS: Duration = Duration::from_millis(1);
const REMOTE: &str = "192.0.2.1:443";

/// The records of a file, each of which is framed as RFC 7464 says.
fn records(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap();
    let mut records = text.split('\u{1e}');
    assert_eq!(records.next(), Some(""), "{}", path.display());
    records.map(|record| serde_json::from_str(record.strip_suffix('\n').unwrap()).unwrap()).collect()
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

fn sent(path: u32, number: u64) -> QlogEvent {
    QlogEvent::PacketSent { path: PathId(path), number, size: 1400 }
}

fn assigned(path: u32) -> QlogEvent {
    QlogEvent::PathAssigned { path: PathId(path), local: None, remote: REMOTE.parse().unwrap() }
}

fn metrics(path: u32, congestion_window: u64) -> QlogEvent {
    QlogEvent::Metrics(QlogMetrics {
        path: PathId(path),
        min_rtt: 20 * MS,
        smoothed_rtt: 25 * MS,
        latest_rtt: 30 * MS,
        rtt_variance: MS,
        congestion_window,
        bytes_in_flight: 1400,
        pacing_rate: Some(1_000_000),
    })
}

#[test]
fn a_file_tells_what_happened_on_each_path_and_only_its_owner_may_read_it() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("qlog");
    let qlog = Qlog::start(&folder, Role::Client, "mpvpn0").unwrap();
    let (sink, now) = (qlog.sink(), Instant::now());
    for path in 0..2 {
        sink.record(now, 0x830f, assigned(path));
        sink.record(now + 2 * MS, 0x830f, sent(path, 7));
        sink.record(now + 5 * MS, 0x830f, metrics(path, 100_000 + u64::from(path)));
    }
    sink.record(now + 6 * MS, 0x830f, QlogEvent::PacketsAcked { path: PathId(1), numbers: vec![8, 7, 3] });
    sink.record(now + 6 * MS, 0x830f, QlogEvent::PacketLost { path: PathId(1), number: 5, size: 900 });
    sink.record(now + 7 * MS, 0x830f, QlogEvent::Closed { local: true, reason: "done".into() });
    drop((sink, qlog));

    let files = files(&folder);
    let [file] = &files[..] else { panic!("{files:?}") };
    let name = file.file_name().unwrap().to_str().unwrap();
    assert!(name.starts_with("client-mpvpn0-") && name.ends_with("-000000000000830f.sqlog"), "{name}");
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(file), mode(&folder)), (0o600, 0o700));
    let records = records(file);
    let head = &records[0];
    assert_eq!((&head["qlog_version"], &head["qlog_format"]), (&"0.3".into(), &"JSON-SEQ".into()));
    assert_eq!(head["trace"]["vantage_point"]["type"], "client");
    let names: Vec<_> = records[1..].iter().map(|record| record["name"].as_str().unwrap()).collect();
    let of_path = ["connectivity:path_assigned", "transport:packet_sent", "recovery:metrics_updated"];
    let last = ["transport:packet_received", "recovery:packet_lost", "connectivity:connection_closed"];
    assert_eq!(names, [of_path, of_path, last].concat());
    let sent = &records[5];
    assert_eq!((&sent["time"], &sent["group_id"]), (&5.0.into(), &"000000000000830f-path-1".into()));
    assert_eq!((&sent["data"]["header"]["packet_number"], &sent["data"]["path_id"]), (&7.into(), &1.into()));
    assert_eq!(sent["data"]["raw"]["length"], 1400);
    let metrics = &records[6]["data"];
    assert_eq!((&metrics["congestion_window"], &metrics["smoothed_rtt"]), (&100_001.into(), &25.0.into()));
    assert_eq!(metrics["pacing_rate"], 8_000_000, "bits a second");
    assert_eq!(records[7]["data"]["frames"][0]["acked_ranges"], serde_json::json!([[3, 3], [7, 8]]));
    let times: Vec<_> = records[1..].iter().map(|record| record["time"].as_f64().unwrap()).collect();
    assert!(times.is_sorted(), "{times:?}");
}

#[test]
fn files_take_no_more_than_they_may_and_the_oldest_go() {
    const MAX_TOTAL_BYTES: u64 = 4_000_000;
    let dir = tempfile::tempdir().unwrap();
    let stranger = dir.path().join("client-mpvpn0-holiday.sqlog");
    fs::write(&stranger, vec![0; 1_000_000]).unwrap();
    let open = |limit| Folder::open(dir.path().to_owned(), "client-mpvpn0-", limit).unwrap();
    let (mut folder, start) = (open(MAX_TOTAL_BYTES), Instant::now());
    let mut traces = [1, 2].map(|connection| Trace::new(Role::Client, connection, start));
    for number in 0..50_000 {
        for trace in &mut traces {
            let event = if number == 0 { assigned(3) } else { sent(3, number) };
            trace.record(start + Duration::from_micros(10 * number), event);
            if trace.is_buffer_full() {
                folder.write(trace).unwrap();
            }
        }
    }
    traces.iter_mut().for_each(|trace| folder.write(trace).unwrap());

    let ours = || files(dir.path()).into_iter().filter(|file| *file != stranger);
    let sizes: Vec<u64> = ours().map(|file| fs::metadata(file).unwrap().len()).collect();
    let total: u64 = sizes.iter().sum();
    assert!(
        (MAX_TOTAL_BYTES * 9 / 10..=MAX_TOTAL_BYTES).contains(&total),
        "{total} bytes in {} files",
        sizes.len()
    );
    assert!(stranger.exists());
    // Each can be read alone, and the newest records of both connections are there.
    let mut last = BTreeMap::new();
    for file in ours() {
        let records = records(&file);
        assert_eq!(records[0]["qlog_format"], "JSON-SEQ");
        assert_eq!(records[1]["name"], "connectivity:path_assigned");
        let record = records.last().unwrap();
        last.insert(record["group_id"].to_string(), record["data"]["header"]["packet_number"].as_u64());
    }
    assert_eq!(last.into_values().collect::<Vec<_>>(), [Some(49_999); 2]);
    // A later process counts the files that are there.
    let mut folder = open(1_000_000);
    let mut trace = Trace::new(Role::Client, 3, start);
    trace.record(start, sent(0, 1));
    folder.write(&mut trace).unwrap();
    let left: u64 = ours().map(|file| fs::metadata(file).unwrap().len()).sum();
    assert!(left <= 1_000_000, "{left}");
}

#[test]
fn a_packet_thread_does_not_wait_and_the_file_says_how_many_events_were_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let (messages, receiver) = sync_channel(10);
    let dropped = Arc::new(AtomicU64::new(0));
    let queue = Queue { messages, dropped: dropped.clone() };
    let now = Instant::now();
    // Nothing reads the queue.
    (0..100).for_each(|number| queue.record(now, 1, sent(0, number)));
    assert_eq!(dropped.load(Relaxed), 90);
    drop(queue);
    let files_of = Folder::open(dir.path().to_owned(), "server-edge-", MAX_TOTAL_BYTES).unwrap();
    let traces = BTreeMap::new();
    Writer { files: files_of, role: Role::Server, traces, dropped, warned: false }.run(&receiver);
    let files = files(dir.path());
    let records = records(&files[0]);
    assert_eq!(records.len(), 1 + 10 + 1);
    let last = records.last().unwrap();
    assert_eq!((&last["name"], &last["data"]["code"]), (&"loglevel:warning".into(), &90.into()));
}

#[test]
fn a_folder_that_cannot_be_written_is_an_error_at_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    let error = Qlog::start(&file, Role::Client, "mpvpn0").unwrap_err().to_string();
    assert!(error.contains("cannot write qlog files to") && error.contains("file"), "{error}");
}

#[test]
fn a_trace_goes_on_in_a_new_file_when_somebody_removes_its_file() {
    let dir = tempfile::tempdir().unwrap();
    let mut folder = Folder::open(dir.path().to_owned(), "client-mpvpn0-", MAX_TOTAL_BYTES).unwrap();
    let now = Instant::now();
    let mut trace = Trace::new(Role::Client, 1, now);
    for number in 0..3 {
        files(dir.path()).iter().for_each(|file| fs::remove_file(file).unwrap());
        trace.record(now, sent(0, number));
        folder.write(&mut trace).unwrap();
        let files = files(dir.path());
        assert_eq!((files.len(), records(&files[0]).len()), (1, 2));
    }
}
