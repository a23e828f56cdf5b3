//! `mpvpn ping`: asks a host through the tunnel, and says which paths each answer took.

use std::{
    collections::BTreeMap,
    fmt::Write,
    net::{IpAddr, ToSocketAddrs},
    ops::ControlFlow,
    path::Path,
    process::ExitCode,
    time::Duration,
};

use clap::Parser;
use mpvpn_measure::{Interrupt, PingPlan, PingResult, Pinger};
use mpvpn_status::measure::{EchoPaths, EchoReport, EchoRequest, Latency, LatencySamples};
use serde_json::json;

use super::Command;
use crate::{
    failure::Failure,
    output::{json_line, parse_seconds, print, print_part},
    process_selector::ProcessSelector,
};

const EXAMPLES: &str = "\
Examples:
  mpvpn ping 10.0.0.1
      the server, at its address in the tunnel
  mpvpn ping -c 10 -i 0.2 example.com
  mpvpn ping -6 --json example.com
      a line of JSON for each answer, and one with the summary

`out` is the path on which the request left this machine: class/link/number as in `mpvpn status --paths`, several if it was copied or
sent again. `back` is the path on which the answer arrived here. What a packet does behind the server is not known here.
Exit code 0 if a request was answered, else 1.";

/// Ask a host through the tunnel, and show the path of each answer
#[derive(Debug, Parser)]
#[command(name = "ping", after_help = EXAMPLES)]
pub(crate) struct Ping {
    /// Name or address of the host
    host: String,
    /// Number of requests [default: until Ctrl-C]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    count: Option<u32>,
    /// Time between two requests, from 0.05 to 3600 seconds
    #[arg(short, long, value_name = "SECONDS", default_value = "1", value_parser = parse_interval)]
    interval: Duration,
    /// Time after which a request without an answer counts as lost, from 0.05 to 3600 seconds
    #[arg(short = 'W', long, value_name = "SECONDS", default_value = "2", value_parser = parse_interval)]
    timeout: Duration,
    /// Bytes of data in each request
    #[arg(short, long, value_name = "BYTES", default_value_t = 56,
    value_parser = clap::value_parser!(u16).range(..=65_000))]
    size: u16,
    /// Use an IPv4 address of the host
    #[arg(short = '4', long, conflicts_with = "ipv6")]
    ipv4: bool,
    /// Use an IPv6 address of the host
    #[arg(short = '6', long)]
    ipv6: bool,
    /// Print a line of JSON for each request, and one with the summary at the end
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    target: ProcessSelector,
}

impl Command for Ping {
    const SUMMARY: &str = "cannot ping";

    fn run(self) -> Result<ExitCode, Failure> {
        let socket = self.target.socket()?;
        let to = self.address()?;
        // The identifier of requests is known once the socket is bound to the device, which this answer
        // tells.
        let device = echoes(&socket, 0)?.device;
        let plan = PingPlan {
            to,
            device: Some(device.clone()),
            count: self.count.map(u64::from),
            interval: self.interval,
            timeout: self.timeout,
            payload_bytes: self.size.into(),
        };
        let refused = |error: std::io::Error| {
            Failure::runtime(
                format!("{to} through {device}: {error}"),
                "run it as root; `mpvpn status` says whether the tunnel is up and which addresses it has",
            )
        };
        let interrupt = Interrupt::catch().map_err(refused)?;
        let pinger = Pinger::open(plan).map_err(refused)?;
        let identifier = pinger.identifier();
        // The watch begins before the first request.
        echoes(&socket, identifier)?;
        if !self.json {
            print(&format!("PING {} ({to}) through {device}\n", self.host))?;
        }
        let mut log = PingLog { is_json: self.json, ..PingLog::default() };
        let mut failed = None;
        let show = |result| {
            // If the client ends meanwhile, only the paths are unknown.
            let report = echoes(&socket, identifier).or_else(|_| echoes(&socket, identifier));
            let report = report.unwrap_or_default();
            log.line(result, &report).and_then(|line| print_part(&line)).unwrap_or_else(|failure| {
                failed = Some(failure);
                ControlFlow::Break(())
            })
        };
        pinger.run(&interrupt, show).map_err(refused)?;
        if let Some(failure) = failed {
            return Err(failure);
        }
        print(&log.summary(&self.host, to)?)?;
        Ok(ExitCode::from(u8::from(log.samples.summary().answered == 0)))
    }
}

impl Ping {
    fn address(&self) -> Result<IpAddr, Failure> {
        let wanted = |ip: &IpAddr| if self.ipv4 { ip.is_ipv4() } else { !self.ipv6 || ip.is_ipv6() };
        let found = (self.host.as_str(), 0).to_socket_addrs().map_err(|error| {
            Failure::runtime(
                format!("`{}`: {error}", self.host),
                "check the name, or give an address; `mpvpn status` says whether the tunnel is up",
            )
        })?;
        found.map(|address| address.ip()).find(wanted).ok_or_else(|| {
            let family = if self.ipv4 { "IPv4" } else { "IPv6" };
            Failure::usage(format!("`{}` has no {family} address", self.host), "leave out -4 or -6")
        })
    }
}

fn echoes(socket: &Path, identifier: u16) -> Result<EchoReport, Failure> {
    Ok(mpvpn_api::fetch_echoes(socket, EchoRequest { identifier })?)
}

fn parse_interval(text: &str) -> Result<Duration, String> {
    parse_seconds(text, 0.05..=3600.0)
}

/// The counters of the printed requests.
#[derive(Debug, Default)]
struct PingLog {
    is_json: bool,
    samples: LatencySamples,
    /// How often each path carried a request, and an answer.
    out: BTreeMap<String, u64>,
    back: BTreeMap<String, u64>,
}

impl PingLog {
    /// The line of a request.
    fn line(&mut self, result: PingResult, report: &EchoReport) -> Result<String, Failure> {
        self.samples.add(result.rtt);
        let nothing = EchoPaths::default();
        let seen = report.echoes.iter().rfind(|echo| echo.sequence == result.sequence);
        let EchoPaths { out, back, .. } = seen.unwrap_or(&nothing);
        if let Some(path) = out.first() {
            *self.out.entry(path.clone()).or_default() += 1;
        }
        if let Some(path) = back.as_ref().filter(|_| result.rtt.is_some()) {
            *self.back.entry(path.clone()).or_default() += 1;
        }
        let number = result.number + 1;
        let rtt_ms = result.rtt.map(milliseconds);
        if self.is_json {
            let line = json!({ "number": number, "rtt_ms": rtt_ms, "out": out, "back": back });
            return json_line(serde_json::to_string(&line));
        }
        let answer = rtt_ms.map_or_else(|| "lost".to_owned(), |rtt| format!("{rtt:.2} ms"));
        let out = if out.is_empty() { "unknown".to_owned() } else { out.join(" and ") };
        let back = match (&back, result.rtt) {
            (Some(path), Some(_)) => format!(", back {path}"),
            (None, Some(_)) if seen.is_some() => ", back by FEC or in another order".to_owned(),
            _ => String::new(),
        };
        Ok(format!("{number:>4}  {answer:>10}  out {out}{back}\n"))
    }

    fn summary(&self, host: &str, to: IpAddr) -> Result<String, Failure> {
        let Latency { sent, answered, loss_pct, rtt_ms } = self.samples.summary();
        if self.is_json {
            let line = json!({
                "host": host, "address": to, "sent": sent, "answered": answered, "loss_pct": loss_pct, "rtt_ms": rtt_ms,
                "out": self.out, "back": self.back,
            });
            return json_line(serde_json::to_string(&line));
        }
        let mut text = format!("\n{sent} sent, {answered} answered, {loss_pct:.1} % lost\n");
        if let Some(rtt) = rtt_ms {
            let _ = writeln!(
                text,
                "min {:.2}  mean {:.2}  p50 {:.2}  p99 {:.2}  max {:.2} ms",
                rtt.min, rtt.mean, rtt.p50, rtt.p99, rtt.max
            );
        }
        for (head, paths) in [("out ", &self.out), ("back", &self.back)] {
            let counts: Vec<_> = paths.iter().map(|(path, count)| format!("{path} {count}")).collect();
            if !counts.is_empty() {
                let _ = writeln!(text, "{head} {}", counts.join("  "));
            }
        }
        Ok(text)
    }
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(sequence: u16, out: &[&str], back: Option<&str>) -> EchoReport {
        let out = out.iter().map(|path| (*path).to_owned()).collect();
        let echo = EchoPaths { sequence, out, back: back.map(Into::into), answered: back.is_some() };
        EchoReport { device: "mpvpn0".into(), echoes: vec![EchoPaths::default(), echo] }
    }

    #[test]
    fn each_line_names_the_paths_and_the_summary_counts_them() {
        let mut log = PingLog::default();
        let answered = PingResult { number: 6, sequence: 7, rtt: Some(Duration::from_micros(25_400)) };
        let line = log.line(answered, &report(7, &["default/eth1/0"], Some("default/eth2/1"))).unwrap();
        assert_eq!(line, "   7    25.40 ms  out default/eth1/0, back default/eth2/1\n");
        let lost = PingResult { number: 7, sequence: 8, rtt: None };
        let line = log.line(lost, &report(8, &["default/eth1/0", "default/eth2/1"], None)).unwrap();
        assert_eq!(line, "   8        lost  out default/eth1/0 and default/eth2/1\n");
        let summary = log.summary("server", [10, 0, 0, 1].into()).unwrap();
        assert_eq!(
            summary,
            "\n2 sent, 1 answered, 50.0 % lost\nmin 25.40  mean 25.40  p50 25.40  p99 25.40  max 25.40 ms\n\
             out  default/eth1/0 2\nback default/eth2/1 1\n"
        );
    }

    #[test]
    fn json_has_the_same() {
        let mut log = PingLog { is_json: true, ..PingLog::default() };
        let answered = PingResult { number: 0, sequence: 0, rtt: Some(Duration::from_millis(25)) };
        let line = log.line(answered, &report(0, &[], None)).unwrap();
        let value: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert_eq!((value["number"].as_u64(), value["rtt_ms"].as_f64()), (Some(1), Some(25.0)));
        let summary: serde_json::Value =
            serde_json::from_str(&log.summary("h", [10, 0, 0, 1].into()).unwrap()).unwrap();
        assert_eq!((summary["sent"].as_u64(), summary["rtt_ms"]["p99"].as_f64()), (Some(1), Some(25.0)));
    }

    #[test]
    fn an_interval_is_bounded() {
        assert_eq!(parse_interval("0.2"), Ok(Duration::from_millis(200)));
        for text in ["0", "0.04", "-1", "NaN", "3601", "x"] {
            assert!(parse_interval(text).is_err(), "{text}");
        }
    }
}
