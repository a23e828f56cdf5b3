//! Settings of links: the tables `[[link]]` of a client's file, and `mpvpn link set` at run time.

use std::{fmt, net::SocketAddr};

use mpvpn_masque::capsule::LinkPolicy;
use mpvpn_types::{BitRate, ByteSize, Tier, Transport, Weight};
use schemars::JsonSchema;
use serde::{
    Deserialize,
    de::{Deserializer, Error as _, MapAccess, SeqAccess, Visitor, value::MapAccessDeserializer},
};

use mpvpn_input::{
    schema,
    values::{One, OneOrNumber, Text, is_link_name},
};
use mpvpn_status::{link_change::LinkChange, pipes::Pipes};

/// How interfaces with names like this are used. The first table whose `name` matches counts.
#[derive(Clone, Debug, Deserialize, JsonSchema, PartialEq, Eq)]
#[schemars(rename = "link")]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct LinkConfig {
    /// Name of an interface, or a pattern: `*` stands for any characters, `?` for any one
    #[serde(deserialize_with = "name")]
    #[schemars(with = "One<LinkPattern>")]
    pub name: String,
    /// When the link is used; set `backup` for one that should only help out [default: primary]
    #[serde(default, deserialize_with = "value")]
    #[schemars(with = "One<Tier>")]
    pub tier: Tier,
    /// Whether traffic on the link costs money: then fewer heartbeats are sent, and a failure is noticed
    /// later [default: false]
    #[serde(default)]
    pub metered: bool,
    /// Limit of the rate at which the client sends over the link, in bit/s of IP packets, 64kbit to
    /// 1000gbit. A limit a little below the real rate keeps queues out of the modem [default: none]
    #[serde(default, with = "One::<BitRate>")]
    pub up: Option<BitRate>,
    /// Limit of the rate at which the server sends over the link, in bit/s of IP packets, 64kbit to
    /// 1000gbit. A limit a little below the real rate keeps queues out of the operator's network
    /// [default: none]
    #[serde(default, with = "One::<BitRate>")]
    pub down: Option<BitRate>,
    /// Share of the traffic relative to other links, 1 to 1000, in both directions; only for the scheduler
    /// `weighted` [default: 1]
    #[serde(default, deserialize_with = "weight")]
    #[schemars(schema_with = "schema::number::<Weight>")]
    pub weight: Weight,
    /// Limit of the bytes in IP packets in a month, both directions together, at least 1MB; a link that
    /// reached it is not used until the next month [default: none]
    #[serde(default, with = "One::<ByteSize>")]
    pub quota: Option<ByteSize>,
    /// Day of the month on which the quota starts again from 0, 1 to 31 [default: 1]
    #[serde(default = "first", alias = "quota_day", deserialize_with = "day")]
    #[schemars(range(min = 1, max = 31))]
    pub quota_day: u8,
    /// Number of paths over the link, each from its own UDP source port; raise it if the operator limits the
    /// rate of each UDP flow [default: the key `pipes` of the file]
    #[serde(default, with = "OneOrNumber::<Pipes>")]
    pub pipes: Option<Pipes>,
    /// DSCP of the tunnel's packets on this link (RFC 2474), for networks that treat packets by it; the
    /// `dscp` of a class precedes it [default: 0]
    #[serde(default, deserialize_with = "dscp")]
    #[schemars(with = "OneOrNumber<Dscp>")]
    pub dscp: u8,
    /// How packets over the link reach the server; set `tcp` where UDP passes but is slowed down [default:
    /// the key `transport` of the file]
    #[serde(default, with = "One::<Transport>")]
    pub transport: Option<Transport>,
    /// Address and port of the server for this link, where the server has several; the connection stays one
    /// [default: the key `server` of the file]
    #[serde(default, with = "One::<SocketAddr>")]
    pub server: Option<SocketAddr>,
}

impl Default for LinkConfig {
    /// The settings of links that no table names.
    fn default() -> Self {
        Self {
            name: "*".into(),
            tier: Tier::Primary,
            metered: false,
            up: None,
            down: None,
            weight: Weight::default(),
            quota: None,
            quota_day: 1,
            pipes: None,
            dscp: 0,
            transport: None,
            server: None,
        }
    }
}

impl LinkConfig {
    /// The policy of the link, for both ends of the tunnel.
    pub fn policy(&self) -> LinkPolicy {
        let Self { tier, metered, up, down, weight, dscp, .. } = *self;
        LinkPolicy { tier, metered, up, down, weight, dscp }
    }

    /// Applies a change. The caller handles `quota_reset`, as the usage is not part of the settings.
    pub fn change(&mut self, change: &LinkChange) {
        self.tier = change.tier.unwrap_or(self.tier);
        self.metered = change.metered.unwrap_or(self.metered);
        self.up = change.up.map_or(self.up, |limit| limit.0);
        self.down = change.down.map_or(self.down, |limit| limit.0);
        self.weight = change.weight.unwrap_or(self.weight);
        self.quota = change.quota.map_or(self.quota, |limit| limit.0);
        self.pipes = change.pipes.or(self.pipes);
        self.transport = change.transport.or(self.transport);
    }
}

/// Whether `name` matches `pattern`: `*` matches any characters, `?` any one.
pub fn is_match(pattern: &str, name: &str) -> bool {
    let (pattern, name) = (pattern.as_bytes(), name.as_bytes());
    let (mut at, mut from) = (0, 0);
    // Where to continue if the text after the last star does not match here: places in pattern and name.
    let mut star: Option<(usize, usize)> = None;
    while from < name.len() {
        match pattern.get(at) {
            Some(b'*') => {
                star = Some((at, from));
                at += 1;
            }
            Some(b) if *b == b'?' || *b == name[from] => (at, from) = (at + 1, from + 1),
            _ => match &mut star {
                Some((star, upto)) => {
                    *upto += 1;
                    (at, from) = (*star + 1, *upto);
                }
                None => return false,
            },
        }
    }
    pattern[at..].iter().all(|b| *b == b'*')
}

fn first() -> u8 {
    1
}

fn value<'de, D: Deserializer<'de>, T: Text + Default>(from: D) -> Result<T, D::Error> {
    Ok(One::<T>::deserialize(from)?.unwrap_or_default())
}

/// A name of a link, or a pattern of names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LinkPattern(pub(super) String);

impl Text for LinkPattern {
    const EXPECTED: &'static str = "an interface's name or a pattern in quotes, as in \"wwan*\"";
    const EXAMPLE: &'static str = "wwan*";

    fn read(text: &str) -> Result<Self, String> {
        match is_link_name(text) {
            true => Ok(Self(text.into())),
            false => Err(format!(
                "`{text}` is not an interface's name: expected 1 to 15 letters, digits, - _ . * or ?"
            )),
        }
    }
}

fn name<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    Ok(One::<LinkPattern>::deserialize(from)?.map(|pattern| pattern.0).unwrap_or_default())
}

fn day<'de, D: Deserializer<'de>>(from: D) -> Result<u8, D::Error> {
    let day = i64::deserialize(from)?;
    match u8::try_from(day) {
        Ok(day) if (1..=31).contains(&day) => Ok(day),
        _ => Err(D::Error::custom(format!("{day} is not a day of a month: expected 1 to 31"))),
    }
}

fn weight<'de, D: Deserializer<'de>>(from: D) -> Result<Weight, D::Error> {
    let number = i64::deserialize(from)?;
    let found = u64::try_from(number).ok().and_then(Weight::new);
    found.ok_or_else(|| {
        D::Error::custom(format!(
            "{number} is not a weight: expected a whole number from 1 to {}",
            Weight::MAX
        ))
    })
}

/// A DSCP: a number, or a name of the IANA registry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Dscp(pub(super) u8);

impl Text for Dscp {
    const EXPECTED: &'static str = "a number from 0 to 63, or a name as in \"ef\"";
    const EXAMPLE: &'static str = "ef";

    fn read(text: &str) -> Result<Self, String> {
        let number = || text.parse().ok().filter(|number| *number < 64);
        dscp_named(text).or_else(number).map(Self).ok_or_else(|| {
            format!("`{text}` is not a DSCP: expected 0 to 63, ef, va, le, cs0 to cs7, or af11 to af43")
        })
    }
}

fn dscp<'de, D: Deserializer<'de>>(from: D) -> Result<u8, D::Error> {
    Ok(OneOrNumber::<Dscp>::deserialize(from)?.map(|dscp| dscp.0).unwrap_or_default())
}

/// The names of the IANA registry: class selectors (RFC 2474), assured forwarding (RFC 2597), expedited
/// forwarding (RFC 3246), voice-admit (RFC 5865) and lower effort (RFC 8622).
fn dscp_named(text: &str) -> Option<u8> {
    let lower = text.to_ascii_lowercase();
    match lower.as_str() {
        "ef" => return Some(46),
        "va" => return Some(44),
        "le" => return Some(1),
        _ => {}
    }
    let digits = |text: &str| text.bytes().map(|b| b.wrapping_sub(b'0')).collect::<Vec<_>>();
    if let Some([class @ 0..=7]) = lower.strip_prefix("cs").map(digits).as_deref() {
        return Some(class << 3);
    }
    match lower.strip_prefix("af").map(digits).as_deref() {
        Some([class @ 1..=4, drop @ 1..=3]) => Some(class << 3 | drop << 1),
        _ => None,
    }
}

/// For serde: the tables `[[link]]`, of which no two have the same name.
pub(super) fn link_tables<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<LinkConfig>, D::Error> {
    struct Links;

    /// One table, read with the earlier ones at hand, so that the error for a repeated name has the right
    /// line.
    struct LinkTable<'a>(&'a [LinkConfig]);

    impl<'de> serde::de::DeserializeSeed<'de> for LinkTable<'_> {
        type Value = LinkConfig;

        fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<LinkConfig, D::Error> {
            from.deserialize_map(self)
        }
    }

    impl<'de> Visitor<'de> for LinkTable<'_> {
        type Value = LinkConfig;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a table with the head [[link]]")
        }

        fn visit_map<A: MapAccess<'de>>(self, fields: A) -> Result<LinkConfig, A::Error> {
            let link = LinkConfig::deserialize(MapAccessDeserializer::new(fields))?;
            match self.0.iter().any(|other| other.name == link.name) {
                true => Err(A::Error::custom(format!(
                    "there are two [[link]] with the name `{}`: the second would never apply, put both into one",
                    link.name
                ))),
                false => Ok(link),
            }
        }
    }

    impl<'de> Visitor<'de> for Links {
        type Value = Vec<LinkConfig>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("tables with the head [[link]]")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
            let mut links = Vec::new();
            while let Some(link) = items.next_element_seed(LinkTable(&links))? {
                links.push(link);
            }
            Ok(links)
        }
    }

    from.deserialize_seq(Links)
}

#[cfg(test)]
mod tests {
    use mpvpn_status::link_change::Limit;

    use super::*;
    use proptest::prelude::*;

    #[test]
    fn patterns_stand_for_names() {
        for (pattern, name) in [
            ("wwan*", "wwan0"),
            ("wwan*", "wwan"),
            ("*", "eth0"),
            ("e*h?", "eth1"),
            ("eth0", "eth0"),
            ("*0*", "a0b0"),
        ] {
            assert!(is_match(pattern, name), "{pattern} {name}");
        }
        for (pattern, name) in
            [("wwan*", "wlan0"), ("eth?", "eth10"), ("eth?", "eth"), ("eth0", "eth01"), ("*0", "eth1")]
        {
            assert!(!is_match(pattern, name), "{pattern} {name}");
        }
    }

    #[test]
    fn names_of_dscp_are_those_of_the_registry() {
        for (name, value) in [
            ("ef", 46),
            ("EF", 46),
            ("cs0", 0),
            ("cs1", 8),
            ("cs7", 56),
            ("af11", 10),
            ("af43", 38),
            ("le", 1),
        ] {
            assert_eq!(dscp_named(name), Some(value), "{name}");
        }
        for bad in ["", "cs8", "cs", "af44", "af01", "af1", "best", "cs10"] {
            assert_eq!(dscp_named(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_change_leaves_the_rest_as_it_is() {
        let mut link =
            LinkConfig { up: Some(BitRate::from_bps(64_000)), metered: true, ..LinkConfig::default() };
        link.change(&LinkChange { up: Some(Limit(None)), tier: Some(Tier::Never), ..LinkChange::default() });
        assert_eq!(link, LinkConfig { tier: Tier::Never, metered: true, ..LinkConfig::default() });
    }

    proptest! {
        #[test]
        fn a_name_matches_itself_and_patterns_made_of_it(name in "[a-z0-9]{1,15}", at in 0usize..15) {
            prop_assert!(is_match(&name, &name));
            let at = at % name.len();
            let patterns = [
                format!("{}*", &name[..at]),
                format!("*{}", &name[at..]),
                format!("{}?{}", &name[..at], &name[at + 1..]),
            ];
            for pattern in patterns {
                prop_assert!(is_match(&pattern, &name), "{} {}", pattern, name);
            }
        }
    }
}
