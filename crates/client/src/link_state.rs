//! Which of the paths over a link tells whether the link works.
//!
//! In: the paths of all classes, with the time of the last arrival on each. Out: the deciding path. Always
//! holds: a path that only has not noticed the failure of its link yet hides no failure that another path has
//! noticed.

use std::time::{Duration, Instant};

use mpvpn_links::Links;
use mpvpn_path::PathState;
use mpvpn_tunnel::PathReport;

/// An arrival this recent shows that a link works. Less than a second, so that a link that was cut is shown
/// within a second; more than the time between packets of a path in use. Smaller: links whose paths are
/// hardly used look failed together with one of their paths. Larger: failures are shown later. Chosen.
const RECENT_ARRIVAL: Duration = Duration::from_millis(500);
/// An arrival this long after the last one on a failed path shows that the link works, at least for other
/// paths. The last arrivals on all paths of a link that was cut are closer together. Chosen.
const LATER_ARRIVAL: Duration = Duration::from_secs(1);

/// The place of the path whose state is that of the link: of the best one, unless another one has failed and
/// nothing has arrived on the working ones since. A path without traffic has few heartbeats, and so notices a
/// failure late. `paths` are all over one link, with the time of the last arrival on each.
pub(crate) fn deciding_path(paths: &[(PathState, Instant)], now: Instant) -> Option<usize> {
    let best = (0..paths.len()).min_by_key(|at| paths[*at].0);
    let down = (0..paths.len()).filter(|at| paths[*at].0 == PathState::Down);
    let Some(failed) = down.max_by_key(|at| paths[*at].1) else { return best };
    let is_proof = |(state, last_arrival): &(PathState, Instant)| {
        matches!(state, PathState::Active | PathState::Standby)
            && (*last_arrival + RECENT_ARRIVAL >= now || *last_arrival > paths[failed].1 + LATER_ARRIVAL)
    };
    if paths.iter().any(is_proof) { best } else { Some(failed) }
}

/// The names of the links on which a path works, the one with the shortest round trip first.
pub(crate) fn working_links(paths: &[PathReport], links: &Links) -> Vec<String> {
    let works = |path: &&PathReport| matches!(path.state, PathState::Active | PathState::Standby);
    let mut working: Vec<(Duration, &str)> = paths
        .iter()
        .filter(works)
        .filter_map(|path| Some((path.view.rtt, links.links.get(&path.link?.uplink())?.name.as_str())))
        .collect();
    working.sort_unstable();
    working.into_iter().map(|(_, name)| name.to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The deciding one of paths with these states, on which something last arrived so many ms ago.
    fn decide(paths: &[(PathState, u64)]) -> Option<PathState> {
        let now = Instant::now() + Duration::from_secs(100);
        let paths: Vec<_> =
            paths.iter().map(|(state, ms)| (*state, now - Duration::from_millis(*ms))).collect();
        deciding_path(&paths, now).map(|at| paths[at].0)
    }

    #[test]
    fn a_link_is_as_good_as_its_best_path_in_use() {
        assert_eq!(decide(&[]), None);
        assert_eq!(decide(&[(PathState::Standby, 9000), (PathState::Active, 9000)]), Some(PathState::Active));
        assert_eq!(decide(&[(PathState::Down, 9000), (PathState::Active, 20)]), Some(PathState::Active));
    }

    #[test]
    fn a_path_that_is_hardly_used_does_not_hide_that_its_link_was_cut() {
        let cut_just_now = [(PathState::Down, 600), (PathState::Active, 4000)];
        assert_eq!(decide(&cut_just_now), Some(PathState::Down));
        let cut_some_time_ago = [(PathState::Down, 15_100), (PathState::Active, 15_000)];
        assert_eq!(decide(&cut_some_time_ago), Some(PathState::Down));
    }

    #[test]
    fn a_path_that_failed_alone_is_not_the_link() {
        // One of several paths whose UDP port is blocked, and another that had its last heartbeat seconds
        // later.
        assert_eq!(
            decide(&[(PathState::Down, 30_000), (PathState::Standby, 5000)]),
            Some(PathState::Standby)
        );
    }
}
