//! Parses the tables `[[class]]` and `[[class.match]]`.

use std::ops::Range;

use ipnet::IpNet;
use mpvpn_class::{DomainPattern, MAX_COPIES, Rule};
use mpvpn_types::{ClassName, Fec, Portion, Weight};
use schemars::JsonSchema;
use serde::{
    Deserialize,
    de::{Deserializer, Error},
};
use toml::Spanned;

use super::{
    ClassConfig,
    steering::{Ingress, KernelMatch, Mark, Vlan},
};
use crate::{
    file::SourceText,
    links::{Dscp, LinkPattern},
};
use mpvpn_input::{
    rules::{Ports, Prefix},
    values::{Filled, FilledOrNumbers, One, OneOrNumber, Text},
};
use mpvpn_path::Scheduler;
use mpvpn_types::{CongestionControl, FlowMode};

/// The tables `[[class]]` of a file.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Eq)]
#[schemars(inline)]
#[serde(transparent)]
pub struct ClassTables {
    pub(crate) tables: Vec<Table>,
    #[serde(skip)]
    pub(crate) source: SourceText,
}

impl ClassTables {
    /// Whether a class sends its TCP connections as streams.
    pub(crate) fn takes_streams(&self) -> bool {
        self.tables.iter().any(|table| table.lane == Some(FlowMode::Stream))
    }
}

/// A class of traffic. The classes `default`, `critical` and `bulk` are always there; a table with such a
/// name changes that class. `critical` has `priority`, `max = "50%"` and `dscp = "ef"`; `bulk` has `weight =
/// 1` and `dscp = "cs1"`. A class with a table has a connection of its own from its first packet on;
/// `default` carries those of a class without one until a link is full or loses packets.
#[derive(Clone, Debug, Deserialize, JsonSchema, PartialEq, Eq)]
#[schemars(rename = "class")]
#[serde(deny_unknown_fields, rename_all = "kebab-case", expecting = "a table with the head [[class]]")]
pub(crate) struct Table {
    /// Name of the class: 1 to 16 lower-case letters, digits, `-` or `_`
    #[schemars(with = "One<ClassName>")]
    name: Spanned<Parsed<ClassName>>,
    /// How TCP connections of the class travel where no `[[lane-rule]]` matches [default: the key `lane` of
    /// the file]
    #[serde(default, with = "One::<FlowMode>")]
    lane: Option<FlowMode>,
    /// Congestion control of the paths of the class, in both directions [default: the key `cc` of the file]
    #[serde(default, with = "One::<CongestionControl>")]
    cc: Option<CongestionControl>,
    /// How packets of the class are spread over its paths [default: the key `scheduler` of the file]
    #[serde(default, with = "One::<Scheduler>")]
    scheduler: Option<Scheduler>,
    /// Number of links on which each packet is sent, 1 to 4. More copies get through outages without a gap,
    /// and cost that many times the data [default: 1]
    #[serde(default, with = "OneOrNumber::<Copies>")]
    copies: Option<Copies>,
    /// Forward error correction, for lossy links where a retransmission would come too late: off, auto, or a
    /// fixed rate, as in `10+2` for 2 repair packets per 10 packets [default: off]
    #[serde(default, with = "One::<Fec>")]
    fec: Option<Fec>,
    /// Share of a link relative to other classes, while they compete for it, 1 to 1000 [default: 4]
    #[serde(default, with = "OneOrNumber::<Weight>")]
    weight: Option<Weight>,
    /// Rate that the class gets of each link whenever it needs it, in bit/s or as a part of the link
    /// [default: none]
    #[serde(default)]
    #[schemars(with = "One<Portion>")]
    pub(crate) min: Option<Spanned<Parsed<Portion>>>,
    /// Limit on each link, in bit/s or as a part of the link; with `priority` the limit up to which the
    /// class precedes others [default: none]
    #[serde(default)]
    #[schemars(with = "One<Portion>")]
    max: Option<Spanned<Parsed<Portion>>>,
    /// DSCP of the tunnel's packets that carry the class (RFC 2474), for networks that treat packets by it
    /// [default: the `dscp` of the `[[link]]`]
    #[serde(default, with = "OneOrNumber::<Dscp>")]
    dscp: Option<Dscp>,
    /// Links that the class uses as long as one of them works, names or patterns; others only if none does
    /// [default: all]
    #[serde(default)]
    #[schemars(with = "Filled<LinkPattern>")]
    prefer: Option<Spanned<LinkPatterns>>,
    /// Links that the class never uses, names or patterns; for example a metered link for backups [default:
    /// none]
    #[serde(default)]
    #[schemars(with = "Filled<LinkPattern>")]
    exclude: Option<Spanned<LinkPatterns>>,
    /// Name of a TUN device for the class: all packets of this device belong to the class. Set it where
    /// routes or firewall marks shall choose the class [default: none]
    #[serde(default)]
    #[schemars(with = "One<String>")]
    tun: Option<Spanned<Parsed<String>>>,
    /// Whether the class is sent before the classes without priority, up to `max` [default: false]
    #[serde(default)]
    #[schemars(with = "bool")]
    priority: Option<bool>,
    /// Whether the class travels on its own connection only. Otherwise `default` carries its packets over the
    /// links of `default` while none of its own works. With `exclude` and `tun` the class is a tunnel of its
    /// own over some links; with `tun-carrier` its device loses its carrier as soon as it does not work
    /// [default: false]
    #[serde(default)]
    #[schemars(with = "bool")]
    pinned: Option<Spanned<bool>>,
    /// Packets that belong to the class: the tables `[[class.match]]`
    #[serde(default, rename = "match")]
    #[schemars(with = "Vec<MatchTable>")]
    rules: Vec<Spanned<MatchEntry>>,
}

/// A key whose place in the file is needed for errors that are found after parsing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Key {
    Min,
    Prefer,
    Exclude,
    Tun,
    Pinned,
}

impl Table {
    pub(crate) fn name(&self) -> &str {
        self.name.get_ref().0.as_str()
    }

    pub(crate) fn name_span(&self) -> Range<usize> {
        self.name.span()
    }

    /// The place of the value of a key; the place of the class name if the key is missing.
    pub(crate) fn span(&self, key: Key) -> Range<usize> {
        let found = match key {
            Key::Min => self.min.as_ref().map(Spanned::span),
            Key::Prefer => self.prefer.as_ref().map(Spanned::span),
            Key::Exclude => self.exclude.as_ref().map(Spanned::span),
            Key::Tun => self.tun.as_ref().map(Spanned::span),
            Key::Pinned => self.pinned.as_ref().map(Spanned::span),
        };
        found.unwrap_or_else(|| self.name_span())
    }

    /// Its rules for packets from the client's TUN device, and their places in the file.
    pub(crate) fn rules(&self) -> impl Iterator<Item = (Range<usize>, &Rule)> {
        let rules = self.rules.iter().filter(|rule| rule.get_ref().kernel_match.is_empty());
        rules.map(|rule| (rule.span(), &rule.get_ref().rule))
    }

    /// Its rules for packets that the kernel steers, and their places in the file.
    pub(crate) fn steering(&self) -> impl Iterator<Item = (Range<usize>, &Rule, &KernelMatch)> {
        let rules = self.rules.iter().filter(|rule| !rule.get_ref().kernel_match.is_empty());
        rules.map(|found| (found.span(), &found.get_ref().rule, &found.get_ref().kernel_match))
    }

    /// Applies the keys of the table to `class`.
    pub(crate) fn apply(&self, class: &mut ClassConfig) {
        let links =
            |links: &Option<Spanned<LinkPatterns>>| links.as_ref().map(|links| links.get_ref().0.clone());
        let portion =
            |portion: &Option<Spanned<Parsed<Portion>>>| portion.as_ref().map(|one| one.get_ref().0);
        class.lane = self.lane;
        class.cc = self.cc;
        class.scheduler = self.scheduler;
        class.copies = self.copies.map_or(class.copies, |copies| copies.0);
        class.fec = self.fec.unwrap_or(class.fec);
        class.weight = self.weight.unwrap_or(class.weight);
        class.min = portion(&self.min);
        class.max = portion(&self.max).or(class.max);
        class.dscp = self.dscp.map(|dscp| dscp.0).or(class.dscp);
        class.prefer = links(&self.prefer).unwrap_or_default();
        class.exclude = links(&self.exclude).unwrap_or_default();
        class.tun = self.tun.as_ref().map(|tun| tun.get_ref().0.clone());
        class.priority = self.priority.unwrap_or(class.priority);
        class.connects_at_once = true;
        class.pinned = self.pinned.as_ref().is_some_and(|pinned| *pinned.get_ref());
    }
}

/// A [`Text`] value that deserializes itself, as [`Spanned`] needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Parsed<T>(pub(crate) T);

impl<'de, T: Text> Deserialize<'de> for Parsed<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let read = One::<T>::deserialize(from)?;
        read.map(Self).ok_or_else(|| D::Error::custom(format!("expected {}", T::EXPECTED)))
    }
}

/// Names of links, or patterns of names.
#[derive(Clone, Debug, PartialEq, Eq)]
struct LinkPatterns(Vec<String>);

impl<'de> Deserialize<'de> for LinkPatterns {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let links: Vec<LinkPattern> = Filled::<LinkPattern>::deserialize(from)?;
        Ok(Self(links.into_iter().map(|link| link.0).collect()))
    }
}

/// One parsed `[[class.match]]`; its class is filled in later.
#[derive(Clone, Debug, PartialEq, Eq)]
struct MatchEntry {
    rule: Rule,
    kernel_match: KernelMatch,
}

/// Packets that belong to the class: those that match every key of the table. A key with a list matches if
/// one of its values does.
#[derive(Deserialize, JsonSchema)]
#[schemars(rename = "class.match")]
#[serde(deny_unknown_fields, rename_all = "kebab-case", expecting = "a table with the head [[class.match]]")]
struct MatchTable {
    /// IP protocols: tcp, udp, icmp (of IPv4 and IPv6) or a number [default: all]
    #[serde(default, with = "FilledOrNumbers::<Protocol>")]
    protocol: Vec<Protocol>,
    /// Networks or addresses of the client's end [default: all]
    #[serde(default, with = "Filled::<Prefix>")]
    from: Vec<IpNet>,
    /// Networks or addresses of the far end [default: all]
    #[serde(default, with = "Filled::<Prefix>")]
    to: Vec<IpNet>,
    /// Ports of the client's end, or ranges of ports [default: all]
    #[serde(default, with = "FilledOrNumbers::<Ports>")]
    from_ports: Vec<Ports>,
    /// Ports of the far end, or ranges of ports [default: all]
    #[serde(default, with = "FilledOrNumbers::<Ports>")]
    ports: Vec<Ports>,
    /// DSCPs of the packet inside the tunnel (RFC 2474), as the application set it [default: all]
    #[serde(default, with = "FilledOrNumbers::<Dscp>")]
    dscp: Vec<Dscp>,
    /// Domain names to which DNS gave the address of the far end: `example.com` is this name and all below
    /// it, `*.example.com` only those below it [default: all]
    #[serde(default, with = "Filled::<Domain>")]
    domain: Vec<Domain>,
    /// Firewall marks, as a value or as value and mask; only for a class with `tun`, not together with
    /// `domain` [default: all]
    #[serde(default, with = "FilledOrNumbers::<Mark>")]
    mark: Vec<Mark>,
    /// VLAN IDs, 1 to 4094 (IEEE 802.1Q); only for a class with `tun`, not together with `domain` [default:
    /// all]
    #[serde(default, with = "FilledOrNumbers::<Vlan>")]
    vlan: Vec<Vlan>,
    /// Interfaces by which the packet comes in; only for a class with `tun`, not together with `domain`
    /// [default: all]
    #[serde(default, with = "Filled::<Ingress>")]
    ingress: Vec<Ingress>,
}

/// The conditions of a parsed `[[class.match]]` or `[[bypass]]`, as a [`Rule`] and for the kernel.
macro_rules! packet_conditions {
    ($fields:ident) => {{
        let ranges = |list: Vec<Ports>| list.into_iter().map(Ports::range).collect();
        let rule = Rule {
            protocols: $fields.protocol.iter().flat_map(|protocol| protocol.numbers()).copied().collect(),
            from: $fields.from,
            to: $fields.to,
            from_ports: ranges($fields.from_ports),
            ports: ranges($fields.ports),
            dscp: $fields.dscp.into_iter().map(|dscp| dscp.0).collect(),
            domains: $fields.domain.into_iter().map(|domain| domain.0).collect(),
            ..Rule::default()
        };
        let kernel_match = KernelMatch {
            marks: $fields.mark,
            vlans: $fields.vlan.into_iter().map(|vlan| vlan.0).collect(),
            ingress: $fields.ingress.into_iter().map(|name| name.0).collect(),
        };
        (rule, kernel_match)
    }};
}
pub(crate) use packet_conditions;

impl<'de> Deserialize<'de> for MatchEntry {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let fields = MatchTable::deserialize(from)?;
        let (rule, kernel_match) = packet_conditions!(fields);
        Ok(Self { rule, kernel_match })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Copies(u8);

impl Text for Copies {
    const EXPECTED: &'static str = "a number of copies from 1 to 4";
    const EXAMPLE: &'static str = "2";

    fn read(text: &str) -> Result<Self, String> {
        let number = text.parse().ok().filter(|number| (1..=MAX_COPIES).contains(number));
        number
            .map(Self)
            .ok_or_else(|| format!("`{text}` is not a number of copies: expected 1 to {}", MAX_COPIES))
    }
}

/// [`DomainPattern`].
pub(crate) struct Domain(pub(crate) DomainPattern);

impl Text for Domain {
    const EXPECTED: &'static str = "a domain in quotes, as in \"example.com\" or \"*.example.com\"";
    const EXAMPLE: &'static str = "*.example.com";

    fn read(text: &str) -> Result<Self, String> {
        text.parse().map(Self).map_err(|error: mpvpn_class::ParseDomainPatternError| error.to_string())
    }
}

/// An IP protocol by name or number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protocol {
    /// ICMP of IPv4 and IPv6.
    Icmp,
    Number(u8),
}

impl Protocol {
    /// Names and numbers (IANA, Assigned Internet Protocol Numbers).
    const NAMES: [(&'static str, u8); 2] = [("tcp", 6), ("udp", 17)];

    pub(crate) fn numbers(&self) -> &[u8] {
        match self {
            Self::Icmp => &[1, 58],
            Self::Number(number) => std::slice::from_ref(number),
        }
    }

    /// Formats protocol numbers, with names where they have one.
    pub(crate) fn name(numbers: &[u8]) -> String {
        let mut numbers = numbers.to_vec();
        let mut names = Vec::new();
        if let Some(at) = numbers.windows(2).position(|two| two == Self::Icmp.numbers()) {
            numbers.drain(at..at + 2);
            names.push("icmp".to_owned());
        }
        names.extend(numbers.iter().map(|number| {
            let named = Self::NAMES.iter().find(|(_, known)| known == number);
            named.map_or_else(|| number.to_string(), |(name, _)| (*name).to_owned())
        }));
        names.join(" ")
    }
}

impl Text for Protocol {
    const EXPECTED: &'static str = "\"tcp\", \"udp\", \"icmp\" or a number from 0 to 255";
    const EXAMPLE: &'static str = "udp";

    fn read(text: &str) -> Result<Self, String> {
        let named = Self::NAMES.iter().find(|(name, _)| *name == text).map(|(_, number)| *number);
        match named.or_else(|| text.parse().ok()) {
            Some(number) => Ok(Self::Number(number)),
            None if text == "icmp" => Ok(Self::Icmp),
            None => {
                Err(format!("`{text}` is not a protocol: expected tcp, udp, icmp or a number from 0 to 255"))
            }
        }
    }
}
