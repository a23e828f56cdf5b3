//! A client with valid credentials that tries everything at once: the memory of the server, and the download,
//! the pings and the name look-ups of another client beside it.

use std::{
    fs::{self, File},
    net::UdpSocket,
    path::Path,
    process::Child,
    thread,
    time::{Duration, Instant},
};

use mpvpn_tests::{
    dns::{NameServer, query},
    flood::RunningFlood,
    iperf::IperfServer,
    machine_share::{MachineShare, Share},
    percentile,
    ping::{Ping, reaches},
    testbed::{Direction, Host, TUNNEL, Testbed, inet4},
    usage::peak_memory,
};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde_json::Value;

const SERVER: &str = "192.0.2.1:4433";
/// Where the rogue downloads from.
const DOWNLOAD_PORT: u16 = 5209;
/// Memory that the server is told to use, and has used at most (bytes).
const MEMORY: u64 = 512_000_000;
/// The rate of the victim, as a share of its highest.
const LOAD: f64 = 0.8;
/// How long each measurement takes (s).
const SECONDS: u32 = 20;
/// The rogue begins so long before the measurement.
const RAMP: Duration = Duration::from_secs(5);

struct Victim<'a> {
    testbed: &'a Testbed,
    iperf: IperfServer,
}

impl Victim<'_> {
    /// Measures a download at this rate (Mbit/s), with pings and look-ups beside it; returns what it got, and
    /// the figures.
    fn sample(&self, rate: f64) -> (f64, String) {
        let pings = Ping::dense(self.testbed, Host::Client, TUNNEL, SECONDS.into());
        let load =
            self.iperf.tcp_at(self.testbed, Host::Client, &inet4(), 4, rate / 4.0, Direction::Down, SECONDS);
        let lookups: Vec<f64> =
            (0..u16::try_from(SECONDS).expect("seconds") * 2).map(|number| self.look_up(number)).collect();
        let load = load.finish();
        println!("bit/s in each second: {:.0?}", load.seconds);
        let megabits = load.megabits();
        let pings = pings.finish();
        let mut times: Vec<f64> = pings.answers.iter().map(|answer| answer.rtt_ms).collect();
        // Pings that were lost have waited longest.
        times.extend((times.len() as u64..pings.sent).map(|_| f64::from(SECONDS) * 1e3));
        times.sort_by(f64::total_cmp);
        let lookup = lookups.into_iter().fold(0.0, f64::max);
        let ping = percentile(&times, 99);
        let figures =
            format!("{megabits:.0} Mbit/s, 99 % of pings {ping:.1} ms, slowest look-up {lookup:.0} ms");
        (megabits, figures)
    }

    /// The time of a look-up at the server's resolver (ms), which is repeated as programs do it.
    fn look_up(&self, number: u16) -> f64 {
        let began = Instant::now();
        let socket = self.testbed.in_namespace(Host::Client, || UdpSocket::bind("0.0.0.0:0"));
        let socket = socket.expect("a free port");
        socket.set_read_timeout(Some(Duration::from_secs(1))).expect("a socket takes a time-out");
        let (question, mut answer) = (query(number, &format!("n{number}.live.example")), [0; 512]);
        for _ in 0..3 {
            // A queue that is full drops it.
            let _ = socket.send_to(&question, (TUNNEL, 53));
            if socket.recv(&mut answer).is_ok_and(|_| answer[..2] == number.to_be_bytes()) {
                break;
            }
        }
        let took = began.elapsed();
        thread::sleep(Duration::from_millis(500).saturating_sub(took));
        took.as_secs_f64() * 1e3
    }
}

/// A process that is killed when this is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The kernel's memory of what the server's TCP connections have received and sent (bytes).
fn in_kernel(testbed: &Testbed) -> u64 {
    let shown = testbed.run(Host::Server, &["ss", "-tmnOH", "state", "established"]);
    let number = |text: &str| text.trim_start_matches(|c: char| c.is_ascii_lowercase()).parse::<u64>().ok();
    let of_socket = |line: &str| {
        let (_, rest) = line.split_once("skmem:(")?;
        let mut numbers = rest.split([',', ')']);
        // Received; then the limit, what is being sent, its limit, the reserve; queued to be sent.
        Some(number(numbers.next()?)? + number(numbers.nth(4)?)?)
    };
    shown.lines().filter_map(of_socket).sum()
}

/// Starts a part of the rogue on processor 0.
fn rogue(testbed: &Testbed, host: Host, output: &Path, args: &[&str]) -> Running {
    let file = File::create(output).expect("a file in the testbed's directory");
    let mut command = testbed.command(host, "taskset");
    command.args(["-c", "0", env!("CARGO_BIN_EXE_rogue")]).args(args);
    command.stdout(file.try_clone().expect("a second handle")).stderr(file);
    Running(command.spawn().expect("taskset runs"))
}

/// Adds a user; returns the join link.
fn add(testbed: &Testbed, name: &str) -> String {
    let output = testbed
        .mpvpn(Host::Server, &["user", "add", name, "--json", "--host", SERVER, "--state-dir", "state"]);
    assert!(output.status.success(), "{output:?}");
    let said: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    said["link"].as_str().expect("a link").to_owned()
}

#[test]
fn a_rogue_with_one_token_and_everything_at_once_takes_no_more_memory_than_there_may_be() {
    let _share = MachineShare::take(Share::Whole);
    let usual = sched_getaffinity(None).expect("the processors of this thread");
    if usual.count() < 2 {
        println!("skipped: the rogue needs a processor of its own");
        return;
    }
    // Everything that this thread starts, but for the rogue, shares a processor.
    let mut one = CpuSet::new();
    one.set(1);
    sched_setaffinity(None, &one).expect("processor 1");

    let testbed = Testbed::unlimited_with_other();
    RunningFlood::prepare(&testbed);
    let _names = NameServer::start(&testbed, Host::Inet);
    let resolvers = testbed.dir().join("resolv.conf of the server");
    fs::write(&resolvers, format!("nameserver {}\n", inet4())).expect("a file in the testbed's directory");
    let socket = testbed.file("api", Host::Server);
    let args = ["server", "--listen", "0.0.0.0:4433", "--cert", "server.crt", "--key", "server.key"];
    let more = ["--subnet", "10.0.0.0/16", "--auth", "token", "--state-dir", "state"];
    let more = [&more[..], &["--max-memory", "512MB", "--api-socket"]].concat();
    let args = [&args[..], &more, &[socket.to_str().expect("an ASCII path")]].concat();
    let resolv_conf = Path::new("/etc/resolv.conf");
    let mut server =
        testbed.start_with_file(Host::Server, &resolvers, resolv_conf, &args, &socket).wait_until_up();
    let [victim, token] = ["victim", "rogue"].map(|name| add(&testbed, name));
    let client = testbed.start(Host::Client, &["client", &victim, "--path", "eth1"]).wait_until_up();
    reaches(&testbed, Host::Client, &inet4());
    let victim = Victim { testbed: &testbed, iperf: IperfServer::start(&testbed, Host::Inet, 5201) };

    let most = victim.iperf.tcp(&testbed, Host::Client, &inet4(), 4, Direction::Down, 10).finish().megabits();
    let (rate_alone, alone) = victim.sample(LOAD * most);
    println!("{most:.0} Mbit/s at most, {} MB; alone: {alone}", server.memory() / 1_000_000);

    let downloads = format!("{}:{DOWNLOAD_PORT}", inet4());
    let _downloads =
        rogue(&testbed, Host::Inet, &testbed.file("downloads", Host::Inet), &["serve", &downloads]);
    let token = token.strip_prefix("mpvpn://").and_then(|rest| rest.split('@').next()).expect("a token");
    let (output, resolver) = (testbed.file("rogue", Host::Other), format!("{TUNNEL}:53"));
    // To measure some of its parts by themselves.
    let parts = std::env::var("ROGUE_PARTS").ok();
    let args = ["attack", SERVER, token, &resolver, &downloads];
    let args: Vec<&str> = args.into_iter().chain(parts.as_deref()).collect();
    let mut attack = rogue(&testbed, Host::Other, &output, &args);
    thread::sleep(RAMP);
    let (rate_beside, beside) = victim.sample(LOAD * most);
    // The rest of its connections.
    thread::sleep(RAMP);
    let kernel = in_kernel(&testbed);
    let said = fs::read_to_string(&output).expect("the rogue's output");
    let peak = peak_memory(server.id()).expect("the server");
    println!("{said}");
    println!(
        "{most:.0} Mbit/s at most; alone: {alone}; beside the rogue: {beside}; server: {} MB, {} MB in the kernel",
        peak / 1_000_000,
        kernel / 1_000_000
    );
    println!("{}", server.log().lines().rev().take(30).collect::<Vec<_>>().join("\n"));
    assert!(matches!(attack.0.try_wait(), Ok(None)), "the rogue has ended: {said}");
    assert!(server.is_running() && !server.log().contains("panicked"), "{}", server.log());
    println!("the victim had to connect again: {} times", client.status()["session"]["resumed"]);
    if parts.is_some() {
        println!("skipped: how much the rogue did in all");
        return;
    }
    let counts: Value = serde_json::from_str(said.lines().last().expect("counts")).expect("JSON");
    for (what, least) in [("attempts", 10_000), ("resets", 1000), ("names", 1000), ("downloads", 1000)] {
        assert!(counts[what].as_u64().is_some_and(|count| count >= least), "{what}: {counts}");
    }
    assert!(peak <= MEMORY, "the server used {peak} bytes");
    // 42 to 79 % were measured in ten runs; 18 to 26 % before users took turns.
    assert!(rate_beside >= rate_alone / 3.0, "{rate_beside:.0} of {rate_alone:.0} Mbit/s beside the rogue");
    assert!(kernel <= MEMORY / 2, "the server's connections hold {kernel} bytes in the kernel");
    sched_setaffinity(None, &usual).expect("the processors of before");
}
