//! What a running server or client tells about itself: the JSON of `GET /v1/status`, and a readable form.
//!
//! Times are in ms (or s where the name ends in `_s`), rates in bit/s, sizes in bytes of UDP payload.
//! Fields are added, never renamed; a reader takes missing ones as their default and skips unknown ones.

mod flows;
mod render;

use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use mpvpn_types::word_enum;
use serde::{Deserialize, Serialize, Serializer};

use crate::metrics::{Metric, metrics};

pub use flows::{Flow, FlowLane, FlowList, FlowState};
pub(crate) use render::{Table, fit, section};
pub use render::{render, render_flows, render_links};

/// Everything about one process.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Server or client.
    pub role: Role,
    /// The program's version.
    pub version: String,
    /// How it stands.
    pub state: State,
    /// Seconds since the start.
    #[serde(serialize_with = "finite")]
    pub uptime_s: f64,
    /// What people should know about how it runs, a sentence each; left out if there is nothing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// Its addresses in the tunnel.
    #[serde(default)]
    pub addresses: Vec<IpNet>,
    /// The session with the server; none at a server.
    #[serde(default)]
    pub session: Option<Session>,
    /// The traffic classes.
    #[serde(default)]
    pub classes: Vec<Class>,
    /// The uplinks.
    #[serde(default)]
    pub links: Vec<Link>,
    /// The QUIC paths.
    #[serde(default)]
    pub paths: Vec<Path>,
    /// Flows inside the tunnel.
    #[serde(default)]
    pub flows: Flows,
    /// What became of numbered packets; left out at a server, which tells it of each client, and where the two ends
    /// agreed on no numbers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lane: Option<Lane>,
    /// The sessions of a server.
    #[serde(default)]
    pub clients: Vec<Client>,
}

impl Status {
    /// The status of a process that has just started.
    pub fn new(role: Role) -> Self {
        Self { role, version: env!("CARGO_PKG_VERSION").into(), ..Self::default() }
    }
}

word_enum! {
    /// Which end it is.
    pub enum Role {
        /// Gives access.
        #[default]
        Server = "server",
        /// Uses it.
        Client = "client",
    }
}

word_enum! {
    /// How a process stands.
    pub enum State {
        /// Not ready yet.
        #[default]
        Starting = "starting",
        /// A client that has no session yet.
        Connecting = "connecting",
        /// Working.
        Up = "up",
        /// A client that lost its session and tries to get it back.
        Reconnecting = "reconnecting",
        /// A class that nobody uses, so it has no connection.
        Asleep = "asleep",
        /// Undoing what it did to the system.
        Stopping = "stopping",
    }
}

/// A client's session.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Session {
    /// The server's address and port.
    pub server: String,
    /// Who we are there.
    pub user: String,
    /// How often the session was taken up again.
    pub resumed: u64,
}

/// One traffic class; at a server, all connections of that class.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Class {
    /// `default`, or the user's name for it.
    pub name: String,
    /// How its flows are carried.
    pub lane: String,
    /// Its congestion controller at this end; where its connections have several, all of them, separated by commas.
    pub cc: String,
    /// The congestion controller that the server says it uses for this class; left out where it says nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer_cc: Option<String>,
    /// Its scheduler.
    pub scheduler: String,
    /// Bytes sent.
    pub tx_bytes: u64,
    /// Bytes received.
    pub rx_bytes: u64,
    /// How long packets wait for room now, in ms; where there are several connections, in the one with the most.
    #[serde(serialize_with = "finite")]
    pub queue_ms: f64,
    /// Packets dropped because there was no room.
    pub drops: u64,
    /// How much is sent now, in bit/s of what the tunnel carries, measured over about a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tx_bps: Option<u64>,
    /// How much is received.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rx_bps: Option<u64>,
    /// Whether a client's connection for this class works; while it does not, the default class carries its packets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<State>,
    /// Why it does not; left out where there is nothing to say.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// Smoothed round-trip time of the quickest path that carries data, in ms; left out where there is none, and for
    /// all clients of a server together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rtt_ms: Option<f64>,
    /// Lost of what we sent in the last 10 s on all its paths, in percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_pct: Option<f64>,
    /// What became of its numbered packets, its copies and repair included; left out where the two ends agreed on no
    /// numbers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub order: Option<Lane>,
    /// Its own TUN device; left out if it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tun: Option<String>,
    /// The addresses of that device.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<IpNet>,
}

impl Class {
    /// The metrics of each class.
    pub(crate) const METRICS: &[Metric<Self>] = metrics! { class: Class;
        "class_up" Gauge class.connected(), "Whether the connection of a class works; none while nobody uses it.";
        "class_transmit_bytes_total" Counter class.tx_bytes, "Bytes that the tunnel has sent.";
        "class_receive_bytes_total" Counter class.rx_bytes, "Bytes that the tunnel has received.";
        "class_transmit_bytes_per_second" Gauge class.tx_bps.map(bytes),
            "What is sent now, measured over about a second.";
        "class_receive_bytes_per_second" Gauge class.rx_bps.map(bytes),
            "What is received now, measured over about a second.";
        "class_rtt_seconds" Gauge class.rtt_ms.map(seconds), "Round trip of the quickest path that carries data.";
        "class_loss_ratio" Gauge class.loss_pct.map(ratio), "Lost of what was sent in the last 10 s.";
        "class_queue_seconds" Gauge seconds(class.queue_ms), "How long packets wait for room.";
        "class_dropped_packets_total" Counter class.drops, "Packets dropped because there was no room.";
        "class_numbered_packets_total" Counter class.order.map(|o| o.numbered), "Packets sent with a number.";
        "class_resent_packets_total" Counter class.order.map(|o| o.resent),
            "Packets sent again because they were lost.";
        "class_copied_packets_total" Counter class.order.map(|o| o.copies), "Copies sent beside the first ones.";
        "class_restored_packets_total" Counter class.order.map(|o| o.restored),
            "Packets received ahead of others and put back in order.";
        "class_late_packets_total" Counter class.order.map(|o| o.late),
            "Packets received after they had been given up.";
        "class_duplicate_packets_total" Counter class.order.map(|o| o.duplicates),
            "Packets received a second time, and dropped.";
        "class_given_up_packets_total" Counter class.order.map(|o| o.given_up), "Packets waited for in vain.";
        "class_fec_ratio" Gauge class.fec().map(|fec| ratio(fec.percent.into())),
            "Repair that is sent now, for each packet, on the path with the most.";
        "class_fec_protected_packets_total" Counter class.fec().map(|fec| fec.protected),
            "Packets sent in groups that get repair.";
        "class_fec_repair_packets_total" Counter class.fec().map(|fec| fec.sent), "Packets of repair sent.";
        "class_fec_repair_bytes_total" Counter class.fec().map(|fec| fec.sent_bytes), "Bytes of repair sent.";
        "class_fec_made_good_packets_total" Counter class.fec().map(|fec| fec.made_good),
            "Packets lost on the way that the far end restored.";
        "class_fec_recovered_packets_total" Counter class.fec().map(|fec| fec.recovered),
            "Packets lost on the way here, and restored.";
        "class_fec_wasted_packets_total" Counter class.fec().map(|fec| fec.wasted),
            "Packets of repair that came and were not needed.";
        "class_fec_unrecoverable_groups_total" Counter class.fec().map(|fec| fec.unrecoverable),
            "Groups that lost more than could be restored.";
    };

    fn connected(&self) -> Option<bool> {
        self.state.filter(|state| *state != State::Asleep).map(|state| state == State::Up)
    }

    fn fec(&self) -> Option<Repair> {
        self.order.map(|order| order.fec)
    }

    /// A class that has carried nothing.
    pub fn new(name: &str) -> Self {
        let auto = || "auto".to_owned();
        Self { name: name.into(), lane: auto(), cc: "bbr".into(), scheduler: auto(), ..Self::default() }
    }

    /// Adds what another connection of the class carries. The least round-trip time counts, and the most loss; it sleeps
    /// only where all do.
    pub fn add(&mut self, other: &Self) {
        if self.state == Some(State::Asleep) && other.state.is_some_and(|state| state != State::Asleep) {
            self.state = other.state;
            self.reason.clone_from(&other.reason);
        }
        self.add_cc(&other.cc);
        self.tx_bytes += other.tx_bytes;
        self.rx_bytes += other.rx_bytes;
        self.drops += other.drops;
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
        if let Some(order) = other.order {
            self.order.get_or_insert_default().add(order);
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

/// One uplink.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Link {
    /// The interface.
    pub name: String,
    /// Whether it can be used.
    pub state: LinkState,
    /// When it is used: `primary`, `overflow`, `backup` or `never`.
    pub tier: String,
    /// Why it is in its state, or nothing.
    pub reason: String,
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
    /// Bytes sent.
    pub tx_bytes: u64,
    /// Bytes received.
    pub rx_bytes: u64,
    /// Whether every byte costs; left out if not.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub metered: bool,
    /// What we send there at most, in bit/s; left out without a limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub up_cap_bps: Option<u64>,
    /// What the server is asked to send there at most, in bit/s; left out without a limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub down_cap_bps: Option<u64>,
    /// How much it carries compared with others, under the scheduler `weighted`; left out if 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<u16>,
    /// What it may carry in a month, in bytes of IP packets; left out without a limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quota_bytes: Option<u64>,
    /// How many paths it is to have, where that is not one, or is found out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pipes: Option<u8>,
    /// Why so many, where that is found out (`pipes = "auto"`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pipes_reason: Option<String>,
    /// What it has carried of that since the month began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quota_used_bytes: Option<u64>,
}

impl Link {
    /// The metrics of each link.
    pub(crate) const METRICS: &[Metric<Self>] = metrics! { link: Link;
        "link_up" Gauge matches!(link.state, LinkState::Up | LinkState::Standby),
            "Whether a link works, in use or waiting until it is needed.";
        "link_transmit_bytes_total" Counter link.tx_bytes, "Bytes of UDP payload sent.";
        "link_receive_bytes_total" Counter link.rx_bytes, "Bytes of UDP payload received.";
        "link_quota_bytes" Gauge link.quota_bytes, "What a link may carry in a month, in IP packets.";
        "link_quota_used_bytes" Gauge link.quota_used_bytes, "What it has carried of that.";
    };

    /// A link of which nothing is known.
    pub fn new(name: &str) -> Self {
        Self { name: name.into(), tier: "primary".into(), ..Self::default() }
    }
}

word_enum! {
    /// Whether a link can be used.
    pub enum LinkState {
        /// It can be used.
        Up = "up",
        /// It works, and waits until it is needed.
        Standby = "standby",
        /// It cannot be used, or nothing arrives on it.
        #[default]
        Down = "down",
        /// It is not to be used.
        Never = "never",
    }
}

/// One QUIC path.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Path {
    /// `class/link/number`, or `class/link/tcp`.
    pub id: String,
    /// The class it belongs to.
    pub class: String,
    /// The link it runs over.
    pub link: String,
    /// Which of the link's paths it is, counted from 0, where there are several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pipe: Option<u8>,
    /// What its packets travel in: `quic` (over UDP), `tcp` or `mptcp` (inside HTTP/2).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transport: Option<String>,
    /// Our address and port, those of the TCP connection where there is one.
    pub local: SocketAddr,
    /// The other end's address and port.
    pub remote: SocketAddr,
    /// Whether it carries data.
    pub state: PathState,
    /// Why it is in that state, or nothing.
    pub reason: String,
    /// Smoothed round-trip time, in ms.
    #[serde(serialize_with = "finite")]
    pub rtt_ms: f64,
    /// Lowest round-trip time seen, in ms.
    #[serde(serialize_with = "finite")]
    pub min_rtt_ms: f64,
    /// What the round trip takes while nothing queues, as congestion control takes it, in ms; left out where unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base_rtt_ms: Option<f64>,
    /// Variation of the round-trip time, in ms.
    #[serde(serialize_with = "finite")]
    pub jitter_ms: f64,
    /// Lost of what we sent in the last 10 s, in percent.
    #[serde(serialize_with = "finite")]
    pub loss_pct: f64,
    /// Its congestion controller at this end; left out where there is no connection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cc: Option<String>,
    /// Congestion window.
    pub cwnd_bytes: u64,
    /// Sent and not acknowledged.
    pub in_flight_bytes: u64,
    /// Estimated rate at which what we send is delivered, in bit/s.
    pub rate_bps: u64,
    /// What all classes together are taken to be able to send over its link, in bit/s of IP packets: what was given, or
    /// what was found while they shared it; left out where unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link_rate_bps: Option<u64>,
    /// Bytes sent.
    pub tx_bytes: u64,
    /// Bytes received.
    pub rx_bytes: u64,
    /// QUIC packets sent.
    pub tx_packets: u64,
    /// QUIC packets received.
    pub rx_packets: u64,
    /// QUIC packets declared lost.
    pub lost_packets: u64,
    /// Largest UDP payload that gets through, in bytes.
    pub mtu: u16,
}

impl Path {
    /// The metrics of each path.
    pub(crate) const METRICS: &[Metric<Self>] = metrics! { path: Path;
        "path_active" Gauge path.state == PathState::Active, "Whether a path carries data.";
        "path_rtt_seconds" Gauge seconds(path.rtt_ms), "Smoothed round-trip time.";
        "path_min_rtt_seconds" Gauge seconds(path.min_rtt_ms), "Lowest round-trip time seen.";
        "path_jitter_seconds" Gauge seconds(path.jitter_ms), "Variation of the round-trip time.";
        "path_loss_ratio" Gauge ratio(path.loss_pct), "Lost of what was sent in the last 10 s.";
        "path_congestion_window_bytes" Gauge path.cwnd_bytes, "Congestion window.";
        "path_in_flight_bytes" Gauge path.in_flight_bytes, "Sent and not acknowledged.";
        "path_delivery_bytes_per_second" Gauge bytes(path.rate_bps),
            "Estimated rate at which what is sent arrives.";
        "path_link_bytes_per_second" Gauge path.link_rate_bps.map(bytes),
            "What all classes together may send over its link.";
        "path_mtu_bytes" Gauge u64::from(path.mtu), "Largest UDP payload that gets through.";
        "path_transmit_bytes_total" Counter path.tx_bytes, "Bytes of UDP payload sent.";
        "path_receive_bytes_total" Counter path.rx_bytes, "Bytes of UDP payload received.";
        "path_transmit_packets_total" Counter path.tx_packets, "UDP datagrams sent.";
        "path_receive_packets_total" Counter path.rx_packets, "UDP datagrams received.";
        "path_lost_packets_total" Counter path.lost_packets, "QUIC packets declared lost.";
    };
}

word_enum! {
    /// Whether a path carries data.
    pub enum PathState {
        /// It does.
        Active = "active",
        /// It could, and waits.
        Standby = "standby",
        /// Being tried.
        Probing = "probing",
        /// It cannot.
        #[default]
        Down = "down",
    }
}

/// Flows by the way they are carried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Flows {
    /// As bytes on streams.
    pub stream: u64,
    /// As IP packets.
    pub datagram: u64,
    /// As UDP payloads.
    pub udp: u64,
}

/// Packets that are numbered where flows take several paths or packets are lost: the receiver restores their order,
/// the sender sends again what was lost. Counted since the session began, or was taken up again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lane {
    /// Whether what we send is numbered now.
    pub on: bool,
    /// Packets sent with a number.
    pub numbered: u64,
    /// Sent again because they were lost.
    pub resent: u64,
    /// Copies sent beside the first ones (scheduler `redundant`, or `copies`).
    pub copies: u64,
    /// Received ahead of others, held and then delivered in order.
    pub restored: u64,
    /// Received after they had been given up, and delivered all the same.
    pub late: u64,
    /// Received a second time, and dropped.
    pub duplicates: u64,
    /// Waited for in vain.
    pub given_up: u64,
    /// What repaired losses without asking.
    #[serde(default, skip_serializing_if = "Repair::is_none")]
    pub fec: Repair,
}

/// Packets of repair for groups of packets (`fec`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Repair {
    /// Packets of repair that are sent now for 100 packets, on the path with the most.
    pub percent: u8,
    /// Packets sent in groups.
    pub protected: u64,
    /// Packets of repair sent.
    pub sent: u64,
    /// Their bytes.
    pub sent_bytes: u64,
    /// Packets that we sent and that were lost, but not sent again, as the far end restored them.
    pub made_good: u64,
    /// Packets that were lost on the way here, and restored.
    pub recovered: u64,
    /// Packets of repair that came and were not needed.
    pub wasted: u64,
    /// Groups that lost more than could be restored; their packets were sent again.
    pub unrecoverable: u64,
}

impl Repair {
    fn is_none(&self) -> bool {
        *self == Self::default()
    }

    fn add(&mut self, other: Self) {
        self.percent = self.percent.max(other.percent);
        self.protected += other.protected;
        self.sent += other.sent;
        self.sent_bytes += other.sent_bytes;
        self.made_good += other.made_good;
        self.recovered += other.recovered;
        self.wasted += other.wasted;
        self.unrecoverable += other.unrecoverable;
    }
}

impl Lane {
    /// Those of a connection that is over.
    pub fn as_over(self) -> Self {
        Self { on: false, fec: Repair { percent: 0, ..self.fec }, ..self }
    }

    /// Adds those of another connection of the same session.
    pub fn add(&mut self, other: Self) {
        self.on |= other.on;
        self.numbered += other.numbered;
        self.resent += other.resent;
        self.copies += other.copies;
        self.restored += other.restored;
        self.late += other.late;
        self.duplicates += other.duplicates;
        self.given_up += other.given_up;
        self.fec.add(other.fec);
    }
}

/// One session at a server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Client {
    /// Whose it is.
    pub user: String,
    /// Its addresses in the tunnel.
    pub addresses: Vec<IpNet>,
    /// Seconds since it came.
    #[serde(serialize_with = "finite")]
    pub connected_s: f64,
    /// Bytes sent to it.
    pub tx_bytes: u64,
    /// Bytes received from it.
    pub rx_bytes: u64,
    /// Its classes of traffic; left out if it has none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub classes: Vec<Class>,
    /// What became of numbered packets, as the server counts; left out where the two ends agreed on no numbers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lane: Option<Lane>,
    /// Its paths, as the server sees them.
    pub paths: Vec<Path>,
}

/// Bytes per second.
fn bytes(bits_per_second: u64) -> f64 {
    bits_per_second as f64 / 8.0
}

fn seconds(millis: f64) -> f64 {
    millis / 1000.0
}

fn ratio(percent: f64) -> f64 {
    percent / 100.0
}

/// JSON has no NaN and no infinity: they become 0, or the reader would meet `null`.
fn finite<S: Serializer>(value: &f64, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_f64(if value.is_finite() { *value } else { 0.0 })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// The example that other programs are built on, word for word.
    pub(crate) const EXAMPLE: &str = concat!(
        r#"{"role":"client","version":"0.1.0","state":"up","uptime_s":12.5,"addresses":["10.0.0.2/24","fd00::2/64"],"session":{"server":"203.0.113.1:4433","user":"alice","resumed":0},"#,
        r#""classes":[{"name":"default","lane":"auto","cc":"bbr","scheduler":"auto","tx_bytes":0,"rx_bytes":0,"queue_ms":0.1,"drops":0}],"#,
        r#""links":[{"name":"eth0","state":"up","tier":"primary","reason":"","addresses":["192.0.2.7"],"tx_bytes":0,"rx_bytes":0}],"#,
        r#""paths":[{"id":"default/eth0/0","class":"default","link":"eth0","local":"192.0.2.7:40001","remote":"203.0.113.1:4433","state":"active","reason":"","rtt_ms":12.3,"min_rtt_ms":11.9,"jitter_ms":0.4,"loss_pct":0.0,"cwnd_bytes":0,"in_flight_bytes":0,"rate_bps":0,"tx_bytes":0,"rx_bytes":0,"tx_packets":0,"rx_packets":0,"lost_packets":0,"mtu":1472}],"#,
        r#""flows":{"stream":0,"datagram":0,"udp":0},"clients":[]}"#
    );

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
            lane: None,
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
        status.lane = Some(Lane { on: true, numbered: 9, resent: 2, ..Lane::default() });
        status.paths[0].base_rtt_ms = Some(12.0);
        let json = serde_json::to_value(&status).unwrap();
        assert_eq!((&json["lane"]["resent"], &json["paths"][0]["base_rtt_ms"]), (&2.into(), &12.0.into()));
        assert_eq!(serde_json::from_value::<Status>(json).unwrap(), status);
    }

    #[test]
    fn connections_of_a_class_add_up() {
        let repair = |percent, recovered| Repair { percent, recovered, ..Repair::default() };
        let one = Class {
            tx_bytes: 5,
            queue_ms: 2.0,
            tx_bps: Some(8),
            rtt_ms: Some(20.0),
            loss_pct: Some(1.0),
            order: Some(Lane { copies: 3, fec: repair(10, 4), ..Lane::default() }),
            ..Class::new("bulk")
        };
        let mut all = Class::new("bulk");
        all.add(&Class { drops: 7, ..Class::new("bulk") });
        all.add(&one);
        all.add(&Class { rtt_ms: Some(30.0), loss_pct: Some(4.0), ..one.clone() });
        assert_eq!((all.tx_bytes, all.drops, all.tx_bps, all.rx_bps), (10, 7, Some(16), None));
        assert_eq!((all.queue_ms, all.rtt_ms, all.loss_pct), (2.0, Some(20.0), Some(4.0)));
        assert_eq!(all.order, Some(Lane { copies: 6, fec: repair(10, 8), ..Lane::default() }));
    }

    #[test]
    fn unknown_fields_of_a_newer_version_are_skipped() {
        let newer = EXAMPLE.replacen('{', r#"{"colour":"blue","#, 1);
        assert!(serde_json::from_str::<Status>(&newer).is_ok());
    }
}
