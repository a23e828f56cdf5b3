//! iperf3 runs between two hosts of a testbed; they panic on errors.

use std::{
    cell::RefCell,
    fs::{self, File},
    path::PathBuf,
    process::Child,
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::{
    eventually,
    testbed::{Direction, Host, Testbed},
};

/// An iperf3 server on a host.
pub struct IperfServer {
    host: Host,
    port: u16,
    server: RefCell<Server>,
}

/// An iperf3 server process. It serves one run only: directly after a run it would refuse the next client for
/// a moment.
struct Server {
    child: Child,
    is_used: bool,
}

/// A running iperf3 client.
pub struct IperfRun {
    child: Child,
    report: PathBuf,
    args: String,
}

/// The receiver's result.
#[derive(Clone, Debug)]
pub struct Report {
    /// Goodput at the receiver, bit/s.
    pub rate: f64,
    /// Lost datagrams of UDP runs, percent.
    pub loss_pct: f64,
    /// Goodput in each second, bit/s, as reported by the iperf3 client.
    pub seconds: Vec<f64>,
}

impl IperfServer {
    /// Starts a server on every address of that host, and waits until it listens.
    pub fn start(testbed: &Testbed, host: Host, port: u16) -> Self {
        Self { host, port, server: RefCell::new(Server::start(testbed, host, port)) }
    }

    /// Starts parallel TCP flows between host `from` and this server at `to`, for `seconds`.
    pub fn tcp(
        &self,
        testbed: &Testbed,
        from: Host,
        to: &str,
        flows: u32,
        direction: Direction,
        seconds: u32,
    ) -> IperfRun {
        self.run(testbed, from, to, direction, seconds, &["-P", &flows.to_string()])
    }

    /// The same; each flow sends at most at this rate (Mbit/s).
    #[expect(clippy::too_many_arguments, reason = "those of `tcp`, and the rate")]
    pub fn tcp_at(
        &self,
        testbed: &Testbed,
        from: Host,
        to: &str,
        flows: u32,
        megabits: f64,
        direction: Direction,
        seconds: u32,
    ) -> IperfRun {
        let rate = format!("{}K", (megabits * 1e3) as u64);
        self.run(testbed, from, to, direction, seconds, &["-P", &flows.to_string(), "-b", &rate])
    }

    /// Starts UDP datagrams of 1200 bytes at `megabits` per second.
    pub fn udp(
        &self,
        testbed: &Testbed,
        from: Host,
        to: &str,
        megabits: u32,
        direction: Direction,
        seconds: u32,
    ) -> IperfRun {
        self.run(testbed, from, to, direction, seconds, &["-u", "-l", "1200", "-b", &format!("{megabits}M")])
    }

    /// Replaces the server process if it has served a run.
    pub(crate) fn ensure_unused(&self, testbed: &Testbed) {
        let mut server = self.server.borrow_mut();
        if server.is_used {
            server.end();
            *server = Server::start(testbed, self.host, self.port);
        }
        server.is_used = true;
    }

    fn run(
        &self,
        testbed: &Testbed,
        from: Host,
        to: &str,
        direction: Direction,
        seconds: u32,
        more_args: &[&str],
    ) -> IperfRun {
        self.ensure_unused(testbed);
        let report = testbed.file("iperf", from);
        let file = File::create(&report).expect("a file in the stage's directory");
        let (port, time, limit) = (self.port.to_string(), seconds.to_string(), (seconds + 20).to_string());
        let mut command = testbed.command(from, "timeout");
        command.args(["-k", "2", &limit, "iperf3", "-J", "--connect-timeout", "5000", "-c", to, "-p", &port]);
        command.args(["-t", &time]).args(more_args);
        assert_ne!(direction, Direction::Both, "one iperf3 client sends in one direction");
        if direction == Direction::Down {
            command.arg("-R");
        }
        command.stdout(file.try_clone().expect("a second handle")).stderr(file);
        let child = command.spawn().expect("timeout runs");
        IperfRun { child, report, args: format!("iperf3 to {to}, {direction:?}, {more_args:?}") }
    }
}

impl Server {
    fn start(testbed: &Testbed, host: Host, port: u16) -> Self {
        let file = File::create(testbed.file("iperf-server", host)).expect("a file in the stage's directory");
        let mut command = testbed.command(host, "iperf3");
        command.args(["-s", "-p", &port.to_string()]);
        command.stdout(file.try_clone().expect("a second handle")).stderr(file);
        let server = Self { child: command.spawn().expect("iperf3 runs"), is_used: false };
        let filter = format!("sport = :{port}");
        eventually(Duration::from_secs(5), "iperf3 listens", || {
            let sockets = testbed.run(host, &["ss", "-ltnH", &filter]);
            if sockets.is_empty() { Err(format!("no listener on port {port}")) } else { Ok(()) }
        });
        server
    }

    fn end(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}

impl IperfRun {
    /// Interrupts the run, and returns the goodput in each whole second so far, bit/s.
    pub fn stop(self) -> Vec<f64> {
        // `timeout` forwards the signal. The run may have ended already.
        let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
        let (args, all) = self.read_report();
        let error = all["error"].as_str().unwrap_or_default();
        assert!(error.is_empty() || error.starts_with("interrupt"), "{args}: {error}");
        let mut seconds = seconds(&all);
        seconds.pop();
        seconds
    }

    fn read_report(mut self) -> (String, Value) {
        let status = self.child.wait().expect("our own child");
        let text = fs::read_to_string(&self.report).expect("its own file");
        let all = serde_json::from_str(&text)
            .unwrap_or_else(|error| panic!("{} ({status}): {error}\n{text}", self.args));
        (std::mem::take(&mut self.args), all)
    }

    /// Waits for the end of the run, and returns its result.
    pub fn finish(self) -> Report {
        let (args, all) = self.read_report();
        assert!(all["error"].is_null(), "{args}: {}", all["error"]);
        let end = &all["end"];
        let received = if end["sum_received"].is_null() { &end["sum"] } else { &end["sum_received"] };
        Report {
            rate: received["bits_per_second"].as_f64().expect("a rate"),
            loss_pct: end["sum"]["lost_percent"].as_f64().unwrap_or(0.0),
            seconds: seconds(&all),
        }
    }
}

/// Goodput in each interval of a report, bit/s.
fn seconds(report: &Value) -> Vec<f64> {
    let intervals = report["intervals"].as_array().map_or(&[][..], Vec::as_slice);
    intervals.iter().filter_map(|second| second["sum"]["bits_per_second"].as_f64()).collect()
}

impl Drop for IperfRun {
    fn drop(&mut self) {
        // `timeout` forwards SIGTERM to iperf3; after SIGKILL of `timeout` iperf3 would continue.
        if let Ok(None) = self.child.try_wait() {
            let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
        }
        let _ = self.child.wait();
    }
}

impl Report {
    /// The receiver's goodput, Mbit/s.
    pub fn megabits(&self) -> f64 {
        self.rate / 1e6
    }
}
