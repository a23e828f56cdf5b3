//! Middleboxes that take Multipath TCP's options away, where no UDP gets through: the tunnel is there all the same, and
//! says what it uses.

use mpvpn_lab::Direction;
use mpvpn_tests::{
    stage::{Peer, Stage, TUNNEL},
    wall::{Travel, Wall, stripped, transports, until_travels},
};
use serde_json::{Value, json};

use super::{DEVICES, Pair, RIG};
use crate::{
    figure::{Bar, figure},
    options::Options,
    parts::missing,
    paths::{
        load::{Iperf, Kind, Load, PORT, Sink},
        plan::caught,
    },
    report::Outcome,
};

const LINK: &str = "10mbit,10ms,queue=60ms";

/// Which links lose the options.
struct Case {
    title: &'static str,
    links: &'static [usize],
}

const CASES: [Case; 3] = [
    Case { title: "options on both links", links: &[] },
    Case { title: "options stripped on link 1", links: &[1] },
    Case { title: "options stripped on both links", links: &[1, 2] },
];

/// What was found in a case.
struct Found {
    /// What carries data on each link.
    transports: Vec<Vec<String>>,
    /// Why each link is as it is.
    reasons: Vec<String>,
    /// Segments that lost options.
    segments: u64,
    mbit: f64,
}

pub(super) fn run(options: &Options) -> Result<Outcome, String> {
    let mut outcome = Outcome {
        chapter: "\n## Without the options of Multipath TCP\n\n\
                  | case | segments stripped | link 1 | link 2 | 1 TCP flow down, Mbit/s |\n|---|---:|---|---|---:|\n"
            .to_owned(),
        ..Outcome::default()
    };
    let mut raw = Vec::new();
    for case in &CASES {
        let found = match caught(|| measure(case, options)) {
            Ok(found) => found,
            Err(why) => {
                outcome.figures.push(missing(RIG, case.title, &why));
                continue;
            }
        };
        let mut ask = |which: &str, value: usize, bar| {
            let what = format!("{}: {which}", case.title);
            outcome.figures.push(figure(RIG, what, value as f64, "", bar));
        };
        let (bare, whole): (Vec<usize>, Vec<usize>) = (1..=2).partition(|link| case.links.contains(link));
        ask("links that carry data", found.used().count(), Bar::AtLeast(1.0));
        if !bare.is_empty() {
            let told = found.called_mptcp(&bare);
            ask("stripped links that are said to use Multipath TCP", told, Bar::AtMost(0.0));
        }
        if !whole.is_empty() {
            ask("links with options that are said to use it", found.called_mptcp(&whole), whole_bar());
        }
        let what = format!("{}: 1 TCP flow down", case.title);
        outcome.figures.push(figure(RIG, what, found.mbit, "Mbit/s", Bar::Higher));
        outcome.chapter += &found.line(case);
        raw.push(json!({ "case": case.title, "segments": found.segments, "transports": found.transports,
                         "reasons": found.reasons, "mbit": found.mbit }));
    }
    outcome.raw = Value::Array(raw);
    Ok(outcome)
}

fn measure(case: &Case, options: &Options) -> Result<Found, String> {
    let stage = Stage::new(&[LINK; 2]);
    let wall = Wall { no_udp: &[1, 2], no_mptcp: case.links };
    let pair = Pair::start(&stage, wall, &[]);
    for (number, device) in (1..).zip(DEVICES) {
        // A link without the options may be left out, but then the other must be there.
        let settled = caught(|| {
            until_travels(&pair.client, device, Travel::Tcp, super::SETTLE);
            Ok(())
        });
        if !case.links.contains(&number) {
            settled?;
        }
    }
    let segments = stripped(&stage);
    if segments == 0 && !case.links.is_empty() && has_mptcp() {
        return Err("no segment had options of Multipath TCP".to_owned());
    }
    let seconds = if options.quick { 4 } else { 10 };
    let _sink = Sink::start(&stage, Kind::Tcp, PORT)?;
    let load = Load::Tcp(1, options.inner);
    let load = Iperf::start(&stage, Kind::Tcp, (TUNNEL, PORT), load, Direction::Down, seconds)?;
    let mbit = load.finish()?.mbit;
    Ok(Found { segments, mbit, ..Found::of(&pair.client) })
}

impl Found {
    /// What a client says.
    fn of(client: &Peer) -> Self {
        let status = client.status();
        let of_link = |device: &&str| transports(&status, device).into_iter().map(str::to_owned).collect();
        let reason = |device: &&str| {
            let links = status["links"].as_array().into_iter().flatten();
            let mut own = links.filter(|link| link["name"] == **device);
            own.find_map(|link| link["reason"].as_str()).unwrap_or_default().to_owned()
        };
        Self {
            transports: DEVICES.iter().map(of_link).collect(),
            reasons: DEVICES.iter().map(reason).collect(),
            segments: 0,
            mbit: f64::NAN,
        }
    }

    /// Links that carry data.
    fn used(&self) -> impl Iterator<Item = &Vec<String>> {
        self.transports.iter().filter(|transports| !transports.is_empty())
    }

    /// How many of these links are said to use Multipath TCP.
    fn called_mptcp(&self, links: &[usize]) -> usize {
        let is = |link: &&usize| self.transports[**link - 1].iter().any(|transport| transport == "mptcp");
        links.iter().filter(is).count()
    }

    fn line(&self, case: &Case) -> String {
        let links: Vec<String> = self
            .transports
            .iter()
            .zip(&self.reasons)
            .map(|(transports, reason)| format!("{} ({reason})", transports.join(", ")))
            .collect();
        format!("| {} | {} | {} | {:.2} |\n", case.title, self.segments, links.join(" | "), self.mbit)
    }
}

/// Where the kernel has Multipath TCP it is used, and said.
fn whole_bar() -> Bar {
    if has_mptcp() { Bar::AtLeast(1.0) } else { Bar::Higher }
}

/// Whether the kernel has it. Namespaces begin with the kernel's own setting, which is on.
fn has_mptcp() -> bool {
    std::path::Path::new("/proc/sys/net/mptcp/enabled").exists()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_counted_by_what_they_are_said_to_use() {
        let texts = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        let found = Found {
            transports: vec![texts(&["tcp"]), texts(&["mptcp"])],
            reasons: texts(&["UDP gets no answer", ""]),
            segments: 3,
            mbit: 9.0,
        };
        assert_eq!((found.called_mptcp(&[1]), found.called_mptcp(&[1, 2])), (0, 1));
        assert_eq!(found.used().count(), 2);
        let case = Case { title: "a case", links: &[1] };
        assert_eq!(found.line(&case), "| a case | 3 | tcp (UDP gets no answer) | mptcp () | 9.00 |\n");
    }
}
