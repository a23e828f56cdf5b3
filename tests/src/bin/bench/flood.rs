//! Effect of floods on a connected client and on a new one, and the server's memory.
//!
//! Each flood goes to the measured server, and, as the baseline, to a second server of the same kind on the
//! same machine: so the processors have the same work, and what differs is the server's own fault.
//! wireguard-go stands in the same table, if it is installed; its baseline is a flood to a port where nothing
//! listens.

use std::{
    net::SocketAddrV4,
    thread,
    time::{Duration, Instant},
};

use mpvpn_os::usage::resident_memory;
use mpvpn_tests::{
    flood::{Flood, RunningFlood},
    iperf::IperfServer,
    percentile,
    ping::Ping,
    system::System,
    testbed::{Direction, Host, MpvpnProcess, SERVER, TUNNEL, Testbed},
};
use serde_json::{Value, json};

use crate::{
    figure::{Bar, figure},
    median::median,
    options::Options,
    parts::unmeasured_figure,
    paths::plan::catch_panic,
    plot::{self, Panel},
    report::Outcome,
};

const RIG: &str = "flood";
/// The ports of the measured server and of the other one.
const PORTS: [u16; 2] = [4433, 4434];
/// Goodput under a flood, share of the baseline (%).
const MIN_GOODPUT: f64 = 95.0;
/// The 99th percentile of pings above the baseline (ms).
const MAX_ADDED_PING: f64 = 10.0;
/// A new client is up within this time (s).
const MAX_CONNECT: f64 = 2.0;
/// Memory of the server (MB): 1024 strangers with 128 KiB in their windows.
const MAX_MEMORY: f64 = 256.0;
/// The client's load in each direction (Mbit/s).
const LOAD: u32 = 50;
/// Time for a flood to reach its rate: 1024 strangers at 500 in a second.
const RAMP: Duration = Duration::from_millis(2500);

/// The results of one run.
#[derive(Clone, Copy, Debug)]
struct Sample {
    /// The lower one of both directions (Mbit/s).
    goodput: f64,
    /// 99th percentile of the round-trip time (ms).
    ping: f64,
    /// Until a new client is up (s); `None` where that is not measured.
    connect: Option<f64>,
    /// Resident memory of the server (MB).
    memory: f64,
    /// Packets, handshakes or connections of the flood in a second.
    rate: f64,
}

/// The medians of one flood: as the baseline, and at the measured server.
struct Row {
    system: &'static str,
    flood: Flood,
    baseline: Sample,
    flooded: Sample,
}

pub(crate) fn run(options: &Options) -> Outcome {
    let (rounds, seconds) = if options.quick { (1, 2) } else { (3, 5) };
    let mut outcome = Outcome::default();
    let mut rows = Vec::new();
    match catch_panic(|| mpvpn(rounds, seconds)) {
        Ok(found) => rows.extend(found),
        Err(why) => outcome.figures.push(unmeasured_figure(RIG, "mpvpn", &why)),
    }
    let mut missing = None;
    match System::WireguardGo.version() {
        Ok(_) => match catch_panic(|| wireguard_go(rounds, seconds)) {
            Ok(found) => rows.extend(found),
            Err(why) => missing = Some(why),
        },
        Err(why) => missing = Some(why),
    }
    for row in &rows {
        let name = |what: &str| format!("{}, {}: {what}", row.system, row.flood.name());
        let own = row.system == "mpvpn";
        let bar = |bar: Bar, other: Bar| if own { bar } else { other };
        let goodput = 100.0 * row.flooded.goodput / row.baseline.goodput;
        let bars = [
            (name("goodput"), goodput, "%", bar(Bar::AtLeast(MIN_GOODPUT), Bar::Higher)),
            (
                name("added to the 99th percentile of pings"),
                row.flooded.ping - row.baseline.ping,
                "ms",
                bar(Bar::AtMost(MAX_ADDED_PING), Bar::Lower),
            ),
            (name("memory"), row.flooded.memory, "MB", bar(Bar::AtMost(MAX_MEMORY), Bar::Lower)),
        ];
        outcome.figures.extend(bars.map(|(name, value, unit, bar)| figure(RIG, name, value, unit, bar)));
        if let Some(connect) = row.flooded.connect {
            outcome.figures.push(figure(RIG, name("a new client"), connect, "s", Bar::AtMost(MAX_CONNECT)));
        }
    }
    outcome.chapter = chapter(&rows, rounds, seconds, missing.as_deref());
    outcome.plots = plots(&rows);
    outcome.raw = Value::Array(rows.iter().map(raw).collect());
    outcome
}

/// This project, with every flood.
fn mpvpn(rounds: u32, seconds: u32) -> Result<Vec<Row>, String> {
    let testbed = Testbed::unlimited_with_other();
    RunningFlood::prepare(&testbed);
    let server = testbed.server(&[]);
    let _other = other_server(&testbed);
    let _client = testbed.client(&[]);
    let link = Link { testbed: &testbed, address: TUNNEL.to_owned(), server: server.id() };
    measure_all("mpvpn", &Flood::OF_QUIC, rounds, |flood, flooded| {
        let port = PORTS[usize::from(!flooded)];
        link.sample(flood, SocketAddrV4::new([192, 0, 2, 1].into(), port), seconds, true)
    })
}

/// The server that receives the flood of the baseline: the same, but without a TUN device.
fn other_server(testbed: &Testbed) -> MpvpnProcess {
    let listen = format!("0.0.0.0:{}", PORTS[1]);
    let args = ["server", "--listen", &listen, "--cert", "server.crt", "--key", "server.key"];
    testbed.start(Host::Server, &[&args[..], &["--auth", "none", "--relay-only"]].concat()).wait_until_up()
}

/// wireguard-go, with the floods that it can be compared by.
fn wireguard_go(rounds: u32, seconds: u32) -> Result<Vec<Row>, String> {
    let testbed = Testbed::unlimited_with_other();
    RunningFlood::prepare(&testbed);
    let tunnel = System::WireguardGo.start(&testbed)?;
    let server = tunnel.server().ok_or("no process at the server")?;
    let link = Link { testbed: &testbed, address: tunnel.address().to_string(), server };
    let floods = [Flood::Garbage, Flood::WireguardInitiations];
    measure_all("wireguard-go", &floods, rounds, |flood, flooded| {
        let port = if flooded { WIREGUARD_PORT } else { WIREGUARD_PORT + 1 };
        link.sample(flood, SocketAddrV4::new([192, 0, 2, 1].into(), port), seconds, false)
    })
}

/// Where wireguard-go listens.
const WIREGUARD_PORT: u16 = 51820;

/// Medians of all floods, with the baseline and the flood in turn.
fn measure_all(
    system: &'static str,
    floods: &[Flood],
    rounds: u32,
    sample: impl Fn(Flood, bool) -> Result<Sample, String>,
) -> Result<Vec<Row>, String> {
    let mut rows = Vec::new();
    for &flood in floods {
        let mut samples = [Vec::new(), Vec::new()];
        for round in 0..rounds {
            for at in if round % 2 == 0 { [0, 1] } else { [1, 0] } {
                let found = sample(flood, at == 1)?;
                eprintln!(
                    "  {system}, {}, {}: {found:?}",
                    flood.name(),
                    if at == 1 { "flooded" } else { "baseline" }
                );
                samples[at].push(found);
            }
        }
        let [baseline, flooded] = samples.map(|all| median_of(&all));
        rows.push(Row { system, flood, baseline, flooded });
    }
    Ok(rows)
}

fn median_of(all: &[Sample]) -> Sample {
    let of = |value: fn(&Sample) -> f64| median(all.iter().map(value).collect()).unwrap_or(f64::NAN);
    let connect: Vec<f64> = all.iter().filter_map(|sample| sample.connect).collect();
    Sample {
        goodput: of(|sample| sample.goodput),
        ping: of(|sample| sample.ping),
        // The slowest: one that does not come in is what this is about.
        connect: connect.into_iter().reduce(f64::max),
        memory: all.iter().map(|sample| sample.memory).fold(0.0, f64::max),
        rate: of(|sample| sample.rate),
    }
}

/// A tunnel between the client and the server of a testbed.
struct Link<'a> {
    testbed: &'a Testbed,
    /// The server's address in the tunnel.
    address: String,
    /// The process ID of the server.
    server: u32,
}

impl Link<'_> {
    fn sample(
        &self,
        flood: Flood,
        target: SocketAddrV4,
        seconds: u32,
        connects: bool,
    ) -> Result<Sample, String> {
        let iperf = IperfServer::start(self.testbed, Host::Server, 5201);
        let mut running = RunningFlood::start(self.testbed, flood, target)?;
        thread::sleep(RAMP);
        let (before, began) = (running.sent(), Instant::now());
        let ping = Ping::dense(self.testbed, Host::Client, &self.address, (2 * seconds).into());
        let mut goodput = f64::INFINITY;
        for direction in [Direction::Up, Direction::Down] {
            let run = iperf.udp(self.testbed, Host::Client, &self.address, LOAD, direction, seconds);
            goodput = goodput.min(run.finish().megabits());
        }
        let pings = ping.finish();
        let connect = connects.then(|| self.connect());
        let rate = (running.sent() - before) as f64 / began.elapsed().as_secs_f64();
        if !running.is_running() {
            return Err(format!("the flood {} has ended early", flood.name()));
        }
        let mut times: Vec<f64> = pings.answers.iter().map(|answer| answer.rtt_ms).collect();
        // Pings that were lost have waited longest.
        times.extend((times.len() as u64..pings.sent).map(|_| f64::from(seconds) * 2e3));
        times.sort_by(f64::total_cmp);
        let memory = resident_memory(self.server).ok_or("the server has ended")? as f64 / 1e6;
        Ok(Sample { goodput, ping: percentile(&times, 99), connect, memory, rate })
    }

    /// The time in which another client comes up, its process included (s).
    fn connect(&self) -> f64 {
        let args = ["client", "--server", SERVER, "--insecure", "--path", "eth1", "--routes", "none"];
        let mut client = self.testbed.start(Host::Other, &args);
        let took = client.wait_until_up_within(Duration::from_secs(15));
        client.interrupt();
        took.as_secs_f64()
    }
}

fn chapter(rows: &[Row], rounds: u32, seconds: u32, missing: Option<&str>) -> String {
    let mut text = format!(
        "\n## Floods\n\nBeside a client with {LOAD} Mbit/s and a ping every 10 ms, over a veth link; a flood from 65,536 \
         forged addresses or 1000 hosts; median of {rounds} rounds of {seconds} s in each direction; in parentheses the \
         same flood elsewhere. The slowest of {rounds} new clients, and the largest memory.\n\n| system, flood | rate, \
         1/s | goodput, Mbit/s | ping, 99 %, ms | new client, s | memory of the server, MB |\n|---|---:|---:|---:|---:|---:|\n"
    );
    for Row { system, flood, baseline, flooded } in rows {
        let connect = |sample: &Sample| sample.connect.map_or("–".to_owned(), |s| format!("{s:.2}"));
        text += &format!(
            "| {system}, {} | {:.0} | {:.1} ({:.1}) | {:.1} ({:.1}) | {} ({}) | {:.0} ({:.0}) |\n",
            flood.name(),
            flooded.rate,
            flooded.goodput,
            baseline.goodput,
            flooded.ping,
            baseline.ping,
            connect(flooded),
            connect(baseline),
            flooded.memory,
            baseline.memory,
        );
    }
    if let Some(why) = missing {
        text += &format!("\nwireguard-go is missing: {}\n", why.lines().next().unwrap_or_default());
    }
    text
}

/// A picture for each measure, with a panel for each flood.
fn plots(rows: &[Row]) -> Vec<(String, String)> {
    type Measure = (&'static str, &'static str, &'static str, fn(&Sample) -> Option<f64>);
    const MEASURES: [Measure; 4] = [
        ("goodput", "Goodput beside a flood", "Mbit/s", |sample| Some(sample.goodput)),
        ("ping", "99th percentile of pings beside a flood", "ms", |sample| Some(sample.ping)),
        ("connect", "Time until a new client is up beside a flood", "s", |sample| sample.connect),
        ("memory", "Memory of the server beside a flood", "MB", |sample| Some(sample.memory)),
    ];
    let mut plots = Vec::new();
    for (file, title, unit, value) in MEASURES {
        let panels: Vec<Panel> = rows
            .iter()
            .filter_map(|row| {
                let bars =
                    vec![(row.system, value(&row.flooded)?), ("flood elsewhere", value(&row.baseline)?)];
                let title = format!("{}, {}, {:.0}/s", row.system, row.flood.name(), row.flooded.rate);
                Some(Panel { title, unit, bars })
            })
            .collect();
        if !panels.is_empty() {
            plots.push((format!("{RIG}/{file}.svg"), plot::draw(title, &panels)));
        }
    }
    plots
}

fn raw(row: &Row) -> Value {
    let of = |sample: &Sample| {
        json!({ "goodput": sample.goodput, "ping": sample.ping, "connect": sample.connect,
                "memory": sample.memory, "rate": sample.rate })
    };
    json!({ "system": row.system, "flood": row.flood.name(), "baseline": of(&row.baseline), "flooded": of(&row.flooded) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_measure_has_a_picture_with_a_panel_for_each_flood() {
        let sample = |goodput, connect| Sample { goodput, ping: 3.0, connect, memory: 40.0, rate: 39_800.0 };
        let row = |system, flood, connect| Row {
            system,
            flood,
            baseline: sample(50.0, connect),
            flooded: sample(49.0, connect),
        };
        let rows = [
            row("mpvpn", Flood::Initials, Some(0.2)),
            row("wireguard-go", Flood::WireguardInitiations, None),
        ];
        let plots = plots(&rows);
        let names: Vec<_> = plots.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["flood/goodput.svg", "flood/ping.svg", "flood/connect.svg", "flood/memory.svg"]);
        for (name, panels) in [(0, 2), (2, 1)] {
            assert_eq!(plots[name].1.matches(">flood elsewhere<").count(), panels, "{}", plots[name].1);
        }
        assert!(plots[0].1.contains("mpvpn, initials, 39800/s (Mbit/s)"), "{}", plots[0].1);
        assert!(super::plots(&[]).is_empty());
    }
}
