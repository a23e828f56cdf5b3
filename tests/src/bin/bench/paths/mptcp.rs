//! The kernel's Multipath TCP over the links of a scenario, without a tunnel.

use mpvpn_lab::{Direction, SERVER_V4};
use mpvpn_scenarios::Scenario;
use mpvpn_tests::testbed::{Host, Testbed};

use super::load::{Iperf, IperfServer, Load, PORT, TcpKind};

/// A result, or the reason why there is none.
pub(crate) type Result<T> = std::result::Result<T, String>;

/// Configures Multipath TCP of both hosts for all links, and starts an iperf3 server.
pub(crate) fn prepare(testbed: &Testbed, links: usize) -> Result<IperfServer> {
    for host in [Host::Client, Host::Server] {
        ask(testbed, host, &["ip", "mptcp", "limits", "set", "subflow", "8", "add_addr_accepted", "8"])?;
    }
    for number in 1..=links {
        let (address, device) = (format!("10.{}.0.2", 100 + number), format!("eth{number}"));
        ask(testbed, Host::Client, &["ip", "mptcp", "endpoint", "add", &address, "dev", &device, "subflow"])?;
    }
    IperfServer::start(testbed, TcpKind::Mptcp, PORT)
}

/// Runs a load, and returns its goodput, Mbit/s. Fails if no second subflow joined (RFC 8684 §3.2).
pub(crate) fn run(
    testbed: &Testbed,
    scenario: &Scenario,
    load: Load,
    direction: Direction,
    seconds: u32,
) -> Result<f64> {
    let before = joins(testbed);
    let arrived = start(testbed, load, direction, seconds)?.finish()?;
    if scenario.links.len() > 1 && joins(testbed) == before {
        return Err("no subflow joined: is net.mptcp.enabled 1?".to_owned());
    }
    Ok(arrived.mbit)
}

/// Starts a load beside any tunnel.
pub(crate) fn start(testbed: &Testbed, load: Load, direction: Direction, seconds: u32) -> Result<Iperf> {
    Iperf::start(testbed, TcpKind::Mptcp, (&SERVER_V4.to_string(), PORT), load, direction, seconds)
}

fn ask(testbed: &Testbed, host: Host, args: &[&str]) -> Result<()> {
    let output = testbed.output_of(host, std::time::Duration::from_secs(5), args);
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{}: {}", args.join(" "), String::from_utf8_lossy(&output.stderr).trim()))
}

/// Number of joined subflows that the server's kernel has accepted (`MPJoinAckRx`).
pub(crate) fn joins(testbed: &Testbed) -> u64 {
    let table = testbed
        .in_namespace(Host::Server, || std::fs::read_to_string("/proc/thread-self/net/netstat"))
        .unwrap_or_default();
    counter(&table, "MPTcpExt:", "MPJoinAckRx")
}

/// A counter of `/proc/net/netstat`: a line of names and a line of values that begin with the same word.
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
