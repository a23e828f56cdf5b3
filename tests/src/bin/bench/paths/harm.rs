//! Runs in which things happen to the links, and what those did.

use std::{
    thread,
    time::{Duration, Instant, SystemTime},
};

use mpvpn_lab::{Direction, History};
use mpvpn_scenarios::Scenario;
use mpvpn_tests::{
    ping::Ping,
    stage::{Place, Stage, TUNNEL},
};

use super::{
    load::{Arrived, Run, START_UP},
    talk::Talk,
};

/// Between pings.
const DENSE: Duration = Duration::from_millis(5);
/// From one question of the quiet TCP connection to the next.
const PAUSE: Duration = Duration::from_millis(500);
/// A harm is looked for from so long before it, so that the last answer before it counts.
const BEFORE: Duration = Duration::from_millis(100);
/// The window in which a link's return is looked for.
const WINDOW: Duration = Duration::from_millis(100);
/// The share of the earlier rate at which a link counts as back.
const BACK: f64 = 0.8;

/// What a harm did.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Harm {
    pub(crate) from: SystemTime,
    pub(crate) to: SystemTime,
    /// The longest time without an answer to pings.
    pub(crate) gap: Duration,
    /// From the end of the harm until the links carried what they had carried before it; `None`: not in this run.
    pub(crate) back: Option<Duration>,
}

/// A run with harms.
pub(crate) struct Harmed {
    pub(crate) arrived: Result<Arrived, String>,
    pub(crate) harms: Vec<Harm>,
    /// Pings that were not answered.
    pub(crate) lost_pings: u64,
    /// How long the quiet TCP connection waited at most, or how it was lost.
    pub(crate) talk: Result<Duration, String>,
}

/// Lets the events of the scenario happen while the traffic that `start` starts runs, for all its repetitions.
pub(crate) fn harmed(
    stage: &Stage,
    scenario: &Scenario,
    way: Direction,
    start: impl FnOnce(u32) -> Result<Run, String>,
) -> Result<Harmed, String> {
    let repeat = scenario.repeat.max(1);
    let seconds = scenario.seconds * repeat;
    let (period, start_up) =
        (Duration::from_secs(scenario.seconds.into()), Duration::from_secs(START_UP.into()));
    let talk = Talk::start(stage, TUNNEL, PAUSE)?;
    let run = start(seconds)?;
    let ping = Ping::every(stage, Place::Client, DENSE, TUNNEL, START_UP + seconds + 1);
    let (begin, wall) = (Instant::now() + start_up, SystemTime::now() + start_up);
    for repetition in 0..repeat {
        for event in &scenario.event {
            let due = begin + period * repetition + event.at();
            thread::sleep(due.saturating_duration_since(Instant::now()));
            let link = stage.link(event.link);
            event
                .change
                .apply(link.handle(), &scenario.links[event.link - 1])
                .map_err(|error| format!("link {}: {error}", event.link))?;
        }
    }
    let arrived = run.finish();
    let pings = ping.finish();
    let of_one = scenario.impairments();
    let times = (0..repeat).flat_map(|repetition| {
        of_one.iter().map(move |(from, to)| (period * repetition + *from, period * repetition + *to))
    });
    let times: Vec<_> = times.collect();
    let histories = histories(stage, scenario.links.len());
    let harm = |(n, (from, to)): (usize, &(Duration, Duration))| {
        // The next harm ends the search for the return from this one.
        let end = times.get(n + 1).map_or(Duration::from_secs(seconds.into()), |next| next.0);
        let back = |histories| back(histories, way, (begin + *from, begin + *to), begin + end);
        Harm {
            from: wall + *from,
            to: wall + *to,
            gap: pings.longest_gap(wall + *from - BEFORE, wall + *to),
            back: histories.as_deref().and_then(back),
        }
    };
    let harms = times.iter().enumerate().map(harm).collect();
    let talk = talk.finish().map(|times| times.into_iter().max().unwrap_or_default());
    Ok(Harmed { arrived, harms, lost_pings: pings.missing(), talk })
}

/// What every link has delivered so far.
pub(crate) fn histories(stage: &Stage, links: usize) -> Option<Vec<History>> {
    (1..=links).map(|number| stage.link(number).handle().history()).collect::<Result<_, _>>().ok()
}

/// How long after the harm all links together carried [`BACK`] of what they had carried in the second before it.
pub(crate) fn back(
    histories: &[History],
    way: Direction,
    (from, to): (Instant, Instant),
    end: Instant,
) -> Option<Duration> {
    let carried = |from: Instant, to: Instant| -> f64 {
        histories.iter().map(|history| history.between(way, from, to) as f64).sum()
    };
    let second = Duration::from_secs(1);
    let wanted = carried(from - second, from) * BACK * WINDOW.as_secs_f64();
    let times = (0..).map(|step| to + WINDOW + Duration::from_millis(10) * step).take_while(|at| *at <= end);
    times.into_iter().find(|at| carried(*at - WINDOW, *at) >= wanted).map(|at| at - to)
}
