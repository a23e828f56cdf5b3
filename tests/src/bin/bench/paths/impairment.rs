//! Runs with events on the links, and the effect of each impairment.

use std::{
    thread,
    time::{Duration, Instant, SystemTime},
};

use mpvpn_lab::{Direction, History};
use mpvpn_scenarios::Scenario;
use mpvpn_tests::{
    ping::Ping,
    testbed::{Host, TUNNEL, Testbed},
};

use super::{
    load::{LoadResult, LoadRun, START_UP_SECONDS},
    quiet_connection::QuietConnection,
};

/// Interval of pings: the resolution of gaps.
const PING_INTERVAL: Duration = Duration::from_millis(5);
/// Pause between an answer and the next request of the quiet TCP connection.
const REQUEST_INTERVAL: Duration = Duration::from_millis(500);
/// Gaps are searched from this long before an impairment, so that the last reply before it counts.
const LOOK_BACK: Duration = Duration::from_millis(100);
/// Length of the sliding window in which the rate is compared to detect recovery. Shorter: bursts look like a
/// recovery. Longer: recovery is detected late.
const RECOVERY_WINDOW: Duration = Duration::from_millis(100);
/// Share of the previous rate at which the links count as recovered.
const RECOVERED_SHARE: f64 = 0.8;

/// An impairment and its effect.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Impairment {
    pub(crate) from: SystemTime,
    pub(crate) to: SystemTime,
    /// The longest gap between ping replies.
    pub(crate) gap: Duration,
    /// Time from the end of the impairment until the links carried [`RECOVERED_SHARE`] of the previous rate;
    /// `None`: not before the next impairment or the end of the run.
    pub(crate) recovery_time: Option<Duration>,
}

/// Results of a run with impairments.
pub(crate) struct ImpairedRun {
    pub(crate) arrived: Result<LoadResult, String>,
    pub(crate) impairments: Vec<Impairment>,
    /// Number of unanswered pings.
    pub(crate) lost_pings: u64,
    /// The longest answer time of the quiet TCP connection, or the error that ended it.
    pub(crate) quiet_connection: Result<Duration, String>,
}

/// Applies the events of the scenario, with all repetitions, while the traffic that `start` starts runs.
pub(crate) fn run_with_events(
    testbed: &Testbed,
    scenario: &Scenario,
    direction: Direction,
    start: impl FnOnce(u32) -> Result<LoadRun, String>,
) -> Result<ImpairedRun, String> {
    let repeat = scenario.repeat.max(1);
    let seconds = scenario.seconds * repeat;
    let (period, start_up) =
        (Duration::from_secs(scenario.seconds.into()), Duration::from_secs(START_UP_SECONDS.into()));
    let quiet_connection = QuietConnection::start(testbed, TUNNEL, REQUEST_INTERVAL)?;
    let run = start(seconds)?;
    let ping = Ping::every(testbed, Host::Client, PING_INTERVAL, TUNNEL, START_UP_SECONDS + seconds + 1);
    let (begin, begin_wall_clock) = (Instant::now() + start_up, SystemTime::now() + start_up);
    for repetition in 0..repeat {
        for event in &scenario.event {
            let due = begin + period * repetition + event.at();
            thread::sleep(due.saturating_duration_since(Instant::now()));
            let link = testbed.link(event.link);
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
    let histories = histories(testbed, scenario.links.len());
    let impairment = |(n, (from, to)): (usize, &(Duration, Duration))| {
        // The next impairment ends the search for the recovery from this one.
        let end = times.get(n + 1).map_or(Duration::from_secs(seconds.into()), |next| next.0);
        let recovery_time =
            |histories| recovery_time(histories, direction, (begin + *from, begin + *to), begin + end);
        Impairment {
            from: begin_wall_clock + *from,
            to: begin_wall_clock + *to,
            gap: pings.longest_gap(begin_wall_clock + *from - LOOK_BACK, begin_wall_clock + *to),
            recovery_time: histories.as_deref().and_then(recovery_time),
        }
    };
    let impairments = times.iter().enumerate().map(impairment).collect();
    let quiet_connection = quiet_connection.finish().map(|times| times.into_iter().max().unwrap_or_default());
    Ok(ImpairedRun { arrived, impairments, lost_pings: pings.missing(), quiet_connection })
}

/// The delivery history of every link.
pub(crate) fn histories(testbed: &Testbed, links: usize) -> Option<Vec<History>> {
    (1..=links).map(|number| testbed.link(number).handle().history()).collect::<Result<_, _>>().ok()
}

/// Time from the end of an impairment (`from`, `to`) until all links together carried [`RECOVERED_SHARE`] of
/// the rate in the second before it; searched until `end`.
pub(crate) fn recovery_time(
    histories: &[History],
    direction: Direction,
    (from, to): (Instant, Instant),
    end: Instant,
) -> Option<Duration> {
    let carried = |from: Instant, to: Instant| -> f64 {
        histories.iter().map(|history| history.between(direction, from, to) as f64).sum()
    };
    let second = Duration::from_secs(1);
    let wanted = carried(from - second, from) * RECOVERED_SHARE * RECOVERY_WINDOW.as_secs_f64();
    let times =
        (0..).map(|step| to + RECOVERY_WINDOW + Duration::from_millis(10) * step).take_while(|at| *at <= end);
    times.into_iter().find(|at| carried(*at - RECOVERY_WINDOW, *at) >= wanted).map(|at| at - to)
}
