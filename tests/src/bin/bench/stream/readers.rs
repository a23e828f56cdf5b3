//! Downloads with stalled readers: their memory, and the delay of another connection meanwhile.

use std::{net::IpAddr, thread, time::Duration};

use mpvpn_tests::{
    percentile,
    stalled_readers::run_stalled_readers,
    testbed::{Direction, TUNNEL, Testbed},
};
use serde_json::json;

use super::{RIG, STREAM, peak_memory::PeakMemory};
use crate::{
    figure::{Bar, figure},
    options::Options,
    paths::quiet_connection::QuietConnection,
    plot::{self, Panel},
    report::Outcome,
};

/// Number of downloads with stalled readers.
const STALLED_DOWNLOADS: usize = 32;
/// Pause between an answer and the next request of the other connection.
const REQUEST_INTERVAL: Duration = Duration::from_millis(10);

/// Results: memory in MB, times in ms.
struct StalledResult {
    idle: Vec<f64>,
    during_stall: Vec<f64>,
    /// Client and server: idle memory, and peak during the stall.
    memory: [(f64, f64); 2],
    pushed: u64,
}

pub(super) fn run(options: &Options) -> Result<Outcome, String> {
    let time = Duration::from_secs(if options.quick { 4 } else { 10 });
    let result = measure(time)?;
    let mut figures = Vec::new();
    for (name, (idle, most)) in ["client", "server"].iter().zip(result.memory) {
        let name =
            format!("{STALLED_DOWNLOADS} downloads that nobody reads: memory of the {name} above idle");
        figures.push(figure(RIG, name, most - idle, "MB", Bar::AtMost(64.0)));
    }
    let added = |percent| percentile(&result.during_stall, percent) - percentile(&result.idle, percent);
    let name = |which: &str| format!("the same: echo of another connection above idle, {which}");
    figures.push(figure(RIG, name("median"), added(50), "ms", Bar::AtMost(5.0)));
    figures.push(figure(RIG, name("99th percentile"), added(99), "ms", Bar::Lower));
    let panel = |title: &str, unit, bars| Panel { title: title.to_owned(), unit, bars };
    let echo = |percent| {
        let of = |times: &[f64]| percentile(times, percent);
        vec![("mpvpn, meanwhile", of(&result.during_stall)), ("idle", of(&result.idle))]
    };
    let memory = |(idle, most): (f64, f64)| vec![("mpvpn, meanwhile", most), ("idle", idle)];
    let [client, server] = result.memory;
    let panels = [
        panel("echo of another connection, median", "ms", echo(50)),
        panel("echo of another connection, 99th percentile", "ms", echo(99)),
        panel("memory of the client", "MB", memory(client)),
        panel("memory of the server", "MB", memory(server)),
    ];
    let title = format!("{STALLED_DOWNLOADS} downloads that nobody reads");
    let plots = vec![(format!("{RIG}/readers.svg"), plot::draw(&title, &panels))];
    let raw = json!({ "idle_ms": result.idle, "meanwhile_ms": result.during_stall, "memory_mb": result.memory,
                      "pushed_bytes": result.pushed });
    Ok(Outcome { figures, raw, plots, ..Outcome::default() })
}

fn measure(time: Duration) -> Result<StalledResult, String> {
    let testbed = Testbed::unlimited();
    let (server, client) = (testbed.server(&[]), testbed.client(&STREAM));
    let address: IpAddr = TUNNEL.parse().map_err(|error| format!("{TUNNEL}: {error}"))?;
    let quiet_connection = QuietConnection::start(&testbed, TUNNEL, REQUEST_INTERVAL)?;
    thread::sleep(time / 2);
    let idle = in_ms(&quiet_connection.finish()?);
    let before = [client.memory(), server.memory()];
    let quiet_connection = QuietConnection::start(&testbed, TUNNEL, REQUEST_INTERVAL)?;
    let peak_memory = PeakMemory::start([client.id(), server.id()]);
    let pushed = run_stalled_readers(&testbed, address, STALLED_DOWNLOADS, Direction::Down, time)?;
    let (most, during_stall) = (peak_memory.finish(), in_ms(&quiet_connection.finish()?));
    let memory = [0, 1].map(|end| (before[end] as f64 / 1e6, most[end] as f64 / 1e6));
    Ok(StalledResult { idle, during_stall, memory, pushed })
}

fn in_ms(times: &[Duration]) -> Vec<f64> {
    let mut times: Vec<f64> = times.iter().map(|time| time.as_secs_f64() * 1e3).collect();
    times.sort_by(f64::total_cmp);
    times
}
