//! The internet between the machines: this program's own network namespace, as a router.
//!
//! In: links of machines. Out: a bridge for each link, the router's address in it, a host behind the router,
//! and counters of what arrives there. Always holds: nothing is connected to the network of the machine that
//! runs the tests.
//!
//! ```text
//!  server ── 203.0.113.0/24, 2001:db8:113::/64 ──┐
//!  alpha ─┬─ 192.168.11.0/24, fd00:0:0:11::/64 ──┤ router, resolver, translation of 192.168.0.0/16,
//!         └─ 192.168.12.0/24, fd00:0:0:12::/64 ──┤ and an address of the internet of each family
//!  beta ──┬─ 192.168.21.0/24, fd00:0:0:21::/64 ──┤
//!         └─ 192.168.22.0/24, fd00:0:0:22::/64 ──┘
//! ```

use std::{
    fs,
    path::Path,
    process::{Child, Command, Stdio},
};

use mpvpn_tests::{dns::NameServer, tcpdump::Tcpdump};

use crate::{isolation::run, root_file_system::folder};

/// Addresses of the internet, which the router has itself: IPv4 and IPv6, as in all pairs of addresses here.
pub(crate) const INTERNET: [&str; 2] = ["198.51.100.1", "2001:db8:100::1"];
/// The lengths of the prefixes of links.
pub(crate) const PREFIX_LENGTHS: [u8; 2] = [24, 64];
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
        iifname \"c*\" ip6 daddr 2001:db8:100::1 counter comment \"past the tunnel\"
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
    /// The beginnings of its addresses.
    pub(crate) nets: [String; 2],
    /// The last number of the machine's addresses.
    pub(crate) host: u8,
    /// Whether its rate is limited.
    pub(crate) is_limited: bool,
}

impl Link {
    /// A link of a server.
    pub(crate) fn of_server(number: usize) -> Self {
        let (interface, bridge) = ("eth0".to_owned(), format!("s{number}"));
        let nets = ["203.0.113.", "2001:db8:113::"].map(str::to_owned);
        Self { interface, bridge, nets, host: 10, is_limited: false }
    }

    /// A link of a client; both numbers count from 1.
    pub(crate) fn of_client(client: usize, number: usize) -> Self {
        let bridge = format!("c{client}l{number}");
        let interface = format!("eth{}", number - 1);
        let nets = [format!("192.168.{client}{number}."), format!("fd00:0:0:{client}{number}::")];
        Self { interface, bridge, nets, host: 2, is_limited: true }
    }

    /// The machine's IPv4 address.
    pub(crate) fn address(&self) -> String {
        let [v4, _] = self.addresses();
        v4
    }

    /// The machine's addresses.
    pub(crate) fn addresses(&self) -> [String; 2] {
        self.nets.each_ref().map(|net| format!("{net}{}", self.host))
    }

    /// The router's addresses.
    pub(crate) fn gateways(&self) -> [String; 2] {
        self.nets.each_ref().map(|net| format!("{net}1"))
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
        for (internet, forwarding) in INTERNET.iter().zip(["ipv4/ip_forward", "ipv6/conf/all/forwarding"]) {
            run("ip", &["address", "replace", internet, "dev", "lo"]);
            fs::write(Path::new("/proc/sys/net").join(forwarding), "1").expect("our own network");
        }
        for link in links {
            run("ip", &["link", "add", &link.bridge, "type", "bridge", "forward_delay", "0"]);
            for (gateway, length) in link.gateways().iter().zip(PREFIX_LENGTHS) {
                run("ip", &["address", "add", &format!("{gateway}/{length}"), "dev", &link.bridge, "nodad"]);
            }
            run("ip", &["link", "set", &link.bridge, "up"]);
        }
        run("nft", &[RULES]);
        let mut iperf = Command::new("iperf3");
        iperf.arg("--server").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Self {
            iperf: iperf.spawn().expect("iperf3 runs"),
            names: NameServer::start_here(),
            bridges: links.iter().map(|link| link.bridge.clone()).collect(),
        }
    }

    /// The packets that rules with this comment have counted.
    pub(crate) fn count(&self, comment: &str) -> u64 {
        let rules = run("nft", &["list", "table", "inet", "router"]);
        let marked = rules.lines().filter(|line| line.ends_with(&format!("comment \"{comment}\"")));
        let packets = |line: &str| line.split_once("packets ")?.1.split_once(' ')?.0.parse::<u64>().ok();
        let counts: Vec<u64> = marked.map(|line| packets(line).expect("a counter")).collect();
        assert!(!counts.is_empty(), "no rule has the comment {comment}");
        counts.iter().sum()
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

/// Packets of clients that leave past the tunnel, as they arrive at the router.
pub(crate) struct Capture(Tcpdump);

/// Left out: packets to the server, among them the kernel's answers to packets for a client that has ended
/// ("port unreachable"), ARP, and neighbour, router and multicast listener discovery within the link. The
/// kernel sends these by itself as soon as an interface is up (RFC 4861, RFC 4862, RFC 9777), and nothing
/// reaches the internet without them, so the kill switch lets them pass. Multicast listener reports have
/// their type after an extension header of 8 bytes.
const PAST_THE_TUNNEL: &str = "(ip or ip6) \
    and not ((port 443 or icmp[icmptype] = icmp-unreach) and dst host 203.0.113.10) \
    and not ((port 443 or (ip6[6] = 58 and ip6[40] = 1)) and dst host 2001:db8:113::10) \
    and not ((dst net ff02::/16 or dst net fe80::/10 or dst net fd00::/16) \
        and ((ip6[6] = 58 and ip6[40] >= 133 and ip6[40] <= 136) or (ip6[6] = 0 and ip6[40] = 58 and ip6[48] = 143)))";

impl Capture {
    /// Starts it.
    pub(crate) fn start() -> Self {
        let files = ["pcap.log", "tcpdump.log"].map(|name| folder().join(name));
        Self(Tcpdump::run(Command::new("tcpdump"), PAST_THE_TUNNEL, files))
    }

    /// The packets since the last call, as tcpdump prints them.
    pub(crate) fn new_lines(&mut self) -> Vec<String> {
        let is_of_client = |line: &String| {
            let mut words = line.split_whitespace().skip(1);
            words.next().is_some_and(|port| port.starts_with('c') && port.ends_with('p'))
                && words.next() == Some("In")
        };
        self.0.new_lines().into_iter().filter(is_of_client).collect()
    }
}
