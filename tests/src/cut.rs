//! A link dies under load and comes back: how long nothing came through, and how soon it is used again.

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

/// How link 1 dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkFailure {
    /// The client's cable is pulled.
    Carrier,
    /// Packets vanish, and nobody is told.
    Silent(Direction),
}

/// What it did.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The longest time without an answer to pings 10 ms apart, from the cut until the restore.
    pub longest_gap: Duration,
    /// From the restore until the link carried data again.
    pub recovery_time: Duration,
    /// The eight flows meanwhile.
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

/// When what happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeline {
    /// From the start of the load until the link dies.
    pub before_cut: Duration,
    /// From when that was noticed until the link comes back.
    pub outage: Duration,
    /// How long the load lasts, in seconds.
    pub load_seconds: u32,
}

impl Timeline {
    /// Long enough for rates that have settled.
    pub const LONG: Self =
        Self { before_cut: Duration::from_secs(3), outage: Duration::from_secs(3), load_seconds: 12 };
    /// Just long enough to see the link die and come back under load.
    pub const SHORT: Self =
        Self { before_cut: Duration::from_secs(2), outage: Duration::from_secs(2), load_seconds: 9 };
}

/// Eight flows and a dense ping; link 1 dies and comes back meanwhile.
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

/// Waits until link 1 carries data again: 200 kB, which no heartbeats add up to.
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
