//! Cuts at random: which link, in which way, for how long. The same seed draws the same ones.

use serde::Deserialize;

use mpvpn_lab::Direction;

use super::{Change, Event, Scenario};

/// The first cut comes so many seconds after the start of the run.
const FIRST_S: f64 = 1.0;
/// The run goes on for so many seconds after the last cut.
const REST_S: f64 = 2.0;

/// Cuts of one link after the other, never of two at once: half of them pulled cables, half of them silent.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RandomCuts {
    /// How many.
    pub count: u32,
    /// What they are drawn from; not 0.
    pub seed: u64,
    /// How long one lasts: the shortest and the longest, seconds.
    pub last_s: [f64; 2],
    /// How long all links are well between two of them: the shortest and the longest, seconds.
    pub pause_s: [f64; 2],
}

impl Scenario {
    /// The same with so many random cuts, where they are random: the first ones of those that its seed draws.
    #[must_use]
    pub fn with_cuts(mut self, count: u32) -> Self {
        let Some(cuts) = &self.random_cuts else { return self };
        let (events, end_s) = cuts.draw(count, self.links.len());
        (self.event, self.seconds) = (events, end_s.ceil() as u32);
        self
    }
}

impl RandomCuts {
    /// What is wrong with it, if anything is.
    pub(super) fn check(&self) -> Result<(), String> {
        let ranges = [("last_s", self.last_s), ("pause_s", self.pause_s)];
        match ranges.iter().find(|(_, [least, most])| !(*least > 0.0 && least <= most && most.is_finite())) {
            Some((key, [least, most])) => Err(format!("{key} = [{least}, {most}] is no range of seconds")),
            None if self.seed == 0 => Err("the seed 0 draws nothing: take another one".to_owned()),
            None => Ok(()),
        }
    }

    /// The events in the order of time, and when the run ends (seconds since its start).
    fn draw(&self, count: u32, links: usize) -> (Vec<Event>, f64) {
        let mut state = self.seed;
        // xorshift64, of which the upper 53 bits make a number from 0 up to 1.
        let mut draw = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 11) as f64 / (1u64 << 53) as f64
        };
        let mut events = Vec::new();
        let mut at_s = FIRST_S;
        for _ in 0..count {
            let link = 1 + (draw() * links as f64) as usize;
            let change = if draw() < 0.5 { Change::Cut } else { Change::Silent(Direction::Both) };
            events.push(Event { at_s, link, change });
            at_s += self.last_s[0] + draw() * (self.last_s[1] - self.last_s[0]);
            events.push(Event { at_s, link, change: Change::Restore });
            at_s += self.pause_s[0] + draw() * (self.pause_s[1] - self.pause_s[0]);
        }
        (events, at_s + REST_S)
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
        let harms = scenario.harms();
        assert_eq!(harms.len(), cuts.count as usize);
        for pair in harms.windows(2) {
            assert!(pair[0].1.as_secs_f64() + cuts.pause_s[0] < pair[1].0.as_secs_f64() + 1e-6, "{pair:?}");
        }
        for (from, to) in &harms {
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
        let said = |scenario: &Scenario| {
            scenario.event[..10].iter().map(|event| format!("{event:?}")).collect::<Vec<_>>()
        };
        assert_eq!((few.event.len(), said(&few)), (10, said(&all)));
        assert!(few.seconds < all.seconds);
    }
}
