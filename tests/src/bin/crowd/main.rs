//! What thousands of idle clients cost one server, and what they cost the packets of a busy one.
//!
//! `crowd [--clients N] [--at-once N] [--idle SECONDS] [--load SECONDS]` runs a server and a client of the release build in
//! namespaces, lets N more clients connect that live in this process, and compares before and after. The table goes to
//! stdout. Exit code 1: a bar was missed.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)] // Edge: it runs processes and sockets and reads clocks.

mod members;

use std::{net::SocketAddr, process::ExitCode, thread, time::Duration};

use mpvpn_lab::remove_labs_when_interrupted;
use mpvpn_tests::{
    files::allow_files,
    machine_share::MachineShare,
    ping::Ping,
    stage::{Peer, Place, Stage, TUNNEL},
    tcp::{Sink, Way},
};

use members::{Crowd, files};

/// The server's address on the side of [`Place::Inet`], where the crowd is: the busy client has its link to itself.
const SERVER: &str = "198.51.100.1:4433";
/// What an idle client may cost the server, KiB.
const BAR: f64 = 128.0;
/// Files that this process has open beside those of the clients, at most.
const OWN_FILES: usize = 100;
/// What one more client may take to connect, on average, before the run is given up.
const PATIENCE: Duration = Duration::from_millis(100);
/// Path MTU discovery is over, and what handshakes left has been given back.
const SETTLE: Duration = Duration::from_secs(5);
/// What a server does not need any more it has given back.
const GIVEN_BACK: Duration = Duration::from_secs(20);

struct Options {
    clients: usize,
    at_once: usize,
    idle: u64,
    load: u32,
}

impl Options {
    fn parse(mut words: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut options = Self { clients: 10_000, at_once: 64, idle: 30, load: 3 };
        while let Some(word) = words.next() {
            let value = words.next().and_then(|value| value.parse::<u32>().ok()).filter(|value| *value > 0);
            let value = value.ok_or_else(|| format!("{word} wants a number above 0"))?;
            match word.as_str() {
                "--clients" => options.clients = value as usize,
                "--at-once" => options.at_once = value as usize,
                "--idle" => options.idle = value.into(),
                "--load" => options.load = value,
                _ => return Err(format!("`{word}` is no option")),
            }
        }
        Ok(options)
    }

    /// Whether this process may have as many files open as the clients need.
    fn check_files(&self) -> Result<(), String> {
        let wanted = files(self.clients) + OWN_FILES;
        let allowed = allow_files(wanted as u64)? as usize;
        if allowed >= wanted {
            return Ok(());
        }
        let most = allowed.saturating_sub(OWN_FILES) / files(1);
        Err(format!(
            "{} clients need {wanted} open files, and {allowed} are allowed\n  next: crowd --clients {most}, or raise the \
             limit (ulimit -n {wanted})",
            self.clients
        ))
    }
}

fn main() -> ExitCode {
    remove_labs_when_interrupted();
    MachineShare::always_whole();
    let options = Options::parse(std::env::args().skip(1));
    let usage = "  next: crowd [--clients N] [--at-once N] [--idle S] [--load S]";
    let options = options.map_err(|complaint| format!("{complaint}\n{usage}"));
    match options.and_then(|options| options.check_files().map(|()| options)) {
        Ok(options) if run(&options) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(complaint) => {
            eprintln!("crowd: {complaint}");
            ExitCode::from(2)
        }
    }
}

/// Whether the bar was met.
fn run(options: &Options) -> bool {
    let stage = Stage::unlimited();
    let most = (options.clients + 1).to_string();
    let server = stage.start(
        Place::Server,
        &[
            &["server", "--listen", "0.0.0.0:4433", "--cert", "server.crt", "--key", "server.key"][..],
            &["--subnet", "10.0.0.0/16", "--auth", "none", "--max-clients", &most],
        ]
        .concat(),
    );
    let server = server.up();
    let client = stage.client(&[]);
    let sink = Sink::start(&stage, Place::Server, 5201);
    let alone = Busy::measure(&stage, &server, &client, &sink, options.load);

    let before = (server.memory(), server.processor_time());
    let address: SocketAddr = SERVER.parse().expect("an address");
    let crowd = Crowd::start(&stage, Place::Inet, address, options.clients, options.at_once);
    let count = options.clients as f64;
    let took = crowd.wait_up(options.clients, PATIENCE * options.clients as u32 + SETTLE);
    let shaken = server.processor_time() - before.1;
    row("clients", count, "");
    row("time to connect all", took.as_secs_f64(), "s");
    row("connected", count / took.as_secs_f64(), "1/s");
    row("server's processor time to connect one", shaken.as_secs_f64() * 1e3 / count, "ms");
    thread::sleep(SETTLE);
    let each = (server.memory() - before.0) as f64 / 1024.0 / count;
    row("server's memory a client, connected", each, "KiB");

    let started = server.processor_time();
    thread::sleep(Duration::from_secs(options.idle));
    let used = (server.processor_time() - started).as_secs_f64() / options.idle as f64;
    row("server's processor time, all idle", used * 100.0, "% of a core");
    let each = (server.memory() - before.0) as f64 / 1024.0 / count;
    row("server's memory a client, idle", each, "KiB");

    let crowded = Busy::measure(&stage, &server, &client, &sink, options.load);
    for (name, unit, of) in Busy::ROWS {
        row(&format!("busy client: {name}, alone"), of(&alone), unit);
        row(&format!("busy client: {name}, among the idle"), of(&crowded), unit);
    }
    row("clients that lost their connection", crowd.lost() as f64, "");
    let whole = crowd.lost() == 0;
    crowd.leave();
    thread::sleep(GIVEN_BACK);
    row("server's memory after all left", server.memory() as f64 / 1024.0 / 1024.0, "MiB");
    each <= BAR && whole
}

fn row(name: &str, value: f64, unit: &str) {
    println!("{name:<50} {value:>10.3} {unit}");
}

/// What one client's packets take.
struct Busy {
    ping_ms: f64,
    ping_p99_ms: f64,
    up: f64,
    down: f64,
    /// Processor time of the server for each GB, both ways together.
    cost: f64,
}

type Row = (&'static str, &'static str, fn(&Busy) -> f64);

impl Busy {
    const ROWS: [Row; 5] = [
        ("ping, median", "ms", |busy| busy.ping_ms),
        ("ping, 99 %", "ms", |busy| busy.ping_p99_ms),
        ("TCP up", "Mbit/s", |busy| busy.up),
        ("TCP down", "Mbit/s", |busy| busy.down),
        ("server's processor time", "s/GB", |busy| busy.cost),
    ];

    fn measure(stage: &Stage, server: &Peer, client: &Peer, sink: &Sink, seconds: u32) -> Self {
        client.status();
        let pings = Ping::dense(stage, Place::Client, TUNNEL, seconds.into()).finish();
        let mut times: Vec<f64> = pings.answers.iter().map(|answer| answer.rtt_ms).collect();
        assert!(times.len() > 10, "{} of {} pings were answered", times.len(), pings.sent);
        times.sort_by(f64::total_cmp);
        let started = server.processor_time();
        let [up, down] = [Way::Up, Way::Down]
            .map(|way| sink.tcp(stage, Place::Client, TUNNEL, 1, way, seconds).finish().rate);
        let bytes = (up + down) / 8.0 * f64::from(seconds);
        Self {
            ping_ms: times[times.len() / 2],
            ping_p99_ms: times[times.len() * 99 / 100],
            up: up / 1e6,
            down: down / 1e6,
            cost: (server.processor_time() - started).as_secs_f64() / (bytes / 1e9),
        }
    }
}
