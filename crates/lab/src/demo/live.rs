//! What is seen while the traffic runs: a line a path each second, in place on a terminal.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use serde_json::Value;

use super::traffic::Goodput;
use crate::screen::Screen;

/// How often the view changes.
const EVERY: Duration = Duration::from_secs(1);
/// Width of a bar that stands for 100 Mbit/s, in characters.
const BAR: f64 = 30.0;

/// The view, and what it needs to remember from one time to the next.
pub(super) struct View {
    start: Instant,
    /// When the bytes of the paths were last looked at.
    looked: Instant,
    due: Instant,
    bytes: BTreeMap<String, u64>,
    screen: Screen,
}

struct Path {
    link: String,
    state: String,
    mbps: f64,
    rtt_ms: f64,
    loss_pct: f64,
}

impl View {
    /// A view of what happens from `start` on, when the paths were as `status` says.
    pub(super) fn new(start: Instant, status: &Value) -> Self {
        let (bytes, screen) = (BTreeMap::new(), Screen::new());
        let mut view = Self { start, looked: start, due: start + EVERY, bytes, screen };
        view.paths(status, EVERY);
        view
    }

    /// Whether a second has passed.
    pub(super) fn is_due(&self) -> bool {
        Instant::now() >= self.due
    }

    /// Shows the state of the paths; `events` says what happened when, the latest first.
    pub(super) fn show(&mut self, status: &Value, goodput: &Goodput, events: [(&str, Option<Instant>); 2]) {
        let now = Instant::now();
        let paths = self.paths(status, now - self.looked);
        let total = goodput.between(now - EVERY - EVERY / 5, now).unwrap_or(0.0);
        let seconds = (now - self.start).as_secs_f64().round();
        let event = events.iter().find_map(|(text, at)| at.map(|_| *text)).unwrap_or("both links are up");
        self.screen.show(&lines(&paths, total, seconds, event), &line(&paths, total, seconds, event));
        self.looked = now;
        self.due += EVERY;
    }

    /// Leaves the last view as it is.
    pub(super) fn end(&self) {
        println!();
    }

    fn paths(&mut self, status: &Value, passed: Duration) -> Vec<Path> {
        let mut paths = Vec::new();
        for path in status["paths"].as_array().into_iter().flatten() {
            let number = |key: &str| path[key].as_f64().unwrap_or(0.0);
            let id = path["id"].as_str().unwrap_or_default().to_owned();
            let bytes =
                path["tx_bytes"].as_u64().unwrap_or(0).saturating_add(path["rx_bytes"].as_u64().unwrap_or(0));
            let before = self.bytes.insert(id, bytes).unwrap_or(bytes);
            paths.push(Path {
                link: path["link"].as_str().unwrap_or("?").to_owned(),
                state: path["state"].as_str().unwrap_or("?").to_owned(),
                mbps: bytes.saturating_sub(before) as f64 * 8e-6 / passed.as_secs_f64(),
                rtt_ms: number("rtt_ms"),
                loss_pct: number("loss_pct"),
            });
        }
        paths.sort_by(|a, b| a.link.cmp(&b.link));
        paths
    }
}

fn lines(paths: &[Path], total: f64, seconds: f64, event: &str) -> Vec<String> {
    let mut lines = vec![format!("  {seconds:3.0} s   {event}")];
    for path in paths {
        lines.push(format!(
            "  {:6} {:30} {:6.1} Mbit/s  {:6.1} ms  {:4.1} % lost  {}",
            path.link,
            bar(path.mbps),
            path.mbps,
            path.rtt_ms,
            path.loss_pct,
            path.state
        ));
    }
    lines.push(format!("  total  {:60} {total:6.1} Mbit/s received by iperf3", bar(total)));
    lines
}

fn bar(mbps: f64) -> String {
    let length = (mbps / 100.0 * BAR).round().clamp(0.0, 2.0 * BAR);
    "█".repeat(length as usize)
}

fn line(paths: &[Path], total: f64, seconds: f64, event: &str) -> String {
    let paths: Vec<String> = paths
        .iter()
        .map(|p| {
            let Path { link, state, mbps, rtt_ms, loss_pct } = p;
            format!("{link} {mbps:5.1} Mbit/s {rtt_ms:5.1} ms {loss_pct:4.1} % lost, {state:7}")
        })
        .collect();
    format!("  {seconds:3.0} s  {}  total {total:5.1} Mbit/s  ({event})", paths.join(" | "))
}
