//! Builds the list of flows for the local API.
//!
//! In: reports of the tunnel, of the egress and of the proxies. Out: a [`FlowList`]. Always holds: at most
//! [`FlowList::MAX_FLOWS`] flows, the most recently active.

use std::time::Instant;

use mpvpn_config::ClientConfig;
use mpvpn_flow::{rules::FlowModeReason, split_tcp::ConnectionState};
use mpvpn_input::role::Role;
use mpvpn_masque::connect::Authority;
use mpvpn_os::TcpSocket;
use mpvpn_packet::{FlowKey, protocol};
use mpvpn_sockets::splice::TransferState;
use mpvpn_status::{EffectiveFlowMode, Flow, FlowList, FlowState};
use mpvpn_tunnel::{FlowReport, FlowTransport};
use mpvpn_types::ClassId;

/// A TCP connection or UDP flow that ends at this process.
pub struct Connection<'a> {
    owner: Owner<'a>,
    to: &'a Authority,
    lane: EffectiveFlowMode,
    state: FlowState,
    /// Bytes from the app (`up`) and to the app (`down`).
    up: u64,
    down: u64,
    since: Instant,
    active: Instant,
}

/// The owner of the connection.
enum Owner<'a> {
    /// At a server: the connection of a client of this user.
    User(&'a str),
    /// At a proxy: the connection of the app at the other end of this socket.
    App(&'a TcpSocket),
}

impl<'a> Connection<'a> {
    /// A connection that the server makes for a client. `transfer` is `None` until the socket to the
    /// destination is connected.
    pub fn of_client(
        user: &'a str,
        to: &'a Authority,
        lane: EffectiveFlowMode,
        since: Instant,
        transfer: Option<TransferState>,
    ) -> Self {
        let new = || Self { lane, ..Self::new(Owner::User(user), to, since) };
        transfer.map_or_else(new, |transfer| Self {
            state: connection_state(transfer.stream_ended, transfer.socket_ended),
            up: transfer.to_socket,
            down: transfer.from_socket,
            active: transfer.last_activity,
            ..new()
        })
    }

    /// A connection of a local app to a proxy, through this socket.
    pub fn of_app(
        socket: &'a TcpSocket,
        to: &'a Authority,
        since: Instant,
        transfer: Option<TransferState>,
    ) -> Self {
        let new = || Self::new(Owner::App(socket), to, since);
        transfer.map_or_else(new, |transfer| Self {
            state: connection_state(transfer.socket_ended, transfer.stream_ended),
            up: transfer.from_socket,
            down: transfer.to_socket,
            active: transfer.last_activity,
            ..new()
        })
    }

    fn new(owner: Owner<'a>, to: &'a Authority, since: Instant) -> Self {
        let lane = EffectiveFlowMode::Stream;
        Self { owner, to, lane, state: FlowState::Opening, up: 0, down: 0, since, active: since }
    }

    fn flow(self, now: Instant) -> Flow {
        let (user, from, why) = match self.owner {
            Owner::User(user) => (user.to_owned(), String::new(), ""),
            // A broken socket has no peer address any more.
            Owner::App(socket) => (
                String::new(),
                socket.peer_addr().map_or_else(|_| String::new(), |ip| ip.to_string()),
                "proxy",
            ),
        };
        Flow {
            class: String::new(),
            protocol: protocol_name(if self.lane == EffectiveFlowMode::Udp {
                protocol::UDP
            } else {
                protocol::TCP
            }),
            user,
            from,
            to: self.to.to_string(),
            mode: self.lane,
            why: why.to_owned(),
            state: Some(self.state),
            up_bytes: self.up,
            down_bytes: self.down,
            age_s: seconds(now, self.since),
            idle_s: seconds(now, self.active),
        }
    }
}

/// The state of an established connection whose halves may have ended.
fn connection_state(up_ended: bool, down_ended: bool) -> FlowState {
    match (up_ended, down_ended) {
        (false, false) => FlowState::Open,
        (true, false) => FlowState::UpEnded,
        (false, true) => FlowState::DownEnded,
        (true, true) => FlowState::Closing,
    }
}

/// The flows of a client with a TUN device.
pub fn tun_flows(now: Instant, reports: Vec<(ClassId, FlowReport)>, config: &ClientConfig) -> FlowList {
    let flow = |(id, report)| Flow { class: config.class_name(id), ..flow_of_report(now, &report) };
    most_recent(Role::Client, reports, |(_, report)| report.active, flow)
}

/// The connections of apps at a proxy, or of clients at a server.
pub fn connection_flows<'a>(
    now: Instant,
    role: Role,
    connections: impl Iterator<Item = Connection<'a>>,
) -> FlowList {
    most_recent(
        role,
        connections.collect(),
        |connection| connection.active,
        |connection| connection.flow(now),
    )
}

/// Formats the most recently active items, and counts the others.
fn most_recent<T>(
    role: Role,
    mut all: Vec<T>,
    active: impl Fn(&T) -> Instant,
    flow: impl Fn(T) -> Flow,
) -> FlowList {
    let left_out = all.len().saturating_sub(FlowList::MAX_FLOWS);
    if left_out > 0 {
        all.select_nth_unstable_by_key(FlowList::MAX_FLOWS, |item| std::cmp::Reverse(active(item)));
        all.truncate(FlowList::MAX_FLOWS);
    }
    all.sort_by_key(|item| std::cmp::Reverse(active(item)));
    FlowList { flows: all.into_iter().map(flow).collect(), left_out: left_out as u64, ..FlowList::new(role) }
}

fn flow_of_report(now: Instant, report: &FlowReport) -> Flow {
    let (lane, state) = match report.transport {
        FlowTransport::Stream(state) => (EffectiveFlowMode::Stream, Some(proxied_state(state))),
        FlowTransport::Packets => (EffectiveFlowMode::Datagram, None),
        FlowTransport::UdpPayloads => (EffectiveFlowMode::Udp, None),
    };
    let (from, to) = endpoints(&report.key);
    Flow {
        protocol: protocol_name(report.key.protocol),
        user: String::new(),
        class: String::new(),
        from,
        to,
        mode: lane,
        why: reason_text(report.why),
        state,
        up_bytes: report.up_bytes,
        down_bytes: report.down_bytes,
        age_s: seconds(now, report.since),
        idle_s: seconds(now, report.active),
    }
}

fn proxied_state(state: ConnectionState) -> FlowState {
    match state {
        ConnectionState::Opening => FlowState::Opening,
        ConnectionState::Open => FlowState::Open,
        ConnectionState::AppEnded => FlowState::UpEnded,
        ConnectionState::RemoteEnded => FlowState::DownEnded,
        ConnectionState::Closing => FlowState::Closing,
    }
}

fn reason_text(why: FlowModeReason) -> String {
    match why {
        FlowModeReason::Rule(number) => return format!("rule {number}"),
        FlowModeReason::DefaultMode => "lane option",
        FlowModeReason::Translated => "auto",
        FlowModeReason::Untranslated => "auto: not translated",
        FlowModeReason::PrivateAddress => "auto: private address",
        FlowModeReason::ServerRefused => "refused by the server",
        FlowModeReason::NotTcp => "not TCP",
        FlowModeReason::ServerWithoutPackets => "the server carries no packets",
        FlowModeReason::BeganAsPackets => "began as packets",
    }
    .to_owned()
}

fn protocol_name(number: u8) -> String {
    match number {
        protocol::TCP => "tcp".to_owned(),
        protocol::UDP => "udp".to_owned(),
        protocol::ICMP | protocol::ICMPV6 => "icmp".to_owned(),
        other => other.to_string(),
    }
}

/// Source and destination addresses, with ports if the protocol has ports.
fn endpoints(key: &FlowKey) -> (String, String) {
    match key.protocol {
        protocol::TCP | protocol::UDP => (key.source().to_string(), key.destination().to_string()),
        _ => (key.src.to_string(), key.dst.to_string()),
    }
}

fn seconds(now: Instant, at: Instant) -> f64 {
    now.saturating_duration_since(at).as_secs_f64()
}

#[cfg(test)]
mod tests {
    use mpvpn_types::Duration;

    use super::*;
    use mpvpn_identity::trust::Trust;

    #[test]
    fn the_latest_thousand_are_listed_and_the_others_counted() {
        let start = Instant::now();
        let report = |port: u16| FlowReport {
            key: FlowKey {
                src: [10, 0, 0, 2].into(),
                dst: [198, 51, 100, 9].into(),
                src_port: port,
                dst_port: 443,
                protocol: protocol::TCP,
            },
            transport: if port.is_multiple_of(2) {
                FlowTransport::Packets
            } else {
                FlowTransport::Stream(ConnectionState::Open)
            },
            why: FlowModeReason::Rule(3),
            up_bytes: 1,
            down_bytes: 2,
            since: start,
            active: start + Duration::from_secs(u64::from(port)),
        };
        let now = start + Duration::from_secs(1500);
        let config = ClientConfig::new("vpn.example".parse().unwrap(), Trust::Insecure);
        let reports = (1..=1500).map(|number| (ClassId(1), report(number)));
        let list = tun_flows(now, reports.collect(), &config);
        assert_eq!(list.flows[0].class, "critical");
        assert_eq!((list.flows.len(), list.left_out), (FlowList::MAX_FLOWS, 500));
        assert!(list.flows.iter().zip(0..).all(|(flow, at)| flow.idle_s == f64::from(at)));
        let (first, second) = (&list.flows[0], &list.flows[1]);
        assert_eq!((first.from.as_str(), first.to.as_str()), ("10.0.0.2:1500", "198.51.100.9:443"));
        assert_eq!(
            (first.mode, first.state, first.why.as_str()),
            (EffectiveFlowMode::Datagram, None, "rule 3")
        );
        assert_eq!((second.mode, second.state), (EffectiveFlowMode::Stream, Some(FlowState::Open)));
    }
}
