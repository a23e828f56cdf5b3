//! Rates of paths over time, from the client's status.

use std::{
    collections::BTreeMap,
    io::{Read, Write},
    os::unix::net::UnixStream,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant, SystemTime},
};

use mpvpn_lab::Direction;
use serde_json::Value;

/// Interval between queries of the status.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Timeout of a query.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// Rates of the paths during a run.
#[derive(Clone, Debug, Default)]
pub(crate) struct PathRates {
    /// Centres of the steps, seconds since the start.
    pub(crate) times: Vec<f64>,
    /// Rates in each step, Mbit/s, by path ID.
    pub(crate) paths: BTreeMap<String, Vec<f64>>,
    /// Start of the first step.
    pub(crate) began: Option<SystemTime>,
}

/// A thread that samples the status until it is finished.
pub(crate) struct PathRateWatch {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<PathRates>,
}

impl PathRateWatch {
    /// Samples the status at `socket`; `direction` selects sent or received bytes.
    pub(crate) fn start(socket: &Path, direction: Direction) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (socket, seen) = (socket.to_owned(), Arc::clone(&stop));
        Self { stop, thread: thread::spawn(move || watch_path_rates(&socket, direction, &seen)) }
    }

    pub(crate) fn finish(self) -> PathRates {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap_or_default()
    }
}

fn watch_path_rates(socket: &Path, direction: Direction, stop: &AtomicBool) -> PathRates {
    let key = if direction == Direction::Up { "tx_bytes" } else { "rx_bytes" };
    let began = Instant::now();
    let mut path_rates = PathRates { began: Some(SystemTime::now()), ..PathRates::default() };
    let mut before: BTreeMap<String, u64> = BTreeMap::new();
    let mut looked = began;
    while !stop.load(Ordering::Relaxed) {
        let due = looked + POLL_INTERVAL;
        // A missing answer makes the step longer; its rate stays correct.
        if let Ok(status) = status(socket) {
            let now = Instant::now();
            let passed = (now - looked).as_secs_f64().max(1e-3);
            let mut bytes = BTreeMap::new();
            for path in status["paths"].as_array().into_iter().flatten() {
                let id = path["id"].as_str().unwrap_or_default().to_owned();
                bytes.insert(id, path[key].as_u64().unwrap_or(0));
            }
            if !path_rates.times.is_empty() || !before.is_empty() {
                path_rates.times.push((looked - began).as_secs_f64() + passed / 2.0);
                let steps = path_rates.times.len();
                for (id, bytes) in &bytes {
                    // A new path starts at 0 bytes.
                    let more = bytes.saturating_sub(before.get(id).copied().unwrap_or(0));
                    let curve = path_rates.paths.entry(id.clone()).or_default();
                    curve.resize(steps - 1, 0.0);
                    curve.push(more as f64 * 8e-6 / passed);
                }
            }
            (before, looked) = (bytes, now);
        }
        thread::sleep(due.saturating_duration_since(Instant::now()));
    }
    let steps = path_rates.times.len();
    path_rates.paths.values_mut().for_each(|curve| curve.resize(steps, 0.0));
    path_rates
}

/// Numbers of numbered and of retransmitted packets of a sender.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Resent {
    pub(crate) numbered: u64,
    pub(crate) again: u64,
}

impl Resent {
    pub(crate) fn since(self, before: Self) -> Self {
        Self {
            numbered: self.numbered.saturating_sub(before.numbered),
            again: self.again.saturating_sub(before.again),
        }
    }

    /// Retransmitted packets, percent of the numbered ones; 0 without numbered packets.
    pub(crate) fn percent(self) -> f64 {
        100.0 * self.again as f64 / self.numbered.max(1) as f64
    }
}

/// Counts of the process with the API at `socket`: of a client, or the sum over all clients of a server.
pub(crate) fn resent(socket: &Path) -> Option<Resent> {
    let status = status(socket).ok()?;
    let clients = status["clients"].as_array().map_or(&[][..], Vec::as_slice);
    let lanes = std::iter::once(&status["lane"]).chain(clients.iter().map(|client| &client["lane"]));
    let of_lane =
        |lane: &Value| Some(Resent { numbered: lane["numbered"].as_u64()?, again: lane["resent"].as_u64()? });
    lanes
        .filter_map(of_lane)
        .reduce(|a, b| Resent { numbered: a.numbered + b.numbered, again: a.again + b.again })
}

/// The answer to `GET /v1/status`, without starting a process, which would disturb the measurement.
fn status(socket: &Path) -> Result<Value, String> {
    let text = (|| {
        let mut stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
        stream.write_all(b"GET /v1/status HTTP/1.1\r\nHost: mpvpn\r\nConnection: close\r\n\r\n")?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        Ok::<_, std::io::Error>(text)
    })();
    let text = text.map_err(|error| format!("{}: {error}", socket.display()))?;
    let body = text.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    serde_json::from_str(body).map_err(|error| format!("{}: no status: {error}", socket.display()))
}
