//! Changes of a tunnel that need no action of the edge: of paths, classes, capacity and sessions.
//!
//! In: the state machines of client and server. Out: changes for the event log, by `poll_change`. Always
//! holds: at most [`MAX_WAITING`] changes wait; further ones are dropped.

use std::{
    collections::VecDeque,
    net::{IpAddr, SocketAddr},
};

use mpvpn_class::CapacityChange;
use mpvpn_types::{ClassId, Duration, LinkId, PathId};

use crate::{ConnectionNumber, SecretSharing};

/// A change of a path, or of the capacity of its link.
#[derive(Clone, Debug, PartialEq)]
pub struct PathEvent {
    /// The path.
    pub path: PathId,
    /// The link of the path; meaningless at a server.
    pub link: LinkId,
    /// The change.
    pub change: PathChange,
}

/// A change of a path, and its reason.
#[derive(Clone, Debug, PartialEq)]
pub enum PathChange {
    /// The path was validated (RFC 9000 §8.2). Its remote address, if known.
    Opened(Option<SocketAddr>),
    /// The path failed: it carries no data any more.
    Failed(PathFailure),
    /// The path works again. How long it had failed.
    Recovered(Duration),
    /// The path left standby and carries data.
    Active,
    /// The path works and is on standby, for this reason.
    Standby(&'static str),
    /// The path was closed while it worked.
    Closed,
    /// The capacity of its link changed.
    Capacity(CapacityChange),
}

/// How a path failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathFailure {
    /// Why.
    pub reason: FailureReason,
    /// Data in flight on the path that is reinjected on other paths.
    pub reinjected: Reinjected,
    /// Number of other paths that work.
    pub working: usize,
}

/// Why a path failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureReason {
    /// Nothing arrived for this time, in which this many heartbeats were missed.
    Silent(Duration, u32),
    /// The kernel reports that the link cannot carry packets.
    NoCarrier,
    /// The far end reports, since this time, that it receives nothing on the path.
    Unheard(Duration),
}

/// Data that is sent again on other paths because its path failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reinjected {
    /// QUIC DATAGRAM frames, most with one IP packet each.
    pub packets: usize,
    /// Bytes of streams.
    pub stream_bytes: u64,
}

/// A change at a client.
#[derive(Clone, Debug, PartialEq)]
pub enum ClientChange {
    /// A path changed.
    Path(PathEvent),
    /// The connection of a class other than the default one changed.
    Class(ClassId, ClassChange),
    /// A handshake over a link failed, for this reason.
    ConnectFailed(LinkId, String),
    /// The server sent GOAWAY (RFC 9114 §5.2) on the connection of this class.
    Stopping(ClassId),
    /// Another machine shows the secret of the session.
    SecretShared(SecretSharing),
}

/// A change of the connection of a class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClassChange {
    /// A packet belongs to the class, so a connection is made.
    Used,
    /// The connection is established.
    Connected,
    /// The class was idle, so its connection was closed.
    Idle,
    /// The connection was lost, for this reason.
    Disconnected(String),
    /// The server refuses the connection, for this reason.
    Refused(String),
}

/// A change at a server.
#[derive(Clone, Debug, PartialEq)]
pub enum ServerChange {
    /// Two machines show the secret of the session of this client, which keeps it; the other one gets a
    /// session of its own.
    SecretShared {
        /// The client.
        client: ClientTag,
    },
    /// A client connected.
    Joined {
        /// The client.
        client: ClientTag,
        /// Whether it resumed a session.
        resumed: bool,
    },
    /// A client disconnected.
    Left {
        /// The client.
        client: ClientTag,
        /// Why.
        reason: String,
    },
    /// A path of a client changed.
    Path {
        /// The client.
        client: ClientTag,
        /// The change.
        event: PathEvent,
    },
    /// A request was refused with this HTTP status, for this reason.
    Refused(u16, String),
}

/// A connection of a client, as the event log names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientTag {
    /// The user.
    pub user: String,
    /// The first tunnel address of the session, if it has one.
    pub address: Option<IpAddr>,
    /// The connection of the session.
    pub connection: ConnectionNumber,
    /// The name of its class; empty without classes.
    pub class: String,
}

/// Changes that wait for `poll_change`.
#[derive(Debug)]
pub(crate) struct Changes<T>(VecDeque<T>);

/// Changes that may wait for the edge, about 200 bytes each. The edge polls them in every iteration of its
/// event loop. Larger: memory; smaller: changes are dropped when all clients of a server disconnect at once.
const MAX_WAITING: usize = 4096;

impl<T> Default for Changes<T> {
    fn default() -> Self {
        Self(VecDeque::new())
    }
}

impl<T> Changes<T> {
    pub(crate) fn push(&mut self, change: T) {
        if self.0.len() < MAX_WAITING {
            self.0.push_back(change);
        }
    }

    pub(crate) fn pop(&mut self) -> Option<T> {
        self.0.pop_front()
    }
}
