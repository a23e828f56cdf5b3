//! Multipath TCP of the kernel over the same links, without a tunnel.

use mpvpn_lab::{Direction, SERVER_V4};
use mpvpn_scenarios::Scenario;
use mpvpn_tests::stage::{Place, Stage};

use super::load::{Iperf, Kind, Load, PORT, Sink};

/// Goodput in Mbit/s, or why there is none.
pub(crate) type Result<T> = std::result::Result<T, String>;

/// Lets both kernels use all links.
pub(crate) fn prepare(stage: &Stage, links: usize) -> Result<Sink> {
    for place in [Place::Client, Place::Server] {
        ask(stage, place, &["ip", "mptcp", "limits", "set", "subflow", "8", "add_addr_accepted", "8"])?;
    }
    for number in 1..=links {
        let (address, device) = (format!("10.{}.0.2", 100 + number), format!("eth{number}"));
        ask(stage, Place::Client, &["ip", "mptcp", "endpoint", "add", &address, "dev", &device, "subflow"])?;
    }
    Sink::start(stage, Kind::Mptcp, PORT)
}

/// One run. A connection that did not join its second subflow is no measure of several links.
pub(crate) fn run(
    stage: &Stage,
    scenario: &Scenario,
    load: Load,
    way: Direction,
    seconds: u32,
) -> Result<f64> {
    let before = joins(stage);
    let arrived = start(stage, load, way, seconds)?.finish()?;
    if scenario.links.len() > 1 && joins(stage) == before {
        return Err("no subflow joined: is net.mptcp.enabled 1?".to_owned());
    }
    Ok(arrived.mbit)
}

/// Traffic past any tunnel.
pub(crate) fn start(stage: &Stage, load: Load, way: Direction, seconds: u32) -> Result<Iperf> {
    Iperf::start(stage, Kind::Mptcp, (&SERVER_V4.to_string(), PORT), load, way, seconds)
}

fn ask(stage: &Stage, place: Place, words: &[&str]) -> Result<()> {
    let output = stage.attempt(place, std::time::Duration::from_secs(5), words);
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{}: {}", words.join(" "), String::from_utf8_lossy(&output.stderr).trim()))
}

/// How many subflows the server's kernel has accepted.
pub(crate) fn joins(stage: &Stage) -> u64 {
    let table = stage
        .inside(Place::Server, || std::fs::read_to_string("/proc/thread-self/net/netstat"))
        .unwrap_or_default();
    counter(&table, "MPTcpExt:", "MPJoinAckRx")
}

/// A line of names, and then one of values, both beginning with the same word.
fn counter(table: &str, word: &str, name: &str) -> u64 {
    let mut lines = table.lines().filter(|line| line.starts_with(word));
    let (Some(names), Some(values)) = (lines.next(), lines.next()) else { return 0 };
    let mut pairs = names.split_whitespace().zip(values.split_whitespace());
    pairs.find(|pair| pair.0 == name).and_then(|pair| pair.1.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_of_the_kernel_are_read() {
        let table = "TcpExt: A B\nTcpExt: 1 2\nMPTcpExt: MPCapableSYNRX MPJoinAckRx\nMPTcpExt: 3 4\n";
        assert_eq!(counter(table, "MPTcpExt:", "MPJoinAckRx"), 4);
        assert_eq!(counter(table, "MPTcpExt:", "Nothing"), 0);
        assert_eq!(counter("", "MPTcpExt:", "MPJoinAckRx"), 0);
    }
}
