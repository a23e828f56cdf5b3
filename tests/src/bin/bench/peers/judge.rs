//! What the samples say: figures beside their bars, a chapter of the report, and plots.

use std::fmt::Write;

use mpvpn_tests::{quiet, system::System, wall::Wall};
use serde_json::{Value, json};

use super::{
    Contest, Scope, Setting, Versions,
    notebook::{MEASURES, Measure, Notebook, known},
};
use crate::{
    figure::{Bar, Figure},
    options::Options,
    plot::{Panel, draw, number},
    report::Outcome,
};

/// mpvpn with its defaults.
pub(super) const PEERS: Contest = Contest {
    rig: "peers",
    title: "Peers",
    ours: &[System::Mpvpn],
    rival: System::WireguardGo,
    bars: &BARS,
    scope: Scope::Everything,
    wall: Wall::NONE,
};
/// mpvpn with TCP on streams.
pub(super) const STREAM: Contest = Contest {
    rig: "stream",
    title: "Streams beside another VPN",
    ours: &[System::MpvpnStream],
    rival: System::WireguardGo,
    bars: &STREAM_BARS,
    scope: Scope::Tcp,
    wall: Wall::NONE,
};
/// mpvpn inside TCP, with TCP as packets and on streams.
pub(super) const INSIDE_TCP: Contest = Contest {
    rig: "mptcp",
    title: "Inside TCP beside another VPN over TCP",
    ours: &[System::MpvpnTcp, System::MpvpnTcpStream],
    rival: System::OpenvpnTcp,
    bars: &INSIDE_TCP_BARS,
    scope: Scope::Tcp,
    wall: Wall { no_udp: &[1], ..Wall::NONE },
};

/// What is asked of mpvpn: where, what, and how much.
const BARS: [(Setting, &str, Asked); 28] = [
    (Setting::Veth, "tcp1_up", Asked::TimesRival(2.5)),
    (Setting::Veth, "tcp1_down", Asked::TimesRival(2.5)),
    (Setting::Veth, "tcp1_up_cpu_client", Asked::AtMost(1.5)),
    (Setting::Veth, "tcp1_up_cpu_server", Asked::AtMost(1.5)),
    (Setting::Veth, "tcp1_down_cpu_client", Asked::AtMost(1.5)),
    (Setting::Veth, "tcp1_down_cpu_server", Asked::AtMost(1.5)),
    (Setting::Plain, "tcp1_up", Asked::TimesRival(1.5)),
    (Setting::Plain, "tcp1_down", Asked::TimesRival(1.5)),
    (Setting::Gigabit, "tcp1_up", Asked::Told),
    (Setting::Gigabit, "tcp1_down", Asked::Told),
    (Setting::Veth, "tcp8_up", Asked::TimesRival(2.5)),
    (Setting::Veth, "tcp8_down", Asked::TimesRival(2.5)),
    (Setting::Veth, "udp1200", Asked::TimesRival(2.0)),
    (Setting::Veth, "udp1200", Asked::AtLeast(120.0)),
    (Setting::Veth, "udp512", Asked::Told),
    (Setting::Veth, "udp64", Asked::Told),
    (Setting::Veth, "idle_median", Asked::AtMost(0.2)),
    (Setting::Veth, "idle_p99", Asked::AtMost(0.6)),
    (Setting::Slow, "load_up_median", Asked::AtMost(5.0)),
    (Setting::Slow, "load_up_p99", Asked::AtMost(15.0)),
    (Setting::Slow, "load_down_median", Asked::AtMost(5.0)),
    (Setting::Slow, "load_down_p99", Asked::AtMost(15.0)),
    (Setting::Slow, "load_up_rate", Asked::Told),
    (Setting::Slow, "load_down_rate", Asked::Told),
    (Setting::Veth, "rss_client", Asked::AtMost(64.0)),
    (Setting::Veth, "rss_server", Asked::AtMost(64.0)),
    (Setting::Veth, "rss_stalled_client", Asked::AtMost(64.0)),
    (Setting::Veth, "rss_stalled_server", Asked::AtMost(64.0)),
];

/// What is asked of it with TCP on streams.
const STREAM_BARS: [(Setting, &str, Asked); 12] = [
    (Setting::Veth, "tcp1_up", Asked::TimesRival(2.5)),
    (Setting::Veth, "tcp1_down", Asked::TimesRival(2.5)),
    (Setting::Veth, "tcp8_up", Asked::TimesRival(2.5)),
    (Setting::Veth, "tcp8_down", Asked::TimesRival(2.5)),
    (Setting::Veth, "tcp1_up_cpu_client", Asked::AtMost(1.2)),
    (Setting::Veth, "tcp1_up_cpu_server", Asked::AtMost(1.2)),
    (Setting::Veth, "tcp1_down_cpu_client", Asked::AtMost(1.2)),
    (Setting::Veth, "tcp1_down_cpu_server", Asked::AtMost(1.2)),
    (Setting::Veth, "tcp8_up_cpu_client", Asked::AtMost(1.2)),
    (Setting::Veth, "tcp8_up_cpu_server", Asked::AtMost(1.2)),
    (Setting::Veth, "tcp8_down_cpu_client", Asked::AtMost(1.2)),
    (Setting::Veth, "tcp8_down_cpu_server", Asked::AtMost(1.2)),
];

/// What is asked of it inside TCP.
const INSIDE_TCP_BARS: [(Setting, &str, Asked); 8] = [
    (Setting::Veth, "tcp1_up", Asked::TimesRival(1.5)),
    (Setting::Veth, "tcp1_down", Asked::TimesRival(1.5)),
    (Setting::Veth, "tcp1_up", Asked::Told),
    (Setting::Veth, "tcp1_down", Asked::Told),
    (Setting::Veth, "tcp1_up_cpu_client", Asked::Told),
    (Setting::Veth, "tcp1_up_cpu_server", Asked::Told),
    (Setting::Veth, "tcp1_down_cpu_client", Asked::Told),
    (Setting::Veth, "tcp1_down_cpu_server", Asked::Told),
];

#[derive(Clone, Copy)]
pub(super) enum Asked {
    AtLeast(f64),
    AtMost(f64),
    /// So many times what the rival does in the same round.
    TimesRival(f64),
    Told,
}

/// End of the file name, title, and what is drawn of which setting.
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
    contest: &Contest,
    versions: &Versions,
    notes: &Notebook,
) -> Outcome {
    let figures = figures(options, contest, notes);
    let chapter = chapter(options, contest, versions, notes);
    let plots = plots(options, contest, notes);
    let versions: Vec<Value> = versions
        .iter()
        .map(|(system, version)| {
            json!({ "system": system.name(), "version": version.as_ref().ok(), "missing": version.as_ref().err(),
                    "setup": system.settings() })
        })
        .collect();
    let mut raw = notes.json();
    raw["systems"] = Value::Array(versions);
    raw["rounds"] = json!(options.rounds);
    raw["seconds"] = json!(options.seconds);
    Outcome { figures, chapter, raw, plots }
}

/// Only what was asked for is judged; what was and has no value has missed its bar.
fn figures(options: &Options, contest: &Contest, notes: &Notebook) -> Vec<Figure> {
    let ours = contest.ours.iter().filter(|system| options.systems.contains(system));
    let asked = || contest.bars.iter().filter(|(setting, ..)| options.settings.contains(setting));
    let judged = |ours: System| {
        asked().filter_map(move |(setting, key, asked)| {
            judged(contest, ours, *setting, known(key), *asked, options, notes)
        })
    };
    ours.flat_map(|system| judged(*system)).collect()
}

fn judged(
    contest: &Contest,
    ours: System,
    setting: Setting,
    measure: &Measure,
    asked: Asked,
    options: &Options,
    notes: &Notebook,
) -> Option<Figure> {
    let (rig, rival) = (contest.rig, contest.rival);
    let note = if notes.is_disturbed(setting, ours, measure.key) { "*" } else { "" };
    let who = if contest.ours.len() > 1 { format!("{}, ", ours.name()) } else { String::new() };
    let name = format!("{who}{}, {}", setting.name(), measure.title);
    let absolute = |bar| {
        let value = notes.median(setting, ours, measure.key).unwrap_or(f64::NAN);
        Some(Figure { rig, name: name.clone(), note: note.to_owned(), value, unit: measure.unit, bar })
    };
    match asked {
        Asked::AtLeast(bar) => absolute(Bar::AtLeast(bar)),
        Asked::AtMost(bar) => absolute(Bar::AtMost(bar)),
        Asked::Told => absolute(measure.direction()),
        Asked::TimesRival(bar) => {
            let value = notes.ratio(setting, ours, rival, measure.key);
            // Without figures of the rival there is nothing to judge; missing figures of ours beside them are a miss.
            let judged =
                options.systems.contains(&rival) && notes.median(setting, rival, measure.key).is_some();
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

fn chapter(options: &Options, contest: &Contest, versions: &Versions, notes: &Notebook) -> String {
    let mut text = format!(
        "\n## {}\n\n{}\n\n| system | version | setup |\n|---|---|---|\n",
        contest.title,
        method(options, notes)
    );
    for (system, version) in versions {
        let version = version.clone().unwrap_or_else(|why| format!("not installed: {why}"));
        let _ = writeln!(text, "| {} | {} | {} |", system.name(), one_line(&version), system.settings());
    }
    for &setting in &options.settings {
        text += &section(contest, setting, versions, notes);
    }
    if !notes.failures().is_empty() {
        text += "\n### What did not work\n\n";
    }
    for (turn, why) in notes.failures() {
        let (setting, system) = (turn.setting.name(), turn.system.name());
        let _ = writeln!(text, "- round {}, {setting}, {system}: {}", turn.round, one_line(why));
    }
    text
}

fn method(options: &Options, notes: &Notebook) -> String {
    let (samples, repeated, disturbed) = notes.counts();
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
        quiet::LIMIT
    )
}

fn section(contest: &Contest, setting: Setting, versions: &Versions, notes: &Notebook) -> String {
    let here: Vec<System> =
        versions.iter().filter(|(_, version)| version.is_ok()).map(|(system, _)| *system).collect();
    let mut text = format!("\n### {}: {}\n\n| |", setting.name(), setting.about());
    here.iter().for_each(|system| text += &format!(" {} |", system.name()));
    let (ours, rival) = (contest.ours[0], contest.rival);
    text += &format!(" {} ÷ {} |\n|---|", ours.name(), rival.name());
    text += &"---:|".repeat(here.len() + 1);
    text.push('\n');
    for measure in &MEASURES {
        let values: Vec<_> = here.iter().map(|system| notes.median(setting, *system, measure.key)).collect();
        if values.iter().all(Option::is_none) {
            continue;
        }
        let _ = write!(text, "| {}, {} |", measure.title, measure.unit);
        for (system, value) in here.iter().zip(values) {
            let bound = if notes.is_sender_bound(setting, *system, measure.key) { ">" } else { "" };
            let mark = if notes.is_disturbed(setting, *system, measure.key) { "*" } else { "" };
            let _ = write!(text, " {bound}{}{mark} |", value.map_or("–".to_owned(), number));
        }
        let ratio = notes.ratio(setting, ours, rival, measure.key);
        let _ = writeln!(text, " {} |", ratio.map_or(String::new(), number));
    }
    text
}

fn plots(options: &Options, contest: &Contest, notes: &Notebook) -> Vec<(String, String)> {
    let plot = |(file, title, measures): &Plot| {
        let panels: Vec<Panel> = measures
            .iter()
            .filter_map(|(setting, key)| panel(*setting, known(key), options, notes))
            .collect();
        (!panels.is_empty()).then(|| (format!("{}-{file}", contest.rig), draw(title, &panels)))
    };
    PLOTS.iter().filter_map(plot).collect()
}

fn panel(setting: Setting, measure: &Measure, options: &Options, notes: &Notebook) -> Option<Panel> {
    let bar = |system: &System| Some((system.name(), notes.median(setting, *system, measure.key)?));
    let bars: Vec<_> = options.systems.iter().filter_map(bar).collect();
    let title = format!("{}: {}", setting.name(), measure.title);
    (!bars.is_empty()).then_some(Panel { title, unit: measure.unit, bars })
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|")
}
