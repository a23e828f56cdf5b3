//! iperf3 through whatever lies between two hosts.

use std::{
    fs::{self, File},
    path::PathBuf,
    process::Child,
    thread,
    time::Duration,
};

use serde_json::Value;

use crate::{
    eventually,
    stage::{Place, Stage},
};

/// A running iperf3 server.
pub struct Sink {
    child: Child,
    port: u16,
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
        let file = File::create(stage.file("iperf-server", place)).expect("a file in the stage's directory");
        let mut command = stage.command(place, "iperf3");
        command.args(["-s", "-p", &port.to_string()]);
        command.stdout(file.try_clone().expect("a second handle")).stderr(file);
        let sink = Self { child: command.spawn().expect("iperf3 runs"), port };
        let filter = format!("sport = :{port}");
        eventually(Duration::from_secs(5), "iperf3 listens", || {
            let sockets = stage.run(place, &["ss", "-ltnH", &filter]);
            if sockets.is_empty() { Err(format!("nobody on port {port}")) } else { Ok(()) }
        });
        sink
    }

    /// Starts TCP flows to it at `to` for some seconds.
    pub fn tcp(&self, stage: &Stage, from: Place, to: &str, flows: u32, way: Way, seconds: u32) -> Run {
        self.run(stage, from, to, way, seconds, &["-P", &flows.to_string()])
    }

    /// Starts UDP datagrams of 1200 bytes at `megabits` a second.
    pub fn udp(&self, stage: &Stage, from: Place, to: &str, megabits: u32, way: Way, seconds: u32) -> Run {
        self.run(stage, from, to, way, seconds, &["-u", "-l", "1200", "-b", &format!("{megabits}M")])
    }

    fn run(&self, stage: &Stage, from: Place, to: &str, way: Way, seconds: u32, more: &[&str]) -> Run {
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

impl Drop for Sink {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Run {
    /// Waits for its end, which must be a good one.
    pub fn finish(mut self) -> Report {
        let status = self.child.wait().expect("our own child");
        // The server says farewell a moment after the client: the next run would find it busy.
        thread::sleep(Duration::from_millis(100));
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
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Report {
    /// The receiver's goodput, Mbit/s.
    pub fn megabits(&self) -> f64 {
        self.rate / 1e6
    }
}
