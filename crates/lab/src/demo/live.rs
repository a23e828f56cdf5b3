//! What is seen while the traffic runs: a line a link each second, in place on a terminal.

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

/// A link, with the state and the figures of the path over it that has carried most; each class has one of its own.
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
    /// A view of what happens from `start` on, when the links were as `status` says.
    pub(super) fn new(start: Instant, status: &Value) -> Self {
        let (bytes, screen) = (BTreeMap::new(), Screen::new());
        let mut view = Self { start, looked: start, due: start + EVERY, bytes, screen };
        links(&mut view.bytes, status, EVERY);
        view
    }

    /// Whether a second has passed.
    pub(super) fn is_due(&self) -> bool {
        Instant::now() >= self.due
    }

    /// Shows the state of the links; `events` says what happened when, the latest first.
    pub(super) fn show(&mut self, status: &Value, goodput: &Goodput, events: [(&str, Option<Instant>); 2]) {
        let now = Instant::now();
        let links = links(&mut self.bytes, status, now - self.looked);
        let total = goodput.between(now - EVERY - EVERY / 5, now).unwrap_or(0.0);
        let seconds = (now - self.start).as_secs_f64().round();
        let event = events.iter().find_map(|(text, at)| at.map(|_| *text)).unwrap_or("both links are up");
        self.screen.show(&lines(&links, total, seconds, event), &line(&links, total, seconds, event));
        self.looked = now;
        self.due += EVERY;
    }

    /// Leaves the last view as it is.
    pub(super) fn end(&self) {
        println!();
    }
}

/// The links of `status`; `bytes` is what each path had carried when it was looked, so long ago.
fn links(bytes: &mut BTreeMap<String, u64>, status: &Value, passed: Duration) -> Vec<Link> {
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
            mbps: carried.saturating_sub(before) as f64 * 8e-6 / passed.as_secs_f64(),
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
    let length = (mbps / 100.0 * BAR).round().clamp(0.0, 2.0 * BAR);
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
    fn the_paths_of_all_classes_over_a_link_are_one_line() {
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
        let told: Vec<_> =
            found.iter().map(|link| (&*link.name, &*link.state, link.mbps, link.rtt_ms)).collect();
        assert_eq!(told, [("eth0", "active", 1.0, 7.0), ("eth1", "active", 17.0, 25.0)]);
    }
}
