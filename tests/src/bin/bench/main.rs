//! The rigs: measure the release build in emulated networks, and compare each figure with its bar.
//!
//! `bench [RIG]... [OPTION]...` runs all rigs, or those named; `bench --list` lists rigs and options. The
//! table goes to stdout; report, raw values and plots go to `target/bench/`. Exit code 1: a bar was missed,
//! or with `--against` a figure is worse.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)] // Edge: rigs run processes and read clocks.

mod against;
mod classes;
mod cost;
mod cut;
mod figure;
mod flood;
mod median;
mod mptcp;
mod options;
mod parts;
mod paths;
mod peers;
mod plot;
mod pseudotcp;
mod report;
mod rigs;
mod shards;
mod stream;
mod sweep;
mod timeline;

use std::process::ExitCode;

use mpvpn_lab::remove_labs_when_interrupted;
use mpvpn_scenarios::{FlowMode, Scenario};
use mpvpn_tests::{flood as generator, machine_share::MachineShare, many_connections, quic_bulk, tun_copy};

use crate::{
    figure::{Figure, table},
    options::Options,
    report::Outcome,
};

/// Name, description and function of a rig.
type Rig = (&'static str, &'static str, fn(&Options) -> Outcome);

const RIGS: [Rig; 16] = [
    ("bonding", "two links of 100 Mbit/s, 12.5 ms each way, 60 ms queue: 8 TCP flows, UDP", rigs::bonding),
    (
        "cut",
        "the same links: link 1 fails under load and recovers; with --count the distribution of gaps",
        cut::run,
    ),
    ("latency", "plain veth: round-trip time added by the tunnel", rigs::latency),
    ("speed", "plain veth: rate of one TCP flow, processor time of each end", rigs::speed),
    ("download", "the two links: 100 MB by curl through NAT, also across a cut", rigs::download),
    ("memory", "resident memory, idle and under load", rigs::memory),
    ("paths", "scenarios: goodput over links of all kinds, and the effect of link failures", paths::run),
    ("peers", "one link: mpvpn compared with other VPNs; TCP, UDP, ping, processor time, memory", peers::run),
    ("shards", "links without a rate limit: effect of a second link and of a second shard", shards::run),
    (
        "stream",
        "TCP on streams: scenarios, comparison with wireguard-go, short and many connections, stalled readers",
        stream::run,
    ),
    (
        "pseudotcp",
        "HTTP downloads of 10 kB to 100 MB: TCP on streams, compared with TCP beside the tunnel",
        pseudotcp::run,
    ),
    (
        "classes",
        "classes of traffic: effect of loss and load in one class on others, loss table, failover, pipes, nine paths",
        classes::run,
    ),
    (
        "cost",
        "links of 5 to 1000 Mbit/s: processor time, wake-ups and system calls, beside plain copies and wireguard-go",
        cost::run,
    ),
    (
        "flood",
        "floods of strangers beside a busy client: garbage, Initials, handshakes, TCP; also wireguard-go",
        flood::run,
    ),
    (
        "sweep",
        "links, loads and changes at random in simulated time: utilisation, calls, changes, foreign flows",
        sweep::run,
    ),
    (
        "mptcp",
        "networks that block UDP: links inside TCP, alone and beside QUIC, cuts, blocking in mid-flow; other VPNs over TCP",
        mptcp::run,
    ),
];

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.first().map(String::as_str) {
        Some(tun_copy::SUBCOMMAND | tun_copy::PLAIN_SUBCOMMAND) => return end_of(tun_copy::run(&args), 1),
        Some(quic_bulk::SUBCOMMAND) => return end_of(quic_bulk::run(&args[1..]), 1),
        Some(many_connections::SUBCOMMAND) => return end_of(many_connections::run(&args[1..]), 1),
        Some(generator::SUBCOMMAND) => return end_of(generator::run(&args[1..]), 1),
        _ => {}
    }
    let options = match Options::parse(&args, &RIGS.map(|(name, ..)| name)) {
        Ok(options) if options.list => {
            for (name, about, _) in RIGS {
                println!("{name:<9} {about}\n{:<9} --against: {}", "", against::about(name));
            }
            println!("\nscenarios of `paths`: {}", Scenario::names().collect::<Vec<_>>().join(" "));
            println!("of them in `stream`: {}", paths::names(FlowMode::Stream).join(" "));
            print!("{}", options::HELP);
            return ExitCode::SUCCESS;
        }
        Ok(options) => options,
        Err(complaint) => {
            let complaint = format!("{complaint}\n  next: bench --list names the rigs and the options");
            return end_of(Err(complaint), 2);
        }
    };
    if let Some(before) = &options.against {
        return match against::run(&options, before) {
            Ok(true) => ExitCode::SUCCESS,
            Ok(false) => ExitCode::FAILURE,
            Err(complaint) => end_of(Err(complaint), 2),
        };
    }
    remove_labs_when_interrupted();
    MachineShare::always_whole();
    if let Some(directory) = &options.report_to {
        report::set_directory(directory);
        if let Err(complaint) = against::end_with_parent() {
            return end_of(Err(complaint), 2);
        }
    }
    let mut outcomes = Vec::new();
    for (name, about, rig) in RIGS {
        if options.rigs.is_empty() || options.rigs.iter().any(|wanted| wanted == name) {
            eprintln!("{name}: {about}");
            outcomes.push((name, rig(&options)));
        }
    }
    let figures: Vec<&Figure> = outcomes.iter().flat_map(|(_, outcome)| &outcome.figures).collect();
    print!("{}", table(&figures));
    if let Err(error) = report::write(&args, &outcomes) {
        return end_of(Err(format!("the report cannot be written: {error}")), 1);
    }
    if figures.iter().all(|figure| figure.is_good()) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn end_of(result: Result<(), String>, code: u8) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(complaint) => {
            eprintln!("bench: {complaint}");
            ExitCode::from(code)
        }
    }
}
