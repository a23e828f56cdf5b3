//! Routes into the tunnel that the user wants beside those of `routes`: the tables `[[route]]`.

use ipnet::IpNet;
use mpvpn_input::{rules::Prefix, values::Filled};
use schemars::JsonSchema;
use serde::Deserialize;

/// Routes into the tunnel. They are set whenever its device is there, and taken back with it.
#[derive(Clone, Debug, Deserialize, JsonSchema, PartialEq, Eq)]
#[schemars(rename = "route")]
#[serde(deny_unknown_fields, expecting = "a table with the head [[route]]")]
pub struct RouteRule {
    /// Networks or addresses
    #[serde(with = "Filled::<Prefix>")]
    pub to: Vec<IpNet>,
    /// Metric: of several routes to a network that with the smallest counts [default: the kernel's]
    #[serde(default)]
    pub metric: Option<u32>,
    /// Number of the routing table [default: 254, the main table]
    #[serde(default)]
    pub table: Option<u32>,
}
