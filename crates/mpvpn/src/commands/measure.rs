//! `mpvpn measure`: measures the real network between a running client and its server.

use std::{
    fs,
    io::{ErrorKind, IsTerminal},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::Parser;
use mpvpn_config::{BitRate, FlowMode};
use mpvpn_input::values::text;
use mpvpn_measure::{
    DEFAULT_LOAD_SECONDS, Interrupt, LanPage, MeasureError, MeasureEvent, MeasurePlan, links_of, measure,
};
use mpvpn_status::{
    Status, format_bytes, format_duration,
    measure::{MeasureReport, MeasureRequest, MeasuredLink},
};

use super::Command;
use crate::{
    failure::Failure,
    measure::{markdown, pictures::pictures, summary::summary},
    output::{confirm, json_line, print, print_part},
    process_selector::ProcessSelector,
};

const EXAMPLES: &str = "\
Examples:
  mpvpn measure
      latency, TCP with 1 and 8 flows, and UDP at rising rates, over each link alone and over all: less than 5 min for two links
  mpvpn measure --report home.md --json home.json
      the tables with pictures, and all figures
  mpvpn measure --long-only --cut wwan0
      60 s of a download, in which wwan0 is not used from second 20 to 40
  mpvpn measure --long-only --hours 1 --rate 80mbit --report hour.md
  mpvpn measure --link eth1 --seconds 3
  mpvpn measure --from-lan 192.168.1.1:8080
      a speed test for browsers in the LAN, through the whole chain

The server has to answer: `measure = true` in its file, or --measure. What is measured goes through the tunnel to the server's
address there, within the limits of the user. Only these flows are put on chosen links; other traffic stays as it is, and
shares the links with them. Ctrl-C ends it with what was measured so far.";

/// Measure latency, TCP and UDP to the server, over each link alone and over all
#[derive(Debug, Parser)]
#[command(name = "measure", after_help = EXAMPLES)]
pub(crate) struct Measure {
    /// Measure this link; repeatable [default: all links that work and whose tier is not never]
    #[arg(long, value_name = "NAME")]
    link: Vec<String>,
    /// Duration of each TCP load, from 1 to 600 seconds
    #[arg(long, value_name = "SECONDS", default_value_t = DEFAULT_LOAD_SECONDS,
    value_parser = clap::value_parser!(u32).range(1..=600))]
    seconds: u32,
    /// How TCP connections travel [default: as others to this address]
    #[arg(long, value_name = "auto|datagram|stream", value_parser = text::<FlowMode>)]
    lane: Option<FlowMode>,
    /// Also measure a download of 60 s in which this link is not used from second 20 to 40
    #[arg(long, value_name = "LINK")]
    cut: Option<String>,
    /// Also measure a download for so many hours, with the memory of both ends
    #[arg(long, value_name = "N", value_parser = parse_hours)]
    hours: Option<f64>,
    /// Limit of the rate of --hours, in bit/s, as in 80mbit [default: none]
    #[arg(long, value_name = "RATE", value_parser = parse_rate, requires = "hours")]
    rate: Option<BitRate>,
    /// Measure only what --cut and --hours ask for
    #[arg(long)]
    long_only: bool,
    /// Write the tables to this file in Markdown, and pictures beside it
    #[arg(long, value_name = "FILE.md")]
    report: Option<PathBuf>,
    /// Write all figures to this file in JSON
    #[arg(long, value_name = "FILE.json")]
    json: Option<PathBuf>,
    /// Serve a speed test to browsers in the LAN at this address, until Ctrl-C, instead of measuring here
    #[arg(long, value_name = "ADDR:PORT", conflicts_with_all = ["link", "cut", "hours", "report", "json", "lane"])]
    from_lan: Option<SocketAddr>,
    /// Do not ask before metered links are used
    #[arg(long, short)]
    yes: bool,
    #[command(flatten)]
    target: ProcessSelector,
}

impl Command for Measure {
    const SUMMARY: &str = "cannot measure";

    fn run(self) -> Result<ExitCode, Failure> {
        if self.long_only && self.cut.is_none() && self.hours.is_none() {
            let next = "add --cut LINK or --hours N, or leave out --long-only";
            return Err(Failure::usage("--long-only needs --cut or --hours", next));
        }
        let socket = self.target.socket()?;
        let plan = MeasurePlan {
            socket: socket.clone(),
            links: self.link.clone(),
            lane: self.lane,
            load_seconds: self.seconds,
            cut: self.cut.clone(),
            hours: self.hours,
            rate: self.rate,
            only_long: self.long_only,
        };
        let status = mpvpn_api::fetch_status(&socket)?;
        let links = links_of(&status, &plan).map_err(failure)?;
        if !self.agrees(&status, &links, &plan)? {
            return print("nothing was measured\n");
        }
        if let Some(address) = self.from_lan {
            return serve_page(&socket, address);
        }
        // A file that cannot be written is said before minutes of measuring.
        for file in self.report.iter().chain(&self.json) {
            write(file, "")?;
        }
        let interrupt = Interrupt::catch().map_err(caught)?;
        let mut show = |event| {
            // A closed output does not stop the measurement: the files are still written.
            let _ = print_part(&match event {
                MeasureEvent::Step(text) => format!("{text}\n"),
                MeasureEvent::Result(text) => format!("    {text}\n"),
            });
        };
        let report = measure(&plan, &interrupt, &mut show).map_err(failure)?;
        self.write_files(&report)?;
        print(&format!("\n{}{}", markdown::tables(&report), summary(&report)))?;
        Ok(ExitCode::from(u8::from(interrupt.is_set())))
    }
}

impl Measure {
    /// Whether the user agrees to what metered links are used for.
    fn agrees(&self, status: &Status, links: &[MeasuredLink], plan: &MeasurePlan) -> Result<bool, Failure> {
        let metered: Vec<_> = links.iter().filter(|link| link.metered).collect();
        if metered.is_empty() {
            return Ok(true);
        }
        let seconds = plan.full_seconds(links.len() as u32);
        let mut text = String::new();
        for link in metered {
            let paths = status.paths.iter().filter(|path| path.link == link.name);
            text += &use_of(&link.name, paths.map(|path| path.rate_bps).max(), seconds);
        }
        print(&text)?;
        if self.yes {
            return Ok(true);
        }
        if !std::io::stdin().is_terminal() {
            let next = "add --yes if that is fine, or name the links to measure with --link";
            return Err(Failure::usage(text.trim_end(), next));
        }
        confirm("Measure?")
            .map_err(|error| Failure::runtime(error.to_string(), "add --yes, as there is nobody to ask"))
    }

    fn write_files(&self, report: &MeasureReport) -> Result<(), Failure> {
        if let Some(file) = &self.json {
            write(file, &json_line(serde_json::to_string_pretty(report))?)?;
        }
        let Some(file) = &self.report else { return Ok(()) };
        let stem =
            file.file_stem().map_or_else(|| "report".to_owned(), |stem| stem.to_string_lossy().into_owned());
        let mut names = Vec::new();
        for picture in pictures(report) {
            let name = format!("{stem}-{}.svg", picture.name);
            write(&file.with_file_name(&name), &picture.svg)?;
            names.push((name, picture.title));
        }
        write(file, &markdown::page(report, &names))
    }
}

/// Serves the page until a signal comes.
fn serve_page(socket: &Path, address: SocketAddr) -> Result<ExitCode, Failure> {
    // Asked once: the traffic of browsers takes the ways of all other traffic.
    let state = mpvpn_api::measure(socket, &MeasureRequest { end: true, ..MeasureRequest::default() })?;
    let interrupt = Interrupt::catch().map_err(caught)?;
    let page = LanPage::bind(address, &state.device, &state.responders, &interrupt).map_err(failure)?;
    let at = page.local_addr().map_err(caught)?;
    print(&format!("open http://{at}/ in a browser in the LAN; Ctrl-C ends it\n"))?;
    page.serve();
    Ok(ExitCode::SUCCESS)
}

fn caught(error: std::io::Error) -> Failure {
    Failure::runtime(error.to_string(), "this is a bug: report it to the project")
}

/// The use of a metered link in a line; `known`: its last rate (bit/s).
fn use_of(link: &str, known: Option<u64>, seconds: f64) -> String {
    let time = format_duration(seconds);
    match known.filter(|rate| *rate > 0) {
        Some(rate) => {
            let bytes = format_bytes((rate as f64 / 8.0 * seconds) as u64);
            format!("{link} is metered: it carries what it can for {time}, some {bytes} at its last rate\n")
        }
        None => {
            let bytes = format_bytes((1e7 / 8.0 * seconds) as u64);
            format!("{link} is metered: it carries what it can for {time}, some {bytes} for each 10 Mbit/s\n")
        }
    }
}

fn write(file: &Path, text: &str) -> Result<(), Failure> {
    fs::write(file, text).map_err(|error| {
        let next = "give a file in a folder that you may write to";
        Failure::runtime(format!("cannot write {}: {error}", file.display()), next)
    })
}

fn failure(error: MeasureError) -> Failure {
    match &error {
        MeasureError::Client(cause) => Failure::of(cause, ""),
        MeasureError::NoResponder { source, .. } => {
            let next = match source.kind() {
                ErrorKind::PermissionDenied => "run it as root",
                _ => {
                    "on the server, start mpvpn with --measure, or set `measure = true` in its file and run `mpvpn config \
                     reload`; a rule [[access]] there must allow port 9494"
                }
            };
            Failure::runtime(error.to_string(), next)
        }
        MeasureError::Listen { .. } => {
            Failure::runtime(error.to_string(), "give an address of this machine, and a port that is free")
        }
        MeasureError::NoLinks(_) => Failure::usage(error.to_string(), "see `mpvpn link show`"),
    }
}

fn parse_rate(text: &str) -> Result<BitRate, String> {
    text.parse().map_err(|error| format!("{error}"))
}

fn parse_hours(text: &str) -> Result<f64, String> {
    let hours = text.parse::<f64>().ok().filter(|hours| (0.01..=1000.0).contains(hours));
    hours.ok_or_else(|| format!("`{text}` is not a number of hours from 0.01 to 1000"))
}

#[cfg(test)]
mod tests {
    use mpvpn_input::role::Role;

    use super::*;

    fn parse(words: &str) -> Measure {
        Measure::try_parse_from(format!("measure {words}").split_whitespace()).unwrap()
    }

    fn links(metered: bool) -> Vec<MeasuredLink> {
        vec![MeasuredLink { name: "wwan0".into(), tier: "backup".into(), metered }]
    }

    fn plan(measure: &Measure) -> MeasurePlan {
        MeasurePlan {
            socket: "x".into(),
            links: Vec::new(),
            lane: None,
            load_seconds: measure.seconds,
            cut: measure.cut.clone(),
            hours: measure.hours,
            rate: measure.rate,
            only_long: measure.long_only,
        }
    }

    #[test]
    fn metered_links_are_used_only_with_consent() {
        let status = Status::new(Role::Client);
        let measure = parse("--seconds 2");
        assert_eq!(measure.agrees(&status, &links(false), &plan(&measure)), Ok(true));
        if !std::io::stdin().is_terminal() {
            let refused = measure.agrees(&status, &links(true), &plan(&measure)).unwrap_err();
            assert!(refused.is_usage() && refused.text().contains("wwan0 is metered"), "{}", refused.text());
        }
        let measure = parse("--seconds 2 --yes");
        assert_eq!(measure.agrees(&status, &links(true), &plan(&measure)), Ok(true));
    }

    #[test]
    fn what_a_metered_link_costs_is_said_with_its_rate_if_it_is_known() {
        assert_eq!(
            use_of("wwan0", None, 80.0),
            "wwan0 is metered: it carries what it can for 1 min 20 s, some 95.4 MiB for each 10 Mbit/s\n"
        );
        let text = use_of("wwan0", Some(20_000_000), 80.0);
        assert!(text.contains("some 190.7 MiB at its last rate"), "{text}");
    }

    #[test]
    fn numbers_are_bounded() {
        for words in ["--seconds 0", "--seconds 601", "--hours 0", "--hours x --rate 1mbit", "--rate 1mbit"] {
            let words = format!("measure {words}");
            assert!(Measure::try_parse_from(words.split_whitespace()).is_err(), "{words}");
        }
        assert_eq!(parse("--hours 0.5 --rate 80mbit").rate.map(|rate| rate.bps()), Some(80_000_000));
        let failure = parse("--long-only").run().unwrap_err();
        assert!(failure.text().contains("--long-only needs --cut or --hours"), "{}", failure.text());
    }
}
