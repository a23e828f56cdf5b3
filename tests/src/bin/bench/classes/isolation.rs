//! Loss in the connection of one class, and what the others feel of it: nothing.
//!
//! Every class has the same load in all runs, and together they leave some of the link free. So what changes when one of
//! them loses comes from that alone. Packets are dropped by nftables where they arrive, known by the class's UDP ports.

use std::{thread, time::Duration};

use mpvpn_lab::Direction;
use mpvpn_tests::{
    call::{Call, DENSE},
    ping::Pings,
    stage::Place,
};
use serde_json::{Value, json};

use super::{
    RIG, measured,
    scene::{BULK, CRITICAL, DEFAULT, Scene, THREE},
    tell_call,
};
use crate::{
    figure::{Bar, Figure, figure},
    options::Options,
    parts::{name, ways},
    paths::load::{Load, START_UP},
    report::Outcome,
};

const LINK: &str = "150mbit,6.5ms,queue=60ms";
/// Offered in each class, Mbit/s.
const OFFERED: u32 = 40;
/// What bulk loses, per cent.
const LOSSES: [u32; 2] = [10, 30];
/// How far what was dropped may be from that.
const TOLERANCE: f64 = 3.0;
/// The server's end of the link, past the tunnel.
const PAST: (&str, u16) = ("10.101.0.1", 5399);
/// The table of nftables.
const TABLE: &str = "netdev bench_loss";
/// Loads have greeted their servers within this.
const GREETING: Duration = Duration::from_millis(500);

/// What was found in a run.
struct Found {
    way: Direction,
    /// Bulk's loss as it was dropped, per cent.
    dropped: f64,
    /// Goodput in the order of [`THREE`], Mbit/s, and datagrams that were lost.
    loads: Vec<(f64, u64)>,
    /// Critical's and default's.
    calls: [Pings; 2],
    /// One that takes the link past the tunnel: what the machine and the link themselves do to calls.
    past: Pings,
}

pub(super) fn run(options: &Options) -> Result<Outcome, String> {
    let seconds = if options.quick { 5 } else { 10 };
    let scene = Scene::new(&[LINK], "", &THREE)?;
    let _sinks = THREE.iter().map(|line| line.sink(&scene)).collect::<Result<Vec<_>, _>>()?;
    let mut outcome = Outcome {
        chapter: "\n## Loss in one class\n\n| way | bulk loses, % | class | Mbit/s | lost | round trip, ms: median | 99 % |\n\
                  |---|---:|---|---:|---:|---:|---:|\n"
            .to_owned(),
        ..Outcome::default()
    };
    let mut raw = Vec::new();
    for &way in ways(options.quick) {
        let what = format!("no loss, {}", name(way));
        let calm = measured(&what, options, &mut outcome, || measure(&scene, way, 0, seconds))?;
        let mut all = vec![calm];
        for percent in LOSSES {
            let what = format!("{percent} % loss in bulk, {}", name(way));
            let found = measured(&what, options, &mut outcome, || measure(&scene, way, percent, seconds))?;
            outcome.figures.extend(figures(&all[0], &found, percent));
            all.push(found);
        }
        for found in &all {
            let lines = lines(found);
            eprint!("{lines}");
            outcome.chapter += &lines;
            raw.push(tell(found));
        }
    }
    outcome.raw = Value::Array(raw);
    Ok(outcome)
}

fn measure(scene: &Scene, way: Direction, percent: u32, seconds: u32) -> Result<Found, String> {
    // iperf3 greets its server with one datagram that it never repeats.
    inject(scene, 0)?;
    let loads = THREE.map(|line| line.load(scene, Load::Udp(OFFERED), way, seconds));
    let loads: Vec<_> = loads.into_iter().collect::<Result<_, _>>()?;
    thread::sleep(GREETING);
    inject(scene, percent)?;
    thread::sleep(Duration::from_secs(START_UP.into()) - GREETING);
    let calls = [CRITICAL.call(scene, DENSE)?, DEFAULT.call(scene, DENSE)?];
    let past = Call::start(&scene.stage, PAST, DENSE)?;
    let mut arrived = Vec::new();
    for load in loads {
        let load = load.finish()?;
        arrived.push((load.mbit, load.lost.ok_or("iperf3 does not say what was lost")?));
    }
    let [critical, default] = calls.map(|call| call.finish());
    let dropped = dropped(scene)?;
    if (dropped - f64::from(percent)).abs() > TOLERANCE {
        return Err(format!("{dropped:.1} % of bulk's packets were dropped instead of {percent} %"));
    }
    Ok(Found { way, dropped, loads: arrived, calls: [critical?, default?], past: past.finish()? })
}

/// Lets so many of bulk's packets vanish, both ways, in place of what vanished before.
fn inject(scene: &Scene, percent: u32) -> Result<(), String> {
    let ports: Vec<String> = scene.ports(BULK.class).iter().map(u16::to_string).collect();
    let ports = ports.join(", ");
    let link = scene.stage.link(1);
    for (place, device, side) in [
        (Place::Server, link.handle().server_device(), "sport"),
        (Place::Client, link.handle().client_device(), "dport"),
    ] {
        let is_bulk = format!("udp {side} {{ {ports} }}");
        scene.nft(
            place,
            &format!(
                "table {TABLE}\ndelete table {TABLE}\ntable {TABLE} {{\n  chain in {{\n    \
                 type filter hook ingress device \"{device}\" priority 0\n    {is_bulk} counter\n    \
                 {is_bulk} numgen random mod 100 < {percent} counter drop\n  }}\n}}\n"
            ),
        )?;
    }
    Ok(())
}

/// Per cent of bulk's packets that were dropped since then.
fn dropped(scene: &Scene) -> Result<f64, String> {
    let (mut all, mut gone) = (0, 0);
    for place in [Place::Server, Place::Client] {
        let listing = scene.stage.run(place, &["nft", "-j", "list", "table", "netdev", "bench_loss"]);
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

fn figures(calm: &Found, found: &Found, percent: u32) -> Vec<Figure> {
    let mut all = Vec::new();
    for (at, line) in [CRITICAL, DEFAULT].iter().enumerate() {
        let what = format!("{}, {percent} % loss in bulk, {}", line.class, name(found.way));
        let mut ask = |which: &str, value, unit, bar| {
            all.push(figure(RIG, format!("{what}: {which}"), value, unit, bar));
        };
        let more = |percent| found.calls[at].rtt_ms(percent) - calm.calls[at].rtt_ms(percent);
        ask("throughput kept", 100.0 * found.loads[at].0 / calm.loads[at].0, "%", Bar::AtLeast(99.0));
        ask("round trip, median more", more(50), "ms", Bar::AtMost(0.5));
        ask("round trip, 99 % more", more(99), "ms", Bar::AtMost(3.0));
        let lost = found.loads[at].1 + found.calls[at].lost();
        ask("lost", lost as f64, "", Bar::AtMost(0.0));
    }
    let what = format!("bulk, {percent} % loss in it, {}: throughput kept", name(found.way));
    all.push(figure(RIG, what, 100.0 * found.loads[2].0 / calm.loads[2].0, "%", Bar::Higher));
    all
}

fn lines(found: &Found) -> String {
    let mut text = String::new();
    for (at, line) in THREE.iter().enumerate() {
        let (mbit, lost) = found.loads[at];
        let times = found
            .calls
            .get(at)
            .map_or(" | ".to_owned(), |calls| format!("{:.2} | {:.2}", calls.rtt_ms(50), calls.rtt_ms(99)));
        let lost = lost + found.calls.get(at).map_or(0, Pings::lost);
        text += &format!(
            "| {} | {:.1} | {} | {mbit:.1} | {lost} | {times} |\n",
            name(found.way),
            found.dropped,
            line.class
        );
    }
    let (past, way) = (&found.past, name(found.way));
    let times = format!("{:.2} | {:.2}", past.rtt_ms(50), past.rtt_ms(99));
    text + &format!("| {way} | {:.1} | past the tunnel |  | {} | {times} |\n", found.dropped, past.lost())
}

fn tell(found: &Found) -> Value {
    let calls = found.calls.iter().chain([&found.past]).map(tell_call);
    json!({ "way": name(found.way), "dropped_pct": found.dropped, "mbit_and_lost": found.loads,
            "calls": calls.collect::<Vec<_>>() })
}
