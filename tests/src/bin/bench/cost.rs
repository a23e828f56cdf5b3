//! The cost of a tunnel at the rates that links have: processor time of each end a GB, wake-ups and system
//! calls a packet, and the round trip beside the load. Links have 20 ms of round trip.
//!
//! In: options. Out: a figure for every load, as a ratio to a plain copy of packets in the same round. Always
//! holds: the compared systems are measured in turn.

use std::{
    collections::BTreeMap,
    fs,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use mpvpn_tests::{
    call::{Call, CallProfile},
    fallible_iperf::{IperfTarget, Traffic},
    ping::Ping,
    system::System,
    testbed::{Direction, Host, Testbed},
    usage::user_and_system_time,
};
use serde_json::{Value, json};

use crate::{
    figure::{Bar, figure},
    median::median,
    options::Options,
    parts::{direction_name, unmeasured_figure},
    paths::plan::catch_panic,
    peers::in_turn,
    plot::number,
    report::Outcome,
};

const RIG: &str = "cost";
/// The compared systems.
const SYSTEMS: [System; 5] =
    [System::PlainCopy, System::TunCopy, System::Mpvpn, System::MpvpnStream, System::WireguardGo];
/// Names of the two ends in figures.
const ENDS: [&str; 2] = ["client", "server"];
/// Port of iperf3, and of the call's echo server.
const PORT: u16 = 5201;
const CALL_PORT: u16 = 5301;
/// UDP payload of a datagram of the video and of the half load, bytes.
const DATAGRAM_BYTES: u32 = 1200;
/// Time from the start of a system to the first load: path MTU, pipes and classes have settled.
const SETTLING_TIME: Duration = Duration::from_secs(2);
/// A GB, bytes.
const GB: f64 = 1e9;

/// A load, and the links that it runs over.
struct Load {
    name: &'static str,
    rate_mbit: u32,
    links: usize,
    traffic: LoadTraffic,
    /// Highest ratio of processor time to the plain copy's.
    most: Option<f64>,
    /// Whether a quick run has it.
    is_quick: bool,
}

#[derive(Clone, Copy)]
enum LoadTraffic {
    Tcp(u32, Direction),
    /// Datagrams at this rate, Mbit/s, down, with pings beside it.
    Udp(f64),
    /// 50 datagrams a second in both directions.
    Call,
    /// Nothing.
    Idle,
}

const fn load(
    name: &'static str,
    rate_mbit: u32,
    links: usize,
    traffic: LoadTraffic,
    most: Option<f64>,
    is_quick: bool,
) -> Load {
    Load { name, rate_mbit, links, traffic, most, is_quick }
}

const DOWN: Direction = Direction::Down;

const LOADS: [Load; 14] = [
    load("5 Mbit/s, 1 flow", 5, 1, LoadTraffic::Tcp(1, DOWN), None, false),
    load("20 Mbit/s, 1 flow", 20, 1, LoadTraffic::Tcp(1, DOWN), Some(1.4), true),
    load("100 Mbit/s, 1 flow", 100, 1, LoadTraffic::Tcp(1, DOWN), Some(1.0), true),
    load("500 Mbit/s, 8 flows", 500, 1, LoadTraffic::Tcp(8, DOWN), Some(0.8), true),
    load("1000 Mbit/s, 8 flows", 1000, 1, LoadTraffic::Tcp(8, DOWN), None, false),
    load("100 Mbit/s, 1 flow up", 100, 1, LoadTraffic::Tcp(1, Direction::Up), None, true),
    load("100 Mbit/s, 8 flows", 100, 1, LoadTraffic::Tcp(8, DOWN), None, false),
    load("100 Mbit/s, half load of UDP", 100, 1, LoadTraffic::Udp(50.0), None, true),
    load("100 Mbit/s, video of 5 Mbit/s", 100, 1, LoadTraffic::Udp(5.0), None, false),
    load("100 Mbit/s, call", 100, 1, LoadTraffic::Call, None, false),
    load("2 × 50 Mbit/s, 1 flow", 50, 2, LoadTraffic::Tcp(1, DOWN), None, true),
    load("4 × 25 Mbit/s, 1 flow", 25, 4, LoadTraffic::Tcp(1, DOWN), None, false),
    load("idle, 1 link", 100, 1, LoadTraffic::Idle, None, false),
    load("idle, 4 links", 100, 4, LoadTraffic::Idle, None, false),
];

impl Load {
    fn testbed(&self) -> Testbed {
        let link = format!("{}mbit,10ms", self.rate_mbit);
        Testbed::new(&vec![link.as_str(); self.links])
    }

    /// Only mpvpn uses several links; idling says something of mpvpn only, and is the same whatever flows
    /// would travel as. An idle run takes two minutes and has no baseline to be compared with in turn, so
    /// one is enough.
    fn measures(&self, system: System, round: u32) -> bool {
        let is_ours = matches!(system, System::Mpvpn | System::MpvpnStream);
        match self.traffic {
            LoadTraffic::Idle => system == System::Mpvpn && round == 0,
            _ => is_ours || self.links == 1,
        }
    }

    fn seconds(&self, options: &Options) -> u32 {
        match self.traffic {
            LoadTraffic::Idle => 60,
            _ => options.seconds.max(4),
        }
    }
}

/// The resources that one end used during a run.
#[derive(Clone, Copy, Default)]
struct Used {
    /// Processor time, user and system, s.
    user: f64,
    system: f64,
    /// How often a thread slept and was woken.
    wakeups: f64,
}

/// The results of a run.
#[derive(Clone, Default)]
struct Run {
    bytes: f64,
    seconds: f64,
    used: [Used; 2],
    /// System calls a second at each end.
    calls: [Option<f64>; 2],
    /// Median and 99 % of pings beside the load, ms.
    rtt: Option<(f64, f64)>,
}

impl Run {
    /// CPU-s a GB at an end.
    fn cost(&self, end: usize) -> f64 {
        (self.used[end].user + self.used[end].system) / (self.bytes / GB)
    }
}

pub(crate) fn run(options: &Options) -> Outcome {
    let loads: Vec<&Load> = LOADS.iter().filter(|load| !options.quick || load.is_quick).collect();
    let rounds = if options.quick { 1 } else { options.rounds.min(3) };
    let mut runs: BTreeMap<(usize, System), Vec<Run>> = BTreeMap::new();
    let mut outcome = Outcome::default();
    for round in 0..rounds {
        for (at, load) in loads.iter().enumerate() {
            let systems: Vec<System> =
                SYSTEMS.into_iter().filter(|system| load.measures(*system, round)).collect();
            for system in in_turn(&systems, round) {
                eprintln!("  round {} of {rounds}, {}: {}", round + 1, load.name, system.name());
                match catch_panic(|| measure(load, system, round == 0, options)) {
                    Ok(run) => runs.entry((at, system)).or_default().push(run),
                    Err(why) => {
                        let what = format!("{}, {}", load.name, system.name());
                        outcome.figures.push(unmeasured_figure(RIG, &what, &why));
                    }
                }
            }
        }
    }
    for (at, load) in loads.iter().enumerate() {
        figures(&mut outcome, load, |system| runs.get(&(at, system)).map_or(&[], Vec::as_slice));
    }
    outcome.chapter = chapter(&loads, &runs, rounds);
    outcome.raw = raw_json(&loads, &runs);
    outcome
}

fn figures<'a>(outcome: &mut Outcome, load: &Load, runs: impl Fn(System) -> &'a [Run]) {
    for system in [System::Mpvpn, System::MpvpnStream] {
        let ours = runs(system);
        if ours.is_empty() {
            continue;
        }
        let mut add = |what: &str, values: Vec<f64>, unit, bar| {
            let name = format!("{}, {}: {what}", load.name, system.name());
            outcome.figures.push(figure(RIG, name, median(values).unwrap_or(f64::NAN), unit, bar));
        };
        if matches!(load.traffic, LoadTraffic::Idle) {
            let each = |of: fn(Used) -> f64| {
                move |run: &Run| {
                    run.used.map(of).into_iter().map(|value| value / run.seconds).collect::<Vec<_>>()
                }
            };
            let wakeups = each(|used| used.wakeups);
            let busy = each(|used| (used.user + used.system) * 100.0);
            for (end, name) in ENDS.iter().enumerate() {
                let of =
                    |values: &dyn Fn(&Run) -> Vec<f64>| ours.iter().map(|run| values(run)[end]).collect();
                add(&format!("wake-ups of the {name}"), of(&wakeups), "1/s", Bar::Lower);
                add(name, of(&busy), "% of a core", Bar::Lower);
            }
            continue;
        }
        let plain = runs(System::PlainCopy);
        for (end, name) in ENDS.iter().enumerate() {
            if load.links > 1 {
                add(name, ours.iter().map(|run| run.cost(end)).collect(), "CPU-s/GB", Bar::Lower);
                continue;
            }
            let ratios = ours.iter().zip(plain).map(|(ours, plain)| ours.cost(end) / plain.cost(end));
            let bar = load.most.map_or(Bar::Lower, Bar::AtMost);
            add(&format!("{name} ÷ plain copy"), ratios.collect(), "×", bar);
        }
        let added = |of: fn((f64, f64)) -> f64| {
            ours.iter()
                .zip(plain)
                .filter_map(|(ours, plain)| Some(of(ours.rtt?) - of(plain.rtt?)))
                .collect::<Vec<_>>()
        };
        if ours.iter().any(|run| run.rtt.is_some()) && load.links == 1 {
            add("added round trip, median", added(|rtt| rtt.0), "ms", Bar::AtMost(0.4));
            add("added round trip, 99 %", added(|rtt| rtt.1), "ms", Bar::AtMost(1.5));
        }
    }
}

/// Runs one load through one system, started for it. `counts_calls`: also counts system calls, if the load is
/// one of a quick run.
fn measure(load: &Load, system: System, counts_calls: bool, options: &Options) -> Result<Run, String> {
    let testbed = load.testbed();
    let tunnel = system.start(&testbed)?;
    let seconds = load.seconds(options);
    let ends = [tunnel.client(), tunnel.server()];
    let address = tunnel.address().to_string();
    let mut target = IperfTarget::new(&testbed, &address, PORT);
    target.listen();
    thread::sleep(SETTLING_TIME);
    if matches!(load.traffic, LoadTraffic::Idle) {
        // A client counts as idle after a minute without traffic.
        thread::sleep(Duration::from_secs(60));
    }
    let mut run = spend(load, &testbed, &mut target, &address, ends, seconds)?;
    if counts_calls && load.is_quick && matches!(load.traffic, LoadTraffic::Tcp(..)) {
        // Tracing costs time itself, so it is a run of its own.
        let counters = ends.map(|pid| pid.and_then(|pid| SystemCalls::count(pid, Duration::from_secs(2))));
        spend(load, &testbed, &mut target, &address, ends, 4)?;
        run.calls = counters.map(|counter| counter.and_then(SystemCalls::finish));
    }
    Ok(run)
}

fn spend(
    load: &Load,
    testbed: &Testbed,
    target: &mut IperfTarget<'_>,
    address: &str,
    ends: [Option<u32>; 2],
    seconds: u32,
) -> Result<Run, String> {
    let (before, began) = (ends.map(used), Instant::now());
    let (bytes, rtt) = match load.traffic {
        LoadTraffic::Tcp(flows, direction) => {
            (target.run(Traffic::Tcp { flows }, direction, seconds)?.bytes, None)
        }
        LoadTraffic::Udp(mbit) => {
            let pings = Ping::dense(testbed, Host::Client, address, u64::from(seconds));
            let rate = mbit * 1e6 / 8.0 / f64::from(DATAGRAM_BYTES);
            let arrived = target.run(Traffic::Udp { size: DATAGRAM_BYTES, rate }, DOWN, seconds)?;
            let pings = pings.finish();
            (arrived.bytes, Some((pings.median_rtt_ms(), pings.rtt_ms(99))))
        }
        LoadTraffic::Call => {
            let profile = CallProfile { interval: Duration::from_millis(20), payload_bytes: 172 };
            let call = Call::start(testbed, (address, CALL_PORT), profile)?;
            thread::sleep(Duration::from_secs(seconds.into()));
            let pings = call.finish()?;
            let rtt = (pings.median_rtt_ms(), pings.rtt_ms(99));
            (2.0 * pings.answers.len() as f64 * profile.payload_bytes as f64, Some(rtt))
        }
        LoadTraffic::Idle => {
            thread::sleep(Duration::from_secs(seconds.into()));
            (0.0, None)
        }
    };
    let (after, seconds) = (ends.map(used), began.elapsed().as_secs_f64());
    let used = [0, 1].map(|end| Used {
        user: after[end].user - before[end].user,
        system: after[end].system - before[end].system,
        wakeups: after[end].wakeups - before[end].wakeups,
    });
    Ok(Run { bytes, seconds, used, rtt, calls: [None, None] })
}

/// The resources that a process has used so far; zero without a process.
fn used(pid: Option<u32>) -> Used {
    let read = |pid: u32| {
        let (user, system) = user_and_system_time(pid)?;
        let mut wakeups = 0.0;
        for thread in fs::read_dir(format!("/proc/{pid}/task")).ok()?.flatten() {
            let status = fs::read_to_string(thread.path().join("status")).unwrap_or_default();
            let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
            wakeups += line.and_then(|count| count.trim().parse::<f64>().ok()).unwrap_or(0.0);
        }
        Some(Used { user: user.as_secs_f64(), system: system.as_secs_f64(), wakeups })
    };
    pid.and_then(read).unwrap_or_default()
}

/// perf(1) that counts the system calls of a process.
struct SystemCalls {
    perf: std::process::Child,
    time: Duration,
}

impl SystemCalls {
    /// Counts from one second on, for `time`; `None` where perf is missing or must not trace.
    fn count(pid: u32, time: Duration) -> Option<Self> {
        let limit = time.as_millis().to_string();
        let perf = Command::new("perf")
            .args(["stat", "--delay", "1000", "--field-separator", ",", "--event", "raw_syscalls:sys_enter"])
            .args(["--pid", &pid.to_string(), "--timeout", &limit])
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::piped())
            .spawn();
        Some(Self { perf: perf.ok()?, time })
    }

    /// System calls a second.
    fn finish(self) -> Option<f64> {
        let output = self.perf.wait_with_output().ok()?;
        Some(counted_calls(&String::from_utf8_lossy(&output.stderr))? / self.time.as_secs_f64())
    }
}

/// The count in the output of `perf stat --field-separator ,`.
fn counted_calls(text: &str) -> Option<f64> {
    let line = text.lines().find(|line| line.contains("raw_syscalls"))?;
    line.split(',').next()?.parse().ok()
}

fn chapter(loads: &[&Load], runs: &BTreeMap<(usize, System), Vec<Run>>, rounds: u32) -> String {
    let mut text = format!(
        "\n## Cost at the rates that links have\n\n20 ms of round trip, medians of {rounds} rounds in turn. Processor time in CPU-s/GB \
         (of it in the kernel), wake-ups a second, system calls a second.\n\n\
         | load | system | Mbit/s | client | server | wake-ups, client | server | calls, client | server | ping, median and 99 %, ms |\n\
         |---|---|---:|---:|---:|---:|---:|---:|---:|---:|\n"
    );
    for ((at, system), runs) in runs {
        let of = |value: &dyn Fn(&Run) -> Option<f64>| {
            median(runs.iter().filter_map(value).collect()).map_or("–".to_owned(), number)
        };
        let cost = |end: usize| {
            let in_kernel = of(&|run| Some(run.used[end].system / (run.bytes / GB)));
            format!("{} ({in_kernel})", of(&|run| Some(run.cost(end))))
        };
        text += &format!(
            "| {} | {} | {} | {} | {} | {} | {} | {} | {} | {} / {} |\n",
            loads[*at].name,
            system.name(),
            of(&|run| Some(run.bytes * 8.0 / run.seconds / 1e6)),
            cost(0),
            cost(1),
            of(&|run| Some(run.used[0].wakeups / run.seconds)),
            of(&|run| Some(run.used[1].wakeups / run.seconds)),
            of(&|run| run.calls[0]),
            of(&|run| run.calls[1]),
            of(&|run| Some(run.rtt?.0)),
            of(&|run| Some(run.rtt?.1)),
        );
    }
    text
}

fn raw_json(loads: &[&Load], runs: &BTreeMap<(usize, System), Vec<Run>>) -> Value {
    let all = runs.iter().map(|((at, system), runs)| {
        let runs: Vec<Value> = runs
            .iter()
            .map(|run| {
                json!({ "bytes": run.bytes, "seconds": run.seconds, "calls": run.calls, "rtt_ms": run.rtt,
                        "user_s": run.used.map(|used| used.user), "system_s": run.used.map(|used| used.system),
                        "wakeups": run.used.map(|used| used.wakeups) })
            })
            .collect();
        let direction = match loads[*at].traffic {
            LoadTraffic::Tcp(_, direction) => direction_name(direction),
            _ => "",
        };
        json!({ "load": loads[*at].name, "direction": direction, "system": system.name(), "runs": runs })
    });
    json!({ "runs": all.collect::<Vec<_>>() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_mpvpn_is_measured_over_several_links_and_idle() {
        for load in &LOADS {
            let all = SYSTEMS.iter().all(|system| load.measures(*system, 1));
            let is_idle = matches!(load.traffic, LoadTraffic::Idle);
            assert_eq!(all, load.links == 1 && !is_idle, "{}", load.name);
            assert!(load.measures(System::Mpvpn, 0));
            assert_eq!(load.measures(System::MpvpnStream, 0), !is_idle);
        }
    }

    #[test]
    fn costs_are_of_the_bytes_that_arrived() {
        let used = [Used { user: 1.0, system: 0.5, wakeups: 0.0 }, Used::default()];
        let run = Run { bytes: 0.5e9, seconds: 10.0, used, ..Run::default() };
        assert_eq!((run.cost(0), run.cost(1)), (3.0, 0.0));
    }

    #[test]
    fn system_calls_are_read_from_what_perf_prints() {
        let text = "# started\n\n28901,,raw_syscalls:sys_enter,2001066215,100.00,,\n";
        assert_eq!(counted_calls(text), Some(28901.0));
        assert_eq!(counted_calls("<not counted>,,raw_syscalls:sys_enter,0,0.00,,\n"), None);
    }

    #[test]
    fn a_process_that_is_not_there_has_used_nothing() {
        assert_eq!(used(None).user, 0.0);
        assert!(used(Some(std::process::id())).wakeups > 0.0);
    }
}
