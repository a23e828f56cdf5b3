//! HTTP downloads over persistent connections, through the tunnel with TCP on streams and beside the tunnel,
//! in turn: measures the cost of the split-TCP proxy.

use std::{net::Ipv4Addr, thread, time::Duration};

use mpvpn_tests::{
    persistent_http::{PersistentConnection, PersistentServer},
    testbed::{Host, Testbed},
};
use serde_json::{Value, json};

use crate::{
    figure::{Bar, figure},
    median::median,
    options::Options,
    paths::plan::catch_panic,
    peers::Setting,
    report::Outcome,
    stream::STREAM,
};

const RIG: &str = "pseudotcp";
/// Sizes, bytes, and the number of consecutive downloads of each.
const SIZES: [(u64, u32); 5] = [(10_000, 9), (100_000, 9), (1_000_000, 9), (10_000_000, 3), (100_000_000, 1)];
/// Maximum size of the uncounted download before each series, bytes: it lets the congestion window grow
/// again.
const MAX_WARM_UP_BYTES: u64 = 1_000_000;
/// Number of rounds in which both routes are measured.
const ROUNDS: u32 = 5;
/// Wait after the client's start, so that its paths are established.
const START_TIME: Duration = Duration::from_secs(1);

/// Server address and the expected device, beside the tunnel and through it.
const ROUTES: [(Ipv4Addr, &str); 2] =
    [(Ipv4Addr::new(10, 101, 0, 1), "eth1"), (Ipv4Addr::new(10, 0, 0, 1), "mpvpn0")];

#[derive(Clone, Copy)]
enum Link {
    Gigabit,
    Near,
    Veth,
}

impl Link {
    const ALL: [Self; 3] = [Self::Gigabit, Self::Near, Self::Veth];

    fn name(self) -> &'static str {
        match self {
            Self::Gigabit => "1 Gbit/s",
            Self::Near => "100 Mbit/s, 5 ms there and back",
            Self::Veth => "veth without a limit",
        }
    }

    fn testbed(self) -> Testbed {
        match self {
            Self::Gigabit => Setting::Gigabit.testbed(),
            Self::Near => Testbed::new(&["100mbit,2.5ms,queue=60ms"]),
            Self::Veth => Setting::Veth.testbed(),
        }
    }

    /// Bar of the time on streams as a multiple of the time beside the tunnel.
    fn bar(self, size: u64) -> Bar {
        match (self, size) {
            (Self::Gigabit, 10_000_000 | 100_000_000) => Bar::AtMost(1.15),
            (Self::Near, 10_000 | 100_000) => Bar::AtMost(1.2),
            _ => Bar::Lower,
        }
    }
}

/// Download times of one size over one link, ms: beside the tunnel and on streams.
struct Row {
    size: u64,
    times: [Vec<f64>; 2],
}

pub(crate) fn run(options: &Options) -> Outcome {
    let rounds = options.runs.unwrap_or(if options.quick { 1 } else { ROUNDS });
    let mut outcome = Outcome {
        chapter: "\n## HTTP downloads\n\nMedians, each download over a connection that is kept.\n\n\
                  | link | bytes | past the tunnel, ms | on streams, ms | × |\n|---|---:|---:|---:|---:|\n"
            .to_owned(),
        ..Outcome::default()
    };
    let mut raw = Vec::new();
    for link in Link::ALL {
        match catch_panic(|| measure(link, rounds)) {
            Ok(rows) => rows.iter().for_each(|row| raw.push(add_row(link, row, &mut outcome))),
            Err(why) => {
                eprintln!("  {}: {why}", link.name());
                let name = format!("{}: it cannot be measured", link.name());
                outcome.figures.push(figure(RIG, name, f64::NAN, "", Bar::AtLeast(0.0)));
                raw.push(json!({ "link": link.name(), "error": why }));
            }
        }
    }
    outcome.raw = Value::Array(raw);
    outcome
}

fn measure(link: Link, rounds: u32) -> Result<Vec<Row>, String> {
    let testbed = link.testbed();
    let (_server, _client) = (testbed.server(&[]), testbed.client(&STREAM));
    thread::sleep(START_TIME);
    let server = PersistentServer::start(&testbed)?;
    let mut connections = Vec::new();
    for (address, device) in ROUTES {
        let route = testbed.run(Host::Client, &["ip", "route", "get", &address.to_string()]);
        if !route.contains(&format!("dev {device} ")) {
            return Err(format!("what is for {address} would not leave by {device}: {}", route.trim()));
        }
        connections.push(server.connect(&testbed, address)?);
    }
    let row = |(size, _)| Row { size, times: [Vec::new(), Vec::new()] };
    let mut rows: Vec<Row> = SIZES.into_iter().map(row).collect();
    for round in 0..rounds {
        for (row, (_, count)) in rows.iter_mut().zip(SIZES) {
            // The order alternates from round to round.
            let order = if round % 2 == 0 { [0, 1] } else { [1, 0] };
            for route in order {
                let times = download_repeatedly(&mut connections[route], row.size, count);
                row.times[route].extend(times.map_err(|why| format!("from {}: {why}", ROUTES[route].0))?);
            }
        }
    }
    Ok(rows)
}

fn download_repeatedly(
    connection: &mut PersistentConnection,
    size: u64,
    count: u32,
) -> Result<Vec<f64>, String> {
    connection.get(size.min(MAX_WARM_UP_BYTES))?;
    (0..count).map(|_| Ok(connection.get(size)?.as_secs_f64() * 1e3)).collect()
}

fn add_row(link: Link, row: &Row, outcome: &mut Outcome) -> Value {
    let [direct, streams] = row.times.clone().map(|times| median(times).unwrap_or(f64::NAN));
    let name = format!("{}, {} kB on streams, of the time past the tunnel", link.name(), row.size / 1000);
    outcome.figures.push(figure(RIG, name, streams / direct, "×", link.bar(row.size)));
    let line =
        format!("| {} | {} | {direct:.2} | {streams:.2} | {:.2} |", link.name(), row.size, streams / direct);
    eprintln!("{line}");
    outcome.chapter += &(line + "\n");
    json!({ "link": link.name(), "bytes": row.size, "direct_ms": row.times[0], "streams_ms": row.times[1] })
}
