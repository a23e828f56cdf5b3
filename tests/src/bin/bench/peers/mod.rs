//! Compares mpvpn with other VPNs over the same links, in turn.
//!
//! In each round every system is started on every link, checked to carry packets, measured and stopped. The
//! order rotates from round to round. Judged are medians, and medians of the ratios within each round.

mod judge;
mod rate_search;
mod samples;
mod setting;
mod system_run;

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    time::Instant,
};

use mpvpn_tests::{firewall::Firewall, system::System};
use mpvpn_types::panic_text;

pub(crate) use self::setting::Setting;
use self::{
    judge::{INSIDE_TCP, PEERS, Requirement, STREAM},
    samples::{RunKey, SampleLog},
    system_run::{KnownRates, SystemRun},
};
use crate::{options::Options, report::Outcome};

/// Number of rounds with all measurements. Later rounds only repeat measurements of rates, which vary most.
const FULL_ROUNDS: u32 = 3;
/// Number of consecutive disturbed values after which runs are no longer repeated: then the machine is always
/// busy. Larger: runs on a busy machine take longer. Smaller: a short disturbance ends all repetitions.
const MAX_DISTURBED_IN_A_ROW: usize = 24;

/// The version of each system, or the reason why it cannot run.
type Versions = Vec<(System, Result<String, String>)>;

/// A comparison of systems: which are judged, by which bars, and what is measured.
struct PeerComparison {
    rig: &'static str,
    title: &'static str,
    /// The judged systems; the table compares the first one with the rival.
    ours: &'static [System],
    rival: System,
    bars: &'static [(Setting, &'static str, Requirement)],
    scope: Scope,
    /// Firewall that prevents other transports.
    firewall: Firewall<'static>,
}

/// Extent of the measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scope {
    /// All measures.
    Everything,
    /// Rates of TCP flows and their processor time.
    Tcp,
}

pub(crate) fn run(options: &Options) -> Outcome {
    compare(options, &PEERS)
}

/// Compares mpvpn with TCP on streams with its rival, over a link without a rate limit.
pub(crate) fn streams(options: &Options) -> Outcome {
    over_veth(options, &STREAM)
}

/// Compares mpvpn inside TCP with its rival over TCP, over a link without a rate limit.
pub(crate) fn inside_tcp(options: &Options) -> Outcome {
    over_veth(options, &INSIDE_TCP)
}

fn over_veth(options: &Options, comparison: &PeerComparison) -> Outcome {
    let rounds = if options.quick { 1 } else { options.rounds };
    let systems = [comparison.ours, &[comparison.rival]].concat();
    compare(&Options { rounds, systems, settings: vec![Setting::Veth], ..options.clone() }, comparison)
}

fn compare(options: &Options, comparison: &PeerComparison) -> Outcome {
    let versions: Versions = options.systems.iter().map(|system| (*system, system.version())).collect();
    for (system, version) in &versions {
        match version {
            Ok(version) => eprintln!("  {}: {version}", system.name()),
            Err(why) => eprintln!("  {}: not here: {why}", system.name()),
        }
    }
    let available: Vec<System> =
        versions.iter().filter(|(_, version)| version.is_ok()).map(|(system, _)| *system).collect();
    let mut log = SampleLog::default();
    let mut known_rates = KnownRates::new();
    for round in 1..=options.rounds {
        let is_full = round <= FULL_ROUNDS;
        // The emulated link is used for pings only, which are not repeated in later rounds.
        for &setting in options.settings.iter().filter(|setting| is_full || **setting != Setting::Slow) {
            eprintln!("  round {round} of {}, {}: {}", options.rounds, setting.name(), setting.about());
            let testbed = setting.testbed();
            comparison.firewall.apply(&testbed);
            for system in
                in_turn(&available, round).into_iter().filter(|system| is_full || !system.is_reference())
            {
                let run_key = RunKey { round, setting, system };
                let tries = if log.is_always_disturbed(MAX_DISTURBED_IN_A_ROW) { 1 } else { options.tries };
                let system_run = SystemRun {
                    run_key,
                    testbed: &testbed,
                    seconds: options.seconds,
                    scope: comparison.scope,
                    tries,
                    is_full: is_full && comparison.scope == Scope::Everything,
                    log: &mut log,
                    known_rates: &mut known_rates,
                };
                let began = Instant::now();
                // A system that fails has no values, and the others still run.
                match catch_unwind(AssertUnwindSafe(|| system_run.run())) {
                    Ok(Ok(())) => {}
                    Ok(Err(why)) => log.fail(run_key, why),
                    Err(panic) => log.fail(run_key, panic_text(&*panic).to_owned()),
                }
                eprintln!("    {:<13} took {} s", system.name(), began.elapsed().as_secs());
            }
        }
    }
    judge::outcome(options, comparison, &versions, &log)
}

/// All elements, rotated by the number of the round.
pub(crate) fn in_turn<T: Clone>(all: &[T], round: u32) -> Vec<T> {
    let mut all = all.to_vec();
    if !all.is_empty() {
        let first = round as usize % all.len();
        all.rotate_left(first);
    }
    all
}
