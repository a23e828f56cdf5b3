//! The trace of one connection as records of qlog 0.3, in JSON text sequences (RFC 7464).
//!
//! In: events. Out: the header records of a file, and the records that follow it. Always holds: the times of
//! records, in milliseconds since the trace began, never decrease.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use mpvpn_input::role::Role;
use mpvpn_quic::{QlogEvent, QlogMetrics};
use mpvpn_types::PathId;
use serde_json::{Value, json};

use super::FORGET_AFTER;

/// Buffered bytes that trigger a write. Smaller: system calls. Larger: memory for each connection.
const WRITE_THRESHOLD_BYTES: usize = 64 << 10;

#[derive(Debug)]
pub(super) struct Trace {
    role: Role,
    connection: u64,
    start: Instant,
    start_date: SystemTime,
    /// The time of the latest record.
    latest: Instant,
    /// The record with the addresses of each path: those already written, and those in the buffer.
    paths: BTreeMap<PathId, Vec<u8>>,
    new_paths: BTreeMap<PathId, Vec<u8>>,
    buffer: Vec<u8>,
    /// The name of the current file, if there is one.
    pub(super) file: Option<String>,
    /// Records are discarded from now on.
    ended: bool,
    closed: bool,
}

impl Trace {
    pub(super) fn new(role: Role, connection: u64, now: Instant) -> Self {
        Self {
            role,
            connection,
            start: now,
            start_date: SystemTime::now(),
            latest: now,
            paths: BTreeMap::new(),
            new_paths: BTreeMap::new(),
            buffer: Vec::new(),
            file: None,
            ended: false,
            closed: false,
        }
    }

    pub(super) fn connection(&self) -> u64 {
        self.connection
    }

    pub(super) fn is_buffer_full(&self) -> bool {
        self.buffer.len() >= WRITE_THRESHOLD_BYTES
    }

    /// Whether the connection has ended.
    pub(super) fn is_over(&self, now: Instant) -> bool {
        self.closed || now.saturating_duration_since(self.latest) > FORGET_AFTER
    }

    /// Discards all further records.
    pub(super) fn end(&mut self) {
        self.ended = true;
        self.buffer = Vec::new();
    }

    /// Bytes of buffered records.
    pub(super) fn buffered(&self) -> usize {
        self.buffer.len()
    }

    /// Takes the buffered records.
    pub(super) fn take(&mut self) -> Vec<u8> {
        self.paths.append(&mut self.new_paths);
        std::mem::take(&mut self.buffer)
    }

    /// The header records of a file whose other records come from [`Self::take`].
    pub(super) fn head(&self) -> Vec<u8> {
        let date = self.start_date.duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut head = framed(&json!({
            "qlog_version": "0.3",
            "qlog_format": "JSON-SEQ",
            "title": format!("mpvpn {}", self.role),
            "trace": {
                "vantage_point": { "type": self.role.to_string() },
                "common_fields": {
                    "protocol_type": ["QUIC"],
                    "time_format": "relative",
                    "reference_time": millis(date),
                },
            },
        }));
        head.extend(self.paths.values().flatten());
        head
    }

    pub(super) fn record(&mut self, now: Instant, event: QlogEvent) {
        self.latest = now.max(self.latest);
        self.closed |= matches!(event, QlogEvent::Closed { .. });
        if self.ended {
            return;
        }
        match event {
            QlogEvent::PathAssigned { path, local, remote } => {
                let mut data = json!({ "path_remote": endpoint(remote.ip(), Some(remote)) });
                if let Some(ip) = local {
                    data["path_local"] = endpoint(ip, None);
                }
                let record = self.event("connectivity:path_assigned", Some(path), data);
                self.buffer.extend(&record);
                self.new_paths.insert(path, record);
            }
            QlogEvent::PacketSent { path, number, size } => {
                self.push("transport:packet_sent", path, packet(number, size));
            }
            QlogEvent::PacketLost { path, number, size } => {
                self.push("recovery:packet_lost", path, packet(number, size));
            }
            QlogEvent::PacketsAcked { path, numbers } => {
                let ack = json!({ "frame_type": "ack", "acked_ranges": ranges(numbers) });
                let data = json!({ "header": { "packet_type": "1RTT" }, "frames": [ack] });
                self.push("transport:packet_received", path, data);
            }
            QlogEvent::Metrics(metrics) => {
                self.push("recovery:metrics_updated", metrics.path, metrics_of(metrics));
            }
            QlogEvent::Closed { local, reason } => {
                let owner = if local { "local" } else { "remote" };
                let data = json!({ "owner": owner, "reason": reason });
                let record = self.event("connectivity:connection_closed", None, data);
                self.buffer.extend(record);
            }
        }
    }

    /// Records that the process dropped `count` events, of any connection.
    pub(super) fn record_dropped(&mut self, count: u64) {
        if self.ended {
            return;
        }
        let message = format!("{count} events of this process were dropped before this one");
        let record = self.event("loglevel:warning", None, json!({ "message": message, "code": count }));
        self.buffer.extend(record);
    }

    fn push(&mut self, name: &str, path: PathId, data: Value) {
        let record = self.event(name, Some(path), data);
        self.buffer.extend(record);
    }

    /// The record of an event. Each path is a group of its own, because each path has its own packet numbers,
    /// and most tools show one path only.
    fn event(&self, name: &str, path: Option<PathId>, mut data: Value) -> Vec<u8> {
        let time = millis(self.latest.saturating_duration_since(self.start));
        let mut group = format!("{:016x}", self.connection);
        if let Some(PathId(path)) = path {
            group = format!("{group}-path-{path}");
            data["path_id"] = path.into();
        }
        framed(&json!({ "time": time, "name": name, "group_id": group, "data": data }))
    }
}

fn framed(value: &Value) -> Vec<u8> {
    format!("\u{1e}{value}\n").into_bytes()
}

/// Milliseconds with three decimals.
fn millis(time: Duration) -> f64 {
    time.as_micros() as f64 / 1000.0
}

fn packet(number: u64, size: u16) -> Value {
    json!({ "header": { "packet_type": "1RTT", "packet_number": number }, "raw": { "length": size } })
}

fn endpoint(ip: IpAddr, address: Option<SocketAddr>) -> Value {
    let ip = ip.to_canonical();
    let version = if ip.is_ipv4() { "v4" } else { "v6" };
    let mut value = json!({ format!("ip_{version}"): ip.to_string() });
    if let Some(address) = address {
        value[format!("port_{version}")] = address.port().into();
    }
    value
}

fn metrics_of(metrics: QlogMetrics) -> Value {
    let mut data = json!({
        "min_rtt": millis(metrics.min_rtt),
        "smoothed_rtt": millis(metrics.smoothed_rtt),
        "latest_rtt": millis(metrics.latest_rtt),
        "rtt_variance": millis(metrics.rtt_variance),
        "congestion_window": metrics.congestion_window,
        "bytes_in_flight": metrics.bytes_in_flight,
    });
    if let Some(rate) = metrics.pacing_rate {
        // qlog counts bits/s.
        data["pacing_rate"] = rate.saturating_mul(8).into();
    }
    data
}

/// Packet numbers as inclusive ranges.
fn ranges(mut numbers: Vec<u64>) -> Vec<[u64; 2]> {
    numbers.sort_unstable();
    let mut ranges: Vec<[u64; 2]> = Vec::new();
    for number in numbers {
        match ranges.last_mut() {
            Some([_, last]) if number <= last.saturating_add(1) => *last = number,
            _ => ranges.push([number; 2]),
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_become_ranges_in_their_order() {
        assert_eq!(ranges(vec![7, 3, 4, 5, 9]), [[3, 5], [7, 7], [9, 9]]);
        assert_eq!(ranges(vec![u64::MAX, u64::MAX - 1]), [[u64::MAX - 1, u64::MAX]]);
    }
}
