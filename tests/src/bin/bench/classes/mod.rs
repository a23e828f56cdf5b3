//! Classes of traffic: what one class feels of the others' loss and load, and what a class gets over links that lose,
//! fail, or shape each session.
//!
//! Traffic is told apart by its port, with rules of the client's file as anybody would write them.

mod class_testbed;
mod competition;
mod failover;
mod isolation;
mod loss;
mod nine;
mod striping;

use mpvpn_tests::{disturbance::measure_undisturbed, ping::Pings};
use serde_json::{Value, json};

use crate::{
    figure::{Bar, figure},
    options::Options,
    parts,
    report::Outcome,
};

const RIG: &str = "classes";

/// What the rig consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// Loss in one class alone.
    Isolation,
    /// Classes that want more than a link carries.
    Competition,
    /// Congestion control and lane of a class over a link that loses.
    Loss,
    /// A primary link that goes silent, and one that waits.
    Failover,
    /// Sessions that are shaped one by one.
    Striping,
    /// Three links and three classes for long.
    Nine,
}

impl Part {
    pub(crate) const ALL: [Self; 6] =
        [Self::Isolation, Self::Competition, Self::Loss, Self::Failover, Self::Striping, Self::Nine];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Isolation => "isolation",
            Self::Competition => "competition",
            Self::Loss => "loss",
            Self::Failover => "failover",
            Self::Striping => "striping",
            Self::Nine => "nine",
        }
    }

    fn run(self, options: &Options) -> Result<Outcome, String> {
        match self {
            Self::Isolation => isolation::run(options),
            Self::Competition => competition::run(options),
            Self::Loss => loss::run(options),
            Self::Failover => failover::run(options),
            Self::Striping => striping::run(options),
            Self::Nine => nine::run(options),
        }
    }
}

pub(crate) fn run(options: &Options) -> Outcome {
    parts::run_parts(RIG, &options.class_parts, Part::name, |part| part.run(options))
}

/// Measures, and again while something else uses the machine. What disturbed the try that counts is a figure as well.
fn measured<T>(
    what: &str,
    options: &Options,
    outcome: &mut Outcome,
    task: impl FnMut() -> Result<T, String>,
) -> Result<T, String> {
    let measurement = measure_undisturbed(options.tries, task);
    if measurement.disturbance.exceeds_limit() {
        let what = format!("{what}: disturbed in each of {} tries, at least by", measurement.tries);
        outcome.figures.push(figure(RIG, what, measurement.disturbance.total(), "cores", Bar::None));
    }
    measurement.value
}

/// A call, for the report's JSON.
fn call_json(calls: &Pings) -> Value {
    json!({ "sent": calls.sent, "lost": calls.lost(), "median_ms": calls.rtt_ms(50), "p99_ms": calls.rtt_ms(99),
            "most_ms": calls.rtt_ms(100) })
}
