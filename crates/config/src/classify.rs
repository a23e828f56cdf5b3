//! `mpvpn class test`: parses the description of a packet, and finds its class.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    str::FromStr,
};

use mpvpn_class::{DnsSnooper, DomainPattern, PacketFields, Rules, has_ports};
use mpvpn_types::Instant;
use serde::Serialize;

use crate::classes::{
    KernelMatch, RuleOrigin, SteeringRule, rules_of,
    steering::{self, Ingress, Vlan},
    table::Protocol,
};
use crate::{links::Dscp, resolve::ClientConfig};
use mpvpn_input::values::Text;

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
}

/// The class of a packet, and the rule that decided it. `mpvpn class test --json` prints it.
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
        match &self.ingress {
            Some(ingress) => write!(f, " ingress {ingress}"),
            None => Ok(()),
        }
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
        let ((src, from), (dst, to)) = (endpoint(from, has_ports)?, endpoint(to, has_ports)?);
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
        let packet = Self { facts, domain: None, mark: 0, vlan: None, ingress: None };
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
            _ => {
                return Err(format!(
                    "`{}` is not understood: after the ends, expected `dscp 46`, `domain example.com`, `mark 0x10`, \
                     `vlan 20` or `ingress lan0`",
                    words.join(" ")
                ));
            }
        }
        Ok(self)
    }

    /// Whether the kernel steers this packet by the rule.
    fn is_steered_by(&self, SteeringRule { rule, kernel_match, .. }: &SteeringRule) -> bool {
        let KernelMatch { marks, vlans, ingress } = kernel_match;
        let rules = Rules::new(vec![rule.clone()]);
        (marks.is_empty() || marks.iter().any(|mark| self.mark & mark.mask == mark.value))
            && (vlans.is_empty() || self.vlan.is_some_and(|vlan| vlans.contains(&vlan)))
            && (ingress.is_empty() || self.ingress.as_ref().is_some_and(|name| ingress.contains(name)))
            && rules.classify(Instant::now(), &self.facts, &DnsSnooper::new([])).rule.is_some()
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
