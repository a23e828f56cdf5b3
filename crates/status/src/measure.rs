//! Measuring a running client: what `mpvpn ping` and `mpvpn measure` ask the client for, and the protocol of
//! the responder of a server.
//!
//! In: requests on the local API, messages of a measuring client. Out: their types, parsed and checked.
//! Always holds: a message that cannot be parsed has no effect; lengths and numbers in messages are bounded.

mod datagram;
mod latency;
mod order;
mod report;

use std::net::SocketAddr;

use mpvpn_types::FlowMode;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use datagram::{DATAGRAM_BYTES, Datagram, DatagramCounter, DatagramKind, DatagramReport};
pub use latency::{Latency, LatencySamples, RttFigures, percentile};
pub use order::{MAX_ORDER_BYTES, MAX_UDP_SEND_MILLISECONDS, Order, ResponderReport, SentDatagrams};
pub use report::{
    CutResult, CutRow, HoursResult, LatencyRow, LoadDirection, MeasureReport, MeasuredLink, MemoryFigures,
    RatePoint, Route, TcpRow, UdpStep, UdpSweep,
};

/// The port of the responder, TCP and UDP, at the addresses of a server in the tunnel. Chosen: no registered
/// service is known to use it.
pub const RESPONDER_PORT: u16 = 9494;
/// The name of the class of measured flows, while a measurement runs.
pub const MEASURE_CLASS: &str = "measure";

/// Which ICMP echo requests to watch: the body of `POST /v1/echoes`.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct EchoRequest {
    /// The identifier in the requests.
    pub identifier: u16,
}

/// The links of ICMP echoes: the answer of `POST /v1/echoes`.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Eq, Serialize)]
pub struct EchoReport {
    /// The TUN device of the client.
    pub device: String,
    /// The latest echoes with this identifier, up to 128.
    pub echoes: Vec<EchoPaths>,
}

/// The paths of one ICMP echo.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Eq, Serialize)]
pub struct EchoPaths {
    /// Sequence number.
    pub sequence: u16,
    /// Paths on which the request left: `class/link/number` as in the status, the first one first. Several
    /// for copies and retransmissions.
    pub out: Vec<String>,
    /// Path on which the reply arrived; `null` if none has, or if it was restored by FEC.
    pub back: Option<String>,
    /// Whether a reply has arrived.
    pub answered: bool,
}

/// How the measured flows use the links: the body of `POST /v1/measure`. It counts for 10 s unless it is
/// repeated.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct MeasureRequest {
    /// The only links that measured flows may use; all if it is empty.
    pub only: Vec<String>,
    /// Links that they may not use.
    pub exclude: Vec<String>,
    /// How their TCP connections travel; `None`: as the client's other ones.
    pub lane: Option<FlowMode>,
    /// The measurement ends.
    pub end: bool,
}

/// Links that a [`MeasureRequest`] may name in each list: as many as a client has.
pub const MAX_LINKS_OF_REQUEST: usize = 32;

/// The state of the client that a measurement needs: the answer of `POST /v1/measure`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct MeasureState {
    /// The TUN device.
    pub device: String,
    /// Where the responder of the server is, if it has one.
    pub responders: Vec<SocketAddr>,
}
