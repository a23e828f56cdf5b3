//! Cuts link 1 under load and restores it, once or again and again: measures the longest gap between ping
//! replies and the time until the link carries data again.

use std::{
    ops::Range,
    thread,
    time::{Duration, Instant, SystemTime},
};

use crate::{
    eventually,
    iperf::IperfServer,
    percentile,
    ping::Ping,
    testbed::{Direction, Host, MpvpnProcess, TUNNEL, Testbed},
};

/// The 99th percentile of gaps where round trips take up to 30 ms, however the link fails: what
/// docs/performance.md promises.
pub const MAX_P99: Duration = Duration::from_millis(200);
/// A link that does not carry data for this long after its return fails the test.
const RETURN_TIMEOUT: Duration = Duration::from_secs(5);

/// How link 1 fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkFailure {
    /// The client's interface loses its carrier.
    Carrier,
    /// All packets in that direction are lost; the carrier stays on.
    Silent(Direction),
}

/// The measured effects of one cut.
#[derive(Clone, Debug)]
pub struct Cut {
    /// When the link failed.
    pub at: SystemTime,
    /// When it was restored.
    pub restored_at: SystemTime,
    /// The longest time between replies to pings sent every 10 ms, from the cut until the restore.
    pub longest_gap: Duration,
    /// Time from the restore until the link carried data again.
    pub recovery_time: Duration,
}

/// The measured effects of a series of cuts.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// In the order of time.
    pub cuts: Vec<Cut>,
    /// Goodput of the eight TCP flows together in each second, bit/s.
    pub rates: Vec<f64>,
}

impl LinkFailure {
    /// The median of gaps where round trips take up to 30 ms: what docs/performance.md promises.
    pub fn max_median(self) -> Duration {
        Duration::from_millis(if self == Self::Carrier { 50 } else { 100 })
    }

    fn apply(self, testbed: &Testbed) {
        match self {
            Self::Carrier => testbed.link(1).cut(),
            Self::Silent(direction) => testbed.link(1).silence(direction),
        }
    }

    fn undo(self, testbed: &Testbed) {
        match self {
            Self::Carrier => testbed.link(1).restore(),
            Self::Silent(_) => testbed.link(1).end_silence(),
        }
    }
}

impl Outcome {
    /// The gaps in ms, the shortest first.
    pub fn gaps_ms(&self) -> Vec<f64> {
        let mut gaps: Vec<f64> = self.cuts.iter().map(|cut| cut.longest_gap.as_secs_f64() * 1e3).collect();
        gaps.sort_by(f64::total_cmp);
        gaps
    }

    /// The median and the maximum of the gaps.
    pub fn median_and_max_gap(&self) -> (Duration, Duration) {
        let gaps = self.gaps_ms();
        let [median, max] = [50, 100].map(|percent| percentile(&gaps, percent));
        (Duration::from_secs_f64(median / 1e3), Duration::from_secs_f64(max / 1e3))
    }

    /// The longest time until the link carried data again.
    pub fn max_recovery_time(&self) -> Duration {
        self.cuts.iter().map(|cut| cut.recovery_time).max().expect("a cut")
    }
}

/// Times of the experiment.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// Number of cuts.
    pub count: u32,
    /// From the start of the load, or from when link 1 carries data again, to the cut. Cuts are spread evenly
    /// over the range.
    pub before_cut: Range<Duration>,
    /// From the detection of the cut to the restore.
    pub outage: Duration,
}

impl Timeline {
    /// One cut, long enough for stable rates before it.
    pub const LONG: Self = Self::once(Duration::from_secs(3));
    /// One cut, just long enough to see the failure and the recovery under load.
    pub const SHORT: Self = Self::once(Duration::from_secs(2));

    const fn once(time: Duration) -> Self {
        Self { count: 1, before_cut: time..time, outage: time }
    }

    /// `count` cuts in short order.
    pub fn repeated(count: u32) -> Self {
        let before_cut = Duration::from_millis(600)..Duration::from_millis(1400);
        Self { count, before_cut, outage: Duration::from_millis(700) }
    }

    /// The time before cut `number`: multiples of the golden ratio, modulo 1, are spread evenly.
    fn before(&self, number: u32) -> Duration {
        let share = (f64::from(number) * 0.618_034).fract();
        self.before_cut.start + (self.before_cut.end - self.before_cut.start).mul_f64(share)
    }

    /// How long the cuts may take in all, seconds.
    fn max_seconds(&self) -> u32 {
        let cut = self.before_cut.end + self.outage + 2 * RETURN_TIMEOUT;
        (cut * self.count).as_secs_f64().ceil() as u32
    }
}

/// Runs eight TCP flows and pings every 10 ms, meanwhile cuts link 1 and restores it.
pub fn cut_under_load(
    testbed: &Testbed,
    client: &MpvpnProcess,
    failure: LinkFailure,
    direction: Direction,
    timeline: &Timeline,
) -> Outcome {
    for link in ["eth1", "eth2"] {
        client.wait_for_path(link, "active", RETURN_TIMEOUT);
    }
    let iperf = IperfServer::start(testbed, Host::Server, 5201);
    let seconds = timeline.max_seconds();
    let load = iperf.tcp(testbed, Host::Client, TUNNEL, 8, direction, seconds);
    let dense = Ping::dense(testbed, Host::Client, TUNNEL, seconds.into());
    let cuts: Vec<_> = (0..timeline.count)
        .map(|number| {
            thread::sleep(timeline.before(number));
            let at = SystemTime::now();
            failure.apply(testbed);
            client.wait_for_status(Duration::from_secs(3), "eth1 carries nothing", |status| {
                let paths = status["paths"].as_array().into_iter().flatten();
                let mut used = paths.filter(|path| path["link"] == "eth1" && path["state"] == "active");
                used.next().map_or(Ok(()), |path| Err(format!("{} is active", path["id"])))
            });
            thread::sleep(timeline.outage);
            let restored = (SystemTime::now(), Instant::now());
            failure.undo(testbed);
            wait_until_used(testbed, direction);
            (at, restored.0, restored.1.elapsed())
        })
        .collect();
    let (rates, pings) = (load.stop(), dense.stop());
    let cut = |(at, restored_at, recovery_time)| {
        let longest_gap = pings.longest_gap(at - Duration::from_millis(100), restored_at);
        Cut { at, restored_at, longest_gap, recovery_time }
    };
    Outcome { cuts: cuts.into_iter().map(cut).collect(), rates }
}

/// Waits until link 1 has carried 200 kB since the call: more than heartbeats add up to in 5 s.
fn wait_until_used(testbed: &Testbed, direction: Direction) {
    let carried = || {
        let (received, sent) = testbed.interface_bytes(Host::Client, "eth1");
        if direction == Direction::Up { sent } else { received }
    };
    let before = carried();
    eventually(RETURN_TIMEOUT, "traffic on the restored link", || {
        let more = carried() - before;
        if more > 200_000 { Ok(()) } else { Err(format!("{more} bytes")) }
    });
}
