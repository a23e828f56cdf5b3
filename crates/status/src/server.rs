//! Handshakes, and requests that a server refused, in the status.

use derive_more::AddAssign;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// QUIC handshakes since the start of the process.
#[derive(AddAssign, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Handshakes {
    /// Completed handshakes.
    pub completed: u64,
    /// Failed handshakes, and those without an answer in time.
    pub failed: u64,
    /// Attempts to connect that a server answered with a Retry packet, because many handshakes were under
    /// way.
    pub retried: u64,
    /// Attempts to connect that a server dropped, because there were too many.
    pub dropped: u64,
}

/// The memory of a server. Where more is allocated than may be, the user for whom most is held loses
/// connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Budget {
    /// Bytes that are allocated.
    pub used_bytes: u64,
    /// Bytes that may be allocated: half of `max-memory`.
    pub max_bytes: u64,
    /// Connections of clients whose user is known.
    pub connections: u64,
}

/// Requests that a server refused with one HTTP status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RefusedRequests {
    /// The HTTP status. Requests without valid credentials that got the web site instead count as 401.
    pub status: u16,
    /// Number of requests.
    pub count: u64,
}
