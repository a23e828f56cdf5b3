//! A link dies under load and comes back: how long nothing came through, and how soon it is used again.

use std::{
    thread,
    time::{Duration, Instant, SystemTime},
};

use crate::{
    eventually,
    ping::Ping,
    stage::{Direction, Peer, Place, Stage, TUNNEL},
    tcp::{Report, Sink, Way},
};

/// How link 1 dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Death {
    /// The client's cable is pulled.
    Carrier,
    /// Packets vanish, and nobody is told.
    Silent(Direction),
}

/// What it did.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The longest time without an answer to pings 10 ms apart, from the cut until the restore.
    pub gap: Duration,
    /// From the restore until the link carried data again.
    pub back: Duration,
    /// The eight flows meanwhile.
    pub load: Report,
}

impl Death {
    fn strike(self, stage: &Stage) {
        match self {
            Self::Carrier => stage.link(1).cut(),
            Self::Silent(direction) => stage.link(1).silence(direction),
        }
    }

    fn heal(self, stage: &Stage) {
        match self {
            Self::Carrier => stage.link(1).restore(),
            Self::Silent(_) => stage.link(1).heal(),
        }
    }
}

/// When what happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Course {
    /// From the start of the load until the link dies.
    pub alive: Duration,
    /// From when that was noticed until the link comes back.
    pub dead: Duration,
    /// How long the load lasts, in seconds.
    pub load: u32,
}

impl Course {
    /// Long enough for rates that have settled.
    pub const LONG: Self = Self { alive: Duration::from_secs(3), dead: Duration::from_secs(3), load: 12 };
    /// Just long enough to see the link die and come back under load.
    pub const SHORT: Self = Self { alive: Duration::from_secs(2), dead: Duration::from_secs(2), load: 9 };
}

/// Eight flows and a dense ping; link 1 dies and comes back meanwhile.
pub fn survive(stage: &Stage, client: &Peer, death: Death, way: Way, course: Course) -> Outcome {
    for link in ["eth1", "eth2"] {
        client.until_path(link, "active", Duration::from_secs(5));
    }
    let sink = Sink::start(stage, Place::Server, 5201);
    let load = sink.tcp(stage, Place::Client, TUNNEL, 8, way, course.load);
    let dense = Ping::dense(stage, Place::Client, TUNNEL, course.load.into());
    thread::sleep(course.alive);

    let cut = SystemTime::now();
    death.strike(stage);
    client.until_path("eth1", "down", Duration::from_secs(3));
    thread::sleep(course.dead);
    let restored = (SystemTime::now(), Instant::now());
    death.heal(stage);
    until_used(stage, way);
    let back = restored.1.elapsed();

    let (load, pings) = (load.finish(), dense.finish());
    let gap = pings.longest_gap(cut - Duration::from_millis(100), restored.0);
    Outcome { gap, back, load }
}

/// Waits until link 1 carries data again: 200 kB, which no heartbeats add up to.
fn until_used(stage: &Stage, way: Way) {
    let carried = || {
        let (received, sent) = stage.counters(Place::Client, "eth1");
        if way == Way::Up { sent } else { received }
    };
    let before = carried();
    eventually(Duration::from_secs(5), "traffic on the restored link", || {
        let more = carried() - before;
        if more > 200_000 { Ok(()) } else { Err(format!("{more} bytes")) }
    });
}
