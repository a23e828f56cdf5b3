use mpvpn_types::word_enum;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::finite;
use mpvpn_input::role::Role;
use mpvpn_input::word_schemas;

/// The flows inside the tunnel, the most recently active first: the answer of `GET /v1/flows`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct FlowList {
    /// Whether the process is a server or a client.
    pub role: Role,
    /// Flows, at most 1000.
    pub flows: Vec<Flow>,
    /// Number of flows that are left out: those idle for longest.
    pub left_out: u64,
}

impl FlowList {
    /// Flows in a list, about 300 bytes of JSON each. More make the answer slow for servers with many flows;
    /// fewer hide active flows.
    pub const MAX_FLOWS: usize = 1000;

    /// A list of no flows.
    pub fn new(role: Role) -> Self {
        Self { role, flows: Vec::new(), left_out: 0 }
    }

    /// Merges another list into this one, and keeps the most recently active flows.
    pub fn add(&mut self, other: Self) {
        self.left_out += other.left_out;
        self.flows.extend(other.flows);
        self.flows.sort_by(|a, b| a.idle_s.total_cmp(&b.idle_s));
        self.left_out += self.flows.len().saturating_sub(Self::MAX_FLOWS) as u64;
        self.flows.truncate(Self::MAX_FLOWS);
    }
}

/// One flow.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Flow {
    /// `tcp`, `udp`, `icmp`, or the number of the protocol.
    pub protocol: String,
    /// Name of the user; left out at a client.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub user: String,
    /// Class of traffic; left out at a server and at a proxy.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub class: String,
    /// Address and port of the app; left out at a server, which does not know it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub from: String,
    /// Destination: address or name, and port.
    pub to: String,
    /// How the flow travels.
    #[serde(rename = "lane")]
    pub mode: EffectiveFlowMode,
    /// The cause of the decision how it travels; left out at a server.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub why: String,
    /// State of the connection; left out for flows as packets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<FlowState>,
    /// Bytes from the app: payload of a stream, or IP packets.
    pub up_bytes: u64,
    /// Bytes to the app: payload of a stream, or IP packets.
    pub down_bytes: u64,
    /// Time since the first packet, in s.
    #[serde(serialize_with = "finite")]
    pub age_s: f64,
    /// Time since the last packet, in s.
    #[serde(serialize_with = "finite")]
    pub idle_s: f64,
}

word_enum! {
    /// How a flow travels.
    pub enum EffectiveFlowMode {
        /// A TCP connection on a stream.
        #[default]
        Stream = "stream",
        /// IP packets.
        Datagram = "datagram",
        /// UDP payloads.
        Udp = "udp",
    }
}

word_enum! {
    /// State of a connection.
    pub enum FlowState {
        /// Requested.
        #[default]
        Opening = "opening",
        /// Open in both directions.
        Open = "open",
        /// The app has sent FIN.
        UpEnded = "up-ended",
        /// The far end has sent FIN.
        DownEnded = "down-ended",
        /// Both ends have sent FIN.
        Closing = "closing",
    }
}

word_schemas!(EffectiveFlowMode, FlowState);

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn flow(idle_s: f64) -> Flow {
        Flow {
            class: String::new(),
            protocol: "tcp".into(),
            user: String::new(),
            from: "10.0.0.2:40001".into(),
            to: "198.51.100.9:443".into(),
            mode: EffectiveFlowMode::Stream,
            why: "rule 2".into(),
            state: Some(FlowState::UpEnded),
            up_bytes: 1024,
            down_bytes: 5 << 20,
            age_s: 61.0,
            idle_s,
        }
    }

    #[test]
    fn the_json_is_that_of_the_documentation() {
        let list = FlowList { flows: vec![flow(0.5)], left_out: 3, ..FlowList::new(Role::Client) };
        let json = concat!(
            r#"{"role":"client","flows":[{"protocol":"tcp","from":"10.0.0.2:40001","to":"198.51.100.9:443","#,
            r#""lane":"stream","why":"rule 2","state":"up-ended","up_bytes":1024,"down_bytes":5242880,"#,
            r#""age_s":61.0,"idle_s":0.5}],"left_out":3}"#
        );
        assert_eq!(serde_json::to_string(&list).unwrap(), json);
        assert_eq!(serde_json::from_str::<FlowList>(json).unwrap(), list);
    }

    #[test]
    fn of_many_lists_the_latest_are_kept_and_the_others_counted() {
        let mut list = FlowList::new(Role::Client);
        for part in 0..3 {
            let flows = (0..700).map(|at| flow(f64::from(at * 3 + part))).collect();
            list.add(FlowList { flows, left_out: 1, ..FlowList::new(Role::Client) });
        }
        assert_eq!((list.flows.len(), list.left_out), (FlowList::MAX_FLOWS, 1103));
        assert!(list.flows.iter().zip(0..).all(|(flow, at)| flow.idle_s == f64::from(at)));
    }
}
