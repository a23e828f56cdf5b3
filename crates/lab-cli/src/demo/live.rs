//! The live view during the demonstration: one line for each link, updated every second.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use serde_json::Value;

use super::traffic::Goodput;
use crate::screen::Screen;

/// The interval of updates.
const DISPLAY_INTERVAL: Duration = Duration::from_secs(1);
/// Width of a bar for 100 Mbit/s, in characters.
const BAR_CHARS_PER_100_MBPS: f64 = 30.0;

/// The live view, with the state that it needs for the next update.
pub(super) struct View {
    start: Instant,
    /// When the counters of the paths were last read.
    last_read: Instant,
    next_display: Instant,
    bytes: BTreeMap<String, u64>,
    screen: Screen,
}

/// A link, with the state and figures of the path over it that has carried most bytes; each class has a path
/// over it.
#[derive(Debug, PartialEq)]
struct Link {
    name: String,
    carried: u64,
    state: String,
    mbps: f64,
    rtt_ms: f64,
    loss_pct: f64,
}

impl View {
    /// A view that begins at `start`, with `status` as the status of the client at that time.
    pub(super) fn new(start: Instant, status: &Value) -> Self {
        let (bytes, screen) = (BTreeMap::new(), Screen::new());
        let mut view =
            Self { start, last_read: start, next_display: start + DISPLAY_INTERVAL, bytes, screen };
        links(&mut view.bytes, status, DISPLAY_INTERVAL);
        view
    }

    /// Whether the next update is due.
    pub(super) fn is_due(&self) -> bool {
        Instant::now() >= self.next_display
    }

    /// Shows the state of the links. `events` has the texts of events and when they happened, the latest
    /// first.
    pub(super) fn show(&mut self, status: &Value, goodput: &Goodput, events: [(&str, Option<Instant>); 2]) {
        let now = Instant::now();
        let links = links(&mut self.bytes, status, now - self.last_read);
        let total = goodput.between(now - DISPLAY_INTERVAL - DISPLAY_INTERVAL / 5, now).unwrap_or(0.0);
        let seconds = (now - self.start).as_secs_f64().round();
        let event = events.iter().find_map(|(text, at)| at.map(|_| *text)).unwrap_or("both links are up");
        self.screen.show(&lines(&links, total, seconds, event), &line(&links, total, seconds, event));
        self.last_read = now;
        self.next_display += DISPLAY_INTERVAL;
    }

    /// Ends the view; the last update stays on the screen.
    pub(super) fn end(&self) {
        println!();
    }
}

/// The links in `status`. `bytes` has the bytes of each path at the last update, `elapsed` ago, and is
/// updated.
fn links(bytes: &mut BTreeMap<String, u64>, status: &Value, elapsed: Duration) -> Vec<Link> {
    let mut links: BTreeMap<String, Link> = BTreeMap::new();
    for path in status["paths"].as_array().into_iter().flatten() {
        let text = |key: &str| path[key].as_str().unwrap_or("?").to_owned();
        let number = |key: &str| path[key].as_f64().unwrap_or(0.0);
        let count = |key: &str| path[key].as_u64().unwrap_or(0);
        let carried = count("tx_bytes").saturating_add(count("rx_bytes"));
        let before = bytes.insert(text("id"), carried).unwrap_or(carried);
        let mut new = Link {
            name: text("link"),
            carried,
            state: text("state"),
            mbps: carried.saturating_sub(before) as f64 * 8e-6 / elapsed.as_secs_f64(),
            rtt_ms: number("rtt_ms"),
            loss_pct: number("loss_pct"),
        };
        if let Some(other) = links.remove(&new.name) {
            let mbps = new.mbps + other.mbps;
            new = Link { mbps, ..if other.carried >= new.carried { other } else { new } };
        }
        links.insert(new.name.clone(), new);
    }
    links.into_values().collect()
}

fn lines(links: &[Link], total: f64, seconds: f64, event: &str) -> Vec<String> {
    let mut lines = vec![format!("  {seconds:3.0} s   {event}")];
    for link in links {
        lines.push(format!(
            "  {:6} {:30} {:6.1} Mbit/s  {:6.1} ms  {:4.1} % lost  {}",
            link.name,
            bar(link.mbps),
            link.mbps,
            link.rtt_ms,
            link.loss_pct,
            link.state
        ));
    }
    lines.push(format!("  total  {:60} {total:6.1} Mbit/s received by iperf3", bar(total)));
    lines
}

fn bar(mbps: f64) -> String {
    let length = (mbps / 100.0 * BAR_CHARS_PER_100_MBPS).round().clamp(0.0, 2.0 * BAR_CHARS_PER_100_MBPS);
    "█".repeat(length as usize)
}

fn line(links: &[Link], total: f64, seconds: f64, event: &str) -> String {
    let links: Vec<String> = links
        .iter()
        .map(|link| {
            let Link { name, state, mbps, rtt_ms, loss_pct, .. } = link;
            format!("{name} {mbps:5.1} Mbit/s {rtt_ms:5.1} ms {loss_pct:4.1} % lost, {state:7}")
        })
        .collect();
    format!("  {seconds:3.0} s  {}  total {total:5.1} Mbit/s  ({event})", links.join(" | "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_paths_of_all_classes_over_a_link_share_one_line() {
        let path = |class: &str, link: &str, state: &str, tx_bytes: u64, rtt_ms: f64| {
            serde_json::json!({
                "id": format!("{class}/{link}"), "link": link, "state": state, "tx_bytes": tx_bytes, "rx_bytes": 0,
                "rtt_ms": rtt_ms, "loss_pct": 0.0,
            })
        };
        let status = |mega: u64, small: u64| {
            serde_json::json!({ "paths": [
                path("critical", "eth1", "standby", small, 9.0),
                path("default", "eth1", "active", mega * 1_000_000, 25.0),
                path("critical", "eth0", "active", small, 7.0),
            ] })
        };
        let (mut bytes, second) = (BTreeMap::new(), Duration::from_secs(1));
        assert_eq!(links(&mut bytes, &status(1, 0), second).len(), 2);
        let found = links(&mut bytes, &status(3, 125_000), second);
        let shown: Vec<_> =
            found.iter().map(|link| (&*link.name, &*link.state, link.mbps, link.rtt_ms)).collect();
        assert_eq!(shown, [("eth0", "active", 1.0, 7.0), ("eth1", "active", 17.0, 25.0)]);
    }
}
