//! Netlink messages about policy rules (ip-rule(8)): which packets are routed by which table.

use std::fmt;

use ipnet::IpNet;
use netlink_packet_route::{
    AddressFamily,
    route::RouteHeader,
    rule::{RuleAction, RuleAttribute, RuleFlags, RuleMessage},
};
use serde::{Deserialize, Serialize};

/// An IP version.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Family {
    /// IPv4.
    #[default]
    V4,
    /// IPv6.
    V6,
}

impl From<Family> for AddressFamily {
    fn from(family: Family) -> Self {
        match family {
            Family::V4 => Self::Inet,
            Family::V6 => Self::Inet6,
        }
    }
}

/// A rule that looks up a table for matching packets. Journals on disk have the names of the fields.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Rule {
    /// The IP version of the packets.
    pub family: Family,
    /// The kernel evaluates rules in ascending order of priority; that of the main table is 32766.
    pub priority: u32,
    /// The table to look up.
    pub table: u32,
    /// The firewall mark that packets must have, and the mask of the bits that count.
    pub mark: Option<(u32, u32)>,
    /// Whether the rule matches the packets for which the conditions do *not* hold.
    pub invert: bool,
    /// Routes with a prefix of at most this length are ignored; 0 ignores the default route.
    pub suppress_prefix_length: Option<u32>,
    /// The incoming interface (`iif`).
    pub input: Option<String>,
    /// The interface that the sending socket is bound to (`oif`).
    #[serde(default)]
    pub output: Option<String>,
    /// The source network.
    #[serde(default)]
    pub source: Option<IpNet>,
    /// The destination network.
    #[serde(default)]
    pub destination: Option<IpNet>,
}

impl Rule {
    /// A rule without conditions that looks up `table`.
    pub fn lookup(family: Family, priority: u32, table: u32) -> Self {
        Self { family, priority, table, ..Self::default() }
    }

    pub(crate) fn message(&self) -> RuleMessage {
        let mut message = RuleMessage::default();
        message.header.family = self.family.into();
        message.header.table = u8::try_from(self.table).unwrap_or(RouteHeader::RT_TABLE_UNSPEC);
        message.header.action = RuleAction::ToTable;
        if self.invert {
            message.header.flags = RuleFlags::Invert;
        }
        let attributes = &mut message.attributes;
        attributes.push(RuleAttribute::Priority(self.priority));
        attributes.push(RuleAttribute::Table(self.table));
        if let Some((mark, mask)) = self.mark {
            attributes.push(RuleAttribute::FwMark(mark));
            attributes.push(RuleAttribute::FwMask(mask));
        }
        attributes.extend(self.suppress_prefix_length.map(RuleAttribute::SuppressPrefixLen));
        attributes.extend(self.input.clone().map(RuleAttribute::Iifname));
        attributes.extend(self.output.clone().map(RuleAttribute::Oifname));
        attributes.extend(self.source.map(|source| RuleAttribute::Source(source.addr())));
        message.header.src_len = self.source.map_or(0, |source| source.prefix_len());
        attributes.extend(self.destination.map(|network| RuleAttribute::Destination(network.network())));
        message.header.dst_len = self.destination.map_or(0, |network| network.prefix_len());
        message
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.priority, if self.invert { " not" } else { "" })?;
        if let Some((mark, mask)) = self.mark {
            write!(f, " fwmark {mark:#x}/{mask:#x}")?;
        }
        if let Some(source) = &self.source {
            write!(f, " from {source}")?;
        }
        if let Some(destination) = &self.destination {
            write!(f, " to {destination}")?;
        }
        if let Some(input) = &self.input {
            write!(f, " iif {input}")?;
        }
        if let Some(output) = &self.output {
            write!(f, " oif {output}")?;
        }
        write!(f, " lookup {}", self.table)?;
        if let Some(length) = self.suppress_prefix_length {
            write!(f, " suppress_prefixlength {length}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use netlink_packet_route::RouteNetlinkMessage;

    use super::*;

    /// Parses a rule that looks up a table; `None` for other actions.
    fn parse(message: &RouteNetlinkMessage) -> Option<Rule> {
        let (RouteNetlinkMessage::NewRule(message) | RouteNetlinkMessage::DelRule(message)) = message else {
            return None;
        };
        let family = match message.header.family {
            AddressFamily::Inet => Family::V4,
            AddressFamily::Inet6 => Family::V6,
            _ => return None,
        };
        if message.header.action != RuleAction::ToTable {
            return None;
        }
        let mut rule = Rule::lookup(family, 0, message.header.table.into());
        rule.invert = message.header.flags.contains(RuleFlags::Invert);
        let (mut mark, mut mask) = (None, u32::MAX);
        for attribute in &message.attributes {
            match attribute {
                RuleAttribute::Priority(priority) => rule.priority = *priority,
                RuleAttribute::Table(table) => rule.table = *table,
                RuleAttribute::FwMark(value) => mark = Some(*value),
                RuleAttribute::FwMask(value) => mask = *value,
                // The kernel reports "none" as -1.
                RuleAttribute::SuppressPrefixLen(length) if *length != u32::MAX => {
                    rule.suppress_prefix_length = Some(*length);
                }
                RuleAttribute::Iifname(name) => rule.input = Some(name.clone()),
                RuleAttribute::Oifname(name) => rule.output = Some(name.clone()),
                RuleAttribute::Source(ip) => rule.source = IpNet::new(*ip, message.header.src_len).ok(),
                RuleAttribute::Destination(ip) => {
                    rule.destination = IpNet::new(*ip, message.header.dst_len).ok();
                }
                _ => {}
            }
        }
        rule.mark = mark.map(|mark| (mark, mask));
        Some(rule)
    }

    #[test]
    fn a_rule_is_read_as_it_was_written() {
        let mut rule = Rule::lookup(Family::V6, 28_017, 28_016);
        rule.mark = Some((0x6d70, u32::MAX));
        rule.invert = true;
        rule.suppress_prefix_length = Some(0);
        rule.input = Some("eth0".into());
        rule.output = Some("t0".into());
        rule.source = Some("fd00::/64".parse().unwrap());
        rule.destination = Some("fd01::/64".parse().unwrap());
        assert_eq!(parse(&RouteNetlinkMessage::NewRule(rule.message())), Some(rule.clone()));
        assert_eq!(parse(&RouteNetlinkMessage::DelRule(rule.message())), Some(rule));
    }

    #[test]
    fn a_rule_reads_like_ip_rule() {
        let mut rule = Rule::lookup(Family::V4, 28_017, 28_016);
        rule.mark = Some((0x6d70, u32::MAX));
        rule.invert = true;
        assert_eq!(rule.to_string(), "28017: not fwmark 0x6d70/0xffffffff lookup 28016");
    }
}
