//! Multipath QUIC connections; the only crate that knows `noq-proto`.
//!
//! In: received UDP payloads with their local and remote address, the time, datagrams and stream data to
//! send, and the send quota of each path. Out: UDP payloads to send, events, received datagrams and stream
//! data, and measurements of each path.
//!
//! noq sends on the path with the lowest number whose congestion window is open, and has no queue per path.
//! So each path's congestion controller is behind a gate (`gate.rs`): noq sees an unlimited window while the
//! gate holds credit, and none otherwise, while the real controller inside counts what is sent, acknowledged
//! and lost. [`Connection::poll_transmit`] gives credit to one path after the other, with exactly the
//! datagrams for that path, and ends with a control pass that gives every path a little credit for
//! acknowledgements, heartbeats, path challenges and MTU probes.
//!
//! Always holds:
//! - A datagram leaves on the path that it was queued for, and on no other.
//! - A path has no more bytes in flight than its controller allows, plus one control pass.
//! - The outcome of every tracked datagram is reported (`sent_datagrams.rs`).
//! - Path numbers are the path IDs of the wire.
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
mod held;
mod path_stats;
mod qlog;
mod queue_probe;
mod random_loss;
mod sent_datagrams;
mod strangers;
mod streams;

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use mpvpn_types::LinkId;

pub use cid::{MAX_SHARDS, Shard, shard_of};
pub use config::{
    ClientSetup, DATAGRAM_OVERHEAD, FlowControlWindows, OwnSockets, ServerSetup, SetupError, TransportOptions,
};
pub use connection::{Connection, DataAck, Event, LostReason, OverdueChunk, ReadStatus, StreamChunk};
pub use endpoint::{Endpoint, Handled, HandshakeCounters, HandshakeResult, ReceivedPackets};
pub use held::{CountedConnection, ProcessBytes, UserBytes};
pub use path_stats::PathStats;
pub use qlog::{QlogEvent, QlogMetrics, QlogSink};
pub use sent_datagrams::{Outcome, TrackedDatagram};
pub use streams::{Read, StreamError, StreamId};

/// The status of a path that is reported to the peer (draft-ietf-quic-multipath-21 §3.3).
pub use noq_proto::PathStatus;

/// A connection's number at its endpoint; not a QUIC connection ID. It is reused some time after the
/// connection has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionHandle(pub usize);

/// The local end of a path, as an IP address because noq has no other type for it.
///
/// At a server it is the local address. At a client it is a token for each link, which never reaches the wire
/// and selects the socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LocalAddress(IpAddr);

/// fd6d:7076:706e::/112, unique local addresses (RFC 4193) that spell "mpvpn".
const LINK_TOKEN: [u16; 7] = [0xfd6d, 0x7076, 0x706e, 0, 0, 0, 0];

impl LocalAddress {
    /// The token of a client's link.
    pub fn link(link: LinkId) -> Self {
        let [a, b, c, d, e, f, g] = LINK_TOKEN;
        Self(IpAddr::V6(Ipv6Addr::new(a, b, c, d, e, f, g, link.0)))
    }

    /// The link of this token; `None` for a real address.
    pub fn as_link(self) -> Option<LinkId> {
        let IpAddr::V6(ip) = self.0 else { return None };
        let [head @ .., link] = ip.segments();
        (head == LINK_TOKEN).then_some(LinkId(link))
    }

    /// The address or token.
    pub fn ip(self) -> IpAddr {
        self.0
    }
}

impl From<IpAddr> for LocalAddress {
    fn from(ip: IpAddr) -> Self {
        Self(ip)
    }
}

/// A UDP payload to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transmit {
    /// The local end: at a client the token of a link, at a server the local address.
    pub local: Option<LocalAddress>,
    /// The destination.
    pub remote: SocketAddr,
    /// ECN codepoint bits for the IP header.
    pub ecn: Option<u8>,
    /// The DSCP for the IP header, 0 to 63; 0 leaves the socket's.
    pub dscp: u8,
    /// Bytes of the buffer.
    pub size: usize,
    /// If set, the buffer holds several datagrams of this size (UDP GSO); the last one may be shorter.
    pub segment_size: Option<usize>,
}
