//! Figures of a link, or of a client of a server, from those of its paths. Always holds: a figure that is not
//! known is none, never 0; one of before has its age.

use std::{cmp::Ordering, collections::BTreeMap};

use crate::{Link, Path, PathState, Status, format_duration, format_rate, table::UNKNOWN};

/// The age (s) from which a figure says it: the heartbeats of idle links come within 25 s, so that a shorter
/// time would mark links that work; a longer one hides silence.
const OLD_S: f64 = 30.0;

/// A measured figure.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Figure {
    /// The figure, in the unit of the field that it comes from.
    pub value: f64,
    /// How long ago it was measured, in s; `None` if that is not long, or if it is a configured figure.
    pub age_s: Option<f64>,
}

/// Figures of a link, or of a client of a server, from those of its paths.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PathFigures {
    /// The lowest round-trip time of the paths that work (ms); if none does, that of the path that worked
    /// last.
    pub rtt: Option<Figure>,
    /// The highest loss of the paths that work (percent).
    pub loss_pct: Option<f64>,
    /// The rate that the link carries away from this end (bit/s), configured or measured.
    pub capacity: Option<Figure>,
}

impl PathFigures {
    /// The figures from these paths.
    pub fn of<'a>(paths: impl Iterator<Item = &'a Path> + Clone) -> Self {
        let order = |(_, path): &(Figure, &Path)| match path.state {
            PathState::Down => (true, path.heard_s),
            PathState::Active | PathState::Standby => (false, Some(path.rtt_ms)),
        };
        let round_trips = paths.clone().filter_map(|path| Some((path.rtt()?, path)));
        let rtt = round_trips.min_by(|a, b| order(a).partial_cmp(&order(b)).unwrap_or(Ordering::Equal));
        let losses = paths.clone().filter_map(Path::loss);
        // All classes and pipes of a shard share the link's rate there; shards have a part of it each.
        let rates = paths.filter_map(|path| {
            let age_s = path.link_rate_age_s.filter(|age| *age >= OLD_S);
            let shard = path.id.rsplit_once('@').map(|(_, shard)| shard);
            Some((shard, Figure { value: path.link_rate_bps? as f64, age_s }))
        });
        let capacity = BTreeMap::from_iter(rates).into_values().reduce(|a, b| Figure {
            value: a.value + b.value,
            age_s: a.age_s.into_iter().chain(b.age_s).reduce(f64::max),
        });
        Self { rtt: rtt.map(|(rtt, _)| rtt), loss_pct: losses.max_by(f64::total_cmp), capacity }
    }

    /// The round-trip time for people, with its age if it is old.
    pub fn rtt_text(&self) -> String {
        text(self.rtt, format_ms)
    }

    /// The capacity for people, with its age if it is old.
    pub fn capacity_text(&self) -> String {
        text(self.capacity, |rate| format_rate(rate as u64))
    }
}

fn text(figure: Option<Figure>, format: impl Fn(f64) -> String) -> String {
    match figure {
        None => UNKNOWN.to_owned(),
        Some(Figure { value, age_s: None }) => format(value),
        Some(Figure { value, age_s: Some(age) }) => {
            // The largest unit of the age is enough.
            let age: Vec<_> = format_duration(age).split(' ').take(2).map(str::to_owned).collect();
            format!("{}, {} ago", format(value), age.join(" "))
        }
    }
}

impl Status {
    /// The figures of a link, from those of the paths over it.
    pub fn figures_of(&self, link: &Link) -> PathFigures {
        PathFigures::of(self.paths.iter().filter(|path| path.link == link.name))
    }
}

impl Path {
    /// The smoothed round-trip time (ms), if there is one; of a path that is down with its age.
    fn rtt(&self) -> Option<Figure> {
        let works = self.state != PathState::Down;
        let age_s = self.heard_s.filter(|age| !works || *age >= OLD_S);
        let is_known = self.rtt_ms > 0.0 && (works || age_s.is_some());
        is_known.then_some(Figure { value: self.rtt_ms, age_s })
    }

    /// The far end for people. A server knows the address inside TCP only while that connection is there.
    pub fn remote_text(&self) -> String {
        match self.transport.as_deref() {
            None | Some("quic") => self.remote.to_string(),
            Some(_) if self.remote.ip().to_canonical().is_loopback() => "over TCP".to_owned(),
            Some(_) => format!("{} over TCP", self.remote),
        }
    }
}

/// A time in ms, as in `12.3 ms`; without the fraction where it says nothing.
pub fn format_ms(ms: f64) -> String {
    if ms < 100.0 { format!("{ms:.1} ms") } else { format!("{ms:.0} ms") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::EXAMPLE;

    fn path(state: PathState, rtt_ms: f64, heard_s: f64) -> Path {
        let status: Status = serde_json::from_str(EXAMPLE).unwrap();
        Path { state, rtt_ms, heard_s: Some(heard_s), ..status.paths[0].clone() }
    }

    fn rtt_of(paths: &[Path]) -> String {
        PathFigures::of(paths.iter()).rtt_text()
    }

    #[test]
    fn the_round_trip_of_a_link_is_that_of_its_quickest_path_that_works() {
        let asleep = path(PathState::Standby, 0.0, 1.0);
        let all = [
            asleep.clone(),
            path(PathState::Down, 3.0, 9.0),
            path(PathState::Active, 41.25, 0.1),
            path(PathState::Standby, 28.0, 14.0),
        ];
        assert_eq!(rtt_of(&all), "28.0 ms");
        assert_eq!(rtt_of(&all[..1]), "–", "a path that has no connection has no round trip");
        assert_eq!(rtt_of(&[]), "–");
    }

    #[test]
    fn a_figure_of_before_says_its_age() {
        let silent = path(PathState::Active, 28.0, 90.0);
        assert_eq!(rtt_of(&[silent]), "28.0 ms, 1 min ago");
        let down = [path(PathState::Down, 128.0, 7500.0), path(PathState::Down, 641.0, 9.0)];
        let figures = PathFigures::of(down.iter());
        assert_eq!((figures.rtt_text().as_str(), figures.loss_pct), ("641 ms, 9.0 s ago", None));
        let unknown = Path { heard_s: None, ..down[0].clone() };
        assert_eq!(rtt_of(&[unknown]), "–", "of a process that does not say when");
    }

    #[test]
    fn a_loss_is_known_where_something_was_sent() {
        let of = |recent_packets| {
            let path = path(PathState::Active, 28.0, 0.1);
            PathFigures::of([Path { recent_packets, loss_pct: 1.5, ..path }].iter()).loss_pct
        };
        assert_eq!((of(0), of(1)), (None, Some(1.5)));
    }

    #[test]
    fn the_capacity_is_that_of_all_shards_and_says_its_age() {
        let with = |id: &str, rate, age| {
            let path = path(PathState::Active, 28.0, 0.1);
            Path { id: id.to_owned(), link_rate_bps: rate, link_rate_age_s: age, ..path }
        };
        let text = |paths: &[Path]| PathFigures::of(paths.iter()).capacity_text();
        let rate = Some(60_000_000);
        let (first, bulk) = (with("default/eth0/0", rate, Some(1.0)), with("bulk/eth0/0", rate, Some(1.0)));
        let second = with("default/eth0/0@1", Some(40_000_000), Some(200_000.0));
        assert_eq!(text(&[with("default/eth0/0", None, None)]), "–", "not the delivery rate");
        assert_eq!(text(&[first.clone(), bulk.clone()]), "60.0 Mbit/s");
        assert_eq!(text(&[first, bulk, second]), "100.0 Mbit/s, 2 d ago");
    }

    #[test]
    fn the_far_end_inside_tcp_is_that_of_the_connection() {
        let of = |transport: &str, remote: &str| {
            let (transport, remote) = (Some(transport.to_owned()), remote.parse().unwrap());
            Path { transport, remote, ..path(PathState::Active, 1.0, 0.0) }.remote_text()
        };
        assert_eq!(of("quic", "127.0.0.1:443"), "127.0.0.1:443");
        assert_eq!(of("mptcp", "[2001:db8::1]:443"), "[2001:db8::1]:443 over TCP");
        assert_eq!(of("tcp", "127.0.0.1:43966"), "over TCP");
        assert_eq!(of("tcp", "[::ffff:127.0.0.1]:43966"), "over TCP");
    }
}
