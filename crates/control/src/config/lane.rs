//! How `[[lane-rule]]` is written in a client's file.

use ipnet::IpNet;
use serde::{
    Deserialize,
    de::{Deserializer, Error as _},
};

use super::{
    FlowMode,
    access::{Prefix, some},
    values::one,
};
use crate::access::Ports;

/// One `[[lane-rule]]`: how TCP connections to some destinations travel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaneRule {
    /// Whether as streams; else as packets.
    pub streams: bool,
    /// The addresses that it is about; all of them if there is none.
    pub to: Vec<IpNet>,
    /// The ports that it is about; all of them if there is none.
    pub ports: Vec<Ports>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", expecting = "a table with the head [[lane-rule]]")]
struct Table {
    #[serde(deserialize_with = "lane")]
    lane: bool,
    #[serde(default, deserialize_with = "some")]
    to: Vec<Prefix>,
    #[serde(default, deserialize_with = "some")]
    ports: Vec<Ports>,
}

/// For serde: the tables in order.
pub(super) fn list<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<LaneRule>, D::Error> {
    let rule = |table: Table| LaneRule {
        streams: table.lane,
        to: table.to.into_iter().map(|prefix| prefix.0).collect(),
        ports: table.ports,
    };
    Ok(Vec::<Table>::deserialize(from)?.into_iter().map(rule).collect())
}

fn lane<'de, D: Deserializer<'de>>(from: D) -> Result<bool, D::Error> {
    match one::<D, FlowMode>(from)? {
        Some(FlowMode::Stream) => Ok(true),
        Some(FlowMode::Datagram) => Ok(false),
        _ => Err(D::Error::custom("a rule says \"datagram\" or \"stream\"")),
    }
}
