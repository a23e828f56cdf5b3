//! The rigs: figures of the release build in emulated networks, each beside the bar it must meet.
//!
//! `bench [RIG]... [--load SECONDS]` runs all rigs, or those named; `bench --list` names them. The table goes to
//! stdout, the report to `target/bench/report.md` and `target/bench/report.json`. Exit code 1: a bar was missed.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)] // Edge: rigs run processes and read clocks.

use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use mpvpn_tests::{
    cut::{Death, survive},
    http::{Download, MB, Site},
    ping::{Ping, ping},
    stage::{Direction, Family, Peer, Place, SERVER, Stage, TUNNEL, inet},
    tcp::{Sink, Way},
};
use serde_json::json;

/// A measured value and what is asked of it.
struct Figure {
    rig: &'static str,
    name: String,
    value: f64,
    unit: &'static str,
    bar: Bar,
}

#[derive(Clone, Copy)]
enum Bar {
    AtLeast(f64),
    AtMost(f64),
    /// Of interest, not judged.
    None,
}

type Rig = fn(&Options) -> Vec<Figure>;

const RIGS: [(&str, &str, Rig); 6] = [
    ("bonding", "two links of 100 Mbit/s, 12.5 ms each way, 60 ms queue: 8 TCP flows, UDP", bonding),
    ("cut", "the same, link 1 dies under load and comes back", cut),
    ("latency", "plain veth: what the tunnel adds to a ping", latency),
    ("speed", "plain veth: one TCP flow, processor time of each end", speed),
    ("download", "the two links: 100 MB by curl through NAT, also across a cut", download),
    ("memory", "resident memory, idle and under load", memory),
];

struct Options {
    rigs: Vec<String>,
    load: Duration,
}

fn main() -> ExitCode {
    let options = match options(std::env::args().skip(1)) {
        Ok(Some(options)) => options,
        Ok(None) => return ExitCode::SUCCESS,
        Err(complaint) => {
            eprintln!("bench: {complaint}\n  next: bench --list names the rigs");
            return ExitCode::from(2);
        }
    };
    let mut figures = Vec::new();
    for (name, about, rig) in RIGS {
        if options.rigs.is_empty() || options.rigs.iter().any(|wanted| wanted == name) {
            eprintln!("{name}: {about}");
            figures.extend(rig(&options));
        }
    }
    let table = table(&figures);
    print!("{table}");
    if let Err(error) = write_report(&table, &figures) {
        eprintln!("bench: the report cannot be written: {error}");
        return ExitCode::FAILURE;
    }
    if figures.iter().all(Figure::is_good) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn options(mut words: impl Iterator<Item = String>) -> Result<Option<Options>, String> {
    let mut options = Options { rigs: Vec::new(), load: Duration::from_secs(60) };
    while let Some(word) = words.next() {
        match word.as_str() {
            "--list" => {
                RIGS.iter().for_each(|(name, about, _)| println!("{name:<9} {about}"));
                return Ok(None);
            }
            "--load" => {
                let seconds = words.next().and_then(|text| text.parse().ok());
                options.load = Duration::from_secs(seconds.ok_or("--load takes a number of seconds")?);
            }
            name if RIGS.iter().any(|(known, ..)| *known == name) => options.rigs.push(word),
            _ => return Err(format!("there is no rig {word}")),
        }
    }
    Ok(Some(options))
}

fn bonding(_: &Options) -> Vec<Figure> {
    let stage = Stage::two_links();
    let (_server, client) = pair(&stage);
    await_both(&client);
    let sink = Sink::start(&stage, Place::Server, 5201);
    let mut figures = Vec::new();
    for way in [Way::Up, Way::Down] {
        let report = sink.tcp(&stage, Place::Client, TUNNEL, 8, way, 10).finish();
        let name = format!("8 TCP flows {way:?}");
        figures.push(figure("bonding", name, report.megabits(), "Mbit/s", Bar::AtLeast(170.0)));
    }
    for way in [Way::Up, Way::Down] {
        let report = sink.udp(&stage, Place::Client, TUNNEL, 160, way, 10).finish();
        let name = format!("loss of UDP, 1200 bytes, 160 Mbit/s {way:?}");
        figures.push(figure("bonding", name, report.loss_pct, "%", Bar::AtMost(1.0)));
    }
    for way in [Way::Up, Way::Down] {
        let report = sink.tcp(&stage, Place::Client, TUNNEL, 1, way, 10).finish();
        figures.push(figure(
            "bonding",
            format!("1 TCP flow {way:?}"),
            report.megabits(),
            "Mbit/s",
            Bar::None,
        ));
    }
    figures
}

fn cut(_: &Options) -> Vec<Figure> {
    let mut figures = Vec::new();
    for (death, way, longest) in [
        (Death::Carrier, Way::Up, 100.0),
        (Death::Carrier, Way::Down, 100.0),
        (Death::Silent(Direction::Both), Way::Up, 300.0),
        (Death::Silent(Direction::Both), Way::Down, 300.0),
        (Death::Silent(Direction::Up), Way::Up, 300.0),
        (Death::Silent(Direction::Down), Way::Down, 300.0),
    ] {
        let stage = Stage::two_links();
        let (_server, client) = pair(&stage);
        let outcome = survive(&stage, &client, death, way);
        let what = format!("{death:?}, 8 flows {way:?}");
        figures.push(figure("cut", format!("gap: {what}"), ms(outcome.gap), "ms", Bar::AtMost(longest)));
        figures.push(figure(
            "cut",
            format!("used again: {what}"),
            ms(outcome.back),
            "ms",
            Bar::AtMost(2000.0),
        ));
    }
    figures
}

fn latency(_: &Options) -> Vec<Figure> {
    let stage = Stage::unlimited();
    let (_server, _client) = pair(&stage);
    let outside = SERVER.trim_end_matches(":4433");
    let mut added: Vec<f64> = (0..3)
        .map(|_| {
            let through = Ping::dense(&stage, Place::Client, TUNNEL, 3).finish();
            // The server's outer address goes around the tunnel only from the link's own device.
            let direct = Ping::dense_from(&stage, Place::Client, "eth1", outside, 3).finish();
            through.median_rtt_ms() - direct.median_rtt_ms()
        })
        .collect();
    added.sort_by(f64::total_cmp);
    vec![figure("latency", "added round trip, median of 3".to_owned(), added[1], "ms", Bar::AtMost(0.3))]
}

fn speed(_: &Options) -> Vec<Figure> {
    let stage = Stage::unlimited();
    let (server, client) = pair(&stage);
    let sink = Sink::start(&stage, Place::Server, 5201);
    let mut figures = Vec::new();
    for way in [Way::Up, Way::Down] {
        let before = (client.processor_time(), server.processor_time());
        let report = sink.tcp(&stage, Place::Client, TUNNEL, 1, way, 10).finish();
        let gigabytes = report.rate * 10.0 / 8e9;
        let cost = |peer: &Peer, before: Duration| (peer.processor_time() - before).as_secs_f64() / gigabytes;
        let (at_client, at_server) = (cost(&client, before.0), cost(&server, before.1));
        figures.push(figure(
            "speed",
            format!("1 TCP flow {way:?}"),
            report.rate / 1e9,
            "Gbit/s",
            Bar::AtLeast(2.0),
        ));
        figures.push(figure("speed", format!("client {way:?}"), at_client, "CPU-s/GB", Bar::None));
        figures.push(figure("speed", format!("server {way:?}"), at_server, "CPU-s/GB", Bar::None));
    }
    figures
}

fn download(_: &Options) -> Vec<Figure> {
    let mut figures = Vec::new();
    for family in [Family::V4, Family::V6] {
        for across in [false, true] {
            let stage = Stage::two_links();
            let (_server, client) = pair(&stage);
            await_both(&client);
            let site = Site::start(&stage, Place::Inet);
            let began = Instant::now();
            let limit = Duration::from_secs(60);
            let download = Download::start(&stage, &site, &inet(family), 100 * MB, limit, &[]);
            if across {
                thread::sleep(Duration::from_secs(1));
                stage.link(1).cut();
                thread::sleep(Duration::from_secs(3));
                stage.link(1).restore();
            }
            download.finish();
            let name = format!("100 MB over {family:?}{}", if across { ", link 1 gone for 3 s" } else { "" });
            figures.push(figure("download", name, began.elapsed().as_secs_f64(), "s", Bar::None));
        }
    }
    figures
}

fn memory(options: &Options) -> Vec<Figure> {
    let stage = Stage::two_links();
    let (server, client) = pair(&stage);
    await_both(&client);
    thread::sleep(Duration::from_secs(5));
    let mut figures = Vec::new();
    for (name, peer) in [("client", &client), ("server", &server)] {
        figures.push(figure("memory", format!("idle {name}"), megabytes(peer), "MB", Bar::AtMost(20.0)));
    }
    let sink = Sink::start(&stage, Place::Server, 5201);
    let seconds = u32::try_from(options.load.as_secs()).unwrap_or(u32::MAX).max(20);
    let load = sink.tcp(&stage, Place::Client, TUNNEL, 8, Way::Down, seconds);
    // What buffers a busy tunnel needs are there after a while: growth is counted from then on.
    thread::sleep(Duration::from_secs(10));
    let busy = (megabytes(&client), megabytes(&server));
    load.finish();
    for (name, peer, before) in [("client", &client, busy.0), ("server", &server, busy.1)] {
        figures.push(figure("memory", format!("busy {name}"), megabytes(peer), "MB", Bar::AtMost(64.0)));
        let growth = megabytes(peer) - before;
        let name = format!("growth of the {name} in {} s of load", seconds - 10);
        figures.push(figure("memory", name, growth, "MB", Bar::AtMost(2.0)));
    }
    let pings = ping(&stage, Place::Client, TUNNEL, 10);
    assert_eq!(pings.answers.len(), 10, "the tunnel is idle again");
    figures
}

fn pair(stage: &Stage) -> (Peer, Peer) {
    (stage.server(&[]), stage.client(&[]))
}

fn await_both(client: &Peer) {
    for link in ["eth1", "eth2"] {
        client.until_path(link, "active", Duration::from_secs(5));
    }
}

fn figure(rig: &'static str, name: String, value: f64, unit: &'static str, bar: Bar) -> Figure {
    let figure = Figure { rig, name, value, unit, bar };
    eprintln!("  {}: {:.2} {}", figure.name, figure.value, figure.unit);
    figure
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn megabytes(peer: &Peer) -> f64 {
    peer.memory() as f64 / 1e6
}

impl Figure {
    fn is_good(&self) -> bool {
        match self.bar {
            Bar::AtLeast(bar) => self.value >= bar,
            Bar::AtMost(bar) => self.value <= bar,
            Bar::None => true,
        }
    }

    fn bar(&self) -> String {
        match self.bar {
            Bar::AtLeast(bar) => format!("≥ {bar}"),
            Bar::AtMost(bar) => format!("≤ {bar}"),
            Bar::None => String::new(),
        }
    }

    fn verdict(&self) -> &'static str {
        match (self.bar, self.is_good()) {
            (Bar::None, _) => "",
            (_, true) => "ok",
            (_, false) => "missed",
        }
    }
}

fn table(figures: &[Figure]) -> String {
    let mut text = String::from("| rig | figure | measured | unit | bar | |\n|---|---|---:|---|---|---|\n");
    for figure in figures {
        let (bar, verdict) = (figure.bar(), figure.verdict());
        text += &format!(
            "| {} | {} | {:.2} | {} | {bar} | {verdict} |\n",
            figure.rig, figure.name, figure.value, figure.unit
        );
    }
    text
}

fn write_report(table: &str, figures: &[Figure]) -> std::io::Result<()> {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| PathBuf::from("target"), PathBuf::from);
    let directory = target.join("bench");
    fs::create_dir_all(&directory)?;
    let machine = machine();
    let markdown = format!("# mpvpn, measured\n\n{machine}\n\n{table}");
    write(&directory.join("report.md"), &markdown)?;
    let list: Vec<_> = figures
        .iter()
        .map(|figure| {
            json!({ "rig": figure.rig, "name": figure.name, "value": figure.value, "unit": figure.unit,
                    "bar": figure.bar(), "ok": figure.is_good() })
        })
        .collect();
    write(&directory.join("report.json"), &format!("{:#}\n", json!({ "machine": machine, "figures": list })))
}

fn write(path: &Path, text: &str) -> std::io::Result<()> {
    fs::write(path, text)?;
    eprintln!("wrote {}", path.display());
    Ok(())
}

/// Processor, cores and kernel, as the kernel tells them.
fn machine() -> String {
    let processors = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model =
        processors.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or(": unknown processor");
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let cores = thread::available_parallelism().map_or(0, usize::from);
    format!("{}, {cores} cores, Linux {}", model.trim_start_matches(['\t', ' ', ':']), kernel.trim())
}
