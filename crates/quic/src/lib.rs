//! Multipath QUIC connections; the only crate that knows `noq-proto`.
//!
//! In: received UDP payloads with the place where they arrived, the time, datagrams and stream
//! bytes to send, and credit that says which path may send how much. Out: UDP payloads to send,
//! events, received datagrams and stream bytes, and what is measured about every path.
//!
//! The library sends on the lowest path that has room and knows no per-path queue. So every path's
//! congestion controller stands behind a gate ([`mpvpn_types::CongestionControl`], `gate.rs`): its window looks endless while
//! the gate holds credit and empty otherwise, while the real controller inside keeps counting.
//! [`Connection::poll_transmit`] hands credit to one path after the other, with exactly the
//! datagrams that belong there, and ends with a control pass that gives every path a little for
//! acknowledgements, heartbeats, path challenges and MTU probes.
//!
//! Always holds:
//! - A datagram leaves on the path that it was queued for, and on no other.
//! - No more is in flight on a path than its inner controller allows, plus one control pass.
//! - What became of a datagram is known where somebody asked for it (`sent_datagrams.rs`).
//! - Path numbers are those of the wire.
#![forbid(unsafe_code)]
// Tests need a moment to count from.
#![cfg_attr(test, allow(clippy::disallowed_methods))]

mod bbr;
mod cap;
mod cid;
mod config;
mod connection;
mod delivery;
mod endpoint;
mod gate;
mod path_stats;
mod qlog;
mod queue_probe;
mod random_loss;
mod sent_datagrams;
mod streams;

pub use cid::{MAX_SHARDS, Shard, shard_of};
pub use config::{
    ClientSetup, DATAGRAM_OVERHEAD, FlowControlWindows, ServerSetup, SetupError, TransportOptions,
};
pub use connection::{Connection, DataAck, Event, LostReason, OverdueChunk, ReadStatus, StreamChunk};
pub use endpoint::{ConnectionHandle, Endpoint, Handled, LocalAddress};
pub use path_stats::PathStats;
pub use qlog::{QlogEvent, QlogMetrics, QlogSink};
pub use sent_datagrams::{Outcome, TrackedDatagram};
pub use streams::{Read, StreamError, StreamId};

/// What may be told to a peer about a path (draft-ietf-quic-multipath-21 §3.3).
pub use noq_proto::PathStatus;

/// A UDP payload to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transmit {
    /// Where it leaves: at a client the token of a link, at a server the local address.
    pub local: Option<LocalAddress>,
    /// Where it goes.
    pub remote: std::net::SocketAddr,
    /// ECN codepoint bits for the IP header.
    pub ecn: Option<u8>,
    /// The DSCP that it is to have, 0 to 63; 0 is that of the socket.
    pub dscp: u8,
    /// Bytes of the buffer that it takes.
    pub size: usize,
    /// If set, the payload is several datagrams of this size (the last may be shorter).
    pub segment_size: Option<usize>,
}
