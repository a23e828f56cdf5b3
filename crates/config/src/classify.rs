//! `mpvpn route test`: parses the description of a packet, and finds its way: past the tunnel, or its class
//! and lane in it.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::{Path, PathBuf},
    str::FromStr,
};

use mpvpn_class::{DnsSnooper, DomainPattern, PacketFields, Rule, Rules, has_ports};
use mpvpn_types::{FlowMode, Instant};
use serde::Serialize;

use crate::classes::{
    KernelMatch, RuleOrigin, SteeringRule, rules_of,
    steering::{self, Ingress, Vlan},
    table::Protocol,
};
use crate::{
    bypass::{BypassRule, Mac},
    lane::LaneRule,
    links::Dscp,
    resolve::ClientConfig,
};
use mpvpn_input::values::Text;

/// The protocol number of TCP (IANA, Assigned Internet Protocol Numbers).
const TCP: u8 = 6;

/// A packet from a client to the far end, as in `udp 10.0.0.5:5060 -> 198.51.100.9:5060 dscp 46`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PacketDescription {
    facts: PacketFields,
    /// A domain name whose DNS answer had the address of the far end.
    domain: Option<String>,
    /// Attributes that only the kernel sees: firewall mark, VLAN ID, and incoming interface.
    mark: u32,
    vlan: Option<u16>,
    ingress: Option<String>,
    /// The hardware address of the host, or the user of this machine, that sends it.
    mac: Option<Mac>,
    uid: Option<u32>,
}

/// The way of a packet, and the rule that decided it. `mpvpn route test --json` prints it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum PacketRoute {
    /// It leaves past the tunnel.
    Bypass {
        /// The packet, as it was parsed.
        packet: String,
        /// The link; `None`: the best one that works.
        bypass: Option<String>,
        /// Whether it leaves while the kill switch blocks, too.
        always: bool,
        /// The file that defines the rule.
        file: Option<PathBuf>,
        /// The line of the rule in that file, from 1.
        line: Option<usize>,
    },
    /// It travels in the tunnel.
    Tunnel {
        /// How a TCP connection travels; `None` for other packets.
        #[serde(skip_serializing_if = "Option::is_none")]
        lane: Option<&'static str>,
        /// Its class, and the rule that decided it.
        #[serde(flatten)]
        class: Classification,
    },
}

impl fmt::Display for PacketRoute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bypass { bypass, always, file, line, .. } => {
                let link = bypass.as_deref().unwrap_or("the best link");
                write!(f, "past the tunnel over {link}, by the [[bypass]] of ")?;
                let file = file.as_deref().unwrap_or(Path::new("")).display();
                write!(f, "{file}, line {}", line.unwrap_or_default())?;
                f.write_str(if *always { ", also while the kill switch blocks" } else { "" })
            }
            Self::Tunnel { lane, class } => {
                let lane = lane.map(|lane| format!(", TCP as {lane}")).unwrap_or_default();
                write!(f, "in the tunnel{lane}: class {class}")
            }
        }
    }
}

/// The class of a packet, and the rule that decided it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Classification {
    /// The packet, as it was parsed.
    pub packet: String,
    /// The name of its class.
    pub class: String,
    /// The number of the rule that decided, in the order of evaluation from 1; `None` if no rule matches, or
    /// if the kernel steers the packet.
    pub rule: Option<usize>,
    /// The file that defines the rule; `None` for a built-in rule.
    pub file: Option<PathBuf>,
    /// The line of the rule in that file, from 1.
    pub line: Option<usize>,
    /// The name of the rule if it is built in.
    pub built_in: Option<&'static str>,
    /// The TUN device into which the kernel steers it, whatever the rules say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tun: Option<String>,
}

impl fmt::Display for Classification {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, ", self.class)?;
        if let (Some(tun), Some(file), Some(line)) = (&self.tun, &self.file, self.line) {
            return write!(f, "steered into {tun}: {}, line {line}", file.display());
        }
        match (self.rule, &self.file, self.line, self.built_in) {
            (Some(rule), Some(file), Some(line), _) => {
                write!(f, "by rule {rule}: {}, line {line}", file.display())
            }
            (Some(rule), _, _, Some(name)) => write!(f, "by rule {rule}: built-in `{name}`"),
            _ => f.write_str("as no rule matches"),
        }
    }
}

impl ClientConfig {
    /// The way of a packet.
    pub fn route_of(&self, packet: &PacketDescription) -> PacketRoute {
        if let Some(found) = self.bypass.iter().find(|rule| packet.is_past_tunnel_by(rule)) {
            let (file, line, _) = rule_location(Some(&found.origin));
            let (packet, bypass) = (packet.to_string(), found.link.clone());
            return PacketRoute::Bypass { packet, bypass, always: found.always, file, line };
        }
        let class = self.class_of(packet);
        let lane = (packet.facts.protocol == TCP).then(|| self.flow_mode_of(packet, &class.class).as_str());
        PacketRoute::Tunnel { lane, class }
    }

    /// How a TCP connection of this class travels.
    fn flow_mode_of(&self, packet: &PacketDescription, class: &str) -> FlowMode {
        let PacketFields { dst, ports, .. } = packet.facts;
        let is_for = |rule: &&LaneRule| {
            (rule.to.is_empty() || rule.to.iter().any(|net| net.contains(&dst)))
                && (rule.ports.is_empty()
                    || ports
                        .is_some_and(|(_, to)| rule.ports.iter().any(|ports| ports.range().contains(&to))))
        };
        let of_class = || self.classes.iter().find(|one| one.name == class).and_then(|class| class.lane);
        match self.lane_rules.iter().find(is_for) {
            Some(LaneRule { streams: true, .. }) => FlowMode::Stream,
            Some(_) => FlowMode::Datagram,
            None => of_class().unwrap_or(self.lane),
        }
    }

    /// The class of a packet.
    pub fn class_of(&self, packet: &PacketDescription) -> Classification {
        // All packets from the TUN device of a class belong to that class.
        if let Some(SteeringRule { origin, rule, .. }) =
            self.class_steering.iter().find(|rule| packet.is_steered_by(rule))
        {
            let (file, line, built_in) = rule_location(Some(origin));
            let tun = self.class(rule.class).and_then(|class| class.tun.clone());
            let class = self.class_name(rule.class);
            return Classification {
                packet: packet.to_string(),
                class,
                rule: None,
                file,
                line,
                built_in,
                tun,
            };
        }
        let rules = rules_of(&self.class_rules);
        let mut names = DnsSnooper::new(rules.patterns());
        let now = Instant::now();
        if let Some(domain) = &packet.domain {
            names.add_mapping(now, packet.facts.dst, domain);
        }
        let verdict = rules.classify(now, &packet.facts, &names);
        let (file, line, built_in) = rule_location(verdict.rule.map(|at| &self.class_rules[at].origin));
        let class = self.class_name(verdict.class);
        let rule = verdict.rule.map(|at| at + 1);
        Classification { packet: packet.to_string(), class, rule, file, line, built_in, tun: None }
    }
}

/// The file and line of a rule, or its name if it is built in.
fn rule_location(origin: Option<&RuleOrigin>) -> (Option<PathBuf>, Option<usize>, Option<&'static str>) {
    match origin {
        Some(RuleOrigin::File { file, line }) => (Some(file.clone()), Some(*line), None),
        Some(RuleOrigin::BuiltIn(name)) => (None, None, Some(*name)),
        None => (None, None, None),
    }
}

impl fmt::Display for PacketDescription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PacketFields { protocol, src, dst, ports, dscp } = self.facts;
        let end = |ip: IpAddr, port: Option<u16>| match port {
            None => ip.to_string(),
            Some(port) => SocketAddr::new(ip, port).to_string(),
        };
        let protocol = match protocol {
            1 | 58 => "icmp".to_owned(),
            protocol => Protocol::name(&[protocol]),
        };
        let (from, to) = (end(src, ports.map(|ports| ports.0)), end(dst, ports.map(|ports| ports.1)));
        write!(f, "{protocol} {from} -> {to}")?;
        if dscp != 0 {
            write!(f, " dscp {dscp}")?;
        }
        if let Some(domain) = &self.domain {
            write!(f, " domain {domain}")?;
        }
        if self.mark != 0 {
            write!(f, " mark {:#x}", self.mark)?;
        }
        if let Some(vlan) = self.vlan {
            write!(f, " vlan {vlan}")?;
        }
        if let Some(ingress) = &self.ingress {
            write!(f, " ingress {ingress}")?;
        }
        if let Some(mac) = self.mac {
            write!(f, " mac {mac}")?;
        }
        self.uid.map_or(Ok(()), |uid| write!(f, " uid {uid}"))
    }
}

impl FromStr for PacketDescription {
    type Err = String;

    /// Parses the protocol, both ends, and optional attributes, separated by spaces.
    fn from_str(text: &str) -> Result<Self, String> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let [protocol, from, "->", to, more @ ..] = words.as_slice() else {
            return Err(format!(
                "`{text}` is not a packet: expected a protocol and two ends in quotes, as in \
                 \"udp 10.0.0.5:5060 -> 198.51.100.9:5060\""
            ));
        };
        let protocol = Protocol::read(protocol)?;
        let has_ports = protocol.numbers().iter().any(|number| has_ports(*number));
        let (src, from) = sender(from, has_ports)?;
        let (domain, (dst, to)) = match name(to, has_ports) {
            Some((name, port)) => (Some(name), (some_address(src), port)),
            None => (None, endpoint(to, has_ports)?),
        };
        if src.is_ipv4() != dst.is_ipv4() {
            return Err(format!(
                "{src} and {dst} are of different IP versions: give two IPv4 or two IPv6 addresses"
            ));
        }
        let number = match protocol.numbers() {
            [_, v6] if src.is_ipv6() => *v6,
            numbers => numbers[0],
        };
        let facts = PacketFields { protocol: number, src, dst, ports: from.zip(to), dscp: 0 };
        let packet = Self { facts, domain, mark: 0, vlan: None, ingress: None, mac: None, uid: None };
        more.chunks(2).try_fold(packet, Self::with_attribute)
    }
}

impl PacketDescription {
    /// The packet with one more attribute, given as name and value.
    fn with_attribute(mut self, words: &[&str]) -> Result<Self, String> {
        match *words {
            ["dscp", dscp] => self.facts.dscp = Dscp::read(dscp)?.0,
            // A domain name, not a pattern: `*` is refused.
            ["domain", domain] if !domain.starts_with('*') => {
                domain.parse::<DomainPattern>().map_err(|error| error.to_string())?;
                self.domain = Some(domain.to_owned());
            }
            ["mark", mark] => {
                let no_mark =
                    || format!("`{mark}` is not a firewall mark of a packet: expected one as in 0x10");
                self.mark = steering::mark_number(mark).ok_or_else(no_mark)?;
            }
            ["vlan", vlan] => self.vlan = Some(Vlan::read(vlan)?.0),
            ["ingress", ingress] => self.ingress = Some(Ingress::read(ingress)?.0),
            ["mac", mac] => self.mac = Some(Mac::read(mac)?),
            ["uid", uid] => {
                let no_uid = || format!("`{uid}` is not the number of a user: `id -u NAME` prints it");
                self.uid = Some(uid.parse().map_err(|_| no_uid())?);
            }
            _ => {
                return Err(format!(
                    "`{}` is not understood: after the ends, expected `dscp 46`, `domain example.com`, `mark 0x10`, \
                     `vlan 20`, `ingress lan0`, `mac 02:00:5e:10:00:01` or `uid 1000`",
                    words.join(" ")
                ));
            }
        }
        Ok(self)
    }

    /// Whether the kernel steers this packet by the rule.
    fn is_steered_by(&self, SteeringRule { rule, kernel_match, .. }: &SteeringRule) -> bool {
        self.matches(rule, kernel_match)
    }

    /// Whether this packet leaves past the tunnel by the rule.
    fn is_past_tunnel_by(&self, found: &BypassRule) -> bool {
        let BypassRule { rule, kernel_match, macs, uids, .. } = found;
        self.matches(rule, kernel_match)
            && (macs.is_empty() || self.mac.is_some_and(|mac| macs.contains(&mac)))
            && (uids.is_empty() || self.uid.is_some_and(|uid| uids.contains(&uid)))
    }

    fn matches(&self, rule: &Rule, KernelMatch { marks, vlans, ingress }: &KernelMatch) -> bool {
        let rules = Rules::new(vec![rule.clone()]);
        let (now, mut names) = (Instant::now(), DnsSnooper::new(rules.patterns()));
        if let Some(domain) = &self.domain {
            names.add_mapping(now, self.facts.dst, domain);
        }
        (marks.is_empty() || marks.iter().any(|mark| self.mark & mark.mask == mark.value))
            && (vlans.is_empty() || self.vlan.is_some_and(|vlan| vlans.contains(&vlan)))
            && (ingress.is_empty() || self.ingress.as_ref().is_some_and(|name| ingress.contains(name)))
            && rules.classify(now, &self.facts, &names).rule.is_some()
    }
}

/// An address of the IP version of `other`, of a name whose address is not known: no rule names it.
fn some_address(other: IpAddr) -> IpAddr {
    if other.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() }
}

/// Parses a name, with a port if the protocol has ports.
fn name(text: &str, has_port: bool) -> Option<(String, Option<u16>)> {
    let (name, port) = match text.rsplit_once(':') {
        Some((name, port)) if has_port => (name, Some(port.parse().ok()?)),
        _ => (text, None),
    };
    let is_name =
        name.parse::<DomainPattern>().is_ok() && !name.starts_with('*') && port.is_some() == has_port;
    is_name.then(|| (name.to_owned(), port))
}

/// Parses the sender, whose port may be left out: 0 is no port that a rule names.
fn sender(text: &str, has_ports: bool) -> Result<(IpAddr, Option<u16>), String> {
    match text.parse() {
        Ok(ip) if has_ports => Ok((ip, Some(0))),
        _ => endpoint(text, has_ports),
    }
}

/// Parses an address, with a port if the protocol has ports.
fn endpoint(text: &str, has_port: bool) -> Result<(IpAddr, Option<u16>), String> {
    let bare = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(text);
    match (text.parse::<SocketAddr>(), bare.parse::<IpAddr>()) {
        (Ok(address), _) if has_port => Ok((address.ip(), Some(address.port()))),
        (Ok(address), _) => {
            Err(format!("`{text}` has a port, and the protocol has none: expected {}", address.ip()))
        }
        (_, Ok(ip)) if !has_port => Ok((ip, None)),
        (_, Ok(IpAddr::V4(ip))) => Err(format!("`{text}` has no port: expected one as in {ip}:5060")),
        (_, Ok(IpAddr::V6(ip))) => Err(format!("`{text}` has no port: expected one as in [{ip}]:5060")),
        _ => Err(format!(
            "`{text}` is not an address{}",
            if has_port {
                " with a port, as in 10.0.0.5:5060 or [fd00::5]:5060"
            } else {
                ", as in 10.0.0.5 or fd00::5"
            }
        )),
    }
}
