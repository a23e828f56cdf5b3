//! Paths, and the counters of the connections that have them, as the local API shows them.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use mpvpn_path::PathState as TunnelPathState;
use mpvpn_quic::HandshakeCounters;
use mpvpn_status::{Class, FecStats, Handshakes, Path, PathFec, PathState, Resequencing};
use mpvpn_tunnel::{
    ConnectionNumber, FecCounters, PathFecCounters, PathReport, ResequencingCounters, TrafficCounters,
};
use mpvpn_types::{LinkId, PathId};

/// The class of clients and packets that have no other.
pub const DEFAULT_CLASS: &str = "default";

/// The smallest smoothed round-trip time of the active paths (ms).
pub fn rtt_of(paths: &[PathReport]) -> Option<f64> {
    let active = paths.iter().filter(|path| path.state == TunnelPathState::Active);
    active.map(|path| path.view.rtt).min().map(milliseconds)
}

/// The loss on all paths in the last 10 s (percent), if anything was sent.
pub fn loss_of(paths: &[PathReport]) -> Option<f64> {
    let sent: u64 = paths.iter().map(|path| path.view.recent_packets_sent).sum();
    let lost: f64 = paths.iter().map(|path| path.view.loss * path.view.recent_packets_sent as f64).sum();
    (sent > 0).then(|| 100.0 * lost / sent as f64)
}

/// Adds the counters of another connection, if it puts packets in order.
pub fn add_resequencing(sum: &mut Option<Resequencing>, other: Option<Resequencing>) {
    if let Some(other) = other {
        sum.get_or_insert_default().add(other);
    }
}

/// The counters of a connection that puts packets in order.
pub fn resequencing_of(counters: ResequencingCounters) -> Resequencing {
    Resequencing {
        on: counters.is_numbering,
        numbered: counters.numbered,
        resent: counters.retransmissions,
        copies: counters.copies,
        restored: counters.received.held,
        late: counters.received.late,
        duplicates: counters.received.duplicates,
        given_up: counters.received.given_up,
        waiting: counters.received.holding,
        wait_ms: counters.received.wait.as_millis() as u64,
        fec: counters.fec.map(repair_of).unwrap_or_default(),
    }
}

fn repair_of(counters: FecCounters) -> FecStats {
    FecStats {
        percent: counters.max_repair_percent,
        protected: counters.protected,
        sent: counters.repair_packets,
        sent_bytes: counters.repair_bytes,
        made_good: counters.recovered_by_peer,
        recovered: counters.recovered,
        wasted: counters.unneeded_repairs,
        unrecoverable: counters.unrecoverable,
    }
}

/// The counters of FEC on a path; `None` if it was never used there.
fn path_fec_of(counters: PathFecCounters) -> Option<PathFec> {
    (counters != PathFecCounters::default()).then_some(PathFec {
        percent: counters.repair_percent,
        protected: counters.protected,
        sent: counters.repair_packets,
        sent_bytes: counters.repair_bytes,
        made_good: counters.recovered_by_peer,
        wasted: counters.unneeded_repairs,
    })
}

/// The counters of handshakes.
pub fn handshakes_of(counters: HandshakeCounters) -> Handshakes {
    let HandshakeCounters { completed, failed, retried, dropped } = counters;
    Handshakes { completed, failed, retried, dropped }
}

/// The class with the counters of a connection.
pub fn with_counters(class: Class, counters: TrafficCounters) -> Class {
    Class {
        tx_bytes: counters.tx_bytes,
        rx_bytes: counters.rx_bytes,
        superseded_acks: counters.superseded_acks,
        reinjected_bytes: counters.reinjected_bytes,
        ..class
    }
}

/// Path IDs count from 0 in each connection of a session.
pub fn id_of(number: u32, class: &str, link: &str, member: ConnectionNumber) -> String {
    format!("{class}/{link}/{number}{}", shard_of(member))
}

/// The name of a path: class, link, and its number or `tcp` for a path inside TCP. A server does not know the
/// link.
pub fn path_name(
    path: PathId,
    class: &str,
    name: &str,
    link: Option<LinkId>,
    member: ConnectionNumber,
) -> String {
    match link.is_some_and(LinkId::is_tcp) {
        true => tcp_id(class, name, member),
        false => id_of(path.0, class, if name.is_empty() { UNKNOWN_LINK } else { name }, member),
    }
}

/// Stands for an unknown link.
const UNKNOWN_LINK: &str = "path";

fn tcp_id(class: &str, link: &str, member: ConnectionNumber) -> String {
    format!("{class}/{link}/tcp{}", shard_of(member))
}

fn shard_of(member: ConnectionNumber) -> String {
    if member.shard() == 0 { String::new() } else { format!("@{}", member.shard()) }
}

/// The path of a report that was made `now`.
pub fn path_of(
    now: Instant,
    report: &PathReport,
    class: &str,
    link: &str,
    local: SocketAddr,
    member: ConnectionNumber,
) -> Path {
    let view = &report.view;
    let age = |since| now.saturating_duration_since(since).as_secs_f64();
    Path {
        id: path_name(view.id, class, link, report.link, member),
        class: class.to_owned(),
        link: link.to_owned(),
        pipe: None,
        transport: Some(if view.inside_tcp { "tcp" } else { "quic" }.to_owned()),
        local,
        remote: view.remote,
        state: match report.state {
            TunnelPathState::Active => PathState::Active,
            TunnelPathState::Standby => PathState::Standby,
            TunnelPathState::Down => PathState::Down,
        },
        reason: report.reason.clone(),
        heard_s: Some(age(report.last_arrival)),
        rtt_ms: milliseconds(view.rtt),
        min_rtt_ms: milliseconds(view.min_rtt.unwrap_or_default()),
        // It is 0 before the first measurement.
        base_rtt_ms: (!view.base_rtt.is_zero()).then(|| milliseconds(view.base_rtt)),
        jitter_ms: milliseconds(view.jitter),
        loss_pct: view.loss * 100.0,
        recent_packets: view.recent_packets_sent,
        cc: Some(view.cc.to_string()),
        cwnd_bytes: view.congestion_window,
        in_flight_bytes: view.in_flight,
        rate_bps: view.delivery_rate.saturating_mul(8),
        link_rate_bps: view.link_rate.map(|rate| rate.saturating_mul(8)),
        link_rate_age_s: view.link_rate_measured.map(age),
        backlog_ms: view.backlog_time.map(|time| time.as_millis() as u64),
        tx_bytes: view.tx_bytes,
        rx_bytes: view.rx_bytes,
        tx_packets: view.tx_packets,
        rx_packets: view.rx_packets,
        lost_packets: view.lost_packets,
        mtu: view.mtu,
        fec: report.fec.and_then(path_fec_of),
    }
}

/// A time in ms.
pub fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}
