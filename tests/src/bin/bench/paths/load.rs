//! A run of traffic between client and server: TCP and UDP by iperf3, QUIC by [`quic_bulk`].

use std::{
    fs::{self, File},
    process::Child,
    thread,
    time::{Duration, SystemTime},
};

use mpvpn_lab::Direction;
use mpvpn_tests::{
    quic_bulk::{self, QuicDownload, QuicServer},
    testbed::{Host, Testbed},
};
use serde_json::Value;

/// Start of a run that is not counted, s: TCP's slow start. Shorter: slow start lowers the result. Longer:
/// runs take longer.
pub(crate) const START_UP_SECONDS: u32 = 2;
/// Interval of the goodput samples.
pub(crate) const STEP: Duration = quic_bulk::STEP;
/// [`STEP`] as the value of iperf3's option `-i`, s.
const STEP_S: &str = "0.1";
/// Port of iperf3, unless a rig needs several.
pub(crate) const PORT: u16 = 5201;
/// UDP payload of inner datagrams, bytes: below the MTU of every tunnel.
const UDP_PAYLOAD_BYTES: &str = "1200";

/// Congestion control of inner TCP. Set explicitly in every run, because the system's default differs between
/// machines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum InnerCc {
    #[default]
    Cubic,
    Bbr,
}

impl InnerCc {
    pub(crate) const ALL: [Self; 2] = [Self::Cubic, Self::Bbr];

    /// The kernel's name.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Cubic => "cubic",
            Self::Bbr => "bbr",
        }
    }
}

/// The traffic of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Load {
    /// Number of parallel TCP flows, and their congestion control.
    Tcp(u32, InnerCc),
    /// One QUIC connection with one stream.
    Quic,
    /// Datagrams at a rate in Mbit/s.
    Udp(u32),
}

impl Load {
    pub(crate) fn name(self) -> String {
        match self {
            Self::Tcp(flows, InnerCc::Cubic) => format!("{flows} TCP"),
            Self::Tcp(flows, cc) => format!("{flows} TCP under {}", cc.name()),
            Self::Quic => "QUIC".to_owned(),
            Self::Udp(mbit) => format!("UDP, {mbit} Mbit/s"),
        }
    }
}

/// The protocol of the kernel's connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TcpKind {
    Tcp,
    /// Multipath TCP, by `mptcpize`.
    Mptcp,
}

/// The result of a run.
#[derive(Clone, Debug)]
pub(crate) struct LoadResult {
    /// Goodput after the start-up, Mbit/s, as counted by the receiver.
    pub(crate) mbit: f64,
    /// Goodput in each [`STEP`] from the beginning, Mbit/s.
    pub(crate) steps: Vec<f64>,
    /// Payload of the whole run including the start-up, bytes.
    pub(crate) bytes: f64,
    /// Number of datagrams lost after the start-up; `None` for TCP and QUIC.
    pub(crate) lost: Option<u64>,
    /// Start of the run.
    pub(crate) started: SystemTime,
}

impl LoadResult {
    /// The longest time without data after the start-up, in multiples of [`STEP`].
    pub(crate) fn longest_stall(&self) -> Duration {
        let silent = |part: &&[f64]| part.iter().all(|mbit| *mbit < 0.01);
        let count_nft_packets = self.steps.get(START_UP_SECONDS as usize * 10..).unwrap_or_default();
        let groups = count_nft_packets.chunk_by(|a, b| (*a < 0.01) == (*b < 0.01)).filter(silent);
        STEP * groups.map(<[f64]>::len).max().unwrap_or(0) as u32
    }
}

/// An iperf3 server; ended when dropped.
pub(crate) struct IperfServer(Child);

impl IperfServer {
    /// Starts a server on every address of the testbed's server, and waits until it listens.
    pub(crate) fn start(testbed: &Testbed, kind: TcpKind, port: u16) -> Result<Self, String> {
        let mut command = match kind {
            TcpKind::Tcp => testbed.command(Host::Server, "iperf3"),
            TcpKind::Mptcp => {
                let mut command = testbed.command(Host::Server, "mptcpize");
                command.args(["run", "iperf3"]);
                command
            }
        };
        let log =
            File::create(testbed.file("iperf-server", Host::Server)).map_err(|error| error.to_string())?;
        // The iperf3 client copies the server's report, so the server uses the same format and interval.
        let child = command.args(["-s", "-J", "-i", STEP_S, "-p", &port.to_string()]).stdout(log).spawn();
        let iperf = Self(child.map_err(|error| format!("iperf3 does not start: {error}"))?);
        for _ in 0..100 {
            thread::sleep(Duration::from_millis(20));
            if !testbed.run(Host::Server, &["ss", "-ltnH", &format!("sport = :{port}")]).is_empty() {
                return Ok(iperf);
            }
        }
        Err("iperf3 does not listen after 2 s".to_owned())
    }
}

impl Drop for IperfServer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Running traffic; ended when dropped.
pub(crate) enum LoadRun {
    Iperf(Iperf),
    Quic(QuicDownload, SystemTime),
}

impl LoadRun {
    /// Starts a download from `quic_server` at `address` that lasts `seconds` after the start-up.
    pub(crate) fn quic(
        testbed: &Testbed,
        quic_server: &QuicServer,
        address: &str,
        seconds: u32,
    ) -> Result<Self, String> {
        Ok(Self::Quic(quic_server.fetch(testbed, address, seconds + START_UP_SECONDS)?, SystemTime::now()))
    }

    /// Waits for the end.
    pub(crate) fn finish(self) -> Result<LoadResult, String> {
        match self {
            Self::Iperf(iperf) => iperf.finish(),
            Self::Quic(fetch, started) => Ok(from_step_bytes(&fetch.finish()?, started)),
        }
    }
}

/// A running iperf3 client; ended when dropped.
pub(crate) struct Iperf {
    child: Child,
    report: std::path::PathBuf,
    started: SystemTime,
}

impl Iperf {
    /// Starts a load between the client and the iperf3 server at an address and port, for `seconds` after the
    /// start-up.
    pub(crate) fn start(
        testbed: &Testbed,
        kind: TcpKind,
        (address, port): (&str, u16),
        load: Load,
        direction: Direction,
        seconds: u32,
    ) -> Result<Self, String> {
        let report = testbed.file("iperf", Host::Client);
        let file = File::create(&report).map_err(|error| format!("{}: {error}", report.display()))?;
        let limit = (seconds + START_UP_SECONDS + 15).to_string();
        let mut command = testbed.command(Host::Client, "timeout");
        command.args(["-k", "2", &limit]);
        if kind == TcpKind::Mptcp {
            command.args(["mptcpize", "run"]);
        }
        command.args(["iperf3", "-J", "--get-server-output", "--connect-timeout", "5000"]);
        command.args(["-c", address, "-p", &port.to_string(), "-i", STEP_S]);
        command.args(["-t", &seconds.to_string(), "-O", &START_UP_SECONDS.to_string()]);
        match load {
            Load::Tcp(flows, cc) => command.args(["-C", cc.name(), "-P", &flows.to_string()]),
            Load::Udp(mbit) => command.args(["-u", "-l", UDP_PAYLOAD_BYTES, "-b", &format!("{mbit}M")]),
            Load::Quic => return Err("iperf3 knows no QUIC".to_owned()),
        };
        if direction == Direction::Down {
            command.arg("-R");
        }
        let started = SystemTime::now();
        let child = command.stdout(file).spawn().map_err(|error| format!("iperf3: {error}"))?;
        Ok(Self { child, report, started })
    }

    /// Waits for the end.
    pub(crate) fn finish(mut self) -> Result<LoadResult, String> {
        let status = self.child.wait().map_err(|error| error.to_string())?;
        // The server ends a moment after the client and refuses the next run until then.
        thread::sleep(Duration::from_millis(100));
        let text = fs::read_to_string(&self.report).unwrap_or_default();
        let all: Value =
            serde_json::from_str(&text).map_err(|_| format!("iperf3 ended with {status} and no result"))?;
        if let Some(error) = all["error"].as_str() {
            return Err(format!("iperf3: {error}"));
        }
        parse_report(&all, self.started)
            .ok_or_else(|| format!("iperf3 ended with {status} and half a result"))
    }
}

impl Drop for Iperf {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn parse_report(all: &Value, started: SystemTime) -> Option<LoadResult> {
    let reversed = all["start"]["test_start"]["reverse"] == 1;
    let at_server = all["server_output_json"]["intervals"].as_array().filter(|_| !reversed);
    let intervals = at_server.or(all["intervals"].as_array())?;
    let sums = || intervals.iter().map(|interval| &interval["sum"]);
    let end = &all["end"];
    let received = if end["sum_received"].is_null() { &end["sum"] } else { &end["sum_received"] };
    Some(LoadResult {
        mbit: received["bits_per_second"].as_f64()? / 1e6,
        steps: sums().filter_map(|sum| sum["bits_per_second"].as_f64()).map(|rate| rate / 1e6).collect(),
        bytes: sums().filter_map(|sum| sum["bytes"].as_f64()).sum(),
        lost: end["sum"]["lost_packets"].as_i64().map(|lost| lost.max(0).cast_unsigned()),
        started,
    })
}

/// The result of a download from its bytes per step.
fn from_step_bytes(bytes: &[u64], started: SystemTime) -> LoadResult {
    let in_a_step = |bytes: &u64| *bytes as f64 * 8e-6 / STEP.as_secs_f64();
    let steps: Vec<f64> = bytes.iter().map(in_a_step).collect();
    let count_nft_packets = steps.get(START_UP_SECONDS as usize * 10..).unwrap_or_default();
    LoadResult {
        mbit: count_nft_packets.iter().sum::<f64>() / count_nft_packets.len().max(1) as f64,
        bytes: bytes.iter().sum::<u64>() as f64,
        lost: None,
        steps,
        started,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn sum(mbit: f64) -> Value {
        json!({ "sum": { "bits_per_second": mbit * 1e6, "bytes": mbit * 1e5 / 8.0 } })
    }

    #[test]
    fn results_are_those_of_the_receiver_and_stalls_are_found() {
        let mut intervals = vec![sum(0.0); 20];
        intervals.extend([5.0, 0.0, 5.0, 0.0, 0.0, 0.0, 5.0].map(sum));
        let all = json!({ "intervals": intervals, "end": { "sum_received": { "bits_per_second": 7e6 } } });
        let arrived = parse_report(&all, SystemTime::now()).expect("a result");
        assert_eq!((arrived.mbit, arrived.longest_stall()), (7.0, Duration::from_millis(300)));
        assert!((arrived.bytes - 1.5e6 / 8.0).abs() < 1.0);
        assert!(parse_report(&json!({}), SystemTime::now()).is_none());
    }

    #[test]
    fn the_server_reports_what_it_received() {
        let of = |reverse: u8| {
            let all = json!({
                "start": { "test_start": { "reverse": reverse } }, "intervals": [sum(9.0)],
                "server_output_json": { "intervals": [sum(8.0)] },
                "end": { "sum": { "bits_per_second": 8e6, "lost_packets": 3 } },
            });
            let arrived = parse_report(&all, SystemTime::now()).expect("a result");
            assert_eq!((arrived.mbit, arrived.lost), (8.0, Some(3)));
            arrived.steps
        };
        assert_eq!((of(0), of(1)), (vec![8.0], vec![9.0]));
    }

    #[test]
    fn the_start_of_a_download_is_not_counted() {
        let mut bytes = vec![0; 20];
        bytes.extend([125_000, 0, 250_000]);
        let arrived = from_step_bytes(&bytes, SystemTime::now());
        assert_eq!((arrived.mbit, arrived.bytes, arrived.steps[20]), (10.0, 375_000.0, 10.0));
    }
}
