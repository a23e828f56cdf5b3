//! Random cuts of links: which link, how, and for how long.
//!
//! In: number of cuts, ranges of durations, and a seed. Out: events. Always holds: the same seed gives the
//! same events, fewer cuts are the first ones of many, and two links are never cut at once.

use serde::Deserialize;

use mpvpn_lab::Direction;

use super::{Change, Event, Scenario};

/// Start of the first cut, seconds after the start of the run: long enough for a rate before the cut.
const FIRST_CUT_AT_S: f64 = 1.0;
/// Time from the end of the last pause to the end of the run, seconds: long enough to see traffic return.
const TIME_AFTER_LAST_CUT_S: f64 = 2.0;

/// Cuts of one link at a time: half of them lose the carrier, half of them lose packets silently.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RandomCuts {
    /// Number of cuts.
    pub count: u32,
    /// Seed of the random numbers; not 0.
    pub seed: u64,
    /// Shortest and longest duration of a cut, seconds.
    pub last_s: [f64; 2],
    /// Shortest and longest pause between two cuts, seconds.
    pub pause_s: [f64; 2],
}

impl Scenario {
    /// The scenario with its first `count` random cuts; unchanged if it has no random cuts.
    #[must_use]
    pub fn with_cuts(mut self, count: u32) -> Self {
        let Some(cuts) = &self.random_cuts else { return self };
        let (events, end_s) = cuts.draw(count, self.links.len());
        (self.event, self.seconds) = (events, end_s.ceil() as u32);
        self
    }
}

impl RandomCuts {
    /// Checks the ranges and the seed.
    pub(super) fn check(&self) -> Result<(), String> {
        let ranges = [("last_s", self.last_s), ("pause_s", self.pause_s)];
        match ranges.iter().find(|(_, [least, most])| !(*least > 0.0 && least <= most && most.is_finite())) {
            Some((key, [least, most])) => Err(format!("{key} = [{least}, {most}] is no range of seconds")),
            None if self.seed == 0 => Err("seed = 0 is invalid: xorshift would only return 0".to_owned()),
            None => Ok(()),
        }
    }

    /// The events ordered by time, and the end of the run in seconds since its start.
    fn draw(&self, count: u32, links: usize) -> (Vec<Event>, f64) {
        let mut state = self.seed;
        // xorshift64 (Marsaglia, "Xorshift RNGs", 2003); the upper 53 bits give a number in [0, 1).
        let mut draw = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 11) as f64 / (1u64 << 53) as f64
        };
        let mut events = Vec::new();
        let mut at_s = FIRST_CUT_AT_S;
        for _ in 0..count {
            let link = 1 + (draw() * links as f64) as usize;
            let change = if draw() < 0.5 { Change::Cut } else { Change::Silent(Direction::Both) };
            events.push(Event { at_s, link, change });
            at_s += self.last_s[0] + draw() * (self.last_s[1] - self.last_s[0]);
            events.push(Event { at_s, link, change: Change::Restore });
            at_s += self.pause_s[0] + draw() * (self.pause_s[1] - self.pause_s[0]);
        }
        (events, at_s + TIME_AFTER_LAST_CUT_S)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_cut_in_both_ways_one_at_a_time() {
        let scenario = Scenario::all().unwrap().into_iter().find(|found| found.random_cuts.is_some());
        let scenario = scenario.expect("a scenario with random cuts");
        let cuts = scenario.random_cuts.clone().unwrap();
        let impairments = scenario.impairments();
        assert_eq!(impairments.len(), cuts.count as usize);
        for pair in impairments.windows(2) {
            assert!(pair[0].1.as_secs_f64() + cuts.pause_s[0] < pair[1].0.as_secs_f64() + 1e-6, "{pair:?}");
        }
        for (from, to) in &impairments {
            let lasted = (*to - *from).as_secs_f64();
            assert!((cuts.last_s[0] - 1e-6..=cuts.last_s[1] + 1e-6).contains(&lasted), "{lasted} s");
        }
        let count =
            |wanted: &dyn Fn(&Event) -> bool| scenario.event.iter().filter(|&event| wanted(event)).count();
        let quarter = cuts.count as usize / 4;
        assert!(count(&|event| event.change == Change::Cut) > quarter);
        assert!(count(&|event| matches!(event.change, Change::Silent(_))) > quarter);
        assert!((1..=2).all(|link| count(&|event| event.link == link) > quarter));
    }

    #[test]
    fn fewer_cuts_are_the_first_ones_of_many() {
        let all = Scenario::all().unwrap().into_iter().find(|found| found.random_cuts.is_some()).unwrap();
        let few = all.clone().with_cuts(5);
        let first_events = |scenario: &Scenario| {
            scenario.event[..10].iter().map(|event| format!("{event:?}")).collect::<Vec<_>>()
        };
        assert_eq!((few.event.len(), first_events(&few)), (10, first_events(&all)));
        assert!(few.seconds < all.seconds);
    }
}
