//! iperf3 through whatever lies between two hosts.

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
    stage::{Place, Stage},
};

/// A place where an iperf3 server runs.
pub struct Sink {
    place: Place,
    port: u16,
    server: RefCell<Server>,
}

/// A running iperf3 server. It serves one run: between two it would refuse, for a moment, who comes at once.
struct Server {
    child: Child,
    is_used: bool,
}

/// A running iperf3 client.
pub struct Run {
    child: Child,
    report: PathBuf,
    words: String,
}

/// What the receiver saw.
#[derive(Clone, Debug)]
pub struct Report {
    /// Goodput at the receiver, bit/s.
    pub rate: f64,
    /// Lost datagrams of UDP runs, percent.
    pub loss_pct: f64,
    /// Goodput in each second, bit/s, as the client saw it.
    pub seconds: Vec<f64>,
}

/// Which way the data goes, seen from the one who asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Away from the client.
    Up,
    /// Towards the client.
    Down,
}

impl Sink {
    /// Listens on every address of that host, and is ready when this returns.
    pub fn start(stage: &Stage, place: Place, port: u16) -> Self {
        Self { place, port, server: RefCell::new(Server::start(stage, place, port)) }
    }

    /// Starts TCP flows to it at `to` for some seconds.
    pub fn tcp(&self, stage: &Stage, from: Place, to: &str, flows: u32, way: Way, seconds: u32) -> Run {
        self.run(stage, from, to, way, seconds, &["-P", &flows.to_string()])
    }

    /// Starts UDP datagrams of 1200 bytes at `megabits` a second.
    pub fn udp(&self, stage: &Stage, from: Place, to: &str, megabits: u32, way: Way, seconds: u32) -> Run {
        self.run(stage, from, to, way, seconds, &["-u", "-l", "1200", "-b", &format!("{megabits}M")])
    }

    /// Makes sure that a server waits that has served nobody.
    pub(crate) fn renew(&self, stage: &Stage) {
        let mut server = self.server.borrow_mut();
        if server.is_used {
            server.end();
            *server = Server::start(stage, self.place, self.port);
        }
        server.is_used = true;
    }

    fn run(&self, stage: &Stage, from: Place, to: &str, way: Way, seconds: u32, more: &[&str]) -> Run {
        self.renew(stage);
        let report = stage.file("iperf", from);
        let file = File::create(&report).expect("a file in the stage's directory");
        let (port, time, limit) = (self.port.to_string(), seconds.to_string(), (seconds + 20).to_string());
        let mut command = stage.command(from, "timeout");
        command.args(["-k", "2", &limit, "iperf3", "-J", "--connect-timeout", "5000", "-c", to, "-p", &port]);
        command.args(["-t", &time]).args(more);
        if way == Way::Down {
            command.arg("-R");
        }
        command.stdout(file.try_clone().expect("a second handle")).stderr(file);
        let child = command.spawn().expect("timeout runs");
        Run { child, report, words: format!("iperf3 to {to}, {way:?}, {more:?}") }
    }
}

impl Server {
    fn start(stage: &Stage, place: Place, port: u16) -> Self {
        let file = File::create(stage.file("iperf-server", place)).expect("a file in the stage's directory");
        let mut command = stage.command(place, "iperf3");
        command.args(["-s", "-p", &port.to_string()]);
        command.stdout(file.try_clone().expect("a second handle")).stderr(file);
        let server = Self { child: command.spawn().expect("iperf3 runs"), is_used: false };
        let filter = format!("sport = :{port}");
        eventually(Duration::from_secs(5), "iperf3 listens", || {
            let sockets = stage.run(place, &["ss", "-ltnH", &filter]);
            if sockets.is_empty() { Err(format!("nobody on port {port}")) } else { Ok(()) }
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

impl Run {
    /// Waits for its end, which must be a good one.
    pub fn finish(mut self) -> Report {
        let status = self.child.wait().expect("our own child");
        let text = fs::read_to_string(&self.report).expect("its own file");
        let all: Value = serde_json::from_str(&text)
            .unwrap_or_else(|error| panic!("{} ({status}): {error}\n{text}", self.words));
        assert!(all["error"].is_null(), "{}: {}", self.words, all["error"]);
        let end = &all["end"];
        let received = if end["sum_received"].is_null() { &end["sum"] } else { &end["sum_received"] };
        let intervals = all["intervals"].as_array().map_or(&[][..], Vec::as_slice);
        Report {
            rate: received["bits_per_second"].as_f64().expect("a rate"),
            loss_pct: end["sum"]["lost_percent"].as_f64().unwrap_or(0.0),
            seconds: intervals
                .iter()
                .filter_map(|second| second["sum"]["bits_per_second"].as_f64())
                .collect(),
        }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        // `timeout` hands this on to iperf3, which would go on after a kill.
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
