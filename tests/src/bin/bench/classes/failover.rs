//! A primary link that silently fails and recovers beside a backup link: counts the lost pings.

use std::{
    thread,
    time::{Duration, SystemTime},
};

use mpvpn_tests::{
    ping::{Ping, Pings},
    testbed::{Direction, Host, TUNNEL},
};
use serde_json::{Value, json};

use super::{
    RIG,
    class_testbed::{CRITICAL, ClassTestbed, ClassTraffic, DEFAULT},
};
use crate::{
    figure::{Bar, figure_with_note},
    options::Options,
    report::Outcome,
};

/// The primary and the second link.
const LINKS: [&str; 2] = ["50mbit,10ms,queue=60ms", "50mbit,15ms,queue=60ms"];
/// Configuration that makes the second link a backup.
const SECOND_LINK_IS_BACKUP: &str = "[[link]]\nname = \"eth2\"\ntier = \"backup\"\n";

/// A case. A built-in rule assigns pings to the class `critical`.
struct Case {
    title: &'static str,
    before: &'static str,
    critical: ClassTraffic,
    interval: Duration,
    /// Bar: lost pings until the primary link has recovered.
    lost: f64,
}

const CASES: [Case; 4] = [
    Case {
        title: "a ping each second",
        before: SECOND_LINK_IS_BACKUP,
        critical: CRITICAL,
        interval: Duration::from_secs(1),
        lost: 1.0,
    },
    Case {
        title: "100 pings a second",
        before: SECOND_LINK_IS_BACKUP,
        critical: CRITICAL,
        interval: Duration::from_millis(10),
        lost: 15.0,
    },
    Case {
        title: "100 pings a second, two copies",
        before: "",
        critical: CRITICAL.with("copies = 2"),
        interval: Duration::from_millis(10),
        lost: 0.0,
    },
    Case {
        title: "100 pings a second, two copies, one link a backup",
        before: SECOND_LINK_IS_BACKUP,
        critical: CRITICAL.with("copies = 2"),
        interval: Duration::from_millis(10),
        lost: 0.0,
    },
];

/// Lost pings before and after the recovery of the primary link.
struct PingLoss {
    sent: u64,
    during_outage: u64,
    after: u64,
}

pub(super) fn run(options: &Options) -> Result<Outcome, String> {
    let seconds = if options.quick { 24 } else { 74 };
    let mut outcome = Outcome {
        chapter: "\n## The primary link goes silent, and comes back\n\n\
                  | pings | sent | lost after the cut | lost after the return |\n|---|---:|---:|---:|\n"
            .to_owned(),
        ..Outcome::default()
    };
    let mut raw = Vec::new();
    for case in &CASES {
        let ping_loss = measure(case, seconds)?;
        let mut ask = |which: &str, lost, most| {
            let (what, of) = (format!("{}: {which}", case.title), format!("of {}", ping_loss.sent));
            outcome.figures.push(figure_with_note(RIG, what, &of, lost as f64, "", Bar::AtMost(most)));
        };
        ask("lost, primary silent", ping_loss.during_outage, case.lost);
        ask("lost when it is back", ping_loss.after, 0.0);
        outcome.chapter += &format!(
            "| {} | {} | {} | {} |\n",
            case.title, ping_loss.sent, ping_loss.during_outage, ping_loss.after
        );
        raw.push(
            json!({ "case": case.title, "sent": ping_loss.sent, "lost_meanwhile": ping_loss.during_outage,
                         "lost_after": ping_loss.after }),
        );
    }
    outcome.raw = Value::Array(raw);
    Ok(outcome)
}

fn measure(case: &Case, seconds: u32) -> Result<PingLoss, String> {
    let setup = ClassTestbed::new(&LINKS, case.before, &[case.critical, DEFAULT])?;
    let third = Duration::from_secs(u64::from(seconds) / 3);
    let ping = Ping::every(&setup.testbed, Host::Client, case.interval, TUNNEL, seconds);
    thread::sleep(third);
    setup.testbed.link(1).silence(Direction::Both);
    thread::sleep(third);
    let healed = SystemTime::now();
    setup.testbed.link(1).end_silence();
    let pings = ping.finish();
    if pings.answers.is_empty() {
        return Err(format!("{}: no ping was answered", case.title));
    }
    Ok(ping_loss(&pings, healed))
}

/// Splits lost pings at the first answered ping that was sent after `healed`.
fn ping_loss(pings: &Pings, healed: SystemTime) -> PingLoss {
    let healed = healed.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    let mut after = pings.answers.iter().filter(|answer| answer.at - answer.rtt_ms / 1e3 > healed);
    let first = after.next().map_or(u64::MAX, |answer| answer.number);
    let last = pings.answers.iter().map(|answer| answer.number).max().unwrap_or(0);
    let answered = pings.answers.iter().filter(|answer| answer.number < first).count() as u64;
    let during_outage = first.min(last + 1).saturating_sub(1 + answered);
    PingLoss { sent: pings.sent, during_outage, after: pings.missing().saturating_sub(during_outage) }
}

#[cfg(test)]
mod tests {
    use mpvpn_tests::ping::Answer;

    use super::*;

    #[test]
    fn lost_pings_are_counted_by_their_sending_time() {
        let numbers = (1..=100).filter(|number| ![40, 41, 60, 61, 90].contains(number));
        let answer = |number| Answer { at: number as f64 / 10.0 + 0.025, rtt_ms: 25.0, number };
        let pings = Pings { answers: numbers.map(answer).collect(), sent: 101 };
        let lost = |seconds| {
            let ping_loss = ping_loss(&pings, SystemTime::UNIX_EPOCH + Duration::from_secs_f64(seconds));
            (ping_loss.sent, ping_loss.during_outage, ping_loss.after)
        };
        assert_eq!((lost(5.95), lost(8.05), lost(20.0)), ((101, 4, 1), (101, 4, 1), (101, 5, 0)));
    }
}
