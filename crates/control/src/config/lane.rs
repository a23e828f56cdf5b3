//! How `[[lane-rule]]` is written in a client's file.

use ipnet::IpNet;
use serde::{
    Deserialize,
    de::{Deserializer, Error as _},
};

use super::{
    FlowMode,
    rules::{networks, some},
    values::one,
};
use crate::access::Ports;

/// One `[[lane-rule]]`: how TCP connections to some destinations travel.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields, expecting = "a table with the head [[lane-rule]]")]
pub struct LaneRule {
    /// Whether as streams; else as packets.
    #[serde(rename = "lane", deserialize_with = "lane")]
    pub streams: bool,
    /// The addresses that it is about; all of them if there is none.
    #[serde(default, deserialize_with = "networks")]
    pub to: Vec<IpNet>,
    /// The ports that it is about; all of them if there is none.
    #[serde(default, deserialize_with = "some")]
    pub ports: Vec<Ports>,
}

fn lane<'de, D: Deserializer<'de>>(from: D) -> Result<bool, D::Error> {
    match one::<D, FlowMode>(from)? {
        Some(FlowMode::Stream) => Ok(true),
        Some(FlowMode::Datagram) => Ok(false),
        _ => Err(D::Error::custom("a rule says \"datagram\" or \"stream\"")),
    }
}
