//! `mpvpn status`: prints the status of a running server or client.

use std::{
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use clap::Parser;
use mpvpn_control::{
    api,
    status::{self, State, Status as ProcessStatus},
};

use super::Command;
use crate::{
    failure::Failure,
    output::{json_line, print, width},
    process_selector::{ProcessSelector, help_for_any_role},
};

const SUMMARY: &str = "cannot show the status";

const EXAMPLES: &str = "\
Examples:
  mpvpn status
  mpvpn status --flows
      each connection inside the tunnel, and whether it travels as a stream or as packets
  mpvpn status --wait 30
      waits until the tunnel is up, for 30 s at most; exit code 1 if it is not up by then
  mpvpn status --name mpvpn0 --json
  curl --unix-socket /run/mpvpn/client-mpvpn0.sock http://localhost/v1/status";

/// Show the status of a running server or client
#[derive(Debug, Parser)]
#[command(name = "status", after_help = EXAMPLES, mut_arg("name", help_for_any_role))]
pub(crate) struct Status {
    /// List the flows inside the tunnel: how each travels, and why
    #[arg(long)]
    pub(crate) flows: bool,
    /// Wait until the process runs and its tunnel is up, for so many seconds at most; exit code 1 if it is not up by then
    #[arg(long, value_name = "SECONDS")]
    pub(crate) wait: Option<u32>,
    /// Print JSON, the answer of the local API
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    target: ProcessSelector,
}

impl Command for Status {
    fn run(self) -> Result<ExitCode, Failure> {
        if let Some(seconds) = self.wait {
            self.wait_until_up(Duration::from_secs(seconds.into()))?;
        }
        let socket = self.target.socket(SUMMARY)?;
        let failed = |error| Failure::from_control_error(SUMMARY, &error);
        if self.flows {
            let flows = api::fetch_flows(&socket).map_err(failed)?;
            return print(&if self.json {
                json_line(SUMMARY, serde_json::to_string(&flows))?
            } else {
                status::render_flows(&flows, width())
            });
        }
        let status = api::fetch_status(&socket).map_err(failed)?;
        print(&if self.json {
            json_line(SUMMARY, serde_json::to_string(&status))?
        } else {
            status::render(&status, width())
        })
    }
}

/// How often the state is looked at. More often: time of the process; less often: it is noticed later.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

impl Status {
    /// Returns when the process is up.
    fn wait_until_up(&self, limit: Duration) -> Result<(), Failure> {
        let deadline = Instant::now() + limit;
        loop {
            let answer = self.target.socket(SUMMARY).and_then(|socket| {
                api::fetch_status(&socket).map_err(|error| Failure::from_control_error(SUMMARY, &error))
            });
            match &answer {
                Ok(status) if status.state == State::Up => return Ok(()),
                // Which one is meant does not become clear by waiting.
                Err(failure) if failure.is_usage() => return Err(answer.unwrap_err()),
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
            let why = format!("after {limit:?} the {} is not up: {}", status.role, status.state);
            Failure::runtime(SUMMARY, why, next)
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
