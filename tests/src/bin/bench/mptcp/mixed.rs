//! UDP that is blocked on one of two links from the start, and on both in mid-flow.

use std::{
    thread,
    time::{Duration, Instant, SystemTime},
};

use mpvpn_lab::Direction;
use mpvpn_tests::{
    firewall::{Firewall, Transport, check_transport},
    ping::Ping,
    testbed::{Host, LINK, TUNNEL, Testbed},
};
use serde_json::{Value, json};

use super::{DEVICES, RIG, TunnelPair, mean};
use crate::{
    figure::{Bar, Figure, figure, figure_with_note},
    median::median,
    options::Options,
    parts::{direction_name, directions, unmeasured_figure},
    paths::{
        load::{Iperf, IperfServer, Load, PORT, START_UP_SECONDS, TcpKind},
        plan::catch_panic,
        quiet_connection::QuietConnection,
    },
    report::Outcome,
    timeline::{self, Timeline},
};

/// Number of TCP flows.
const FLOWS: u32 = 8;
/// Time from the start-up until UDP is blocked, s.
const BEFORE_BLOCK_S: u32 = 5;
/// Duration of the block, s.
const BLOCK_S: u32 = 10;
/// Duration of the load after the block, s: the bar for the return to QUIC is 30 s.
const AFTER_BLOCK_S: u32 = 35;
/// Interval between queries of the client's status.
const STATUS_POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Pause between an answer and the next request of the quiet connection.
const REQUEST_INTERVAL: Duration = Duration::from_millis(100);
/// Gaps are searched from this long before the block, so that the last reply before it counts.
const LOOK_BACK: Duration = Duration::from_millis(100);
/// Time after a change of transport that is left out of the means, s.
const SETTLING_S: f64 = 3.0;

/// UDP blocked on link 1.
const FIRST_LINK_BLOCKED: Firewall<'static> = Firewall { no_udp: &[1], ..Firewall::OPEN };
/// UDP blocked on both links.
const BOTH_LINKS_BLOCKED: Firewall<'static> = Firewall { no_udp: &[1, 2], ..Firewall::OPEN };

/// Results of a block in mid-flow.
struct BlockResult {
    before_mbit: f64,
    blocked_mbit: f64,
    after_mbit: f64,
    /// The longest gap between ping replies while UDP was blocked, and afterwards.
    longest_ping_gap_s: [f64; 2],
    /// The longest time in which no data arrived.
    longest_stall_s: f64,
    /// Time from the end of the block until both links used QUIC only; infinite if not before the end of the
    /// load.
    quic_after_s: f64,
    /// Errors of lost connections.
    lost: Vec<String>,
    steps: Vec<f64>,
    /// From when until when UDP was blocked (s).
    blocked_s: (f64, f64),
}

pub(super) fn run(options: &Options) -> Result<Outcome, String> {
    let testbed = Testbed::two_links();
    let mut outcome = Outcome {
        chapter: format!(
            "\n## UDP blocked on one of two links, and on both in mid-flow\n\nTwice {LINK}, {FLOWS} TCP flows.\n\n\
             | way | QUIC + TCP, Mbit/s | QUIC | TCP | QUIC again | silence, s | nothing for, s | QUIC after, s |\n\
             |---|---:|---:|---:|---:|---:|---:|---:|\n"
        ),
        ..Outcome::default()
    };
    let (mut raw, mut panels) = (Vec::new(), Vec::new());
    for &direction in directions(options.quick) {
        let what = format!("UDP blocked on link 1, {FLOWS} flows {}", direction_name(direction));
        let mbit = catch_panic(|| measure_one_link_blocked(&testbed, options, direction));
        let sum = mbit.as_ref().map_or(f64::NAN, |mbit| median(mbit.clone()).unwrap_or(f64::NAN));
        match mbit {
            Ok(mbit) => {
                let what = format!("{what}: QUIC + TCP");
                outcome.figures.push(figure(RIG, what, sum, "Mbit/s", Bar::AtLeast(165.0)));
                raw.push(json!({ "case": "one link", "way": direction_name(direction), "mbit": mbit }));
            }
            Err(why) => outcome.figures.push(unmeasured_figure(RIG, &what, &why)),
        }
        let what = format!("UDP blocked on both in mid-flow, {FLOWS} flows {}", direction_name(direction));
        match catch_panic(|| measure_block(&testbed, options, direction)) {
            Ok(result) => {
                outcome.figures.extend(result.figures(&what));
                outcome.chapter +=
                    &format!("| {} | {sum:.1} | {} |\n", direction_name(direction), result.cells());
                raw.push(result.tell(direction));
                panels.push(result.timeline(direction));
            }
            Err(why) => outcome.figures.push(unmeasured_figure(RIG, &what, &why)),
        }
    }
    if !panels.is_empty() {
        let title = format!("UDP blocked on two links in mid-flow for {BLOCK_S} s, {FLOWS} TCP flows");
        let below = format!("links: twice {LINK}; goodput at the receiver");
        let ends = ("UDP is blocked", "UDP passes");
        outcome.plots.push((format!("{RIG}/mixed.svg"), timeline::draw(&title, &below, ends, &panels)));
    }
    outcome.raw = Value::Array(raw);
    Ok(outcome)
}

impl BlockResult {
    fn figures(&self, what: &str) -> Vec<Figure> {
        let why = self.lost.first().map_or("", String::as_str);
        let lost = format!("{what}: connections lost");
        let lost = figure_with_note(RIG, lost, why, self.lost.len() as f64, "", Bar::AtMost(0.0));
        let others = [
            ("no ping answered for", self.longest_ping_gap_s[0], "s", Bar::AtMost(2.0)),
            ("nothing arrived for", self.longest_stall_s, "s", Bar::AtMost(2.0)),
            ("unblocked, by QUIC again after", self.quic_after_s, "s", Bar::AtMost(30.0)),
            ("unblocked, no ping answered for", self.longest_ping_gap_s[1], "s", Bar::Lower),
            ("over QUIC", self.before_mbit, "Mbit/s", Bar::Higher),
            ("inside TCP", self.blocked_mbit, "Mbit/s", Bar::Higher),
            ("over QUIC again", self.after_mbit, "Mbit/s", Bar::Higher),
        ];
        let others = others
            .into_iter()
            .map(|(which, value, unit, bar)| figure(RIG, format!("{what}: {which}"), value, unit, bar));
        [lost].into_iter().chain(others).collect()
    }

    fn timeline(&self, direction: Direction) -> Timeline {
        let quic = self.blocked_s.1 + self.quic_after_s;
        Timeline {
            title: format!(
                "{}: nothing arrived for {:.1} s at most",
                direction_name(direction),
                self.longest_stall_s
            ),
            runs: vec![self.steps.clone()],
            impaired: self.blocked_s,
            marks: quic.is_finite().then_some((quic, "both links by QUIC")).into_iter().collect(),
        }
    }

    fn cells(&self) -> String {
        let Self {
            before_mbit,
            blocked_mbit,
            after_mbit,
            longest_ping_gap_s,
            longest_stall_s,
            quic_after_s,
            ..
        } = self;
        format!(
            "{before_mbit:.1} | {blocked_mbit:.1} | {after_mbit:.1} | {:.2} | {longest_stall_s:.1} | {quic_after_s:.1}",
            longest_ping_gap_s[0]
        )
    }

    fn tell(&self, direction: Direction) -> Value {
        json!({ "case": "both in mid-flow", "way": direction_name(direction), "lost": self.lost, "silence_s": self.longest_ping_gap_s,
                "stall_s": self.longest_stall_s, "quic_s": self.quic_after_s, "mbit_per_100ms": self.steps })
    }
}

/// Rates of runs over both links, one of them inside TCP.
fn measure_one_link_blocked(
    testbed: &Testbed,
    options: &Options,
    direction: Direction,
) -> Result<Vec<f64>, String> {
    let (seconds, runs) = if options.quick { (6, 1) } else { (10, 3) };
    let pair = TunnelPair::start(testbed, FIRST_LINK_BLOCKED, &[]);
    let _iperf = IperfServer::start(testbed, TcpKind::Tcp, PORT)?;
    let run = |_| {
        pair.wait_for_transports([Transport::Tcp, Transport::Quic]);
        let mbit = load(testbed, options, direction, seconds)?.finish()?.mbit;
        // Check that the transports did not change during the run.
        let status = pair.client.status();
        check_transport(&status, DEVICES[0], Transport::Tcp)?;
        check_transport(&status, DEVICES[1], Transport::Quic)?;
        Ok(mbit)
    };
    (0..options.runs.unwrap_or(runs)).map(run).collect()
}

fn load(testbed: &Testbed, options: &Options, direction: Direction, seconds: u32) -> Result<Iperf, String> {
    Iperf::start(testbed, TcpKind::Tcp, (TUNNEL, PORT), Load::Tcp(FLOWS, options.inner), direction, seconds)
}

/// Blocks UDP on both links during a load, and unblocks it.
fn measure_block(testbed: &Testbed, options: &Options, direction: Direction) -> Result<BlockResult, String> {
    // The retry interval of UDP grows with each failure, so each block gets a new client.
    let pair = TunnelPair::start(testbed, Firewall::OPEN, &[]);
    pair.wait_for_transports([Transport::Quic; 2]);
    let _iperf = IperfServer::start(testbed, TcpKind::Tcp, PORT)?;
    let quiet_connection = QuietConnection::start(testbed, TUNNEL, REQUEST_INTERVAL)?;
    let seconds = BEFORE_BLOCK_S + BLOCK_S + AFTER_BLOCK_S;
    let load = load(testbed, options, direction, seconds)?;
    let pings = Ping::dense(testbed, Host::Client, TUNNEL, u64::from(START_UP_SECONDS + seconds));
    let (begin, begin_wall_clock) = (Instant::now(), SystemTime::now());
    let [measure_block, unblock, end] =
        [BEFORE_BLOCK_S, BEFORE_BLOCK_S + BLOCK_S, seconds].map(|seconds| START_UP_SECONDS + seconds);
    let sleep_until = |seconds: u32| {
        let due = begin + Duration::from_secs(seconds.into());
        thread::sleep(due.saturating_duration_since(Instant::now()));
    };
    sleep_until(measure_block);
    let blocked = SystemTime::now();
    BOTH_LINKS_BLOCKED.apply(testbed);
    sleep_until(unblock);
    Firewall::OPEN.apply(testbed);
    let unblocked = (SystemTime::now(), Instant::now());
    let quic_after_s = loop {
        let status = pair.client.status();
        if DEVICES.iter().all(|device| check_transport(&status, device, Transport::Quic).is_ok()) {
            break unblocked.1.elapsed().as_secs_f64();
        }
        if begin.elapsed() >= Duration::from_secs(end.into()) {
            break f64::INFINITY;
        }
        thread::sleep(STATUS_POLL_INTERVAL);
    };
    let (arrived, quiet_connection, pings) = (load.finish(), quiet_connection.finish(), pings.finish());
    let lost =
        [arrived.as_ref().err(), quiet_connection.as_ref().err()].into_iter().flatten().cloned().collect();
    let longest_stall_s = arrived.as_ref().map_or(f64::NAN, |arrived| arrived.longest_stall().as_secs_f64());
    let steps = arrived.map(|arrived| arrived.steps).unwrap_or_default();
    // Replies to the last pings arrive after the end of the load.
    let last = begin_wall_clock + Duration::from_secs(u64::from(end) - 1);
    let [measure_block, unblock, end] = [measure_block, unblock, end].map(f64::from);
    Ok(BlockResult {
        before_mbit: mean(&steps, START_UP_SECONDS.into(), measure_block),
        blocked_mbit: mean(&steps, measure_block + SETTLING_S, unblock),
        after_mbit: mean(&steps, unblock + quic_after_s + SETTLING_S, end),
        longest_ping_gap_s: [
            pings.longest_gap(blocked - LOOK_BACK, unblocked.0).as_secs_f64(),
            pings.longest_gap(unblocked.0, last).as_secs_f64(),
        ],
        longest_stall_s,
        quic_after_s,
        lost,
        steps,
        blocked_s: (measure_block, unblock),
    })
}
