//! Compares results with the bars of a scenario: figures, table rows and raw values.

use mpvpn_lab::Direction;
use mpvpn_scenarios::{Bars, Scenario, ShareOf};
use serde_json::{Value, json};

use super::{
    impairment::Impairment,
    load::{Load, START_UP_SECONDS},
    path_rates::Resent,
    play::{Row, RunResult},
    rig,
};
use crate::{
    figure::{Bar, Figure, figure, figure_with_note},
    median::median,
};

/// Head of the table.
pub(crate) const TABLE_HEAD: &str = "| scenario | load | way | Mbit/s | % of (1 − loss) × sum | % of the ceiling | best link alone | \
    kernel MPTCP | bytes sent ÷ payload | sent again, % | longest gap, ms | bars |\n\
    |---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---|\n";

/// Bar: retransmitted packets without loss on the links, percent. Queues overflow now and then. Larger:
/// needless retransmission passes. Smaller: queue overflow fails the rig.
const MAX_REPAIR_WITHOUT_LOSS_PERCENT: f64 = 0.3;

/// A figure for every bar of a row.
pub(crate) fn figures(scenario: &Scenario, row: &Row) -> Vec<Figure> {
    let bars = &scenario.bars;
    let what = format!("{}, {} {:?}", scenario.name, row.load.name(), row.direction);
    let mut all = Vec::new();
    let mut ask = |name: &str, note: &str, value: f64, unit, bar| {
        all.push(figure_with_note(
            rig(scenario.flow_mode),
            format!("{what}: {name}"),
            note,
            value,
            unit,
            bar,
        ));
    };
    let mbit = row.mbit().unwrap_or(f64::NAN);
    if let Some(least) = row.index.and_then(|index| bars.min_share.get(index)) {
        let reference_rate = scenario.reference_rate(row.direction).bps() as f64 / 1e6;
        let of = match bars.share_of {
            ShareOf::UsableRate => "share of (1 − loss) × sum",
            ShareOf::PayloadCeiling => "share of the ceiling",
            ShareOf::PayloadAfterLoss => "share of (1 − loss) × ceiling",
        };
        ask(of, "", 100.0 * mbit / reference_rate, "%", Bar::AtLeast(100.0 * least));
    }
    if let Some(least) = bars.min_mbit.filter(|_| row.index.is_some()) {
        ask("goodput", "", row.unharmed(scenario), "Mbit/s", Bar::AtLeast(least));
    }
    let single = row.best_single().map_or(f64::NAN, |single| single.1);
    if bars.not_below_best_single && scenario.links.len() > 1 {
        ask("part of the best link alone", "", 100.0 * mbit / single, "%", Bar::AtLeast(100.0));
    }
    if let Some(least) = bars.min_single_mbit {
        ask("best link alone", "", single, "Mbit/s", Bar::AtLeast(least));
    }
    if let Some(most) = bars.max_repair {
        let loss = scenario.loss(row.direction);
        let more = row.sent_per_payload() / row.clean_sent_per_payload() - 1.0;
        ask("sent more, of what the loss takes", "", more * (1.0 - loss) / loss, "×", Bar::AtMost(most));
        let idle = row.clean.as_ref().and_then(|run| run.resent).map_or(f64::NAN, Resent::percent);
        ask("sent again without loss", "", idle, "%", Bar::AtMost(MAX_REPAIR_WITHOUT_LOSS_PERCENT));
    }
    impairment_figures(bars, row, &mut ask);
    if all.is_empty() {
        all.push(figure(rig(scenario.flow_mode), format!("{what}: goodput"), mbit, "Mbit/s", Bar::Higher));
    }
    all
}

fn impairment_figures(bars: &Bars, row: &Row, ask: &mut impl FnMut(&str, &str, f64, &'static str, Bar)) {
    let impairments: Vec<&Impairment> = row.runs.iter().flat_map(|run| &run.impairments).collect();
    let gaps: Vec<f64> = impairments.iter().map(|impairment| impairment.gap.as_secs_f64() * 1e3).collect();
    let of = format!("of {}", gaps.len());
    if let Some(most) = bars.max_gap_ms {
        ask("gap, median", &of, median(gaps.clone()).unwrap_or(f64::NAN), "ms", Bar::AtMost(most));
    }
    if !gaps.is_empty() {
        let worst = gaps.iter().copied().fold(0.0, f64::max);
        let bar = bars.max_worst_gap_ms.map_or(Bar::Lower, Bar::AtMost);
        ask("gap, worst", &of, worst, "ms", bar);
    }
    if let Some(most) = bars.max_lost_packets {
        let lost: Option<u64> = row.runs.iter().map(|run| run.lost_pings).sum();
        ask("lost pings", "", lost.map_or(f64::NAN, |lost| lost as f64), "", Bar::AtMost(most as f64));
        if matches!(row.load, Load::Udp(_)) {
            let lost: Option<u64> = row.runs.iter().map(|run| run.arrived.as_ref().ok()?.lost).sum();
            ask(
                "lost datagrams",
                "",
                lost.map_or(f64::NAN, |lost| lost as f64),
                "",
                Bar::AtMost(most as f64),
            );
        }
    }
    if let Some(most) = bars.max_back_s {
        let back = |impairment: &&Impairment| {
            impairment.recovery_time.map_or(f64::INFINITY, |back| back.as_secs_f64())
        };
        let worst = impairments.iter().map(back).reduce(f64::max).unwrap_or(f64::NAN);
        ask("back at 80 %", "", worst, "s", Bar::AtMost(most));
    }
    if row.runs.iter().any(|run| run.quiet_connection.is_some()) {
        let broken = row.runs.iter().filter(|run| run.arrived.is_err()).count();
        let lost =
            row.runs.iter().filter(|run| run.quiet_connection.as_ref().is_some_and(Result::is_err)).count();
        ask("runs and quiet connections lost", "", (broken + lost) as f64, "", Bar::AtMost(0.0));
    }
}

impl Row {
    /// Goodput before the first impairment, Mbit/s; of the whole run if there is none.
    fn unharmed(&self, scenario: &Scenario) -> f64 {
        let Some((from, _)) = scenario.impairments().first().copied() else {
            return self.mbit().unwrap_or(f64::NAN);
        };
        // The clocks of iperf3 and of the events differ by the time in which connections are made.
        let end = (f64::from(START_UP_SECONDS) + from.as_secs_f64() - 0.3) * 10.0;
        let before = |run: &RunResult| {
            let steps = run.arrived.as_ref().ok()?.steps.get(START_UP_SECONDS as usize * 10..end as usize)?;
            Some(steps.iter().sum::<f64>() / steps.len() as f64)
        };
        median(self.runs.iter().filter_map(before).collect()).unwrap_or(f64::NAN)
    }

    /// Bytes of IP packets on the links per byte of payload.
    fn sent_per_payload(&self) -> f64 {
        median(self.runs.iter().filter_map(RunResult::sent_per_payload).collect()).unwrap_or(f64::NAN)
    }

    fn clean_sent_per_payload(&self) -> f64 {
        self.clean.as_ref().and_then(RunResult::sent_per_payload).unwrap_or(f64::NAN)
    }

    /// Retransmitted packets, percent of the numbered ones; `None` if the sender's status does not tell.
    fn resent_percent(&self) -> Option<f64> {
        median(self.runs.iter().filter_map(|run| Some(run.resent?.percent())).collect())
    }

    /// The longest gap, ms: between ping replies around impairments, else in TCP data.
    fn gap_ms(&self) -> f64 {
        let of_run = |run: &RunResult| {
            let impairments = run.impairments.iter().map(|impairment| impairment.gap);
            let longest_stall = run.arrived.as_ref().ok().map(|arrived| arrived.longest_stall());
            impairments.max().or(longest_stall).map_or(f64::NAN, |gap| gap.as_secs_f64() * 1e3)
        };
        self.runs.iter().map(of_run).fold(0.0, f64::max)
    }
}

impl RunResult {
    fn sent_per_payload(&self) -> Option<f64> {
        Some(self.sent / self.arrived.as_ref().ok()?.bytes)
    }
}

/// The row of the table.
pub(crate) fn line(scenario: &Scenario, row: &Row, figures: &[Figure]) -> String {
    let mbit = row.mbit();
    let share = |reference_rate: f64| {
        mbit.as_ref().map_or(String::new(), |mbit| format!("{:.0}", 100e6 * mbit / reference_rate))
    };
    let single =
        row.best_single().map_or(String::new(), |(number, rate)| format!("{rate:.1} (link {number})"));
    let mptcp = match &row.mptcp {
        None => String::new(),
        Some(Ok(rate)) => format!("{rate:.1}"),
        Some(Err(why)) => why.clone(),
    };
    let missed: Vec<String> = figures
        .iter()
        .filter(|figure| !figure.is_good())
        .map(|figure| {
            let name = figure.name.rsplit(": ").next().unwrap_or_default();
            format!("{name} {:.1} {}, asked {}", figure.value, figure.unit, figure.bar())
        })
        .collect();
    let again = row.resent_percent().map_or(String::new(), |percent| format!("{percent:.1}"));
    let verdict = if missed.is_empty() { "ok".to_owned() } else { format!("missed: {}", missed.join("; ")) };
    format!(
        "| {} | {} | {:?} | {} | {} | {} | {single} | {mptcp} | {:.2} | {again} | {:.0} | {verdict} |\n",
        scenario.name,
        row.load.name(),
        row.direction,
        mbit.as_ref().map_or_else(Clone::clone, |mbit| format!("{mbit:.1}")),
        share(scenario.usable_rate(row.direction).bps() as f64),
        share(scenario.payload_ceiling(row.direction).bps() as f64),
        row.sent_per_payload(),
        row.gap_ms(),
    )
}

/// All values of the row as JSON.
pub(crate) fn raw(row: &Row) -> Value {
    let runs = row.runs.iter().map(|run| {
        let impairments = run.impairments.iter().map(
            |impairment| {
                let back = impairment.recovery_time.map(|back| back.as_secs_f64());
                json!({ "gap_ms": impairment.gap.as_secs_f64() * 1e3, "back_s": back })
            },
        );
        let arrived = run.arrived.as_ref();
        json!({
            "mbit": arrived.ok().map(|arrived| arrived.mbit), "error": arrived.err(),
            "steps_100ms_mbit": arrived.ok().map(|arrived| &arrived.steps),
            "stall_ms": arrived.ok().map(|arrived| arrived.longest_stall().as_millis() as u64),
            "sent_bytes": run.sent, "lost_pings": run.lost_pings, "harms": impairments.collect::<Vec<_>>(),
            "lost_datagrams": arrived.ok().and_then(|arrived| arrived.lost),
            "numbered": run.resent.map(|found| found.numbered), "sent_again": run.resent.map(|found| found.again),
            "quiet_connection": run.quiet_connection.as_ref().map(|quiet_connection| match quiet_connection {
                Ok(longest) => json!({ "longest_answer_ms": longest.as_millis() as u64 }),
                Err(why) => json!({ "error": why }),
            }),
        })
    });
    let singles = row.singles.iter().map(
        |(number, rate)| json!({ "link": number, "mbit": rate.as_ref().ok(), "error": rate.as_ref().err() }),
    );
    let mptcp =
        row.mptcp.as_ref().map(|found| json!({ "mbit": found.as_ref().ok(), "error": found.as_ref().err() }));
    json!({
        "load": row.load.name(), "way": if row.direction == Direction::Up { "up" } else { "down" },
        "runs": runs.collect::<Vec<_>>(),
        "sent_per_payload": row.sent_per_payload(), "without_loss": row.clean_sent_per_payload(),
        "alone": singles.collect::<Vec<_>>(), "mptcp": mptcp,
    })
}
