//! Loss in the connection of one class must not affect the others.
//!
//! Every class has the same load in all runs, and together they use less than the link's rate, so that
//! changes are caused by the loss alone. nftables drops packets at the receiver by the class's UDP ports.

use std::{thread, time::Duration};

use mpvpn_lab::Direction;
use mpvpn_tests::{
    call::{Call, DENSE},
    ping::Pings,
    testbed::Host,
};
use serde_json::{Value, json};

use super::{
    RIG, call_json,
    class_testbed::{ALL_CLASSES, BULK, CRITICAL, ClassTestbed, DEFAULT},
    measured,
};
use crate::{
    figure::{Bar, Figure, figure},
    options::Options,
    parts::{direction_name, directions},
    paths::load::{Load, START_UP_SECONDS},
    report::Outcome,
};

/// The link: its rate is above the sum of all loads, so that queues stay empty.
const LINK: &str = "150mbit,6.5ms,queue=60ms";
/// Offered load per class, Mbit/s.
const OFFERED_MBIT: u32 = 40;
/// Loss of the class `bulk`, percent.
const LOSS_PERCENTS: [u32; 2] = [10, 30];
/// Maximum deviation of the actual loss, percentage points. Larger: wrong rules pass. Smaller: random
/// variation fails runs.
const LOSS_TOLERANCE_PERCENT: f64 = 3.0;
/// The server's address on the link, beside the tunnel, and a port.
const BESIDE_TUNNEL: (&str, u16) = ("10.101.0.1", 5399);
/// The nftables table.
const TABLE: &str = "netdev bench_loss";
/// Time in which iperf3 clients have contacted their servers.
const CONNECT_TIME: Duration = Duration::from_millis(500);

/// Results of a run.
struct LossResult {
    direction: Direction,
    /// Actual loss of `bulk`, percent.
    dropped: f64,
    /// Goodput, Mbit/s, and number of lost datagrams, in the order of [`ALL_CLASSES`].
    loads: Vec<(f64, u64)>,
    /// Calls in `critical` and `default`.
    calls: [Pings; 2],
    /// A call over the link beside the tunnel: the effect of machine and link alone.
    beside_tunnel: Pings,
}

pub(super) fn run(options: &Options) -> Result<Outcome, String> {
    let seconds = if options.quick { 5 } else { 10 };
    let setup = ClassTestbed::new(&[LINK], "", &ALL_CLASSES)?;
    let _iperf_servers = ALL_CLASSES.iter().map(|line| line.iperf(&setup)).collect::<Result<Vec<_>, _>>()?;
    let mut outcome = Outcome {
        chapter: "\n## Loss in one class\n\n| way | bulk loses, % | class | Mbit/s | lost | round trip, ms: median | 99 % |\n\
                  |---|---:|---|---:|---:|---:|---:|\n"
            .to_owned(),
        ..Outcome::default()
    };
    let mut raw = Vec::new();
    for &direction in directions(options.quick) {
        let what = format!("no loss, {}", direction_name(direction));
        let baseline = measured(&what, options, &mut outcome, || measure(&setup, direction, 0, seconds))?;
        let mut all = vec![baseline];
        for percent in LOSS_PERCENTS {
            let what = format!("{percent} % loss in bulk, {}", direction_name(direction));
            let result =
                measured(&what, options, &mut outcome, || measure(&setup, direction, percent, seconds))?;
            outcome.figures.extend(figures(&all[0], &result, percent));
            all.push(result);
        }
        for result in &all {
            let lines = lines(result);
            eprint!("{lines}");
            outcome.chapter += &lines;
            raw.push(result_json(result));
        }
    }
    outcome.raw = Value::Array(raw);
    Ok(outcome)
}

fn measure(
    setup: &ClassTestbed,
    direction: Direction,
    percent: u32,
    seconds: u32,
) -> Result<LossResult, String> {
    // iperf3 contacts its server with one datagram that it does not repeat, so loss starts later.
    inject(setup, 0)?;
    let loads = ALL_CLASSES.map(|line| line.load(setup, Load::Udp(OFFERED_MBIT), direction, seconds));
    let loads: Vec<_> = loads.into_iter().collect::<Result<_, _>>()?;
    thread::sleep(CONNECT_TIME);
    inject(setup, percent)?;
    thread::sleep(Duration::from_secs(START_UP_SECONDS.into()) - CONNECT_TIME);
    let calls = [CRITICAL.call(setup, DENSE)?, DEFAULT.call(setup, DENSE)?];
    let beside_tunnel = Call::start(&setup.testbed, BESIDE_TUNNEL, DENSE)?;
    let mut arrived = Vec::new();
    for load in loads {
        let load = load.finish()?;
        arrived.push((load.mbit, load.lost.ok_or("iperf3 does not say what was lost")?));
    }
    let [critical, default] = calls.map(|call| call.finish());
    let dropped = dropped(setup)?;
    if (dropped - f64::from(percent)).abs() > LOSS_TOLERANCE_PERCENT {
        return Err(format!("{dropped:.1} % of bulk's packets were dropped instead of {percent} %"));
    }
    Ok(LossResult {
        direction,
        dropped,
        loads: arrived,
        calls: [critical?, default?],
        beside_tunnel: beside_tunnel.finish()?,
    })
}

/// Sets the loss of `bulk` in both directions, in place of the previous one.
fn inject(setup: &ClassTestbed, percent: u32) -> Result<(), String> {
    let ports: Vec<String> = setup.ports(BULK.class).iter().map(u16::to_string).collect();
    let ports = ports.join(", ");
    let link = setup.testbed.link(1);
    for (host, device, side) in [
        (Host::Server, link.handle().server_device(), "sport"),
        (Host::Client, link.handle().client_device(), "dport"),
    ] {
        let is_bulk = format!("udp {side} {{ {ports} }}");
        setup.nft(
            host,
            &format!(
                "table {TABLE}\ndelete table {TABLE}\ntable {TABLE} {{\n  chain in {{\n    \
                 type filter hook ingress device \"{device}\" priority 0\n    {is_bulk} counter\n    \
                 {is_bulk} numgen random mod 100 < {percent} counter drop\n  }}\n}}\n"
            ),
        )?;
    }
    Ok(())
}

/// Loss of `bulk` since the last [`inject`], percent.
fn dropped(setup: &ClassTestbed) -> Result<f64, String> {
    let (mut all, mut gone) = (0, 0);
    for host in [Host::Server, Host::Client] {
        let listing = setup.testbed.run(host, &["nft", "-j", "list", "table", "netdev", "bench_loss"]);
        let listing: Value = serde_json::from_str(&listing).map_err(|error| format!("nft: {error}"))?;
        let rules = listing["nftables"].as_array().into_iter().flatten();
        let counters = rules.flat_map(|rule| rule["rule"]["expr"].as_array().into_iter().flatten());
        let counts: Vec<u64> =
            counters.filter_map(|expression| expression["counter"]["packets"].as_u64()).collect();
        let &[passed, dropped] = &counts[..] else { return Err(format!("nft counts {counts:?}")) };
        (all, gone) = (all + passed, gone + dropped);
    }
    Ok(100.0 * gone as f64 / all.max(1) as f64)
}

fn figures(baseline: &LossResult, result: &LossResult, percent: u32) -> Vec<Figure> {
    let mut all = Vec::new();
    for (at, line) in [CRITICAL, DEFAULT].iter().enumerate() {
        let what = format!("{}, {percent} % loss in bulk, {}", line.class, direction_name(result.direction));
        let mut ask = |which: &str, value, unit, bar| {
            all.push(figure(RIG, format!("{what}: {which}"), value, unit, bar));
        };
        let more = |percent| result.calls[at].rtt_ms(percent) - baseline.calls[at].rtt_ms(percent);
        ask("throughput kept", 100.0 * result.loads[at].0 / baseline.loads[at].0, "%", Bar::AtLeast(99.0));
        ask("round trip, median more", more(50), "ms", Bar::AtMost(0.5));
        ask("round trip, 99 % more", more(99), "ms", Bar::AtMost(3.0));
        let lost = result.loads[at].1 + result.calls[at].lost();
        ask("lost", lost as f64, "", Bar::AtMost(0.0));
    }
    let what = format!("bulk, {percent} % loss in it, {}: throughput kept", direction_name(result.direction));
    all.push(figure(RIG, what, 100.0 * result.loads[2].0 / baseline.loads[2].0, "%", Bar::Higher));
    all
}

fn lines(result: &LossResult) -> String {
    let mut text = String::new();
    for (at, line) in ALL_CLASSES.iter().enumerate() {
        let (mbit, lost) = result.loads[at];
        let times = result
            .calls
            .get(at)
            .map_or(" | ".to_owned(), |calls| format!("{:.2} | {:.2}", calls.rtt_ms(50), calls.rtt_ms(99)));
        let lost = lost + result.calls.get(at).map_or(0, Pings::lost);
        text += &format!(
            "| {} | {:.1} | {} | {mbit:.1} | {lost} | {times} |\n",
            direction_name(result.direction),
            result.dropped,
            line.class
        );
    }
    let (beside_tunnel, direction) = (&result.beside_tunnel, direction_name(result.direction));
    let times = format!("{:.2} | {:.2}", beside_tunnel.rtt_ms(50), beside_tunnel.rtt_ms(99));
    text + &format!(
        "| {direction} | {:.1} | past the tunnel |  | {} | {times} |\n",
        result.dropped,
        beside_tunnel.lost()
    )
}

fn result_json(result: &LossResult) -> Value {
    let calls = result.calls.iter().chain([&result.beside_tunnel]).map(call_json);
    json!({ "way": direction_name(result.direction), "dropped_pct": result.dropped, "mbit_and_lost": result.loads,
            "calls": calls.collect::<Vec<_>>() })
}
