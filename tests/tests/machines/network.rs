//! The internet between the machines: this program's own network namespace, as a router.
//!
//! In: links of machines. Out: a bridge for each link, the router's address in it, a host behind the router,
//! and counters of what arrives there. Always holds: nothing is connected to the network of the machine that
//! runs the tests.
//!
//! ```text
//!  server ── 203.0.113.0/24 ──┐
//!  alpha ─┬─ 192.168.11.0/24 ─┤ router, resolver, translation of 192.168.0.0/16,
//!         └─ 192.168.12.0/24 ─┤ and 198.51.100.1, an address of the internet
//!  beta ──┬─ 192.168.21.0/24 ─┤
//!         └─ 192.168.22.0/24 ─┘
//! ```

use std::{
    fs,
    process::{Child, Command, Stdio},
};

use mpvpn_tests::dns::NameServer;

use crate::isolation::run;

/// An address of the internet, which the router has itself.
pub(crate) const INTERNET: &str = "198.51.100.1";
/// Rate of each link of a client in each direction, as tc writes it. Higher: the tests compete for
/// processors. Lower: they wait.
const RATE: &str = "30mbit";

/// The rules of the router. What comes from a link of a client and is not for a server has left past the
/// tunnel.
const RULES: &str = "
table inet router {
    chain count {
        type filter hook prerouting priority -300
        iifname \"c*\" ip daddr 198.51.100.1 counter comment \"past the tunnel\"
        iifname \"s*\" ip daddr 198.51.100.1 counter comment \"through the server\"
        iifname \"c*\" udp dport 53 counter comment \"queries past the tunnel\"
    }
    chain translate {
        type nat hook postrouting priority 100
        ip saddr 192.168.0.0/16 ip daddr 203.0.113.0/24 masquerade
    }
}";

/// One link of a machine.
#[derive(Clone, Debug)]
pub(crate) struct Link {
    /// Interface in the machine.
    pub(crate) interface: String,
    /// Interface at the router.
    pub(crate) bridge: String,
    /// The first three numbers of the /24.
    pub(crate) net: String,
    /// The last number of the machine's address.
    pub(crate) host: u8,
    /// Whether its rate is limited.
    pub(crate) is_limited: bool,
}

impl Link {
    /// A link of a server.
    pub(crate) fn of_server(number: usize) -> Self {
        let (interface, bridge) = ("eth0".to_owned(), format!("s{number}"));
        Self { interface, bridge, net: "203.0.113".to_owned(), host: 10, is_limited: false }
    }

    /// A link of a client; both numbers count from 1.
    pub(crate) fn of_client(client: usize, number: usize) -> Self {
        let bridge = format!("c{client}l{number}");
        let (interface, net) = (format!("eth{}", number - 1), format!("192.168.{client}{number}"));
        Self { interface, bridge, net, host: 2, is_limited: true }
    }

    /// The machine's address.
    pub(crate) fn address(&self) -> String {
        format!("{}.{}", self.net, self.host)
    }

    /// The router's address.
    pub(crate) fn gateway(&self) -> String {
        format!("{}.1", self.net)
    }

    /// The machine's hardware address, which stays over reboots: locally administered, and made of the IPv4
    /// address.
    fn hardware_address(&self) -> String {
        let numbers: Vec<u8> = self.address().split('.').filter_map(|number| number.parse().ok()).collect();
        numbers.iter().fold("02:00".to_owned(), |text, number| format!("{text}:{number:02x}"))
    }

    /// The device that connects the machine's namespace with the bridge.
    fn port(&self) -> String {
        format!("{}p", self.bridge)
    }

    /// Connects a network namespace, before the machine starts in it.
    pub(crate) fn connect(&self, namespace: &str) {
        let (port, interface) = (self.port(), self.interface.as_str());
        let (port, bridge) = (port.as_str(), self.bridge.as_str());
        let hardware = self.hardware_address();
        let near = ["link", "add", port, "type", "veth", "peer", "name", interface];
        run("ip", &[&near[..], &["address", &hardware, "netns", namespace]].concat());
        run("ip", &["link", "set", port, "master", bridge, "up"]);
        if self.is_limited {
            let limit = ["root", "tbf", "rate", RATE, "burst", "64kb", "latency", "60ms"];
            run("tc", &[&["qdisc", "add", "dev", port], &limit[..]].concat());
            run("tc", &[&["-n", namespace, "qdisc", "add", "dev", interface], &limit[..]].concat());
        }
    }
}

/// The router, and the programs on it.
pub(crate) struct Network {
    iperf: Child,
    names: NameServer,
    bridges: Vec<String>,
}

impl Network {
    /// A network with these links.
    pub(crate) fn new(links: &[Link]) -> Self {
        run("ip", &["link", "set", "lo", "up"]);
        run("ip", &["address", "replace", &format!("{INTERNET}/32"), "dev", "lo"]);
        fs::write("/proc/sys/net/ipv4/ip_forward", "1").expect("our own network");
        for link in links {
            run("ip", &["link", "add", &link.bridge, "type", "bridge", "forward_delay", "0"]);
            run("ip", &["address", "add", &format!("{}/24", link.gateway()), "dev", &link.bridge]);
            run("ip", &["link", "set", &link.bridge, "up"]);
        }
        run("nft", &[RULES]);
        let mut iperf = Command::new("iperf3");
        iperf
            .args(["--server", "--bind", INTERNET])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        Self {
            iperf: iperf.spawn().expect("iperf3 runs"),
            names: NameServer::start_here(),
            bridges: links.iter().map(|link| link.bridge.clone()).collect(),
        }
    }

    /// The packets that rules with this comment have counted.
    pub(crate) fn count(&self, comment: &str) -> u64 {
        let rules = run("nft", &["list", "table", "inet", "router"]);
        let marked = rules.lines().find(|line| line.ends_with(&format!("comment \"{comment}\"")));
        let line = marked.unwrap_or_else(|| panic!("no rule has the comment {comment}"));
        let packets = line.split_once("packets ").and_then(|(_, rest)| rest.split_once(' '));
        packets.and_then(|(packets, _)| packets.parse().ok()).expect("a counter")
    }

    /// The addresses that have used the router's resolver.
    pub(crate) fn resolver_clients(&self) -> Vec<String> {
        self.names.client_addresses().iter().map(ToString::to_string).collect()
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        let _ = self.iperf.kill();
        let _ = self.iperf.wait();
        for bridge in &self.bridges {
            let _ = Command::new("ip").args(["link", "delete", bridge]).status();
        }
        let _ = Command::new("nft").args(["delete", "table", "inet", "router"]).status();
    }
}
