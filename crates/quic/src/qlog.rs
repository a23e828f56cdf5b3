//! The events of connections for qlog files.
//!
//! In: events of gates and connections. Out: plain data, for a sink at the edge. Always holds: without a sink
//! nothing is computed or kept; window and rate are those of the real controller, not those that the gate
//! shows noq. Why noq's own qlog is not used: `docs/design/qlog.md`.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use mpvpn_types::{Duration, Instant, PathId};

/// Takes the events of connections.
pub trait QlogSink: fmt::Debug + Send + Sync {
    /// Takes an event of the connection with this identifier, which is the same at both ends. Never blocks:
    /// events that do not fit are dropped.
    fn record(&self, now: Instant, connection: u64, event: QlogEvent);
}

/// Something that happened to a connection after its handshake.
#[derive(Clone, Debug, PartialEq)]
pub enum QlogEvent {
    /// A path has these addresses from now on.
    PathAssigned {
        /// The path.
        path: PathId,
        /// The local address, which only a server knows.
        local: Option<IpAddr>,
        /// The remote address.
        remote: SocketAddr,
    },
    /// An ack-eliciting packet was sent.
    PacketSent {
        /// The path.
        path: PathId,
        /// The packet number on that path.
        number: u64,
        /// The size of the packet (bytes).
        size: u16,
    },
    /// Packets were acknowledged for the first time.
    PacketsAcked {
        /// The path that the packets were sent on.
        path: PathId,
        /// The packet numbers.
        numbers: Vec<u64>,
    },
    /// A packet was declared lost.
    PacketLost {
        /// The path.
        path: PathId,
        /// The packet number on that path.
        number: u64,
        /// The size of the packet (bytes).
        size: u16,
    },
    /// The state of a path's congestion controller after acknowledgements or losses.
    Metrics(QlogMetrics),
    /// The connection was closed.
    Closed {
        /// Whether this end closed it.
        local: bool,
        /// Why.
        reason: String,
    },
}

/// The state of a path's congestion controller. Paths of a group share one controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QlogMetrics {
    /// The path.
    pub path: PathId,
    /// The shortest round trip.
    pub min_rtt: Duration,
    /// The smoothed round-trip time.
    pub smoothed_rtt: Duration,
    /// The round trip of the last acknowledged packet.
    pub latest_rtt: Duration,
    /// The variation of the round-trip time.
    pub rtt_variance: Duration,
    /// The congestion window (bytes).
    pub congestion_window: u64,
    /// Bytes sent on the path and neither acknowledged nor lost.
    pub bytes_in_flight: u64,
    /// The pacing rate (bytes/s), if packets are paced.
    pub pacing_rate: Option<u64>,
}

/// A sink, and the identifier of the connection whose events go there.
#[derive(Clone, Debug)]
pub(crate) struct ConnectionQlog {
    pub(crate) sink: Arc<dyn QlogSink>,
    pub(crate) connection: u64,
}

impl ConnectionQlog {
    pub(crate) fn record(&self, now: Instant, event: QlogEvent) {
        self.sink.record(now, self.connection, event);
    }
}
