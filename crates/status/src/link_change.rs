//! Changes of the settings of a link at run time, by `mpvpn link set` and the dashboard.

use std::fmt;

use clap::Args;
use mpvpn_types::{BitRate, ByteSize, Tier, Transport, Weight};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::pipes::Pipes;
use mpvpn_input::values::{One, OneOrNumber, Text, text, word};

/// Changed settings of a link, which apply until the client ends.
#[derive(Args, Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct LinkChange {
    /// When the link is used
    #[arg(long, value_name = "TIER", value_parser = word::<Tier>())]
    #[serde(deserialize_with = "one", serialize_with = "as_text", skip_serializing_if = "Option::is_none")]
    pub tier: Option<Tier>,

    /// Whether traffic on the link costs money: then fewer heartbeats are sent, and a failure is noticed
    /// later
    #[arg(long, value_name = "yes|no", value_parser = yes_or_no)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metered: Option<bool>,

    /// Limit of the rate at which the client sends over the link, in bit/s, as in 20mbit; none: no limit
    #[arg(long, value_name = "RATE|none", value_parser = text::<Limit<BitRate>>)]
    #[serde(deserialize_with = "one", serialize_with = "as_text", skip_serializing_if = "Option::is_none")]
    pub up: Option<Limit<BitRate>>,

    /// Limit of the rate at which the server sends over the link, in bit/s, as in 50mbit; none: no limit
    #[arg(long, value_name = "RATE|none", value_parser = text::<Limit<BitRate>>)]
    #[serde(deserialize_with = "one", serialize_with = "as_text", skip_serializing_if = "Option::is_none")]
    pub down: Option<Limit<BitRate>>,

    /// Share of the traffic relative to other links, 1 to 1000; only for --scheduler weighted
    #[arg(long, value_name = "N", value_parser = text::<Weight>)]
    #[serde(deserialize_with = "one", serialize_with = "as_text", skip_serializing_if = "Option::is_none")]
    pub weight: Option<Weight>,

    /// Limit of the bytes in a month, both directions together, as in 50GB; none: no limit
    #[arg(long, value_name = "SIZE|none", value_parser = text::<Limit<ByteSize>>)]
    #[serde(deserialize_with = "one", serialize_with = "as_text", skip_serializing_if = "Option::is_none")]
    pub quota: Option<Limit<ByteSize>>,

    /// Number of paths over the link, each from its own UDP source port: 1 to 8, or auto; raise it if the
    /// operator limits the rate of each UDP flow
    #[arg(long, value_name = "auto|N", value_parser = text::<Pipes>)]
    #[serde(
        deserialize_with = "OneOrNumber::deserialize",
        serialize_with = "as_text",
        skip_serializing_if = "Option::is_none"
    )]
    pub pipes: Option<Pipes>,

    /// How packets over the link reach the server; set tcp where UDP passes but is slowed down
    #[arg(long, value_name = "auto|quic|tcp", value_parser = word::<Transport>())]
    #[serde(deserialize_with = "one", serialize_with = "as_text", skip_serializing_if = "Option::is_none")]
    pub transport: Option<Transport>,

    /// Count the quota of this month from 0 again, after you bought more data
    #[arg(long)]
    pub quota_reset: bool,
}

impl fmt::Display for LinkChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // With the names of the keys and options.
        let written = serde_json::to_value(self).map_err(|_| fmt::Error)?;
        for (at, (key, value)) in written.as_object().into_iter().flatten().enumerate() {
            let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            write!(f, "{}{key} {value}", if at == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

impl LinkChange {
    /// Whether no setting changes.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// A limit, or the word `none`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit<T>(pub Option<T>);

impl<T: fmt::Display> fmt::Display for Limit<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Some(value) => value.fmt(f),
            None => f.write_str("none"),
        }
    }
}

impl<T: Text> Text for Limit<T> {
    const EXPECTED: &'static str = "a limit in quotes, or \"none\"";
    const EXAMPLE: &'static str = T::EXAMPLE;

    fn read(text: &str) -> Result<Self, String> {
        match text {
            "none" => Ok(Self(None)),
            text => T::read(text).map(|value| Self(Some(value))),
        }
    }
}

/// For clap.
fn yes_or_no(text: &str) -> Result<bool, String> {
    match text {
        "yes" => Ok(true),
        "no" => Ok(false),
        _ => Err(format!("`{text}` is neither yes nor no")),
    }
}

fn one<'de, D: Deserializer<'de>, T: Text>(from: D) -> Result<Option<T>, D::Error> {
    One::<T>::deserialize(from)
}

fn as_text<S: Serializer, T: fmt::Display>(value: &Option<T>, to: S) -> Result<S::Ok, S::Error> {
    match value {
        Some(value) => to.collect_str(value),
        None => to.serialize_none(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_the_same_in_json() {
        let change = LinkChange {
            tier: Some(Tier::Backup),
            weight: Weight::new(3),
            metered: Some(false),
            up: Some(Limit(Some(BitRate::from_bps(1_500_000)))),
            down: Some(Limit(None)),
            quota: Some(Limit(Some(ByteSize::from_bytes(50_000_000_000)))),
            pipes: Some(Pipes::Auto),
            transport: Some(Transport::Tcp),
            quota_reset: true,
        };
        let json = serde_json::to_string(&change).unwrap();
        assert_eq!(serde_json::from_str::<LinkChange>(&json).unwrap(), change, "{json}");
        assert_eq!(serde_json::from_str::<LinkChange>("{}").unwrap(), LinkChange::default());
        for bad in [r#"{"tier":"best"}"#, r#"{"metered":"yes"}"#, r#"{"up":5}"#, r#"{"colour":"blue"}"#] {
            assert!(serde_json::from_str::<LinkChange>(bad).is_err(), "{bad}");
        }
    }
}
