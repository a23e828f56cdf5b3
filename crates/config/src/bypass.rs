//! Packets that leave past the tunnel, over a link: the tables `[[bypass]]` of a client.
//!
//! In: the parsed tables ([`BypassTables`]), and the TUN devices of the client. Out: the rules in
//! the order of evaluation ([`BypassRule`]). Always holds: a rule has a condition, so that none sends
//! everything past the tunnel; one that can never decide is refused with its line of the file.

use std::{net::IpAddr, ops::Range};

use ipnet::IpNet;
use mpvpn_class::{Rule, Rules, UnreachableReason};
use mpvpn_input::{
    Result,
    rules::{Ports, Prefix},
    values::{Filled, FilledOrNumbers, One, Text},
};
use schemars::JsonSchema;
use serde::{Deserialize, de::Deserializer};
use toml::Spanned;

use crate::{
    classes::{
        KernelMatch, RuleOrigin,
        steering::{Ingress, Mark, Vlan},
        table::{Domain, Protocol, packet_conditions},
    },
    dns_names::NameAddress,
    file::{OrFallback, SourceText},
    links::Dscp,
};

/// The most rules. Each new connection is compared with all of them, and nft takes a script of some
/// megabytes.
const MAX_RULES: usize = 4096;

/// Packets that leave past the tunnel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BypassRule {
    /// Where the rule is defined.
    pub origin: RuleOrigin,
    /// The conditions on fields of the packet. Its class counts nothing.
    pub rule: Rule,
    /// Conditions that only the kernel can evaluate.
    pub kernel_match: KernelMatch,
    /// Hardware addresses of hosts of the LAN.
    pub macs: Vec<Mac>,
    /// Users of this machine whose programs send the packets.
    pub uids: Vec<u32>,
    /// The link by which they leave; `None`: the best one that works.
    pub link: Option<String>,
    /// Resolvers that are asked over that link for the domains of the rule; those of the links if it is
    /// empty.
    pub dns: Vec<IpAddr>,
    /// Whether they leave while the kill switch blocks, too.
    pub always: bool,
}

impl BypassRule {
    /// Whether a packet that another host sends can match.
    pub fn is_for_others(&self) -> bool {
        self.uids.is_empty()
    }

    /// Whether a packet of this machine can match.
    pub fn is_for_own(&self) -> bool {
        self.macs.is_empty() && self.kernel_match.ingress.is_empty() && self.kernel_match.vlans.is_empty()
    }
}

/// A hardware address (EUI-48).
#[derive(Clone, Copy, Debug, derive_more::Display, PartialEq, Eq)]
#[display("{:02x}:{:02x}:{:02x}:{:02x}:{:02x}:{:02x}", _0[0], _0[1], _0[2], _0[3], _0[4], _0[5])]
pub struct Mac(pub [u8; 6]);

impl Text for Mac {
    const EXPECTED: &'static str = "a hardware address in quotes, as in \"02:00:5e:10:00:01\"";
    const EXAMPLE: &'static str = "02:00:5e:10:00:01";

    fn read(text: &str) -> Result<Self, String> {
        let octet = |part: &str| u8::from_str_radix(part, 16).ok().filter(|_| part.len() == 2);
        let octets: Option<Vec<u8>> = text.split([':', '-']).map(octet).collect();
        let octets = octets.and_then(|octets| octets.try_into().ok());
        octets.map(Self).ok_or_else(|| {
            format!("`{text}` is not a hardware address: expected one as in {}", Self::EXAMPLE)
        })
    }
}

/// The number of a user of this machine.
#[derive(Clone, Copy, Debug)]
struct Uid(u32);

impl Text for Uid {
    const EXPECTED: &'static str = "the number of a user, as `id -u NAME` prints it";
    const EXAMPLE: &'static str = "1000";

    fn read(text: &str) -> Result<Self, String> {
        text.parse()
            .map(Self)
            .map_err(|_| format!("`{text}` is not the number of a user: `id -u NAME` prints it"))
    }
}

/// The name of one link.
struct LinkName(String);

impl Text for LinkName {
    const EXPECTED: &'static str = "the name of a link in quotes";
    const EXAMPLE: &'static str = "eth0";

    fn read(text: &str) -> Result<Self, String> {
        Ingress::read(text).map(|name| Self(name.0))
    }
}

/// One parsed `[[bypass]]`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry(BypassRule);

/// Packets that leave past the tunnel, over a link: those that match every key of the table. A key with a
/// list matches if one of its values does. The first table that matches decides.
#[derive(Deserialize, JsonSchema)]
#[schemars(rename = "bypass")]
#[serde(deny_unknown_fields, rename_all = "kebab-case", expecting = "a table with the head [[bypass]]")]
struct Table {
    /// The link by which they leave; where it does not work, they are refused. Otherwise the best link that
    /// works [default: the best one]
    #[serde(default, with = "One::<LinkName>")]
    link: Option<LinkName>,
    /// Whether they leave while the kill switch blocks, too [default: false]
    #[serde(default)]
    always: bool,
    /// Resolvers that are asked over that link for the names of `domain` [default: those of the links]
    #[serde(default, with = "Filled::<NameAddress>")]
    dns: Vec<IpAddr>,
    /// IP protocols: tcp, udp, icmp (of IPv4 and IPv6) or a number [default: all]
    #[serde(default, with = "FilledOrNumbers::<Protocol>")]
    protocol: Vec<Protocol>,
    /// Networks or addresses of the sender [default: all]
    #[serde(default, with = "Filled::<Prefix>")]
    from: Vec<IpNet>,
    /// Networks or addresses of the far end [default: all]
    #[serde(default, with = "Filled::<Prefix>")]
    to: Vec<IpNet>,
    /// Ports of the sender, or ranges of ports [default: all]
    #[serde(default, with = "FilledOrNumbers::<Ports>")]
    from_ports: Vec<Ports>,
    /// Ports of the far end, or ranges of ports [default: all]
    #[serde(default, with = "FilledOrNumbers::<Ports>")]
    ports: Vec<Ports>,
    /// DSCPs, as the application set them (RFC 2474) [default: all]
    #[serde(default, with = "FilledOrNumbers::<Dscp>")]
    dscp: Vec<Dscp>,
    /// Domain names of the far end: `example.com` is this name and all below it, `*.example.com` only those
    /// below it [default: all]
    #[serde(default, with = "Filled::<Domain>")]
    domain: Vec<Domain>,
    /// Firewall marks, as a value or as value and mask [default: all]
    #[serde(default, with = "FilledOrNumbers::<Mark>")]
    mark: Vec<Mark>,
    /// VLAN IDs by which packets of other hosts come in, 1 to 4094 (IEEE 802.1Q) [default: all]
    #[serde(default, with = "FilledOrNumbers::<Vlan>")]
    vlan: Vec<Vlan>,
    /// Interfaces by which packets of other hosts come in [default: all]
    #[serde(default, with = "Filled::<Ingress>")]
    ingress: Vec<Ingress>,
    /// Hardware addresses of hosts of the LAN [default: all]
    #[serde(default, with = "Filled::<Mac>")]
    mac: Vec<Mac>,
    /// Users of this machine, by their numbers [default: all]
    #[serde(default, with = "FilledOrNumbers::<Uid>")]
    uid: Vec<Uid>,
}

impl<'de> Deserialize<'de> for Entry {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let fields = Table::deserialize(from)?;
        let (rule, kernel_match) = packet_conditions!(fields);
        Ok(Self(BypassRule {
            // It is filled in with the rest of the file.
            origin: RuleOrigin::BuiltIn(""),
            rule,
            kernel_match,
            macs: fields.mac,
            uids: fields.uid.into_iter().map(|uid| uid.0).collect(),
            link: fields.link.map(|link| link.0),
            dns: fields.dns,
            always: fields.always,
        }))
    }
}

/// The tables `[[bypass]]` of a file.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Eq)]
#[schemars(inline)]
#[serde(transparent)]
pub struct BypassTables {
    #[schemars(with = "Vec<Table>")]
    tables: Vec<Spanned<Entry>>,
    #[serde(skip)]
    source: SourceText,
}

impl OrFallback for BypassTables {
    fn is_given(&self) -> bool {
        !self.tables.is_empty()
    }
}

impl BypassTables {
    pub(crate) fn set_source(&mut self, source: SourceText) {
        self.source = source;
    }

    /// The rules of a client with these TUN devices.
    pub(crate) fn resolve(self, tuns: &[&str]) -> Result<Vec<BypassRule>> {
        let Self { tables, source } = self;
        let mut all: Vec<BypassRule> = Vec::new();
        // A rule with other conditions covers no other: two lists of these are hardly ever the same.
        let mut plain: Vec<(Range<usize>, Rule)> = Vec::new();
        for table in tables {
            let span = table.span();
            let Entry(mut rule) = table.into_inner();
            rule.origin = RuleOrigin::File { file: source.file().into(), line: source.line(span.start) };
            if let Some(why) = mistake(&rule, all.len(), tuns) {
                return Err(source.error_at(span, why));
            }
            if rule.kernel_match.is_empty() && rule.macs.is_empty() && rule.uids.is_empty() {
                plain.push((span, rule.rule.clone()));
            }
            all.push(rule);
        }
        let rules = Rules::new(plain.iter().map(|(_, rule)| rule.clone()).collect());
        let Some(first) = rules.unreachable().into_iter().next() else { return Ok(all) };
        let why = match first.reason {
            UnreachableReason::Covered(by) => {
                let line = source.line(plain[by].0.start);
                format!("the [[bypass]] at line {line} comes first and matches all its packets")
            }
            other => other.to_string(),
        };
        Err(source.error_at(plain[first.rule].0.clone(), format!("this rule never decides: {why}")))
    }
}

/// Why a rule cannot be that comes behind so many others.
fn mistake(rule: &BypassRule, earlier: usize, tuns: &[&str]) -> Option<String> {
    let BypassRule { rule: packets, kernel_match, macs, uids, link, dns, .. } = rule;
    let everything = Rule::default();
    if *packets == everything && kernel_match.is_empty() && macs.is_empty() && uids.is_empty() {
        return Some(
            "this table has no condition: name what goes past the tunnel, as in to, domain or mac".to_owned(),
        );
    }
    if earlier == MAX_RULES {
        return Some(format!(
            "this is one [[bypass]] too many: {MAX_RULES} are possible; a key may have a list"
        ));
    }
    if !rule.is_for_others() && !rule.is_for_own() {
        return Some(
            "`uid` is of programs of this machine, and `mac`, `vlan` and `ingress` are of other hosts: no packet has both"
                .to_owned(),
        );
    }
    if !dns.is_empty() && packets.domains.is_empty() {
        return Some(
            "`dns` is given without `domain`, the names that these resolvers are asked for".to_owned(),
        );
    }
    let is_tun = |name: &&String| tuns.contains(&name.as_str());
    if let Some(tun) = kernel_match.ingress.iter().chain(link).find(is_tun) {
        return Some(format!("`{tun}` is a TUN device of this client: it is no way past the tunnel"));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ClientConfig, ClientOptions};

    fn read(text: &str) -> Result<Vec<BypassRule>, String> {
        let text = format!("insecure = true\nserver = 'vpn.example:443'\n{text}");
        let options = ClientOptions::parse(&text).map_err(|error| error.to_string())?;
        ClientConfig::resolve(options).map(|config| config.bypass).map_err(|error| error.to_string())
    }

    #[test]
    fn a_rule_says_which_packets_leave_by_which_link() {
        let rules = read(
            "[[bypass]]\ndomain = ['tv.example', '*.cdn.example']\nlink = 'wwan0'\ndns = ['9.9.9.9']\n\
             [[bypass]]\nmac = '02:00:5e:10:00:0A'\nalways = true\n\
             [[bypass]]\nuid = [1000, 33]\nports = 443\nprotocol = 'tcp'\n",
        );
        let [tv, host, user] = rules.unwrap().try_into().unwrap();
        assert_eq!((tv.link.as_deref(), tv.rule.domains.len(), tv.always), (Some("wwan0"), 2, false));
        assert_eq!((host.macs[0].to_string(), host.always), ("02:00:5e:10:00:0a".to_owned(), true));
        assert!(!host.is_for_own() && host.is_for_others() && user.is_for_own() && !user.is_for_others());
        assert_eq!((user.uids, user.origin.to_string().contains("line 10")), (vec![1000, 33], true));
    }

    #[test]
    fn rules_that_cannot_be_are_refused_with_their_line() {
        for (text, why) in [
            ("link = 'eth0'", "has no condition"),
            ("to = '10.0.0.0/8'\nlink = 'wwan*'", "is not an interface's name"),
            ("ingress = 'mpvpn0'", "`mpvpn0` is a TUN device of this client"),
            ("uid = 0\nmac = '02:00:5e:10:00:01'", "no packet has both"),
            ("uid = 'anna'", "`id -u NAME` prints it"),
            ("mac = '02:00:5e:10:00'", "is not a hardware address"),
            ("mac = '02:00:5e:10:0:001'", "is not a hardware address"),
            ("to = '9.9.9.9'\ndns = '9.9.9.9'", "`dns` is given without `domain`"),
            ("protocol = 'icmp'\nports = 5", "this rule never decides"),
            ("to = '10.0.0.0/8'\n[[bypass]]\nto = '10.1.0.0/16'", "comes first and matches all its packets"),
        ] {
            let error = read(&format!("[[bypass]]\n{text}\n")).unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
        let covered_by_others = "[[bypass]]\nto = '10.0.0.0/8'\nuid = 7\n[[bypass]]\nto = '10.1.0.0/16'\n";
        assert_eq!(read(covered_by_others).unwrap().len(), 2);
    }
}
