//! Connections in numbers: how many at once, and how many short ones a second.

use std::{thread, time::Duration};

use mpvpn_tests::{
    stage::{Stage, TUNNEL},
    visits::{Host, Repeated},
};
use serde_json::{Value, json};

use super::{RIG, STREAM, peaks::Peaks};
use crate::{
    figure::{Bar, Figure, figure, noted},
    options::Options,
    report::Outcome,
};

/// Connections at once.
const HELD: u32 = 10_000;
/// What the server lets one user have by default is less than that.
const ROOM: [&str; 2] = ["--max-user-relays", "12000"];
/// The connections that were held end meanwhile.
const REST: Duration = Duration::from_secs(2);
/// The server's end of the link, past the tunnel.
const OUTSIDE: &str = "10.101.0.1";

pub(super) fn run(options: &Options) -> Result<Outcome, String> {
    let seconds = if options.quick { 4 } else { 10 };
    let stage = Stage::unlimited();
    let (server, client) = (stage.server(&ROOM), stage.client(&STREAM));
    let host = Host::start(&stage)?;
    let idle = [client.memory(), server.memory()];
    let peaks = Peaks::start([client.id(), server.id()]);
    let held = host.hold(&stage, TUNNEL, HELD)?;
    let most = peaks.finish();
    let name = format!("{HELD} connections at once");
    let mut figures = vec![failures(&name, &held.why, held.failed as f64)];
    for (what, time) in [("made in", held.opening), ("all answered in", held.asking)] {
        figures.push(figure(RIG, format!("{name}, {what}"), time.as_secs_f64(), "s", Bar::Lower));
    }
    for (end, (idle, most)) in ["client", "server"].iter().zip(idle.into_iter().zip(most)) {
        let each = most.saturating_sub(idle) as f64 / 1e3 / f64::from(HELD);
        figures.push(figure(RIG, format!("{name}, memory of the {end} for each"), each, "kB", Bar::Lower));
    }
    thread::sleep(REST);
    // What the machine and the loader can do, for comparison.
    let direct = host.repeat(&stage, OUTSIDE, seconds)?;
    let through = host.repeat(&stage, TUNNEL, seconds)?;
    let name = "short connections";
    let past = format!("{name} past the tunnel");
    figures.push(figure(RIG, past, a_second(&direct), "/s", Bar::None));
    figures.push(figure(RIG, name.to_owned(), a_second(&through), "/s", Bar::AtLeast(2000.0)));
    figures.push(failures(name, &through.why, through.failed as f64));
    let raw = json!({ "direct": told(&direct), "through": told(&through),
                      "held": { "failed": held.failed, "why": held.why, "opening_s": held.opening.as_secs_f64(),
                                "asking_s": held.asking.as_secs_f64(), "idle_bytes": idle, "most_bytes": most } });
    Ok(Outcome { figures, raw, ..Outcome::default() })
}

fn a_second(found: &Repeated) -> f64 {
    found.done as f64 / found.time.as_secs_f64()
}

fn failures(what: &str, why: &str, count: f64) -> Figure {
    noted(RIG, format!("{what}, failed"), why, count, "", Bar::AtMost(0.0))
}

fn told(found: &Repeated) -> Value {
    json!({ "done": found.done, "failed": found.failed, "seconds": found.time.as_secs_f64(), "why": found.why })
}
