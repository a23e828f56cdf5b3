//! qlog files of both ends.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    time::Duration,
};

use mpvpn_tests::{
    eventually,
    iperf::IperfServer,
    testbed::{Direction, Host, TUNNEL, Testbed, path_of},
};
use serde_json::Value;

/// How long a test waits for an expected state. Longer than on any busy machine; only a failing test takes
/// that long.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The records of a file: each begins with a record separator and ends with a line feed (RFC 7464). The last
/// record may be incomplete while it is written.
fn records(file: &Path) -> Vec<Value> {
    let text = fs::read_to_string(file).expect("a qlog file");
    let mut records = text.split('\u{1e}');
    assert_eq!(records.next(), Some(""), "{} begins otherwise", file.display());
    let complete = records.filter_map(|record| record.strip_suffix('\n'));
    complete
        .map(|json| serde_json::from_str(json).unwrap_or_else(|error| panic!("{error}: {json}")))
        .collect()
}

fn files(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path()).collect()
}

/// The records of the file with the most records in a folder.
fn busiest(folder: &Path) -> Vec<Value> {
    let all = files(folder).into_iter().map(|file| records(&file));
    all.max_by_key(Vec::len).expect("a file")
}

/// The values of field `name` in the records of this kind and path.
fn values(records: &[Value], kind: &str, path: u64, name: &str) -> Vec<u64> {
    let of_path = records.iter().filter(|record| record["name"] == kind && record["data"]["path_id"] == path);
    of_path.filter_map(|record| record["data"][name].as_u64()).collect()
}

#[test]
fn both_ends_record_each_path_with_the_window_that_the_status_shows() {
    let testbed = Testbed::new(&["20mbit,10ms", "10mbit,30ms"]);
    let [client_folder, server_folder] = ["client-qlog", "server-qlog"].map(|name| testbed.dir().join(name));
    let qlog = |folder: &Path| folder.to_str().expect("an ASCII path").to_owned();
    let mut server = testbed.server(&["--qlog", &qlog(&server_folder)]);
    let mut client = testbed.client(&["--qlog", &qlog(&client_folder)]);
    for link in ["eth1", "eth2"] {
        client.wait_for_path(link, "active", TIMEOUT);
    }
    let iperf = IperfServer::start(&testbed, Host::Server, 5201);
    iperf.tcp(&testbed, Host::Client, TUNNEL, 4, Direction::Up, 3).finish();

    // The window in the status is recorded within a second, unless it has changed again.
    let windows = eventually(TIMEOUT, "the windows of the status in the file", || {
        let status = client.status();
        std::thread::sleep(Duration::from_millis(1500));
        let records = busiest(&client_folder);
        let window = |link: &str| {
            let path = path_of(&status, link).ok_or("no path")?;
            let id = path["id"].as_str().and_then(|id| id.rsplit('/').next()).and_then(|id| id.parse().ok());
            let shown = path["cwnd_bytes"].as_u64().unwrap_or_default();
            let windows =
                values(&records, "recovery:metrics_updated", id.ok_or("no number")?, "congestion_window");
            match windows.contains(&shown) {
                true => Ok(shown),
                false => Err(format!("{link} {shown}, recorded last {:?}", windows.last())),
            }
        };
        Ok([window("eth1")?, window("eth2")?])
    });
    assert_ne!(windows[0], windows[1]);
    assert!(client.interrupt().success() && server.interrupt().success());

    let (sender, receiver) = (busiest(&client_folder), busiest(&server_folder));
    for path in [0, 1] {
        let windows = values(&sender, "recovery:metrics_updated", path, "congestion_window");
        assert!(windows.len() > 100, "path {path}: {} records", windows.len());
        // The gate shows the library 2^62 bytes or none at all.
        assert!(windows.iter().all(|window| (1000..100_000_000).contains(window)), "{windows:?}");
        let rates = values(&sender, "recovery:metrics_updated", path, "pacing_rate");
        assert!(rates.iter().all(|rate| (10_000..100_000_000_000).contains(rate)), "{rates:?}");
    }
    let groups = |records: &[Value]| {
        let mut groups: Vec<String> =
            records.iter().filter_map(|record| record["group_id"].as_str().map(str::to_owned)).collect();
        groups.sort();
        groups.dedup();
        groups
    };
    assert_eq!(groups(&sender).len(), 3, "{:?}", groups(&sender));
    assert_eq!(groups(&sender)[1..], groups(&receiver)[1..], "both ends name connection and paths alike");
    assert_eq!(sender.last().expect("records")["name"], "connectivity:connection_closed");
    for file in files(&client_folder).iter().chain(&files(&server_folder)) {
        let mode = fs::metadata(file).expect("a file").permissions().mode() & 0o777;
        assert_eq!(mode, 0o600, "{}", file.display());
        assert_eq!(records(file)[0]["qlog_format"], "JSON-SEQ");
    }
}
