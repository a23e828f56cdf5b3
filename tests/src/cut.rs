//! Cuts link 1 under load and restores it: measures the longest gap between ping replies and the time until
//! the link carries data again.

use std::{
    thread,
    time::{Duration, Instant, SystemTime},
};

use crate::{
    eventually,
    iperf::{IperfServer, Report},
    ping::Ping,
    testbed::{Direction, Host, MpvpnProcess, TUNNEL, Testbed},
};

/// How link 1 fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkFailure {
    /// The client's interface loses its carrier.
    Carrier,
    /// All packets in that direction are lost; the carrier stays on.
    Silent(Direction),
}

/// The measured effects.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The longest time between replies to pings sent every 10 ms, from the cut until the restore.
    pub longest_gap: Duration,
    /// Time from the restore until the link carried data again.
    pub recovery_time: Duration,
    /// The eight TCP flows.
    pub load: Report,
}

impl LinkFailure {
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

/// Times of the experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeline {
    /// From the start of the load to the cut.
    pub before_cut: Duration,
    /// From the detection of the cut to the restore.
    pub outage: Duration,
    /// Duration of the load, seconds.
    pub load_seconds: u32,
}

impl Timeline {
    /// Long enough for stable rates before the cut.
    pub const LONG: Self =
        Self { before_cut: Duration::from_secs(3), outage: Duration::from_secs(3), load_seconds: 12 };
    /// Just long enough to see the failure and the recovery under load.
    pub const SHORT: Self =
        Self { before_cut: Duration::from_secs(2), outage: Duration::from_secs(2), load_seconds: 9 };
}

/// Runs eight TCP flows and pings every 10 ms, cuts link 1 meanwhile and restores it.
pub fn cut_under_load(
    testbed: &Testbed,
    client: &MpvpnProcess,
    failure: LinkFailure,
    direction: Direction,
    timeline: Timeline,
) -> Outcome {
    for link in ["eth1", "eth2"] {
        client.wait_for_path(link, "active", Duration::from_secs(5));
    }
    let iperf = IperfServer::start(testbed, Host::Server, 5201);
    let load = iperf.tcp(testbed, Host::Client, TUNNEL, 8, direction, timeline.load_seconds);
    let dense = Ping::dense(testbed, Host::Client, TUNNEL, timeline.load_seconds.into());
    thread::sleep(timeline.before_cut);

    let cut = SystemTime::now();
    failure.apply(testbed);
    client.wait_for_path("eth1", "down", Duration::from_secs(3));
    thread::sleep(timeline.outage);
    let restored = (SystemTime::now(), Instant::now());
    failure.undo(testbed);
    wait_until_used(testbed, direction);
    let recovery_time = restored.1.elapsed();

    let (load, pings) = (load.finish(), dense.finish());
    let longest_gap = pings.longest_gap(cut - Duration::from_millis(100), restored.0);
    Outcome { longest_gap, recovery_time, load }
}

/// Waits until link 1 has carried 200 kB since the call: more than heartbeats add up to in 5 s.
fn wait_until_used(testbed: &Testbed, direction: Direction) {
    let carried = || {
        let (received, sent) = testbed.interface_bytes(Host::Client, "eth1");
        if direction == Direction::Up { sent } else { received }
    };
    let before = carried();
    eventually(Duration::from_secs(5), "traffic on the restored link", || {
        let more = carried() - before;
        if more > 200_000 { Ok(()) } else { Err(format!("{more} bytes")) }
    });
}
