//! The results of a measurement: what `mpvpn measure --json` writes.
//!
//! Rates are in bit/s of the content of TCP connections and UDP datagrams, times in ms or s as the field
//! says, processor time in percent of one processor.

use mpvpn_types::word_enum;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Latency;
use mpvpn_input::word_schemas;

/// The results of `mpvpn measure`.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
pub struct MeasureReport {
    /// Version of the client.
    pub version: String,
    /// When it began, in s since 1970 (UTC).
    pub began_s: u64,
    /// How long it took, in s.
    pub seconds: f64,
    /// The server, as the client is configured.
    pub server: String,
    /// How the TCP connections travelled: `datagram`, `stream` or `auto`.
    #[serde(rename = "lane")]
    pub flow_mode: String,
    /// The measured links.
    pub links: Vec<MeasuredLink>,
    /// Why parts are missing, a sentence each; empty if all was measured.
    pub missing: Vec<String>,
    /// Latency without load.
    pub idle: Vec<LatencyRow>,
    /// Loads of TCP connections.
    pub tcp: Vec<TcpRow>,
    /// UDP at rising rates.
    pub udp: Vec<UdpSweep>,
    /// A link that was not used for a while; `null` without `--cut`.
    pub cut: Option<CutResult>,
    /// A load over hours; `null` without `--hours`.
    pub hours: Option<HoursResult>,
}

/// A link at the begin.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
pub struct MeasuredLink {
    /// Name of the interface.
    pub name: String,
    /// When the link is used.
    pub tier: String,
    /// Whether every byte costs.
    pub metered: bool,
}

word_enum! {
    /// The way of a series of requests.
    pub enum Route {
        /// Past the tunnel, over one link, to the server's public address, by ICMP.
        #[default]
        Direct = "direct",
        /// Through the tunnel, over one link alone.
        Link = "link",
        /// Through the tunnel, over all links.
        All = "all",
    }
}

word_enum! {
    /// Where the data goes.
    #[derive(Hash)]
    pub enum LoadDirection {
        /// From the server to the client.
        #[default]
        Down = "down",
        /// From the client to the server.
        Up = "up",
    }
}

word_schemas!(Route, LoadDirection);

/// Latency without load.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
pub struct LatencyRow {
    /// The way of the requests.
    pub route: Route,
    /// The link; empty for all of them.
    pub link: String,
    /// The figures.
    pub latency: Latency,
}

/// A load of TCP connections.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
pub struct TcpRow {
    /// The only link; empty for all of them.
    pub link: String,
    /// Number of connections.
    pub flows: u32,
    /// Where the data went.
    pub direction: LoadDirection,
    /// Rate at which the receiver read.
    pub bits_per_second: f64,
    /// Segments with data that the sender sent.
    pub segments: u64,
    /// Those that it retransmitted.
    pub retransmitted: u64,
    /// Latency of other packets meanwhile.
    pub loaded: Latency,
    /// Processor time of the client.
    pub client_cpu_pct: f64,
    /// Processor time of the server, without what made the load.
    pub server_cpu_pct: f64,
    /// The rate over time.
    pub series: Vec<RatePoint>,
}

/// The rate at a time.
#[derive(Clone, Copy, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
pub struct RatePoint {
    /// Time since the begin, in s.
    pub second: f64,
    /// Rate in the interval that ends then.
    pub bits_per_second: f64,
}

/// UDP at rising rates in one direction.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
pub struct UdpSweep {
    /// The only link; empty for all of them.
    pub link: String,
    /// Where the data went.
    pub direction: LoadDirection,
    /// The steps, in the order of their rates.
    pub steps: Vec<UdpStep>,
    /// The highest rate that was received at a loss below 1 %; `null` if there was none.
    pub best_bits_per_second: Option<f64>,
}

/// One rate.
#[derive(Clone, Copy, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
pub struct UdpStep {
    /// Rate that was sent.
    pub sent_bits_per_second: f64,
    /// Rate that was received.
    pub received_bits_per_second: f64,
    /// Datagrams that did not arrive, in percent.
    pub loss_pct: f64,
    /// Interarrival jitter (RFC 3550), in ms.
    pub jitter_ms: f64,
    /// Datagrams that arrived after one with a higher number.
    pub reordered: u64,
}

/// A load of one TCP connection, with a link that was not used for a while.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
pub struct CutResult {
    /// The link.
    pub link: String,
    /// When it was used no more, in s since the begin.
    pub cut_second: f64,
    /// When it was used again.
    pub restored_second: f64,
    /// A row a second.
    pub rows: Vec<CutRow>,
    /// Mean rate before.
    pub before_bits_per_second: f64,
    /// Mean rate while the link was not used.
    pub during_bits_per_second: f64,
    /// Mean rate afterwards.
    pub after_bits_per_second: f64,
    /// Longest time without a byte, in ms.
    pub longest_silence_ms: f64,
}

/// One second with a link that was not used for a while.
#[derive(Clone, Copy, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
pub struct CutRow {
    /// The second, from 1.
    pub second: u32,
    /// Rate in this second.
    pub bits_per_second: f64,
    /// Whether the link was used.
    pub link_used: bool,
    /// Longest round trip of other packets in this second, in ms; `null` if none was answered.
    pub max_rtt_ms: Option<f64>,
    /// Requests in this second that were not answered.
    pub lost: u64,
}

/// A load over hours.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
pub struct HoursResult {
    /// How long, in hours.
    pub hours: f64,
    /// Mean rate.
    pub bits_per_second: f64,
    /// The lowest rate of a minute.
    pub lowest_minute_bits_per_second: f64,
    /// Segments with data that the sender sent.
    pub segments: u64,
    /// Those that it retransmitted.
    pub retransmitted: u64,
    /// Memory of the client.
    pub client: MemoryFigures,
    /// Memory of the server.
    pub server: MemoryFigures,
    /// The rate of each minute.
    pub series: Vec<RatePoint>,
}

/// Resident memory of a process, in bytes.
#[derive(Clone, Copy, Debug, Default, Deserialize, JsonSchema, PartialEq, Eq, Serialize)]
pub struct MemoryFigures {
    /// At the begin.
    pub start: u64,
    /// After five minutes; `null` in shorter measurements.
    pub minute_5: Option<u64>,
    /// At the end.
    pub end: u64,
    /// The highest, of one sample a second.
    pub max: u64,
}

impl MemoryFigures {
    /// Takes a sample.
    pub fn add(&mut self, seconds: f64, bytes: u64) {
        if self.start == 0 {
            self.start = bytes;
        }
        if seconds >= 300.0 && self.minute_5.is_none() {
            self.minute_5 = Some(bytes);
        }
        (self.end, self.max) = (bytes, self.max.max(bytes));
    }
}
