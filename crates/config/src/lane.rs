//! Parses the tables `[[lane-rule]]` of a client's file.

use ipnet::IpNet;
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{
    Deserialize,
    de::{Deserializer, Error as _},
};

use mpvpn_input::{
    rules::{Ports, Prefix},
    schema,
    values::{Filled, One},
};
use mpvpn_types::FlowMode;

/// The modes that a rule can set.
const RULE_MODES: &str = "\"datagram\" or \"stream\"";

/// How TCP connections to some destinations travel. The first table that matches decides.
#[derive(Clone, Debug, Deserialize, JsonSchema, PartialEq, Eq)]
#[schemars(rename = "lane-rule")]
#[serde(deny_unknown_fields, expecting = "a table with the head [[lane-rule]]")]
pub struct LaneRule {
    /// How the connections travel; `auto` is not allowed here
    #[serde(rename = "lane", deserialize_with = "lane")]
    #[schemars(schema_with = "rule_mode_schema")]
    pub streams: bool,
    /// Destination networks or addresses [default: all]
    #[serde(default, with = "Filled::<Prefix>")]
    pub to: Vec<IpNet>,
    /// Destination ports [default: all]
    #[serde(default, with = "Filled::<Ports>")]
    pub ports: Vec<Ports>,
}

/// The schema of the words that [`lane`] accepts.
fn rule_mode_schema(_: &mut SchemaGenerator) -> Schema {
    let words: Vec<_> =
        FlowMode::WORDS.iter().filter(|(word, _)| *word != FlowMode::Auto.as_str()).copied().collect();
    schema::words(RULE_MODES, &words)
}

fn lane<'de, D: Deserializer<'de>>(from: D) -> Result<bool, D::Error> {
    match One::<FlowMode>::deserialize(from)? {
        Some(FlowMode::Stream) => Ok(true),
        Some(FlowMode::Datagram) => Ok(false),
        _ => Err(D::Error::custom(format!("expected {RULE_MODES}"))),
    }
}
