use mpvpn_types::word_enum;
use serde::{Deserialize, Serialize};

use super::{Role, finite};

/// The answer of `GET /v1/flows`: the flows inside the tunnel one by one, those first of which something was seen last.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FlowList {
    /// Server or client.
    pub role: Role,
    /// At most [`FlowList::MOST`].
    pub flows: Vec<Flow>,
    /// How many more there are, of which nothing was seen for longer.
    pub left_out: u64,
}

impl FlowList {
    /// Flows in a list.
    pub const MOST: usize = 1000;

    /// A list of no flows.
    pub fn new(role: Role) -> Self {
        Self { role, flows: Vec::new(), left_out: 0 }
    }

    /// Takes another list in, and keeps the latest of all.
    pub fn add(&mut self, other: Self) {
        self.left_out += other.left_out;
        self.flows.extend(other.flows);
        self.flows.sort_by(|a, b| a.idle_s.total_cmp(&b.idle_s));
        self.left_out += self.flows.len().saturating_sub(Self::MOST) as u64;
        self.flows.truncate(Self::MOST);
    }
}

/// One flow.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Flow {
    /// `tcp`, `udp`, `icmp`, or the number of the protocol.
    pub protocol: String,
    /// Whose it is, at a server.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub user: String,
    /// The class that carries it, at a client with a TUN.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub class: String,
    /// The address and port of the app; left out at a server, which is not told.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub from: String,
    /// The address or name, and the port, that the app wants to reach.
    pub to: String,
    /// How it is carried.
    pub lane: FlowLane,
    /// What decided that; left out at a server, which did not.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub why: String,
    /// How far its connection is; left out of packets, whose connections are not followed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<FlowState>,
    /// Bytes from the app: those of its connection, or of packets where these are carried.
    pub up_bytes: u64,
    /// Bytes to the app, likewise.
    pub down_bytes: u64,
    /// Seconds since it was seen first.
    #[serde(serialize_with = "finite")]
    pub age_s: f64,
    /// Seconds since something of it was seen last.
    #[serde(serialize_with = "finite")]
    pub idle_s: f64,
}

word_enum! {
    /// How a flow is carried.
    pub enum FlowLane {
        /// As the bytes of a stream.
        #[default]
        Stream = "stream",
        /// As IP packets.
        Datagram = "datagram",
        /// As UDP payloads.
        Udp = "udp",
    }
}

word_enum! {
    /// How far a connection is.
    pub enum FlowState {
        /// Asked for.
        #[default]
        Opening = "opening",
        /// Bytes may move both ways.
        Open = "open",
        /// The app sends nothing more.
        UpEnded = "up-ended",
        /// The other side sends nothing more.
        DownEnded = "down-ended",
        /// Neither does.
        Closing = "closing",
    }
}

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
            lane: FlowLane::Stream,
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
        assert_eq!((list.flows.len(), list.left_out), (FlowList::MOST, 1103));
        assert!(list.flows.iter().zip(0..).all(|(flow, at)| flow.idle_s == f64::from(at)));
    }
}
