//! Measures the cost of thousands of idle clients for a server, and their effect on a busy client.
//!
//! `crowd [--clients N] [--at-once N] [--idle SECONDS] [--load SECONDS] [--talk SECONDS] [--dashboard
//! SECONDS]` runs a server and a busy client of the release build in namespaces, connects N idle clients that
//! run in this process, and compares before and after; with `--talk` also while each of them sends and gets a
//! packet a second. The table goes to stdout. Exit code 1: the bar was missed.
// Edge: it runs processes and sockets and reads clocks.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

use std::{
    net::SocketAddr,
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use mpvpn_lab::remove_labs_when_interrupted;
use mpvpn_tests::{
    crowd::{Crowd, CrowdPlan},
    dashboard::{Browser, DASHBOARD},
    files::allow_files,
    iperf::IperfServer,
    machine_share::MachineShare,
    ping::Ping,
    testbed::{Direction, Host, MpvpnProcess, TUNNEL, Testbed},
};

/// The server's address towards [`Host::Inet`], where the idle clients are, so that the busy client shares no
/// link with them.
const SERVER: &str = "198.51.100.1:4433";
/// Bar: maximum memory of the server per idle client, KiB.
const MAX_IDLE_CLIENT_KIB: f64 = 72.0;
/// Maximum number of open files of this process without the clients' sockets, of which each has one.
const OTHER_OPEN_FILES: usize = 100;
/// Average time per client to connect before the run fails.
const CONNECT_TIMEOUT_PER_CLIENT: Duration = Duration::from_millis(100);
/// Wait until path MTU discovery is complete and memory of handshakes has been freed.
const SETTLING_TIME: Duration = Duration::from_secs(5);
/// Wait until the server has returned the memory of closed sessions to the system.
const MEMORY_RETURN_TIME: Duration = Duration::from_secs(20);

struct Options {
    clients: usize,
    at_once: usize,
    idle: u64,
    load: u32,
    /// How long each client sends a packet a second (s); 0: they stay idle.
    talk: u64,
    /// How long a browser looks at the dashboard (s); 0: there is none.
    dashboard: u64,
}

impl Options {
    fn parse(mut args: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut options = Self { clients: 10_000, at_once: 64, idle: 90, load: 3, talk: 0, dashboard: 0 };
        while let Some(word) = args.next() {
            let value = args.next().and_then(|value| value.parse::<u32>().ok()).filter(|value| *value > 0);
            let value = value.ok_or_else(|| format!("{word} wants a number above 0"))?;
            match word.as_str() {
                "--clients" => options.clients = value as usize,
                "--at-once" => options.at_once = value as usize,
                "--idle" => options.idle = value.into(),
                "--load" => options.load = value,
                "--talk" => options.talk = value.into(),
                "--dashboard" => options.dashboard = value.into(),
                _ => return Err(format!("`{word}` is no option")),
            }
        }
        Ok(options)
    }

    /// Checks that this process may open enough files for the clients.
    fn check_files(&self) -> Result<(), String> {
        let wanted = self.clients + OTHER_OPEN_FILES;
        let allowed = allow_files(wanted as u64)? as usize;
        if allowed >= wanted {
            return Ok(());
        }
        let most = allowed.saturating_sub(OTHER_OPEN_FILES);
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
    let usage = "  next: crowd [--clients N] [--at-once N] [--idle S] [--load S] [--talk S] [--dashboard S]";
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

/// Measures and prints; returns whether the bar was met.
fn run(options: &Options) -> bool {
    let testbed = Testbed::unlimited();
    let most = (options.clients + 1).to_string();
    let dashboard: &[&str] = if options.dashboard > 0 { &["--dashboard", DASHBOARD] } else { &[] };
    let server = testbed.start(
        Host::Server,
        &[
            &["server", "--listen", "0.0.0.0:4433", "--cert", "server.crt", "--key", "server.key"][..],
            &["--subnet", "10.0.0.0/16", "--auth", "none", "--max-clients", &most],
            dashboard,
        ]
        .concat(),
    );
    let server = server.wait_until_up();
    let client = testbed.client(&[]);
    let iperf = IperfServer::start(&testbed, Host::Server, 5201);
    let alone = BusyClient::measure(&testbed, &server, &client, &iperf, options.load);

    let before = (server.memory(), server.processor_time());
    let address: SocketAddr = SERVER.parse().expect("an address");
    let plan = CrowdPlan { count: options.clients, at_once: options.at_once, loss_percent: 0, stay: None };
    let crowd = Crowd::start(&testbed, Host::Inet, address, plan);
    let count = options.clients as f64;
    let took = crowd.wait_until_up_within(
        options.clients,
        CONNECT_TIMEOUT_PER_CLIENT * options.clients as u32 + SETTLING_TIME,
    );
    let handshake_time = server.processor_time() - before.1;
    row("clients", count, "");
    row("time to connect all", took.as_secs_f64(), "s");
    row("connected", count / took.as_secs_f64(), "1/s");
    row("server's processor time to connect one", handshake_time.as_secs_f64() * 1e3 / count, "ms");
    thread::sleep(SETTLING_TIME);
    let each = (server.memory() - before.0) as f64 / 1024.0 / count;
    row("server's memory a client, connected", each, "KiB");

    let started = server.processor_time();
    thread::sleep(Duration::from_secs(options.idle));
    let used = (server.processor_time() - started).as_secs_f64() / options.idle as f64;
    row("server's processor time, all idle", used * 100.0, "% of a core");
    let each = (server.memory() - before.0) as f64 / 1024.0 / count;
    row("server's memory a client, idle", each, "KiB");

    if options.dashboard > 0 {
        watch(&testbed, &server, options.dashboard);
    }

    let crowded = BusyClient::measure(&testbed, &server, &client, &iperf, options.load);
    for (name, unit, of) in BusyClient::ROWS {
        row(&format!("busy client: {name}, alone"), of(&alone), unit);
        row(&format!("busy client: {name}, among the idle"), of(&crowded), unit);
    }
    if options.talk > 0 {
        talk(&testbed, &server, &crowd, options);
    }
    row("clients that lost their connection", crowd.lost() as f64, "");
    let whole = crowd.lost() == 0;
    crowd.leave();
    thread::sleep(MEMORY_RETURN_TIME);
    row("server's memory after all left", server.memory() as f64 / 1024.0 / 1024.0, "MiB");
    each <= MAX_IDLE_CLIENT_KIB && whole
}

/// Lets each client of the crowd send and get a packet a second.
fn talk(testbed: &Testbed, server: &MpvpnProcess, crowd: &Crowd, options: &Options) {
    let p99 = || {
        let pings = Ping::dense(testbed, Host::Client, TUNNEL, options.load.into()).finish();
        let mut times: Vec<f64> = pings.answers.iter().map(|answer| answer.rtt_ms).collect();
        assert!(times.len() > 10, "{} of {} pings were answered", times.len(), pings.sent);
        times.sort_by(f64::total_cmp);
        times[times.len() * 99 / 100]
    };
    let alone = p99();
    crowd.talk(true);
    thread::sleep(SETTLING_TIME);
    let (started, answers) = (server.processor_time(), crowd.answers());
    let among = p99();
    thread::sleep(Duration::from_secs(options.talk));
    let seconds = (options.talk + u64::from(options.load)) as f64;
    row("packets of the clients that came back", (crowd.answers() - answers) as f64 / seconds, "1/s");
    let used = (server.processor_time() - started).as_secs_f64() / seconds;
    row("server's processor time, each with a packet a second", used * 100.0, "% of a core");
    row("busy client: ping, 99 %, what this adds", among - alone, "ms");
    crowd.talk(false);
}

/// Looks at the dashboard for so many seconds, four times a second, and measures what that costs the server.
fn watch(testbed: &Testbed, server: &MpvpnProcess, seconds: u64) {
    let used = |seconds: u64| {
        let started = server.processor_time();
        thread::sleep(Duration::from_secs(seconds));
        (server.processor_time() - started).as_secs_f64() / seconds as f64 * 100.0
    };
    let browser = Browser::logged_in(testbed, Host::Server, server);
    let (memory, alone) = (server.memory(), used(seconds));
    let mut messages = browser.messages("&hz=4&count=100");
    let until = Instant::now() + Duration::from_secs(seconds + 2);
    let reader = thread::spawn(move || {
        let (mut frames, mut longest) = (0.0, 0.0_f64);
        while Instant::now() < until {
            let asked = Instant::now();
            let status = messages.next_status();
            longest = longest.max(asked.elapsed().as_secs_f64());
            assert!(status["clients"].as_array().is_some_and(|clients| clients.len() > 1), "{status}");
            frames += 1.0;
        }
        (frames, longest)
    });
    let watched = used(seconds);
    let (frames, longest) = reader.join().expect("the reader ends");
    row("dashboard: messages", frames / (seconds + 2) as f64, "1/s");
    row("dashboard: longest time between two", longest * 1e3, "ms");
    row("server's processor time, nobody looks", alone, "% of a core");
    row("server's processor time, 100 sessions shown", watched, "% of a core");
    row("dashboard: processor time", watched - alone, "% of a core");
    row("dashboard: memory", server.memory().saturating_sub(memory) as f64 / 1024.0 / 1024.0, "MiB");
}

fn row(name: &str, value: f64, unit: &str) {
    println!("{name:<50} {value:>10.3} {unit}");
}

/// Measurements of the busy client.
struct BusyClient {
    ping_ms: f64,
    ping_p99_ms: f64,
    up: f64,
    down: f64,
    /// Processor time of the server per GB, s, both directions together.
    cost: f64,
}

type Row = (&'static str, &'static str, fn(&BusyClient) -> f64);

impl BusyClient {
    const ROWS: [Row; 5] = [
        ("ping, median", "ms", |busy_client| busy_client.ping_ms),
        ("ping, 99 %", "ms", |busy_client| busy_client.ping_p99_ms),
        ("TCP up", "Mbit/s", |busy_client| busy_client.up),
        ("TCP down", "Mbit/s", |busy_client| busy_client.down),
        ("server's processor time", "s/GB", |busy_client| busy_client.cost),
    ];

    fn measure(
        testbed: &Testbed,
        server: &MpvpnProcess,
        client: &MpvpnProcess,
        iperf: &IperfServer,
        seconds: u32,
    ) -> Self {
        client.status();
        let pings = Ping::dense(testbed, Host::Client, TUNNEL, seconds.into()).finish();
        let mut times: Vec<f64> = pings.answers.iter().map(|answer| answer.rtt_ms).collect();
        assert!(times.len() > 10, "{} of {} pings were answered", times.len(), pings.sent);
        times.sort_by(f64::total_cmp);
        let started = server.processor_time();
        let [up, down] = [Direction::Up, Direction::Down]
            .map(|direction| iperf.tcp(testbed, Host::Client, TUNNEL, 1, direction, seconds).finish().rate);
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
