//! Many TCP connections on streams: 10 000 at the same time, and the rate of short ones.

use std::{thread, time::Duration};

use mpvpn_tests::{
    many_connections::{ConnectionServer, ShortConnections},
    testbed::{TUNNEL, Testbed},
};
use serde_json::{Value, json};

use super::{RIG, STREAM, peak_memory::PeakMemory};
use crate::{
    figure::{Bar, Figure, figure, figure_with_note},
    options::Options,
    plot::{self, Panel},
    report::Outcome,
};

/// Number of concurrent connections.
const CONCURRENT_CONNECTIONS: u32 = 10_000;
/// Server option: the default limit per user is below [`CONCURRENT_CONNECTIONS`].
const HIGHER_RELAY_LIMIT: [&str; 2] = ["--max-user-relays", "12000"];
/// Wait until the concurrent connections have closed.
const CLOSE_TIME: Duration = Duration::from_secs(2);
/// The server's address on the link, beside the tunnel.
const SERVER_LINK_ADDRESS: &str = "10.101.0.1";

pub(super) fn run(options: &Options) -> Result<Outcome, String> {
    let seconds = if options.quick { 4 } else { 10 };
    let testbed = Testbed::unlimited();
    let (server, client) = (testbed.server(&HIGHER_RELAY_LIMIT), testbed.client(&STREAM));
    let connection_server = ConnectionServer::start(&testbed)?;
    let idle = [client.memory(), server.memory()];
    let peak_memory = PeakMemory::start([client.id(), server.id()]);
    let held = connection_server.hold(&testbed, TUNNEL, CONCURRENT_CONNECTIONS)?;
    let most = peak_memory.finish();
    let name = format!("{CONCURRENT_CONNECTIONS} connections at once");
    let mut figures = vec![failures(&name, &held.first_error, held.failed as f64)];
    for (what, time) in [("made in", held.opening), ("all answered in", held.asking)] {
        figures.push(figure(RIG, format!("{name}, {what}"), time.as_secs_f64(), "s", Bar::Lower));
    }
    for (end, (idle, most)) in ["client", "server"].iter().zip(idle.into_iter().zip(most)) {
        let each = memory_of_each(idle, most);
        figures.push(figure(RIG, format!("{name}, memory of the {end} for each"), each, "kB", Bar::Lower));
    }
    thread::sleep(CLOSE_TIME);
    // The limit of the machine and of the load generator, for comparison.
    let direct = connection_server.repeat(&testbed, SERVER_LINK_ADDRESS, seconds)?;
    let through = connection_server.repeat(&testbed, TUNNEL, seconds)?;
    let name = "short connections";
    let past = format!("{name} past the tunnel");
    figures.push(figure(RIG, past, per_second(&direct), "/s", Bar::None));
    figures.push(figure(RIG, name.to_owned(), per_second(&through), "/s", Bar::AtLeast(2000.0)));
    figures.push(failures(name, &through.first_error, through.failed as f64));
    let memory = |end: usize| memory_of_each(idle[end], most[end]);
    let panel = |title: &str, unit, bars| Panel { title: title.to_owned(), unit, bars };
    let panels = [
        panel(
            "short connections",
            "/s",
            vec![("mpvpn", per_second(&through)), ("past the tunnel", per_second(&direct))],
        ),
        panel(
            "10 000 connections at once",
            "s",
            vec![
                ("mpvpn, made in", held.opening.as_secs_f64()),
                ("mpvpn, answered in", held.asking.as_secs_f64()),
            ],
        ),
        panel(
            "memory for each of them",
            "kB",
            vec![("mpvpn client", memory(0)), ("mpvpn server", memory(1))],
        ),
    ];
    let plots = vec![(format!("{RIG}/short.svg"), plot::draw("Many TCP connections on streams", &panels))];
    let raw = json!({ "direct": json_of(&direct), "through": json_of(&through),
                      "held": { "failed": held.failed, "why": held.first_error, "opening_s": held.opening.as_secs_f64(),
                                "asking_s": held.asking.as_secs_f64(), "idle_bytes": idle, "most_bytes": most } });
    Ok(Outcome { figures, raw, plots, ..Outcome::default() })
}

/// Memory of each connection (kB).
fn memory_of_each(idle: u64, most: u64) -> f64 {
    most.saturating_sub(idle) as f64 / 1e3 / f64::from(CONCURRENT_CONNECTIONS)
}

fn per_second(found: &ShortConnections) -> f64 {
    found.done as f64 / found.time.as_secs_f64()
}

fn failures(what: &str, why: &str, count: f64) -> Figure {
    figure_with_note(RIG, format!("{what}, failed"), why, count, "", Bar::AtMost(0.0))
}

fn json_of(found: &ShortConnections) -> Value {
    json!({ "done": found.done, "failed": found.failed, "seconds": found.time.as_secs_f64(), "why": found.first_error })
}
