//! iperf3 runs that return errors instead of panicking: for other VPNs, which may fail in any way.
//!
//! In: destination, traffic and direction. Out: the receiver's result or an error. Always holds: a run is
//! bounded in time.

use std::fs;

use serde_json::Value;

use crate::{
    iperf::IperfServer,
    testbed::{Direction, Host, Testbed},
};

/// Socket buffer that UDP runs request, bytes, if the system's limits allow it. Smaller: bursts are lost at
/// the receiver and count as losses of the tunnel. Larger: the kernel refuses it on many machines.
const MAX_UDP_BUFFER_BYTES: u64 = 1 << 20;

/// The traffic of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Traffic {
    /// Parallel TCP flows at the highest rate.
    Tcp {
        /// Number of flows.
        flows: u32,
    },
    /// Datagrams of one size at a constant rate.
    Udp {
        /// Bytes of UDP payload.
        size: u32,
        /// Datagrams per second.
        rate: f64,
    },
}

/// The receiver's result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct IperfResult {
    /// Goodput at the receiver, bit/s.
    pub rate: f64,
    /// Received payload, bytes.
    pub bytes: f64,
    /// Datagrams sent per second; 0 for TCP.
    pub sent: f64,
    /// Lost datagrams, percent; 0 for TCP.
    pub loss_pct: f64,
}

/// An iperf3 server on the testbed's server; restarted after a failed run.
pub struct IperfTarget<'a> {
    testbed: &'a Testbed,
    address: String,
    port: u16,
    server: Option<IperfServer>,
}

impl<'a> IperfTarget<'a> {
    /// A server that clients reach at `address`. It starts with the first run.
    pub fn new(testbed: &'a Testbed, address: &str, port: u16) -> Self {
        Self { testbed, address: address.to_owned(), port, server: None }
    }

    /// Starts the server unless it runs.
    pub fn listen(&mut self) {
        let (testbed, port) = (self.testbed, self.port);
        self.server.get_or_insert_with(|| IperfServer::start(testbed, Host::Server, port));
    }

    /// Runs `traffic` for `seconds`; the iperf3 client is on the testbed's client.
    pub fn run(
        &mut self,
        traffic: Traffic,
        direction: Direction,
        seconds: u32,
    ) -> Result<IperfResult, String> {
        self.listen();
        self.server.as_ref().expect("made by the line above").ensure_unused(self.testbed);
        let result = self.attempt(traffic, direction, seconds);
        if result.is_err() {
            // The server may still wait for the client of the failed run.
            self.server = None;
        }
        result
    }

    fn attempt(&self, traffic: Traffic, direction: Direction, seconds: u32) -> Result<IperfResult, String> {
        let (port, time, limit) = (self.port.to_string(), seconds.to_string(), (seconds + 8).to_string());
        let report = self.testbed.file("iperf", Host::Client);
        let file = fs::File::create(&report).map_err(|error| format!("{}: {error}", report.display()))?;
        let mut command = self.testbed.command(Host::Client, "timeout");
        command.args(["-k", "1", &limit, "iperf3", "-J", "--connect-timeout", "3000"]);
        command.args(["-c", &self.address, "-p", &port, "-t", &time]);
        match traffic {
            Traffic::Tcp { flows } => command.args(["-P", &flows.to_string()]),
            Traffic::Udp { size, rate } => {
                let bits = (rate * f64::from(size) * 8.0).round().to_string();
                let (size, buffer) = (size.to_string(), udp_buffer().to_string());
                command.args(["-u", "-l", &size, "-b", &bits, "-w", &buffer])
            }
        };
        assert_ne!(direction, Direction::Both, "one iperf3 client sends in one direction");
        if direction == Direction::Down {
            command.arg("-R");
        }
        let status = command.stdout(file).status().map_err(|error| format!("iperf3: {error}"))?;
        let text = fs::read_to_string(&report).unwrap_or_default();
        let all: Value =
            serde_json::from_str(&text).map_err(|_| format!("iperf3 ended with {status} and no result"))?;
        if let Some(error) = all["error"].as_str() {
            return Err(format!("iperf3: {error}"));
        }
        arrived(&all["end"]).ok_or_else(|| format!("iperf3 ended with {status} and half a result"))
    }
}

/// The largest buffer that the system grants, at most [`MAX_UDP_BUFFER_BYTES`].
fn udp_buffer() -> u64 {
    let limit_of = |name: &str| {
        let text = fs::read_to_string(format!("/proc/sys/net/core/{name}")).ok()?;
        text.trim().parse::<u64>().ok()
    };
    ["rmem_max", "wmem_max"].into_iter().filter_map(limit_of).fold(MAX_UDP_BUFFER_BYTES, u64::min)
}

fn arrived(end: &Value) -> Option<IperfResult> {
    if let Some(packets) = end["sum"]["packets"].as_f64() {
        let sum = &end["sum"];
        let (seconds, lost_pct) = (sum["seconds"].as_f64()?, sum["lost_percent"].as_f64()?);
        let size = sum["bytes"].as_f64()? / packets.max(1.0);
        let bytes = packets * size * (1.0 - lost_pct / 100.0);
        let seconds = seconds.max(0.001);
        return Some(IperfResult {
            rate: bytes * 8.0 / seconds,
            bytes,
            sent: packets / seconds,
            loss_pct: lost_pct,
        });
    }
    let sum = &end["sum_received"];
    Some(IperfResult {
        rate: sum["bits_per_second"].as_f64()?,
        bytes: sum["bytes"].as_f64()?,
        sent: 0.0,
        loss_pct: 0.0,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn results_are_those_of_the_receiver() {
        let end = json!({ "sum_sent": { "bytes": 900, "bits_per_second": 9.0 },
                          "sum_received": { "bytes": 500, "bits_per_second": 5.0 } });
        let tcp = arrived(&end).expect("a TCP run");
        assert_eq!((tcp.bytes, tcp.rate, tcp.loss_pct), (500.0, 5.0, 0.0));
        let end = json!({ "sum": { "seconds": 2.0, "bytes": 1000, "packets": 10, "lost_percent": 20.0 } });
        let udp = arrived(&end).expect("a UDP run");
        assert_eq!((udp.bytes, udp.rate, udp.sent, udp.loss_pct), (800.0, 3200.0, 5.0, 20.0));
        assert_eq!(arrived(&json!({})), None);
    }
}
