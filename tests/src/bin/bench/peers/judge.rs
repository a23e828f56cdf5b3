//! Turns samples into figures with bars, a chapter of the report, and plots.

use std::fmt::Write;

use mpvpn_tests::{disturbance, firewall::Firewall, system::System};
use serde_json::{Value, json};

use super::{
    PeerComparison, Scope, Setting, Versions,
    samples::{MEASURES, Measure, SampleLog, measure_of},
};
use crate::{
    figure::{Bar, Figure},
    options::Options,
    plot::{Panel, draw, number},
    report::Outcome,
};

/// mpvpn with its defaults.
pub(super) const PEERS: PeerComparison = PeerComparison {
    rig: "peers",
    title: "Peers",
    ours: &[System::Mpvpn],
    rival: System::WireguardGo,
    bars: &BARS,
    scope: Scope::Everything,
    firewall: Firewall::OPEN,
};
/// mpvpn with TCP on streams.
pub(super) const STREAM: PeerComparison = PeerComparison {
    rig: "stream",
    title: "Streams beside another VPN",
    ours: &[System::MpvpnStream],
    rival: System::WireguardGo,
    bars: &STREAM_BARS,
    scope: Scope::Tcp,
    firewall: Firewall::OPEN,
};
/// mpvpn inside TCP, with TCP as packets and on streams.
pub(super) const INSIDE_TCP: PeerComparison = PeerComparison {
    rig: "mptcp",
    title: "Inside TCP beside another VPN over TCP",
    ours: &[System::MpvpnTcp, System::MpvpnTcpStream],
    rival: System::OpenvpnTcp,
    bars: &INSIDE_TCP_BARS,
    scope: Scope::Tcp,
    firewall: Firewall { no_udp: &[1], ..Firewall::OPEN },
};

/// Bars of mpvpn: setting, measure and requirement.
const BARS: [(Setting, &str, Requirement); 28] = [
    (Setting::Veth, "tcp1_up", Requirement::TimesRival(2.5)),
    (Setting::Veth, "tcp1_down", Requirement::TimesRival(2.5)),
    (Setting::Veth, "tcp1_up_cpu_client", Requirement::AtMost(1.5)),
    (Setting::Veth, "tcp1_up_cpu_server", Requirement::AtMost(1.5)),
    (Setting::Veth, "tcp1_down_cpu_client", Requirement::AtMost(1.5)),
    (Setting::Veth, "tcp1_down_cpu_server", Requirement::AtMost(1.5)),
    (Setting::Plain, "tcp1_up", Requirement::TimesRival(1.5)),
    (Setting::Plain, "tcp1_down", Requirement::TimesRival(1.5)),
    (Setting::Gigabit, "tcp1_up", Requirement::ReportOnly),
    (Setting::Gigabit, "tcp1_down", Requirement::ReportOnly),
    (Setting::Veth, "tcp8_up", Requirement::TimesRival(2.5)),
    (Setting::Veth, "tcp8_down", Requirement::TimesRival(2.5)),
    (Setting::Veth, "udp1200", Requirement::TimesRival(2.0)),
    (Setting::Veth, "udp1200", Requirement::AtLeast(120.0)),
    (Setting::Veth, "udp512", Requirement::ReportOnly),
    (Setting::Veth, "udp64", Requirement::ReportOnly),
    (Setting::Veth, "idle_median", Requirement::AtMost(0.2)),
    (Setting::Veth, "idle_p99", Requirement::AtMost(0.6)),
    (Setting::Slow, "load_up_median", Requirement::AtMost(5.0)),
    (Setting::Slow, "load_up_p99", Requirement::AtMost(15.0)),
    (Setting::Slow, "load_down_median", Requirement::AtMost(5.0)),
    (Setting::Slow, "load_down_p99", Requirement::AtMost(15.0)),
    (Setting::Slow, "load_up_rate", Requirement::ReportOnly),
    (Setting::Slow, "load_down_rate", Requirement::ReportOnly),
    (Setting::Veth, "rss_client", Requirement::AtMost(64.0)),
    (Setting::Veth, "rss_server", Requirement::AtMost(64.0)),
    (Setting::Veth, "rss_stalled_client", Requirement::AtMost(64.0)),
    (Setting::Veth, "rss_stalled_server", Requirement::AtMost(64.0)),
];

/// Bars of mpvpn with TCP on streams.
const STREAM_BARS: [(Setting, &str, Requirement); 12] = [
    (Setting::Veth, "tcp1_up", Requirement::TimesRival(2.5)),
    (Setting::Veth, "tcp1_down", Requirement::TimesRival(2.5)),
    (Setting::Veth, "tcp8_up", Requirement::TimesRival(2.5)),
    (Setting::Veth, "tcp8_down", Requirement::TimesRival(2.5)),
    (Setting::Veth, "tcp1_up_cpu_client", Requirement::AtMost(1.2)),
    (Setting::Veth, "tcp1_up_cpu_server", Requirement::AtMost(1.2)),
    (Setting::Veth, "tcp1_down_cpu_client", Requirement::AtMost(1.2)),
    (Setting::Veth, "tcp1_down_cpu_server", Requirement::AtMost(1.2)),
    (Setting::Veth, "tcp8_up_cpu_client", Requirement::AtMost(1.2)),
    (Setting::Veth, "tcp8_up_cpu_server", Requirement::AtMost(1.2)),
    (Setting::Veth, "tcp8_down_cpu_client", Requirement::AtMost(1.2)),
    (Setting::Veth, "tcp8_down_cpu_server", Requirement::AtMost(1.2)),
];

/// Bars of mpvpn inside TCP.
const INSIDE_TCP_BARS: [(Setting, &str, Requirement); 8] = [
    (Setting::Veth, "tcp1_up", Requirement::TimesRival(1.5)),
    (Setting::Veth, "tcp1_down", Requirement::TimesRival(1.5)),
    (Setting::Veth, "tcp1_up", Requirement::ReportOnly),
    (Setting::Veth, "tcp1_down", Requirement::ReportOnly),
    (Setting::Veth, "tcp1_up_cpu_client", Requirement::ReportOnly),
    (Setting::Veth, "tcp1_up_cpu_server", Requirement::ReportOnly),
    (Setting::Veth, "tcp1_down_cpu_client", Requirement::ReportOnly),
    (Setting::Veth, "tcp1_down_cpu_server", Requirement::ReportOnly),
];

#[derive(Clone, Copy)]
pub(super) enum Requirement {
    AtLeast(f64),
    AtMost(f64),
    /// Minimum ratio to the rival's value in the same round.
    TimesRival(f64),
    ReportOnly,
}

/// End of the file name, title, and the drawn measures with their settings.
type Plot = (&'static str, &'static str, &'static [(Setting, &'static str)]);

const PLOTS: [Plot; 5] = [
    (
        "tcp.svg",
        "TCP goodput",
        &[
            (Setting::Veth, "tcp1_up"),
            (Setting::Veth, "tcp1_down"),
            (Setting::Veth, "tcp8_up"),
            (Setting::Veth, "tcp8_down"),
            (Setting::Plain, "tcp1_up"),
            (Setting::Plain, "tcp1_down"),
            (Setting::Gigabit, "tcp1_up"),
            (Setting::Gigabit, "tcp1_down"),
        ],
    ),
    (
        "udp.svg",
        "UDP packets at less than 1 % loss",
        &[
            (Setting::Veth, "udp64"),
            (Setting::Veth, "udp512"),
            (Setting::Veth, "udp1200"),
            (Setting::Plain, "udp1200"),
            (Setting::Gigabit, "udp1200"),
        ],
    ),
    (
        "cpu.svg",
        "Processor time, one TCP flow",
        &[
            (Setting::Veth, "tcp1_up_cpu_client"),
            (Setting::Veth, "tcp1_up_cpu_server"),
            (Setting::Veth, "tcp1_down_cpu_client"),
            (Setting::Veth, "tcp1_down_cpu_server"),
            (Setting::Plain, "tcp1_up_cpu_client"),
            (Setting::Plain, "tcp1_up_cpu_server"),
        ],
    ),
    (
        "latency.svg",
        "Round trips beyond those of the idle link",
        &[
            (Setting::Veth, "idle_median"),
            (Setting::Veth, "idle_p99"),
            (Setting::Slow, "load_up_median"),
            (Setting::Slow, "load_up_p99"),
            (Setting::Slow, "load_down_median"),
            (Setting::Slow, "load_down_p99"),
        ],
    ),
    (
        "memory.svg",
        "Peak resident memory",
        &[
            (Setting::Veth, "rss_client"),
            (Setting::Veth, "rss_server"),
            (Setting::Veth, "rss_stalled_client"),
            (Setting::Veth, "rss_stalled_server"),
        ],
    ),
];

pub(super) fn outcome(
    options: &Options,
    comparison: &PeerComparison,
    versions: &Versions,
    log: &SampleLog,
) -> Outcome {
    let figures = figures(options, comparison, log);
    let chapter = chapter(options, comparison, versions, log);
    let plots = plots(options, comparison, log);
    let versions: Vec<Value> = versions
        .iter()
        .map(|(system, version)| {
            json!({ "system": system.name(), "version": version.as_ref().ok(), "missing": version.as_ref().err(),
                    "setup": system.settings() })
        })
        .collect();
    let mut raw = log.json();
    raw["systems"] = Value::Array(versions);
    raw["rounds"] = json!(options.rounds);
    raw["seconds"] = json!(options.seconds);
    Outcome { figures, chapter, raw, plots }
}

/// Figures of the selected systems and settings; a missing value misses its bar.
fn figures(options: &Options, comparison: &PeerComparison, log: &SampleLog) -> Vec<Figure> {
    let ours = comparison.ours.iter().filter(|system| options.systems.contains(system));
    let asked = || comparison.bars.iter().filter(|(setting, ..)| options.settings.contains(setting));
    let judged = |ours: System| {
        asked().filter_map(move |(setting, key, asked)| {
            judged(comparison, ours, *setting, measure_of(key), *asked, options, log)
        })
    };
    ours.flat_map(|system| judged(*system)).collect()
}

fn judged(
    comparison: &PeerComparison,
    ours: System,
    setting: Setting,
    measure: &Measure,
    asked: Requirement,
    options: &Options,
    log: &SampleLog,
) -> Option<Figure> {
    let (rig, rival) = (comparison.rig, comparison.rival);
    let note = if log.is_disturbed(setting, ours, measure.key) { "*" } else { "" };
    let who = if comparison.ours.len() > 1 { format!("{}, ", ours.name()) } else { String::new() };
    let name = format!("{who}{}, {}", setting.name(), measure.title);
    let absolute = |bar| {
        let value = log.median(setting, ours, measure.key).unwrap_or(f64::NAN);
        Some(Figure { rig, name: name.clone(), note: note.to_owned(), value, unit: measure.unit, bar })
    };
    match asked {
        Requirement::AtLeast(bar) => absolute(Bar::AtLeast(bar)),
        Requirement::AtMost(bar) => absolute(Bar::AtMost(bar)),
        Requirement::ReportOnly => absolute(measure.direction()),
        Requirement::TimesRival(bar) => {
            let value = log.ratio(setting, ours, rival, measure.key);
            // Without values of the rival there is no bar; with them, a missing value of mpvpn is a miss.
            let judged =
                options.systems.contains(&rival) && log.median(setting, rival, measure.key).is_some();
            if !judged && value.is_none() {
                return None;
            }
            let bar = if judged { Bar::AtLeast(bar) } else { Bar::Higher };
            let name = format!("{name}, ÷ {}", rival.name());
            let value = value.unwrap_or(f64::NAN);
            Some(Figure { rig, name, note: note.to_owned(), value, unit: "×", bar })
        }
    }
}

fn chapter(options: &Options, comparison: &PeerComparison, versions: &Versions, log: &SampleLog) -> String {
    let mut text = format!(
        "\n## {}\n\n{}\n\n| system | version | setup |\n|---|---|---|\n",
        comparison.title,
        method(options, log)
    );
    for (system, version) in versions {
        let version = version.clone().unwrap_or_else(|why| format!("not installed: {why}"));
        let _ = writeln!(text, "| {} | {} | {} |", system.name(), one_line(&version), system.settings());
    }
    for &setting in &options.settings {
        text += &section(comparison, setting, versions, log);
    }
    if !log.failures().is_empty() {
        text += "\n### What did not work\n\n";
    }
    for (run_key, why) in log.failures() {
        let (setting, system) = (run_key.setting.name(), run_key.system.name());
        let _ = writeln!(text, "- round {}, {setting}, {system}: {}", run_key.round, one_line(why));
    }
    text
}

fn method(options: &Options, log: &SampleLog) -> String {
    let (samples, repeated, disturbed) = log.counts();
    format!(
        "Client and server of each system run on this one machine, in network namespaces, one system at a time; in \
         each of {} rounds all have their turn, each round beginning with another. Figures are medians over the \
         rounds (pings, memory, datagrams of 64 and 512 bytes, raw and tun-copy: the first 3), ratios are medians of \
         the ratios within each round. Traffic is iperf3, {} s a run, goodput at the receiver; up is from the client \
         to the server. UDP rates are searched: the highest rate received among probes with less than 1 % loss, in \
         steps of 7 %; where iperf3 itself could not send more, the rate is marked with >. The processor time of an \
         end is that of its process; without IRQ accounting the kernel also charges it for softirqs that run in its \
         context, and nobody is charged for kernel threads. Memory is VmHWM. Added round trips are those through the \
         tunnel less the median of pings past it. A run is tried {} times at most, while other processes or the host \
         took more than {} of a core meanwhile (softirqs count as ours); of {samples} values {repeated} were \
         repeated and {disturbed} stayed disturbed: what they are part of is marked with *.",
        options.rounds,
        options.seconds,
        options.tries,
        disturbance::MAX_DISTURBANCE_CORES
    )
}

fn section(comparison: &PeerComparison, setting: Setting, versions: &Versions, log: &SampleLog) -> String {
    let available: Vec<System> =
        versions.iter().filter(|(_, version)| version.is_ok()).map(|(system, _)| *system).collect();
    let mut text = format!("\n### {}: {}\n\n| |", setting.name(), setting.about());
    available.iter().for_each(|system| text += &format!(" {} |", system.name()));
    let (ours, rival) = (comparison.ours[0], comparison.rival);
    text += &format!(" {} ÷ {} |\n|---|", ours.name(), rival.name());
    text += &"---:|".repeat(available.len() + 1);
    text.push('\n');
    for measure in &MEASURES {
        let values: Vec<_> =
            available.iter().map(|system| log.median(setting, *system, measure.key)).collect();
        if values.iter().all(Option::is_none) {
            continue;
        }
        let _ = write!(text, "| {}, {} |", measure.title, measure.unit);
        for (system, value) in available.iter().zip(values) {
            let bound = if log.is_sender_bound(setting, *system, measure.key) { ">" } else { "" };
            let mark = if log.is_disturbed(setting, *system, measure.key) { "*" } else { "" };
            let _ = write!(text, " {bound}{}{mark} |", value.map_or("–".to_owned(), number));
        }
        let ratio = log.ratio(setting, ours, rival, measure.key);
        let _ = writeln!(text, " {} |", ratio.map_or(String::new(), number));
    }
    text
}

fn plots(options: &Options, comparison: &PeerComparison, log: &SampleLog) -> Vec<(String, String)> {
    let plot = |(file, title, measures): &Plot| {
        let panels: Vec<Panel> = measures
            .iter()
            .filter_map(|(setting, key)| panel(*setting, measure_of(key), options, log))
            .collect();
        (!panels.is_empty()).then(|| (format!("{}-{file}", comparison.rig), draw(title, &panels)))
    };
    PLOTS.iter().filter_map(plot).collect()
}

fn panel(setting: Setting, measure: &Measure, options: &Options, log: &SampleLog) -> Option<Panel> {
    let bar = |system: &System| Some((system.name(), log.median(setting, *system, measure.key)?));
    let bars: Vec<_> = options.systems.iter().filter_map(bar).collect();
    let title = format!("{}: {}", setting.name(), measure.title);
    (!bars.is_empty()).then_some(Panel { title, unit: measure.unit, bars })
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|")
}
