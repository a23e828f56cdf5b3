//! Names that every crate shares.
//!
//! In: nothing. Out: identifiers, rates and the clock type. Always holds: no behaviour beyond
//! parsing and printing lives here, and nothing here depends on another crate of the workspace.
#![forbid(unsafe_code)]

mod rate;
mod size;
mod tier;
mod weight;

pub use rate::{BitRate, ParseBitRateError};
pub use size::{ByteSize, ParseByteSizeError};
pub use std::time::{Duration, Instant};
pub use tier::{ParseTierError, Tier};
pub use weight::{ParseWeightError, Weight};

/// An uplink of this machine (an interface with its addresses), numbered by the engine.
///
/// Stable while the process runs: a link that disappears and returns keeps its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkId(pub u16);

/// A QUIC path within one connection (draft-ietf-quic-multipath-21, path ID).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PathId(pub u32);

/// A traffic class of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClassId(pub u8);

/// One client at one server, numbered by the server while it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub u32);
