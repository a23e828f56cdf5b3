//! What more shards and a second link bring where no link is a limit: how busy the processors are is.

use std::thread;

use mpvpn_tests::{
    quiet::undisturbed,
    stage::{Place, Stage, TUNNEL},
    tcp::{Sink, Way},
};
use serde_json::{Value, json};

use crate::{
    figure::{Bar, figure},
    options::Options,
    parts::missing,
    paths::plan::caught,
    peers::{in_turn, median, name},
    report::Outcome,
    rigs::await_links,
};

const RIG: &str = "shards";

/// How a client and a server are set up.
struct Setup {
    title: &'static str,
    links: &'static [&'static str],
    /// Of either end.
    shards: &'static str,
}

const SETUPS: [Setup; 3] = [
    Setup { title: "one link, 1 shard", links: &["unlimited"], shards: "1" },
    Setup { title: "two links, 1 shard", links: &["unlimited", "unlimited"], shards: "1" },
    Setup { title: "two links, 2 shards", links: &["unlimited", "unlimited"], shards: "2" },
];
const LOADS: [(u32, Way); 4] = [(1, Way::Up), (1, Way::Down), (8, Way::Up), (8, Way::Down)];
/// A second shard takes nothing away where there are no more processors, but runs differ by that much.
const NO_LESS: f64 = 0.95;

pub(crate) fn run(options: &Options) -> Outcome {
    // Gbit/s: of each load, of each setup, of each round.
    let mut rates = vec![vec![Vec::new(); SETUPS.len()]; LOADS.len()];
    let mut outcome = Outcome::default();
    let mut disturbed = 0;
    for round in 0..options.rounds {
        for (at, setup) in in_turn(&SETUPS.iter().enumerate().collect::<Vec<_>>(), round) {
            eprintln!("  round {} of {}, {}", round + 1, options.rounds, setup.title);
            match caught(|| Ok(play(setup, options))) {
                Ok(found) => {
                    for (load, (rate, calm)) in found.into_iter().enumerate() {
                        rates[load][at].push(rate);
                        disturbed += u32::from(!calm);
                    }
                }
                Err(why) => {
                    outcome.figures.push(missing(RIG, setup.title, &why));
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
        // Both ends, the traffic's programs and the kernel share two processors already with one shard each.
        compare(2, 1, Bar::AtLeast(if cores > 2 { 1.0 } else { NO_LESS }));
    }
    outcome.chapter = chapter(options, &rates, disturbed);
    outcome.raw = told(&rates, disturbed);
    outcome
}

/// The rate of each load (Gbit/s), and whether nothing else on the machine disturbed it.
fn play(setup: &Setup, options: &Options) -> Vec<(f64, bool)> {
    let stage = Stage::new(setup.links);
    let shards = ["--shards", setup.shards];
    let _server = stage.server(&shards);
    let client = stage.client(&[&shards[..], &["--lane", "datagram"]].concat());
    await_links(&client, setup.links.len());
    let sink = Sink::start(&stage, Place::Server, 5201);
    let measure = |(flows, way): (u32, Way)| {
        let run = || sink.tcp(&stage, Place::Client, TUNNEL, flows, way, options.seconds).finish().rate / 1e9;
        let watched = undisturbed(options.tries, run);
        eprintln!("    {flows} {way:?}: {:.2} Gbit/s", watched.value);
        (watched.value, !watched.disturbance.is_too_much())
    };
    LOADS.into_iter().map(measure).collect()
}

fn title((flows, way): (u32, Way)) -> String {
    format!("{flows} TCP flow{} {}", if flows == 1 { "" } else { "s" }, name(way))
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

fn told(rates: &[Vec<Vec<f64>>], disturbed: u32) -> Value {
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
