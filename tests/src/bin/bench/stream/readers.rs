//! Downloads that nobody reads: what they hold in memory, and whether another connection waits for them.

use std::{net::IpAddr, thread, time::Duration};

use mpvpn_tests::{
    percentile,
    stage::{Stage, TUNNEL},
    stall::{Ways, stall},
};
use serde_json::json;

use super::{RIG, STREAM, peaks::Peaks};
use crate::{
    figure::{Bar, figure},
    options::Options,
    paths::talk::Talk,
    report::Outcome,
};

/// Downloads that nobody reads.
const STALLED: usize = 32;
/// From an answer of the other connection to its next question.
const PAUSE: Duration = Duration::from_millis(10);

/// Memory in MB, and times in ms.
struct Found {
    idle: Vec<f64>,
    meanwhile: Vec<f64>,
    /// The client and the server, each idle and at most meanwhile.
    memory: [(f64, f64); 2],
    pushed: u64,
}

pub(super) fn run(options: &Options) -> Result<Outcome, String> {
    let time = Duration::from_secs(if options.quick { 4 } else { 10 });
    let found = measure(time)?;
    let mut figures = Vec::new();
    for (name, (idle, most)) in ["client", "server"].iter().zip(found.memory) {
        let name = format!("{STALLED} downloads that nobody reads: memory of the {name} above idle");
        figures.push(figure(RIG, name, most - idle, "MB", Bar::AtMost(64.0)));
    }
    let added = |percent| percentile(&found.meanwhile, percent) - percentile(&found.idle, percent);
    let name = |which: &str| format!("the same: echo of another connection above idle, {which}");
    figures.push(figure(RIG, name("median"), added(50), "ms", Bar::AtMost(5.0)));
    figures.push(figure(RIG, name("99th percentile"), added(99), "ms", Bar::Lower));
    let raw = json!({ "idle_ms": found.idle, "meanwhile_ms": found.meanwhile, "memory_mb": found.memory,
                      "pushed_bytes": found.pushed });
    Ok(Outcome { figures, raw, ..Outcome::default() })
}

fn measure(time: Duration) -> Result<Found, String> {
    let stage = Stage::unlimited();
    let (server, client) = (stage.server(&[]), stage.client(&STREAM));
    let address: IpAddr = TUNNEL.parse().map_err(|error| format!("{TUNNEL}: {error}"))?;
    let talk = Talk::start(&stage, TUNNEL, PAUSE)?;
    thread::sleep(time / 2);
    let idle = in_ms(&talk.finish()?);
    let before = [client.memory(), server.memory()];
    let talk = Talk::start(&stage, TUNNEL, PAUSE)?;
    let peaks = Peaks::start([client.id(), server.id()]);
    let pushed = stall(&stage, address, STALLED, Ways::Down, time)?;
    let (most, meanwhile) = (peaks.finish(), in_ms(&talk.finish()?));
    let memory = [0, 1].map(|end| (before[end] as f64 / 1e6, most[end] as f64 / 1e6));
    Ok(Found { idle, meanwhile, memory, pushed })
}

fn in_ms(times: &[Duration]) -> Vec<f64> {
    let mut times: Vec<f64> = times.iter().map(|time| time.as_secs_f64() * 1e3).collect();
    times.sort_by(f64::total_cmp);
    times
}
