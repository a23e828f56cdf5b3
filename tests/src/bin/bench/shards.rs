//! Effect of a second link and a second shard over links without a rate limit, where processors are the
//! bottleneck.

use std::thread;

use mpvpn_tests::{
    disturbance::measure_undisturbed,
    iperf::IperfServer,
    testbed::{Direction, Host, TUNNEL, Testbed},
};
use serde_json::{Value, json};

use crate::{
    figure::{Bar, figure},
    median::median,
    options::Options,
    parts::{direction_name, unmeasured_figure},
    paths::plan::catch_panic,
    peers::in_turn,
    report::Outcome,
    rigs::await_links,
};

const RIG: &str = "shards";

/// Links and shards of client and server.
struct Setup {
    title: &'static str,
    links: &'static [&'static str],
    /// Number of shards on each end.
    shards: &'static str,
}

/// The compared setups; each is compared with the one before.
const SETUPS: [Setup; 3] = [
    Setup { title: "one link, 1 shard", links: &["unlimited"], shards: "1" },
    Setup { title: "two links, 1 shard", links: &["unlimited", "unlimited"], shards: "1" },
    Setup { title: "two links, 2 shards", links: &["unlimited", "unlimited"], shards: "2" },
];
/// Numbers of TCP flows and directions.
const LOADS: [(u32, Direction); 4] =
    [(1, Direction::Up), (1, Direction::Down), (8, Direction::Up), (8, Direction::Down)];
/// Minimum ratio of two shards to one on machines with up to two processors: a second shard must not cost
/// throughput, and runs vary by 5 %. Larger: noise fails the rig. Smaller: a loss of throughput passes.
const MIN_RATIO_WITH_SHARED_CORES: f64 = 0.95;

pub(crate) fn run(options: &Options) -> Outcome {
    // Gbit/s, by load, setup and round.
    let mut rates = vec![vec![Vec::new(); SETUPS.len()]; LOADS.len()];
    let mut outcome = Outcome::default();
    let mut disturbed = 0;
    for round in 0..options.rounds {
        for (at, setup) in in_turn(&SETUPS.iter().enumerate().collect::<Vec<_>>(), round) {
            eprintln!("  round {} of {}, {}", round + 1, options.rounds, setup.title);
            match catch_panic(|| Ok(measure_setup(setup, options))) {
                Ok(found) => {
                    for (load, (rate, calm)) in found.into_iter().enumerate() {
                        rates[load][at].push(rate);
                        disturbed += u32::from(!calm);
                    }
                }
                Err(why) => {
                    outcome.figures.push(unmeasured_figure(RIG, setup.title, &why));
                    rates.iter_mut().for_each(|rates| rates[at].push(f64::NAN));
                }
            }
        }
    }
    let cores = thread::available_parallelism().map_or(1, usize::from);
    for (load, rates) in LOADS.iter().zip(&rates) {
        let load = title(*load);
        let mut compare = |of: usize, to: usize, bar| {
            let ratios = rates[of].iter().zip(&rates[to]).map(|(of, to)| of / to).collect();
            let what = format!("{load}, {} ÷ {}", SETUPS[of].title, SETUPS[to].title);
            outcome.figures.push(figure(RIG, what, median(ratios).unwrap_or(f64::NAN), "×", bar));
        };
        compare(1, 0, Bar::AtLeast(1.0));
        // With two processors, both ends, iperf3 and the kernel already use both with one shard each.
        compare(2, 1, Bar::AtLeast(if cores > 2 { 1.0 } else { MIN_RATIO_WITH_SHARED_CORES }));
    }
    outcome.chapter = chapter(options, &rates, disturbed);
    outcome.raw = raw_json(&rates, disturbed);
    outcome
}

/// The rate of each load, Gbit/s, and whether it was measured undisturbed.
fn measure_setup(setup: &Setup, options: &Options) -> Vec<(f64, bool)> {
    let testbed = Testbed::new(setup.links);
    let shards = ["--shards", setup.shards];
    let _server = testbed.server(&shards);
    let client = testbed.client(&[&shards[..], &["--lane", "datagram"]].concat());
    await_links(&client, setup.links.len());
    let iperf = IperfServer::start(&testbed, Host::Server, 5201);
    let measure = |(flows, direction): (u32, Direction)| {
        let run = || {
            iperf.tcp(&testbed, Host::Client, TUNNEL, flows, direction, options.seconds).finish().rate / 1e9
        };
        let measurement = measure_undisturbed(options.tries, run);
        eprintln!("    {flows} {direction:?}: {:.2} Gbit/s", measurement.value);
        (measurement.value, !measurement.disturbance.exceeds_limit())
    };
    LOADS.into_iter().map(measure).collect()
}

fn title((flows, direction): (u32, Direction)) -> String {
    format!("{flows} TCP flow{} {}", if flows == 1 { "" } else { "s" }, direction_name(direction))
}

fn chapter(options: &Options, rates: &[Vec<Vec<f64>>], disturbed: u32) -> String {
    let heads: String = SETUPS.iter().map(|setup| format!(" {} |", setup.title)).collect();
    let mut text = format!(
        "\n## Shards\n\nLinks without a limit, as packets; medians of {} rounds of {} s in turn, Gbit/s; {disturbed} runs \
         stayed disturbed.\n\n| |{heads}\n|---|{}\n",
        options.rounds,
        options.seconds,
        "---:|".repeat(SETUPS.len())
    );
    for (load, rates) in LOADS.iter().zip(rates) {
        let cells: String = rates
            .iter()
            .map(|all| median(all.clone()).map_or(" – |".to_owned(), |rate| format!(" {rate:.2} |")))
            .collect();
        text += &format!("| {} |{cells}\n", title(*load));
    }
    text
}

fn raw_json(rates: &[Vec<Vec<f64>>], disturbed: u32) -> Value {
    let loads: Vec<Value> = LOADS
        .iter()
        .zip(rates)
        .map(|(load, rates)| {
            let setups: Vec<Value> = SETUPS
                .iter()
                .zip(rates)
                .map(|(setup, gbit)| json!({ "setup": setup.title, "gbit": gbit }))
                .collect();
            json!({ "load": title(*load), "setups": setups })
        })
        .collect();
    json!({ "loads": loads, "disturbed": disturbed })
}
