//! The status of a running server or client: the JSON of `GET /v1/status`, and its rendering as text.
//!
//! In: values that client and server fill in. Out: JSON and text. Always holds: times are in ms (or s if the
//! name ends in `_s`), rates in bit/s, sizes in bytes of UDP payload unless the field says otherwise; fields
//! are added, never renamed; a reader uses defaults for missing fields and skips unknown ones.
#![forbid(unsafe_code)]
// This crate is at the edge: files, sockets and clocks are its business.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

mod announced;
pub mod check;
pub mod events;
mod flows;
pub mod link_change;
pub mod measure;
pub mod metrics;
mod overview;
mod path_figures;
pub mod pipes;
pub mod rates;
pub mod reload_report;
mod render;
mod resequencing;
mod server;
mod session;
mod table;

use mpvpn_input::role::Role;
use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use mpvpn_types::word_enum;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize, Serializer};

use crate::metrics::{Metric, metrics};
use mpvpn_input::word_schemas;

pub use announced::{AnnouncedNetwork, ForwardedPort, NetworkState};
pub use flows::{EffectiveFlowMode, Flow, FlowList, FlowState};
pub use overview::{Overview, SessionSummary};
pub use path_figures::{Figure, PathFigures, format_ms};
pub use render::{Sections, render, render_flows, render_links, used_of};
pub use render::{format_bytes, format_duration, format_rate};
pub use resequencing::{FecStats, PathFec, Resequencing};
pub use server::{Budget, Handshakes, RefusedRequests};
pub use session::{ServerInUse, Session};
pub use table::{Table, UNKNOWN, fit, section, wrap};

/// The status of one process: the answer of `GET /v1/status`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Status {
    /// Whether the process is a server or a client.
    pub role: Role,
    /// Whether it is a client that serves apps as a proxy, without a TUN device; left out if not.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub proxy: bool,
    /// The program's version.
    pub version: String,
    /// State of the process.
    pub state: State,
    /// The state with its reason, as a sentence; left out at a server.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub verdict: String,
    /// Time since the start of the process, in s.
    #[serde(serialize_with = "finite")]
    pub uptime_s: f64,
    /// Notes about how the process runs, a sentence each; left out if there is none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// Kill switch of a client; left out at a server and at a proxy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kill_switch: Option<KillSwitchState>,
    /// Rights that the process keeps; left out if it is not confined.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub confinement: Option<Confinement>,
    /// Memory of the process; left out where the C library is not glibc.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<Memory>,
    /// Addresses of the process in the tunnel, with their prefix lengths.
    #[serde(default)]
    #[schemars(with = "Vec<String>")]
    pub addresses: Vec<IpNet>,
    /// The server that a client with several uses; left out where there is only one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server: Option<ServerInUse>,
    /// Session with the server; `null` at a server.
    #[serde(default)]
    pub session: Option<Session>,
    /// Classes of traffic.
    #[serde(default)]
    pub classes: Vec<Class>,
    /// Links of a client.
    #[serde(default)]
    pub links: Vec<Link>,
    /// QUIC paths of a client.
    #[serde(default)]
    pub paths: Vec<Path>,
    /// Numbers of flows inside the tunnel.
    #[serde(default)]
    pub flows: Flows,
    /// Numbered packets of the default class; left out at a server, which has it for each client, and where
    /// the two ends did not agree on numbers.
    #[serde(rename = "lane", default, skip_serializing_if = "Option::is_none")]
    pub resequencing: Option<Resequencing>,
    /// Sessions of a server.
    #[serde(default)]
    pub clients: Vec<Client>,
    /// Networks behind this client, or behind the clients of a server; left out if there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub announced: Vec<AnnouncedNetwork>,
    /// Ports of a server's machine that lead to hosts in the tunnel, or of a client's address there that lead
    /// to hosts behind it; left out if there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub forwards: Vec<ForwardedPort>,
    /// QUIC handshakes since the start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub handshakes: Option<Handshakes>,
    /// Requests that a server refused since the start, by HTTP status; left out if there were none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub refused: Vec<RefusedRequests>,
    /// Memory of a server, and its connections; left out at a client.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub budget: Option<Budget>,
    /// Users of a server, those who are not connected, too; empty at a server without authentication.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub users: Vec<User>,
}

impl Status {
    /// The status of a process that has just started.
    pub fn new(role: Role) -> Self {
        Self { role, version: env!("CARGO_PKG_VERSION").into(), ..Self::default() }
    }

    /// The process in a word: `server`, `client` or `proxy`.
    pub fn kind(&self) -> &str {
        if self.proxy { "proxy" } else { self.role.as_str() }
    }

    /// The state with its reason, as far as there is one.
    pub fn sentence(&self) -> &str {
        if self.verdict.is_empty() { self.state.as_str() } else { &self.verdict }
    }
}

word_enum! {
    /// The state of a client's kill switch.
    pub enum KillSwitchState {
        /// It is off: packets may leave past the tunnel.
        #[default]
        Off = "off",
        /// It blocks packets past the tunnel, and the tunnel carries packets.
        Armed = "armed",
        /// It blocks all packets, as the tunnel carries none.
        Blocking = "blocking",
    }
}

word_enum! {
    /// State of a process, or of a client's connection for a class.
    pub enum State {
        /// Not ready yet.
        #[default]
        Starting = "starting",
        /// A client that has no session yet.
        Connecting = "connecting",
        /// It works.
        Up = "up",
        /// A client that works, though not on all of its links.
        Degraded = "degraded",
        /// A client to which nothing of its server arrives.
        NoAnswer = "no-answer",
        /// A client that the server knows and refuses.
        Refused = "refused",
        /// A client that lost its session and tries to get it back.
        Reconnecting = "reconnecting",
        /// A class without traffic so far or for ten minutes, or in a client without traffic for a minute: it
        /// has no connection, and its paths are on standby.
        Asleep = "asleep",
        /// A process that undoes its changes to the system.
        Stopping = "stopping",
    }
}

impl State {
    /// Whether packets get through.
    pub fn works(self) -> bool {
        matches!(self, Self::Up | Self::Degraded)
    }
}

/// The rights that a process keeps while it runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Confinement {
    /// Its capabilities, by the names of capabilities(7) in small letters without `cap_`.
    pub capabilities: Vec<String>,
    /// Whether system calls that it does not need fail (seccomp).
    pub system_calls: bool,
    /// Version of Landlock, which keeps it from files that it does not need; left out where the kernel has
    /// none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub landlock: Option<u32>,
}

/// The memory of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Memory {
    /// Resident memory that is no file's, in bytes: heap, stacks and static data.
    pub resident_bytes: u64,
    /// Bytes that the program has allocated on the heap and not freed.
    pub heap_bytes: u64,
}

word_enum! {
    /// Whether a user of a server has access.
    pub enum UserState {
        /// The user has access.
        #[default]
        Active = "active",
        /// The access was taken away.
        Revoked = "revoked",
        /// The access has ended by its date.
        Expired = "expired",
        /// The quota of this month is used up.
        QuotaUsedUp = "quota-used-up",
    }
}

/// A user of a server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct User {
    /// Name of the user.
    pub name: String,
    /// Whether the user has access.
    pub state: UserState,
    /// The last day of the access in UTC, or the moment at which it ends; left out if it does not end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires: Option<String>,
    /// Number of sessions now.
    pub sessions: u32,
    /// Number of connections now.
    #[serde(default)]
    pub connections: u64,
    /// Bytes that the server holds for the user's connections now.
    #[serde(default)]
    pub held_bytes: u64,
    /// Number of sessions at once that the users' file allows; left out if it says nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_sessions: Option<u32>,
    /// Limit of the rate at which the user's clients send, in bit/s; left out if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub up_cap_bps: Option<u64>,
    /// Limit of the rate at which the user's clients receive, in bit/s; left out if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub down_cap_bps: Option<u64>,
    /// Bytes that the user may carry in a calendar month (UTC), both directions together; left out if there
    /// is no quota.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quota_bytes: Option<u64>,
    /// Bytes that the user has carried in this month; left out if there is no quota.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quota_used_bytes: Option<u64>,
    /// Bytes of IP packets sent to the user's clients since the server started.
    #[serde(default)]
    pub tx_bytes: u64,
    /// Bytes of IP packets received from the user's clients since the server started.
    #[serde(default)]
    pub rx_bytes: u64,
}

/// One class of traffic, which has a connection of its own; at a server, all connections of that class
/// together, closed ones included in counters.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Class {
    /// Name of the class, as configured.
    pub name: String,
    /// How its TCP connections travel, as configured; not known at a server.
    #[serde(rename = "lane")]
    pub flow_mode: String,
    /// Congestion controller at this end; at a server those of all its connections, as in `bbr, cubic`.
    pub cc: String,
    /// Congestion controller at the server, as reported by the server; left out where it reports none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer_cc: Option<String>,
    /// Scheduler, as configured; not known at a server.
    pub scheduler: String,
    /// Bytes of IP packets sent since the start.
    pub tx_bytes: u64,
    /// Bytes of IP packets received since the start.
    pub rx_bytes: u64,
    /// Time that packets wait here before they are sent, in ms; with several connections, of the one with
    /// the longest.
    #[serde(serialize_with = "finite")]
    pub queue_ms: f64,
    /// Bytes of packets that wait here before they are sent; left out if none wait.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub queue_bytes: u64,
    /// Packets dropped because the queue was full.
    pub drops: u64,
    /// TCP acknowledgements not sent because a later one superseded them while they waited here; left out if
    /// none were.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub superseded_acks: u64,
    /// Bytes of streams sent again on another path because the first one stalled or failed; left out if
    /// there were none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub reinjected_bytes: u64,
    /// Rate sent, in bit/s of IP packets, measured over about a second; left out where unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tx_bps: Option<u64>,
    /// Rate received, in bit/s of IP packets, measured over about a second; left out where unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rx_bps: Option<u64>,
    /// State of a client's connection for this class: `up`, `connecting` or `asleep`. While it is not `up`,
    /// the class `default` carries its packets. Left out at a server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<State>,
    /// Why the connection is not up, for example because the server allows no more classes; left out if
    /// empty.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// Smoothed round-trip time of the path with the lowest one that carries data, in ms; left out where
    /// there is none, and for all clients of a server together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rtt_ms: Option<f64>,
    /// Loss of what this end sent in the last 10 s on all paths, in percent; with several connections, of
    /// the worst.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_pct: Option<f64>,
    /// Numbered packets of the class; left out where the two ends did not agree on numbers.
    #[serde(rename = "order", default, skip_serializing_if = "Option::is_none")]
    pub resequencing: Option<Resequencing>,
    /// TUN device of the class; left out if it has none of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tun: Option<String>,
    /// Addresses of that device.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(with = "Vec<String>")]
    pub addresses: Vec<IpNet>,
}

impl Class {
    /// The metrics of each class.
    pub const METRICS: &[Metric<Self>] = metrics! { class: Class;
        "class_up" Gauge class.connected(), "Whether the connection of a class works; no value while the class has no traffic.";
        "class_transmit_bytes_total" Counter class.tx_bytes, "Bytes of IP packets sent.";
        "class_receive_bytes_total" Counter class.rx_bytes, "Bytes of IP packets received.";
        "class_transmit_bytes_per_second" Gauge class.tx_bps.map(bytes),
            "Rate sent, in bytes of IP packets, measured over about a second.";
        "class_receive_bytes_per_second" Gauge class.rx_bps.map(bytes),
            "Rate received, in bytes of IP packets, measured over about a second.";
        "class_rtt_seconds" Gauge class.rtt_ms.map(seconds), "Smoothed round-trip time of the path with the lowest one that carries data.";
        "class_loss_ratio" Gauge class.loss_pct.map(ratio), "Loss of what this end sent in the last 10 s.";
        "class_queue_seconds" Gauge seconds(class.queue_ms), "Time that packets wait before they are sent.";
        "class_queue_bytes" Gauge class.queue_bytes, "Bytes of packets that wait before they are sent.";
        "class_dropped_packets_total" Counter class.drops, "Packets dropped because the queue was full.";
        "class_superseded_acks_total" Counter class.superseded_acks,
            "TCP acknowledgements not sent because a later one superseded them while they waited.";
        "class_reinjected_bytes_total" Counter class.reinjected_bytes,
            "Bytes of streams sent again on another path because the first one stalled or failed.";
        "class_numbered_packets_total" Counter class.resequencing.map(|counters| counters.numbered), "Packets sent with a number.";
        "class_resent_packets_total" Counter class.resequencing.map(|counters| counters.resent),
            "Packets retransmitted because they were lost.";
        "class_copied_packets_total" Counter class.resequencing.map(|counters| counters.copies), "Additional copies of packets sent.";
        "class_restored_packets_total" Counter class.resequencing.map(|counters| counters.restored),
            "Packets received early, held and then delivered in order.";
        "class_late_packets_total" Counter class.resequencing.map(|counters| counters.late),
            "Packets received after the receiver had given them up.";
        "class_duplicate_packets_total" Counter class.resequencing.map(|counters| counters.duplicates),
            "Packets received a second time, and dropped.";
        "class_given_up_packets_total" Counter class.resequencing.map(|counters| counters.given_up), "Packets that the receiver waited for and gave up.";
        "class_reorder_waiting_packets" Gauge class.resequencing.map(|counters| counters.waiting),
            "Packets received early that wait now for those before them.";
        "class_reorder_wait_seconds_total" Counter class.resequencing.map(|counters| seconds(counters.wait_ms as f64)),
            "Time that packets received early have waited for those before them, summed up over all packets.";
        "class_fec_ratio" Gauge class.fec().map(|fec| ratio(fec.percent.into())),
            "Repair packets sent now per packet, on the path with the most.";
        "class_fec_protected_packets_total" Counter class.fec().map(|fec| fec.protected),
            "Packets sent in groups that have repair packets.";
        "class_fec_repair_packets_total" Counter class.fec().map(|fec| fec.sent), "Repair packets sent.";
        "class_fec_repair_bytes_total" Counter class.fec().map(|fec| fec.sent_bytes), "Bytes of repair packets sent.";
        "class_fec_made_good_packets_total" Counter class.fec().map(|fec| fec.made_good),
            "Packets sent by this end and lost, which the far end restored.";
        "class_fec_recovered_packets_total" Counter class.fec().map(|fec| fec.recovered),
            "Packets lost on the way to this end and restored.";
        "class_fec_wasted_packets_total" Counter class.fec().map(|fec| fec.wasted),
            "Repair packets received and not needed.";
        "class_fec_unrecoverable_groups_total" Counter class.fec().map(|fec| fec.unrecoverable),
            "Groups that lost more than could be restored.";
    };

    fn connected(&self) -> Option<bool> {
        self.state.filter(|state| *state != State::Asleep).map(|state| state == State::Up)
    }

    fn fec(&self) -> Option<FecStats> {
        self.resequencing.map(|counters| counters.fec)
    }

    /// The status of a class before its first packet.
    pub fn new(name: &str) -> Self {
        let auto = || "auto".to_owned();
        Self { name: name.into(), flow_mode: auto(), cc: "bbr".into(), scheduler: auto(), ..Self::default() }
    }

    /// Adds the values of another connection of the class: counters and rates are summed, of round-trip times
    /// the lowest is kept, of losses and queueing delays the highest. The class is asleep only if all its
    /// connections are.
    pub fn add(&mut self, other: &Self) {
        if self.state == Some(State::Asleep) && other.state.is_some_and(|state| state != State::Asleep) {
            self.state = other.state;
            self.reason.clone_from(&other.reason);
        }
        self.add_cc(&other.cc);
        self.tx_bytes += other.tx_bytes;
        self.rx_bytes += other.rx_bytes;
        self.queue_bytes += other.queue_bytes;
        self.drops += other.drops;
        self.superseded_acks += other.superseded_acks;
        self.reinjected_bytes += other.reinjected_bytes;
        self.queue_ms = self.queue_ms.max(other.queue_ms);
        let either = |a: Option<f64>, b: Option<f64>, of: fn(f64, f64) -> f64| match (a, b) {
            (Some(a), Some(b)) => Some(of(a, b)),
            (a, b) => a.or(b),
        };
        self.rtt_ms = either(self.rtt_ms, other.rtt_ms, f64::min);
        self.loss_pct = either(self.loss_pct, other.loss_pct, f64::max);
        for (own, rate) in [(&mut self.tx_bps, other.tx_bps), (&mut self.rx_bps, other.rx_bps)] {
            *own = rate.map(|rate| own.unwrap_or(0) + rate).or(*own);
        }
        if let Some(counters) = other.resequencing {
            self.resequencing.get_or_insert_default().add(counters);
        }
    }

    fn add_cc(&mut self, other: &str) {
        for cc in other.split(", ").filter(|cc| !cc.is_empty()) {
            if !self.cc.split(", ").any(|known| known == cc) {
                let separator = if self.cc.is_empty() { "" } else { ", " };
                self.cc = format!("{}{separator}{cc}", self.cc);
            }
        }
    }
}

/// One link of a client: an interface.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Link {
    /// Name of the interface.
    pub name: String,
    /// Whether the link can be used.
    pub state: LinkState,
    /// When the link is used: `primary`, `overflow`, `backup` or `never`.
    pub tier: String,
    /// Why the link is in this state or uses TCP; empty if there is no special reason.
    pub reason: String,
    /// Time for which the link has been down, in s; left out while it is not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub down_s: Option<f64>,
    /// Addresses of the interface.
    pub addresses: Vec<IpAddr>,
    /// Bytes of UDP payload sent on all paths that the link ever had.
    pub tx_bytes: u64,
    /// Bytes of UDP payload received on all paths that the link ever had.
    pub rx_bytes: u64,
    /// Whether every byte costs; left out if not.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub metered: bool,
    /// Limit of the rate at which the client sends, in bit/s; left out without a limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub up_cap_bps: Option<u64>,
    /// Limit of the rate at which the server sends, in bit/s; left out without a limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub down_cap_bps: Option<u64>,
    /// Share of the traffic relative to other links, for the scheduler `weighted`; left out if 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<u16>,
    /// Quota of a month, in bytes of IP packets; left out without a limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quota_bytes: Option<u64>,
    /// Number of paths; left out if it is 1 and fixed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pipes: Option<u8>,
    /// Why the link has this number of paths, with `pipes = "auto"`; else left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pipes_reason: Option<String>,
    /// Used part of the quota since the month began, in bytes of IP packets; left out without a limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quota_used_bytes: Option<u64>,
}

impl Link {
    /// The metrics of each link.
    pub const METRICS: &[Metric<Self>] = metrics! { link: Link;
        "link_up" Gauge matches!(link.state, LinkState::Up | LinkState::Standby),
            "Whether a link works, in use or on standby.";
        "link_transmit_bytes_total" Counter link.tx_bytes, "Bytes of UDP payload sent.";
        "link_receive_bytes_total" Counter link.rx_bytes, "Bytes of UDP payload received.";
        "link_quota_bytes" Gauge link.quota_bytes, "Quota of a month, in bytes of IP packets.";
        "link_quota_used_bytes" Gauge link.quota_used_bytes, "Used part of the quota, in bytes of IP packets.";
    };

    /// The status of a link before anything is known about it.
    pub fn new(name: &str) -> Self {
        Self { name: name.into(), tier: "primary".into(), ..Self::default() }
    }
}

word_enum! {
    /// Whether a link can be used.
    pub enum LinkState {
        /// It works.
        Up = "up",
        /// It works, and is not needed now.
        Standby = "standby",
        /// It cannot be used, or nothing arrives on it.
        #[default]
        Down = "down",
        /// It is not used, as configured.
        Never = "never",
    }
}

/// One QUIC path.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Path {
    /// Name of the path: `class/link/number`, or `class/link/tcp` where the link uses TCP.
    pub id: String,
    /// Class of traffic of the path.
    pub class: String,
    /// Link of the path.
    pub link: String,
    /// Number of the path among those of the link, from 0; left out if there is only one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pipe: Option<u8>,
    /// Transport: `quic` (over UDP), or `tcp` or `mptcp` (inside HTTP/2 over TCP or Multipath TCP).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transport: Option<String>,
    /// Address and port of this end; with TCP, of the TCP connection.
    pub local: SocketAddr,
    /// Address and port of the far end; with TCP, of the TCP connection.
    pub remote: SocketAddr,
    /// Whether the path carries data.
    pub state: PathState,
    /// Why the path is in this state; empty if there is no special reason.
    pub reason: String,
    /// Time since something last arrived on the path, in s; left out where there is no connection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heard_s: Option<f64>,
    /// Smoothed round-trip time, in ms.
    #[serde(serialize_with = "finite")]
    pub rtt_ms: f64,
    /// Lowest measured round-trip time, in ms.
    #[serde(serialize_with = "finite")]
    pub min_rtt_ms: f64,
    /// Round-trip time without queueing, as estimated by congestion control, in ms; left out where unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base_rtt_ms: Option<f64>,
    /// Variation of the round-trip time, in ms.
    #[serde(serialize_with = "finite")]
    pub jitter_ms: f64,
    /// Loss of what this end sent in the last 10 s, in percent; unknown where `recent_packets` is 0.
    #[serde(serialize_with = "finite")]
    pub loss_pct: f64,
    /// QUIC packets sent in the last 10 s.
    #[serde(default)]
    pub recent_packets: u64,
    /// Congestion controller at this end; left out where there is no connection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cc: Option<String>,
    /// Congestion window, in bytes.
    pub cwnd_bytes: u64,
    /// Data sent and not yet acknowledged, in bytes.
    pub in_flight_bytes: u64,
    /// Estimated delivery rate of what this end sends, in bit/s.
    pub rate_bps: u64,
    /// Rate that all classes together may send over the link, in bit/s of IP packets: as configured, or as
    /// measured while classes shared the link; left out where unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link_rate_bps: Option<u64>,
    /// Time since data last waited for the link, so that its rate was measured, in s; left out where it is
    /// configured or unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link_rate_age_s: Option<f64>,
    /// Time for which the class had more data than could leave over the link, on all pipes of the link
    /// together, summed up, in ms; left out without a shaper.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backlog_ms: Option<u64>,
    /// Bytes of UDP payload sent.
    pub tx_bytes: u64,
    /// Bytes of UDP payload received.
    pub rx_bytes: u64,
    /// QUIC packets sent.
    pub tx_packets: u64,
    /// QUIC packets received.
    pub rx_packets: u64,
    /// QUIC packets declared lost.
    pub lost_packets: u64,
    /// Largest UDP payload that the path carries, in bytes.
    pub mtu: u16,
    /// Forward error correction of what this end sends on the path; left out if it was never used there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fec: Option<PathFec>,
}

impl Path {
    /// Whether its round trip, loss and rate are those of now: packets arrive, and a round trip was measured.
    pub fn is_measured(&self) -> bool {
        self.state != PathState::Down && self.rtt_ms > 0.0
    }

    /// The loss (percent), if the path works and anything was sent that could be lost.
    pub fn loss(&self) -> Option<f64> {
        (self.is_measured() && self.recent_packets > 0).then_some(self.loss_pct)
    }

    /// The metrics of each path.
    pub const METRICS: &[Metric<Self>] = metrics! { path: Path;
        "path_active" Gauge path.state == PathState::Active, "Whether a path carries data.";
        "path_rtt_seconds" Gauge seconds(path.rtt_ms), "Smoothed round-trip time.";
        "path_min_rtt_seconds" Gauge seconds(path.min_rtt_ms), "Lowest measured round-trip time.";
        "path_jitter_seconds" Gauge seconds(path.jitter_ms), "Variation of the round-trip time.";
        "path_loss_ratio" Gauge path.loss().map(ratio), "Loss of what this end sent in the last 10 s.";
        "path_congestion_window_bytes" Gauge path.cwnd_bytes, "Congestion window.";
        "path_in_flight_bytes" Gauge path.in_flight_bytes, "Data sent and not yet acknowledged.";
        "path_delivery_bytes_per_second" Gauge bytes(path.rate_bps),
            "Estimated delivery rate of what this end sends.";
        "path_link_bytes_per_second" Gauge path.link_rate_bps.map(bytes),
            "Rate that all classes together may send over the link.";
        "path_backlog_seconds_total" Counter path.backlog_ms.map(|ms| seconds(ms as f64)),
            "Time for which the class had more data than could leave over the link, on all its paths together.";
        "path_mtu_bytes" Gauge u64::from(path.mtu), "Largest UDP payload that the path carries.";
        "path_transmit_bytes_total" Counter path.tx_bytes, "Bytes of UDP payload sent.";
        "path_receive_bytes_total" Counter path.rx_bytes, "Bytes of UDP payload received.";
        "path_transmit_packets_total" Counter path.tx_packets, "UDP datagrams sent.";
        "path_receive_packets_total" Counter path.rx_packets, "UDP datagrams received.";
        "path_lost_packets_total" Counter path.lost_packets, "QUIC packets declared lost.";
        "path_fec_ratio" Gauge path.fec.map(|fec| ratio(fec.percent.into())), "Repair packets sent now per packet.";
        "path_fec_protected_packets_total" Counter path.fec.map(|fec| fec.protected),
            "Packets sent in groups that have repair packets.";
        "path_fec_repair_packets_total" Counter path.fec.map(|fec| fec.sent), "Repair packets sent.";
        "path_fec_repair_bytes_total" Counter path.fec.map(|fec| fec.sent_bytes), "Bytes of repair packets sent.";
        "path_fec_made_good_packets_total" Counter path.fec.map(|fec| fec.made_good),
            "Packets that this end sent and that were lost, which the far end restored.";
        "path_fec_wasted_packets_total" Counter path.fec.map(|fec| fec.wasted),
            "Repair packets that arrived at the far end and were not needed.";
    };
}

word_enum! {
    /// Whether a path carries data.
    pub enum PathState {
        /// It carries data.
        Active = "active",
        /// It works, and carries no data now.
        Standby = "standby",
        /// It does not work.
        #[default]
        Down = "down",
    }
}

/// Numbers of flows inside the tunnel, by how they travel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Flows {
    /// TCP connections on streams.
    pub stream: u64,
    /// Flows as IP packets.
    pub datagram: u64,
    /// Flows as UDP payloads.
    pub udp: u64,
}

/// One session of a client at a server.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Client {
    /// Name of the user.
    pub user: String,
    /// Addresses of the client in the tunnel, with their prefix lengths.
    #[schemars(with = "Vec<String>")]
    pub addresses: Vec<IpNet>,
    /// Time since the client connected, in s.
    #[serde(serialize_with = "finite")]
    pub connected_s: f64,
    /// Bytes of IP packets sent to the client.
    pub tx_bytes: u64,
    /// Bytes of IP packets received from the client.
    pub rx_bytes: u64,
    /// Classes of traffic of the client; left out if it has none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub classes: Vec<Class>,
    /// Numbered packets, as counted at the server; left out where the two ends did not agree on numbers.
    #[serde(rename = "lane", default, skip_serializing_if = "Option::is_none")]
    pub resequencing: Option<Resequencing>,
    /// Paths of the client, as seen by the server.
    pub paths: Vec<Path>,
}

word_schemas!(State, KillSwitchState, LinkState, NetworkState, PathState, UserState);

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// Converts bit/s to bytes/s.
fn bytes(bits_per_second: u64) -> f64 {
    bits_per_second as f64 / 8.0
}

fn seconds(millis: f64) -> f64 {
    millis / 1000.0
}

fn ratio(percent: f64) -> f64 {
    percent / 100.0
}

/// Writes NaN and infinity as 0: JSON has neither, and serde would write `null`.
fn finite<S: Serializer>(value: &f64, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_f64(if value.is_finite() { *value } else { 0.0 })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// The documented example, on which other programs rely byte for byte.
    pub(crate) const EXAMPLE: &str = include_str!("example.json");

    #[test]
    fn the_json_is_the_documented_one_byte_for_byte() {
        let status: Status = serde_json::from_str(EXAMPLE).unwrap();
        assert_eq!(serde_json::to_string(&status).unwrap(), EXAMPLE);
    }

    #[test]
    fn a_client_of_the_server_shows_its_paths() {
        let example: Status = serde_json::from_str(EXAMPLE).unwrap();
        let mut status = Status::new(Role::Server);
        status.clients.push(Client {
            user: "alice".into(),
            addresses: example.addresses.clone(),
            connected_s: f64::NAN,
            tx_bytes: 1,
            rx_bytes: 2,
            classes: Vec::new(),
            resequencing: None,
            paths: example.paths,
        });
        let json = serde_json::to_value(&status).unwrap();
        assert_eq!(json["session"], serde_json::Value::Null);
        assert_eq!(json["clients"][0]["connected_s"], 0.0);
        assert_eq!(json["clients"][0]["paths"][0]["id"], "default/eth0/0");
    }

    #[test]
    fn what_was_added_is_left_out_where_nothing_is_known() {
        let mut status: Status = serde_json::from_str(EXAMPLE).unwrap();
        status.resequencing =
            Some(Resequencing { on: true, numbered: 9, resent: 2, ..Resequencing::default() });
        status.paths[0].base_rtt_ms = Some(12.0);
        let json = serde_json::to_value(&status).unwrap();
        assert_eq!((&json["lane"]["resent"], &json["paths"][0]["base_rtt_ms"]), (&2.into(), &12.0.into()));
        assert_eq!(serde_json::from_value::<Status>(json).unwrap(), status);
    }

    #[test]
    fn connections_of_a_class_add_up() {
        let repair = |percent, recovered| FecStats { percent, recovered, ..FecStats::default() };
        let one = Class {
            tx_bytes: 5,
            queue_bytes: 6,
            superseded_acks: 9,
            reinjected_bytes: 10,
            queue_ms: 2.0,
            tx_bps: Some(8),
            rtt_ms: Some(20.0),
            loss_pct: Some(1.0),
            resequencing: Some(Resequencing { copies: 3, fec: repair(10, 4), ..Resequencing::default() }),
            ..Class::new("bulk")
        };
        let mut all = Class::new("bulk");
        all.add(&Class { drops: 7, ..Class::new("bulk") });
        all.add(&one);
        all.add(&Class { rtt_ms: Some(30.0), loss_pct: Some(4.0), ..one.clone() });
        assert_eq!((all.tx_bytes, all.drops, all.tx_bps, all.rx_bps), (10, 7, Some(16), None));
        assert_eq!((all.queue_bytes, all.superseded_acks, all.reinjected_bytes), (12, 18, 20));
        assert_eq!((all.queue_ms, all.rtt_ms, all.loss_pct), (2.0, Some(20.0), Some(4.0)));
        assert_eq!(
            all.resequencing,
            Some(Resequencing { copies: 6, fec: repair(10, 8), ..Resequencing::default() })
        );
    }

    #[test]
    fn unknown_fields_of_a_newer_version_are_skipped() {
        let newer = EXAMPLE.replacen('{', r#"{"colour":"blue","#, 1);
        assert!(serde_json::from_str::<Status>(&newer).is_ok());
    }
}
