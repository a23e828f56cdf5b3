//! Classes of traffic: the effect of loss and load in one class on the others, and the throughput of a class
//! over links that lose packets, fail, or shape each UDP session.
//!
//! Rules in the client's file assign traffic to classes by port.

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

/// Parts of the rig.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// Loss in one class alone.
    Isolation,
    /// Classes whose demand exceeds the rate of the link.
    Competition,
    /// Congestion control and flow mode of a class over a lossy link.
    Loss,
    /// A primary link that silently fails, and a backup link.
    Failover,
    /// Links that shape each UDP session.
    Striping,
    /// Three links and three classes over a long time.
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

/// Measures, and repeats disturbed attempts. If the best attempt is still disturbed, the disturbance becomes
/// a figure.
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

/// JSON of a call's result.
fn call_json(calls: &Pings) -> Value {
    json!({ "sent": calls.sent, "lost": calls.lost(), "median_ms": calls.rtt_ms(50), "p99_ms": calls.rtt_ms(99),
            "most_ms": calls.rtt_ms(100) })
}
