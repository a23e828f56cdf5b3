//! `mpvpn status`: prints the status of a running server or client.

use std::{
    io::IsTerminal,
    path::Path,
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use clap::Parser;
use mpvpn_status::{
    Sections, Status as ProcessStatus,
    rates::{Counters, Rates},
};

use super::Command;
use crate::{
    failure::Failure,
    output::{json_line, parse_seconds, print, print_part, width},
    process_selector::{ProcessSelector, help_for_any_role},
};

const EXAMPLES: &str = "\
Examples:
  mpvpn status
      exit code 0 if the tunnel works, 3 if it does not, 1 if no process answers; with --json 0 whenever
      one answers
  mpvpn status --paths --details
      each path, the order of packets, and the rights that the process keeps
  mpvpn status --flows
      each connection inside the tunnel, and whether it travels as a stream or as packets
  mpvpn status --wait 30
      waits until the tunnel is up, for 30 s at most; exit code 1 if it is not up by then
  mpvpn status --watch
      again and again until Ctrl-C, each second; --watch 10: every 10 s
  mpvpn status --name mpvpn0 --json
  curl --unix-socket /run/mpvpn/client-mpvpn0.sock http://localhost/v1/status";

/// Show the status of a running server or client
#[derive(Debug, Parser)]
#[command(name = "status", after_help = EXAMPLES, mut_arg("name", help_for_any_role))]
pub(crate) struct Status {
    /// List the flows inside the tunnel: how each travels, and why
    #[arg(long)]
    pub(crate) flows: bool,
    /// Show each path as well: a class of traffic has one over each link, or several
    #[arg(long)]
    pub(crate) paths: bool,
    /// Show the rights that the process keeps, and the order of packets, as well
    #[arg(long)]
    pub(crate) details: bool,
    /// Wait until the process runs and its tunnel is up, for so many seconds at most; exit code 1 if it is
    /// not up by then
    #[arg(long, value_name = "SECONDS")]
    pub(crate) wait: Option<u32>,
    /// Print it again and again until Ctrl-C, every so many seconds, 1 unless you say otherwise; from 0.2 to
    /// 3600
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "1", value_parser = parse_interval)]
    pub(crate) watch: Option<Duration>,
    /// Print JSON, the answer of the local API; with --watch one line each time
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    target: ProcessSelector,
}

impl Command for Status {
    const SUMMARY: &str = "cannot show the status";

    fn run(self) -> Result<ExitCode, Failure> {
        if let Some(seconds) = self.wait {
            self.wait_until_up(Duration::from_secs(seconds.into()))?;
        }
        let socket = self.target.socket()?;
        // A process that cannot be asked at all is an error; later it may restart.
        let mut rates = Rates::new(1);
        let (mut text, works) = self.text(&socket, &mut rates)?;
        let Some(interval) = self.watch else {
            print(&text)?;
            return Ok(if works { ExitCode::SUCCESS } else { NOT_WORKING.into() });
        };
        let clear = if std::io::stdout().is_terminal() && !self.json { CLEAR_SCREEN } else { "" };
        loop {
            if print_part(&format!("{clear}{text}"))?.is_break() {
                return Ok(ExitCode::SUCCESS);
            }
            thread::sleep(interval);
            let asked = self.text(&socket, &mut rates).map(|(text, _)| text);
            text = asked.unwrap_or_else(|failure| failure.about(Self::SUMMARY).text() + "\n");
            if clear.is_empty() && !self.json {
                text.insert(0, '\n');
            }
        }
    }
}

/// The exit code where a process answers and its tunnel does not work, as of `systemctl status` for a service
/// that does not run.
const NOT_WORKING: u8 = 3;

/// Time over which the rates of a first status are measured. Longer: the answer comes late; shorter: a few
/// packets are a rate. As on the dashboard. Chosen.
const RATE_INTERVAL: Duration = Duration::from_millis(500);

/// Clears the terminal and goes to its first column and line (ECMA-48: ED, CUP).
const CLEAR_SCREEN: &str = "\x1b[2J\x1b[H";

/// How often the state is looked at. More often: time of the process; less often: it is noticed later.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

fn parse_interval(text: &str) -> Result<Duration, String> {
    parse_seconds(text, 0.2..=3600.0)
}

impl Status {
    /// The text to print, and whether the tunnel works as far as the text says.
    fn text(&self, socket: &Path, rates: &mut Rates) -> Result<(String, bool), Failure> {
        if self.flows {
            let flows = mpvpn_api::fetch_flows(socket)?;
            let text = match self.json {
                true => json_line(serde_json::to_string(&flows))?,
                false => mpvpn_status::render_flows(&flows, width()),
            };
            return Ok((text, true));
        }
        let mut status = mpvpn_api::fetch_status(socket)?;
        if self.json {
            return Ok((json_line(serde_json::to_string(&status))?, true));
        }
        let is_first = rates.is_empty();
        rates.take(status.uptime_s, Counters::of_all(&status));
        if is_first {
            thread::sleep(RATE_INTERVAL);
            // Where the process has ended meanwhile, its last status counts, without rates.
            if let Ok(later) = mpvpn_api::fetch_status(socket) {
                rates.take(later.uptime_s, Counters::of_all(&later));
                status = later;
            }
        }
        let sections = Sections { paths: self.paths, details: self.details };
        Ok((mpvpn_status::render(&status, rates, sections, width()), status.state.works()))
    }

    /// Returns when the process is up.
    fn wait_until_up(&self, limit: Duration) -> Result<(), Failure> {
        let deadline = Instant::now() + limit;
        loop {
            let answer = self
                .target
                .socket()
                .and_then(|socket| mpvpn_api::fetch_status(&socket).map_err(Failure::from));
            match &answer {
                Ok(status) if status.state.works() => return Ok(()),
                // An ambiguous name does not become clear by waiting, and no permission comes.
                Err(failure) if failure.is_usage() || failure.is_denied() => return Err(answer.unwrap_err()),
                _ => {}
            }
            if Instant::now() >= deadline {
                return Err(late(limit, answer));
            }
            thread::sleep(POLL_INTERVAL.min(deadline.saturating_duration_since(Instant::now())));
        }
    }
}

fn late(limit: Duration, answer: Result<ProcessStatus, Failure>) -> Failure {
    let next = "`mpvpn events` and the log (journalctl -u 'mpvpn*') say why; `mpvpn check` tries each link";
    match answer {
        Ok(status) => {
            let why = format!("after {limit:?} the {} is not up: {}", status.kind(), status.sentence());
            Failure::runtime(why, next)
        }
        Err(failure) => failure,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_does_not_come_is_a_failure_within_the_time() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("none.sock");
        let words = ["status", "--wait", "0", "--api-socket", socket.to_str().unwrap()];
        let began = Instant::now();
        let failure = Status::try_parse_from(words).unwrap().run().unwrap_err();
        assert!(began.elapsed() < Duration::from_secs(5));
        assert!(!failure.is_usage(), "{}", failure.text());
    }
}
