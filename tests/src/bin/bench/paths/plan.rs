//! Which runs of a scenario are measured, and how long that takes.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    time::Duration,
};

use mpvpn_scenarios::{FlowMode, Scenario};
use mpvpn_types::panic_text;

use super::load::{InnerCc, Load, START_UP_SECONDS};

/// Estimated time to set up a testbed, a server and clients.
const SETUP_TIME: Duration = Duration::from_secs(8);
/// Estimated time from the end of a run to the start of the next one.
const PAUSE_BETWEEN_RUNS: Duration = Duration::from_millis(1500);

/// Extent of the measurement.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    /// Number of runs per row.
    pub(crate) runs: u32,
    /// Duration of runs without events, s; `None`: as the scenario says.
    pub(crate) seconds: Option<u32>,
    /// Rows with more TCP flows are left out, unless none would remain.
    pub(crate) max_flows: u32,
    /// Number of repetitions of the events; `None`: as the scenario says.
    pub(crate) repeat: Option<u32>,
    /// Congestion control of inner TCP.
    pub(crate) inner: InnerCc,
    /// Number of random cuts; `None`: as the scenario says.
    pub(crate) random_cuts: Option<u32>,
}

impl Plan {
    /// The default extent.
    pub(crate) const FULL: Self = Self {
        runs: 3,
        seconds: None,
        max_flows: u32::MAX,
        repeat: None,
        inner: InnerCc::Cubic,
        random_cuts: None,
    };
    /// The extent with `--quick`.
    pub(crate) const QUICK: Self = Self {
        runs: 1,
        seconds: Some(6),
        max_flows: 4,
        repeat: Some(3),
        inner: InnerCc::Cubic,
        random_cuts: Some(15),
    };

    /// The scenario with the plan's repetitions and cuts.
    pub(crate) fn of(&self, scenario: Scenario) -> Scenario {
        let mut scenario = match self.random_cuts {
            Some(count) => scenario.with_cuts(count),
            None => scenario,
        };
        if scenario.random_cuts.is_none() {
            scenario.repeat = self.repeat.unwrap_or(scenario.repeat);
        }
        scenario
    }

    /// Every load, with the index of the number of flows whose bars apply.
    pub(crate) fn loads(&self, scenario: &Scenario) -> Vec<(Option<usize>, Load)> {
        let tcp = |most: u32| {
            let all = scenario.flows.iter().enumerate().filter(move |(_, flows)| **flows <= most);
            all.map(|(index, flows)| (Some(index), Load::Tcp(*flows, self.inner))).collect::<Vec<_>>()
        };
        let few = tcp(self.max_flows);
        let mut loads = if few.is_empty() { tcp(u32::MAX) } else { few };
        loads.extend(scenario.quic.then_some((Some(0), Load::Quic)));
        loads.extend(scenario.udp_mbit.map(|mbit| (None, Load::Udp(mbit))));
        loads
    }

    /// Duration of a run without events after its start-up, s.
    pub(crate) fn seconds(&self, scenario: &Scenario) -> u32 {
        self.seconds.unwrap_or(scenario.seconds)
    }

    /// Number of runs of a row over all links.
    pub(crate) fn runs(&self, scenario: &Scenario) -> u32 {
        // Events are repeated within one run.
        if scenario.event.is_empty() { self.runs } else { 1 }
    }

    /// Whether the kernel's Multipath TCP is measured.
    pub(crate) fn measures_kernel_mptcp(scenario: &Scenario) -> bool {
        scenario.flow_mode == FlowMode::Datagram
            && (scenario.event.is_empty() || scenario.bars.min_single_mbit.is_some())
    }

    /// Whether single links are measured. In stream mode only if a bar needs it, because the rig `paths` has
    /// measured them.
    pub(crate) fn measures_single_links(scenario: &Scenario) -> bool {
        let bars = &scenario.bars;
        let is_wanted = match scenario.flow_mode {
            FlowMode::Datagram => scenario.event.is_empty(),
            FlowMode::Stream => bars.not_below_best_single,
        };
        scenario.links.len() > 1 && (is_wanted || bars.min_single_mbit.is_some())
    }

    /// Estimated duration of the scenario.
    pub(crate) fn estimate(&self, scenario: &Scenario) -> Duration {
        let start_up = Duration::from_secs(START_UP_SECONDS.into());
        let calm = start_up + PAUSE_BETWEEN_RUNS + Duration::from_secs(self.seconds(scenario).into());
        let whole = match scenario.event.is_empty() {
            true => calm,
            false => {
                start_up
                    + PAUSE_BETWEEN_RUNS
                    + Duration::from_secs(u64::from(scenario.seconds) * u64::from(scenario.repeat))
            }
        };
        let loads = self.loads(scenario);
        let rows = (loads.len() * scenario.directions.len()) as u32;
        let mut time = SETUP_TIME + whole * self.runs(scenario) * rows;
        if scenario.bars.max_repair.is_some() {
            time += calm * rows;
        }
        if Self::measures_kernel_mptcp(scenario) {
            let tcp = loads.iter().filter(|(_, load)| matches!(load, Load::Tcp(..))).count() as u32;
            time += calm * self.runs * tcp * scenario.directions.len() as u32;
        }
        if Self::measures_single_links(scenario) {
            let alone = scenario
                .directions
                .iter()
                .map(|direction| scenario.best_link_candidates(*direction).len())
                .max();
            time += calm * self.runs * rows * alone.unwrap_or(0) as u32;
        }
        time
    }
}

/// The result of `task`; a panic becomes an error with its message.
pub(crate) fn catch_panic<T>(task: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(task)).unwrap_or_else(|panic| Err(panic_text(&*panic).to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scenario(name: &str) -> Scenario {
        Scenario::all().unwrap().into_iter().find(|scenario| scenario.name == name).expect(name)
    }

    #[test]
    fn the_quick_plan_leaves_out_long_runs() {
        let named = |plan: Plan, name| {
            let loads = plan.loads(&plan.of(scenario(name)));
            loads.into_iter().map(|(_, load)| load.name()).collect::<Vec<_>>()
        };
        assert_eq!(named(Plan::FULL, "two_100"), ["1 TCP", "4 TCP", "16 TCP"]);
        assert_eq!(named(Plan::QUICK, "two_100"), ["1 TCP", "4 TCP"]);
        assert_eq!(named(Plan::QUICK, "lossy"), ["1 TCP", "4 TCP", "QUIC"]);
        assert_eq!(named(Plan::FULL, "redundant_cut"), ["4 TCP", "UDP, 20 Mbit/s"]);
        let cuts = |plan: Plan| plan.of(scenario("random_cuts")).impairments().len();
        assert_eq!((cuts(Plan::FULL), cuts(Plan::QUICK)), (100, 15));
        let seconds = |plan: Plan, name| plan.estimate(&plan.of(scenario(name))).as_secs();
        assert!(seconds(Plan::QUICK, "cut_silent") < seconds(Plan::FULL, "cut_silent"));
        // Three loads over both links, three over each of two links, two by MPTCP; each three times 10 s and
        // more.
        assert!((330..460).contains(&seconds(Plan::FULL, "lossy")), "{}", seconds(Plan::FULL, "lossy"));
    }

    #[test]
    fn comparisons_without_a_bar_are_left_out_with_streams() {
        let played = |name, flow_mode| scenario(name).for_flow_mode(flow_mode).expect(name);
        let asks = |name, flow_mode| {
            let scenario = played(name, flow_mode);
            (Plan::measures_kernel_mptcp(&scenario), Plan::measures_single_links(&scenario))
        };
        assert_eq!(
            (asks("equal", FlowMode::Datagram), asks("equal", FlowMode::Stream)),
            ((true, true), (false, false))
        );
        assert_eq!(
            (asks("lte_geo", FlowMode::Stream), asks("two_10", FlowMode::Stream)),
            ((false, false), (false, true))
        );
        let loads = Plan::FULL.loads(&played("equal", FlowMode::Stream));
        assert_eq!(loads.into_iter().map(|(_, load)| load.name()).collect::<Vec<_>>(), ["1 TCP", "4 TCP"]);
    }

    #[test]
    fn a_panic_becomes_an_error() {
        assert_eq!(catch_panic(|| Ok(1)), Ok(1));
        assert_eq!(catch_panic::<()>(|| panic!("why {}", 1)), Err("why 1".to_owned()));
    }
}
