//! Helpers for the unit tests of several parts.

use mpvpn_flow::{Label, Part};
use mpvpn_masque::datagram::{self, DatagramPrefix};
use mpvpn_quic::PathStats;
use mpvpn_types::{CongestionControl, Duration, Instant, LinkId, PathId};

use serde_json::{Value, json};

use super::{
    Role,
    path::PathEntry,
    policy::{PathPolicy, PolicyInForce},
};
use crate::vectors::{check, number};

/// Returns the measurements of a path with this round-trip time and this loss ratio (0 to 1).
pub(super) fn view(id: u32, rtt: Duration, loss: f64) -> PathStats {
    PathStats {
        id: PathId(id),
        local: None,
        remote: ([192, 0, 2, 1], 443).into(),
        inside_tcp: false,
        observed: None,
        rtt,
        min_rtt: Some(rtt),
        base_rtt: rtt,
        jitter: Duration::ZERO,
        loss,
        recent_packets_sent: 1000,
        random_loss: None,
        cc: CongestionControl::Bbr,
        congestion_window: 1 << 20,
        in_flight: 0,
        delivery_rate: 1_000_000,
        link_rate: None,
        link_rate_measured: None,
        backlog_time: None,
        mtu: 1400,
        tx_bytes: 0,
        tx_packets: 0,
        rx_bytes: 0,
        rx_packets: 0,
        lost_packets: 0,
    }
}

/// A datagram of a test vector.
#[derive(Clone, Copy)]
pub(super) struct Received<'a> {
    pub(super) stream: u64,
    pub(super) context: u64,
    pub(super) bytes: &'a [u8],
    /// The bytes after the context ID.
    pub(super) payload: &'a [u8],
}

/// Checks the test vectors of a file, which are datagrams. `parse` returns all fields except stream and
/// context, or `None` for a datagram that is to be ignored.
pub(super) fn check_datagrams(
    file: &str,
    parse: impl Fn(Received<'_>) -> Option<Value>,
    encode: impl Fn(u64, u64, &Value) -> Vec<u8>,
) {
    let parse = |bytes: &[u8]| {
        let datagram = datagram::parse(bytes).unwrap();
        let (stream, context) = (datagram.stream_id, datagram.context_id);
        let payload = &bytes[datagram.payload_at..];
        let mut fields = parse(Received { stream, context, bytes, payload }).ok_or("ignored")?;
        fields["stream_id"] = json!(stream);
        fields["context_id"] = json!(context);
        Ok(fields)
    };
    check(file, parse, |fields| encode(number(&fields["stream_id"]), number(&fields["context_id"]), fields));
}

/// Returns the datagram prefix for these fields.
pub(super) fn prefix(fields: &Value) -> DatagramPrefix {
    datagram::prefix(number(&fields["stream_id"]), number(&fields["context_id"]))
}

/// Returns the label with these fields.
pub(super) fn label(fields: &Value) -> Label {
    let part = |part: &Value| {
        let field = |name| Some(part.get(name)?.as_u64()? as u8);
        Some(Part { index: field("index")?, last: field("last")? })
    };
    Label {
        bucket: number(&fields["bucket"]) as u16,
        ordered: fields["ordered"].as_bool().unwrap(),
        reorder_timeout: Duration::from_millis(number(&fields["reorder_timeout_ms"])),
        number: number(&fields["number"]) as u32,
        part: part(&fields["part"]),
    }
}

/// Returns the fields of a label.
pub(super) fn fields_of(label: &Label) -> Value {
    json!({
        "ordered": label.ordered,
        "bucket": label.bucket,
        "reorder_timeout_ms": label.reorder_timeout.as_millis() as u64,
        "number": label.number,
        "part": label.part.map(|part| json!({ "index": part.index, "last": part.last })),
    })
}

/// Returns a path over a link that was just opened.
pub(super) fn path(now: Instant, link: u16) -> PathEntry {
    PathEntry::new(now, Role::Client, LinkId(link), false, PolicyInForce::new(PathPolicy::default(), false))
}
