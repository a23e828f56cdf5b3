//! Links that change all the time, after published measurements: Starlink, LTE and Wi-Fi.
//!
//! In: a seed and the number of a run, which gives the world, the load and its direction. Out: a line of
//! JSON; `./dev bench sweep` makes a table of them, beside the distributions of the settings drawn at random.
//! The titles and venues of the sources are in `docs/design/lab.md`.

use mpvpn_lab::{ChannelParams, LinkSpec, emulation::Rng};
use mpvpn_types::BitRate;

use super::{setting::Draw, *};

/// The number of the first run of a world; smaller numbers are settings drawn at random.
pub(super) const FIRST: u64 = 1_000_000;
/// The worlds, each with its links.
const WORLDS: [(&str, &[Access]); 4] =
    [("Starlink", &[starlink]), ("LTE", &[lte]), ("Wi-Fi", &[wifi]), ("Starlink and LTE", &[starlink, lte])];
/// Runs of a world: one flow and eight, packets and streams, up and down.
const RUNS: u64 = 8;
/// A run lasts so long and is counted from the second time on: three intervals of Starlink.
const TIME: Duration = Duration::from_secs(50);
const COUNTED_FROM: Duration = Duration::from_secs(5);
/// The resolution of changes, and of the time between two looks at the ends.
const STEP: Duration = MS;
/// The rate while a link carries nothing (bit/s): a packet that it is sending stays where it is.
const CLOSED_RATE: f64 = 1000.0;
/// The bytes of a packet of the call on a link: with the headers inside and outside of the tunnel.
const FRAME_BYTES_ON_LINK: f64 = FRAME_BYTES as f64 + 28.0 + LINK_MTU as f64 - STREAM_BYTES;

/// A normal deviate (Box and Muller 1958).
fn gauss(draw: &mut Draw) -> f64 {
    let radius = (-2.0 * (1.0 - draw.0.uniform()).ln()).sqrt();
    radius * (std::f64::consts::TAU * draw.0.uniform()).cos()
}

/// The parameters of one direction of a link, each with the time from which on they hold.
type Script = Vec<(Duration, ChannelParams)>;
/// Draws the script of a link, up or down.
type Access = fn(&mut Draw, bool) -> Script;

/// A direction with this rate (bit/s), delay and jitter (s), and bytes in its queue.
fn params(rate: f64, delay: f64, jitter: f64, queue_bytes: f64) -> ChannelParams {
    ChannelParams {
        rate: Some(BitRate::from_bps(rate as u64)),
        delay: Duration::from_secs_f64(delay),
        jitter: Duration::from_secs_f64(jitter),
        queue: Duration::from_secs_f64(queue_bytes * 8.0 / rate),
        mtu: Some(LINK_MTU),
        ..ChannelParams::default()
    }
}

/// Satellites are assigned anew every 15 s, here at 10, 25 and 40 s; the rate stays in between. Rates and
/// queues: Mohan et al. One-way delays of 15 to 35 ms: steps of 12 ms in the median (LENS). Jitter of 7 ms:
/// round trips that follow each other differ by 6.7 ms (Huston). The gap of 0.2 s is his loss of 1 to 2 %,
/// and the 0.2 s with 20 ms more each way after it are his spikes of 30 to 50 ms. Else 0.1 % is lost (LENS).
fn starlink(draw: &mut Draw, is_up: bool) -> Script {
    let (slowest, fastest, queue) = if is_up { (4e6, 12e6, 0.1) } else { (50e6, 100e6, 0.4) };
    let mut script = Vec::new();
    for number in 0..4 {
        let (rate, delay) = (draw.log(slowest, fastest), 0.015 + 0.02 * draw.0.uniform());
        let of = |delay, loss| ChannelParams { loss, ..params(rate, delay, 0.007, rate * queue / 8.0) };
        let at = Duration::from_secs(15 * number).saturating_sub(Duration::from_secs(5));
        if number == 0 {
            script.push((at, of(delay, 0.001)));
            continue;
        }
        let (gap, spike, quiet) = (of(delay + 0.02, 1.0), of(delay + 0.02, 0.001), of(delay, 0.001));
        script.extend([(at, gap), (at + 200 * MS, spike), (at + 400 * MS, quiet)]);
    }
    script
}

/// The rate walks, and the buffer is deep. Medians of 13 and 6 Mbit/s (Huang et al.); 55 ms (Daoudi), and up
/// to 8 ms more each way where a block is sent again (HARQ); 2 s of buffer (Winstein et al.). Their traces
/// give the walk: the logarithm of the rate has a deviation of 0.7, of which exp(-1/3) is kept for a second;
/// every 30 s nothing passes for 0.7 s.
fn lte(draw: &mut Draw, is_up: bool) -> Script {
    let median: f64 = if is_up { 6e6 } else { 13e6 };
    let kept = (-0.1_f64 / 3.0).exp();
    let mut deviation = 0.7 * gauss(draw);
    let step = |number: u32| {
        deviation = kept * deviation + (1.0 - kept * kept).sqrt() * 0.7 * gauss(draw);
        let is_open = !(200..207).contains(&(number % 300));
        let rate = if is_open { median * deviation.exp() } else { CLOSED_RATE };
        (number * 100 * MS, params(rate, 0.0315, 0.004, median * 2.0 / 8.0))
    };
    (0..500).map(step).collect()
}

/// Packets leave in aggregates of 4 ms at 130 Mbit/s (ath9k: 64,280 bytes). In between, others take the
/// channel for 10 ms on average, exponentially distributed: a packet waits 3.6 ms in the median and 20 ms in
/// the 90th percentile, where Sui et al. found 3 and 20. The queue holds 250 ms, their 99th percentile. Every
/// 10 s nothing passes for 150 ms (Huitema et al.: 100 to 200). The way behind takes 10 ms each way (chosen).
fn wifi(draw: &mut Draw, _is_up: bool) -> Script {
    let (mut script, mut at, mut suspensions) = (Vec::new(), Duration::ZERO, 0);
    let of = |rate| params(rate, 0.01, 0.0, 130e6 * 4.0 / 14.0 * 0.25 / 8.0);
    while at < TIME {
        script.extend([(at, of(130e6)), (at + 4 * MS, of(CLOSED_RATE))]);
        let mut pause = Duration::from_secs_f64(-0.01 * (1.0 - draw.0.uniform()).ln());
        if at >= Duration::from_secs(10 * suspensions + 7) {
            (pause, suspensions) = (150 * MS, suspensions + 1);
        }
        at += 4 * MS + pause;
    }
    script
}

/// The result of a run.
struct Counted {
    phase: Phase,
    /// Bytes that the links could deliver in the direction of the load meanwhile.
    ceiling: f64,
    mtu: usize,
}

/// Plays the scripts of each link, up and down.
fn play(mut played: Played, scripts: &[[Script; 2]], time: Duration, counted_from: Duration) -> Counted {
    let (start, mtu) = (played.world.now, played.mtu);
    let (mut phase, mut unused, mut ceiling) = (Phase::default(), Phase::default(), 0.0);
    let mut next: Vec<[usize; 2]> = vec![[0; 2]; scripts.len()];
    while played.world.now < start + time {
        let now = played.world.now;
        let is_counted = now >= start + counted_from;
        for (number, (scripts, next)) in scripts.iter().zip(&mut next).enumerate() {
            let link = LinkId(number as u16);
            let link = played.world.machines[played.client].links.get_mut(&link).expect("a link");
            for (way, wire) in [&mut link.up, &mut link.down].into_iter().enumerate() {
                while let Some((_, params)) = scripts[way].get(next[way]).filter(|(at, _)| start + *at <= now)
                {
                    wire.change(now, params);
                    next[way] += 1;
                }
                if is_counted && (way == 0) == played.setting.is_up {
                    let params = &scripts[way][next[way] - 1].1;
                    let rate = params.rate.map_or(0.0, |rate| rate.bps() as f64);
                    ceiling += rate / 8.0 * (1.0 - params.loss) * STEP.as_secs_f64();
                }
            }
        }
        let (before, on_link) = (played.delivered(), played.on_link());
        let phase = if is_counted { &mut phase } else { &mut unused };
        played.advance(STEP, phase);
        phase.counted += played.world.now - now;
        phase.bytes += played.delivered() - before;
        phase.on_link[1] += played.on_link()[1] - on_link[1];
    }
    Counted { phase, ceiling, mtu }
}

/// The setting of a run, and its scripts.
fn world(seed: u64, number: u64) -> (&'static str, Setting, Vec<[Script; 2]>) {
    let (name, links) = WORLDS[(number / RUNS) as usize];
    let script = |(link, draws): (usize, &Access)| {
        [true, false].map(|is_up| {
            let own = seed.wrapping_mul(1000) + 10 * (number / RUNS) + 2 * link as u64 + u64::from(is_up);
            let mut draw = Draw(Rng(own.wrapping_mul(0x5851_f42d)));
            draw.0.uniform();
            draws(&mut draw, is_up)
        })
    };
    let scripts: Vec<_> = links.iter().enumerate().map(script).collect();
    let link = |[up, down]: &[Script; 2]| LinkSpec {
        up: up[0].1.clone(),
        down: down[0].1.clone(),
        ..LinkSpec::default()
    };
    let setting = Setting {
        links: scripts.iter().map(link).collect(),
        loss: Loss::None,
        beside: Beside::Nothing,
        step: None,
        load: if number & 4 == 0 { Load::Packets } else { Load::Streams },
        flows: if number & 2 == 0 { 1 } else { 8 },
        is_up: number & 1 == 0,
        has_call: true,
        cc: CongestionControl::Bbr,
    };
    (name, setting, scripts)
}

/// Bytes that the links could deliver of the load, with headers.
fn ceiling(setting: &Setting, counted: &Counted) -> f64 {
    let call = counted.phase.delays[usize::from(!setting.is_up)].len();
    counted.ceiling - call as f64 * FRAME_BYTES_ON_LINK
}

/// Plays a run and returns its line.
pub(super) fn line(seed: u64, number: u64) -> String {
    let began = RealInstant::now();
    let (name, setting, scripts) = world(seed, number);
    let run = |purpose| {
        let played = Played::new(&setting, seed, purpose).expect("a tunnel");
        play(played, &scripts, TIME, COUNTED_FROM)
    };
    let (loaded, idle) = (run(Purpose::Loaded), run(Purpose::Idle));
    // The load's flows as TCP over the best link alone, without the tunnel.
    let plain = (0..scripts.len()).map(|link| run(Purpose::Plain(link)).phase.on_link[1] / SEGMENT_BYTES);
    let plain = plain.fold(0.0, f64::max) * f64::from(LINK_MTU) / ceiling(&setting, &loaded);
    let of_wire = if setting.load == Load::Packets { loaded.mtu as f64 } else { STREAM_BYTES };
    let delivered = loaded.phase.bytes / of_wire * f64::from(LINK_MTU);
    let worse = |of: &dyn Fn(usize) -> Option<f64>| (0..2).filter_map(of).reduce(f64::max);
    let ms = |run: &Counted, way: usize, percent| percentile_ms(&run.phase.delays[way], percent);
    let added = |percent| worse(&|way| Some(ms(&loaded, way, percent)? - ms(&idle, way, percent)?));
    let arrived = |run: &Counted| {
        let arrived: usize = run.phase.delays.iter().map(Vec::len).sum();
        arrived as f64 / (2 * run.phase.sent).max(1) as f64
    };
    json!({
        "seed": seed,
        "number": FIRST + number,
        "world": name,
        "load": format!("{:?}", setting.load).to_lowercase(),
        "flows": setting.flows,
        "direction": if setting.is_up { "up" } else { "down" },
        "ceiling_mbit": loaded.ceiling * 8e-6 / loaded.phase.counted.as_secs_f64(),
        "utilisation": delivered / ceiling(&setting, &loaded),
        "plain": plain,
        "idle_p99_ms": worse(&|way| ms(&idle, way, 99)),
        "added_median_ms": added(50),
        "added_p99_ms": added(99),
        "lost_idle": 1.0 - arrived(&idle),
        "lost": 1.0 - arrived(&loaded),
        "took_s": began.elapsed().as_secs_f64(),
    })
    .to_string()
}

#[test]
fn worlds_are_like_what_was_measured() {
    // Wi-Fi, eight flows up.
    let (_, setting, scripts) = world(1, 2 * RUNS + 2);
    // A packet that arrives at any time waits for the next aggregate.
    let opens: Vec<f64> = scripts[0][0].iter().step_by(2).map(|(at, _)| at.as_secs_f64()).collect();
    let wait = |ms: u32| {
        let at = f64::from(ms) / 1e3;
        let next = opens.partition_point(|open| open + 0.004 <= at);
        Duration::from_secs_f64((opens.get(next).copied().unwrap_or(at) - at).max(0.0))
    };
    let waits: Vec<Duration> = (0..49_000).map(wait).collect();
    let found = [50, 90].map(|percent| percentile_ms(&waits, percent).expect("waits"));
    assert!((2.0..5.0).contains(&found[0]) && (15.0..25.0).contains(&found[1]), "{found:?}");
    let (_, _, lte) = world(1, RUNS);
    let rates = lte[0][1].iter().map(|(_, params)| params.rate.expect("a rate").bps() as f64 / 13e6);
    let rates: Vec<f64> = rates.filter(|rate| *rate > 1e-3).map(f64::ln).collect();
    let deviation = (rates.iter().map(|rate| rate * rate).sum::<f64>() / rates.len() as f64).sqrt();
    assert!((0.4..1.0).contains(&deviation), "{deviation}");
    // TCP alone uses five seconds of it, and the tunnel carries the call.
    let run = |purpose| {
        let played = Played::new(&setting, 1, purpose).expect("a tunnel");
        play(played, &scripts, Duration::from_secs(5), Duration::from_secs(2))
    };
    let (plain, idle) = (run(Purpose::Plain(0)), run(Purpose::Idle));
    let share = plain.phase.on_link[1] / SEGMENT_BYTES * f64::from(LINK_MTU) / ceiling(&setting, &plain);
    assert!((0.9..1.02).contains(&share), "{share}");
    let arrived = idle.phase.delays.each_ref().map(Vec::len);
    assert!(arrived.iter().all(|arrived| arrived.abs_diff(idle.phase.sent) < 20), "{arrived:?}");
}

#[test]
#[ignore = "long: ./dev test all plays it"]
fn a_pause_of_a_link_does_not_make_it_slow_beside_a_call() {
    // Wi-Fi, eight streams up: the pause of 150 ms is at 7 s.
    let (_, setting, scripts) = world(1, 2 * RUNS + 6);
    let played = Played::new(&setting, 1, Purpose::Loaded).expect("a tunnel");
    let run = play(played, &scripts, Duration::from_secs(14), Duration::from_secs(8));
    let share = run.phase.bytes / STREAM_BYTES * f64::from(LINK_MTU) / ceiling(&setting, &run);
    println!("{share:.2}");
    assert!(share > 0.3, "{share}");
}
