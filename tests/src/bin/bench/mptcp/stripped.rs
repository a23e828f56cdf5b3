//! Middleboxes that strip the options of Multipath TCP while UDP is blocked: the tunnel must come up, and its
//! status must name the transport.

use mpvpn_lab::Direction;
use mpvpn_tests::{
    firewall::{Firewall, Transport, count_stripped_segments, transports, wait_for_transport},
    testbed::{MpvpnProcess, TUNNEL, Testbed},
};
use serde_json::{Value, json};

use super::{DEVICES, RIG, TunnelPair};
use crate::{
    figure::{Bar, figure},
    options::Options,
    parts::unmeasured_figure,
    paths::{
        load::{Iperf, IperfServer, Load, PORT, TcpKind},
        plan::catch_panic,
    },
    plot::{self, Panel},
    report::Outcome,
};

/// Both links.
const LINK: &str = "10mbit,10ms,queue=60ms";

/// A case: the links that strip the options.
struct Case {
    title: &'static str,
    /// Name of its bar: the links with the options.
    bar: &'static str,
    links: &'static [usize],
}

const CASES: [Case; 3] = [
    Case { title: "options on both links", bar: "mpvpn: both links", links: &[] },
    Case { title: "options stripped on link 1", bar: "mpvpn: link 2 only", links: &[1] },
    Case { title: "options stripped on both links", bar: "mpvpn: no link", links: &[1, 2] },
];

/// Results of a case.
struct CaseResult {
    /// Transports of the active paths, by link.
    transports: Vec<Vec<String>>,
    /// The status's reason, by link.
    reasons: Vec<String>,
    /// Number of segments whose options were stripped.
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
    let (mut raw, mut bars) = (Vec::new(), Vec::new());
    for case in &CASES {
        let result = match catch_panic(|| measure(case, options)) {
            Ok(result) => result,
            Err(why) => {
                outcome.figures.push(unmeasured_figure(RIG, case.title, &why));
                continue;
            }
        };
        let mut ask = |which: &str, value: usize, bar| {
            let what = format!("{}: {which}", case.title);
            outcome.figures.push(figure(RIG, what, value as f64, "", bar));
        };
        let (stripped_links, unstripped): (Vec<usize>, Vec<usize>) =
            (1..=2).partition(|link| case.links.contains(link));
        ask("links that carry data", result.links_in_use().count(), Bar::AtLeast(1.0));
        if !stripped_links.is_empty() {
            let count = result.count_reported_mptcp(&stripped_links);
            ask("stripped links that are said to use Multipath TCP", count, Bar::AtMost(0.0));
        }
        if !unstripped.is_empty() {
            ask(
                "links with options that are said to use it",
                result.count_reported_mptcp(&unstripped),
                mptcp_bar(),
            );
        }
        let what = format!("{}: 1 TCP flow down", case.title);
        outcome.figures.push(figure(RIG, what, result.mbit, "Mbit/s", Bar::Higher));
        outcome.chapter += &result.line(case);
        bars.push((case.bar, result.mbit));
        raw.push(json!({ "case": case.title, "segments": result.segments, "transports": result.transports,
                         "reasons": result.reasons, "mbit": result.mbit }));
    }
    if !bars.is_empty() {
        let panel = Panel {
            title: "1 TCP flow down, by the links that leave the options".to_owned(),
            unit: "Mbit/s",
            bars,
        };
        let title = "Two links of 10 Mbit/s without UDP";
        outcome.plots.push((format!("{RIG}/stripped.svg"), plot::draw(title, &[panel])));
    }
    outcome.raw = Value::Array(raw);
    Ok(outcome)
}

fn measure(case: &Case, options: &Options) -> Result<CaseResult, String> {
    let testbed = Testbed::new(&[LINK; 2]);
    let firewall = Firewall { no_udp: &[1, 2], no_mptcp: case.links };
    let pair = TunnelPair::start(&testbed, firewall, &[]);
    for (number, device) in (1..).zip(DEVICES) {
        // A link that strips the options may stay unused; other links must be used.
        let settled = catch_panic(|| {
            wait_for_transport(&pair.client, device, Transport::Tcp, super::TRANSPORT_TIMEOUT);
            Ok(())
        });
        if !case.links.contains(&number) {
            settled?;
        }
    }
    let segments = count_stripped_segments(&testbed);
    if segments == 0 && !case.links.is_empty() && has_mptcp() {
        return Err("no segment had options of Multipath TCP".to_owned());
    }
    let seconds = if options.quick { 4 } else { 10 };
    let _iperf = IperfServer::start(&testbed, TcpKind::Tcp, PORT)?;
    let load = Load::Tcp(1, options.inner);
    let load = Iperf::start(&testbed, TcpKind::Tcp, (TUNNEL, PORT), load, Direction::Down, seconds)?;
    let mbit = load.finish()?.mbit;
    Ok(CaseResult { segments, mbit, ..CaseResult::of(&pair.client) })
}

impl CaseResult {
    /// The transports and reasons in a client's status.
    fn of(client: &MpvpnProcess) -> Self {
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

    /// Links with an active path.
    fn links_in_use(&self) -> impl Iterator<Item = &Vec<String>> {
        self.transports.iter().filter(|transports| !transports.is_empty())
    }

    /// Number of these links whose status reports Multipath TCP.
    fn count_reported_mptcp(&self, links: &[usize]) -> usize {
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

/// Bar: if the kernel has Multipath TCP, an unstripped link must report it.
fn mptcp_bar() -> Bar {
    if has_mptcp() { Bar::AtLeast(1.0) } else { Bar::Higher }
}

/// Whether the kernel has Multipath TCP. It is enabled by default in new namespaces.
fn has_mptcp() -> bool {
    std::path::Path::new("/proc/sys/net/mptcp/enabled").exists()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_counted_by_their_reported_transport() {
        let texts = |all: &[&str]| all.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        let result = CaseResult {
            transports: vec![texts(&["tcp"]), texts(&["mptcp"])],
            reasons: texts(&["UDP gets no answer", ""]),
            segments: 3,
            mbit: 9.0,
        };
        assert_eq!((result.count_reported_mptcp(&[1]), result.count_reported_mptcp(&[1, 2])), (0, 1));
        assert_eq!(result.links_in_use().count(), 2);
        let case = Case { title: "a case", bar: "mpvpn", links: &[1] };
        assert_eq!(result.line(&case), "| a case | 3 | tcp (UDP gets no answer) | mptcp () | 9.00 |\n");
    }
}
